"""Writing a run folder: one process at a time, every file whole or absent, going on where a stopped run was."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from fedbilevel import storage
from fedbilevel._version import __version__
from fedbilevel.runs import files
from fedbilevel.runs.files import MODELS, PARTS, SETTINGS_FILE, Run

Model = Mapping[str, Any] | Callable[[Path], Any]
"""Arrays by name, or a function that writes the ``.npz`` file it is given."""
PACKAGES = ("jax", "jaxlib", "numpy", "pandas", "scipy", "scikit-learn")


class RunFolder:
    """A run folder open for writing; see `open`.  Methods may be called from several threads."""

    def __init__(self, path: Path, lock: storage.Lock, about: dict[str, Any], keys: set[str], grows: bool) -> None:
        self.path = path
        self._lock, self._about, self._keys, self._grows = lock, about, keys, grows
        self._threads = threading.Lock()

    @classmethod
    def open(
        cls, path: str | Path, *, command: str, configuration: Mapping[str, Any], line: str = "", grows: bool = False
    ) -> RunFolder:
        """Create the folder, or go on with the run that is in it.

        ``configuration`` is every resolved option; ``line`` the command that reproduces the run.  A folder with another
        configuration, of a later format, in use by another process, or that cannot be written to is refused (ValueError)
        and stays as it is.  With ``grows`` the parts stay when the run is finished, and a later call may add to them.
        """
        folder = Path(path)
        wanted = storage.plain(configuration, "configuration")
        with _explained(folder, "write to"):
            folder.mkdir(parents=True, exist_ok=True)
            _check_empty(folder)
            lock = _take_lock(folder)
        try:
            with _explained(folder, "write to"):
                storage.remove_drafts(folder)
                if (folder / SETTINGS_FILE).exists():
                    about = files.read_about(folder)
                    _check_same(folder, about, command, wanted)
                    keys = {part.key for part in files.read_parts(folder)}
                else:
                    about, keys = _new(command, wanted, line), set()
                    (folder / PARTS).mkdir(exist_ok=True)
                    (folder / MODELS).mkdir(exist_ok=True)
                    storage.write_toml(folder / SETTINGS_FILE, about)
            run = cls(folder, lock, about, keys, grows)
            status = "complete" if run.complete else f"going on after {len(keys)} parts" if keys else "begins"
            run.log(f"{command}: {status}")
            return run
        except BaseException:
            lock.release()
            raise

    @property
    def complete(self) -> bool:
        return bool(self._about["status"] == "complete")

    @property
    def keys(self) -> set[str]:
        """Keys of the parts that are in the folder."""
        return set(self._keys)

    def done(self, key: str) -> bool:
        """Whether the part ``key`` has been saved, in this process or an earlier one."""
        return key in self._keys or (self.complete and not self._grows)

    def save(
        self,
        key: str,
        *,
        rows: files.Table | None = None,
        groups: files.Table | None = None,
        weights: files.Table | None = None,
        history: files.Table | None = None,
        others: Mapping[str, pd.DataFrame] | None = None,
        models: Mapping[str, Model] | None = None,
    ) -> None:
        """Keep the results of one part: all of them, or (should this process die) none."""
        if self.done(key):
            raise ValueError(f"The part {key!r} of {self.path} has been saved before.")
        given = {"rows": rows, "groups": groups, "weights": weights, "history": history, **(others or {})}
        tables = {name: files.Kept.of(name, table) for name, table in given.items() if table is not None}
        with _explained(self.path, "save results in"):
            if self.complete:
                self._describe({"status": "running", "files": None})
            for name, model in (models or {}).items():
                target = self.path / MODELS / f"{name}.npz"
                if callable(model):
                    with storage.draft(target) as draft:
                        model(draft)
                else:
                    storage.write_arrays(target, model)
            # The part itself comes last: with it, the results count as saved.
            storage.write(self.path / PARTS / files.part_name(key), files.part_text(key, tables, list(models or {})))
        with self._threads:
            self._keys.add(key)

    def log(self, text: str) -> None:
        """One line, with the time, at the end of log.txt."""
        with self._threads, _explained(self.path, "save results in"), (self.path / "log.txt").open("a") as file:
            file.write(f"{_now()} {' '.join(text.split())}\n")

    def parts(self) -> dict[str, files.Frames]:
        """The tables of every saved part, by key; of a complete run that does not grow there are none left."""
        return {part.key: files.Frames(part.tables) for part in files.read_parts(self.path)}

    def finish(self, order: Sequence[str] | None = None, extra: Mapping[str, pd.DataFrame] | None = None) -> Run:
        """Merge the parts into the tables, mark the run complete and return it.

        ``order``: the keys in the order their rows are to have (default: all, sorted), so that the tables do not depend on
        which part was ready first; parts that it leaves out are dropped, with their models.  ``extra``: further tables, each
        written as a CSV file of its name.  A run that grows is merged again whenever it is told how.
        """
        if not self.complete or (self._grows and order is not None):
            with _explained(self.path, "save results in"):
                self._merge(list(order) if order is not None else sorted(self._keys), extra or {})
            self.log("complete")
        return files.read(self.path)

    def _merge(self, order: list[str], extra: Mapping[str, pd.DataFrame]) -> None:
        parts = {part.key: part for part in files.read_parts(self.path)}
        absent = [key for key in order if key not in parts]
        if absent:
            raise ValueError(
                f"The part {absent[0]!r} of {self.path} has not been saved, so the run cannot be finished."
            )
        pieces: dict[str, list[files.Kept]] = {name: [] for name in files.TABLES}
        for key in order:
            for name, kept in parts[key].tables.items():
                pieces.setdefault(name, []).append(kept)
        merged = {name: files.stacked(name, tables) for name, tables in pieces.items() if tables}
        checksums = {}
        for name, table in {**merged, **extra}.items():
            text = files.csv_text(table)
            storage.write(self.path / f"{name}.csv", text)
            checksums[f"{name}.csv"] = files.digest(text)
        if "rows" in merged and find_spec("pyarrow") is None:
            self.log("rows.parquet was not written: it needs pyarrow (install fedbilevel[report]).")
        elif "rows" in merged:  # a second form of the rows for other programs; nothing of ours reads it
            storage.write(self.path / "rows.parquet", merged["rows"].to_parquet(index=False))
        self._describe({"status": "complete", "files": checksums})
        for key, part in parts.items():
            if key not in order:
                for name in part.models:
                    (self.path / MODELS / f"{name}.npz").unlink(missing_ok=True)
            if not self._grows:
                (self.path / PARTS / files.part_name(key)).unlink(missing_ok=True)

    def _describe(self, change: dict[str, Any]) -> None:
        self._about = {**self._about, **change}
        storage.write_toml(self.path / SETTINGS_FILE, self._about)

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                with suppress(ValueError):  # what stopped the run must be heard, not that it could not be noted
                    self.log(f"stopped: {error or kind.__name__ if kind else error}")
        finally:
            self.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _new(command: str, configuration: dict[str, Any], line: str) -> dict[str, Any]:
    machine = {"python": platform.python_version(), "platform": platform.platform(), "processors": os.cpu_count() or 1}
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "format": files.FORMAT,
        "command": command,
        "fedbilevel": __version__,
        "created": _now(),
        "status": "running",
        "configuration": configuration,
        "environment": {**machine, **packages},
        "arguments": {"line": line},
    }


def _check_empty(folder: Path) -> None:
    """A folder without a run may hold nothing else."""
    names = sorted(file.name for file in folder.iterdir())
    strange = [name for name in names if name not in ("lock", "log.txt") and name[0] != "."]
    if SETTINGS_FILE not in names and strange:
        raise ValueError(f"{folder} holds other files ({strange[0]}) and no run: name a new or empty folder.")


def _check_same(folder: Path, about: dict[str, Any], command: str, wanted: dict[str, Any]) -> None:
    remedy = "name another folder, or give the same options to go on with it."
    if about["command"] != command:
        raise ValueError(f"{folder} holds a run of {about['command']!r}, not of {command!r}: name another folder.")
    kept, wanted = dict(_options(about["configuration"])), dict(_options(wanted))
    for name in [*wanted, *(name for name in kept if name not in wanted)]:
        # As text: that is what was kept, and a NaN must equal itself.
        old, new = (storage.toml_text({name: table[name]}) if name in table else "" for table in (kept, wanted))
        if old != new:
            shown = [f"{table[name]!r}" if name in table else "none" for table in (kept, wanted)]
            raise ValueError(f"{folder} was begun with {name} = {shown[0]}, and now {name} is {shown[1]}: {remedy}")
    if about["status"] != "complete" and about["fedbilevel"] != __version__:
        raise ValueError(
            f"{folder} was begun by fedbilevel {about['fedbilevel']} and this is {__version__}, which may compute otherwise: "
            "finish it with that version, or name another folder."
        )


def _options(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Options by name; those inside tables as ``table.name``."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _options(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _take_lock(folder: Path) -> storage.Lock:
    try:
        return storage.lock(folder / "lock")
    except storage.Busy as busy:
        owner = f" ({busy})" if str(busy) else ""
        raise ValueError(
            f"{folder} is in use by another process{owner}: wait for it, or name another folder."
        ) from None


@contextmanager
def _explained(folder: Path, doing: str) -> Iterator[None]:
    """What the system refuses, in one sentence.  What was saved before is in files that nobody touches."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"Cannot {doing} {folder} ({reason}); what was saved there before is intact.") from error
