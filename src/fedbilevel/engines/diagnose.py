"""What a recorded round knows: the objective, the true hypergradient, and the errors the theory bounds.

The exact columns need y_m(x) = argmin g_m(x, .), found by Newton's method on a client's whole training set, with a dense
solve ("exact") or conjugate gradients ("conjugate_gradient") for the Newton and for the adjoint system.  With a global lower
level the same is done once for all clients, on their mean loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.calculus import Tree, both_gradients, dot, inner_gradient, select, squared_norm, step_along, subtract
from fedbilevel.engines.fleet import Fleet, Layout, map_clients
from fedbilevel.engines.rounds import Cohort, State, largest, that_count, total
from fedbilevel.hypergradients import assemble
from fedbilevel.hypergradients.conjugate_gradient import solve as solve_by_products
from fedbilevel.hypergradients.exact import dense_hessian, solve_with
from fedbilevel.plan import Algorithm, View, weighted_mean
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.sampling import LocalData

LEVELS = ("cheap", "cohort", "exact", "conjugate_gradient")
STEPS = "steps"
"""Not a level of diagnostics: records what every client did in every local step, for `trace`."""
NEWTON_STEPS = 100
SOLVED = 1e-3
"""Largest relative residual of the adjoint system that counts as solved; most solves leave far less."""
SMALL_INNER = 300
"""Largest inner variable for which "auto" forms dense Hessians, and..."""
SMALL_WORK = 2e8
"""...largest samples * inner^2, about a tenth of a second a recorded round."""
MANY = 10
"""From so many times the cohort on, "auto" does not look at all clients to record a round, unless that is quick."""


def level_for(asked: str, algorithm: Algorithm, data: ClientData, cohort: int | None = None) -> str:
    if asked not in ("auto", *LEVELS):
        raise ValueError(f"diagnostics must be 'auto', {', '.join(map(repr, LEVELS))}, not {asked!r}.")
    if asked != "auto":
        return asked
    cheap = "cheap" if cohort is None or data.clients < MANY * cohort else "cohort"
    if algorithm.problem is None:
        return "exact" if cheap == "cheap" else cheap  # a plain gradient: as cheap as the objective
    inner = jax.eval_shape(algorithm.problem.init, jax.random.key(0))[1]
    size = sum(leaf.size for leaf in jax.tree.leaves(inner))
    small = size <= SMALL_INNER and float(data.train_sizes.sum()) * size**2 <= SMALL_WORK
    return "exact" if small else cheap


def minimise(
    value_at: Callable[[Tree], jax.Array],
    gradient_at: Callable[[Tree], Tree],
    solve: Callable[[Tree, Tree], Tree],
    inner: Tree,
) -> tuple[Tree, jax.Array]:
    """The minimiser of a strongly convex function from a warm start, ``solve(y, v)`` being its inverse Hessian at y times v,
    and whether it was found: damped Newton until the gradient is at rounding level, or no step lowers the value any more.

    A damped step lowers the value, not always the norm of the gradient: far from the solution that norm may grow.
    """
    start = gradient_at(inner)
    tiny = jnp.finfo(jax.tree.leaves(inner)[0].dtype).eps
    goal = (100 * tiny) ** 2 * (1 + squared_norm(start))

    def unfinished(state: tuple[Any, ...]) -> jax.Array:
        *_, solved, stuck, count = state
        return jnp.asarray((count < NEWTON_STEPS) & ~solved & ~stuck)

    def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
        point, gradient, size, _, _, count = state
        direction = solve(point, gradient)
        value = value_at(point)
        slope = dot(direction, gradient)  # twice the decrease that Newton's model promises
        rounding = 10 * tiny * jnp.abs(value)

        def too_long(length: jax.Array) -> jax.Array:
            trial = value_at(step_along(point, -length, direction))
            # Rounding of the loss itself must not stop the last, tiny steps.
            return ~(trial <= value - 1e-4 * length * slope + rounding) & (length > 1e-8)

        length = jax.lax.while_loop(too_long, lambda length: length / 2, jnp.ones((), value.dtype))
        moved = step_along(point, -length, direction)
        gradient_there = gradient_at(moved)
        renewed = squared_norm(gradient_there)
        descends = (slope > 0) & (length > 1e-8)  # neither holds where the Hessian is not positive definite
        better, promising = renewed < size, slope > 100 * rounding
        accepted = descends & (better | promising)
        point, gradient = select(accepted, (moved, gradient_there), (point, gradient))
        size = jnp.where(accepted, renewed, size)
        return point, gradient, size, (size <= goal) | (descends & ~better & ~promising), ~descends, count + 1

    size = squared_norm(start)
    state = (inner, start, size, size <= goal, jnp.asarray(False), jnp.zeros((), jnp.int32))
    point, *_, solved, _, _ = jax.lax.while_loop(unfinished, iterate, state)
    return point, solved


def true_hypergradient(
    problem: BilevelProblem, outer: Tree, inner: Tree, mean: Callable[[Callable[[Tree, Tree], Tree]], Tree], level: str
) -> tuple[Tree, Tree, jax.Array]:
    """(grad h(x), y(x), h(x)), the inner problem solved from ``inner``; all NaN where that could not be done.

    ``mean(function)`` is that of ``function(train, val)`` over the clients that share y: with a local lower level, one.
    """

    def value(y: Tree) -> jax.Array:
        return mean(lambda train, val: problem.inner_loss(outer, y, train))  # type: ignore[no-any-return]

    def gradient(y: Tree) -> Tree:
        return mean(lambda train, val: inner_gradient(problem.inner_loss, outer, y, train))

    def solver(y: Tree) -> Callable[[Tree], Tree]:
        if level == "exact":
            return partial(solve_with, mean(lambda train, val: dense_hessian(problem, (outer, y), train)))
        size = sum(leaf.size for leaf in jax.tree.leaves(y))
        tolerance = 10 * jnp.finfo(jax.tree.leaves(y)[0].dtype).eps  # about rounding
        product = jax.linearize(gradient, y)[1]
        return lambda right: solve_by_products(product, right, min(2 * size, 1000), tolerance)[0]

    solution, found = minimise(value, gradient, lambda y, right: solver(y)(right), inner)
    in_outer, in_inner, objective = mean(
        lambda train, val: (
            *both_gradients(problem.outer_loss, outer, solution, val), problem.outer_loss(outer, solution, val)
        )
    )  # fmt: skip
    slope = gradient(solution)
    # Both systems through one instance of the solver: half as much to compile.
    solved = jax.vmap(solver(solution))(jax.tree.map(lambda *two: jnp.stack(two), in_inner, slope))
    adjoint, further = (jax.tree.map(lambda leaf, i=i: leaf[i], solved) for i in (0, 1))
    # A small gradient is no minimum where the Hessian is not positive definite, or where Newton would still go far: there
    # may be none.  And products may run out before the adjoint system is solved.
    left = squared_norm(subtract(jax.linearize(gradient, solution)[1](adjoint), in_inner))
    found &= (dot(adjoint, in_inner) >= 0) & (left <= SOLVED**2 * squared_norm(in_inner))
    found &= dot(further, slope) <= SOLVED**2 * (1 + jnp.abs(value(solution)))
    there = mean(lambda train, val: assemble(problem, (outer, solution), in_outer, adjoint, train))
    return jax.tree.map(lambda leaf: jnp.where(found, leaf, jnp.nan), (there, solution, objective))  # type: ignore[no-any-return]


@partial(jax.jit, static_argnames=("problem", "level"))
def _of_one(problem: BilevelProblem, level: str, outer: Tree, inner: Tree, train: Tree, val: Tree) -> Any:
    """`true_hypergradient` of one client.  A program within the program: it is traced once for all algorithms that solve the
    same problem on rows of the same shapes, and is the larger part of what most of them trace."""
    return true_hypergradient(problem, outer, inner, lambda function: function(train, val), level)


def measure(
    algorithm: Algorithm, layout: Layout, fleet: Fleet, state: State, level: str, cohort: Cohort | None
) -> dict[str, jax.Array]:
    """One row of history, without the columns the host adds (round, bytes, time).  ``cohort``: who took part last."""
    outer = algorithm.outer(state.server)
    here, weights, local = None, jnp.where(fleet.ids < layout.clients, fleet.weights, 0), state.local
    if cohort is not None:
        here, weights = cohort.positions, cohort.weights
        local = local if here is None else jax.tree.map(lambda leaf: leaf[here], local)
    if cohort is not None and cohort.order is not None:
        weights, layout = cohort.together(weights), replace(layout, mesh=None)
    weights = weights / total(jnp.sum(weights), layout)

    def everyone(function: Callable[[LocalData, View], Any]) -> Any:
        return map_clients(
            lambda data, own: function(data, algorithm.view(state.server, own)), fleet, local, layout, here
        )

    def average(tree: Tree) -> Tree:
        tree = tree if cohort is None else cohort.together(tree)
        tree = that_count(tree, weights) if layout.zeros or cohort is not None else tree
        return jax.tree.map(lambda leaf: total(leaf, layout), weighted_mean(tree, weights))

    row: dict[str, jax.Array] = {
        "objective": average(everyone(lambda data, view: algorithm.objective(outer, view.inner, data)))
    }
    if cohort is not None:
        return row | {"consensus_error": state.consensus}
    if level != "cheap":
        row |= _errors(algorithm, outer, level, everyone, average)
    view = jax.eval_shape(algorithm.view, state.server, jax.tree.map(lambda leaf: leaf[0], state.local))
    if level != "cheap" and view.inner_momentum is not None:
        row["inner_momentum_error"] = average(everyone(lambda data, view: _inner_momentum_error(algorithm, view, data)))
    row["consensus_error"] = state.consensus
    if view.calls is not None:
        row |= _count(jax.vmap(lambda local: algorithm.view(state.server, local).calls)(state.local), fleet, layout)
    return row


def _errors(
    algorithm: Algorithm, outer: Tree, level: str, everyone: Callable[..., Any], average: Callable[[Tree], Tree]
) -> dict[str, jax.Array]:
    problem = algorithm.problem
    if problem is None:
        gradients = everyone(
            lambda data, view: jax.grad(lambda model: algorithm.objective(model, view.inner, data))(outer)
        )
        return {"hypergradient_squared_norm": squared_norm(average(gradients))}

    def whole(data: LocalData) -> tuple[Tree, Tree]:
        return data.whole("train"), data.whole("val")

    def one(data: LocalData, view: View) -> tuple[Any, ...]:
        rows = whole(data)

        def true(x: Tree, y: Tree) -> tuple[Tree, Tree, jax.Array]:
            return _of_one(problem, level, x, y, *rows)  # type: ignore[no-any-return]

        if view.outer_momentum is None:
            gradient, solved, value = true(outer, view.inner)
            return gradient, squared_norm(subtract(view.inner, solved)), value, None
        # Both points through one instance of the solver: half as much to compile.
        places = jax.tree.map(lambda *a: jnp.stack(a), (outer, view.inner), (view.momentum_outer, view.momentum_inner))
        gradients, solved, values = jax.vmap(true)(*places)
        gradient, there = (jax.tree.map(lambda leaf, i=i: leaf[i], gradients) for i in (0, 1))
        error = squared_norm(subtract(view.inner, jax.tree.map(lambda leaf: leaf[0], solved)))
        return gradient, error, values[0], subtract(view.outer_momentum, there)

    if problem.lower_level == "global":
        held, gap = average(everyone(lambda data, view: view.inner)), None
        gradient, solved, value = true_hypergradient(
            problem, outer, held, lambda function: average(everyone(lambda data, view: function(*whole(data)))), level
        )
        inner_error = squared_norm(subtract(held, solved))
    else:
        gradient, inner_error, value, gap = average(everyone(one))
    row = {"hypergradient_squared_norm": squared_norm(gradient), "inner_error": inner_error, "true_objective": value}
    return row if gap is None else {**row, "outer_momentum_error": squared_norm(gap)}


def _inner_momentum_error(algorithm: Algorithm, view: View, data: LocalData) -> jax.Array:
    outer = view.momentum_outer if view.inner_momentum_outer is None else view.inner_momentum_outer
    gradient = inner_gradient(algorithm.problem.inner_loss, outer, view.momentum_inner, data.whole("train"))
    return squared_norm(subtract(view.inner_momentum, gradient))


def _count(calls: Any, fleet: Fleet, layout: Layout) -> dict[str, jax.Array]:
    """Totals over the clients as two 32-bit halves: ten thousand clients overflow one."""
    real = fleet.ids < layout.clients
    counts = dict(zip(("gradient_calls", "hessian_vector_calls", "cross_calls"), calls[:3], strict=True))
    row = {}
    if calls.solves is not None:
        counts |= zip(("solves", "solves_missed", "negative_curvature"), calls.solves[:3], strict=True)
        latest = {"solve_products": calls.solves.products, "solve_residual": calls.solves.residual}
        row = {name: largest(jnp.where(real, values, 0), layout) for name, values in latest.items()}
    for name, values in counts.items():
        kept = jnp.where(real, values, 0)
        row[f"{name}/high"] = total(jnp.sum(kept >> 15, dtype=jnp.int32), layout)
        row[f"{name}/low"] = total(jnp.sum(kept & 0x7FFF, dtype=jnp.int32), layout)
    return row
