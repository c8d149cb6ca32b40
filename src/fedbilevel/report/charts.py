"""What a figure is, before anybody draws it (`svg` for pages, `paper` for papers); `Sketch`, which makes one; and how series
look: one colour, one marker and one dash each, so that nothing is told by colour alone."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbilevel.report.scales import Axis, Span, domain, shown

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
    taken: dict[int, int] = {}
    for place, name in enumerate(names):
        if name in usual:
            taken.setdefault(usual[name], place)
    chosen = {place: slot for slot, place in taken.items()}
    free = (slot for slot in count() if slot not in taken)
    cycles = [
        divmod(chosen[place] if place in chosen else next(free), len(SERIES["light"])) for place in range(len(names))
    ]
    return [Style(slot, *((slot + 3 * cycle) % len(kinds) for kinds in (MARKERS, DASHES))) for cycle, slot in cycles]


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

    def domain(self, which: str) -> tuple[float, float]:
        """What the axis "x" or "y" shows."""
        ends = [[getattr(mark, f"{which}{end}") for mark in self.visible()] for end in ("", "_low", "_high")]
        for line in self.lines:
            parts = (line.x,) if which == "x" else (line.y, line.low or line.y, line.high or line.y)
            for values, more in zip(ends, parts, strict=False):
                values.extend(more)
        return domain(getattr(self, which), *ends)


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
    "doubtful": "Rows whose labels are doubtful: how many; which ones is in a list of the site's own",
    "mapping": "Mapping applied: what was changed in the tables of the sites",
    "effects": "What each feature does: odds ratios with 95 % intervals",
    "verdicts": "Ours against the pooled frontier, in accuracy at our gap",
    "duels": "Ours minus every other method: gap and accuracy, with 95 % intervals",
    "small_sites": "Accuracy minus FedAvg's at the smallest site, at all sites, and at the site that loses most",
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

    titles: Sequence[str] = ()
    """Of the blocks, where the figure's panels are those."""

    def __init__(self, names: Sequence[str], looks: Sequence[Style] | None = None) -> None:
        self.names, self.styles = tuple(names), tuple(looks or styles(names))
        self.free = looks is None
        self.panels: list[Panel] = []
        self._bars: dict[tuple[str, int], dict[str, list[Mark]]] = {}
        self._told: list[tuple[tuple[int, int], dict[str, str]]] = []

    def tell(self, block: int, series: int, columns: dict[str, str]) -> None:
        """A row of the table."""
        self._told.append(((block, series), columns))

    def bar(self, variant: str, place: tuple[int, int], group: str, span: Span, tip: str, text: str) -> str:
        """A row of the panel of ``variant`` and the block of ``place``, below the others of its group; and what it says."""
        if math.isfinite(span.value):
            mark = Mark(place[1], span.value, 0, span.low, span.high, tip=f"{self.names[place[1]]}{tip}: {text}")
            self._bars.setdefault((variant, place[0]), {}).setdefault(group, []).append(mark)
        return text

    def rows(
        self, key: str, title: str, note: str, asked: str, axes: Mapping[str, tuple[str, Axis]], baseline: float = 0.0,
        bars: bool = True,
    ) -> Chart | None:  # fmt: skip
        """The figure of all rows: for each variant's name and axis one panel a block, and a choice between the variants."""
        for variant, (_, axis) in axes.items():
            for block, head in enumerate(self.titles):
                groups = self._bars.get((variant, block), {})
                marks = [
                    mark._replace(y=place) for place, members in enumerate(groups.values())
                    for mark in sorted(members, key=lambda mark: mark.series)
                ]  # fmt: skip
                self.panels.append(
                    Panel(block, head, axis, variant=variant, marks=tuple(marks), groups=tuple(groups), baseline=baseline,
                          bars=bars)
                )  # fmt: skip
        choice = Choice(asked, tuple((variant, name[0].upper() + name[1:]) for variant, (name, _) in axes.items()))
        return self.chart(key, "rows", title, note, (choice,))

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
