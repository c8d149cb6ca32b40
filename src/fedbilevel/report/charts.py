"""What a figure is, before anybody draws it: `draw` makes SVG of it, `draw_matplotlib` files for papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd

from fedbilevel.report.scales import Axis, domain
from fedbilevel.report.styles import Style

NAN = math.nan


class Mark(NamedTuple):
    """A value with its interval.  In a plane x and y are both measured; in rows y numbers the group.

    ``layer`` names an extra that is hidden at first ("seeds", "paper").
    """

    series: int
    x: float
    y: float
    x_low: float = NAN
    x_high: float = NAN
    y_low: float = NAN
    y_high: float = NAN
    tip: str = ""
    layer: str = ""


class Line(NamedTuple):
    """Points joined in order, with a band; ``name`` tells lines of one series apart (a stage)."""

    series: int
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes.  ``variant`` is one of the chart's choices, by position ("" where it has none)."""

    case: int
    title: str
    x: Axis
    y: Axis
    variant: str = ""
    marks: tuple[Mark, ...] = ()
    lines: tuple[Line, ...] = ()
    groups: tuple[str, ...] = ()
    baseline: float | None = None
    bars: bool = True

    def visible(self) -> list[Mark]:
        return [mark for mark in self.marks if not mark.layer]

    def x_domain(self) -> tuple[float, float]:
        if self.lines:
            return domain(self.x, [x for line in self.lines for x in line.x], [], [])
        marks = self.visible()
        return domain(self.x, [m.x for m in marks], [m.x_low for m in marks], [m.x_high for m in marks])

    def y_domain(self) -> tuple[float, float]:
        if self.lines:
            lows, highs = ([value for line in self.lines for value in getattr(line, end)] for end in ("low", "high"))
            return domain(self.y, [y for line in self.lines for y in line.y], lows, highs)
        marks = self.visible()
        return domain(self.y, [m.y for m in marks], [m.y_low for m in marks], [m.y_high for m in marks])


class Choice(NamedTuple):
    """A control that picks panels: ``options`` are (key, text); a panel's variant joins one key of each choice by "/"."""

    label: str
    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Chart:
    """A figure: panels of one kind ("plane", "rows" or "lines"), and the numbers behind them as a table."""

    key: str
    kind: str
    title: str
    note: str
    panels: tuple[Panel, ...]
    names: tuple[str, ...]
    styles: tuple[Style, ...]
    table: pd.DataFrame
    choices: tuple[Choice, ...] = ()
    layers: tuple[tuple[str, str], ...] = ()
    table_rows: tuple[tuple[int, int], ...] = field(default=())
    """(case, series) of every row of the table, for filters."""

    @property
    def first_variant(self) -> str:
        return "/".join(choice.options[0][0] for choice in self.choices)

    def variants(self) -> list[str]:
        return list(dict.fromkeys(panel.variant for panel in self.panels))

    def used(self) -> list[int]:
        """Series that appear, in their order."""
        seen = {mark.series for panel in self.panels for mark in panel.marks}
        seen |= {line.series for panel in self.panels for line in panel.lines}
        return sorted(seen)


def columns_for(panels: Sequence[Panel]) -> int:
    """How many panels stand side by side on a wide screen."""
    count = len({panel.case for panel in panels})
    return 1 if count == 1 else 2 if count in (2, 4) else 3
