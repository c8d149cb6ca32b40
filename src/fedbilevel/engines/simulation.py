"""A simulation: checked, laid out and compiled once; then any step sizes, any seed, any number of rounds.

`Simulation.rounds` is the one way through the rounds: `simulate`, `sweep`, `trace`, fair fits and the bench all look at the
`Moment`s that it yields.  How many rounds to run is an argument of the compiled loop, not part of it: one compilation serves
any length, and stopping between two calls (to save, to report, to look for a NaN) cannot change a single bit of the result.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.extend.core import Var
from jax.sharding import PartitionSpec

from fedbilevel.calculus import Remembered, Solves, Tree, all_finite, bytes_of, put
from fedbilevel.engines import cohorts
from fedbilevel.engines.cohorts import Held
from fedbilevel.engines.diagnose import STEPS, level_for, measure
from fedbilevel.engines.fixed import check_summed
from fedbilevel.engines.fleet import AXIS, CHUNK, Fleet, Layout, ends_of_shares, host_fleet, size_bands, size_groups
from fedbilevel.engines.hosts import (
    client_mesh,
    of_all_hosts,
    one_device_each,
    own_part,
    place_fleet,
    place_state,
    seen_from_here,
    share_out,
    specs_like,
)
from fedbilevel.engines.messages import in_messages
from fedbilevel.engines.result import Later, Result
from fedbilevel.engines.rounds import (
    Reads,
    State,
    Traffic,
    choose,
    counters_at_zero,
    read_by_objective,
    run_round,
    run_traced_round,
    start,
    traffic,
)
from fedbilevel.engines.store import ClientStore
from fedbilevel.hints import whole_number
from fedbilevel.kernels import packed
from fedbilevel.plan import Algorithm
from fedbilevel.problem import ClientData

ROWS = 256
"""Rows of history one call can return."""
SMALL_STATE = 2**20
"""Bytes of a state up to which the host looks for a NaN itself: compiling a program for that would take longer."""
Seeds = int | np.ndarray
"""One seed; or several, whose runs go side by side in one program.  Their states then have one entry a seed, and nothing is
recorded.  It pays where a round reads whole sets: a row is then read once for all of them."""
COUNTED = ("bytes_up", "bytes_down", "contacts", "replies")
"""Columns of the history that add up from call to call."""


@dataclass(frozen=True)
class Options:
    """How to simulate, apart from what: shared by `simulate` and `sweep`, checked once."""

    weights: Any = "uniform"
    participation: float | int | None = None
    sampling: str = "proportional"
    dropout: float = 0.0
    record_every: int | None = None
    diagnostics: str = "auto"
    client_chunk: int | None = CHUNK
    devices: Sequence[Any] | None = None
    secure: bool = False
    effort: str = "full"
    message_dtype: str | None = None


@dataclass(frozen=True)
class CompiledLoop:
    """The static part: what is compiled.  ``level`` None records nothing; ``measuring`` is the layout of what records;
    ``effort``: how much XLA optimises it, one of `EFFORTS`."""

    build: Any
    layout: Layout
    measuring: Layout
    level: str | None
    effort: str = "full"

    def measured(self, algorithm: Algorithm, fleet: Fleet, state: State, key: jax.Array, done: Any, since: Any) -> Any:
        """A row after ``done`` rounds, the last of them being the latest that took part; before round 1, the first."""
        assert self.level is not None
        cohort = None
        if self.level == "cohort":
            number = jnp.maximum(done - 1, since)
            cohort = choose(fleet, self.measuring, key, number)
        counted = {name: getattr(state, name) for name in ("contacts", "replies", "messages", "answers")}
        return {**measure(algorithm, self.measuring, fleet, state, self.level, cohort), **counted}


def begin(loop: CompiledLoop, settings: Any, seed: Any) -> State:
    """Of one seed, or of several side by side.  How clients are laid out and what is recorded play no part in the program."""
    with uncollected():
        state: State = _compiled(_begin, loop.effort, once=True)(loop.build, loop.layout.places, settings, seed)
    return state


@contextmanager
def uncollected() -> Iterator[None]:
    """While a program may be traced nobody looks for garbage: hardly any of the many small objects is any, and to find that out
    took a tenth of a first fit.  Of several threads, the one that found the collector at work starts it again."""
    at_work = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if at_work:
            gc.enable()


def _begin(build: Any, places: int, settings: Any, seed: Any) -> State:
    def of(seed: Any) -> State:
        return start(build(settings), places, jax.random.key(seed))

    return jax.vmap(of)(seed) if jnp.ndim(seed) else of(seed)


def _advance(
    loop: CompiledLoop, settings: Any, fleet: Fleet, seed: Any, state: State, first: Any, blocks: Any, every: Any
) -> tuple[State, Any]:
    """``blocks`` times: ``every`` rounds, then a row.  ``first`` is the number of rounds done before.

    One block of no rounds measures the state as it is: the row before round 1 comes from the same compiled program.
    With several seeds, every leaf of the state has one entry a seed.
    """

    def inside(settings: Any, fleet: Fleet, seed: Any, state: State, first: Any, blocks: Any, every: Any) -> Any:
        algorithm: Algorithm = loop.build(settings)
        key = jax.random.key(seed)

        def rounds(block: Any, state: State) -> State:
            done, watch = first + block * every, loop.level is not None
            result: State = jax.lax.fori_loop(
                0, every, lambda i, held: run_round(algorithm, loop.layout, fleet, key, held, done + i, watch), state
            )
            return result

        if loop.level is None:
            return jax.lax.fori_loop(0, blocks, rounds, state), {}

        # A program within the program, so that the shapes of the rows and the loop share one trace of it.
        measured = jax.jit(lambda state, done: loop.measured(algorithm, fleet, state, key, done, first), inline=True)

        def row(block: Any, state: State, rounds: Any = rounds) -> tuple[State, Any]:
            if loop.level == STEPS:
                return run_traced_round(algorithm, loop.layout, fleet, key, state, first + block)
            state = rounds(block, state)
            return state, measured(state, first + (block + 1) * every)

        def recorded(block: Any, held: tuple[State, Any]) -> tuple[State, Any]:
            state, found = row(block, held[0])
            return state, jax.tree.map(lambda rows, value: put(rows, value, block), held[1], found)

        shapes = jax.eval_shape(lambda: row(0, state, rounds=lambda block, state: state)[1])
        rows = jax.tree.map(lambda shape: jnp.zeros((ROWS, *shape.shape), shape.dtype), shapes)
        return jax.lax.fori_loop(0, blocks, recorded, (state, rows))

    arguments = (settings, fleet, seed, state, first, blocks, every)
    if loop.layout.mesh is None:
        each = jax.vmap(inside, (None, None, 0, 0, None, None, None)) if jnp.ndim(seed) else inside
        return each(*arguments)  # type: ignore[no-any-return]
    # Every device runs its share of the clients.
    outputs = (specs_like(state), specs_like(None))
    shared = jax.shard_map(
        inside, mesh=loop.layout.mesh, in_specs=tuple(map(specs_like, arguments)), out_specs=outputs, check_vma=False
    )
    return shared(*arguments)  # type: ignore[no-any-return]


PLAIN = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 4}
"""What XLA leaves out for a program that mostly calls kernels.  Its newer way of emitting what lies between them takes as long
to compile as everything else; of Table 1's methods, all but FCFL get the same bits from the older one (cube roots differ, hence
`kernels.cube_root`).  In 4 parts instead of 32, each of which begins with a copy of the whole, it takes a tenth less."""
EFFORTS: dict[str, dict[str, Any]] = {
    "full": {},
    "plain": PLAIN,
    "brief": {**PLAIN, "xla_backend_optimization_level": 1},
}
"""How XLA compiles the rounds, where nobody chose its flags: with all it can do; `PLAIN`; or, for rounds that take less time
than optimising them would, brief.  FedPath's then took half the time, and its rounds on 10,000 rows a tenth longer."""
ONCE = {**PLAIN, "xla_backend_optimization_level": 0}
"""For what runs once: without any optimisation it takes a quarter of the time to compile, and five times as long."""
STATIC = {"_begin": ("build", "places"), "_advance": ("loop",)}


def program_of(effort: str) -> Any:
    """The loop, compiled with one of `EFFORTS`."""
    return _compiled(_advance, effort)


def _compiled(function: Any, effort: str, once: bool = False) -> Any:
    """XLA's own options where there are to be all of them, or somebody chose its flags, or it compiles for another device."""
    chosen = any(name in os.environ.get("XLA_FLAGS", "") for name in ONCE)
    if effort == "full" or chosen or jax.default_backend() != "cpu":
        return _jitted(function, "full")
    return _jitted(function, effort, once)


@cache
def _jitted(function: Any, effort: str, once: bool = False) -> Any:
    options = ONCE if once else EFFORTS[effort]
    return jax.jit(function, static_argnames=STATIC[function.__name__], compiler_options=options or None)


advance = _jitted(_advance, "full")


class Moment(NamedTuple):
    """A simulation between two rounds, and all it needs to go on: rounds ``done``, ``state``, all rows of ``history`` so far
    and the ``seconds`` of computing.  The counters in ``state`` began at the moment before.  ``held``: whose local states
    these are, where a run does not have those of everybody at hand."""

    done: int
    state: State
    history: list[Any]
    seconds: float
    held: Held | None = None

    @property
    def finite(self) -> bool:
        held = (self.state.server, self.state.local)
        if jax.process_count() > 1 or bytes_of(held) > SMALL_STATE:
            return bool(_all_finite(held))
        floats = [np.asarray(leaf) for leaf in jax.tree.leaves(held) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return all(np.isfinite(leaf).all() for leaf in floats)

    def counted_anew(self) -> State:
        """The state with counters at zero, unless rounds were counted that no row of the history tells of yet."""
        between_rows = self.held is not None and self.history and self.history[-1]["round"] < self.done
        return self.state if between_rows else counters_at_zero(self.state)


_all_finite = jax.jit(all_finite)
_packed = Remembered(lambda features: jax.device_put(packed(features)))


class Simulation:
    """A checked and laid-out simulation: everything but the seed, the step sizes and the number of rounds."""

    def __init__(
        self,
        algorithm: Algorithm,
        data: ClientData | ClientStore,
        options: Options,
        level: str | None = None,
        narrow: tuple[Algorithm, ClientData] | None = None,
    ) -> None:
        """``level``: what is recorded, where the options do not say it.  ``narrow``: the same algorithm on the same clients,
        whose arrays may be narrower: its bytes are counted."""
        if not isinstance(data, ClientData | ClientStore):
            raise TypeError(f"data must be a ClientData or a ClientStore, not {type(data).__name__}.")
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                f"algorithm must be an Algorithm such as fb.fedbio(...) returns, not {type(algorithm).__name__}."
            )
        whole_number("record_every", options.record_every, optional=True)
        whole_number("client_chunk", options.client_chunk, optional=True)
        if options.sampling not in ("proportional", "uniform"):
            raise ValueError(f"sampling must be 'proportional' or 'uniform', not {options.sampling!r}.")
        if not isinstance(options.secure, bool):
            raise TypeError(f"secure must be True or False, not {options.secure!r}.")
        algorithm = in_messages(algorithm, options.message_dtype)
        if options.secure:
            check_summed(algorithm, data.clients)
        mesh, clients = client_mesh(options.devices, data.clients)
        cohort = cohort_size(options.participation, clients)
        if isinstance(data, ClientStore) and cohort is None:
            data = data.load()  # every round needs everybody
        self.source: ClientData | ClientStore = data
        data = data.outline if isinstance(data, ClientStore) else data
        algorithm.check(data)
        self.algorithm, self.data, self.options = algorithm, data, options
        self._weighed = (
            (algorithm, data) if narrow is None else (in_messages(narrow[0], options.message_dtype), narrow[1])
        )
        self.level = level
        if level is None and options.record_every is not None:
            self.level = level_for(options.diagnostics, algorithm, data, cohort)
        self.weights = client_weights(options.weights, data)
        everybody = of_all_hosts(self.weights)
        unequal = cohort is not None and bool((everybody != everybody[0]).any())
        layout = Layout(
            clients,
            clients if mesh is None else -(-clients // mesh.size) * mesh.size,
            padded=tuple(part for part in data.parts if not data.equal_sizes(part)),
            chunk=options.client_chunk,
            cohort=cohort,
            proportional=options.sampling == "proportional" and unequal,
            zeros=bool((everybody == 0).any()),
            dropout=chance(options.dropout) > 0,
            mesh=mesh,
            secure=options.secure,
        )
        self._common = {"weight": everybody.sum()}
        if layout.proportional:
            self._common["ends"] = ends_of_shares(everybody)
        self._lay_out(layout)

    def _host_fleet(self) -> Fleet:
        return host_fleet(self.data, self.weights, self.options.dropout, **self._common)

    def _placed(self, fleet: Fleet, layout: Layout) -> Fleet:
        """On the devices; with one-hot rows packed for the kernels, where a device has all clients."""
        placed, leaf = place_fleet(fleet, layout), self.algorithm.linear
        if leaf is None or layout.mesh is not None or layout.groups is not None or layout.cohort is not None:
            return placed
        parts = {part: getattr(self.data, part) for part in self.data.parts}
        kept = {part: _packed(rows[leaf]) for part, rows in parts.items() if isinstance(rows, dict) and leaf in rows}
        return replace(placed, packed={part: {leaf: rows} for part, rows in kept.items() if rows is not None})

    @cached_property
    def traffic(self) -> Traffic:
        """The bytes of every message: found when they are first asked for, since all the work is traced for them."""
        return self._exchanged[0]

    @cached_property
    def _exchanged(self) -> tuple[Traffic, Reads]:
        algorithm, data = self._weighed
        with uncollected():
            return traffic(algorithm, host_fleet(data, self.weights, self.options.dropout))

    def _lay_out(self, layout: Layout) -> None:
        fleet = self._host_fleet()
        # Without padding to cut it is all one which sets are read whole: nothing is traced to find out.
        whole = self._exchanged[1] if self.data.has_padding else set()
        stored = isinstance(self.source, ClientStore)
        # Sizes are part of a program only where it reads whole sets: other clients of the same shapes then share it.
        # Clients grouped by size live on one device.
        alone = replace(layout, mesh=None, places=layout.clients)
        records = (
            layout.padded and self.level is not None
        )  # which reads whole sets too, unless it leaves the padding out
        if records and self.level in ("cheap", "cohort"):
            records = any(cut and part in layout.padded for part, cut in read_by_objective(self.algorithm, fleet))
        reads_whole = any(cut and part in layout.padded for part, cut in whole)
        if stored:
            check_stored(self.algorithm.name, reads_whole, bool(records), self.level)
            layout = alone if jax.process_count() == 1 else replace(alone, mesh=one_device_each())
        elif self.level == "cohort" and (records or reads_whole):
            self.level = "cheap"  # clients that run together by size are all computed anyway
        grouped = replace(alone, groups=size_groups(self.data)) if reads_whole or records else layout
        if reads_whole:
            layout = grouped
        elif records:
            layout = alone
        if layout.groups is None and layout.mesh is None and layout.cohort is None:
            layout = replace(layout, groups=size_bands(self.data, {part for part, _ in whole}))
        if stored or (layout.gathers_cohort and self.level in (None, "cohort")):
            one = jax.eval_shape(self.algorithm.enroll, jax.random.key(0))
            if stored or bytes_of(one) * layout.clients > cohorts.MANY_BYTES:
                assert layout.cohort is not None
                rounds = cohorts.stretch(layout.cohort, cohorts.client_bytes(self.data))
                layout = replace(layout, stretch=rounds)
        self.loop = CompiledLoop(
            self.algorithm.build, layout, grouped if records else layout, self.level, self.options.effort
        )
        if layout.stretch:
            self.fleet: Fleet = replace(fleet, ends=jax.device_put(fleet.ends))
            return
        self.data.check_finite()
        self.fleet = self._placed(fleet, layout)

    def on(self, data: ClientData) -> Simulation:
        """The same simulation on other clients; with arrays of the same shapes nothing is traced or compiled again."""
        layout = self.loop.layout
        same = client_weights(self.options.weights, data)
        if layout.groups is not None or layout.stretch or layout.proportional or _shapes(data) != _shapes(self.data):
            return Simulation(self.algorithm, data, self.options)
        data.check_finite()
        other = copy(self)
        other.data = other.source = data
        other.weights, other._common = same, {"weight": of_all_hosts(same).sum()}
        other.fleet = other._placed(other._host_fleet(), layout)
        return other

    def start(self, settings: Any, seed: Seeds, file: Path | None = None, resumed: bool = False) -> Moment:
        """Before the first round.  ``file``: where local states may be kept; ``resumed``: they are there already."""
        layout = self.loop.layout
        if not layout.stretch:
            return Moment(0, place_state(begin(self.loop, settings, np.asarray(seed, np.uint32)), layout), [], 0.0)
        loop = replace(self.loop, layout=replace(layout, places=1))
        seed = int(seed)
        state = begin(loop, settings, np.uint32(seed))
        enrolled = jax.tree.map(lambda leaf: leaf[0], state.local)
        state = place_state(state._replace(local=None), layout)
        folder = self.source.folder if isinstance(self.source, ClientStore) else None
        states = cohorts.LocalStates(self.data.clients, enrolled, file, folder, resumed)
        visits = cohorts.Visits(self.source, self.data, self.weights, self.fleet, layout, seed, states)
        return Moment(0, state, [], 0.0, Held(visits, np.zeros(0, int)))

    def rounds(
        self, settings: Any, seed: Seeds, stops: Iterable[int], every: int | None = None, since: Moment | None = None
    ) -> Iterator[Moment]:
        """Go on ``since`` a moment (None: the start) and look at the simulation after each number of rounds in ``stops``.

        ``stops`` rise, and are asked for one at a time, so that one can depend on what was seen before.  A simulation that
        records adds a row to the history at each stop, or ``every`` so many rounds up to it; a stop where it already
        stands records that state.  Where the rows of one call do not reach a stop there are moments in between.
        """
        moment = self.start(settings, seed) if since is None else since
        for stop in stops:
            if stop == moment.done:
                yield (moment := self._after(settings, seed, moment, 1, 0))
            while moment.done < stop:
                left = stop - moment.done
                # Rows are of rounds that ``every`` divides, wherever a run was interrupted.
                step = left if every is None else min(every - moment.done % every, left)
                room = left if (stretch := self.loop.layout.stretch) == 0 else stretch - moment.done % stretch
                blocks = min(left // step, ROWS, room // step) if step in (every, left) else 1
                yield (moment := self._after(settings, seed, moment, max(blocks, 1), min(step, room), step <= room))

    def _after(
        self, settings: Any, seed: Seeds, moment: Moment, blocks: int, every: int, record: bool = True
    ) -> Moment:
        """The moment ``blocks * every`` rounds later.  Without ``record``: on the way to the next row."""
        if self.level is None and every == 0:
            return moment
        began = time.perf_counter()
        moment, fleet = self._at_hand(moment)
        state, rows = self._advance(settings, fleet, seed, moment, blocks, every)
        state = jax.block_until_ready(state)
        took = time.perf_counter() - began
        after = Moment(moment.done + blocks * every, state, moment.history, moment.seconds + took, moment.held)
        if self.level is None or not record:
            return after
        arrays = jax.tree.map(lambda column: np.asarray(column)[:blocks], rows)
        if self.level == STEPS:
            return after._replace(history=[*moment.history, arrays])
        history = list(moment.history)
        before = history[-1] if history else dict.fromkeys(COUNTED, 0)
        for number in range(1, blocks + 1):
            row = {name: column[number - 1].tolist() for name, column in arrays.items()}
            # Within one call only its end is on the clock: rounds take equal shares.
            elapsed = moment.seconds + took * number / blocks
            history.append(self._complete(row, before, moment.done + number * every, elapsed))
        return after._replace(history=history)

    def _at_hand(self, moment: Moment) -> tuple[Moment, Fleet]:
        """With the local states and the rows of the clients that the next rounds ask."""
        if moment.held is None:
            return moment, self.fleet
        visits = moment.held.visits
        stretch = visits.stretch(moment.done)
        if stretch.clients is not moment.held.clients:
            moment.held.keep(moment.done, moment.state.local)
            places = len(own_part(stretch.fleet.ids))
            local = share_out(visits.states.read(stretch.clients, places), PartitionSpec(AXIS), self.loop.layout)
            moment = moment._replace(state=moment.state._replace(local=local), held=Held(visits, stretch.clients))
        return moment, stretch.fleet

    def _advance(
        self, settings: Any, fleet: Fleet, seed: Seeds, moment: Moment, blocks: int, every: int
    ) -> tuple[State, Any]:
        numbers = map(np.int32, (moment.done, blocks, every))
        program = program_of(self.loop.effort)
        state = moment.counted_anew()
        with uncollected():
            return program(self.loop, settings, fleet, np.asarray(seed, np.uint32), state, *numbers)  # type: ignore[no-any-return]

    def _complete(self, row: dict[str, Any], before: dict[str, Any], done: int, seconds: float) -> dict[str, Any]:
        """A row of history with what only the host knows.

        The device counts messages since the call began and the host weighs them: bytes would overflow there.
        """
        phases = [*zip(self.traffic.phases, row.pop("messages"), row.pop("answers"), strict=True)]
        counted = {
            "bytes_up": sum(up * answers for (_, up), _, answers in phases),
            "bytes_down": sum(down * messages for (down, _), messages, _ in phases),
            "contacts": row.pop("contacts"),
            "replies": row.pop("replies"),
        }
        halves = [name[:-5] for name in row if name.endswith("/high")]
        calls = {name: (row.pop(f"{name}/high") << 15) + row.pop(f"{name}/low") for name in halves}
        travelled = {name: before[name] + counted[name] for name in COUNTED}
        place = {"round": done, "step": done * self.algorithm.local_steps}
        return {**place, **row, **travelled, **calls, "seconds": seconds}

    def compile(self, settings: Any, seed: Seeds = 0) -> None:
        """Compile without running a round, so that threads find the program ready, for one seed or so many."""
        moment, fleet = self._at_hand(self.start(settings, seed))
        jax.block_until_ready(self._advance(settings, fleet, seed, moment, 0, 1))

    def answer(self, settings: Any, state: State) -> tuple[Tree, Tree]:
        """(outer, every client's inner)."""
        return self._answer(settings, *seen_from_here(state, self.loop.layout))

    def _answer(self, settings: Any, server: Any, local: Tree) -> tuple[Tree, Tree]:
        algorithm = self.algorithm.build(settings)
        return algorithm.outer(server), inner_of(algorithm, server, local, self.data.clients)

    def solves(self, settings: Any, moment: Moment) -> tuple[np.ndarray, Solves] | None:
        """How the linear systems of clients ended, for estimators that solve some, and the numbers of these clients."""
        algorithm = self.algorithm.build(settings)
        server, local = seen_from_here(moment.state, self.loop.layout)
        numbers = np.arange(self.data.clients)
        one = local if moment.held is None else moment.held.visits.states.read(numbers[:1])
        own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), one)
        view = jax.eval_shape(algorithm.view, server, own)
        if view.calls is None or view.calls.solves is None:
            return None
        if moment.held is not None:
            states, clients = moment.held.visits.states, moment.held.clients
            others = np.setdiff1d(states.kept, clients)
            kept, numbers = states.read(others), np.concatenate([clients, others])
            here = jax.tree.map(lambda leaf: leaf[: len(clients)], kept if local is None else local)
            local = jax.tree.map(lambda *leaves: np.concatenate(leaves), here, kept)
        calls = jax.vmap(lambda own: algorithm.view(server, own).calls)(local)
        return numbers, jax.tree.map(np.asarray, calls.solves)

    def result(self, settings: Any, seed: int, moment: Moment) -> Result:
        hyper = {name: float(value) for name, value in named_numbers(settings).items()}
        server, local = seen_from_here(moment.state, self.loop.layout)
        if moment.held is None:
            # Clients' own variables are put together once somebody looks at them.
            algorithm, count = self.algorithm.build(settings), self.data.clients
            outer = algorithm.outer(server)
            inner: Any = Later(partial(inner_of, algorithm, server, local, count))
        else:
            moment.held.keep(moment.done, moment.state.local)
            states = moment.held.visits.states
            outer, inner = self._answer(settings, server, states.read(np.arange(1)))
            shown = [lambda own: own, lambda own: self._answer(settings, server, own)[1]]
            # All clients in memory are arrays, but of the size of the population: whoever looks at them pays for them.
            later: Any = cohorts.ReadLater if isinstance(self.source, ClientStore) else everybody_later
            local, inner = later(states, shown[0]), None if inner is None else later(states, shown[1])
        return Result(outer, inner, pd.DataFrame(moment.history), moment.done, seed, hyper, server, local)


def inner_of(algorithm: Algorithm, server: Any, local: Tree, clients: int) -> Tree:
    """The inner variable of every client at hand, stacked."""
    held = jax.tree.leaves(local)
    count = len(held[0]) if held else clients

    def inner(local: Tree) -> Tree:
        return jax.vmap(lambda own: algorithm.view(server, own).inner, axis_size=count)(local)

    # Mostly it is one of the arrays at hand: then nothing is computed. A view shows more, and each small operation that goes
    # into what nobody asked for would be compiled, which took half as long as 2,000 steps of three clients.
    made, shapes = jax.make_jaxpr(inner, return_shape=True)(local)
    at_hand = dict(zip(made.jaxpr.invars, held, strict=True))
    if all(isinstance(var, Var) and var in at_hand for var in made.jaxpr.outvars):
        return jax.tree.unflatten(jax.tree.structure(shapes), [at_hand[var] for var in made.jaxpr.outvars])
    return inner(local)


def everybody_later(states: cohorts.LocalStates, show: Any) -> Later:
    """What ``show`` makes of the states of all clients, once it is asked for."""
    return Later(lambda: show(states.read(np.arange(len(states.places)))))


def check_stored(name: str, reads_whole: bool, records: bool, level: str | None) -> None:
    """Refuse what would need all clients of a store at a time."""
    if level not in (None, "cohort"):
        raise ValueError(
            f"diagnostics={level!r} looks at every client whenever a row is recorded, which runs on a ClientStore with "
            "participation do not: use diagnostics='cohort', or record_every=None."
        )
    if reads_whole or records:
        what = f"{name} reads" if reads_whole else "The objective that is recorded reads"
        remedy = "give batch sizes, or " if reads_whole else "use record_every=None, or "
        raise ValueError(
            f"{what} whole sets, and the clients of this store have unequal sizes: {remedy}write the store with mask=, "
            "for losses that leave padding out."
        )


def _shapes(data: ClientData) -> Any:
    described = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), (data.train, data.val))
    return jax.tree.flatten(described), [data.equal_sizes(part) for part in data.parts]


def client_weights(weights: Any, data: ClientData) -> np.ndarray:
    if isinstance(weights, str):
        if weights == "uniform":
            return np.ones(data.clients)
        if weights == "samples":
            return np.asarray(data.train_sizes, np.float64)
        raise ValueError(f"weights must be 'uniform', 'samples' or one number per client, not {weights!r}.")
    values = np.asarray(weights, np.float64)
    if values.shape != (data.clients,):
        raise ValueError(f"weights must have one number per client ({data.clients}), not shape {values.shape}.")
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() == 0:
        raise ValueError("weights must be finite, not negative, and not all zero.")
    return values


def cohort_size(participation: float | int | None, clients: int) -> int | None:
    if participation is None:
        return None
    if isinstance(participation, bool) or not isinstance(participation, int | float | np.number):
        raise TypeError(f"participation must be a fraction or a number of clients, not {participation!r}.")
    if isinstance(participation, float):
        if not 0 < participation <= 1:
            raise ValueError(f"participation as a fraction must lie in (0, 1], not {participation}.")
        count = max(1, round(participation * clients))
    else:
        count = int(participation)
        if not 1 <= count <= clients:
            raise ValueError(
                f"participation as a number must lie in 1..{clients} (the clients there are), not {count}."
            )
    return None if count == clients else count


def chance(dropout: float) -> float:
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a probability in [0, 1), not {dropout!r}.")
    return float(dropout)


def named_numbers(settings: Any) -> dict[str, Any]:
    """The float hyper-parameters by the names `sweep` takes; those that set themselves are not numbers."""
    leaves = jax.tree_util.tree_flatten_with_path(settings)[0]
    # A scalar given as an array of NumPy's is a model to start from, not a hyper-parameter.
    return {path_name(path): leaf for path, leaf in leaves if np.ndim(leaf) == 0 and not isinstance(leaf, np.ndarray)}


def path_name(path: tuple[Any, ...]) -> str:
    """Nested names joined by an underscore: ``hypergradient_step``."""
    return "_".join(str(getattr(entry, "name", getattr(entry, "key", entry))) for entry in path)


def with_numbers(settings: Any, chosen: dict[str, float]) -> Any:
    """``settings`` with some of its named numbers replaced, or steps that set themselves by numbers."""
    paths, structure = jax.tree_util.tree_flatten_with_path(settings)
    given = jax.tree.unflatten(structure, [chosen.get(path_name(path), leaf) for path, leaf in paths])
    automatic = {name: value for name, value in chosen.items() if getattr(given, name, 0) is None}
    return replace(given, **automatic) if automatic else given
