"""How sure a number is: a mean over splits, alone and paired against a baseline, and a metric of one trained model.

Comparisons are made on differences within the same split (`paired_difference`) or on the same redrawn rows
(`bootstrap_difference`): what both sides share then cancels.

What the intervals over splits do not say: random splits of one table overlap, so their values are not independent. "student"
and "bootstrap" speak about the mean over splits of this table and shrink with every further split; "corrected" (Nadeau &
Bengio, Inference for the generalization error, 2003) adds the share of the variance that the overlap hides and is the
one to use for claims about new data.

For one model, other test rows are redrawn from those at hand.  A disparity is never negative, and its bootstrap distribution
lies too high when the true one is near zero, so an interval for it practically never contains 0: judge by differences.
Accuracy and disparities depend on the rows only through their `Counts`.  Redrawing rows within the cells (group and label
together) is therefore drawing binomial counts, and for two models on the same rows multinomial ones (`redrawn_counts`): the
same distribution, thousands of times faster.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
    """
    both = [encode(y_true, y, sensitive_features, sample_weight, pos_label) for y in (y_pred, y_pred_baseline)]
    check_level(level)
    ours, theirs = _values(metric, method, both, strata, resamples, seed)
    differences = ours - theirs
    return percentile(float(differences[0]), differences[1:], level, size=both[0].y_true.size)


def redrawn_counts(
    labels: Any, decisions: Sequence[Any], groups: Any, names: int, *, resamples: int, seed: int
) -> list[Counts]:
    """The counts of every model in ``decisions`` over ``resamples`` draws of the rows within their cells.

    A draw says for each cell how often every combination of the models' decisions occurs, so the models share their rows.
    """
    combinations = 2 ** len(decisions)
    combination = sum(np.asarray(decided, np.int64) << model for model, decided in enumerate(decisions))
    cell = 2 * np.asarray(groups, np.int64) + np.asarray(labels, np.int64)
    observed = np.bincount(cell * combinations + combination, minlength=2 * names * combinations)
    observed = observed.reshape(2 * names, combinations)
    sizes = observed.sum(axis=1)
    shares = observed / np.maximum(sizes, 1)[:, None]
    shares[sizes == 0, 0] = 1.0
    generator = np.random.default_rng(seed)
    drawn = np.stack([generator.multinomial(n, p, size=resamples) for n, p in zip(sizes, shares, strict=True)], axis=1)
    counts = []
    for model in range(len(decisions)):
        positive = drawn[..., np.arange(combinations) >> model & 1 == 1].sum(axis=-1)
        counts.append(Counts(np.stack([sizes - positive, positive], axis=-1).reshape(resamples, names, 2, 2)))
    return counts


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
    key = {"cell": 2 * data.groups + data.y_true, "group": data.groups, "none": np.zeros_like(data.groups)}[strata]
    order = np.argsort(key, kind="stable")
    _, first, size = np.unique(key[order], return_index=True, return_counts=True)
    generator = np.random.default_rng(seed)
    start, width = np.repeat(first, size), np.repeat(size, size)
    for _ in range(resamples):
        yield order[start + generator.integers(width)]
