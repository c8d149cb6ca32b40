"""Data cleaning: the losses against plain NumPy, and learned weights that tell wrong labels from right ones."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.studies.bench import settled_inner
from fedbilevel.tasks import data_cleaning
from fedbilevel.tasks.cleaning import auc, corrupt
from tests.tasks.common import IMAGES, rows_of, settled, softmax_losses, train


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 30), st.floats(0, 1))
def test_exactly_the_asked_share_of_labels_is_wrong(seed, clients, rows, noise):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, (clients, rows)).astype(np.int32)
    observed, corrupted = corrupt(labels, noise, generator)
    assert np.array_equal(observed != labels, corrupted)
    assert (corrupted.sum(axis=1) == round(noise * rows)).all()
    assert observed.min() >= 0
    assert observed.max() <= 9


def test_noise_may_differ_between_clients():
    labels = np.zeros((2, 10), np.int32)
    _, corrupted = corrupt(labels, (0.0, 0.7), np.random.default_rng(0))
    assert corrupted.sum(axis=1).tolist() == [0, 7]
    for bad in (1.1, -0.1, (0.1, 0.2, 0.3), float("nan")):
        with pytest.raises(ValueError, match="must be a share in"):
            corrupt(labels, bad, np.random.default_rng(0))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_auc_counts_pairs(rows):
    scores, positive = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive] for b in scores[~positive]]
    if not pairs:
        assert np.isnan(auc(scores, positive))
    else:
        assert auc(scores, positive) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize("weights", ["samples", "trust"])
def test_losses_are_what_the_page_says(weights):
    task = data_cleaning(
        IMAGES, 3, weights=weights, lower_level="global", clients=3, train=12, validation=5, test=7, ridge=0.1
    )
    generator = np.random.default_rng(0)
    rows, val = rows_of(task.data.train, 1), rows_of(task.data.val, 1)
    outer = generator.standard_normal(36 if weights == "samples" else (65, 10)).astype(np.float32)
    inner = generator.standard_normal((65, 10)).astype(np.float32)
    if weights == "samples":
        logit = 6 * outer[12:24]  # client 1 of three with 12 rows each; sqrt(36)
    else:
        logit = np.array([a @ outer[:, b] for a, b in zip(rows["features"], rows["labels"], strict=True)])
    losses = softmax_losses(rows["features"] @ inner, rows["labels"])
    expected = np.mean(2 / (1 + np.exp(-logit)) * losses) + 0.05 * np.sum(inner**2)
    np.testing.assert_allclose(jax.jit(task.problem.inner_loss)(outer, inner, rows), expected, rtol=1e-5)
    plain = np.mean(softmax_losses(val["features"] @ inner, val["labels"]))
    np.testing.assert_allclose(jax.jit(task.problem.outer_loss)(outer, inner, val), plain, rtol=1e-5)


def test_draws_share_one_problem_and_differ_in_their_rows():
    first, second = (data_cleaning(IMAGES, seed, concentration=0.5, clients=3, train=20) for seed in (0, 1))
    assert first.problem == second.problem
    assert hash(first.problem) == hash(second.problem)
    assert not np.array_equal(first.data.train["labels"], second.data.train["labels"])
    same = data_cleaning(IMAGES, 1, concentration=0.5, clients=3, train=20)
    assert np.array_equal(second.data.train["features"], same.data.train["features"])
    assert np.array_equal(second.facts["corrupted"], same.facts["corrupted"])
    assert (first.facts["weights"], data_cleaning(IMAGES, lower_level="global").facts["weights"]) == (
        "trust",
        "samples",
    )


def test_a_shared_trust_model_finds_wrong_labels_with_local_lower_levels():
    task = data_cleaning(IMAGES, 1, concentration=1.0, noise=0.6)
    result = train(task, 0.5 / task.curvature, task.outer_step / 2, 60)
    before, after = settled(task), task.evaluate(result.outer, settled_inner(task, result.outer, result.inner))
    assert before["auc"] == 0.5
    assert after["auc"] > 0.9  # measured 0.97
    assert after["accuracy"] > before["accuracy"] + 0.15  # measured 0.52 -> 0.80
    weights = task.problem.inner_loss.weights(np.asarray(result.outer), task.data.train, np)
    corrupted = task.facts["corrupted"]
    assert weights[corrupted].mean() < 0.6 * weights[~corrupted].mean()


def test_one_weight_a_row_finds_wrong_labels_with_a_global_lower_level():
    task = data_cleaning(IMAGES, 1, lower_level="global", concentration=1.0, noise=0.6)
    result = train(task, 0.5 / task.curvature, task.outer_step, 100)
    before, after = settled(task), task.evaluate(result.outer, settled_inner(task, result.outer, result.inner))
    assert after["auc"] > 0.9
    assert after["accuracy"] > before["accuracy"] + 0.03
    # Every row is weighed by its own client alone, and every client weighed its rows.
    moved = np.asarray(result.outer).reshape(8, 100)
    assert (np.abs(moved).max(axis=1) > 0).all()


BAD = {
    "lower_level must be 'local' or 'global', not 'both'": {"lower_level": "both"},
    "weights must be 'samples' or 'trust', not 'rows'": {"weights": "rows"},
    "need 1500 rows, but there are 1258": {"clients": 10},
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_gets_a_sentence(sentence):
    with pytest.raises(ValueError, match=sentence):
        data_cleaning(IMAGES, **BAD[sentence])
