"""Writing a run folder: one process at a time, every file whole or absent, going on where a stopped run was."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pandas as pd

from fedbilevel._version import __version__
from fedbilevel.runs.reading import FORMAT, MODELS, PARTS, SETTINGS_FILE, Run, digest, read, read_about, read_parts
from fedbilevel.runs.tables import TABLES, models_of, part_text, stacked, tidy
from fedbilevel.runs.toml import plain, toml_text

try:
    import fcntl
except ImportError:  # no such lock on this system: keeping two processes apart is then up to the user
    fcntl = None  # type: ignore[assignment]

Model = Mapping[str, Any] | Callable[[Path], Any]
"""Arrays by name, or a function that writes the ``.npz`` file it is given."""
PACKAGES = ("jax", "jaxlib", "numpy", "pandas", "scipy", "scikit-learn")


class RunFolder:
    """A run folder open for writing; see `open`.  Methods may be called from several threads."""

    def __init__(self, path: Path, lock: IO[str], about: dict[str, Any], keys: set[str]) -> None:
        self.path = path
        self._lock, self._about, self._keys = lock, about, keys
        self._threads = threading.Lock()

    @classmethod
    def open(cls, path: str | Path, *, command: str, configuration: Mapping[str, Any], line: str = "") -> RunFolder:
        """Create the folder, or go on with the run that is in it.

        ``configuration`` is every resolved option; ``line`` the command that reproduces the run.  A folder with another
        configuration, of a later format, in use by another process, or that cannot be written to is refused (ValueError)
        and stays as it is.
        """
        folder = Path(path)
        wanted = plain(configuration, "configuration")
        with _explained(folder, "write to"):
            folder.mkdir(parents=True, exist_ok=True)
            known = {"lock", "log.txt", SETTINGS_FILE}
            if not (folder / SETTINGS_FILE).exists():
                strange = sorted(
                    file.name for file in folder.iterdir() if file.name not in known and file.name[0] != "."
                )
                if strange:
                    raise ValueError(
                        f"{folder} holds other files ({strange[0]}) and no run: name a new or empty folder."
                    )
            lock = _take_lock(folder)
        try:
            with _explained(folder, "write to"):
                for leftover in [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]:
                    leftover.unlink(missing_ok=True)  # drafts of a process that was killed
                if (folder / SETTINGS_FILE).exists():
                    about = read_about(folder)
                    _check_same(folder, about, command, wanted)
                    keys = {key for key, _ in read_parts(folder)}
                else:
                    about, keys = _new(command, wanted, line), set()
                    (folder / PARTS).mkdir(exist_ok=True)
                    (folder / MODELS).mkdir(exist_ok=True)
                    _write(folder / SETTINGS_FILE, toml_text(about).encode())
            run = cls(folder, lock, about, keys)
            run.log(
                f"{command}: {'complete' if run.complete else f'going on after {len(keys)} parts' if keys else 'begins'}"
            )
            return run
        except BaseException:
            lock.close()
            raise

    @property
    def complete(self) -> bool:
        return bool(self._about["status"] == "complete")

    def done(self, key: str) -> bool:
        """Whether the part ``key`` has been saved, in this process or an earlier one."""
        return self.complete or key in self._keys

    def save(
        self,
        key: str,
        *,
        rows: pd.DataFrame | None = None,
        groups: pd.DataFrame | None = None,
        weights: pd.DataFrame | None = None,
        history: pd.DataFrame | None = None,
        models: Mapping[str, Model] | None = None,
    ) -> None:
        """Keep the results of one part: all of them, or (should this process die) none."""
        if self.done(key):
            raise ValueError(f"The part {key!r} of {self.path} has been saved before.")
        given = {"rows": rows, "groups": groups, "weights": weights, "history": history}
        tables = {name: tidy(name, frame) for name, frame in given.items() if frame is not None}
        with _explained(self.path, "save results in"):
            for name, model in (models or {}).items():
                _write_model(self.path / MODELS / f"{name}.npz", model)
            # The part itself comes last: with it, the results count as saved.
            _write(self.path / PARTS / part_name(key), part_text(key, tables, list(models or {})))
        with self._threads:
            self._keys.add(key)

    def log(self, text: str) -> None:
        """One line, with the time, at the end of log.txt."""
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        with self._threads, _explained(self.path, "save results in"), (self.path / "log.txt").open("a") as file:
            file.write(f"{now} {' '.join(text.split())}\n")

    def parts(self) -> dict[str, dict[str, pd.DataFrame]]:
        """The tables of every saved part, by key; of a complete run there are none left."""
        return dict(read_parts(self.path))

    def finish(self, order: Sequence[str] | None = None, extra: Mapping[str, pd.DataFrame] | None = None) -> Run:
        """Merge the parts into the tables, mark the run complete and return it.

        ``order``: the keys in the order their rows are to have (default: all, sorted), so that the tables do not depend on
        which part was ready first; parts that it leaves out are dropped, with their models.  ``extra``: further tables, each
        written as a CSV file of its name.
        """
        if not self.complete:
            with _explained(self.path, "save results in"):
                self._merge(list(order) if order is not None else sorted(self._keys), extra or {})
            self.log("complete")
        return read(self.path)

    def _merge(self, order: list[str], extra: Mapping[str, pd.DataFrame]) -> None:
        parts = self.parts()
        absent = [key for key in order if key not in parts]
        if absent:
            raise ValueError(
                f"The part {absent[0]!r} of {self.path} has not been saved, so the run cannot be finished."
            )
        files = {}
        for name in TABLES:
            frames = [parts[key][name] for key in order if name in parts[key]]
            if not frames:
                continue
            table = stacked(name, frames)
            file = self.path / f"{name}.csv"
            _write(file, table.to_csv(index=False, lineterminator="\n").encode())
            files[file.name] = digest(file)
            if name == "rows":
                self._write_parquet(file.with_suffix(".parquet"), table)
        for name, table in extra.items():
            _write(self.path / f"{name}.csv", table.to_csv(index=False, lineterminator="\n").encode())
            files[f"{name}.csv"] = digest(self.path / f"{name}.csv")
        finished = {**self._about, "status": "complete", "files": files}
        _write(self.path / SETTINGS_FILE, toml_text(finished).encode())
        self._about = finished
        for key in parts:
            file = self.path / PARTS / part_name(key)
            if key not in order:
                for name in models_of(file):
                    (self.path / MODELS / f"{name}.npz").unlink(missing_ok=True)
            file.unlink(missing_ok=True)

    def _write_parquet(self, file: Path, table: pd.DataFrame) -> None:
        """A second form of the rows for other programs, where pyarrow is installed; nothing of ours reads it."""
        if find_spec("pyarrow") is None:
            self.log("rows.parquet was not written: it needs pyarrow (install fedbilevel[report]).")
            return
        _write(file, table.to_parquet(index=False))

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.log(f"stopped: {error or kind.__name__ if kind else error}")
        except ValueError:
            pass  # what stopped the run is what must be heard, not that it could not be noted
        finally:
            self.close()


def part_name(key: str) -> str:
    """A file name for any key: readable, and different for different keys."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", key).strip("-")[:80]
    return f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def _new(command: str, configuration: dict[str, Any], line: str) -> dict[str, Any]:
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    machine = {"python": platform.python_version(), "platform": platform.platform(), "processors": os.cpu_count() or 1}
    return {
        "format": FORMAT,
        "command": command,
        "fedbilevel": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "status": "running",
        "configuration": configuration,
        "environment": {**machine, **packages},
        "arguments": {"line": line},
    }


def _check_same(folder: Path, about: dict[str, Any], command: str, wanted: dict[str, Any]) -> None:
    remedy = "name another folder, or give the same options to go on with it."
    if about["command"] != command:
        raise ValueError(f"{folder} holds a run of {about['command']!r}, not of {command!r}: name another folder.")
    kept = about["configuration"]
    for name in [*wanted, *(name for name in kept if name not in wanted)]:
        # As text: that is what was kept, and a NaN must equal itself.
        old, new = (toml_text({name: table[name]}) if name in table else "" for table in (kept, wanted))
        if old != new:
            shown = [f"{table[name]!r}" if name in table else "none" for table in (kept, wanted)]
            raise ValueError(f"{folder} was begun with {name} = {shown[0]}, and now {name} is {shown[1]}: {remedy}")
    if about["status"] != "complete" and about["fedbilevel"] != __version__:
        raise ValueError(
            f"{folder} was begun by fedbilevel {about['fedbilevel']} and this is {__version__}, which may compute otherwise: "
            "finish it with that version, or name another folder."
        )


def _take_lock(folder: Path) -> IO[str]:
    file = (folder / "lock").open("a+")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            raise ValueError(
                f"{folder} is in use by another process{f' ({owner})' if owner else ''}: wait for it, or name another folder."
            ) from None
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()}")
    file.flush()
    return file


@contextmanager
def _explained(folder: Path, doing: str) -> Iterator[None]:
    """What the system refuses, in one sentence.  What was saved before is in files that nobody touches."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"Cannot {doing} {folder} ({reason}); what was saved there before is intact.") from error


def _write(target: Path, contents: bytes) -> None:
    """Under a temporary name first, on the disk before it is renamed."""
    draft = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _write_model(target: Path, model: Model) -> None:
    if not callable(model):
        memory = io.BytesIO()
        np.savez(memory, **{name: np.asarray(array) for name, array in model.items()})  # type: ignore[arg-type]
        _write(target, memory.getvalue())
        return
    draft = target.with_name(f".{target.stem}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        model(draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
