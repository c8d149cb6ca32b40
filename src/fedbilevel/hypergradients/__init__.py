"""Hypergradient estimators, and what one is: a small tree with one signature.

``estimator(problem, points, batches)`` returns one outer-shaped estimate of

    Phi(x, y) = grad_x f - (d2g/dxdy) (d2g/dy2)^-1 grad_y f

for each ``(x, y)`` in ``points``, all on the *same* minibatches (momentum methods compare two points), and how many
derivatives that took.  ``train_batches`` / ``val_batches`` say how many independent minibatches a call consumes.  An estimator
with ``solves = True`` also tells how its linear systems ended.  Register the class with ``jax.tree_util.register_dataclass``:
float fields are data (traced, swept), the rest is static.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from fedbilevel.calculus import Calls, Solves, Tree, both_gradients, cross_product, subtract
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches

Points = tuple[tuple[Tree, Tree], ...]


class Hypergradient(Protocol):
    @property
    def train_batches(self) -> int: ...

    @property
    def val_batches(self) -> int: ...

    def __call__(self, problem: BilevelProblem, points: Points, batches: Batches) -> tuple[tuple[Tree, ...], Calls]: ...


def outer_gradients(problem: BilevelProblem, points: Points, batches: Batches) -> list[tuple[Tree, Tree]]:
    """grad_x f and grad_y f at every point, on the first validation batch."""
    loss = problem.outer_loss
    found: list[tuple[Tree, Tree]] = batches.val(
        0, lambda batch: [both_gradients(loss, *point, batch) for point in points]
    )
    return found


def assemble(problem: BilevelProblem, point: tuple[Tree, Tree], in_outer: Tree, solution: Tree, batch: Tree) -> Tree:
    """grad_x f - (d2g/dxdy) solution, the last line of every estimator."""
    outer, inner = point
    return subtract(in_outer, cross_product(problem.inner_loss, outer, inner, batch, solution))


def by_solving(
    problem: BilevelProblem,
    points: Points,
    batches: Batches,
    solve: Callable[[tuple[Tree, Tree], Tree, Tree], tuple[Tree, Calls]],
) -> tuple[tuple[Tree, ...], Calls]:
    """An estimator on one training batch: ``solve(point, batch, right)`` is (d2g/dy2)^-1 right and what that took."""
    batch, gradients = batches.train(0), outer_gradients(problem, points, batches)
    estimates, calls = [], Calls(len(points), 0, len(points))
    ends: list[Solves | None] = []
    for point, (in_outer, in_inner) in zip(points, gradients, strict=True):
        solution, used = solve(point, batch, in_inner)
        estimates.append(assemble(problem, point, in_outer, solution, batch))
        calls = calls.plus(used)
        ends.append(used.solves)
    if ends[0] is not None:
        every = jax.tree.map(lambda *values: jnp.stack(values), *ends)
        ended = [*(jnp.sum(count, dtype=count.dtype) for count in every[:3]), *map(jnp.max, every[3:])]
        calls = calls._replace(solves=Solves(*ended))
    return tuple(estimates), calls
