"""How sure a metric of one trained model is: other test rows, redrawn from those at hand.

Models are compared on the same redrawn rows (`bootstrap_difference`): what both share then cancels. A disparity is
never negative, and its bootstrap distribution lies too high when the true one is near zero, so an interval for it
practically never contains 0: judge by differences.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.fairness.intervals import Interval, check_level, percentile
from fedbilevel.fairness.metrics import (
    CRITERIA,
    METHODS,
    Encoded,
    GroupLeftOut,
    check_choice,
    encode,
    encoded_disparity,
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
    """
    data = encode(y_true, y_pred, sensitive_features, sample_weight, pos_label)
    check_level(level)
    evaluate = _evaluator(metric, method)
    estimate = evaluate(data)
    drawn = [_or_nan(evaluate, _take(data, rows)) for rows in _resamples(data, strata, resamples, seed)]
    return percentile(estimate, drawn, level, size=data.y_true.size)


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
    ours = encode(y_true, y_pred, sensitive_features, sample_weight, pos_label)
    theirs = encode(y_true, y_pred_baseline, sensitive_features, sample_weight, pos_label)
    check_level(level)
    evaluate = _evaluator(metric, method)
    estimate = evaluate(ours) - evaluate(theirs)
    drawn = [
        _or_nan(evaluate, _take(ours, rows)) - _or_nan(evaluate, _take(theirs, rows))
        for rows in _resamples(ours, strata, resamples, seed)
    ]
    return percentile(estimate, drawn, level, size=ours.y_true.size)


def _evaluator(metric: Metric, method: str) -> Callable[[Encoded], float]:
    check_choice("method", method, METHODS)
    if isinstance(metric, str):
        name = metric
        check_choice("metric", name, (*CRITERIA, "accuracy"))
        if name == "accuracy":
            return _accuracy
        return lambda data: encoded_disparity(data, name, method)
    function = metric

    def evaluate(data: Encoded) -> float:
        names = np.asarray(data.names, dtype=object)
        weights = {} if data.weight is None else {"sample_weight": data.weight}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GroupLeftOut)
            return float(function(data.y_true, data.y_pred, sensitive_features=names[data.groups], **weights))

    return evaluate


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


def _take(data: Encoded, rows: NDArray[np.int64]) -> Encoded:
    weight = None if data.weight is None else data.weight[rows]
    return Encoded(data.y_true[rows], data.y_pred[rows], data.groups[rows], data.names, weight)


def _or_nan(evaluate: Callable[[Encoded], float], data: Encoded) -> float:
    # The same call has just succeeded on the rows themselves: what a redrawn sample refuses is undefined, not wrong.
    try:
        return evaluate(data)
    except ValueError:
        return math.nan


def _accuracy(data: Encoded) -> float:
    weight = np.ones(data.y_true.shape) if data.weight is None else data.weight
    total = weight.sum()
    return float(weight @ (data.y_true == data.y_pred) / total) if total > 0 else math.nan
