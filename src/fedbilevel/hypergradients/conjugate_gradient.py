"""Phi(x, y) by conjugate gradients on the inner Hessian: only Hessian-vector products, stops when accurate.

Needs a positive definite Hessian, as strong convexity of the inner problem gives.  All products use one training batch,
linearised once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.calculus import (
    Calls,
    Tree,
    add,
    dot,
    hessian_operator,
    scale,
    squared_norm,
    step_along,
    subtract,
    zeros,
)
from fedbilevel.hypergradients import Points, by_solving
from fedbilevel.problem import BilevelProblem, positive, whole_number
from fedbilevel.sampling import Batches


@partial(jax.tree_util.register_dataclass, data_fields=("tolerance",), meta_fields=("steps",))
@dataclass(frozen=True)
class ConjugateGradient:
    steps: int = 100
    tolerance: Any = 1e-6

    train_batches = 1
    val_batches = 1

    def __call__(self, problem: BilevelProblem, points: Points, batches: Batches) -> tuple[tuple[Tree, ...], Calls]:
        def by_products(point: tuple[Tree, Tree], batch: Tree, right: Tree) -> tuple[Tree, jax.Array]:
            return solve(hessian_operator(problem.inner_loss, *point, batch), right, self.steps, self.tolerance)

        return by_solving(problem, points, batches, by_products)


def solve(
    operator: Callable[[Tree], Tree], right: Tree, steps: int, tolerance: Any, start: Tree = None
) -> tuple[Tree, jax.Array]:
    """Solve ``operator(v) = right``; stop at a residual of ``tolerance`` times that of zero.  Also counts the products."""
    solution = zeros(right) if start is None else start
    residual = right if start is None else subtract(right, operator(start))
    energy = squared_norm(residual)
    goal = jnp.asarray(tolerance, energy.dtype) ** 2 * squared_norm(right)

    def unfinished(state: tuple[Any, ...]) -> jax.Array:
        return jnp.logical_and(state[4] < steps, state[3] > goal)

    def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
        solution, residual, direction, energy, count = state
        image = operator(direction)
        length = energy / dot(direction, image)
        solution = step_along(solution, length, direction)
        residual = step_along(residual, -length, image)
        renewed = squared_norm(residual)
        return solution, residual, add(residual, scale(renewed / energy, direction)), renewed, count + 1

    used = jnp.asarray(0 if start is None else 1, jnp.int32)
    state = jax.lax.while_loop(unfinished, iterate, (solution, residual, residual, energy, used))
    return state[0], state[4]


def conjugate_gradient(steps: int = 100, tolerance: float = 1e-6) -> ConjugateGradient:
    """The hypergradient by at most ``steps`` conjugate-gradient iterations to a relative residual of ``tolerance``.

    >>> import fedbilevel as fb
    >>> fb.conjugate_gradient(steps=20)
    ConjugateGradient(steps=20, tolerance=1e-06)
    """
    whole_number("steps", steps)
    positive("tolerance", tolerance)
    return ConjugateGradient(steps, tolerance)
