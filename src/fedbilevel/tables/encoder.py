"""Tables as matrices: one `Encoder`, learned from a typed table, or a pure function of a schema and of sums over the sites.

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
    group_texts,
    is_number_column,
    listed,
    numbers_of,
    to_frame,
)
from fedbilevel.tables.schema import Column, Schema

FURTHEST = 20.0
"""Standardised numbers are cut here: a mistyped value must not outweigh all others."""


class Statistics(NamedTuple):
    """Sums over training rows, one entry a number column of the schema: what a site sends so that all scale alike.

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
    marks: dict[str, Codes]

    @property
    def labels(self) -> Codes:
        """1, 0, or -1 where the target is missing."""
        return self._mark("labels")

    @property
    def groups(self) -> Codes:
        """The place of every row's group in the schema's groups, -1 where it is missing."""
        return self._mark("groups")

    def _mark(self, name: str) -> Codes:
        if name not in self.marks:
            raise ValueError("These rows were read without labels and groups: parse them with labelled=True.")
        return self.marks[name]

    def take(self, rows: NDArray[np.int64]) -> Parsed:
        cells = {name: values[rows] for name, values in self.cells.items()}
        return Parsed(cells, len(rows), {name: values[rows] for name, values in self.marks.items()})

    def complete(self) -> Parsed:
        """Without the rows that have no label or no group."""
        return self.take(np.flatnonzero((self.labels >= 0) & (self.groups >= 0)))


def parse(schema: Schema, frame: pd.DataFrame, *, labelled: bool = False, source: str = "The table") -> Parsed:
    """Cells read by the schema's rules; the first that breaks them is reported with its place in ``source``."""
    check_columns(frame, schema.needed(labelled=labelled), source)
    cells = {column.name: _cells(schema, column, frame, source) for column in schema.features}
    marks = {}
    if labelled:
        marks = {"labels": _labels(schema, frame, source), "groups": _groups(schema, frame, source)}
    return Parsed(cells, len(frame), marks)


def _cells(schema: Schema, column: Column, frame: pd.DataFrame, source: str) -> Numbers | Codes:
    """Numbers, NaN where missing; of a category or boolean column, codes."""
    missing = frozenset(schema.missing) | frozenset(column.also_missing)
    values: Numbers | Codes
    if column.kind == "number":
        values, bad = numbers_of(frame[column.name], column.decimal, missing)
        hint = "mend it, or list such cells in also_missing of the column in the schema"
        _refuse(frame, column.name, bad, "must hold numbers (up to 1e100)", source=source, hint=hint)
        absent = np.isnan(values)
    else:
        values = codes_of(frame[column.name], column.values, missing)
        absent = values == MISSING_CODE
    if column.missing == "refuse":
        hint = 'fill it in, or write missing = "plain" for the column in the schema'
        _refuse(frame, column.name, absent, "must not be missing", source=source, hint=hint)
    return values


def _labels(schema: Schema, frame: pd.DataFrame, source: str) -> Codes:
    """1 for the positive class, 0 for the others, -1 where the target is missing."""
    codes = codes_of(frame[schema.target], schema.classes, frozenset(schema.missing))
    must, hint = f"must hold one of {listed(schema.classes)}", "mend it, or list the value in classes of the schema"
    _refuse(frame, schema.target, codes == UNKNOWN_CODE, must, source=source, hint=hint)
    return np.where(codes < 0, MISSING_CODE, codes == schema.classes.index(schema.positive)).astype(np.int32)


def _groups(schema: Schema, frame: pd.DataFrame, source: str) -> Codes:
    """Place of every row's group in the schema's groups, -1 where it is missing."""
    joined = group_texts(frame, schema.sensitive, frozenset(schema.missing), own=schema.missing_group == "own")
    codes = codes_of(pd.Series(joined, index=frame.index, dtype=object), schema.groups, frozenset())
    must = f"must make one of the groups {listed(schema.groups)}"
    hint = "mend it, or list the group in groups of the schema"
    _refuse(frame, schema.sensitive[0], codes == UNKNOWN_CODE, must, source=source, hint=hint)
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
    """What one site adds to the common statistics: sums over its training rows."""
    parsed = table if isinstance(table, Parsed) else parse(schema, table)
    values = [parsed.cells[column.name] - column.center for column in schema.numbers]
    there = [column[~np.isnan(column)] for column in values]
    return Statistics(
        np.array([float(parsed.rows)]),
        np.array([float(len(column)) for column in there]),
        np.array([float(column.sum()) for column in there]),
        np.array([float((column**2).sum()) for column in there]),
    )


def combine(parts: Iterable[Statistics]) -> Statistics:
    """The statistics of all sites together; the same whatever their order."""
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

    Numbers are standardised.  A category is one 0/1 column a value; a value that is not listed is "(other)" if there is that
    column, else all zeros.  The last column is 1.

    By a schema (`from_statistics`) cells are read as text: numbers are cut at 20 spreads and a missing one is the mean, 0; a
    missing category is all zeros; a boolean is 0 or 1, and a half where it is missing or another word.  With
    ``missing = "flag"`` a further column is 1 where a cell is missing.  In a typed table (`learn`) nothing may be missing.

    Attributes:
        columns: how each column becomes numbers, in the order of the matrix.
        means, spreads: of the number columns.
        source: the schema and the statistics it was made from; None: learned from a table.
    """

    columns: tuple[Column, ...]
    means: Numbers
    spreads: Numbers
    source: tuple[Schema, Statistics] | None = None

    @classmethod
    def from_statistics(cls, schema: Schema, statistics: Statistics) -> Encoder:
        """The encoding that everybody with this schema and these statistics has."""
        expected = len(schema.numbers)
        for name in ("counts", "sums", "squares"):
            sent = getattr(statistics, name)
            if sent.shape != (expected,) or not np.isfinite(sent).all():
                raise ValueError(f"statistics.{name} must hold {expected} finite numbers, one a number column.")
        count = np.maximum(statistics.counts, 1)
        shift = statistics.sums / count
        means = np.array([column.center for column in schema.numbers], np.float64) + shift
        variance = statistics.squares / count - shift**2
        # Below these bounds the difference is rounding: of the sums, or of the values themselves.
        varies = variance > 1e-12 * statistics.squares / count + (1e-12 * means) ** 2
        return cls(schema.features, means, np.sqrt(np.where(varies, variance, 1.0)), (schema, statistics))

    @classmethod
    def learn(cls, table: Any) -> Encoder:
        """Means, spreads and categories of a typed table: number columns first, then the others."""
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        frame = typed(table)
        check_features(frame)
        numbers = [name for name in frame.columns if is_number_column(frame[name])]
        others = [name for name in frame.columns if name not in numbers]
        means, spreads = np.zeros(0), np.ones(0)
        if numbers:
            scaler = StandardScaler().fit(frame[numbers])
            means, spreads = np.asarray(scaler.mean_, np.float64), np.asarray(scaler.scale_, np.float64)
        values = OneHotEncoder().fit(frame[others]).categories_ if others else []
        return cls.of_values(numbers, means, spreads, dict(zip(others, values, strict=True)))

    @classmethod
    def of_values(cls, numbers: Sequence[str], means: Numbers, spreads: Numbers, values: dict[str, Any]) -> Encoder:
        """The encoder of a typed table from what `learn` learned: for a model that is read back."""
        categories = [Column(name, "category", tuple(known)) for name, known in values.items()]
        return cls((*map(Column, numbers), *categories), means, spreads)

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
        """Names of the number columns."""
        return [column.name for column in self.columns if column.kind == "number"]

    @property
    def feature_names(self) -> list[str]:
        """Names of the matrix's columns."""
        return [name for column in self.columns for name in column.features] + ["1"]

    def transform(self, table: Any, *, source: str = "The table") -> NDArray[np.float32]:
        """The encoded rows of a table, or of rows that are parsed already."""
        parsed = table if isinstance(table, Parsed) else self._parsed(table, source)
        out = np.ones((parsed.rows, len(self.feature_names)), np.float32)
        furthest = np.inf if self.source is None else FURTHEST
        scaling = zip(self.means, self.spreads, strict=True)
        place = 0
        for column in self.columns:
            cells = parsed.cells[column.name]
            width = len(column.features)
            block = out[:, place : place + width]
            if column.kind == "number":
                mean, spread = next(scaling)
                absent = np.isnan(cells)
                block[:, 0] = np.where(absent, 0.0, np.clip((cells - mean) / spread, -furthest, furthest))
            else:
                absent = cells == MISSING_CODE
                _fill(column, np.asarray(cells, np.int32), block)
            if column.missing == "flag":
                block[:, -1] = absent
            place += width
        return out

    def labels(self, table: pd.DataFrame, *, source: str = "The table") -> Codes:
        """1, 0, or -1 where the target is missing: leave such rows out."""
        check_columns(table, [self.schema.target], source)
        return _labels(self.schema, table, source)

    def groups(self, table: pd.DataFrame, *, source: str = "The table") -> Codes:
        """The place of every row's group in ``schema.groups``, -1 where it is missing: leave such rows out."""
        check_columns(table, self.schema.sensitive, source)
        return _groups(self.schema, table, source)

    def _parsed(self, table: Any, source: str) -> Parsed:
        if self.source is not None:
            return parse(self.schema, table, source=source)
        frame = typed(table)
        names = [column.name for column in self.columns]
        check_columns(frame, names, "X")
        frame = frame[names]
        check_features(frame)
        cells: dict[str, Numbers | Codes] = {}
        for column in self.columns:
            values = frame[column.name]
            if column.kind != "number":
                # A value that is not listed has code -1.
                codes = pd.Index(list(column.values)).get_indexer(pd.Index(values.astype(object)))
                cells[column.name] = codes.astype(np.int32)
                continue
            if not is_number_column(values):
                raise ValueError(
                    f"X: the column {column.name!r} held numbers in the training part but holds text here."
                )
            cells[column.name] = values.to_numpy(np.float64)
        return Parsed(cells, len(frame), {})


def typed(table: Any) -> pd.DataFrame:
    """A pandas table whose text and category columns hold plain values."""
    frame = to_frame(table)
    plain = {
        column: frame[column].astype(object)
        for column in frame.columns
        if isinstance(frame[column].dtype, pd.CategoricalDtype)
    }
    return frame.assign(**plain) if plain else frame


def check_features(frame: pd.DataFrame, name: str = "X") -> None:
    """Missing and infinite values are errors: what they mean is for the owner of the data to say."""
    if frame.shape[0] == 0 or frame.shape[1] == 0:
        raise ValueError(f"{name} has {frame.shape[0]} rows and {frame.shape[1]} columns; it needs one at least.")
    for column in frame.columns:
        values = frame[column]
        missing = np.flatnonzero(values.isna().to_numpy())
        if missing.size:
            raise ValueError(
                f"{name}: the column {column!r} has {missing.size} missing value(s), the first in row {missing[0]}; "
                "fill them in or leave those rows out."
            )
        if is_number_column(values) and not np.isfinite(values.to_numpy(dtype=np.float64)).all():
            raise ValueError(f"{name}: the column {column!r} has infinite values; replace them by numbers.")


def _fill(column: Column, codes: Codes, block: NDArray[np.float32]) -> None:
    if column.kind == "boolean":
        block[:, 0] = np.where(codes < 0, 0.5, codes)
        return
    known = len(column.values)
    block[:, :known] = codes[:, None] == np.arange(known)
    if column.pooled:
        block[:, known] = codes == UNKNOWN_CODE
