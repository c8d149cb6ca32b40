"""What a site keeps between exchanges: its local state after the current exchange and after the ones it may go back to.

A file per state, named by the exchange it follows, written under a temporary name and renamed before the reply leaves: a
site that is killed at any moment can go on from what the coordinator last counted.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel._version import __version__
from fedbilevel.calculus import Tree
from fedbilevel.federation.protocol.errors import BadReply, Refused
from fedbilevel.federation.protocol.payload import to_tree

FORMAT = 1


class Label(NamedTuple):
    """An exchange of a run: the state of a site is named by the one it follows."""

    stage: int
    round: int
    ordinal: int
    attempt: int
    """How often the run had been submitted: what an abandoned attempt left behind is never taken for another's."""

    @classmethod
    def read(cls, value: Any) -> Label | None:
        """From a message: four numbers, or nothing for the state before the first exchange of a stage."""
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != 4 or not all(isinstance(v, int) for v in value):
            raise BadReply("an exchange must be named by four numbers")
        return cls(*value)

    def file(self) -> str:
        return f"after-{self.stage}-{self.round}-{self.ordinal}-{self.attempt}.npz"


class Kept(NamedTuple):
    """A state, and a sentence where it is not the one asked for."""

    local: Tree
    note: str | None


class Vault:
    """The states of one run in ``folder``; the latest is held in memory too."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder, self.digest = folder, digest
        self.latest: tuple[Label, Tree] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if os.name == "posix":
            folder.chmod(0o700)

    def labels(self) -> list[Label]:
        found = []
        for file in self.folder.glob("after-*.npz"):
            parts = file.stem.split("-")[1:]
            if len(parts) == 4 and all(part.isdigit() for part in parts):
                found.append(Label(*map(int, parts)))
        return sorted(found)

    def state(self, since: Label | None, stage: int, enrolled: Tree) -> Kept:
        """The state after ``since``, an exchange of ``stage``; None is the state at enrolment.

        A site that has lost it goes on from the newest older one, or enrols anew, and says so.
        """
        if since is None:
            return Kept(enrolled, None)
        if self.latest is not None and self.latest[0] == since:
            return Kept(self.latest[1], None)
        here = [label for label in self.labels() if label.stage == stage]
        if since in here:
            found = self._read(since, enrolled)
            if found is not None:
                return Kept(found, None)
            here.remove(since)
        older = [label for label in here if label < since]
        for label in reversed(older):
            found = self._read(label, enrolled)
            if found is not None:
                return Kept(found, f"went on from round {label.round + 1}, having lost what followed")
        if here:
            raise Refused(
                f"This site is at round {here[-1].round + 1} and no longer holds what followed round {since.round + 1}: "
                f"the coordinator went back too far."
            )
        return Kept(enrolled, "had lost its state and enrolled anew")

    def keep(self, label: Label, local: Tree, floor: Label | None, since: Label | None) -> None:
        """Write the state after ``label`` and let go of those before ``floor``, where the round began.

        Newer ones are never touched: a worker that slept through a restart must not delete what its successor wrote.
        """
        self._write(label, local)
        self.latest = (label, local)
        oldest = min((kept for kept in (floor, since) if kept is not None), default=Label(label.stage, 0, 0, 0))
        for other in self.labels():
            if other < oldest:
                (self.folder / other.file()).unlink(missing_ok=True)

    def _write(self, label: Label, local: Tree) -> None:
        about = {"format": FORMAT, "version": __version__, "digest": self.digest}
        arrays = {f"leaf{number}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(local))}
        write_arrays(self.folder / label.file(), about, arrays)

    def _read(self, label: Label, like: Tree) -> Tree | None:
        found = read_arrays(self.folder / label.file())
        if found is None or found[0].get("digest") != self.digest:
            return None
        try:
            return to_tree([found[1][f"leaf{i}"] for i in range(len(found[1]))], like, "the state", finite=False)
        except (BadReply, KeyError):
            return None


def write_arrays(path: Path, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """One ``.npz`` file with a JSON description, no pickle, never half-written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            described: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays}
            np.savez(file, **described)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(
            f"Cannot write {path}: {error.strerror or error}; free space or choose another folder."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """What `write_arrays` wrote; None where it cannot be read."""
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            about = json.loads(bytes(file["about"]))
            arrays = {name: file[name] for name in file.files if name != "about"}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return (about, arrays) if about.get("format") == FORMAT else None
