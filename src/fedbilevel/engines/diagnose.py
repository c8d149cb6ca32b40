"""What a recorded round knows: the objective, the true hypergradient, and the errors the theory bounds.

The exact columns need y_m(x) = argmin g_m(x, .), found by Newton's method on a client's whole training set, with a dense
solve ("exact") or conjugate gradients ("conjugate_gradient") for the Newton and for the adjoint system.  With a global lower
level the same is done once for all clients, on their mean loss: see `engines/newton.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.calculus import (
    Tree,
    both_gradients,
    hessian_operator,
    hessian_vector,
    inner_gradient,
    squared_norm,
    subtract,
)
from fedbilevel.engines.fleet import Fleet, Layout, map_clients
from fedbilevel.engines.newton import System, minimise, solve_iteratively
from fedbilevel.engines.rounds import State, total
from fedbilevel.hypergradients.base import assemble
from fedbilevel.hypergradients.exact import dense_hessian, solve_dense, solve_with
from fedbilevel.plan import Algorithm, View, weighted_mean
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.sampling import LocalData

LEVELS = ("cheap", "exact", "conjugate_gradient")
STEPS = "steps"
"""Not a level of diagnostics: records what every client did in every local step, for `trace`."""
SMALL_INNER = 300
"""Largest inner variable for which "auto" forms dense Hessians, and..."""
SMALL_WORK = 2e8
"""...largest samples * inner^2, about a tenth of a second a recorded round."""


def level_for(asked: str, algorithm: Algorithm, data: ClientData) -> str:
    if asked not in ("auto", *LEVELS):
        raise ValueError(f"diagnostics must be 'auto', {', '.join(map(repr, LEVELS))}, not {asked!r}.")
    if asked != "auto":
        return asked
    if algorithm.problem is None:
        return "exact"  # a plain gradient: as cheap as the objective
    inner = jax.eval_shape(algorithm.problem.init, jax.random.key(0))[1]
    size = sum(leaf.size for leaf in jax.tree.leaves(inner))
    small = size <= SMALL_INNER and float(data.train_sizes.sum()) * size**2 <= SMALL_WORK
    return "exact" if small else "cheap"


def client_system(problem: BilevelProblem, outer: Tree, batch: Tree, level: str) -> System:
    """One client's inner problem at x."""

    def solve(inner: Tree, right: Tree) -> Tree:
        if level == "exact":
            return solve_dense(problem, (outer, inner), batch, right)
        return solve_iteratively(hessian_operator(problem.inner_loss, outer, inner, batch), right)

    return System(
        lambda inner: problem.inner_loss(outer, inner, batch),
        lambda inner: inner_gradient(problem.inner_loss, outer, inner, batch),
        solve,
    )


def true_hypergradient(
    problem: BilevelProblem, outer: Tree, inner: Tree, data: LocalData, level: str
) -> tuple[Tree, Tree, jax.Array]:
    """(grad h_m(x), y_m(x), h_m(x)) of one client, the inner problem solved from ``inner``."""
    train, val = data.whole("train"), data.whole("val")
    system = client_system(problem, outer, train, level)
    solved = minimise(system, inner)
    in_outer, in_inner = both_gradients(problem.outer_loss, outer, solved, val)
    adjoint = system.solve(solved, in_inner)
    gradient = assemble(problem, (outer, solved), in_outer, adjoint, train)
    return gradient, solved, problem.outer_loss(outer, solved, val)


def measure(algorithm: Algorithm, layout: Layout, fleet: Fleet, state: State, level: str) -> dict[str, jax.Array]:
    """One row of history, without the columns the host adds (round, bytes, time)."""
    outer = algorithm.outer(state.server)
    weights = jnp.where(fleet.ids < layout.clients, fleet.weights, 0)
    weights = weights / total(jnp.sum(weights), layout)

    def everyone(function: Callable[[LocalData, View], Any]) -> Any:
        return map_clients(
            lambda data, local: function(data, algorithm.view(state.server, local)), fleet, state.local, layout
        )

    def average(tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: total(leaf, layout), weighted_mean(tree, weights))

    row: dict[str, jax.Array] = {
        "objective": average(everyone(lambda data, view: algorithm.objective(outer, view.inner, data)))
    }
    if level != "cheap":
        errors = (
            _global_errors
            if algorithm.problem is not None and algorithm.problem.lower_level == "global"
            else _true_errors
        )
        row |= errors(algorithm, outer, level, everyone, average)
    view = jax.eval_shape(algorithm.view, state.server, jax.tree.map(lambda leaf: leaf[0], state.local))
    if view.inner_momentum is not None:
        row["inner_momentum_error"] = average(everyone(lambda data, view: _inner_momentum_error(algorithm, view, data)))
    row["consensus_error"] = state.consensus
    if view.calls is not None:
        row |= _count(jax.vmap(lambda local: algorithm.view(state.server, local).calls)(state.local), fleet, layout)
    return row


def _true_errors(
    algorithm: Algorithm, outer: Tree, level: str, everyone: Callable[..., Any], average: Callable[[Tree], Tree]
) -> dict[str, jax.Array]:
    problem = algorithm.problem
    if problem is None:
        gradients = everyone(
            lambda data, view: jax.grad(lambda model: algorithm.objective(model, view.inner, data))(outer)
        )
        return {"hypergradient_squared_norm": squared_norm(average(gradients))}

    def one(data: LocalData, view: View) -> tuple[Any, ...]:
        if view.outer_momentum is None:
            gradient, solved, value = true_hypergradient(problem, outer, view.inner, data, level)
            return gradient, squared_norm(subtract(view.inner, solved)), value, None
        # Both points through one instance of the solver: half as much to compile.
        places = jax.tree.map(lambda *a: jnp.stack(a), (outer, view.inner), (view.momentum_outer, view.momentum_inner))
        gradients, solved, values = jax.vmap(lambda x, y: true_hypergradient(problem, x, y, data, level))(*places)
        gradient, there = (jax.tree.map(lambda leaf, i=i: leaf[i], gradients) for i in (0, 1))
        error = squared_norm(subtract(view.inner, jax.tree.map(lambda leaf: leaf[0], solved)))
        return gradient, error, values[0], subtract(view.outer_momentum, there)

    gradient, inner_error, value, gap = average(everyone(one))
    row = {"hypergradient_squared_norm": squared_norm(gradient), "inner_error": inner_error, "true_objective": value}
    return row if gap is None else {**row, "outer_momentum_error": squared_norm(gap)}


def _global_errors(
    algorithm: Algorithm, outer: Tree, level: str, everyone: Callable[..., Any], average: Callable[[Tree], Tree]
) -> dict[str, jax.Array]:
    """The same columns where all clients share y: every loss, gradient and Hessian is the clients' mean."""
    problem = algorithm.problem

    def mean(function: Callable[[Tree, Tree], Tree]) -> Tree:
        return average(everyone(lambda data, view: function(data.whole("train"), data.whole("val"))))

    def solve(inner: Tree, right: Tree) -> Tree:
        if level == "exact":
            hessian = mean(lambda train, val: dense_hessian(problem, (outer, inner), train))
            return solve_with(hessian, right)
        return solve_iteratively(
            lambda vector: mean(lambda train, val: hessian_vector(problem.inner_loss, outer, inner, train, vector)),
            right,
        )

    system = System(
        lambda inner: mean(lambda train, val: problem.inner_loss(outer, inner, train)),
        lambda inner: mean(lambda train, val: inner_gradient(problem.inner_loss, outer, inner, train)),
        solve,
    )
    held = average(everyone(lambda data, view: view.inner))
    solved = minimise(system, held)
    in_outer, in_inner, value = mean(
        lambda train, val: (
            *both_gradients(problem.outer_loss, outer, solved, val), problem.outer_loss(outer, solved, val)
        )
    )  # fmt: skip
    adjoint = solve(solved, in_inner)
    gradient = mean(lambda train, val: assemble(problem, (outer, solved), in_outer, adjoint, train))
    return {
        "hypergradient_squared_norm": squared_norm(gradient),
        "inner_error": squared_norm(subtract(held, solved)),
        "true_objective": value,
    }


def _inner_momentum_error(algorithm: Algorithm, view: View, data: LocalData) -> jax.Array:
    gradient = inner_gradient(
        algorithm.problem.inner_loss, view.momentum_outer, view.momentum_inner, data.whole("train")
    )
    return squared_norm(subtract(view.inner_momentum, gradient))


def _count(calls: Any, fleet: Fleet, layout: Layout) -> dict[str, jax.Array]:
    """Totals over the clients as two 32-bit halves: ten thousand clients overflow one."""
    real = fleet.ids < layout.clients
    row = {}
    for name, values in zip(("gradient_calls", "hessian_vector_calls", "cross_calls"), calls, strict=True):
        kept = jnp.where(real, values, 0)
        row[f"{name}/high"] = total(jnp.sum(kept >> 15, dtype=jnp.int32), layout)
        row[f"{name}/low"] = total(jnp.sum(kept & 0x7FFF, dtype=jnp.int32), layout)
    return row
