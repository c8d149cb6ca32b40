"""What the figures of a page share: the table behind each, intervals in words, and what an interval means."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedbilevel.report.charts import Chart, Choice, Panel
from fedbilevel.report.reading import WORDS, Case, Study
from fedbilevel.report.scales import shown


class Table:
    """Rows of the table behind a figure, each with its case and series."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.rows: list[dict[str, str]] = []
        self.places: list[tuple[int, int]] = []

    def add(self, case: Case, series: int, **columns: str) -> None:
        study = self.study
        keys = {study.word(facet): WORDS.get(part, part) for facet, part in zip(study.facets, case.key, strict=True)}
        name = {study.word(study.series): study.names[series]}
        self.rows.append({**keys, **name, **{column.replace("_", " "): text for column, text in columns.items()}})
        self.places.append((case.number, series))


def finished(study: Study, key: str, kind: str, title: str, note: str, panels: list[Panel], table: Table,
             choices: tuple[Choice, ...] = (), layers: tuple[tuple[str, str], ...] = ()) -> Chart | None:  # fmt: skip
    """The chart, or None where it would be empty."""
    if not any(panel.marks or panel.lines for panel in panels):
        return None
    return Chart(
        key, kind, title, note, tuple(panels), study.names, tuple(study.styles), pd.DataFrame(table.rows), choices, layers,
        tuple(table.places),
    )  # fmt: skip


def bounds(low: float, high: float, kind: str) -> str:
    """An interval in words, with a space before it; nothing where there is none."""
    return f" [{shown(low, kind)}, {shown(high, kind)}]" if np.isfinite(low) else ""


def how_sure(study: Study) -> str:
    """What the intervals of this run mean, in one or two sentences."""
    if study.rows.groupby([*study.facets, study.series])["seed"].nunique().max() < 2:
        given = "test_accuracy_low" in study.rows.columns
        return "Intervals: 95 %, as the run gives them." if given else "One seed only: there are no intervals."
    if study.test_share:
        return "Intervals: 95 % over random splits, corrected for their overlap."
    if study.fixed_split:
        return (
            "Intervals: 95 % (Student) for the mean over seeds on one and the same split of the rows; another split may "
            "differ by more."
        )
    return (
        "Intervals: 95 % (Student) for the mean over splits; splits of one table overlap, so they are a little short."
    )
