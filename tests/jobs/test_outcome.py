"""Rates and gaps from counts equal those from the rows."""

import numpy as np
import pytest

from fedbilevel.fairness.metrics import disparity, group_table
from fedbilevel.jobs.outcome import from_counts, group_counts

GROUPS = ("a", "b", "c")


@pytest.fixture(params=range(3))
def rows(request):
    rng = np.random.default_rng(request.param)
    groups, labels, decided = (rng.integers(0, high, 60) for high in (3, 2, 2))
    if request.param == 2:
        labels[groups == 1] = 0  # a group without positives has no true positive rate
    return groups, labels, decided


def counted(groups, labels, decided):
    counts = np.zeros((3, 2, 2), int)
    for place in zip(groups, labels, decided, strict=True):
        counts[place] += 1
    return counts


@pytest.mark.parametrize("metric", ["equal_opportunity", "equalized_odds", "demographic_parity"])
def test_accuracy_and_gap(rows, metric):
    groups, labels, decided = rows
    found = from_counts("train", counted(*rows), metric)
    names = np.array(GROUPS)[groups]
    wanted = disparity(labels, decided, sensitive_features=names, criterion=metric).value
    assert found == {
        "train_accuracy": pytest.approx((labels == decided).mean()),
        "train_gap": pytest.approx(wanted),
    }


def test_rates_of_groups(rows):
    groups, labels, decided = rows
    found = group_counts("train", counted(*rows), GROUPS).set_index("group")
    wanted = group_table(labels, decided, sensitive_features=np.array(GROUPS)[groups])
    for column in (
        "count", "positives", "accuracy", "selection_rate", "true_positive_rate", "false_positive_rate",
    ):  # fmt: skip
        np.testing.assert_allclose(found[column], wanted[column], rtol=1e-12, err_msg=column)
    inside = found["selection_rate"].between(found["selection_rate_low"], found["selection_rate_high"])
    assert inside.all()


def test_a_group_without_rows_is_left_out():
    counts = counted(np.array([0, 2]), np.array([0, 1]), np.array([1, 1]))
    assert group_counts("train", counts, GROUPS)["group"].tolist() == ["a", "c"]
