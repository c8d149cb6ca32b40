"""FedNest: corrected local steps for y, a federated Neumann series for the adjoint, corrected local steps for x.

D. A. Tarzanagh, M. Li, C. Thrampoulidis, S. Oymak, "FedNest: Federated Bilevel, Minimax, and Compositional Optimization",
ICML 2022.  A round is one outer iteration:

    FedInn, T times:   q = mean_i grad_y g_i(x, y);   tau times: y_i -= (beta/tau) (grad_y g_i(x, y_i) - grad_y g_i(x, y) + q)
                       y = mean_i y_i
    FedIHGP:           N' uniform on 0 .. N-1;   p = N s mean_i grad_y f_i(x, y);   N' times: p = mean_i (I - s d2g_i/dy2) p
    FedOut:            h = mean_i [grad_x f_i - (d2g_i/dxdy) p]
                       tau times: x_i -= (alpha/tau) (grad_x f_i(x_i, y) - grad_x f_i(x, y) + h);   x = mean_i x_i

In expectation over N', p is the series s sum_{n<N} (I - s H)^n grad_y f with H the clients' *mean* Hessian (s = 1/l in the
paper), up to (1 - s mu)^N of H^-1 grad_y f.  ``series="sum"`` adds the terms instead of drawing one: the same expectation, no
variance, N - 1 products always.

Exchanges: a broadcast of x, 2 T (T with tau = 1), 1 + N' (N with "sum"), 2 (1 with tau = 1).  Up per round and client, in
vectors: T q's and T y's, 1 + N' of y's size, h and x; down: the same without the first, and x once more.

Differences from the paper: the same clients take part in all exchanges of a round; where tau = 1 the local steps of all clients
are equal and the server makes them, without a second exchange; x is projected onto X where the problem has a projection.

Sources: notes on the paper's three algorithm boxes, and the authors' program (github.com/ucr-optml/FedNest).  The program adds
the terms of the series, as "sum" does, but between two means it multiplies each client's vector by that client's own Hessian,
and it leaves out the factor s; here the mean follows every factor, as in the boxes.

Checked: iterates against a naive loop; that the mean over N' of one round's x is the one of the truncated series; that on
heterogeneous quadratics with tau = 2 ("sum") it converges to the known root of the truncated series, and that this lies at a
distance from the minimiser that shrinks like (1 - s mu)^N.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.coupled import check_global
from fedbilevel.algorithms.local import check_rates, settle_outer_batch
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
)
from fedbilevel.calculus import Calls, Tree, add, scale, step_along, subtract, zeros
from fedbilevel.plan import Algorithm, Phase, Plan, Repeat, View
from fedbilevel.problem import BilevelProblem, whole_number
from fedbilevel.sampling import Batches, LocalData, draw_round


class Server(NamedTuple):
    """x, y, the mean gradient q, the newest term of the series and the sum of all so far, the N' drawn, and h."""

    outer: Tree
    inner: Tree
    direction: Tree
    term: Tree
    adjoint: Tree
    factors: jax.Array
    outer_direction: Tree


class Reply(NamedTuple):
    outer: Tree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("inner_step", "outer_step", "series_step"),
    meta_fields=("problem", "terms", "inner_rounds", "local_steps", "batch_size", "outer_batch_size", "series"),
)
@dataclass(frozen=True)
class Settings:
    problem: BilevelProblem
    inner_step: Any
    outer_step: Any
    series_step: Any
    terms: int
    inner_rounds: int
    local_steps: int
    batch_size: int | None
    outer_batch_size: int | None
    series: str


def fednest(
    problem: BilevelProblem,
    inner_step: float = 0.1,
    outer_step: float = 0.1,
    series_step: float = 0.5,
    terms: int = 5,
    inner_rounds: int = 1,
    local_steps: int = 5,
    batch_size: int | None = None,
    outer_batch_size: int | str | None = None,
    series: str = "random",
) -> Algorithm:
    """FedNest.  ``inner_step`` is beta, ``outer_step`` alpha, ``series_step`` s = 1/l, ``terms`` N, ``inner_rounds`` T,
    ``local_steps`` tau; ``series`` draws the length of the series ("random", the paper's) or adds its terms ("sum")."""
    check_global("fednest", problem, local_steps, batch_size, outer_batch_size)
    check_rates(inner_step=inner_step, outer_step=outer_step, series_step=series_step)
    whole_number("terms", terms)
    whole_number("inner_rounds", inner_rounds)
    if series not in ("random", "sum"):
        raise ValueError(f"series must be 'random' or 'sum', not {series!r}.")
    outer_batch = settle_outer_batch(batch_size, outer_batch_size)
    sizes = (local_steps, batch_size, outer_batch)
    return build(Settings(problem, inner_step, outer_step, series_step, terms, inner_rounds, *sizes, series))


def build(settings: Settings) -> Algorithm:
    problem, count, summed = settings.problem, settings.local_steps, settings.series == "sum"
    sizes = (settings.batch_size, settings.outer_batch_size)

    def begin(inner: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Tree, Held]:
        return inner_gradient_of_outer(problem, local._replace(inner=inner), data, key, settings.outer_batch_size)

    def first_term(server: Server, mean: Tree) -> Server:
        term = scale(settings.series_step * (1 if summed else settings.terms), mean)
        return server._replace(term=term, adjoint=term)

    def multiply(term: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Tree, Held]:
        return factor(problem, term, settings.series_step, local, data, key, settings.batch_size)

    def next_term(server: Server, mean: Tree) -> Server:
        return server._replace(term=mean, adjoint=add(server.adjoint, mean) if summed else mean)

    def share(adjoint: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Tree, Held]:
        return hypergradient_share(problem, adjoint, local, data, key, sizes)

    def settle(server: Server, mean: Tree) -> Server:
        if count == 1:
            return server._replace(outer=problem.into_set(step_along(server.outer, -settings.outer_step, mean)))
        return server._replace(outer_direction=mean)

    def outer_steps(direction: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Reply, Held]:
        def walk(outer: Tree, drawn: Any) -> tuple[Tree, None]:
            batch = Batches(data, drawn).val(0)
            now, there = (jax.grad(problem.outer_loss)(point, local.inner, batch) for point in (outer, local.outer))
            along = add(subtract(now, there), direction)
            return problem.into_set(step_along(outer, -settings.outer_step / count, along)), None

        draws = draw_round(data, key, count, batch_size=None, outer_batch_size=settings.outer_batch_size, val_batches=1)
        outer, _ = jax.lax.scan(walk, local.outer, draws, length=count)
        return Reply(outer), local._replace(calls=local.calls.plus(Calls(gradients=2 * count)))

    def init(key: jax.Array) -> Server:
        outer, inner = problem.init(key)
        outer, zero = problem.into_set(outer), zeros(inner)
        waiting = None if count == 1 else zeros(outer)
        return Server(outer, inner, no_direction(inner, count), zero, zero, jnp.zeros((), jnp.int32), waiting)

    factors = Phase("factor", lambda server: server.term, multiply, next_term)
    turns = None if summed else (lambda server: server.factors)
    plan: Plan = (
        broadcast(),
        Repeat(inner_phases(problem, settings.inner_step, count, settings.batch_size), settings.inner_rounds),
        *(() if summed else (draw_terms(settings.terms),)),
        Phase("series", lambda server: server.inner, begin, first_term),
        Repeat((factors,), settings.terms - 1, turns),
        Phase("hypergradient", lambda server: server.adjoint, share, settle),
    )
    if count > 1:

        def absorb(server: Server, mean: Reply) -> Server:
            return server._replace(outer=problem.into_set(mean.outer))

        plan = (*plan, Phase("outer", lambda server: server.outer_direction, outer_steps, absorb))
    return Algorithm(
        name="fednest",
        init=init,
        enroll=partial(enroll, problem),
        plan=plan,
        outer=lambda server: server.outer,
        view=lambda server, local: View(inner=server.inner, calls=local.calls),
        objective=lambda outer, inner, data: problem.outer_loss(outer, inner, data.whole("val")),
        check=lambda data: problem.check(data, *sizes),
        settings=settings,
        build=build,
        local_steps=count,
        problem=problem,
    )
