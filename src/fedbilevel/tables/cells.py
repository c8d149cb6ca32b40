"""Cells of a column, as text or as what Parquet and pandas hold, turned into numbers, codes, labels and groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.tables.columns import JOIN, listed
from fedbilevel.tables.schema import MISSING_GROUP, Column, Schema

Codes = NDArray[np.int32]
Numbers = NDArray[np.float64]

LARGEST = 1e100
"""A number beyond this is taken for a mistake; squares and sums of smaller ones stay finite."""
MISSING_CODE = -1
UNKNOWN_CODE = -2
_WHOLE = re.compile(r"([+-]?\d+)\.0+")


def distinct_texts(column: pd.Series[Any], missing: frozenset[str]) -> tuple[NDArray[np.int64], list[str | None]]:
    """Codes of a column's cells and the texts they stand for; a missing cell has code -1 or a text None.

    The same value is the same text wherever it comes from: 1, 1.0 and "1.0" are "1", True is "true".
    """
    codes, values = pd.factorize(column.astype(object))
    return codes, [_text(value, missing) for value in values]


def _text(value: Any, missing: frozenset[str]) -> str | None:
    if isinstance(value, str):
        stripped = value.strip()
        if stripped in missing:
            return None
        whole = _WHOLE.fullmatch(stripped)
        return whole.group(1) if whole else stripped
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else repr(float(value))
    return str(value)


def texts(column: pd.Series[Any], missing: frozenset[str]) -> NDArray[np.object_]:
    """Every cell as text, None where it is missing."""
    codes, values = distinct_texts(column, missing)
    # The code -1 takes the last entry.
    return np.array([*values, None], dtype=object)[codes]


def codes_of(column: pd.Series[Any], values: Sequence[str], missing: frozenset[str]) -> Codes:
    """Place of every cell in ``values``; `MISSING_CODE` where it is missing, `UNKNOWN_CODE` where it is not listed."""
    codes, found = distinct_texts(column, missing)
    place = {value: i for i, value in enumerate(values)}
    looked_up = [MISSING_CODE if value is None else place.get(value, UNKNOWN_CODE) for value in found]
    return np.array([*looked_up, MISSING_CODE], dtype=np.int32)[codes]


def numbers_of(column: pd.Series[Any], decimal: str, missing: frozenset[str]) -> tuple[Numbers, NDArray[np.bool_]]:
    """Every cell as a number, NaN where it is missing or no number up to `LARGEST`; and where it is the latter."""
    if pd.api.types.is_numeric_dtype(column):
        values = column.to_numpy(np.float64, na_value=np.nan)
        too_large = np.abs(values) > LARGEST
        return np.where(too_large, np.nan, values), too_large
    cells = column.astype(object)
    absent = cells.isna() | cells.isin(missing)
    if decimal == ",":
        cells = cells.map(lambda cell: cell.replace(",", ".") if isinstance(cell, str) and "." not in cell else cell)
    values = pd.to_numeric(cells.where(~absent), errors="coerce").to_numpy(np.float64, na_value=np.nan)
    values = np.where(np.abs(values) <= LARGEST, values, np.nan)
    return values, np.isnan(values) & ~absent.to_numpy(bool)


def refuse(frame: pd.DataFrame, column: str, bad: NDArray[np.bool_], must: str, *, source: str, hint: str) -> None:
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


def read_numbers(schema: Schema, column: Column, frame: pd.DataFrame, source: str) -> Numbers:
    """A number column by the schema's rules; NaN where missing."""
    missing = frozenset(schema.missing) | frozenset(column.also_missing)
    values, bad = numbers_of(frame[column.name], column.decimal, missing)
    hint = "mend it, or list such cells in also_missing of the column in the schema"
    refuse(frame, column.name, bad, "must hold numbers (up to 1e100)", source=source, hint=hint)
    if column.missing == "refuse":
        must, hint = "must not be missing", 'fill it in, or write missing = "plain" for the column in the schema'
        refuse(frame, column.name, np.isnan(values), must, source=source, hint=hint)
    return values


def read_codes(schema: Schema, column: Column, frame: pd.DataFrame, source: str) -> Codes:
    """A category or boolean column by the schema's rules, as codes."""
    missing = frozenset(schema.missing) | frozenset(column.also_missing)
    codes = codes_of(frame[column.name], column.values, missing)
    if column.missing == "refuse":
        must, hint = "must not be missing", 'fill it in, or write missing = "plain" for the column in the schema'
        refuse(frame, column.name, codes == MISSING_CODE, must, source=source, hint=hint)
    return codes


def read_labels(schema: Schema, frame: pd.DataFrame, source: str) -> Codes:
    """1 for the positive class, 0 for the others, -1 where the target is missing."""
    codes = codes_of(frame[schema.target], schema.classes, frozenset(schema.missing))
    must = f"must hold one of {listed(schema.classes)}"
    hint = "mend it, or list the value in classes of the schema"
    refuse(frame, schema.target, codes == UNKNOWN_CODE, must, source=source, hint=hint)
    return np.where(codes < 0, MISSING_CODE, codes == schema.classes.index(schema.positive)).astype(np.int32)


def group_texts(schema: Schema, frame: pd.DataFrame) -> NDArray[np.object_]:
    """The joined group of every row as text, None where it is missing and such rows are left out."""
    missing = frozenset(schema.missing)
    return joined_groups([texts(frame[name], missing) for name in schema.sensitive], schema.missing_group == "own")


def joined_groups(parts: list[NDArray[np.object_]], own: bool) -> NDArray[np.object_]:
    """Groups of several columns joined ("Black & Female"); with ``own`` a missing part is written as one."""

    def join(cells: tuple[str | None, ...]) -> str | None:
        there = [MISSING_GROUP if own and cell is None else cell for cell in cells]
        return None if None in there else JOIN.join(cell for cell in there if cell is not None)

    out = np.empty(len(parts[0]), dtype=object)
    out[:] = [join(cells) for cells in zip(*parts, strict=True)]
    return out


def read_groups(schema: Schema, frame: pd.DataFrame, source: str) -> Codes:
    """Place of every row's group in the schema's groups, -1 where it is missing."""
    joined = pd.Series(group_texts(schema, frame), index=frame.index, dtype=object)
    codes = codes_of(joined, schema.groups, frozenset())
    must = f"must make one of the groups {listed(schema.groups)}"
    hint = "mend it, or list the group in groups of the schema"
    refuse(frame, schema.sensitive[0], codes == UNKNOWN_CODE, must, source=source, hint=hint)
    return codes
