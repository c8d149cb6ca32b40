"""How often each group, with each label, got each decision: the integers that every rate, gap and interval follows from.

`Counts` of two sets of rows add up, so a site can send its own and nobody needs the rows:

    counts = Counts.of(labels, decisions, groups, names=2)          # codes: 0/1, 0/1, 0..names-1
    total  = counts + Counts(received)                              # received: integers [group, label, decision]
    total.rates("true_positive_rate"), total.overall("accuracy")    # by group; over all groups
    total.gap("equal_opportunity", "between_groups"), total.lead("true_positive_rate")
    total.wilson("true_positive_rate"), total.table(["f", "m"])     # interval of every group's rate; everything as a table

In front of [group, label, decision] there may be further axes (resamples, models, seeds): all answers then have them too.
A rate without rows is NaN, and so is a gap where fewer than two of several groups have the rate.

A disparity compares a rate between groups in one of three ways (`METHODS`):

    between_groups     the largest rate minus the smallest
    to_overall         the largest distance of a group's rate to the rate over all rows
    majority_vs_rest   the distance between the largest group (in rows) and all others taken together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

METHODS = ("between_groups", "to_overall", "majority_vs_rest")
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
}

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Counts:
    """Rows by group, label and decision.

    Attributes:
        cells: integers [..., group, label, decision]; rates are those of two classes.
        weights: sums of the rows' weights in the same places, if they have any.  Rates are then shares of weight; counts and
            the majority remain those of rows.
    """

    cells: Integers
    weights: Floats | None = None

    @classmethod
    def of(
        cls, labels: Any, decisions: Any, groups: Any, names: int, weight: Floats | None = None, classes: int = 2
    ) -> Counts:
        """Count rows given as codes: ``groups`` from 0 to ``names`` - 1, the others 0 or 1."""
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
    def rows(self) -> Integers:
        """Rows by group."""
        return np.asarray(self.cells.sum(axis=(-2, -1)))

    def among(self, rate: str) -> Integers:
        """Rows that ``rate`` is a rate among, by group."""
        return np.asarray(_parts(self.cells, rate)[1])

    def rates(self, rate: str) -> Floats:
        """``rate`` by group."""
        return _ratio(*_parts(self._measured, rate))

    def overall(self, rate: str) -> Floats:
        """``rate`` over all groups."""
        above, below = _parts(self._measured, rate)
        return _ratio(above.sum(axis=-1), below.sum(axis=-1))

    def balanced_accuracy(self) -> Floats:
        """Mean over the two classes of the share of their rows decided rightly."""
        by_class = self._measured.sum(axis=-3)
        right = _ratio(np.diagonal(by_class, axis1=-2, axis2=-1), by_class.sum(axis=-1))
        return np.asarray(right.sum(axis=-1) / 2)

    def gap(self, criterion: str, method: str = "between_groups") -> Floats:
        """The disparity of the rates of ``criterion``."""
        counts = self.majority_and_rest() if method == "majority_vs_rest" and self.cells.shape[-3] > 1 else self
        gaps = []
        for rate in CRITERIA[criterion]:
            rates = counts.rates(rate)
            reference = counts.overall(rate) if method == "to_overall" else np.fmax.reduce(rates, axis=-1)
            distance = np.fmax.reduce(np.abs(rates - reference[..., None]), axis=-1)
            comparable = (~np.isnan(rates)).sum(axis=-1) >= min(2, rates.shape[-1])
            gaps.append(np.where(comparable, distance, np.nan))
        return np.asarray(np.max(gaps, axis=0))

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

    def present(self) -> Counts:
        """Without the groups that have no rows; for counts without further axes."""
        there = self.rows > 0
        return Counts(self.cells[there], None if self.weights is None else self.weights[there])

    def wilson(self, rate: str, level: float = 0.95) -> tuple[Floats, Floats]:
        """Both ends of Wilson's interval of ``rate``, by group."""
        return wilson(self.rates(rate), self.among(rate), level)

    def table(self, names: Sequence[Any], level: float | None = None) -> pd.DataFrame:
        """One row a group: how many rows, positives and negatives, and the rates; with ``level`` Wilson's intervals too."""
        columns: dict[str, Any] = {"count": self.rows}
        columns |= {among: self.among(rate) for rate, among in RATES.items() if among != "count"}
        for rate in ("accuracy", "selection_rate", "true_positive_rate", "false_positive_rate"):
            columns[rate] = self.rates(rate)
        if level is not None:
            for rate in RATES:
                columns[f"{rate}_low"], columns[f"{rate}_high"] = self.wilson(rate, level)
        return pd.DataFrame(columns, index=pd.Index(list(names), name="group"))

    @property
    def _measured(self) -> NDArray[Any]:
        return self.cells if self.weights is None else self.weights


def wilson(share: Any, size: Any, level: float = 0.95) -> tuple[Floats, Floats]:
    """Both ends of Wilson's interval for a share observed in ``size`` rows; NaN without rows.

    The closed form of ``scipy.stats.binomtest(...).proportion_ci(method="wilson")``, for arrays, and for shares that are means.

    >>> low, high = wilson(0.5, 100)
    >>> round(float(low), 4), round(float(high), 4)
    (0.4038, 0.5962)
    """
    from scipy.special import ndtri

    z = float(ndtri((1 + level) / 2))
    rate, count = np.asarray(share, np.float64), np.asarray(size, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        middle = (rate + z**2 / (2 * count)) / (1 + z**2 / count)
        half = z / (1 + z**2 / count) * np.sqrt(rate * (1 - rate) / count + (z / (2 * count)) ** 2)
    empty = count == 0
    return np.where(empty, np.nan, np.maximum(middle - half, 0)), np.where(empty, np.nan, np.minimum(middle + half, 1))


def _parts(cells: NDArray[Any], rate: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """What counts for a rate, and what it is a rate among, by group."""
    if rate in ("selection_rate", "accuracy"):
        hits = cells[..., 1].sum(axis=-1) if rate == "selection_rate" else cells[..., 0, 0] + cells[..., 1, 1]
        return hits, cells.sum(axis=(-2, -1))
    of_label = cells[..., 1 if rate == "true_positive_rate" else 0, :]
    return of_label[..., 1], of_label.sum(axis=-1)


def _ratio(above: NDArray[Any], below: NDArray[Any]) -> Floats:
    missing = np.full(np.shape(below), np.nan)
    return np.asarray(np.divide(above, below, out=missing, where=np.asarray(below) > 0))
