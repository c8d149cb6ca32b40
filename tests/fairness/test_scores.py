"""Predicted probabilities as counts: every measure against scikit-learn on the rows, additivity, and small cells."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm, ttest_ind
from sklearn.metrics import balanced_accuracy_score, brier_score_loss, precision_score, recall_score, roc_auc_score

from fedbilevel.fairness.disclosure import Visible
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.moments import gap_change
from fedbilevel.fairness.scores import ALL, EDGES, Scores, auc_ends, measures, miscalibrations
from fedbilevel.fairness.thresholds import Threshold, decisions


def rows(count=900, seed=0, names=3):
    rng = np.random.default_rng(seed)
    groups, probability = rng.integers(0, names, count), rng.beta(1, 6, count)
    return (rng.random(count) < probability).astype(int), probability, groups


def test_every_measure_is_that_of_the_rows():
    labels, probability, groups = rows()
    probability[:9] = 0.2  # at the threshold a decision is negative
    scores = Scores.of(labels, probability, groups, 3)
    table = measures(scores.counts(0.2), scores, ["a", "b", "c"])
    decided = (probability > 0.2).astype(int)
    oracles = {
        "auc": lambda y, d, p: roc_auc_score(y, p), "brier": lambda y, d, p: brier_score_loss(y, p),
        "true_positive_rate": lambda y, d, p: recall_score(y, d), "precision": lambda y, d, p: precision_score(y, d),
        "balanced_accuracy": lambda y, d, p: balanced_accuracy_score(y, d),
        "calibration": lambda y, d, p: p.mean() - y.mean(), "selection_rate": lambda y, d, p: d.mean(),
    }  # fmt: skip
    assert list(table.index) == [ALL, "a", "b", "c"]
    for place, name in enumerate(table.index):
        part = slice(None) if name == ALL else groups == place - 1
        for measure, oracle in oracles.items():
            value, low, high = (table.loc[name, f"{measure}{end}"] for end in ("", "_low", "_high"))
            assert value == pytest.approx(oracle(labels[part], decided[part], probability[part]), abs=1e-12), measure
            assert low < value < high


def of_classes(count=1200, seed=0, names=2):
    """Three classes with their true probabilities, the last one rare."""
    rng = np.random.default_rng(seed)
    logits = rng.normal([1.0, 0.5, -1.5], 1, (count, 3))
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = (rng.random((count, 1)) > chances.cumsum(axis=1)).sum(axis=1)
    return labels, chances, rng.integers(0, names, count)


def test_every_measure_of_three_classes_is_that_of_the_rows():
    labels, chances, groups = of_classes()
    decided = chances.argmax(axis=1)
    scores = Scores.of(labels, chances, groups, 2)
    table = measures(Counts.of(labels, decided, groups, 2, classes=3), scores, ["a", "b"], classes=list("xyz"))
    own = np.eye(3)[labels]
    for place, name in enumerate((ALL, "a", "b")):
        part = groups >= 0 if name == ALL else groups == place - 1
        for c, label in enumerate("xyz"):
            found = table.loc[name, label]
            assert found["auc"] == pytest.approx(roc_auc_score(own[part, c], chances[part, c]))
            assert found["calibration"] == pytest.approx((chances - own)[part, c].mean())
            assert found["brier"] == pytest.approx(((chances - own)[part] ** 2).sum(axis=1).mean() / 2)
            for measure in ("auc", "brier", "calibration"):
                assert found[f"{measure}_low"] < found[measure] < found[f"{measure}_high"]
        macro = roc_auc_score(labels[part], chances[part], multi_class="ovr")
        assert table.loc[name, "auc"].mean() == pytest.approx(macro)
    sent = [Scores.of(labels[i::2], chances[i::2], groups[i::2], 2) for i in (0, 1)]
    total = sent[0] + Scores.unpacked(sent[1].packed())
    np.testing.assert_allclose(total.sums, scores.sums)
    np.testing.assert_allclose(total.auc(), scores.auc(), atol=2e-3)
    assert (total.of_groups([1], 2).cells == total.cells[2, [1]]).all()


def test_the_threshold_of_three_classes_has_the_best_balanced_accuracy():
    """Where probabilities are right, no other weights of the classes do better, up to what the rows tell."""
    labels, chances, _ = of_classes(40_000, 1)
    chosen = Threshold("auto").choose(Scores.of(labels, chances, np.zeros(40_000, int), 1, minimum=10))
    np.testing.assert_allclose(chosen, np.bincount(labels) / 40_000, atol=0.01)

    def balanced(threshold):
        return balanced_accuracy_score(labels, decisions(chances, threshold))

    others = [chosen * factors for factors in np.random.default_rng(0).lognormal(0, 0.7, (60, 3))]
    assert balanced(chosen) > balanced(0.5) + 0.1
    assert balanced(chosen) > max(map(balanced, others)) - 0.01
    with pytest.raises(ValueError, match="rows of every class"):
        Threshold("auto").choose(Scores.of([0, 1], chances[:2], [0, 0], 1))


def test_intervals_of_the_mean_auc_and_of_the_brier_score_of_three_classes_hold():
    """400 tables of 250 rows: at least 93 % hold the truth, which 200,000 rows tell; 2.2 points are two standard errors."""
    truth = Scores.of(*of_classes(200_000, 10**6, 1), 1)
    held = []
    for seed in range(400):
        scores = Scores.of(*of_classes(250, seed, 1), 1)
        ends = [np.mean(scores.auc_ends(), axis=1)[:, 0], np.array(scores.brier_ends())[:, 0, 0]]
        wanted = truth.auc().mean(), truth.brier()[0, 0]
        held.append([low <= value <= high for (low, high), value in zip(ends, wanted, strict=True)])
    assert (np.mean(held, axis=0) >= 0.93).all(), np.mean(held, axis=0)


def test_scores_of_sites_add_up_and_lose_only_the_ties_of_a_bin():
    labels, probability, groups = rows()
    whole = Scores.of(labels, probability, groups, 3)
    parts = [Scores.of(*(column[i::2] for column in (labels, probability, groups)), 3) for i in (0, 1)]
    total = parts[0] + Scores.unpacked(parts[1].packed())
    assert (total.cells == whole.cells).all()
    np.testing.assert_allclose(total.sums, whole.sums)
    assert total.areas is None
    np.testing.assert_allclose(total.auc(), whole.auc(), atol=2e-3)
    np.testing.assert_allclose(total.brier(), whole.brier())
    above = whole.above()
    for place in (0, 300, len(EDGES) - 1):
        assert (whole.counts(EDGES[place]).cells[..., 1] == above[..., place]).all()
        decided = probability > EDGES[place]
        assert (whole.counts(EDGES[place]).cells == Counts.of(labels, decided, groups, 3).cells).all()
    with pytest.raises(ValueError, match=r"no edge of the bins; the nearest one is 0\.3"):
        whole.counts(0.30001)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Scores.of([1], [1.2], [0], 1)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 25))
def test_no_bin_that_a_site_sends_is_small(seed, minimum):
    labels, probability, groups = rows(400, seed, 2)
    exact, sent = (Scores.of(labels, probability, groups, 2, minimum=least) for least in (1, minimum))
    assert (sent.rows == exact.rows).all()
    np.testing.assert_array_equal(sent.sums, exact.sums)
    enough = exact.rows >= minimum
    assert (sent.cells[enough][sent.cells[enough] > 0] >= minimum).all()
    assert np.abs(sent.above() - exact.above()).max() < 2 * minimum - 1


def test_what_averaging_does_to_few_rows_is_undone():
    """15 positives, told as one place: the AUC of the rows, not ten points more."""
    rng, off = np.random.default_rng(0), []
    label = np.repeat([0, 1], [300, 15])
    for _ in range(40):
        probability = 1 / (1 + np.exp(-rng.normal(1.2 * label - 2, 1)))
        told = Scores.unpacked(Scores.of(label, probability, 0 * label, 1, minimum=10).packed())
        exact = roc_auc_score(label, probability)
        assert (told.spread().rows == told.rows).all()
        off.append([told.auc()[0] - exact, told.spread().auc()[0] - exact])
    before, after = np.mean(off, axis=0)
    assert before > 0.08
    assert abs(after) < 0.01


def test_the_curve_joins_bins_until_no_cell_is_small():
    labels, probability, groups = rows(3000)
    curve = Scores.of(labels, probability, groups, 3).curve(minimum=10)
    positives = (curve["observed"] * curve["count"]).round()
    assert 5 < len(curve) <= 10
    assert curve["count"].sum() == 3000
    assert (positives >= 10).all()
    assert (curve["count"] - positives >= 10).all()
    assert curve["predicted"].is_monotonic_increasing
    assert ((curve["observed_low"] < curve["predicted"]) & (curve["predicted"] < curve["observed_high"])).mean() > 0.8
    assert Scores.of(labels[:40], probability[:40], groups[:40], 3).curve(minimum=10).empty


@pytest.mark.parametrize(("positives", "negatives", "truth"), [(3, 40, 0.8), (10, 10, 0.95), (30, 300, 0.7)])
def test_intervals_of_the_auc_hold(positives, negatives, truth):
    """Binormal scores, 2,000 draws: at least 93 % of the intervals hold the truth; 0.5 points are two standard errors."""
    rng = np.random.default_rng(0)
    shift = np.sqrt(2) * norm.ppf(truth)
    high, low = rng.normal(shift, 1, (2000, positives, 1)), rng.normal(0, 1, (2000, 1, negatives))
    value = (high > low).mean(axis=(1, 2))
    ends = auc_ends(value, positives, negatives)
    assert ((ends[0] <= truth) & (truth <= ends[1])).mean() >= 0.93


@pytest.mark.parametrize(
    ("cells", "known", "shown", "pooled"),
    [
        ([[50, 20], [30, 10]], "labels", [1, 1], [0, 0]),
        ([[50, 20], [30, 0], [0, 0]], "labels", [1, 1, 1], [0, 0, 0]),  # zero is shown
        ([[500, 200], [30, 2], [300, 90]], "", [1, 0, 1], [0, 0, 0]),
        ([[500, 200], [30, 2], [300, 90]], "rows", [1, 0, 1], [0, 0, 0]),  # 32 rows follow, how many positives does not
        ([[500, 200], [3, 2], [300, 90]], "rows", [1, 0, 0], [0, 1, 1]),
        ([[500, 200], [30, 2], [300, 90]], "labels", [1, 0, 0], [0, 1, 1]),
        ([[500, 200], [30, 6], [40, 4]], "labels", [1, 0, 0], [0, 1, 1]),  # together they are ten
        ([[500, 200], [30, 2]], "labels", [0, 0], [1, 1]),
        ([[500, 4], [30, 2]], "labels", [0, 0], [0, 0]),  # not even the total may be shown
    ],
)
def test_small_groups_are_pooled_or_left_out(cells, known, shown, pooled):
    visible = Visible.of(cells, 10, known)
    assert visible.shown.tolist() == [bool(value) for value in shown]
    assert visible.pooled.tolist() == [bool(value) for value in pooled]


CELL = st.integers(0, 40)


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6), st.sampled_from(["", "rows", "labels"]))
def test_nothing_small_follows_from_what_is_shown(cells, known):
    """What an onlooker has: the rows shown, and totals that are known elsewhere.  No difference of them is a small count."""
    cells = np.array(cells)
    visible = Visible.of(cells, 10, known)
    sent = visible.sums(cells)
    assert not ((sent > 0) & (sent < 10)).any()
    rest = cells.sum(axis=0) - sent.sum(axis=0)
    if known == "labels" and sent.any():
        assert not ((rest > 0) & (rest < 10)).any()
    if known == "rows" and sent.any():
        assert rest.sum() == 0 or rest.sum() >= 10
    codes = visible.codes(np.arange(len(cells)))
    names = visible.listed(list("abcdef")[: len(cells)])
    assert codes.max() == len(names) - 1
    assert ((codes == -1) == visible.left_out).all()


def too_sure(count=1500, seed=3, names=3):
    """Of the last group the probabilities are too far from a half; of the others they are right."""
    rng = np.random.default_rng(seed)
    groups, truth = rng.integers(0, names, count), rng.beta(2, 3, count)
    sharper = truth**2 / (truth**2 + (1 - truth) ** 2)
    labels = (rng.random(count) < truth).astype(int)
    return labels, np.where(groups == names - 1, sharper, truth), groups


def moments_by_hand(labels, probability, groups, names):
    """Means of (p - y) p and (p - y) (1 - p) of every group."""
    parts = [(probability[groups == g], labels[groups == g]) for g in range(names)]
    return np.array([[np.mean((p - y) * p) for p, y in parts], [np.mean((p - y) * (1 - p)) for p, y in parts]])


def test_the_calibration_gap_is_that_of_the_rows_and_adds_up():
    labels, probability, groups = too_sure()
    expected = moments_by_hand(labels, probability, groups, 3)
    whole = Scores.of(labels, probability, groups, 3)
    np.testing.assert_allclose(whole.miscalibration()[0], expected, atol=1e-12)
    assert whole.calibration_gap() == pytest.approx(np.ptp(expected, axis=1).max())
    halves = [Scores.of(labels[k::2], probability[k::2], groups[k::2], 3) for k in (0, 1)]
    assert (halves[0] + halves[1]).calibration_gap() == pytest.approx(whole.calibration_gap())
    # The sharp group promises as much on the whole: its mean says nothing, and the two moments do.
    assert np.ptp(whole.calibration()) < whole.calibration_gap()
    joined = whole.gathered([0, 0, 1], 2)
    assert joined.calibration_gap() == pytest.approx(
        np.ptp(moments_by_hand(labels, probability, groups // 2, 2), axis=1).max()
    )
    three = np.stack([1 - probability, 0.4 * probability, 0.6 * probability], axis=1)
    classes = np.where(labels == 0, 0, 1 + (np.arange(len(labels)) % 2))
    several = [moments_by_hand((classes == c).astype(int), three[:, c], groups, 3) for c in range(3)]
    wanted = max(np.ptp(each, axis=1).max() for each in several)
    assert Scores.of(classes, three, groups, 3).calibration_gap() == pytest.approx(wanted)
    assert np.isnan(Scores.of(labels, probability, 0 * groups, 3).calibration_gap())


def test_ends_of_the_calibration_gap_are_welch_s():
    labels, probability, groups = too_sure(names=2)
    scores, values = Scores.of(labels, probability, groups, 2), miscalibrations(labels, probability)
    low, high = scores.calibration_gap_ends(0.9)
    ends = []
    for each in values:  # two comparisons: each at half the share
        found = ttest_ind(each[groups == 0], each[groups == 1], equal_var=False).confidence_interval(0.95)
        ends.append(
            sorted((abs(found.low), abs(found.high)))
            if found.low * found.high > 0
            else (0, max(abs(found.low), found.high))
        )
    np.testing.assert_allclose((low, high), np.max(ends, axis=0), atol=2e-3)  # variances come from bins
    assert low > 0


def test_intervals_of_a_change_of_calibration_hold_it():
    """Of 150 samples at least nine in ten: were the level 95 %, fewer would come about once in a hundred times."""

    def both(labels, probability, groups):
        return miscalibrations(labels, probability), miscalibrations(labels, 0.5 + 0.8 * (probability - 0.5)), groups

    def gap(values, codes):
        return max(abs(np.mean(each[codes == 0]) - np.mean(each[codes == 1])) for each in values)

    ours, theirs, codes = both(*too_sure(400_000, 9, 2))
    truth = gap(ours, codes) - gap(theirs, codes)
    found = []
    for seed in range(150):
        ours, theirs, codes = both(*too_sure(600, 10 + seed, 2))
        found.append(gap_change(ours, theirs, codes, 2))
        assert found[-1][0] == pytest.approx(gap(ours, codes) - gap(theirs, codes))
    _, low, high = np.transpose(found)
    assert np.mean((low <= truth) & (truth <= high)) > 0.9
    assert np.mean(high - low) < 0.1, "and they say something: gaps are of .05"
