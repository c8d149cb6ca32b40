"""What is measured of a model, on one machine from rows and over real sites from counts: numbers with intervals, and findings.

All intervals are 95 % and speak of other rows of the same kind, not of other training rows or sites.  Rates: Wilson.  Gaps:
`fairness.intervals.gap_ends`.  Others: `fairness.scores.measures`.  No group with fewer positives or negatives than the minimum
cell is shown (`fairness.disclosure`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.fairness import findings, moments
from fedbilevel.fairness.disclosure import Visible
from fedbilevel.fairness.findings import Finding
from fedbilevel.fairness.intervals import gap_difference_ends, gap_ends
from fedbilevel.fairness.metrics import Counts, normal_quantile
from fedbilevel.fairness.models import numbers
from fedbilevel.fairness.moments import Moments, Scale, in_units
from fedbilevel.fairness.saving import FittedModel
from fedbilevel.fairness.scores import ALL, Scores, measures
from fedbilevel.jobs.sites import Part, Prepared, joined
from fedbilevel.tables.schema import Margin, Schema

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


MEASURES_OF_NUMBERS = {
    "rmse": "RMSE",
    "mae": "mean absolute error",
    "r2": "R²",
    "mean_target": "mean",
    "mean_prediction": "mean prediction",
    "mean_error": "mean error",
}
NO_ROWS = pd.DataFrame()


class Measured(NamedTuple):
    """``row``: columns of rows.csv; ``groups``: rows of groups.csv, ``compared`` where they make the gap; ``curve``: rows of
    calibration.csv; ``found``; ``gaps``: of several sensitive columns, those by each and by their intersections."""

    row: dict[str, Any]
    groups: pd.DataFrame
    curve: pd.DataFrame
    found: list[Finding]
    gaps: pd.DataFrame = NO_ROWS


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
    schema: Schema | None = None,
) -> Measured:
    """From counts of the groups ``names``, of which the first ``compared`` make the gap (pooled ones do not).  ``schema``: for
    the names of more than two classes, and for several sensitive columns each by itself."""
    classes = range(counts.classes) if schema is None else schema.labels
    table = measures(counts, scores, names, LEVEL, classes)
    several = len(classes) > 2
    everybody = table.loc[ALL].iloc[0] if several else table.loc[ALL]
    alone = Counts(counts.cells[:compared])
    row = _gap(f"{part}_gap", alone, metric)
    for name in ("accuracy", "balanced_accuracy") if several else MEASURES:
        row |= ends(f"{part}_{name}", *(everybody.get(f"{name}{end}", np.nan) for end in ("", "_low", "_high")))
    groups = _rows(table, part, names[:compared])
    curves = []
    if scores is not None:
        each = {ALL: scores, **{name: Scores(scores.cells[[g]], scores.sums[[g]]) for g, name in enumerate(names)}}
        curves = [of.curve(minimum).assign(part=part, group=name) for name, of in each.items()]
        curves = [curve for curve in curves if len(curve)]
    curve = pd.concat(curves, ignore_index=True) if curves else NO_ROWS
    there = [g for g in range(compared) if counts.rows[g]]
    cells = dict(zip(names, counts.cells.sum(axis=-1).tolist(), strict=True))
    kind: dict[str, Any] = {"remedy": remedy, "classes": classes}
    found = findings.of_model(Counts(counts.cells[there]), [names[g] for g in there], metric, about, **kind)
    found += findings.of_rows(cells, "group", f" among the {part} rows", classes)
    if schema is None or not schema.margins:
        return Measured(row, groups, curve, found)
    gaps = [{"by": " & ".join(schema.sensitive), "part": part, **_gap("gap", alone, metric)}]
    for margin in margins(schema, names[:compared]):
        column = alone.gathered(margin.places, len(margin.values))
        gaps.append({"by": margin.name, "part": part, **_gap("gap", column, metric)})
        more = _rows(measures(column, None, margin.values, LEVEL, classes), part, margin.values)
        groups = pd.concat([groups, more.assign(by=margin.name)], ignore_index=True)
    return Measured(row, with_by(groups, schema), curve, found, pd.DataFrame(gaps))


def _rows(table: pd.DataFrame, part: str, shown: Sequence[str]) -> pd.DataFrame:
    """Rows of groups.csv, of which those of the groups ``shown`` by themselves are compared."""
    there = (table["count"] > 0) & (table.index.get_level_values("group") != ALL)
    kept = table[there].drop(columns=["negatives", "selected"], errors="ignore").reset_index()
    return kept.assign(compared=kept["group"].isin(list(shown)), part=part)


def _gap(name: str, counts: Counts, metric: str) -> dict[str, float]:
    return ends(name, counts.gap(metric), *gap_ends(counts, metric, level=LEVEL))


def margins(schema: Schema, shown: Sequence[str]) -> list[Margin]:
    """Of several sensitive columns, each by itself, over the groups that are shown: what is left out stays out."""
    places = [schema.groups.index(name) for name in shown]
    return [margin._replace(places=margin.places[places]) for margin in schema.margins]


def with_by(groups: pd.DataFrame, schema: Schema) -> pd.DataFrame:
    """Of several sensitive columns, which of them a row is about."""
    if not schema.margins:
        return groups
    return groups.assign(by=groups["by"].fillna(" & ".join(schema.sensitive)))


def answers(model: FittedModel, features: NDArray[np.float32]) -> NDArray[Any]:
    """What the model says of encoded rows: the place of a class, or a number in spreads from its mean."""
    if model.model.regression:
        return numbers(model.model, model.params, features)
    return model.decided(model.probabilities_of(features))


def of_rows(part: str, rows: Part, model: FittedModel, visible: Visible, metric: str) -> Measured:
    """The same from rows at hand, of which those in groups that are too small are not looked at."""
    schema = model.schema
    codes = visible.codes(rows.groups)
    kept = codes >= 0
    listed, shown = visible.listed(schema.groups), int(visible.shown.sum())
    if model.model.regression:
        sums = Moments.of(rows.labels[kept], answers(model, rows.features[kept]), codes[kept], len(listed))
        return measured_numbers(
            part, sums, schema, listed, shown, metric, Scale(*model.encoder.target or ()), model.label
        )
    taken = rows.labels[kept], codes[kept], len(listed)
    chances = model.probabilities_of(rows.features[kept])
    counts = Counts.of(taken[0], model.decided(chances), *taken[1:], classes=len(schema.labels))
    scores = Scores.of(taken[0], chances[:, 1], *taken[1:]) if len(schema.labels) == 2 else None
    return measured(part, counts, scores, listed, shown, metric, visible.minimum, model.label, schema=schema)


def received(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[Counts, Scores | None, list[str]]:
    """What the reports of sites (`fairness.audit.report_of`) add up to; and what their groups are called, the last being those
    that sites told as one."""
    counts = Counts(np.sum([report["decisions"] for report in reports], axis=0))
    histograms = [Scores.unpacked(report) for report in reports if "scores/sums" in report]
    return counts, sum(histograms[1:], histograms[0]) if histograms else None, told_names(reports, names)


def told_names(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """What the groups of reports are called, the last being those that sites told as one."""
    pooled = np.any([np.asarray(report["hidden"]) == 1 for report in reports], axis=0)
    together = " + ".join(name for name, here in zip(names, pooled, strict=True) if here)
    return [*names, f"{together} (where few)"]


def compared(
    rows: Part, said: NDArray[Any], schema: Schema, visible: Visible, metric: str, plain: bool
) -> dict[str, Any]:
    """What choosing a strength looks at: accuracy (balanced unless ``plain``; of a number R2), gap, and if it is of use."""
    groups = len(schema.groups)
    if schema.regression:
        sums = Moments.of(rows.labels, said, rows.groups, groups)
        gap = Moments(sums.sums[visible.shown]).gap(metric)
        return {"accuracy": float(sums.everybody().measure("r2")[0]), "gap": float(gap), "usable": True}
    counts = rows.counted(said, groups, len(schema.labels))
    shown = Counts(counts.cells[visible.shown]).present()
    found = findings.of_model(shown, range(len(shown.rows)), metric)
    return {
        "accuracy": float(counts.overall("accuracy") if plain else counts.balanced_accuracy()),
        "gap": float(shown.gap(metric)),
        "usable": not any(finding.code.startswith(("selects", "never")) for finding in found),
    }


def differences(
    rows: Part,
    ours: Any,
    theirs: Any,
    visible: Visible,
    metric: str,
    classes: int = 2,
    target: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Accuracy and gap minus those of another model on the same rows, from the `answers` of both, with the intervals of the
    differences; of a number, whose mean and spread are its ``target``, RMSE and gap."""
    codes, number = visible.codes(rows.groups), int(visible.shown.sum())
    alone = (codes >= 0) & (codes < number)
    if target is not None:
        taken = rows.labels[alone], ours[alone], theirs[alone], codes[alone]
        found = moments.differences(*taken, number, metric, LEVEL)
        spread = target[1]
        return {
            k: v for name, of in found.items() for k, v in ends(f"{name}_difference", *(spread * x for x in of)).items()
        }
    shape = (number, *[classes] * 3)
    place = np.ravel_multi_index(
        tuple(np.asarray(column, np.int64)[alone] for column in (codes, rows.labels, ours, theirs)), shape
    )
    joint = np.bincount(place, minlength=int(np.prod(shape))).reshape(shape)
    gaps = [Counts(joint.sum(axis=axis)).gap(metric) for axis in (-1, -2)]
    seen = codes >= 0
    right = [(np.asarray(each)[seen] == rows.labels[seen]) * 1.0 for each in (ours, theirs)]
    gap = ends("gap_difference", gaps[0] - gaps[1], *gap_difference_ends(joint, metric, LEVEL))
    return gap | _paired("accuracy_difference", *right)


def _paired(name: str, ours: Any, theirs: Any) -> dict[str, float]:
    """The difference of two shares of the same rows, with Bonett and Price's interval: Wald's, one row of either disagreement
    added."""
    size = len(ours)
    more, less = int((ours > theirs).sum()), int((theirs > ours).sum())
    middle, both = (more - less) / (size + 2), (more + less + 2) / (size + 2)
    half = normal_quantile(LEVEL) * np.sqrt((both - middle**2) / (size + 2))
    return ends(name, (more - less) / max(size, 1), middle - half, middle + half)


def ends(name: str, value: Any, low: Any, high: Any) -> dict[str, float]:
    return {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}


def measured_numbers(
    part: str, sums: Moments, schema: Schema, names: Sequence[str], compared: int, metric: str, scale: Scale, about: str
) -> Measured:
    """`measured` of a model that predicts a number: means and errors in the units of the table."""
    everybody, alone = sums.everybody(), Moments(sums.sums[:compared])

    def gap(name: str, of: Moments) -> dict[str, float]:
        return ends(name, *(scale.spread * value for value in (of.gap(metric), *of.gap_ends(metric, LEVEL))))

    def rows(of: Moments, names: Sequence[str], shown: Sequence[str]) -> pd.DataFrame:
        return _rows(of.table(names, scale, LEVEL), part, shown)

    row, groups = gap(f"{part}_gap", alone), rows(sums, names, names[:compared])
    for name in MEASURES_OF_NUMBERS:
        values = (everybody.measure(name), *everybody.ends(name, LEVEL))
        row |= ends(f"{part}_{name}", *(in_units(name, value[0], scale) for value in values))
    gaps = [{"by": " & ".join(schema.sensitive), "part": part, **gap("gap", alone)}]
    for margin in margins(schema, names[:compared]):
        column = alone.gathered(margin.places, len(margin.values))
        gaps.append({"by": margin.name, "part": part, **gap("gap", column)})
        groups = pd.concat(
            [groups, rows(column, margin.values, margin.values).assign(by=margin.name)], ignore_index=True
        )
    found = list(_of_numbers(everybody, alone, names, metric, about))
    return Measured(row, with_by(groups, schema), NO_ROWS, found, pd.DataFrame(gaps) if schema.margins else NO_ROWS)


def _of_numbers(everybody: Moments, alone: Moments, names: Sequence[str], metric: str, about: str) -> Iterator[Finding]:
    """A model that is no better than the mean, and a gap that rests on few rows."""
    share, (low,), (high,) = float(everybody.measure("r2")[0]), *everybody.ends("r2", LEVEL)
    if not low > 0:
        yield Finding(
            "near-chance", about,
            f"{about} explains {share:.3f} [{low:.3f}, {high:.3f}] of the number's variance, and always saying the mean "
            "explains 0: such a model is not to be used; give it better columns, or train it longer.",
        )  # fmt: skip
    means, there = alone.measure(metric), np.flatnonzero(alone.rows > 0)
    pair = {int(there[np.argmax(means[there])]), int(there[np.argmin(means[there])])} if len(there) > 1 else set()
    for group in sorted(group for group in pair if alone.rows[group] < findings.FEW):
        yield Finding(
            "few-rows", str(names[group]),
            f"The gap rests on {int(alone.rows[group]):,} rows of the group {names[group]}: fewer than {findings.FEW} tell "
            "little, so read the interval and not the number, and measure on more rows.",
        )  # fmt: skip


def visible_groups(prepared: Prepared, minimum: int) -> Visible:
    """Groups that training and test rows may both show."""
    schema = prepared.encoder.schema
    parts = [joined(part) for part in (prepared.train, prepared.test)]
    cells = [cells_of(part, len(schema.groups), schema) for part in parts]
    visible = Visible.of(cells, minimum)
    if visible.left_out[np.sum(cells, axis=(0, 2)) > 0].all():
        what = "rows" if schema.regression else f"positives and {minimum} negatives"
        what = f"rows of each of the {len(schema.labels)} classes" if len(schema.labels) > 2 else what
        raise ValueError(
            f"There is nothing to show: no group, nor all small ones together, has {minimum} {what} "
            "among the training and among the test rows; --minimum-cell 1 shows them all the same."
        )
    return visible


def cells_of(part: Part, groups: int, schema: Schema) -> NDArray[np.int64]:
    """Rows by group and label; of a number, by group."""
    if schema.regression:
        return np.bincount(part.groups, minlength=groups)[:, None]
    classes = len(schema.labels)
    place = classes * part.groups.astype(np.int64) + part.labels
    return np.bincount(place, minlength=classes * groups).reshape(groups, classes)


def site_table(prepared: Prepared, visible: Visible) -> tuple[pd.DataFrame, list[Finding]]:
    """Rows of every site: how many to train on, to test with, and the share of positives, or of every class, or the mean of the
    number; what is wrong with them.

    Groups that are left out are not counted.  The totals are in the table of groups, so what may not be shown of one site is
    not shown of a second one either.
    """
    schema = prepared.encoder.schema
    by_site, means = [], []
    for train, test in zip(prepared.train, prepared.test, strict=True):
        kept = [part.take(~visible.left_out[part.groups]) for part in (train, test)]
        by_site.append([cells_of(part, len(schema.groups), schema).sum(axis=0) for part in kept])
        means.append(float(np.mean(joined(kept).labels)))
    cells = np.array(by_site)  # [site, part, label]
    rows, labels = cells.sum(axis=2), cells.sum(axis=1)
    shares = Visible.of(labels, visible.minimum, "labels")
    sizes = Visible.of(rows, visible.minimum, "labels")
    table = pd.DataFrame({"site": prepared.names})
    for place, name in enumerate(("training_rows", "test_rows")):
        counted = [int(count) if shown else None for count, shown in zip(rows[:, place], sizes.shown, strict=True)]
        table[name] = pd.Series(counted, dtype="int64" if sizes.shown.all() else object)
    told = shares.shown & sizes.shown
    if prepared.encoder.target is not None:
        mean, spread = prepared.encoder.target
        table[f"mean {schema.target}"] = np.where(told, mean + spread * np.array(means), np.nan)
        return table, []
    with np.errstate(invalid="ignore"):
        each = np.where(told[:, None], labels / labels.sum(axis=1, keepdims=True), np.nan)
    if len(schema.labels) == 2:
        table["positive_share"] = each[:, 1]
    else:
        table[[f"share of {name}" for name in schema.labels]] = each
    found = findings.of_rows(dict(zip(prepared.names, labels.tolist(), strict=True)), "site", classes=schema.labels)
    few = [
        name for name, row in zip(prepared.names, labels, strict=True) if ((row > 0) & (row < visible.minimum)).any()
    ]
    if few:
        which = ", ".join(few)
        what = "positives or negatives" if len(schema.labels) == 2 else "rows of a class"
        sentence = f"Fewer than {visible.minimum} {what} at the site(s) {which}: little can be learned there."
        found.append(Finding("site-with-few", which, sentence, blocks=False))
    return table, found


def findings_table(found: Sequence[Finding]) -> pd.DataFrame:
    return pd.DataFrame(list(dict.fromkeys(found)), columns=list(Finding._fields))
