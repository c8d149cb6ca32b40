"""How well a fit does on test rows, with intervals.

Of redrawn rows only the counts matter, so they are drawn themselves (`redrawn_counts`).  Rates of single groups get Wilson's
interval: a redrawn rate of 3 in 3 would be 1 every time, which says nothing of how few three are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.fairness.bootstrap import redrawn_counts
from fedbilevel.fairness.counts import CRITERIA, Counts, Floats
from fedbilevel.fairness.intervals import percentile
from fedbilevel.fairness.metrics import auc, check_choice
from fedbilevel.jobs.fit.data import Part

RESAMPLES = 2000
LEVEL = 0.95
Decided = NDArray[np.bool_]


def counted(rows: Part, decided: Decided, groups: int) -> Counts:
    return Counts.of(rows.labels, decided, rows.groups, groups)


def measures(part: str, rows: Part, probability: Floats, groups: int, metric: str) -> dict[str, float]:
    """Accuracy and gap of one set of rows, under the names of the run folder's columns."""
    counts = counted(rows, probability > 0.5, groups)
    row = quality(part, counts.present(), metric)
    if part == "test":
        both = 0 < rows.labels.sum() < len(rows.labels)
        row["test_balanced_accuracy"] = float(counts.balanced_accuracy())
        row["test_auc"] = auc(rows.labels, probability) if both else float("nan")
    return row


def quality(part: str, counts: Counts, metric: str) -> dict[str, float]:
    """Accuracy, and the disparity between groups; NaN where it is undefined (no positives at all)."""
    return {f"{part}_accuracy": float(counts.overall("accuracy")), f"{part}_gap": float(counts.gap(metric))}


def group_rows(part: str, counts: Counts, names: Sequence[str]) -> pd.DataFrame:
    """Rates of every group that has rows, each with the ends of Wilson's interval."""
    table = counts.table(names, LEVEL).drop(columns="negatives")
    return table[table["count"] > 0].reset_index().assign(part=part)


def intervals(rows: Part, decided: Decided, groups: int, metric: str, seed: int = 0) -> dict[str, float]:
    """Bootstrap intervals of the test accuracy and the test gap."""
    (drawn,) = _redrawn(rows, [decided], groups, metric, seed)
    return _ends("test_accuracy", drawn["accuracy"]) | _ends("test_gap", drawn["gap"])


def differences(
    rows: Part, decided: Decided, baseline: Decided, groups: int, metric: str, seed: int = 0
) -> dict[str, float]:
    """Accuracy and gap minus those of another model on the same rows, with bootstrap intervals of the difference."""
    ours, theirs = _redrawn(rows, [decided, baseline], groups, metric, seed)
    observed, other = (_values(counted(rows, decisions, groups), metric) for decisions in (decided, baseline))
    out: dict[str, float] = {}
    for name in ours:
        out[f"{name}_difference"] = float(observed[name] - other[name])
        out |= _ends(f"{name}_difference", ours[name] - theirs[name])
    return out


def _redrawn(rows: Part, decisions: list[Decided], groups: int, metric: str, seed: int) -> list[dict[str, Floats]]:
    check_choice("metric", metric, tuple(CRITERIA))
    drawn = redrawn_counts(rows.labels, decisions, rows.groups, groups, resamples=RESAMPLES, seed=seed)
    return [_values(counts, metric) for counts in drawn]


def _values(counts: Counts, metric: str) -> dict[str, Floats]:
    return {"accuracy": counts.overall("accuracy"), "gap": counts.gap(metric)}


def _ends(name: str, values: Floats) -> dict[str, float]:
    """Both ends of the interval; NaN where the metric is undefined, which within cells it is always or never."""
    low, high = np.nan, np.nan
    if not np.isnan(values).any():
        _, low, high, *_ = percentile(np.nan, values, LEVEL, size=len(values))
    return {f"{name}_low": float(low), f"{name}_high": float(high)}


__all__ = ["counted", "differences", "group_rows", "intervals", "measures", "quality"]
