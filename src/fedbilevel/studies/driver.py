"""One driver for all studies: parts of a design are computed by threads, kept in a run folder, merged, and shown.

A study says what it compares (`Study.configuration`), into which parts that falls, how one of them is computed and which
tables come of all.  Everything else is here: what the folder holds is not computed again, a call that was stopped goes on,
the first failure (or Ctrl-C) ends all threads after the part they are at, and somebody is told how far it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import pandas as pd
from threadpoolctl import threadpool_limits

from fedbilevel.runs import Run, RunFolder

MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 50_000
"""Linux allows a process 65,530.  A compiled program takes some 300, and JAX keeps it for as long as its caches know it."""
LOOK = 1.0
"""Seconds from one look at them to the next, which takes as long as measuring a run: no time for fifty programs."""


@dataclass(frozen=True)
class Part:
    """What one computation gives.

    ``keys``: what the folder keeps it under, several where one computation serves several runs.  ``what``: how the study
    describes it; ``title``: how people read it.  Parts of one ``program`` share what `Study.prepare` makes.  ``cost``:
    seconds, roughly, for guessing the time that is left.  Of the parts that are ready the smallest ``rank`` goes first.
    """

    keys: tuple[str, ...]
    what: Any
    title: str
    program: Any = None
    cost: float = 1.0
    rank: Any = 0


class Standing(NamedTuple):
    """How far a call is: runs done of all, a guess of the seconds left (None: not yet), and what was done last."""

    done: int
    total: int
    left: float | None
    what: str


Report = Callable[[Standing], None]


class Study:
    """What a study has to say of itself."""

    command = ""
    grows = False
    """Whether another design may add to a finished folder."""

    def configuration(self) -> dict[str, Any]:
        """Every resolved option that the numbers depend on."""
        raise NotImplementedError

    def parts(self) -> list[Part]:
        """In the order of the tables."""
        raise NotImplementedError

    def prepare(self, part: Part) -> None:
        """Make what all parts of its program share; called once a program."""

    def compute(self, part: Part) -> dict[str, dict[str, Any]]:
        """What `RunFolder.save` is to keep, by key."""
        raise NotImplementedError

    def merged(self, folder: RunFolder) -> tuple[list[str], dict[str, pd.DataFrame]]:
        """The keys that make the tables, in their order, and tables that follow from all parts together."""
        return [key for part in self.parts() for key in part.keys], {}

    def write(self, run: Run) -> None:
        """Write what stands beside the tables in the folder: figures, summaries."""


def conduct(
    study: Study,
    out: str | Path | None = None,
    report: Report | None = None,
    line: str = "",
    workers: int | None = None,
    compute: bool = True,
) -> Run:
    """Compute what ``out`` does not hold yet, and return all of it.

    ``out``: a run folder; None keeps nothing.  ``workers``: threads; by default one a core.  Without ``compute`` the tables are
    made (anew) from the parts that are there, which a study that grows keeps.
    """
    about: dict[str, Any] = {"command": study.command, "configuration": study.configuration(), "grows": study.grows}
    home = TemporaryDirectory(prefix="fedbilevel-") if out is None else nullcontext(str(out))
    with home as path, RunFolder.open(path, line=line, **about) as folder:
        parts = study.parts()
        left = [part for part in parts if not all(map(folder.done, part.keys))]
        if left and compute:
            # Every core has a thread of ours: those that NumPy would start beside them only wait for each other.
            with threadpool_limits(1, "blas"):
                _Crew(study, folder, parts, left, report or (lambda standing: None)).work(workers or _cores())
        done = folder.complete and compute
        run = folder.finish() if done else folder.finish(*study.merged(folder))
        if out is not None:
            study.write(run)
        return run


def listed(option: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Names separated by commas, each once, as the command line takes them."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError(f"{option} is empty; choose from {', '.join(known)}.")
    for name in names:
        if name not in known:
            raise ValueError(f"{option} names {name!r}, which is unknown; choose from {', '.join(known)}.")
    return names


class _Crew:
    """Threads at work.  JAX lets go of the interpreter while it compiles and computes, so threads use the cores.

    Whoever is free takes the first part whose program nobody else is preparing, and prepares it where that is not done.  One
    more thread keeps what they computed: it waits for the disk, and no core waits with it.
    """

    def __init__(self, study: Study, folder: RunFolder, parts: list[Part], left: list[Part], report: Report) -> None:
        self.study, self.folder, self.report = study, folder, report
        self.waiting = sorted(left, key=lambda part: part.rank)
        self.prepared: dict[Any, bool] = {}
        """By program: True, or False while somebody is at it."""
        self.changed = threading.Condition()
        self.computed = SimpleQueue[tuple[Part, dict[str, dict[str, Any]]] | None]()
        self.failure: BaseException | None = None
        self.total = sum(len(part.keys) for part in parts)
        self.done = self.total - sum(len(part.keys) for part in left)
        self.began, self.spent, self.cost = time.monotonic(), 0.0, sum(part.cost for part in left)
        self.looked = self.began

    def work(self, workers: int) -> None:
        self.report(Standing(self.done, self.total, None, "preparing"))
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        keeper = threading.Thread(target=self._keep, daemon=True)
        for thread in (*threads, keeper):
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # in short waits, between which Ctrl-C is heard
        except BaseException as stop:
            self._stop(stop)
            for thread in threads:
                thread.join()
            raise
        finally:
            self.computed.put(None)
            keeper.join()
        if self.failure is not None:
            raise self.failure

    def _stop(self, failure: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()

    def _serve(self) -> None:
        try:
            while (part := self._next()) is not None:
                if not self.prepared[part.program]:
                    self.study.prepare(part)
                    with self.changed:
                        self.prepared[part.program] = True
                        self.changed.notify_all()
                self.computed.put((part, self.study.compute(part)))
                if time.monotonic() - self.looked > LOOK:
                    self.looked = time.monotonic()
                    make_room()
        except BaseException as failure:
            self._stop(failure)

    def _next(self) -> Part | None:
        """The part to compute next; None at the end."""
        with self.changed:
            while self.waiting and self.failure is None:
                for place, part in enumerate(self.waiting):
                    if self.prepared.get(part.program, True):
                        self.prepared.setdefault(part.program, False)
                        return self.waiting.pop(place)
                self.changed.wait()
            return None

    def _keep(self) -> None:
        """Until there is nothing more.  Whoever fails, here or elsewhere: what was computed is kept."""
        while (computed := self.computed.get()) is not None:
            part, found = computed
            try:
                for key, results in found.items():
                    if not self.folder.done(key):
                        self.folder.save(key, **results)
                first = not self.spent
                self.done += len(part.keys)
                self.spent += part.cost
                left = (time.monotonic() - self.began) * (self.cost - self.spent) / self.spent
                self.report(Standing(self.done, self.total, None if first else left, part.title))
            except BaseException as failure:
                self._stop(failure)


def make_room() -> None:
    """Let go of compiled programs before a study of many shapes runs out of mappings: what is needed again is loaded again."""
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
