"""Reading a run folder, finished or not, without taking its lock."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedbilevel.runs.tables import TABLES, digest, read_csv, read_part, stacked

FORMAT = 1
SETTINGS_FILE = "run.toml"
PARTS, MODELS = "parts", "models"


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
        parts = [tables for _, tables in read_parts(folder)]
        names = dict.fromkeys(name for tables in parts for name in tables)
        tables = {name: stacked(name, [part[name] for part in parts if name in part]) for name in names}
    usual = {name: tables.pop(name, None) for name in TABLES}
    return Run(
        folder,
        about["command"],
        about["status"],
        about["configuration"],
        about.get("environment", {}),
        about.get("arguments", {}).get("line", ""),
        **{name: stacked(name, []) if table is None else table for name, table in usual.items()},
        others=tables,
        created=about.get("created", ""),
        version=about["fedbilevel"],
        format=about["format"],
    )


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


def read_parts(folder: Path) -> list[tuple[str, dict[str, pd.DataFrame]]]:
    """(key, tables) of every saved part, by file name."""
    found = []
    for file in sorted((folder / PARTS).glob("*.json")):
        if file.name.startswith("."):
            continue
        try:
            found.append(read_part(file))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is damaged ({_reason(error)}): delete it, and the same command computes this part anew; all other "
                "parts are kept."
            ) from error
    return found


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
