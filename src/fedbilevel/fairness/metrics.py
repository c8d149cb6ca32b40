"""How well a classifier does, and how differently it does for different groups.

A disparity compares a rate between groups: the true positive rate (equal opportunity), true and false positive rates
(equalized odds), the selection rate (demographic parity); `fedbilevel.fairness.counts` has the rates and the three ways to
compare them.

"between_groups" and "to_overall" equal fairlearn's functions of the same names, with one deliberate difference. A group
without positives has no true positive rate. Fairlearn counts it as 0, which makes the gap large for no fault of the classifier;
here the group is left out, and that is reported: `disparity` lists it in `left_out`, the plain functions warn (`GroupLeftOut`).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.fairness.counts import CRITERIA, METHODS, RATES, Counts, Floats
from fedbilevel.tables.columns import binary_labels, check_lengths, encode_groups, listed, to_series


class GroupLeftOut(UserWarning):
    """A group has no rows that a rate could be computed from and was left out of a disparity."""


@dataclass(frozen=True)
class Disparity:
    """A disparity and what it came from.

    Attributes:
        value: the disparity; NaN if fewer than two of several groups can be compared.
        criterion: "equal_opportunity", "equalized_odds" or "demographic_parity".
        method: "between_groups", "to_overall" or "majority_vs_rest".
        table: the per-group table, see `group_table`.
        left_out: per rate, the groups that have none (without positives, negatives, or weight).
    """

    value: float
    criterion: str
    method: str
    table: pd.DataFrame
    left_out: dict[str, list[Any]]


class Encoded(NamedTuple):
    """Checked inputs as arrays: what resampling works on."""

    y_true: NDArray[np.int8]
    y_pred: NDArray[np.int8]
    groups: NDArray[np.int32]
    names: list[Any]
    weight: Floats | None

    @property
    def counts(self) -> Counts:
        return Counts.of(self.y_true, self.y_pred, self.groups, len(self.names), self.weight)


def equal_opportunity_difference(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    method: str = "between_groups",
    sample_weight: Any = None,
    pos_label: Any = None,
) -> float:
    """Disparity of the true positive rates: of the people who merit a positive decision, who gets it?

    >>> equal_opportunity_difference([1, 1, 1, 1], [1, 0, 1, 1], sensitive_features=["a", "a", "b", "b"])
    0.5
    """
    return _plain("equal_opportunity", method, y_true, y_pred, sensitive_features, sample_weight, pos_label)


def equalized_odds_difference(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    method: str = "between_groups",
    sample_weight: Any = None,
    pos_label: Any = None,
) -> float:
    """The larger of the disparities of the true and of the false positive rates."""
    return _plain("equalized_odds", method, y_true, y_pred, sensitive_features, sample_weight, pos_label)


def demographic_parity_difference(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    method: str = "between_groups",
    sample_weight: Any = None,
    pos_label: Any = None,
) -> float:
    """Disparity of the selection rates; `y_true` is accepted for the common signature and only checked."""
    return _plain("demographic_parity", method, y_true, y_pred, sensitive_features, sample_weight, pos_label)


def disparity(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    criterion: str = "equal_opportunity",
    method: str = "between_groups",
    sample_weight: Any = None,
    pos_label: Any = None,
) -> Disparity:
    """A disparity with the per-group table behind it and the groups that had to be left out; does not warn."""
    check_choice("criterion", criterion, tuple(CRITERIA))
    check_choice("method", method, METHODS)
    data = encode(y_true, y_pred, sensitive_features, sample_weight, pos_label)
    counts = data.counts
    left_out = {}
    for rate in CRITERIA[criterion]:
        if not counts.among(rate).any():
            raise ValueError(f"y_true holds one class only, no {_among(rate)}: {criterion} is undefined.")
        without = [name for name, value in zip(data.names, counts.rates(rate), strict=True) if math.isnan(value)]
        if without:
            left_out[rate] = without
    value = float(counts.gap(criterion, method))
    return Disparity(value, criterion, method, counts.table(data.names), left_out)


def group_table(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    sample_weight: Any = None,
    pos_label: Any = None,
) -> pd.DataFrame:
    """One row per group, sorted: how many rows, positives and negatives, and the rates; NaN where a rate has no rows.

    The counts are numbers of rows, whatever the weights; the rates are weighted.

    >>> group_table([1, 0, 1, 1], [1, 0, 0, 1], sensitive_features=["a", "a", "b", "b"])["accuracy"].to_dict()
    {'a': 1.0, 'b': 0.5}
    """
    data = encode(y_true, y_pred, sensitive_features, sample_weight, pos_label)
    return data.counts.table(data.names)


def accuracy(y_true: Any, y_pred: Any, *, sample_weight: Any = None) -> float:
    """Share of the rows predicted rightly; any number of classes."""
    from sklearn.metrics import accuracy_score

    true, predicted, weight = _labels_and_weight(y_true, y_pred, sample_weight)
    return float(accuracy_score(true, predicted, sample_weight=weight))


def balanced_accuracy(y_true: Any, y_pred: Any, *, sample_weight: Any = None) -> float:
    """Mean over the classes of the share of their rows predicted rightly."""
    from sklearn.metrics import recall_score

    true, predicted, weight = _labels_and_weight(y_true, y_pred, sample_weight)
    classes = pd.unique(true)
    if len(classes) < 2:
        raise ValueError("y_true holds one class only: the balanced accuracy is undefined.")
    # Not balanced_accuracy_score: it warns when a class is predicted that no row has, which is an ordinary error.
    return float(recall_score(true, predicted, labels=classes, average="macro", sample_weight=weight, zero_division=0))


def auc(y_true: Any, y_score: Any, *, sample_weight: Any = None, pos_label: Any = None) -> float:
    """Area under the ROC curve: how often a positive row scores higher than a negative one."""
    from sklearn.metrics import roc_auc_score

    true = binary_labels(y_true, "y_true", pos_label=pos_label)
    score = np.asarray(to_series(y_score, "y_score"), dtype=np.float64)
    weight = _weight(sample_weight)
    check_lengths(y_true=true, y_score=score, sample_weight=weight)
    if not np.isfinite(score).all():
        raise ValueError("y_score has missing or infinite values.")
    if true.min() == true.max():
        raise ValueError("y_true holds one class only: the AUC is undefined.")
    return float(roc_auc_score(true, score, sample_weight=weight))


def encode(y_true: Any, y_pred: Any, sensitive_features: Any, sample_weight: Any, pos_label: Any) -> Encoded:
    """The inputs of a group metric, checked and turned into arrays."""
    true = binary_labels(y_true, "y_true", pos_label=pos_label)
    predicted = binary_labels(y_pred, "y_pred", pos_label=pos_label)
    groups, names = encode_groups(sensitive_features)
    weight = _weight(sample_weight)
    check_lengths(y_true=true, y_pred=predicted, sensitive_features=groups, sample_weight=weight)
    return Encoded(true, predicted, groups, names, weight)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}.")


def _plain(criterion: str, method: str, y_true: Any, y_pred: Any, groups: Any, weight: Any, pos_label: Any) -> float:
    result = disparity(
        y_true,
        y_pred,
        sensitive_features=groups,
        criterion=criterion,
        method=method,
        sample_weight=weight,
        pos_label=pos_label,
    )
    for rate, names in result.left_out.items():
        warnings.warn(f"{rate}: no {_among(rate)} in group(s) {listed(names)}; left out.", GroupLeftOut, stacklevel=3)
    return result.value


def _among(rate: str) -> str:
    """The rows that a rate is about, in words."""
    return RATES[rate].replace("count", "rows")


def _weight(sample_weight: Any) -> Floats | None:
    if sample_weight is None:
        return None
    weight = np.asarray(to_series(sample_weight, "sample_weight"), dtype=np.float64)
    if not np.isfinite(weight).all() or (weight < 0).any() or not (weight > 0).any():
        raise ValueError("sample_weight must hold finite numbers, none negative and not all 0.")
    return weight


def _labels_and_weight(y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any, Floats | None]:
    true, predicted = to_series(y_true, "y_true"), to_series(y_pred, "y_pred")
    weight = _weight(sample_weight)
    check_lengths(y_true=true, y_pred=predicted, sample_weight=weight)
    for name, labels in (("y_true", true), ("y_pred", predicted)):
        if labels.isna().any():
            raise ValueError(f"{name} has {int(labels.isna().sum())} missing value(s).")
    return true.to_numpy(), predicted.to_numpy(), weight
