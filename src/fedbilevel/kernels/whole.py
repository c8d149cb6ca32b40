"""Losses, soft true-positive rates and their gradients over a client's whole set, by group, each row read once.

A logistic model y on rows x_i with labels t_i in {0, 1} and groups a_i; z_i = x_i . y and s_i = sigmoid(T z_i).  The rows are
``start`` .. ``start + size - 1`` of ``features``: numbers and not shapes, so that clients of any sizes share one program
and padding is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.kernels import build


class WholeSums(NamedTuple):
    """Sums over rows: ``losses``, ``counts``, ``rates`` (of t s) and ``positives`` (of t) by group ``[K]``; the derivative of
    the sum of all losses ``[d]`` and of every group's rate ``[K, d]``."""

    losses: jax.Array
    counts: jax.Array
    rates: jax.Array
    positives: jax.Array
    loss_gradient: jax.Array
    rate_gradients: jax.Array


def group_losses(
    features: jax.Array,
    labels: jax.Array,
    groups: jax.Array,
    start: jax.Array,
    size: jax.Array,
    inner: jax.Array,
    *,
    count: int,
) -> tuple[jax.Array, jax.Array]:
    """(sum of log losses, number of rows) of each of ``count`` groups.

    Shapes: features [N, d], labels [N], groups [N] (int32), start and size scalars (int32), inner [d].
    """
    _check(features, labels, groups, start, size, inner)
    losses, counts = _call((features, labels, groups, start, size, inner), [(count,)] * 2)
    return losses, counts


def group_sums(
    features: jax.Array,
    labels: jax.Array,
    groups: jax.Array,
    start: jax.Array,
    size: jax.Array,
    inner: jax.Array,
    temperature: jax.Array,
    *,
    count: int,
) -> WholeSums:
    """All sums and gradients; the shapes are those of `group_losses`, ``temperature`` T is a scalar."""
    _check(features, labels, groups, start, size, inner)
    if temperature.shape != () or temperature.dtype != features.dtype:
        raise ValueError(
            f"temperature must be one {features.dtype} number, not {temperature.dtype}{temperature.shape}."
        )
    length = features.shape[1]
    shapes = [(count,), (count,), (count,), (count,), (length,), (count, length)]
    return WholeSums(*_call((features, labels, groups, start, size, inner, temperature), shapes))


def _call(operands: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]]) -> Sequence[jax.Array]:
    operands = build.together(*operands)
    like: Any = jax.typeof(operands[5])
    call = jax.ffi.ffi_call(
        build.target("whole"), [like.update(shape=shape) for shape in shapes], vmap_method="expand_dims"
    )
    return call(*operands)


def _check(
    features: jax.Array, labels: jax.Array, groups: jax.Array, start: jax.Array, size: jax.Array, inner: jax.Array
) -> None:
    if features.ndim != 2 or 0 in features.shape or features.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"features must be a matrix of float32 or float64, none of its sides 0, not {features.dtype}{features.shape}."
        )
    rows, length = features.shape
    wanted = {
        "labels": (labels, (rows,), features.dtype),
        "groups": (groups, (rows,), np.dtype(np.int32)),
        "start": (start, (), np.dtype(np.int32)),
        "size": (size, (), np.dtype(np.int32)),
        "inner": (inner, (length,), features.dtype),
    }
    for name, (array, shape, dtype) in wanted.items():
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}{shape} to fit the features, not {array.dtype}{array.shape}.")
