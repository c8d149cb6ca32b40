"""Functions of long rows, whose products read the rows where they lie, against the same functions of gathered rows."""

from __future__ import annotations

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.calculus import both_gradients, cross_product, hessian_vector, inner_gradient
from fedbilevel.kernels.products import LEAST_BYTES, _suits, over_rows

TOLERANCE = {np.float32: 2e-5, np.float64: 1e-12}
# rows, columns, batch: one block and a tail, groups of rows that do not come out even, several blocks.
SHAPES = [(6, 262_147, 4), (3, 150_001, 7), (2, 530_000, 2)]


@cache
def table(shape, dtype, clients=2):
    rng = np.random.default_rng(0)
    rows, columns, batch = shape
    leaves = {
        "features": rng.standard_normal((clients, rows, columns)).astype(dtype) / dtype(columns) ** 0.5,
        "labels": rng.integers(0, 2, (clients, rows)).astype(dtype),
        "groups": rng.integers(0, 3, (clients, rows)).astype(np.int32),
    }
    indices = rng.integers(0, rows, (clients, batch)).astype(np.int32)
    points = [(rng.standard_normal(3).astype(dtype), rng.standard_normal(columns).astype(dtype)) for _ in range(2)]
    vectors = [rng.standard_normal(columns).astype(dtype) for _ in range(2)]
    return jax.tree.map(jnp.asarray, (leaves, indices, points, vectors))


def loss(outer, inner, batch):
    margins = batch["features"] @ inner
    weights = jax.nn.softmax(outer)[batch["groups"]]
    losses = jax.nn.softplus(margins) - batch["labels"] * margins
    return jnp.mean(weights * losses) + 0.05 * jnp.sum(inner**2)


def derivatives(points, vectors):
    pairs = [*zip(points, vectors, strict=True)]
    return {
        "hessian": lambda batch: [hessian_vector(loss, *point, batch, vector) for point, vector in pairs],
        "cross": lambda batch: [cross_product(loss, *point, batch, vector) for point, vector in pairs],
        "both": lambda batch: [both_gradients(loss, *point, batch) for point in points],
        "inner": lambda batch: {"now": inner_gradient(loss, *points[0], batch), "loss": loss(*points[1], batch)},
    }


def assert_close(found, expected, dtype):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (dtype, other.shape)
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE[dtype] * np.abs(other).max())


def gathered(function, leaves, indices):
    return function(jax.tree.map(lambda leaf: leaf[indices], leaves))


@pytest.mark.parametrize("what", ["hessian", "cross", "both", "inner"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_derivatives_equal_those_of_gathered_rows(shape, dtype, what):
    leaves, indices, *given = table(shape, dtype)
    assert _suits(leaves["features"][0], indices[0])

    @jax.jit
    def both(given, leaves, indices):
        function = derivatives(*given)[what]
        return [jax.vmap(partial(way, function))(leaves, indices) for way in (over_rows, gathered)]

    assert_close(*both(given, leaves, indices), dtype)


def calls(function, leaves, indices):
    """Names of our kernels in the compiled program, and how many products are left to XLA."""
    program = jax.jit(lambda leaves, indices: over_rows(function, leaves, indices)).lower(leaves, indices).compile()
    text = program.as_text()
    return sorted(re.findall(r'custom_call_target="fedbilevel_([a-z]+)_', text)), text.count(" dot(")


def test_both_points_read_the_rows_twice_and_nothing_is_copied():
    leaves, indices, *given = table(SHAPES[0], np.float32)
    one = jax.tree.map(lambda leaf: leaf[0], (leaves, indices))
    wanted = derivatives(*given)
    assert calls(wanted["hessian"], *one) == (["products", "products"], 0)
    assert calls(wanted["cross"], *one) == (["products"], 0)


def test_what_is_no_product_with_a_vector_is_computed_from_gathered_rows():
    leaves, indices, points, _ = table(SHAPES[0], np.float32)
    leaves, indices = jax.tree.map(lambda leaf: leaf[0], (leaves, indices))
    matrix = jnp.stack([point[1] for point in points], axis=1)

    def function(batch):
        rows = batch["features"]
        return rows @ points[0][1], batch["labels"] @ rows, rows @ matrix, jnp.abs(rows).sum(1), points[0][0], 2.0

    found, expected = over_rows(function, leaves, indices), gathered(function, leaves, indices)
    assert found[5] == 2
    assert_close(found[:5], expected[:5], np.float32)
    kernels, _ = calls(function, leaves, indices)
    assert kernels == ["products", "products", "take"]


def test_short_rows_are_gathered():
    leaves, indices, *given = table((6, LEAST_BYTES // 16 - 1, 4), np.float32)
    one = jax.tree.map(lambda leaf: leaf[0], (leaves, indices))
    assert "products" not in calls(derivatives(*given)["hessian"], *one)[0]


def test_an_index_out_of_range_is_an_error():
    leaves, indices, *given = table(SHAPES[0], np.float32)
    one = jax.tree.map(lambda leaf: leaf[0], leaves)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="names a row that there is not"):
        jax.block_until_ready(over_rows(derivatives(*given)["hessian"], one, indices[0].at[1].set(6)))


def test_a_run_on_plain_losses_is_the_same_without_kernels(monkeypatch):
    columns = 300_000
    leaves, _, _, _ = table((8, columns, 4), np.float32)

    def run():
        problem = fb.BilevelProblem(
            lambda *given: loss(*given),
            lambda outer, inner, batch: jnp.mean(jax.nn.softplus(batch["features"] @ inner)) + 0.1 * jnp.sum(outer**2),
            lambda key: (jnp.zeros(3, jnp.float32), jnp.ones(columns, jnp.float32)),
        )
        series = fb.neumann(terms=3, step=0.5)
        method = fb.fedbioacc(problem, series, inner_step=0.1, outer_step=0.1, local_steps=2, batch_size=4)
        result = fb.simulate(method, fb.ClientData(leaves, leaves), rounds=2, record_every=None)
        return np.asarray(result.outer), np.asarray(result.inner)

    found = run()
    monkeypatch.setenv("FEDBILEVEL_KERNELS", "off")
    assert_close(found, run(), np.float32)
