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

Sources: notes on the paper and its abstract.  We had neither its text nor a program to compare with; that the estimator is the
right one rests on the checks below.

Checked: iterates against a naive loop; that the mean over Q of one round's x is the one of the sum above; that on heterogeneous
quadratics the expected steps end at the known root of FedNest's truncated series, at a distance from the minimiser that
shrinks like (1 - lambda mu)^N.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.coupled import check_global
from fedbilevel.algorithms.local import check_rates, inner_gradients, settle_outer_batch
from fedbilevel.algorithms.nested import (
    Held,
    broadcast,
    draw_terms,
    enroll,
    factor,
    hypergradient_share,
    inner_gradient_of_outer,
    inner_phases,
    no_direction,
    one_batch,
)
from fedbilevel.calculus import Calls, Tree, scale, step_along, zeros
from fedbilevel.plan import Algorithm, Phase, Repeat, View
from fedbilevel.problem import BilevelProblem, whole_number
from fedbilevel.sampling import LocalData


class Server(NamedTuple):
    """x, y, the mean gradient q, z, and the Q drawn."""

    outer: Tree
    inner: Tree
    direction: Tree
    adjoint: Tree
    factors: jax.Array


class Position(NamedTuple):
    inner: Tree
    adjoint: Tree


class Reply(NamedTuple):
    """grad_y g, and what becomes z: grad_y f or (I - lambda H) z."""

    gradient: Tree
    adjoint: Tree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("inner_step", "outer_step", "series_step"),
    meta_fields=("problem", "terms", "local_steps", "batch_size", "outer_batch_size"),
)
@dataclass(frozen=True)
class Settings:
    problem: BilevelProblem
    inner_step: Any
    outer_step: Any
    series_step: Any
    terms: int
    local_steps: int
    batch_size: int | None
    outer_batch_size: int | None


def aggitd(
    problem: BilevelProblem,
    inner_step: float = 0.1,
    outer_step: float = 0.1,
    series_step: float = 0.5,
    terms: int = 5,
    local_steps: int = 1,
    batch_size: int | None = None,
    outer_batch_size: int | str | None = None,
) -> Algorithm:
    """AggITD.  ``inner_step`` is the step of y, ``outer_step`` alpha, ``series_step`` lambda, ``terms`` N, ``local_steps``
    tau."""
    check_global("aggitd", problem, local_steps, batch_size, outer_batch_size)
    check_rates(inner_step=inner_step, outer_step=outer_step, series_step=series_step)
    whole_number("terms", terms)
    outer_batch = settle_outer_batch(batch_size, outer_batch_size)
    return build(Settings(problem, inner_step, outer_step, series_step, terms, local_steps, batch_size, outer_batch))


def build(settings: Settings) -> Algorithm:
    problem, count, terms = settings.problem, settings.local_steps, settings.terms
    sizes = (settings.batch_size, settings.outer_batch_size)
    anchor, *steps = inner_phases(problem, settings.inner_step, count, settings.batch_size)

    def gradient(inner: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Tree, Held]:
        (found,) = inner_gradients(problem, ((local.outer, inner),), one_batch(data, key, settings.batch_size))
        return found, local._replace(inner=inner, calls=local.calls.plus(Calls(gradients=1)))

    def begin(inner: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Reply, Held]:
        first, second = jax.random.split(key)
        found, local = gradient(inner, local, data, first)
        start, local = inner_gradient_of_outer(problem, local, data, second, settings.outer_batch_size)
        return Reply(found, start), local

    def multiply(message: Position, local: Held, data: LocalData, key: jax.Array) -> tuple[Reply, Held]:
        first, second = jax.random.split(key)
        found, local = gradient(message.inner, local, data, first)
        image, local = factor(problem, message.adjoint, settings.series_step, local, data, second, settings.batch_size)
        return Reply(found, image), local

    def first_term(server: Server, mean: Reply) -> Server:
        adjoint = scale(settings.series_step * terms, mean.adjoint)
        return anchor.absorb(server, mean.gradient)._replace(adjoint=adjoint)  # type: ignore[no-any-return]

    def next_term(server: Server, mean: Reply) -> Server:
        return anchor.absorb(server, mean.gradient)._replace(adjoint=mean.adjoint)  # type: ignore[no-any-return]

    def share(message: Position, local: Held, data: LocalData, key: jax.Array) -> tuple[Tree, Held]:
        return hypergradient_share(problem, message.adjoint, local._replace(inner=message.inner), data, key, sizes)

    def descend(server: Server, mean: Tree) -> Server:
        return server._replace(outer=problem.into_set(step_along(server.outer, -settings.outer_step, mean)))

    def position(server: Server) -> Position:
        return Position(server.inner, server.adjoint)

    def init(key: jax.Array) -> Server:
        outer, inner = problem.init(key)
        waiting = no_direction(inner, count)
        return Server(problem.into_set(outer), inner, waiting, zeros(inner), jnp.zeros((), jnp.int32))

    return Algorithm(
        name="aggitd",
        init=init,
        enroll=partial(enroll, problem),
        plan=(
            broadcast(),
            draw_terms(terms),
            Repeat((anchor, *steps), terms - 1, lambda server: server.factors),
            Phase("series", lambda server: server.inner, begin, first_term),
            *steps,
            Repeat(
                (Phase("factor", position, multiply, next_term), *steps),
                terms - 1,
                lambda server: terms - 1 - server.factors,
            ),
            Phase("outer", position, share, descend),
        ),
        outer=lambda server: server.outer,
        view=lambda server, local: View(inner=server.inner, calls=local.calls),
        objective=lambda outer, inner, data: problem.outer_loss(outer, inner, data.whole("val")),
        check=lambda data: problem.check(data, *sizes),
        settings=settings,
        build=build,
        local_steps=count,
        problem=problem,
    )
