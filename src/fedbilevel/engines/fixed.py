"""Averages in fixed point: what a secure sum over sites computes, and `simulate` with ``secure=True``.

Sums of whole numbers are the same in any order and modulo 2^64, so masks cancel in them exactly (`federation.protocol.secure`).
A client's reply, times its weight over a power of two that no weight exceeds, is rounded to the nearest step of 2^-32 and may
be 2^20 in size at most; the sum, over the sum of those weights, is the mean.
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
from fedbilevel.plan import Algorithm, phases_of, sums_up

Words = NDArray[np.uint64]
LIMB, LIMBS, SMALLEST = 52, 4, -84
WORKING = (
    "fedpath, fedbioacc, fedbio, fedavg, fedreg, fedminmax, fedfb, qfedavg, fednest, lfednest, aggitd, simfbo or fedmsa"
)
"""Methods all of whose phases average."""


class OutOfRange(ValueError):
    """A number that the sum could not hold."""


@dataclass(frozen=True)
class Fixed:
    """Numbers as fixed point: steps of 2^-``bits``, up to ``largest`` in size, summed over at most ``sites``.

    Rounding is to the nearest step, so a sum of n numbers is off by n 2^-(bits+1) at most.
    """

    bits: int = 32
    largest: float = 2.0**20
    sites: int = 2**10

    def __post_init__(self) -> None:
        if self.largest * 2.0**self.bits * self.sites > 2.0**62:
            raise ValueError(
                f"Sums of {self.sites} numbers up to {self.largest:g} in steps of 2^-{self.bits} overflow."
            )

    def encode(self, values: Any) -> Words:
        numbers = np.asarray(values, np.float64)
        if not np.isfinite(numbers).all():
            raise OutOfRange("A reply holds a NaN or an infinity.")
        if numbers.size and float(np.abs(numbers).max()) > self.largest:
            raise OutOfRange(f"A reply holds a number beyond {self.largest:g}, which the sum could not hold.")
        return np.rint(numbers * 2.0**self.bits).astype(np.int64).view(np.uint64)

    def decode(self, words: Words) -> NDArray[np.float64]:
        return words.view(np.int64).astype(np.float64) / 2.0**self.bits


FIXED = Fixed()


def scale_of(weights: Any) -> float:
    """The smallest power of two that no weight exceeds."""
    return float(2.0 ** np.ceil(np.log2(np.max(np.asarray(weights, np.float64)))))


def to_words(arrays: Sequence[Any], share: float = 1.0) -> Words:
    """A reply of weight ``share`` (1 at most), ready to be summed."""
    each = [FIXED.encode(share * np.asarray(array, np.float64)).ravel() for array in arrays]
    return np.concatenate([*each, np.zeros(0, np.uint64)])


def to_mean(words: Words, mass: float, like: Sequence[Any]) -> list[np.ndarray]:
    """The mean whose sum ``words`` is, weights adding up to ``mass``, with the shapes and types ``like``."""
    ends = np.cumsum([int(np.prod(leaf.shape)) for leaf in like])[:-1]
    parts = np.split(FIXED.decode(words) / mass, ends)
    return [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, like, strict=True)]


def mean_on_host(replies: Tree, weights: Any, heaviest: Any) -> Tree:
    """The mean of stacked replies as sites that send secure sums find it; NaN where a reply is out of range.

    ``heaviest``: the largest weight of all clients, whoever takes part.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, replies))
    shares = np.asarray(weights, np.float64) / scale_of(heaviest)
    counted = np.flatnonzero(shares > 0)
    mean = [np.full(leaf.shape[1:], np.nan, leaf.dtype) for leaf in leaves]
    with contextlib.suppress(OutOfRange):
        words = [to_words([leaf[client] for leaf in leaves], shares[client]) for client in counted]
        if words:
            mean = to_mean(np.sum(words, axis=0), float(shares[counted].sum()), mean)
    return jax.tree.unflatten(structure, mean)


def fixed_mean(replies: Tree, weights: Any, heaviest: Any) -> Tree:
    """`mean_on_host` within a compiled program: whole numbers of 64 bits need no x64 there."""
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), replies)
    return jax.pure_callback(mean_on_host, like, replies, weights, heaviest, vmap_method="sequential")


def check_summed(algorithm: Algorithm, clients: int) -> None:
    """Refuse an algorithm whose coordinator needs the clients' replies one by one, and more clients than a sum can hold."""
    if clients > FIXED.sites:
        raise ValueError(f"A secure sum is of {FIXED.sites:,} clients at most, not {clients:,}.")
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
