"""Metrics against fairlearn, against counting by hand, and against bad input; counts of clients add up to those of all rows."""

import math
import warnings

import fairlearn.metrics as fairlearn
import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import balanced_accuracy_score

from fedbilevel.fairness import (
    GroupLeftOut,
    accuracy,
    auc,
    balanced_accuracy,
    demographic_parity_difference,
    disparity,
    equal_opportunity_difference,
    equalized_odds_difference,
    group_table,
)
from fedbilevel.fairness.intervals import gap_difference_ends, gap_ends
from fedbilevel.fairness.metrics import CONVENTIONS, CRITERIA, Counts, wilson
from fedbilevel.jobs.measuring import Tally, measured
from fedbilevel.tables.schema import Column, Schema

checked = settings(deadline=None, max_examples=60)
FUNCTIONS = {
    "equal_opportunity": equal_opportunity_difference,
    "equalized_odds": equalized_odds_difference,
    "demographic_parity": demographic_parity_difference,
}
ROUNDING = 1e-12  # sums of at most 80 weights in another order

row = st.tuples(st.integers(0, 1), st.integers(0, 1), st.sampled_from("abcd"), st.floats(0.1, 10))


@st.composite
def samples(draw):
    """Labels, predictions, groups, weights or None, with both classes present; groups may lack one of them."""
    drawn = draw(st.lists(row, min_size=2, max_size=80))
    drawn += [(0, draw(st.integers(0, 1)), "a", 1.0), (1, draw(st.integers(0, 1)), draw(st.sampled_from("ab")), 2.0)]
    y_true, y_pred, groups, weight = (np.array(column) for column in zip(*drawn, strict=True))
    return y_true, y_pred, groups, weight if draw(st.booleans()) else None


def quietly(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GroupLeftOut)
        return function(*args, **options)


RATES = {
    "equal_opportunity": [(fairlearn.true_positive_rate, 1)],
    "equalized_odds": [(fairlearn.true_positive_rate, 1), (fairlearn.false_positive_rate, 0)],
    "demographic_parity": [(fairlearn.selection_rate, None)],
}


def fairlearn_difference(rate, label, y_true, y_pred, groups, weight, method):
    """Fairlearn's difference of one rate over the groups that have rows with `label` (None: all groups)."""
    keep = np.ones(len(groups), dtype=bool)
    if label is not None:
        keep = np.isin(groups, [group for group in set(groups) if (y_true[groups == group] == label).any()])
    frame = fairlearn.MetricFrame(
        metrics=rate,
        y_true=y_true[keep],
        y_pred=y_pred[keep],
        sensitive_features=list(groups[keep]),  # a list, because fairlearn trips over arrays with one row
        sample_params={"sample_weight": None if weight is None else weight[keep]},
    )
    return math.nan if frame.by_group.size < min(2, len(set(groups))) else frame.difference(method=method)


@pytest.mark.parametrize("method", CONVENTIONS[:3])  # fairlearn knows no mean over pairs
@checked
@given(sample=samples(), criterion=st.sampled_from(sorted(FUNCTIONS)))
def test_equal_to_fairlearn_over_the_groups_that_have_the_rate(method, sample, criterion):
    y_true, y_pred, groups, weight = sample
    value = quietly(
        FUNCTIONS[criterion], y_true, y_pred, sensitive_features=groups, method=method, sample_weight=weight
    )
    if method == "majority_vs_rest":
        names, counts = np.unique(groups, return_counts=True)
        groups, method = np.where(groups == names[counts.argmax()], "majority", "rest"), "between_groups"
    expected = np.max(
        [fairlearn_difference(*rate, y_true, y_pred, groups, weight, method) for rate in RATES[criterion]]
    )
    np.testing.assert_allclose(value, expected, rtol=0, atol=ROUNDING)
    assert isinstance(value, float)


@pytest.mark.parametrize("method", ["between_groups", "to_overall"])
@checked
@given(sample=samples(), criterion=st.sampled_from(sorted(FUNCTIONS)))
def test_fairlearns_own_function_agrees_when_every_group_has_both_classes(method, sample, criterion):
    y_true, y_pred, groups, weight = sample
    complete = [group for group in set(groups) if len(set(y_true[groups == group])) == 2]
    if not complete:
        return
    keep = np.isin(groups, complete)
    arguments = {
        "sensitive_features": groups[keep],
        "method": method,
        "sample_weight": None if weight is None else weight[keep],
    }
    theirs = getattr(fairlearn, f"{criterion}_difference")(y_true[keep], y_pred[keep], **arguments)
    ours = FUNCTIONS[criterion](y_true[keep], y_pred[keep], **arguments)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDING)


@checked
@given(sample=samples())
def test_group_table_against_counting_by_hand(sample):
    y_true, y_pred, groups, weight = sample
    table = group_table(y_true, y_pred, sensitive_features=groups, sample_weight=weight)
    assert list(table.index) == sorted(set(groups))
    weights = np.ones(len(groups)) if weight is None else weight

    def share(hits, among):
        total = sum(w for w, inside in zip(weights, among, strict=True) if inside)
        return (
            sum(w for w, inside, h in zip(weights, among, hits, strict=True) if inside and h) / total if total else None
        )

    for group, row in table.iterrows():
        mine = groups == group
        assert row["count"] == sum(mine)
        assert row["positives"] == sum(mine & (y_true == 1))
        assert row["negatives"] == sum(mine & (y_true == 0))
        for column, hits, among in (
            ("accuracy", y_true == y_pred, mine),
            ("selection_rate", y_pred == 1, mine),
            ("true_positive_rate", y_pred == 1, mine & (y_true == 1)),
            ("false_positive_rate", y_pred == 1, mine & (y_true == 0)),
        ):
            expected = share(hits, among)
            if expected is None:
                assert math.isnan(row[column])
            else:
                assert row[column] == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize("method", CONVENTIONS)
@checked
@given(sample=samples(), criterion=st.sampled_from(sorted(FUNCTIONS)), data=st.data())
def test_a_whole_weight_equals_repeated_rows(method, sample, criterion, data):
    y_true, y_pred, groups, _ = sample
    times = np.array(data.draw(st.lists(st.integers(1, 3), min_size=len(groups), max_size=len(groups))))
    if method == "majority_vs_rest":
        times[:] = times[0]  # the majority is counted in rows, which repeating changes
    repeated = [np.repeat(column, times) for column in (y_true, y_pred, groups)]
    weighted = quietly(
        FUNCTIONS[criterion], y_true, y_pred, sensitive_features=groups, method=method, sample_weight=times
    )
    plain = quietly(FUNCTIONS[criterion], *repeated[:2], sensitive_features=repeated[2], method=method)
    np.testing.assert_allclose(weighted, plain, rtol=0, atol=ROUNDING)


def test_a_group_without_positives_is_left_out_and_reported():
    y_true, y_pred = [1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1]
    groups = ["a", "a", "b", "b", "c", "c"]
    assert fairlearn.equal_opportunity_difference(y_true, y_pred, sensitive_features=groups) == 1.0
    with pytest.warns(GroupLeftOut, match=r"true_positive_rate: no positives in group\(s\) 'c'; left out"):
        value = equal_opportunity_difference(y_true, y_pred, sensitive_features=groups)
    assert value == 0.5
    result = disparity(y_true, y_pred, sensitive_features=groups)
    assert result.value == 0.5
    assert result.left_out == {"true_positive_rate": ["c"]}
    assert math.isnan(result.table.loc["c", "true_positive_rate"])
    assert result.table.loc["c", "positives"] == 0


@pytest.mark.parametrize(
    ("y_true", "y_pred", "groups", "options", "left_out", "value"),
    [
        ([1, 0, 1, 0, 1], [1, 1, 1, 0, 0], "aabbc", {"criterion": "equalized_odds"}, {"false_positive_rate": ["c"]}, 1.0),
        (
            [1, 0, 1, 0], [1, 0, 1, 1], "aabb", {"criterion": "demographic_parity", "sample_weight": [1, 1, 0, 0]},
            {"selection_rate": ["b"]}, math.nan,
        ),
    ],
    ids=["without negatives", "without weight"],
)  # fmt: skip
def test_other_groups_that_are_left_out(y_true, y_pred, groups, options, left_out, value):
    result = disparity(y_true, y_pred, sensitive_features=list(groups), **options)
    assert result.left_out == left_out
    np.testing.assert_equal(result.value, value)


def test_one_comparable_group_of_several_has_no_gap_to_report():
    with pytest.warns(GroupLeftOut):
        assert math.isnan(equal_opportunity_difference([1, 0], [1, 1], sensitive_features=["a", "b"]))
    # A single group has no gap either, but nothing was left out: 0, as fairlearn says.
    for method in CONVENTIONS:
        assert equal_opportunity_difference([1, 1], [1, 0], sensitive_features=["a", "a"], method=method) == 0.0


def test_majority_against_the_rest_pools_the_rest():
    y_true = [1] * 7
    y_pred = [1, 1, 0, 0, 1, 1, 1]
    groups = ["w", "w", "w", "w", "x", "y", "y"]
    value = equal_opportunity_difference(y_true, y_pred, sensitive_features=groups, method="majority_vs_rest")
    assert value == 0.5


@pytest.mark.parametrize("make", [list, np.array, pd.Series, pl.Series, lambda v: pd.Series(v, dtype="category")])
def test_any_container_and_text_labels(make):
    y_true, y_pred = make(["good", "bad", "bad", "bad"]), make(["bad", "bad", "good", "bad"])
    groups = make(["a", "a", "b", "b"])
    assert equal_opportunity_difference(y_true, y_pred, sensitive_features=groups, pos_label="bad") == 0.5
    assert accuracy(y_true, y_pred) == 0.5


def test_several_sensitive_columns_and_shuffled_index():
    table = pd.DataFrame({"race": ["x", "y", "x", "y"], "sex": ["f", "f", "m", "m"]}, index=[3, 1, 2, 0])
    result = group_table(pd.Series([1, 1, 1, 1], index=[9, 8, 7, 6]), [1, 1, 0, 1], sensitive_features=table)
    assert result["true_positive_rate"].to_dict() == {"x & f": 1.0, "x & m": 0.0, "y & f": 1.0, "y & m": 1.0}


@checked
@given(sample=samples())
def test_balanced_accuracy_equals_scikit_learns(sample):
    y_true, y_pred, _, weight = sample
    expected = balanced_accuracy_score(y_true, y_pred, sample_weight=weight)
    assert balanced_accuracy(y_true, y_pred, sample_weight=weight) == pytest.approx(expected, abs=ROUNDING)


@checked
@given(sample=samples(), data=st.data())
def test_auc_is_the_share_of_pairs_in_the_right_order(sample, data):
    y_true, _, _, weight = sample
    score = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(y_true), max_size=len(y_true))))
    weights = np.ones(len(y_true)) if weight is None else weight
    won = total = 0.0
    for i in np.flatnonzero(y_true == 1):
        for j in np.flatnonzero(y_true == 0):
            total += weights[i] * weights[j]
            won += weights[i] * weights[j] * ((score[i] > score[j]) + 0.5 * (score[i] == score[j]))
    assert auc(y_true, score, sample_weight=weight) == pytest.approx(won / total, abs=1e-9)


def test_accuracy_with_weights_and_more_classes():
    assert accuracy(["a", "b", "c"], ["a", "b", "a"], sample_weight=[1, 1, 2]) == 0.5
    assert balanced_accuracy([0, 0, 1], [0, 2, 1]) == 0.75


GOOD = {"y_true": [0, 1, 1, 0], "y_pred": [0, 1, 0, 1], "sensitive_features": ["a", "a", "b", "b"]}


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), disparity, group_table])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sensitive_features": ["a", None, "b", "b"]},
            r"sensitive_features has 1 missing value\(s\), the first in row 1",
        ),
        ({"sensitive_features": ["a", "b"]}, "sensitive_features has 2 rows but y_true has 4"),
        ({"y_pred": [0, 1]}, "y_pred has 2 rows but y_true has 4"),
        ({"y_true": [0, 2, 2, 0]}, "y_true must hold 0/1, False/True or -1/1, but it holds 0, 2"),
        ({"y_pred": [0.2, 0.7, 0.1, 0.4]}, "y_pred must hold 0/1"),
        ({"sample_weight": [1, 1, 1]}, "sample_weight has 3 rows but y_true has 4"),
        ({"sample_weight": [1, 1, 1, -1]}, "sample_weight must hold finite numbers, none negative"),
        ({"sample_weight": [0, 0, 0, 0]}, "sample_weight must hold finite numbers, none negative and not all 0"),
        ({"sample_weight": [1, 1, 1, np.nan]}, "sample_weight must hold finite numbers"),
        ({"y_true": [], "y_pred": [], "sensitive_features": []}, "y_true has no rows"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(function, change, message):
    with pytest.raises(ValueError, match=message):
        function(**(GOOD | change))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: disparity(**GOOD, method="overall"),
            "method='overall' is unknown; choose one of between_groups, to_ov",
        ),
        (lambda: disparity(**GOOD, criterion="eqopp"), "criterion='eqopp' is unknown; choose one of equal_opportunity"),
        (
            lambda: equal_opportunity_difference([0, 0], [0, 1], sensitive_features=[1, 2]),
            "one class only, no positives",
        ),
        (lambda: equalized_odds_difference([1, 1], [0, 1], sensitive_features=[1, 2]), "one class only, no negatives"),
        (lambda: auc([1, 1], [0.2, 0.3]), "y_true holds one class only: the AUC is undefined"),
        (lambda: auc([0, 1], [0.2, np.nan]), "y_score has missing or infinite values"),
        (lambda: auc([0, 1], [0.2]), "y_score has 1 rows but y_true has 2"),
        (lambda: balanced_accuracy([1, 1], [0, 1]), "one class only: the balanced accuracy is undefined"),
        (lambda: accuracy([1, None], [0, 1]), r"y_true has 1 missing value\(s\)"),
        (lambda: accuracy([1, 0], [0, 1, 1]), "y_pred has 3 rows but y_true has 2"),
    ],
)
def test_other_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


GROUPS = ("a", "b", "c")
SCHEMA = Schema("y", ("0", "1"), "1", ("sex",), GROUPS, (Column("x"),))


@pytest.fixture(params=range(3))
def rows(request):
    rng = np.random.default_rng(request.param)
    groups, labels, decided = (rng.integers(0, high, 60) for high in (3, 2, 2))
    if request.param == 2:
        labels[groups == 1] = 0  # a group without positives has no true positive rate
    return labels, decided, groups


def counted(labels, decided, groups):
    cells = np.zeros((3, 2, 2), int)
    for place in zip(groups, labels, decided, strict=True):
        cells[place] += 1
    return Counts(cells)


@pytest.mark.parametrize("metric", CRITERIA)
@pytest.mark.parametrize("method", CONVENTIONS)
def test_accuracy_and_gap(rows, metric, method):
    labels, decided, groups = rows
    counts = counted(*rows)
    np.testing.assert_array_equal(Counts.of(*rows, 3).cells, counts.cells)
    names = np.array(GROUPS)[groups]
    wanted = disparity(labels, decided, sensitive_features=names, criterion=metric, method=method).value
    assert float(counts.gap(metric, method)) == wanted
    if method == "between_groups":
        row = measured("train", Tally(counts, None, GROUPS, 3), SCHEMA, metric, 10, "FedAvg").row
        assert row["train_accuracy"] == (labels == decided).mean()
        assert row["train_gap"] == wanted
        assert row["train_gap_low"] <= wanted <= row["train_gap_high"]


def test_the_lead_of_the_majority_has_a_sign():
    labels, decided, groups = np.ones(5, int), np.array([0, 0, 1, 1, 0]), np.array([0, 0, 0, 1, 2])
    assert Counts.of(labels, decided, groups, 3).lead("true_positive_rate") == pytest.approx(1 / 3 - 1 / 2)


def test_rates_of_groups(rows):
    labels, decided, groups = rows
    told = measured("train", Tally(counted(*rows), None, GROUPS, 3), SCHEMA, "equal_opportunity", 10, "")
    found = told.groups.set_index("group")
    wanted = group_table(labels, decided, sensitive_features=np.array(GROUPS)[groups])
    for column in wanted.columns.drop(["negatives", "selected"]):
        np.testing.assert_array_equal(found[column], wanted[column], err_msg=column)
    for rate in ("selection_rate", "true_positive_rate", "false_positive_rate", "accuracy"):
        known = found.dropna(subset=rate)
        assert known[rate].between(known[f"{rate}_low"], known[f"{rate}_high"]).all(), rate


def test_a_group_without_rows_is_left_out():
    counts = counted(np.array([0, 1]), np.array([1, 1]), np.array([0, 2]))
    found = measured("train", Tally(counts, None, GROUPS, 3), SCHEMA, "equal_opportunity", 10, "")
    assert found.groups["group"].tolist() == ["a", "c"]
    assert {finding.code for finding in found.found} >= {"group-without-positives", "group-without-negatives"}
    assert counts.present().cells.shape == (2, 2, 2)


def test_counts_of_clients_add_up(rows):
    weight = np.random.default_rng(3).random(60)
    for options in ({}, {"weight": weight}):
        parts = [
            Counts.of(*(column[some] for column in rows), 3, **{name: value[some] for name, value in options.items()})
            for some in (slice(20), slice(20, None))
        ]
        whole, added = Counts.of(*rows, 3, **options), parts[0] + parts[1]
        np.testing.assert_array_equal(added.cells, whole.cells)
        np.testing.assert_allclose(added.gap("equalized_odds"), whole.gap("equalized_odds"), rtol=1e-12)


@pytest.mark.parametrize("method", CONVENTIONS)
def test_further_axes_are_kept(rows, method):
    several = [counted(*rows), counted(*(column[:30] for column in rows)), counted(*(column[:2] for column in rows))]
    together = Counts.stack(several)
    for answer in (
        lambda counts: counts.gap("equal_opportunity", method),
        lambda counts: counts.balanced_accuracy(),
        lambda counts: counts.rates("accuracy"),
        lambda counts: counts.overall("selection_rate"),
    ):
        np.testing.assert_array_equal(answer(together), np.stack([answer(counts) for counts in several]))


@pytest.mark.parametrize("metric", CRITERIA)
@pytest.mark.parametrize("method", CONVENTIONS)
def test_of_several_classes_each_is_held_against_all_others(metric, method):
    """Rates are those of the two-class table "this class or not"; the gap is the largest of theirs; further axes stay."""
    rng = np.random.default_rng(4)
    groups, labels, decided = rng.integers(0, 3, 90), rng.integers(0, 4, 90), rng.integers(0, 4, 90)
    labels[(groups == 1) & (labels == 3)] = 0
    counts = Counts.of(labels, decided, groups, 3, classes=4)
    each = [Counts.of(labels == c, decided == c, groups, 3) for c in range(4)]
    for rate in ("true_positive_rate", "false_positive_rate", "selection_rate"):
        np.testing.assert_array_equal(counts.rates(rate), [one.rates(rate) for one in each])
        np.testing.assert_array_equal(counts.overall(rate), [one.overall(rate) for one in each])
        np.testing.assert_array_equal(counts.lead(rate), [one.lead(rate) for one in each])
    gaps = [float(one.gap(metric, method)) for one in each]
    assert float(counts.gap(metric, method)) == np.nanmax(gaps)
    names = np.array(GROUPS)[groups]
    found = disparity(labels, decided, sensitive_features=names, criterion=metric, method=method)
    assert found.value == np.nanmax(gaps)
    assert found.left_out.get("true_positive_rate", [("b", 3)]) == [("b", 3)]
    by_class = group_table(labels, decided, sensitive_features=names)
    assert by_class.index.names == ["group", "label"]
    np.testing.assert_array_equal(
        by_class.xs(2, level="label")["true_positive_rate"], each[2].rates("true_positive_rate")
    )
    assert by_class.loc[("b", 3), "positives"] == 0
    stacked = Counts.stack([counts, counts])
    assert stacked.gap(metric, method).tolist() == [float(counts.gap(metric, method))] * 2
    assert float(counts.balanced_accuracy()) == pytest.approx(balanced_accuracy_score(labels, decided))
    fewer = counts.gathered([0, 1, 0], 2)
    np.testing.assert_array_equal(
        fewer.cells, Counts.of(labels, decided, np.array([0, 1, 0])[groups], 2, classes=4).cells
    )
    with pytest.raises(ValueError, match="y_pred holds the class 7, which y_true does not have"):
        group_table(labels, np.where(decided == 1, 7, decided), sensitive_features=names)
    if method == "mean_pairwise":  # which has no such interval
        return
    low, high = gap_ends(counts, metric, method)
    # Wider than those of any class by itself below, where more is claimed at once; equal above.
    alone = [gap_ends(one, metric, method) for one in each]
    assert low <= np.nanmax([ends[0] for ends in alone])
    assert high == np.nanmax([ends[1] for ends in alone])


def test_the_difference_of_two_gaps_of_several_classes():
    """Of two models on the same rows: its interval holds for the population of which they are a sample."""
    rng = np.random.default_rng(2)
    size, hits = 120_000, 0
    groups, labels = rng.integers(0, 2, size), rng.integers(0, 3, size)
    right = rng.random(size) < np.where((groups == 1) & (labels == 2), 0.5, 0.8)
    ours = np.where(right, labels, (labels + 1) % 3)
    theirs = np.where(rng.random(size) < 0.7, labels, rng.integers(0, 3, size))

    def joint(some):
        place = np.ravel_multi_index(tuple(column[some] for column in (groups, labels, ours, theirs)), (2, 3, 3, 3))
        return np.bincount(place, minlength=54).reshape(2, 3, 3, 3)

    def gap_difference(table):
        return float(
            Counts(table.sum(axis=-1)).gap("equal_opportunity") - Counts(table.sum(axis=-2)).gap("equal_opportunity")
        )

    true = gap_difference(joint(slice(None)))
    assert true > 0.2
    for number in range(200):
        table = joint(slice(600 * number, 600 * (number + 1)))
        low, high = gap_difference_ends(table, "equal_opportunity")
        assert low <= gap_difference(table) <= high
        hits += low <= true <= high
    assert hits >= 186  # 93 % of 200


def test_wilson_against_scipy():
    cases = ((0, 7), (3, 11), (400, 500), (7, 7))
    for level in (0.9, 0.95):
        low, high = wilson([hits / size for hits, size in cases], [size for _, size in cases], level)
        exact = [stats.binomtest(*case).proportion_ci(level, "wilson") for case in cases]
        np.testing.assert_allclose(np.transpose([low, high]), exact, rtol=0, atol=1e-12)
    assert np.isnan(wilson(np.nan, 5)).all()
    assert np.isnan(wilson(0.5, 0)).all()
    low, high = wilson(1.0, 3)
    np.testing.assert_allclose([low, high], [0.4385, 1.0], atol=1e-4)
