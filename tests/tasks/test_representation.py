"""Hyper-representation: the network against plain NumPy, and a learned one against a random one."""

import jax
import numpy as np
import pytest

from fedbilevel.tasks import hyper_representation
from fedbilevel.tasks.representation import represent
from tests.tasks.common import IMAGES, rows_of, settled, softmax_losses, train


def test_losses_are_what_the_page_says():
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


def test_bad_input_gets_a_sentence():
    with pytest.raises(ValueError, match="hidden needs at least one width"):
        hyper_representation(IMAGES, hidden=())
    with pytest.raises(TypeError, match=r"hidden must be a whole number, not 2\.5"):
        hyper_representation(IMAGES, hidden=(2.5,))
    with pytest.raises(ValueError, match="lower_level must be"):
        hyper_representation(IMAGES, lower_level="none")
