"""The host's side of a run: how many rounds the next call takes, and the rows of history with what only the host knows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pandas as pd

from fedbilevel.engines.hosts import seen_from_here
from fedbilevel.engines.options import named_numbers
from fedbilevel.engines.program import ROWS
from fedbilevel.engines.result import Result
from fedbilevel.engines.rounds import State

if TYPE_CHECKING:
    from fedbilevel.engines.simulate import Run

SLICE_SECONDS = 0.5
"""How long one call of the program aims to take: how soon Ctrl-C, progress and saving get their turn."""

COUNTED = ("bytes_up", "bytes_down", "contacts", "replies")
"""Columns that add up from call to call."""


class Book:
    """The host's side of a run: rounds done, rows of history, and the columns only the host knows."""

    def __init__(self, run: Run, settings: Any, seed: int) -> None:
        self.run, self.settings, self.seed = run, settings, seed
        self.done = 0
        self.before = 0.0
        self.rows: list[dict[str, Any]] = []
        self.counted = dict.fromkeys(COUNTED, 0)
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.began

    def note(self, rows: dict[str, Any], blocks: int, every: int, seconds: float) -> None:
        if self.rows:
            self.counted = {name: self.rows[-1][name] for name in COUNTED}
        arrays = {name: np.asarray(value)[:blocks] for name, value in rows.items()}
        for number in range(blocks if arrays else 0):
            row = {name: array[number].item() for name, array in arrays.items()}
            # Within one call only its end is on the clock: rounds take equal shares.
            elapsed = self.seconds - seconds * (1 - (number + 1) / blocks)
            self.rows.append(self._complete(row, self.done + (number + 1) * every, elapsed))
        self.done += blocks * every

    def _travelled(self, row: dict[str, Any]) -> dict[str, int]:
        """Bytes and contacts so far.  The device counts messages and the host weighs them: bytes would overflow there."""
        new = {"bytes_up": 0, "bytes_down": 0, "contacts": row.pop("contacts"), "replies": row.pop("replies")}
        for number, (down, up) in enumerate(self.run.traffic.phases):
            new["bytes_down"] += down * row.pop(f"messages/{number}")
            new["bytes_up"] += up * row.pop(f"answers/{number}")
        return {name: self.counted[name] + new[name] for name in COUNTED}

    def _complete(self, row: dict[str, Any], done: int, seconds: float) -> dict[str, Any]:
        travelled = self._travelled(row)
        halves = [name[:-5] for name in row if name.endswith("/high")]
        counts = {name: (row.pop(f"{name}/high") << 15) + row.pop(f"{name}/low") for name in halves}
        return {
            "round": done,
            "step": done * self.run.algorithm.local_steps,
            **row,
            **travelled,
            **counts,
            "seconds": seconds,
        }

    def result(self, state: State) -> Result:
        algorithm = self.run.algorithm.build(self.settings)
        server, local = seen_from_here(state, self.run.program.layout)
        inner = jax.vmap(lambda own: algorithm.view(server, own).inner, axis_size=self.run.data.clients)(local)
        return Result(
            algorithm.outer(server),
            inner,
            pd.DataFrame(self.rows),
            self.done,
            self.seed,
            {name: float(value) for name, value in named_numbers(self.settings).items()},
            server,
            local,
        )


class Pace:
    """Chooses how many rounds the next call runs: about half a second's worth where that is ``measured``, else all."""

    def __init__(self, measured: bool) -> None:
        self.measured = measured
        self.rate: float | None = None

    def next(self, left: int, record_every: int | None) -> tuple[int, int]:
        """(rounds per block, blocks)."""
        every = 1 if record_every is None else min(record_every, left)
        most = left if record_every is None else min(left // every, ROWS) * every
        if self.measured:
            most = min(most, 1 if self.rate is None else max(1, int(SLICE_SECONDS * self.rate)))
        return every, max(1, most // every)

    def learn(self, rounds: int, seconds: float) -> None:
        # The first call may compile, and one lucky clock reading must not make a long call: grow fourfold at most.
        rate = rounds / max(seconds, 1e-6)
        self.rate = rate if self.rate is None else min(rate, 4 * self.rate)
