"""The Neumann estimator and the inner gradient on a declared linear inner problem, by the fused kernels.

The kernel runs the whole series and the cross derivative on rows gathered in place.  What it returns per cell is turned
into an outer-shaped vector by one vector-Jacobian product of the weight table w(x) and the ridge.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel import kernels
from fedbilevel.calculus import Tree, subtract
from fedbilevel.hypergradients.base import Points
from fedbilevel.linear import LinearInner
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches


def applies(problem: BilevelProblem, batches: Batches) -> bool:
    """Whether the fused kernels serve this call; on whole sets XLA's large products are as fast."""
    linear = problem.linear
    if linear is None or linear.kernel == "off":
        return False
    if linear.kernel == "require":
        if batches.whole_train:
            raise ValueError("kernel='require' needs minibatches: give a batch_size.")
        if not kernels.available():
            raise RuntimeError(f"kernel='require', but the fused kernel is not available: {kernels.why_not()}")
    return not batches.whole_train and kernels.available()


def hypergradients(
    problem: BilevelProblem, points: Points, batches: Batches, gradients: list[tuple[Tree, Tree]], step: Any
) -> tuple[Tree, ...]:
    linear = problem.linear
    assert linear is not None
    assert batches.draws.train is not None
    (features, targets, cells, indices), inner, tables = _operands(linear, points, batches, batches.draws.train)
    right = jnp.stack([in_inner for _, in_inner in gradients])
    steps = jnp.full(len(points), step, inner.dtype)
    solutions, products = kernels.neumann(
        features, targets, cells, indices, inner, right, *tables, steps, link=linear.link
    )
    return tuple(
        subtract(in_outer, _pull_back(linear, outer, y, solutions[number], products[number]))
        for number, ((outer, y), (in_outer, _)) in enumerate(zip(points, gradients, strict=True))
    )


def inner_gradients(problem: BilevelProblem, points: Points, batches: Batches) -> tuple[jax.Array, ...]:
    """The inner gradient at every point on the step's inner batch."""
    linear = problem.linear
    assert linear is not None
    assert batches.draws.inner is not None
    (features, targets, cells, indices), inner, tables = _operands(linear, points, batches, batches.draws.inner)
    return tuple(kernels.gradient(features, targets, cells, indices, inner, *tables, link=linear.link))


def _operands(
    linear: LinearInner, points: Points, batches: Batches, indices: jax.Array
) -> tuple[tuple[Any, Any, Any, jax.Array], jax.Array, tuple[jax.Array, jax.Array]]:
    """(features, targets, cells, indices), the inner variables, (weight tables, ridges): stacked over the points."""
    rows, indices = batches.data.flat("train", indices)
    inner = jnp.stack([point[1] for point in points])
    tables = jnp.stack([linear.cell_weights(outer).astype(inner.dtype) for outer, _ in points])
    ridges = jnp.stack([linear.ridge_at(outer, inner) for outer, _ in points])
    targets, cells = rows[linear.targets].astype(inner.dtype), rows[linear.cells].astype(jnp.int32)
    return (rows[linear.features], targets, cells, indices), inner, (tables, ridges)


def _pull_back(linear: LinearInner, outer: Tree, inner: jax.Array, solution: jax.Array, products: jax.Array) -> Tree:
    """(d2g/dxdy) solution = Dw(x)^T products + ridge'(x) <y, solution>."""

    def tables(x: Tree) -> tuple[jax.Array, jax.Array]:
        return linear.cell_weights(x).astype(inner.dtype), linear.ridge_at(x, inner)

    return jax.vjp(tables, outer)[1]((products, jnp.dot(inner, solution)))[0]
