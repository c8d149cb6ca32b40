"""What the columns of tables look like, site by site: gathered chunk by chunk in bounded memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel.tables.columns import date_order, distinct_texts, group_texts, listed, numbers_of, texts
from fedbilevel.tables.reading import Table, site_names

MOST_SITES = 1000
MOST_GROUPS = 50
MOST_VALUES = 2000
"""Different values counted per column and site; later ones only add to ``uncounted``."""
LONGEST_VALUE = 200
"""Characters of a category's name; a column with longer cells is free text."""
MOST_ODD = 5
"""Different words that a number column may hold besides numbers..."""
MOST_ODD_SHARE = 0.1
"""...in so many of its cells."""

_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")


@dataclass
class Profile:
    """What one column looks like at one site.

    ``counts``: how often each of the first values occurred; ``rows_counted``: in how many rows, up to the first value that was
    not counted; ``odd``: cells that are no numbers; ``orders``: how dates are written, see `date_order`.
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
    rising: bool = True
    low: float = math.inf
    high: float = -math.inf
    previous: float = math.nan
    measured: int = 0
    mean: float = 0.0
    squares: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    orders: set[str] = field(default_factory=set)

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

    @property
    def looks(self) -> str:
        """What all cells but a tenth are: "date", "number" or "text"; else "mixed", or "" where there are none."""
        if self.present == 0:
            return ""
        if self.dates == self.present:
            return "date"
        numbers = (self.numeric + self.comma) / self.present
        return "number" if numbers >= 1 - MOST_ODD_SHARE else "text" if numbers <= MOST_ODD_SHARE else "mixed"

    @cached_property
    def distribution(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers among the counted values, ascending, and how often each occurred."""
        values, often = np.array([*self.counts], dtype=object), np.array([*self.counts.values()], np.int64)
        numbers, _ = numbers_of(pd.Series(values, dtype=object), "," if self.comma else ".", frozenset())
        there = np.flatnonzero(~np.isnan(numbers))
        order = there[np.argsort(numbers[there])]
        return numbers[order], often[order]

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
        steps = np.diff(numbers, prepend=start)
        self.consecutive = self.consecutive and bool((steps == 1).all())
        self.rising = self.rising and bool((steps > 0).all())
        self.low, self.high = min(self.low, float(numbers.min())), max(self.high, float(numbers.max()))
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
        order = date_order(value)
        if order is not None:
            self.dates += count
            self.orders.add(order)
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
    out.low, out.high = min(profile.low for profile in profiles), max(profile.high for profile in profiles)
    out.longest = max(profile.longest for profile in profiles)
    out.whole = all(profile.whole for profile in profiles)
    out.consecutive = all(profile.consecutive for profile in profiles if profile.numeric)
    for profile in profiles:
        out._join(profile.measured, profile.mean, profile.squares)
        out.counts.update(profile.counts)
        out.odd.update(profile.odd)
        out.orders |= profile.orders
    return out


class Seen(NamedTuple):
    """``profiles``: of every column that any site has, one a site; ``groups``: of all rows; ``lacking``: sites without a
    column; ``unread``: columns whose type cannot be used, with that type."""

    sites: list[str]
    profiles: dict[str, list[Profile]]
    groups: set[str]
    lacking: dict[str, list[str]]
    unread: dict[str, str]


def look(
    tables: Sequence[Table],
    sensitive: Sequence[str],
    missing: frozenset[str],
    site: str | None = None,
    only: Sequence[str] | None = None,
) -> Seen:
    """Read all tables once.  A table is a site, or its column ``site`` says whose a row is.  ``only``: no other columns."""
    profiles: dict[str, dict[str, Profile]] = {}
    groups: set[str] = set()
    columns = dict.fromkeys(name for table in tables for name in table.columns if only is None or name in only)
    lacking: dict[str, list[str]] = {}
    for table, name in zip(tables, site_names(tables), strict=True):
        rows = 0
        for column in columns:
            if column not in table.columns:
                lacking.setdefault(column, []).append(name)
        there = [column for column in columns if column in table.columns]
        for chunk in table.chunks(there):
            for owner, part in _owned(chunk, name, site, missing):
                own = profiles.setdefault(owner, {column: Profile() for column in columns})
                for column in there:
                    own[column].add(part[column], missing)
            rows += len(chunk)
            if set(sensitive) <= set(table.columns):
                groups |= {group for group in pd.unique(group_texts(chunk, sensitive, missing)) if group is not None}
            if len(groups) > MOST_GROUPS:
                raise ValueError(
                    f"The sensitive column {listed(sensitive)} makes more than {MOST_GROUPS} groups "
                    f"({listed(sorted(groups), 3)}): gather its values into fewer, larger groups (say, ages into ranges), "
                    "or name another column."
                )
            if len(profiles) > MOST_SITES:
                raise ValueError(f"The site column {site!r} has more than {MOST_SITES} values: name a column of sites.")
        if rows == 0:
            raise ValueError(f"{table.path} names its columns but has no rows; leave it out or fill it.")
    unread = {name: kind for table in tables for name, kind in table.unread.items()}
    every = {column: [own[column] for own in profiles.values()] for column in columns}
    return Seen(list(profiles), every, groups, lacking, unread)


def _owned(
    chunk: pd.DataFrame, name: str, site: str | None, missing: frozenset[str]
) -> Iterator[tuple[str, pd.DataFrame]]:
    if site is None or site not in chunk:
        yield name, chunk
        return
    owners = texts(chunk[site], missing)
    for owner in dict.fromkeys(owners):
        if owner is not None:
            yield owner, chunk[owners == owner]
