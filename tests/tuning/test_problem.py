"""What is tuned: losses against loops over rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.fairness.models import Model
from fedbilevel.tuning.problem import OnAllRows, Ridge, Tuning, check_what, prior

ALL = ("penalties", "classes", "sites", "rows")
ROWS = 30


def rows(classes, rng):
    labels = rng.normal(size=ROWS) if classes == 1 else rng.integers(classes, size=ROWS)
    return {
        "features": rng.normal(size=(ROWS, 5)).astype(np.float32),
        "labels": labels.astype(np.float32),
        "weights": (np.arange(ROWS) < 26).astype(np.float32),
        "folds": rng.integers(3, size=ROWS).astype(np.int32),
        "site": rng.integers(2, size=ROWS).astype(np.int32),
    }


def made(classes, what):
    model = Model("linear", 5, 1, loss="squared") if classes == 1 else Model("logistic", 5, classes)
    counts = tuple(range(4, 4 + classes)) if "classes" in what else None
    return Tuning(model, what, 3, (0, 0, 1, 2), 2, 100, counts)


def row_loss(model, scores, label):
    if model.regression:
        return (scores - label) ** 2 / 2
    scores = np.atleast_1d(scores)
    scores = np.array([0, scores[0]]) if len(scores) == 1 else scores
    return np.log(np.exp(scores).sum()) - scores[int(label)]


CASES = [(2, ALL), (3, ALL), (1, ("features", "sites")), (2, ("penalties",)), (3, ("sites",))]


@pytest.mark.parametrize(("classes", "what"), CASES)
def test_losses_are_what_the_formulas_say(classes, what):
    rng = np.random.default_rng(0)
    tuning, batch = made(classes, what), rows(classes, rng)
    problem, model = tuning.problem(), tuning.model
    start, inner = problem.start(jax.random.key(0))
    outer = jax.tree.map(lambda leaf: np.float32(leaf + rng.normal(size=leaf.shape).astype(np.float32)), start)
    inner = rng.normal(size=inner.shape).astype(np.float32)
    used, real = np.zeros(3), np.sum(batch["weights"])
    held_out, fitted, whole = 0.0, 0.0, 0.0
    for features, label, weight, fold, site in zip(*batch.values(), strict=True):
        factor = weight
        if "sites" in what:
            factor = factor * 2 * np.exp(outer.sites[site]) / np.exp(outer.sites).sum()
        if "classes" in what:
            factor = factor * np.exp(outer.classes[int(label)])
        if "rows" in what:
            own = features @ outer.trust
            agreement = own * (2 * label - 1) if classes == 2 else own[int(label)]
            factor = factor * 2 / (1 + np.exp(-agreement))
        for k, params in enumerate(inner):
            scores = features @ params
            loss = row_loss(model, scores, label)
            if "classes" in what:
                share = 1 / (1 + np.exp(-outer.smoothing))
                loss = (1 - share) * loss + share * np.mean([row_loss(model, scores, c) for c in range(classes)])
            used[k] += (fold != k) * factor * loss * 1.5 / real
            whole += (k == 0) * factor * loss / real
            if fold == k:
                alike = sum(tuning.counts) / (classes * tuning.counts[int(label)]) if "classes" in what else 1
                judged = row_loss(model, scores, label)
                if "rows" in what:
                    drawn = 1 / (1 + np.exp(-outer.noise))
                    judged = -np.log((1 - drawn) * np.exp(-judged) + drawn / classes)
                held_out += weight * alike * judged / real
    own = np.zeros(4) if outer.columns is None else np.asarray(outer.columns)
    own = own[[0, 0, 1, 2]] if "penalties" in what else own
    penalties = np.append(np.exp(outer.common + own), 1e-6)
    squares = [np.sum(penalties * (params**2).T) / 2 for params in inner]
    fitted = used.sum() + sum(squares)
    np.testing.assert_allclose(problem.inner_loss(outer, inner, batch), fitted, rtol=2e-6)
    np.testing.assert_allclose(problem.outer_loss.judged(outer, inner, batch), held_out, rtol=2e-6)
    np.testing.assert_allclose(
        problem.outer_loss(outer, inner, batch), held_out + float(prior(outer, tuning)) / 100, rtol=2e-6
    )
    same, each = np.stack([inner[0]] * 3), np.reshape(Ridge(tuning)(outer), inner[0].shape)
    alike = problem.inner_loss(OnAllRows(tuning)(outer), same, batch) / 3
    np.testing.assert_allclose(alike, whole + (squares[0] - 1e-6 * np.sum(inner[0][-1] ** 2) / 2) * 2 / 3, rtol=2e-6)
    np.testing.assert_allclose(np.sum(each * inner[0] ** 2) / 2, squares[0], rtol=2e-6)


def test_the_prior_is_zero_at_the_start_and_counts_spreads():
    tuning = made(2, ALL)
    start = tuning.start()
    assert float(prior(start, tuning)) == 0
    assert float(start.common) == pytest.approx(-np.log(100))
    moved = start._replace(common=start.common + 3, sites=start.sites + jnp.asarray([1.0, 0.0], jnp.float32))
    assert float(prior(moved, tuning)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("what", "classes", "sentence"),
    [
        (("penalty",), 2, "among penalties, features"),
        ((), 2, "name choices to tune"),
        (("sites", "sites"), 2, "each once"),
        (("penalties", "features"), 2, "for each column"),
        (("classes",), 1, "a number takes"),
    ],
)
def test_what_cannot_be_tuned_is_refused(what, classes, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(classes, what)


def test_networks_are_refused():
    with pytest.raises(ValueError, match="for linear models"):
        check_what(("penalties",), Model("mlp", 5))
