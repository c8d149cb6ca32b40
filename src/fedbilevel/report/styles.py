"""How series look: one colour, one marker and one dash each, so that nothing is told by colour alone."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

_KEPT = tomllib.loads(
    resources.files("fedbilevel.report").joinpath("assets", "styles.toml").read_text(encoding="utf-8")
)
SERIES = {theme: tuple(_KEPT[theme].pop("series")) for theme in ("light", "dark")}
LIGHT, DARK = _KEPT["light"], _KEPT["dark"]
GLYPHS, DASHES, USUAL = _KEPT["markers"], _KEPT["dashes"], _KEPT["usual"]
MARKERS = tuple(GLYPHS)


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
