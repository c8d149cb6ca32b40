"""Sums over whole sets against loops in NumPy: any sizes, clients side by side, and nothing read that is not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import kernels
from tests.references.compare import refusals

# Rounding of sums over a few thousand rows, relative to the largest entry of the result.
TOLERANCE = {np.float32: 2e-5, np.float64: 1e-12}
GROUPS = 4
RAISED = (ValueError, jax.errors.JaxRuntimeError)


def make(rows, length, dtype, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, length)).astype(dtype)
    labels = (rng.random(rows) < 0.3).astype(dtype)
    groups = rng.integers(0, GROUPS - 1, rows).astype(np.int32)  # the last group stays empty
    return features, labels, groups, (3 * rng.normal(size=length) / np.sqrt(length)).astype(dtype)


def naive(features, labels, groups, inner, start, size, temperature):
    """Row by row, in double precision."""
    features, labels, inner = (array.astype(np.float64) for array in (features, labels, inner))
    losses, counts, rates, positives = np.zeros((4, GROUPS))
    loss_gradient, rate_gradients = np.zeros(features.shape[1]), np.zeros((GROUPS, features.shape[1]))
    for i in range(start, start + size):
        score, a = features[i] @ inner, groups[i]
        losses[a] += np.log1p(np.exp(-abs(score))) + max(score, 0) - labels[i] * score
        counts[a] += 1
        soft = 1 / (1 + np.exp(-temperature * score))
        rates[a] += labels[i] * soft
        positives[a] += labels[i]
        loss_gradient += (1 / (1 + np.exp(-score)) - labels[i]) * features[i]
        rate_gradients[a] += labels[i] * temperature * soft * (1 - soft) * features[i]
    return losses, counts, rates, positives, loss_gradient, rate_gradients


def near(found, wanted, dtype):
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        assert np.abs(np.asarray(got, np.float64) - want).max() <= TOLERANCE[dtype] * max(1, np.abs(want).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
# Rows that fill tiles and that do not, rows shorter than a vector, tails, more than one flush of the running sum.
@pytest.mark.parametrize(
    ("rows", "length", "start", "size"), [(64, 16, 0, 64), (40, 3, 5, 30), (2500, 37, 11, 2300), (9, 1, 8, 1)]
)
def test_equals_the_loop_over_rows(rows, length, start, size, dtype):
    features, labels, groups, inner = make(rows, length, dtype)
    place = (np.int32(start), np.int32(size))
    found = jax.jit(kernels.group_sums, static_argnames="count")(
        features, labels, groups, *map(jnp.asarray, place), inner, jnp.asarray(dtype(7)), count=GROUPS
    )
    wanted = naive(features, labels, groups, inner, start, size, 7.0)
    near(found, wanted, dtype)
    losses = kernels.group_losses(features, labels, groups, *map(jnp.asarray, place), inner, count=GROUPS)
    near(losses, wanted[:2], dtype)


def test_clients_of_any_sizes_share_one_array():
    features, labels, groups, inner = make(90, 5, np.float64)
    starts, sizes = np.array([0, 30, 60], np.int32), np.array([30, 7, 22], np.int32)
    inners = np.stack([inner, -inner, 0 * inner])

    def one(start, size, point):
        return kernels.group_sums(features, labels, groups, start, size, point, jnp.asarray(2.0), count=GROUPS)

    found = jax.vmap(one)(starts, sizes, inners)
    for client in range(3):
        wanted = naive(features, labels, groups, inners[client], starts[client], sizes[client], 2.0)
        near([leaf[client] for leaf in found], wanted, np.float64)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("points", [1, 2, 3, 5, 7, 18])
def test_points_on_the_same_rows_go_together_and_change_nothing(points, dtype):
    """Seeds side by side on clients side by side: what each point gives alone.

    To rounding: which products the compiler fuses with a sum may differ with the number of points.
    """
    features, labels, groups, _ = make(75, 19, dtype)
    starts, sizes = np.array([0, 40], np.int32), np.array([33, 35], np.int32)
    inners = np.random.default_rng(1).normal(size=(points, 2, 19)).astype(dtype)

    def one(start, size, point):
        return kernels.group_losses(features, labels, groups, start, size, point, count=GROUPS)

    together = jax.vmap(jax.vmap(one), (None, None, 0))(starts, sizes, inners)
    for point in range(points):
        for client in range(2):
            alone = one(*map(jnp.asarray, (starts[client], sizes[client], inners[point, client])))
            near([leaf[point, client] for leaf in together], [np.asarray(leaf) for leaf in alone], dtype)


def test_extreme_scores_stay_finite_and_a_nan_is_seen():
    features = np.array([[1e4], [-1e4], [88.0], [-745.0]])
    labels, groups = np.array([0.0, 1.0, 1.0, 0.0]), np.zeros(4, np.int32)
    place = (jnp.asarray(np.int32(0)), jnp.asarray(np.int32(4)))
    found = kernels.group_sums(features, labels, groups, *place, np.ones(1), jnp.asarray(1.0), count=1)
    near(found[:1], [np.array([2e4])], np.float64)
    assert all(np.isfinite(leaf).all() for leaf in found)
    losses, _ = kernels.group_losses(features, labels, groups, *place, np.array([np.nan]), count=1)
    assert np.isnan(losses).all()


NAMES = ("features", "labels", "groups", "inner")
PLAIN = dict(zip(NAMES, make(20, 4, np.float64), strict=True)) | {"start": np.int32(0), "size": np.int32(20)}
test_bad_arguments = refusals(
    lambda given: kernels.group_sums(**PLAIN | {"temperature": np.float64(1)} | given, count=2),
    ({"inner": np.zeros(4, np.float32)}, r"inner must be float64\(4,\) to fit the features, not float32\(4,\)"),
    ({"features": np.zeros(4)}, "features must be a matrix of float32 or float64"),
    ({"temperature": np.ones(2)}, r"temperature must be float64\(\) to fit the features, not float64\(2,\)"),
)
test_never_reads_what_is_not_there = refusals(
    lambda given: jax.block_until_ready(kernels.group_losses(**PLAIN | given, count=GROUPS)),
    *(
        ({"groups": np.full(20, bad, np.int32)}, "'groups' names a group that there is not", RAISED)
        for bad in (GROUPS, -1)
    ),
    *(
        (given, "'start' and 'size' name rows that there are not", RAISED)
        for given in ({"size": np.int32(21)}, {"start": np.int32(-1)}, {"size": np.int32(-1)})
    ),
)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [0.0, 40.0])
def test_losses_of_models_that_know_nothing_and_of_sure_ones(scale, dtype):
    """Products of many factors: all of them 2, or nearly all of them 1."""
    features, labels, groups, inner = make(5000, 21, dtype, seed=3)
    model, whole = scale * inner, (jnp.asarray(0, jnp.int32), jnp.asarray(5000, jnp.int32))
    found = kernels.group_losses(features, labels, groups, *whole, model, count=GROUPS)
    wanted = naive(features, labels, groups, model, 0, 5000, 1.0)[:2]
    near(found, wanted, dtype)
    if scale == 0:
        np.testing.assert_allclose(found[0], np.log(2) * wanted[1], rtol=TOLERANCE[dtype])
