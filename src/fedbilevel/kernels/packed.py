"""One-hot tables packed: of every row the values of the few columns of numbers, and the places of its ones.

A row of Adult then is one cache line instead of seven, and a product with it a seventh of the work.  The kernels of `linear`
and `whole` take `Packed` rows in the place of features; they add up in another order, so results agree to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Array

from fedbilevel.kernels import build

WORDS = 16
"""A record is a whole number of cache lines of so many 32-bit words."""
LEAST = 3
"""A table is packed if a row has so many times as many columns as numbers and ones, and twice the bytes of a record."""
ONES = 8
"""The places of a row's ones are a multiple of so many."""
LOOK = 64
"""Rows of each client that are looked at first: most tables that are not of this kind show it there."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """``records`` ``[..., rows, words]`` (int32): the bits of the row's numbers (float32), then two ones a word, each
    twice its column;
    ``columns`` ``[..., numbers]``: of the numbers, by client.  ``ones``: a row's at most; ``length``: columns of the table,
    which also stands for no column where a row has fewer ones.
    """

    records: Any
    columns: Any
    ones: int = field(metadata={"static": True})
    length: int = field(metadata={"static": True})

    def flat(self) -> Packed:
        """The rows of all clients one after the other."""
        return Packed(self.records.reshape(-1, self.records.shape[-1]), self.columns[0], self.ones, self.length)


def packed(features: Any) -> Packed | None:
    """``features`` ``[clients, rows, columns]`` packed; None where that does not pay, or the kernels are not there."""
    if features.ndim != 3 or features.dtype != np.float32 or not 0 < features.shape[-1] < 2**15:
        return None
    return _packed(np.asarray(features)) if build.available() else None


def _packed(features: np.ndarray) -> Packed | None:
    few = features[:, :LOOK]
    if few.size == 0 or LEAST * np.count_nonzero(few) > few.size:
        return None
    clients, samples, length = features.shape
    rows = features.reshape(-1, length)
    # By whole masks: every run packs its table anew, and this takes a third of the time of looking at one column after another.
    one = rows == 1
    columns = np.flatnonzero(~((rows == 0) | one).all(axis=0)).astype(np.int32)
    one[:, columns] = False
    which, place = np.divmod(np.flatnonzero(one), length)
    counts = np.bincount(which, minlength=len(rows))
    ones = max(-(-int(counts.max()) // ONES), 1) * ONES
    size = 4 * len(columns) + 2 * ones
    words = -(-size // (4 * WORDS)) * WORDS
    if LEAST * (len(columns) + ones) > length or 2 * words > length:
        return None
    records = np.zeros((len(rows), words), np.int32)
    records.view(np.float32)[:, : len(columns)] = rows[:, columns]
    places = records.view(np.uint16)[:, 2 * len(columns) : 2 * len(columns) + ones]
    places[:] = 2 * length
    places[np.arange(ones) < counts[:, None]] = 2 * place
    return Packed(
        records.reshape(clients, samples, words), np.broadcast_to(columns, (clients, len(columns))), ones, length
    )


def call_linear(operands: Mapping[str, Any], like: Sequence[str], link: int, by_row: bool = False) -> Sequence[Array]:
    """The kernels of `linear`, whose operands' shapes these are: ``features`` are packed.  ``by_row``: rows have weights of
    their own, and the indices stand for the cells too, which are not read."""
    results = [jax.typeof(operands[name]) for name in like]
    return _call("packed", operands, results, link=np.int32(link), by_row=np.int32(by_row))


def weighted_gradient(rows: Packed, labels: Array, weights: Array, indices: Array, inner: Array, ridge: Array) -> Array:
    """The gradient of the mean of weights times log losses over the rows ``indices``, and of ``ridge``/2 |inner|^2.

    Shapes: labels and weights [N], indices [b] (int32), inner [d], ridge a scalar.
    """
    operands = {
        "features": rows, "targets": labels, "cells": indices, "indices": indices,
        "inner": inner[None], "weights": weights[None], "ridge": ridge[None],
    }  # fmt: skip
    return call_linear(operands, ("inner",), 0, by_row=True)[0][0]


def call_whole(operands: Mapping[str, Any], count: int) -> Sequence[Array]:
    """Losses and counts by group, or with a temperature all sums and gradients, as `whole` has them: to the last bit."""
    like: Any = jax.typeof(operands["inner"])
    shapes = [(count,)] * 2
    if "temperature" in operands:
        shapes = [(count,)] * 4 + [like.shape, (count, *like.shape)]
    return _call("packed-whole", operands, [like.update(shape=shape) for shape in shapes])


def multiply(rows: Packed, indices: Array, vectors: Sequence[Array], sums: bool) -> Sequence[Array]:
    """The rows ``indices`` [b] times each of the ``vectors`` [d]: [b]; with ``sums`` their sums weighted by each [b]: [d]."""
    given = build.together(rows.records, rows.columns, indices, *vectors)
    result = jax.typeof(given[3]).update(shape=(rows.length,) if sums else indices.shape)
    name = build.target("packed-products")
    call = jax.ffi.ffi_call(name, [result] * len(vectors), vmap_method="expand_dims")
    return call(*given, ones=np.int32(rows.ones), sums=np.int32(sums))


def _call(kernel: str, operands: Mapping[str, Any], results: Sequence[Any], **attributes: Any) -> Sequence[Array]:
    rows: Packed = operands["features"]
    if rows.records.ndim != 2:
        raise ValueError(f"Packed rows must be those of one table, not {rows.records.shape}: take flat().")
    if operands["inner"].shape[-1] != rows.length:
        raise ValueError(f"inner must have {rows.length} columns as the rows have, not {operands['inner'].shape[-1]}.")
    for name, array in operands.items():
        wanted = np.int32 if name in ("cells", "indices", "groups", "start", "size") else np.float32
        if name != "features" and array.dtype != wanted:
            raise TypeError(f"{name} must have type {np.dtype(wanted)}, but has type {array.dtype}.")
    others = [array for name, array in operands.items() if name != "features"]
    given = build.together(rows.records, rows.columns, *others)
    call = jax.ffi.ffi_call(build.target(kernel), results, vmap_method="expand_dims")
    return call(*given, ones=np.int32(rows.ones), **attributes)
