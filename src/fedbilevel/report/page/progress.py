"""Figures of the way there: convergence against rounds and bytes, and what each method costs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fedbilevel.report.charts import Chart, Choice, Line, Mark, Panel
from fedbilevel.report.page.parts import Table, bounds, finished
from fedbilevel.report.reading import Metric, Study, metrics
from fedbilevel.report.scales import Axis, shown
from fedbilevel.report.summary import Cell, bands, cells

POINTS = 24
"""A line on a screen needs no more."""
TABLE_POINTS = 3
ACROSS = {"round": ("rounds", "count"), "bytes": ("bytes, up and down, all clients", "bytes")}


def convergence(study: Study) -> Chart | None:
    """Objective, accuracy and gap against rounds and against bytes: means over seeds with their intervals."""
    frame = study.run.history
    if not len(frame) or not {*study.facets, study.series} <= set(frame.columns):
        return None
    frame = frame.assign(bytes=frame["bytes_up"] + frame["bytes_down"]) if "bytes" not in frame.columns else frame
    known = metrics(study.gap)
    order = ("score", "test_accuracy", "test_gap", "objective")
    ups = [
        known[column] for column in order
        if column in frame.columns and np.isfinite(frame[column].to_numpy(dtype=float)).any()
    ]  # fmt: skip
    acrosses = [column for column in ACROSS if (frame[column] > 0).any()]
    table, panels = Table(study), []
    lines: dict[tuple[int, str, str], list[Line]] = {}
    for case, number, own in study.each(frame):
        through = pd.concat([_counted_through(run) for _, run in own.groupby("seed", sort=False)])
        for up in ups:
            for stage, path in _paths(study, through, up.column):
                kept = path.iloc[_thinned(len(path), POINTS)]
                for across in acrosses:
                    parts = [tuple(kept[name].tolist()) for name in (across, "mean", "low", "high")]
                    lines.setdefault((case.number, up.column, across), []).append(Line(number, stage, *parts))
                for _, row in path.iloc[_thinned(len(path), TABLE_POINTS)].iterrows():
                    value = shown(row["mean"], up.format) + bounds(row["low"], row["high"], up.format)
                    keys = {"stage": stage} if stage else {}
                    table.add(case, number, **keys, measure=up.label, round=shown(row["round"], "count"),
                              bytes=shown(row["bytes"], "bytes"), value=value)  # fmt: skip
    for up in ups:
        drawn = [
            value for key, own_lines in lines.items() if key[1] == up.column for line in own_lines for value in line.y
        ]
        for across in acrosses:
            label, kind = ACROSS[across]
            axes = Axis(label, kind, floor=0, include=0), _up_axis(up, drawn)
            panels += [
                Panel(case.number, case.title, *axes, f"{up.column}/{across}",
                      lines=tuple(lines.get((case.number, up.column, across), ())))
                for case in study.cases
            ]  # fmt: skip
    note = "Means over seeds; bands: 95 % intervals."
    if any(line.name for panel in panels for line in panel.lines):
        note += " Methods in two stages have a line for each."
    if any(up.column == "objective" for up in ups) and study.run.command != "bench":
        note += " An objective is a method's own: its level cannot be compared between methods or stages."
    choices = (
        Choice("Measure", tuple((up.column, up.short) for up in ups)),
        Choice("Against", tuple((across, {"round": "Rounds", "bytes": "Bytes"}[across]) for across in acrosses)),
    )
    return finished(study, "convergence", "lines", "Convergence", note, panels, table, choices)


def _up_axis(up: Metric, drawn: list[float]) -> Axis:
    if up.format == "rate":
        return Axis(up.label, "rate", floor=0, ceiling=1)
    positive = [value for value in drawn if value > 0]
    wide = len(positive) == len(drawn) and bool(positive) and max(positive) / min(positive) > 30
    return Axis(up.label, up.format, log=wide)


def _paths(study: Study, through: pd.DataFrame, column: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Every stage's mean path over seeds."""
    through = through[np.isfinite(through[column].to_numpy(dtype=float))]
    stages = through["stage"].astype(str) if "stage" in through.columns else pd.Series("", index=through.index)
    for stage, members in through.groupby(stages.to_numpy(), sort=False):
        sent = members.groupby("round")["bytes"].mean()
        path = bands(study, members[column], members["round"]).assign(bytes=sent).reset_index()
        yield str(stage) if stages.nunique() > 1 else "", path


def _counted_through(run: pd.DataFrame) -> pd.DataFrame:
    """One seed's history: a stage that counts from the beginning again goes on where the one before ended."""
    if "stage" not in run.columns or run["stage"].nunique() < 2:
        return run
    parts: list[pd.DataFrame] = []
    for _, part in run.groupby("stage", sort=False):
        shifted = part
        for column in ("round", "bytes"):
            if parts and part[column].iloc[0] <= parts[-1][column].iloc[-1]:
                shifted = shifted.assign(**{column: part[column] + parts[-1][column].iloc[-1]})
        parts.append(shifted)
    return pd.concat(parts)


def _thinned(count: int, most: int) -> list[int]:
    """Places evenly spread, both ends among them."""
    return sorted({round(number) for number in np.linspace(0, count - 1, min(count, most))}) if count else []


def costs(study: Study) -> Chart | None:
    """What a run of each method sent and computed."""
    columns = study.costs
    if not columns:
        return None
    found: dict[tuple[int, int, str], Cell] = cells(study, columns)
    table, panels = Table(study), []
    drawn = [metric for metric in columns if metric.column in ("bytes", "gradient_calls", "hvp_calls", "seconds")]
    for case in study.cases:
        for number in range(len(study.names)):
            own = {metric.short: found.get((case.number, number, metric.column)) for metric in columns}
            if any(own.values()):
                texts = {short: shown(cell.mean, cell.metric.format) if cell else "–" for short, cell in own.items()}
                table.add(case, number, **texts)
    for metric in drawn:
        axis = Axis(f"{metric.label} a run", metric.format, floor=0, include=0)
        for case in study.cases:
            marks = []
            for number, name in enumerate(study.names):
                cell = found.get((case.number, number, metric.column))
                if cell is not None:
                    tip = f"{name}, {metric.label}: {shown(cell.mean, metric.format)}"
                    marks.append(Mark(number, cell.mean, number, tip=tip))
            panels.append(
                Panel(case.number, case.title, axis, Axis(""), metric.column, tuple(marks), groups=study.names, baseline=0.0)
            )  # fmt: skip
    note = "Means over seeds. Bytes are those of all clients together, counted from the arrays that travel."
    choice = Choice("Cost", tuple((metric.column, metric.label[0].upper() + metric.label[1:]) for metric in drawn))
    return finished(study, "costs", "rows", "Costs", note, panels, table, (choice,) if drawn else ())
