"""Sums for predicted numbers: against scikit-learn and loops, additive, and their intervals hold."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from fedbilevel.fairness.moments import CRITERIA, MEASURES, Moments, Scale, differences

ROUNDING = 1e-10


def people(rows, seed=0, groups=3, lift=0.4):
    """True and predicted numbers, heavy tails; the prediction is too high for group 0 and too low for the last."""
    rng = np.random.default_rng(seed)
    codes = rng.choice(groups, rows, p=np.arange(groups, 0, -1) / (groups * (groups + 1) / 2))
    true = rng.standard_t(8, rows) + 0.3 * codes
    predicted = 0.7 * true + 0.5 * rng.normal(size=rows) + lift * (codes == 0)
    return true, predicted, codes


def test_measures_equal_scikit_learn():
    true, predicted, codes = people(200)
    scale = Scale(50.0, 7.0)
    table = Moments.of(true, predicted, codes, 4).table(["a", "b", "c", "nobody"], scale, 0.95)
    assert table["count"].tolist() == [*np.bincount(codes), 0]
    assert table.loc["nobody", list(MEASURES)].isna().all()
    for number, name in enumerate("abc"):
        y, p = (50 + 7 * values[codes == number] for values in (true, predicted))
        wanted = [
            y.mean(),
            p.mean(),
            (p - y).mean(),
            root_mean_squared_error(y, p),
            mean_absolute_error(y, p),
            r2_score(y, p),
        ]
        np.testing.assert_allclose(table.loc[name, list(MEASURES)].astype(float), wanted, rtol=ROUNDING)
        low, high = stats.ttest_1samp(p - y, 0).confidence_interval()
        np.testing.assert_allclose(table.loc[name, ["mean_error_low", "mean_error_high"]].astype(float), [low, high])
    for measure in MEASURES:
        there = table.dropna(subset=measure)
        assert there[measure].between(there[f"{measure}_low"], there[f"{measure}_high"]).all()


@pytest.mark.parametrize("criterion", CRITERIA)
def test_gaps_equal_loops(criterion):
    true, predicted, codes = people(150)
    values = predicted - true if criterion == "mean_error" else predicted
    each = [values[codes == group] for group in range(3)]
    moments = Moments.of(true, predicted, codes, 3)
    pairs = list(combinations(each, 2))
    assert float(moments.gap(criterion)) == pytest.approx(max(abs(a.mean() - b.mean()) for a, b in pairs))
    welch = [stats.ttest_ind(a, b, equal_var=False).confidence_interval(1 - 0.05 / 3) for a, b in pairs]
    high = max(max(abs(low), abs(top)) for low, top in welch)
    low = max(max(low, -top, 0) for low, top in welch)
    np.testing.assert_allclose(moments.gap_ends(criterion), (low, high), rtol=1e-9)
    two = Moments.of(true, predicted, np.zeros_like(codes), 2)
    assert np.isnan(two.gap(criterion))
    assert np.isnan(two.gap_ends(criterion)).all()


def test_sums_of_clients_add_up():
    rows = people(120)
    parts = [Moments.of(*(column[some] for column in rows), 3) for some in (slice(50), slice(50, None))]
    whole = Moments.of(*rows, 3)
    np.testing.assert_allclose((parts[0] + parts[1]).sums, whole.sums, rtol=ROUNDING)
    fewer = whole.gathered([0, 1, 0], 2)
    np.testing.assert_allclose(fewer.sums, Moments.of(*rows[:2], np.array([0, 1, 0])[rows[2]], 2).sums, rtol=ROUNDING)
    np.testing.assert_allclose(whole.everybody().sums[0], whole.sums.sum(axis=0), rtol=ROUNDING)


def test_intervals_hold():
    """Coverage over 600 samples of 90 rows, nominal 95 %: three standard errors of such a count are 2.7 points.

    R2 and RMSE lean on normality of squares and may lose a little more with heavy tails."""
    true, predicted, codes = people(400_000, seed=5)
    whole = Moments.of(true, predicted, codes, 3)
    hits = dict.fromkeys([*MEASURES, *(f"gap of {criterion}" for criterion in CRITERIA), "difference"], 0)
    other = predicted + 0.3 * (codes == 1)
    wanted = differences(true, predicted, other, codes, 3, "mean_error")["gap"][0]
    samples = 600
    for start in range(0, samples * 90, 90):
        some = slice(start, start + 90)
        part = Moments.of(true[some], predicted[some], codes[some], 3)
        for name in MEASURES:
            (low,), (high,) = part.everybody().ends(name)
            hits[name] += low <= whole.everybody().measure(name)[0] <= high
        for criterion in CRITERIA:
            low, high = part.gap_ends(criterion)
            hits[f"gap of {criterion}"] += low <= whole.gap(criterion) <= high
        _, low, high = differences(true[some], predicted[some], other[some], codes[some], 3, "mean_error")["gap"]
        hits["difference"] += low <= wanted <= high
    covered = {name: count / samples for name, count in hits.items()}
    assert all(rate > (0.90 if name in ("rmse", "r2") else 0.92) for name, rate in covered.items()), covered
