"""Saving a simulation and going on: arrays in one ``.npz`` file, no pickle, never half-written."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel._version import __version__
from fedbilevel.calculus import Tree

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint cannot be read or belongs to another run."""


def fingerprint(name: str, settings: Tree, run: dict[str, Any], data: Tree) -> str:
    """What must be equal for two runs to be the same run: algorithm, settings, options, and every number of the data."""
    digest = hashlib.sha256(f"{name}|{_structure(settings)}|{json.dumps(run, sort_keys=True, default=str)}".encode())
    for leaf in jax.tree.leaves((settings, data)):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _structure(settings: Tree) -> str:
    """Static fields by name; functions by their qualified name, since an address changes from process to process."""
    fields = getattr(settings, "__dataclass_fields__", None)
    if fields is None:
        if callable(settings):
            return f"{getattr(settings, '__module__', '')}.{getattr(settings, '__qualname__', type(settings).__qualname__)}"
        return type(settings).__name__ if isinstance(settings, jax.Array | np.ndarray) else repr(settings)
    inside = ",".join(f"{name}={_structure(getattr(settings, name))}" for name in fields)
    return f"{type(settings).__qualname__}({inside})"


def save(path: Path, mark: str, round_number: int, state: Tree, rows: list[dict[str, Any]], seconds: float) -> None:
    """Write under a temporary name in the same folder, then rename: a crash leaves the earlier file intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "format": FORMAT,
        "version": __version__,
        "fingerprint": mark,
        "round": round_number,
        "seconds": seconds,
        "rows": rows,
    }
    arrays = {f"leaf{number}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(
            f"Cannot save the run to {path}: {error.strerror or error}; free space or choose another file."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path, mark: str, like: Tree) -> tuple[int, Tree, list[dict[str, Any]], float]:
    """(rounds done, state, rows, seconds) of the same run; refuses anything else."""
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            about = json.loads(bytes(file["about"]))
            arrays = [file[f"leaf{number}"] for number in range(len(file.files) - 1)]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint ({error}): remove it to start afresh.") from error
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} was written in checkpoint format {about.get('format')} by fedbilevel {about.get('version')}; this is "
            f"{__version__} with format {FORMAT}: use that version, or another file."
        )
    if about["fingerprint"] != mark:
        raise CheckpointError(
            f"{path} belongs to another run (its algorithm, step sizes, seed, options or data differ): use another file, or "
            f"remove it to start afresh."
        )
    leaves, structure = jax.tree.flatten(like)
    if [(leaf.shape, leaf.dtype) for leaf in leaves] != [(array.shape, array.dtype) for array in arrays]:
        raise CheckpointError(f"{path} does not hold the arrays of this run: remove it to start afresh.")
    return int(about["round"]), jax.tree.unflatten(structure, arrays), about["rows"], float(about["seconds"])
