"""Sources of rows weighed with a network inside; whether an inner loss is convex."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.signal import correlate

import fedbilevel as fb
from fedbilevel.tasks import Convolutional, Images, source_weighting
from tests.references.compare import identical, refusals
from tests.tasks.common import IMAGES

SMALL = {"clients": 3, "train": 30, "validation": 12, "test": 12, "spoiled": 1, "network": Convolutional(8, channels=2)}


def test_the_network_is_what_it_says():
    network = Convolutional(8, channels=2)
    layers = {name: np.asarray(leaf) + 0.1 for name, leaf in network.init(jax.random.key(0)).items()}
    features = np.random.default_rng(0).normal(size=(3, 65)).astype(np.float32)

    def layer(pictures, filters, bias):
        """[height, width, channels] -> the same, by scipy."""
        kernels = filters.reshape(3, 3, pictures.shape[-1], -1)
        found = [
            sum(correlate(pictures[..., i], kernels[..., i, o], mode="same") for i in range(pictures.shape[-1]))
            for o in range(kernels.shape[-1])
        ]
        hidden = np.tanh(np.stack(found, axis=-1) + bias)
        height, width = (size // 2 for size in hidden.shape[:2])
        return hidden.reshape(height, 2, width, 2, -1).mean(axis=(1, 3))

    for row, logits in zip(features, network(layers, jnp.asarray(features)), strict=True):
        hidden = row[:64].reshape(8, 8, 1)
        for name in ("first", "second"):
            hidden = layer(hidden, layers[name], layers[f"{name}_bias"])
        np.testing.assert_allclose(logits, hidden.ravel() @ layers["last"] + layers["last_bias"], atol=1e-5)


@pytest.mark.parametrize("level", ["local", "global"])
def test_sources_are_dealt_and_weighed(level):
    task = source_weighting(IMAGES, 1, lower_level=level, **SMALL)
    source, bad = task.data.train["source"], task.facts["spoiled"]
    wanted = np.repeat(np.arange(3), 30) if level == "global" else np.tile(np.arange(30) % 3, 3)
    np.testing.assert_array_equal(source.ravel(), wanted)
    clean = source_weighting(IMAGES, 1, lower_level=level, **SMALL | {"noise": 0.0})
    wrong = task.data.train["labels"] != clean.data.train["labels"]
    assert not wrong[~bad[source]].any()
    assert wrong[bad[source]].mean() > 0.7
    x, y = task.problem.init(jax.random.key(0))
    batch = {name: leaf[0] for name, leaf in task.data.train.items()}
    loss = float(task.problem.inner_loss(x, y, batch))
    only = {name: leaf[source[0] == 0] for name, leaf in batch.items()}
    first = float(task.problem.inner_loss(x.at[0].set(50.0), y, batch))  # all the weight on source 0
    ridge = 0.0005 * sum(float(jnp.sum(leaf**2)) for leaf in y.values())
    share = 3 * len(only["labels"]) / 30
    assert first == pytest.approx(share * (float(task.problem.outer_loss(x, y, only))) + ridge, rel=1e-4)
    assert loss == pytest.approx(float(task.problem.outer_loss(x, y, batch)) + ridge, rel=1e-4)
    assert task.evaluate(-bad.astype(float), jax.tree.map(lambda leaf: np.stack([leaf] * 3), y))["auc"] == 1.0


def test_a_stopped_run_of_a_network_goes_on_to_the_same_bits(tmp_path):
    """Minibatches, a tree inside and steps that set themselves; on pictures of MNIST's shape as well."""
    drawn = np.random.default_rng(0)
    pixels, labels = drawn.random((200, 196), np.float32), np.arange(200, dtype=np.int32) % 10
    images = Images("mnist", pixels, labels, pixels, labels)
    task = source_weighting(images, lower_level="global", **SMALL | {"network": Convolutional(14, channels=2)})
    algorithm, options = fb.meha(task.problem, batch_size=4, local_steps=2), {"record_every": None}
    straight = fb.simulate(algorithm, task.data, 4, **options)
    fb.simulate(algorithm, task.data, 2, checkpoint=tmp_path / "run.npz", **options)
    resumed = fb.simulate(algorithm, task.data, 4, checkpoint=tmp_path / "run.npz", **options)
    identical((resumed.outer, resumed.server, resumed.local), (straight.outer, straight.server, straight.local))


def bowl(sign, level="local"):
    """Curvatures 1, 3 and ``sign`` times 2 at every client but the first, where all are positive."""
    problem = fb.BilevelProblem(
        lambda x, y, batch: 0.5 * jnp.sum(jnp.mean(batch, 0) * y**2) + 0 * jnp.sum(x),
        lambda x, y, batch: jnp.sum(y**2),
        lambda key: (jnp.zeros(1), jnp.zeros(3)),
        lower_level=level,
    )
    rows = np.array([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0 * sign]])[:, None]
    return problem, fb.ClientData(rows, rows)


def test_curvature_of_the_lower_level():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fb.lower_level(*bowl(1.0))
        assert fb.lower_level(*bowl(-0.5, "global")).smallest == pytest.approx(0.5, rel=1e-3), (
            "of the mean: (2 - 1) / 2"
        )
    assert (found.smallest, found.largest) == (pytest.approx(1.0, rel=1e-3), pytest.approx(3.0, rel=1e-3))
    assert found.condition == pytest.approx(3.0, rel=1e-3)
    with pytest.warns(UserWarning, match="client 1's inner loss has curvature -2 in some direction"):
        found = fb.lower_level(*bowl(-1.0))
    assert (found.client, found.condition) == (1, float("inf"))


test_bad_input_gets_a_sentence = refusals(
    lambda given: source_weighting(IMAGES, **given) if isinstance(given, dict) else given(),
    ({"spoiled": 6}, "spoiled=6 must leave at least one of the 6 sources clean"),
    ({"spoiled": 0}, "spoiled must be at least 1, not 0"),
    (lambda: fb.lower_level(*bowl(1.0), points=0), "points must be at least 1, not 0"),
    (lambda: fb.lower_level(*bowl(1.0), spread=-1.0), "spread must be a number of at least 0, not -1"),
)
