"""The fused kernels against loops in NumPy, under every transformation they promise to survive."""

from __future__ import annotations

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel import kernels

# Rounding of sums of at most a few thousand terms, relative to the largest entry of the result.
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}
DTYPES = [np.float32, np.float64]
LINKS = ["logistic", "squared"]
# samples, length, batch, terms, points, cells: full vectors, tails, rows shorter than a vector, tiles and groups that do
# not come out even, more than one column block, no Hessian at all, many cells, more points than are treated together.
SHAPES = [
    (60, 107, 128, 10, 2, 2),
    (60, 107, 13, 3, 1, 5),
    (7, 1, 5, 2, 2, 1),
    (30, 3, 1, 0, 2, 4),
    (30, 8, 9, 1, 3, 3000),
    (64, 33, 64, 2, 5, 3),
    (20, 5000, 17, 2, 2, 3),
    (9, 4096, 8, 1, 1, 3),
    (6, 20011, 21, 1, 2, 3),
]


@pytest.fixture(autouse=True)
def _kernels_are_available():
    if kernels.why_not() is not None:
        pytest.skip(kernels.why_not())


def make(seed, samples, length, batch, terms, points, cells, dtype=np.float64):
    """Arguments of `neumann` as NumPy arrays, scaled so that the series neither explodes nor dies."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    return (
        normal(samples, length),
        rng.integers(0, 2, samples).astype(dtype),
        rng.integers(0, cells, samples).astype(np.int32),
        rng.integers(0, samples, (terms + 1, batch)).astype(np.int32),
        normal(points, length) / dtype(np.sqrt(length)),
        normal(points, length),
        np.exp(normal(points, cells)),
        np.exp(normal(points)),
        rng.uniform(0.05, 0.2, points).astype(dtype) / dtype(length),
    )


def slope(u, t, link):
    return 1.0 / (1.0 + np.exp(-u)) - t if link == "logistic" else u - t


def curvature(u, link):
    return 1.0 / (2.0 + np.exp(u) + np.exp(-u)) if link == "logistic" else 1.0


def naive_neumann(features, targets, cells, indices, inner, vectors, weights, ridge, step, link):
    z, t = features.astype(np.float64), targets.astype(np.float64)
    solutions, products = [], []
    for y, v, w, mu, tau in zip(inner, vectors, weights, ridge, step, strict=True):
        y, v = y.astype(np.float64), v.astype(np.float64)
        total = v.copy()
        for rows in indices[:-1]:
            hv = mu * v
            for i in rows:
                hv = hv + w[cells[i]] * curvature(z[i] @ y, link) * (z[i] @ v) * z[i] / len(rows)
            v = v - tau * hv
            total = total + v
        solution = tau * total
        product = np.zeros(len(w))
        for i in indices[-1]:
            product[cells[i]] += slope(z[i] @ y, t[i], link) * (z[i] @ solution) / len(indices[-1])
        solutions.append(solution)
        products.append(product)
    return np.array(solutions), np.array(products)


def naive_gradient(features, targets, cells, indices, inner, weights, ridge, link):
    z, results = features.astype(np.float64), []
    for y, w, mu in zip(inner, weights, ridge, strict=True):
        result = mu * y.astype(np.float64)
        for i in indices:
            result = result + w[cells[i]] * slope(z[i] @ y, targets[i], link) * z[i] / len(indices)
        results.append(result)
    return np.array(results)


def for_gradient(arguments):
    features, targets, cells, indices, inner, _, weights, ridge, _ = arguments
    return features, targets, cells, indices[0], inner, weights, ridge


def assert_close(actual, expected, dtype):
    expected = np.asarray(expected)
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max())


def assert_equals_naive_loops(neumann, gradient, shape, dtype, link, seed=1):
    arguments = make(seed, *shape, dtype=dtype)
    for result, expected in zip(neumann(*arguments, link=link), naive_neumann(*arguments, link), strict=True):
        assert_close(result, expected, dtype)
    expected = naive_gradient(*for_gradient(arguments), link)
    assert_close(gradient(*for_gradient(arguments), link=link), expected, dtype)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_naive_loops(shape, dtype, link):
    assert_equals_naive_loops(kernels.neumann, kernels.gradient, shape, dtype, link)


@pytest.mark.parametrize("link", LINKS)
def test_references_equal_naive_loops(link):
    neumann = jax.jit(kernels.neumann_reference, static_argnames="link")
    gradient = jax.jit(kernels.gradient_reference, static_argnames="link")
    for dtype in DTYPES:
        assert_equals_naive_loops(neumann, gradient, (60, 107, 13, 3, 2, 5), dtype, link)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    samples=st.integers(1, 20),
    length=st.integers(1, 40),
    batch=st.integers(1, 40),
    cells=st.integers(1, 6),
    link=st.sampled_from(LINKS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_small_shape(seed, samples, length, batch, cells, link, dtype):
    shape = (samples, length, batch, 1, 2, cells)
    assert_equals_naive_loops(kernels.neumann, kernels.gradient, shape, dtype, link, seed)


@pytest.mark.parametrize("link", LINKS)
def test_kernels_are_the_derivatives_of_the_loss(link):
    features, targets, cells, indices, inner, vectors, weights, ridge, step = make(2, 40, 9, 16, 2, 2, 3)

    def loss(w, y, rows, mu):
        u, t = features[rows] @ y, targets[rows]
        phi = jnp.logaddexp(u, 0.0) - t * u if link == "logistic" else 0.5 * (u - t) ** 2
        return jnp.mean(w[cells[rows]] * phi) + 0.5 * mu * y @ y

    slopes = jax.grad(loss, argnums=1)

    @jax.jit
    def by_autodiff(w, y, v, mu, tau):
        total = v
        for rows in indices[:-1]:
            v = v - tau * jax.jvp(partial(slopes, w, rows=rows, mu=mu), (y,), (v,))[1]
            total = total + v
        solution = tau * total
        cross = jax.grad(lambda w: slopes(w, y, indices[-1], mu) @ solution)(w)
        return solution, cross, slopes(w, y, indices[0], mu)

    features, targets, cells, indices = map(jnp.asarray, (features, targets, cells, indices))
    arguments = (features, targets, cells, indices, inner, vectors, weights, ridge, step)
    actual = (*kernels.neumann(*arguments, link=link), kernels.gradient(*for_gradient(arguments), link=link))
    for p in range(2):
        expected = by_autodiff(weights[p], inner[p], vectors[p], ridge[p], step[p])
        for one, other in zip(actual, expected, strict=True):
            assert_close(one[p], other, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_is_exact_to_rounding_over_the_whole_range(dtype):
    limit = 87.0 if dtype == np.float32 else 700.0
    margins = np.linspace(-limit, limit, 4001).astype(dtype)[:, None]
    one, zero = np.ones((1, 1), dtype), np.zeros(1, np.int32)
    # One row z = 1 with target 0 and weight 1: the gradient at the point u is the sigmoid of u.
    ones, nothing = np.ones_like(margins), np.zeros(len(margins), dtype)
    actual = kernels.gradient(one, np.zeros(1, dtype), zero, zero, margins, ones, nothing, link="logistic")
    expected = 1 / (1 + np.exp(-margins.astype(np.longdouble)))
    np.testing.assert_allclose(actual, expected, rtol=8 * np.finfo(dtype).eps, atol=0)


def test_a_row_of_a_million_numbers():
    arguments = make(3, 3, 10**6, 4, 1, 2, 2, np.float32)
    actual = kernels.neumann(*arguments, link="logistic")
    for result, expected in zip(actual, naive_neumann(*arguments, "logistic"), strict=True):
        assert_close(result, expected, np.float32)


# ---- transformations -------------------------------------------------------------------------------------------------


def stacked(count, **changes):
    """Arguments of `count` clients, and the same stacked."""
    shape = {"samples": 23, "length": 11, "batch": 10, "terms": 2, "points": 2, "cells": 3} | changes
    clients = [make(seed, **shape) for seed in range(count)]
    return clients, tuple(jnp.asarray(np.stack(leaves)) for leaves in zip(*clients, strict=True))


def test_vmap_over_clients_is_bit_identical_to_one_at_a_time():
    clients, batched = stacked(4)
    for link in LINKS:
        together = jax.vmap(partial(kernels.neumann, link=link))(*batched)
        gradients = jax.vmap(partial(kernels.gradient, link=link))(*for_gradient_batched(batched))
        for k, client in enumerate(clients):
            for part, alone in zip(together, kernels.neumann(*client, link=link), strict=True):
                np.testing.assert_array_equal(part[k], alone)
            np.testing.assert_array_equal(gradients[k], kernels.gradient(*for_gradient(client), link=link))


def for_gradient_batched(batched):
    features, targets, cells, indices, inner, _, weights, ridge, _ = batched
    return features, targets, cells, indices[:, 0], inner, weights, ridge


@pytest.mark.parametrize("batched_operand", range(9))
def test_vmap_over_any_single_operand(batched_operand):
    one, other = make(0, 23, 11, 10, 2, 2, 3), make(1, 23, 11, 10, 2, 2, 3)
    axes = [None] * 9
    axes[batched_operand] = 1  # not leading: the transformation has to move it
    operands = list(one)
    operands[batched_operand] = np.stack([one[batched_operand], other[batched_operand]], axis=1)
    together = jax.vmap(partial(kernels.neumann, link="logistic"), in_axes=axes)(*operands)
    for k, source in enumerate((one, other)):
        operands[batched_operand] = source[batched_operand]
        for part, alone in zip(together, kernels.neumann(*operands, link="logistic"), strict=True):
            np.testing.assert_array_equal(part[k], alone)


def test_seeds_over_clients_with_shared_features():
    clients, batched = stacked(3)
    rng = np.random.default_rng(5)
    indices = rng.integers(0, 23, (2, 3, 3, 10)).astype(np.int32)
    step = jnp.asarray(rng.uniform(0.01, 0.02, (2, 2)))  # differs by seed, shared by clients
    features, targets, cells, _, inner, vectors, weights, ridge, _ = batched
    over_clients = jax.vmap(partial(kernels.neumann, link="logistic"), in_axes=(0,) * 8 + (None,))
    over_seeds = jax.vmap(over_clients, in_axes=(None, None, None, 0, None, None, None, None, 0))
    for transformed in (over_seeds, jax.jit(over_seeds)):
        solutions, products = transformed(features, targets, cells, indices, inner, vectors, weights, ridge, step)
        for s in range(2):
            for m, client in enumerate(clients):
                alone = kernels.neumann(*client[:3], indices[s, m], *client[4:8], step[s], link="logistic")
                np.testing.assert_array_equal(solutions[s, m], alone[0])
                np.testing.assert_array_equal(products[s, m], alone[1])


def test_shared_features_are_never_copied():
    _, batched = stacked(2, samples=5000, length=50)
    features, targets, cells, _, inner, vectors, weights, ridge, step = batched
    size = features.nbytes

    @jax.jit
    def program(features, targets, cells, indices, inner, vectors, weights, ridge, step):
        over_clients = jax.vmap(partial(kernels.neumann, link="logistic"))
        over_seeds = jax.vmap(over_clients, in_axes=(None, None, None, 0, 0, None, None, None, None))

        def body(inner, indices):
            solutions, _ = over_seeds(features, targets, cells, indices, inner, vectors, weights, ridge, step)
            return inner - solutions, None

        return jax.lax.scan(body, inner, indices)[0]

    indices = jnp.zeros((6, 4, 2, 3, 10), jnp.int32)
    points = jnp.broadcast_to(inner, (4, *inner.shape))
    compiled = program.lower(features, targets, cells, indices, points, vectors, weights, ridge, step).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < size / 10
    assert np.isfinite(compiled(features, targets, cells, indices, points, vectors, weights, ridge, step)).all()


def test_inside_loops_under_jit():
    client = tuple(map(jnp.asarray, make(0, 23, 11, 10, 2, 2, 3)))
    many = jnp.asarray(np.random.default_rng(1).integers(0, 23, (5, 3, 10)).astype(np.int32))
    features, targets, cells, _, inner, vectors, weights, ridge, step = client

    def one(indices, vectors):
        return kernels.neumann(
            features, targets, cells, indices, inner, vectors, weights, ridge, step, link="logistic"
        )[0]

    expected = vectors
    for indices in many:
        expected = one(indices, expected)
    scanned = jax.jit(lambda v: jax.lax.scan(lambda v, rows: (one(rows, v), None), v, many)[0])(vectors)
    looped = jax.jit(lambda v: jax.lax.fori_loop(0, 5, lambda k, v: one(many[k], v), v))(vectors)
    np.testing.assert_array_equal(scanned, expected)
    np.testing.assert_array_equal(looped, expected)
    mapped = jax.jit(lambda rows: jax.lax.map(lambda i: one(i, vectors), rows))(many)
    np.testing.assert_array_equal(mapped, np.stack([one(rows, vectors) for rows in many]))


def test_two_threads_at_once():
    clients = [make(seed, 200, 107, 64, 5, 2, 3) for seed in range(2)]
    expected = [kernels.neumann(*client, link="logistic") for client in clients]
    results: list[list] = [[], []]

    def work(k):
        for _ in range(40):
            results[k].append(jax.block_until_ready(kernels.neumann(*clients[k], link="logistic")))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(2):
        assert len(results[k]) == 40
        for result in results[k]:
            jax.tree.map(np.testing.assert_array_equal, result, expected[k])
