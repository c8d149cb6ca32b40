"""What a column looks like, gathered chunk by chunk in bounded memory: the ground on which `schema_infer` decides."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.tables.cells import distinct_texts, numbers_of

MOST_VALUES = 2000
"""Different values counted per column and table; later ones only add to ``uncounted``."""
LONGEST_VALUE = 200
"""Characters of a category's name; a column with longer cells is free text."""
MOST_ODD = 5
"""Different words that a number column may hold besides numbers."""

_DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([T ]\d{1,2}:\d{2}.*)?|\d{1,2}:\d{2}(:\d{2}.*)?"
)
_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")


@dataclass
class Profile:
    """One column of one table.

    ``counts``: how often each of the first values occurred; ``rows_counted``: in how many rows, up to the first value that was
    not counted; ``odd``: cells that are no numbers.
    """

    rows: int = 0
    missing: int = 0
    numeric: int = 0
    comma: int = 0
    thousands_like: int = 0
    dates: int = 0
    longest: int = 0
    uncounted: int = 0
    rows_counted: int = 0
    whole: bool = True
    consecutive: bool = True
    previous: float = math.nan
    measured: int = 0
    mean: float = 0.0
    squares: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)

    @property
    def present(self) -> int:
        return self.rows - self.missing

    @property
    def distinct(self) -> int:
        """How many different values there are, at least."""
        return len(self.counts)

    @property
    def all_different(self) -> bool:
        """Whether nearly every row, as far as values were counted, has a value of its own."""
        return self.rows_counted > 0 and self.distinct >= 0.9 * self.rows_counted

    def add(self, column: pd.Series[Any], missing: frozenset[str]) -> None:
        """Take a chunk in."""
        codes, values = distinct_texts(column, missing)
        often = np.bincount(codes[codes >= 0], minlength=len(values)).tolist()
        there = [(value, count) for value, count in zip(values, often, strict=True) if value is not None]
        self.rows += len(column)
        self.missing += len(column) - sum(count for _, count in there)
        if len(self.odd) <= MOST_ODD:  # else it is no number column, and nobody will ask
            numbers, bad = numbers_of(pd.Series(values, dtype=object), ".", frozenset())
            rows = numbers[codes[codes >= 0]]
            self._numbers(rows[~np.isnan(rows)])
            self._not_numbers([(str(values[i]), often[i]) for i in np.flatnonzero(bad)])
        for value, count in there:
            self._value(value, count)

    def _numbers(self, numbers: np.ndarray) -> None:
        if len(numbers) == 0:
            return
        self.numeric += len(numbers)
        self.whole = self.whole and bool((numbers == np.floor(numbers)).all())
        start = numbers[0] - 1 if math.isnan(self.previous) else self.previous
        self.consecutive = self.consecutive and bool((np.diff(numbers, prepend=start) == 1).all())
        self.previous = float(numbers[-1])
        # Squares of larger numbers would not add up to a finite one; the center is a rough middle anyway.
        small = np.clip(numbers, -1e140, 1e140)
        mean = float(small.mean())
        self._join(len(small), mean, float(((small - mean) ** 2).sum()))

    def _join(self, count: int, mean: float, squares: float) -> None:
        """Means and squared deviations of two sets of numbers, put together without losing digits."""
        both = self.measured + count
        step = mean - self.mean
        self.squares += squares + step * step * self.measured * count / max(both, 1)
        self.mean += step * count / max(both, 1)
        self.measured = both

    def _value(self, value: str, count: int) -> None:
        self.longest = max(self.longest, len(value))
        self.dates += count if len(value) < 40 and _DATE.fullmatch(value) else 0
        if value in self.counts or (len(self.counts) < MOST_VALUES and len(value) <= LONGEST_VALUE):
            self.counts[value] += count
            self.rows_counted += 0 if self.uncounted else count
        else:
            self.uncounted += count

    def _not_numbers(self, cells: list[tuple[str, int]]) -> None:
        for value, count in cells:
            if _COMMA.fullmatch(value):
                self.comma += count
                self.thousands_like += count if len(value.rpartition(",")[2]) == 3 else 0
            elif value in self.odd or len(self.odd) <= MOST_ODD:
                self.odd[value[:LONGEST_VALUE]] += count


def merged(profiles: list[Profile]) -> Profile:
    """The column over several tables."""
    out = Profile()
    for name in (
        "rows", "missing", "numeric", "comma", "thousands_like", "dates", "uncounted", "rows_counted",
    ):  # fmt: skip
        setattr(out, name, sum(getattr(profile, name) for profile in profiles))
    out.longest = max(profile.longest for profile in profiles)
    out.whole = all(profile.whole for profile in profiles)
    out.consecutive = all(profile.consecutive for profile in profiles if profile.numeric)
    for profile in profiles:
        out._join(profile.measured, profile.mean, profile.squares)
        out.counts.update(profile.counts)
        out.odd.update(profile.odd)
    return out
