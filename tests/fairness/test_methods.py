"""All methods behind one function: what they reach, what they send, and that rearranging the rows changes nothing."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.simulation import advance
from fedbilevel.fairness import equal_opportunity_difference
from fedbilevel.fairness.formulation import Formulation, equalized_odds
from fedbilevel.fairness.methods import METHODS, Recipe, fit, group_counts, marks_padding
from fedbilevel.fairness.models import Model, probabilities
from fedbilevel.fairness.recipe import COMPARES_GROUPS
from fedbilevel.fairness.rows import joined, padded, training_part

MODEL = Model("logistic", 4)
FLOAT32 = 2e-5  # sums of float32 in another order, over some hundred steps


def unfair_rows(seed, n=240, positive_of_second=0.25):
    """Two groups; the second has fewer positives, and its positives look less positive."""
    rng = np.random.default_rng(seed)
    groups = (rng.random(n) < 0.4).astype(np.int32)
    labels = (rng.random(n) < np.where(groups == 1, positive_of_second, 0.5)).astype(np.float32)
    signal = labels * np.where(groups == 1, 1.0, 1.8) + 0.8 * rng.normal(size=n) - 0.9
    features = np.stack([signal, rng.normal(size=n), groups + 0.3 * rng.normal(size=n), np.ones(n)], axis=1)
    return {"features": features.astype(np.float32), "labels": labels, "groups": groups}


def clients(sizes=(240, 240)):
    pairs = [(unfair_rows(10 * i, n), unfair_rows(10 * i + 1, n)) for i, n in enumerate(sizes)]
    return fb.ClientData.from_clients(pairs)


def together(data):
    parts = joined(data)
    return {name: np.concatenate([part[name] for part in parts]) for name in ("features", "labels", "groups")}


def gap(fitted, rows, model=MODEL):
    decided = probabilities(model, fitted.params, rows["features"]).argmax(axis=1)
    return equal_opportunity_difference(rows["labels"], decided, sensitive_features=rows["groups"])


@pytest.fixture(scope="module")
def data():
    return clients()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_with_the_papers_defaults(method, data):
    recipe = Recipe(method, Formulation("paper"), steps=60, weight_steps=20, batch_size=32)
    fitted = fit(recipe, data, MODEL, 2, record_every=10)
    assert np.asarray(fitted.params).shape == (4,)
    assert np.isfinite(np.asarray(fitted.params)).all()
    stages = ["weights", "model"] if method.startswith("fedbio") else ["model"]
    assert list(dict.fromkeys(fitted.history["stage"])) == stages
    assert fitted.history["bytes_up"].is_monotonic_increasing
    if method.startswith("fedbio"):
        assert fitted.weights.shape == (2,)
        assert fitted.weights.mean() == pytest.approx(1)


def test_cells_close_the_gap_that_fedavg_leaves(data):
    rows = together(data)
    plain = fit(Recipe("fedavg", batch_size=None, steps=600, step=0.5), data, MODEL, 2)
    recipe = Recipe(
        "fedbio", Formulation(strength=20.0), batch_size=None, steps=600, step=0.5, weight_steps=600, outer_step=0.3
    )
    fair = fit(recipe, data, MODEL, 2)
    assert gap(plain, rows) > 0.2
    assert gap(fair, rows) < 0.4 * gap(plain, rows)
    assert fair.weights.shape == (4,)
    # The positives of the disadvantaged group weigh more than its negatives.
    assert fair.weights[3] > fair.weights[2]


def test_stage_two_is_fedavg_on_weighted_rows(data):
    """One client and whole batches: gradient descent in NumPy with the learned weights gives the same parameters."""
    alone = fb.ClientData.from_clients([(unfair_rows(0), unfair_rows(1))])
    recipe = Recipe(
        "fedbio", Formulation(ridge=0.01), batch_size=None, steps=40, weight_steps=10, step=0.2, local_steps=2
    )
    fitted = fit(recipe, alone, MODEL, 2)
    rows = joined(alone)[0]
    cell = rows["groups"] * 2 + rows["labels"].astype(int)
    weight = fitted.weights[cell]
    params = np.zeros(4)
    for _ in range(40):
        chance = 1 / (1 + np.exp(-rows["features"] @ params))
        params -= 0.2 * (rows["features"].T @ (weight * (chance - rows["labels"])) / len(weight) + 0.01 * params)
    np.testing.assert_allclose(np.asarray(fitted.params), params, atol=FLOAT32)


def test_train_on_train_leaves_validation_rows_out():
    data = clients((50, 60))
    kept, everything = training_part(data, "train"), training_part(data, "all")
    assert (kept.train_sizes.tolist(), everything.train_sizes.tolist()) == ([50, 60], [100, 120])
    for client, rows in enumerate(joined(data)):
        size = len(rows["labels"])
        np.testing.assert_array_equal(everything.train["features"][client, :size], rows["features"])
        np.testing.assert_array_equal(kept.train["features"][client, : size // 2], rows["features"][: size // 2])


def test_padding_changes_nothing():
    data = clients((60, 90))
    recipe = Recipe("fedbio", Formulation("paper"), steps=20, weight_steps=10, batch_size=16)
    plain, longer = (np.asarray(fit(recipe, data, MODEL, 2, capacity=size).params) for size in (None, 256))
    np.testing.assert_array_equal(plain, longer)


def test_whole_validation_sets_of_unequal_sizes_share_one_program():
    """Their padding is marked and left out; a metric that cannot know of it gets whole sets, size by size."""
    options = {"steps": 10, "weight_steps": 40, "batch_size": 16}
    named, own = (Recipe("fedbio", Formulation(metric=one), **options) for one in ("equalized_odds", equalized_odds))
    first, other = (padded(clients(sizes), 128, 128) for sizes in ((60, 90), (70, 85)))
    assert marks_padding(named, first)
    assert not marks_padding(own, first)
    found = fit(named, first, MODEL, 2, capacity=256)
    wanted = fit(own, first, MODEL, 2, capacity=256)
    np.testing.assert_allclose(found.outer, wanted.outer, atol=FLOAT32)
    assert np.abs(found.outer).max() > 0.05
    programs = advance._cache_size()
    fit(named, other, MODEL, 2, capacity=256)
    assert advance._cache_size() == programs


def test_unit_row_weights_change_nothing():
    data = clients((80,))
    weighted = fb.ClientData(
        {**data.train, "weights": np.ones((1, 80), np.float32)}, {**data.val, "weights": np.ones((1, 80), np.float32)}
    )
    recipe = Recipe("fedbio", batch_size=None, steps=20, weight_steps=10)
    both = [np.asarray(fit(recipe, one, MODEL, 2).params) for one in (data, weighted)]
    np.testing.assert_allclose(*both, atol=FLOAT32)


@pytest.mark.parametrize("kind", ["logistic", "mlp"])
def test_three_classes(kind):
    rng = np.random.default_rng(3)
    labels = np.tile([0, 1, 2], 60)
    features = np.concatenate([np.eye(3)[labels] + 0.3 * rng.normal(size=(180, 3)), np.ones((180, 1))], axis=1)
    rows = {
        "features": features.astype(np.float32), "labels": labels.astype(np.float32),
        "groups": rng.integers(2, size=180).astype(np.int32),
    }  # fmt: skip
    model = Model(kind, 4, 3, hidden=5)
    recipe = Recipe("fedbio", steps=300, weight_steps=20, step=0.5, batch_size=64, train_on="train")
    fitted = fit(recipe, fb.ClientData.from_clients([(rows, rows)]), model, 2)
    assert fitted.weights.shape == (6,)
    assert (probabilities(model, fitted.params, rows["features"]).argmax(axis=1) == labels).mean() > 0.9


def test_fedminmax_weighs_the_group_with_the_larger_loss():
    data = clients()
    fitted = fit(Recipe("fedminmax", steps=150, batch_size=None), data, MODEL, 2)
    rows = together(data)
    chance = probabilities(MODEL, fitted.params, rows["features"])[:, 1]
    losses = -np.log(np.where(rows["labels"] == 1, chance, 1 - chance))
    risk = [losses[rows["groups"] == group].mean() for group in range(2)]
    assert (fitted.weights[0] > fitted.weights[1]) == (risk[0] > risk[1])
    shares = group_counts(training_part(data, "all"), 2) / len(losses)
    assert fitted.weights @ shares == pytest.approx(1, abs=1e-5)


def test_fedfb_weighs_the_positives_of_the_group_with_the_larger_loss(data):
    fitted = fit(Recipe("fedfb", steps=300, batch_size=None, alpha=0.002), data, MODEL, 2)
    plain = fit(Recipe("fedavg", steps=300, batch_size=None), data, MODEL, 2)
    assert fitted.weights[1] > 1.05 > fitted.weights[0]
    assert gap(fitted, together(data)) < gap(plain, together(data))


def test_bytes_go_on_over_the_stages(data):
    recipe = Recipe("fedbioacc", Formulation("paper"), steps=20, weight_steps=10, batch_size=16)
    history = fit(recipe, data, MODEL, 2, record_every=1).history
    first, second = (history[history["stage"] == stage] for stage in ("weights", "model"))
    # Two vectors of two weights up per client and round, then one model of four numbers; all float32.
    assert first["bytes_up"].iloc[-1] == 2 * 2 * (2 * 2 * 4)
    assert second["bytes_up"].iloc[-1] - first["bytes_up"].iloc[-1] == 4 * 2 * (4 * 4)


def test_rounds_follow_the_method():
    assert Recipe("fedavg").rounds == 400
    assert Recipe("fedminmax").rounds == 2000
    assert Recipe("fcfl").rounds == 1020
    assert (Recipe("fcfl", steps=100).rounds, Recipe("fedbio", steps=11).rounds) == (100, 3)
    assert (Recipe("fedbio").weight_rounds, Recipe("fedbio", Formulation("paper")).weight_rounds) == (200, 400)


def test_slower_divides_the_inner_and_the_series_step():
    recipe = Recipe("fedbio").slower(4.0)
    assert (recipe.inner_step, recipe.series_step) == (0.04, 0.125)
    assert Recipe("fedavg").slower(4.0) == Recipe("fedavg")


def test_padded_refuses_to_cut(data):
    with pytest.raises(ValueError, match="capacity=5 is below"):
        padded(data, 5)
    assert jax.tree.leaves(padded(data, 300, 310).val)[0].shape[1] == 310


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "fedsgd"}, "method must be one of"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"train_on": "test"}, "train_on must be"),
        ({"client_weights": "rows"}, "client_weights must be"),
        ({"formulation": "cells"}, "formulation must be a Formulation"),
    ],
)
def test_bad_recipes_are_one_sentence(change, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Recipe(**change)


def test_bad_data_is_one_sentence(data):
    bare = fb.ClientData(data.train)
    with pytest.raises(ValueError, match="needs validation rows"):
        fit(Recipe("fedbio"), bare, MODEL, 2)
    negative = fb.ClientData({**data.train, "labels": np.where(data.train["groups"] == 1, 0, data.train["labels"])})
    with pytest.raises(ValueError, match="positive rows, but group number 1 has none"):
        fit(Recipe("fedfb"), negative, MODEL, 2)


@pytest.mark.parametrize("method", COMPARES_GROUPS)
def test_needs_of_methods_that_compare_groups_are_one_sentence(method, data):
    with pytest.raises(ValueError, match=f"{method} is defined for two classes, not 3"):
        fit(Recipe(method), data, Model("logistic", 4, 3), 2)
    with pytest.raises(ValueError, match=f"{method} compares groups, but there is only one"):
        fit(Recipe(method), data, MODEL, 1)
    weighted = fb.ClientData({**data.train, "weights": data.train["labels"]}, data.val)
    with pytest.raises(ValueError, match=f"{method} takes no weights of single rows"):
        fit(Recipe(method), weighted, MODEL, 2)
