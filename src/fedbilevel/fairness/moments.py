"""How well a number is predicted, and how differently for different groups: sums first, then means, errors and gaps.

`Moments` holds sums over the rows of every group, of the true number y, the predicted one p and the error e = p - y.  Sums of
two sets of rows add up, so a site can send its own and nobody needs the rows:

    moments = Moments.of(true, predicted, groups, names=2)       # numbers in standard deviations from the agreed mean
    total   = moments + Moments(received)
    total.gap("mean_error"), total.gap_ends("mean_error")        # the largest difference of two groups' mean errors
    total.table(["f", "m"], Scale(mean, spread))                 # everything by group, in the units of the table

Two criteria (`CRITERIA`): "mean_prediction" compares the groups' mean predictions, whatever the truth; "mean_error" their
mean errors: does the model say too much about some and too little about others?

Intervals need no rows either.  Means (of y, p, e and the size of e): Student.  RMSE: the root of Student's interval of the mean
square.  R2: its influence function, with the standard error that the fourth moments give.  Gaps: Welch's intervals of all pairs
of groups, at a level that holds for all of them together (Bonferroni); two groups: Welch's interval of the difference, folded
at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel.fairness.metrics import Floats, normal_quantile, ratio

SUMS = ("n", "y", "yy", "yyy", "yyyy", "p", "pp", "e", "ee", "size", "eeee", "eey", "eeyy")
"""What is summed: 1, powers of y, p, e, the size of e, and the mixed ones that R2's interval needs."""
CRITERIA = {"mean_prediction": ("p", "pp"), "mean_error": ("e", "ee")}
"""Criterion: the sum of what is compared, and of its square."""
MEASURES = ("mean_target", "mean_prediction", "mean_error", "rmse", "mae", "r2")


class Scale(NamedTuple):
    """Units of the table: a number is ``mean`` + ``spread`` times the standardised one."""

    mean: float = 0.0
    spread: float = 1.0


STANDARD = Scale()


@dataclass(frozen=True, eq=False)
class Moments:
    """``sums``: [..., group, sum], the last axis as in `SUMS`."""

    sums: Floats

    @classmethod
    def of(cls, true: Any, predicted: Any, groups: Any, names: int) -> Moments:
        y, p = np.asarray(true, np.float64), np.asarray(predicted, np.float64)
        e = p - y
        each = (np.ones_like(y), y, y**2, y**3, y**4, p, p**2, e, e**2, np.abs(e), e**4, e**2 * y, e**2 * y**2)
        codes = np.asarray(groups, np.int64)
        return cls(np.stack([np.bincount(codes, values, names) for values in each], axis=-1))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.sums + other.sums)

    @property
    def rows(self) -> Floats:
        """Rows by group."""
        return self._sum("n")

    def gathered(self, places: Any, count: int) -> Moments:
        """Fewer groups: those with the same place become one; -1 is left out."""
        chosen = np.asarray(places)[None, :] == np.arange(count)[:, None]
        return Moments(np.asarray(np.tensordot(chosen.astype(np.float64), self.sums, axes=(1, -2))))

    def first(self, number: int) -> Moments:
        """The first groups alone."""
        return Moments(self.sums[..., :number, :])

    def everybody(self) -> Moments:
        """All groups as one."""
        return Moments(self.sums.sum(axis=-2, keepdims=True))

    def measure(self, name: str) -> Floats:
        """One of `MEASURES`, by group; NaN without rows."""
        if name in ("mean_target", "mean_prediction", "mean_error", "mae"):
            return self._mean({"mean_target": "y", "mean_prediction": "p", "mean_error": "e", "mae": "size"}[name])
        if name == "rmse":
            return np.sqrt(self._mean("ee"))
        return 1 - self._unexplained()

    def ends(self, name: str, level: float = 0.95) -> tuple[Floats, Floats]:
        """Both ends of the interval of one of `MEASURES`, by group; NaN with fewer than two rows."""
        value = self.measure(name)
        if name == "rmse":
            half = self._half("ee", "eeee", level)
            return np.sqrt(np.maximum(value**2 - half, 0)), np.sqrt(value**2 + half)
        if name == "r2":
            half = _student(self.rows, level) * np.sqrt(np.maximum(self._influence(), 0) / np.maximum(self.rows - 1, 1))
            return value - half, np.minimum(value + half, 1)
        pair = {"mean_target": ("y", "yy"), "mae": ("size", "ee"), **CRITERIA}[name]
        half = self._half(*pair, level)
        return value - half, value + half

    def gap(self, criterion: str) -> Floats:
        """The largest difference between two groups; NaN where fewer than two of several have rows."""
        means = self._mean(CRITERIA[criterion][0])
        there = (~np.isnan(means)).sum(axis=-1) >= min(2, means.shape[-1])
        return np.where(there, np.fmax.reduce(means, axis=-1) - np.fmin.reduce(means, axis=-1), np.nan)

    def gap_ends(self, criterion: str, level: float = 0.95) -> tuple[float, float]:
        """Both ends of the gap's interval, for sums without further axes; groups of one row have no variance and no part."""
        first, second = CRITERIA[criterion]
        return mean_gap_ends(self._mean(first)[None], self._variance(first, second)[None], self.rows, level)

    def table(self, names: Sequence[Any], scale: Scale = STANDARD, level: float | None = None) -> pd.DataFrame:
        """One row a group: how many rows, and `MEASURES` in the table's units; with ``level`` their intervals too."""
        columns: dict[str, Any] = {"count": self.rows.astype(np.int64)}
        for name in MEASURES:
            columns[name] = in_units(name, self.measure(name), scale)
            if level is not None:
                ends = (in_units(name, end, scale) for end in self.ends(name, level))
                columns[f"{name}_low"], columns[f"{name}_high"] = ends
        return pd.DataFrame(columns, index=pd.Index(list(names), name="group"))

    def _sum(self, name: str) -> Floats:
        return self.sums[..., SUMS.index(name)]

    def _mean(self, name: str) -> Floats:
        return ratio(self._sum(name), self.rows)

    def _variance(self, first: str, second: str) -> Floats:
        """Of single rows."""
        rows = self.rows
        centred = self._mean(second) - self._mean(first) ** 2
        return np.where(rows > 1, np.maximum(centred, 0) * rows / np.maximum(rows - 1, 1), np.nan)

    def _half(self, first: str, second: str, level: float) -> Floats:
        return _student(self.rows, level) * np.sqrt(self._variance(first, second) / np.maximum(self.rows, 1))

    def _unexplained(self) -> Floats:
        """Squared errors as a share of the squared distances to the mean."""
        spread = self._mean("yy") - self._mean("y") ** 2
        return ratio(self._mean("ee"), np.where(spread > 0, spread, np.nan))

    def _influence(self) -> Floats:
        """Mean square of the rows' influence on R2: (e^2 - c d^2) / v, with d = y - mean, v its mean square, c = 1 - R2."""
        middle, share = self._mean("y"), self._unexplained()
        spread = self._mean("yy") - middle**2
        mixed = self._mean("eeyy") - 2 * middle * self._mean("eey") + middle**2 * self._mean("ee")
        fourth = self._mean("yyyy") - 4 * middle * self._mean("yyy") + 6 * middle**2 * self._mean("yy") - 3 * middle**4
        return np.asarray((self._mean("eeee") - 2 * share * mixed + share**2 * fourth) / spread**2)


def mean_gap_ends(means: Floats, variances: Floats, rows: Floats, level: float = 0.95) -> tuple[float, float]:
    """Both ends of the interval of the largest difference between two groups' ``means`` [comparison, group], from the variances
    of single rows; groups of one row have no part."""
    pairs = list(combinations(np.flatnonzero(rows > 1), 2))
    if not pairs:
        return float("nan"), float("nan")
    from scipy.special import stdtrit

    low, high = 0.0, 0.0
    for middle, errors in zip(means, variances / np.maximum(rows, 1), strict=True):
        for a, b in pairs:
            both = errors[a] + errors[b]
            freedom = both**2 / sum(errors[one] ** 2 / (rows[one] - 1) for one in (a, b)) if both > 0 else 1.0
            half = float(stdtrit(freedom, 1 - (1 - level) / (2 * len(pairs) * len(means))) * np.sqrt(both))
            distance = abs(float(middle[a] - middle[b]))
            low, high = max(low, distance - half), max(high, distance + half)
    return low, high


def in_units(name: str, value: Any, scale: Scale) -> Any:
    """A measure, or a gap of means, in the table's units."""
    if name == "r2":
        return value
    return scale.spread * value + (scale.mean if name in ("mean_target", "mean_prediction") else 0.0)


def differences(
    true: Any, ours: Any, theirs: Any, groups: Any, names: int, criterion: str, level: float = 0.95
) -> dict[str, tuple[float, float, float]]:
    """Two models on the same rows: ``rmse`` and ``gap`` of ours minus theirs, each with both ends of its interval.

    Normal, from the rows' influence; of a gap the two groups that make it are taken as given.
    """
    y, codes = np.asarray(true, np.float64), np.asarray(groups, np.int64)
    errors = [np.asarray(p, np.float64) - y for p in (ours, theirs)]
    z = normal_quantile(level)

    def around(value: float, error: float) -> tuple[float, float, float]:
        return value, value - z * error, value + z * error

    roots = [float(np.sqrt(np.mean(e**2))) for e in errors]
    slopes = [e**2 / (2 * root) if root > 0 else 0 * e for e, root in zip(errors, roots, strict=True)]
    found = {"rmse": around(roots[0] - roots[1], float(np.std(slopes[0] - slopes[1]) / np.sqrt(len(y))))}
    compared = [
        (e if criterion == "mean_error" else np.asarray(p, np.float64))[None]
        for e, p in zip(errors, (ours, theirs), strict=True)
    ]
    return {**found, "gap": gap_change(compared[0], compared[1], codes, names, level)}


def gap_change(
    ours: Floats, theirs: Floats, groups: Any, names: int, level: float = 0.95
) -> tuple[float, float, float]:
    """The largest difference of two groups' means in ours minus that in theirs, with both ends of its interval; a value of each
    comparison and row [comparison, n].

    If our gap rests on two groups in one comparison, theirs is at least as large as their own difference there: the change is
    at most that of this one contrast.  Likewise it is at least that of the contrast which their gap rests on.  The ends are
    those of all contrasts that a gap may rest on by chance, in either direction where that is chance, too.  Normal.
    """
    codes = np.asarray(groups, np.int64)
    rows = np.bincount(codes, minlength=names)
    pairs, z = list(combinations(np.flatnonzero(rows).tolist(), 2)), normal_quantile(level)
    if not pairs:
        return np.nan, np.nan, np.nan
    members = [codes == group for group in range(names)]

    def around(values: Floats, pair: tuple[int, int]) -> tuple[float, float]:
        """The difference of two groups' means, and its standard error."""
        here = [values[members[group]] for group in pair]
        return float(here[0].mean() - here[1].mean()), float(np.sqrt(sum(each.var() / len(each) for each in here)))

    contrasts = [(each, pair) for each in range(len(ours)) for pair in pairs]
    known = [[around(values[each], pair) for each, pair in contrasts] for values in (ours, theirs)]
    gaps = [max(abs(value) for value, _ in of) for of in known]
    ends = []
    for rests, side in ((1, -1.0), (0, 1.0)):
        found = []
        for (each, pair), (value, error), (other, _) in zip(contrasts, known[rests], known[1 - rests], strict=True):
            if abs(value) + z * error < gaps[rests]:
                continue
            one, two = (ours, theirs) if rests == 0 else (theirs, ours)
            for sign in (-1.0, 1.0) if abs(value) < z * error else (np.sign(value),):
                apart, error_apart = around(sign * one[each] - (1.0 if other >= 0 else -1.0) * two[each], pair)
                found.append(apart + z * error_apart)
        ends.append(side * max(found))
    change = gaps[0] - gaps[1]
    return change, min(ends[0], change), max(ends[1], change)


def _student(rows: Floats, level: float) -> Floats:
    from scipy.special import stdtrit

    with np.errstate(invalid="ignore"):
        return np.where(rows > 1, stdtrit(np.maximum(rows - 1, 1), (1 + level) / 2), np.nan)
