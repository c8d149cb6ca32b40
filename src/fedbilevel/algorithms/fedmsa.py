"""FedMSA: recursive momenta at the server, and local steps corrected towards them.

D. A. Tarzanagh, M. Li, P. Sharma, S. Oymak, "Federated Multi-Sequence Stochastic Approximation with Local Hypergradient
Estimation", AAAI 2024; here with the two sequences of a bilevel problem, y and the adjoint u.  With z = (x, y, u) and
d_i(z; B) = (nu, omega, q) the directions of `fedbilevel.algorithms.coupled`, every round is two exchanges:

    h <- mean_i [ d_i(z; B) + (1 - rho) (h - d_i(z_before; B)) ]         in the first round: mean_i d_i(z; B)
    client i:  z_{i,1} = z - step h;  h_k = d_i(z_{i,k}; B_k) + h_{k-1} - d_i(z_{i,k-1}; B_k),  z_{i,k+1} = z_{i,k} - step h_k
    server:    z <- mean_i z_{i,tau}

with z_before the z of the round before and h_0 = h.  The local h_k telescope to h + d_i(z_{i,k}) - d_i(z): where h = 0 nobody
moves, so there is no client drift.  With tau = 1 all clients would make the same step: the server makes it, and the second
exchange is left out.

Up per round and client: three directions, then x, y and u; down: x, y, u and the round's number, then three directions (with
tau = 1: half of that each way).

Steps set themselves unless they are given (`fedbilevel.algorithms.steps`).  y and u move by 1/L with L the mean of the clients'
curvatures, a number that each sends with its share of h.  Where the outer step is not given x stands still within a round,
clients send the sum of their h_k for x in place of it, and the server moves x; after a search h starts anew.

Differences from the paper: u starts at 0, not from a Neumann series.  A client that missed a round compares with the point it
receives, so that its share of h is rho d_i(z) + (1 - rho) h.

Sources: notes on the paper, and the authors' program (github.com/ucr-optml/FedMSA); we did not have its text.  The program
reuses the estimate made on the earlier minibatch; here, as in the notes, both estimates of a difference use the same one.

Checked: iterates against a naive loop; convergence to the known minimiser of heterogeneous quadratics with tau = 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import coupled, steps
from fedbilevel.algorithms.arguments import Batch, Count, Optimizer, OuterBatch, Share, Step, bilevel
from fedbilevel.algorithms.coupled import Point, Summed
from fedbilevel.algorithms.local import Told
from fedbilevel.calculus import Calls, Tree, add, counted, no_calls, scale, select, subtract, zeros
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData


class Server(NamedTuple):
    """z, h, the number of rounds done, the mean curvature, and what outer steps follow from where they are not numbers."""

    point: Point
    momenta: Point
    round: jax.Array
    largest: Any
    kept: Any


class Message(NamedTuple):
    point: Point
    round: jax.Array


class Local(NamedTuple):
    """What a client keeps: the z it was last sent, the number of the round after that, how much it computed, and its
    curvature where steps follow from it."""

    point: Point
    round: jax.Array
    calls: Calls
    curvature: Any


@bilevel("global")
def fedmsa(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    adjoint_step: Step = "auto",
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    rho: Share = 0.5,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """FedMSA.  ``local_steps`` is tau, ``rho`` in (0, 1] what the momenta forget in a round; steps as in `fedbio_global`, or
    set by themselves.

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        inner_step: Step of the inner variable, positive. "auto": it sets itself.
        outer_step: Step of the outer variable, positive. "auto": it sets itself.
        adjoint_step: Step of the third variable u, which solves the linear system of the hypergradient. "auto": it sets
            itself.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        rho: What the common momentum forgets in a round, in (0, 1].
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
        >>> fb.fedmsa(problem).name
        'fedmsa'
    """
    sampler = coupled.sampler(batch_size, outer_batch_size)
    sizes = batch_size, outer_batch_size
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer, echo=steps.echo_of(rho, sizes), eager=True)
    below = steps.Shared(problem.inner_loss, (inner_step, adjoint_step))

    def move(point: Point, along: Point, largest: Any) -> Point:
        return coupled.descend(problem, point, along, (above.local, *below.rates(largest)))

    def moved(outer: Tree, server: Server, total: Tree) -> Server:
        """``server`` with x moved."""
        outer, kept = above.moved(outer, server.kept, total)
        return server._replace(point=server.point._replace(outer=outer), kept=kept)

    def anew(server: Server) -> Server:
        return server._replace(momenta=zeros(server.momenta), round=jnp.zeros_like(server.round))

    meeting = coupled.Meeting(problem, above, below, sizes, anew)

    def estimate(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Told, Local]:
        before = select(local.round == message.round, local.point, message.point)
        batches = sampler.once(data, key)
        now, then = coupled.directions(problem, (message.point, before), batches)
        kept = jnp.where(message.round > 0, 1 - rho, 0)
        local = below.look(message.point[:2], batches, counted(local, coupled.direction_calls(2)))
        share = Told(subtract(now, scale(kept, then)), below.sent(local))
        return share, local._replace(point=message.point, round=message.round + 1)

    def settle(server: Server, mean: Told) -> Server:
        # At first h is zero, so that adding a share of it is right there too.
        momenta = add(mean.value, scale(1 - rho, server.momenta))
        server = server._replace(momenta=momenta, round=server.round + 1, largest=mean.largest)
        if local_steps > 1:
            return server
        point = move(server.point, momenta, mean.largest)
        return moved(server.point.outer, server._replace(point=point), momenta.outer if above.sums else point.outer)

    def walk(message: Told, local: Local, data: LocalData, key: jax.Array) -> tuple[Point | Summed, Local]:
        def step(held: tuple[Point, Point, Point, Tree], batches: Batches) -> tuple[Any, None]:
            point, before, along, total = held
            now, then = coupled.directions(problem, (point, before), batches)
            along = add(now, subtract(along, then))
            return (move(point, along, message.largest), point, along, add(total, along.outer)), None

        along, rest = message.value, local_steps - 1
        first = move(local.point, along, message.largest), local.point, along, along.outer
        (point, _, _, total), _ = sampler.walk(step, first, data, key, rest)
        reply = Summed(total, point.inner, point.adjoint, None) if above.sums else point
        return reply, counted(local, coupled.direction_calls(2 * rest))

    def absorb(server: Server, mean: Point | Summed) -> Server:
        return moved(server.point.outer, server._replace(point=Point(*mean[:3])), mean[0])

    def init(key: jax.Array) -> Server:
        point = coupled.first_point(problem, key)
        none = jnp.zeros((), jnp.int32)
        return Server(point, zeros(point), none, below.none_yet(point.inner), above.start(point.outer))

    def enroll(key: jax.Array) -> Local:
        point = coupled.first_point(problem, key)
        return Local(point, jnp.zeros((), jnp.int32), no_calls(), below.start(point.inner, key))

    momenta = Phase("momenta", lambda server: Message(server.point, server.round), estimate, settle)
    local = Phase("local", lambda server: Told(server.momenta, server.largest), walk, absorb)
    return Algorithm(
        init,
        enroll,
        plan=meeting.plan(momenta, *(() if local_steps == 1 else (local,))),
        outer=lambda server: server.point.outer,
        check=above.check,
        remark=lambda server: above.remark(server.kept),
    )
