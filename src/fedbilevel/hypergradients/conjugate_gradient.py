"""Phi(x, y) by conjugate gradients on the inner Hessian: only Hessian-vector products, as many as the tolerance needs.

Needs a positive definite Hessian, as strong convexity of the inner problem gives.  All products use one training batch,
linearised once.  How every solve ended is counted with the client's calls: a run shows it in its history and warns at its end.

With condition number kappa the products grow like sqrt(kappa).  Where kappa comes from variables on different scales,
``preconditioner="diagonal"`` solves the system in variables that are on one scale (see `scales`).
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
    Solves,
    Tree,
    add,
    dot,
    dtype_of,
    hessian_operator,
    scale,
    select,
    squared_norm,
    step_along,
    zeros,
)
from fedbilevel.hints import positive, whole_number
from fedbilevel.hypergradients import Points, by_solving
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches

PROBES = 10
"""Products that go into the scales.  With 5 the solves that follow took 1.2 to 1.7 times as many products, with 20 0.7 to 0.8
times (400 correlated features on scales that differ by 100 and by 1000)."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("tolerance",),
    meta_fields=("steps", "preconditioner", "on_negative_curvature"),
)
@dataclass(frozen=True)
class ConjugateGradient:
    steps: int = 1000
    tolerance: Any = 1e-6
    preconditioner: str | None = None
    on_negative_curvature: str = "stop"

    train_batches = 1
    val_batches = 1
    solves = True

    def __call__(self, problem: BilevelProblem, points: Points, batches: Batches) -> tuple[tuple[Tree, ...], Calls]:
        def by_products(point: tuple[Tree, Tree], batch: Tree, right: Tree) -> tuple[Tree, Calls]:
            operator = hessian_operator(problem.inner_loss, *point, batch)
            diagonal = None if self.preconditioner is None else scales(operator, right)
            solution, solved = solve(operator, right, self.steps, self.tolerance, diagonal)
            if self.on_negative_curvature == "refuse":
                solution = select(solved.bent > 0, scale(jnp.nan, solution), solution)
            return solution, Calls(hessian_vector=solved.products, solves=solved)

        return by_solving(problem, points, batches, by_products)


def solve(
    operator: Callable[[Tree], Tree], right: Tree, steps: int, tolerance: Any, diagonal: Tree = None
) -> tuple[Tree, Solves]:
    """Solve ``operator(v) = right``, and how that ended.

    Stops at a residual of ``tolerance`` times the right side, after ``steps`` products, or where the operator is not
    positive along the next direction (to the precision of the numbers).  The answer is then the one that left least: on the way
    to a direction without curvature the later ones grow without bound.
    ``diagonal``: a preconditioner, near the operator's diagonal; its `PROBES` products are counted.
    """

    def preconditioned(residual: Tree) -> Tree:
        return residual if diagonal is None else jax.tree.map(jnp.divide, residual, diagonal)

    whole = squared_norm(right)
    goal = jnp.asarray(tolerance, whole.dtype) ** 2 * whole
    rounding = 10 * jnp.finfo(whole.dtype).eps  # of a product, relative to the steepest direction

    def unfinished(state: tuple[Any, ...]) -> jax.Array:
        *_, left, _, _, bent, count = state
        return jnp.asarray((count < steps) & (left > goal) & ~bent)

    def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
        solution, residual, direction, energy, _, (best, least), steepest, _, count = state
        image = operator(direction)
        curvature = dot(direction, image)
        extent = dot(direction, direction if diagonal is None else jax.tree.map(jnp.multiply, diagonal, direction))
        steepest = jnp.maximum(steepest, jnp.abs(curvature) / extent)
        bent = curvature <= rounding * steepest * extent
        length = jnp.where(bent, 0, energy / jnp.where(bent, 1, curvature))
        solution = step_along(solution, length, direction)
        residual = step_along(residual, -length, image)
        ahead = preconditioned(residual)
        renewed = dot(residual, ahead)
        direction = add(ahead, scale(renewed / energy, direction))
        left = squared_norm(residual)
        kept = select(left < 0.99 * least, (solution, left), (best, least))
        return solution, residual, direction, renewed, left, kept, steepest, bent, count + 1

    first, nothing, count = preconditioned(right), (zeros(right), whole), jnp.zeros((), jnp.int32)
    start = (
        nothing[0],
        right,
        first,
        dot(right, first),
        whole,
        nothing,
        jnp.zeros_like(whole),
        jnp.asarray(False),
        count,
    )
    solution, *_, left, best, _, bent, count = jax.lax.while_loop(unfinished, iterate, start)
    solution, left = select(bent, best, (solution, left))
    residual = jnp.sqrt(left / jnp.where(whole > 0, whole, 1)).astype(jnp.float32)
    missed, bent = (~(left <= goal)).astype(jnp.int32), bent.astype(jnp.int32)
    products = count if diagonal is None else count + PROBES
    return solution, Solves(jnp.ones_like(missed), missed, bent, products, residual, residual)


def scales(operator: Callable[[Tree], Tree], like: Tree) -> Tree:
    """The scale d_i of every variable under a symmetric operator A: what its diagonal would be if A were diagonal, and rows of
    D^-1/2 A D^-1/2 of about one length if it is not.

    With random signs z, y = A D^-1/2 z has E y_i^2 = d_i where the rows are of one length; log d is the mean of 0 and the
    logarithms of y_i^2 that `PROBES` products show, each taken with the d found before it.  (Averages of z_i (A z)_i, the
    usual estimate of a diagonal, drown small entries in the errors of large ones.)  The signs are the same each time: an
    estimate of the hypergradient stays a function of its point and its rows.
    """
    leaves, structure = jax.tree.flatten(like)
    about = jnp.finfo(dtype_of(like))

    def probe(number: Any, logs: Tree) -> Tree:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), len(leaves))
        signs = [jax.random.rademacher(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
        scaled = jax.tree.map(lambda sign, log: sign * jnp.exp(-log / 2), jax.tree.unflatten(structure, signs), logs)
        image = jax.tree.map(jnp.abs, operator(scaled))
        largest = jnp.max(jnp.stack([jnp.max(leaf) for leaf in jax.tree.leaves(image)]))
        least = jnp.maximum(about.eps * largest, jnp.sqrt(about.tiny))  # a row of zeros has no scale
        share = 1 / (number + 2)
        return jax.tree.map(
            lambda log, size: log + jnp.asarray(share, log.dtype) * (2 * jnp.log(jnp.maximum(size, least)) - log),
            logs,
            image,
        )

    return jax.tree.map(jnp.exp, jax.lax.fori_loop(0, PROBES, probe, zeros(like)))


def conjugate_gradient(
    steps: int = 1000,
    tolerance: float = 1e-6,
    preconditioner: str | None = None,
    on_negative_curvature: str = "stop",
) -> ConjugateGradient:
    """The hypergradient by conjugate gradients, to a relative residual of ``tolerance`` or at most ``steps`` products.

    ``preconditioner="diagonal"`` spends ten products more on the scale of every inner variable, which pays where the scales
    differ a lot (docs/algorithms.md has a table).  Where the inner Hessian is not positive definite,
    ``on_negative_curvature="stop"`` goes on with the answer that left the smallest residual and counts it as missed; "refuse"
    ends the run with an error.

    A run's history says in ``solves``, ``solves_missed``, ``negative_curvature``, ``solve_products`` and ``solve_residual`` how
    the solves ended, and one warning at the end of the run says where some missed their tolerance.

    Args:
        steps: Products at most.
        tolerance: Relative residual to stop at.
        preconditioner: None or "diagonal".
        on_negative_curvature: "stop" or "refuse".

    Returns:
        An estimator for the argument ``hypergradient``.

    Raises:
        ValueError: A number is out of its range, or a word is not one of these.

    Examples:
        >>> import fedbilevel as fb
        >>> fb.conjugate_gradient(steps=20)
        ConjugateGradient(steps=20, tolerance=1e-06, preconditioner=None, on_negative_curvature='stop')
    """
    whole_number("steps", steps)
    positive("tolerance", tolerance)
    if preconditioner not in (None, "diagonal"):
        raise ValueError(f"preconditioner must be None or 'diagonal', not {preconditioner!r}.")
    if on_negative_curvature not in ("stop", "refuse"):
        raise ValueError(f"on_negative_curvature must be 'stop' or 'refuse', not {on_negative_curvature!r}.")
    return ConjugateGradient(steps, tolerance, preconditioner, on_negative_curvature)
