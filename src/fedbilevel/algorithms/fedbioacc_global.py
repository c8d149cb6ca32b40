"""FedBiOAcc with a global lower level: recursive momenta for x, y and the adjoint u, all six vectors averaged every I steps.

J. Li, F. Huang, H. Huang, "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level
Problems", NeurIPS 2023 (FedBiOAcc).

With z = (x, y, u), d(z; B) = (nu, omega, q) the directions of `fedbio_global` and alpha_t = delta / (u_0 + sigma^2 t)^(1/3),
on client m with the same minibatches at both points:

    m_t = d(z_t; B) + (1 - c alpha_{t-1}^2) (m_{t-1} - d(z_{t-1}; B))        one c for each part; m_1 = d(z_1; B)
    x_{t+1} = x_t - eta alpha_t m_t^x       y_{t+1} = y_t - gamma alpha_t m_t^y       u_{t+1} = Proj_r(u_t - tau alpha_t m_t^u)

After I steps z_{t+1} *and* m_t are averaged; each client keeps its own z_t for the next correction.  Every round is one
exchange.  Up per round and client: x, y, u and their three momenta; down: the same and the step number.

Averaging the momenta is what removes client drift: a client's own momentum keeps pushing it along its own direction
(docs/algorithms.md has the measurement).  ``average_momenta=False`` is that variant, for comparison: three vectors each way.

Differences from the paper: those of `fedbio_global`; the factors 1 - c alpha^2 are kept within [0, 1]; a client that missed
a round compares with the point it receives, since its own no longer belongs to the averaged momenta.  Steps set themselves
unless they are given (`fedbilevel.algorithms.steps`): y and u move by 1/L with L the clients' mean curvature, a number that
each sends (shared out over the local steps where y does not keep its way: momenta forget, and do not correct all drift), x
stands still within a round, and the server moves it along the averaged momentum; x itself then does not go up.

Sources: as for `fedbio_global`.  That the momenta are averaged too stands in the notes, and was measured both ways.

Checked: iterates against a naive loop; convergence to the known minimiser of heterogeneous quadratics, and the drift of
`fedbio_global` and of the variant without averaged momenta beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import coupled, steps
from fedbilevel.algorithms.arguments import (
    Batch,
    Count,
    Flag,
    MaybePositive,
    Optimizer,
    OuterBatch,
    Step,
    bilevel,
)
from fedbilevel.algorithms.coupled import Meeting, Point
from fedbilevel.algorithms.fedbioacc import EVEN, TUNED, anew
from fedbilevel.algorithms.local import corrected, cube_root_rate, share_kept
from fedbilevel.calculus import Calls, Tree, counted, dtype_of, select, zeros
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData


class Message(NamedTuple):
    """z_{t+1}, the averaged momenta (None where clients keep theirs), the steps t done, and the mean curvature where steps
    follow from it."""

    point: Point
    momenta: Point | None
    step: jax.Array
    largest: Any


class Server(NamedTuple):
    """What it sends, and what steps follow from where they set themselves: the ways of x and of y."""

    point: Point
    momenta: Point | None
    step: jax.Array
    largest: Any
    kept: Any
    heading: Any


class Local(NamedTuple):
    """What stays on a client: z_t, its momenta where they are not averaged, the step it last finished, its calls, and its
    curvature where steps follow from it."""

    previous: Point
    momenta: Point | None
    step: jax.Array
    calls: Calls
    curvature: Any


class Reply(NamedTuple):
    outer: Tree
    inner: Tree
    adjoint: Tree
    momenta: Point | None
    largest: Any


class Unmoved(NamedTuple):
    """The reply where the server moves x: of momenta that are not averaged, the one of x."""

    inner: Tree
    adjoint: Tree
    momenta: Point
    largest: Any


SLOWER = {**EVEN, "c_inner": 1.0, "c_outer": 1.0}
"""`EVEN` where momenta are averaged: what they hold corrects the drift of clients, and they forget a quarter of it in every
step.  Chosen among 2, 1, .3 and .1 on the bench's tasks; with .3 and less noise entered faster than it was forgotten."""


def _constants(arguments: dict[str, Any]) -> dict[str, Any]:
    numbers = None not in (arguments["inner_step"], arguments["outer_step"], arguments["adjoint_step"])
    known = {name: (TUNED if numbers else SLOWER)[name] for name in SLOWER}
    known = {**known, "c_adjoint": known["c_outer"]}
    return {**arguments, **{name: value for name, value in known.items() if arguments[name] is None}}


@bilevel("global", _constants)
def fedbioacc_global(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    adjoint_step: Step = "auto",
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    delta: Step = "auto",
    u: Step = "auto",
    sigma: Step = "auto",
    c_inner: Step = "auto",
    c_outer: Step = "auto",
    c_adjoint: Step = "auto",
    radius: MaybePositive = None,
    average_momenta: Flag = True,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """FedBiOAcc for a global lower level.  ``inner_step`` is gamma, ``outer_step`` eta, ``adjoint_step`` tau, ``u`` u_0.

    Constants that are not given: where all steps are, those of `fedbilevel.TUNED`, which keep c alpha_1^2 near 1, so that the
    momenta forget their first minibatches; otherwise those of `SLOWER`.

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        inner_step: alpha_t times this is the step of the inner variable.  "auto": it sets itself.
        outer_step: alpha_t times this is the step of the outer variable.  "auto": it sets itself.
        adjoint_step: alpha_t times this is the step of u.  "auto": it sets itself.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        delta: Scale of alpha_t = delta / (u + sigma^2 t)^(1/3).
        u: How late alpha_t begins to fall.
        sigma: How fast alpha_t falls.
        c_inner: How fast the inner momentum forgets: by c alpha_t^2 a step.
        c_outer: The same for the outer momentum.
        c_adjoint: The same for that of u.
        radius: u is kept within a ball of this radius.  None: no bound.
        average_momenta: False: every client keeps its own momenta, for comparison.
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
        >>> fb.fedbioacc_global(problem, 0.3, 0.1, 0.3).name
        'fedbioacc_global'
    """
    sampler, averaged = coupled.sampler(batch_size, outer_batch_size), average_momenta
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer)
    below = steps.Shared(problem.inner_loss, (inner_step, adjoint_step), local_steps)
    meeting = Meeting(
        problem, above, below, (batch_size, outer_batch_size),
        lambda server: anew(server)._replace(heading=below.ahead(server.point.inner)),
    )  # fmt: skip

    def alpha(step: jax.Array, point: Point) -> jax.Array:
        return cube_root_rate(delta, u, sigma, step, dtype_of(point.outer))

    def rates(rate: jax.Array, largest: Any) -> list[Any]:
        """Numbers shrink with alpha_t; steps that set themselves do not."""
        own = zip((outer_step, inner_step, adjoint_step), (above.local, *below.rates(largest)), strict=True)
        return [found if step is None else jnp.asarray(step, rate.dtype) * rate for step, found in own]

    def work(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply | Unmoved, Local]:
        local = below.look(message.point[:2], sampler.once(data, key), local)
        largest = below.known(message.largest, local)

        def step(held: tuple[Point, Point, Point, Any, Any], batches: Batches) -> tuple[Any, None]:
            point, previous, momenta, done, started = held
            now, before = coupled.directions(problem, (point, previous), batches)
            last, rate = alpha(done, point), alpha(done + 1, point)
            kept = [jnp.where(started, share_kept(constant, last), 0) for constant in (c_outer, c_inner, c_adjoint)]
            momenta = Point(*map(corrected, now, before, momenta, kept))
            new = coupled.descend(problem, point, momenta, tuple(rates(rate, largest)), radius)
            return (new, point, momenta, done + 1, jnp.ones_like(started)), None

        momenta, done = (message.momenta, message.step) if averaged else (local.momenta, local.step)
        previous = select(local.step == message.step, local.previous, message.point)
        first = (message.point, previous, momenta, message.step, done > 0)
        (point, previous, momenta, done, _), _ = sampler.walk(step, first, data, key, local_steps)
        local = counted(local, coupled.direction_calls(2 * local_steps))
        sent, kept = (momenta, None) if averaged else (None, momenta)
        reply: Reply | Unmoved = Reply(point.outer, point.inner, point.adjoint, sent, below.sent(local))
        if above.sums:
            moved = sent or Point(momenta.outer, None, None)
            reply = Unmoved(point.inner, point.adjoint, moved, below.sent(local))
        return reply, local._replace(previous=previous, momenta=kept, step=done)

    def absorb(server: Server, mean: Any) -> Server:
        kept, done = server.kept, server.step + local_steps
        if above.sums:
            outer, kept = above.along(server.point.outer, kept, mean.momenta.outer)
        else:
            outer = problem.into_set(mean.outer)
        point = Point(outer, mean.inner, mean.adjoint)
        heading = below.headed(server.heading, server.point.inner, mean.inner)
        return Server(point, mean.momenta if averaged else None, done, mean.largest, kept, heading)

    def init(key: jax.Array) -> Server:
        point, largest, kept, heading = meeting.init(key)
        return Server(point, zeros(point) if averaged else None, jnp.zeros((), jnp.int32), largest, kept, heading)

    def told(server: Server) -> Message:
        return Message(*server[:3], below.shared(server.largest, server.heading))

    def enroll(key: jax.Array) -> Local:
        point, (calls, curvature) = coupled.first_point(problem, key), meeting.enroll(key)
        return Local(point, None if averaged else zeros(point), jnp.zeros((), jnp.int32), calls, curvature)

    return Algorithm(
        init,
        enroll,
        plan=meeting.plan(Phase("local", told, work, absorb)),
        outer=meeting.outer,
        check=meeting.check,
        remark=meeting.remark,
    )
