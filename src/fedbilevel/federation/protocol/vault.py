"""What a site keeps between exchanges: its local state after the current exchange and after the ones it may go back to.

A file per state, named by the exchange it follows, written before the reply leaves: a site that is killed at any moment can
go on from what the coordinator last counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedbilevel import storage
from fedbilevel._version import __version__
from fedbilevel.engines.stages import Refused
from fedbilevel.federation.protocol.payload import BadReply, to_arrays, to_tree

if TYPE_CHECKING:
    from fedbilevel.calculus import Tree

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


NOTES = {
    "older": "went on from an earlier state, having lost what followed",
    "anew": "had lost its state and enrolled anew",
}
"""What a site may note about the state it went on from."""


class Kept(NamedTuple):
    """A state, which of `NOTES` holds where it is not the one asked for, and a digest of all that the site was asked on the way
    to it."""

    local: Tree
    note: str | None
    history: str = ""


class Vault:
    """The states of one run in ``folder``; the latest is held in memory too."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder, self.digest = folder, digest
        self.latest: tuple[Label, Kept] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if os.name == "posix":
            folder.chmod(0o700)

    def labels(self) -> list[Label]:
        parts = [file.stem.split("-")[1:] for file in self.folder.glob("after-*.npz")]
        return sorted(Label(*map(int, part)) for part in parts if len(part) == 4 and all(map(str.isdigit, part)))

    def state(self, since: Label | None, stage: int, enrolled: Tree) -> Kept:
        """The state after ``since``, an exchange of ``stage``; None is the state at enrolment.

        A site that has lost it goes on from the newest older one, or enrols anew, and says so.
        """
        if since is None:
            return Kept(enrolled, None)
        if self.latest is not None and self.latest[0] == since:
            return self.latest[1]
        here = [label for label in self.labels() if label.stage == stage]
        for label in reversed([label for label in here if label <= since]):
            kept = self._read(label, enrolled)
            if kept is not None:
                return kept if label == since else kept._replace(note="older")
            if label == since:
                here.remove(since)
        if here:
            raise Refused(
                "back", f"This site is at round {here[-1].round + 1}; it was asked for what followed {since.round + 1}."
            )
        return Kept(enrolled, "anew")

    def keep(self, label: Label, local: Tree, floor: Label | None, since: Label | None, history: str = "") -> None:
        """Write the state after ``label`` and let go of those before ``floor``, where the round began.

        Newer ones are never touched: a worker that slept through a restart must not delete what its successor wrote.
        """
        about = {"version": __version__, "digest": self.digest, "history": history}
        write_leaves(self.folder / label.file(), to_arrays(local), **about)
        self.latest = (label, Kept(local, None, history))
        oldest = min((kept for kept in (floor, since) if kept is not None), default=Label(label.stage, 0, 0, 0))
        for other in self.labels():
            if other < oldest:
                (self.folder / other.file()).unlink(missing_ok=True)

    def _read(self, label: Label, like: Tree) -> Kept | None:
        kept = read_arrays(self.folder / label.file())
        if kept is None or kept[1].get("digest") != self.digest:
            return None
        try:
            local = to_tree([*kept[0].values()], like, "the state", finite=False)
            return Kept(local, None, kept[1].get("history", ""))
        except BadReply:
            return None


def write_arrays(path: Path, arrays: Mapping[str, Any], **about: Any) -> None:
    """A file of a run, at either end."""
    try:
        storage.write_arrays(path, arrays, {"format": FORMAT, **about})
    except OSError as error:
        raise OSError(
            f"Cannot write {path}: {error.strerror or error}; free space or choose another folder."
        ) from error


def write_leaves(path: Path, arrays: Sequence[np.ndarray], **about: Any) -> None:
    """Arrays without names; they are read in the order in which they were written."""
    write_arrays(path, {f"leaf{number}": array for number, array in enumerate(arrays)}, **about)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """``(arrays, about)`` as `write_arrays` wrote them; None where they cannot be read."""
    try:
        arrays, about = storage.read_arrays(path)
    except (OSError, storage.Unreadable):
        return None
    return (arrays, about) if about.get("format") == FORMAT else None
