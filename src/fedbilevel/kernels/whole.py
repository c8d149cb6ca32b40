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
from jax import Array

from fedbilevel.kernels import build
from fedbilevel.kernels.packed import Packed, call_whole


class WholeSums(NamedTuple):
    """Sums over rows: ``losses``, ``counts``, ``rates`` (of t s) and ``positives`` (of t) by group ``[K]``; the derivative of
    the sum of all losses ``[d]`` and of every group's rate ``[K, d]``."""

    losses: Array
    counts: Array
    rates: Array
    positives: Array
    loss_gradient: Array
    rate_gradients: Array


def group_losses(
    features: Array, labels: Array, groups: Array, start: Array, size: Array, inner: Array, *, count: int
) -> tuple[Array, Array]:
    """(sum of log losses, number of rows) of each of ``count`` groups.

    Shapes: features [N, d], labels [N], groups [N] (int32), start and size scalars (int32), inner [d].
    """
    losses, counts = _call(features, labels, groups, start, size, inner, count=count)
    return losses, counts


def group_sums(
    features: Array, labels: Array, groups: Array, start: Array, size: Array, inner: Array, temperature: Array, *,
    count: int,
) -> WholeSums:  # fmt: skip
    """All sums and gradients; the shapes are those of `group_losses`, ``temperature`` T is a scalar."""
    return WholeSums(*_call(features, labels, groups, start, size, inner, temperature, count=count))


def _call(features: Array, *others: Array, count: int) -> Sequence[Array]:
    """Check the operands and call the kernel: with a temperature for everything, without for losses and counts."""
    if isinstance(features, Packed):
        names = ("labels", "groups", "start", "size", "inner", "temperature")
        return call_whole({"features": features, **dict(zip(names, others, strict=False))}, count)
    if features.ndim != 2 or 0 in features.shape or features.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"features must be a matrix of float32 or float64, none of its sides 0, not {features.dtype}{features.shape}."
        )
    (rows, length), kind, whole = features.shape, features.dtype, np.dtype(np.int32)
    wanted: dict[str, tuple[tuple[int, ...], Any]] = {
        "labels": ((rows,), kind), "groups": ((rows,), whole), "start": ((), whole), "size": ((), whole),
        "inner": ((length,), kind), "temperature": ((), kind),
    }  # fmt: skip
    for (name, (shape, dtype)), array in zip(wanted.items(), others, strict=False):
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}{shape} to fit the features, not {array.dtype}{array.shape}.")
    operands = build.together(features, *others)
    like: Any = jax.typeof(operands[5])
    shapes = [(count,)] * 2 if len(others) < len(wanted) else [(count,)] * 4 + [(length,), (count, length)]
    results = [like.update(shape=shape) for shape in shapes]
    return jax.ffi.ffi_call(build.target("whole", kind == jnp.float64), results, vmap_method="expand_dims")(*operands)
