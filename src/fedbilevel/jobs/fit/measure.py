"""How well a fit does on test rows, with intervals.

Accuracy and disparities depend on the rows only through how many of each (group, label) cell were decided positively.
Redrawing rows within the cells (`bootstrap_interval` with ``strata="cell"``) is therefore drawing binomial counts, and for two
models on the same rows multinomial ones: the same distribution, thousands of times faster.  Rates of single groups get
Wilson's interval: a redrawn rate of 3 in 3 would be 1 every time, which says nothing of how few three are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.fairness.metrics import CRITERIA, auc, balanced_accuracy, check_choice, disparity, group_table
from fedbilevel.jobs.fit.data import Part

RESAMPLES = 2000
LEVEL = 0.95
Z = 1.959963984540054  # the 97.5 % point of the normal distribution
RATES = {
    "true_positive_rate": "positives",
    "false_positive_rate": "negatives",
    "selection_rate": "count",
    "accuracy": "count",
}
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def measures(part: str, rows: Part, probability: Floats, names: tuple[str, ...], metric: str) -> dict[str, float]:
    """Accuracy and gap of one set of rows, under the names of the run folder's columns."""
    decided = probability > 0.5
    found = {f"{part}_accuracy": float((decided == rows.labels).mean())}
    found[f"{part}_gap"] = gap(rows, decided, names, metric)
    if part == "test":
        two = 0 < rows.labels.sum() < len(rows.labels)
        found["test_balanced_accuracy"] = balanced_accuracy(rows.labels, decided.astype(int)) if two else float("nan")
        found["test_auc"] = auc(rows.labels, probability) if two else float("nan")
    return found


def gap(rows: Part, decided: NDArray[np.bool_], names: tuple[str, ...], metric: str) -> float:
    """The disparity between groups; NaN where it is undefined (no positives at all)."""
    try:
        return disparity(
            rows.labels, decided.astype(int), sensitive_features=np.asarray(names)[rows.groups], criterion=metric
        ).value
    except ValueError:
        return float("nan")


def group_rows(part: str, rows: Part, decided: NDArray[np.bool_], names: tuple[str, ...]) -> pd.DataFrame:
    """Rates of every group that has rows, each with the ends of Wilson's 95 % interval."""
    table = group_table(rows.labels, decided.astype(int), sensitive_features=np.asarray(names)[rows.groups])
    out = table.reset_index().assign(part=part)
    for rate, among in RATES.items():
        low, high = wilson(out[rate].to_numpy(), out[among].to_numpy())
        out[f"{rate}_low"], out[f"{rate}_high"] = low, high
    return out.drop(columns="negatives")


def wilson(rate: Any, size: Any) -> tuple[Floats, Floats]:
    """Wilson's interval for a share observed in ``size`` rows; NaN without rows."""
    count = np.asarray(size, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        middle = (np.asarray(rate) + Z**2 / (2 * count)) / (1 + Z**2 / count)
        half = (
            Z / (1 + Z**2 / count) * np.sqrt(np.asarray(rate) * (1 - np.asarray(rate)) / count + (Z / (2 * count)) ** 2)
        )
    empty = count == 0
    return np.where(empty, np.nan, np.maximum(middle - half, 0)), np.where(empty, np.nan, np.minimum(middle + half, 1))


def intervals(rows: Part, decided: NDArray[np.bool_], groups: int, metric: str, seed: int = 0) -> dict[str, float]:
    """Bootstrap intervals of the test accuracy and the test gap."""
    drawn, sizes = _drawn(rows, [decided], groups, seed)
    return {
        **_ends("test_accuracy", _accuracy(drawn[0], sizes)),
        **_ends("test_gap", _gaps(drawn[0], sizes, metric)),
    }


def differences(
    rows: Part, decided: NDArray[np.bool_], baseline: NDArray[np.bool_], groups: int, metric: str, seed: int = 0
) -> dict[str, float]:
    """Accuracy and gap minus those of another model on the same rows, with bootstrap intervals of the difference."""
    drawn, sizes = _drawn(rows, [decided, baseline], groups, seed)
    observed, _ = _counted(rows, [decided, baseline], groups)
    out: dict[str, float] = {}
    for name, found, of_all in (
        ("accuracy_difference", [_accuracy(one, sizes) for one in drawn], [_accuracy(one, sizes) for one in observed]),
        (
            "gap_difference",
            [_gaps(one, sizes, metric) for one in drawn],
            [_gaps(one, sizes, metric) for one in observed],
        ),
    ):
        out[name] = float((of_all[0] - of_all[1])[0])
        out |= _ends(name, found[0] - found[1])
    return out


def _outcomes(rows: Part, decisions: list[NDArray[np.bool_]], groups: int) -> tuple[Counts, Counts]:
    """Per cell (group, label), how often each combination of decisions occurred; and the cells' sizes."""
    kinds = 2 ** len(decisions)
    combination = sum(np.asarray(one, np.int64) << place for place, one in enumerate(decisions))
    cell = 2 * rows.groups.astype(np.int64) + rows.labels
    counts = np.bincount(cell * kinds + combination, minlength=2 * groups * kinds).reshape(2 * groups, kinds)
    return counts, counts.sum(axis=1).reshape(groups, 2)


def _selected(counts: Counts, models: int, groups: int) -> list[Counts]:
    """Positive decisions of every model per (draw, group, label), from counts of combinations [draws, cells, kinds]."""
    kinds = np.arange(counts.shape[-1])
    shape = (len(counts), groups, 2)
    return [(counts * (kinds >> place & 1)).sum(axis=-1).reshape(shape) for place in range(models)]


def _counted(rows: Part, decisions: list[NDArray[np.bool_]], groups: int) -> tuple[list[Counts], Counts]:
    counts, sizes = _outcomes(rows, decisions, groups)
    return _selected(counts[None], len(decisions), groups), sizes


def _drawn(rows: Part, decisions: list[NDArray[np.bool_]], groups: int, seed: int) -> tuple[list[Counts], Counts]:
    counts, sizes = _outcomes(rows, decisions, groups)
    generator = np.random.default_rng(seed)
    total = counts.sum(axis=1)
    shares = counts / np.maximum(total, 1)[:, None]
    shares[total == 0, 0] = 1.0
    drawn = np.stack([generator.multinomial(n, p, size=RESAMPLES) for n, p in zip(total, shares, strict=True)], axis=1)
    return _selected(drawn, len(decisions), groups), sizes


def _accuracy(selected: Counts, sizes: Counts) -> Floats:
    right = selected[..., 1] + sizes[:, 0] - selected[..., 0]
    return np.asarray(right.sum(axis=-1) / sizes.sum(), np.float64)


def _gaps(selected: Counts, sizes: Counts, metric: str) -> Floats:
    """Largest minus smallest rate over the groups that have one, the larger of both rates for equalized odds."""
    check_choice("metric", metric, tuple(CRITERIA))
    found = []
    for rate in CRITERIA[metric]:
        if rate == "selection_rate":
            above, below = selected.sum(axis=-1), sizes.sum(axis=-1)
        else:
            label = 1 if rate == "true_positive_rate" else 0
            above, below = selected[..., label], sizes[:, label]
        there = below > 0
        if there.sum() < 2:
            return np.full(len(selected), np.nan)
        rates = above[:, there] / below[there]
        found.append(rates.max(axis=1) - rates.min(axis=1))
    return np.asarray(np.max(found, axis=0), np.float64)


def _ends(name: str, values: Floats) -> dict[str, float]:
    if np.isnan(values).any():
        return {f"{name}_low": float("nan"), f"{name}_high": float("nan")}
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {f"{name}_low": float(low), f"{name}_high": float(high)}


__all__ = ["differences", "gap", "group_rows", "intervals", "measures", "wilson"]
