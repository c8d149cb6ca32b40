"""What a figure is, before anybody draws it (`svg` for pages, `paper` for papers); `Sketch`, which makes one; and how series
look: one colour, one marker and one dash each, so that nothing is told by colour alone."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbilevel.report.scales import Axis, domain, shown

if TYPE_CHECKING:
    import pandas as pd

_KEPT = tomllib.loads(
    resources.files("fedbilevel.report").joinpath("assets", "styles.toml").read_text(encoding="utf-8")
)
SERIES = {theme: tuple(_KEPT[theme].pop("series")) for theme in ("light", "dark")}
LIGHT, DARK = _KEPT["light"], _KEPT["dark"]
GLYPHS, DASHES, USUAL = _KEPT["markers"], _KEPT["dashes"], _KEPT["usual"]
MARKERS = tuple(GLYPHS)
NAN, NO_AXIS = math.nan, Axis("")
LISTED = 100
"""Rows of a long table that a page shows."""
Columns = Mapping[str, Callable[[dict[Any, Any]], str]]
"""How each column of a table is told from a row, by heading."""


class Style(NamedTuple):
    """``slot`` numbers the colour; ``marker`` and ``dash`` number `MARKERS` and `DASHES`."""

    slot: int
    marker: int
    dash: int


def styles(names: Sequence[str]) -> list[Style]:
    """A style for each name: the usual one where the method has one, else the next that is free.

    After eight series colours return with other markers and dashes.
    """
    usual = {name: slot for slot, group in enumerate(USUAL) for name in group}
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for place, name in enumerate(names):
        slot = usual.get(name)
        if slot is not None and slot not in taken:
            chosen[place] = slot
            taken.add(slot)
    count = len(SERIES["light"])
    free = (slot for slot in range(len(names) + count) if slot not in taken)
    result = []
    for place in range(len(names)):
        number = chosen[place] if place in chosen else next(free)
        cycle, slot = divmod(number, count)
        result.append(Style(slot, (slot + 3 * cycle) % len(MARKERS), (slot + 3 * cycle) % len(DASHES)))
    return result


def colours(theme: str) -> dict[str, str]:
    """The theme's colours by name; those of series are "s0", "s1" and so on."""
    return {**(LIGHT if theme == "light" else DARK), **{f"s{n}": c for n, c in enumerate(SERIES[theme])}}


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
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One pair of axes.  ``variant`` is one of the chart's choices, by position ("" where it has none).

    ``baseline`` is where bars start, or a line across; ``note`` says what the panel leaves out.
    """

    block: int
    title: str
    x: Axis
    y: Axis = NO_AXIS
    variant: str = ""
    marks: tuple[Mark, ...] = ()
    lines: tuple[Line, ...] = ()
    groups: tuple[str, ...] = ()
    baseline: float | None = None
    bars: bool = True
    note: str = ""

    def visible(self) -> list[Mark]:
        return [mark for mark in self.marks if not mark.layer]

    def used(self) -> set[int]:
        return {mark.series for mark in self.marks} | {line.series for line in self.lines}

    def x_domain(self) -> tuple[float, float]:
        marks, lines = self.visible(), self.lines
        values = [m.x for m in marks] + [x for line in lines for x in line.x]
        return domain(self.x, values, [m.x_low for m in marks], [m.x_high for m in marks])

    def y_domain(self) -> tuple[float, float]:
        marks, lines = self.visible(), self.lines
        lows = [m.y_low for m in marks] + [low for line in lines for low in line.low or line.y]
        highs = [m.y_high for m in marks] + [high for line in lines for high in line.high or line.y]
        return domain(self.y, [m.y for m in marks] + [y for line in lines for y in line.y], lows, highs)


class Choice(NamedTuple):
    """A control that picks panels: ``options`` are (key, text); a panel's variant joins one key of each choice by "/"."""

    label: str
    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Listing:
    """A plain table of texts; ``places`` are (block, series) of every row, for filters."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    places: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, caption: str, table: pd.DataFrame, columns: Columns) -> Listing:
        """A row of texts for every row of ``table``; ``columns`` say how to make each, by heading."""
        rows = [[make(row) for make in columns.values()] for row in table.to_dict("records")]
        return cls(caption, list(columns), rows)

    @classmethod
    def first(cls, name: str, table: pd.DataFrame) -> Listing:
        """The first rows of any table; the whole of it is in its file."""
        left = f" (the first {LISTED} of {len(table):,} rows; all are in {name}.csv)" if len(table) > LISTED else ""
        rows = [[shown(value, "number") if isinstance(value, float) else str(value) for value in row]
                for row in table.head(LISTED).itertuples(index=False)]  # fmt: skip
        return cls(CAPTIONS.get(name, name) + left, [str(column).replace("_", " ") for column in table.columns], rows)


CAPTIONS = {
    "mapping": "Mapping applied: what was changed in the tables of the sites",
    "effects": "What each feature does: odds ratios with 95 % intervals",
}
"""What a command's own tables are called on its page."""


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
    numbers: Listing
    choices: tuple[Choice, ...] = ()
    layers: tuple[tuple[str, str], ...] = ()
    free: bool = False
    """Whether its panels and series are its own, and not those that a page's filter chooses between."""

    @property
    def first_variant(self) -> str:
        return "/".join(choice.options[0][0] for choice in self.choices)

    def variants(self) -> list[str]:
        return list(dict.fromkeys(panel.variant for panel in self.panels))

    def used(self) -> list[int]:
        """Series that appear, in their order."""
        return sorted({series for panel in self.panels for series in panel.used()})

    @property
    def columns(self) -> int:
        """How many panels stand side by side on a wide screen."""
        count = len({panel.block for panel in self.panels})
        return 1 if count == 1 else 2 if count in (2, 4) else 3


class Sketch:
    """A figure in the making: panels, rows of panels, and rows of the table behind it are added."""

    def __init__(self, names: Sequence[str], looks: Sequence[Style] | None = None) -> None:
        self.names, self.styles = tuple(names), tuple(looks or styles(names))
        self.free = looks is None
        self.panels: list[Panel] = []
        self._bars: dict[tuple[str, int], dict[str, list[Mark]]] = {}
        self._told: list[tuple[tuple[int, int], dict[str, str]]] = []

    def tell(self, block: int, series: int, columns: dict[str, str]) -> None:
        """A row of the table."""
        self._told.append(((block, series), columns))

    def bar(self, variant: str, block: int, group: str, mark: Mark) -> None:
        """A row of the panel of ``variant`` and ``block``, below the others of its group."""
        self._bars.setdefault((variant, block), {}).setdefault(group, []).append(mark)

    def rows(self, titles: Sequence[str], axes: dict[str, Axis], baseline: float, bars: bool = True) -> None:
        """Panels of all rows: for each variant's axis one a block, named by ``titles``."""
        for variant, axis in axes.items():
            for block, title in enumerate(titles):
                groups = self._bars.get((variant, block), {})
                marks = [
                    mark._replace(y=place) for place, members in enumerate(groups.values())
                    for mark in sorted(members, key=lambda mark: mark.series)
                ]  # fmt: skip
                self.panels.append(
                    Panel(block, title, axis, variant=variant, marks=tuple(marks), groups=tuple(groups), baseline=baseline,
                          bars=bars)
                )  # fmt: skip

    def chart(self, key: str, kind: str, title: str, note: str, choices: tuple[Choice, ...] = (),
              layers: tuple[tuple[str, str], ...] = ()) -> Chart | None:  # fmt: skip
        """The figure, or None where it would be empty."""
        if not any(panel.used() for panel in self.panels):
            return None
        columns = list(dict.fromkeys(name for _, row in self._told for name in row))
        rows = [[row.get(name, "") for name in columns] for _, row in self._told]
        heads = [name[:1].upper() + name[1:] for name in columns]
        numbers = Listing(
            f"Data behind the figure: {title}", heads, rows, [] if self.free else [place for place, _ in self._told]
        )
        layered = {mark.layer for panel in self.panels for mark in panel.marks}
        shown_layers = tuple(layer for layer in layers if layer[0] in layered)
        return Chart(
            key, kind, title, note, tuple(self.panels), self.names, self.styles, numbers, choices, shown_layers, self.free
        )  # fmt: skip


def with_bounds(value: float, low: float, high: float, kind: str) -> str:
    """A number and its interval in words; without one, the number."""
    return shown(value, kind) + (f" [{shown(low, kind)}, {shown(high, kind)}]" if math.isfinite(low) else "")
