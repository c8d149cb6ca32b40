"""The exchange in which clients look for the scale of x: the first round of steps that set themselves.

Each client by itself settles y by 32 inner steps before each of ten hypergradients g, and walks by eta g.  The first step is
0.1 |f| / ||g|| long: a share of the way on which its outer loss f would fall to zero along a straight line, in whatever unit x
is.  In a later search it is 0.2 r long (r as in `fedbilevel.algorithms.steps`).  The others follow by

    eta <- eta min(1 / (1 - <g, g before> / max(||g||^2, ||g before||^2)), 3)

to where a gradient that goes on changing like this would vanish.  Minibatches are as large as those of all local steps of a
round together: on those of one step, g says little of the next g where each row has a number of its own in x.

A step is taken back where g is then ten times as long as any before, or no number, or where f fell by less than a tenth of what
g promised: the client returns to the point before and makes a tenth of that step.  The first step needs that most.  |f| may be
large where there is little to gain, or because of a constant in it; and where x comes to a plateau nothing leads back from
there.  f is compared on the very rows that g is of, with y settled on them at both points: y learns on, and on other rows the
step along a g of few may bring nothing, by no fault of its length.

The server takes the mean of where clients arrive, and r becomes the distance from the start: the clients' mean first step at
least.  Each client also tells how far it went itself (its first step at least), over the root mean square of its g; the
server's first step is at most the mean of that, or a share of it where y and u lag behind x.  The lengths of g themselves would
not do: where clients disagree, that of their mean is up to forty times shorter.

Where clients share no numbers of x, the mean of M moves each number by 1/M of what its own client found.  So a client also
tells over what share of the n numbers its way a is spread, ||a||_1^2 / (n ||a||_2^2), and the server multiplies both means by
how many times more the mean of a is spread over.  For clients that agree that is 1, and where they disagree at random in the
same numbers too; for M clients that share none and go equally far it is M.

Clients search again where a round after the first search says that they stopped short, or after the server took a move back.
Momenta start anew after a search.

A method says what its clients settle and what they take for a hypergradient (`Below`).  The gradient-only methods settle y and
z: `fedbilevel.algorithms.penalty`.

With a local lower level this is what clients do anyway, but for local steps that find their own length.  y then goes on from
where it settled before the first step: where it ends belongs to an x that is the client's alone, and fits its validation rows
by more than they are worth; an inner problem of a large condition takes hundreds of rounds to get away from there.  With a
global one they search with y and Hessians of their own, which is another problem: not the right answer, but the right scale,
and an x and a y to begin at.

Up per client: x, three numbers, and y where it is shared; down: x, a number, and y.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.calculus import (
    Calls,
    Tree,
    counted,
    dot,
    dtype_of,
    no_calls,
    select,
    squared_norm,
    step_along,
    subtract,
    zeros,
)
from fedbilevel.plan import Item, Phase, Plan, Repeat
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler

SETTLING = 8
"""Times as many inner steps before a hypergradient as in a round."""
STRIDES = 10
GAINED = 0.1
"""The share of the fall of the outer loss along a straight line that a step must bring, or it is taken back."""
NEAR = 0.1
"""The first step of a first search, as a share of the way on which the outer loss would fall to zero along a straight line."""


class Pace(NamedTuple):
    """Of a search: the step of x, the last hypergradient, the sum of all their squared norms and the largest of these, how many
    they were, and how long the first step was; 0 where nobody knows yet."""

    step: jax.Array
    last: Tree
    square: jax.Array
    steepest: jax.Array
    strides: jax.Array
    probe: jax.Array

    def too_far(self, estimate: Tree) -> jax.Array:
        return (self.steepest > 0) & ~(squared_norm(estimate) <= steps.STEEPER**2 * self.steepest)

    def in_vain(self, losses: jax.Array, moved: Tree) -> jax.Array:
        """Whether the loss fell from the second to the first by less than a share of what the gradient promised, by more than
        rounding.  From a loss that was no number nothing can fall."""
        here, before = losses[0], losses[1]
        promised = GAINED * jnp.maximum(dot(self.last, moved), 0)
        rounding = 8 * jnp.finfo(before.dtype).eps * jnp.abs(before)
        return (self.strides > 0) & jnp.isfinite(before) & ~(here <= before - promised + rounding)

    def taken_back(self) -> Pace:
        """A tenth of the last step: where that was the first, this is now the first."""
        probe = jnp.where(self.strides == 1, self.probe / 10, self.probe)
        return self._replace(step=self.step / 10, probe=probe)

    def after(self, estimate: Tree, loss: jax.Array, guess: jax.Array) -> Pace:
        square = squared_norm(estimate)
        norm = jnp.sqrt(jnp.maximum(square, steps.TINY))
        ahead = NEAR * jnp.abs(loss) / norm
        own = jnp.where(jnp.isfinite(ahead) & (ahead > 0), ahead, guess)
        own = jnp.where(
            jnp.isfinite(square), own, jnp.nan
        )  # no number where nobody has moved yet: no length would help
        probe = jnp.where((self.probe > 0) | (square == 0), self.probe, own)
        step = jnp.where(self.square > 0, steps.strode(self.step, estimate, self.last), probe / norm)
        return Pace(step, estimate, self.square + square, jnp.maximum(self.steepest, square), self.strides + 1, probe)


class Below(Protocol):
    """What a search asks of a method: which variables a client settles, how, and what it takes for the hypergradient there.

    ``kept`` is what the steps follow from, and begins with each search.
    """

    @property
    def train_batches(self) -> int: ...
    @property
    def val_batches(self) -> int: ...
    @property
    def gradients(self) -> int:
        """How many `settled` computes, each time."""

    def read(self, state: Any) -> Tree:
        """The variables, of a client or of a server where they are shared."""

    def put(self, server: Any, inner: Tree) -> Any:
        """The server, or its point, with these variables where they are shared."""

    def after(self, local: Any, inner: Tree) -> Any:
        """A client that has searched, with these variables where they are its own."""

    def start(self, inner: Tree) -> Any: ...
    def calls(self) -> Calls: ...
    def look(self, outer: Tree, inner: Tree, batches: Batches, kept: Any) -> tuple[Any, Calls]: ...
    def settled(self, outer: Tree, inner: Tree, batches: Batches, kept: Any, times: int) -> Tree: ...
    def loss(self, outer: Tree, inner: Tree, batches: Batches, kept: Any) -> jax.Array:
        """What falls along the hypergradient."""

    def estimate(self, outer: Tree, inner: Tree, batches: Batches, kept: Any) -> tuple[Tree, Calls]: ...


class Solving(NamedTuple):
    """By an estimator of the hypergradient, where y is settled by its curvature."""

    below: steps.Inner

    @property
    def train_batches(self) -> int:
        return self.below.train_batches

    @property
    def val_batches(self) -> int:
        return int(self.below.hypergradient.val_batches)

    @property
    def gradients(self) -> int:
        return self.below.ahead

    def read(self, state: Any) -> Tree:
        return state.inner

    def put(self, server: Any, inner: Tree) -> Any:
        return server._replace(inner=inner)

    def after(self, local: Any, inner: Tree) -> Any:
        return local._replace(inner=inner, kept=local.kept.anew(inner))

    def start(self, inner: Tree) -> steps.Kept:
        return self.below.start(inner, jax.random.key(0))

    def calls(self) -> Calls:
        return no_calls(self.below.hypergradient)

    def look(self, outer: Tree, inner: Tree, batches: Batches, kept: steps.Kept) -> tuple[steps.Kept, Calls]:
        return self.below.look((outer, inner), batches, kept)

    def settled(self, outer: Tree, inner: Tree, batches: Batches, kept: steps.Kept, times: int) -> Tree:
        return self.below.settled(outer, inner, batches, kept, times)[0]

    def loss(self, outer: Tree, inner: Tree, batches: Batches, kept: steps.Kept) -> jax.Array:
        return self.below.problem.outer_loss(outer, inner, batches.val(0))

    def estimate(self, outer: Tree, inner: Tree, batches: Batches, kept: steps.Kept) -> tuple[Tree, Calls]:
        (estimate,), used = self.below.estimator(kept)(self.below.problem, ((outer, inner),), batches)
        return estimate, used


def solving(problem: BilevelProblem, hypergradient: Any, batch_size: int | None) -> Solving:
    """With steps of y that set themselves, whatever the rounds do."""
    return Solving(steps.settling(problem, hypergradient, None, None, batch_size))


class Look(NamedTuple):
    """x, y where it is shared, and how long the first step of a search is; 0 where nobody knows yet."""

    outer: Tree
    inner: Tree
    probe: jax.Array


class Found(NamedTuple):
    """How far a client went, that distance over the root mean square of its hypergradients, how long its first step was, over
    what share of the numbers of x it went, and its y where it is shared."""

    away: Tree
    rate: jax.Array
    probe: jax.Array
    spread: jax.Array
    inner: Tree


def unchanged(server: Any) -> Any:
    return server


class Search(NamedTuple):
    """The exchange in which clients look for the scale of x, each by itself: before the first round and when asked to."""

    problem: BilevelProblem
    above: steps.Outer
    below: Below
    sizes: tuple[int | None, int | None]
    anew: Callable[[Any], Any] = unchanged
    """What a search does to the rest of the server's state: momenta from before it are of no use."""

    @property
    def shared(self) -> bool:
        return self.problem.lower_level == "global"

    def plan(self, *phases: Item) -> Plan:
        """A plan whose rounds are ``phases`` and the searches that these ask for; the first round is a search alone.  For
        servers with x as ``outer``, y as ``inner`` where it is shared (or both within ``point``) and ``kept``."""
        if not self.above.itself:
            return phases

        def send(server: Any) -> Look:
            point, kept = getattr(server, "point", server), server.kept
            probe = jnp.where(kept.guess, 0, steps.PROBE * kept.reach)
            return Look(point.outer, self.below.read(point) if self.shared else None, probe)

        def absorb(server: Any, mean: Found) -> Any:
            point = getattr(server, "point", server)
            outer, kept = self.above.found(point.outer, server.kept, mean.away, mean.rate, mean.probe, mean.spread)
            new = point._replace(outer=outer)
            new = self.below.put(new, mean.inner) if self.shared else new
            server = server._replace(point=new) if point is not server else new
            return self.anew(server._replace(kept=kept))

        phase = Phase("search", send, self.work, absorb)
        return (
            Repeat(phases, 1, lambda server: jnp.where(server.kept.searches > 0, 0, 1)),
            Repeat((phase,), steps.AGAIN, lambda server: server.kept.searches),
        )

    def work(self, message: Look, local: Any, data: LocalData, key: jax.Array) -> tuple[Found, Any]:
        """`STRIDES` steps of x, y settled before each; a minibatch has the rows of all local steps of a round."""
        below = self.below
        train, val = (None if size is None else self.above.local_steps * size for size in self.sizes)
        sampler = Sampler(train, val, below.train_batches, below.val_batches)

        guess = steps.PROBE * steps.first_distance(message.outer)

        def step(walk: tuple[Any, ...], batches: Batches) -> tuple[tuple[Any, ...], None]:
            here, pace, sound, then, settled, calls = walk
            kept, looked = below.look(here[0], here[1], batches, here[2])

            def at(point: Any) -> tuple[Any, jax.Array]:
                outer, inner, kept = point
                inner = below.settled(outer, inner, promising, kept, SETTLING)
                return (outer, inner, kept), below.loss(outer, inner, promising, kept)

            # Both on the rows of the last g, and y settled as often: what is left between their losses is what the step did.
            promising = Batches(data, then)
            both = jax.tree.map(lambda *pair: jnp.stack(pair), (*here[:2], kept), sound)
            points, losses = jax.lax.map(at, both)
            here, sound = (jax.tree.map(lambda leaf, number=number: leaf[number], points) for number in (0, 1))
            settled = None if self.shared else select(pace.strides == 0, here[1], settled)
            estimate, used = below.estimate(here[0], here[1], batches, here[2])
            back = pace.too_far(estimate) | pace.in_vain(losses, subtract(sound[0], here[0]))
            ahead = pace.after(estimate, losses[0], guess)
            sound, pace, then = select(back, (sound, pace.taken_back(), then), (here, ahead, batches.draws))
            calls = calls.plus(looked).plus(used).plus(Calls(gradients=2 * SETTLING * below.gradients))
            outer = self.problem.into_set(step_along(sound[0], -pace.step, pace.last))
            return ((outer, *sound[1:]), pace, sound, then, settled, calls), None

        zero, inner = jnp.zeros((), dtype_of(message.outer)), message.inner if self.shared else below.read(local)
        start = message.outer, inner, below.start(inner)
        pace = Pace(zero, zeros(message.outer), zero, zero, zero, message.probe)
        drawn = sampler.draw(data, key, STRIDES)
        then = jax.tree.map(lambda rows: rows[0], drawn)
        first = (start, pace, start, then, None if self.shared else inner, below.calls())
        strode = jax.lax.scan(lambda held, rows: step(held, Batches(data, rows)), first, drawn, length=STRIDES)
        ((outer, inner, _), pace, _, _, settled, calls), _ = strode
        if not self.shared:
            local = below.after(local, settled)
        local = counted(local, calls)
        away, probe = subtract(message.outer, outer), jnp.where(pace.probe == 0, guess, pace.probe)
        far = jnp.maximum(squared_norm(away), probe**2)  # at a wall a client goes nowhere
        rate = jnp.where(pace.square > 0, jnp.sqrt(pace.strides * far / jnp.maximum(pace.square, steps.TINY)), 0)
        return Found(away, rate, probe, steps.spread_of(away), inner if self.shared else None), local
