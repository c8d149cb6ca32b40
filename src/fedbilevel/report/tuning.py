"""The page of a tuning: what was learned, and what it cost against a search."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedbilevel.report.charts import Chart, Mark, Panel, Sketch
from fedbilevel.report.figures import convergence, plane
from fedbilevel.report.reading import Reading
from fedbilevel.report.scales import Axis, Span, shown
from fedbilevel.runs import Run

KINDS = {
    "penalty": ("penalties", "Penalties", "penalty; the common one is what all others are multiples of", True, "name"),
    "site weight": ("sites", "Whose data helps", "weight of a site in training; 1 is its usual share", False, "site"),
    "class weight": ("classes", "Class weights", "weight of a class in training", False, "class"),
}
"""Of a kind of choice: the figure's key and title, what its axis measures, whether on a scale of logarithms, what a name
is."""
NOTE = (
    "The line goes from the smallest to the largest value over {splits} ways of dealing the rows into folds; the mark is the "
    "value of the model in this folder."
)


def charts(reading: Reading) -> list[Chart]:
    """A figure for every kind of choice, then loss against bytes and the way there."""
    table = reading.run.others["choices"]
    drawn = [_learned(kind, table) for kind in KINDS]
    return [chart for chart in (*drawn, plane(reading), convergence(reading)) if chart is not None]


def spans(table: pd.DataFrame) -> dict[str, Span]:
    """The value by name, and its ends over the ways of dealing."""
    first = table[table["split"] == table["split"].min()].set_index("name")["value"]
    ends = table.groupby("name")["value"].agg(["min", "max"])
    several = table["split"].nunique() > 1
    none = float("nan")
    return {
        str(name): Span(float(value), *(ends.loc[name].tolist() if several else (none, none)))
        for name, value in first.items()
    }


def _learned(kind: str, table: pd.DataFrame) -> Chart | None:
    own = table[table["kind"] == kind]
    if not len(own):
        return None
    key, title, label, logarithmic, what = KINDS[kind]
    sketch, marks, told = Sketch([title]), [], spans(own)
    for place, (name, span) in enumerate(told.items()):
        text = span.text("number")
        marks.append(Mark(0, span.value, place, span.low, span.high, tip=f"{name}: {text}"))
        sketch.tell(0, 0, {what: name, label.split(";")[0]: text})
    axis = Axis(label, "number", logarithmic)
    baseline = None if logarithmic else 1.0
    sketch.panels.append(Panel(0, "", axis, marks=tuple(marks), groups=tuple(told), baseline=baseline, bars=False))
    return sketch.chart(key, "rows", title, NOTE.format(splits=own["split"].nunique()))


def sentences(run: Run) -> list[str]:
    """How good the model is against the search and for how many bytes; whose data helps; how many rows are doubtful."""
    return [*_against(run.rows), *_sites(run.others["choices"]), *_doubtful(run)]


def _against(rows: pd.DataFrame) -> list[str]:
    if len(rows) < 2:
        return []
    search, ours = rows.iloc[0], rows.iloc[-1]
    trainings, times = int(search["trainings"]), search["bytes"] / ours["bytes"]
    change = ours["test_loss"] - search["test_loss"]
    word = "less" if change < 0 else "more"
    return [
        f"On test rows it loses {shown(ours['test_loss'], 'number')} a row, {shown(abs(change), 'number')} {word} than the "
        f"model that a search found ({shown(search['test_loss'], 'number')}).",
        f"The sites sent and received {shown(ours['bytes'], 'bytes')}; the search took {trainings} trainings and "
        f"{shown(search['bytes'], 'bytes')}, {times:.0f} times as much.",
    ]


def _sites(choices: pd.DataFrame) -> list[str]:
    told = spans(choices[choices["kind"] == "site weight"]) if (choices["kind"] == "site weight").any() else {}
    if not told:
        return []
    sure = [f"{name} counts {shown(span.value, 'number')} times" for name, span in told.items()
            if np.isfinite(span.low) and (span.low > 1 or span.high < 1)]  # fmt: skip
    if not sure:
        return ["No site counts more or less than its share in all ways of dealing the rows."]
    return [f"In all ways of dealing the rows, {' and '.join(sure)} its share of the training."]


def _doubtful(run: Run) -> list[str]:
    table = run.others.get("doubtful")
    if table is None:
        return []
    told = " and ".join(f"{count} at {site}" for site, count in zip(table["site"], table["doubtful_rows"], strict=True))
    return [f"Rows whose labels are doubtful: {told}."]
