"""What follows from counts equals what follows from the rows; counts add up over clients and over further axes."""

import numpy as np
import pytest
from scipy import stats

from fedbilevel.fairness.bootstrap import redrawn_counts
from fedbilevel.fairness.counts import CRITERIA, METHODS, Counts, wilson
from fedbilevel.fairness.metrics import disparity, group_table
from fedbilevel.jobs.fit.measure import group_rows, quality

GROUPS = ("a", "b", "c")


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
@pytest.mark.parametrize("method", METHODS)
def test_accuracy_and_gap(rows, metric, method):
    labels, decided, groups = rows
    counts = counted(*rows)
    np.testing.assert_array_equal(Counts.of(*rows, 3).cells, counts.cells)
    names = np.array(GROUPS)[groups]
    wanted = disparity(labels, decided, sensitive_features=names, criterion=metric, method=method).value
    assert float(counts.gap(metric, method)) == wanted
    if method == "between_groups":
        assert quality("train", counts, metric) == {"train_accuracy": (labels == decided).mean(), "train_gap": wanted}


def test_the_lead_of_the_majority_has_a_sign():
    labels, decided, groups = np.ones(5, int), np.array([0, 0, 1, 1, 0]), np.array([0, 0, 0, 1, 2])
    assert Counts.of(labels, decided, groups, 3).lead("true_positive_rate") == pytest.approx(1 / 3 - 1 / 2)


def test_rates_of_groups(rows):
    labels, decided, groups = rows
    found = group_rows("train", counted(*rows), GROUPS).set_index("group")
    wanted = group_table(labels, decided, sensitive_features=np.array(GROUPS)[groups])
    for column in wanted.columns.drop("negatives"):
        np.testing.assert_array_equal(found[column], wanted[column], err_msg=column)
    inside = found["selection_rate"].between(found["selection_rate_low"], found["selection_rate_high"])
    assert inside.all()


def test_a_group_without_rows_is_left_out():
    counts = counted(np.array([0, 1]), np.array([1, 1]), np.array([0, 2]))
    assert group_rows("train", counts, GROUPS)["group"].tolist() == ["a", "c"]
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


@pytest.mark.parametrize("method", METHODS)
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


def test_redrawn_counts_keep_the_cells_and_pair_the_models(rows):
    labels, decided, groups = rows
    ours, theirs = redrawn_counts(labels, [decided, ~decided.astype(bool)], groups, 3, resamples=50, seed=0)
    sizes = counted(*rows).cells.sum(axis=-1)
    assert (ours.cells.sum(axis=-1) == sizes).all()
    np.testing.assert_array_equal(ours.cells, theirs.cells[..., ::-1])
    assert len(np.unique(ours.overall("accuracy"))) > 5


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
