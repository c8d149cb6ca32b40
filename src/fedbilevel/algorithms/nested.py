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

from fedbilevel.algorithms.local import inner_gradients
from fedbilevel.calculus import Calls, Tree, add, both_gradients, hessian_vector, no_calls, step_along, subtract, zeros
from fedbilevel.hypergradients.base import assemble
from fedbilevel.plan import Phase, ServerStep
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, draw_round


class Held(NamedTuple):
    """What a client keeps of the current round, x and y as it was last sent them, and how much it computed."""

    outer: Tree
    inner: Tree
    calls: Calls


def enroll(problem: BilevelProblem, key: jax.Array) -> Held:
    outer, inner = problem.init(key)
    return Held(problem.into_set(outer), inner, no_calls())


def one_batch(
    data: LocalData, key: jax.Array, batch_size: int | None, outer_batch_size: int | None = None, val: bool = False
) -> Batches:
    """A training minibatch, ``.inner()``, and with ``val`` a validation minibatch, ``.val(0)``."""
    draws = draw_round(
        data, key, 1, batch_size=batch_size, outer_batch_size=outer_batch_size if val else None, val_batches=int(val)
    )
    return Batches(data, jax.tree.map(lambda rows: rows[0], draws))


def broadcast() -> Phase:
    """x to every client; nothing comes back."""

    def work(outer: Tree, local: Any, data: LocalData, key: jax.Array) -> tuple[tuple[()], Any]:
        return (), local._replace(outer=outer)

    return Phase("broadcast", lambda server: server.outer, work, lambda server, mean: server)


def inner_phases(problem: BilevelProblem, step: Any, local_steps: int, batch_size: int | None) -> tuple[Phase, ...]:
    """FedInn, for a server state with ``outer``, ``inner`` and ``direction``: one exchange or, with tau > 1, two."""

    def anchor(inner: Tree, local: Any, data: LocalData, key: jax.Array) -> tuple[Tree, Any]:
        (gradient,) = inner_gradients(problem, ((local.outer, inner),), one_batch(data, key, batch_size))
        return gradient, local._replace(inner=inner, calls=local.calls.plus(Calls(gradients=1)))

    def settle(server: Any, mean: Tree) -> Any:
        if local_steps == 1:
            return server._replace(inner=step_along(server.inner, -step, mean))
        return server._replace(direction=mean)

    first = Phase("anchor", lambda server: server.inner, anchor, settle)
    if local_steps == 1:
        return (first,)
    return first, inner_steps(problem, step, local_steps, batch_size)


def inner_steps(problem: BilevelProblem, step: Any, local_steps: int, batch_size: int | None) -> Phase:
    """The local steps of FedInn from the y each client holds, towards the mean gradient the server sends."""

    def work(direction: Tree, local: Any, data: LocalData, key: jax.Array) -> tuple[Tree, Any]:
        def walk(inner: Tree, drawn: Any) -> tuple[Tree, None]:
            points = ((local.outer, inner), (local.outer, local.inner))
            now, there = inner_gradients(problem, points, Batches(data, drawn))
            return step_along(inner, -step / local_steps, add(subtract(now, there), direction)), None

        draws = draw_round(data, key, local_steps, batch_size=batch_size)
        inner, _ = jax.lax.scan(walk, local.inner, draws, length=local_steps)
        return inner, local._replace(calls=local.calls.plus(Calls(gradients=2 * local_steps)))

    return Phase("inner", lambda server: server.direction, work, lambda server, mean: server._replace(inner=mean))


def no_direction(inner: Tree, local_steps: int) -> Tree:
    """The server's place for q, where it needs one."""
    return None if local_steps == 1 else zeros(inner)


def draw_terms(terms: int) -> ServerStep:
    """The server draws how many factors the series gets, uniform on 0 .. terms - 1."""
    return ServerStep(
        "truncate", lambda server, key: server._replace(factors=jax.random.randint(key, (), 0, terms, jnp.int32))
    )


def inner_gradient_of_outer(
    problem: BilevelProblem, local: Any, data: LocalData, key: jax.Array, outer_batch_size: int | None
) -> tuple[Tree, Any]:
    """grad_y f(x, y; B) at what the client holds: where every series starts."""
    batch = one_batch(data, key, None, outer_batch_size, val=True).val(0)
    _, in_inner = both_gradients(problem.outer_loss, local.outer, local.inner, batch)
    return in_inner, local._replace(calls=local.calls.plus(Calls(gradients=1)))


def factor(
    problem: BilevelProblem,
    vector: Tree,
    step: Any,
    local: Any,
    data: LocalData,
    key: jax.Array,
    batch_size: int | None,
) -> tuple[Tree, Any]:
    """(I - step d2g/dy2) vector, on a minibatch of its own."""
    batch = one_batch(data, key, batch_size).inner()
    image = hessian_vector(problem.inner_loss, local.outer, local.inner, batch, vector)
    return step_along(vector, -step, image), local._replace(calls=local.calls.plus(Calls(hessian_vector=1)))


def hypergradient_share(
    problem: BilevelProblem, adjoint: Tree, local: Any, data: LocalData, key: jax.Array, sizes: tuple[Any, Any]
) -> tuple[Tree, Any]:
    """grad_x f - (d2g/dxdy) p at what the client holds, p given."""
    batches = one_batch(data, key, *sizes, val=True)
    in_outer, _ = both_gradients(problem.outer_loss, local.outer, local.inner, batches.val(0))
    share = assemble(problem, (local.outer, local.inner), in_outer, adjoint, batches.inner())
    return share, local._replace(calls=local.calls.plus(Calls(gradients=1, cross=1)))
