"""Phi(x, y) by a series whose steps and length set themselves, each product on an independent minibatch.

The Neumann series is Richardson's iteration for H p = grad_y f.  From p = 0 and r = grad_y f, with the Hessian H_j of the j-th
minibatch,

    s = min(step, r'H_j r / |H_j r|^2)        p <- p + s r        r <- r - s H_j r

so that s is never longer than the one that leaves least of r.  Methods that measure the curvature L set ``step`` to 1/L where
it is None; where nobody does, there is no bound but the other one.  The series ends where what is left of it, by the ratio of
its last two residuals, is below ``bias`` times |p|, after ``most`` products, or where H_j curves downwards or not at all along
r.  What is left of r is then added once more.  With several points all series have the same length: momentum methods
compare them.

A step that comes from the rows of H_j is not independent of H_j, which adds a bias on minibatches; with 1/L it is rarely taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.calculus import (
    Calls,
    Tree,
    dot,
    dtype_of,
    hessian_operator,
    hessian_vector,
    squared_norm,
    step_along,
    zeros,
)
from fedbilevel.hypergradients import Points, assemble, outer_gradients
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches

TINY = 1e-30


@partial(jax.tree_util.register_dataclass, data_fields=("step", "bias"), meta_fields=("terms", "most"))
@dataclass(frozen=True)
class AdaptiveNeumann:
    """``terms`` and ``step`` of None set themselves."""

    terms: int | None = None
    step: Any = None
    bias: Any = 0.1
    most: int = 20

    val_batches = 1

    @property
    def train_batches(self) -> int:
        return (self.most if self.terms is None else self.terms) + 1

    def __call__(self, problem: BilevelProblem, points: Points, batches: Batches) -> tuple[tuple[Tree, ...], Calls]:
        gradients = outer_gradients(problem, points, batches)
        solutions, terms = self._series(problem, points, batches, tuple(in_inner for _, in_inner in gradients))
        batch, count = batches.train(self.train_batches - 1), len(points)
        estimates = tuple(
            assemble(problem, point, in_outer, solution, batch)
            for point, (in_outer, _), solution in zip(points, gradients, solutions, strict=True)
        )
        return estimates, Calls(count, count * terms, count)

    def _series(
        self, problem: BilevelProblem, points: Points, batches: Batches, right: tuple[Tree, ...]
    ) -> tuple[tuple[Tree, ...], jax.Array]:
        whole = batches.whole_train and [
            hessian_operator(problem.inner_loss, *point, batches.train(0)) for point in points
        ]

        def images(number: jax.Array, vectors: tuple[Tree, ...]) -> list[Tree]:
            if whole:
                return [operator(vector) for operator, vector in zip(whole, vectors, strict=True)]
            batch = batches.train(number)
            pairs = zip(points, vectors, strict=True)
            return [hessian_vector(problem.inner_loss, *point, batch, vector) for point, vector in pairs]

        def unfinished(state: tuple[Any, ...]) -> Any:
            residuals, sums, before, steps, number, bent = state
            now = _norms(residuals)
            on = (number < self.train_batches - 1) & (now > 0).any() & ~bent
            if self.terms is not None:
                return on
            ratio = jnp.clip(now / jnp.maximum(before, TINY), 0, 0.999)
            left = steps * now * ratio / (1 - ratio)
            return on & ((number == 0) | (left > jnp.asarray(self.bias, left.dtype) * _norms(sums)).any())

        def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
            residuals, sums, _, _, number, _ = state
            before, products = _norms(residuals), images(number, residuals)
            along = jnp.stack([dot(*pair) for pair in zip(residuals, products, strict=True)])
            sizes = _norms(products)
            # Where the loss curves downwards the series ends, and what is left counts by the curvature's size.
            steps = jnp.where(along > 0, along / sizes, before) / jnp.maximum(sizes, TINY)
            if self.step is not None:
                steps = jnp.minimum(steps, jnp.asarray(self.step, steps.dtype))
            taken, moves = jnp.where(along > 0, steps, 0), (sums, residuals, products)
            sums, residuals = zip(
                *(
                    (step_along(total, step, residual), step_along(residual, -step, image))
                    for step, total, residual, image in zip(taken, *moves, strict=True)
                ),
                strict=True,
            )
            return residuals, sums, before, steps, number + 1, (along <= 0).any()

        ones = jnp.ones(len(right), dtype_of(right[0]))
        start = (right, tuple(map(zeros, right)), ones, 0 * ones, jnp.zeros((), jnp.int32), jnp.asarray(False))
        residuals, sums, _, steps, number, _ = jax.lax.while_loop(unfinished, advance, start)
        return tuple(map(step_along, sums, steps, residuals)), number


def _norms(trees: Any) -> jax.Array:
    return jnp.sqrt(jnp.stack([squared_norm(tree) for tree in trees]))
