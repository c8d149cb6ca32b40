"""PBGD: x and y descend the penalised loss together, the penalty rises to a cap; gradients only.

H. Shen, T. Chen, "On Penalty-based Bilevel Gradient Descent Method", ICML 2023 (the value gap as penalty, V-PBGD).

With gamma_k = min(gamma_0 + d k, cap) in the k-th step of a client:

    K times:   z <- z - s grad_y g(x, z; B)
    then:      x <- x - eta / (1 + gamma_k) (grad_x f(x, y) + gamma_k (grad_x g(x, y) - grad_x g(x, z)))
               y <- y - s / (1 + gamma_k) (grad_y f(x, y) + gamma_k grad_y g(x, y))            both from the same point

Local lower level: I steps, then x is averaged; up one vector of the size of x, down one and a number; y and z stay.  Global:
one step a round with K = 1, of the clients' mean losses; up a direction for each of x, y and z, down these three and a
number.  K + 3 gradients a step (3 with a global lower level), no second derivative; `fedbilevel.algorithms.penalty` has the
loop.

It ends at the minimiser of the problem penalised by the cap: at a distance of the order 1/cap from the bilevel one.

Differences from the paper: steps eta and s for x and y, where the paper has one; both are divided by 1 + gamma_k, as the
penalised loss curves the more the larger gamma_k.  Where the outer step sets itself the server moves x, and does not divide.
x is projected onto X where the problem has a projection; y is free.  Clients, and steps that set themselves, are ours.

Sources: the paper's abstract, and BOAT (github.com/callous-youth/BOAT, boat_torch/fo_ol/pgdo.py, August 2026), which has this
update with two optimizers whose steps are divided by max(gamma_k, 1), and a gamma_k that rises linearly to a cap; we did not
have the paper's text.

Checked: iterates against a naive loop, both lower levels; that it ends at the minimiser of the penalised problem, known for
quadratics, and how far that is from the right one.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, NotNegative, Optimizer, OuterBatch, Positive, Step, bilevel
from fedbilevel.algorithms.penalty import Rule, made
from fedbilevel.plan import Algorithm
from fedbilevel.problem import BilevelProblem


def rises(arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments["cap"] < arguments["penalty"]:
        raise ValueError(
            f"cap={arguments['cap']} is below penalty={arguments['penalty']}: the penalty rises from the one to the other."
        )
    return arguments


@bilevel("either", rises)
def pbgd(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    penalty: Positive = 1.0,
    increase: NotNegative = 0.1,
    cap: Positive = 30.0,
    inner_steps: Count = 1,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """PBGD.  ``inner_step`` is s, ``outer_step`` eta, ``penalty`` gamma_0, ``increase`` d, ``inner_steps`` K,
    ``local_steps`` I; steps set themselves unless given.

    Args:
        problem: A `BilevelProblem` with either lower level.
        inner_step: Step of the inner variable, positive.  "auto": it sets itself.
        outer_step: Step of the outer variable, positive.  "auto": it sets itself.
        penalty: Weight of the inner loss at the start.
        increase: How much the weight grows in a step; not negative.
        cap: Weight of the inner loss at most.
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
        >>> fb.pbgd(problem).name
        'pbgd'
    """

    def weight(time: Any) -> Any:
        start, more, most = (jnp.asarray(value, time.dtype) for value in (penalty, increase, cap))
        return jnp.minimum(start + more * time, most)

    rule = Rule(weight, shares=lambda weight, time: (1 / (1 + weight), 1 / (1 + weight)))
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer)
    return made(problem, rule, inner_step, inner_steps, (batch_size, outer_batch_size), above)
