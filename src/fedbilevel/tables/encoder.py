"""Tables as matrices: one `Encoder`, learned from a table, or a pure function of a schema and of sums over the sites.

Every number column is standardised.  Between sites mean and spread are those of all sites' training rows; they come from
per-site counts, sums and sums of squares.  So the sites agree on an encoding by adding up three numbers a column, and one
machine that holds all tables gets the same one: `combine` adds with a correctly rounded sum, so the order of the sites does not
matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.tables.columns import (
    MISSING_CODE,
    UNKNOWN_CODE,
    Codes,
    Numbers,
    check_columns,
    codes_of,
    days_of,
    group_texts,
    is_number_column,
    listed,
    numbers_of,
    text_of,
    to_frame,
)
from fedbilevel.tables.schema import MISSING, Column, Schema, learned_columns

FURTHEST = 20.0
"""Standardised numbers are cut here: a mistyped value must not outweigh all others."""


class Statistics(NamedTuple):
    """Sums over training rows, one entry a number column of the schema: what a site sends so that all scale alike.  Where the
    target is a number, it is the last entry.

    ``rows``: how many rows (one entry); ``counts``: of them not missing; ``sums``: of value - center; ``squares``:
    of its square.
    """

    rows: Numbers
    counts: Numbers
    sums: Numbers
    squares: Numbers


@dataclass(frozen=True)
class Parsed:
    """Rows as arrays, before scaling: number columns as float64 (NaN: missing), others as codes.

    ``marks``: "labels" and "groups" as codes; empty for rows that are only to be predicted.
    """

    cells: dict[str, Numbers | Codes]
    rows: int
    marks: dict[str, NDArray[Any]]

    @property
    def labels(self) -> NDArray[Any]:
        """The place of every row's label in the schema's labels, -1 where the target is missing; numbers themselves, or NaN."""
        return self._mark("labels")

    @property
    def unlabelled(self) -> NDArray[np.bool_]:
        """Where the target is missing."""
        return np.asarray(np.isnan(self.labels) if self.labels.dtype.kind == "f" else self.labels < 0)

    @property
    def groups(self) -> Codes:
        """The place of every row's group in the schema's groups, -1 where it is missing."""
        return self._mark("groups")

    def _mark(self, name: str) -> NDArray[Any]:
        if name not in self.marks:
            raise ValueError("These rows were read without labels and groups: parse them with labelled=True.")
        return self.marks[name]

    def take(self, rows: NDArray[np.int64]) -> Parsed:
        cells = {name: values[rows] for name, values in self.cells.items()}
        return Parsed(cells, len(rows), {name: values[rows] for name, values in self.marks.items()})

    def complete(self) -> Parsed:
        """Without the rows that have no label or no group."""
        return self.take(np.flatnonzero(~self.unlabelled & (self.groups >= 0)))


def parse(schema: Schema, frame: pd.DataFrame, *, labelled: bool = False, source: str = "The table") -> Parsed:
    """Cells read by the schema's rules; the first that breaks them is reported with its place in ``source``."""
    check_columns(frame, schema.needed(labelled=labelled), source)
    missing = frozenset(schema.missing)
    cells = {column.name: _cells(column, frame, missing, source) for column in schema.features}
    marks = {}
    if labelled:
        marks = {"labels": _labels(schema, frame, source), "groups": _groups(schema, frame, source)}
    return Parsed(cells, len(frame), marks)


def _cells(column: Column, frame: pd.DataFrame, missing: frozenset[str], source: str) -> Numbers | Codes:
    """Numbers, NaN where missing; of a category or boolean column, codes."""
    missing |= frozenset(column.also_missing)
    values: Numbers | Codes
    if column.kind == "number":
        values, bad = numbers_of(frame[column.name], column.decimal, missing)
        hint = "mend it, or list such cells in also_missing of the column in the schema"
        _refuse(frame, column.name, bad, "must hold numbers (up to 1e100)", source=source, hint=hint)
        absent = np.isnan(values)
    elif column.kind == "date":
        values, bad = days_of(frame[column.name], column.order, missing)
        hint = "mend it, or list such cells in also_missing of the column in the schema"
        _refuse(frame, column.name, bad, "must hold dates", source=source, hint=hint)
        absent = np.isnan(values)
    else:
        values = codes_of(frame[column.name], column.values, missing)
        absent = values == MISSING_CODE
    if column.missing == "refuse":
        hint = 'fill it in, or write missing = "plain" for the column in the schema'
        _refuse(frame, column.name, absent, "must not be missing", source=source, hint=hint)
    return values


def _labels(schema: Schema, frame: pd.DataFrame, source: str) -> NDArray[Any]:
    """The place of every row's label in the schema's labels, -1 where the target is missing; numbers as they are."""
    if schema.regression:
        return _cells(Column(schema.target, decimal=schema.decimal), frame, frozenset(schema.missing), source)
    codes = codes_of(frame[schema.target], schema.classes, frozenset(schema.missing))
    must, hint = f"must hold one of {listed(schema.classes)}", "mend it, or list the value in classes of the schema"
    _refuse(frame, schema.target, codes == UNKNOWN_CODE, must, source=source, hint=hint)
    if schema.positive is None:
        return codes
    return np.where(codes < 0, MISSING_CODE, codes == schema.classes.index(schema.positive)).astype(np.int32)


def _groups(schema: Schema, frame: pd.DataFrame, source: str) -> Codes:
    """Place of every row's group in the schema's groups, -1 where it is missing."""
    joined = group_texts(frame, schema.sensitive, frozenset(schema.missing), own=schema.missing_group == "own")
    codes = codes_of(pd.Series(joined, index=frame.index, dtype=object), schema.groups, frozenset())
    must = f"must make one of the groups {listed(schema.groups)}"
    hint = "mend it, or list the group in groups of the schema"
    _refuse(frame, (*schema.sensitive, schema.target)[0], codes == UNKNOWN_CODE, must, source=source, hint=hint)
    return codes


def _refuse(frame: pd.DataFrame, column: str, bad: NDArray[np.bool_], must: str, *, source: str, hint: str) -> None:
    """One sentence about the first of the ``bad`` cells, if there is any."""
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        cell = frame[column].iloc[row]
        shown = "is empty" if pd.isna(cell) or cell == "" else f"holds {str(cell)[:60]!r}"
        where = frame.index.name or "row"
        more = f" (and {int(bad.sum()) - 1} more below)" if bad.sum() > 1 else ""
        raise ValueError(
            f"{source}, {where} {frame.index[row]}: the column {column!r} {must}, but it {shown}{more}; {hint}."
        )


def stack(parts: Sequence[Parsed]) -> Parsed:
    """Chunks of one table, one after the other."""
    cells = {name: np.concatenate([part.cells[name] for part in parts]) for name in parts[0].cells}
    marks = {name: np.concatenate([part.marks[name] for part in parts]) for name in parts[0].marks}
    return Parsed(cells, sum(part.rows for part in parts), marks)


def site_statistics(schema: Schema, table: pd.DataFrame | Parsed) -> Statistics:
    """What one site adds to the common statistics: sums over its training rows.

    Args:
        schema: what the columns mean.
        table: the site's training rows.

    Returns:
        Counts, sums and sums of squares.
    """
    parsed = table if isinstance(table, Parsed) else parse(schema, table, labelled=schema.regression)
    numbers = [parsed.cells[column.name] for column in schema.numbers] + ([parsed.labels] if schema.regression else [])
    values = [column - center for column, center in zip(numbers, schema.centers, strict=True)]
    there = [column[~np.isnan(column)] for column in values]
    return Statistics(
        np.array([float(parsed.rows)]),
        np.array([float(len(column)) for column in there]),
        np.array([float(column.sum()) for column in there]),
        np.array([float((column**2).sum()) for column in there]),
    )


def combine(parts: Iterable[Statistics]) -> Statistics:
    """The statistics of all sites together; the same whatever their order.

    Args:
        parts: what each site's `site_statistics` returned.

    Returns:
        Their sum, for `Encoder.from_statistics`.
    """
    every = list(parts)
    if not every:
        raise ValueError("There are no statistics to combine: no site sent any.")

    def total(arrays: list[Numbers]) -> Numbers:
        if len({array.shape for array in arrays}) > 1:
            raise ValueError("Sites sent statistics of different shapes: they do not use the same schema.")
        return np.array([math.fsum(values) for values in zip(*arrays, strict=True)], np.float64)

    return Statistics(*(total([getattr(part, name) for part in every]) for name in Statistics._fields))


@dataclass(frozen=True, eq=False)
class Encoder:
    """Rows to a float32 matrix, with the columns ``feature_names``.

    Numbers are standardised and cut at ``furthest`` spreads, dates are days since 1970 and then numbers; a missing one is the
    mean, 0.  A category is one 0/1 column a value; a value that is not listed is "(other)" if there is that column, else all
    zeros, and so is a missing one.  A boolean is 0 or 1, and a half where it is missing or another word.  With
    ``missing = "flag"`` a further column is 1 where a cell is missing.  The last column is 1.

    Attributes:
        columns: how each column becomes numbers, in the order of the matrix.
        means, spreads: of the number and date columns.
        source: the schema and the statistics it was made from; None: learned from a table.
        absent: cells that mean missing, besides empty ones.
        furthest: spreads at which numbers are cut.
        target: mean and spread of the number that is predicted; None for classes.
    """

    columns: tuple[Column, ...]
    means: Numbers
    spreads: Numbers
    source: tuple[Schema, Statistics] | None = None
    absent: tuple[str, ...] = ()
    furthest: float = FURTHEST
    target: tuple[float, float] | None = None

    @classmethod
    def from_statistics(cls, schema: Schema, statistics: Statistics) -> Encoder:
        """The encoding that everybody with this schema and these statistics has."""
        centers = schema.centers
        expected = len(centers)
        for name in ("counts", "sums", "squares"):
            sent = getattr(statistics, name)
            if sent.shape != (expected,) or not np.isfinite(sent).all():
                raise ValueError(f"statistics.{name} must hold {expected} finite numbers, one a number column.")
        count = np.maximum(statistics.counts, 1)
        shift = statistics.sums / count
        means = centers + shift
        variance = statistics.squares / count - shift**2
        # Below these bounds the difference is rounding: of the sums, or of the values themselves.
        varies = variance > 1e-12 * statistics.squares / count + (1e-12 * means) ** 2
        spreads = np.sqrt(np.where(varies, variance, 1.0))
        columns, target = len(schema.numbers), None
        if schema.regression:
            target = float(means[-1]), float(spreads[-1])
        scaling = means[:columns], spreads[:columns]
        return cls(schema.features, *scaling, (schema, statistics), schema.missing, target=target)

    @classmethod
    def learn(cls, table: Any, *, every_value: bool = False) -> Encoder:
        """From a table in memory, number columns first.

        Columns are taken for what `fedbilevel.tables.schema.infer` takes those of a file for; a column of numbers is one, and a
        matrix has no other.  ``every_value``: numbers are standardised, all else is one 0/1 column for every value, and nothing
        may be missing.
        """
        frame = to_frame(table)
        check_features(frame, missing=not every_value)
        if every_value:
            learned = [_every_value(name, frame[name]) for name in frame.columns]
        else:
            learned = learned_columns(frame, named=hasattr(table, "columns"))
        absent = () if every_value else MISSING
        columns = sorted((one for one in learned if one.kind != "ignore"), key=lambda one: not one.scaled)
        if not columns:
            why = "; ".join(f"{one.name!r}: {one.note}" for one in learned[:5])
            raise ValueError(f"No column of X is left as a feature ({why}).")
        scaled = [_cells(one, frame, frozenset(absent), "X") for one in columns if one.scaled]
        means, spreads = np.zeros(0), np.ones(0)
        if scaled:
            means, spreads = _standard(np.stack(scaled, axis=1))
        return cls(tuple(columns), means, spreads, absent=absent)

    @classmethod
    def of_values(
        cls, numbers: Sequence[str], means: Numbers, spreads: Numbers, values: dict[str, Any] | None = None
    ) -> Encoder:
        """Numbers standardised and never cut, categories with all their values: what models before version 0.2 have."""
        words = {
            name: tuple(str(text_of(value, frozenset())) for value in known) for name, known in (values or {}).items()
        }
        categories = [Column(name, "category", known) for name, known in words.items()]
        return cls((*map(Column, numbers), *categories), means, spreads, furthest=np.inf)

    @property
    def schema(self) -> Schema:
        return self._source[0]

    @property
    def statistics(self) -> Statistics:
        return self._source[1]

    @property
    def _source(self) -> tuple[Schema, Statistics]:
        if self.source is None:
            raise ValueError("This encoder was learned from a table: it has no schema.")
        return self.source

    @property
    def numbers(self) -> list[str]:
        """Names of the number and date columns."""
        return [column.name for column in self.columns if column.scaled]

    @property
    def feature_names(self) -> list[str]:
        """Names of the matrix's columns."""
        return [name for column in self.columns for name in column.features] + ["1"]

    @property
    def units(self) -> tuple[Numbers, Numbers]:
        """Of every feature but the constant, what it is divided by, and what is taken away before."""
        scales, shifts = np.ones(len(self.feature_names) - 1), np.zeros(len(self.feature_names) - 1)
        scaling, place = zip(self.means, self.spreads, strict=True), 0
        for column in self.columns:
            if column.scaled:
                shifts[place], scales[place] = next(scaling)
            place += len(column.features)
        return scales, shifts

    def transform(self, table: Any, *, source: str = "The table") -> NDArray[np.float32]:
        """The encoded rows of a table, or of rows that are parsed already."""
        parsed = table if isinstance(table, Parsed) else self._parsed(table, source)
        out = np.ones((parsed.rows, len(self.feature_names)), np.float32)
        scaling = zip(self.means, self.spreads, strict=True)
        place = 0
        for column in self.columns:
            cells = parsed.cells[column.name]
            width = len(column.features)
            block = out[:, place : place + width]
            if column.scaled:
                mean, spread = next(scaling)
                absent = np.isnan(cells)
                block[:, 0] = np.where(absent, 0.0, np.clip((cells - mean) / spread, -self.furthest, self.furthest))
            else:
                absent = cells == MISSING_CODE
                _fill(column, np.asarray(cells, np.int32), block)
            if column.missing == "flag":
                block[:, -1] = absent
            place += width
        return out

    def labels(self, table: pd.DataFrame, *, source: str = "The table") -> NDArray[Any]:
        """The place of every row's label in ``schema.labels``, -1 where the target is missing: leave such rows out.
        Numbers themselves, or NaN."""
        check_columns(table, [self.schema.target], source)
        return _labels(self.schema, table, source)

    def standardised(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Labels as models are trained on them: of a number, its distance to the mean in spreads."""
        return labels if self.target is None else (labels - self.target[0]) / self.target[1]

    def groups(self, table: pd.DataFrame, *, source: str = "The table") -> Codes:
        """The place of every row's group in ``schema.groups``, -1 where it is missing: leave such rows out."""
        check_columns(table, self.schema.sensitive, source)
        return _groups(self.schema, table, source)

    def _parsed(self, table: Any, source: str) -> Parsed:
        if self.source is not None:
            return parse(self.schema, table, source=source)
        frame = to_frame(table)
        check_columns(frame, [column.name for column in self.columns], "X")
        absent = frozenset(self.absent)
        return Parsed({column.name: _cells(column, frame, absent, "X") for column in self.columns}, len(frame), {})


def check_features(frame: pd.DataFrame, name: str = "X", *, missing: bool = False) -> None:
    """Infinite values are errors, and so are missing ones that are not allowed: their owner must say what they mean."""
    if frame.shape[0] == 0 or frame.shape[1] == 0:
        raise ValueError(f"{name} has {frame.shape[0]} rows and {frame.shape[1]} columns; it needs one at least.")
    for column in frame.columns:
        values = frame[column]
        absent = np.flatnonzero(values.isna().to_numpy())
        if absent.size and not missing:
            raise ValueError(
                f"{name}: the column {column!r} has {absent.size} missing value(s), the first in row {absent[0]}; "
                "fill them in or leave those rows out."
            )
        if is_number_column(values) and np.isinf(values.to_numpy(np.float64, na_value=np.nan)).any():
            raise ValueError(f"{name}: the column {column!r} has infinite values; replace them by numbers.")


def _standard(values: NDArray[np.float64]) -> tuple[Numbers, Numbers]:
    """Means and spreads of columns without their missing cells: to the last bit those of scikit-learn's `StandardScaler`, whose
    import would take longer than all else that is done to a table."""
    there = ~np.isnan(values)
    count = np.maximum(there.sum(axis=0), 1)
    means = np.nansum(values, axis=0) / count
    apart = values - means
    variance = (np.nansum(apart**2, axis=0) - np.nansum(apart, axis=0) ** 2 / count) / count
    # What two passes over equal values may leave, by rounding (Chan, Golub, LeVeque, The American Statistician 1983).
    rounding = count * np.finfo(np.float64).eps
    return means, np.sqrt(np.where(variance > rounding * variance + (rounding * means) ** 2, variance, 1.0))


def _every_value(name: str, values: pd.Series[Any]) -> Column:
    if is_number_column(values):
        return Column(name)
    known = pd.factorize(values.astype(object), sort=True)[1]
    return Column(name, "category", tuple(str(text_of(value, frozenset())) for value in known))


def _fill(column: Column, codes: Codes, block: NDArray[np.float32]) -> None:
    if column.kind == "boolean":
        block[:, 0] = np.where(codes < 0, 0.5, codes)
        return
    known = len(column.values)
    block[:, :known] = codes[:, None] == np.arange(known)
    if column.pooled:
        block[:, known] = codes == UNKNOWN_CODE
