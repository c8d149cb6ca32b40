"""Intervals over splits against SciPy's and formulas; over redrawn rows against the theory of a proportion."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks import coverage
from fedbilevel.fairness import (
    across_splits,
    bootstrap_difference,
    bootstrap_interval,
    comparison_table,
    demographic_parity_difference,
    equal_opportunity_difference,
    paired_difference,
)  # fmt: skip
from fedbilevel.fairness.intervals import gap_ends
from fedbilevel.fairness.metrics import CRITERIA, Counts

checked = settings(deadline=None, max_examples=60)
numbers = st.lists(st.floats(-10, 10), min_size=2, max_size=30).filter(lambda values: np.std(values) > 1e-6)


@checked
@given(values=numbers, level=st.floats(0.5, 0.999))
def test_student_interval_equals_scipys(values, level):
    interval = across_splits(values, level=level)
    low, high = stats.t.interval(level, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    np.testing.assert_allclose([interval.low, interval.high], [low, high], rtol=1e-9, atol=1e-9)
    assert interval.estimate == pytest.approx(np.mean(values))
    assert (interval.size, interval.method, interval.level) == (len(values), "student", level)


@checked
@given(values=numbers, data=st.data())
def test_paired_difference_equals_scipys_paired_test(values, data):
    size = len(values)
    baseline = data.draw(st.lists(st.floats(-10, 10), min_size=size, max_size=size))
    if np.std(np.subtract(values, baseline)) < 1e-6:
        return
    interval = paired_difference(values, baseline)
    expected = stats.ttest_rel(values, baseline).confidence_interval(0.95)
    np.testing.assert_allclose([interval.low, interval.high], list(expected), rtol=1e-8, atol=1e-8)


def test_corrected_interval_by_its_formula():
    values = np.array([0.1, 0.3, 0.2, 0.25])
    interval = across_splits(values, method="corrected", test_share=0.3)
    half = stats.t.ppf(0.975, 3) * math.sqrt(values.var(ddof=1) * (1 / 4 + 0.3 / 0.7))
    assert interval.high - interval.estimate == pytest.approx(half)
    assert interval.estimate - interval.low == pytest.approx(half)


def test_bootstrap_interval_of_the_mean():
    values = np.random.default_rng(0).normal(size=200)
    interval = across_splits(values, method="bootstrap")
    student = across_splits(values)
    # With 200 values both are the normal interval up to the noise of 10,000 redraws.
    assert interval.low == pytest.approx(student.low, abs=0.02)
    assert interval.high == pytest.approx(student.high, abs=0.02)
    assert interval == across_splits(values, method="bootstrap")
    assert interval != across_splits(values, method="bootstrap", seed=1)


def test_series_are_paired_by_split_not_by_position():
    ours = pd.Series([0.5, 0.7, 0.9], index=[2, 0, 1])
    theirs = pd.Series([0.6, 0.8, 0.4], index=[0, 1, 2])
    interval = paired_difference(ours, theirs)
    assert interval.estimate == pytest.approx(0.1)
    assert interval.high - interval.low < 1e-9


def results():
    return pd.DataFrame(
        {
            "method": ["fedavg"] * 3 + ["ours"] * 3,
            "split": [0, 1, 2, 2, 1, 0],
            "accuracy": [0.84, 0.85, 0.86, 0.86, 0.84, 0.84],
            "gap": [0.10, 0.12, 0.14, 0.05, 0.04, 0.03],
        }
    )


def test_comparison_table():
    table = comparison_table(results(), baseline="fedavg", metrics=["accuracy", "gap"])
    assert list(table.index) == [("fedavg", "accuracy"), ("fedavg", "gap"), ("ours", "accuracy"), ("ours", "gap")]
    ours = table.loc[("ours", "gap")]
    by_hand = paired_difference([0.03, 0.04, 0.05], [0.10, 0.12, 0.14])
    assert ours["difference"] == pytest.approx(-0.08)
    assert (ours["difference_low"], ours["difference_high"]) == pytest.approx((by_hand.low, by_hand.high))
    assert ours["excludes_zero"] is True
    assert table.loc[("ours", "accuracy"), "excludes_zero"] is False
    assert ours["mean"] == pytest.approx(0.04)
    assert ours["splits"] == 3
    assert math.isnan(table.loc[("fedavg", "gap"), "difference"])
    wide = comparison_table(results(), baseline="fedavg", metrics=["gap"], interval="corrected", test_share=0.3)
    assert wide.loc[("ours", "gap"), "difference_low"] < ours["difference_low"]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            lambda r: r,
            {"baseline": "fedsgd"},
            "baseline='fedsgd' is not in the column 'method', which holds fedavg, ours",
        ),
        (lambda r: r, {"metrics": ["gaps"]}, "results: there is no column 'gaps'; did you mean 'gap'"),
        (lambda r: pd.concat([r, r[:1]]), {}, "two rows for method 'fedavg' and split 0"),
        (lambda r: r[1:], {}, "split 0 is in only one of values and baseline"),
        (lambda r: r.assign(gap=[0.1, np.nan, 0.1, 0.1, 0.1, 0.1]), {}, "split number 1 holds nan"),
    ],
)
def test_tables_that_cannot_be_compared(change, options, message):
    arguments = {"baseline": "fedavg", "metrics": ["gap"]} | options
    with pytest.raises(ValueError, match=message):
        comparison_table(change(results()), **arguments)


def redrawn(metric="accuracy", **options):
    return bootstrap_interval(metric, [0, 1], [0, 1], sensitive_features=["a", "b"], **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: across_splits([0.1]), "at least two splits"),
        (lambda: across_splits([[0.1, 0.2]]), "at least two splits"),
        (lambda: across_splits([0.1, 0.2], method="normal"), "method='normal' is unknown; choose one of student"),
        (lambda: across_splits([0.1, 0.2], method="corrected"), "test_share=None: the corrected interval needs"),
        (lambda: across_splits([0.1, 0.2], level=1.0), "level=1.0 must lie between 0 and 1"),
        (lambda: paired_difference([0.1, 0.2], [0.1]), "baseline has 1 rows but values has 2"),
        (lambda: paired_difference(pd.Series([1, 2], index=[0, 0]), pd.Series([1, 2])), "two numbers for the split 0"),
        (lambda: redrawn("eqopp"), "metric='eqopp' is unknown; choose one of equal_opportunity, equalized_odds"),
        (lambda: redrawn(method="other"), "method='other' is unknown"),
        (lambda: redrawn(strata="label"), "strata='label' is unknown; choose one of cell, group, none"),
        (lambda: redrawn(level=95), "level=95 must lie between 0 and 1, like 0.95"),
        (lambda: redrawn(resamples=0), "resamples=0 must be at least 1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def rows(size=400, seed=0, noise=(0.1, 0.3)):
    """Two groups; the second group's labels are predicted wrongly more often."""
    generator = np.random.default_rng(seed)
    groups = generator.integers(2, size=size)
    y_true = generator.integers(2, size=size)
    wrong = generator.random(size) < np.take(noise, groups)
    return y_true, np.where(wrong, 1 - y_true, y_true), groups


@pytest.mark.parametrize("weighted", [False, True])
def test_named_metric_equals_the_function_of_that_name(weighted):
    y_true, y_pred, groups = rows()
    weight = np.random.default_rng(1).random(len(groups)) if weighted else None
    options = {"sensitive_features": groups, "sample_weight": weight}
    for name, function in (
        ("equal_opportunity", equal_opportunity_difference),
        ("demographic_parity", demographic_parity_difference),
    ):
        named, called = (bootstrap_interval(m, y_true, y_pred, **options, resamples=50) for m in (name, function))
        assert named == called
        assert named.estimate == function(y_true, y_pred, **options)
    estimate = bootstrap_interval("accuracy", y_true, y_pred, **options, resamples=50).estimate
    assert estimate == pytest.approx(np.average(y_true == y_pred, weights=weight))


@pytest.mark.parametrize(
    ("strata", "fixed"), [("cell", (True, True)), ("group", (True, False)), ("none", (False, False))]
)
def test_rows_are_redrawn_within_their_stratum(strata, fixed):
    y_true, y_pred, groups = rows(60)
    seen = []

    def spy(true, predicted, *, sensitive_features):
        assert len(true) == len(predicted) == len(sensitive_features) == 60
        seen.append((sum(sensitive_features), sum(true * sensitive_features), sum(predicted)))
        return 0.0

    bootstrap_interval(spy, y_true, y_pred, sensitive_features=groups, strata=strata, resamples=40)
    group_sizes, positives, predicted = (len(set(column)) for column in zip(*seen, strict=True))
    assert (group_sizes == 1, positives == 1) == fixed
    assert predicted > 1


def test_same_seed_same_interval_other_seed_another():
    y_true, y_pred, groups = rows()
    one, again, other = (
        bootstrap_interval("accuracy", y_true, y_pred, sensitive_features=groups, resamples=60, seed=seed)
        for seed in (3, 3, 4)
    )
    assert one == again != other


def test_width_for_the_accuracy_is_that_of_a_proportion():
    generator = np.random.default_rng(0)
    y_true = np.zeros(2_000, dtype=int)
    y_pred = (generator.random(2_000) < 0.2).astype(int)
    interval = bootstrap_interval("accuracy", y_true, y_pred, sensitive_features=["a"] * 2_000, resamples=4_000)
    p = interval.estimate
    # The quantiles of 4,000 draws have a standard error of about 3 % of the width.
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * math.sqrt(p * (1 - p) / 2_000), rel=0.1)
    assert interval.low < p < interval.high


def test_coverage_of_a_difference_between_two_groups():
    """True selection rates .3 and .6: the 95 % interval holds the true gap in about 95 % of 200 samples."""
    hits = 0
    for seed in range(200):
        generator = np.random.default_rng([seed, 5])
        groups = np.repeat([0, 1], 150)
        y_pred = (generator.random(300) < np.take([0.3, 0.6], groups)).astype(int)
        interval = bootstrap_interval(
            "demographic_parity", np.zeros(300, dtype=int), y_pred, sensitive_features=groups, resamples=150, seed=seed
        )
        hits += interval.low <= 0.3 <= interval.high
    # Binomial(200, .95) lies in 180..198 with probability .998; percentile intervals run a little short.
    assert 178 <= hits <= 198


def test_difference_to_a_baseline_uses_the_same_rows_for_both():
    y_true, y_pred, groups = rows()
    none = bootstrap_difference("accuracy", y_true, y_pred, y_pred, sensitive_features=groups, resamples=50)
    assert (none.estimate, none.low, none.high) == (0.0, 0.0, 0.0)
    assert not none.excludes_zero
    better = y_pred.copy()
    better[:40] = y_true[:40]
    gain = bootstrap_difference("accuracy", y_true, better, y_pred, sensitive_features=groups, resamples=300)
    assert gain.estimate == pytest.approx(np.mean(better == y_true) - np.mean(y_pred == y_true))
    assert gain.excludes_zero
    alone = bootstrap_interval("accuracy", y_true, better, sensitive_features=groups, resamples=300)
    assert gain.high - gain.low < alone.high - alone.low


def test_resamples_without_a_value_are_counted():
    y_true, y_pred = [1, 0, 1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]
    options = {"sensitive_features": list("aabbaabb"), "strata": "none", "resamples": 200}
    for metric in ("equal_opportunity", equal_opportunity_difference):
        interval = bootstrap_interval(metric, y_true, y_pred, **options)
        assert 0 < interval.undefined < 200
    assert bootstrap_interval("equal_opportunity", y_true, y_pred, **options | {"strata": "cell"}).undefined == 0


def test_a_metric_that_fails_on_the_rows_themselves_raises():
    with pytest.raises(ValueError, match="one class only, no positives"):
        bootstrap_interval(equal_opportunity_difference, [0, 0], [0, 1], sensitive_features=["a", "b"])
    with pytest.raises(ValueError, match="undefined in every resample"):
        bootstrap_interval("equal_opportunity", [1, 0], [0, 1], sensitive_features=["a", "b"], resamples=5)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 100), (3, 3), (10, 10), (30, 30)])
def test_intervals_of_gaps_hold_for_small_cells(sizes):
    """Exact, over 47 x 47 true rates that include 0, 1 and equal ones; docs/metrics.md has more sizes."""
    smallest, mean, width = coverage.two_groups(sizes)
    assert smallest >= 0.93
    assert mean < 0.9999 or sizes[0] == 2
    assert width < 1


@pytest.mark.parametrize(
    ("measured", "sizes"),
    [
        (coverage.several_groups, (2, 10, 30, 100, 1000)),
        (coverage.several_groups, (30, 30, 30)),
        (coverage.two_models, (2, 100)),
        (coverage.two_models, (30, 30, 30)),
    ],
)
def test_intervals_of_several_groups_and_of_two_models_hold(measured, sizes):
    """1,000 draws a truth: two standard errors are 1.4 points."""
    smallest, *_ = measured(sizes, draws=1000)
    assert smallest >= 0.93 - 0.014


def test_a_gap_of_two_positives_is_wide_and_one_of_many_is_not():
    few, many = (Counts(np.array([[[9, 9], [n, 0]], [[9, 9], [600, 400]]])) for n in (2, 1000))
    (low, high), (tight_low, tight_high) = (gap_ends(counts, "equal_opportunity") for counts in (few, many))
    assert few.gap("equal_opportunity") == many.gap("equal_opportunity") == 0.4
    assert low == 0
    assert high - low > 0.4
    assert 0.36 < tight_low < 0.4 < tight_high < 0.44
    assert np.isnan(gap_ends(Counts(np.array([[[9, 9], [0, 0]], [[9, 9], [6, 4]]])), "equal_opportunity")).all()


@pytest.mark.parametrize("method", ["between_groups", "to_overall", "majority_vs_rest"])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_intervals_of_gaps_hold_the_gap_and_shrink(criterion, method):
    rng = np.random.default_rng(0)
    counts = Counts(rng.integers(1, 9, (40, 4, 2, 2)))
    gap, (low, high) = counts.gap(criterion, method), gap_ends(counts, criterion, method)
    assert ((low <= gap) & (gap <= high) & (low >= 0) & (high <= 1)).all()
    more = gap_ends(Counts(100 * counts.cells), criterion, method)
    assert (more[1] - more[0] < high - low).all()
    wider = gap_ends(counts, criterion, method, level=0.99)
    assert ((wider[0] <= low) & (wider[1] >= high)).all()
