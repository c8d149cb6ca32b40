"""How series look: one colour, one marker and one dash each, so that nothing is told by colour alone.

The colours keep a distance from each other for readers with protanopia, deuteranopia and tritanopia as well, and at least
3:1 against the background of their theme (tests/report/test_styles.py computes both).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LIGHT = {
    "page": "#f6f7f9",
    "card": "#ffffff",
    "ink": "#1b1f24",
    "soft": "#545c66",
    "line": "#d5dae0",
    "grid": "#e6e9ed",
    "accent": "#0b57a4",
    "tint": "#e8f0fa",
    "warn": "#7a4a00",
    "warn-tint": "#fff4dc",
}
DARK = {
    "page": "#101317",
    "card": "#171b20",
    "ink": "#eceff3",
    "soft": "#a9b2bd",
    "line": "#3a424c",
    "grid": "#2a3037",
    "accent": "#7db8f5",
    "tint": "#1d2c3f",
    "warn": "#f3c979",
    "warn-tint": "#33291a",
}
SERIES_LIGHT = ("#2e2b29", "#de7200", "#2e8fff", "#a44bb1", "#948a96", "#263391", "#1a705c", "#cc0b06")
SERIES_DARK = ("#e3f6fa", "#ffd200", "#5cc4ff", "#c07fd0", "#8f7b80", "#7d74ff", "#72b98c", "#e8621a")

MARKERS = ("*", "s", "v", "D", "X", "P", "o", "^")
"""Matplotlib's letters; `GLYPHS` draws the same shapes."""
GLYPHS = {
    "o": "M-4.2 0a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0 -8.4 0Z",
    "s": "M-3.8 -3.8H3.8V3.8H-3.8Z",
    "^": "M0 -5L4.7 3.6H-4.7Z",
    "v": "M0 5L4.7 -3.6H-4.7Z",
    "D": "M0 -5.2L5.2 0L0 5.2L-5.2 0Z",
    "P": "M-1.7 -4.8H1.7V-1.7H4.8V1.7H1.7V4.8H-1.7V1.7H-4.8V-1.7H-1.7Z",
    "X": "M-4.6 -2.4L-2.4 -4.6L0 -2.2L2.4 -4.6L4.6 -2.4L2.2 0L4.6 2.4L2.4 4.6L0 2.2L-2.4 4.6L-4.6 2.4L-2.2 0Z",
    "*": "M0 -5.8L1.5 -2.1L5.5 -1.8L2.4 .8L3.4 4.7L0 2.6L-3.4 4.7L-2.4 .8L-5.5 -1.8L-1.5 -2.1Z",
}
DASHES = ("", "7 3", "2 2.5", "8 3 2 3", "4 2", "10 3 2 2 2 3", "", "6 2")

_USUAL = (
    ("FedAvg",),
    ("FedReg",),
    ("FedMinMax",),
    ("FCFL",),
    ("FedBiO", "FedBiO, paper"),
    ("FedBiOAcc", "FedBiOAcc, paper"),
    ("FedBiO, cells",),
    ("FedBiOAcc, cells",),
)
"""Methods that look the same on every page."""


class Style(NamedTuple):
    """``slot`` numbers the colour; ``marker`` and ``dash`` number `MARKERS` and `DASHES`."""

    slot: int
    marker: int
    dash: int

    @property
    def glyph(self) -> str:
        return GLYPHS[MARKERS[self.marker]]


def styles(names: Sequence[str]) -> list[Style]:
    """A style for each name: the usual one where the method has one, else the next that is free.

    After eight series colours return with other markers and dashes.
    """
    usual = {name: slot for slot, group in enumerate(_USUAL) for name in group}
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for place, name in enumerate(names):
        slot = usual.get(name)
        if slot is not None and slot not in taken:
            chosen[place] = slot
            taken.add(slot)
    count = len(SERIES_LIGHT)
    free = (slot for slot in range(len(names) + count) if slot not in taken)
    result = []
    for place in range(len(names)):
        number = chosen[place] if place in chosen else next(free)
        cycle, slot = divmod(number, count)
        result.append(Style(slot, (slot + 3 * cycle) % len(MARKERS), (slot + 3 * cycle) % len(DASHES)))
    return result


def variables(theme: str) -> str:
    """The theme's colours as CSS custom properties."""
    colours, series = (LIGHT, SERIES_LIGHT) if theme == "light" else (DARK, SERIES_DARK)
    lines = [f"--{name}:{value};" for name, value in colours.items()]
    lines += [f"--s{number}:{value};" for number, value in enumerate(series)]
    return f"color-scheme:{theme};" + "".join(lines)
