"""MEHA (also MESO): z is held near y, so that it is unique where the inner loss is not convex; gradients only.

R. Liu, Z. Liu, W. Yao, S. Zeng, J. Zhang, "Moreau Envelope for Nonconvex Bi-Level Optimization: A Single-loop and
Hessian-free Solution Strategy", ICML 2024.

g(x, y) is compared with its Moreau envelope, the minimum over z of g(x, z) + |z - y|^2 / (2 r).  With c_k = c_0 (k + 1)^p in
the k-th step of a client:

    K times:   z <- z - s (grad_y g(x, z; B) + (z - y) / r)
    then:      x <- x - eta (grad_x f(x, y) / c_k + grad_x g(x, y) - grad_x g(x, z))
               y <- y - s c_k / (1 + c_k) (grad_y f(x, y) / c_k + grad_y g(x, y) - (y - z) / r)        both from the same point

The minimum is unique if r is below 1/m, with m such that g + m/2 |y|^2 is convex in y.  The gap between g and its envelope
vanishes where y is a stationary point of g(x, .); for convex g, where it is a minimiser.

Local lower level: I steps, then x is averaged; up one vector of the size of x, down one and a number; y and z stay.  Global:
one step a round with K = 1, of the clients' mean losses; up a direction for each of x, y and z, down these three and a
number.  K + 3 gradients a step (3 with a global lower level), no second derivative; `fedbilevel.algorithms.penalty` has the
loop.

Differences from the paper: both updates from the same point; the step of y is s c_k / (1 + c_k), which grows to s, so that a
small c_k does no harm; no proximal step for a part of g that is not smooth.  Where the outer step sets itself the server
moves x along c_k times its direction.  x is projected onto X where the problem has a projection.  Clients, and steps that set
themselves, are ours.

Sources: the paper's abstract and summaries of it (p < 1/2, and a rate for p = 0 too), and BOAT
(github.com/callous-youth/BOAT, boat_torch/fo_ol/meso.py, August 2026), which has these updates with K = 1, p = 1/4 and 1/r as
its gamma_1, moves y first and x at the new y, and begins with c_0 = 0.2 whatever it was set to; we did not have the paper's
text.

Checked: iterates against a naive loop, both lower levels; that with p = 0 it ends at the stationary point known for
quadratics, at a distance of the order 1/c_0 from the minimiser; that y ends near a stationary point of an inner loss that is
not convex.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, NotNegative, Optimizer, OuterBatch, Positive, Step, bilevel
from fedbilevel.algorithms.penalty import Rule, made
from fedbilevel.plan import Algorithm
from fedbilevel.problem import BilevelProblem


def grows(arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments["growth"] >= 0.5:
        raise ValueError(f"growth must lie in [0, 0.5), not {arguments['growth']}: the theorem asks for it.")
    return arguments


@bilevel("either", grows)
def meha(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    penalty: Positive = 5.0,
    growth: NotNegative = 0.25,
    radius: Positive = 10.0,
    inner_steps: Count = 1,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """MEHA.  ``inner_step`` is s, ``outer_step`` eta, ``penalty`` c_0, ``growth`` p in [0, 1/2), ``radius`` r,
    ``inner_steps`` K, ``local_steps`` I; steps set themselves unless given.

    Args:
        problem: A `BilevelProblem` with either lower level.
        inner_step: Step of the inner variable, positive.  "auto": it sets itself.
        outer_step: Step of the outer variable, positive.  "auto": it sets itself.
        penalty: Weight of the inner loss at the start.
        growth: The weight grows with the step to this power, in [0, 1/2).
        radius: Of the proximal term; positive.
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
        >>> problem = random_quadratic(0, clients=3).problem()
        >>> fb.meha(problem, radius=0.5).name
        'meha'
    """

    def weight(time: Any) -> Any:
        start, power = (jnp.asarray(value, time.dtype) for value in (penalty, growth))
        return start * (time + 1) ** power

    rule = Rule(weight, shares=lambda weight, time: (1 / weight, 1 / (1 + weight)), radius=radius)
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer)
    return made(problem, rule, inner_step, inner_steps, (batch_size, outer_batch_size), above)
