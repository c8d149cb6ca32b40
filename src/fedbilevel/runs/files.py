"""What the files of a run folder hold: tables as text and back without losing a bit, and a folder, finished or not, read
without taking its lock."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel import storage

FORMAT = 1
SETTINGS_FILE = "run.toml"
PARTS, MODELS = "parts", "models"

KEYS = {"dataset": "text", "split": "text", "method": "text", "seed": "whole"}
ROWS = {
    **KEYS, "split_seed": "whole", "setting": "text", "test_accuracy": "number", "train_accuracy": "number",
    "test_balanced_accuracy": "number", "test_auc": "number", "train_gap": "number", "test_gap": "number",
    "validation_accuracy": "number", "validation_gap": "number", "rounds": "whole", "steps": "whole",
    "bytes_up": "whole", "bytes_down": "whole", "gradient_calls": "whole", "hvp_calls": "whole", "cross_calls": "whole",
    "seconds": "number", "weights": "text",
}  # fmt: skip
GROUPS = {
    **KEYS, "part": "text", "group": "text", "count": "whole", "positives": "whole", "true_positive_rate": "number",
    "false_positive_rate": "number", "selection_rate": "number", "accuracy": "number",
}  # fmt: skip
WEIGHTS = {**KEYS, "group": "text", "label": "text", "weight": "number"}
HISTORY = {
    **KEYS, "stage": "text", "round": "whole", "step": "whole", "objective": "number", "bytes_up": "whole",
    "bytes_down": "whole", "gradient_calls": "whole", "hvp_calls": "whole", "cross_calls": "whole",
}  # fmt: skip
TABLES: dict[str, dict[str, str]] = {"rows": ROWS, "groups": GROUPS, "weights": WEIGHTS, "history": HISTORY}
"""Columns every folder has; a command may add its own behind them."""
_TYPES: dict[str, Any] = {"text": "str", "whole": "int64", "number": "float64"}
_MISSING: dict[str, Any] = {"text": "", "whole": 0, "number": np.nan}
Table = pd.DataFrame | Mapping[str, Sequence[Any]]
"""A frame, or columns by name, without missing texts: a run's tables are many and short, and a frame for each takes longer than
measuring the run does."""


def tidy(name: str, frame: pd.DataFrame | None) -> pd.DataFrame:
    """The table ``name`` with its own columns first and typed, those that ``frame`` lacks empty (or 0 where whole).

    A table that is a command's own stays as it is.
    """
    if name not in TABLES:
        return pd.DataFrame() if frame is None else frame.reset_index(drop=True)
    columns = TABLES[name]
    if frame is None or (frame.empty and len(frame.columns) == 0):
        return pd.DataFrame({column: pd.Series(dtype=_TYPES[kind]) for column, kind in columns.items()})
    _check_marked(name, frame)
    arrays: dict[str, Any] = {}
    for column, kind in columns.items():
        values = frame[column] if column in frame.columns else pd.Series(_MISSING[kind], index=frame.index)
        try:
            if kind == "text" and (values.dtype != "str" or values.hasnans):
                values = values.astype(object).where(values.notna(), "")
            arrays[column] = values.astype(_TYPES[kind]).array
        except (ValueError, TypeError) as error:
            raise _wrong(name, column, kind, error) from error
    extra = {str(column): frame[column].array for column in frame.columns if column not in columns}
    return pd.DataFrame({**arrays, **extra})


def _check_marked(name: str, table: Table) -> None:
    for column in KEYS:
        if column not in table:
            raise ValueError(f"{name} lacks the column {column!r}, which says which run a row belongs to.")


def _wrong(name: str, column: str, kind: str, error: Exception) -> ValueError:
    said = {"text": "text", "whole": "whole numbers", "number": "numbers"}[kind]
    return ValueError(f"{name}: the column {column!r} must hold {said} ({error}).")


class Kept(NamedTuple):
    """A table as a part's file keeps it: the kind of every column, and its values."""

    columns: dict[str, str]
    values: list[list[Any]]

    @classmethod
    def of(cls, name: str, table: Table) -> Kept:
        """``table`` as `tidy` has it."""
        if isinstance(table, pd.DataFrame) or not table:
            frame = tidy(name, table if isinstance(table, pd.DataFrame) else None)
            found = {str(column): str(frame[column].dtype.kind) for column in frame.columns}
            return cls(found, [frame[column].tolist() for column in frame.columns])
        _check_marked(name, table)
        size, own = len(next(iter(table.values()))), TABLES[name]
        read: dict[str, Any] = {"text": str, "whole": int, "number": float}
        kinds: dict[str, str] = {}
        values: list[list[Any]] = []
        for column, kind in own.items():
            kinds[column] = {"text": "O", "whole": "i", "number": "f"}[kind]
            try:
                given = table[column] if column in table else [_MISSING[kind]] * size
                values.append(list(map(read[kind], given)))
            except (ValueError, TypeError) as error:
                raise _wrong(name, column, kind, error) from error
        for column, given in table.items():
            if column not in own:
                array = np.asarray(given)
                kinds[column] = array.dtype.kind
                values.append(array.tolist())
        return cls(kinds, values)

    @property
    def frame(self) -> pd.DataFrame:
        kinds: dict[str, Any] = {"f": "float64", "i": "int64", "u": "int64", "b": "bool"}
        columns = zip(self.columns.items(), self.values, strict=True)
        return pd.DataFrame(
            {column: pd.array(values, dtype=kinds.get(kind, "str")) for (column, kind), values in columns}
        )

    def followed_by(self, others: list[Kept]) -> Kept:
        """With the rows of ``others``, which have the same columns, below its own."""
        every = zip(self.values, *(other.values for other in others), strict=True)
        return Kept(self.columns, [[value for values in column for value in values] for column in every])


class Frames(Mapping[str, pd.DataFrame]):
    """The tables of one part, each made when it is asked for."""

    def __init__(self, kept: dict[str, Kept]) -> None:
        self._kept = kept

    def __getitem__(self, name: str) -> pd.DataFrame:
        return self._kept[name].frame

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def stacked(name: str, tables: list[Kept]) -> pd.DataFrame:
    """Several tables one below the other; a column that only some of them have is empty in the others."""
    filled = [table for table in tables if table.values and table.values[0]]
    # Tables alike become one frame together: a frame for each would take longer than everything else.
    alike = [list(group) for _, group in groupby(filled, key=lambda table: list(table.columns.items()))]
    frames = [first.followed_by(others).frame for first, *others in alike]
    return tidy(name, pd.concat(frames, ignore_index=True) if frames else None)


def digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def csv_text(frame: pd.DataFrame) -> bytes:
    def harmless(cell: Any) -> Any:
        return storage.harmless(cell) if isinstance(cell, str) else cell

    texts = {name: frame[name].map(harmless) for name in frame.columns if frame[name].dtype.kind not in "biufc"}
    return frame.assign(**texts).to_csv(index=False, lineterminator="\n").encode()


def part_name(key: str) -> str:
    """A file name for any key: readable, and different for different keys."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", key).strip("-")[:80]
    return f"{readable}-{digest(key.encode())[:12]}.json"


def part_text(key: str, tables: dict[str, Kept], models: list[str]) -> bytes:
    """What a part's file holds: a digest, so that damage is seen, and below it everything else.

    In JSON numbers keep every bit, and whole numbers stay whole.
    """
    records = {name: kept._asdict() for name, kept in tables.items()}
    body = json.dumps({"key": key, "tables": records, "models": models}).encode()
    return digest(body).encode() + b"\n" + body


def _read_part(file: Path) -> Part:
    """ValueError where the file is not what was written."""
    checksum, _, body = file.read_bytes().partition(b"\n")
    if digest(body).encode() != checksum:
        raise ValueError("its contents do not match their checksum")
    record = json.loads(body)
    tables = {name: Kept(table["columns"], table["values"]) for name, table in record["tables"].items()}
    return Part(record["key"], tables, record["models"])


def read_csv(name: str, text: bytes) -> pd.DataFrame:
    """A merged table, typed as it was written, every number with all its bits."""
    texts = pd.read_csv(io.BytesIO(text), dtype="str", keep_default_na=False, encoding="utf-8")
    texts = texts.map(storage.restored)
    read = {"text": lambda values: values, "whole": _whole, "number": _numbers, "": _guessed}
    kinds = TABLES.get(name, {})
    return tidy(name, pd.DataFrame({column: read[kinds.get(column, "")](texts[column]) for column in texts.columns}))


def _whole(values: pd.Series[Any]) -> pd.Series[Any]:
    return values.map(int).astype("int64")


def _numbers(values: pd.Series[Any]) -> pd.Series[Any]:
    """Python's own conversion, which is exact; nothing stands for a missing number."""
    return pd.Series([float(value) if value else np.nan for value in values], dtype="float64", index=values.index)


def _guessed(values: pd.Series[Any]) -> pd.Series[Any]:
    """A command's own column: truth values, whole numbers, numbers, or else text."""
    if len(values) and values.isin(["True", "False"]).all():
        return values == "True"
    for read in (_whole, _numbers):
        with suppress(ValueError):
            return read(values)
    return values


@dataclass(frozen=True, eq=False)
class Run:
    """What a run folder holds.  Tables that it lacks are empty; ``others``: a command's own tables, by name; ``status`` is
    "running" or "complete"."""

    path: Path
    command: str
    status: str
    configuration: dict[str, Any]
    environment: dict[str, Any]
    line: str
    rows: pd.DataFrame
    groups: pd.DataFrame
    weights: pd.DataFrame
    history: pd.DataFrame
    others: dict[str, pd.DataFrame]
    created: str
    version: str
    format: int

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """A command's own tables, by their names without the command's."""
        return {name.removeprefix(f"{self.command}-"): table for name, table in self.others.items()}

    @property
    def models(self) -> list[str]:
        """Names of the saved models; `model_file` finds one."""
        return sorted(file.stem for file in (self.path / MODELS).glob("*.npz") if not file.name.startswith("."))


def read(path: str | Path) -> Run:
    """The run in the folder ``path``; of an unfinished one, the parts that are there."""
    folder = Path(path)
    about = read_about(folder)
    files = about.get("files", {})
    if about["status"] == "complete":
        tables = {file.removesuffix(".csv"): _merged(folder / file, files[file]) for file in files}
    else:
        parts = [part.tables for part in read_parts(folder)]
        names = dict.fromkeys(name for tables in parts for name in tables)
        tables = {name: stacked(name, [part[name] for part in parts if name in part]) for name in names}
    told: dict[str, Any] = {name: about[name] for name in ("command", "status", "configuration", "format")}
    told |= {"environment": about.get("environment", {}), "line": about.get("arguments", {}).get("line", "")}
    told |= {name: tables.pop(name) if name in tables else stacked(name, []) for name in TABLES}
    return Run(folder, **told, others=tables, created=about.get("created", ""), version=about["fedbilevel"])


def model_file(run: Run, name: str) -> Path:
    """The file of one saved model."""
    file = run.path / MODELS / f"{name}.npz"
    if not file.is_file():
        raise ValueError(f"{run.path} has no model {name!r}; it has {', '.join(run.models) or 'none'}.")
    return file


def read_about(folder: Path) -> dict[str, Any]:
    """The contents of run.toml, checked: one clear sentence where it is missing, damaged or of a later format."""
    file = folder / SETTINGS_FILE
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    if not file.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no {SETTINGS_FILE}.")
    try:
        about = tomllib.loads(file.read_text(encoding="utf-8"))
        number = about["format"]
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror or error}).") from error
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} is damaged ({_reason(error)}); the tables beside it are untouched.") from error
    if not isinstance(number, int) or number > FORMAT:
        raise ValueError(
            f"{folder} was written by a newer fedbilevel, {about.get('fedbilevel', 'of unknown version')} (format {number}; "
            f"this one reads {FORMAT}): update fedbilevel, or name another folder."
        )
    kinds: dict[str, type] = {"command": str, "fedbilevel": str, "status": str, "configuration": dict}
    for name, kind in kinds.items():
        if not isinstance(about.get(name), kind):
            raise ValueError(f"{file} is damaged (it does not say {name!r}); the tables beside it are untouched.")
    return about


class Part(NamedTuple):
    """What was saved under one key, and the names of its models."""

    key: str
    tables: dict[str, Kept]
    models: list[str]


def read_parts(folder: Path) -> list[Part]:
    """Every saved part, by file name."""
    parts = []
    for file in sorted((folder / PARTS).glob("[!.]*.json")):
        try:
            parts.append(_read_part(file))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is damaged ({_reason(error)}): delete it, and the same command computes this part anew; all other "
                "parts are kept."
            ) from error
    return parts


def _merged(file: Path, checksum: str) -> pd.DataFrame:
    try:
        text = file.read_bytes()
        if digest(text) != checksum:
            raise ValueError("it is not what the run wrote there")
        return read_csv(file.stem, text)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} is damaged or was changed ({_reason(error)}): restore it, or run the command again into another folder."
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
