"""A schema from the tables themselves: types, categories, the positive class, the groups.

Rules, in this order, over all tables together.  Missing cells count for nothing.

- no value, or one value only: ignored.
- all cells are dates or times: ignored.
- all cells are words for true and false: boolean.
- all cells are numbers (or all but a few different words, a tenth of the cells at most, which then mean missing): number;
  ignored if it counts the rows (1, 2, 3, ...) or is named like an identifier and differs in every row.
- text that differs in nearly every row (20 rows at least), or is longer than 200 characters: an identifier or free text,
  ignored.
- other text: category.  Values of fewer than ``rare`` rows, and all beyond the ``most`` frequent, are pooled as "(other)":
  little can be learned from a handful of rows, and the list, which travels, must not point at single people.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.tables.cells import distinct_texts, joined_groups, numbers_of, texts
from fedbilevel.tables.columns import check_columns, listed
from fedbilevel.tables.reading import Table, check_same_columns
from fedbilevel.tables.schema import MISSING, MOST_CLASSES, MOST_GROUPS, Column, Schema

RARE = 10
MOST = 100
ENOUGH_ROWS = 20
MOST_ODD_SHARE = 0.1
WORDS = (("false", "true"), ("no", "yes"), ("f", "t"), ("n", "y"))
CODED = ({"0", "1"}, {"-1", "1"}, *({false, true} for false, true in WORDS))
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
_IDENTIFIER = re.compile(r"(.*[ _.-])?(id|uuid|guid|key|index|nr|no|rownames|row|column_1)", re.IGNORECASE)

Source = Table | pd.DataFrame


def infer(
    tables: Sequence[Source],
    *,
    target: str,
    sensitive: str | Sequence[str],
    site: str | None = None,
    positive: str | None = None,
    keep_sensitive: bool = False,
    missing: Sequence[str] = MISSING,
    rare: int = RARE,
    most: int = MOST,
) -> Schema:
    """Read all tables once, chunk by chunk, and say what their columns are.

    Args:
        tables: one per site (or one): opened files or pandas tables, with the same columns.
        target: the column to predict.
        sensitive: the column(s) that make the groups.
        site: the column that names a row's site, if any.
        positive: the class that counts as 1.  None: 1, true or yes if the target is coded so, else the rarer of two classes.
        keep_sensitive: whether the sensitive columns are features as well.
        missing: cells that mean missing.
        rare: values of a category with fewer rows are pooled.
        most: values of a category at most; the rest is pooled.
    """
    columns = [sensitive] if isinstance(sensitive, str) else list(sensitive)
    roles = [target, *columns] + ([] if site is None else [site])
    for name in roles:
        if roles.count(name) > 1:
            raise ValueError(f"The column {name!r} is named twice among target, sensitive columns and site.")
    names = _checked(tables, roles)
    absent = frozenset(missing)
    profiles: dict[str, list[Profile]] = {name: [] for name in names}
    groups: set[str] = set()
    for table in tables:
        own = {name: Profile() for name in names}
        for chunk in _chunks(table):
            for name in names:
                own[name].add(chunk[name], absent)
            found = joined_groups([texts(chunk[name], absent) for name in columns], own=False)
            groups |= {group for group in pd.unique(found) if group is not None}
            _few_groups(groups, columns)
        if own[target].rows == 0:
            raise ValueError(f"{_name(table)} names its columns but has no rows; leave it out or fill it.")
        for name in names:
            profiles[name].append(own[name])
    classes, chosen = _classes(target, merged(profiles[target]), positive)
    unread = {name: kind for table in tables if isinstance(table, Table) for name, kind in table.unread.items()}
    made = []
    for name in names:
        if name in (target, site):
            continue
        if name in unread:
            made.append(Column(name, "ignore", note=f"holds {unread[name][:60]}, which is not read"))
            continue
        column = _column(name, profiles[name], rare=rare, most=most)
        if name in columns and not keep_sensitive:
            column = Column(name, "ignore", column.values, note="sensitive, and so no feature")
        made.append(column)
    if not groups:
        raise ValueError(f"The sensitive column {listed(columns)} has no values in rows of these tables.")
    return Schema(
        target, classes, chosen, tuple(columns), tuple(sorted(groups)), tuple(made), site, tuple(missing)
    )  # fmt: skip


def _checked(tables: Sequence[Source], roles: Sequence[str]) -> tuple[str, ...]:
    if not tables:
        raise ValueError("There are no tables: name one file at least.")
    for table in tables:
        if isinstance(table, Table):
            table.check_columns(roles)
        else:
            check_columns(table, roles, "The table")
    files = [table for table in tables if isinstance(table, Table)]
    if files:
        check_same_columns(files)
    first = tables[0]
    return first.columns if isinstance(first, Table) else tuple(map(str, first.columns))


def _chunks(table: Source) -> Iterator[pd.DataFrame]:
    return table.chunks() if isinstance(table, Table) else iter([table])


def _name(table: Source) -> str:
    return str(table.path) if isinstance(table, Table) else "The table"


def _few_groups(groups: Iterable[str], columns: Sequence[str]) -> None:
    found = sorted(groups)
    if len(found) > MOST_GROUPS:
        raise ValueError(
            f"The sensitive column {listed(columns)} makes more than {MOST_GROUPS} groups ({listed(found, 3)}): gather its "
            "values into fewer, larger groups (say, ages into ranges), or name another column."
        )


def _classes(target: str, profile: Profile, positive: str | None) -> tuple[tuple[str, ...], str]:
    """All classes, sorted, and the positive one."""
    if profile.present == 0:
        raise ValueError(f"The target {target!r} is missing in every row.")
    if profile.uncounted or profile.distinct > MOST_CLASSES:
        raise ValueError(
            f"The target {target!r} has more than {MOST_CLASSES} values ({listed(sorted(profile.counts), 3)}): it must be a "
            "class; name another column, or cut its values into two classes first."
        )
    classes = tuple(sorted(profile.counts))
    if len(classes) == 1:
        raise ValueError(f"The target {target!r} is {classes[0]!r} in every row: there is nothing to learn.")
    if positive is not None:
        if positive not in classes:
            raise ValueError(f"--positive {positive!r} is no value of {target!r}, which has {listed(classes)}.")
        return classes, positive
    if len(classes) > 2:
        raise ValueError(
            f"The target {target!r} has {len(classes)} classes ({listed(classes)}) where two are needed: "
            "name the positive one with --positive, and all others count as negative."
        )
    if {value.lower() for value in classes} in CODED:
        return classes, max(classes, key=str.lower)  # 1, true, yes, t and y come last
    return classes, min(classes, key=lambda value: (profile.counts[value], value))


def _column(name: str, profiles: list[Profile], *, rare: int, most: int) -> Column:
    profile = merged(profiles)
    rule = "flag" if profile.missing else "plain"
    if profile.present == 0:
        return Column(name, "ignore", note="no values")
    if profile.distinct == 1 and not profile.uncounted:
        return Column(name, "ignore", note="one value only")
    if profile.dates == profile.present:
        return Column(name, "ignore", note="dates and times are not used; add their year or age as a number")
    words = {value.lower(): value for value in profile.counts}
    for false, true in WORDS:
        if set(words) == {false, true} and profile.distinct == 2 and not profile.uncounted:
            return Column(name, "boolean", (words[false], words[true]), missing=rule)
    number = _number(name, profile, profiles)
    if number is not None:
        return number
    if profile.longest > LONGEST_VALUE:
        return Column(name, "ignore", note=f"free text (cells of more than {LONGEST_VALUE} characters)")
    if profile.present >= ENOUGH_ROWS and all(one.all_different for one in profiles if one.present):
        return Column(name, "ignore", note="an identifier: nearly every row has a value of its own")
    frequent = [value for value, count in profile.counts.most_common(most) if count >= rare]
    if not frequent:
        return Column(name, "ignore", note=f"no value has {rare} rows")
    pooled = profile.distinct - len(frequent)
    many = "more than " if profile.uncounted else ""
    note = f"{many}{pooled:,} rare value(s) pooled" if pooled else ""
    return Column(name, "category", tuple(sorted(frequent)), bool(pooled), rule, note=note)


def _number(name: str, profile: Profile, profiles: list[Profile]) -> Column | None:
    """A number column, or None if too many cells are no numbers."""
    decimal = "."
    numeric = profile.numeric
    if profile.comma and profile.thousands_like < profile.comma:
        decimal, numeric = ",", numeric + profile.comma
    odd = profile.present - numeric
    if odd and (odd > MOST_ODD_SHARE * profile.present or not 0 < len(profile.odd) <= MOST_ODD):
        return None
    if odd and decimal == "." and profile.comma:
        return None
    # Numbers written with a comma were not summed: their center stays 0, which costs precision only.
    mean, spread = 0.0, 1.0
    if profile.numeric and decimal == ".":
        mean, spread = profile.mean, float(np.sqrt(profile.squares / profile.numeric))
    if not odd and profile.present >= ENOUGH_ROWS and profile.whole and decimal == ".":
        counted = all(one.consecutive for one in profiles if one.present > 1)
        named = _IDENTIFIER.fullmatch(name) is not None and all(one.all_different for one in profiles if one.present)
        if counted or named:
            return Column(name, "ignore", note="an identifier: it counts or names the rows")
    words = tuple(sorted(profile.odd)) if odd else ()
    note = f"{listed(words)} ({odd:,} cell(s)) read as missing" if words else ""
    rule = "flag" if profile.missing or odd else "plain"
    return Column(
        name, "number", missing=rule, also_missing=words, decimal=decimal, center=_rounded(mean, spread), note=note
    )  # fmt: skip


def _rounded(mean: float, spread: float) -> float:
    """The mean, no more precise than its spread allows: a rough middle that says little about any row."""
    if not np.isfinite(mean) or not spread > 0:
        return float(f"{mean:.3g}") if np.isfinite(mean) else 0.0
    digits = int(np.clip(-np.floor(np.log10(spread)), -300, 300))
    return round(mean, digits) + 0.0  # no negative zero


@dataclass
class Profile:
    """What one column of one table looks like, gathered chunk by chunk in bounded memory.

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
