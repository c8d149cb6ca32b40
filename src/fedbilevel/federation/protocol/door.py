"""The one way out of a site: replies, statistics, measures, reports, refusals.

Whatever leaves has passed `Door`: it was paid for, clipped and blurred where the site wants noise; it is finite, of bounded
size and of enough rows; in a run with secure sums it is then weighted, rounded and masked; and a refusal is one of `REASONS`,
never a sentence that quotes a job or a cell.  The details are in the site's own log, and everything that left is a line in
``left.csv``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.engines.fixed import OutOfRange
from fedbilevel.engines.stages import Numbers, Refused
from fedbilevel.federation.protocol.payload import Arrays, BadReply, named_arrays, size_of
from fedbilevel.federation.protocol.policy import Policy
from fedbilevel.federation.protocol.privacy import Guard, fingerprint
from fedbilevel.federation.protocol.secure import Insecure
from fedbilevel.federation.protocol.vault import Label

LEFT = "left.csv"
OFTEN = 3
"""How many times the replies its rounds need a run may ask for: faults make rounds be done again."""
SPARE = 100
COUNTS = {
    "statistics/rows": "minimum_rows", "statistics/counts": "minimum_rows", "rows": "minimum_rows",
    "groups": "minimum_cell", "labels": "minimum_cell", "scores/counts": "minimum_cell", "decisions": "minimum_cell",
    "moments": "minimum_cell",
}  # fmt: skip
"""Numbers that count rows, and the policy's bound that each must reach, or be 0."""
REPORTED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "decisions": lambda values: np.asarray(values.sum(axis=-1)),
    "moments": lambda values: np.asarray(values[..., 0]),
}
"""Rows by group and class in a report, and by group where it is of a number: as many in all as anything is told of."""


class Door:
    """Of one site in one run; ``folder`` holds the states of all its runs.

    ``planned``: how many replies the stages so far need; the site says it when it knows.
    """

    def __init__(self, policy: Policy, folder: Path, run: str, digest: str, say: Callable[[str], None]) -> None:
        self.policy, self.say = policy, say
        self.guard = None if policy.privacy is None else Guard(policy.privacy, folder, run, digest, say)
        self.file = folder / run / LEFT
        self.left: Counter[str] = Counter()
        self._end = 0
        self.planned = 0

    def answer(self, task: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``work`` returns, or the reason why nothing does."""
        try:
            told = work()
            self.check_size(_arrays(told))
        except Refused as error:
            told = {"refused": error.reason}
            self.say(f"refused {task}: {error}")
        except (BadReply, Insecure, OutOfRange) as error:
            reason = {Insecure: "sums", OutOfRange: "range"}.get(type(error), "request")
            told = {"refused": reason}
            self.say(f"refused {task}: {error}")
        except Exception as error:
            # What went wrong may depend on the rows, down to the kind of error.
            told = {"refused": "site"}
            self.say(f"could not do {task}: {type(error).__name__}: {error}")
        self._note(task, told)
        return told

    def reply(
        self,
        task: str,
        compute: Callable[[], Arrays],
        like: Sequence[Any],
        message: Sequence[np.ndarray],
        label: Label,
        seal: Callable[[Arrays], Arrays] | None = None,
        ticket: str = "",
    ) -> Arrays:
        """The arrays that ``compute`` returns, of the shapes and types ``like``, in answer to ``message``.

        ``seal`` masks them, last of all, for the sum of that ``ticket``.
        """
        left = self._count(task)
        if left >= OFTEN * self.planned + SPARE:
            raise Refused("often", f"{left} replies have left; the rounds need {self.planned}.")
        self.check_size([np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for leaf in like])
        if self.guard is not None:
            # A share of noise hides nothing in the difference of two sums that both have it.
            once = ticket if self.guard.among > 1 else ""
            arrays = self.guard.protect(compute, like, message, fingerprint(task, label, message, once))
        else:
            arrays = compute()
        if seal is not None:
            return seal(arrays)
        if not all(np.isfinite(array).all() for array in arrays):
            raise Refused("finite")
        return arrays

    def numbers(self, told: Numbers, section: str | None = None) -> Numbers:
        """Numbers about rows, where the policy tells them (``section``, or what stands before the "/" of their names)."""
        for name, values in named_arrays(told, "what the program tells").items():
            self.policy.require(section or name.split("/")[0])
            if name in REPORTED:
                values = REPORTED[name](values)
                self.check_counts(values.sum(keepdims=True), self.policy.minimum_rows, "rows")
            if name in COUNTS:
                self.check_counts(values, getattr(self.policy, COUNTS[name]), name)
        return told

    def check_counts(self, counts: np.ndarray, least: int, what: str) -> None:
        """Every number of rows is 0 or ``least`` at least."""
        few = np.flatnonzero((counts > 0) & (counts < least))
        if few.size:
            reason = "rows" if what in ("rows", "statistics/rows") else "cells"
            raise Refused(reason, f"{what}: number {few[0]} counts {counts.ravel()[few[0]]:g} rows, below {least}.")

    def check_size(self, arrays: Sequence[np.ndarray]) -> None:
        if size_of(arrays) > self.policy.largest_megabytes * 1e6:
            raise Refused("large", f"{size_of(arrays):,} bytes are more than {self.policy.largest_megabytes:g} MB.")

    def _count(self, task: str) -> int:
        """How often it was answered in this run, by whichever worker of the site."""
        if self.file.exists():
            with self.file.open("rb") as file:
                file.seek(self._end)
                whole = file.read().rpartition(b"\n")[0]  # another worker may be writing the last line
            self._end += len(whole) + bool(whole)
            lines = whole.decode().split("\n")
            self.left.update(line.split(";")[1] for line in lines if line.count(";") == 4)
        return self.left[task]

    def _note(self, task: str, told: dict[str, Any]) -> None:
        """A line for everything that leaves: the site's own record."""
        arrays, names = _arrays(told), ",".join(sorted(told.get("numbers", {}))) or ",".join(sorted(told))
        with self.file.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')};{task};{names};{len(arrays)};{size_of(arrays)}\n")


def _arrays(told: dict[str, Any]) -> Arrays:
    return [*told.get("arrays", ()), *told.get("numbers", {}).values()]


def effective_rows(weights: np.ndarray) -> float:
    """Kish's effective sample size: how many rows of equal weight tell as much; none where a weight is negative."""
    if not (weights >= 0).all():
        return 0.0
    total = float(np.sum(weights, dtype=np.float64))
    return total**2 / max(float(np.sum(np.square(weights, dtype=np.float64))), 1e-300)
