"""Clipping and Gaussian noise on what leaves a site, with an account of what was spent; decided by the site alone.

Every reply is compared with what the site was sent: for each array of the reply the first array of the message with the
same shape and type (not used before) is its reference, zero where there is none.  The difference, all arrays together, is
cut to norm ``clip``, and independent normal noise of standard deviation ``noise * clip`` is added.  The reference is known to
everybody and does not depend on the rows, so any choice of it is sound.

The account is for a whole site: with its rows, or silent (its reply then is the reference plus noise).  One reply is one
Gaussian mechanism of sensitivity ``clip``.  T of them with noise multipliers z_1 .. z_T, each chosen in view of the earlier
ones, are together one with multiplier (sum 1/z_t^2)^(-1/2) (Dong, Roth, Su 2022, Cor. 3.3), whose epsilon at the given delta
`dp_accounting` computes.  The account runs over all jobs of the site, whatever their names.  Surveys, counts, reports and the
time a reply takes are outside of it: list in ``policy.tell`` only what may be told.

Noise comes from the operating system's entropy, never from the job's seed, which the coordinator knows.  The latest reply,
asked for again (after a fault), is sent again as it was, since fresh noise on the same numbers would tell more of them; any
other is a further reply on the account.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbilevel import storage
from fedbilevel.engines.stages import Refused
from fedbilevel.federation.protocol.payload import Arrays
from fedbilevel.federation.protocol.policy import Privacy
from fedbilevel.federation.protocol.vault import FORMAT, Label, read_arrays, write_leaves

ACCOUNT = "privacy.json"
"""In the folder of a site's states: what all its jobs have spent."""


class Account(NamedTuple):
    """``replies`` made with noise so far, and the sum of 1 / z^2 over them."""

    replies: int = 0
    inverse_squares: float = 0.0

    def epsilon(self, delta: float) -> float:
        return 0.0 if self.inverse_squares == 0 else gaussian_epsilon(self.inverse_squares**-0.5, delta)


def read_account(folder: Path) -> Account:
    """What a site has spent; refused where its file cannot be read, since then nobody knows."""
    file = folder / ACCOUNT
    if not file.exists():
        return Account()
    try:
        spent = json.loads(file.read_text())
        account = Account(int(spent["replies"]), float(spent["inverse_squares"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused("The site cannot read its own privacy account, so it releases nothing more.") from error
    if account.replies < 0 or not 0 <= account.inverse_squares < math.inf:
        raise Refused("The site's privacy account holds impossible numbers, so it releases nothing more.")
    return account


class Guard:
    """The privacy of one site in one run; ``folder`` holds the states of all its runs."""

    def __init__(self, privacy: Privacy, folder: Path, run: str, digest: str) -> None:
        self.privacy, self.folder, self.digest = privacy, folder, digest
        self.file = folder / run / "released.npz"
        self.random = np.random.default_rng()
        self.last: tuple[str, Arrays] | None = None
        if privacy.noise > 0:
            gaussian_epsilon(1.0, privacy.delta)  # a site without the accountant says so before it computes anything
        released = read_arrays(self.file)
        if released is not None and released[1].get("digest") == digest:
            self.last = (released[1]["asked"], [*released[0].values()])

    def protect(self, reply: Arrays, message: Sequence[np.ndarray], label: Label) -> Arrays:
        """Clip, add noise, and write down that it was done before it leaves; the same request gets the same reply."""
        asked = fingerprint(label, message)
        if self.last is not None and self.last[0] == asked:
            return self.last[1]
        noisy = clip_and_blur(reply, references(reply, message), self.privacy, self.random)
        if self.privacy.noise > 0:
            self._spend()
        write_leaves(self.file, noisy, digest=self.digest, asked=asked)
        self.last = (asked, noisy)
        return noisy

    def _spend(self) -> None:
        """One more reply on the account, unless that is more than the site allows."""
        with storage.lock(self.folder / f".{ACCOUNT}.lock", seconds=-1):  # several jobs may be at work
            before = read_account(self.folder)
            after = Account(before.replies + 1, before.inverse_squares + self.privacy.noise**-2)
            budget = self.privacy.epsilon
            if budget is not None and after.epsilon(self.privacy.delta) > budget:
                raise Refused(
                    f"This site has spent its privacy budget (epsilon {budget:g} at delta {self.privacy.delta:g}) in "
                    f"{before.replies} replies."
                )
            storage.write_json(self.folder / ACCOUNT, {"format": FORMAT, **after._asdict()})


def references(reply: Arrays, message: Sequence[np.ndarray]) -> Arrays:
    """For every array of the reply the public array it is compared with."""
    left, public = list(message), []
    for array in reply:
        alike = [i for i, sent in enumerate(left) if sent.shape == array.shape and sent.dtype == array.dtype]
        public.append(left.pop(alike[0]) if alike else np.zeros_like(array))
    return public


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
    """What was asked for, whichever attempt of the run it was asked in."""
    digest = hashlib.sha256(repr((label.stage, label.round, label.ordinal)).encode())
    for array in message:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def gaussian_epsilon(noise: float, delta: float) -> float:
    """epsilon of one Gaussian mechanism with noise multiplier ``noise``, by the accountant library."""
    try:
        from dp_accounting import get_epsilon_gaussian  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise Refused(
            "This site's privacy settings need the package dp-accounting, 0.6 or later: install fedbilevel[privacy]."
        ) from error
    return float(get_epsilon_gaussian(noise, delta))
