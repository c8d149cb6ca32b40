"""Clipping and Gaussian noise on what leaves a site, with an account of what was spent; decided by the site alone.

Every reply is compared with what the site was sent: for each array of the reply the first array of the message with the
same shape and type (not used before) is its reference, zero where there is none.  The difference, all arrays together, is
cut to norm ``clip``, and independent normal noise of standard deviation ``noise * clip`` is added.  The reference is known to
everybody and does not depend on the rows, so any choice of it is sound.

The account is for a whole site: with its rows, or silent (its reply then is the reference plus noise).  One reply is one
Gaussian mechanism of sensitivity ``clip``; they compose over the run, by `dp_accounting`.  Surveys, counts and reports are
outside of it: list in ``policy.tell`` only what may be told.

Noise comes from the operating system's entropy, never from the job's seed, which the coordinator knows.  A reply asked for
again (after a fault) is sent again as it was: fresh noise on the same numbers would give them away.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbilevel.engines.nvflare.errors import Refused
from fedbilevel.engines.nvflare.payload import Arrays
from fedbilevel.engines.nvflare.policy import Privacy
from fedbilevel.engines.nvflare.vault import FORMAT, Label, read_arrays, write_arrays


class Guard:
    """The privacy of one site in one run; ``releases`` counts the noisy replies that were made."""

    def __init__(self, privacy: Privacy, folder: Path, digest: str) -> None:
        self.privacy, self.file, self.digest = privacy, folder / "released.npz", digest
        self.random = np.random.default_rng()
        self.releases = 0
        self.last: tuple[str, Arrays] | None = None
        self.allowed = releases_within(privacy)
        found = read_arrays(self.file) if self.file.exists() else None
        if self.file.exists() and found is None:
            raise Refused("The site cannot read its own account of what it released, so it releases nothing more.")
        if found is not None:
            about, arrays = found
            self.releases = int(about["releases"])
            if about["digest"] == digest:
                self.last = (about["asked"], [arrays[f"leaf{i}"] for i in range(len(arrays))])

    def again(self, label: Label, message: Sequence[np.ndarray]) -> Arrays | None:
        """The reply already made to the same request."""
        if self.last is not None and self.last[0] == fingerprint(label, message):
            return self.last[1]
        return None

    def protect(self, reply: Arrays, message: Sequence[np.ndarray], label: Label) -> Arrays:
        """Clip, add noise, and write down that it was done before it leaves."""
        if self.allowed is not None and self.releases >= self.allowed:
            raise Refused(
                f"This site has spent its privacy budget (epsilon {self.privacy.epsilon:g} at delta "
                f"{self.privacy.delta:g}) in {self.releases} replies."
            )
        noisy = clip_and_blur(reply, references(reply, message), self.privacy, self.random)
        self.releases += 1
        asked = fingerprint(label, message)
        about = {"format": FORMAT, "digest": self.digest, "releases": self.releases, "asked": asked}
        write_arrays(self.file, about, {f"leaf{i}": array for i, array in enumerate(noisy)})
        self.last = (asked, noisy)
        return noisy


def references(reply: Arrays, message: Sequence[np.ndarray]) -> Arrays:
    """For every array of the reply the public array it is compared with."""
    left = list(message)
    found: Arrays = []
    for array in reply:
        place = next(
            (i for i, sent in enumerate(left) if sent.shape == array.shape and sent.dtype == array.dtype), None
        )
        found.append(np.zeros_like(array) if place is None else left.pop(place))
    return found


def clip_and_blur(reply: Arrays, public: Arrays, privacy: Privacy, random: np.random.Generator) -> Arrays:
    if any(array.dtype.kind != "f" for array in reply):
        raise Refused("The reply holds whole numbers, which this site's privacy settings cannot blur.")
    moves = [
        np.asarray(array, np.float64) - np.asarray(base, np.float64) for array, base in zip(reply, public, strict=True)
    ]
    norm = math.sqrt(sum(float(np.sum(move**2)) for move in moves))
    if not math.isfinite(norm):
        raise Refused("The reply is not finite.")
    factor = min(1.0, privacy.clip / norm) if norm > 0 else 1.0
    spread = privacy.noise * privacy.clip
    return [
        (base + factor * move + spread * random.standard_normal(move.shape)).astype(array.dtype)
        for array, base, move in zip(reply, public, moves, strict=True)
    ]


def fingerprint(label: Label, message: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256(repr(tuple(label)).encode())
    for array in message:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def spent(noise: float, releases: int, delta: float) -> float:
    """epsilon after ``releases`` replies with noise multiplier ``noise``: T Gaussian mechanisms are one of noise / sqrt(T)."""
    raise NotImplementedError


def releases_within(privacy: Privacy) -> int | None:
    """How many replies the budget allows; None where there is none."""
    if privacy.epsilon is None:
        return None
    low, high = 0, 1
    while high < 1 << 24 and spent(privacy.noise, high, privacy.delta) <= privacy.epsilon:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if spent(privacy.noise, middle, privacy.delta) <= privacy.epsilon:
            low = middle
        else:
            high = middle
    return low
