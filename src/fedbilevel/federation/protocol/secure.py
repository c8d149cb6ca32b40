"""Sums that show nobody's single reply: secure aggregation with dropouts.

K. Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, with fresh masks for every
ticket (one sum).  The coordinator relays everything and learns the sum, and nothing else, as long as fewer than ``threshold``
sites work with it:

    hello       once a run: a site's keys for sealed letters and for its signature, signed with its certificate
    advertise   per ticket: a key for masks, signed; and letters with one Shamir share each of that key and of its own seed
    mask        x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv)   (mod 2^64)
    unmask      of every site whose masked numbers arrived, the share of its seed b; of every other, the share of its key s

``b_u`` is a site's own seed for the ticket, ``s_uv`` what two sites agree on (X25519, HKDF) about the same question: sites that
were asked differently have masks that do not cancel.  A site's two secrets never leave together: it hands out one kind of share
of each other site, once an exchange, also where a run is submitted again.  Two lists of survivors would need two thresholds, so
a threshold above half of the cohort keeps a lying coordinator from both.

Where a sum needs every site of the cohort (three of three), nobody's masks are ever taken out, so there is nothing to share:
the masks of a pair follow from the keys in their greetings, there are no seeds and no adverts, and a sum takes one exchange.

What travels is fixed point modulo 2^64 or less (`fedbilevel.engines.fixed`); what holds modulo 2^64 holds for the lower bits.
Keys, letters and masks are X25519, Ed25519, HKDF,
ChaCha20 and ChaCha20-Poly1305 of ``cryptography``.  Every secret of a ticket follows from the site's master secret and the
ticket, so a site that was killed goes on with the same numbers; what it has answered is kept in `Answered`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedbilevel.engines.fixed import Words
from fedbilevel.federation.protocol.settings import LEAST, quorum

PRIME = 2**255 - 19
"""Shares are numbers below it; secrets have 31 bytes, so every one fits."""
SECRET = 31
NOTHING_TO_SHARE = "Every site is needed for a sum of this cohort: there are no adverts, and nothing is unmasked."


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

    @property
    def digest(self) -> bytes:
        return _hash("cohort", self.run, *self.names, str(self.threshold))

    def place(self, name: str) -> int:
        """Where a site's shares are taken: 1, 2, ..."""
        return self.names.index(name) + 1


class Hello(NamedTuple):
    """Once a run: the key that letters to a site are sealed for, and the one that it signs adverts with."""

    name: str
    key: bytes
    signing: bytes
    certificate: bytes
    signature: bytes


class Advert(NamedTuple):
    """Once a ticket: a key for masks, the digest of the seed, and a sealed letter to every other site.

    A letter is nobody else's business and cannot be changed, so a site is sent its own alone, and no signature covers it.
    """

    name: str
    key: bytes
    seed: bytes
    signature: bytes
    letters: dict[str, bytes]


class Shares(NamedTuple):
    """What a site gives to unmask a sum, by site: shares of seeds (whose numbers arrived), of keys (whose did not)."""

    seeds: dict[str, int]
    keys: dict[str, int]


class Identity(Protocol):
    """Who a site is, by its certificate."""

    @property
    def certificate(self) -> bytes: ...

    def sign(self, message: bytes) -> bytes: ...

    def verify(self, name: str, certificate: bytes, message: bytes, signature: bytes) -> None:
        """Raises ``InvalidSignature`` unless the message is signed by the site ``name``, or `Insecure` where the certificate is
        not the one it is known by."""


class Answered:
    """What a site has answered: what it masked for a ticket, whom it unmasked an exchange for.  With ``file`` every answer is
    on disk before it leaves."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.known: dict[tuple[str, str], str] = {}
        for line in file.read_text().splitlines() if file is not None and file.exists() else ():
            try:
                kind, name, value = json.loads(line)
            except ValueError:
                continue  # cut short by a crash, so nothing of it left
            self.known.setdefault((kind, name), value)

    def first(self, kind: str, name: str, value: str) -> str:
        """The first value that was settled on under this name: ``value`` unless there was one before."""
        if (kind, name) not in self.known:
            if self.file is not None:
                with self.file.open("a") as file:
                    file.write("\n" * (file.tell() > 0) + json.dumps([kind, name, value]))
                    file.flush()
                    os.fsync(file.fileno())
            self.known[kind, name] = value
        return self.known[kind, name]


class SecureSite:
    """One site's side.  ``master``: 32 secret bytes, kept with ``answered`` for as long as the run may go on."""

    def __init__(
        self, name: str, cohort: Cohort, master: bytes, identity: Identity, answered: Answered | None = None
    ) -> None:
        if name not in cohort.names:
            raise Insecure(f"{name} is not in the cohort.")
        self.name, self.cohort, self.identity = name, cohort, identity
        self.answered = answered or Answered()
        self._master = master
        self._channel = X25519PrivateKey.from_private_bytes(self._derive("channel"))
        self._signing = Ed25519PrivateKey.from_private_bytes(self._derive("signing"))
        self._agreed: dict[str, bytes] = {}
        self._letters: dict[str, ChaCha20Poly1305] = {}
        self._signers: dict[str, Ed25519PublicKey] = {}
        self._verified: tuple[str, Sequence[Advert]] = ("", ())

    def hello(self) -> Hello:
        keys = [private.public_key().public_bytes_raw() for private in (self._channel, self._signing)]
        signature = self.identity.sign(_hash("hello", self.cohort.digest, self.name, *keys))
        return Hello(self.name, keys[0], keys[1], self.identity.certificate, signature)

    def meet(self, hellos: Sequence[Hello]) -> None:
        """Take the keys of those who are there, each signed by the site it is said to be of."""
        names = [hello.name for hello in hellos]
        if names != sorted(set(names)) or not set(names) <= set(self.cohort.names) or self.name not in names:
            raise Insecure("The greetings are not those of the cohort, one each and this site's own among them.")
        if len(names) < self.cohort.threshold:
            raise Insecure(f"{len(names)} sites are fewer than the {self.cohort.threshold} a sum needs.")
        self._agreed, self._letters, self._signers = {}, {}, {}
        for hello in hellos:
            signed = _hash("hello", self.cohort.digest, hello.name, hello.key, hello.signing)
            try:
                self.identity.verify(hello.name, hello.certificate, signed, hello.signature)
            except InvalidSignature as error:
                raise Insecure(f"A greeting that is said to be of {hello.name} is not signed by it.") from error
            self._signers[hello.name] = Ed25519PublicKey.from_public_bytes(hello.signing)
            if hello.name == self.name:
                if hello.key != self._channel.public_key().public_bytes_raw():
                    raise Insecure("Somebody else's key is passed off as this site's.")
                continue
            agreed = self._agreed[hello.name] = self._channel.exchange(X25519PublicKey.from_public_bytes(hello.key))
            pair = sorted((self.name, hello.name))
            self._letters[hello.name] = ChaCha20Poly1305(_stretch(agreed, _hash("letters", self.cohort.digest, *pair)))

    def advertise(self, label: str) -> Advert:
        """The key for the masks of ``label``, and shares of its two secrets for everybody else."""
        if self.cohort.complete:
            raise Insecure(NOTHING_TO_SHARE)
        if not self._letters:
            raise Insecure("The sites have not met yet.")
        keys, seeds = (self._shares(label, kind) for kind in ("key", "seed"))
        letters = {}
        for other, sealed in self._letters.items():
            place = self.cohort.place(other) - 1
            # One letter a label and receiver, so a nonce made of the label is used once with this key.
            about = _hash("letter", self.cohort.digest, label, self.name, other)
            text = b"".join(shares[place].to_bytes(32, "big") for shares in (keys, seeds))
            letters[other] = sealed.encrypt(about[:12], text, about)
        key, seed = self._mask_key(label).public_key().public_bytes_raw(), _digest(self._secret(label, "seed"))
        signature = self._signing.sign(_advertised(self.cohort, label, self.name, key, seed))
        return Advert(self.name, key, seed, signature, letters)

    def mask(
        self, label: str, adverts: Sequence[Advert], words: Words, exchange: str = "", question: bytes = b""
    ) -> Words:
        """``words`` behind the masks of everybody who advertised, or of the whole cohort where a sum needs that: the same
        answer to the same question, no other after it.

        ``exchange``: what the sum is for, by name; ``question``: all that the sites were asked, which must be the same for all.
        """
        present = self._read(label, adverts)
        asked = _hash("masked", label, exchange, question, *present, *(advert.key for advert in adverts))
        digest = hashlib.sha256(asked + words.tobytes()).hexdigest()
        if self.answered.first("masked", label, f"{digest} {exchange}") != f"{digest} {exchange}":
            raise Insecure(f"{label} was answered before, to another question.")
        masked, pairs = words, self._agreed
        if not self.cohort.complete:
            masked = words + _stream(_stretch(self._secret(label, "seed"), b"self"), words.size)
            own, others = self._mask_key(label), (advert for advert in adverts if advert.name != self.name)
            pairs = {advert.name: own.exchange(X25519PublicKey.from_public_bytes(advert.key)) for advert in others}
        for other, agreed in pairs.items():
            stream = _stream(_stretch(agreed, _about(self.cohort, label, question, self.name, other)), words.size)
            masked = masked + stream if self.name < other else masked - stream
        return masked

    def unmask(self, label: str, adverts: Sequence[Advert], survivors: Sequence[str]) -> Shares:
        """One share of each site that advertised: of its seed if its numbers arrived, of its key if not."""
        if self.cohort.complete:
            raise Insecure(NOTHING_TO_SHARE)
        present = self._read(label, adverts)
        alive = sorted(set(survivors))
        masked = self.answered.known.get(("masked", label))
        if masked is None:
            raise Insecure(f"{label} is to be unmasked, but this site has masked nothing for it.")
        if len(alive) < len(survivors) or not set(alive) <= set(present) or self.name not in alive:
            raise Insecure("The list of survivors names strangers, names twice, or leaves out the site it was sent to.")
        if len(alive) < self.cohort.threshold:
            raise Insecure(
                f"{len(alive)} survivors are fewer than the {self.cohort.threshold} a sum needs: nothing is unmasked."
            )
        # An exchange that is done again, by another submission of the run, tells no other sum than before.
        exchange = masked.partition(" ")[2] or label
        before = self.answered.first("unmasked", exchange, " ".join(alive))
        if before != " ".join(alive):
            raise Insecure(f"{exchange} was unmasked before, for another list of survivors: {before}.")
        seeds, keys = {self.name: self._shares(label, "seed")[self.cohort.place(self.name) - 1]}, {}
        for advert in adverts:
            if advert.name == self.name:
                continue
            about = _hash("letter", self.cohort.digest, label, advert.name, self.name)
            try:
                text = self._letters[advert.name].decrypt(about[:12], advert.letters[self.name], about)
            except (InvalidTag, KeyError) as error:
                raise Insecure(
                    f"The letter of {advert.name} cannot be opened: it is not what that site sealed."
                ) from error
            key, seed = (int.from_bytes(half, "big") for half in (text[:32], text[32:]))
            if advert.name in alive:
                seeds[advert.name] = seed
            else:
                keys[advert.name] = key
        return Shares(seeds, keys)

    def _read(self, label: str, adverts: Sequence[Advert]) -> list[str]:
        """The names of those who advertised, every advert being its site's own; of all where a sum needs all."""
        if self.cohort.complete:
            if adverts or not self._agreed:
                raise Insecure(NOTHING_TO_SHARE if adverts else "The sites have not met yet.")
            return list(self.cohort.names)
        names = [advert.name for advert in adverts]
        if self._verified[0] == label and self._verified[1] is adverts:
            return names
        if names != sorted(set(names)) or not set(names) <= set(self._signers) or self.name not in names:
            raise Insecure(
                "The adverts are not of different sites of the cohort, in its order and with this site's own."
            )
        if len(names) < self.cohort.threshold:
            raise Insecure(f"{len(names)} sites are fewer than the {self.cohort.threshold} a sum needs.")
        for advert in adverts:
            signed = _advertised(self.cohort, label, advert.name, advert.key, advert.seed)
            try:
                self._signers[advert.name].verify(advert.signature, signed)
            except InvalidSignature as error:
                raise Insecure(f"A message that is said to be of {advert.name} is not signed by it.") from error
        own = next(advert for advert in adverts if advert.name == self.name)
        if own.key != self._mask_key(label).public_key().public_bytes_raw():
            raise Insecure("Somebody else's key is passed off as this site's.")
        self._verified = label, adverts
        return names

    def _derive(self, *about: str) -> bytes:
        return _stretch(self._master, _hash("site", self.cohort.digest, self.name, *about))

    def _secret(self, label: str, kind: str) -> bytes:
        return self._derive(label, kind)[:SECRET]

    def _shares(self, label: str, kind: str) -> list[int]:
        drawn = self._derive(label, kind, "polynomial")
        return share(self._secret(label, kind), self.cohort.threshold, len(self.cohort.names), drawn)

    def _mask_key(self, label: str) -> X25519PrivateKey:
        return _key_of(self._secret(label, "key"))


def recovered(
    cohort: Cohort,
    label: str,
    adverts: Sequence[Advert],
    masked: Mapping[str, Words],
    shares: Mapping[str, Shares],
    question: bytes = b"",
) -> Words:
    """The coordinator's step: the sum over the sites in ``masked``, by the shares that ``threshold`` of them gave."""
    alive = sorted(masked)
    present = {advert.name: advert for advert in adverts}
    if not cohort.complete and not set(alive) <= set(present):
        raise Insecure("Masked numbers came from a site that had not advertised.")
    if len(alive) < cohort.threshold:
        raise Insecure(
            f"{len(alive)} sites answered, fewer than the {cohort.threshold} a sum needs: the round has no sum."
        )
    size = {words.size for words in masked.values()}
    if len(size) > 1:
        raise Insecure("The sites' numbers differ in how many they are.")
    total = np.zeros(size.pop(), np.uint64)
    for words in masked.values():
        total = total + words
    if cohort.complete:
        return total
    for name in alive:
        secret = _joined(
            cohort, name, {giver: given.seeds[name] for giver, given in shares.items() if name in given.seeds}
        )
        if _digest(secret) != present[name].seed:
            raise Insecure(f"The shares of {name}'s seed do not make the seed it advertised: a site gave a wrong one.")
        total = total - _stream(_stretch(secret, b"self"), total.size)
    for name in sorted(set(present) - set(alive)):
        key = _key_of(
            _joined(cohort, name, {giver: given.keys[name] for giver, given in shares.items() if name in given.keys})
        )
        if key.public_key().public_bytes_raw() != present[name].key:
            raise Insecure(f"The shares of {name}'s key do not make the key it advertised: a site gave a wrong one.")
        for other in alive:
            agreed = key.exchange(X25519PublicKey.from_public_bytes(present[other].key))
            stream = _stream(_stretch(agreed, _about(cohort, label, question, name, other)), total.size)
            # What ``other`` added for the pair is taken back.
            total = total - stream if other < name else total + stream
    return total


def _joined(cohort: Cohort, name: str, given: Mapping[str, int]) -> bytes:
    """A secret of the site ``name`` from the shares that the others gave."""
    if len(given) < cohort.threshold:
        raise Insecure(
            f"{len(given)} shares of a secret of {name} came, and {cohort.threshold} are needed: the round has no sum."
        )
    few = sorted(given)[: cohort.threshold]
    secret: int = join({cohort.place(giver): given[giver] for giver in few})
    # Shares that do not belong together make some other number; the caller sees that it is not what was advertised.
    return (secret % (1 << 8 * SECRET)).to_bytes(SECRET, "big")


def share(secret: bytes, threshold: int, count: int, seed: bytes) -> list[int]:
    """Shamir's shares 1 .. ``count``: any ``threshold`` of them make the secret, fewer say nothing about it.

    The other coefficients are those that ``seed`` stands for, two blocks of the stream each so that the remainder is even.
    """
    drawn = _bytes(seed, 64 * (threshold - 1))
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [int.from_bytes(drawn[64 * k : 64 * k + 64], "big") % PRIME for k in range(threshold - 1)]
    shares = []
    for place in range(1, count + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * place + coefficient) % PRIME
        shares.append(value)
    return shares


def join(shares: Mapping[int, int]) -> int:
    """The secret that ``shares`` (place: value) lie around: Lagrange's polynomial at 0."""
    secret = 0
    for place, value in shares.items():
        above = below = 1
        for other in shares:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        secret = (secret + value * above * pow(below, -1, PRIME)) % PRIME
    return secret


def _advertised(cohort: Cohort, label: str, name: str, key: bytes, seed: bytes) -> bytes:
    return _hash("advert", cohort.digest, label, name, key, seed)


def _about(cohort: Cohort, label: str, question: bytes, *pair: str) -> bytes:
    """What the mask of a pair is for."""
    return _hash("pair", cohort.digest, label, question, *sorted(pair))


def _digest(secret: bytes) -> bytes:
    return _hash("seed", secret)


def _key_of(secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(_stretch(secret, b"mask key"))


def _stretch(secret: bytes, about: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"fedbilevel secure sum 1 " + about).derive(secret)


def _bytes(key: bytes, count: int) -> bytes:
    """ChaCha20's stream; every key is used for one stream only, so the nonce may be zero."""
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(count))


def _stream(key: bytes, size: int) -> Words:
    return np.frombuffer(_bytes(key, 8 * size), "<u8").astype(np.uint64)


def _hash(*parts: str | bytes) -> bytes:
    """A digest of the parts, each with its length, so that no two lists of parts have the same."""
    digest = hashlib.sha256()
    for part in parts:
        text = part.encode() if isinstance(part, str) else part
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.digest()
