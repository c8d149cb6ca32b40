"""Neumann series and gradients of weighted generalised linear models, every row of a minibatch read once.

The inner loss of a client is

    g(x, y; batch) = 1/b sum_i w[c_i] phi(z_i . y, t_i) + ridge/2 ||y||^2

with feature rows z_i, targets t_i, integer cells c_i and a table w = w(x) of weights by cell. ``link`` chooses
phi(u, t): "logistic" is log(1 + exp(u)) - t u, "squared" is (u - t)^2 / 2. All functions treat P points (y, w) on the
same rows.

They work under jit, vmap, scan and shard_map, in float32 and float64. A batch dimension that an operand does not have
costs nothing: features shared by clients or seeds are never copied. An index outside the features or a cell outside
the table ends the program with an error (ValueError, or `jax.errors.JaxRuntimeError` if JAX had already returned); it
never reads other memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.kernels import build

_LINKS = {"logistic": 0, "squared": 1}


def neumann(
    features: jax.Array,
    targets: jax.Array,
    cells: jax.Array,
    indices: jax.Array,
    inner: jax.Array,
    vectors: jax.Array,
    weights: jax.Array,
    ridge: jax.Array,
    step: jax.Array,
    *,
    link: str,
) -> tuple[jax.Array, jax.Array]:
    """Truncated Neumann series times vectors, and the cross derivative by cells that follows it.

    For each point p with H_j the Hessian of g on the rows ``indices[j]``,

        s = step * sum_{q=0..Q} (I - step H_{q-1}) ... (I - step H_0) v,
        k-th product = 1/b sum_{i in indices[Q], c_i = k} phi'(z_i . y, t_i) (z_i . s).

    Shapes: features [N, d], targets [N], cells [N] (int32), indices [Q+1, b] (int32), inner and vectors [P, d],
    weights [P, K], ridge and step [P]. Returns solutions [P, d] and products [P, K].
    """
    _check(features, targets, cells, indices, inner, weights, ridge, link, index_rank=2)
    _check_array("vectors", vectors, inner.shape, features.dtype)
    _check_array("step", step, ridge.shape, features.dtype)
    operands = (features, targets, cells, indices, inner, vectors, weights, ridge, step)
    solutions, products = _call(operands, (4, 6), link)
    return solutions, products


def gradient(
    features: jax.Array,
    targets: jax.Array,
    cells: jax.Array,
    indices: jax.Array,
    inner: jax.Array,
    weights: jax.Array,
    ridge: jax.Array,
    *,
    link: str,
) -> jax.Array:
    """The gradient of g with respect to y on the rows ``indices`` [b], at each of the P points: [P, d]."""
    _check(features, targets, cells, indices, inner, weights, ridge, link, index_rank=1)
    operands = (features, targets, cells, indices, inner, weights, ridge)
    (result,) = _call(operands, (4,), link)
    return result


def _call(operands: Sequence[jax.Array], like: Sequence[int], link: str) -> Sequence[jax.Array]:
    """Call the kernel; its results have the shapes and types of the operands that ``like`` counts off."""
    operands = build.together(*operands)
    results = [jax.typeof(operands[k]) for k in like]
    # "expand_dims": an operand without the batch dimension arrives with size 1 there, which is no copy.
    call = jax.ffi.ffi_call(build.target("linear"), results, vmap_method="expand_dims")
    return call(*operands, link=np.int32(_LINKS[link]))


def _check(
    features: jax.Array,
    targets: jax.Array,
    cells: jax.Array,
    indices: jax.Array,
    inner: jax.Array,
    weights: jax.Array,
    ridge: jax.Array,
    link: str,
    *,
    index_rank: int,
) -> None:
    if link not in _LINKS:
        raise ValueError(f"link must be 'logistic' or 'squared', not {link!r}.")
    if features.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"features must be float32 or float64, but are {features.dtype}.")
    for name, array, rank in (("features", features, 2), ("inner", inner, 2), ("weights", weights, 2)):
        if array.ndim != rank or 0 in array.shape:
            raise ValueError(f"{name} must have {rank} dimensions, none of size 0, but has shape {array.shape}.")
    if indices.ndim != index_rank or 0 in indices.shape:
        raise ValueError(f"indices must have {index_rank} dimension(s), none of size 0, but has shape {indices.shape}.")
    (samples, length), points = features.shape, inner.shape[0]
    _check_array("targets", targets, (samples,), features.dtype)
    _check_array("cells", cells, (samples,), np.dtype(np.int32))
    _check_array("indices", indices, indices.shape, np.dtype(np.int32))
    _check_array("inner", inner, (points, length), features.dtype)
    _check_array("weights", weights, (points, weights.shape[1]), features.dtype)
    _check_array("ridge", ridge, (points,), features.dtype)


def _check_array(name: str, array: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape} to fit the other arguments, but has shape {array.shape}.")
    if array.dtype != dtype:
        raise TypeError(f"{name} must have type {dtype}, but has type {array.dtype}.")
