"""What F2SA, PBGD, BOME and MEHA share: bilevel problems by gradients alone.

That y minimises g(x, .) is to say that g(x, y) is no larger than g(x, z), z being the minimiser: a penalty can press the one
down to the other.  The gradient of min_y g(x, y) in x is grad_x g(x, z), so that no derivative of z is needed, and no
Hessian.  One step of a client, all of it on its own rows:

    K times:   z <- z - s grad_y g(x, z)                              and, in F2SA, y along with it
    then:      (x, y) descend  f(x, y) + lambda (g(x, y) - g(x, z))   with z held fixed

The methods differ in what sets lambda, and in how y and z move: four `Rule`s for one loop.

f pulls y away from z and lambda g holds it, so that |y - z| is of the order 1/lambda, and lambda times the difference of the
two gradients of the order one.  With a fixed lambda the answer is that of another problem, at a distance of the order
1/lambda.  Both gradients of the difference use one minibatch: its noise shrinks with |y - z| while lambda grows.

Local lower level: y and z stay on the client, x is averaged after I steps.  Clients that differ drift apart between
averagings, and the method stalls at a distance that shrinks with the step of x.

Global lower level: x, y and z rest at the server within a round.  Clients send their share of the three directions, averaged
over I minibatches, all at the same point; the server makes one step, with K = 1.  These are the steps of the mean losses,
without drift.  Local steps would not do: lambda multiplies how clients differ, and with five of them F2SA ended further from
the minimiser of quadratics than it began.

Down goes also the number of steps so far, for the schedules.

Steps set themselves unless they are given (`fedbilevel.algorithms.steps`), with two changes.  A client follows its curvature by
differences of two gradients, (grad_y g(x, z + h v) - grad_y g(x, z)) / h in place of the Hessian times v; with a global lower
level clients send L, a number, and the server moves y and z by 1 over its mean.  And in a search
(`fedbilevel.algorithms.search`) all four do the same: a client settles y and z with x at rest and a large lambda, takes the
direction of x there for the hypergradient, and watches f(x, z).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.local import Reply
from fedbilevel.algorithms.search import Search
from fedbilevel.calculus import (
    Calls,
    Tree,
    add,
    both_gradients,
    dot,
    dtype_of,
    inner_gradient,
    no_calls,
    scale,
    squared_norm,
    step_along,
    subtract,
    zeros,
)
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler

PRESSED = 30.0
"""Lambda in a search: at a thirtieth, y - z is still well above the rounding of float32."""


class Pair(NamedTuple):
    """One vector like x and one like y."""

    outer: Tree
    inner: Tree


class Slopes(NamedTuple):
    """Gradients in x and y: of f, and of the gap g(x, y) - g(x, z)."""

    loss: Pair
    gap: Pair

    def along(self, weight: Any) -> Pair:
        """Of f + weight * gap."""
        return Pair(*(add(loss, scale(weight, gap)) for loss, gap in zip(self.loss, self.gap, strict=True)))


class Rule(NamedTuple):
    """What tells the methods apart.

    ``weight(number of steps so far)``: lambda; None where `Penalty.lacking` sets it, by ``barrier``.  ``shares(lambda, number
    of steps so far)``: what the steps of x and y are multiplied by.  ``together``: y moves with z, not with x.  ``restarts``: z
    starts from y in every step of a client.  ``radius``: z is held near y, at the minimum of g(x, z) + |z - y|^2 / (2 radius),
    and the gap is that between g(x, y) and this minimum.
    """

    weight: Callable[[Any], Any] | None
    shares: Callable[[Any, Any], tuple[Any, Any]]
    together: bool = False
    restarts: bool = False
    radius: Any = None
    barrier: Any = None


class Point(NamedTuple):
    """x, y and z."""

    outer: Tree
    inner: Tree
    follower: Tree


class Server(NamedTuple):
    """x, y and z (the last two None unless they are shared), steps so far, and what outer steps follow from where they set
    themselves."""

    outer: Tree
    inner: Tree
    follower: Tree
    step: jax.Array
    kept: Any


class Message(NamedTuple):
    outer: Tree
    inner: Tree
    follower: Tree
    step: jax.Array


class Sum(NamedTuple):
    """Of a client's directions of x: the reply where the server moves it."""

    total: Tree


class Share(NamedTuple):
    """A client's share of the directions of x and y (`Slopes` where the server sets lambda) and of z, and its curvature where
    steps follow from it."""

    along: Pair | Slopes
    follower: Tree
    largest: Any


class Local(NamedTuple):
    """What stays on a client: y and z unless they are shared, how much it computed, and its curvature where steps follow
    from it."""

    inner: Tree
    follower: Tree
    calls: Calls
    curvature: steps.Curvature | None


class Penalty(NamedTuple):
    """One of the methods on a problem, with its steps: ``inner_step`` is None where it sets itself."""

    problem: BilevelProblem
    rule: Rule
    inner_step: Any
    inner_steps: int
    sizes: tuple[int | None, int | None]

    @property
    def shared(self) -> bool:
        return self.problem.lower_level == "global"

    @property
    def measures(self) -> bool:
        return self.inner_step is None

    @property
    def sampler(self) -> Sampler:
        """The first minibatches are for x, one more of each kind for every step of z."""
        return Sampler(*self.sizes, self.inner_steps, 1 + self.inner_steps * self.rule.together)

    @property
    def calls(self) -> int:
        """Gradients of one step, looks at the curvature aside."""
        return 3 + self.inner_steps * (3 if self.rule.together else 1)

    def look(self, outer: Tree, follower: Tree, batch: Tree, held: Any) -> tuple[Any, Calls]:
        """The curvature at z, by differences of gradients: a step of about the cube root of the precision keeps both their
        rounding and the bend of the loss below a percent."""
        if held is None:
            return None, Calls()
        here = inner_gradient(self.problem.inner_loss, outer, follower, batch)
        size = jnp.sqrt(squared_norm(follower))
        length = jnp.cbrt(jnp.finfo(size.dtype).eps).astype(size.dtype) * (1 + size)

        def product(direction: Tree) -> Tree:
            there = step_along(follower, length, direction)
            return scale(1 / length, subtract(inner_gradient(self.problem.inner_loss, outer, there, batch), here))

        held, count = steps.traced(product, held)
        return held, Calls(gradients=1 + count)

    def rate(self, curvature: Any) -> Any:
        """The step of z; infinite where there is no curvature, so that the run ends and says so."""
        if not self.measures:
            return self.inner_step
        largest = curvature.largest if isinstance(curvature, steps.Curvature) else curvature
        return 1 / (largest if self.rule.radius is None else largest + jnp.asarray(1 / self.rule.radius, largest.dtype))

    def follow(self, point: Point, weight: Any, time: Any, rate: Any, batches: Batches) -> Point:
        """K steps of z, and of y where it moves with z, on the same rows."""
        loss, (outer, inner, _) = self.problem.inner_loss, point

        def once(number: jax.Array, pair: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            inner, follower = pair
            batch = batches.train(number)
            slope = self.held(inner_gradient(loss, outer, follower, batch), follower, inner)
            if self.rule.together:
                pull = inner_gradient(self.problem.outer_loss, outer, inner, batches.val(1 + number))
                along = add(pull, scale(weight, inner_gradient(loss, outer, inner, batch)))
                inner = step_along(inner, -rate * self.rule.shares(weight, time)[1], along)
            return inner, step_along(follower, -rate, slope)

        first = inner, inner if self.rule.restarts else point.follower
        return Point(outer, *jax.lax.fori_loop(0, self.inner_steps, once, first))

    def held(self, slope: Tree, one: Tree, other: Tree) -> Tree:
        """``slope`` + (one - other) / radius."""
        return slope if self.rule.radius is None else step_along(slope, 1 / self.rule.radius, subtract(one, other))

    def slopes(self, point: Point, batch: Tree, held_out: Tree) -> tuple[Slopes, Tree]:
        """And the slope of z, on the same rows."""
        outer, inner, follower = point
        loss = self.problem.inner_loss
        in_outer, in_inner = both_gradients(loss, outer, inner, batch)
        below, slope = both_gradients(loss, outer, follower, batch)
        gap = Pair(subtract(in_outer, below), self.held(in_inner, follower, inner))
        slopes = Slopes(Pair(*both_gradients(self.problem.outer_loss, outer, inner, held_out)), gap)
        return slopes, self.held(slope, follower, inner)

    def lacking(self, slopes: Slopes) -> Any:
        """The smallest lambda with which f + lambda q descends q at least as fast as ``rule.barrier`` says.

        Over y alone on a client: x moves by the mean of all, and no client's own hypergradient vanishes at the solution.
        """
        loss, gap = slopes if self.shared else (slopes.loss.inner, slopes.gap.inner)
        square = squared_norm(gap)
        short = jnp.asarray(self.rule.barrier, square.dtype) * square - dot(loss, gap)
        return jnp.maximum(short, 0) / jnp.maximum(square, steps.TINY)

    def first(self, key: jax.Array) -> Point:
        outer, inner = self.problem.start(key)
        return Point(outer, inner, inner)

    def start(self, above: steps.Outer, key: jax.Array) -> Server:
        outer, inner, follower = self.first(key)
        below = (inner, follower) if self.shared else (None, None)
        return Server(outer, below[0], below[1], jnp.zeros((), jnp.int32), above.start(outer))

    def enroll(self, key: jax.Array) -> Local:
        _, inner, follower = self.first(key)
        curvature = steps.unknown(inner, key) if self.measures else None
        below = (None, None) if self.shared else (inner, follower)
        return Local(below[0], below[1], no_calls(), curvature)

    def algorithm(self, above: steps.Outer, work: Any, absorb: Any, minibatches: int) -> Algorithm:
        """Rounds of one phase, in which clients read so many minibatches, and the searches that they ask for."""
        search = Search(
            self.problem, above._replace(local_steps=minibatches), Pressing(self._replace(inner_step=None)), self.sizes
        )
        return Algorithm(
            partial(self.start, above),
            self.enroll,
            plan=search.plan(Phase("local", lambda server: Message(*server[:4]), work, absorb)),
            **completed(self.problem, above),
        )


class Pressing(NamedTuple):
    """What clients do in a search, whatever the rule: y and z make steps with x at rest, and their difference shows the
    hypergradient.

    With a lambda as large as `PRESSED` the difference is small, and so is what x could gain by lowering the penalty."""

    method: Penalty

    @property
    def train_batches(self) -> int:
        return steps.AHEAD

    @property
    def val_batches(self) -> int:
        return 1

    @property
    def gradients(self) -> int:
        return 3 * steps.AHEAD

    def read(self, state: Server | Local) -> tuple[Tree, Tree]:
        return state.inner, state.follower

    def put(self, server: Server, inner: tuple[Tree, Tree]) -> Server:
        return server._replace(inner=inner[0], follower=inner[1])

    def after(self, local: Local, inner: tuple[Tree, Tree]) -> Local:
        return local._replace(inner=inner[0], follower=inner[1])

    def start(self, inner: tuple[Tree, Tree]) -> steps.Curvature:
        return steps.unknown(inner[1], jax.random.key(0))

    def calls(self) -> Calls:
        return no_calls()

    def look(
        self, outer: Tree, inner: tuple[Tree, Tree], batches: Batches, kept: steps.Curvature
    ) -> tuple[steps.Curvature, Calls]:
        found: tuple[steps.Curvature, Calls] = self.method.look(outer, inner[1], batches.inner(), kept)
        return found

    def settled(
        self, outer: Tree, inner: tuple[Tree, Tree], batches: Batches, kept: steps.Curvature, times: int
    ) -> tuple[Tree, Tree]:
        rate = self.method.rate(kept)

        def once(number: Any, inner: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            slopes, slope = self.method.slopes(
                Point(outer, *inner), batches.train(number % steps.AHEAD), batches.val(0)
            )
            along = slopes.along(PRESSED).inner
            return step_along(inner[0], -rate / (1 + PRESSED), along), step_along(inner[1], -rate, slope)

        settled: tuple[Tree, Tree] = jax.lax.fori_loop(0, steps.AHEAD * times, once, inner)
        return settled

    def loss(self, outer: Tree, inner: tuple[Tree, Tree], batches: Batches, kept: steps.Curvature) -> jax.Array:
        """At z: y has learned from these very rows."""
        return self.method.problem.outer_loss(outer, inner[1], batches.val(0))

    def estimate(
        self, outer: Tree, inner: tuple[Tree, Tree], batches: Batches, kept: steps.Curvature
    ) -> tuple[Tree, Calls]:
        slopes, _ = self.method.slopes(Point(outer, *inner), batches.inner(), batches.val(0))
        return slopes.along(PRESSED).outer, Calls(gradients=3)


def completed(problem: BilevelProblem, above: steps.Outer) -> dict[str, Any]:
    """The parts of an `Algorithm` that say what is wrong with an optimizer or a run."""
    return {
        "check": above.check,
        "remark": lambda server: above.remark(server.kept),
    }


def made(
    problem: BilevelProblem, rule: Rule, inner_step: Any, inner_steps: int, sizes: tuple[Any, Any], above: steps.Outer
) -> Algorithm:
    """The method with this rule for the problem's lower level."""
    method = Penalty(problem, rule, inner_step, inner_steps, sizes)
    if not method.shared:
        return walked(method, above)
    if inner_steps > 1:
        raise ValueError(
            f"inner_steps={inner_steps}, but with a global lower level a round is one step of y and z: leave inner_steps at 1."
        )
    return averaged(method, above)


def walked(method: Penalty, above: steps.Outer) -> Algorithm:
    """Local lower level: clients walk I steps between two exchanges."""
    problem, rule = method.problem, method.rule

    def step(held: tuple[Tree, Tree, jax.Array, Local], batches: Batches) -> tuple[Any, None]:
        outer, total, number, (inner, follower, calls, curvature) = held
        curvature, looked = method.look(outer, follower, batches.inner(), curvature)
        rate, time = method.rate(curvature), number.astype(dtype_of(inner))
        scheduled = None if rule.weight is None else rule.weight(time)
        point = method.follow(Point(outer, inner, follower), scheduled, time, rate, batches)
        slopes, _ = method.slopes(point, batches.inner(), batches.val(0))
        weight = method.lacking(slopes) if scheduled is None else scheduled
        along, shares = slopes.along(weight), rule.shares(weight, time)
        moved = point.inner if rule.together else step_along(inner, -rate * shares[1], along.inner)
        calls = calls.plus(looked).plus(Calls(gradients=method.calls))
        outer = problem.into_set(step_along(outer, -above.local * shares[0], along.outer))
        total = add(total, along.outer) if above.sums else total
        return (outer, total, number + 1, Local(moved, point.follower, calls, curvature)), None

    def work(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply | Sum, Local]:
        first = message.outer, zeros(message.outer) if above.sums else None, message.step, local
        (outer, total, _, local), _ = method.sampler.walk(step, first, data, key, above.local_steps)
        return Sum(total) if above.sums else Reply(outer), local

    def absorb(server: Server, mean: Reply | Sum) -> Server:
        outer, kept = above.moved(server.outer, server.kept, mean[0])
        return server._replace(outer=outer, step=server.step + above.local_steps, kept=kept)

    return method.algorithm(above, work, absorb, above.local_steps)


def averaged(method: Penalty, above: steps.Outer) -> Algorithm:
    """Global lower level: clients send directions, averaged over I minibatches, and the server makes one step of x, y and z."""
    rule, minibatches, above = method.rule, above.local_steps, above._replace(local_steps=1)

    def share(message: Message, batches: Batches) -> tuple[Pair | Slopes, Tree]:
        slopes, slope = method.slopes(Point(*message[:3]), batches.inner(), batches.val(0))
        if rule.weight is None:
            return slopes, slope
        return slopes.along(rule.weight(message.step.astype(dtype_of(message.inner)))), slope

    def work(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Share, Local]:
        def step(held: tuple[Tree, Local], batches: Batches) -> tuple[tuple[Tree, Local], None]:
            total, local = held
            curvature, looked = method.look(message.outer, message.follower, batches.inner(), local.curvature)
            calls = local.calls.plus(looked).plus(Calls(gradients=3))
            return (add(total, share(message, batches)), local._replace(calls=calls, curvature=curvature)), None

        pair = Pair(message.outer, message.inner)
        nothing = zeros((Slopes(pair, pair) if rule.weight is None else pair, message.follower))
        sampler = Sampler(*method.sizes, val_batches=1)
        (total, local), _ = sampler.walk(step, (nothing, local), data, key, minibatches)
        largest = None if local.curvature is None else local.curvature.largest
        along, slope = scale(1 / minibatches, total)
        return Share(along, slope, largest), local

    def absorb(server: Server, mean: Share) -> Server:
        time, rate = server.step.astype(dtype_of(server.inner)), method.rate(mean.largest)
        if isinstance(mean.along, Slopes):
            weight = method.lacking(mean.along)
            along = mean.along.along(weight)
        else:
            assert rule.weight is not None
            weight, along = rule.weight(time), mean.along
        shares = rule.shares(weight, time)
        reply = along.outer if above.sums else step_along(server.outer, -above.local * shares[0], along.outer)
        outer, kept = above.moved(server.outer, server.kept, reply)
        inner = step_along(server.inner, -rate * shares[1], along.inner)
        return Server(outer, inner, step_along(server.follower, -rate, mean.follower), server.step + 1, kept)

    return method.algorithm(above, work, absorb, minibatches)
