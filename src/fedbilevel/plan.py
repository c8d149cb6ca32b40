"""What a federated algorithm is: a plan of pure functions.

A round is a short tuple of phases, each ``send -> work -> aggregate -> absorb``.  ``work`` is the only function that sees
client data; everything it returns as *reply* travels to the server, everything it returns as *local state* stays.  An
engine (``fedbilevel.engines``) decides where the functions run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fedbilevel.calculus import Tree
from fedbilevel.kernels import draw

SERVER = 0x7FFFFFFE
"""The client number whose keys are the server's own: no client has it."""


class Relay(NamedTuple):
    """What the server passes on from the clients' replies to single clients, after ``absorb``.

    ``pack(replies, weights, key)`` turns the stacked replies into stacked parcels, one for each client that was asked, in
    the same order; ``unpack(local, parcel)`` puts a client's own parcel into its local state.  A client whose reply was
    lost gets none: its reply is zeros and its weight 0.

    Attributes:
        pack: (stacked replies, weights, key) -> stacked parcels, one for each client that was asked.
        unpack: (local state, parcel) -> local state.
    """

    pack: Callable[[Tree, jax.Array, jax.Array], Tree]
    unpack: Callable[[Tree, Tree], Tree]


class Phase(NamedTuple):
    """One exchange between the server and the clients.

    ``aggregate(replies, weights)`` gets the stacked replies (leaves ``[clients, ...]``) and weights that sum to one; None
    is the weighted mean.  ``trace`` is ``work`` with a third result, the `LocalStep` of every local step, for analysis.
    The clients asked are the same in all phases of a round, so a client may keep what it was sent for the next phase.

    Attributes:
        name: Shown in tables and messages.
        send: server state -> message to every client.
        work: (message, local state, data, key) -> (reply, local state).  The only code that sees rows.
        absorb: (server state, aggregate) -> server state.
        aggregate: (stacked replies, weights) -> tree; None: the weighted mean.
        trace: ``work`` with the `LocalStep` of every step as a third result; None: cannot be traced.
        relay: A `Relay`, or None.
        recalls: Whether the reply is computed at what an earlier phase has sent, and a round may begin with it all the same.
        sketch: How many sums over rows the reply holds whose signs follow from the key, which everybody knows: as many of them
            as rows would tell the rows, so a real site answers such a phase in one exchange of a stage only.
    """

    name: str
    send: Callable[[Any], Tree]
    work: Callable[[Tree, Tree, Any, jax.Array], tuple[Tree, Tree]]
    absorb: Callable[[Any, Tree], Any]
    aggregate: Callable[[Tree, jax.Array], Tree] | None = None
    trace: Callable[[Tree, Tree, Any, jax.Array], tuple[Tree, Tree, LocalStep]] | None = None
    relay: Relay | None = None
    recalls: bool = False
    sketch: int = 0


class ServerStep(NamedTuple):
    """Something the server does alone, such as drawing a number: ``update(server state, key) -> server state``.

    Attributes:
        name: Shown in tables and messages.
        update: (server state, key) -> server state.
    """

    name: str
    update: Callable[[Any, jax.Array], Any]


class Repeat(NamedTuple):
    """Phases that run ``times`` times within one round, or as often as ``turns(server state)`` says, up to ``times``.

    ``turns`` is asked once, before the first repetition.

    Attributes:
        phases: Phases and server steps, in order.
        times: How often, at most.
        turns: server state -> how often; None: ``times``.
    """

    phases: Plan
    times: int
    turns: Callable[[Any], jax.Array] | None = None


Item: TypeAlias = "Phase | Repeat | ServerStep"
Plan: TypeAlias = "tuple[Item, ...]"


class LocalStep(NamedTuple):
    """What one client did in one local step t: where it stood, what it estimated there, and where that led.

    Attributes:
        outer: x_t, where the client stood.
        inner: y_t.
        outer_momentum: What the client estimated for x there: nu_t.
        inner_momentum: What it estimated for y: omega_t.
        proposed: x_{t+1}, before any averaging.
    """

    outer: Tree
    inner: Tree
    outer_momentum: Tree
    inner_momentum: Tree
    proposed: Tree


class View(NamedTuple):
    """What diagnostics may look at in one client's state; None where an algorithm has no such thing.

    The momenta (nu, omega) were estimated at ``(momentum_outer, momentum_inner)``, which for most methods is the point
    *before* the last update; omega at ``inner_momentum_outer`` where that is another point.

    Attributes:
        inner: The client's inner variable.
        outer_momentum: nu.
        inner_momentum: omega.
        momentum_outer: x where nu was estimated.
        momentum_inner: y where both were estimated.
        calls: How many derivatives the client computed.
        inner_momentum_outer: x where omega was estimated, if another.
    """

    inner: Tree = None
    outer_momentum: Tree = None
    inner_momentum: Tree = None
    momentum_outer: Tree = None
    momentum_inner: Tree = None
    calls: Tree = None
    inner_momentum_outer: Tree = None


def only_calls(server: Any, local: Tree) -> View:
    """The view of an algorithm that keeps no more on a client than the count of what it computed, or not even that."""
    return View(calls=getattr(local, "calls", None))


def _unsaid(*arguments: Any) -> Any:
    raise NotImplementedError("An Algorithm that no decorator completes must say its objective and its build itself.")


class Algorithm(NamedTuple):
    """A federated algorithm.

    ``settings`` is a tree whose leaves are the float hyper-parameters and whose structure is all the rest; ``build``
    makes the algorithm from settings.  An engine therefore compiles ``build(settings)`` once and runs it for any step
    sizes.  `fedbilevel.algorithms.arguments` derives the name, the settings and ``build`` from a function's arguments.

    Attributes:
        init: key -> server state: what the server knows.
        enroll: key -> one client's local state: what never leaves it.
        plan: The phases of a round.
        outer: server state -> the outer variable, the answer.
        view: (server state, local state) -> `View`, for diagnostics.
        objective: (outer, inner, one client's data) -> its share of the objective.
        check: `ClientData` -> None; raises where the data do not fit.
        remark: server state at the end -> a warning, or None.
        name: Shown in tables and messages.
        settings: The hyper-parameters; float ones are leaves of this tree.
        build: settings -> the algorithm with these.
        local_steps: Steps of a client between two exchanges.
        problem: The `BilevelProblem`, where there is one.
        linear: The leaf of training rows whose products with coefficients kernels take, where there is one.
    """

    init: Callable[[jax.Array], Any]
    """key -> server state: what the server knows."""
    enroll: Callable[[jax.Array], Tree]
    """key -> one client's local state: what never leaves it.  Gets the same key as ``init``."""
    plan: Plan
    outer: Callable[[Any], Tree] = lambda server: server.outer
    """server state -> the outer variable, the answer."""
    view: Callable[[Any, Tree], View] = only_calls
    objective: Callable[[Tree, Tree, Any], jax.Array] = _unsaid
    """(outer, inner, one client's data) -> this client's share of the objective, over all its data."""
    check: Callable[[Any], None] = lambda data: None
    """ClientData -> None; raises one clear sentence when the data do not fit."""
    remark: Callable[[Any], str | None] = lambda server: None
    """server state at the end of a run -> what to warn of, if anything."""
    name: str = ""
    settings: Any = None
    build: Callable[[Any], Algorithm] = _unsaid
    local_steps: int = 1
    problem: Any = None
    """The BilevelProblem where there is one: diagnostics solve it to know the true hypergradient."""
    linear: str | None = None
    """The leaf of training rows whose products with coefficients kernels take: engines may pack it for them."""


def client_key(seed_key: jax.Array, round_index: Any, ordinal: Any, client: Any) -> jax.Array:
    """The key of one client in one phase of one round: a function of these numbers, never of the order of arrival."""
    return folded(seed_key, round_index, ordinal, client)


def folded(key: jax.Array, *numbers: Any) -> jax.Array:
    """``jax.random.fold_in`` of one number after the other.

    By a kernel where one is at hand, else in a loop: XLA takes longer to compile the generator than most of what a server
    does, and would do so for every number."""
    if draw.serves(key):
        return draw.fold(key, *numbers)
    each = jnp.stack([jnp.asarray(number, jnp.uint32) for number in numbers])
    found: jax.Array = jax.lax.scan(lambda held, number: (jax.random.fold_in(held, number), None), key, each)[0]
    return found


def weighted_mean(replies: Tree, weights: jax.Array) -> Tree:
    return jax.tree.map(lambda a: jnp.tensordot(weights.astype(a.dtype), a, axes=1), replies)


def sums_up(phase: Phase) -> bool:
    """Whether the server needs no more of the replies than their weighted sum."""
    return phase.aggregate is None and phase.relay is None


def phases_of(plan: Plan) -> Iterator[tuple[Phase, int]]:
    """Every phase with how often it runs in a round, at most."""
    for item in plan:
        if isinstance(item, Repeat):
            yield from ((phase, times * item.times) for phase, times in phases_of(item.phases))
        elif isinstance(item, Phase):
            yield item, 1


def length_of(plan: Plan) -> int:
    """How many ordinals a round has, at most."""
    return sum(item.times * length_of(item.phases) if isinstance(item, Repeat) else 1 for item in plan)
