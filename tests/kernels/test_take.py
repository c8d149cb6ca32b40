"""The row-copying kernel against NumPy's own indexing, under every transformation an engine applies to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.kernels.take import LEAST_BYTES, _suits, take

RNG = np.random.default_rng(0)


def rows_of(shape, dtype):
    return RNG.integers(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int8", "bool", "float16"])
@pytest.mark.parametrize("row", [(107,), (3, 40), (2048,)])
def test_equals_indexing(dtype, row):
    rows, indices = rows_of((50, *row), dtype), RNG.integers(0, 50, 33).astype(np.int32)
    assert _suits(jnp.asarray(rows), jnp.asarray(indices))
    found = jax.jit(take)(rows, indices)
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, rows[indices])


def test_batched_rows_shared_rows_and_both_nested():
    rows, indices = rows_of((4, 20, 30), "float64"), RNG.integers(0, 20, (4, 9)).astype(np.int32)
    np.testing.assert_array_equal(jax.vmap(take)(rows, indices), np.stack([rows[m][indices[m]] for m in range(4)]))
    shared = jax.vmap(take, in_axes=(None, 0))(rows[0], indices)
    np.testing.assert_array_equal(shared, rows[0][indices])
    only_rows = jax.vmap(take, in_axes=(0, None))(rows, indices[0])
    np.testing.assert_array_equal(only_rows, rows[:, indices[0]])
    seeds = RNG.integers(0, 20, (3, 4, 9)).astype(np.int32)
    nested = jax.vmap(jax.vmap(take), in_axes=(None, 0))(rows, seeds)
    np.testing.assert_array_equal(nested, np.stack([[rows[m][seeds[s, m]] for m in range(4)] for s in range(3)]))


def test_inside_a_scan():
    rows, indices = rows_of((20, 30), "float64"), RNG.integers(0, 20, (7, 5)).astype(np.int32)
    total, _ = jax.jit(
        lambda rows, indices: jax.lax.scan(lambda sum_, i: (sum_ + take(rows, i).sum(0), None), jnp.zeros(30), indices)
    )(rows, indices)
    np.testing.assert_array_equal(total, rows[indices].sum((0, 1)))


def test_short_rows_go_to_xla():
    short = jnp.zeros((10, LEAST_BYTES // 8 - 1))
    assert not _suits(short, jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(take(jnp.arange(10.0), jnp.asarray([3, 1], jnp.int32)), [3.0, 1.0])


@pytest.mark.parametrize("bad", [-1, 20, 2**31 - 1])
def test_an_index_out_of_range_is_an_error(bad):
    rows, indices = rows_of((20, 30), "float64"), np.array([1, 2, bad, 3], np.int32)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="names a row that there is not"):
        jax.block_until_ready(take(jnp.asarray(rows), jnp.asarray(indices)))
