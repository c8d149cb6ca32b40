"""The truth about an arbitrary small problem, by automatic differentiation: what `lemmas` asks for.

Inner solutions come from a damped Newton method with dense Hessians, so the inner variable should have at most a few
hundred entries. Points are flat vectors; trees are unflattened with the shapes of ``problem.init``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from fedbilevel.problem import BilevelProblem, ClientData

Array = NDArray[np.float64]
_NEWTON_STEPS = 60


class Rows(NamedTuple):
    """One client's training and validation rows, leaves [samples, ...]."""

    train: Any
    val: Any

    def single(self, row: Any) -> Rows:
        """Row number ``row`` alone."""
        return Rows(*(jax.tree.map(lambda leaf: leaf[row][None], part) for part in self))


def rows_of(data: ClientData) -> list[Rows]:
    """The real rows of every client."""
    owns = [data.only(client) for client in range(data.clients)]
    return [Rows(*(jax.tree.map(lambda leaf: leaf[0], part) for part in (own.train, own.val))) for own in owns]


class FlatProblem:
    """A problem as functions of two flat vectors and one client's rows."""

    def __init__(self, problem: BilevelProblem) -> None:
        outer, inner = problem.init(jax.random.key(0))
        self.problem = problem
        self.outer, self._to_outer = ravel_pytree(outer)
        self.inner, self._to_inner = ravel_pytree(inner)

    def inner_loss(self, outer: jax.Array, inner: jax.Array, rows: Rows) -> jax.Array:
        return self.problem.inner_loss(self._to_outer(outer), self._to_inner(inner), rows.train)

    def outer_loss(self, outer: jax.Array, inner: jax.Array, rows: Rows) -> jax.Array:
        return self.problem.outer_loss(self._to_outer(outer), self._to_inner(inner), rows.val)

    def inner_gradient(self, outer: jax.Array, inner: jax.Array, rows: Rows) -> jax.Array:
        """grad_y g(x, y)."""
        return jnp.asarray(jax.grad(self.inner_loss, argnums=1)(outer, inner, rows))

    def outer_gradients(self, outer: jax.Array, inner: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """grad_x f and grad_y f."""
        direct, through = jax.grad(self.outer_loss, argnums=(0, 1))(outer, inner, rows)
        return direct, through

    def inner_solution(self, outer: jax.Array, rows: Rows) -> jax.Array:
        """y(x) by Newton's method with backtracking, from the start of the problem."""
        hessian = jax.hessian(self.inner_loss, argnums=1)

        def iterate(inner: jax.Array, _: None) -> tuple[jax.Array, None]:
            slope = self.inner_gradient(outer, inner, rows)
            direction = jnp.linalg.solve(hessian(outer, inner, rows), slope)
            value, gain = self.inner_loss(outer, inner, rows), slope @ direction

            def too_long(length: jax.Array) -> jax.Array:
                trial = self.inner_loss(outer, inner - length * direction, rows)
                enough = value - 1e-4 * length * gain + 1e-14 * jnp.abs(value)
                return jnp.logical_and(trial > enough, length > 1e-9)

            length = jax.lax.while_loop(too_long, lambda length: length / 2, jnp.ones((), inner.dtype))
            return inner - length * direction, None

        solution: jax.Array = jax.lax.scan(iterate, self.inner, None, length=_NEWTON_STEPS)[0]
        return solution

    def hypergradient(self, outer: jax.Array, inner: jax.Array, rows: Rows) -> jax.Array:
        """Phi(x, y)."""
        direct, through = self.outer_gradients(outer, inner, rows)
        adjoint = jnp.linalg.solve(jax.hessian(self.inner_loss, argnums=1)(outer, inner, rows), through)
        indirect = jax.grad(lambda x: self.inner_gradient(x, inner, rows) @ adjoint)(outer)
        return jnp.asarray(direct - indirect)

    def client_gradient(self, outer: jax.Array, rows: Rows) -> jax.Array:
        """grad h(x)."""
        return self.hypergradient(outer, self.inner_solution(outer, rows), rows)

    def objective(self, outer: jax.Array, rows: Rows) -> jax.Array:
        """h(x)."""
        return self.outer_loss(outer, self.inner_solution(outer, rows), rows)


@partial(jax.jit, static_argnums=(0,))
def _everywhere(function: Callable[..., jax.Array], points: tuple[jax.Array, ...], rows: Rows) -> jax.Array:
    """A function of points and one client's rows, at many points."""
    return jax.vmap(lambda *point: function(*point, rows))(*points)


class ProblemOracles:
    """`fedbilevel.theory.paths.Oracles` of any `BilevelProblem` and its `ClientData`."""

    def __init__(self, problem: BilevelProblem, data: ClientData) -> None:
        self._flat = FlatProblem(problem)
        self._rows = rows_of(data)

    def _map(self, function: Callable[..., jax.Array], *points: Array) -> Array:
        """Apply a function to each client's own slice of points [..., clients, size]."""
        shape = points[0].shape[:-2]
        columns = []
        for number, rows in enumerate(self._rows):
            own = tuple(jnp.asarray(point[..., number, :].reshape(-1, point.shape[-1])) for point in points)
            columns.append(np.asarray(_everywhere(function, own, rows)))
        stacked = np.stack(columns, axis=1)
        return stacked.reshape(*shape, *stacked.shape[1:])

    def inner_solution(self, outer: Array) -> Array:
        return self._map(self._flat.inner_solution, outer)

    def inner_gradient(self, outer: Array, inner: Array) -> Array:
        return self._map(self._flat.inner_gradient, outer, inner)

    def hypergradient(self, outer: Array, inner: Array) -> Array:
        return self._map(self._flat.hypergradient, outer, inner)

    def client_gradient(self, outer: Array) -> Array:
        return self._map(self._flat.client_gradient, outer)

    def objective(self, outer: Array) -> Array:
        everywhere = np.broadcast_to(outer[..., None, :], (*outer.shape[:-1], len(self._rows), outer.shape[-1]))
        return np.asarray(self._map(self._flat.objective, everywhere).mean(axis=-1))
