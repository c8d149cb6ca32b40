"""What is measured of a model, on one machine from rows and over real sites from counts: numbers with intervals, and findings.

All intervals are 95 % and speak of other rows of the same kind, not of other training rows or sites.  Rates: Wilson.  Gaps:
`fairness.intervals.gap_ends`.  Others: `fairness.scores.measures`.  No group with fewer positives or negatives than the minimum
cell is shown (`fairness.disclosure`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel.fairness import findings
from fedbilevel.fairness.disclosure import Visible
from fedbilevel.fairness.findings import Finding
from fedbilevel.fairness.intervals import gap_difference_ends, gap_ends
from fedbilevel.fairness.metrics import Counts, normal_quantile
from fedbilevel.fairness.scores import ALL, Scores, measures
from fedbilevel.jobs.sites import Decided, Part, Prepared, joined

LEVEL = 0.95
MEASURES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "precision": "precision",
    "true_positive_rate": "recall",
    "false_positive_rate": "false positives",
    "selection_rate": "selected",
    "brier": "Brier score",
    "calibration": "predicted - observed",
}
"""Columns of the tables, and what people call them, in the order of the terminal."""


class Measured(NamedTuple):
    """``row``: columns of rows.csv; ``groups``: rows of groups.csv, ``compared`` where they make the gap; ``curve``: rows of
    calibration.csv; ``found``."""

    row: dict[str, Any]
    groups: pd.DataFrame
    curve: pd.DataFrame
    found: list[Finding]


def measured(
    part: str,
    counts: Counts,
    scores: Scores | None,
    names: Sequence[str],
    compared: int,
    metric: str,
    minimum: int,
    about: str,
    remedy: str = findings.REMEDY,
) -> Measured:
    """From counts of the groups ``names``, of which the first ``compared`` make the gap (pooled ones do not)."""
    table = measures(counts, scores, names, LEVEL)
    everybody = table.loc[ALL]
    alone = Counts(counts.cells[:compared])
    row = {f"{part}_gap": float(alone.gap(metric))}
    row[f"{part}_gap_low"], row[f"{part}_gap_high"] = map(float, gap_ends(alone, metric, level=LEVEL))
    for name in MEASURES:
        for end in ("", "_low", "_high"):
            row[f"{part}_{name}{end}"] = float(everybody.get(f"{name}{end}", np.nan))
    kept = table.drop(index=ALL).drop(columns=["negatives", "selected"])
    groups = kept.assign(compared=np.arange(len(kept)) < compared)
    groups = groups[groups["count"] > 0].reset_index().assign(part=part)
    curves = []
    if scores is not None:
        each = {ALL: scores, **{name: Scores(scores.cells[[g]], scores.sums[[g]]) for g, name in enumerate(names)}}
        curves = [of.curve(minimum).assign(part=part, group=name) for name, of in each.items()]
        curves = [curve for curve in curves if len(curve)]
    curve = pd.concat(curves, ignore_index=True) if curves else pd.DataFrame()
    there = [g for g in range(compared) if counts.rows[g]]
    cells = dict(zip(names, counts.cells.sum(axis=-1).tolist(), strict=True))
    found = findings.of_model(Counts(counts.cells[there]), [names[g] for g in there], metric, about, remedy=remedy)
    found += findings.of_rows(cells, "group", f" among the {part} rows")
    return Measured(row, groups, curve, found)


def of_rows(
    part: str,
    rows: Part,
    probability: Any,
    threshold: float,
    names: Sequence[str],
    visible: Visible,
    metric: str,
    about: str,
) -> Measured:
    """The same from rows at hand, of which those in groups that are too small are not looked at."""
    codes = visible.codes(rows.groups)
    kept = codes >= 0
    listed = visible.listed(names)
    taken = rows.labels[kept], codes[kept], len(listed)
    counts = Counts.of(taken[0], probability[kept] > threshold, *taken[1:])
    scores = Scores.of(taken[0], probability[kept], *taken[1:])
    return measured(part, counts, scores, listed, int(visible.shown.sum()), metric, visible.minimum, about)


def received(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[Counts, Scores | None, list[str]]:
    """What the reports of sites (`fairness.audit.report_of`) add up to; and what their groups are called, the last being those
    that sites told as one."""
    counts = Counts(np.sum([report["decisions"] for report in reports], axis=0))
    histograms = [Scores.unpacked(report) for report in reports if "scores/sums" in report]
    pooled = np.any([np.asarray(report["hidden"]) == 1 for report in reports], axis=0)
    together = " + ".join(name for name, here in zip(names, pooled, strict=True) if here)
    return counts, sum(histograms[1:], histograms[0]) if histograms else None, [*names, f"{together} (where few)"]


def differences(rows: Part, decided: Decided, baseline: Decided, visible: Visible, metric: str) -> dict[str, float]:
    """Accuracy and gap minus those of another model on the same rows, with the intervals of the differences."""
    codes = visible.codes(rows.groups)
    alone = (codes >= 0) & (codes < visible.shown.sum())
    shape = (int(visible.shown.sum()), 2, 2, 2)
    place = np.ravel_multi_index(
        tuple(np.asarray(column, np.int64)[alone] for column in (codes, rows.labels, decided, baseline)), shape
    )
    joint = np.bincount(place, minlength=int(np.prod(shape))).reshape(shape)
    gaps = [Counts(joint.sum(axis=axis)).gap(metric) for axis in (-1, -2)]
    low, high = gap_difference_ends(joint, metric, LEVEL)
    seen = codes >= 0
    right = [(np.asarray(each)[seen] == rows.labels[seen]) * 1.0 for each in (decided, baseline)]
    return _ends("gap_difference", gaps[0] - gaps[1], low, high) | _paired("accuracy_difference", *right)


def _paired(name: str, ours: Any, theirs: Any) -> dict[str, float]:
    """The difference of two shares of the same rows, with Bonett and Price's interval: Wald's, one row of either disagreement
    added."""
    size = len(ours)
    more, less = int((ours > theirs).sum()), int((theirs > ours).sum())
    middle, both = (more - less) / (size + 2), (more + less + 2) / (size + 2)
    half = normal_quantile(LEVEL) * np.sqrt((both - middle**2) / (size + 2))
    return _ends(name, (more - less) / max(size, 1), middle - half, middle + half)


def _ends(name: str, value: Any, low: Any, high: Any) -> dict[str, float]:
    return {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}


def visible_groups(prepared: Prepared, minimum: int) -> Visible:
    """Groups that training and test rows may both show."""
    number = len(prepared.encoder.schema.groups)
    cells = []
    for part in map(joined, (prepared.train, prepared.test)):
        place = 2 * part.groups.astype(np.int64) + part.labels
        cells.append(np.bincount(place, minlength=2 * number).reshape(number, 2))
    visible = Visible.of(cells, minimum)
    if visible.left_out[np.sum(cells, axis=(0, 2)) > 0].all():
        raise ValueError(
            f"There is nothing to show: no group, nor all small ones together, has {minimum} positives and {minimum} negatives "
            "among the training and among the test rows; --minimum-cell 1 shows them all the same."
        )
    return visible


def site_table(prepared: Prepared, visible: Visible) -> tuple[pd.DataFrame, list[Finding]]:
    """Rows of every site: how many to train on, to test with, and the share of positives; what is wrong with them.

    Groups that are left out are not counted.  The totals are in the table of groups, so what may not be shown of one site is
    not shown of a second one either.
    """
    by_site = []
    for train, test in zip(prepared.train, prepared.test, strict=True):
        kept = [part.take(~visible.left_out[part.groups]) for part in (train, test)]
        by_site.append([np.bincount(part.labels, minlength=2)[:2] for part in kept])
    cells = np.array(by_site)  # [site, part, label]
    rows, labels = cells.sum(axis=2), cells.sum(axis=1)
    shares = Visible.of(labels, visible.minimum, "labels")
    sizes = Visible.of(rows, visible.minimum, "labels")
    table = pd.DataFrame({"site": prepared.names})
    for place, name in enumerate(("training_rows", "test_rows")):
        told = [int(count) if shown else None for count, shown in zip(rows[:, place], sizes.shown, strict=True)]
        table[name] = pd.Series(told, dtype="int64" if sizes.shown.all() else object)
    with np.errstate(invalid="ignore"):
        table["positive_share"] = np.where(shares.shown & sizes.shown, labels[:, 1] / labels.sum(axis=1), np.nan)
    found = findings.of_rows(dict(zip(prepared.names, labels.tolist(), strict=True)), "site")
    few = [
        name for name, row in zip(prepared.names, labels, strict=True) if ((row > 0) & (row < visible.minimum)).any()
    ]
    if few:
        which = ", ".join(few)
        sentence = (
            f"Fewer than {visible.minimum} positives or negatives at the site(s) {which}: little can be learned there."
        )
        found.append(Finding("site-with-few", which, sentence, blocks=False))
    return table, found


def findings_table(found: Sequence[Finding]) -> pd.DataFrame:
    return pd.DataFrame(list(dict.fromkeys(found)), columns=list(Finding._fields))
