"""The simulation of a fair program: `fit` once, or a `Trainer` for any seeds, learning rates and clients of the same shapes.

A `Trainer` traces and compiles nothing twice; what it computes is what single fits compute, to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from fedbilevel.calculus import Tree, bytes_of
from fedbilevel.engines.simulate import execute
from fedbilevel.engines.simulation import Options, Seeds, Simulation, with_numbers
from fedbilevel.engines.stages import Numbers, Stage
from fedbilevel.fairness.baseline import LEAVES
from fedbilevel.fairness.formulation import REAL
from fedbilevel.fairness.frontier import Frontier
from fedbilevel.fairness.methods import Recipe
from fedbilevel.fairness.program import FairProgram, Rows
from fedbilevel.problem import ClientData

Tell = Callable[[int, int], None]
"""``(rounds done, of how many)``, counted through the stages."""
SMALLEST_CAPACITY = 512
WIDTH = 16
"""Features of a logistic model are filled up to a multiple of this, see `fit_alike`."""

BRIEF_BYTES = 16 * 2**20
"""Rows up to which FedPath's rounds are brief, see `EFFORTS`: all of them take a second or two."""


class Clients(NamedTuple):
    """Clients' rows as the stages read them: those the model is trained on (no validation rows), and those of the bilevel
    problem, on both levels.  Leaves are ``[clients, rows, ...]``: ``features``, ``labels`` (class numbers), ``groups`` and,
    where rows have weights of their own, ``weights``."""

    model: ClientData
    bilevel: ClientData

    @classmethod
    def of(cls, program: FairProgram, data: ClientData, capacity: int | None = None) -> Clients:
        """From training and validation rows.  ``capacity``: pad the model's rows to this many, so that tables of different
        sizes share one compiled program; padding is never read."""
        if not isinstance(data.train, dict) or not set(LEAVES) <= set(data.train):
            raise ValueError("Rows must be dicts with features, labels and groups.")
        if program.two_stages and data.val is None:
            raise ValueError(f"{program.recipe.method} needs validation rows: pass val= to ClientData.")
        return cls(training_part(data, program.recipe.train_on, capacity), data)

    def agreed(self, program: FairProgram) -> Numbers:
        """What the clients' surveys agree on."""
        told = []
        for client in range(self.model.clients):
            train = client_rows(self.bilevel, "train", client)
            val = train if self.bilevel.val is None else client_rows(self.bilevel, "val", client)
            told.append(program.told(Rows(train, val, client_rows(self.model, "train", client))))
        return program.agree(1, told, {})

    def of_stage(self, program: FairProgram, stage: Stage, agreed: Numbers, answers: Sequence[Tree]) -> ClientData:
        data = self.bilevel if stage.name == "weights" else self.model
        if stage.name == "weights":
            data = replace(data, val=program.with_weights(data.val, agreed))
            if marks_padding(program.settled(agreed)):
                data = data.with_mask(REAL, "val")
        return replace(data, train=program.training_rows(len(answers), data.train, answers, agreed))


def client_rows(data: ClientData, part: str, client: int) -> Tree:
    """One client's real rows."""
    size = int(getattr(data, f"{part}_sizes")[client])
    return jax.tree.map(lambda leaf: np.asarray(leaf)[client, :size], getattr(data, part))


def joined(data: ClientData) -> list[Tree]:
    """Per client its training rows followed by its validation rows (where it has any)."""
    each = [[client_rows(data, part, client) for part in data.parts] for client in range(data.clients)]
    return [{name: np.concatenate([rows[name] for rows in parts]) for name in parts[-1]} for parts in each]


def training_part(data: ClientData, which: str, capacity: int | None = None) -> ClientData:
    """The rows a single-level method trains on: "all" of a client's, or those in "train"."""
    kept = data if which == "all" else replace(data, val=None, val_sizes=None)
    return padded(ClientData.from_clients(joined(kept)), capacity)


def padded(data: ClientData, capacity: int | None, val_capacity: int | None = None) -> ClientData:
    """The same clients with the sample axis lengthened to ``capacity`` rows; None leaves it."""

    def longer(leaf: Any, capacity: int) -> np.ndarray:
        array = np.asarray(leaf)
        missing = capacity - array.shape[1]
        if missing < 0:
            raise ValueError(f"capacity={capacity} is below the {array.shape[1]} rows of the largest client.")
        return np.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)])

    def lengthened(tree: Tree, capacity: int | None) -> Tree:
        return tree if capacity is None else jax.tree.map(lambda leaf: longer(leaf, capacity), tree)

    return replace(data, train=lengthened(data.train, capacity), val=lengthened(data.val, val_capacity))


def dealt(program: FairProgram, leaves: dict[str, np.ndarray], parts: Sequence[np.ndarray]) -> ClientData:
    """Rows of all clients, of which each holds those in its part, divided for the two levels."""
    pairs = program.divided(leaves["groups"], parts)
    return ClientData.from_clients(
        [tuple({name: leaf[rows] for name, leaf in leaves.items()} for rows in pair) for pair in pairs]
    )


def tuned_threshold(
    program: FairProgram, params: Tree, leaves: dict[str, np.ndarray], parts: Sequence[np.ndarray]
) -> float | np.ndarray:
    """The threshold of ``program`` for a model with these ``params``, on every client's rows set aside."""
    if not program.threshold.tuned:
        return program.threshold.value
    rows = ({name: leaf[part] for name, leaf in leaves.items()} for part in parts)
    return program.decides(program.agree(2, [program.scores_aside(each, params).packed() for each in rows], {}))


def marks_padding(recipe: Recipe) -> bool:
    """Whether whole validation sets are read with their padding marked, so that clients of any sizes share one program.

    Otherwise every size would get a copy of it; with whole training sets that is so anyway.
    """
    drawn = recipe.batch_size is not None and recipe.outer_batch_size == "whole"
    return drawn and recipe.formulation.skips_padding()


def capacity_for(rows: int) -> int:
    """Rows to pad to: the next power of two, so that tables of similar sizes share a compiled program."""
    return max(SMALLEST_CAPACITY, 1 << (rows - 1).bit_length())


class Stop(NamedTuple):
    """A fit on its way.  Costs are those of all stages so far, summed over the clients; ``calls`` counts gradients,
    Hessian-vector products and cross products."""

    stage: str
    round: int
    step: int
    outer: Tree
    inner: np.ndarray | None
    calls: tuple[int, ...]
    bytes_up: int
    bytes_down: int


class Fitted(NamedTuple):
    """``params`` of the model; ``weights``: see `FairProgram.weights`; ``answers``: of all stages; ``history``: the recorded
    rounds of all stages, bytes counted through; ``stops``: what was looked at on the way; seconds of computing;
    ``agreed``: what the clients' surveys agreed on; ``frontier``: of FedPath."""

    params: Tree
    weights: np.ndarray | None
    answers: list[Tree]
    history: pd.DataFrame
    stops: list[Stop]
    seconds: float
    agreed: Numbers
    frontier: Frontier | None = None

    @property
    def diverged(self) -> bool:
        return not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(self.params))


def fit(
    program: FairProgram,
    data: ClientData,
    *,
    seed: int = 0,
    record_every: int | None = None,
    capacity: int | None = None,
    tell: Tell | None = None,
) -> Fitted:
    """Run all stages of ``program`` on ``data``.  A row of history is taken ``record_every`` rounds; see `Clients.of`."""
    clients = Clients.of(program, data, capacity)
    return Trainer(program, clients, record_every).run(clients, seed, tell=tell)


def fit_alike(
    program: FairProgram, data: ClientData, *, seed: int = 0, record_every: int | None = None, tell: Tell | None = None
) -> Fitted:
    """`fit` on arrays of a few sizes only, so that tables of similar sizes, such as the folds of a cross-validation, share one
    compiled program.

    Rows are padded to `capacity_for` rows, and padding is never read.  A logistic model gets columns of zeros in front, up to a
    multiple of `WIDTH`: their coefficients stay zero and are taken away again.  Bytes are those of the true width.
    """
    model, recipe = program.model, program.recipe
    extra = -model.features % WIDTH if model.kind == "logistic" else 0
    wide = replace(program, model=replace(model, features=model.features + extra))

    def widened(rows: Any) -> Any:
        front = [(0, 0), (0, 0), (extra, 0)]
        return None if rows is None else {**rows, "features": np.pad(np.asarray(rows["features"]), front)}

    capacity = None
    if recipe.method != "fcfl" and recipe.batch_size is not None:
        apart = recipe.train_on == "all" and data.val is not None
        capacity = capacity_for(int((data.train_sizes + (data.val_sizes if apart else 0)).max()))
    filled = padded(replace(data, train=widened(data.train), val=widened(data.val)), capacity, capacity)
    clients = Clients.of(wide, filled, capacity)
    fitted = Trainer(wide, clients, record_every, program if extra else None).run(clients, seed, tell=tell)
    params = jax.tree.map(lambda leaf: leaf[extra:], fitted.params)
    answer = params
    if program.path:
        path = fitted.answers[-1]
        answer = path._replace(inner=jax.tree.map(lambda leaf: leaf[:, extra:], path.inner))
    return fitted._replace(params=params, answers=[*fitted.answers[:-1], answer])


class Trainer:
    """A program for clients like those of ``example``; `compile` once, then `run` from any thread.

    ``narrow``: the same program without the columns that fill up the features, whose bytes are counted.  ``efforts``: how much
    XLA optimises a stage, by name, see `EFFORTS`; all it can where nothing is said.
    """

    def __init__(
        self,
        program: FairProgram,
        example: Clients,
        record_every: int | None = None,
        narrow: FairProgram | None = None,
        efforts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.program, self.example, self.record_every, self.narrow = program, example, record_every, narrow
        self.efforts = efforts
        self._laid_out: dict[int, Simulation] = {}

    def compile(self, seeds: Sequence[int] | None = None) -> None:
        """For `run`; with ``seeds`` for `run_together` with so many."""
        agreed = self.example.agreed(self.program)
        answers: list[Tree] = []
        together: Seeds = 0 if seeds is None else np.asarray(seeds)
        while (stage := self.program.stage(len(answers), agreed, answers)) is not None:
            self._simulation(stage, self.example, agreed, answers).compile(stage.algorithm.settings, together)
            answers.append(stage.algorithm.outer(stage.algorithm.init(jax.random.key(0))))

    def run(
        self,
        clients: Clients,
        seed: int,
        rate: float | None = None,
        stops: int | None = None,
        tell: Tell | None = None,
    ) -> Fitted:
        """Train from ``seed``.

        ``rate`` replaces the learning rate; a bilevel method's inner step grows alike.  ``stops``: look so many times at every
        stage on its way, besides its start, and record nothing; a fit that diverges then says so in its answer.
        """
        began = time.perf_counter()
        program, agreed = self.program, clients.agreed(self.program)
        total, _ = program.settled(agreed).total
        answers: list[Tree] = []
        frames: list[pd.DataFrame] = []
        seen: list[Stop] = []
        done = 0
        server = None
        while (stage := program.stage(len(answers), agreed, answers)) is not None:
            simulation = self._simulation(stage, clients, agreed, answers)
            settings = self._settings(stage, agreed, rate)
            if stops is None:
                heard = None if tell is None else lambda at, before=done: tell(before + at.done, total)
                result = execute(simulation, settings, stage.rounds, seed, heard)
                frames.append(result.history.assign(stage=stage.name))
                answer, server = result.outer, result.server
            else:
                before = seen[-1] if seen else None
                for ((stop, state),) in _walk(stage, simulation, settings, seed, stops, before):
                    seen.append(stop)
                    answer, server = stop.outer, state
            answers.append(jax.tree.map(np.asarray, answer))
            done += stage.rounds
        weights, params = program.weights(agreed, answers, server), program.params(answers, agreed)
        frontier = program.frontier(answers, agreed) if program.path else None
        history, seconds = _chained(frames), time.perf_counter() - began
        return Fitted(params, weights, answers, history, seen, seconds, agreed, frontier)

    def run_together(self, clients: Clients, seeds: Sequence[int], rate: float, stops: int) -> list[Fitted]:
        """`run` from each of ``seeds``, by a method of one stage: side by side in one program.

        A method that reads whole local sets then reads each row once for all of them.  Sums over minibatches may be taken in
        another order than alone.
        """
        began = time.perf_counter()
        program, agreed = self.program, clients.agreed(self.program)
        stage = program.stage(0, agreed, [])
        assert stage is not None, "every program has a first stage"
        assert not program.two_stages, "the second stage of each run would have rows of its own"
        simulation = self._simulation(stage, clients, agreed, [])
        walked = [*_walk(stage, simulation, self._settings(stage, agreed, rate), np.asarray(seeds), stops, None)]
        seconds = (time.perf_counter() - began) / len(seeds)
        fitted = []
        for seen in zip(*walked, strict=True):
            answers, server = [seen[-1][0].outer], seen[-1][1]
            weights, params = program.weights(agreed, answers, server), program.params(answers, agreed)
            fitted.append(Fitted(params, weights, answers, pd.DataFrame(), [stop for stop, _ in seen], seconds, agreed))
        return fitted

    def _settings(self, stage: Stage, agreed: Numbers, rate: float | None) -> Any:
        """Those of the stage, with ``rate`` in the place of the learning rate; a bilevel method's inner step grows alike."""
        settings = stage.algorithm.settings
        if rate is None or self.program.path:
            return settings
        usual = self.program.settled(agreed).step
        assert usual is not None
        name, value = ("inner_step", settings.inner_step) if stage.name == "weights" else ("step", usual)
        return with_numbers(settings, {name: value * (rate / usual)})

    def _simulation(self, stage: Stage, clients: Clients, agreed: Numbers, answers: Sequence[Tree]) -> Simulation:
        number, data = len(answers), clients.of_stage(self.program, stage, agreed, answers)
        if number in self._laid_out:
            return self._laid_out[number].on(data)
        every = None if self.record_every is None else min(self.record_every, stage.rounds)
        short = self.program.path and bytes_of(data.train) <= BRIEF_BYTES
        options = Options(
            stage.weights,
            record_every=every,
            diagnostics="cheap",
            secure=self.program.secure,
            effort="brief" if short else self.efforts.get(stage.name, "full"),
        )
        narrow = None
        if self.narrow is not None:
            width = self.narrow.model.features
            true = self.narrow.stage(number, agreed, answers)
            assert true is not None
            narrow = (true.algorithm, replace(data, train=_cut(data.train, width), val=_cut(data.val, width)))
        made = Simulation(stage.algorithm, data, options, narrow=narrow)
        self._laid_out[number] = made
        return made


def _cut(rows: Any, width: int) -> Any:
    return None if rows is None else {**rows, "features": rows["features"][..., -width:]}


def _walk(
    stage: Stage, run: Simulation, settings: Any, seed: Seeds, stops: int, before: Stop | None
) -> Iterator[list[tuple[Stop, Any]]]:
    """Each stop with the server's state, of every seed; costs go on from the stage before."""
    places = sorted({round(stage.rounds * number / stops) for number in range(stops + 1)}) if stops else [stage.rounds]
    algorithm, traffic = stage.algorithm, run.traffic
    first = (0, 0, 0) if before is None else before.calls
    up, down = (0, 0) if before is None else (before.bytes_up, before.bytes_down)
    for number, state, *_ in run.rounds(settings, seed, places):
        # On the host and client by client: the same small operations on stacked arrays take JAX ten times as long.
        held = jax.tree.map(np.asarray, state)
        each = [held] if not np.ndim(seed) else [_entry(held, place) for place in range(np.size(seed))]
        found = []
        for one in each:
            views = [algorithm.view(one.server, _entry(one.local, client)) for client in range(run.data.clients)]
            spent = (sum(map(int, counts)) for counts in zip(*(view.calls[:3] for view in views), strict=True))
            stop = Stop(
                stage.name,
                number,
                number * algorithm.local_steps,
                jax.tree.map(np.asarray, algorithm.outer(one.server)),
                None if views[0].inner is None else np.stack([np.asarray(view.inner) for view in views]),
                tuple(a + b for a, b in zip(first, spent, strict=True)),
                up + number * traffic.up * run.data.clients,
                down + number * traffic.down * run.data.clients,
            )
            found.append((stop, one.server))
        yield found


def _entry(tree: Tree, place: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf[place], tree)


def _chained(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Histories of the stages one after the other: traffic and time go on, rounds and steps count within a stage."""
    chained: list[pd.DataFrame] = []
    for frame in frames:
        if chained and len(frame):
            last = chained[-1].iloc[-1]
            counted = [name for name in ("bytes_up", "bytes_down", "seconds") if name in frame]
            frame = frame.assign(**{name: frame[name] + last[name] for name in counted})
        if len(frame):
            chained.append(frame)
    if not chained:
        return pd.DataFrame()
    table = pd.concat(chained, ignore_index=True)
    return table[["stage", *(name for name in table.columns if name != "stage")]]
