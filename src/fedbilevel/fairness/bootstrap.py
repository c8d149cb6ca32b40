"""How sure a metric of one trained model is: other test rows, redrawn from those at hand.

Models are compared on the same redrawn rows (`bootstrap_difference`): what both share then cancels. A disparity is
never negative, and its bootstrap distribution lies too high when the true one is near zero, so an interval for it
practically never contains 0: judge by differences.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.fairness.counts import CRITERIA, METHODS, Counts, Floats
from fedbilevel.fairness.intervals import Interval, check_level, percentile
from fedbilevel.fairness.metrics import Encoded, GroupLeftOut, check_choice, encode

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
    check_choice("method", method, METHODS)
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
                of_model.append(look(_take(data, rows)))
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


def _take(data: Encoded, rows: NDArray[np.int64]) -> Encoded:
    weight = None if data.weight is None else data.weight[rows]
    return Encoded(data.y_true[rows], data.y_pred[rows], data.groups[rows], data.names, weight)
