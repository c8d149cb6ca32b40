"""The truth about an arbitrary small problem, by automatic differentiation: what `lemmas` asks for.

Inner solutions come from a damped Newton method with dense Hessians, so the inner variable should have at most a few
hundred entries. Points are flat vectors; trees are unflattened with the shapes of ``problem.init``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedbilevel.calculus import inner_gradient
from fedbilevel.engines.diagnose import true_hypergradient
from fedbilevel.hypergradients.exact import exact
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.sampling import Batches, Draws, LocalData
from fedbilevel.tasks.task import Array


def flat_problem(problem: BilevelProblem) -> BilevelProblem:
    """The same problem with vectors for trees."""
    (outer, to_outer), (inner, to_inner) = map(ravel_pytree, problem.init(jax.random.key(0)))

    def flat(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda outer, inner, batch: loss(to_outer(outer), to_inner(inner), batch)

    return BilevelProblem(flat(problem.inner_loss), flat(problem.outer_loss), lambda key: (outer, inner))


def local_data(data: ClientData) -> list[LocalData]:
    """Every client's own rows, without padding."""

    def of(client: int) -> LocalData:
        alone = data.only(client)
        train, val = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), (alone.train, alone.val))
        zero, sizes = jnp.zeros((), jnp.int32), (data.train_sizes[client], data.val_sizes[client])
        return LocalData(train, val, zero, jnp.asarray(sizes[0]), jnp.asarray(sizes[1]))

    return [of(client) for client in range(data.clients)]


@partial(jax.jit, static_argnums=(0, 1))
def everywhere(
    question: Callable[..., Any], problem: BilevelProblem, points: tuple[jax.Array, ...], data: LocalData
) -> Any:
    """``question(problem, *point, one client's data)`` at many points."""
    return jax.vmap(lambda *point: question(problem, *point, data))(*points)


def _inner_gradient(problem: BilevelProblem, outer: jax.Array, inner: jax.Array, data: LocalData) -> Any:
    """grad_y g(x, y)."""
    return inner_gradient(problem.inner_loss, outer, inner, data.train)


def _hypergradient(problem: BilevelProblem, outer: jax.Array, inner: jax.Array, data: LocalData) -> Any:
    """Phi(x, y)."""
    return exact()(problem, ((outer, inner),), Batches(data, Draws()))[0][0]


def truth(problem: BilevelProblem, outer: jax.Array, data: LocalData) -> tuple[Any, Any, Any]:
    """grad h(x), y(x) and h(x), the inner problem solved from the start of the problem."""
    start = problem.init(jax.random.key(0))[1]
    return true_hypergradient(problem, outer, start, lambda question: question(data.train, data.val), "exact")


class ProblemOracles:
    """`fedbilevel.theory.lemmas.Oracles` of any `BilevelProblem` and its `ClientData`."""

    def __init__(self, problem: BilevelProblem, data: ClientData) -> None:
        self._problem, self._clients = flat_problem(problem), local_data(data)

    def _ask(self, question: Callable[..., Any], *points: Array) -> Any:
        """Ask a question at each client's own slice of points [..., clients, size]."""
        shape, answers = points[0].shape[:-2], []
        for number, data in enumerate(self._clients):
            slices = tuple(jnp.asarray(point[..., number, :].reshape(-1, point.shape[-1])) for point in points)
            answers.append(everywhere(question, self._problem, slices, data))
        together = jax.tree.map(lambda *columns: np.stack(columns, axis=1), *answers)
        return jax.tree.map(lambda stacked: stacked.reshape(*shape, *stacked.shape[1:]), together)

    def inner_solution(self, outer: Array) -> Array:
        return np.asarray(self._ask(truth, outer)[1])

    def inner_gradient(self, outer: Array, inner: Array) -> Array:
        return np.asarray(self._ask(_inner_gradient, outer, inner))

    def hypergradient(self, outer: Array, inner: Array) -> Array:
        return np.asarray(self._ask(_hypergradient, outer, inner))

    def client_gradient(self, outer: Array) -> Array:
        return np.asarray(self._ask(truth, outer)[0])

    def objective(self, outer: Array) -> Array:
        clients = len(self._clients)
        common = np.broadcast_to(outer[..., None, :], (*outer.shape[:-1], clients, outer.shape[-1]))
        return np.asarray(self._ask(truth, common)[2].mean(axis=-1))
