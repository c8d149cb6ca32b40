"""A simulation: checked, laid out and compiled once; then any step sizes, any seed, any number of rounds.

`Simulation.rounds` is the one way through the rounds: `simulate`, `sweep`, `trace`, fair fits and the bench all look at the
`Moment`s that it yields.  How many rounds to run is an argument of the compiled loop, not part of it: one compilation serves
any length, and stopping between two calls (to save, to report, to look for a NaN) cannot change a single bit of the result.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbilevel.calculus import Solves, Tree, all_finite
from fedbilevel.engines.diagnose import STEPS, level_for, measure
from fedbilevel.engines.fixed import check_summed
from fedbilevel.engines.fleet import CHUNK, Fleet, Layout, host_fleet, size_groups
from fedbilevel.engines.hosts import client_mesh, of_all_hosts, place_fleet, place_state, seen_from_here, specs_like
from fedbilevel.engines.result import Result
from fedbilevel.engines.rounds import (
    State,
    counters_at_zero,
    read_by_objective,
    run_round,
    run_traced_round,
    start,
    traffic,
)
from fedbilevel.plan import Algorithm
from fedbilevel.problem import ClientData, whole_number

ROWS = 256
"""Rows of history one call can return."""
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


@dataclass(frozen=True)
class CompiledLoop:
    """The static part: what is compiled.  ``level`` None records nothing; ``measuring`` is the layout of what records."""

    build: Any
    layout: Layout
    measuring: Layout
    level: str | None


@partial(jax.jit, static_argnames=("loop",))
def begin(loop: CompiledLoop, settings: Any, seed: Any) -> State:
    return start(loop.build(settings), loop.layout, jax.random.key(seed))


@partial(jax.jit, static_argnames=("loop",))
def advance(
    loop: CompiledLoop, settings: Any, fleet: Fleet, seed: Any, state: State, first: Any, blocks: Any, every: Any
) -> tuple[State, Any]:
    """``blocks`` times: ``every`` rounds, then a row.  ``first`` is the number of rounds done before.

    One block of no rounds measures the state as it is: the row before round 1 comes from the same compiled program.
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

        def row(block: Any, state: State, rounds: Any = rounds) -> tuple[State, Any]:
            if loop.level == STEPS:
                return run_traced_round(algorithm, loop.layout, fleet, key, state, first + block)
            state = rounds(block, state)
            return state, _row(algorithm, loop, fleet, state)

        def recorded(block: Any, held: tuple[State, Any]) -> tuple[State, Any]:
            state, found = row(block, held[0])
            return state, jax.tree.map(lambda rows, value: rows.at[block].set(value), held[1], found)

        shapes = jax.eval_shape(lambda: row(0, state, rounds=lambda block, state: state)[1])
        rows = jax.tree.map(lambda shape: jnp.zeros((ROWS, *shape.shape), shape.dtype), shapes)
        return jax.lax.fori_loop(0, blocks, recorded, (state, rows))

    arguments = (settings, fleet, seed, state, first, blocks, every)
    if loop.layout.mesh is None:
        return inside(*arguments)  # type: ignore[no-any-return]
    # Every device runs its share of the clients.
    outputs = (specs_like(state), specs_like(None))
    shared = jax.shard_map(
        inside, mesh=loop.layout.mesh, in_specs=tuple(map(specs_like, arguments)), out_specs=outputs, check_vma=False
    )
    return shared(*arguments)  # type: ignore[no-any-return]


def _row(algorithm: Algorithm, loop: CompiledLoop, fleet: Fleet, state: State) -> dict[str, jax.Array]:
    assert loop.level is not None
    counted = {name: getattr(state, name) for name in ("contacts", "replies", "messages", "answers")}
    return {**measure(algorithm, loop.measuring, fleet, state, loop.level), **counted}


class Moment(NamedTuple):
    """A simulation between two rounds, and all it needs to go on: rounds ``done``, ``state``, all rows of ``history`` so far
    and the ``seconds`` of computing.  The counters in ``state`` began at the moment before."""

    done: int
    state: State
    history: list[Any]
    seconds: float

    @property
    def finite(self) -> bool:
        return bool(_all_finite((self.state.server, self.state.local)))


_all_finite = jax.jit(all_finite)


class Simulation:
    """A checked and laid-out simulation: everything but the seed, the step sizes and the number of rounds."""

    def __init__(self, algorithm: Algorithm, data: ClientData, options: Options, level: str | None = None) -> None:
        """``level``: what is recorded, where the options do not say it."""
        if not isinstance(data, ClientData):
            raise TypeError(f"data must be a ClientData, not {type(data).__name__}.")
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
        if options.secure:
            check_summed(algorithm, data.clients)
        data.check_finite()
        algorithm.check(data)
        self.algorithm, self.data, self.options = algorithm, data, options
        self.level = level
        if level is None and options.record_every is not None:
            self.level = level_for(options.diagnostics, algorithm, data)
        self.weights = client_weights(options.weights, data)
        mesh, clients = client_mesh(options.devices, data.clients)
        everybody, cohort = of_all_hosts(self.weights), cohort_size(options.participation, clients)
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
        self._lay_out(layout)

    def _lay_out(self, layout: Layout) -> None:
        """Trace the work once without computing: it tells the bytes per message and which whole sets are read."""
        fleet = host_fleet(self.data, self.weights, self.options.dropout)
        self.traffic, whole = traffic(self.algorithm, fleet)
        # Sizes are part of a program only where it reads whole sets: other clients of the same shapes then share it.
        # Clients grouped by size live on one device.
        alone = replace(layout, mesh=None, places=layout.clients)
        grouped = replace(alone, groups=size_groups(self.data)) if layout.padded else layout
        records = (
            layout.padded and self.level is not None
        )  # which reads whole sets too, unless it leaves the padding out
        if records and self.level == "cheap":
            records = bool(read_by_objective(self.algorithm, fleet) & set(layout.padded))
        if whole & set(layout.padded):
            layout = grouped
        elif records:
            layout = alone
        self.loop = CompiledLoop(self.algorithm.build, layout, grouped if records else layout, self.level)
        self.fleet: Fleet = place_fleet(fleet, layout)

    def weighed(self, algorithm: Algorithm, data: ClientData) -> Simulation:
        """The same simulation, with the bytes that ``algorithm`` would send on ``data``, whose arrays may be narrower."""
        other = copy(self)
        other.traffic, _ = traffic(algorithm, host_fleet(data, self.weights, self.options.dropout))
        return other

    def on(self, data: ClientData) -> Simulation:
        """The same simulation on other clients; with arrays of the same shapes nothing is traced or compiled again."""
        if self.loop.layout.groups is not None or _shapes(data) != _shapes(self.data):
            return Simulation(self.algorithm, data, self.options)
        data.check_finite()
        other = copy(self)
        other.data, other.weights = data, client_weights(self.options.weights, data)
        other.fleet = place_fleet(host_fleet(data, other.weights, self.options.dropout), self.loop.layout)
        return other

    def start(self, settings: Any, seed: int) -> Moment:
        """Before the first round."""
        return Moment(0, place_state(begin(self.loop, settings, np.uint32(seed)), self.loop.layout), [], 0.0)

    def rounds(
        self, settings: Any, seed: int, stops: Iterable[int], every: int | None = None, since: Moment | None = None
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
                step = left if every is None else min(every, left)
                yield (moment := self._after(settings, seed, moment, min(left // step, ROWS), step))

    def _after(self, settings: Any, seed: int, moment: Moment, blocks: int, every: int) -> Moment:
        """The moment ``blocks * every`` rounds later."""
        if self.level is None and every == 0:
            return moment
        began = time.perf_counter()
        state, rows = self._advance(settings, seed, moment, blocks, every)
        state = jax.block_until_ready(state)
        took = time.perf_counter() - began
        done, seconds = moment.done + blocks * every, moment.seconds + took
        arrays = jax.tree.map(lambda column: np.asarray(column)[:blocks], rows)
        if self.level is None:
            return Moment(done, state, moment.history, seconds)
        if self.level == STEPS:
            return Moment(done, state, [*moment.history, arrays], seconds)
        history = list(moment.history)
        before = history[-1] if history else dict.fromkeys(COUNTED, 0)
        for number in range(1, blocks + 1):
            row = {name: column[number - 1].tolist() for name, column in arrays.items()}
            # Within one call only its end is on the clock: rounds take equal shares.
            elapsed = moment.seconds + took * number / blocks
            history.append(self._complete(row, before, moment.done + number * every, elapsed))
        return Moment(done, state, history, seconds)

    def _advance(self, settings: Any, seed: int, moment: Moment, blocks: int, every: int) -> tuple[State, Any]:
        numbers = map(np.int32, (moment.done, blocks, every))
        return advance(  # type: ignore[no-any-return]
            self.loop, settings, self.fleet, np.uint32(seed), counters_at_zero(moment.state), *numbers
        )

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

    def compile(self, settings: Any) -> None:
        """Compile without running a round, so that threads find the program ready."""
        jax.block_until_ready(self._advance(settings, 0, self.start(settings, 0), 0, 1))

    def answer(self, settings: Any, state: State) -> tuple[Tree, Tree]:
        """(outer, every client's inner)."""
        algorithm = self.algorithm.build(settings)
        server, local = seen_from_here(state, self.loop.layout)
        inner = jax.vmap(lambda own: algorithm.view(server, own).inner, axis_size=self.data.clients)(local)
        return algorithm.outer(server), inner

    def solves(self, settings: Any, state: State) -> Solves | None:
        """How the linear systems of every client ended, for estimators that solve some."""
        algorithm = self.algorithm.build(settings)
        server, local = seen_from_here(state, self.loop.layout)
        calls = jax.vmap(lambda own: algorithm.view(server, own).calls, axis_size=self.data.clients)(local)
        return None if calls is None else jax.tree.map(np.asarray, calls.solves)

    def result(self, settings: Any, seed: int, moment: Moment) -> Result:
        server, local = seen_from_here(moment.state, self.loop.layout)
        hyper = {name: float(value) for name, value in named_numbers(settings).items()}
        history = pd.DataFrame(moment.history)
        return Result(*self.answer(settings, moment.state), history, moment.done, seed, hyper, server, local)


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
