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

Differences from the paper: u starts at 0, not from a Neumann series.  A client that missed a round compares with the point it
receives, so that its share of h is rho d_i(z) + (1 - rho) h.

Sources: notes on the paper, and the authors' program (github.com/ucr-optml/FedMSA); we did not have its text.  The program
reuses the estimate made on the earlier minibatch; here, as in the notes, both estimates of a difference use the same one.

Checked: iterates against a naive loop; convergence to the known minimiser of heterogeneous quadratics with tau = 2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import coupled
from fedbilevel.algorithms.arguments import Batch, Count, OuterBatch, Positive, Share, bilevel
from fedbilevel.algorithms.coupled import Point
from fedbilevel.calculus import Calls, add, counted, no_calls, scale, select, subtract, zeros
from fedbilevel.plan import Algorithm, Phase, View
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData


class Server(NamedTuple):
    """z, h, and the number of rounds done."""

    point: Point
    momenta: Point
    round: jax.Array


class Message(NamedTuple):
    point: Point
    round: jax.Array


class Estimate(NamedTuple):
    """A client's share of h."""

    share: Point


class Local(NamedTuple):
    """What a client keeps: the z it was last sent, the number of the round after that, and how much it computed."""

    point: Point
    round: jax.Array
    calls: Calls


@bilevel("global")
def fedmsa(
    problem: BilevelProblem,
    inner_step: Positive = 0.1,
    outer_step: Positive = 0.1,
    adjoint_step: Positive = 0.1,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    rho: Share = 0.5,
) -> Algorithm:
    """FedMSA.  ``local_steps`` is tau, ``rho`` in (0, 1] what the momenta forget in a round; steps as in `fedbio_global`."""
    sampler = coupled.sampler(batch_size, outer_batch_size)

    def move(point: Point, along: Point) -> Point:
        return coupled.descend(problem, point, along, (outer_step, inner_step, adjoint_step))

    def estimate(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Estimate, Local]:
        before = select(local.round == message.round, local.point, message.point)
        now, then = coupled.directions(problem, (message.point, before), sampler.once(data, key))
        kept = jnp.where(message.round > 0, 1 - rho, 0)
        calls = local.calls.plus(coupled.direction_calls(2))
        return Estimate(subtract(now, scale(kept, then))), Local(message.point, message.round + 1, calls)

    def settle(server: Server, mean: Estimate) -> Server:
        # At first h is zero, so that adding a share of it is right there too.
        momenta = add(mean.share, scale(1 - rho, server.momenta))
        point = move(server.point, momenta) if local_steps == 1 else server.point
        return Server(point, momenta, server.round + 1)

    def step(held: tuple[Point, Point, Point], batches: Batches) -> tuple[tuple[Point, Point, Point], None]:
        point, before, along = held
        now, then = coupled.directions(problem, (point, before), batches)
        along = add(now, subtract(along, then))
        return (move(point, along), point, along), None

    def walk(message: Point, local: Local, data: LocalData, key: jax.Array) -> tuple[Point, Local]:
        first, rest = (move(local.point, message), local.point, message), local_steps - 1
        (point, _, _), _ = sampler.walk(step, first, data, key, rest)
        return point, counted(local, coupled.direction_calls(2 * rest))

    def absorb(server: Server, mean: Point) -> Server:
        return server._replace(point=coupled.into_set(problem, mean))

    def init(key: jax.Array) -> Server:
        point = coupled.first_point(problem, key)
        return Server(point, zeros(point), jnp.zeros((), jnp.int32))

    momenta = Phase("momenta", lambda server: Message(server.point, server.round), estimate, settle)
    local = Phase("local", lambda server: server.momenta, walk, absorb)
    return Algorithm(
        init,
        enroll=lambda key: Local(coupled.first_point(problem, key), jnp.zeros((), jnp.int32), no_calls()),
        plan=(momenta,) if local_steps == 1 else (momenta, local),
        outer=lambda server: server.point.outer,
        view=lambda server, local: View(inner=server.point.inner, calls=local.calls),
    )
