import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedbilevel.fairness import across_splits, comparison_table, paired_difference

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
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
