"""How sure a number is: a mean over splits, alone and paired against a baseline, and a metric of one trained model.

Comparisons are made on differences within the same split (`paired_difference`) or on the same redrawn rows
(`bootstrap_difference`): what both sides share then cancels.

What the intervals over splits do not say: random splits of one table overlap, so their values are not independent. "student"
and "bootstrap" speak about the mean over splits of this table and shrink with every further split; "corrected" (Nadeau &
Bengio, Inference for the generalization error, 2003) adds the share of the variance that the overlap hides and is the
one to use for claims about new data.

For one model, other test rows are redrawn from those at hand.  A disparity is never negative, and its bootstrap distribution
lies too high when the true one is near zero, so an interval for it practically never contains 0: judge by differences.
`gap_ends` needs no redrawing: it knows a group's rows and hits, and what two rows are worth.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.fairness.metrics import (
    CONVENTIONS,
    CRITERIA,
    Counts,
    Encoded,
    Floats,
    GroupLeftOut,
    check_choice,
    encode,
    normal_quantile,
    parts,
    ratio,
)
from fedbilevel.tables.columns import check_columns, check_lengths, shown

SPLIT_METHODS = ("student", "corrected", "bootstrap")


class Interval(NamedTuple):
    """An estimate with its confidence interval.

    Attributes:
        estimate: the value itself.
        low, high: the ends of the interval.
        level: the confidence level.
        method: how the interval was made.
        size: how many rows or splits it rests on.
        undefined: how many resamples the metric was undefined in; these are left out.
    """

    estimate: float
    low: float
    high: float
    level: float
    method: str
    size: int
    undefined: int = 0

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def across_splits(
    values: Any,
    *,
    level: float = 0.95,
    method: str = "student",
    test_share: float | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Mean over splits (or seeds) with its interval; `values` holds one number per split.

    Args:
        values: at least two numbers.
        level: of confidence.
        method: "student": the t interval; "corrected": the t interval with the correction for overlapping random
            splits; "bootstrap": percentiles of the mean of redrawn values.
        test_share: the share of rows in each test part; "corrected" needs it.
        resamples: for "bootstrap".
        seed: for "bootstrap".

    Returns:
        An `Interval`.

    Raises:
        ValueError: There are fewer than two values, one is missing, or ``method`` needs a ``test_share``.

    Examples:
        >>> interval = across_splits([0.1, 0.2, 0.3])
        >>> round(interval.estimate, 3), round(interval.low, 3), round(interval.high, 3)
        (0.2, -0.048, 0.448)
    """
    check_choice("method", method, SPLIT_METHODS)
    check_level(level)
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or numbers.size < 2:
        raise ValueError(f"values must hold one number for each of at least two splits, not shape {numbers.shape}.")
    if not np.isfinite(numbers).all():
        first = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise ValueError(f"values: split number {first} holds {numbers[first]}; leave out splits without a value.")
    mean = float(numbers.mean())
    if method == "bootstrap":
        drawn = np.random.default_rng(seed).choice(numbers, size=(resamples, numbers.size)).mean(axis=1)
        return percentile(mean, drawn, level, size=numbers.size)
    share = 1 / numbers.size
    if method == "corrected":
        if test_share is None or not 0 < test_share < 1:
            raise ValueError(
                f"test_share={test_share!r}: the corrected interval needs the test part's share of the rows."
            )
        share += test_share / (1 - test_share)
    from scipy.special import stdtrit

    half = float(stdtrit(numbers.size - 1, (1 + level) / 2) * np.sqrt(numbers.var(ddof=1) * share))
    return Interval(mean, mean - half, mean + half, level, method, numbers.size)


def paired_difference(
    values: Any,
    baseline: Any,
    *,
    level: float = 0.95,
    method: str = "student",
    test_share: float | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Mean over splits of `values` minus `baseline`, taken split by split; the options are those of `across_splits`.

    Two pandas Series are matched by their index (the split), other inputs by position.

    Args:
        values: One number a split.
        baseline: One number a split, for the same splits.
        level: Of confidence.
        method: As in `across_splits`.
        test_share: Share of the rows that a split tests on; corrects for overlap.
        resamples: Of the bootstrap.
        seed: Of the draws.

    Returns:
        An `Interval`.

    Raises:
        ValueError: The two do not have the same splits, or one has a split twice.

    Examples:
        >>> paired_difference([0.84, 0.85, 0.83], [0.80, 0.80, 0.80]).excludes_zero
        True
    """
    if isinstance(values, pd.Series) and isinstance(baseline, pd.Series):
        for name, series in (("values", values), ("baseline", baseline)):
            repeated = series.index[series.index.duplicated()]
            if len(repeated):
                raise ValueError(f"{name} has two numbers for the split {shown(repeated[0])}.")
        odd = values.index.symmetric_difference(baseline.index)
        if len(odd):
            raise ValueError(f"The split {shown(odd[0])} is in only one of values and baseline; both need it.")
        baseline = baseline.reindex(values.index)
    ours, theirs = np.asarray(values, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    check_lengths(values=ours, baseline=theirs)
    return across_splits(
        ours - theirs, level=level, method=method, test_share=test_share, resamples=resamples, seed=seed
    )


def comparison_table(
    results: pd.DataFrame,
    *,
    baseline: str,
    metrics: Sequence[str],
    by: str = "method",
    split: str = "split",
    level: float = 0.95,
    interval: str = "student",
    test_share: float | None = None,
) -> pd.DataFrame:
    """Means with intervals, and paired differences to a baseline, of all methods and metrics.

    Args:
        results: one row per method and split, one column per metric.
        baseline: the method that the others are compared with.
        metrics: the columns to compare.
        by: the column with the method.
        split: the column with the split.
        level: of confidence.
        interval: "student", "corrected" (needs `test_share`) or "bootstrap".
        test_share: see `across_splits`.

    Returns:
        Indexed by method and metric: `splits`, `mean`, `low`, `high`, `difference`, `difference_low`,
        `difference_high`, `excludes_zero`. The baseline's own differences are missing.

    Raises:
        ValueError: The baseline is not among the methods, or a method has two rows of one split.
    """
    check_columns(results, [by, split, *metrics], "results")
    names = list(dict.fromkeys(results[by]))
    if baseline not in names:
        raise ValueError(
            f"baseline={baseline!r} is not in the column {by!r}, which holds {', '.join(map(str, names))}."
        )
    repeated = results.duplicated([by, split])
    if repeated.any():
        second = results[repeated].iloc[0]
        raise ValueError(f"results has two rows for {by} {shown(second[by])} and {split} {shown(second[split])}.")
    numbers = results.set_index([by, split])[list(metrics)]
    rows = []
    for name in names:
        for metric in metrics:
            values = numbers.loc[name][metric]
            mean = across_splits(values, level=level, method=interval, test_share=test_share)
            row = {by: name, "metric": metric, "splits": mean.size}
            row |= {"mean": mean.estimate, "low": mean.low, "high": mean.high}
            if name != baseline:
                theirs = numbers.loc[baseline][metric]
                gap = paired_difference(values, theirs, level=level, method=interval, test_share=test_share)
                row |= {"difference": gap.estimate, "difference_low": gap.low, "difference_high": gap.high}
                row["excludes_zero"] = gap.excludes_zero
            rows.append(row)
    columns = ["splits", "mean", "low", "high", "difference", "difference_low", "difference_high", "excludes_zero"]
    return pd.DataFrame(rows).set_index([by, "metric"]).reindex(columns=columns)


def percentile(estimate: float, values: Any, level: float, *, size: int) -> Interval:
    """The interval between the percentiles of resampled `values`, those that are NaN left out and counted."""
    check_level(level)
    drawn = np.asarray(values, dtype=np.float64)
    defined = drawn[~np.isnan(drawn)]
    if defined.size == 0:
        raise ValueError("The metric is undefined in every resample, so there is no interval.")
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, float(low), float(high), level, "bootstrap", size, int(drawn.size - defined.size))


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level={level!r} must lie between 0 and 1, like 0.95.")


def gap_ends(
    counts: Counts, criterion: str, method: str = "between_groups", level: float = 0.95
) -> tuple[Floats, Floats]:
    """Both ends of an interval for ``counts.gap(criterion, method)`` that sees how few rows a group has.

    A gap is the largest difference of a pair of groups.  A pair's ends: Clopper and Pearson's of both rates, their distances
    combined as in Newcombe's interval for a difference (MOVER), and widened by 1 + 1 / (n + m) for pairs of n and m rows.
    The gap's low end is the largest low end of all pairs, taken with the quantile of the studentized range, so that all hold
    at once.  Its high end is the largest high end: the pair that is truly furthest apart is among them, so nothing has to be
    corrected.  docs/metrics.md shows the measured coverage.

    Examples:
        >>> low, high = gap_ends(Counts(np.array([[[0, 0], [2, 0]], [[0, 0], [60, 40]]])), "equal_opportunity")
        >>> round(float(low), 3), round(float(high), 3)
        (0.0, 0.504)
    """
    if counts.weights is not None:
        raise ValueError("Rows have weights: bootstrap_interval redraws them.")
    if method == "mean_pairwise":
        raise ValueError("A mean over pairs of groups has no such interval: bootstrap_interval redraws rows.")
    rates, several = CRITERIA[criterion], counts.classes > 2
    compared = counts.majority_and_rest() if method == "majority_vs_rest" and counts.cells.shape[-3] > 1 else counts
    # With more than two classes every class has these rates, and the largest of all gaps counts.
    number = len(rates) * (counts.classes if several else 1)
    pairs = [_pair_ends(*parts(compared.cells, rate), method, level, number) for rate in rates]
    low, high = (np.fmax.reduce(np.concatenate(ends, axis=-1), axis=-1, initial=0) for ends in zip(*pairs, strict=True))
    if several:
        low, high = (np.fmax.reduce(end, axis=-1, initial=0) for end in (low, high))
    undefined = np.isnan(counts.gap(criterion, method))
    return np.where(undefined, np.nan, low), np.where(undefined, np.nan, np.minimum(high, 1))


def _pair_ends(hits: Any, rows: Any, method: str, level: float, rates: int) -> tuple[Floats, Floats]:
    """Ends of the difference of a rate for every ordered pair of groups (or of a group and everybody), along the last axis.

    The low ends hold all at once, for all of so many ``rates``; each high end holds for itself.
    """
    if method == "to_overall":
        rest = [values.sum(axis=-1, keepdims=True) - values for values in (hits, rows)]
        first = [np.concatenate(pair, axis=-1) for pair in zip((hits, rows), rest, strict=True)]
        second = [np.concatenate(pair, axis=-1) for pair in zip(rest, (hits, rows), strict=True)]
        # A group's distance to everybody is its distance to the rest, times the rest's share.
        scale: Any = np.concatenate([ratio(rest[1], rest[1] + rows)] * 2, axis=-1)
    else:
        one, other = _ordered_pairs(rows.shape[-1])
        first, second = ([values[..., index] for values in (hits, rows)] for index in (one, other))
        scale = 1.0
    groups = int((rows > 0).sum(axis=-1).max(initial=0))
    difference = ratio(*first) - ratio(*second)
    with np.errstate(divide="ignore"):
        widened = 1 + 1 / (first[1] + second[1])
    ends = []
    for z, sign in ((_joint_quantile(groups, method, 1 - (1 - level) / rates), -1), (normal_quantile(level), 1)):
        reach = np.hypot(_reach(first[0], first[1], z)[sign], _reach(second[0], second[1], z)[-sign])
        ends.append(scale * (difference + sign * widened * reach))
    return ends[0], ends[1]


def _ordered_pairs(groups: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    one, other = np.nonzero(~np.eye(groups, dtype=bool))
    return one, other


def _reach(hits: Any, rows: Any, z: float) -> dict[int, Floats]:
    """How far Clopper and Pearson's ends lie below (-1) and above (1) a rate."""
    from scipy.special import betaincinv, ndtr

    tail, rate = float(ndtr(-z)), ratio(hits, rows)
    missed = rows - hits
    with np.errstate(invalid="ignore"):
        low = np.where(hits > 0, betaincinv(np.maximum(hits, 1), missed + 1, tail), 0)
        high = np.where(missed > 0, betaincinv(hits + 1, np.maximum(missed, 1), 1 - tail), 1)
    return {-1: rate - low, 1: high - rate}


@cache
def _joint_quantile(groups: int, method: str, level: float) -> float:
    """z for all pairs of groups at once."""
    if method == "to_overall":
        return normal_quantile(1 - (1 - level) / max(groups, 1))
    if groups <= 2:
        return normal_quantile(level)
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(level, groups, np.inf) / math.sqrt(2))


def gap_difference_ends(joint: Any, criterion: str, level: float = 0.95) -> tuple[Floats, Floats]:
    """Both ends of an interval for the gap between groups of one model minus that of another, on the same rows.

    ``joint`` counts rows [..., group, label, decision of the one, decision of the other].  Let g, h be the two groups that the
    one model's gap truly rests on.  The other's gap is at least its own difference of g and h, so the difference of the gaps is
    at most how much more the first model sets g and h apart than the second: a contrast of the decisions in which the two
    differ.  Its high end is the largest of all pairs that the first gap may rest on, by their intervals.  The low end mirrors
    it.  Where the pair is not known, the ends of the two gaps (`gap_ends`) bound the difference.
    """
    tables = np.asarray(joint, np.int64)
    if tables.shape[-1] > 2:
        return _of_classes(tables, criterion, level)
    rates = CRITERIA[criterion]
    models = Counts(tables.sum(axis=-1)), Counts(tables.sum(axis=-2))
    gaps = [counts.gap(criterion) for counts in models]
    ends = [gap_ends(counts, criterion, level=level) for counts in models]
    one, other = _ordered_pairs(tables.shape[-4])
    z = normal_quantile(level)
    highs, lows = [], []
    for rate in rates:
        label = {"true_positive_rate": 1, "false_positive_rate": 0}.get(rate)
        cells = tables.sum(axis=-3) if label is None else tables[..., label, :, :]
        more, size = cells[..., 1, 0] - cells[..., 0, 1], cells.sum(axis=(-2, -1))
        # Bonett and Price's interval of a paired difference: Wald's, with a row of either disagreement added.
        middle, either = more / (size + 2), (cells[..., 1, 0] + cells[..., 0, 1] + 2) / (size + 2)
        half = z * np.sqrt((either - middle**2) / (size + 2))
        change = ratio(more, size)
        below, above = change - np.maximum(middle - half, -1), np.minimum(middle + half, 1) - change
        apart = change[..., one] - change[..., other]
        may_rest = [
            _pair_ends(*parts(counts.cells, rate), "between_groups", level, len(rates))[1] >= end[0][..., None]
            for counts, end in zip(models, ends, strict=True)
        ]
        highs.append(np.where(may_rest[0], apart + np.hypot(above[..., one], below[..., other]), -np.inf))
        lows.append(np.where(may_rest[1], apart - np.hypot(below[..., one], above[..., other]), np.inf))
    difference = gaps[0] - gaps[1]
    high = np.minimum(np.fmax.reduce(np.concatenate(highs, axis=-1), axis=-1, initial=-1), ends[0][1] - ends[1][0])
    low = np.maximum(np.fmin.reduce(np.concatenate(lows, axis=-1), axis=-1, initial=1), ends[0][0] - ends[1][1])
    undefined = np.isnan(difference)
    return (
        np.where(undefined, np.nan, np.minimum(low, difference)),
        np.where(undefined, np.nan, np.maximum(high, difference)),
    )


def _of_classes(joint: NDArray[np.int64], criterion: str, level: float) -> tuple[Floats, Floats]:
    """`gap_difference_ends` for more than two classes, of which the one with the largest gap counts.

    Let c be the class that the one model's gap truly rests on.  The other's gap is at least that of c, so the difference is at
    most that of the gaps of c; and c is among the classes whose gap may be the largest, by its interval.
    """
    classes = joint.shape[-1]
    models = Counts(joint.sum(axis=-1)), Counts(joint.sum(axis=-2))
    difference = models[0].gap(criterion) - models[1].gap(criterion)
    least = [gap_ends(counts, criterion, level=level)[0] for counts in models]
    lows, highs = [], []
    for label in range(classes):
        own = np.arange(classes) == label
        two = np.stack([joint[..., side, :, :].sum(axis=-3) for side in (~own, own)], axis=-3)
        two = np.stack([two[..., side, :].sum(axis=-2) for side in (~own, own)], axis=-2)
        two = np.stack([two[..., side].sum(axis=-1) for side in (~own, own)], axis=-1)
        low, high = gap_difference_ends(two, criterion, level)
        ends = [gap_ends(Counts(two.sum(axis=axis)), criterion, level=level)[1] for axis in (-1, -2)]
        highs.append(np.where(ends[0] >= least[0], high, -np.inf))
        lows.append(np.where(ends[1] >= least[1], low, np.inf))
    low, high = np.fmin.reduce(lows), np.fmax.reduce(highs)
    undefined = np.isnan(difference)
    return (
        np.where(undefined, np.nan, np.minimum(low, difference)),
        np.where(undefined, np.nan, np.maximum(high, difference)),
    )


STRATA = ("cell", "group", "none")

Metric = str | Callable[..., float]


def bootstrap_interval(
    metric: Metric,
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    method: str = "between_groups",
    strata: str = "cell",
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    sample_weight: Any = None,
    pos_label: Any = None,
) -> Interval:
    """Percentile bootstrap over the rows of one test part.

    Args:
        metric: "equal_opportunity", "equalized_odds", "demographic_parity", "accuracy", or a function called like
            `equal_opportunity_difference(y_true, y_pred, sensitive_features=...)` with 0/1 labels, and with
            `sample_weight=...` as well if weights are given.
        y_true: the labels.
        y_pred: the predicted labels.
        sensitive_features: the group of each row.
        method: how groups are compared, for the three disparities.
        strata: rows are redrawn within "cell" (group and label together, so that each group keeps its positives and
            negatives), within "group", or freely ("none").
        level: of confidence.
        resamples: how many.
        seed: of the draws.
        sample_weight: weights of the rows.
        pos_label: the positive class, if the labels are not 0/1.

    Returns:
        An `Interval`.
    """
    data = encode(y_true, y_pred, sensitive_features, sample_weight, pos_label)
    check_level(level)
    (values,) = _values(metric, method, [data], strata, resamples, seed)
    return percentile(float(values[0]), values[1:], level, size=data.y_true.size)


def bootstrap_difference(
    metric: Metric,
    y_true: Any,
    y_pred: Any,
    y_pred_baseline: Any,
    *,
    sensitive_features: Any,
    method: str = "between_groups",
    strata: str = "cell",
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    sample_weight: Any = None,
    pos_label: Any = None,
) -> Interval:
    """The metric of `y_pred` minus that of `y_pred_baseline`, both evaluated on the same redrawn rows.

    The other arguments are those of `bootstrap_interval`.

    Args:
        metric: As in `bootstrap_interval`.
        y_true: The labels.
        y_pred: The predicted labels.
        y_pred_baseline: Those of the model to compare with, for the same rows.
        sensitive_features: The group of each row.
        method: How groups are compared.
        strata: "cell", "group" or "none".
        level: Of confidence.
        resamples: How many.
        seed: Of the draws.
        sample_weight: Weights of the rows; None: all 1.
        pos_label: The positive class, if the labels are not 0/1.

    Returns:
        An `Interval`.
    """
    both = [encode(y_true, y, sensitive_features, sample_weight, pos_label) for y in (y_pred, y_pred_baseline)]
    check_level(level)
    ours, theirs = _values(metric, method, both, strata, resamples, seed)
    differences = ours - theirs
    return percentile(float(differences[0]), differences[1:], level, size=both[0].y_true.size)


def _values(
    metric: Metric, method: str, models: Sequence[Encoded], strata: str, resamples: int, seed: int
) -> list[Floats]:
    """Per model the metric on the rows themselves, then on every redrawn sample of them."""
    check_choice("method", method, CONVENTIONS)
    if isinstance(metric, str):
        check_choice("metric", metric, (*CRITERIA, "accuracy"))
        look: Callable[[Encoded], Any] = attrgetter("counts")
    else:
        look = partial(_of_rows, metric)
    seen = [[look(data)] for data in models]
    for rows in _resamples(models[0], strata, resamples, seed):
        for of_model, data in zip(seen, models, strict=True):
            # The same call has just succeeded on the rows themselves: what a redrawn sample refuses is undefined, not wrong.
            try:
                of_model.append(look(data.take(rows)))
            except ValueError:
                of_model.append(math.nan)
    if not isinstance(metric, str):
        return [np.array(values) for values in seen]
    counts = map(Counts.stack, seen)
    return [found.overall(metric) if metric == "accuracy" else found.gap(metric, method) for found in counts]


def _of_rows(function: Callable[..., float], data: Encoded) -> float:
    names = np.asarray(data.names, dtype=object)
    weights = {} if data.weight is None else {"sample_weight": data.weight}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GroupLeftOut)
        return float(function(data.y_true, data.y_pred, sensitive_features=names[data.groups], **weights))


def _resamples(data: Encoded, strata: str, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    check_choice("strata", strata, STRATA)
    if resamples < 1:
        raise ValueError(f"resamples={resamples!r} must be at least 1.")
    key = {
        "cell": len(data.classes) * data.groups + data.y_true,
        "group": data.groups,
        "none": np.zeros_like(data.groups),
    }[strata]
    order = np.argsort(key, kind="stable")
    _, first, size = np.unique(key[order], return_index=True, return_counts=True)
    generator = np.random.default_rng(seed)
    start, width = np.repeat(first, size), np.repeat(size, size)
    for _ in range(resamples):
        yield order[start + generator.integers(width)]
