"""Figures of the groups: their rates on test rows, and the weights that were learned for them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedbilevel.fairness.counts import wilson
from fedbilevel.report.charts import Chart, Choice, Mark, Panel
from fedbilevel.report.page.parts import Table, bounds, finished
from fedbilevel.report.reading import Study
from fedbilevel.report.scales import Axis, shown
from fedbilevel.report.summary import spread

RATES = {
    "true_positive_rate": ("true-positive rate", "positives"),
    "false_positive_rate": ("false-positive rate", "negatives"),
    "selection_rate": ("selection rate", "count"),
}


def rates(study: Study) -> Chart | None:
    """True-positive, false-positive and selection rate of every group on test rows."""
    frame = study.run.groups
    if not len(frame) or not {*study.facets, study.series} <= set(frame.columns):
        return None
    tested = frame[frame["part"] == "test"] if (frame["part"] == "test").any() else frame
    tested = tested.assign(negatives=tested["count"] - tested["positives"])
    table = Table(study)
    marks: dict[tuple[int, str], list[Mark]] = {}
    groups: dict[int, dict[str, list[pd.DataFrame]]] = {}
    for case, _, own in study.each(tested):
        for group, members in own.groupby(own["group"].astype(str), sort=False):
            groups.setdefault(case.number, {}).setdefault(str(group), []).append(members)
    for case, number, own in study.each(tested):
        names = list(groups[case.number])
        for group, members in own.groupby(own["group"].astype(str), sort=False):
            texts = {}
            for column, (word, rest_on) in RATES.items():
                mean = spread(study, members[column])
                low, high = mean.low, mean.high
                if study.fixed_split:
                    low, high = map(float, wilson(mean.estimate, members[rest_on].mean()))
                texts[word] = shown(mean.estimate, "rate") + bounds(low, high, "rate")
                if np.isfinite(mean.estimate):
                    tip = f"{study.names[number]}, {group}, {word}: {texts[word]}"
                    mark = Mark(number, mean.estimate, names.index(str(group)), low, high, tip=tip)
                    marks.setdefault((case.number, column), []).append(mark)
            table.add(case, number, group=str(group), **texts)
    panels = [
        Panel(
            case.number, case.title, Axis(f"{word} on test rows", "rate", low=0, high=1), Axis(""), column,
            tuple(sorted(marks.get((case.number, column), []), key=lambda mark: (mark.y, mark.series))),
            groups=tuple(_counted(name, pd.concat(own)) for name, own in groups.get(case.number, {}).items()),
            baseline=0.0,
        )
        for column, (word, _) in RATES.items() for case in study.cases
    ]  # fmt: skip
    note = "Whiskers: 95 % intervals over splits." if not study.fixed_split else (
        "Whiskers: 95 % intervals (Wilson) for the number of test rows a rate rests on; groups with few rows have wide ones."
    )  # fmt: skip
    choice = Choice("Rate", tuple((column, word[0].upper() + word[1:]) for column, (word, _) in RATES.items()))
    return finished(study, "rates", "rows", "Rates of the groups", note, panels, table, (choice,))


def _counted(name: str, members: pd.DataFrame) -> str:
    rows, positives = members["count"].mean(), members["positives"].mean()
    about = "about " if members["count"].nunique() > 1 or members["positives"].nunique() > 1 else ""
    return f"{name} ({about}{rows:,.0f} rows, {positives:,.0f} positive)" if rows > 0 else name


def weights(study: Study) -> Chart | None:
    """Learned weights of groups, and of groups with a label; 1 is neutral."""
    frame = study.run.weights
    if not len(frame) or not {*study.facets, study.series} <= set(frame.columns):
        return None
    label = frame["label"].fillna("").astype(str)
    group = frame["group"].astype(str)
    frame = frame.assign(
        cell=group.where(label == "", group + ", label " + label), kind=np.where(label == "", "group", "cell")
    )
    kinds = [kind for kind in ("cell", "group") if (frame["kind"] == kind).any()]
    table, panels = Table(study), []
    for kind in kinds:
        parts = list(study.each(frame[frame["kind"] == kind]))
        for case in study.cases:
            own_case = [(number, own) for one, number, own in parts if one.number == case.number]
            groups = tuple(dict.fromkeys(cell for _, own in own_case for cell in own["cell"]))
            marks = []
            for number, own in own_case:
                for cell, members in own.groupby("cell", sort=False):
                    mean = spread(study, members["weight"])
                    text = shown(mean.estimate, "number") + bounds(mean.low, mean.high, "number")
                    tip = f"{study.names[number]}, {cell}: {text}"
                    marks.append(Mark(number, mean.estimate, groups.index(str(cell)), mean.low, mean.high, tip=tip))
                    table.add(case, number, weight_of=str(cell), weight=text)
            ordered = tuple(sorted(marks, key=lambda mark: (mark.y, mark.series)))
            axis = Axis("weight (1 is neutral)", "number", floor=0, include=1)
            panels.append(Panel(case.number, case.title, axis, Axis(""), kind, ordered, groups=groups, baseline=1.0))
    note = "How much a row of a group (or of a group with a label) counts in training. Whiskers: 95 % intervals over seeds."
    names = {"cell": "Of a group and label", "group": "Of a group"}
    choice = Choice("Weights", tuple((kind, names[kind]) for kind in kinds))
    return finished(study, "weights", "rows", "Learned weights", note, panels, table, (choice,))
