"""F2SA: a penalty that grows without end, y and z side by side; gradients only.

J. Kwon, D. Kwon, S. Wright, R. Nowak, "A Fully First-Order Method for Stochastic Bilevel Optimization", ICML 2023.

With lambda_k = lambda_0 + d k in the k-th step of a client:

    K times:   y <- y - a_k (grad_y f(x, y; B_f) + lambda_k grad_y g(x, y; B))        z <- z - s grad_y g(x, z; B)
    then:      x <- x - eta (grad_x f(x, y; B_f) + lambda_k (grad_x g(x, y; B) - grad_x g(x, z; B)))

Local lower level: I steps, then x is averaged; up one vector of the size of x, down one and a number; y and z stay.  Global:
one step a round with K = 1, of the clients' mean losses; up a direction for each of x, y and z, down these three and a
number.  3 K + 3 gradients a step (3 with a global lower level), no second derivative; `fedbilevel.algorithms.penalty` has the
loop.

Differences from the paper: a_k = s / (1 + lambda_k), which keeps a_k lambda_k below s, and serves as long as f curves no more
than g in y.  y and z see the same training minibatches: they then lag and shake alike, and what lambda_k multiplies stays
small.  The paper's steps and d shrink with k; here they are constant.  x is projected onto X where the problem has a
projection.  Clients, and steps that set themselves, are ours.

Sources: the paper's abstract, and the solver of benchopt/benchmark_bilevel (solvers/f2sa.py, May 2025), which has this update
with minibatches of their own for y and z; we did not have the paper's text.

Checked: iterates against a naive loop, both lower levels; that with d = 0 it ends at the minimiser of the penalised problem,
known for quadratics, at a distance of the order 1/lambda from the right one; that no Hessian product is counted.
"""

from __future__ import annotations

import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, NotNegative, Optimizer, OuterBatch, Positive, Step, bilevel
from fedbilevel.algorithms.penalty import Rule, made
from fedbilevel.plan import Algorithm
from fedbilevel.problem import BilevelProblem


@bilevel("either")
def f2sa(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    penalty: Positive = 1.0,
    increase: NotNegative = 0.1,
    inner_steps: Count = 1,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """F2SA.  ``inner_step`` is s, ``outer_step`` eta, ``penalty`` lambda_0, ``increase`` d, ``inner_steps`` K,
    ``local_steps`` I; steps set themselves unless given.

    Args:
        problem: A `BilevelProblem` with either lower level.
        inner_step: Step of the inner variable, positive.  "auto": it sets itself.
        outer_step: Step of the outer variable, positive.  "auto": it sets itself.
        penalty: Weight of the inner loss at the start.
        increase: How much the weight grows in a step; not negative.
        inner_steps: Steps of the inner variables for each step of the outer one.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        outer_optimizer: An optax transformation for the outer variable at the server, instead of ``outer_step``.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.tasks import random_quadratic
        >>> quadratic = random_quadratic(0, clients=3)
        >>> result = fb.simulate(fb.f2sa(quadratic.problem()), quadratic.data(), rounds=200, record_every=None)
        >>> bool(abs(result.outer - quadratic.minimiser()).max() < 0.05)
        True
    """
    rule = Rule(
        weight=lambda time: jnp.asarray(penalty, time.dtype) + jnp.asarray(increase, time.dtype) * time,
        shares=lambda weight, time: (1, 1 / (1 + weight)),
        together=True,
    )
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer)
    return made(problem, rule, inner_step, inner_steps, (batch_size, outer_batch_size), above)
