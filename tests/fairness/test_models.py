"""Models, and soft rates: against loops, their derivative against finite differences, and with absent groups."""

import jax
import numpy as np
import pytest

from fedbilevel.fairness.models import (
    LOSSES,
    MODELS,
    Model,
    group_rates,
    group_totals,
    largest_gap,
    numbers,
    probabilities,
    recognised,
    row_losses,
)
from tests.fairness.references_baselines import sigmoid, soft_gap, softmax

ROUNDING = 1e-12


def soft_rates(scores, labels, numbers, groups, temperature=1.0):
    return group_rates(recognised(scores, labels, temperature), numbers, groups)


rates = jax.jit(soft_rates, static_argnums=(3, 4))


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


def test_classes_are_recognised_one_by_one():
    """By probabilities and by decisions; a class that a group lacks is absent there."""
    rng = np.random.default_rng(3)
    scores, labels, numbers = rng.normal(size=(60, 3)), rng.integers(3, size=60).astype(float), rows(2)[2]
    labels[(labels == 2) & (numbers == 1)] = 0.0
    for temperature in (2.0, None):
        values, present = rates(scores, labels, numbers, 2, temperature)
        sure = np.eye(3)[scores.argmax(1)] if temperature is None else softmax(temperature * scores)
        for label, group in np.ndindex(3, 2):
            chosen = (numbers == group) & (labels == label)
            assert bool(present[label, group]) == chosen.any() == ((label, group) != (2, 1))
            if chosen.any():
                assert abs(values[label, group] - sure[chosen, label].mean()) < ROUNDING


@pytest.mark.parametrize(("groups", "classes"), [(2, 2), (5, 2), (3, 3)])
def test_gap_and_its_derivative(groups, classes):
    scores, labels, numbers = rows(groups, seed=1)
    labels[numbers == 0] = 0.0 if groups > 2 else labels[numbers == 0]
    if classes > 2:
        rng = np.random.default_rng(2)
        scores, labels = rng.normal(size=(60, classes)), rng.integers(classes, size=60).astype(float)

    @jax.jit
    def gap(scores):
        return largest_gap(soft_rates(scores, labels, numbers, groups, 4.0))

    value, slope = soft_gap(scores, labels, numbers, groups, 4.0)
    assert value > 0.01
    assert abs(gap(scores) - value) < ROUNDING
    derivative = jax.grad(gap)(scores)
    np.testing.assert_allclose(derivative, slope, rtol=0, atol=ROUNDING)
    direction = np.random.default_rng(2).normal(size=scores.shape)
    moved = [float(gap(scores + sign * 1e-6 * direction)) for sign in (1, -1)]
    # 1e-8: a central difference of step 1e-6 loses half of the 16 digits.
    assert abs((moved[0] - moved[1]) / 2e-6 - np.sum(derivative * direction)) < 1e-8


@jax.jit
def gap_and_derivative(scores, labels, numbers):
    return jax.value_and_grad(lambda s: largest_gap(soft_rates(s, labels, numbers, 3)))(scores)


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
    values, _ = soft_rates(scores.astype(np.float32), labels.astype(np.float32), numbers, 2, 10.0)
    assert values.dtype == np.float32


@pytest.mark.parametrize("kind", ["logistic", "mlp"])
@pytest.mark.parametrize("classes", [2, 4])
def test_probabilities_equal_the_scores_and_the_loss_is_theirs(kind, classes):
    model = Model(kind, 5, classes, hidden=3)
    rng = np.random.default_rng(13)
    features = np.concatenate([rng.normal(size=(60, 4)), np.ones((60, 1))], axis=1).astype(np.float32)
    params = jax.tree.map(
        lambda leaf: leaf + 0.3 * np.cos(np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape),
        model.start(jax.random.key(1)),
    )
    scores = np.asarray(jax.jit(model.scores)(params, features))
    found = probabilities(model, params, features)
    full = softmax(np.stack([np.zeros_like(scores), scores], 1) if classes == 2 else scores)
    np.testing.assert_allclose(found, full, atol=1e-5)  # float32 scores
    labels = np.arange(60) % classes
    losses = jax.jit(row_losses)(scores, labels.astype(np.float32))
    np.testing.assert_allclose(np.asarray(losses), -np.log(found[np.arange(60), labels]), atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("loss", LOSSES[1:])
def test_numbers_and_their_losses(kind, loss):
    model = Model(kind, 3, 1, hidden=2, loss=loss)
    params = jax.tree.map(lambda leaf: leaf + 0.7, model.start(jax.random.key(0)))
    features = np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)
    scores, labels = model.scores(params, features), np.linspace(-3, 3, 20, dtype=np.float32)
    assert scores.shape == (20,)
    np.testing.assert_allclose(numbers(model, params, features), scores, atol=1e-5)
    error = np.abs(np.asarray(scores) - labels)
    wanted = error**2 / 2 if loss == "squared" else np.where(error < 1, error**2 / 2, error - 0.5)
    np.testing.assert_allclose(model.losses(scores, labels), wanted, rtol=1e-5)
    slopes = jax.jit(jax.vmap(jax.grad(jax.grad(lambda s, y: model.losses(s[None], y[None])[0]))))(scores, labels)
    assert np.max(slopes) <= model.curvature


def test_bad_model_options():
    assert set(MODELS) == {"logistic", "linear", "mlp"}
    for options, words in (
        ({"kind": "linear"}, "model='linear' cannot predict classes"),
        ({"kind": "logistic", "classes": 1, "loss": "huber"}, "model='logistic' cannot predict a number"),
        ({"kind": "mlp", "loss": "huber"}, "classes must be 1, not 2"),
        ({"kind": "mlp", "classes": 1, "loss": "absolute"}, "loss must be one of"),
    ):
        with pytest.raises(ValueError, match=words):
            Model(features=3, **options)
    with pytest.raises(ValueError, match="model must be one of"):
        Model("forest", 3)
    with pytest.raises(ValueError, match="classes must be at least 2"):
        Model("mlp", 3, classes=1)
