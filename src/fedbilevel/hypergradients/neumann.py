"""The paper's stochastic estimator (Eq. 5): a Neumann series for the inverse Hessian.

    p = s * sum_{q=0..Q} prod_{j<=q} (I - s H_j) grad_y f        Phi = grad_x f - (d2g/dxdy) p

Q = ``terms`` Hessian-vector products, so Q + 1 summands, each factor on an independent minibatch; one minibatch for f and
one for the cross derivative.  The series step s is its own number (the paper calls it eta like the outer step); it needs
s < 1/L, and the bias shrinks as (1 - s mu)^(Q+1).

On a declared linear inner problem the fused kernels run the whole series and the cross derivative on rows gathered in
place.  What they return per cell is turned into an outer-shaped vector by one vector-Jacobian product of the weight table
w(x) and the ridge.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel import kernels
from fedbilevel.calculus import (
    Calls,
    Tree,
    add,
    bytes_of,
    hessian_operator,
    hessian_vector,
    scale,
    step_along,
    subtract,
)
from fedbilevel.hints import positive, whole_number
from fedbilevel.hypergradients import Points, assemble, outer_gradients
from fedbilevel.hypergradients.adaptive import AdaptiveNeumann
from fedbilevel.linear import LinearInner
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches


@partial(jax.tree_util.register_dataclass, data_fields=("step",), meta_fields=("terms",))
@dataclass(frozen=True)
class Neumann:
    terms: int = 10
    step: Any = 0.5

    val_batches = 1

    @property
    def train_batches(self) -> int:
        return self.terms + 1

    def __call__(self, problem: BilevelProblem, points: Points, batches: Batches) -> tuple[tuple[Tree, ...], Calls]:
        gradients = outer_gradients(problem, points, batches)
        count = len(points)
        calls = Calls(count, count * self.terms, count)
        if fused_serves(problem, batches):
            return _fused_hypergradients(problem, points, batches, gradients, self.step), calls
        solutions = self._series(problem, points, batches, tuple(in_inner for _, in_inner in gradients))
        found = [(point, in_outer, s) for point, (in_outer, _), s in zip(points, gradients, solutions, strict=True)]
        estimates = batches.train(self.terms, lambda batch: tuple(assemble(problem, *each, batch) for each in found))
        return estimates, calls

    def _series(
        self, problem: BilevelProblem, points: Points, batches: Batches, right: tuple[Tree, ...]
    ) -> tuple[Tree, ...]:
        # One minibatch serves every point; on whole sets the Hessian is the same each time and linearised once.
        whole = batches.whole_train and [
            hessian_operator(problem.inner_loss, *point, batches.train(0)) for point in points
        ]

        def multiply(vectors: tuple[Tree, ...], number: jax.Array) -> list[Tree]:
            if whole:
                return [operator(vector) for operator, vector in zip(whole, vectors, strict=True)]
            pairs, loss = [*zip(points, vectors, strict=True)], problem.inner_loss
            products: list[Tree] = batches.train(
                number, lambda batch: [hessian_vector(loss, *point, batch, vector) for point, vector in pairs]
            )
            return products

        def factor(state: tuple[Any, Any], number: jax.Array) -> tuple[tuple[Any, Any], None]:
            vectors, totals = state
            images = multiply(vectors, number)
            vectors = tuple(
                step_along(vector, -self.step, image) for vector, image in zip(vectors, images, strict=True)
            )
            return (vectors, tuple(map(add, totals, vectors))), None

        # Where directions leave the caches, the sum takes in two at a time: a pass over it less.
        unroll = 2 if bytes_of(right) >= kernels.LEAST_BYTES else 1
        (_, totals), _ = jax.lax.scan(factor, (right, right), jnp.arange(self.terms), unroll=unroll)
        return tuple(scale(self.step, total) for total in totals)


def neumann(
    terms: int | str = 10, step: float | str = 0.5, *, bias: float = 0.1, most: int = 20
) -> Neumann | AdaptiveNeumann:
    """The paper's Neumann-series estimator with Q = ``terms`` Hessian factors.

    ``step="auto"``: at most 1/L with the curvature L that the algorithm measures; ``terms="auto"``: as many as a relative
    ``bias`` needs, at most ``most``.  On problems declared by `linear_problem` a series with numbers runs in one fused kernel
    where that can be built.

    Args:
        terms: Hessian-vector products, not negative; or "auto".
        step: Step of the series, below 1/L of the inner loss; or "auto".
        bias: With ``terms="auto"``: the relative error to stop at.
        most: With ``terms="auto"``: terms at most.

    Returns:
        An estimator for the argument ``hypergradient``.

    Raises:
        ValueError: A number is out of its range.

    Examples:
        >>> import fedbilevel as fb
        >>> fb.neumann(terms=5, step=0.1)
        Neumann(terms=5, step=0.1)
        >>> fb.neumann("auto", "auto")
        AdaptiveNeumann(terms=None, step=None, bias=0.1, most=20)
    """
    number, length = (None if isinstance(value, str) and value == "auto" else value for value in (terms, step))
    for name, value in (("terms", number), ("step", length)):
        if isinstance(value, str):
            raise ValueError(f'{name} must be a number or "auto", not {value!r}.')
    whole_number("terms", number, least=0, optional=terms == "auto")
    if length is not None:
        positive("step", length)
    positive("bias", bias)
    whole_number("most", most)
    if number is None or length is None:
        return AdaptiveNeumann(number, length, bias, most)  # type: ignore[arg-type]
    return Neumann(number, length)  # type: ignore[arg-type]


# --- on declared linear problems, by the fused kernels -------------------------------------------------------------------


def fused_serves(problem: BilevelProblem, batches: Batches) -> bool:
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


def _fused_hypergradients(
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


def fused_inner_gradients(problem: BilevelProblem, points: Points, batches: Batches) -> tuple[jax.Array, ...]:
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
    return (batches.data.features(rows, linear.features), targets, cells, indices), inner, (tables, ridges)


def _pull_back(linear: LinearInner, outer: Tree, inner: jax.Array, solution: jax.Array, products: jax.Array) -> Tree:
    """(d2g/dxdy) solution = Dw(x)^T products + ridge'(x) <y, solution>."""

    def tables(x: Tree) -> tuple[jax.Array, jax.Array]:
        return linear.cell_weights(x).astype(inner.dtype), linear.ridge_at(x, inner)

    return jax.vjp(tables, outer)[1]((products, jnp.dot(inner, solution)))[0]
