"""The estimator: scikit-learn's own checks, tables of every kind, and clear sentences on bad input."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
from scipy.sparse import csc_matrix, csr_array
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from fedbilevel.engines.simulation import program_of
from fedbilevel.fairness import (
    FairFederatedClassifier,
    FairFederatedRegressor,
    balanced_accuracy,
    disparities,
    equal_opportunity_difference,
)
from fedbilevel.fairness.estimator import UselessModel
from fedbilevel.fairness.methods import Recipe
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.program import FairProgram, smoothness
from fedbilevel.fairness.trainer import dealt, fit
from tests.fairness.conftest import QUICK, table
from tests.references.digits import last_digits_moved

# Eight rows a step: tables of ten rows and of two hundred then run on the same compiled programs.
CHECKED = FairFederatedClassifier("fedavg", steps=300, batch_size=8, step=0.3, history_rows=0, random_state=0)


def expected_failures(estimator):
    minibatches = "steps draw random minibatches: a repeated row and a row of weight two are drawn differently"
    return {f"check_sample_weight_equivalence_on_{kind}_data": minibatches for kind in ("dense", "sparse")}


# Without groups the default method has nothing to make fair, and says so.
DEFAULT = FairFederatedClassifier(history_rows=0, random_state=0)
NUMBERS = FairFederatedRegressor("fedavg", steps=300, batch_size=8, step=0.3, history_rows=0, random_state=0)


@pytest.mark.filterwarnings(
    "ignore:sensitive_features was not given", "ignore::fedbilevel.fairness.estimator.UselessModel"
)
@parametrize_with_checks([CHECKED, DEFAULT, NUMBERS], expected_failed_checks=expected_failures)
def test_scikit_learns_checks(estimator, check):
    reason = expected_failures(estimator).get(check.func.__name__)
    if reason is not None:
        pytest.xfail(reason)  # without running it: it compiles the largest programs of all checks
    check(estimator)


def test_what_fit_leaves_behind(fitted, raw):
    X, y, *_ = raw
    assert fitted.classes_.tolist() == ["poor", "rich"]
    assert fitted.feature_names_in_.tolist() == ["age", "job", "old", "size"]
    assert fitted.groups_ == ["female", "male"]
    assert fitted.clients_ == ["Bern", "Lyon"]
    assert fitted.group_weights_.index.names == ["group", "label"]
    assert fitted.group_weights_.mean() == pytest.approx(1)
    assert set(fitted.history_["stage"]) == {"model"}
    assert fitted.frontier_["chosen"].sum() == 1
    assert fitted.predict_proba(X).sum(axis=1) == pytest.approx(np.ones(len(X)))
    assert fitted.score(X, y) > 0.75


def test_pandas_polars_and_matrices_give_the_same(fitted, raw):
    X, y, sex, site = raw
    again = clone(fitted).fit(
        pl.DataFrame({c: X[c].astype(str).to_list() if c == "job" else X[c].to_numpy() for c in X}),
        pl.Series(y.tolist()),
        sensitive_features=pl.Series(sex.tolist()),
        clients=pl.Series(site.tolist()),
    )
    np.testing.assert_allclose(again.predict_proba(X), fitted.predict_proba(X), atol=1e-6)
    numbers = clone(fitted).set_params(method="fedavg", history_rows=0)
    by_name = numbers.fit(X[["age"]], y, clients=site).predict_proba(X[["age"]])
    by_place = clone(numbers).fit(X[["age"]].to_numpy(), y, clients=site).predict_proba(X[["age"]].to_numpy())
    np.testing.assert_allclose(by_name, by_place, atol=1e-5)


def test_same_seed_same_model(fitted, raw):
    X, y, sex, site = raw
    again = clone(fitted).fit(X, y, sensitive_features=sex, clients=site)
    np.testing.assert_array_equal(again.predict_proba(X), fitted.predict_proba(X))


def test_columns_that_fill_up_the_shapes_leave_no_trace(raw):
    """The features get columns of zeros; bytes are those of the model without them."""
    X, y, _, site = raw
    clf = FairFederatedClassifier("fedavg", **QUICK)
    plain, recorded = (clone(clf).set_params(history_rows=rows).fit(X, y, clients=site) for rows in (0, 2))
    assert plain.params_.shape == recorded.params_.shape == (7,)
    np.testing.assert_array_equal(plain.params_, recorded.params_)
    assert recorded.history_["bytes_up"].iloc[-1] == 12 * 2 * 7 * 4  # rounds, clients, numbers, float32


@pytest.mark.parametrize("kind", ["stratified", "grouped"])
def test_ten_folds_compile_once(kind, compiled):
    """Folds of different sizes, in which sites and groups differ by a few rows, some without the rarest job.  The first
    compiles what the fit starts with and its rounds, with all that it records, and nothing else; the others nothing."""
    X, y, sex, site = table(609, seed=3)
    X = X.assign(job=np.where(np.arange(609) < 13, "astronaut", X["job"].astype(str)))
    # The 13 astronauts are one household: in one of the folds there is none.
    households = np.where(np.arange(609) < 13, 0, np.random.default_rng(0).geometric(0.02, 609))
    clf = FairFederatedClassifier(random_state=0)
    sizes, counted = set(), []
    folds = StratifiedKFold(10).split(X, y) if kind == "stratified" else GroupKFold(10).split(X, y, households)
    for train, _ in folds:
        before = len(compiled)
        clf.fit(X.iloc[train], y[train], sensitive_features=sex[train], clients=site[train])
        counted.append(len(compiled) - before)
        sizes.add((*np.unique(np.stack([site[train], sex[train]]), axis=1, return_counts=True)[1], *clf.params_.shape))
        assert len(clf.history_) == 33
    assert len(sizes) == 10
    assert len({size[-1] for size in sizes}) == 2
    assert counted[0] <= 2  # nothing, where another test has compiled them
    assert counted[1:] == [0] * 9


def test_cross_val_score_with_defaults_compiles_once(raw):
    X, y, sex, _ = raw
    with sklearn.config_context(enable_metadata_routing=True):
        clf = FairFederatedClassifier(random_state=0).set_fit_request(sensitive_features=True)
        before = program_of("brief")._cache_size()
        scores = cross_val_score(clf, X, y, cv=10, params={"sensitive_features": sex})
    assert program_of("brief")._cache_size() - before <= 2
    assert scores.mean() > 0.6


@pytest.mark.parametrize("method", ["fedavg", "fedbioacc", "fedpath"])
def test_padding_gives_the_numbers_of_the_unpadded_fit(method, raw):
    X, y, sex, site = raw
    clf = FairFederatedClassifier(method, **{**QUICK, "history_rows": 4}).fit(
        X, y, sensitive_features=sex, clients=site
    )
    codes, groups = (sex == "male").astype(np.int32), ["female", "male"]
    features = clf.encoder_.transform(X)
    rows = {"features": features, "labels": (y == "rich").astype(np.float32), "groups": codes}
    program = FairProgram(
        Recipe(method, steps=60, weight_steps=20, batch_size=32).asked(2, None), Model("logistic", features.shape[1]), 2,
        curvature=smoothness(features), names=groups,
    )  # fmt: skip
    parts = [np.flatnonzero(site == name) for name in ("Bern", "Lyon")]
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    plain, moved = (
        fit(program, dealt(program, one, parts), seed=seed, record_every=program.recipe.record_every(4))
        for one in (rows, {**rows, "features": last_digits_moved(features)})
    )
    # Padding changes the order of sums.  How much that is depends on the processor; last digits of the rows do as much.
    digits = np.abs(moved.params - plain.params).max()
    assert digits < 1e-4
    np.testing.assert_allclose(clf.params_, plain.params, atol=2e-6 + 4 * digits)
    np.testing.assert_allclose(clf.history_["objective"], plain.history["objective"], rtol=2e-5)
    counts = ["bytes_up", "bytes_down", "gradient_calls"]
    pd.testing.assert_frame_equal(clf.history_[counts], plain.history[counts])


def test_missing_cells_dates_codes_and_free_text(raw):
    """What `fit` accepts in files: missing cells with a flag, rare values pooled, dates as days, identifiers left out."""
    X, y, sex, _ = raw
    n = len(X)
    rng = np.random.default_rng(0)
    messy = X.assign(
        age=X["age"].where(rng.random(n) > 0.1),
        job=X["job"].astype(object).where(rng.random(n) > 0.1, None),
        code=[f"code {i}" for i in rng.integers(0, 2500, n)],
        town=np.where(np.arange(n) < 4, "Ulm", np.where(rng.random(n) < 0.5, "Bern", "Lyon")),
        born=pd.Timestamp("1970-01-01") + pd.to_timedelta(rng.integers(0, 9000, n), unit="D"),
        patient_id=rng.permutation(n),
    )
    clf = FairFederatedClassifier("fedavg", **QUICK)
    with pytest.warns(UserWarning, match="'code', 'patient_id' are left out"):
        clf.fit(messy, y, sensitive_features=sex)
    names = clf.get_feature_names_out().tolist()
    assert names == [
        "age", "age missing", "size", "born", "job=cook", "job=judge", "job=none", "job missing", "old=true",
        "town=Bern", "town=Lyon", "town=(other)",
    ]  # fmt: skip
    assert clf.coef_.shape == (1, len(names))
    features = clf.encoder_.transform(messy)
    assert features[:, 1].sum() == messy["age"].isna().sum()
    days = (messy["born"] - pd.Timestamp("1970-01-01")).dt.days
    np.testing.assert_allclose(features[:, 3], (days - days.mean()) / days.std(ddof=0), atol=1e-5)
    assert np.isfinite(clf.predict_proba(messy.assign(size=np.nan, town="Rome"))).all()


def test_coefficients_in_both_units(raw):
    X, y, sex, _ = raw
    clf = FairFederatedClassifier("fedavg", **QUICK).fit(X, y, sensitive_features=sex)
    logit = np.log(clf.predict_proba(X)[:, 1] / clf.predict_proba(X)[:, 0])
    np.testing.assert_allclose(clf.encoder_.transform(X)[:, :-1] @ clf.coef_[0] + clf.intercept_, logit, atol=1e-5)
    own = clf.coefficients()["rich"]
    by_hand = own["age"] * X["age"] + own["size"] * X["size"] + own["old=true"] * X["old"] + own["(intercept)"]
    by_hand += X["job"].astype(str).map(lambda job: own[f"job={job}"])
    np.testing.assert_allclose(by_hand, logit, atol=1e-5)
    network = FairFederatedClassifier("fedavg", **QUICK, model="mlp", hidden=2).fit(X, y)
    assert not hasattr(network, "coef_")


def test_sparse_and_missing_matrices_are_the_dense_ones():
    rng = np.random.default_rng(0)
    X = np.where(rng.random((200, 5)) < 0.7, 0, rng.normal(size=(200, 5)))
    y = (X.sum(axis=1) > 0).astype(int)
    clf = FairFederatedClassifier("fedavg", **QUICK)
    dense, sparse = (clone(clf).fit(one, y).predict_proba(X) for one in (X, csr_array(X)))
    np.testing.assert_array_equal(dense, sparse)
    np.testing.assert_array_equal(clone(clf).fit(X, y).predict_proba(csc_matrix(X)), dense)
    holes = np.where(rng.random(X.shape) < 0.1, np.nan, X)
    assert clone(clf).fit(holes, y).get_feature_names_out().tolist()[:2] == ["x0", "x0 missing"]
    with pytest.raises(ValueError, match=r"would take 8000 GB; choose fewer columns"):
        clf.fit(csr_array((10**6, 10**6)), np.arange(10**6) % 2)


@pytest.mark.parametrize("values", [np.random.default_rng(0).normal(size=400), np.arange(400) // 6])
def test_a_column_of_measurements_makes_no_groups(values, raw):
    X, y, *_ = raw
    with pytest.raises(ValueError, match=r"makes \d+ groups .*pandas\.cut\(column"):
        FairFederatedClassifier(**QUICK).fit(X, y, sensitive_features=values)


def test_defaults_make_a_table_fairer_that_it_has_never_seen():
    X, y, sex, site = table(3000, seed=5)
    test_X, test_y, test_sex, _ = table(3000, seed=6)

    def gap(clf):
        found = clf.fit(X, y, sensitive_features=sex, clients=site).predict(test_X)
        return equal_opportunity_difference(test_y, found, sensitive_features=test_sex, pos_label="rich")

    plain, fair = (gap(FairFederatedClassifier(m, history_rows=0, random_state=0)) for m in ("fedavg", "fedpath"))
    assert plain > 0.05
    assert fair < 0.5 * plain


def test_grid_search_and_pipeline_route_the_groups(raw):
    X, y, sex, site = raw
    numbers = X[["age"]].to_numpy()
    with sklearn.config_context(enable_metadata_routing=True):
        clf = FairFederatedClassifier("fedavg", **QUICK).set_fit_request(sensitive_features=True, clients=True)
        pipe = make_pipeline(StandardScaler(), clf)
        search = GridSearchCV(pipe, {"fairfederatedclassifier__step": [0.05, 0.5]}, cv=2)
        search.fit(numbers, y, sensitive_features=sex, clients=site)
    best = search.best_estimator_[-1]
    assert best.clients_ == ["Bern", "Lyon"]
    assert best.groups_ == ["female", "male"]


def test_fairlearns_metric_frame_takes_its_predictions(fitted, raw):
    from fairlearn.metrics import MetricFrame, selection_rate

    X, y, sex, _ = raw
    frame = MetricFrame(
        metrics=selection_rate, y_true=y == "rich", y_pred=fitted.predict(X) == "rich", sensitive_features=sex
    )
    assert frame.by_group.index.tolist() == ["female", "male"]


def test_sample_weight_of_zero_removes_rows(raw):
    X, y, _, _ = raw
    numbers = X[["age"]].to_numpy()
    flipped = np.concatenate([y, np.where(y == "rich", "poor", "rich")])
    double = np.concatenate([numbers, numbers])
    weight = np.repeat([1.0, 0.0], len(y))
    clf = FairFederatedClassifier("fedavg", steps=200, batch_size=None, history_rows=0, random_state=0)
    plain = clone(clf).fit(numbers, y).predict_proba(numbers)
    weighted = clone(clf).fit(double, flipped, sample_weight=weight).predict_proba(numbers)
    np.testing.assert_allclose(weighted, plain, atol=2e-3)  # the same loss up to its ridge, which the mean leaves alone


def rare(n=3000, seed=3):
    """A table with 8 % positives, whom a model finds at a low threshold only."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    y = rng.random(n) < 1 / (1 + np.exp(3 - X[:, 0]))
    return X, np.where(y, "ill", "well"), rng.choice(["f", "m"], n), rng.choice(["A", "B"], n)


@pytest.mark.parametrize("method", ["fedavg", "fedbioacc", "fedpath"])
def test_rare_classes_are_found_by_class_weights_or_a_threshold(method, tmp_path):
    X, y, sex, site = rare()
    order = {"sensitive_features": sex, "clients": site}
    trained = {**QUICK, "steps": 600}
    with pytest.warns(UselessModel, match=r"says yes to \d of 3,000 rows"):
        plain = FairFederatedClassifier(method, **trained).fit(X, y == "ill", **order)
    assert plain.threshold_ == 0.5
    assert plain.findings_[0].code == "selects-nobody"
    ways = {"threshold": "auto"}, {"threshold": "recall=0.8"}, {"threshold": 0.1}, {"class_weight": "balanced"}
    for options in (*ways, {"class_weight": {True: 12, False: 1}}):
        found = FairFederatedClassifier(method, **trained, **options).fit(X, y == "ill", **order)
        assert balanced_accuracy(y == "ill", found.predict(X)) > 0.6, options
        assert not [finding for finding in found.findings_ if finding.code.startswith("selects")]
        np.testing.assert_array_equal(found.predict(X), found.predict_proba(X)[:, 1] > found.threshold_)
        again = FairFederatedClassifier.load(found.save(tmp_path / "model")) if "threshold" in options else found
        np.testing.assert_array_equal(again.predict(X), found.predict(X))
        assert again.findings_ == found.findings_


@pytest.mark.parametrize("options", [{"threshold": "auto"}, {"class_weight": "balanced"}])
def test_a_rare_one_of_three_classes_is_found(options, tmp_path):
    rng = np.random.default_rng(2)
    X, sex = rng.normal(size=(1500, 2)), rng.choice(["f", "m"], 1500)
    y = np.array(["a", "b", "c"])[np.digitize(0.4 * X[:, 0] + rng.normal(size=1500), [0.3, 2.0])]
    usual = {"steps": 300, "batch_size": 64, "step": 0.5, "history_rows": 0, "random_state": 0}
    with pytest.warns(UselessModel, match="decides c for"):
        plain = FairFederatedClassifier("fedavg", **usual).fit(X, y, sensitive_features=sex)
    found = FairFederatedClassifier("fedavg", **usual, **options).fit(X, y, sensitive_features=sex)
    assert balanced_accuracy(y, found.predict(X)) > balanced_accuracy(y, plain.predict(X)) + 0.05
    again = FairFederatedClassifier.load(found.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(X), found.predict(X))
    assert np.shape(again.threshold_) == ((3,) if "threshold" in options else ())


def test_class_weights_are_weights_of_rows(raw):
    """Balanced class weights give what the same numbers give as ``sample_weight``."""
    X, y, sex, site = raw
    order = {"sensitive_features": sex, "clients": site}
    shares = pd.Series(y).map(pd.Series(y).value_counts(normalize=True)).to_numpy()
    weighted = FairFederatedClassifier(**QUICK).fit(X, y, **order, sample_weight=1 / (2 * shares))
    balanced = FairFederatedClassifier(**QUICK, class_weight="balanced").fit(X, y, **order)
    np.testing.assert_allclose(balanced.params_, weighted.params_, rtol=1e-5)


@pytest.mark.parametrize(("method", "model"), [("fedfb", "logistic"), ("fairfed", "logistic"), ("fairfed", "mlp")])
def test_fedfb_and_fairfed_learn_a_table(method, model, raw):
    X, y, sex, site = raw
    clf = FairFederatedClassifier(method, **{**QUICK, "steps": 200}, model=model)
    assert clf.fit(X, y, sensitive_features=sex, clients=site).score(X, y) > 0.7
    if method == "fedfb":
        assert clf.group_weights_.index.tolist() == ["female", "male"]
        shares = [(y[sex == group] == "rich").sum() / (y == "rich").sum() for group in ("female", "male")]
        assert clf.group_weights_.to_numpy() @ shares == pytest.approx(1, abs=1e-5)
    else:
        assert clf.group_weights_ is None


def test_a_group_that_a_method_cannot_compare_is_named(raw):
    X, y, sex, _ = raw
    words = (
        "the groups' positive rows, but group 'female' has none, or too few at every site to tell: leave that group out"
    )
    with pytest.raises(ValueError, match=words):
        FairFederatedClassifier("fedfb", **QUICK).fit(X, np.where(sex == "female", "poor", y), sensitive_features=sex)


def test_steep_features_do_not_diverge():
    """Forty copies of one column: forty times the usual curvature."""
    rng = np.random.default_rng(0)
    column = rng.normal(size=(300, 1))
    X, y = np.tile(column, (1, 40)) + 0.01 * rng.normal(size=(300, 40)), (column[:, 0] > 0).astype(int)
    clf = FairFederatedClassifier(**QUICK).fit(X, y, sensitive_features=rng.integers(2, size=300))
    assert clf.score(X, y) > 0.95


def test_without_groups_a_warning_says_that_nothing_is_fair(raw):
    X, y, *_ = raw
    clf = FairFederatedClassifier("fedreg", **QUICK)
    with pytest.warns(UserWarning, match="nothing is made fair"), pytest.raises(ValueError, match="there is only one"):
        clf.fit(X[["age"]], y)


def test_tables_of_groups_are_joined(raw):
    X, y, sex, site = raw
    both = pd.DataFrame({"sex": sex, "site": site})
    clf = FairFederatedClassifier("fedavg", **QUICK).fit(X, y, sensitive_features=both)
    assert clf.groups_[0] == "female & Bern"


def test_validation_share_and_the_papers_formulation(raw):
    X, y, sex, site = raw
    for options in ({"validation": 0.3}, {"formulation": "paper"}):
        clf = FairFederatedClassifier("fedbio", **QUICK, **options).fit(X, y, sensitive_features=sex, clients=site)
        assert len(clf.group_weights_) == (2 if options.get("formulation") else 4)


def bad(**changes):
    X, y, sex, site = table(60)
    given = {"X": X, "y": y, "sensitive_features": sex, "clients": site, **changes}
    return FairFederatedClassifier("fedavg", **QUICK).fit(**given)


def with_missing(values):
    return pd.Series([None, *values[1:]], dtype=object)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda X, y, s, c: {"sensitive_features": with_missing(s)}, "sensitive_features has 1 missing value"),
        (lambda X, y, s, c: {"clients": with_missing(c)}, "clients has 1 missing value"),
        (lambda X, y, s, c: {"y": np.full(60, "rich")}, "y holds one class only"),
        (lambda X, y, s, c: {"clients": np.arange(60)}, "Client 0 has one row"),
        (lambda X, y, s, c: {"X": X[["age"]].assign(age=np.nan)}, r"No column of X is left .*'age': no values"),
        (lambda X, y, s, c: {"X": X.assign(age=np.inf)}, "column 'age' has infinite values"),
        (lambda X, y, s, c: {"sensitive_features": s[:9]}, "sensitive_features has 9 rows but X has 60"),
        (lambda X, y, s, c: {"clients": c[:9]}, "clients has 9 rows but X has 60"),
        (lambda X, y, s, c: {"sample_weight": -np.ones(60)}, "sample_weight must be finite, not negative"),
    ],
)
def test_bad_input_is_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        bad(**change(*table(60)))


def test_unknown_and_missing_columns(fitted, raw):
    X = raw[0]
    with pytest.raises(ValueError, match="there is no column 'age'; did you mean 'ages'"):
        fitted.predict(X.rename(columns={"age": "ages"}))
    with pytest.raises(TypeError, match="must be a table with the columns seen in fit"):
        fitted.predict(np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "magic"}, "method must be one of"),
        ({"formulation": "sells"}, "formulation must be one of"),
        ({"metric": "nice"}, "metric='nice' is unknown"),
        ({"model": "forest"}, "model must be one of"),
        ({"validation": 1.5}, "validation must lie between 0 and 1"),
        ({"step": -1.0}, "step must be a positive number"),
        ({"history_rows": -1}, "history_rows must be at least 0"),
    ],
)
def test_bad_options_are_one_sentence(options, words, raw):
    X, y, sex, site = raw
    clf = FairFederatedClassifier(**{"method": "fedbio", **QUICK, **options})
    with pytest.raises(ValueError, match=words):
        clf.fit(X, y, sensitive_features=sex, clients=site)


def test_numbers_in_their_own_units(raw, tmp_path):
    """Close to least squares where nothing is made fair; saved and read; coefficients say what one more adds."""
    X, _, sex, site = raw
    y = 900 + 7 * X["age"].to_numpy(float) - 40 * (sex == "female") + 20 * np.random.default_rng(3).normal(size=len(X))
    options = {"steps": 1500, "batch_size": 64, "step": 0.3, "random_state": 0}
    plain = FairFederatedRegressor("fedavg", ridge=0.0, **options).fit(X[["age"]], y, clients=site)
    slope, middle = np.polyfit(X["age"].to_numpy(float), y, 1)
    table = plain.coefficients()["prediction"]
    assert table["age"] == pytest.approx(slope, rel=0.05)
    assert table["(intercept)"] == pytest.approx(middle, rel=0.02)
    assert plain.group_weights_ is None
    fair = FairFederatedRegressor("fedreg", strength=2.0, loss="huber", **options)
    fair.fit(X, y, sensitive_features=sex, clients=site)
    again = FairFederatedRegressor.load(fair.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(X), fair.predict(X))
    assert fair.score(X, y) > 0.5
    with pytest.raises(ValueError, match="was not saved by this class"):
        FairFederatedClassifier.load(tmp_path / "model.npz")
    with pytest.raises(ValueError, match="y must hold numbers"):
        FairFederatedRegressor().fit(X, np.full(len(X), "much"), sensitive_features=sex)


def test_a_table_of_sensitive_features_makes_intersections(raw):
    X, y, sex, _ = raw
    old = np.where(X["age"] > X["age"].median(), "old", "young")
    clf = FairFederatedClassifier("fedavg", **QUICK).fit(
        X, y, sensitive_features=pd.DataFrame({"sex": sex, "age": old})
    )
    assert clf.groups_ == ["female & old", "female & young", "male & old", "male & young"]
    table = pd.DataFrame({"sex": sex, "age": old})
    found = disparities(y, clf.predict(X), sensitive_features=table, pos_label="rich")
    assert found.index.tolist() == ["sex", "age", "sex & age"]
    for by, groups in (("sex", sex), ("age", old), ("sex & age", table)):
        wanted = equal_opportunity_difference(y, clf.predict(X), sensitive_features=groups, pos_label="rich")
        assert found.loc[by, "equal_opportunity"] == wanted
