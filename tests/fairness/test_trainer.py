"""Many fits of one recipe equal single fits bit by bit, and the kernel for whole sets equals automatic differentiation."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import kernels
from fedbilevel.fairness.fcfl import fcfl
from fedbilevel.fairness.fedminmax import fedminmax
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.methods import fit
from fedbilevel.fairness.models import LinearScores, Model
from fedbilevel.fairness.recipe import METHODS, Recipe
from fedbilevel.fairness.trainer import Federation, Trainer
from tests.references.compare import close, identical

GROUPS, COLUMNS, CAPACITY = 3, 6, 60


def client(rng, rows):
    features = np.concatenate([rng.normal(size=(rows, COLUMNS - 1)), np.ones((rows, 1))], axis=1).astype(np.float32)
    labels = (features[:, 0] + rng.normal(size=rows) > 0).astype(np.float32)
    return {"features": features, "labels": labels, "groups": np.resize(np.arange(GROUPS, dtype=np.int32), rows)}


def dealt(seed, sizes=((40, 9), (31, 12), (25, 9))):
    """The same clients for a single fit, and padded for a trainer: training rows, then validation rows."""
    rng = np.random.default_rng(seed)
    pairs = [(client(rng, train), client(rng, val)) for train, val in sizes]

    def padded(parts, capacity):
        def longer(leaf):
            return np.pad(leaf, [(0, capacity - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)])

        return {name: np.stack([longer(part[name]) for part in parts]) for name in parts[0]}

    whole = [{name: np.concatenate([train[name], val[name]]) for name in train} for train, val in pairs]
    train_sizes, val_sizes = (np.array([len(pair[k]["labels"]) for pair in pairs], np.int32) for k in (0, 1))
    federation = Federation(
        padded(whole, CAPACITY),
        padded([val for _, val in pairs], 16),
        train_sizes + val_sizes,
        train_sizes,
        val_sizes,
        GROUPS,
    )
    return fb.ClientData.from_clients(pairs), federation


@pytest.mark.parametrize("method", METHODS)
def test_equals_single_fits(method):
    recipe = Recipe(
        method, Formulation("paper"), steps=30, weight_steps=20, batch_size=8, outer_batch_size=6, terms=2, step=0.2
    )
    model = Model("logistic", COLUMNS)
    trainer = Trainer(recipe, dealt(0)[1], model)
    trainer.compile()
    for seed, split in ((0, 1), (3, 0)):
        data, federation = dealt(split)
        course = trainer.run(federation, seed)
        wanted = fit(recipe, data, model, GROUPS, seed=seed, capacity=CAPACITY)
        identical(course.params, np.asarray(wanted.params))
        assert (course.weights is None) == (wanted.weights is None)
        if course.weights is not None:
            identical(course.weights, wanted.weights)
        assert [stop.round for stop in course.stops if stop.stage == "model"][-1] == recipe.rounds
        assert not course.diverged
    if method not in ("fedbio", "fedminmax"):
        return
    # Costs, and another learning rate: the inner step of a bilevel method grows with it.
    inner = recipe.constants()["inner_step"] / 4 if method == "fedbio" else None
    slow = trainer.run(federation, 3, rate=0.05)
    wanted = fit(replace(recipe, step=0.05, inner_step=inner), data, model, GROUPS, seed=3, record_every=10)
    np.testing.assert_allclose(slow.params, wanted.params, rtol=0, atol=1e-5)
    last, row = slow.stops[-1], wanted.history.iloc[-1]
    assert (last.bytes_up, last.bytes_down) == (row["bytes_up"], row["bytes_down"])
    calls = ["gradient_calls", "hessian_vector_calls", "cross_calls"]
    assert last.calls == tuple(map(int, wanted.history.groupby("stage")[calls].max().sum()))


@pytest.mark.parametrize("make", [fcfl, fedminmax], ids=["fcfl", "fedminmax"])
def test_the_kernel_equals_automatic_differentiation(make):
    """On clients of unequal sizes; those of equal sizes run against the naive loops of either method."""
    if kernels.why_not() is not None:
        pytest.skip(kernels.why_not())
    data, _ = dealt(5)
    rows = jax.tree.map(lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf, data.train)
    train = fb.ClientData(rows, None, data.train_sizes)
    start = np.random.default_rng(1).normal(size=COLUMNS)
    counts = np.array([40.0, 30.0, 26.0])
    own = {"groups": GROUPS, "stage_one": 6} if make is fcfl else {"group_counts": counts, "batch_size": 8}
    found = []
    for scores in (LinearScores(), lambda params, features: features @ params):
        algorithm = make(scores, start, ridge=0.1, **own)
        found.append(fb.simulate(algorithm, train, 12, weights="samples", record_every=None))
    close(found[0].outer, found[1].outer)
    assert np.abs(found[1].outer - start).max() > 0.01
    if make is fedminmax:
        close(found[0].server.group_weights, found[1].server.group_weights)


def test_divergence_is_told():
    recipe = Recipe("fedavg", Formulation("paper", ridge=50.0), steps=2000, batch_size=8, step=1.0)
    _, federation = dealt(0)
    assert Trainer(recipe, federation, Model("logistic", COLUMNS)).run(federation, 0).diverged
