"""The paper's stochastic estimator (Eq. 5): a Neumann series for the inverse Hessian.

    p = s * sum_{q=0..Q} prod_{j<=q} (I - s H_j) grad_y f        Phi = grad_x f - (d2g/dxdy) p

Q = ``terms`` Hessian-vector products, so Q + 1 summands, each factor on an independent minibatch; one minibatch for f and
one for the cross derivative.  The series step s is its own number (the paper calls it eta like the outer step); it needs
s < 1/L, and the bias shrinks as (1 - s mu)^(Q+1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from fedbilevel.calculus import Calls, Tree, add, hessian_operator, hessian_vector, scale, step_along
from fedbilevel.hypergradients import linear_fused
from fedbilevel.hypergradients.base import Points, assemble, outer_gradients
from fedbilevel.problem import BilevelProblem, positive, whole_number
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
        if linear_fused.applies(problem, batches):
            return linear_fused.hypergradients(problem, points, batches, gradients, self.step), calls
        solutions = self._series(problem, points, batches, tuple(in_inner for _, in_inner in gradients))
        batch = batches.train(self.terms)
        estimates = tuple(
            assemble(problem, point, in_outer, solution, batch)
            for point, (in_outer, _), solution in zip(points, gradients, solutions, strict=True)
        )
        return estimates, calls

    def _series(
        self, problem: BilevelProblem, points: Points, batches: Batches, right: tuple[Tree, ...]
    ) -> tuple[Tree, ...]:
        # One gather serves every point; on whole sets the Hessian is the same each time and linearised once.
        whole = batches.whole_train and [
            hessian_operator(problem.inner_loss, *point, batches.train(0)) for point in points
        ]

        def multiply(vectors: tuple[Tree, ...], number: jax.Array) -> list[Tree]:
            if whole:
                return [operator(vector) for operator, vector in zip(whole, vectors, strict=True)]
            batch = batches.train(number)
            pairs = zip(points, vectors, strict=True)
            return [hessian_vector(problem.inner_loss, *point, batch, vector) for point, vector in pairs]

        def factor(state: tuple[Any, Any], number: jax.Array) -> tuple[tuple[Any, Any], None]:
            vectors, totals = state
            images = multiply(vectors, number)
            vectors = tuple(step_along(one, -self.step, image) for one, image in zip(vectors, images, strict=True))
            return (vectors, tuple(map(add, totals, vectors))), None

        (_, totals), _ = jax.lax.scan(factor, (right, right), jax.numpy.arange(self.terms))
        return tuple(scale(self.step, total) for total in totals)


def neumann(terms: int = 10, step: float = 0.5) -> Neumann:
    """The paper's Neumann-series estimator with Q = ``terms`` Hessian factors.

    On problems declared by `linear_problem` the whole series runs in one fused kernel where that can be built.

    >>> import fedbilevel as fb
    >>> fb.neumann(terms=5, step=0.1)
    Neumann(terms=5, step=0.1)
    """
    whole_number("terms", terms, least=0)
    positive("step", step)
    return Neumann(terms, step)
