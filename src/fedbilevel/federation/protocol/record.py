"""The coordinator's run folder: everything a run is, outside the engine's job folder, so that no crash can lose it.

settings.json     what was submitted
state.npz         (round, state, what was agreed on, answers so far): where the run goes on; replaced after every round
exchanges.csv     one row per exchange and site: bytes, seconds, what happened
history.csv       the objective at the recorded rounds
log.txt           sentences with time stamps
status.json       what `status` shows: running, waiting, failed or complete, and why
answer.npz        the outer variables of all stages, when the run is complete
report.json       what the sites told about the result
reserve           room for the last words of a job whose disk is full
"""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel import storage
from fedbilevel.federation.protocol.payload import Arrays
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed
from fedbilevel.federation.protocol.vault import read_arrays, write_arrays

TABLES = {
    "exchanges": (
        "stage", "round", "ordinal", "phase", "site", "outcome", "bytes_down", "bytes_up", "seconds", "site_seconds", "at",
    ),
    "history": ("stage", "round", "step", "objective", "sites", "bytes_down", "bytes_up", "seconds"),
}  # fmt: skip
RESERVE = 1 << 18
LONGEST = 8000
"""Characters of an entry of the log."""
NEWLINE = "\n"
LOCK_SECONDS = 30.0
"""How long a new job waits for the one before it to let go of the folder."""


@dataclass
class Progress:
    """Where a run stands between two rounds: all the coordinator needs to go on."""

    attempt: int = 0
    """How often the run was submitted."""
    surveys: int = 0
    stage: int = 0
    round: int = 0
    began: bool = False
    """Whether the stage's first state exists."""
    finished: bool = False
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    since: dict[str, list[int] | None] = field(default_factory=dict)
    """The exchange each site's counted state follows."""
    away: list[str] = field(default_factory=list)
    total: float = 0.0
    """Rows of all sites in the stage, where replies are weighted by them and summed."""
    parcels: dict[str, int] = field(default_factory=dict)
    """Parcels on their way: the item of the plan they come from."""
    agreed: dict[str, np.ndarray] = field(default_factory=dict)
    answers: list[Arrays] = field(default_factory=list)
    server: Arrays = field(default_factory=list)
    packed: dict[str, Arrays] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        numbers = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ARRAYS}
        arrays = {f"agreed/{name}": array for name, array in self.agreed.items()}
        parcels = {f"parcel/{site}": parcel for site, parcel in self.packed.items()}
        lists = {"server": self.server, **by_stage(self.answers), **parcels}
        write_arrays(file, arrays | numbered(lists), progress=numbers)

    @classmethod
    def read(cls, file: Path) -> Progress | None:
        """As `write` kept it; None where that cannot be read."""
        kept = read_arrays(file)
        if kept is None:
            return None
        lists = lists_in(kept[0])
        return cls(
            **kept[1]["progress"],
            agreed={name[len("agreed/") :]: array for name, array in kept[0].items() if name.startswith("agreed/")},
            answers=[answer for name, answer in lists.items() if name.startswith("answer/")],
            server=lists.get("server", []),
            packed={name[len("parcel/") :]: parcel for name, parcel in lists.items() if name.startswith("parcel/")},
        )


ARRAYS = ("agreed", "answers", "server", "packed")


def by_stage(answers: list[Arrays]) -> dict[str, Arrays]:
    return {f"answer/{stage}": answer for stage, answer in enumerate(answers)}


def numbered(lists: Mapping[str, Arrays]) -> dict[str, np.ndarray]:
    """The arrays of named lists, each by the name of its list and its number there."""
    return {f"{name}/{number}": array for name, arrays in lists.items() for number, array in enumerate(arrays)}


def lists_in(arrays: Mapping[str, np.ndarray]) -> dict[str, Arrays]:
    """The lists that `numbered` was given, in their order."""
    lists: dict[str, Arrays] = {}
    for name, array in arrays.items():
        lists.setdefault(name.rpartition("/")[0], []).append(array)
    return lists


class Record:
    """The folder of one run, held by the coordinator's job."""

    def __init__(self, folder: Path, settings: JobSettings, job: str = "") -> None:
        self.folder, self.settings, self.job = folder, settings, job
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = held(
            folder / "lock", LOCK_SECONDS, f"Another coordinator is at work in {folder}: wait for it, or stop it."
        )
        try:
            self._settle()
        except BaseException:
            self.close()
            raise

    def _settle(self) -> None:
        file = self.folder / "settings.json"
        if file.exists() and JobSettings.from_json(file.read_text()).digest != self.settings.digest:
            raise RunFailed(
                f"{self.folder} holds another run of the name {self.settings.run!r}: its program, arguments, sites or "
                f"seed differ. Choose another name."
            )
        storage.write(file, self.settings.to_json())
        storage.write(self.folder / "reserve", os.urandom(RESERVE))
        for name in TABLES:
            if not (self.folder / f"{name}.csv").exists():
                self._replace(name, [])

    def resume(self) -> Progress:
        """Where the run was, and the tables cut back to there: what was begun and not finished is done again."""
        file = self.folder / "state.npz"
        if not file.exists():
            return Progress()
        progress = Progress.read(file)
        if progress is None:
            raise RunFailed(
                f"{file} cannot be read: restore it from a backup, or remove {self.folder} to start afresh."
            )
        for name, first in (("exchanges", 0), ("history", 1)):  # rounds are counted from 0 in one, from 1 in the other
            with (self.folder / f"{name}.csv").open(newline="") as table:
                # A line that a crash cut short goes too.
                whole = [row for row in csv.DictReader(table) if None not in row.values() and None not in row]
            end = progress.stage, progress.round + first
            self._replace(name, [row for row in whole if (int(row["stage"]), int(row["round"])) < end])
        return progress

    def save(self, progress: Progress) -> None:
        progress.write(self.folder / "state.npz")

    def note(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows to a table."""
        with (self.folder / f"{table}.csv").open("a", newline="") as file:
            csv.DictWriter(file, TABLES[table], lineterminator="\n").writerows(rows)

    def _replace(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, TABLES[table], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        storage.write(self.folder / f"{table}.csv", text.getvalue())

    def say(self, text: str) -> None:
        """A line of the log; further lines of ``text`` are set in, so that nothing passes for a line of its own."""
        with (self.folder / "log.txt").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text[:LONGEST].replace(NEWLINE, NEWLINE + '    ')}\n")

    def status(self, status: str, sentence: str = "", **more: Any) -> None:
        """``status``: running, waiting, stopped, failed or complete."""
        told = {"run": self.settings.run, "job": self.job, "status": status, "sentence": sentence, **more}
        told |= {"secure": self.settings.secured}
        storage.write_json(self.folder / "status.json", told)

    def end(self, status: str, sentence: str, **more: Any) -> None:
        """The job ends before the run does; this is told on a full disk too."""
        (self.folder / "reserve").unlink(missing_ok=True)
        self.status(status, sentence, **more)
        self.say(sentence)

    def close(self) -> None:
        """Let another coordinator have the folder."""
        self.lock.release()

    def complete(self, answers: list[Arrays], report: dict[str, dict[str, np.ndarray]]) -> None:
        write_arrays(self.folder / "answer.npz", numbered(by_stage(answers)), run=self.settings.run)
        told = {site: {name: array.tolist() for name, array in numbers.items()} for site, numbers in report.items()}
        storage.write_json(self.folder / "report.json", told)


def held(path: Path, seconds: float, sentence: str) -> storage.Lock:
    """The lock that keeps others out until it is released or this process ends; `RunFailed` where another has it."""
    try:
        return storage.lock(path, seconds)
    except storage.Busy:
        raise RunFailed(sentence) from None


def read_status(folder: Path) -> dict[str, Any] | None:
    """What the coordinator last said of a run; None before it said anything."""
    try:
        status = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) else None


def read_answers(folder: Path) -> list[Arrays]:
    """The arrays of every stage's answer of a complete run."""
    kept = read_arrays(folder / "answer.npz")
    if kept is None:
        raise ValueError(f"{folder} holds no complete run: answer.npz is missing or damaged.")
    return [*lists_in(kept[0]).values()]
