"""What the methods for global lower levels share: the three coupled variables x, y, u and the direction of each.

With one y for all clients, y(x) = argmin 1/M sum_m g_m(x, y), the hypergradient needs the clients' *mean* Hessian:

    grad h(x) = 1/M sum_m [grad_x f_m - (d2g_m/dxdy) u],        u = [1/M sum_m d2g_m/dy2]^-1 1/M sum_m grad_y f_m

No client can compute u alone, but each can compute its share of three directions that are *averages over clients*:

    omega = grad_y g(x, y)          q = (d2g/dy2) u - grad_y f          nu = grad_x f - (d2g/dxdy) u

whose means vanish exactly at y = y(x), at u as above, and where grad h(x) = 0.  u is called ``adjoint`` in code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import automatic
from fedbilevel.algorithms.local import Local, Told, inner_gradients
from fedbilevel.algorithms.search import Search, solving
from fedbilevel.calculus import Calls, Loss, Tree, no_calls, scale, squared_norm, step_along, subtract, zeros
from fedbilevel.hypergradients import outer_gradients
from fedbilevel.plan import Item, Plan
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, Sampler


class Point(NamedTuple):
    """x, y and u; or one direction for each."""

    outer: Tree
    inner: Tree
    adjoint: Tree


def sampler(batch_size: int | None, outer_batch_size: int | None) -> Sampler:
    """The minibatches that one evaluation of `directions` needs."""
    return Sampler(batch_size, outer_batch_size, train_batches=1, val_batches=1)


def direction_calls(times: int | jax.Array) -> Calls:
    """What the three directions cost at so many points."""
    return Calls(gradients=2 * times, hessian_vector=times, cross=times)


def first_point(problem: BilevelProblem, key: jax.Array) -> Point:
    """The problem's own start, and u = 0."""
    outer, inner = problem.start(key)
    return Point(outer, inner, zeros(inner))


class Server(NamedTuple):
    """x, y and u, and what their steps follow from where they set themselves: the clients' mean curvature, the ways of x and
    of y."""

    point: Point
    largest: Any
    kept: Any
    heading: Any


class Arrived(NamedTuple):
    """Where a client arrived, and its curvature where steps follow from it."""

    outer: Tree
    inner: Tree
    adjoint: Tree
    largest: Any


class Summed(NamedTuple):
    """The reply where the server moves x: the sum of a client's directions for x, where its y and u arrived, its curvature."""

    total: Tree
    inner: Tree
    adjoint: Tree
    largest: Any


class Meeting(NamedTuple):
    """A server and clients that share x, y and u."""

    problem: BilevelProblem
    above: steps.Outer
    below: steps.Shared
    sizes: tuple[int | None, int | None]
    anew: Callable[[Any], Any] | None = None

    def plan(self, *phases: Item) -> Plan:
        """Rounds of these phases, and the searches that they ask for."""
        anew = self.anew or (lambda server: server._replace(heading=self.below.ahead(server.point.inner)))
        below = solving(self.problem, automatic(self.sizes[0]), self.sizes[0])
        return Search(self.problem, self.above, below, self.sizes, anew).plan(*phases)

    def init(self, key: jax.Array) -> Server:
        point = first_point(self.problem, key)
        largest, kept = self.below.none_yet(point.inner), self.above.start(point.outer)
        return Server(point, largest, kept, self.below.ahead(point.inner))

    def enroll(self, key: jax.Array) -> Local:
        _, inner = self.problem.start(key)
        return Local(no_calls(), self.below.start(inner, key))

    def told(self, server: Server) -> Told:
        return Told(server.point, self.below.shared(server.largest, server.heading))

    def after(self, server: Server, point: Point, largest: Any, kept: Any) -> Server:
        """The server after a round."""
        return Server(point, largest, kept, self.below.headed(server.heading, server.point.inner, point.inner))

    def outer(self, server: Any) -> Tree:
        return server.point.outer

    def check(self, data: Any) -> None:
        self.above.check(data)

    def remark(self, server: Any) -> str | None:
        return self.above.remark(server.kept)


def into_set(problem: BilevelProblem, point: Point) -> Point:
    return point._replace(outer=problem.into_set(point.outer))


def directions(problem: BilevelProblem, points: tuple[Point, ...], batches: Batches) -> tuple[Point, ...]:
    """(nu, omega, q) at each point, all on the same minibatches: one for omega, one for f, one for both second derivatives."""
    pairs = tuple((point.outer, point.inner) for point in points)
    omegas = inner_gradients(problem, pairs, batches)
    train, gradients, shares = batches.train(0), outer_gradients(problem, pairs, batches), []
    for point, omega, (in_outer, in_inner) in zip(points, omegas, gradients, strict=True):
        cross, product = second_products(problem.inner_loss, point, train)
        shares.append(Point(subtract(in_outer, cross), omega, subtract(product, in_inner)))
    return tuple(shares)


def second_products(loss: Loss, point: Point, batch: Tree) -> tuple[Tree, Tree]:
    """(d2g/dxdy) u and (d2g/dy2) u from one pass."""

    def gradients(inner: Tree) -> tuple[Tree, Tree]:
        in_outer, in_inner = jax.grad(loss, argnums=(0, 1))(point.outer, inner, batch)
        return in_outer, in_inner

    cross, product = jax.jvp(gradients, (point.inner,), (point.adjoint,))[1]
    return cross, product


def descend(
    problem: BilevelProblem, point: Point, along: Point, rates: tuple[Any, Any, Any], radius: Any = None
) -> Point:
    """One step against the three directions, with ``rates`` for x, y and u; x stays in its set and u in its ball."""
    outer, inner, adjoint = (
        step_along(value, -rate, direction) for value, rate, direction in zip(point, rates, along, strict=True)
    )
    return Point(problem.into_set(outer), inner, into_ball(adjoint, radius))


def into_ball(vector: Tree, radius: Any) -> Tree:
    """The nearest point of the ball of this radius; None is no bound."""
    if radius is None:
        return vector
    square = squared_norm(vector)
    limit = jnp.asarray(radius, square.dtype)
    outside = square > limit**2
    # The root is taken of a number that is never zero: its derivative must stay finite.
    return scale(jnp.where(outside, limit / jnp.sqrt(jnp.where(outside, square, 1)), 1), vector)
