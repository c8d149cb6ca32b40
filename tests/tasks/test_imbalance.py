"""Loss tuning: the long tail, the parametric loss against plain NumPy, and balanced accuracy gained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.tasks import loss_tuning
from fedbilevel.tasks.imbalance import LARGEST, LossParameters, bounded
from fedbilevel.tasks.task import balanced_accuracy
from tests.tasks.common import IMAGES, rows_of, settled, softmax_losses, train


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


def test_losses_are_what_the_page_says():
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
    near = bounded(far)
    assert np.array_equal(near.offsets, far.offsets)
    for leaf in (near.log_scales, near.log_weights):
        assert np.array_equal(leaf, np.clip(far.offsets, -LARGEST, LARGEST))


def test_balanced_accuracy_is_the_mean_recall():
    decisions, labels = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 0, 0, 0, 2, 1])
    assert balanced_accuracy(decisions, labels) == pytest.approx((3 / 4 + 0 + 1) / 3)


@pytest.mark.parametrize(("lower_level", "margin"), [("local", 0.02), ("global", 0.05)])
def test_a_tuned_loss_serves_rare_classes_better(lower_level, margin):
    """Mean over two draws."""
    gains = []
    for seed in (0, 1):
        task = loss_tuning(IMAGES, seed, lower_level=lower_level)
        step = 1 / task.curvature
        if lower_level == "local":
            result = train(task, step / 2, 1.5 * task.outer_step, 100)
        else:
            result = train(task, step, task.outer_step / 2, 100)
        plain, tuned = settled(task), settled(task, result.outer)
        gains.append({name: tuned[name] - plain[name] for name in plain})
    assert np.mean([gain["balanced_accuracy"] for gain in gains]) > margin, gains
    assert np.mean([gain["tail_accuracy"] for gain in gains]) > margin, gains


BAD = {
    "imbalance=0 must lie in": {"imbalance": 0},
    "ask for fewer": {"clients": 10, "validation_per_class": 30},
    "lower_level must be": {"lower_level": "none"},
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_gets_a_sentence(sentence):
    with pytest.raises(ValueError, match=sentence):
        loss_tuning(IMAGES, **BAD[sentence])
