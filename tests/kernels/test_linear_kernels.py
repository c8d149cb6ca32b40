"""The fused kernels against loops in NumPy, under every transformation they promise to survive, and on input that is out of
range, not finite, or of the wrong shape."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.errors import JaxRuntimeError

from fedbilevel import kernels
from tests.kernels.references import NAMES, for_gradient, make, naive_gradient, naive_neumann, process, spoken
from tests.references.compare import refusals

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


def assert_close(actual, expected, dtype):
    expected = np.asarray(expected)
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max())


def assert_equals_naive_loops(seed, shape, dtype, link):
    arguments = make(seed, *shape, dtype=dtype)
    pairs = zip(kernels.neumann(**arguments, link=link), naive_neumann(**arguments, link=link), strict=True)
    rows = for_gradient(arguments)
    for result, expected in (*pairs, (kernels.gradient(**rows, link=link), naive_gradient(**rows, link=link))):
        assert_close(result, expected, dtype)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_naive_loops(shape, dtype, link):
    assert_equals_naive_loops(1, shape, dtype, link)


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
    assert_equals_naive_loops(seed, (samples, length, batch, 1, 2, cells), dtype, link)


@pytest.mark.parametrize("link", LINKS)
def test_kernels_are_the_derivatives_of_the_loss(link):
    arguments = make(2, 40, 9, 16, 2, 2, 3)
    features, targets, cells, indices = (jnp.asarray(arguments[name]) for name in NAMES[:4])

    def loss(w, y, rows, mu):
        u, t = features[rows] @ y, targets[rows]
        phi = jnp.logaddexp(u, 0.0) - t * u if link == "logistic" else 0.5 * (u - t) ** 2
        return jnp.mean(w[cells[rows]] * phi) + 0.5 * mu * y @ y

    slopes = jax.grad(loss, argnums=1)

    @jax.jit
    def by_autodiff(y, v, w, mu, tau):
        total = v
        for rows in indices[:-1]:
            v = v - tau * jax.jvp(partial(slopes, w, rows=rows, mu=mu), (y,), (v,))[1]
            total = total + v
        solution = tau * total
        cross = jax.grad(lambda w: slopes(w, y, indices[-1], mu) @ solution)(w)
        return solution, cross, slopes(w, y, indices[0], mu)

    actual = (*kernels.neumann(**arguments, link=link), kernels.gradient(**for_gradient(arguments), link=link))
    for p in range(2):
        expected = by_autodiff(*(arguments[name][p] for name in NAMES[4:]))
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
    arguments = make(3, 3, 10**6, 4, 1, 2, 2, dtype=np.float32)
    actual = kernels.neumann(**arguments, link="logistic")
    for result, expected in zip(actual, naive_neumann(**arguments, link="logistic"), strict=True):
        assert_close(result, expected, np.float32)


# ---- transformations -------------------------------------------------------------------------------------------------


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def neumann(*operands, **options):
    return kernels.neumann(*operands, link="logistic", **options)


def stacked(count, **changes):
    """Arguments of `count` clients, and the same stacked."""
    clients = [make(seed, **changes) for seed in range(count)]
    return clients, {name: jnp.asarray(np.stack([client[name] for client in clients])) for name in NAMES}


def test_vmap_over_clients_is_bit_identical_to_one_at_a_time():
    clients, batched = stacked(4)
    for link in LINKS:
        together = jax.vmap(lambda client, link=link: kernels.neumann(**client, link=link))(batched)
        gradients = jax.vmap(lambda client, link=link: kernels.gradient(**client, link=link))(for_gradient(batched))
        for k, client in enumerate(clients):
            same([part[k] for part in together], list(kernels.neumann(**client, link=link)))
            same(gradients[k], kernels.gradient(**for_gradient(client), link=link))


@pytest.mark.parametrize("batched_operand", NAMES)
def test_vmap_over_any_single_operand(batched_operand):
    one, other = make(0), make(1)
    both = np.stack([one[batched_operand], other[batched_operand]], axis=1)  # not leading: the transformation moves it
    together = jax.vmap(lambda given: neumann(**one | {batched_operand: given}), in_axes=1)(both)
    for k, source in enumerate((one, other)):
        alone = neumann(**one | {batched_operand: source[batched_operand]})
        same([part[k] for part in together], list(alone))


def test_seeds_over_clients_with_shared_features():
    clients, batched = stacked(3)
    rng = np.random.default_rng(5)
    indices = rng.integers(0, 23, (2, 3, 3, 10)).astype(np.int32)
    step = jnp.asarray(rng.uniform(0.01, 0.02, (2, 2)))  # differs by seed, shared by clients
    over_clients = jax.vmap(neumann, in_axes=(0,) * 8 + (None,))
    over_seeds = jax.vmap(over_clients, in_axes=(None, None, None, 0, None, None, None, None, 0))
    operands = [*(batched | {"indices": indices, "step": step}).values()]
    for transformed in (over_seeds, jax.jit(over_seeds)):
        found = transformed(*operands)
        for s in range(2):
            for m, client in enumerate(clients):
                alone = neumann(**client | {"indices": indices[s, m], "step": step[s]})
                same([part[s, m] for part in found], list(alone))


def test_shared_features_are_never_copied():
    _, batched = stacked(2, samples=5000, length=50)

    @jax.jit
    def program(inner, indices, shared):
        def one(inner, indices, client):
            return neumann(**client, inner=inner, indices=indices)[0]

        over_seeds = jax.vmap(jax.vmap(one), in_axes=(0, 0, None))
        return jax.lax.scan(lambda inner, rows: (inner - over_seeds(inner, rows, shared), None), inner, indices)[0]

    indices = jnp.zeros((6, 4, 2, 3, 10), jnp.int32)
    inner = batched.pop("inner")
    del batched["indices"]
    points = jnp.broadcast_to(inner, (4, *inner.shape))
    compiled = program.lower(points, indices, batched).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < batched["features"].nbytes / 10
    assert np.isfinite(compiled(points, indices, batched)).all()


def test_inside_loops_under_jit():
    client = jax.tree.map(jnp.asarray, make(0))
    many = jnp.asarray(np.random.default_rng(1).integers(0, 23, (5, 3, 10)).astype(np.int32))
    vectors = client["vectors"]

    def one(indices, vectors):
        return neumann(**client | {"indices": indices, "vectors": vectors})[0]

    expected = vectors
    for indices in many:
        expected = one(indices, expected)
    scanned = jax.jit(lambda v: jax.lax.scan(lambda v, rows: (one(rows, v), None), v, many)[0])(vectors)
    looped = jax.jit(lambda v: jax.lax.fori_loop(0, 5, lambda k, v: one(many[k], v), v))(vectors)
    same([scanned, looped], [expected] * 2)
    mapped = jax.jit(lambda rows: jax.lax.map(lambda i: one(i, vectors), rows))(many)
    same(mapped, np.stack([one(rows, vectors) for rows in many]))


def test_two_threads_at_once():
    clients = [make(seed, 200, 107, 64, 5) for seed in range(2)]
    expected = [neumann(**client) for client in clients]

    def work(client):
        return [jax.block_until_ready(neumann(**client)) for _ in range(40)]

    with ThreadPoolExecutor(2) as pool:
        for results, wanted in zip(pool.map(work, clients), expected, strict=True):
            same(results, [wanted] * 40)


SHARDED = """
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from fedbilevel import kernels
from tests.kernels.references import NAMES, make
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
assert mesh.size == 2
clients = [make(seed, 20, 7, 9) for seed in range(4)]
shared = {name: clients[0][name] for name in NAMES[6:]}
operands = [*(jnp.stack([client[name] for client in clients]) for name in NAMES[:6]), *shared.values()]
kernel = jax.vmap(partial(kernels.neumann, link="logistic"), in_axes=(0,) * 6 + (None,) * 3)
expected = kernel(*operands)
for check in (True, False):
    sharded = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=(P("clients"),) * 6 + (P(),) * 3,
                                    out_specs=P("clients"), check_vma=check))
    for got, want in zip(sharded(*operands), expected):
        assert len(got.sharding.device_set) == 2
        np.testing.assert_array_equal(got, want)
print("same")
"""


def test_shard_map_gives_the_same_numbers():
    assert spoken(process(SHARDED)) == "same"


# ---- input that is out of range, not finite, or of the wrong shape ---------------------------------------------------

# Which of them depends on whether JAX waits for the result before it returns.
RAISED = (ValueError, JaxRuntimeError)


def in_range(length=11, batch=10, dtype=np.float64):
    arguments = make(7, length=length, batch=batch, dtype=dtype)
    arguments["indices"] %= 20  # rows 20 to 22 are never used
    return arguments | {"ridge": np.full(2, 0.1, dtype), "step": np.full(2, 0.05, dtype)}


def series(arguments, link="logistic", function=kernels.neumann):
    return function(**arguments, link=link)


def slopes(arguments, link="logistic", function=kernels.gradient):
    return function(**for_gradient(arguments), link=link)


@pytest.mark.parametrize("bad", [-1, 23, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [(0, 0), (0, 9), (2, 4)])
def test_an_index_without_a_row_is_an_error(bad, place):
    arguments = in_range()
    arguments["indices"][place] = bad
    with pytest.raises(RAISED, match="'indices' names a row that there is not"):
        jax.block_until_ready(series(arguments))
    if place[0] == 0:
        with pytest.raises(RAISED, match="'indices' names a row"):
            jax.block_until_ready(slopes(arguments))


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1, -(2**31)])
def test_a_cell_without_a_weight_is_an_error_where_it_is_used(bad):
    arguments = in_range()
    arguments["cells"][22] = bad
    assert np.isfinite(series(arguments)[0]).all()
    for minibatch in range(3):
        used = dict(arguments, indices=arguments["indices"].copy())
        used["indices"][minibatch, 3] = 22
        with pytest.raises(RAISED, match="'cells' names a cell that 'weights' does not have"):
            jax.block_until_ready(series(used))
    used = dict(arguments, indices=np.full((1, 4), 22, np.int32))
    with pytest.raises(RAISED, match="'cells' names a cell"):
        jax.block_until_ready(slopes(used))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [3, 11, 107])
@pytest.mark.parametrize("name", ["features", "inner", "vectors", "weights", "ridge", "step"])
def test_nan_in_gives_nan_out(name, length, dtype):
    for position in (0, -1):
        arguments = in_range(length, dtype=dtype)
        arguments["indices"][1, 4] = 0 if position == 0 else 22
        # A cell the minibatches certainly use, so that its weight matters.
        arguments["cells"][:] = 0 if position == 0 else 2
        arguments[name].reshape(-1)[position] = np.nan
        point = slice(None) if name == "features" else position
        solutions, products = series(arguments)
        assert np.isnan(solutions[point]).any()
        assert np.isnan(products[point]).any()
        if name != "features":  # the other point is not touched
            other = -1 - position
            assert np.isfinite(solutions[other]).all()
            assert np.isfinite(products[other]).all()


def test_nan_reaches_the_gradient_and_only_from_rows_in_use():
    for name in ("features", "inner", "weights", "ridge", "targets"):
        arguments = in_range()
        arguments["cells"][:] = 0
        arguments["indices"][0, 5] = 0
        assert np.isfinite(slopes(arguments)).all()
        arguments[name].reshape(-1)[0] = np.nan
        assert np.isnan(slopes(arguments)[0]).any()
    arguments = in_range()
    arguments["features"][22] = arguments["targets"][22] = np.nan
    assert np.isfinite(series(arguments)[0]).all()
    assert np.isfinite(slopes(arguments)).all()


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("batch", [3, 17])
@pytest.mark.parametrize("length", [3, 11])
def test_infinities_travel_as_in_the_reference(length, batch, link):
    for name, value in (("features", np.inf), ("inner", -np.inf), ("weights", np.inf), ("vectors", np.inf)):
        arguments = in_range(length, batch)
        arguments["indices"][:, 0] = 0
        arguments[name][0, -1] = value
        for actual, expected in zip(series(arguments, link), series(arguments, link, naive_neumann), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-11)
        np.testing.assert_allclose(slopes(arguments, link), slopes(arguments, link, naive_gradient), rtol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
def test_saturated_margins_neither_overflow_nor_lose_the_gradient(scale, dtype):
    arguments = in_range(dtype=dtype)
    arguments["inner"] *= dtype(scale)
    arguments["ridge"] *= 0
    for actual, expected in (
        (series(arguments)[0], series(arguments, function=naive_neumann)[0]),
        (slopes(arguments), slopes(arguments, function=naive_gradient)),
    ):
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


test_wrong_shapes_and_types_are_named = refusals(
    lambda change: series(in_range() | change),
    ({"features": np.zeros(3)}, "features must have 2 dimensions"),
    ({"features": np.zeros((0, 11))}, "features must have 2 dimensions, none of size 0"),
    ({"features": np.zeros((23, 11), np.int32)}, "features must be float32 or float64", TypeError),
    ({"targets": np.zeros(22)}, "targets must have shape"),
    ({"targets": np.zeros(23, np.int32)}, "targets must have type float64", TypeError),
    ({"cells": np.zeros(23, np.int64)}, "cells must have type int32", TypeError),
    ({"indices": np.zeros(3, np.int32)}, "indices must have 2 dimension"),
    ({"indices": np.zeros((2, 0), np.int32)}, "indices must have 2 dimension"),
    ({"inner": np.zeros((2, 10))}, "inner must have shape"),
    ({"vectors": np.zeros((1, 11))}, "vectors must have shape"),
    ({"weights": np.zeros((3, 3))}, "weights must have shape"),
    ({"ridge": np.float64(0)}, "ridge must have shape"),
    ({"step": np.zeros(2, np.float32)}, "step must have type float64", TypeError),
)
test_an_unknown_link_is_named = refusals(
    lambda kernel: kernel(in_range(), "probit"),
    *((kernel, "link must be 'logistic' or 'squared', not 'probit'") for kernel in (series, slopes)),
)
