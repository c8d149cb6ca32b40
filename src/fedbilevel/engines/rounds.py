"""One round of any algorithm's plan over all clients, as a pure function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree, bytes_of, select, squared_norm, subtract
from fedbilevel.engines.fixed import fixed_mean
from fedbilevel.engines.fleet import AXIS, LINE, Fleet, Layout, map_clients
from fedbilevel.engines.messages import Moved, arrived
from fedbilevel.plan import (
    SERVER,
    Algorithm,
    Item,
    LocalStep,
    Phase,
    Plan,
    Repeat,
    ServerStep,
    client_key,
    length_of,
    phases_of,
    weighted_mean,
)
from fedbilevel.sampling import LocalData, scaled

KeyOf = Callable[[int], jax.Array]
PARTICIPATION = 0x7FFFFFFF
"""The client number whose key decides who takes part and who drops out: no client has it."""


class State(NamedTuple):
    """Everything a run carries from round to round, and so everything a checkpoint holds."""

    server: Any
    local: Tree
    contacts: jax.Array
    """Clients asked for work since the counters were last read, and..."""
    replies: jax.Array
    """...how many answered."""
    consensus: jax.Array
    """Weighted mean squared distance of the replied outer variables from their mean, in the latest round."""
    messages: jax.Array
    """Messages sent to clients in each phase of the plan since the counters were last read, and..."""
    answers: jax.Array
    """...how many were answered."""


class Cohort(NamedTuple):
    """Who takes part in a round: ``positions`` among the clients at hand (None: all), ``active`` whose reply arrives,
    ``weights`` with which replies count."""

    positions: jax.Array | None
    active: jax.Array
    weights: jax.Array
    asked: jax.Array
    ranks: jax.Array | None = None
    order: jax.Array | None = None

    def together(self, tree: Tree) -> Tree:
        """What every member gives, of all hosts and in the cohort's own order: sums do not depend on who holds whom."""
        if self.order is None:
            return tree
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True)[self.order], tree)


def start(algorithm: Algorithm, places: int, key: jax.Array) -> State:
    """The state before round 0 of so many clients, each of which starts from the same y_1."""
    local = algorithm.enroll(key)
    stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (places, *leaf.shape)), local)
    zero = jnp.zeros((), jnp.int32)
    each = jnp.zeros(sum(1 for _ in phases_of(algorithm.plan)), jnp.int32)
    return State(algorithm.init(key), stacked, zero, zero, jnp.zeros((), float), each, each)


def counters_at_zero(state: State) -> State:
    """After the host has read them."""
    each: Any = np.zeros(state.messages.shape, np.int32)
    zero: Any = np.zeros(state.contacts.shape, np.int32)
    return state._replace(contacts=zero, replies=zero, messages=each, answers=each)


def choose(fleet: Fleet, layout: Layout, seed_key: jax.Array, number: Any) -> Cohort:
    """Sample the cohort of round ``number`` and let each member drop out with the given probability."""
    if layout.cohort is not None or layout.dropout:  # keys that nobody draws from would still be traced
        sample_key, drop_key = jax.random.split(client_key(seed_key, number, 0, PARTICIPATION))
    positions, weights, ranks, order = None, fleet.weights, None, None
    if layout.cohort is None:
        taking_part = fleet.ids < layout.clients
    else:
        if fleet.drawn is not None:
            given = fleet.drawn
            rows = (given.positions, given.times, given.ranks, given.order)
            positions, times, ranks, order = jax.tree.map(lambda leaf: leaf[number - given.first], rows)
        else:
            positions, times = draw(sample_key, layout, fleet.ends)
        if layout.gathers_cohort:
            weights = weights[positions]
        else:
            times = jnp.zeros(layout.places, jnp.int32).at[positions].set(times)[fleet.ids]
            positions = None
        taking_part = times > 0
        weights = times.astype(weights.dtype) if layout.proportional else weights
    active = taking_part
    if layout.dropout:
        ids = fleet.ids if positions is None else fleet.ids[positions]
        chances = jax.vmap(lambda client: jax.random.uniform(jax.random.fold_in(drop_key, client), dtype=jnp.float32))(
            ids
        )
        active = active & (chances >= fleet.dropout)
    asked = jnp.sum(taking_part, dtype=jnp.int32)
    return Cohort(positions, active, jnp.where(active, weights, 0), asked, ranks, order)


def draw(key: jax.Array, layout: Layout, ends: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """As many different clients as a cohort has, and how often each was drawn: 0 for those that only fill up a place."""
    assert layout.cohort is not None
    if not layout.proportional:
        drawn = jnp.sort(draw_distinct(key, layout.clients, layout.cohort))
        return drawn.astype(jnp.int32), jnp.ones(layout.cohort, jnp.int32)
    assert ends is not None
    drawn = draw_in_proportion(key, ends, layout.cohort)
    here, after = (jnp.searchsorted(drawn, drawn, side=side).astype(jnp.int32) for side in ("left", "right"))
    first = here == jnp.arange(layout.cohort, dtype=jnp.int32)
    # Places of clients that were drawn again go to the first clients that were not.
    few = min(2 * layout.cohort, layout.clients)
    others = jnp.argsort(jnp.zeros(few, bool).at[drawn].set(True, mode="drop"), stable=True).astype(jnp.int32)
    again = jnp.cumsum(~first, dtype=jnp.int32) - 1
    return jnp.where(first, drawn, others[again]), jnp.where(first, after - here, 0)


@partial(jax.jit, static_argnames=("layout",))
def draw_ahead(layout: Layout, ends: jax.Array | None, seed: Any, first: Any) -> tuple[jax.Array, jax.Array]:
    """The cohorts of a stretch of rounds, whose numbers count from ``first``: as `choose` would draw them."""

    def one(number: Any) -> tuple[jax.Array, jax.Array]:
        key = client_key(jax.random.key(seed), number, 0, PARTICIPATION)
        return draw(jax.random.split(key)[0], layout, ends)

    return jax.lax.map(one, first + jnp.arange(layout.stretch, dtype=jnp.int32))  # type: ignore[no-any-return]


def draw_distinct(key: jax.Array, clients: int, count: int) -> jax.Array:
    """``count`` different clients, every choice being equally likely, at a cost that follows ``count`` alone.

    Twice as many are drawn with repetition, and anew until enough of them differ.  That treats all clients alike, so the first
    ``count`` different ones are a fair choice.
    """
    if 2 * count > clients:
        return jax.random.permutation(key, clients)[:count]

    def draw(held: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
        key, own = jax.random.split(held[0])
        numbers = jax.random.randint(own, (2 * count,), 0, clients, jnp.int32)
        order = jnp.argsort(numbers, stable=True)
        new = jnp.ones(2 * count, bool).at[1:].set(numbers[order[1:]] != numbers[order[:-1]])
        first = jnp.zeros(2 * count, bool).at[order].set(new)
        return key, numbers[jnp.argsort(~first, stable=True)[:count]], jnp.sum(first, dtype=jnp.int32)

    drawn: jax.Array = jax.lax.while_loop(
        lambda held: held[2] < count, draw, (key, jnp.zeros(count, jnp.int32), jnp.zeros((), jnp.int32))
    )[1]
    return drawn


def draw_in_proportion(key: jax.Array, ends: jax.Array, count: int) -> jax.Array:
    """``count`` clients in rising order, some perhaps more than once: on average each in proportion to its weight, and so the
    equal mean of the drawn replies is, on average, the weighted mean of all.

    Stratified sampling: the clients share a line (``ends``), which is cut into ``count`` equal pieces, and one point is drawn
    from each piece.  The cost follows ``count``, but for the logarithm of the number of clients.
    """
    cuts = np.arange(count + 1) * LINE // count
    points = cuts[:-1].astype(np.int32) + scaled(
        jax.random.bits(key, (count,), jnp.uint32), jnp.asarray(np.diff(cuts), jnp.uint32)
    )
    return jnp.searchsorted(ends, points, side="right").astype(jnp.int32)


def run_round(
    algorithm: Algorithm, layout: Layout, fleet: Fleet, seed_key: jax.Array, state: State, number: Any, watch: bool
) -> State:
    """Round ``number``; with ``watch`` the consensus error is measured too."""
    cohort = choose(fleet, layout, seed_key, number)
    ids = fleet.ids if cohort.positions is None else fleet.ids[cohort.positions]

    asked = total(cohort.asked, layout)
    answered = total(jnp.sum(cohort.active, dtype=jnp.int32), layout)

    def run(items: Plan, state: State, ordinal: Any) -> tuple[State, Any, Any]:
        """From this ``ordinal`` on; the other results: how often each phase of ``items`` ran, and the ordinal after them."""
        ran: list[Any] = [np.zeros(0, np.int32)]
        for item in compact(items):
            if isinstance(item, Repeat | Again):
                state, now, ordinal = repeat(item, state, ordinal)
                ran.append(now)
                continue
            key_of = partial(client_key, seed_key, number, ordinal)
            if isinstance(item, ServerStep):
                state = state._replace(server=item.update(state.server, key_of(SERVER)))
            else:
                state = run_phase(item, layout, fleet, state, cohort, (jax.vmap(key_of)(ids), key_of), watch)[0]
                ran.append(np.ones(1, np.int32))
            ordinal = ordinal + 1
        known = all(isinstance(now, np.ndarray) for now in ran)
        return state, (np if known else jnp).concatenate(ran), ordinal

    def repeat(item: Repeat | Again, state: State, ordinal: Any) -> tuple[State, Any, Any]:
        """The same of one item.  Where what runs does not depend on the state, nothing is counted in the loop."""
        if isinstance(item, Again):
            parts = item.parts
            each = ordinal + np.cumsum([0, *(length_of(part) for part in parts)], dtype=np.int32)
            pieces = [lambda state, n=n: run(parts[n], state, each[n])[0] for n in range(1, len(parts), 2)]

            def once(i: Any, state: State) -> State:
                state = run(parts[0], state, jnp.asarray(each)[2 * i])[0]
                after: State = jax.lax.switch(i, [*pieces, lambda state: state], state)
                return after

            state = jax.lax.fori_loop(0, len(pieces) + 1, once, state)
            return state, np.concatenate([often_in(part) for part in parts]), each[-1]
        times = (
            item.times if item.turns is None else jnp.minimum(item.turns(state.server), item.times).astype(jnp.int32)
        )
        if settled(item.phases):
            length = length_of(item.phases)
            state = jax.lax.fori_loop(
                0, times, lambda i, state: run(item.phases, state, ordinal + i * length)[0], state
            )
            return state, times * often_in(item.phases), ordinal + times * length

        def again(_: Any, held: tuple[State, Any, Any]) -> tuple[State, Any, Any]:
            state, now, ordinal = run(item.phases, held[0], held[2])
            return state, held[1] + now, ordinal

        held = (state, jnp.zeros(len(often_in(item.phases)), jnp.int32), jnp.asarray(ordinal))
        return jax.lax.fori_loop(0, times, again, held)  # type: ignore[no-any-return]

    state, often, _ = run(algorithm.plan, state, np.int32(0))
    return state._replace(
        contacts=state.contacts + asked,
        replies=state.replies + answered,
        messages=state.messages + asked * often,
        answers=state.answers + answered * often,
    )


class Again(NamedTuple):
    """What a plan does from a `Repeat` to where the same comes last, and in between: such a part, another, such a part, ..."""

    parts: tuple[Plan, ...]


def compact(plan: Plan) -> list[Item | Again]:
    """Repeats that come several times in a plan, but for their names, as one item: their phases are compiled once."""
    for start, item in enumerate(plan):
        places = [place for place, other in enumerate(plan) if isinstance(item, Repeat) and alike(item, other)]
        if len(places) < 2 or not settled(plan[start : places[-1]]):
            continue
        parts: list[Plan] = [(item,)]
        for place, after in pairwise(places):
            parts += [plan[place + 1 : after], (plan[after],)]
        return [*plan[:start], Again(tuple(parts)), *compact(plan[places[-1] + 1 :])]
    return [*plan]


def alike(one: Item, other: Item) -> bool:
    """Whether they are the same functions, whatever their names."""
    if not isinstance(one, Repeat) or not isinstance(other, Repeat):
        return type(one) is type(other) and all(a is b for a, b in zip(one[1:], other[1:], strict=True))
    same = one.turns is other.turns and (one.times, len(one.phases)) == (other.times, len(other.phases))
    return same and all(map(alike, one.phases, other.phases))


def settled(plan: Plan) -> bool:
    """Whether it does not depend on the server's state how often each phase runs."""
    repeats = [item for item in plan if isinstance(item, Repeat)]
    return all(item.turns is None and settled(item.phases) for item in repeats)


def often_in(plan: Plan) -> Any:
    """How often each phase of a plan runs, at most."""
    return np.array([times for _, times in phases_of(plan)], np.int32)


def run_traced_round(
    algorithm: Algorithm, layout: Layout, fleet: Fleet, seed_key: jax.Array, state: State, number: Any
) -> tuple[State, LocalStep]:
    """Round ``number`` of a plan of a single phase that records its local steps."""
    (phase,) = algorithm.plan
    cohort = choose(fleet, layout, seed_key, number)
    key_of = partial(client_key, seed_key, number, 0)
    keys = jax.vmap(key_of)(fleet.ids), key_of
    assert isinstance(phase, Phase)
    tracing = phase._replace(work=phase.trace)  # type: ignore[arg-type]
    return run_phase(tracing, layout, fleet, state, cohort, keys, watch=False)


def run_phase(
    phase: Phase, layout: Layout, fleet: Fleet, state: State, cohort: Cohort, keys: tuple[jax.Array, KeyOf], watch: bool
) -> tuple[State, Any]:
    """``keys``: those of the clients taking part, and the key of any number, such as the server's.

    The second result is what ``work`` returns beyond its reply and the local state, of every client.
    """
    message = phase.send(state.server)
    own = jax.tree.map(lambda leaf: leaf if cohort.positions is None else leaf[cohort.positions], state.local)
    replies, local, *beyond = map_clients(
        lambda data, item: phase.work(message, item[0], data, item[1]), fleet, (own, keys[0]), layout, cohort.positions
    )
    counting = cohort.weights
    if cohort.order is not None:
        replies, counting, layout = cohort.together(replies), cohort.together(counting), replace(layout, mesh=None)
    mass = total(jnp.sum(counting), layout)
    weights = counting / jnp.where(mass > 0, mass, 1)
    if layout.masks:
        replies = that_count(replies, weights)
    if layout.secure:
        mean = fixed_mean(gathered(replies, layout), gathered(counting, layout), fleet.weight)
    elif phase.aggregate is None:
        mean = jax.tree.map(lambda leaf: total(leaf, layout), weighted_mean(replies, weights))
    else:
        mean = phase.aggregate(gathered(replies, layout), gathered(weights, layout))
    if phase.relay is not None:
        parcels = phase.relay.pack(gathered(replies, layout), gathered(weights, layout), keys[1](SERVER))
        local = jax.vmap(phase.relay.unpack)(local, _own_share(parcels, layout, cohort))
    if layout.masks:
        local = jax.vmap(select)(cohort.active, local, own)
    if cohort.positions is not None:
        local = jax.tree.map(lambda whole, part: whole.at[cohort.positions].set(part), state.local, local)
    server = phase.absorb(state.server, mean)
    if layout.masks:
        server = select(mass > 0, server, state.server)
    consensus = state.consensus
    moved = isinstance(replies, Moved)
    if watch and (phase.aggregate is None or moved) and hasattr(found := arrived(replies, message), "outer"):
        middle = total(weighted_mean(found.outer, weights), layout) if moved else mean.outer
        spread = jax.vmap(lambda one: squared_norm(subtract(one, middle)))(found.outer)
        consensus = total(jnp.sum(weights.astype(spread.dtype) * spread), layout).astype(consensus.dtype)
    return state._replace(server=server, local=local, consensus=consensus), next(iter(beyond), None)


def that_count(tree: Tree, weights: jax.Array) -> Tree:
    """The clients' trees with zeros for clients of weight 0: what does not count must not count as 0 * NaN either."""
    return jax.tree.map(lambda leaf: jnp.where(weights.reshape(-1, *[1] * (leaf.ndim - 1)) > 0, leaf, 0), tree)


def total(value: Any, layout: Layout) -> Any:
    """Sum over the devices that share the clients."""
    return value if layout.mesh is None else jax.lax.psum(value, AXIS)


def largest(values: jax.Array, layout: Layout) -> jax.Array:
    """Over all clients, on whatever device."""
    return jnp.max(values) if layout.mesh is None else jax.lax.pmax(jnp.max(values), AXIS)


def gathered(tree: Tree, layout: Layout) -> Tree:
    return tree if layout.mesh is None else jax.lax.all_gather(tree, AXIS, tiled=True)


def _own_share(parcels: Tree, layout: Layout, cohort: Cohort) -> Tree:
    """The parcels of the clients on this device."""
    if cohort.ranks is not None:
        return jax.tree.map(lambda leaf: leaf[cohort.ranks], parcels)
    if layout.mesh is None:
        return parcels
    count = cohort.active.shape[0]
    first = jax.lax.axis_index(AXIS) * count
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), parcels)


class Traffic(NamedTuple):
    """Bytes of one client's messages, measured on the arrays that travel: in one round (with as many repetitions as
    there can be), and in one run of each phase, as ``(down, up)``."""

    down: int
    up: int
    phases: tuple[tuple[int, int], ...]


Reads = set[tuple[str, bool]]
"""Parts of a client's data that are read whole, and whether they must be cut to its size for that."""


def traffic(algorithm: Algorithm, fleet: Fleet) -> tuple[Traffic, Reads]:
    """Trace every phase on one client without computing, and weigh its message and its reply; and what it reads whole."""
    sent, read = _exchanges.eval_shape(algorithm.build, algorithm.settings, _one_client(fleet))
    each = tuple((bytes_of(message) + bytes_of(parcel), bytes_of(reply)) for message, parcel, reply in sent)
    times = [times for _, times in phases_of(algorithm.plan)]
    down, up = (sum(count * ways[way] for count, ways in zip(times, each, strict=True)) for way in (0, 1))
    return Traffic(down, up, each), set(read.parts)


def read_by_objective(algorithm: Algorithm, fleet: Fleet) -> Reads:
    """What of a client's data the objective reads whole."""
    whole = Reads()

    def objective(server: Any, local: Any, data: LocalData) -> jax.Array:
        inner = algorithm.view(server, local).inner
        return algorithm.objective(algorithm.outer(server), inner, replace(data, notice=lambda *read: whole.add(read)))

    key = jax.eval_shape(jax.random.key, 0)  # a key itself would be compiled
    states = (jax.eval_shape(make, key) for make in (algorithm.init, algorithm.enroll))
    jax.eval_shape(objective, *states, _one_client(fleet))
    return whole


def _one_client(fleet: Fleet) -> LocalData:
    """Its data, without a number in them."""
    train, val = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (fleet.train, fleet.val))
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return LocalData(train, val, number, number, number, number=number)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Whole:
    """Parts of a client's data that were read whole: known once the work is traced, and kept with the trace."""

    parts: tuple[tuple[str, bool], ...] = field(metadata={"static": True})


@partial(jax.jit, static_argnames=("build",))
def _exchanges(build: Any, settings: Any, data: LocalData) -> tuple[list[tuple[Tree, ...]], _Whole]:
    """(message, parcel, reply) of every phase.  Only ever traced: once for equal algorithms on rows of equal shapes."""
    algorithm, key = build(settings), jax.random.key(0)
    server, local = algorithm.init(key), algorithm.enroll(key)
    parts = Reads()
    sent: list[tuple[Tree, ...]] = []
    for phase, _ in phases_of(algorithm.plan):
        message, parcel = phase.send(server), None
        reply = phase.work(message, local, replace(data, notice=lambda *read: parts.add(read)), key)[0]
        if phase.relay is not None:
            alone = jax.tree.map(lambda leaf: leaf[None], reply)
            parcel = phase.relay.pack(alone, jnp.ones(1), key)
        sent.append((message, parcel, reply))
    return sent, _Whole(tuple(sorted(parts)))
