"""AggITD: the series for the hypergradient runs along with the inner iterations, in the same exchanges.

P. Xiao, K. Ji, "Communication-Efficient Federated Hypergradient Computation via Aggregated Iterative Differentiation", ICML
2023.  A round is one outer iteration.  Q is drawn uniformly on 0 .. N-1; y^0 is the y of the round before; for t = 0 .. N-1:

    y^{t+1}:      from y^t by FedInn (see `fedbilevel.algorithms.nested`): mean gradient, then tau corrected local steps
    t = Q:        z = lambda N mean_i grad_y f_i(x, y^t)
    t > Q:        z = mean_i (I - lambda d2g_i/dy2(x, y^t)) z
    at the end:   x -= alpha mean_i [grad_x f_i(x, y^N) - (d2g_i/dxdy)(x, y^N) z]

In expectation over Q, z is lambda sum_Q prod_{t > Q} (I - lambda H_t) grad_y f(x, y^Q): iterative differentiation with the
clients' mean Hessians, of which nothing is sent but products.

Exchanges: a broadcast of x, N (2 N with tau > 1) and one for x.  Up per round and client: N inner gradients, N - Q inner
vectors for z, h, and with tau > 1 N inner variables; down: x, N + 1 inner variables, N - Q vectors z, and with tau > 1 N mean
gradients.

Differences from the paper: x takes one step of the server a round (the paper also allows corrected local steps for x); where
tau = 1 the server makes the clients' equal inner step; the same clients take part in all exchanges of a round; x is projected
onto X where the problem has a projection.
Steps set themselves unless they are given (`fedbilevel.algorithms.steps`): lambda and the step of y are 1/L with L
the clients' mean curvature, a number that each sends, and the server moves x
by its own rule.

Sources: notes on the paper and its abstract.  We had neither its text nor a program to compare with; that the estimator is the
right one rests on the checks below.

Checked: iterates against a naive loop; that the mean over Q of one round's x is the one of the sum above; that on heterogeneous
quadratics the expected steps end at the known root of FedNest's truncated series, at a distance from the minimiser that
shrinks like (1 - lambda mu)^N.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, Optimizer, OuterBatch, Step, bilevel
from fedbilevel.algorithms.local import Told
from fedbilevel.algorithms.nested import BROADCAST, Held, Nested, draw_terms, enroll
from fedbilevel.calculus import Tree, scale, zeros
from fedbilevel.plan import Algorithm, Phase, Repeat
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import LocalData


class Server(NamedTuple):
    """x, y, the mean gradient q, z, the Q drawn, and what steps follow from where they set themselves."""

    outer: Tree
    inner: Tree
    direction: Tree
    adjoint: Tree
    factors: jax.Array
    largest: Any
    kept: Any


class Position(NamedTuple):
    inner: Tree
    adjoint: Tree
    largest: Any


class Reply(NamedTuple):
    """grad_y g, and what becomes z: grad_y f or (I - lambda H) z."""

    gradient: Told
    adjoint: Tree


@bilevel("global")
def aggitd(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    series_step: Step = "auto",
    terms: Count = 5,
    local_steps: Count = 1,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """AggITD.  ``inner_step`` is the step of y, ``outer_step`` alpha, ``series_step`` lambda, ``terms`` N, ``local_steps``
    tau.

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        inner_step: Step of the inner variable, positive.  "auto": it sets itself.
        outer_step: Step of the outer variable, positive.  "auto": it sets itself.
        series_step: Step of the Neumann series, below 1/L of the mean inner loss.  "auto": 1/L.
        terms: Terms of the series for the inverse Hessian.  Also the steps of the inner variable in a round.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        outer_optimizer: An optax transformation for the outer variable at the server, instead of ``outer_step``.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range, or the problem has the other lower level.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.tasks import random_quadratic
        >>> problem = random_quadratic(0, clients=3).problem("global")
        >>> fb.aggitd(problem, terms=5, series_step=0.5).name
        'aggitd'
    """
    above, below = (
        steps.Outer(problem, outer_step, terms * local_steps, outer_optimizer),
        steps.Shared(problem.inner_loss, (inner_step, series_step)),
    )
    nested = Nested(problem, batch_size, outer_batch_size, local_steps, above, below)

    def begin(inner: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Reply, Held]:
        first, second = jax.random.split(key)
        gradient, local = nested.gradient(inner, local, data, first)
        start, local = nested.series_start(inner, local, data, second)
        return Reply(gradient, start), local

    def multiply(message: Position, local: Held, data: LocalData, key: jax.Array) -> tuple[Reply, Held]:
        first, second = jax.random.split(key)
        gradient, local = nested.gradient(message.inner, local, data, first)
        image, local = nested.factor(below.rates(message.largest)[1], message.adjoint, local, data, second)
        return Reply(gradient, image), local

    def share(message: Position, local: Held, data: LocalData, key: jax.Array) -> tuple[Tree, Held]:
        return nested.hypergradient(message.adjoint, local._replace(inner=message.inner), data, key)

    def first_term(server: Server, mean: Reply) -> Server:
        step = below.rates(mean.gradient.largest)[1]
        return next_term(server, mean._replace(adjoint=scale(step * terms, mean.adjoint)))

    def next_term(server: Server, mean: Reply) -> Server:
        return nested.settle(server, mean.gradient)._replace(adjoint=mean.adjoint)  # type: ignore[no-any-return]

    def position(server: Server) -> Position:
        return Position(server.inner, server.adjoint, server.largest)

    def init(key: jax.Array) -> Server:
        outer, inner = problem.start(key)
        of_steps = below.none_yet(inner), above.start(outer)
        return Server(outer, inner, nested.no_direction(inner), zeros(inner), jnp.zeros((), jnp.int32), *of_steps)

    anchor, *local = nested.inner_phases()
    factors = (Phase("factor", position, multiply, next_term), *local)
    return Algorithm(
        init,
        partial(enroll, problem, below),
        plan=nested.plan(
            BROADCAST,
            draw_terms(terms),
            Repeat((anchor, *local), terms - 1, lambda server: server.factors),
            Phase("series", lambda server: server.inner, begin, first_term),
            *local,
            Repeat(factors, terms - 1, lambda server: terms - 1 - server.factors),
            Phase("outer", position, share, nested.descend),
        ),
        view=nested.view,
        check=above.check,
        remark=lambda server: above.remark(server.kept),
    )
