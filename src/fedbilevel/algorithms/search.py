"""The exchange in which clients look for the scale of x, before the first round of steps that set themselves.

Each client by itself settles y by 32 inner steps before each of ten hypergradients g, and walks by eta g: the first step is
0.2 r long (r as in `fedbilevel.algorithms.steps`), the others by

    eta <- eta min(1 / (1 - <g, g before> / max(||g||^2, ||g before||^2)), 3)

to where a gradient that goes on changing like this would vanish.  The server takes the mean of where clients arrive, and r
becomes the distance from the start.  Each client also tells how far it went itself (its first step at least), over the root
mean square of its g; the server's first step is at most the mean of that.  The lengths of g themselves would not do: where
clients disagree, that of their mean is up to forty times shorter.  Clients search again where the round after the first search
says that they stopped short, or after the server took a move back.  Momenta start anew after a search.

With a local lower level this is what clients do anyway, but for local steps that find their own length.  With a global one they
search with y and Hessians of their own, which is another problem: not the right answer, but the right scale, and an x and a y
to begin at.

Up per client: x, a number, and y where it is shared; down: the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.calculus import Tree, counted, dtype_of, no_calls, squared_norm, step_along, subtract, zeros
from fedbilevel.plan import Item, Phase, Repeat
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler

SETTLING = 8
"""Times as many inner steps before a hypergradient as in a round."""
STRIDES = 10


class Pace(NamedTuple):
    """Of a search: the step of x, the last hypergradient, and the sum of all their squared norms."""

    step: jax.Array
    last: Tree
    square: jax.Array

    def after(self, estimate: Tree, probe: jax.Array) -> Pace:
        square = squared_norm(estimate)
        first = probe / jnp.sqrt(jnp.maximum(square, steps.TINY))
        step = jnp.where(self.square > 0, steps.strode(self.step, estimate, self.last), first)
        return Pace(step, estimate, self.square + square)


class Look(NamedTuple):
    """x, y where it is shared, and how long the first step of a search is."""

    outer: Tree
    inner: Tree
    probe: jax.Array


class Found(NamedTuple):
    """How far a client went, that distance over the root mean square of its hypergradients, and its y where it is shared."""

    away: Tree
    rate: jax.Array
    inner: Tree


def unchanged(server: Any) -> Any:
    return server


class Search(NamedTuple):
    """The exchange in which clients look for the scale of x, each by itself: before the first round and when asked to."""

    problem: BilevelProblem
    above: steps.Outer
    hypergradient: Any
    sizes: tuple[int | None, int | None]
    anew: Callable[[Any], Any] = unchanged
    """What a search does to the rest of the server's state: momenta from before it are of no use."""

    @property
    def shared(self) -> bool:
        return self.problem.lower_level == "global"

    def plan(self) -> tuple[Item, ...]:
        """What a plan begins with, for servers with x as ``outer``, y as ``inner`` where it is shared (or both within
        ``point``) and ``kept``."""
        if not self.above.itself:
            return ()

        def send(server: Any) -> Look:
            point = getattr(server, "point", server)
            return Look(point.outer, point.inner if self.shared else None, steps.PROBE * server.kept.reach)

        def absorb(server: Any, mean: Found) -> Any:
            point = getattr(server, "point", server)
            outer, kept = self.above.found(point.outer, server.kept, mean.away, mean.rate)
            new = {"outer": outer, "inner": mean.inner} if self.shared else {"outer": outer}
            new = {"point": point._replace(**new)} if point is not server else new
            return self.anew(server._replace(**new, kept=kept))

        phase = Phase("search", send, self.work, absorb)
        return (Repeat((phase,), steps.AGAIN, lambda server: server.kept.searches),)

    def work(self, message: Look, local: Any, data: LocalData, key: jax.Array) -> tuple[Found, Any]:
        """`STRIDES` steps of x, y settled before each."""
        below = steps.settling(self.problem, self.hypergradient, None, None, self.sizes[0])
        sampler = Sampler(*self.sizes, below.train_batches, self.hypergradient.val_batches)

        def step(walk: tuple[Any, ...], batches: Batches) -> tuple[tuple[Any, ...], None]:
            outer, inner, pace, kept, calls = walk
            kept, looked = below.look((outer, inner), batches, kept)
            inner, settling = below.settled(outer, inner, batches, kept, SETTLING)
            (estimate,), used = below.estimator(kept)(self.problem, ((outer, inner),), batches)
            pace = pace.after(estimate, message.probe)
            outer = self.problem.into_set(step_along(outer, -pace.step, estimate))
            return (outer, inner, pace, kept, calls.plus(looked).plus(settling).plus(used)), None

        zero, inner = jnp.zeros((), dtype_of(message.outer)), message.inner if self.shared else local.inner
        begun = (
            Pace(zero, zeros(message.outer), zero),
            below.start(inner, jax.random.key(0)),
            no_calls(self.hypergradient),
        )
        first = (message.outer, inner, *begun)
        (outer, inner, pace, _, calls), _ = sampler.walk(step, first, data, key, STRIDES)
        local = counted(local if self.shared else local._replace(inner=inner), calls)
        away = subtract(message.outer, outer)
        far = jnp.maximum(squared_norm(away), message.probe**2)  # at a wall a client goes nowhere
        rate = jnp.where(pace.square > 0, jnp.sqrt(STRIDES * far / jnp.maximum(pace.square, steps.TINY)), 0)
        return Found(away, rate, inner if self.shared else None), local
