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
Steps set themselves unless they are given (`fedbilevel.algorithms.steps`): beta and s are 1/L with L
the clients' mean curvature, a number that each sends, and the server moves x by its own
rule, with no exchange for local steps of x.

Sources: notes on the paper's three algorithm boxes, and the authors' program (github.com/ucr-optml/FedNest).  The program adds
the terms of the series, as "sum" does, but between two means it multiplies each client's vector by that client's own Hessian,
and it leaves out the factor s; here the mean follows every factor, as in the boxes.

Checked: iterates against a naive loop; that the mean over N' of one round's x is the one of the truncated series; that on
heterogeneous quadratics with tau = 2 ("sum") it converges to the known root of the truncated series, and that this lies at a
distance from the minimiser that shrinks like (1 - s mu)^N.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, Optimizer, OuterBatch, Step, bilevel, one_of
from fedbilevel.algorithms.local import Reply, Told
from fedbilevel.algorithms.nested import BROADCAST, Held, Nested, draw_terms, enroll
from fedbilevel.calculus import Calls, Tree, add, counted, scale, step_along, subtract, zeros
from fedbilevel.plan import Algorithm, Phase, Repeat
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler


class Server(NamedTuple):
    """x, y, the mean gradient q, the newest term of the series and the sum of all so far, the N' drawn, h, and what steps
    follow from where they set themselves: the clients' mean curvature, the way of x."""

    outer: Tree
    inner: Tree
    direction: Tree
    term: Tree
    adjoint: Tree
    factors: jax.Array
    outer_direction: Tree
    largest: Any
    kept: Any


@bilevel("global")
def fednest(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    series_step: Step = "auto",
    terms: Count = 5,
    inner_rounds: Count = 1,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    series: Annotated[str, one_of("random", "sum")] = "random",
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """FedNest.  ``inner_step`` is beta, ``outer_step`` alpha, ``series_step`` s = 1/l, ``terms`` N, ``inner_rounds`` T,
    ``local_steps`` tau; ``series`` draws the length of the series ("random", the paper's) or adds its terms ("sum").

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        inner_step: Step of the inner variable, positive.  "auto": it sets itself.
        outer_step: Step of the outer variable, positive.  "auto": it sets itself.
        series_step: Step of the Neumann series, below 1/L of the mean inner loss.  "auto": 1/L.
        terms: Terms of the series for the inverse Hessian.  Each costs an exchange.
        inner_rounds: Rounds that improve the inner variable before each step of the outer one.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        series: "random" draws the length of the series, as the paper does; "sum" adds its terms.
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
        >>> fb.fednest(problem, series="sum").name
        'fednest'
    """
    above, below = (
        steps.Outer(problem, outer_step, local_steps, outer_optimizer),
        steps.Shared(problem.inner_loss, (inner_step, series_step)),
    )
    nested = Nested(problem, batch_size, outer_batch_size, local_steps, above, below)
    summed, walks = series == "sum", local_steps > 1 and not above.sums

    def first_term(server: Server, mean: Tree) -> Server:
        term = scale(below.rates(server.largest)[1] * (1 if summed else terms), mean)
        return server._replace(term=term, adjoint=term)

    def factor(message: Told, local: Held, data: LocalData, key: jax.Array) -> tuple[Tree, Held]:
        return nested.factor(below.rates(message.largest)[1], message.value, local, data, key)

    def next_term(server: Server, mean: Tree) -> Server:
        return server._replace(term=mean, adjoint=add(server.adjoint, mean) if summed else mean)

    def settle(server: Server, mean: Tree) -> Server:
        if walks:
            return server._replace(outer_direction=mean)
        return nested.descend(server, mean)  # type: ignore[no-any-return]

    def outer_steps(direction: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Reply, Held]:
        def step(outer: Tree, batches: Batches) -> tuple[Tree, None]:
            batch = batches.val(0)
            now, there = (jax.grad(problem.outer_loss)(point, local.inner, batch) for point in (outer, local.outer))
            along = add(subtract(now, there), direction)
            return problem.into_set(step_along(outer, -outer_step / local_steps, along)), None

        sampler = Sampler(None, outer_batch_size, val_batches=1)
        outer, _ = sampler.walk(step, local.outer, data, key, local_steps)
        return Reply(outer), counted(local, Calls(gradients=2 * local_steps))

    def absorb(server: Server, mean: Reply) -> Server:
        return server._replace(outer=problem.into_set(mean.outer))

    def init(key: jax.Array) -> Server:
        (outer, inner), waiting = problem.start(key), nested.no_direction
        zero, none = zeros(inner), jnp.zeros((), jnp.int32)
        of_steps = below.none_yet(inner), above.start(outer)
        return Server(outer, inner, waiting(inner), zero, zero, none, waiting(outer) if walks else None, *of_steps)

    multiply = Phase("factor", lambda server: Told(server.term, server.largest), factor, next_term)
    outer = Phase("outer", lambda server: server.outer_direction, outer_steps, absorb)
    return Algorithm(
        init,
        partial(enroll, problem, below),
        plan=nested.plan(
            BROADCAST,
            Repeat(nested.inner_phases(), inner_rounds),
            *(() if summed else (draw_terms(terms),)),
            Phase("series", lambda server: server.inner, nested.series_start, first_term),
            Repeat((multiply,), terms - 1, None if summed else lambda server: server.factors),
            Phase("hypergradient", lambda server: server.adjoint, nested.hypergradient, settle),
            *((outer,) if walks else ()),
        ),
        view=nested.view,
        check=above.check,
        remark=lambda server: above.remark(server.kept),
    )
