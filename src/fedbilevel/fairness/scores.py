"""Predicted probabilities as counts: what thresholds, AUC, Brier score and calibration follow from, by group and for everybody.

`Scores` counts rows by group, label and bin of the predicted probability, and keeps four sums.  Scores of two sets of rows
add up, so a site can send its own and nobody needs the rows.  Any model's predictions will do:

    scores = Scores.of(labels, probability, groups, names=2)    # codes: 0/1, numbers in [0, 1], 0..names-1
    total  = scores + received
    total.counts(0.3)                                           # `Counts` of the decisions probability > 0.3
    measures(total.counts(0.3), total, ["f", "m"])              # every measure with its interval: all rows, then each group
    total.curve(minimum=10)                                     # observed share against prediction

More than two classes: each is held against all others, so answers have an axis of classes before that of groups.  The Brier
score is then half the sum, over the classes, of the squared distances of probability and truth: of two classes, the usual one.

A decision is positive where the probability is *above* the threshold.  Thresholds are edges of the bins (`EDGES`): steps of
0.002 between 0.02 and 0.98, and outside, where rare outcomes have their probabilities, forty to a power of ten.

With ``minimum`` above 1 the histogram holds no bin with fewer rows: those of a group and label are sorted by probability, and
each run of ``minimum`` neighbours (or a few more, so that none are left over) counts at the bin of its mean: microaggregation.
Totals stay as they are.  Whoever receives such a histogram calls `spread`, which undoes what averaging does to AUC and
thresholds.  AUC is exact where it was computed from rows (minimum 1, nothing added).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.engines.stages import Expected
from fedbilevel.fairness.metrics import Counts, Floats, Integers, normal_quantile, ratio, wilson
from fedbilevel.fairness.moments import mean_gap_ends

ALL = "(all)"
"""Everybody, as a group of tables."""
SPREAD = 1000
"""Cells with more rows have runs enough as they are."""


def _edges() -> Floats:
    middle = np.arange(10, 491) / 500
    tail = 0.02 * 10 ** (-np.arange(1, 133) / 40)
    return np.concatenate([tail[::-1], middle, 1 - tail])


EDGES = _edges()
_MIDDLES = np.concatenate([[EDGES[0] / 2], (EDGES[1:] + EDGES[:-1]) / 2, [(1 + EDGES[-1]) / 2]])


@dataclass(frozen=True, eq=False)
class Scores:
    """Rows by group, label and bin of probability.

    Attributes:
        cells: integers [..., group, label, bin].
        sums: [..., group, label, 4]: sums over the rows of the probability of label 1, its square, the row's Brier score, its
            square.
        areas: exact AUC of every group and, last, of all rows; None where only the bins are known.
    """

    cells: Integers
    sums: Floats
    areas: Floats | None = None

    @classmethod
    def of(cls, labels: Any, probability: Any, groups: Any, names: int, minimum: int = 1) -> Scores:
        """Count rows given as codes: ``groups`` from 0 to ``names`` - 1; ``labels`` 0 or 1, with the ``probability`` [n] of
        1, or of more classes, with those [n, classes] of all."""
        values = np.asarray(probability, np.float64)
        if len(values) and not (values.min() >= 0 and values.max() <= 1):
            raise ValueError("Predicted probabilities must lie between 0 and 1 and not be missing.")
        label, group = np.asarray(labels, np.int64), np.asarray(groups, np.int64)
        if values.ndim == 1:
            return cls._against_rest(label, values, (values - label) ** 2, group, names, minimum)
        own = label[:, None] == np.arange(values.shape[1])
        off = ((values - own) ** 2).sum(axis=1) / 2
        each = [cls._against_rest(own[:, c] * 1, values[:, c], off, group, names, minimum) for c in range(own.shape[1])]
        areas = [one.areas for one in each if one.areas is not None]
        cells, sums = (np.stack([getattr(one, part) for one in each]) for part in ("cells", "sums"))
        return cls(cells, sums, np.stack(areas) if areas else None)

    @classmethod
    def _against_rest(
        cls, label: Integers, values: Floats, off: Floats, group: Integers, names: int, minimum: int
    ) -> Scores:
        cell = 2 * group + label
        shape = (names, 2)
        each = (values, values**2, off, off**2)
        sums = np.stack([np.bincount(cell, summed, 2 * names).reshape(shape) for summed in each], axis=-1)
        binned = values if minimum <= 1 else _microaggregated(values, cell, minimum)
        bins = len(EDGES) + 1
        place = cell * bins + np.searchsorted(EDGES, binned)
        cells = np.bincount(place, minlength=2 * names * bins).reshape(*shape, bins)
        areas = None
        if minimum <= 1:
            areas = np.array(
                [area(label[group == g], values[group == g]) for g in range(names)] + [area(label, values)]
            )
        return cls(np.asarray(cells), np.asarray(sums), areas)

    def packed(self) -> dict[str, Any]:
        """As a site sends them: the bins that hold rows, one after the other, and their counts; the sums."""
        places = np.flatnonzero(self.cells)
        return {"scores/places": places, "scores/counts": self.cells.ravel()[places], "scores/sums": self.sums}

    @staticmethod
    def expected(names: int, classes: int = 2) -> dict[str, Expected]:
        """What `packed` tells of so many groups and classes."""
        shape = ((classes,) if classes > 2 else ()) + (names, 2)
        last = math.prod(shape) * (len(EDGES) + 1) - 1
        return {
            "scores/places": Expected((-1,), high=last), "scores/counts": Expected((-1,)),
            "scores/sums": Expected((*shape, 4)),
        }  # fmt: skip

    @classmethod
    def received(cls, told: Mapping[str, Any]) -> Scores:
        """What one client, or the sum over clients (`added_up`), most likely had."""
        if "scores/cells" in told:
            return cls(np.rint(told["scores/cells"]).astype(np.int64), np.asarray(told["scores/sums"], np.float64))
        return cls.unpacked(told).spread()

    @classmethod
    def unpacked(cls, told: Mapping[str, Any]) -> Scores:
        """What `packed` made."""
        sums = np.asarray(told["scores/sums"], np.float64)
        shape = (*sums.shape[:-1], len(EDGES) + 1)
        cells = np.zeros(shape, np.int64)
        cells.ravel()[np.asarray(told["scores/places"], np.int64)] = np.asarray(told["scores/counts"], np.int64)
        return cls(cells, sums)

    def spread(self) -> Scores:
        """What one client's microaggregated rows most likely were: a cell has the quantiles of the Beta distribution with its
        mean and variance, those of each run moved (in log-odds) to the run's mean.

        Fifteen positives count at one place; as they are, an AUC of .80 becomes .90.  Measured on 300 normal samples each of
        10 to 100 positives: biases of .002 to .19 become .003 at most.  Where there are many runs, they are fine as they are.
        """
        from scipy.special import betaincinv, expit, logit

        cells = self.cells.copy()
        for place in zip(*np.nonzero((self.rows > 1) & (self.rows <= SPREAD)), strict=True):
            bins = np.flatnonzero(self.cells[place])
            size, ends = int(self.rows[place]), np.cumsum(self.cells[place][bins])
            mean, square = self.sums[place][:2] / size
            known = np.clip(1 / max((square - mean**2) / max(mean * (1 - mean), 1e-12), 1e-9) - 1, 1e-3, 1e9)
            ranks = (np.arange(size) + 0.5) / size
            drawn = np.clip(betaincinv(max(mean, 1e-9) * known, max(1 - mean, 1e-9) * known, ranks), 1e-9, 1 - 1e-9)
            for run, middle in zip(np.split(np.arange(size), ends[:-1]), _MIDDLES[bins], strict=True):
                drawn[run] = expit(logit(drawn[run]) + logit(middle) - logit(drawn[run].mean()))
            cells[place] = np.bincount(np.searchsorted(EDGES, drawn), minlength=len(EDGES) + 1)
        return Scores(cells, self.sums)

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.cells + other.cells, self.sums + other.sums)

    @property
    def rows(self) -> Integers:
        """Rows by group and label."""
        return np.asarray(self.cells.sum(axis=-1))

    def of_groups(self, places: Sequence[int], label: int | None = None) -> Scores:
        """Some of the groups; and of more than two classes, only how one of them was told from the others."""
        of_class = ... if label is None else label
        return Scores(np.take(self.cells[of_class], places, axis=-3), np.take(self.sums[of_class], places, axis=-3))

    def everybody(self) -> Scores:
        """All groups as one."""
        areas = None if self.areas is None else self.areas[..., -1:].repeat(2, axis=-1)
        return Scores(self.cells.sum(axis=-3, keepdims=True), self.sums.sum(axis=-3, keepdims=True), areas)

    def counts(self, threshold: float) -> Counts:
        """Decisions at a threshold that is one of `EDGES`."""
        place = int(np.argmin(np.abs(EDGES - threshold)))
        if abs(EDGES[place] - threshold) > 1e-9:
            raise ValueError(
                f"The threshold {threshold:g} is no edge of the bins; the nearest one is {EDGES[place]:g}."
            )
        above = self.cells[..., place + 1 :].sum(axis=-1)
        return Counts(np.stack([self.rows - above, above], axis=-1))

    def above(self) -> Integers:
        """Rows above every edge: [..., group, label, edge]."""
        return np.asarray(self.cells[..., ::-1].cumsum(axis=-1)[..., -2::-1])

    def auc(self) -> Floats:
        """Area under the ROC curve by group; NaN where a group has one label only."""
        if self.areas is not None:
            return np.asarray(self.areas[..., :-1])
        negative, positive = self.cells[..., 0, :], self.cells[..., 1, :]
        below = negative.cumsum(axis=-1) - negative / 2
        return ratio((positive * below).sum(axis=-1), positive.sum(axis=-1) * negative.sum(axis=-1))

    def auc_ends(self, level: float = 0.95) -> tuple[Floats, Floats]:
        return auc_ends(self.auc(), self.rows[..., 1], self.rows[..., 0], level)

    def brier(self) -> Floats:
        """Mean squared distance of probability and label by group."""
        return ratio(self.sums[..., 2].sum(axis=-1), self.rows.sum(axis=-1))

    def brier_ends(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """Student's interval of the mean, cut to [0, 1]."""
        from scipy.special import stdtrit

        size, mean = self.rows.sum(axis=-1), self.brier()
        second = ratio(self.sums[..., 3].sum(axis=-1), size)
        with np.errstate(invalid="ignore", divide="ignore"):
            half = stdtrit(size - 1.0, (1 + level) / 2) * np.sqrt(np.maximum(second - mean**2, 0) / (size - 1))
        half = np.where(size > 1, half, np.nan)
        return np.maximum(mean - half, 0), np.minimum(mean + half, 1)

    def calibration(self) -> Floats:
        """Mean prediction minus the share of positives, by group: above 0 where the model predicts too much."""
        size = self.rows.sum(axis=-1)
        return ratio(self.sums[..., 0].sum(axis=-1), size) - ratio(self.rows[..., 1], size)

    def calibration_ends(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """By Wilson's interval of the share of positives, the predictions being given."""
        size = self.rows.sum(axis=-1)
        predicted = ratio(self.sums[..., 0].sum(axis=-1), size)
        low, high = wilson(ratio(self.rows[..., 1], size), size, level)
        return predicted - high, predicted - low

    def miscalibration(self) -> tuple[Floats, Floats]:
        """By comparison and group, the means of (p - y) p and of (p - y) (1 - p) (`formulation.calibration`; of more than two
        classes, of each), and the variances of single rows.  Means follow from the sums, variances from the bins."""
        size, both = self.rows.sum(axis=-1), self.sums.sum(axis=-2)
        among = self.sums[..., 1, 0]
        means = ratio(both[..., 1] - among, size), ratio(both[..., 0] - both[..., 1] - self.rows[..., 1] + among, size)
        error = _MIDDLES - np.array([[0.0], [1.0]])
        variances = []
        for value in (error * _MIDDLES, error * (1 - _MIDDLES)):
            first, second = (ratio((self.cells * value**power).sum(axis=(-1, -2)), size) for power in (1, 2))
            variances.append(np.maximum(second - first**2, 0) * ratio(size, np.maximum(size - 1, 1)))
        shape = (-1, size.shape[-1])
        return np.stack(means).reshape(shape), np.stack(variances).reshape(shape)

    def calibration_gap(self) -> float:
        """The largest difference of two groups in one of the means of `miscalibration`; NaN where fewer than two have rows."""
        means, _ = self.miscalibration()
        if (self.rows.sum(axis=-1).reshape(-1, means.shape[1])[0] > 0).sum() < 2:
            return float("nan")
        return float((np.nanmax(means, axis=1) - np.nanmin(means, axis=1)).max())

    def calibration_gap_ends(self, level: float = 0.95) -> tuple[float, float]:
        """Welch's intervals of all pairs of groups and comparisons, at a level that holds for all together."""
        rows = self.rows.sum(axis=-1)
        return mean_gap_ends(*self.miscalibration(), rows.reshape(-1, rows.shape[-1])[0].astype(np.float64), level)

    def gathered(self, places: Any, count: int) -> Scores:
        """Fewer groups: those with the same place become one; -1 is left out."""
        chosen = np.asarray(places)[None, :] == np.arange(count)[:, None]

        def together(values: Any) -> Any:
            return np.moveaxis(np.tensordot(chosen.astype(values.dtype), values, axes=(1, -3)), 0, -3)

        return Scores(together(self.cells), together(self.sums))

    def curve(self, minimum: int = 1, buckets: int = 10, level: float = 0.95) -> pd.DataFrame:
        """The calibration curve of all groups together: ``predicted`` (mean), ``observed`` (share of positives), ``count``,
        and the ends of Wilson's interval.  Neighbouring bins are joined until a bucket has its share of the rows and
        ``minimum`` rows of either label; with fewer in all there is no curve."""
        cells = self.cells.sum(axis=-3)
        wanted = cells.sum() / buckets
        found: list[Floats] = []
        held = np.zeros(3)
        for negative, positive, middle in zip(*cells, _MIDDLES, strict=True):
            held = held + np.array([negative, positive, (negative + positive) * middle])
            if held[0] + held[1] >= wanted - 0.5 and min(held[:2]) >= minimum:
                found.append(held)
                held = np.zeros(3)
        if found:
            found[-1] = found[-1] + held
        negative, positive, summed = np.array(found).reshape(-1, 3).T
        size = negative + positive
        low, high = wilson(ratio(positive, size), size, level)
        return pd.DataFrame(
            {"predicted": ratio(summed, size), "observed": ratio(positive, size), "count": size.astype(np.int64),
             "observed_low": low, "observed_high": high}
        )  # fmt: skip


def measures(
    counts: Counts,
    scores: Scores | None,
    names: Sequence[Any],
    level: float = 0.95,
    classes: Sequence[Any] | None = None,
) -> pd.DataFrame:
    """Every measure with both ends of its interval (``_low``, ``_high``): a row for all rows (`ALL`), then one a group; of more
    than two ``classes`` one for each of them.

    ``count``, ``positives``, accuracy, selection rate, true and false positive rate (recall is the former), precision: Wilson.
    Balanced accuracy: from Wilson's ends of its two rates.  AUC: Newcombe's method 5.  Brier score: Student.  Calibration (mean
    prediction minus share of positives): Wilson.

    Args:
        counts: decisions by group and label.
        scores: probabilities by group and label; without them AUC, Brier score and calibration are missing.
        names: of the groups.
        level: of the intervals.
        classes: their names, where there are more than two.

    Returns:
        A table with a column for each measure and each end.
    """
    cells = np.concatenate([counts.cells.sum(axis=-3, keepdims=True), counts.cells], axis=-3)
    table = Counts(cells).table([ALL, *names], level, classes)
    if scores is None:
        return table
    parts = [scores.everybody(), scores]
    for name in ("auc", "brier", "calibration"):
        values = [(getattr(part, name)(), *getattr(part, f"{name}_ends")(level)) for part in parts]
        for end, both in zip(("", "_low", "_high"), zip(*values, strict=True), strict=True):
            table[f"{name}{end}"] = np.concatenate(both, axis=-1).T.ravel()
    return table


def miscalibrations(labels: Any, probability: Any) -> Floats:
    """Of every row (p - y) p and (p - y) (1 - p), [comparison, n]: what `Scores.miscalibration` has the means of."""
    values = np.asarray(probability, np.float64)
    label = np.asarray(labels, np.int64)
    chances, truths = (values[None], label[None]) if values.ndim == 1 else (
        values.T, label[None] == np.arange(values.shape[1])[:, None]
    )  # fmt: skip
    error = chances - truths
    return np.concatenate([error * chances, error * (1 - chances)])


def area(labels: Any, values: Any) -> float:
    """How often a positive row scores higher than a negative one, ties counting half; NaN with one label only.

    >>> area(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.4, 0.8]))
    0.875
    """
    positive = np.asarray(labels) == 1
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return float("nan")
    from scipy.stats import rankdata

    ranks = rankdata(np.asarray(values, np.float64))
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def auc_ends(value: Any, positives: Any, negatives: Any, level: float = 0.95) -> tuple[Floats, Floats]:
    """Both ends of an interval for an AUC: the values whose distance to the observed one is z standard errors *at that value*,
    so that it works for few rows and for an AUC of 1.

    Newcombe (2006), Confidence intervals for an effect size measure based on the Mann-Whitney statistic, part 2, method 5.
    """
    observed, ones, zeros = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (value, positives, negatives)))
    z = normal_quantile(level)
    rows = (ones + zeros) / 2 - 1

    def beyond(theta: Floats) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            spread = theta * (1 - theta) / (ones * zeros)
            spread = spread * (1 + rows * ((1 - theta) / (2 - theta) + theta / (1 + theta)))
        return np.asarray((theta - observed) ** 2 - z**2 * spread)

    ends = []
    for end in (0.0, 1.0):
        outside, inside = np.full(observed.shape, end), observed.copy()
        for _ in range(60):
            middle = (outside + inside) / 2
            far = beyond(middle) > 0
            outside, inside = np.where(far, middle, outside), np.where(far, inside, middle)
        ends.append(np.where(np.isnan(observed), np.nan, outside))
    return ends[0], ends[1]


def _microaggregated(values: Floats, cell: Integers, minimum: int) -> Floats:
    """Every probability replaced by the mean of its run of ``minimum`` neighbours of the same cell, or a few more."""
    if not len(values):
        return values
    order = np.lexsort((values, cell))
    ordered = cell[order]
    first = np.append(True, ordered[1:] != ordered[:-1])
    start = np.flatnonzero(first)[np.cumsum(first) - 1]
    size = np.bincount(cell)[ordered]
    run = (np.arange(len(order)) - start) * np.maximum(size // minimum, 1) // size
    number = np.cumsum(first | np.append(True, run[1:] != run[:-1])) - 1
    smooth = np.empty_like(values)
    smooth[order] = (np.bincount(number, values[order]) / np.bincount(number))[number]
    return smooth


def added_up(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a client tells, in a form that adds up over clients: every bin, as `Scores.spread` has it, and which groups are told
    with others, or not at all.  Of an `Expected` of the former the one of the latter."""
    out = {name: value for name, value in told.items() if name not in ("scores/places", "scores/counts", "hidden")}
    if "scores/places" in told:
        sums = told["scores/sums"]
        shape = (*sums.shape[:-1], len(EDGES) + 1)
        out["scores/cells"] = Expected(shape) if isinstance(sums, Expected) else Scores.unpacked(told).spread().cells
    if "hidden" in told:
        hidden = told["hidden"]
        like = Expected((2, *hidden.shape), high=1) if isinstance(hidden, Expected) else None
        out["hidden"] = np.stack([hidden == 1, hidden == 2]).astype(float) if like is None else like
    return out
