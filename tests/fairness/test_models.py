"""Models, and soft rates: against loops, their derivative against finite differences, and with absent groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.fairness.models import (
    MODELS,
    Model,
    group_totals,
    largest_gap,
    probabilities,
    row_losses,
    soft_true_positive_rates,
)
from tests.fairness.references_baselines import sigmoid, soft_gap

ROUNDING = 1e-12
rates = jax.jit(soft_true_positive_rates, static_argnums=3)


def rows(groups, seed=0, count=60):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=count),
        rng.integers(2, size=count).astype(float),
        rng.integers(groups, size=count).astype(np.int32),
    )


@pytest.mark.parametrize("groups", [2, 5])
def test_rates_equal_loops(groups):
    scores, labels, numbers = rows(groups)
    labels[numbers == 1] = 0.0  # no positives in group 1
    numbers[numbers == groups - 1] = 0  # no rows of the last group
    for temperature in (1.0, 10.0):
        values, present = rates(scores, labels, numbers, groups, temperature)
        for group in range(groups):
            chosen = (numbers == group) & (labels == 1)
            assert bool(present[group]) == chosen.any()
            if chosen.any():
                assert abs(values[group] - sigmoid(temperature * scores[chosen]).mean()) < ROUNDING


def test_high_temperature_gives_the_rate_of_decisions():
    scores, labels, numbers = rows(5)
    values, _ = rates(scores, labels, numbers, 5, 1e6)
    for group in range(5):
        assert abs(values[group] - (scores[(numbers == group) & (labels == 1)] > 0).mean()) < ROUNDING


@pytest.mark.parametrize("groups", [2, 5])
def test_gap_and_its_derivative(groups):
    scores, labels, numbers = rows(groups, seed=1)
    labels[numbers == 0] = 0.0 if groups > 2 else labels[numbers == 0]

    @jax.jit
    def gap(scores):
        return largest_gap(soft_true_positive_rates(scores, labels, numbers, groups, 4.0))

    value, slope = soft_gap(scores, labels, numbers, groups, 4.0)
    assert value > 0.01
    assert abs(gap(scores) - value) < ROUNDING
    derivative = jax.grad(gap)(scores)
    np.testing.assert_allclose(derivative, slope, rtol=0, atol=ROUNDING)
    direction = np.random.default_rng(2).normal(size=len(scores))
    moved = [float(gap(scores + sign * 1e-6 * direction)) for sign in (1, -1)]
    # 1e-8: a central difference of step 1e-6 loses half of the 16 digits.
    assert abs((moved[0] - moved[1]) / 2e-6 - derivative @ direction) < 1e-8


@jax.jit
def gap_and_derivative(scores, labels, numbers):
    return jax.value_and_grad(lambda s: largest_gap(soft_true_positive_rates(s, labels, numbers, 3)))(scores)


@pytest.mark.parametrize("present", [0, 1])
def test_fewer_than_two_groups_have_no_gap_and_no_derivative(present):
    scores, labels, numbers = rows(3)
    labels[numbers >= present] = 0.0
    gap, derivative = gap_and_derivative(scores, labels, numbers)
    assert gap == 0
    np.testing.assert_array_equal(derivative, 0)


def test_equal_rates_have_no_derivative():
    _, labels, numbers = rows(3)
    gap, derivative = gap_and_derivative(np.zeros(len(labels)), labels, numbers)
    assert gap == 0
    np.testing.assert_allclose(derivative, 0, rtol=0, atol=ROUNDING)


def test_group_totals_ignore_numbers_outside():
    totals = group_totals(np.array([1.0, 2.0, 4.0]), np.array([0, 2, -1], np.int32), 3)
    np.testing.assert_array_equal(totals, [1.0, 0.0, 2.0])


def test_single_precision_stays():
    scores, labels, numbers = rows(2)
    values, _ = soft_true_positive_rates(scores.astype(np.float32), labels.astype(np.float32), numbers, 2, 10.0)
    assert values.dtype == np.float32


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("classes", [2, 4])
def test_probabilities_equal_the_scores_and_the_loss_is_theirs(kind, classes):
    model = Model(kind, 5, classes, hidden=3)
    rng = np.random.default_rng(13)
    features = np.concatenate([rng.normal(size=(60, 4)), np.ones((60, 1))], axis=1).astype(np.float32)
    params = jax.tree.map(
        lambda leaf: leaf + 0.3 * jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape),
        model.start(jax.random.key(1)),
    )
    scores = model.scores(params, features)
    found = probabilities(model, params, features)
    full = jax.nn.softmax(jnp.stack([jnp.zeros_like(scores), scores], 1) if classes == 2 else scores, axis=1)
    np.testing.assert_allclose(found, np.asarray(full), atol=1e-5)  # float32 scores
    labels = np.arange(60) % classes
    losses = row_losses(scores, jnp.asarray(labels, jnp.float32))
    np.testing.assert_allclose(np.asarray(losses), -np.log(found[np.arange(60), labels]), atol=1e-4)


def test_bad_model_options():
    with pytest.raises(ValueError, match="model must be one of"):
        Model("forest", 3)
    with pytest.raises(ValueError, match="classes must be at least 2"):
        Model("mlp", 3, classes=1)
