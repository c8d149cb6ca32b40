"""Clipping and Gaussian noise on what leaves a site, with an account of what was spent; decided by the site alone.

Every reply is compared with what the site was sent: for each array of the reply the first array of the message with the
same shape and type (not used before) is its reference, zero where there is none.  The difference, all arrays together, is
cut to norm ``clip``, and independent normal noise of standard deviation ``noise * clip`` is added.  The reference is known to
everybody and does not depend on the rows, so any choice of it is sound.  A measured objective is a reply of one number.

With noise, a reply is paid for before anything is computed, and whatever goes wrong from then on (an error, a number that is
not finite) is answered by the reference and noise: a site that fails looks like one that has nothing to say, and pays the same.

The account is for a whole site (*client level*): with its rows, or silent (its reply then is the reference plus noise).  What
holds for all rows of a site holds for each of them (*record level*) a fortiori; a smaller price for single records would need
gradients clipped row by row.  One reply is one Gaussian mechanism of sensitivity ``clip``.  T of them with noise multipliers
z_1 .. z_T, each chosen in view of the earlier ones, are together one with multiplier (sum 1/z_t^2)^(-1/2) (Dong, Roth, Su 2022,
Cor. 3.3), whose epsilon at the given delta `dp_accounting` computes.  The account runs over all jobs of the site, whatever
their names.  Surveys, counts, reports and the time a reply takes are outside of it: ``policy.tell`` decides about these.

With ``shared`` and secure sums, a sum of ``among`` replies or more, of equal weight, is one mechanism: a site's reply moves it
by ``clip`` at most, and the sites' shares of the noise, of variance ``(noise clip)^2 / among`` each, add up to all of it.  The
account is the same; it holds against whoever sees the sums.  Sites that tell the coordinator their shares take these out of it.
Sites say in their greetings how much noise they share, and where one says less than this site needs, it adds all of its own.
A reply that goes into another sum is a new one: two sums with the same shares of the others in them differ by one site's alone.

Noise comes from the operating system's cryptographic generator, never from the job's seed, which the coordinator knows: with
noise a run over sites and a simulation do not give the same numbers.  The latest reply, asked for again after a fault, is
sent again as it was, since fresh noise on the same numbers would tell more of them; any other is one more on the account.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
        raise Refused("account", str(error)) from error
    if account.replies < 0 or not 0 <= account.inverse_squares < math.inf:
        raise Refused("account", "It holds impossible numbers.")
    return account


class Guard:
    """The privacy of one site in one run; ``folder`` holds the states of all its runs."""

    def __init__(
        self, privacy: Privacy, folder: Path, run: str, digest: str, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.privacy, self.folder, self.digest, self.say = privacy, folder, digest, say
        self.among = 1
        """Sites that a reply is summed with at least, itself among them, where the noise is shared by them."""
        self.file = folder / run / "released.npz"
        self.last: tuple[str, Arrays] | None = None
        if privacy.noise > 0:
            gaussian_epsilon(1.0, privacy.delta)  # a site without the accountant says so before it computes anything
        released = read_arrays(self.file)
        if released is not None and released[1].get("digest") == digest:
            self.last = (released[1]["asked"], [*released[0].values()])

    def protect(
        self, compute: Callable[[], Arrays], like: Sequence[Any], message: Sequence[np.ndarray], asked: str
    ) -> Arrays:
        """What ``compute`` returns, paid for, clipped and blurred, and written down before it leaves.

        ``like``: the shapes and types of that; ``message``: the public arrays it is compared with; ``asked``: the name of the
        request.  The latest request, asked again, gets the same reply.
        """
        if self.last is not None and self.last[0] == asked:
            with contextlib.suppress(Exception):
                compute()  # for the state that follows
            return self.last[1]
        if any(np.dtype(leaf.dtype).kind != "f" for leaf in like):
            raise Refused("whole")
        public = references(like, message)
        if self.privacy.noise > 0:
            self._spend()
        noisy = clip_and_blur(self._computed(compute, public), public, self.privacy, self.among)
        write_leaves(self.file, noisy, digest=self.digest, asked=asked)
        self.last = (asked, noisy)
        return noisy

    def _computed(self, compute: Callable[[], Arrays], public: Arrays) -> Arrays:
        try:
            return compute()
        except Exception as error:
            if self.privacy.noise == 0:
                raise
            self.say(f"noise alone leaves, since the reply could not be computed: {type(error).__name__}: {error}")
            return public

    def _spend(self) -> None:
        """One more reply on the account, unless that is more than the site allows."""
        with storage.lock(self.folder / f".{ACCOUNT}.lock", seconds=-1):  # several jobs may be at work
            before = read_account(self.folder)
            after = Account(before.replies + 1, before.inverse_squares + self.privacy.noise**-2)
            budget = self.privacy.epsilon
            if budget is not None and after.epsilon(self.privacy.delta) > budget:
                spent = f"epsilon {budget:g} at delta {self.privacy.delta:g}, in {before.replies} replies"
                raise Refused("budget", f"({spent})")
            storage.write_json(self.folder / ACCOUNT, {"format": FORMAT, **after._asdict()})


def references(reply: Sequence[Any], message: Sequence[np.ndarray]) -> Arrays:
    """For every array of the reply, given by shape and type, the public array it is compared with."""
    left, public = list(message), []
    for array in reply:
        alike = [i for i, sent in enumerate(left) if sent.shape == array.shape and sent.dtype == array.dtype]
        public.append(left.pop(alike[0]) if alike else np.zeros(array.shape, array.dtype))
    return public


def clip_and_blur(reply: Arrays, public: Arrays, privacy: Privacy, among: int = 1) -> Arrays:
    """With noise, a reply that is not finite counts as one that is not there; without, nothing of it is left.

    ``among``: replies that share the noise.
    """
    moves = [
        np.asarray(array, np.float64) - np.asarray(base, np.float64) for array, base in zip(reply, public, strict=True)
    ]
    norm = math.sqrt(sum(float(np.sum(move**2)) for move in moves))
    if not math.isfinite(norm):
        if privacy.noise == 0:
            return [np.full(base.shape, np.nan, base.dtype) for base in public]
        moves, norm = [np.zeros(base.shape) for base in public], 0.0
    factor = min(1.0, privacy.clip / norm) if norm > 0 else 1.0
    spread = privacy.noise * privacy.clip / math.sqrt(among)
    return [
        (base + factor * move + (spread * normal(move.shape) if spread > 0 else 0.0)).astype(base.dtype)
        for base, move in zip(public, moves, strict=True)
    ]


def normal(shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal draws from the operating system's cryptographic generator.

    Each is half the sum of four, so that the low digits of a result do not give away the noise (Holohan, Braghin 2021)."""
    from scipy.special import ndtri

    size = math.prod(shape)
    words = np.frombuffer(secrets.token_bytes(4 * size * 8), np.uint64).reshape(4, size)
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(ndtri(uniform).sum(axis=0) / 2).reshape(shape)


def fingerprint(task: str, label: Label, message: Sequence[np.ndarray], ticket: str = "") -> str:
    """What was asked for, whichever attempt of the run it was asked in; ``ticket``: for one sum alone."""
    digest = hashlib.sha256(repr((task, label.stage, label.round, label.ordinal)).encode() + ticket.encode())
    for array in message:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def gaussian_epsilon(noise: float, delta: float) -> float:
    """epsilon of one Gaussian mechanism with noise multiplier ``noise``, by the accountant library."""
    try:
        from dp_accounting import get_epsilon_gaussian  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise Refused("accountant") from error
    return float(get_epsilon_gaussian(noise, delta))
