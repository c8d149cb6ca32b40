"""From values to places on the paper: domains, ticks, and numbers as text.

A page's script knows none of this: a filter zooms the picture, between the ticks that `ladder` put beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

PADDING = 0.06
REACH = 1.5
"""Whiskers may widen a domain by this many times the spread of the points, or the median whisker, whichever is more: one
long whisker shall not flatten the rest.  Longer ones are cut at the frame."""
UNITS = {"bytes": "B", "seconds": "s", "count": ""}


class Axis(NamedTuple):
    """``low`` and ``high`` fix the ends, ``floor`` and ``ceiling`` limit them, ``include`` is always in sight."""

    label: str
    format: str = "number"
    log: bool = False
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    ceiling: float | None = None
    include: float | None = None


class Scale(NamedTuple):
    """A straight (or logarithmic) map from [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, 1e-300)), math.log10(low), math.log10(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def domain(axis: Axis, values: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """What an axis shows: all points, their whiskers within `REACH`, some air at the ends.

    ``lows`` and ``highs`` are empty, or as long as ``values``.
    """
    usable = (lambda value: math.isfinite(value) and value > 0) if axis.log else math.isfinite
    change = math.log10 if axis.log else float
    points = [change(value) for value in values if usable(value)]
    if not points:
        points = [0.0, 1.0]
    low, high = min(points), max(points)
    lengths = [
        abs(change(end) - change(value))
        for ends in (lows, highs) for value, end in zip(values, ends, strict=False) if usable(value) and usable(end)
    ]  # fmt: skip
    reach = max(REACH * (high - low), 1.05 * _median(lengths)) if high > low else math.inf
    low = max(min([low, *(change(value) for value in lows if usable(value))]), low - reach)
    high = min(max([high, *(change(value) for value in highs if usable(value))]), high + reach)
    if axis.include is not None:
        low, high = min(low, axis.include), max(high, axis.include)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        widen = 0.05 * abs(high) or 0.5
        low, high = low - widen, high + widen
    pad = PADDING * (high - low)
    low, high = low - pad, high + pad
    if axis.log:
        low, high = 10**low, 10**high
    if axis.include is not None and axis.include == axis.floor:
        low = axis.include
    low = max(low, axis.floor) if axis.floor is not None else low
    high = min(high, axis.ceiling) if axis.ceiling is not None else high
    return (low if axis.low is None else axis.low, high if axis.high is None else axis.high)


def _median(values: list[float]) -> float:
    """The upper one of two in the middle; 0 where there are none."""
    return sorted(values)[len(values) // 2] if values else 0.0


def ticks(low: float, high: float, count: int, log: bool = False) -> list[float]:
    """About ``count`` round numbers between ``low`` and ``high``."""
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / (count + 1)))
        decades = [10.0**power for power in range(first, last + 1, every)]
        if len(decades) >= 3 or high / low > 100:
            return decades
        fine = [part * 10.0**power for power in range(first - 1, last + 1) for part in (1, 2, 5)]
        inside = [value for value in fine if low <= value * (1 + 1e-9) and value <= high * (1 + 1e-9)]
        if len(inside) >= 2:
            return inside
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * part for part in (1, 2, 2.5, 5, 10) if size * part >= raw * (1 - 1e-9))
    first_step, last_step = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first_step, last_step + 1)]


def ladder(axis: Axis, spans: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Ticks for whatever a filter may leave, coarse to fine: those of every window between two of the series' ``spans``."""
    steps: dict[float, set[float]] = {}
    for low in {low for low, _ in spans}:
        for high in {high for _, high in spans if high > low}:
            values = ticks(*domain(axis, [low, high], [], []), tick_count(axis), axis.log)
            apart = [b / a if axis.log else b - a for a, b in pairwise(values)]
            if apart:
                steps.setdefault(float(f"{min(apart):.6g}"), set()).update(float(f"{value:.9g}") for value in values)
    return [sorted(steps[step]) for step in sorted(steps, reverse=True)]


def tick_count(axis: Axis) -> int:
    """How many ticks to aim at: texts with units take more room."""
    return 4 if axis.format in UNITS else 6


def tick_labels(values: Sequence[float], kind: str, log: bool = False) -> list[str]:
    """Texts for ticks: as many decimals as their distance needs."""
    if kind in UNITS:
        return ["0" if value == 0 else si(value, UNITS[kind]) for value in values]
    if log:
        return [f"{value:g}".replace("e-0", "e-").replace("-", "−") for value in values]
    step = min((abs(b - a) for a, b in pairwise(values)), default=abs(values[0]) if values else 1)
    decimals = 0
    while decimals < 6 and abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6 * max(1.0, step * 10**decimals):
        decimals += 1
    return ["0" if abs(value) < 1e-12 else short(value, decimals) for value in values]


def short(value: float, decimals: int) -> str:
    """Fixed decimals, no zero before the point, a true minus sign.

    >>> short(-0.0512, 3), short(1, 2), short(-0.0001, 2)
    ('−.051', '1.00', '.00')
    """
    if not math.isfinite(value):
        return "–"
    text = f"{abs(value):.{decimals}f}"
    sign = "−" if value < 0 and float(text) != 0 else ""
    return sign + (text[1:] if text.startswith("0.") else text)


def si(value: float, unit: str = "") -> str:
    """Three digits and a prefix, kept on one line: "1.71 MB", "250 k", "0.8 s".

    >>> [si(1_712_000, "B"), si(400), si(0.8, "s"), si(12_500)]
    ['1.71\\xa0MB', '400', '0.8\\xa0s', '12.5\\xa0k']
    """
    if not math.isfinite(value):
        return "–"
    size, prefix = value, ""
    for larger in ("k", "M", "G", "T"):
        if abs(size) < 999.5:
            break
        size, prefix = size / 1000, larger
    text = f"{size:.3g}".replace("-", "−")
    return f"{text}\u00a0{prefix}{unit}" if prefix or unit else text


def signed(value: float, kind: str) -> str:
    """A difference: `shown` with its sign."""
    return f"{'+' if value > 0 else ''}{shown(value, kind)}"


def shown(value: float, kind: str) -> str:
    """One number as tables and tips show it."""
    if value is None or not math.isfinite(value):
        return "–"
    if kind == "rate":
        return short(value, 4)
    if kind == "count":
        return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
    return si(value, UNITS[kind]) if kind in UNITS else f"{value:#.4g}".rstrip(".").replace("-", "−")


def shown_spread(mean: float, sd: float, kind: str) -> str:
    """A standard deviation with as many decimals as its mean.

    >>> shown_spread(0.8662, 0.018541, "number"), shown_spread(0.8662, 0.018541, "rate")
    ('0.0185', '.0185')
    """
    if kind != "number" or not math.isfinite(mean) or not 1e-4 <= abs(mean) < 1e4:
        return shown(sd, kind)
    return f"{sd:.{max(0, 3 - math.floor(math.log10(abs(mean))))}f}"


class Span(NamedTuple):
    """A number with its interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, row: Any, name: str) -> Span:
        """A row's column ``name``, and its ends where the row has them."""
        return cls(*(float(row.get(f"{name}{end}", math.nan)) for end in ("", "_low", "_high")))

    def columns(self, name: str) -> dict[str, float]:
        """What `of` reads."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    @property
    def beyond_noise(self) -> bool:
        return self.low > 0 or self.high < 0

    def text(self, kind: str, tell: Callable[[float, str], str] = shown) -> str:
        ends = f" [{tell(self.low, kind)}, {tell(self.high, kind)}]" if math.isfinite(self.low) else ""
        return tell(self.value, kind) + ends
