"""Neumann series and gradients of weighted generalised linear models, every row of a minibatch read once.

The inner loss of a client is

    g(x, y; batch) = 1/b sum_i w[c_i] phi(z_i . y, t_i) + ridge/2 ||y||^2

with feature rows z_i, targets t_i, integer cells c_i and a table w = w(x) of weights by cell. ``link`` chooses
phi(u, t): "logistic" is log(1 + exp(u)) - t u, "squared" is (u - t)^2 / 2. All functions treat P points (y, w) on the
same rows.

They work under jit, vmap, scan and shard_map, in float32 and float64. A batch dimension that an operand does not have
costs nothing: features shared by clients or seeds are never copied.  One-hot
features may come `packed` (float32). An index outside the features or a cell outside
the table ends the program with an error (ValueError, or `jax.errors.JaxRuntimeError` if JAX had already returned); it
never reads other memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.kernels import build
from fedbilevel.kernels.packed import Packed, call_linear

_LINKS = {"logistic": 0, "squared": 1}
_NAMES = ("features", "targets", "cells", "indices", "inner", "vectors", "weights", "ridge", "step")


def neumann(
    features: Array, targets: Array, cells: Array, indices: Array, inner: Array, vectors: Array, weights: Array,
    ridge: Array, step: Array, *, link: str,
) -> tuple[Array, Array]:  # fmt: skip
    """Truncated Neumann series times vectors, and the cross derivative by cells that follows it.

    For each point p with H_j the Hessian of g on the rows ``indices[j]``,

        s = step * sum_{q=0..Q} (I - step H_{q-1}) ... (I - step H_0) v,
        k-th product = 1/b sum_{i in indices[Q], c_i = k} phi'(z_i . y, t_i) (z_i . s).

    Shapes: features [N, d], targets [N], cells [N] (int32), indices [Q+1, b] (int32), inner and vectors [P, d],
    weights [P, K], ridge and step [P]. Returns solutions [P, d] and products [P, K].
    """
    operands = (features, targets, cells, indices, inner, vectors, weights, ridge, step)
    solutions, products = _call(dict(zip(_NAMES, operands, strict=True)), ("inner", "weights"), link)
    return solutions, products


def gradient(
    features: Array, targets: Array, cells: Array, indices: Array, inner: Array, weights: Array, ridge: Array, *,
    link: str,
) -> Array:  # fmt: skip
    """The gradient of g with respect to y on the rows ``indices`` [b], at each of the P points: [P, d]."""
    operands = (features, targets, cells, indices, inner, weights, ridge)
    names = (name for name in _NAMES if name not in ("vectors", "step"))
    (result,) = _call(dict(zip(names, operands, strict=True)), ("inner",), link)
    return result


def _call(operands: dict[str, Array], like: Sequence[str], link: str) -> Sequence[Array]:
    """Check the operands and call the kernel; its results have the shapes and types of the operands named by ``like``."""
    if link not in _LINKS:
        raise ValueError(f"link must be 'logistic' or 'squared', not {link!r}.")
    if isinstance(operands["features"], Packed):
        return call_linear(operands, like, _LINKS[link])
    features, kind = operands["features"], operands["features"].dtype
    if kind not in (jnp.float32, jnp.float64):
        raise TypeError(f"features must be float32 or float64, but are {kind}.")
    ranks = {"features": 2, "inner": 2, "weights": 2, "indices": 2 if "vectors" in operands else 1}
    for name, rank in ranks.items():
        if len(found := operands[name].shape) != rank or 0 in found:
            raise ValueError(
                f"{name} must have {rank} dimension{'s' * (rank > 1)}, none of size 0, but has shape {found}."
            )
    (samples, length), (points, cells) = features.shape, (len(operands["inner"]), operands["weights"].shape[1])
    shapes = {
        "features": features.shape, "targets": (samples,), "cells": (samples,), "indices": operands["indices"].shape,
        "inner": (points, length), "vectors": (points, length), "weights": (points, cells), "ridge": (points,),
        "step": (points,),
    }  # fmt: skip
    for name, array in operands.items():
        if array.shape != (shape := shapes[name]):
            raise ValueError(f"{name} must have shape {shape} to fit the other arguments, but has shape {array.shape}.")
        if array.dtype != (wanted := np.dtype(np.int32) if name in ("cells", "indices") else kind):
            raise TypeError(f"{name} must have type {wanted}, but has type {array.dtype}.")
    given = dict(zip(operands, build.together(*operands.values()), strict=True))
    # "expand_dims": an operand without the batch dimension arrives with size 1 there, which is no copy.
    results = [jax.typeof(given[name]) for name in like]
    call = jax.ffi.ffi_call(build.target("linear", kind == jnp.float64), results, vmap_method="expand_dims")
    return call(*given.values(), link=np.int32(_LINKS[link]))
