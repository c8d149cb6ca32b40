"""How well a classifier does, and how differently it does for different groups: integers first, then rates, then gaps.

`Counts` says how often each group, with each label, got each decision; every rate, gap and interval follows from it.  Counts of
two sets of rows add up, so a site can send its own and nobody needs the rows:

    counts = Counts.of(labels, decisions, groups, names=2)          # codes: 0/1, 0/1, 0..names-1
    total  = counts + Counts(received)                              # received: integers [group, label, decision]
    total.rates("true_positive_rate"), total.overall("accuracy")    # by group; over all groups
    total.gap("equal_opportunity", "between_groups"), total.lead("true_positive_rate")
    total.wilson("true_positive_rate"), total.table(["f", "m"])     # interval of every group's rate; everything as a table

In front of [group, label, decision] there may be further axes (resamples, models, seeds): all answers then have them too.
A rate without rows is NaN, and so is a gap where fewer than two of several groups have the rate.

With more than two classes, each is held against all others: it has the rates of a positive class, answers have an axis of
classes before that of groups, and the gap of a criterion is the largest of the classes'.  A class whose rate fewer than two
groups have is left out of that.  Two classes: the positive one alone is held against the other, which is the usual definition.

A disparity compares a rate between groups (`CRITERIA`): the true positive rate (equal opportunity), true and false positive
rates (equalized odds), the selection rate (demographic parity); in one of four ways (`CONVENTIONS`):

    between_groups     the largest rate minus the smallest
    to_overall         the largest distance of a group's rate to the rate over all rows
    majority_vs_rest   the distance between the largest group (in rows) and all others taken together
    mean_pairwise      the mean distance between two groups, over all pairs of them

The first two equal fairlearn's functions of the same names, with one deliberate difference.  A group without positives has no
true positive rate.  Fairlearn counts it as 0, which makes the gap large for no fault of the classifier; here the group is
left out, and that is reported: `disparity` lists it in `left_out`, the plain functions warn (`GroupLeftOut`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.tables.columns import JOIN, binary_labels, check_lengths, encode_groups, listed, to_frame, to_series

CONVENTIONS = ("between_groups", "to_overall", "majority_vs_rest", "mean_pairwise")
# Criterion: the rates it compares. Of several rates the largest disparity counts.
CRITERIA = {
    "equal_opportunity": ("true_positive_rate",),
    "equalized_odds": ("true_positive_rate", "false_positive_rate"),
    "demographic_parity": ("selection_rate",),
}
# Rate: the rows it is a rate among, as a column of `Counts.table`.
RATES = {
    "true_positive_rate": "positives",
    "false_positive_rate": "negatives",
    "selection_rate": "count",
    "accuracy": "count",
    "precision": "selected",
}

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Counts:
    """Rows by group, label and decision.

    Attributes:
        cells: integers [..., group, label, decision].
        weights: sums of the rows' weights in the same places, if they have any.  Rates are then shares of weight; counts and
            the majority remain those of rows.
    """

    cells: Integers
    weights: Floats | None = None

    @classmethod
    def of(
        cls, labels: Any, decisions: Any, groups: Any, names: int, weight: Floats | None = None, classes: int = 2
    ) -> Counts:
        """Count rows given as codes: ``groups`` from 0 to ``names`` - 1, the others from 0 to ``classes`` - 1."""
        codes = (np.asarray(column, np.int64) for column in (groups, labels, decisions))
        shape = (names, classes, classes)
        place = np.ravel_multi_index(tuple(codes), shape)
        size = names * classes**2
        sums = None if weight is None else np.asarray(np.bincount(place, weight, size).reshape(shape), np.float64)
        return cls(np.bincount(place, minlength=size).reshape(shape), sums)

    @classmethod
    def stack(cls, several: Sequence[Counts]) -> Counts:
        """Counts of the same groups along a new first axis."""
        weights = [counts.weights for counts in several if counts.weights is not None]
        return cls(np.stack([counts.cells for counts in several]), np.stack(weights) if weights else None)

    def __add__(self, other: Counts) -> Counts:
        both = None if self.weights is None or other.weights is None else self.weights + other.weights
        return Counts(self.cells + other.cells, both)

    @property
    def classes(self) -> int:
        return int(self.cells.shape[-1])

    @property
    def rows(self) -> Integers:
        """Rows by group."""
        return np.asarray(self.cells.sum(axis=(-2, -1)))

    def among(self, rate: str) -> Integers:
        """Rows that ``rate`` is a rate among, by group."""
        return np.asarray(parts(self.cells, rate)[1])

    def rates(self, rate: str) -> Floats:
        """``rate`` by group."""
        return ratio(*parts(self._measured, rate))

    def overall(self, rate: str) -> Floats:
        """``rate`` over all groups."""
        above, below = parts(self._measured, rate)
        return ratio(above.sum(axis=-1), below.sum(axis=-1))

    def balanced_accuracy(self, by_group: bool = False) -> Floats:
        """Mean over the classes of the share of their rows decided rightly."""
        by_class = self._measured if by_group else self._measured.sum(axis=-3)
        right = ratio(np.diagonal(by_class, axis1=-2, axis2=-1), by_class.sum(axis=-1))
        return np.asarray(right.sum(axis=-1) / self.classes)

    def balanced_accuracy_ends(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """By group: the distances to Wilson's ends of the classes' rates, squared and added (MOVER)."""
        right, rows = np.diagonal(self._measured, axis1=-2, axis2=-1), self._measured.sum(axis=-1)
        low, high = wilson(ratio(right, rows), self.cells.sum(axis=-1), level)
        down, up = (np.sqrt(((ratio(right, rows) - end) ** 2).sum(axis=-1)) / self.classes for end in (low, high))
        middle = self.balanced_accuracy(by_group=True)
        return middle - down, middle + up

    def gap(self, criterion: str, method: str = "between_groups") -> Floats:
        """The disparity of the rates of ``criterion``."""
        if self.cells.shape[-3] == 0:
            return np.full(self.cells.shape[:-3], np.nan)
        counts = self.majority_and_rest() if method == "majority_vs_rest" and self.cells.shape[-3] > 1 else self
        gaps = []
        for rate in CRITERIA[criterion]:
            rates = counts.rates(rate)
            if method == "mean_pairwise" and rates.shape[-1] > 1:
                gaps.append(_mean_distance(rates))
                continue
            reference = counts.overall(rate) if method == "to_overall" else np.fmax.reduce(rates, axis=-1)
            distance = np.fmax.reduce(np.abs(rates - reference[..., None]), axis=-1)
            comparable = (~np.isnan(rates)).sum(axis=-1) >= min(2, rates.shape[-1])
            gaps.append(np.where(comparable, distance, np.nan))
        largest = np.max(gaps, axis=0)
        return np.asarray(largest if self.classes == 2 else np.fmax.reduce(largest, axis=-1))

    def other_label(self) -> Counts:
        """The same rows with the other of the two labels called positive."""
        return Counts(self.cells[..., ::-1, ::-1], None if self.weights is None else self.weights[..., ::-1, ::-1])

    def lead(self, rate: str) -> Floats:
        """The majority's rate minus that of all others together, with its sign."""
        rates = self.majority_and_rest().rates(rate)
        return np.asarray(rates[..., 0] - rates[..., 1])

    def majority_and_rest(self) -> Counts:
        """Two groups instead of many: the one with most rows, and all the others."""
        majority = self.rows.argmax(axis=-1)
        chosen = (np.arange(self.cells.shape[-3]) == majority[..., None])[..., None, None]

        def divided(values: NDArray[Any]) -> NDArray[Any]:
            parts = [np.where(side, values, 0).sum(axis=-3) for side in (chosen, ~chosen)]
            return np.stack(parts, axis=-3)

        return Counts(divided(self.cells), None if self.weights is None else divided(self.weights))

    def gathered(self, places: Any, count: int) -> Counts:
        """Fewer groups, ``count`` of them: those with the same place become one; for counts without further axes."""
        chosen = np.asarray(places)[None, :] == np.arange(count)[:, None]

        def summed(values: NDArray[Any]) -> NDArray[Any]:
            return np.asarray(np.tensordot(chosen.astype(values.dtype), values, axes=1))

        return Counts(summed(self.cells), None if self.weights is None else summed(self.weights))

    def first(self, number: int) -> Counts:
        """The first groups alone."""
        weights = None if self.weights is None else self.weights[..., :number, :, :]
        return Counts(self.cells[..., :number, :, :], weights)

    def present(self) -> Counts:
        """Without the groups that have no rows; for counts without further axes."""
        there = self.rows > 0
        return Counts(self.cells[there], None if self.weights is None else self.weights[there])

    def wilson(self, rate: str, level: float = 0.95) -> tuple[Floats, Floats]:
        """Both ends of Wilson's interval of ``rate``, by group."""
        return wilson(self.rates(rate), self.among(rate), level)

    def table(
        self, names: Sequence[Any], level: float | None = None, classes: Sequence[Any] | None = None
    ) -> pd.DataFrame:
        """One row a group: how many rows, positives, negatives and positive decisions, the rates and the balanced accuracy;
        with ``level`` intervals of all these too.  More than two classes, named by ``classes``: one row a group and class, the
        latter then being the positive one."""
        columns = self.columns()
        if level is not None:
            for rate in RATES:
                columns[f"{rate}_low"], columns[f"{rate}_high"] = self.wilson(rate, level)
            ends = self.balanced_accuracy_ends(level)
            columns["balanced_accuracy_low"], columns["balanced_accuracy_high"] = ends
        if self.classes == 2:
            return pd.DataFrame(columns, index=pd.Index(list(names), name="group"))
        labels = range(self.classes) if classes is None else classes
        cells = pd.MultiIndex.from_product([list(names), list(labels)], names=["group", "label"])
        columns = {
            name: np.broadcast_to(values, (self.classes, len(names))).T.ravel() for name, values in columns.items()
        }
        return pd.DataFrame(columns, index=cells)

    def columns(self) -> dict[str, Any]:
        """Those of `table` without a level, by their names."""
        columns: dict[str, Any] = {"count": self.rows}
        columns |= {among: self.among(rate) for rate, among in RATES.items() if among != "count"}
        for rate in ("accuracy", "selection_rate", "true_positive_rate", "false_positive_rate", "precision"):
            columns[rate] = self.rates(rate)
        columns["balanced_accuracy"] = self.balanced_accuracy(by_group=True)
        return columns

    @property
    def _measured(self) -> NDArray[Any]:
        return self.cells if self.weights is None else self.weights


def wilson(share: Any, size: Any, level: float = 0.95) -> tuple[Floats, Floats]:
    """Both ends of Wilson's interval for a share observed in ``size`` rows; NaN without rows.

    The closed form of ``scipy.stats.binomtest(...).proportion_ci(method="wilson")``, for arrays, and for shares that are means.

    Examples:
        >>> low, high = wilson(0.5, 100)
        >>> round(float(low), 4), round(float(high), 4)
        (0.4038, 0.5962)
    """
    z = normal_quantile(level)
    rate, count = np.asarray(share, np.float64), np.asarray(size, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        middle = (rate + z**2 / (2 * count)) / (1 + z**2 / count)
        half = z / (1 + z**2 / count) * np.sqrt(rate * (1 - rate) / count + (z / (2 * count)) ** 2)
    empty = count == 0
    return np.where(empty, np.nan, np.maximum(middle - half, 0)), np.where(empty, np.nan, np.minimum(middle + half, 1))


def normal_quantile(level: float) -> float:
    """z of a two-sided interval: 1.96 for 95 %."""
    from scipy.special import ndtri

    return float(ndtri((1 + level) / 2))


def parts(cells: NDArray[Any], rate: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """What counts for a rate, and what it is a rate among, by group; of more than two classes by class and group."""
    if rate == "accuracy":
        return np.trace(cells, axis1=-2, axis2=-1), cells.sum(axis=(-2, -1))
    if cells.shape[-1] > 2:
        cells = against_rest(cells)
    if rate == "selection_rate":
        return cells[..., 1].sum(axis=-1), cells.sum(axis=(-2, -1))
    if rate == "precision":
        return cells[..., 1, 1], cells[..., 1].sum(axis=-1)
    of_label = cells[..., 1 if rate == "true_positive_rate" else 0, :]
    return of_label[..., 1], of_label.sum(axis=-1)


def _mean_distance(rates: Floats) -> Floats:
    """The mean of |a - b| over all pairs of rates along the last axis; pairs without a rate are left out."""
    first, second = np.triu_indices(rates.shape[-1], 1)
    apart = np.abs(rates[..., first] - rates[..., second])
    return ratio(np.nansum(apart, axis=-1), (~np.isnan(apart)).sum(axis=-1))


def against_rest(cells: NDArray[Any]) -> NDArray[Any]:
    """Every class as the positive one of two: [..., class, group, 2, 2]."""
    right, of_label, of_decision = np.diagonal(cells, axis1=-2, axis2=-1), cells.sum(axis=-1), cells.sum(axis=-2)
    neither = cells.sum(axis=(-2, -1))[..., None] - of_label - of_decision + right
    both = np.stack([neither, of_decision - right, of_label - right, right], axis=-1)
    return np.moveaxis(both, -2, -3).reshape(*cells.shape[:-3], cells.shape[-1], cells.shape[-3], 2, 2)


def ratio(above: NDArray[Any], below: NDArray[Any]) -> Floats:
    """Quotients; NaN where nothing is below."""
    missing = np.full(np.shape(below), np.nan)
    return np.asarray(np.divide(above, below, out=missing, where=np.asarray(below) > 0))


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
        left_out: per rate, the groups that have none (without positives, negatives, or weight); of more than two classes, pairs
            of a group and a class.
    """

    value: float
    criterion: str
    method: str
    table: pd.DataFrame
    left_out: dict[str, list[Any]]


class Encoded(NamedTuple):
    """Checked inputs as arrays: what resampling works on."""

    y_true: NDArray[Any]
    y_pred: NDArray[Any]
    groups: NDArray[np.int32]
    names: list[Any]
    weight: Floats | None
    classes: list[Any]

    @property
    def counts(self) -> Counts:
        return Counts.of(self.y_true, self.y_pred, self.groups, len(self.names), self.weight, classes=len(self.classes))

    def take(self, rows: NDArray[np.int64]) -> Encoded:
        weight = None if self.weight is None else self.weight[rows]
        return Encoded(self.y_true[rows], self.y_pred[rows], self.groups[rows], self.names, weight, self.classes)


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

    Args:
        y_true: The true labels, ``[rows]``: 0/1, or any two values with ``pos_label``; more values are classes.
        y_pred: The decisions, ``[rows]``.
        sensitive_features: The group of each row, or a table of several columns, which are joined.
        method: How several groups become one number: "between_groups" (largest minus smallest) or another of `CONVENTIONS`.
        sample_weight: Weights of the rows; None: all 1.
        pos_label: The positive class, if the labels are not 0/1.

    Returns:
        A number from 0 (alike) to 1; NaN where fewer than two groups have a rate.

    Raises:
        ValueError: Lengths differ, values are missing, or a label is not one of two.

    Examples:
        >>> equal_opportunity_difference([1, 1, 1, 1], [1, 0, 1, 1], sensitive_features=["a", "a", "b", "b"])
        0.5
    """
    return _plain("equal_opportunity", method, encode(y_true, y_pred, sensitive_features, sample_weight, pos_label))


def equalized_odds_difference(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    method: str = "between_groups",
    sample_weight: Any = None,
    pos_label: Any = None,
) -> float:
    """The larger of the disparities of the true and of the false positive rates.

    Args:
        y_true: The true labels, ``[rows]``: 0/1, or any two values with ``pos_label``; more values are classes.
        y_pred: The decisions, ``[rows]``.
        sensitive_features: The group of each row, or a table of several columns, which are joined.
        method: How several groups become one number: "between_groups" (largest minus smallest) or another of `CONVENTIONS`.
        sample_weight: Weights of the rows; None: all 1.
        pos_label: The positive class, if the labels are not 0/1.

    Returns:
        A number from 0 (alike) to 1; NaN where fewer than two groups have a rate.

    Raises:
        ValueError: Lengths differ, values are missing, or a label is not one of two.
    """
    return _plain("equalized_odds", method, encode(y_true, y_pred, sensitive_features, sample_weight, pos_label))


def demographic_parity_difference(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    method: str = "between_groups",
    sample_weight: Any = None,
    pos_label: Any = None,
) -> float:
    """Disparity of the selection rates; `y_true` is accepted for the common signature and only checked.

    Args:
        y_true: The true labels, ``[rows]``: 0/1, or any two values with ``pos_label``; more values are classes.
        y_pred: The decisions, ``[rows]``.
        sensitive_features: The group of each row, or a table of several columns, which are joined.
        method: How several groups become one number: "between_groups" (largest minus smallest) or another of `CONVENTIONS`.
        sample_weight: Weights of the rows; None: all 1.
        pos_label: The positive class, if the labels are not 0/1.

    Returns:
        A number from 0 (alike) to 1; NaN where fewer than two groups have a rate.

    Raises:
        ValueError: Lengths differ, values are missing, or a label is not one of two.
    """
    return _plain("demographic_parity", method, encode(y_true, y_pred, sensitive_features, sample_weight, pos_label))


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
    """A disparity with the per-group table behind it and the groups that had to be left out; does not warn.

    Args:
        y_true: The true labels, ``[rows]``: 0/1, or any two values with ``pos_label``; more values are classes.
        y_pred: The decisions, ``[rows]``.
        sensitive_features: The group of each row, or a table of several columns, which are joined.
        criterion: "equal_opportunity", "equalized_odds" or "demographic_parity".
        method: How several groups become one number: "between_groups" (largest minus smallest) or another of `CONVENTIONS`.
        sample_weight: Weights of the rows; None: all 1.
        pos_label: The positive class, if the labels are not 0/1.

    Returns:
        A `Disparity`.

    Raises:
        ValueError: Lengths differ, values are missing, or a label is not one of two.
    """
    return _disparity(criterion, method, encode(y_true, y_pred, sensitive_features, sample_weight, pos_label))


def _disparity(criterion: str, method: str, data: Encoded) -> Disparity:
    check_choice("criterion", criterion, tuple(CRITERIA))
    check_choice("method", method, CONVENTIONS)
    counts = data.counts
    left_out = {}
    for rate in CRITERIA[criterion]:
        if not counts.among(rate).any():
            raise ValueError(f"y_true holds one class only, no {_among(rate)}: {criterion} is undefined.")
        rates = counts.rates(rate)
        places = [tuple(place) for place in np.argwhere(np.isnan(rates.T))]
        without = [
            data.names[group] if not label else (data.names[group], data.classes[label[0]]) for group, *label in places
        ]
        if without:
            left_out[rate] = without
    value = float(counts.gap(criterion, method))
    return Disparity(value, criterion, method, counts.table(data.names, classes=data.classes), left_out)


def disparities(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    method: str = "between_groups",
    sample_weight: Any = None,
    pos_label: Any = None,
) -> pd.DataFrame:
    """All three disparities by each of several sensitive columns, and by their intersections: one row each.

    Args:
        y_true: The true labels, ``[rows]``: 0/1, or any two values with ``pos_label``; more values are classes.
        y_pred: The decisions, ``[rows]``.
        sensitive_features: A table of several columns.
        method: How several groups become one number: "between_groups" (largest minus smallest) or another of `CONVENTIONS`.
        sample_weight: Weights of the rows; None: all 1.
        pos_label: The positive class, if the labels are not 0/1.

    Returns:
        A table with a row for each column and one for their intersections.

    Raises:
        ValueError: Lengths differ, values are missing, or a label is not one of two.

    Examples:
        >>> table = pd.DataFrame({"sex": list("ffmm"), "age": list("oyoy")})
        >>> found = disparities([1, 1, 1, 1], [1, 0, 0, 1], sensitive_features=table)
        >>> found["equal_opportunity"].to_dict()
        {'sex': 0.0, 'age': 0.0, 'sex & age': 1.0}
    """
    table = to_frame(sensitive_features, "sensitive_features")
    ways = {name: table[[name]] for name in table.columns}
    rows = {}
    for name, groups in (ways | {JOIN.join(table.columns): table}).items():
        counts = encode(y_true, y_pred, groups, sample_weight, pos_label).counts
        rows[name] = {criterion: float(counts.gap(criterion, method)) for criterion in CRITERIA}
    return pd.DataFrame.from_dict(rows, orient="index")


def group_table(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None, pos_label: Any = None
) -> pd.DataFrame:
    """One row per group, sorted: how many rows, positives and negatives, and the rates; NaN where a rate has no rows.
    With more than two classes, one row per group and class, which then is the positive one.

    The counts are numbers of rows, whatever the weights; the rates are weighted.

    Args:
        y_true: The true labels, ``[rows]``: 0/1, or any two values with ``pos_label``; more values are classes.
        y_pred: The decisions, ``[rows]``.
        sensitive_features: The group of each row, or a table of several columns, which are joined.
        sample_weight: Weights of the rows; None: all 1.
        pos_label: The positive class, if the labels are not 0/1.

    Returns:
        A table with a row for each group.

    Raises:
        ValueError: Lengths differ, values are missing, or a label is not one of two.

    Examples:
        >>> group_table([1, 0, 1, 1], [1, 0, 0, 1], sensitive_features=["a", "a", "b", "b"])["accuracy"].to_dict()
        {'a': 1.0, 'b': 0.5}
    """
    data = encode(y_true, y_pred, sensitive_features, sample_weight, pos_label)
    return data.counts.table(data.names, classes=data.classes)


def accuracy(y_true: Any, y_pred: Any, *, sample_weight: Any = None) -> float:
    """Share of the rows predicted rightly; any number of classes.

    Args:
        y_true: The true labels, ``[rows]``: 0/1, or any two values with ``pos_label``; more values are classes.
        y_pred: The decisions, ``[rows]``.
        sample_weight: Weights of the rows; None: all 1.

    Returns:
        A share between 0 and 1.
    """
    from sklearn.metrics import accuracy_score

    true, predicted, weight = _labels_and_weight(y_true, y_pred, sample_weight)
    return float(accuracy_score(true, predicted, sample_weight=weight))


def balanced_accuracy(y_true: Any, y_pred: Any, *, sample_weight: Any = None) -> float:
    """Mean over the classes of the share of their rows predicted rightly.

    Args:
        y_true: The true labels, ``[rows]``: 0/1, or any two values with ``pos_label``; more values are classes.
        y_pred: The decisions, ``[rows]``.
        sample_weight: Weights of the rows; None: all 1.

    Returns:
        A share between 0 and 1; 0.5 is guessing, for two classes.

    Raises:
        ValueError: There is one class only.
    """
    from sklearn.metrics import recall_score

    true, predicted, weight = _labels_and_weight(y_true, y_pred, sample_weight)
    classes = pd.unique(true)
    if len(classes) < 2:
        raise ValueError("y_true holds one class only: the balanced accuracy is undefined.")
    # Not balanced_accuracy_score: it warns when a class is predicted that no row has, which is an ordinary error.
    return float(recall_score(true, predicted, labels=classes, average="macro", sample_weight=weight, zero_division=0))


def auc(y_true: Any, y_score: Any, *, sample_weight: Any = None, pos_label: Any = None) -> float:
    """Area under the ROC curve: how often a positive row scores higher than a negative one.

    Args:
        y_true: The true labels, ``[rows]``: 0/1, or any two values with ``pos_label``; more values are classes.
        y_score: Scores or probabilities of the positive class, ``[rows]``.
        sample_weight: Weights of the rows; None: all 1.
        pos_label: The positive class, if the labels are not 0/1.

    Returns:
        A share between 0 and 1; 0.5 is guessing.

    Raises:
        ValueError: There is one class only, or a score is missing.
    """
    true = binary_labels(y_true, "y_true", pos_label=pos_label)
    score = np.asarray(to_series(y_score, "y_score"), dtype=np.float64)
    weight = _weight(sample_weight)
    check_lengths(y_true=true, y_score=score, sample_weight=weight)
    if not np.isfinite(score).all():
        raise ValueError("y_score has missing or infinite values.")
    if true.min() == true.max():
        raise ValueError("y_true holds one class only: the AUC is undefined.")
    return area(true, score, weight)


def area(true: NDArray[Any], score: Floats, weight: Floats | None = None) -> float:
    """`auc` of arrays that need no check: labels 0 and 1, both of them there, and finite scores."""
    # Positive and negative weight at every different score; equal scores count half.
    places = np.unique(score, return_inverse=True)[1]
    positive, negative = (np.bincount(places, side if weight is None else side * weight) for side in (true, 1 - true))
    below = np.cumsum(negative) - negative
    return float(positive @ (below + negative / 2) / (positive.sum() * negative.sum()))


def encode(y_true: Any, y_pred: Any, sensitive_features: Any, sample_weight: Any, pos_label: Any) -> Encoded:
    """The inputs of a group metric, checked and turned into arrays.  More than two values in ``y_true`` and no ``pos_label``:
    these are the classes."""
    true: NDArray[Any]
    predicted: NDArray[Any]
    several = list(pd.unique(to_series(y_true, "y_true"))) if pos_label is None else []
    if len(several) > 2:
        true, classes = encode_groups(y_true, name="y_true")
        predicted, _ = encode_groups(y_pred, known=classes, name="y_pred", what="class", where="y_true")
    else:
        true = binary_labels(y_true, "y_true", pos_label=pos_label)
        predicted = binary_labels(y_pred, "y_pred", pos_label=pos_label)
        classes = [False, True]
    groups, names = encode_groups(sensitive_features)
    weight = _weight(sample_weight)
    check_lengths(y_true=true, y_pred=predicted, sensitive_features=groups, sample_weight=weight)
    return Encoded(true, predicted, groups, names, weight, classes)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}.")


def _plain(criterion: str, method: str, data: Encoded) -> float:
    """The disparity alone, with a warning to whoever called the public function."""
    result = _disparity(criterion, method, data)
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
