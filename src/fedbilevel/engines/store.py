"""When and where a run is saved, and how it goes on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from fedbilevel.engines import checkpoint
from fedbilevel.engines.book import Book
from fedbilevel.engines.hosts import agree, first_says, place_state, wait_for_all, whole_state, writes
from fedbilevel.engines.rounds import State

if TYPE_CHECKING:
    from fedbilevel.engines.simulate import Run

SAVE_SECONDS = 10.0
"""How much work a crash may cost when ``checkpoint_every`` is not given."""


class Store:
    """When and where a run is saved.  Several hosts save at the same rounds, one of them writing for all."""

    def __init__(self, file: Path, every: int | None, run: Run, settings: Any, seed: int, rounds: int) -> None:
        if every is None and jax.process_count() > 1:
            every = max(1, rounds // 10)  # hosts have different clocks
        self.file, self.every = file, every
        options = {
            "seed": seed,
            "options": repr(replace(run.options, devices=None)),
            "x64": jax.config.read("jax_enable_x64"),
        }
        everything = (run.data.train, run.data.val, run.data.train_sizes, run.data.val_sizes, run.weights)
        self.mark = agree(checkpoint.fingerprint(run.algorithm.name, settings, options, everything))
        self.run, self.rounds = run, rounds
        self.at = 0
        self.when = time.perf_counter()

    def exists(self) -> bool:
        return first_says(self.file.exists())

    def resume(self, book: Book, state: State) -> State:
        done, kept, rows, seconds = checkpoint.load(self.file, self.mark, state)
        if done > self.rounds:
            raise checkpoint.CheckpointError(
                f"{self.file} holds {done} rounds of this run, more than rounds={self.rounds}: ask for at least {done}, or "
                f"use another file."
            )
        book.rows, book.done, book.before, self.at = rows, done, seconds, done
        return place_state(kept, self.run.program.layout)

    def left(self, done: int) -> int:
        """Rounds until the next checkpoint."""
        return 1 << 30 if self.every is None else self.at + self.every - done

    def due(self, done: int) -> bool:
        return time.perf_counter() - self.when > SAVE_SECONDS if self.every is None else done - self.at >= self.every

    def save(self, book: Book, state: State) -> None:
        whole = whole_state(state)
        if writes():
            checkpoint.save(self.file, self.mark, book.done, whole, book.rows, book.seconds)
        wait_for_all("saved")
        self.at, self.when = book.done, time.perf_counter()
