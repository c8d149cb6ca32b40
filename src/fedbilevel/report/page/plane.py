"""Figures of what was reached: accuracy against gap, and differences paired by seed."""

from __future__ import annotations

import numpy as np

from fedbilevel.fairness.intervals import Interval
from fedbilevel.report.charts import Chart, Choice, Mark, Panel
from fedbilevel.report.page.parts import Table, bounds, finished, how_sure
from fedbilevel.report.reading import Case, Metric, Study
from fedbilevel.report.scales import Axis, shown, signed
from fedbilevel.report.summary import LEVEL, by_seed, cells, paired


def plane(study: Study) -> Chart | None:
    """Accuracy against gap; where no gap was measured, accuracy or objective against bytes."""
    known = {metric.column: metric for metric in [*study.main, *study.costs]}
    across = known.get("test_gap") or known.get("bytes")
    up = known.get("test_accuracy") or known.get("score") or known.get("objective")
    if across is None or up is None:
        return None
    fair = across.column == "test_gap"
    found = cells(study, [across, up])
    axes = [_measured(metric) for metric in (across, up)]
    table, panels = Table(study), []
    for case in study.cases:
        marks = []
        for number, name in enumerate(study.names):
            x, y = (found.get((case.number, number, metric.column)) for metric in (across, up))
            if x is None or y is None:
                continue
            texts = [
                shown(one.mean, one.metric.format) + bounds(one.low, one.high, one.metric.format) for one in (x, y)
            ]
            tip = f"{name}: {up.label} {texts[1]}, {across.label} {texts[0]}"
            marks.append(Mark(number, x.mean, y.mean, x.low, x.high, y.low, y.high, tip))
            table.add(case, number, **{up.label: texts[1], across.label: texts[0], "seeds": str(y.seeds)})
        marks += _seeds(study, case, across, up) + _paper(study, case, across, up)
        panels.append(Panel(case.number, case.title, axes[0], axes[1], marks=tuple(marks)))
    layers = [("seeds", "each seed")] if any(mark.layer == "seeds" for panel in panels for mark in panel.marks) else []
    if any(mark.layer == "paper" for panel in panels for mark in panel.marks):
        layers.append(("paper", "the paper's figures (hollow)"))
    note = f"Up and to the left is better. {how_sure(study)}" if fair else f"To the left is cheaper. {how_sure(study)}"
    title = f"{up.short.removeprefix('Test ').capitalize()} against {'gap' if fair else 'bytes'}"
    return finished(study, "plane", "plane", title, note, panels, table, layers=tuple(layers))


def _measured(metric: Metric) -> Axis:
    label = metric.label if metric.column != "test_gap" else f"{metric.label} (left is fairer)"
    return Axis(
        label, metric.format, metric.format == "bytes", floor=0 if metric.format == "rate" else None,
        ceiling=1 if metric.format == "rate" else None,
    )  # fmt: skip


def _seeds(study: Study, case: Case, across: Metric, up: Metric) -> list[Mark]:
    marks = []
    for own_case, number, own in study.each(study.rows):
        if own_case.number == case.number and len(own) > 1:
            for _, row in own.iterrows():
                x, y = float(row[across.column]), float(row[up.column])
                if np.isfinite(x) and np.isfinite(y):
                    tip = f"{study.names[number]}, seed {row['seed']}: {shown(y, up.format)}, {shown(x, across.format)}"
                    marks.append(Mark(number, x, y, tip=tip, layer="seeds"))
    return marks


def _paper(study: Study, case: Case, across: Metric, up: Metric) -> list[Mark]:
    marks = []
    for number, name in enumerate(study.names):
        x, y = (study.published(case, name, metric.column) for metric in (across, up))
        if x is not None and y is not None:
            tip = f"{name}, as printed in the paper: {up.label} {shown(y[0], 'rate')}, {across.label} {shown(x[0], 'rate')}"
            marks.append(Mark(number, x[0], y[0], tip=tip, layer="paper"))
    return marks


def _given(study: Study, case: Case, name: str, metric: Metric) -> Interval | None:
    """A fit of one seed brings the difference to its baseline, with an interval over redrawn test rows."""
    column = f"{metric.column.removeprefix('test_')}_difference"
    if not {column, f"{column}_low", f"{column}_high"} <= set(study.rows.columns):
        return None
    for one, number, own in study.each(study.rows):
        if one == case and study.names[number] == name:
            values = [float(own[end].iloc[0]) for end in (column, f"{column}_low", f"{column}_high")]
            told = Interval(values[0], values[1], values[2], LEVEL, "bootstrap", len(own))
            return told if np.isfinite(values).all() else None
    return None


def differences(study: Study) -> Chart | None:
    """Paired differences to FedAvg (or the first series), seed by seed."""
    if len(study.names) < 2:
        return None
    first = study.names.index("FedAvg") if "FedAvg" in study.names else 0
    base = study.names[first]
    columns = sorted(study.main, key=lambda metric: metric.column != "test_gap")
    table, panels = Table(study), []
    groups = tuple(name for number, name in enumerate(study.names) if number != first)
    for metric in columns:
        values = {(case.number, number): by_seed(own, metric.column) for case, number, own in study.each(study.rows)}
        axis = Axis(f"{metric.label} minus {base}'s ({metric.better} is better)", metric.format, include=0)
        for case in study.cases:
            marks = []
            for number, name in enumerate(study.names):
                ours, theirs = values.get((case.number, number)), values.get((case.number, first))
                if number == first or ours is None or theirs is None:
                    continue
                gap = paired(study, ours, theirs) or _given(study, case, name, metric)
                if gap is not None:
                    ends = [signed(value, metric.format) for value in (gap.estimate, gap.low, gap.high)]
                    text = f"{ends[0]} [{ends[1]}, {ends[2]}]"
                    tip = f"{name} minus {base}, {metric.label}: {text}"
                    marks.append(Mark(number, gap.estimate, groups.index(name), gap.low, gap.high, tip=tip))
                    table.add(case, number, measure=metric.label, difference=text, seeds=str(gap.size))
            panels.append(
                Panel(case.number, case.title, axis, Axis(""), metric.column, tuple(marks), groups=groups, baseline=0.0,
                      bars=False)
            )  # fmt: skip
    compared = f"Each seed's value minus {base}'s with the same seed."
    if "gap_difference" in study.rows.columns:
        compared = f"Values minus {base}'s on the same test rows."
    note = f"{compared} An interval that crosses 0 is no difference beyond noise."
    choice = Choice("Measure", tuple((metric.column, metric.short) for metric in columns))
    return finished(study, "differences", "rows", f"Differences to {base}", note, panels, table, (choice,))
