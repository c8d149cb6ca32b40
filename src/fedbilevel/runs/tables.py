"""The tables of a run folder: their columns, and frames as text and back without losing a bit."""

from __future__ import annotations

import hashlib
import io
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

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


def tidy(name: str, frame: pd.DataFrame | None) -> pd.DataFrame:
    """The table ``name`` with its own columns first and typed, those that ``frame`` lacks empty (or 0 where whole).

    A table that is a command's own stays as it is.
    """
    if name not in TABLES:
        return pd.DataFrame() if frame is None else frame.reset_index(drop=True)
    columns = TABLES[name]
    if frame is None or (frame.empty and len(frame.columns) == 0):
        return pd.DataFrame({column: pd.Series(dtype=_TYPES[kind]) for column, kind in columns.items()})
    for column in KEYS:
        if column not in frame.columns:
            raise ValueError(f"{name} lacks the column {column!r}, which says which run a row belongs to.")
    missing = {"text": "", "whole": 0, "number": np.nan}
    series = {}
    for column, kind in columns.items():
        values = frame[column] if column in frame.columns else pd.Series(missing[kind], index=frame.index)
        try:
            if kind == "text":
                values = values.astype(object).where(values.notna(), "")
            series[column] = values.astype(_TYPES[kind])
        except (ValueError, TypeError) as error:
            said = {"text": "text", "whole": "whole numbers", "number": "numbers"}[kind]
            raise ValueError(f"{name}: the column {column!r} must hold {said} ({error}).") from error
    extra = {str(column): frame[column] for column in frame.columns if column not in columns}
    return pd.DataFrame({**series, **extra}).reset_index(drop=True)


def stacked(name: str, frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Several tables one below the other; a column that only some of them have is empty in the others."""
    filled = [frame for frame in frames if len(frame)]
    return tidy(name, pd.concat(filled, ignore_index=True) if filled else None)


def digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


def csv_text(frame: pd.DataFrame) -> bytes:
    return frame.to_csv(index=False, lineterminator="\n").encode()


def part_name(key: str) -> str:
    """A file name for any key: readable, and different for different keys."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", key).strip("-")[:80]
    return f"{readable}-{digest(key.encode())[:12]}.json"


def to_record(frame: pd.DataFrame) -> dict[str, Any]:
    """A frame as JSON holds it: numbers keep every bit, whole numbers stay whole."""
    return {
        "columns": {str(column): frame[column].dtype.kind for column in frame.columns},
        "values": [frame[column].tolist() for column in frame.columns],
    }


def from_record(record: dict[str, Any]) -> pd.DataFrame:
    kinds = {"f": "float64", "i": "int64", "u": "int64", "b": "bool"}
    pairs = zip(record["columns"].items(), record["values"], strict=True)
    return pd.DataFrame({name: pd.Series(values, dtype=kinds.get(kind, "str")) for (name, kind), values in pairs})


def part_text(key: str, tables: dict[str, pd.DataFrame], models: list[str]) -> bytes:
    """What a part's file holds: a digest, so that damage is seen, and below it everything else."""
    record = {"key": key, "tables": {name: to_record(frame) for name, frame in tables.items()}, "models": models}
    body = json.dumps(record).encode()
    return digest(body).encode() + b"\n" + body


def read_part(file: Path) -> tuple[str, dict[str, pd.DataFrame]]:
    """(key, tables) of a part; ValueError where the file is not what was written."""
    checksum, _, body = file.read_bytes().partition(b"\n")
    if digest(body).encode() != checksum:
        raise ValueError("its contents do not match their checksum")
    record = json.loads(body)
    return record["key"], {name: from_record(table) for name, table in record["tables"].items()}


def models_of(file: Path) -> list[str]:
    """Names of the models that were saved with a part."""
    return list(json.loads(file.read_bytes().partition(b"\n")[2])["models"])


def read_csv(name: str, text: bytes) -> pd.DataFrame:
    """A merged table, typed as it was written, every number with all its bits."""
    texts = pd.read_csv(io.BytesIO(text), dtype="str", keep_default_na=False, encoding="utf-8")
    read = {"text": lambda values: values, "whole": _whole, "number": _numbers, "": _guessed}
    kinds = TABLES.get(name, {})
    return tidy(name, pd.DataFrame({column: read[kinds.get(column, "")](texts[column]) for column in texts.columns}))


def _whole(values: pd.Series[Any]) -> pd.Series[Any]:
    return pd.Series([int(value) for value in values], dtype="int64", index=values.index)


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
