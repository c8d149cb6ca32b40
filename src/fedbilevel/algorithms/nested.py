"""What FedNest, LFedNest, AggITD and FedMBO share: a round of several exchanges in which x is sent once.

The server first broadcasts x, which the clients keep for the round; later messages carry only what is new.  The inner
variable is then improved by `inner_phases`, the FedInn of FedNest: with q = mean_i grad_y g_i(x, y; B_i), every client does

    y_i <- y_i - (beta / tau) (grad_y g_i(x, y_i; B) - grad_y g_i(x, y; B) + q)        tau times from y_i = y, then the mean

where both gradients of a difference use the same minibatch.  Where q = 0 nobody moves: there is no client drift.  With tau = 1
the difference cancels and all clients would make the same step: the server makes it, and the second exchange is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import automatic
from fedbilevel.algorithms.local import Told, inner_gradients
from fedbilevel.algorithms.search import Search, solving
from fedbilevel.calculus import Calls, Tree, add, counted, hessian_vector, no_calls, step_along, subtract, zeros
from fedbilevel.hypergradients import assemble, outer_gradients
from fedbilevel.plan import Item, Phase, Plan, ServerStep, View
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler


class Held(NamedTuple):
    """What a client keeps of the current round, x and y as it was last sent them, how much it computed, and its curvature where
    steps follow from it."""

    outer: Tree
    inner: Tree
    calls: Calls
    curvature: Any


def enroll(problem: BilevelProblem, below: steps.Shared, key: jax.Array, hypergradient: Any = None) -> Held:
    outer, inner = problem.start(key)
    return Held(outer, inner, no_calls(hypergradient), below.start(inner, key))


class Nested(NamedTuple):
    """What clients and server do on a problem, for client states and server states with ``outer`` and ``inner``.

    The functions with arguments ``(message, local, data, key)`` are the ``work`` of a phase, or a part of it.
    """

    problem: BilevelProblem
    batch_size: int | None
    outer_batch_size: int | None
    local_steps: int
    above: steps.Outer
    below: steps.Shared
    """Its steps: beta, and that of the series where there is one."""

    def plan(self, *phases: Item) -> Plan:
        """Rounds of these phases, and the searches that they ask for."""
        sizes = self.batch_size, self.outer_batch_size
        below = solving(self.problem, automatic(self.batch_size), self.batch_size)
        return Search(self.problem, self.above, below, sizes).plan(*phases)

    def view(self, server: Any, local: Any) -> View:
        """The last y, not a mean: so long rounds are so few that a mean would remember y from long ago."""
        return View(inner=server.inner, calls=local.calls)

    def no_direction(self, variable: Tree) -> Tree:
        """The server's place for a mean direction, where it needs one."""
        return None if self.local_steps == 1 else zeros(variable)

    def gradient(self, inner: Tree, local: Any, data: LocalData, key: jax.Array) -> tuple[Told, Any]:
        """grad_y g(x, y; B), at the y that is sent."""
        batches = Sampler(self.batch_size).once(data, key)
        (share,) = inner_gradients(self.problem, ((local.outer, inner),), batches)
        local = self.below.look((local.outer, inner), batches, local._replace(inner=inner))
        return Told(share, self.below.sent(local)), counted(local, Calls(gradients=1))

    def settle(self, server: Any, mean: Told) -> Any:
        """The mean gradient is where clients go or, with tau = 1, the step of all."""
        server = server._replace(largest=mean.largest)
        if self.local_steps > 1:
            return server._replace(direction=mean.value)
        return server._replace(inner=step_along(server.inner, -self.below.rates(mean.largest)[0], mean.value))

    def inner_steps(self, message: Told, local: Any, data: LocalData, key: jax.Array) -> tuple[Tree, Any]:
        """The local steps of FedInn from the y each client holds, towards the mean gradient the server sends."""
        direction, rate = message.value, self.below.rates(message.largest)[0] / self.local_steps

        def step(inner: Tree, batches: Batches) -> tuple[Tree, None]:
            now, there = inner_gradients(self.problem, ((local.outer, inner), (local.outer, local.inner)), batches)
            along = add(subtract(now, there), direction)
            return step_along(inner, -rate, along), None

        inner, _ = Sampler(self.batch_size).walk(step, local.inner, data, key, self.local_steps)
        return inner, counted(local, Calls(gradients=2 * self.local_steps))

    def inner_phases(self) -> tuple[Phase, ...]:
        """FedInn, for a server state with ``direction`` too: one exchange or, with tau > 1, two."""
        first = Phase("anchor", lambda server: server.inner, self.gradient, self.settle)
        second = Phase("inner", lambda server: Told(server.direction, server.largest), self.inner_steps, _set_inner)
        return (first,) if self.local_steps == 1 else (first, second)

    def series_start(self, inner: Tree, local: Any, data: LocalData, key: jax.Array) -> tuple[Tree, Any]:
        """grad_y f(x, y; B), at the y that is sent: where every series starts."""
        batches = Sampler(None, self.outer_batch_size, val_batches=1).once(data, key)
        ((_, in_inner),) = outer_gradients(self.problem, ((local.outer, inner),), batches)
        return in_inner, counted(local._replace(inner=inner), Calls(gradients=1))

    def factor(self, step: Any, vector: Tree, local: Any, data: LocalData, key: jax.Array) -> tuple[Tree, Any]:
        """(I - step d2g/dy2) vector, on a minibatch of its own."""
        batch = Sampler(self.batch_size).once(data, key).inner()
        image = hessian_vector(self.problem.inner_loss, local.outer, local.inner, batch, vector)
        return step_along(vector, -step, image), counted(local, Calls(hessian_vector=1))

    def hypergradient(self, adjoint: Tree, local: Any, data: LocalData, key: jax.Array) -> tuple[Tree, Any]:
        """grad_x f - (d2g/dxdy) p at what the client holds, p given."""
        batches = Sampler(self.batch_size, self.outer_batch_size, val_batches=1).once(data, key)
        point = local.outer, local.inner
        ((in_outer, _),) = outer_gradients(self.problem, (point,), batches)
        share = assemble(self.problem, point, in_outer, adjoint, batches.inner())
        return share, counted(local, Calls(gradients=1, cross=1))

    def descend(self, server: Any, mean: Tree) -> Any:
        outer, kept = self.above.along(server.outer, server.kept, mean)
        return server._replace(outer=outer, kept=kept)


def _set_inner(server: Any, mean: Tree) -> Any:
    return server._replace(inner=mean)


def _hold_outer(outer: Tree, local: Any, data: LocalData, key: jax.Array) -> tuple[tuple[()], Any]:
    return (), local._replace(outer=outer)


BROADCAST = Phase("broadcast", lambda server: server.outer, _hold_outer, lambda server, mean: server)
"""x to every client; nothing comes back."""


def draw_terms(terms: int) -> ServerStep:
    """The server draws how many factors the series gets, uniform on 0 .. terms - 1."""
    return ServerStep(
        "truncate", lambda server, key: server._replace(factors=jax.random.randint(key, (), 0, terms, jnp.int32))
    )
