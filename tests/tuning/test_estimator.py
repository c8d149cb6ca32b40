"""The tuned estimators: scikit-learn's checks, what they learn, and that they are the program's simulation."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from fedbilevel.fairness.models import Model
from fedbilevel.tuning import TunedFederatedClassifier, TunedFederatedRegressor
from fedbilevel.tuning.search import CANDIDATES, Search, held_out_loss

QUICK = {"rounds": 5, "random_state": 0}


@parametrize_with_checks([TunedFederatedClassifier(**QUICK), TunedFederatedRegressor(**QUICK)])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def rows():
    """Three sites; the first two columns tell the class; at site "c" half of the labels are noise, elsewhere a few are."""
    rng = np.random.default_rng(3)
    X = pd.DataFrame(rng.normal(size=(360, 6)), columns=list("pqrstu")).assign(v=rng.choice(["x", "y", "z"], 360))
    site = np.repeat(["a", "b", "c"], 120)
    clean = (X["p"] - X["q"] + 0.3 * rng.normal(size=360) > 0).to_numpy()
    flipped = rng.random(360) < np.where(site == "c", 0.5, 0.08)
    return X, np.where(clean ^ flipped, "yes", "no"), site, flipped


@pytest.fixture(scope="module")
def tuned(rows):
    X, y, site, _ = rows
    return TunedFederatedClassifier(("penalties", "sites", "rows"), random_state=0).fit(X, y, clients=site)


def test_noisy_sites_count_less(tuned):
    weights = tuned.site_weights_
    assert list(weights.index) == ["a", "b", "c"]
    assert weights["c"] < 0.5 < min(weights["a"], weights["b"])
    assert weights.mean() == pytest.approx(1, rel=1e-5)


def test_columns_that_say_nothing_are_penalised_more(tuned):
    penalties = tuned.penalties_
    assert list(penalties.index) == list(tuned.get_feature_names_out())
    assert penalties[["p", "q"]].max() < penalties.drop(["p", "q"]).mean()
    assert penalties[["v=x", "v=y", "v=z"]].nunique() == 1, "features of one column share a penalty"


def test_doubtful_rows_are_the_flipped_ones(tuned, rows):
    *_, flipped = rows
    assert tuned.doubtful_.sum() > 20
    assert flipped[tuned.doubtful_].mean() > 0.9


def test_a_clone_in_a_pipeline_predicts_the_same(tuned, rows):
    X, y, site, _ = rows
    again = make_pipeline(FunctionTransformer(), clone(tuned))
    again.fit(X, y, tunedfederatedclassifier__clients=site)
    np.testing.assert_array_equal(again.predict_proba(X), tuned.predict_proba(X))
    assert tuned.classes_.tolist() == ["no", "yes"]
    numbers, honest = X.select_dtypes("number"), site == "a"
    untuned = LogisticRegression().fit(numbers, y).score(numbers[honest], y[honest])
    assert tuned.score(X[honest], y[honest]) >= untuned


def test_class_weights_help_the_rare_class():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 3))
    y = X[:, 0] + rng.normal(size=400) > 1.6
    plain = TunedFederatedClassifier(random_state=0).fit(X, y)
    weighted = TunedFederatedClassifier(("penalties", "classes"), random_state=0).fit(X, y)
    assert plain.class_weights_ is None
    assert weighted.class_weights_[True] > 2 * weighted.class_weights_[False]
    assert 0 < weighted.label_smoothing_ < 0.2
    recalled = [model.predict(X)[y].mean() for model in (plain, weighted)]
    assert recalled[1] > recalled[0] + 0.2


def test_numbers_by_the_closed_form_of_the_penalties_learned():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 12)) * [1, 2, 5, *[1] * 9]
    y = 500 + 30 * X[:, 0] + 60 * rng.normal(size=60)
    model = TunedFederatedRegressor("features", random_state=0).fit(X, y, clients=np.arange(60) % 3)
    rows = model.encoder_.transform(X).astype(float)
    penalties = np.append(model.penalties_, 1e-6)
    exact = np.linalg.solve(rows.T @ rows / 60 + np.diag(penalties), rows.T @ model.encoder_.standardised(y) / 60)
    np.testing.assert_allclose(model.params_, exact, atol=1e-5)
    assert model.penalties_.nunique() > 1
    assert model.penalties_.mean() > 5 / 60, "more than at the start: most of the target is noise"


def test_the_search_finds_what_scikit_learn_finds():
    """FedAvg with one client and the ridge of a candidate ends near scikit-learn's model with that penalty."""
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=(300, 3)), np.ones(300)]).astype(np.float32)
    y = (X[:, 0] + rng.normal(size=300) > 0).astype(float)
    found = Search(Model("logistic", 4)).run([(X[:150], y[:150]), (X[150:], y[150:])])
    assert len(found.losses) == len(CANDIDATES)
    assert found.ridge in CANDIDATES
    assert found.bytes_one == 2 * 400 * 2 * 4 * 4
    assert found.bytes_all == 21 * found.bytes_one
    wanted = LogisticRegression(C=1 / (300 * found.ridge)).fit(X[:, :3], y)
    exact = np.append(wanted.coef_[0], wanted.intercept_)
    losses = [held_out_loss(Model("logistic", 4), params, X, y) for params in (found.params[:4], exact)]
    assert losses[0] < losses[1] + 0.005
