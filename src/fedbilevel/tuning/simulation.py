"""The simulation of a tuning: all sites in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from fedbilevel.engines.simulate import execute
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.fairness.program import Rows
from fedbilevel.fairness.trainer import capacity_for
from fedbilevel.problem import ClientData
from fedbilevel.tuning.problem import Choices, Tuning
from fedbilevel.tuning.program import TuneProgram

Tell = Callable[[int, int], None]
Labelled = tuple[np.ndarray, np.ndarray]
"""Features and labels of one site."""


class Tuned(NamedTuple):
    """``folded``: the K models; ``params``: the model that is used; bytes of all sites, up and down."""

    choices: Choices
    folded: np.ndarray
    params: np.ndarray
    tuning: Tuning
    history: pd.DataFrame
    bytes_up: int
    bytes_down: int


def padded(rows: Sequence[dict[str, np.ndarray]]) -> ClientData:
    """Sites of any sizes in arrays of one: rows behind a site's own have no weight, and sites of similar sizes share a
    program."""
    capacity = capacity_for(max(len(each["labels"]) for each in rows))

    def longer(leaf: np.ndarray) -> np.ndarray:
        return np.pad(leaf, [(0, capacity - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)])

    stacked = {name: np.stack([longer(each[name]) for each in rows]) for name in rows[0]}
    return ClientData(train=stacked, val=stacked)


@dataclass(eq=False)
class Tuner:
    """Runs programs for rows of the same shapes with one compilation."""

    secure: bool = False
    _made: dict[Any, Simulation] = field(default_factory=dict)

    def run(
        self,
        program: TuneProgram,
        sites: Sequence[Labelled],
        seed: int = 0,
        tell: Tell | None = None,
        record: bool = True,
    ) -> Tuned:
        rows = [program.folded(*own, number) for number, own in enumerate(sites)]
        sizes = np.array([len(each["labels"]) for each in rows], np.float64)
        agreed = self._agreed(program, sites)
        stage = program.stage(0, agreed, [])
        assert stage is not None
        simulation = self._simulation(stage, padded(rows), sizes, record)
        total = program.rounds
        heard = None if tell is None else lambda at: tell(min(at.done, total), total)
        result = execute(simulation, stage.algorithm.settings, stage.rounds, seed, heard)
        answer = jax.tree.map(np.asarray, result.outer)
        up, down = (int(result.history[name].iloc[-1]) for name in ("bytes_up", "bytes_down"))
        tuning, history = program.tuning(agreed), result.history.assign(stage=stage.name)
        return Tuned(answer.outer, np.asarray(result.inner[0]), answer.model, tuning, history, up, down)

    def _agreed(self, program: TuneProgram, sites: Sequence[Labelled]) -> dict[str, np.ndarray]:
        reading, told = program.reading, []
        for features, labels in sites:
            own = {"features": features, "labels": labels, "groups": np.zeros(len(labels), np.int32)}
            told.append(reading.told(Rows(own, own, own), 1))
        return reading.agree(1, told, {})

    def _simulation(self, stage: Any, data: ClientData, sizes: np.ndarray, record: bool) -> Simulation:
        shapes = jax.tree.map(np.shape, (data.train, stage.algorithm.settings))
        known = (stage.name, stage.rounds, record, tuple(sizes), str(shapes), stage.algorithm.settings.problem)
        if known in self._made:
            return self._made[known].on(data)
        options = Options(sizes, record_every=1 if record else stage.rounds, diagnostics="cheap", secure=self.secure)
        self._made[known] = Simulation(stage.algorithm, data, options)
        return self._made[known]
