"""Sums that show nobody's single reply: secure aggregation with dropouts.

After K. Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, with fresh masks
for every label (one sum).  The coordinator relays everything and learns one sum for a label, and nothing else:

    hello       once a run: a site's key, signed with its certificate; two sites have k_uv in common (X25519, and both names)
    mask        x_u + PRG(b_u) + sum over v > u of PRG(m_uv) - sum over v < u of PRG(m_uv)   (mod 2^64), m_uv from k_uv
    repair      only where sites were lost: what their masks left in the numbers of each survivor, masked in the same way
    unmask      of every site whose masked numbers arrived, a share of its seed b

``m_uv`` depends on the label, on what the sites were asked, on what they remember of earlier questions (`Masking.question`) and
on who takes part, so sites that were told different things have masks that do not cancel.  It is new for every label, and so
are seeds: nothing of one sum helps with another.  ``k_uv`` depends on both names and keys: a site that signs another one's key
as its own has no masks in common with anybody.

*Seeds* are Shamir's: b_u is the value at 0 of a polynomial of degree ``threshold`` - 1, whose value at v is the share of site
v.  The polynomial goes through ``threshold`` points, that of u and those of the sites after it in the cohort, which u and v
both draw from k_uv: nothing is sent for them.  Each other site is sent its share minus a number that is drawn likewise
(`Masked`).

*Lost sites.*  Bonawitz et al. share the keys of the pairwise masks as well and give those of lost sites away.  Here the
survivors add up what is left of these masks in a second sum, whose own masks depend on the list of survivors.  It comes out
only if all of them were given the same list.  A site gives shares for the list it has repaired last, or for all where it has
repaired nothing, and then no other; a list it repairs later must be part of the earlier ones.

*Why one sum only*, while fewer than 2 ``threshold`` - n of the n sites work with a coordinator that lies.  Let c sites do so;
the n - c others are honest.  A repair comes out only if every honest site on its list takes part: at least threshold - c.
Two such groups have a site in common, since 2 (threshold - c) > n - c, so of two lists one is part of the other.  Let L be
the smallest, or everybody where nothing was repaired.  The honest sites on L give no share of a seed of a site outside L, and
the n - threshold others are fewer than the threshold - c that are needed: what sites outside L sent stays masked.  The masks
between two sites on L are in their numbers and in no repair, so nothing comes out but the sum over L, which has ``threshold``
sites or more.

Where a sum needs every site of the cohort (three of three), nobody's masks are ever taken out: there are no seeds and no
shares, and a sum takes one exchange.

*Assumed.*  A site's answers are remembered: in `Answered`, which its processes share and nobody puts back to an earlier copy;
a site that has lost it begins with another master secret.  Sites know each other's certificates.  X25519, HKDF and ChaCha20
are what they are said to be.

What travels is fixed point modulo 2^64 or less (`fedbilevel.engines.fixed`); what holds modulo 2^64 holds for the lower bits.
Keys and masks are X25519, HKDF and ChaCha20 of ``cryptography``.  Every secret follows from the site's master secret and the
label, so a site that was killed goes on with the same numbers; what it has answered is kept in `Answered`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedbilevel import storage
from fedbilevel.engines.fixed import Words
from fedbilevel.federation.protocol.settings import LEAST, quorum

PRIME = 2**127 - 1
"""Seeds and shares are numbers below it: seeds have 127 bits."""
SHARE = 16
"""Bytes of a share, a letter, or the digest of a seed."""
NO_NOISE = struct.pack(">d", 0.0)
NOTHING_TO_SHARE = "Every site is needed for a sum of this cohort: nothing is repaired, and nothing is unmasked."


class Insecure(ValueError):
    """A site will not do this, or a sum cannot be had: the sentence says why, and nothing was unmasked."""


@dataclass(frozen=True)
class Cohort:
    """The sites of a run, in one order for all, and how many of them a sum needs."""

    run: str
    names: tuple[str, ...]
    threshold: int

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names) or list(self.names) != sorted(self.names):
            raise Insecure("The names of a cohort must differ and be sorted.")
        if len(self.names) < LEAST:
            raise Insecure(f"A cohort needs {LEAST} sites at least: of two, each would know the other's numbers.")
        if not max(LEAST, len(self.names) // 2 + 1) <= self.threshold <= len(self.names):
            raise Insecure(
                f"A threshold of {self.threshold} of {len(self.names)} sites will not do: it must be {LEAST} at least, more "
                "than half of the cohort, and not more than all of it."
            )

    @classmethod
    def usual(cls, run: str, names: Iterable[str]) -> Cohort:
        """Two thirds of the sites, and at least three."""
        ordered = tuple(sorted(names))
        return cls(run, ordered, quorum(len(ordered)))

    @property
    def complete(self) -> bool:
        """Whether a sum needs all of them."""
        return self.threshold == len(self.names)

    @cached_property
    def digest(self) -> bytes:
        return _hash("cohort", self.run, *self.names, str(self.threshold))

    @cached_property
    def places(self) -> dict[str, int]:
        """Where the sites' shares are taken: 1, 2, ..."""
        return {name: place for place, name in enumerate(self.names, 1)}

    def after(self, name: str) -> tuple[str, ...]:
        """All sites in the order in which ``name`` shares a seed: itself first, and those from the threshold on by letter."""
        start = self.places[name] - 1
        return self.names[start:] + self.names[:start]

    def letter(self, sender: str, receiver: str) -> int | None:
        """Which of a site's letters goes to another one; None where that one needs none."""
        number = (self.places[receiver] - self.places[sender]) % len(self.names) - self.threshold
        return number if number >= 0 else None

    def roll(self, names: Iterable[str]) -> str:
        """A list of sites as it travels: a 1 for each of them among all."""
        there = set(names)
        return "".join("1" if name in there else "0" for name in self.names)

    def called(self, roll: str) -> list[str]:
        """The list that a roll stands for, in order."""
        if len(roll) != len(self.names) or set(roll) - {"0", "1"}:
            raise Insecure("A list of sites has a 0 or a 1 for every site of the cohort, and nothing else.")
        return [name for name, there in zip(self.names, roll, strict=True) if there == "1"]


class Hello(NamedTuple):
    """Once a run: the key that a site agrees with the others by."""

    name: str
    key: bytes
    certificate: bytes
    signature: bytes
    noise: bytes = NO_NOISE
    """What it adds to sums as its share, as 8 bytes: see `Privacy.shared`."""


class Masked(NamedTuple):
    """A site's part of a sum.  ``seed``: the digest of its seed; ``letters``: the shares of those who cannot draw them, each
    minus a number that only the two know, in the order of `Cohort.after`.

    Whoever changes a letter changes the share that its reader gives by as much, learns nothing, and spoils the sum.
    """

    words: Words
    seed: bytes = b""
    letters: tuple[int, ...] = ()


class Asked(NamedTuple):
    """The sum that a site has masked last: ``about``, all that the masks of pairs depend on."""

    label: str
    exchange: str
    present: tuple[str, ...]
    about: bytes
    size: int


class Identity(Protocol):
    """Who a site is, by its certificate."""

    @property
    def certificate(self) -> bytes: ...

    def sign(self, message: bytes) -> bytes: ...

    def verify(self, name: str, certificate: bytes, message: bytes, signature: bytes) -> None:
        """Raises ``InvalidSignature`` unless the message is signed by the site ``name``, or `Insecure` where the certificate is
        not the one it is known by."""


class Answered:
    """What a site has answered: what it masked for a label, whom it repaired it for last, whom it unmasked an exchange for.
    With ``file`` every answer is on disk before it leaves, and processes with the same file answer as one."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.known: dict[tuple[str, str], str] = {}
        self._end = 0

    @contextmanager
    def held(self) -> Iterator[dict[tuple[str, str], str]]:
        """All that was answered; meanwhile no other process answers."""
        with nullcontext() if self.file is None else storage.lock(self.file.with_suffix(".lock"), seconds=-1):
            if self.file is not None and self.file.exists():
                self._catch_up(self.file)
            yield self.known

    def _catch_up(self, file: Path) -> None:
        with file.open("rb") as opened:
            opened.seek(self._end)
            lines = opened.read().splitlines()
            self._end = opened.tell()
        for line in lines:
            try:
                kind, name, value = json.loads(line)
            except ValueError:
                continue  # cut short by a crash, so nothing of it left
            self.known[kind, name] = value

    def note(self, kind: str, name: str, value: str) -> None:
        """While `held`."""
        if self.known.get((kind, name)) != value:
            if self.file is not None:
                with self.file.open("ab") as file:
                    file.write(b"\n" * (file.tell() > 0) + json.dumps([kind, name, value]).encode())
                    file.flush()
                    os.fsync(file.fileno())
                    self._end = file.tell()
            self.known[kind, name] = value

    def first(self, kind: str, name: str, value: str) -> str:
        """The first value that was settled on under this name: ``value`` unless there was one before."""
        if (kind, name) not in self.known:
            self.note(kind, name, value)
        return self.known[kind, name]


class SecureSite:
    """One site's side.  ``master``: 32 secret bytes, kept with ``answered`` for as long as the run may go on."""

    def __init__(
        self,
        name: str,
        cohort: Cohort,
        master: bytes,
        identity: Identity,
        answered: Answered | None = None,
        noise: bytes = NO_NOISE,
    ) -> None:
        if name not in cohort.names:
            raise Insecure(f"{name} is not in the cohort.")
        self.name, self.cohort, self.identity = name, cohort, identity
        self.answered = answered or Answered()
        self.noise = noise
        self.noises: dict[str, bytes] = {}
        """Of all who have met, as they have signed it."""
        self._master = master
        self._channel = X25519PrivateKey.from_private_bytes(self._derive("channel"))
        self._key = self._channel.public_key().public_bytes_raw()
        self._common: dict[str, bytes] = {}
        self._asked: Asked | None = None

    def hello(self) -> Hello:
        signature = self.identity.sign(greeting(self.cohort, self.name, self._key, self.noise))
        return Hello(self.name, self._key, self.identity.certificate, signature, self.noise)

    def meet(self, hellos: Sequence[Hello]) -> None:
        """Take the keys of those who are there, each signed by the site it is said to be of."""
        names = [hello.name for hello in hellos]
        self._check(names, self.cohort.names, "The greetings are not those of the cohort")
        common = {}
        for hello in hellos:
            signed = greeting(self.cohort, hello.name, hello.key, hello.noise)
            try:
                self.identity.verify(hello.name, hello.certificate, signed, hello.signature)
            except InvalidSignature as error:
                raise Insecure(f"A greeting that is said to be of {hello.name} is not signed by it.") from error
            if hello.name != self.name:
                common[hello.name] = self._in_common(hello.name, hello.key)
            elif hello.key != self._key:
                raise Insecure("Somebody else's key is passed off as this site's.")
        self._common, self.noises = common, {hello.name: hello.noise for hello in hellos}

    def _in_common(self, other: str, key: bytes) -> bytes:
        """k_uv, of the names and keys of both: a site that gives another one's key as its own has nothing in common with
        anybody that the other one has too."""
        shared = self._channel.exchange(X25519PublicKey.from_public_bytes(key))
        both = sorted([(self.name, self._key), (other, key)])
        return _stretch(shared, _hash("common", self.cohort.digest, *(part for pair in both for part in pair)))

    def check_met(self) -> None:
        if not self._common:
            raise Insecure("The sites have not met yet.")

    def mask(
        self, label: str, present: Sequence[str], words: Words, exchange: str = "", question: bytes = b""
    ) -> Masked:
        """``words`` behind the masks that this site has in common with all others who are ``present``, and its own: the same
        answer to the same question, no other after it.

        ``exchange``: what the sum is for, by name; ``question``: all that the sites were asked, which must be the same for all.
        """
        self.check_met()
        if self.cohort.complete and list(present) != list(self.cohort.names):
            raise Insecure(f"{len(present)} sites are not the {self.cohort.threshold} that a sum of this cohort needs.")
        self._check(present, {self.name, *self._common}, "Those who take part are not sites that have met")
        about = _hash("sum", self.cohort.digest, label, exchange, question, *present)
        settled = f"{hashlib.sha256(about + words.tobytes()).hexdigest()} {exchange}"
        with self.answered.held():
            if self.answered.first("masked", label, settled) != settled:
                raise Insecure(f"{label} was answered before, to another question.")
        self._asked = Asked(label, exchange or label, tuple(present), about, words.size)
        masked = words + self._streams(present, about, words.size)
        if self.cohort.complete:
            return Masked(masked)
        order, threshold = self.cohort.after(self.name), self.cohort.threshold
        drawn = [self._drawn(label, self.name, other) for other in order]
        seed, *shares = (_combined(weights, drawn[:threshold]) for weights in self._weights)
        masked = masked + _own_stream(self.cohort, label, self.name, seed, words.size)
        letters = ((share - less) % PRIME for share, less in zip(shares, drawn[threshold:], strict=True))
        return Masked(masked, _digest(self.cohort, label, self.name, seed), tuple(letters))

    def chance(self, label: str, size: int) -> Words:
        """Words that nobody else can draw, for a sum that is to tell nothing."""
        return _stream(self._derive("chance", label), size)

    def repair(self, label: str, survivors: Sequence[str]) -> Words:
        """What the masks of lost sites left in this site's numbers, to be taken away: masked, so that only the sum over the
        survivors comes out, and only if all of them are given the same list."""
        asked = self._sum(label, survivors)
        alive = " ".join(survivors)
        if len(survivors) == len(asked.present):
            raise Insecure("Nobody is said to be lost, so there is nothing to repair.")
        with self.answered.held() as known:
            before = known.get(("repaired", label), " ".join(asked.present))
            if not set(survivors) <= set(before.split()):
                raise Insecure(f"{label} was repaired before, for a list without some of these survivors: {before}.")
            if known.get(("unmasked", asked.exchange), alive) != alive:
                raise Insecure(f"{asked.exchange} was unmasked before, for another list of survivors.")
            self.answered.note("repaired", label, alive)
        lost = [name for name in asked.present if name not in survivors]
        masks = self._streams(survivors, _hash("repair", asked.about, *survivors), asked.size)
        return masks - self._streams(lost, asked.about, asked.size)

    def unmask(self, label: str, survivors: Sequence[str], letters: Mapping[str, int]) -> dict[str, int]:
        """A share of the seed of every survivor; ``letters``: those that came for this site, by their senders."""
        asked = self._sum(label, survivors)
        alive = " ".join(survivors)
        with self.answered.held() as known:
            if known.get(("repaired", label), " ".join(asked.present)) != alive:
                raise Insecure(
                    f"{label} is to be unmasked for another list of survivors than the one it was repaired for."
                )
            # An exchange that is done again, by another submission of the run, is unmasked for the same sites.
            before = self.answered.first("unmasked", asked.exchange, alive)
            if before != alive:
                raise Insecure(f"{asked.exchange} was unmasked before, for another list of survivors: {before}.")
        shares = {}
        for other in survivors:
            drawn = self._drawn(label, other, self.name)
            if self.cohort.letter(other, self.name) is None:
                shares[other] = drawn
            elif other in letters:
                shares[other] = (drawn + letters[other]) % PRIME
            else:
                raise Insecure(f"The letter of {other} is missing.")
        return shares

    def _sum(self, label: str, survivors: Sequence[str]) -> Asked:
        """The sum at hand, where the survivors can be those of it."""
        if self.cohort.complete:
            raise Insecure(NOTHING_TO_SHARE)
        if self._asked is None or self._asked.label != label:
            raise Insecure(f"{label} is not what this site has masked last, since it was started.")
        self._check(survivors, self._asked.present, "The survivors are not sites of the sum")
        return self._asked

    def _check(self, names: Sequence[str], known: Iterable[str], otherwise: str) -> None:
        if list(names) != sorted(set(names)) or not set(names) <= set(known) or self.name not in names:
            raise Insecure(f"{otherwise}, one each and this site among them.")
        if len(names) < self.cohort.threshold:
            raise Insecure(
                f"{len(names)} sites are fewer than the {self.cohort.threshold} a sum needs: nothing is unmasked."
            )

    def _streams(self, names: Iterable[str], about: bytes, size: int) -> Words:
        """The masks that this site has in common with each of ``names``, added up with their signs."""
        total = np.zeros(size, np.uint64)
        for other in names:
            if other != self.name:
                stream = _stream(_stretch(self._common[other], _hash("pair", about)), size)
                (np.add if self.name < other else np.subtract)(total, stream, out=total)
        return total

    def _drawn(self, label: str, sender: str, receiver: str) -> int:
        """A number that two sites draw alike for the share of ``receiver`` of the seed of ``sender``; one that this site alone
        can draw where the two are one, or have not met."""
        other = receiver if sender == self.name else sender
        secret = self._common.get(other) or self._derive("alone", other)
        about = _hash("share", self.cohort.digest, label, sender, receiver)
        return int.from_bytes(_stretch(secret, about), "big") % PRIME

    @cached_property
    def _weights(self) -> list[list[int]]:
        """What makes the seed, and every share that goes by letter, of the shares before the threshold."""
        places = [self.cohort.places[name] for name in self.cohort.after(self.name)]
        drawn, sent = places[: self.cohort.threshold], places[self.cohort.threshold :]
        return lagrange(drawn, (0, *sent))

    def _derive(self, *about: str) -> bytes:
        return _stretch(self._master, _hash("site", self.cohort.digest, self.name, *about))


def greeting(cohort: Cohort, name: str, key: bytes, noise: bytes = NO_NOISE) -> bytes:
    """What a site signs.  NVFlare has sites sign texts that the server chooses, with the same key: no text has the first
    byte."""
    return b"\xfffedbilevel hello " + _hash(cohort.digest, name, key, noise)


def recovered(
    cohort: Cohort,
    label: str,
    masked: Mapping[str, Masked],
    repairs: Iterable[Words],
    shares: Mapping[str, Mapping[str, int]],
) -> Words:
    """The coordinator's step: the sum over the sites in ``masked``, by their ``repairs`` where sites were lost, and by the
    shares of seeds that ``threshold`` of them gave."""
    if len(masked) < cohort.threshold:
        raise Insecure(
            f"{len(masked)} sites answered, fewer than the {cohort.threshold} a sum needs: the round has no sum."
        )
    parts = [*(each.words for each in masked.values()), *repairs]
    if len({part.size for part in parts}) > 1:
        raise Insecure("The sites' numbers differ in how many they are.")
    total = np.zeros(parts[0].size, np.uint64)
    for part in parts:
        total += part
    if cohort.complete:
        return total
    whole = {giver: given for giver, given in shares.items() if given.keys() >= masked.keys()}
    if len(whole) < cohort.threshold:
        raise Insecure(f"{len(whole)} sites gave shares, and {cohort.threshold} are needed: the round has no sum.")
    givers = sorted(whole)[: cohort.threshold]
    (weights,) = lagrange([cohort.places[giver] for giver in givers], [0])
    for name, each in masked.items():
        seed = _combined(weights, [whole[giver][name] for giver in givers])
        if _digest(cohort, label, name, seed) != each.seed:
            raise Insecure(f"The shares of {name}'s seed do not make the seed it has: a site gave a wrong one.")
        total -= _own_stream(cohort, label, name, seed, total.size)
    return total


def lagrange(places: Sequence[int], targets: Iterable[int]) -> list[list[int]]:
    """For each of ``targets``, none of them a place, the weights with which values at ``places`` make the value there of the
    polynomial through them, modulo `PRIME`."""
    below = [math.prod(place - other for other in places if other != place) for place in places]
    inverse = [pow(each, -1, PRIME) for each in below]
    weights = []
    for target in targets:
        above = math.prod(target - place for place in places) % PRIME
        pairs = zip(places, inverse, strict=True)
        weights.append([above * pow(target - place, -1, PRIME) * each % PRIME for place, each in pairs])
    return weights


def _combined(weights: Sequence[int], values: Sequence[int]) -> int:
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) % PRIME


def _own_stream(cohort: Cohort, label: str, name: str, seed: int, size: int) -> Words:
    about = _hash("self", cohort.digest, label, name)
    return _stream(_stretch(seed.to_bytes(SHARE, "big"), about), size)


def _digest(cohort: Cohort, label: str, name: str, seed: int) -> bytes:
    return _hash("seed", cohort.digest, label, name, seed.to_bytes(SHARE, "big"))[:SHARE]


def _stretch(secret: bytes, about: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"fedbilevel secure sum 3 " + about).derive(secret)


def _stream(key: bytes, size: int) -> Words:
    """ChaCha20's stream; every key is used for one stream only, so the nonce may be zero."""
    drawn = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * size))
    return np.frombuffer(drawn, "<u8").astype(np.uint64, copy=False)


def _hash(*parts: str | bytes) -> bytes:
    """A digest of the parts, each with its length, so that no two lists of parts have the same."""
    digest = hashlib.sha256()
    for part in parts:
        text = part.encode() if isinstance(part, str) else part
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.digest()
