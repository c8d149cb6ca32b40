"""Rows so long that a minibatch leaves the caches: the blocked kernels against loops in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import kernels
from tests.kernels.references import for_gradient, make, naive_gradient, naive_neumann

TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}
# samples, length, batch, terms, points, cells: one block and a tail, several blocks, groups of rows that do not come out even,
# an odd and an even number of factors, one, none, more points than are treated together.
SHAPES = [(6, 110_003, 4, 3, 2, 3), (5, 120_000, 3, 4, 2, 2), (9, 90_017, 9, 1, 1, 4), (3, 150_001, 1, 0, 3, 1)]


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max())


@pytest.mark.parametrize("link", ["logistic", "squared"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_long_rows_equal_naive_loops(shape, dtype, link):
    arguments = make(3, *shape, dtype=dtype)
    assert (shape[2] + 6) * shape[1] * 4 > 4 << 20  # else they are not long
    pairs = zip(kernels.neumann(**arguments, link=link), naive_neumann(**arguments, link=link), strict=True)
    rows = for_gradient(arguments)
    for result, expected in (*pairs, (kernels.gradient(**rows, link=link), naive_gradient(**rows, link=link))):
        assert_close(result, expected, dtype)


def test_clients_side_by_side_are_clients_one_by_one():
    each = [make(seed, 5, 110_003, 4, 2, 2, 3, dtype=np.float32) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    together = jax.vmap(lambda given: kernels.neumann(**given, link="logistic"))(stacked)
    for number, arguments in enumerate(each):
        for found, expected in zip(together, kernels.neumann(**arguments, link="logistic"), strict=True):
            np.testing.assert_array_equal(found[number], expected)


def test_a_wrong_cell_or_row_is_an_error():
    arguments = make(3, 6, 110_003, 4, 2, 2, 3, dtype=np.float32)
    for name, place in (("cells", arguments["indices"][1, 2]), ("indices", (1, 2))):
        wrong = arguments | {name: jnp.asarray(arguments[name]).at[place].set(77)}
        with pytest.raises(Exception, match=name):
            jax.block_until_ready(kernels.neumann(**wrong, link="logistic"))
