"""The coordinator's run folder: everything a run is, outside the engine's job folder, so that no crash can lose it.

settings.json     what was submitted
state.npz         (round, state, what was agreed on, answers so far): where the run goes on; replaced after every round
exchanges.csv     one row per exchange and site: bytes, seconds, what happened
history.csv       the objective at the recorded rounds
log.txt           sentences with time stamps
status.json       what `status` shows: running, waiting, failed or complete, and why
answer.npz        the outer variables of all stages, when the run is complete
report.json       what the sites told about the result
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fedbilevel.federation.protocol.errors import RunFailed
from fedbilevel.federation.protocol.payload import Arrays
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.vault import FORMAT, Label, read_arrays, write_arrays

EXCHANGES = (
    "stage", "round", "ordinal", "phase", "site", "outcome", "bytes_down", "bytes_up", "seconds", "site_seconds", "at",
)  # fmt: skip
LOCK_SECONDS = 30.0
"""How long a new job waits for the one before it to let go of the folder."""
HISTORY = ("stage", "round", "step", "objective", "sites", "bytes_down", "bytes_up", "seconds")


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
    parcels: dict[str, int] = field(default_factory=dict)
    """Parcels on their way: the item of the plan they come from."""
    agreed: dict[str, np.ndarray] = field(default_factory=dict)
    answers: list[Arrays] = field(default_factory=list)
    server: Arrays = field(default_factory=list)
    packed: dict[str, Arrays] = field(default_factory=dict)

    def arrays(self) -> dict[str, np.ndarray]:
        found = {f"agreed/{name}": array for name, array in self.agreed.items()}
        found |= {f"server/{i}": array for i, array in enumerate(self.server)}
        found |= {f"answer/{k}/{i}": a for k, one in enumerate(self.answers) for i, a in enumerate(one)}
        return found | {f"parcel/{site}/{i}": a for site, one in self.packed.items() for i, a in enumerate(one)}

    def label(self, site: str) -> Label | None:
        return Label.read(self.since.get(site))


ARRAYS = ("agreed", "answers", "server", "packed")


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
        self.files = {
            name: _Table(folder / f"{name}.csv", head)
            for name, head in (("exchanges", EXCHANGES), ("history", HISTORY))
        }

    def _settle(self) -> None:
        file = self.folder / "settings.json"
        if file.exists():
            kept = JobSettings.from_json(file.read_text())
            if kept.digest != self.settings.digest:
                raise RunFailed(
                    f"{self.folder} holds another run of the name {self.settings.run!r}: its program, arguments, sites or "
                    f"seed differ. Choose another name."
                )
        write_text(file, self.settings.to_json())

    def resume(self) -> Progress:
        """Where the run was, and the tables cut back to there: what was begun and not finished is done again."""
        file = self.folder / "state.npz"
        if not file.exists():
            return Progress()
        found = read_arrays(file)
        if found is None:
            raise RunFailed(
                f"{file} cannot be read: restore it from a backup, or remove {self.folder} to start afresh."
            )
        about, arrays = found
        progress = Progress(**about["progress"])
        for name, array in arrays.items():
            kind, *rest = name.split("/", 2)
            if kind == "agreed":
                progress.agreed[name.partition("/")[2]] = array
            elif kind == "server":
                progress.server.append(array)
            elif kind == "answer":
                while len(progress.answers) <= int(rest[0]):
                    progress.answers.append([])
                progress.answers[int(rest[0])].append(array)
            else:
                progress.packed.setdefault(rest[0], []).append(array)
        self.files["exchanges"].cut(
            lambda row: (int(row["stage"]), int(row["round"])), (progress.stage, progress.round)
        )
        self.files["history"].cut(
            lambda row: (int(row["stage"]), int(row["round"]) - 1), (progress.stage, progress.round)
        )
        return progress

    def save(self, progress: Progress) -> None:
        about = {name: value for name, value in asdict(progress).items() if name not in ARRAYS}
        write_arrays(self.folder / "state.npz", {"format": FORMAT, "progress": about}, progress.arrays())

    def note(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        self.files[table].add(rows)

    def say(self, text: str) -> None:
        with (self.folder / "log.txt").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def status(self, status: str, sentence: str = "", **more: Any) -> None:
        """``status``: running, waiting, stopped, failed or complete."""
        told = {"run": self.settings.run, "job": self.job, "status": status, "sentence": sentence, **more}
        write_text(self.folder / "status.json", json.dumps(told))

    def end(self, status: str, sentence: str) -> None:
        """The job ends before the run does."""
        self.say(sentence)
        self.status(status, sentence)

    def close(self) -> None:
        """Let another coordinator have the folder."""
        self.lock.close()

    def complete(self, answers: list[Arrays], report: dict[str, dict[str, np.ndarray]]) -> None:
        arrays = {f"answer/{k}/{i}": a for k, one in enumerate(answers) for i, a in enumerate(one)}
        write_arrays(self.folder / "answer.npz", {"format": FORMAT, "run": self.settings.run}, arrays)
        told = {site: {name: array.tolist() for name, array in numbers.items()} for site, numbers in report.items()}
        write_text(self.folder / "report.json", json.dumps(told))


def held(path: Path, seconds: float, sentence: str) -> TextIO:
    """The open file that keeps others out until it is closed or this process ends; `RunFailed` where another has it."""
    file = path.open("w")
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > end:
                file.close()
                raise RunFailed(sentence) from None
            time.sleep(0.1)


def is_held(path: Path) -> bool:
    """Whether a process has the file of `held`."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class _Table:
    """A CSV file that rows are added to."""

    def __init__(self, path: Path, head: tuple[str, ...]) -> None:
        self.path, self.head = path, head
        if not path.exists():
            path.write_text(",".join(head) + "\n")

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.head, lineterminator="\n").writerows(rows)

    def cut(self, where: Any, end: tuple[int, int]) -> None:
        """Keep the rows before ``end``; a line that a crash cut short goes too."""
        with self.path.open(newline="") as file:
            whole = [row for row in csv.DictReader(file) if None not in row.values() and None not in row]
        kept = [row for row in whole if where(row) < end]
        lines = [",".join(self.head), *(",".join(_quoted(row[name]) for name in self.head) for row in kept)]
        write_text(self.path, "\n".join(lines) + "\n")


def _quoted(value: str) -> str:
    return f'"{value.replace(chr(34), chr(34) * 2)}"' if any(mark in value for mark in ',"\n') else value


def write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def read_status(folder: Path) -> dict[str, Any] | None:
    """What the coordinator last said of a run; None before it said anything."""
    try:
        found = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_answers(folder: Path) -> list[Arrays]:
    """The arrays of every stage's answer of a complete run."""
    found = read_arrays(folder / "answer.npz")
    if found is None:
        raise ValueError(f"{folder} holds no complete run: answer.npz is missing or damaged.")
    answers: list[Arrays] = []
    for name, array in found[1].items():
        stage = int(name.split("/")[1])
        while len(answers) <= stage:
            answers.append([])
        answers[stage].append(array)
    return answers
