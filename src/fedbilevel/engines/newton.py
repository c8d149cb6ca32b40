"""Newton's method for the inner problem, one client's or all clients' together: what diagnostics call the solution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.calculus import Tree, dot, squared_norm, step_along
from fedbilevel.hypergradients.conjugate_gradient import solve as solve_by_products

NEWTON_STEPS = 50


class System(NamedTuple):
    """A strongly convex function of y: its value, its gradient, and ``solve(y, v)``, its inverse Hessian at y times v."""

    value: Callable[[Tree], jax.Array]
    gradient: Callable[[Tree], Tree]
    solve: Callable[[Tree, Tree], Tree]


def minimise(system: System, inner: Tree) -> Tree:
    """The minimiser from a warm start: damped Newton until the gradient is at rounding level or stops shrinking."""
    start = system.gradient(inner)
    tiny = jnp.finfo(jax.tree.leaves(inner)[0].dtype).eps

    def unfinished(state: tuple[Any, ...]) -> jax.Array:
        _, _, size, improved, count = state
        unsolved = size > (100 * tiny) ** 2 * (1 + squared_norm(start))
        return jnp.logical_and((count < NEWTON_STEPS) & improved, unsolved)

    def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
        point, gradient, size, _, count = state
        direction = system.solve(point, gradient)
        value = system.value(point)
        slope = dot(direction, gradient)

        def too_long(length: jax.Array) -> jax.Array:
            trial = system.value(step_along(point, -length, direction))
            # Rounding of the loss itself must not stop the last, tiny steps.
            return (trial > value - 1e-4 * length * slope + 10 * tiny * jnp.abs(value)) & (length > 1e-8)

        length = jax.lax.while_loop(too_long, lambda length: length / 2, jnp.ones((), value.dtype))
        moved = step_along(point, -length, direction)
        gradient = system.gradient(moved)
        renewed = squared_norm(gradient)
        better = renewed < size
        point = jax.tree.map(lambda a, b: jnp.where(better, a, b), moved, point)
        return point, gradient, jnp.where(better, renewed, size), better, count + 1

    state = (inner, start, squared_norm(start), jnp.asarray(True), jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(unfinished, iterate, state)[0]


def solve_iteratively(operator: Callable[[Tree], Tree], right: Tree) -> Tree:
    """By conjugate gradients to about rounding."""
    size = sum(leaf.size for leaf in jax.tree.leaves(right))
    tolerance = 10 * jnp.finfo(jax.tree.leaves(right)[0].dtype).eps
    return solve_by_products(operator, right, min(2 * size, 1000), tolerance)[0]
