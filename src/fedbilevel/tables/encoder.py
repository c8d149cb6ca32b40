"""Encoding as a pure function of a schema and of sums over the sites.

Every number column is standardised with mean and spread over all sites' training rows; these come from per-site counts,
sums and sums of squares.  So the sites agree on an encoding by adding up three numbers a column, and one machine that
holds all tables gets the same one: `combine` adds with a correctly rounded sum, so the order of the sites does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.tables.cells import (
    MISSING_CODE,
    UNKNOWN_CODE,
    Codes,
    Numbers,
    read_codes,
    read_groups,
    read_labels,
    read_numbers,
)
from fedbilevel.tables.columns import check_columns
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

    ``labels`` and ``groups`` are None for rows that are only to be predicted.
    """

    cells: dict[str, Numbers | Codes]
    labels: Codes | None
    groups: Codes | None
    rows: int

    def take(self, rows: NDArray[np.int64]) -> Parsed:
        def some(values: Codes | None) -> Codes | None:
            return None if values is None else values[rows]

        cells = {name: values[rows] for name, values in self.cells.items()}
        return Parsed(cells, some(self.labels), some(self.groups), len(rows))


def parse(schema: Schema, frame: pd.DataFrame, *, labelled: bool = False, source: str = "The table") -> Parsed:
    """Cells read by the schema's rules; the first that breaks them is reported with its place in ``source``."""
    check_columns(frame, schema.needed(labelled=labelled), source)
    cells: dict[str, Numbers | Codes] = {}
    for column in schema.features:
        read = read_numbers if column.kind == "number" else read_codes
        cells[column.name] = read(schema, column, frame, source)
    labels = read_labels(schema, frame, source) if labelled else None
    groups = read_groups(schema, frame, source) if labelled else None
    return Parsed(cells, labels, groups, len(frame))


def stack(parts: Sequence[Parsed]) -> Parsed:
    """Chunks of one table, one after the other."""

    def together(values: list[Codes | None]) -> Codes | None:
        there = [value for value in values if value is not None]
        return np.concatenate(there) if there else None

    cells = {name: np.concatenate([part.cells[name] for part in parts]) for name in parts[0].cells}
    labels, groups = (together([getattr(part, name) for part in parts]) for name in ("labels", "groups"))
    return Parsed(cells, labels, groups, sum(part.rows for part in parts))


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
    """Rows to a float32 matrix, a pure function of schema and statistics; columns as in ``schema.feature_names``.

    Numbers are standardised and cut at 20 spreads; a missing one is the mean, 0.  A category is one 0/1 column a value; a value
    that the schema does not list is "(other)" if there is that column, else all zeros, like a missing one.  A boolean is 0 or
    1, and a half where it is missing or another word.  With ``missing = "flag"`` a further column is 1 where a cell is missing.
    The last column is 1.
    """

    schema: Schema
    statistics: Statistics

    def __post_init__(self) -> None:
        expected = len(self.schema.numbers)
        for name in ("counts", "sums", "squares"):
            found = getattr(self.statistics, name)
            if found.shape != (expected,) or not np.isfinite(found).all():
                raise ValueError(f"statistics.{name} must hold {expected} finite numbers, one a number column.")

    @property
    def means(self) -> Numbers:
        """Of the number columns; the center where a column has no value."""
        center = np.array([column.center for column in self.schema.numbers], np.float64)
        return center + self.statistics.sums / np.maximum(self.statistics.counts, 1)

    @property
    def spreads(self) -> Numbers:
        """Standard deviations; 1 where a column does not vary."""
        count = np.maximum(self.statistics.counts, 1)
        shift = self.statistics.sums / count
        variance = self.statistics.squares / count - shift**2
        # Below these bounds the difference is rounding: of the sums, or of the values themselves.
        varies = variance > 1e-12 * self.statistics.squares / count + (1e-12 * self.means) ** 2
        return np.sqrt(np.where(varies, variance, 1.0))

    def transform(self, table: pd.DataFrame | Parsed, *, source: str = "The table") -> NDArray[np.float32]:
        """The encoded rows."""
        parsed = table if isinstance(table, Parsed) else parse(self.schema, table, source=source)
        out = np.zeros((parsed.rows, len(self.schema.feature_names)), np.float32)
        scaling = dict(
            zip([c.name for c in self.schema.numbers], zip(self.means, self.spreads, strict=True), strict=True)
        )
        place = 0
        for column in self.schema.features:
            cells = parsed.cells[column.name]
            width = len(column.features)
            block = out[:, place : place + width]
            if column.kind == "number":
                mean, spread = scaling[column.name]
                absent = np.isnan(cells)
                block[:, 0] = np.where(absent, 0.0, np.clip((cells - mean) / spread, -FURTHEST, FURTHEST))
            else:
                absent = cells == MISSING_CODE
                _fill(column, np.asarray(cells, np.int32), block)
            if column.missing == "flag":
                block[:, -1] = absent
            place += width
        out[:, -1] = 1
        return out

    def labels(self, table: pd.DataFrame | Parsed, *, source: str = "The table") -> Codes:
        """1, 0, or -1 where the target is missing: leave such rows out."""
        if isinstance(table, Parsed):
            return _there(table.labels)
        check_columns(table, [self.schema.target], source)
        return read_labels(self.schema, table, source)

    def groups(self, table: pd.DataFrame | Parsed, *, source: str = "The table") -> Codes:
        """The place of every row's group in ``schema.groups``, -1 where it is missing: leave such rows out."""
        if isinstance(table, Parsed):
            return _there(table.groups)
        check_columns(table, self.schema.sensitive, source)
        return read_groups(self.schema, table, source)


def _fill(column: Column, codes: Codes, block: NDArray[np.float32]) -> None:
    if column.kind == "boolean":
        block[:, 0] = np.where(codes < 0, 0.5, codes)
        return
    known = len(column.values)
    block[:, :known] = codes[:, None] == np.arange(known)
    if column.pooled:
        block[:, known] = codes == UNKNOWN_CODE


def _there(values: Codes | None) -> Codes:
    if values is None:
        raise ValueError("These rows were read without labels and groups: parse them with labelled=True.")
    return values
