"""A fair fit by every method: what it reaches and sends, that rearranging rows changes nothing, many fits of one program."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from scipy.optimize import minimize

import fedbilevel as fb
from fedbilevel import kernels
from fedbilevel.engines.simulation import advance
from fedbilevel.fairness import equal_opportunity_difference
from fedbilevel.fairness.fcfl import fcfl
from fedbilevel.fairness.fedminmax import fedminmax
from fedbilevel.fairness.formulation import Formulation, equalized_odds
from fedbilevel.fairness.methods import COMPARES_GROUPS, METHODS, Recipe
from fedbilevel.fairness.models import LinearScores, Model, numbers, probabilities
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.trainer import Clients, Trainer, joined, marks_padding, padded, training_part
from fedbilevel.fairness.trainer import fit as run
from tests.references.compare import close, identical

MODEL = Model("logistic", 4)
CELLS = ("fedbio", "fedbioacc", "fedpath")
FLOAT32 = 2e-5  # sums of float32 in another order, over some hundred steps


def unfair_rows(seed, n=240, positive_of_second=0.25):
    """Two groups; the second has fewer positives, and its positives look less positive."""
    rng = np.random.default_rng(seed)
    groups = (rng.random(n) < 0.4).astype(np.int32)
    labels = (rng.random(n) < np.where(groups == 1, positive_of_second, 0.5)).astype(np.float32)
    signal = labels * np.where(groups == 1, 1.0, 1.8) + 0.8 * rng.normal(size=n) - 0.9
    features = np.stack([signal, rng.normal(size=n), groups + 0.3 * rng.normal(size=n), np.ones(n)], axis=1)
    return {"features": features.astype(np.float32), "labels": labels, "groups": groups}


def clients(sizes=(240, 240), held_out=None, seed=0):
    pairs = zip(sizes, held_out or sizes, strict=True)
    seeds = range(seed, seed + 10 * len(sizes), 10)
    return fb.ClientData.from_clients(
        [(unfair_rows(one, n), unfair_rows(one + 1, other)) for one, (n, other) in zip(seeds, pairs, strict=True)]
    )


def fit(recipe, data, model=MODEL, groups=2, **options):
    return run(FairProgram(recipe, model, groups, row_weights="weights" in data.train), data, **options)


def together(data):
    parts = joined(data)
    return {name: np.concatenate([part[name] for part in parts]) for name in ("features", "labels", "groups")}


def gap(fitted, rows, model=MODEL):
    decided = probabilities(model, fitted.params, rows["features"]).argmax(axis=1)
    return equal_opportunity_difference(rows["labels"], decided, sensitive_features=rows["groups"])


@pytest.fixture(scope="module")
def data():
    return clients()


@pytest.mark.parametrize("method", [method for method in METHODS if method != "fedpath"])
def test_every_method_runs_with_the_papers_defaults(method, data):
    recipe = Recipe(method, Formulation("paper"), steps=60, weight_steps=20, batch_size=32)
    fitted = fit(recipe, data, record_every=10)
    assert np.asarray(fitted.params).shape == (4,)
    assert np.isfinite(np.asarray(fitted.params)).all()
    stages = ["weights", "model"] if method.startswith("fedbio") else ["model"]
    assert list(dict.fromkeys(fitted.history["stage"])) == stages
    assert fitted.history["bytes_up"].is_monotonic_increasing
    if method.startswith("fedbio"):
        assert fitted.weights.shape == (2,)
        assert fitted.weights.mean() == pytest.approx(1)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_tells_three_classes_apart(method, data):
    def middle(rows):
        """Rows of either label with a large second feature are of a third class."""
        return {**rows, "labels": np.where(rows["features"][..., 1] > 0.8, np.float32(2), rows["labels"])}

    three = fb.ClientData(middle(data.train), middle(data.val), data.train_sizes, data.val_sizes)
    model, rows = Model("logistic", 4, 3), together(three)
    fitted = fit(Recipe(method, steps=200, weight_steps=20, batch_size=32, step=0.5), three, model)
    decided = probabilities(model, fitted.params, rows["features"]).argmax(axis=1)
    assert np.mean(decided == rows["labels"]) > np.mean(rows["labels"] == 0) + 0.15
    assert set(decided) == {0, 1, 2}
    cells = {"fedminmax": 2, "fedfb": 6, "fedbio": 6, "fedbioacc": 6, "fedpath": 6}
    assert np.size(fitted.weights) == cells.get(method, 1)
    if method == "fedfb":  # of every class the shares of its rows in the groups, moved on the simplex
        counts = np.array([np.bincount(rows["groups"][rows["labels"] == c]) for c in range(3)])
        mean = (fitted.weights.reshape(2, 3).T * counts / counts.sum(axis=1, keepdims=True)).sum(axis=1)
        np.testing.assert_allclose(mean, 1, atol=1e-5)
        assert np.ptp(fitted.weights) > 0.01


def numbers_to_predict(sizes=(240, 180), seed=0):
    """Clients; the second group has lower numbers than its features say, and a feature that hints at the group."""
    made = []
    for number, size in enumerate(sizes):
        rows = unfair_rows(seed + number, size)
        rng = np.random.default_rng(seed + 10 * number)
        labels = rows["features"] @ np.array([0.6, -0.4, 0.0, 0.1]) - 0.8 * rows["groups"] + 0.3 * rng.normal(size=size)
        made.append(({**rows, "labels": labels.astype(np.float32)},) * 2)
    return fb.ClientData.from_clients(made)


def mean_errors(fitted, rows, model):
    error = numbers(model, fitted.params, rows["features"]) - rows["labels"]
    return np.array([error[rows["groups"] == group].mean() for group in range(2)])


def test_fedavg_on_numbers_is_least_squares():
    """One client and whole batches, to the end: the closed form of ridge regression."""
    data = numbers_to_predict((240,))
    form = Formulation(metric="mean_error", ridge=0.05)
    recipe = Recipe("fedavg", form, steps=1500, batch_size=None, step=0.5, train_on="train")
    fitted = fit(recipe, data, Model("linear", 4, 1, loss="squared"))
    rows = joined(fb.ClientData(data.train, None, data.train_sizes))[0]
    x = rows["features"].astype(float)
    wanted = np.linalg.solve(x.T @ x / len(x) + 0.05 * np.eye(4), x.T @ rows["labels"] / len(x))
    np.testing.assert_allclose(fitted.params, wanted, atol=1e-4)


def exact_gap(rows, strength, ridge=1e-3):
    """The gap of mean errors at the solution of "cells" on pooled rows: Huber's loss, the inner problem by reweighted least
    squares (which never raises it) and the weights by BFGS with differences, written out in float64."""
    x, t, group = (np.asarray(rows[name], np.float64) for name in ("features", "labels", "groups"))
    members, n = [group == g for g in range(2)], len(t)
    cell = (2 * group + (t > 0)).astype(int)

    def solved(outer):
        weights, y = (4 * np.exp(outer) / np.exp(outer).sum())[cell], np.zeros(x.shape[1])
        for _ in range(200):
            bends = weights / np.maximum(1, np.abs(x @ y - t))
            y = np.linalg.solve((x * bends[:, None]).T @ x / n + ridge * np.eye(len(y)), x.T @ (bends * t) / n)
        return y

    def value(outer):
        error = x @ solved(outer) - t
        size = np.abs(error)
        loss = np.mean(np.where(size <= 1, error**2 / 2, size - 0.5))
        (one, two), noise = (
            [measure(error[own]) for own in members] for measure in (np.mean, lambda part: part.var() / (len(part) - 1))
        )
        return loss + strength * ((one - two) ** 2 - sum(noise))

    error = x @ solved(minimize(value, np.zeros(4), method="BFGS").x) - t
    return abs(error[members[0]].mean() - error[members[1]].mean())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_predicts_numbers(method):
    data, model = numbers_to_predict(), Model("linear", 4, 1, loss="huber")
    rows = {name: np.concatenate([part[name] for part in joined(fb.ClientData(data.train, None, data.train_sizes))])
            for name in ("features", "labels", "groups")}  # fmt: skip
    form = Formulation(metric="mean_error", strength=20.0)
    shared = {"steps": 300, "weight_steps": 150, "batch_size": 64, "step": 0.3, "penalty": 1.0, "train_on": "train"}
    fitted = fit(Recipe(method, form, **shared), data, model)
    predicted = numbers(model, fitted.params, rows["features"])
    assert np.mean((predicted - rows["labels"]) ** 2) < 0.75 * np.var(rows["labels"])
    gap = np.ptp(mean_errors(fitted, rows, model))
    if method == "fedavg":
        assert gap > 0.2, "there must be a gap to close"
    elif method == "fedpath":  # weights of cells bend a line that fits well only so far
        assert abs(gap - exact_gap(rows, 20.0)) < 2e-3
    elif method in ("fedreg", "fcfl", *CELLS):
        assert gap < {"fedbio": 0.19, "fedbioacc": 0.19}.get(method, 0.1)
    if method in CELLS:
        below, above = fitted.weights.reshape(2, 2).T
        assert below[1] / above[1] > below[0] / above[0], "low numbers of the group that is overestimated weigh more"
    if method == "fedfb":  # what it evens out are the losses, here of a line that fits one group worse
        of = np.array([np.mean(model.losses(predicted, rows["labels"])[rows["groups"] == group]) for group in range(2)])
        plain = fit(Recipe("fedavg", form, **shared), data, model)
        each = model.losses(numbers(model, plain.params, rows["features"]), rows["labels"])
        assert np.ptp(of) < 0.5 * np.ptp([np.mean(each[rows["groups"] == group]) for group in range(2)])


def test_what_does_not_suit_numbers_is_one_sentence(data):
    number, form = Model("linear", 4, 1, loss="squared"), Formulation(metric="mean_error")
    for recipe, model, words in (
        (
            Recipe("fedavg"),
            number,
            "metric='equal_opportunity' does not suit a number; use mean_prediction or mean_error",
        ),
        (Recipe("fedbio", form), MODEL, "metric='mean_error' does not suit classes; use equal_opportunity or"),
    ):
        with pytest.raises(ValueError, match=words):
            FairProgram(recipe, model, 2)


def test_cells_close_the_gap_that_fedavg_leaves(data):
    rows = together(data)
    plain = fit(Recipe("fedavg", batch_size=None, steps=600, step=0.5), data)
    recipe = Recipe(
        "fedbio", Formulation(strength=20.0), batch_size=None, steps=600, step=0.5, weight_steps=600, outer_step=0.3
    )
    fair = fit(recipe, data)
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
    fitted = fit(recipe, alone)
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
    plain, longer = (np.asarray(fit(recipe, data, capacity=size).params) for size in (None, 256))
    np.testing.assert_array_equal(plain, longer)


def test_whole_validation_sets_of_unequal_sizes_share_one_program():
    """Their padding is marked and left out; a metric that cannot know of it gets whole sets, size by size."""
    options = {"steps": 10, "weight_steps": 40, "batch_size": 16}
    named, own = (Recipe("fedbio", Formulation(metric=one), **options) for one in ("equalized_odds", equalized_odds))
    first, other = (padded(clients(sizes), 128, 128) for sizes in ((60, 90), (70, 85)))
    for recipe in (named, own):
        program = FairProgram(recipe, MODEL, 2)
        assert marks_padding(program.settled(Clients(first, first).agreed(program))) == (recipe is named)
    found = fit(named, first, capacity=256)
    wanted = fit(own, first, capacity=256)
    np.testing.assert_allclose(found.answers[0], wanted.answers[0], atol=FLOAT32)
    assert np.abs(found.answers[0]).max() > 0.05
    programs = advance._cache_size()
    fit(named, other, capacity=256)
    assert advance._cache_size() == programs


def test_unit_row_weights_change_nothing():
    data = clients((80,))
    weighted = fb.ClientData(
        {**data.train, "weights": np.ones((1, 80), np.float32)}, {**data.val, "weights": np.ones((1, 80), np.float32)}
    )
    recipe = Recipe("fedbio", batch_size=None, steps=20, weight_steps=10)
    both = [np.asarray(fit(recipe, one).params) for one in (data, weighted)]
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
    fitted = fit(recipe, fb.ClientData.from_clients([(rows, rows)]), model)
    assert fitted.weights.shape == (6,)
    assert (probabilities(model, fitted.params, rows["features"]).argmax(axis=1) == labels).mean() > 0.9


def test_fedminmax_weighs_the_group_with_the_larger_loss():
    data = clients()
    fitted = fit(Recipe("fedminmax", steps=150, batch_size=None), data)
    rows = together(data)
    chance = probabilities(MODEL, fitted.params, rows["features"])[:, 1]
    losses = -np.log(np.where(rows["labels"] == 1, chance, 1 - chance))
    risk = [losses[rows["groups"] == group].mean() for group in range(2)]
    assert (fitted.weights[0] > fitted.weights[1]) == (risk[0] > risk[1])
    shares = np.bincount(rows["groups"]) / len(losses)
    assert fitted.weights @ shares == pytest.approx(1, abs=1e-5)


def test_fedfb_weighs_the_positives_of_the_group_with_the_larger_loss(data):
    fitted = fit(Recipe("fedfb", steps=300, batch_size=None, alpha=0.002), data)
    plain = fit(Recipe("fedavg", steps=300, batch_size=None), data)
    assert fitted.weights[1] > 1.05 > fitted.weights[0]
    assert gap(fitted, together(data)) < gap(plain, together(data))


@pytest.mark.parametrize("method", METHODS)
def test_many_fits_of_one_program_equal_single_fits_bit_by_bit(method):
    """The trainer's clients hold one set of arrays, of which the inner level reads the first rows; it shows the way, too."""

    def dealt(seed):
        data = clients((40, 31, 25), (9, 12, 9), seed)
        whole, val = training_part(data, "all", 60), padded(data, None, 16)
        return data, Clients(whole, fb.ClientData(whole.train, val.val, data.train_sizes, data.val_sizes))

    form = Formulation("cells" if method == "fedpath" else "paper")
    options = {"steps": 30, "weight_steps": 20, "batch_size": 8, "outer_batch_size": 6, "terms": 2, "step": 0.2}
    recipe = Recipe(method, form, **options, path=(1.0,))
    program = FairProgram(recipe, MODEL, 2)
    trainer = Trainer(program, dealt(0)[1])
    trainer.compile()
    for seed, split in ((0, 100), (3, 0)):
        data, known = dealt(split)
        found, wanted = trainer.run(known, seed, stops=10), run(program, data, seed=seed, capacity=60)
        identical(found.answers, wanted.answers)
        identical(found.weights, wanted.weights)
        assert [stop.round for stop in found.stops if stop.stage == "model"][-1] == recipe.rounds
        assert not found.diverged
    if method not in ("fedbio", "fedminmax"):
        return
    # Costs, and another learning rate: the inner step of a bilevel method grows with it.
    inner = recipe.constants()["inner_step"] / 4 if method == "fedbio" else None
    slow = trainer.run(known, 3, rate=0.05, stops=10)
    wanted = fit(replace(recipe, step=0.05, inner_step=inner), data, seed=3, record_every=10)
    np.testing.assert_allclose(slow.params, wanted.params, rtol=0, atol=1e-5)
    last, row = slow.stops[-1], wanted.history.iloc[-1]
    assert (last.bytes_up, last.bytes_down) == (row["bytes_up"], row["bytes_down"])
    calls = ["gradient_calls", "hessian_vector_calls", "cross_calls"]
    assert last.calls == tuple(map(int, wanted.history.groupby("stage")[calls].max().sum()))


@pytest.mark.parametrize("count", [1, 3])
def test_seeds_side_by_side_equal_single_runs(count):
    """To rounding: with several seeds, sums over a minibatch may be taken in another order."""
    program = FairProgram(Recipe("fedminmax", steps=30, batch_size=8, step=0.2), MODEL, 2)
    known = Clients.of(program, clients((40, 31, 25)))
    trainer, seeds = Trainer(program, known), range(4, 4 + count)
    trainer.compile(seeds)
    for seed, found in zip(seeds, trainer.run_together(known, seeds, 0.1, 5), strict=True):
        wanted = trainer.run(known, seed, 0.1, 5)
        np.testing.assert_allclose(found.params, wanted.params, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found.weights, wanted.weights, rtol=0, atol=1e-5)
        assert [stop[:3] + stop[5:] for stop in found.stops] == [stop[:3] + stop[5:] for stop in wanted.stops]
    assert count == 1 or not np.allclose(found.params, trainer.run(known, 4, 0.1, 5).params, atol=1e-4)


def test_divergence_is_told():
    program = FairProgram(Recipe("fedavg", Formulation(ridge=50.0), batch_size=8, step=1.0), MODEL, 2)
    known = Clients.of(program, clients((40, 31)))
    assert Trainer(program, known).run(known, 0, stops=10).diverged


@pytest.mark.parametrize("make", [fcfl, fedminmax], ids=["fcfl", "fedminmax"])
def test_the_kernel_equals_automatic_differentiation(make):
    """On clients of unequal sizes; those of equal sizes run against the naive loops of either method."""
    if kernels.why_not() is not None:
        pytest.skip(kernels.why_not())
    data = clients((40, 31, 25))
    rows = jax.tree.map(lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf, data.train)
    train = fb.ClientData(rows, None, data.train_sizes)
    start = np.random.default_rng(1).normal(size=4)
    own = {"groups": 2, "stage_one": 6} if make is fcfl else {"group_counts": np.array([56.0, 40.0]), "batch_size": 8}
    found = []
    for scores in (LinearScores(), lambda params, features: features @ params):
        algorithm = make(scores, start, ridge=0.1, **own)
        found.append(fb.simulate(algorithm, train, 12, weights="samples", record_every=None))
    close(found[0].outer, found[1].outer)
    assert np.abs(found[1].outer - start).max() > 0.01
    if make is fedminmax:
        close(found[0].server.group_weights, found[1].server.group_weights)


def test_bytes_go_on_over_the_stages(data):
    recipe = Recipe("fedbioacc", Formulation("paper"), steps=20, weight_steps=10, batch_size=16)
    history = fit(recipe, data, record_every=1).history
    first, second = (history[history["stage"] == stage] for stage in ("weights", "model"))
    # Two vectors of two weights up per client and round, then one model of four numbers; all float32.
    assert first["bytes_up"].iloc[-1] == 2 * 2 * (2 * 2 * 4)
    assert second["bytes_up"].iloc[-1] - first["bytes_up"].iloc[-1] == 4 * 2 * (4 * 4)


def test_rounds_follow_the_method():
    """To the end, or as many as are asked for: by a number, or by the paper's formulation."""
    paper = Formulation("paper")
    assert (Recipe("fedavg").rounds, Recipe("fedavg", paper).rounds, Recipe("fedavg", step=0.1).rounds) == (
        100,
        400,
        400,
    )
    assert (Recipe("fedfb").rounds, Recipe("fedfb").finish_after, Recipe("fedfb", step=0.1).rounds) == (500, 400, 400)
    assert (Recipe("fedminmax").rounds, Recipe("fedminmax", paper).rounds) == (2100, 2000)
    steps = [Recipe(formulation=Formulation(strength=one)).rounds for one in (0.0, 5.0, 3.0)]  # 3 comes in between
    assert steps == [5, 5 + 9 * 3, 5 + 10 * 3]
    assert Recipe("fcfl").rounds == 1020
    for recipe in (
        Recipe("fedavg"),
        Recipe("fedfb"),
        Recipe("fedbio"),
        Recipe("fedavg", paper),
        Recipe("fedfb", steps=40),
    ):
        settled = recipe.settled(40, 30, 50, 1.0)
        assert (settled.rounds, settled.finish_after) == (recipe.rounds, recipe.finish_after)
    assert (Recipe("fcfl", steps=100).rounds, Recipe("fedbio", steps=11).rounds) == (100, 3)
    assert (Recipe("fedbio").weight_rounds, Recipe("fedbio", Formulation("paper")).weight_rounds) == (200, 400)


def test_a_settled_recipe_suits_the_features_and_the_rows():
    """A loss four times as steep as usual; then how many rows an outer step reads."""
    recipe = Recipe("fedbio").settled(40, 30, 50, 10.0)
    assert (recipe.step, recipe.inner_step, recipe.series_step) == (0.025, 0.04, 0.125)
    assert (recipe.batch_size, recipe.outer_batch_size) == (40, "whole")
    assert Recipe("fedavg", step=0.4).settled(40, 30, 50, 10.0).step == 0.1
    one_group = Recipe("fedbio", outer_batch_size="batch")
    assert [one_group.settled(40, 30, 5000, 0.0).outer_batch_size, one_group.settled(200, 9, 9, 0.0).step] == [40, 0.1]
    for form, largest, rows in (("cells", 5000, 512), ("cells", 4096, "whole"), ("paper", 5000, 128)):
        settled = Recipe("fedbio", Formulation(form)).settled(1000, 900, largest, 1.0)
        assert settled.outer_batch_size == rows
    assert Recipe("fedbio", Formulation("paper"), batch_size=None).settled(9, 9, 9, 1.0).outer_batch_size == "whole"


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
        fit(Recipe("fedbio"), bare)
    negative = fb.ClientData({**data.train, "labels": np.where(data.train["groups"] == 1, 0, data.train["labels"])})
    with pytest.raises(ValueError, match="positive rows, but group number 1 has none"):
        fit(Recipe("fedfb"), negative)
    with pytest.raises(ValueError, match="rows of class number 2, but group number 0 has none"):
        fit(Recipe("fedfb"), data, Model("logistic", 4, 3))


@pytest.mark.parametrize("method", COMPARES_GROUPS)
def test_needs_of_methods_that_compare_groups_are_one_sentence(method, data):
    with pytest.raises(ValueError, match=f"{method} compares groups, but there is only one"):
        fit(Recipe(method), data, groups=1)
    weighted = fb.ClientData({**data.train, "weights": data.train["labels"]}, data.val)
    with pytest.raises(ValueError, match=f"{method} takes no weights of single rows"):
        fit(Recipe(method), weighted)
