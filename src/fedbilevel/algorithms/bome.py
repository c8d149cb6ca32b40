"""BOME: the penalty is the smallest with which the inner loss still falls; gradients only.

B. Liu, M. Ye, S. Wright, P. Stone, Q. Liu, "BOME! Bilevel Optimization Made Easy: A Simple First-Order Approach", NeurIPS
2022.

With q(x, y) = g(x, y) - g(x, z), z held fixed, in the k-th step of a client:

    z = y, then K times   z <- z - s grad_y g(x, z; B)
    lambda = max(b |grad q|^2 - <grad f, grad q>, 0) / |grad q|^2
    x <- x - eta / sqrt(k + 1) (grad_x f + lambda grad_x q)        y <- y - s / sqrt(k + 1) (grad_y f + lambda grad_y q)

Along such a path q falls at least as fast as b |grad q|^2 says ("dynamic barrier").

Local lower level: every client has a q and so a lambda of its own.  I steps, then x is averaged; up one vector of the size of
x, down one and a number; y and z stay.  The gradients in lambda are those in y alone: x moves by the mean of all clients, and
at the solution no client's own hypergradient vanishes.  With x among them, weighed by its step, it stopped at 0.42 from the
minimiser of quadratics, having begun at 1.9.

Global: there is one q, the clients' mean, and the server makes lambda from the mean gradients in x and y, then one step of
all.  Clients send the gradients of f and q and the direction of z; z makes one step a round from where it was.  Up per round
and client:  2 x + 3 y, down: x + 2 y and a number.

K + 3 gradients a step (3 with a global lower level), no second derivative; `fedbilevel.algorithms.penalty` has the loop.

Nothing bounds lambda across the gradient of q: y swings, and lambda settles near 1 over its step and its curvature.  A
constant step of y leaves a bias of its own order, so both steps shrink.  Convergence is slow at the end.

Differences from the paper: those above; steps for x and y, where the paper has one for both, constant, and another for z,
while here s is that of z too.  Of the two choices of the paper for the barrier this is b |grad q|^2.  x is projected onto X
where the problem has a projection.  Clients, and steps that set themselves, are ours.

Sources: the paper's abstract and a published summary of it, and the solver of benchopt/benchmark_bilevel (solvers/bome.py,
May 2025), which has this lambda, with constant steps for x and y; we did not have the paper's text.

Checked: iterates against a naive loop, both lower levels; that it approaches the known minimiser of heterogeneous quadratics.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, MaybeCount, Optimizer, OuterBatch, Positive, Step, bilevel
from fedbilevel.algorithms.penalty import Rule, made
from fedbilevel.plan import Algorithm
from fedbilevel.problem import BilevelProblem


def followed(arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments["inner_steps"] is None:
        arguments["inner_steps"] = 10 if arguments["problem"].lower_level == "local" else 1
    return arguments


@bilevel("either", followed)
def bome(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    barrier: Positive = 0.5,
    inner_steps: MaybeCount = None,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """BOME.  ``inner_step`` is s, ``outer_step`` eta, ``barrier`` b, ``inner_steps`` K (10; 1 with a global lower level),
    ``local_steps`` I; steps set themselves unless given.

    Args:
        problem: A `BilevelProblem` with either lower level.
        inner_step: Step of the inner variable, positive.  "auto": it sets itself.
        outer_step: Step of the outer variable, positive.  "auto": it sets itself.
        barrier: How fast the inner loss must fall; positive.
        inner_steps: Steps of the inner variables for each step of the outer one; None: 10, or 1 with a global lower level.
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
        >>> fb.bome(problem, inner_steps=3).name
        'bome'
    """

    def slower(weight: Any, time: Any) -> tuple[Any, Any]:
        share = 1 / jnp.sqrt(time + 1)
        return share, share

    rule = Rule(None, slower, restarts=True, barrier=barrier)
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer)
    assert inner_steps is not None  # by `followed`
    return made(problem, rule, inner_step, inner_steps, (batch_size, outer_batch_size), above)
