"""What a run means for people who decide, in sentences computed from its numbers.

First what the model does for the groups, in people out of a hundred, and whether chance explains the difference; then what
to know before using it.  Chance is judged by the interval of the gap that the run holds (`fairness.intervals.gap_ends`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel.fairness.metrics import CRITERIA
from fedbilevel.report import tuning
from fedbilevel.report.charts import Listing
from fedbilevel.report.reading import estimates, reading_of
from fedbilevel.report.scales import Span, shown, signed
from fedbilevel.runs import Run

TABLES = (
    "sites", "facts", "notes", "mapping", "findings", "calibration", "frontier", "contrast", "contrast-floors", "choices",
    "doubtful", "pooled", "pooled_frontier", "overall", "summary",
)  # fmt: skip
"""Tables of a run that a brief or a figure tells."""
COMMANDS = ("fit", "tune", "federate", "audit")
ASKED = {
    "true_positive_rate": "Of 100 rows with {yes}, the model finds",
    "false_positive_rate": "Of 100 rows without {yes}, it wrongly picks",
    "selection_rate": "Of 100 rows, the model picks",
}
"""Rate: how a sentence about it begins."""
TERMS = {
    "true-positive rate": "of the rows that are positive, the share the model finds; also called recall",
    "false-positive rate": "of the rows that are negative, the share the model picks all the same",
    "selection rate": "of all rows, the share the model picks",
    "equal-opportunity gap (EqOpp)": "the largest true-positive rate of a group minus the smallest; 0 is fair by this measure",
    "equalized-odds gap (EqOdds)": "the same, of true- or false-positive rates, whichever differ more",
    "demographic-parity gap (DemPar)": "the same, of selection rates",
    "calibration gap (Calib)": "the same, of how far probabilities are above the truth, among likely and among unlikely rows",
    "mean error": "where a number is predicted: how far predictions are above the truth on average; its gap is 0 if fair",
    "R²": "the share of a number's variance that predictions explain; always saying the mean explains 0",
    "interval": "95 % of such intervals hold the true value; a wide one means few rows",
    "beyond noise": "the interval of a difference does not hold 0",
    "FedAvg": "the usual training over sites: for accuracy alone, nothing is made fair",
    "cells": "rows of one group with one label; the method learns how much each cell counts in training",
    "seed": "the number that fixes every random choice; the same seed gives the same result",
}
"""What a page explains, in the order it does."""
CONVENTION = (
    "EqOpp is the largest minus the smallest true-positive rate of the groups, as defined in the paper. The paper prints "
    "smaller numbers: --convention majority_vs_rest (the largest group against all others) gives numbers of their size, and "
    "so does --positive-label other with --convention mean_pairwise."
)
OURS = "FedBiOAcc, cells"


class Contrast(NamedTuple):
    """A table, and the sentences that follow from it."""

    table: Listing
    sentences: list[str]


@dataclass(frozen=True)
class Brief:
    """``verdict``: sentences; ``usable``: whether nothing was found against the model; ``warnings``: what was; ``notes``: what
    was done to rows; ``facts``: names and values; ``tables``: rows by site, and what else should be seen first."""

    verdict: list[str]
    usable: bool = True
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    tables: list[Listing] = field(default_factory=list)


def brief_of(run: Run) -> Brief | None:
    """The brief of a model on test rows; None for runs that are about methods and not about one model."""
    if run.command == "table1":
        return _table1(run)
    if run.command not in COMMANDS or not len(run.rows):
        return None
    model = str(run.rows["method"].iloc[-1])
    ours = run.rows[run.rows["method"] == model].iloc[-1]
    found = run.others.get("findings", pd.DataFrame(columns=["method", "sentence", "blocks"]))
    against = found[found["method"] == model]
    usable = not against["blocks"].astype(bool).any()
    verdict = [] if usable else ["Do not use this model as it is: the warnings below say why."]
    verdict += [*_groups(run, ours), *_right(run, ours), *_compared(run, ours, model)]
    verdict += tuning.sentences(run) if "choices" in run.others else []
    sites = run.others.get("sites")
    tables = [] if sites is None else [Listing.first("Rows by site", sites.drop_duplicates("site"))]
    tables += [Listing.first(name, run.others[name]) for name in ("doubtful", "mapping") if name in run.others]
    notes = list(dict.fromkeys(map(str, run.others["notes"]["note"]))) if "notes" in run.others else []
    facts = dict(run.others["facts"].astype(str)[["name", "value"]].to_numpy()) if "facts" in run.others else {}
    told = Brief(verdict, usable, list(dict.fromkeys(against["sentence"])), notes, facts, tables)
    return told if told.verdict or told.warnings or told.facts or told.tables else None


def _groups(run: Run, ours: Any) -> list[str]:
    frame = run.groups
    if not {"true_positive_rate", "positives"} <= set(frame.columns):
        return []
    same = (frame["method"] == ours["method"]) & (frame["split"] == ours["split"])
    frame = frame[same & (frame["part"] == "test")]
    if "compared" in frame.columns:
        frame = frame[frame["compared"].astype(bool)]
    about = run.configuration
    if "by" in frame.columns:  # several sensitive columns: what was made fair are their intersections
        frame = frame[frame["by"] == " & ".join(about["sensitive"])]
    if "mean_error" in frame.columns:
        return _means(run, frame, ours)
    target = about.get("target", "the target")
    if about.get("metric") == "calibration":
        return _believed(frame, ours)
    sentences = []
    for rate in CRITERIA.get(str(about.get("metric")), ()):
        there, yes = frame[frame[rate].notna()], about.get("positive", "positive")
        if "label" in there.columns and len(there):  # more than two classes: that in which the groups differ most
            yes = there.groupby("label")[rate].agg(lambda values: values.max() - values.min()).idxmax()
            there = there[there["label"] == yes]
        if len(there) > 1:
            sentences.append(_shares(there, rate, f"{target} = {yes}"))
    larger = "The larger of the differences" if len(sentences) > 1 else "The difference"
    return sentences and [*sentences, *_chance(ours, lambda share: f"{_points(share)} in 100", larger)]


def _believed(groups: pd.DataFrame, row: Any) -> list[str]:
    """How far probabilities are above the observed share, by group; of more than two classes, in that which differs most."""
    if "label" in groups.columns and len(groups):
        widest = groups.groupby("label")["calibration"].agg(lambda values: values.max() - values.min()).idxmax()
        groups = groups[groups["label"] == widest]
    there = groups[groups["calibration"].notna()].sort_values("calibration")
    if len(there) < 2:
        return []
    said = [
        f"{_points(abs(value))} in 100 too {'many' if value > 0 else 'few'} in the group {name}"
        for name, value in there[["group", "calibration"]].iloc[[0, -1]].itertuples(index=False)
    ]
    told = "The difference between groups, among likely or among unlikely rows,"
    return [
        f"Probabilities promise {said[0]} and {said[1]}.",
        *_chance(row, lambda share: f"{_points(share)} in 100", told),
    ]


def _means(run: Run, groups: pd.DataFrame, row: Any) -> list[str]:
    """Where a number is predicted: how far predictions are above the truth, or how high they are, by group."""
    column = str(run.configuration["metric"])
    there = groups[groups[column].notna()].sort_values(column)
    if len(there) < 2:
        return []
    least, most = there.iloc[0], there.iloc[-1]

    def said(group: Any) -> str:
        value = float(group[column])
        if column == "mean_prediction":
            return f"{shown(value, 'number')} in the group {group['group']}"
        return f"{shown(abs(value), 'number')} too {'high' if value > 0 else 'low'} in the group {group['group']}"

    begins = "On average predictions are" if column == "mean_error" else "The mean prediction is"
    return [f"{begins} {said(least)} and {said(most)}.", *_chance(row, lambda value: shown(value, "number"))]


def _shares(groups: pd.DataFrame, rate: str, yes: str) -> str:
    """Of 100 rows, how many in which group: all of two or three, else the two ends."""
    begins = ASKED[rate].format(yes=yes)
    told = [
        f"{round(100 * value)} in the group {name}" for name, value in zip(groups["group"], groups[rate], strict=True)
    ]
    if len(told) <= 3:
        return f"{begins} {', '.join(told[:-1])} and {told[-1]}."
    order = np.argsort(groups[rate].to_numpy())
    return f"{begins} between {told[order[0]]} and {told[order[-1]]}; {len(told)} groups were compared."


def _chance(row: Any, told: Callable[[float], str], what: str = "The difference") -> list[str]:
    """Whether chance explains the gap, by its interval; nothing where the run has none."""
    low, high = (float(row.get(f"test_gap{end}", np.nan)) for end in ("_low", "_high"))
    if not np.isfinite(low):
        return []
    if low > 0:
        ends = f"at least {told(low)}, and it may be {told(high)}"
        return [f"{what} is more than chance explains: with 95 % confidence it is {ends}."]
    return [f"{what} is within what chance explains; these rows are too few to rule out one of {told(high)}."]


def _points(share: float) -> str:
    value = 100 * share
    return f"{value:.0f}" if value >= 1.5 else f"{value:.1f}"


def _right(run: Run, row: Any) -> list[str]:
    if np.isfinite(row.get("test_r2", np.nan)):
        return [
            f"Predictions are off by {shown(row['test_mae'], 'number')} on average (root mean square "
            f"{shown(row['test_rmse'], 'number')}); they explain {100 * row['test_r2']:.0f} % of the variance of test rows."
        ]
    if not np.isfinite(row.get("test_accuracy", np.nan)):
        return []
    said = f"It is right about {100 * row['test_accuracy']:.0f} of 100 test rows"
    balanced = row.get("test_balanced_accuracy", np.nan)
    if np.isfinite(balanced):
        said += f"; averaged over the classes, so that the larger does not count more, about {100 * balanced:.0f}"
    classes = run.groups["label"].nunique() if "label" in run.groups.columns else 2
    return [f"{said} (guessing: {100 / classes:.0f})." if np.isfinite(balanced) else f"{said}."]


def _compared(run: Run, row: Any, model: str) -> list[str]:
    """Against the baseline of the run, on the same test rows."""
    others = [name for name in run.rows["method"].astype(str).unique() if name != model]
    if len(others) != 1 or not np.isfinite(row.get("gap_difference", np.nan)):
        return []
    parts = []
    number = np.isfinite(row.get("rmse_difference", np.nan))
    better = ("rmse", "root mean squared error") if number else ("accuracy", "accuracy")
    for name, word in (("gap", "gap"), better):
        change = Span.of(row, f"{name}_difference")
        less, more = ("smaller", "larger") if word == "gap" else ("lower", "higher")
        beyond = "beyond noise" if change.beyond_noise else "not beyond noise"
        ends, size = (
            "[{:+.1f}, {:+.1f}]".format(*(100 * end for end in change[1:])),
            f"{_points(abs(change.value))} points",
        )
        if number:
            ends = f"[{signed(change.low, 'number')}, {signed(change.high, 'number')}]"
            size = shown(abs(change.value), "number")
        said = f"{size} {less if change.value < 0 else more} ({beyond}, {ends})"
        if not number and abs(change.value) < 0.0005:
            said = f"the same ({ends} points)"
        parts.append(f"the {word} is {said}")
    return [f"Compared with {others[0]} on the same rows, {' and '.join(parts)}."]


def _table1(run: Run) -> Brief:
    about = run.configuration
    usual = about.get("metric") == "equal_opportunity" and about.get("convention") == "between_groups"
    told = contrast_of(run)
    verdict = [_best_columns(run), *(() if told is None else told.sentences), *([CONVENTION] if usual else [])]
    return Brief(verdict, tables=[] if told is None else [told.table])


def _best_columns(run: Run) -> str:
    """In how many columns of the table a method is best beyond noise."""
    reading = reading_of(run)
    columns = [metric for metric in reading.main if metric.column in ("test_accuracy", "train_gap", "test_gap")]
    numbers = estimates(reading, columns)
    every = {(key[0], key[2]) for key in numbers}
    clear = {(key[0], key[2]) for key, number in numbers.items() if number.verdict == "best"}
    return (
        f"In {len(clear) or 'none'} of the {len(every)} columns of Table 1 (data set, distribution, measure) is one method "
        "best beyond noise."
    )


def contrast_of(run: Run) -> Contrast | None:
    """The comparison beside Table 1 whose splits can tell methods apart; its intervals are corrected for the overlap of the
    splits, so they speak about other splits of such tables."""
    table = run.others.get("contrast")
    if table is None or not len(table):
        return None
    kept: dict[Any, Any] = table[table["interval"] == "corrected"].set_index(["method", "metric"]).to_dict("index")
    methods = list(dict.fromkeys(method for method, _ in kept))
    baseline, floors = methods[0], run.others["contrast-floors"].iloc[0]

    def mean(method: str, metric: str) -> str:
        row = kept[method, metric]
        return Span(row["mean"], max(row["low"], 0.0), row["high"]).text("rate")

    def found(method: str) -> str:
        gap, accuracy = (Span.of(kept[method, f"test_{name}"], "difference") for name in ("gap", "accuracy"))
        change = gap.value / kept[baseline, "test_gap"]["mean"]
        said = f"{method}: the gap is not beyond noise from {baseline}'s"
        if gap.beyond_noise:
            word = "smaller" if change < 0 else "larger"
            said = f"{method}: the gap is {abs(change):.0%} {word} than {baseline}'s, beyond noise"
        return f"{said}; accuracy changes by {100 * accuracy.value:+.2f} points."

    changes = [Span.of(kept[method, "test_gap"], "difference").text("rate").strip("–") for method in methods]
    rows = [
        [method, mean(method, "test_accuracy"), mean(method, "test_gap"), change]
        for method, change in zip(methods, changes, strict=True)
    ]
    splits = int(table["splits"].max())
    heads = ["Method", "Test accuracy", "Gap of true-positive rates", f"Gap minus {baseline}'s"]
    listing = Listing(f"What can be told from noise: Adult by sex, {splits} splits [95 % interval]", heads, rows)
    return Contrast(listing, [
        "Adult by sex has positives enough to tell methods apart:",
        *(found(method) for method in sorted(methods[1:], key=lambda name: name != OURS)),
        f"A model that is fair would show a gap of {shown(floors['fair'], 'rate')} on so many test rows by chance alone; one "
        f"that is exactly fair on its training rows, {shown(floors['fair_in_training'], 'rate')}.",
    ])  # fmt: skip
