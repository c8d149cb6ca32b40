"""Data cleaning, hyper-representation and loss tuning: the losses against plain NumPy, and what is learned serves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.studies.bench import settled_inner
from fedbilevel.tasks import classification as tasks
from fedbilevel.tasks import data_cleaning, hyper_representation, loss_tuning
from fedbilevel.tasks.classification import LossParameters, auc, corrupt, represent
from tests.references.compare import refusals
from tests.tasks.common import IMAGES, train


def softmax_losses(logits, labels):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]


def rows_of(part, client):
    """One client's rows."""
    return {name: leaf[client] for name, leaf in part.items()}


def settled(task, outer=None, key=None):
    """Scores of an outer variable, the start's if left out, with the inner models trained to the end from the start."""
    start, inner = task.problem.init(key)
    outer = start if outer is None else outer
    return task.evaluate(outer, settled_inner(task, outer, np.broadcast_to(inner, (task.data.clients, *inner.shape))))


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
def test_losses_of_cleaning_are_what_the_page_says(weights):
    sizes = {"clients": 3, "train": 12, "validation": 5, "test": 7}
    task = data_cleaning(IMAGES, 3, weights=weights, lower_level="global", ridge=0.1, **sizes)
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
    assert first.facts["weights"] == "trust"
    assert data_cleaning(IMAGES, lower_level="global").facts["weights"] == "samples"


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


def test_losses_of_representation_are_what_the_page_says():
    task = hyper_representation(IMAGES, 2, hidden=(5, 3), clients=2, train=9, validation=6, test=4, ridge=0.2)
    outer, inner = task.problem.init(jax.random.key(4))
    assert [leaf.shape for leaf in outer] == [(65, 5), (5, 3)]
    assert inner.shape == (4, 10)
    assert not inner.any()
    assert 0.7 < float(outer[0].std() * 65**0.5) < 1.3
    inner = np.random.default_rng(0).standard_normal(inner.shape).astype(np.float32)
    batch = rows_of(task.data.train, 1)
    hidden = np.tanh(np.tanh(batch["features"] @ np.asarray(outer[0])) @ np.asarray(outer[1]))
    logits = np.concatenate([hidden, np.ones((9, 1))], axis=1) @ inner
    losses = softmax_losses(logits, batch["labels"])
    both = jax.jit(lambda *point: (task.problem.inner_loss(*point), task.problem.outer_loss(*point)))
    expected = (losses.mean() + 0.1 * (inner**2).sum(), losses.mean())
    np.testing.assert_allclose(both(outer, inner, batch), expected, rtol=1e-5)
    np.testing.assert_allclose(
        represent([np.asarray(leaf) for leaf in outer], batch["features"], np)[:, :-1], hidden, atol=1e-6
    )


def test_curvature_bounds_the_heads_hessian():
    task = hyper_representation(IMAGES, 2, hidden=(4,), clients=2, train=12, validation=6, test=4)
    outer, inner = task.problem.init(jax.random.key(0))
    outer = [10 * leaf for leaf in outer]  # saturated units: the largest representation there can be
    batch = rows_of(task.data.train, 0)
    hessian = jax.jit(lambda y: jax.hessian(lambda y: task.problem.inner_loss(outer, y, batch))(y))(inner)
    top = float(np.linalg.eigvalsh(np.asarray(hessian).reshape(50, 50)).max())
    assert 0.05 * task.curvature < top <= task.curvature  # at equal chances of ten classes a fifth at most


@pytest.mark.parametrize("lower_level", ["local", "global"])
def test_a_learned_representation_beats_a_random_one(lower_level):
    task = hyper_representation(IMAGES, 1, lower_level=lower_level, concentration=1.0)
    step = 1 / task.curvature
    result = train(task, (step, 2 * step), task.outer_step / 2, 100)
    key = jax.random.key(0)
    fixed, learned = settled(task, key=key)["accuracy"], settled(task, result.outer, key)["accuracy"]
    assert learned > fixed + 0.1
    assert learned > 0.85


def test_training_has_a_long_tail_and_validation_none():
    task = loss_tuning(IMAGES, 4, clients=4, train=60, validation_per_class=3, imbalance=0.05)
    order = task.facts["order"]
    counts = np.bincount(task.data.train["labels"].ravel(), minlength=10)[order]
    expected = 0.05 ** (np.arange(10) / 9)
    # Four standard errors of the most frequent class's count.
    shares = expected / expected.sum()
    np.testing.assert_allclose(counts, 240 * shares, atol=4 * np.sqrt(240 * 0.3 * 0.7))
    assert counts[0] > 8 * max(counts[-1], 1)
    for labels in task.data.val["labels"]:
        assert np.bincount(labels, minlength=10).tolist() == [3] * 10


def test_rows_held_out_of_a_long_tail_are_weighed_to_count_by_class():
    task = loss_tuning(IMAGES, 3, clients=5, train=40, validation=20, imbalance=0.05, shards=2)
    labels, weights = (task.data.val[name].ravel() for name in ("labels", "weights"))
    counts = np.bincount(np.concatenate([labels, task.data.train["labels"].ravel()]), minlength=10)
    expected = task.facts["frequency"] / task.facts["frequency"].sum()
    np.testing.assert_allclose(counts, 300 * expected, atol=1)
    totals = np.bincount(labels, weights, minlength=10)
    there = np.unique(labels)
    np.testing.assert_allclose(totals[there], labels.size / 10, rtol=1e-5)
    assert max(len(np.unique(own)) for own in task.data.train["labels"]) < 8  # clients differ


def test_losses_of_a_network_are_what_the_page_says():
    task = loss_tuning(
        IMAGES, 1, lower_level="global", clients=2, train=20, validation=12, hidden=(4,), ridge=0.3, scale=3.0
    )
    outer, inner = task.problem.init(jax.random.key(2))
    assert [leaf.shape for leaf in inner] == [(65, 4), (5, 10)]
    assert 2 < float(inner[0].std() * 65**0.5) < 4
    generator = np.random.default_rng(0)
    outer = LossParameters(*generator.standard_normal((3, 10)).astype(np.float32))
    inner = [generator.standard_normal(leaf.shape).astype(np.float32) for leaf in inner]
    batch, val = rows_of(task.data.train, 1), rows_of(task.data.val, 0)

    def plain(rows):
        hidden = np.concatenate([np.tanh(rows["features"] @ inner[0]), np.ones((len(rows["labels"]), 1))], axis=1)
        return hidden @ inner[1]

    logits = plain(batch) * np.exp(outer.log_scales) + outer.offsets
    weights = np.exp(outer.log_weights)[batch["labels"]]
    squares = sum((leaf**2).sum() for leaf in inner)
    expected = np.mean(weights * softmax_losses(logits, batch["labels"])) + 0.15 * squares
    np.testing.assert_allclose(jax.jit(task.problem.inner_loss)(outer, inner, batch), expected, rtol=1e-5)
    judged = np.mean(val["weights"] * softmax_losses(plain(val), val["labels"]))
    np.testing.assert_allclose(jax.jit(task.problem.outer_loss)(outer, inner, val), judged, rtol=1e-5)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), inner)
    assert 0 <= task.evaluate(outer, stacked)["balanced_accuracy"] <= 1


def test_losses_of_tuning_are_what_the_page_says():
    task = loss_tuning(IMAGES, 1, clients=2, train=20, validation_per_class=2, ridge=0.3)
    generator = np.random.default_rng(0)
    outer = LossParameters(*generator.standard_normal((3, 10)).astype(np.float32))
    inner = generator.standard_normal((65, 10)).astype(np.float32)
    batch = rows_of(task.data.train, 1)
    logits = (batch["features"] @ inner) * np.exp(outer.log_scales) + outer.offsets
    losses = softmax_losses(logits, batch["labels"])
    expected = np.mean(np.exp(outer.log_weights)[batch["labels"]] * losses) + 0.15 * (inner**2).sum()
    np.testing.assert_allclose(jax.jit(task.problem.inner_loss)(outer, inner, batch), expected, rtol=1e-5)


def test_projection_keeps_scales_and_weights_bounded_and_offsets_free():
    far = LossParameters(*(jnp.linspace(-5.0, 5.0, 10) for _ in range(3)))
    near = tasks.bounded(far)
    assert np.array_equal(near.offsets, far.offsets)
    for leaf in (near.log_scales, near.log_weights):
        assert np.array_equal(leaf, np.clip(far.offsets, -tasks.LARGEST, tasks.LARGEST))


def test_balanced_accuracy_is_the_mean_recall():
    decisions, labels = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 0, 0, 0, 2, 1])
    assert tasks.balanced_accuracy(decisions, labels) == pytest.approx((3 / 4 + 0 + 1) / 3)


@pytest.mark.parametrize(("lower_level", "margin"), [("local", 0.02), ("global", 0.05)])
def test_a_tuned_loss_serves_rare_classes_better(lower_level, margin):
    """Mean over two draws."""
    gains = []
    for seed in (0, 1):
        task = loss_tuning(IMAGES, seed, lower_level=lower_level)
        step = 1 / task.curvature
        steps = (step / 2, 1.5 * task.outer_step) if lower_level == "local" else (step, task.outer_step / 2)
        result = train(task, *steps, 100)
        plain, tuned = settled(task), settled(task, result.outer)
        gains.append({name: tuned[name] - plain[name] for name in plain})
    assert np.mean([gain["balanced_accuracy"] for gain in gains]) > margin, gains
    assert np.mean([gain["tail_accuracy"] for gain in gains]) > margin, gains


TASKS = (data_cleaning, hyper_representation, loss_tuning)
test_bad_input_gets_a_sentence = refusals(
    lambda given: given[0](IMAGES, **given[1]),
    ((data_cleaning, {"weights": "rows"}), "weights must be 'samples' or 'trust', not 'rows'"),
    ((data_cleaning, {"clients": 10}), "need 1500 rows, but there are 1258"),
    ((hyper_representation, {"hidden": ()}), "hidden needs at least one width"),
    ((hyper_representation, {"hidden": (2.5,)}), r"hidden must be a whole number, not 2\.5", TypeError),
    ((loss_tuning, {"imbalance": 0}), "imbalance=0 must lie in"),
    ((loss_tuning, {"shards": 2}), "shards takes a number of validation rows"),
    ((loss_tuning, {"shards": 2, "validation": 999}), "needs more than the 1258 there are"),
    ((hyper_representation, {"shards": 2, "concentration": 1.0}), "by shards or by a concentration, not by both"),
    ((hyper_representation, {"shards": 2, "train": 500}), "rows each in shards, fewer than 500"),
    ((hyper_representation, {"shards": 2000}), "need more than the 1258 rows"),
    ((loss_tuning, {"clients": 10, "validation_per_class": 30}), "ask for fewer"),
    *(((make, {"lower_level": "both"}), "must be 'local' or 'global', not 'both'") for make in TASKS),
)
