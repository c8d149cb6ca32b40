"""Phi(x, y) by a dense factorisation of the inner Hessian: the oracle.

Cost: one Hessian of size d x d and a Cholesky solve per point; meant for inner variables up to a few thousand numbers.
On minibatches (``batch_size`` given) the Hessian and the cross derivative come from one training batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
from jax.flatten_util import ravel_pytree

from fedbilevel.calculus import Calls, Tree, solve_positive
from fedbilevel.hypergradients import Points, by_solving
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches


@partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=())
@dataclass(frozen=True)
class Exact:
    train_batches = 1
    val_batches = 1

    def __call__(self, problem: BilevelProblem, points: Points, batches: Batches) -> tuple[tuple[Tree, ...], Calls]:
        def solve(point: tuple[Tree, Tree], batch: Tree, right: Tree) -> tuple[Tree, Calls]:
            hessian = dense_hessian(problem, point, batch)
            return solve_with(hessian, right), Calls(hessian_vector=len(hessian))

        return by_solving(problem, points, batches, solve)


def dense_hessian(problem: BilevelProblem, point: tuple[Tree, Tree], batch: Tree) -> jax.Array:
    """d2g/dy2 as a matrix over the flattened inner variable."""
    outer, inner = point
    flat, restore = ravel_pytree(inner)
    hessian: jax.Array = jax.jacfwd(jax.grad(lambda vector: problem.inner_loss(outer, restore(vector), batch)))(flat)
    return hessian


def solve_with(hessian: jax.Array, right: Tree) -> Tree:
    vector, restore = ravel_pytree(right)
    return restore(solve_positive(hessian, vector))


def exact() -> Exact:
    """The hypergradient Phi by a dense solve.

    Returns:
        An estimator for the argument ``hypergradient``.

    Examples:
        >>> import fedbilevel as fb
        >>> fb.exact()
        Exact()
    """
    return Exact()
