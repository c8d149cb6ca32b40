"""Averages in fixed point: what a secure sum over sites computes, and `simulate` with ``secure=True``.

Sums of whole numbers are the same in any order and modulo a power of two, so masks cancel in them exactly
(`federation.protocol.secure`).  A client's *share* is its weight over a power of two that all clients' weights together do not
exceed.  Its reply, times its share, is rounded to the nearest step; so is the share itself, which comes last.  The sum of the
replies over the sum of the shares is the mean, and nobody need know a single weight.

Replies in single precision travel in a narrower ring than those in double precision (`ring_of`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedbilevel.calculus import Tree
from fedbilevel.engines.messages import message_dtype
from fedbilevel.plan import Algorithm, phases_of, sums_up

Words = NDArray[np.uint64]
LIMB, LIMBS, SMALLEST = 52, 4, -84
MOST = 1024
"""Clients of a sum: with more, rounding would show."""
WORKING = (
    "fedpath, fedbioacc, fedbio, fedavg, fedreg, fedminmax, fedfb, fairfed, qfedavg, fednest, lfednest, aggitd, simfbo "
    "or fedmsa"
)
"""Methods all of whose phases average."""


class OutOfRange(ValueError):
    """A number that the sum could not hold."""


@dataclass(frozen=True)
class Fixed:
    """Numbers as fixed point modulo 2^``width``: steps of 2^-``bits``, up to ``largest`` in size.

    Shares add up to less than 2, so a sum of numbers times shares stays below 2 ``largest``.  Rounding is to the nearest step,
    so a sum of n numbers is off by n 2^-(bits+1) at most.
    """

    width: int
    bits: int
    largest: float

    def __post_init__(self) -> None:
        if self.width % 16 or 2 * self.largest * 2.0**self.bits > 2.0 ** (self.width - 1):
            raise ValueError(f"Sums of numbers up to {self.largest:g} in steps of 2^-{self.bits} overflow.")

    def encode(self, values: Any) -> Words:
        numbers = np.asarray(values, np.float64)
        if not np.isfinite(numbers).all():
            raise OutOfRange("A reply holds a NaN or an infinity.")
        if numbers.size and float(np.abs(numbers).max()) > self.largest:
            raise OutOfRange(f"A reply holds a number beyond {self.largest:g}, which the sum could not hold.")
        return np.rint(numbers * 2.0**self.bits).astype(np.int64).view(np.uint64)

    def decode(self, words: Words) -> NDArray[np.float64]:
        """Of words whose lower ``width`` bits are right."""
        above = np.uint64(64 - self.width)
        return ((words << above).view(np.int64) >> above.view(np.int64)).astype(np.float64) / 2.0**self.bits

    def pack(self, words: Words) -> NDArray[np.uint16]:
        """The lower ``width`` bits, as they travel."""
        pieces = words.astype("<u8", copy=False).view("<u2").reshape(-1, 4)
        return np.ascontiguousarray(pieces[:, : self.width // 16])

    def unpack(self, packed: NDArray[np.uint16]) -> Words:
        """What `pack` was given, modulo 2^``width``."""
        pieces = np.zeros((len(packed), 4), "<u2")
        pieces[:, : packed.shape[1]] = packed
        return pieces.reshape(-1).view("<u8").astype(np.uint64)


WIDE, NARROW = Fixed(64, 42, 2.0**20), Fixed(48, 30, 2.0**16)


def ring_of(like: Sequence[Any]) -> Fixed:
    """For replies ``like``: narrow where every array is in single precision."""
    return NARROW if all(leaf.dtype.kind == "f" and leaf.dtype.itemsize <= 4 for leaf in like) else WIDE


def scale_of(total: float) -> float:
    """The smallest power of two that is no less than all weights together."""
    return float(2.0 ** np.ceil(np.log2(total)))


def to_words(arrays: Sequence[Any], share: float, ring: Fixed) -> Words:
    """A reply of a client with this share (1 at most), ready to be summed; the last word is the share."""
    each = [ring.encode(share * np.asarray(array, np.float64)).ravel() for array in arrays]
    return np.concatenate([*each, np.atleast_1d(ring.encode(share))])


def to_mean(words: Words, like: Sequence[Any], ring: Fixed) -> list[np.ndarray]:
    """The mean whose sum ``words`` is, with the shapes and types ``like``."""
    *numbers, mass = np.split(ring.decode(words), np.cumsum([int(np.prod(leaf.shape)) for leaf in like]))
    return [
        part.reshape(leaf.shape).astype(leaf.dtype)
        for part, leaf in zip((n / mass for n in numbers), like, strict=True)
    ]


def mean_on_host(replies: Tree, weights: Any, everybody: Any) -> Tree:
    """The mean of stacked replies as sites that send secure sums find it; NaN where a reply is out of range.

    ``everybody``: the weights of all clients, whoever takes part, or their sum.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, replies))
    counted, all_of_them = (np.asarray(each, np.float64) for each in (weights, everybody))
    shares = counted / scale_of(max(counted.sum(), all_of_them.sum()))
    mean = [np.full(leaf.shape[1:], np.nan, leaf.dtype) for leaf in leaves]
    ring = ring_of(mean)
    with contextlib.suppress(OutOfRange):
        there = np.flatnonzero(shares > 0)
        words = [to_words([leaf[client] for leaf in leaves], shares[client], ring) for client in there]
        if words:
            mean = to_mean(np.sum(words, axis=0), mean, ring)
    return jax.tree.unflatten(structure, mean)


def fixed_mean(replies: Tree, weights: Any, everybody: Any) -> Tree:
    """`mean_on_host` within a compiled program: whole numbers of 64 bits need no x64 there."""
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), replies)
    return jax.pure_callback(mean_on_host, like, replies, weights, everybody, vmap_method="sequential")


def check_summed(algorithm: Algorithm, clients: int, shown: str | None = None) -> None:
    """Refuse an algorithm whose coordinator needs the clients' replies one by one, and more clients than a sum can hold.

    ``shown``: why the sums themselves would show them."""
    if shown is not None:
        raise ValueError(f"{shown}.")
    if (dtype := message_dtype(algorithm)) is not None:
        raise ValueError(f"Secure sums are of whole numbers, so messages cannot be {dtype}: leave out message_dtype.")
    if clients > MOST:
        raise ValueError(f"A secure sum is of {MOST:,} clients at most, not {clients:,}.")
    single = [phase.name for phase, _ in phases_of(algorithm.plan) if not sums_up(phase)]
    if single:
        raise ValueError(
            f"{algorithm.name} needs every client's reply by itself (phase {single[0]!r}), which secure sums hide: use "
            f"{WORKING}."
        )


def exact_words(values: Any) -> Words:
    """Sums and counts that must stay exact, between 2^-84 and 2^124: four words each, of 52 bits."""
    rest = np.asarray(values, np.float64).ravel()
    if not np.isfinite(rest).all() or (np.abs(rest) >= 2.0 ** (LIMB * LIMBS + SMALLEST)).any():
        raise OutOfRange("A number is not finite or beyond 2^124, which the sum could not hold.")
    words = []
    for limb in reversed(range(LIMBS)):
        step = 2.0 ** (LIMB * limb + SMALLEST)
        words.append(np.trunc(rest / step) if limb else np.rint(rest / step))
        rest = rest - words[-1] * step
    return np.concatenate(words).astype(np.int64).view(np.uint64)


def exact_sums(words: Words) -> np.ndarray:
    """The sums of `exact_words`, rounded once."""
    parts = words.view(np.int64).reshape(LIMBS, -1).T.tolist()
    whole = (sum(part << LIMB * limb for limb, part in enumerate(reversed(each))) for each in parts)
    return np.array([each / 2**-SMALLEST for each in whole], np.float64)
