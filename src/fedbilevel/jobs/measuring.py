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

from fedbilevel.engines.stages import TOGETHER
from fedbilevel.fairness import findings, moments
from fedbilevel.fairness.audit import Predicted
from fedbilevel.fairness.disclosure import Visible
from fedbilevel.fairness.findings import Finding
from fedbilevel.fairness.intervals import gap_difference_ends, gap_ends
from fedbilevel.fairness.metrics import Counts, normal_quantile
from fedbilevel.fairness.models import numbers
from fedbilevel.fairness.moments import Moments, Scale
from fedbilevel.fairness.saving import FittedModel
from fedbilevel.fairness.scores import ALL, Scores, measures, miscalibrations
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
OF_EVERYBODY = ("accuracy", "balanced_accuracy", "auc", "brier")
"""What is said of everybody where there are more than two classes: of the AUC, each class held against all others, the mean
over them, between the means of their ends, which holds however the classes' AUC go together."""
REPORTED = {False: "decisions", True: "moments"}
"""What a site reports of classes, or of numbers."""
NO_ROWS = pd.DataFrame()


class Measured(NamedTuple):
    """``row``: columns of rows.csv; ``groups``: rows of groups.csv, ``compared`` where they make the gap; ``curve``: rows of
    calibration.csv; ``found``; ``gaps``: of several sensitive columns, those by each and by their intersections."""

    row: dict[str, Any]
    groups: pd.DataFrame
    curve: pd.DataFrame
    found: list[Finding]
    gaps: pd.DataFrame = NO_ROWS


class Tally(NamedTuple):
    """What rows, or reports of sites, add up to, of the groups ``names``; the first ``compared`` make the gap (pooled ones do
    not)."""

    sums: Counts | Moments
    scores: Scores | None
    names: list[str]
    compared: int

    @property
    def rows(self) -> int:
        return int(np.sum(self.sums.rows))


def tally(schema: Schema, labels: Any, said: Any, chances: Any, codes: Any, names: list[str], compared: int) -> Tally:
    """From rows: their labels, what a model said (classes, or numbers), its probabilities [n, classes] or None, and the groups'
    places in ``names``."""
    if schema.regression:
        return Tally(Moments.of(labels, said, codes, len(names)), None, names, compared)
    counts = Counts.of(labels, said, codes, len(names), classes=len(schema.labels))
    if chances is None:
        return Tally(counts, None, names, compared)
    return Tally(counts, Scores.of(labels, _scored(chances), codes, len(names)), names, compared)


def _scored(chances: Any) -> Any:
    """What `Scores` takes: of two classes the probability of the second."""
    return chances[:, 1] if chances.shape[1] == 2 else chances


def measured(
    part: str, told: Tally, schema: Schema, metric: str, minimum: int, about: str, remedy: str = findings.REMEDY,
    scale: Scale = moments.STANDARD,
) -> Measured:  # fmt: skip
    """Numbers with intervals, and what is to be known about them; of a number in the units of the table (``scale``)."""
    sums, scores, names, compared = told
    number, classes = isinstance(sums, Moments), schema.labels
    several = len(classes) > 2

    def table(of: Counts | Moments, names: Sequence[str], scores: Scores | None = None) -> pd.DataFrame:
        if isinstance(of, Moments):
            return Moments(np.concatenate([of.everybody().sums, of.sums])).table([ALL, *names], scale, LEVEL)
        return measures(of, scores, names, LEVEL, classes)

    def gap(name: str, of: Counts | Moments, scored: Scores | None) -> dict[str, float]:
        if metric == "calibration":
            if scored is None:  # the sites told no probabilities
                return ends(name, np.nan, np.nan, np.nan)
            return ends(name, scored.calibration_gap(), *scored.calibration_gap_ends(LEVEL))
        ends_of = of.gap_ends(metric, LEVEL) if isinstance(of, Moments) else gap_ends(of, metric, level=LEVEL)
        return ends(name, *(scale.spread * value for value in (of.gap(metric), *ends_of)))

    whole = table(sums, names, scores)
    # Of more than two classes, means over them; what is not a class's own has the same value in all.
    everybody: Any = whole.loc[ALL].mean() if several else whole.loc[ALL]
    alone = sums.first(compared)
    scored = None if scores is None else scores.of_groups(range(compared))
    row = gap(f"{part}_gap", alone, scored)
    for name in MEASURES_OF_NUMBERS if number else OF_EVERYBODY if several else MEASURES:
        row |= ends(f"{part}_{name}", *(everybody.get(f"{name}{end}", np.nan) for end in ("", "_low", "_high")))
    groups = _rows(whole, part, names[:compared])
    if isinstance(sums, Moments):
        assert isinstance(alone, Moments)
        found = list(_of_numbers(sums.everybody(), alone, names, metric, about))
    else:
        found = _of_classes(part, sums, names, compared, metric, about, remedy, classes)
    curve = NO_ROWS if scores is None else _curves(scores, names, minimum, classes if several else ()).assign(part=part)
    if not schema.margins or not set(names[:compared]) <= set(schema.groups):
        return Measured(row, groups, curve, found)
    gaps = [{"by": " & ".join(schema.sensitive), "part": part, **gap("gap", alone, scored)}]
    groups = groups.assign(by=" & ".join(schema.sensitive))
    for margin in margins(schema, names[:compared]):
        column = alone.gathered(margin.places, len(margin.values))
        by_column = None if scored is None else scored.gathered(margin.places, len(margin.values))
        gaps.append({"by": margin.name, "part": part, **gap("gap", column, by_column)})
        more = _rows(table(column, margin.values), part, margin.values).assign(by=margin.name)
        groups = pd.concat([groups, more], ignore_index=True)
    return Measured(row, groups, curve, found, pd.DataFrame(gaps))


def _of_classes(
    part: str, counts: Counts, names: Sequence[str], compared: int, metric: str, about: str, remedy: str, classes: Any
) -> list[Finding]:
    there = [g for g in range(compared) if counts.rows[g]]
    cells = dict(zip(names, counts.cells.sum(axis=-1).tolist(), strict=True))
    shown = Counts(counts.cells[there]), [names[g] for g in there]
    found = findings.of_model(*shown, metric, about, remedy=remedy, classes=classes)
    return found + findings.of_rows(cells, "group", f" among the {part} rows", classes)


def _curves(scores: Scores, names: Sequence[str], minimum: int, classes: Sequence[str]) -> pd.DataFrame:
    """Calibration of everybody and of every group; of more than two classes, of each."""
    curves = []
    for place, label in enumerate(classes or [None]):
        for number, name in enumerate((ALL, *names)):
            groups = range(len(names)) if name == ALL else [number - 1]
            curve = scores.of_groups(groups, place if classes else None).curve(minimum).assign(group=name)
            curves.append(curve.assign(label=label) if classes else curve)
    kept = [curve for curve in curves if len(curve)]
    return pd.concat(kept, ignore_index=True) if kept else NO_ROWS


def _rows(table: pd.DataFrame, part: str, shown: Sequence[str]) -> pd.DataFrame:
    """Rows of groups.csv, of which those of the groups ``shown`` by themselves are compared."""
    there = (table["count"] > 0) & (table.index.get_level_values("group") != ALL)
    kept = table[there].drop(columns=["negatives", "selected"], errors="ignore").reset_index()
    return kept.assign(compared=kept["group"].isin(list(shown)), part=part)


def margins(schema: Schema, shown: Sequence[str]) -> list[Margin]:
    """Of several sensitive columns, each by itself, over the groups that are shown: what is left out stays out."""
    places = [schema.groups.index(name) for name in shown]
    return [margin._replace(places=margin.places[places]) for margin in schema.margins]


def answers(model: FittedModel, features: NDArray[np.float32]) -> NDArray[Any]:
    """What the model says of encoded rows: the place of a class, or a number in spreads from its mean."""
    if model.model.regression:
        return numbers(model.model, model.params, features)
    return model.decided(model.probabilities_of(features))


def chances_of(model: FittedModel, features: NDArray[np.float32]) -> NDArray[Any] | None:
    """The probabilities behind that, [n, classes]; None of a number."""
    return None if model.model.regression else model.probabilities_of(features)


def of_rows(part: str, rows: Part, model: FittedModel, visible: Visible, metric: str) -> Measured:
    """The same from rows at hand, of which those in groups that are too small are not looked at."""
    schema, codes = model.schema, visible.codes(rows.groups)
    kept = rows.take(codes >= 0)
    chances = chances_of(model, kept.features)
    said = answers(model, kept.features) if chances is None else model.decided(chances)
    names, shown = visible.listed(schema.groups), int(visible.shown.sum())
    told = tally(schema, kept.labels, said, chances, codes[codes >= 0], names, shown)
    scale = Scale(*model.encoder.target or ())
    return measured(part, told, schema, metric, visible.minimum, model.label, scale=scale)


def received(reports: Sequence[Mapping[str, Any]], schema: Schema) -> Tally:
    """What the reports of sites (`fairness.audit.report_of`) add up to, groups that sites told as one being the last."""
    total = np.sum([report[REPORTED[schema.regression]] for report in reports], axis=0)
    sums = Moments(total) if schema.regression else Counts(np.rint(total).astype(np.int64))
    histograms = [Scores.received(report) for report in reports if "scores/sums" in report]
    pooled = np.any([_hidden(report)[0] for report in reports], axis=0)
    together = " + ".join(name for name, here in zip(schema.groups, pooled, strict=True) if here)
    names = [*schema.groups, f"{together} (where few)"]
    return Tally(sums, sum(histograms[1:], histograms[0]) if histograms else None, names, len(schema.groups))


def _hidden(report: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which groups were told with others, and which not at all: of a site, or of any site where sites told the sum."""
    told = np.asarray(report["hidden"])
    return np.stack([told == 1, told == 2]) if told.ndim == 1 else told > 0


def found_at_sites(reports: Mapping[str, Mapping[str, Any]], schema: Schema, together: bool = False) -> list[Finding]:
    """What the reports of sites say of the sites: those without positives, and groups that are too few somewhere; ``together``:
    these were trained on as one."""
    cells = {site: np.sum(told["decisions"], axis=(0, 2)) for site, told in reports.items() if "decisions" in told}
    found = findings.of_rows(cells, "site", classes=schema.labels)
    for site, report in reports.items():
        hidden: Any = _hidden(report).any(axis=0).tolist() if "hidden" in report else [False] * len(schema.groups)
        few = [name for name, here in zip(schema.groups, hidden, strict=True) if here]
        if few:
            where = "one of the sites" if site == TOGETHER else site
            found.append(findings.hidden_at(where, few, schema.labels, together))
    return found


def compared(
    rows: Part, said: NDArray[Any], schema: Schema, visible: Visible, metric: str, plain: bool, chances: Any = None
) -> dict[str, Any]:
    """What choosing a strength looks at: accuracy (balanced unless ``plain``; of a number R2), gap, and if it is of use;
    ``chances``: the probabilities [n, classes] behind what was ``said`` of classes."""
    groups = len(schema.groups)
    if schema.regression:
        sums = Moments.of(rows.labels, said, rows.groups, groups)
        gap = float(Moments(sums.sums[visible.shown]).gap(metric))
        return {"accuracy": float(sums.everybody().measure("r2")[0]), "gap": gap, "usable": True}
    counts = rows.counted(said, groups, len(schema.labels))
    shown = Counts(counts.cells[visible.shown]).present()
    found = findings.of_model(shown, range(len(shown.rows)), metric)
    if metric == "calibration":
        scores = Scores.of(rows.labels, _scored(chances), rows.groups, groups)
        gap = float(scores.of_groups(np.flatnonzero(visible.shown).tolist()).calibration_gap())
    else:
        gap = float(shown.gap(metric))
    return {
        "accuracy": float(counts.overall("accuracy") if plain else counts.balanced_accuracy()),
        "gap": gap,
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
    chances: Sequence[Any] = (),
) -> dict[str, float]:
    """Accuracy and gap minus those of another model on the same rows, from the `answers` of both, with the intervals of the
    differences; of a number, whose mean and spread are its ``target``, RMSE and gap.  ``chances``: of both, [n, classes]."""
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
    seen = codes >= 0
    right = [(np.asarray(each)[seen] == rows.labels[seen]) * 1.0 for each in (ours, theirs)]
    if metric == "calibration":
        both = [miscalibrations(rows.labels[alone], _scored(each)[alone]) for each in chances]
        gap = ends("gap_difference", *moments.gap_change(both[0], both[1], codes[alone], number, LEVEL))
    else:
        gaps = [Counts(joint.sum(axis=axis)).gap(metric) for axis in (-1, -2)]
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


def cells_of(part: Part | Predicted, groups: int, schema: Schema) -> NDArray[np.int64]:
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
        what = findings.scarce(schema.labels)
        sentence = f"Fewer than {visible.minimum} {what} at the site(s) {which}: little can be learned there."
        found.append(Finding("site-with-few", which, sentence, blocks=False))
    return table, found


def findings_table(found: Sequence[Finding]) -> pd.DataFrame:
    return pd.DataFrame(list(dict.fromkeys(found)), columns=list(Finding._fields))
