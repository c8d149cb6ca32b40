"""Columns and tables in whatever form they arrive (pandas, polars, NumPy, lists), turned into pandas and checked; and their
cells, as text or as what Parquet and pandas hold, turned into texts, numbers and codes.

Everything that reads user data goes through here, so that a missing group, a wrong length or a misspelt column is
reported once, in one sentence, under the name the caller used for the argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.hints import hint

Codes = NDArray[np.int32]
Numbers = NDArray[np.float64]

# Between the values of several sensitive columns when they are read as one: "Black & Female".
JOIN = " & "
MISSING_GROUP = "(missing)"
EVERYBODY = "everybody"
"""The group of all rows where no column makes groups."""
MISSING_CODE = -1
UNKNOWN_CODE = -2
LARGEST = 1e100
"""A number beyond this is taken for a mistake; squares and sums of smaller ones stay finite."""

_DATE = re.compile(
    r"(?:(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})|(\d{1,2})[-/.](\d{1,2})([-/.])(\d{4}|\d{2}))"
    r"(?:[T ](\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?.*)?"
)
_TIME = re.compile(r"\d{1,2}:\d{2}(:\d{2}.*)?")
_EPOCH = date(1970, 1, 1).toordinal()
_WHOLE = re.compile(r"([+-]?\d+)\.0+")
_NEGATIVE_AND_POSITIVE = ((0, 1), (-1, 1))  # the two codings of a binary label that need no `pos_label`


def to_series(values: Any, name: str) -> pd.Series[Any]:
    """One column as a pandas Series numbered from 0; `name` is the argument's name, for the error messages."""
    if isinstance(values, pd.Series):
        return values.reset_index(drop=True)
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a column (list, NumPy array, pandas or polars Series), not {values!r}.")
    if _is_table(values):
        frame = to_frame(values, name)
        if frame.shape[1] != 1:
            raise ValueError(f"{name} must be one column, but it has {frame.shape[1]}; pass the column you mean.")
        return frame.iloc[:, 0]
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim != 1:
            raise ValueError(f"{name} must be one column, but its shape is {array.shape}.")
        return pd.Series(array)
    # Not np.asarray: it would turn a missing value among strings into the text 'nan'.
    values = list(values)
    return pd.Series(values) if values else pd.Series([], dtype=object)


def to_frame(table: Any, name: str = "X") -> pd.DataFrame:
    """A table as a pandas DataFrame with distinct text column names and rows numbered from 0."""
    if isinstance(table, pd.DataFrame):
        frame = table.reset_index(drop=True)
    elif _is_table(table):
        frame = pd.DataFrame({column: table[column].to_numpy() for column in table.columns})
    else:
        array = np.asarray(table)
        if array.ndim != 2:
            raise ValueError(f"{name} must be a table with rows and columns, but it has {array.ndim} dimension(s).")
        frame = pd.DataFrame(array, columns=[f"x{i}" for i in range(array.shape[1])])
    if any(not isinstance(column, str) for column in frame.columns):
        frame = frame.set_axis([str(column) for column in frame.columns], axis=1)
    repeated = frame.columns[frame.columns.duplicated()]
    if len(repeated):
        raise ValueError(f"{name} has two columns named {repeated[0]!r}; rename one of them.")
    return frame


def group_series(sensitive: Any, name: str = "sensitive_features") -> pd.Series[Any]:
    """The sensitive group of each row as one column; several columns are joined ("Black & Female").

    A row whose group is missing cannot be counted for or against anybody, so missing values are an error.
    """
    if isinstance(sensitive, pd.DataFrame) or _is_table(sensitive) or np.ndim(sensitive) == 2:
        frame = to_frame(sensitive, name)
        if frame.shape[1] == 0:
            raise ValueError(f"{name} has no columns.")
        parts = [_without_missing(frame[column], f"{name}[{column!r}]") for column in frame.columns]
        if len(parts) > 1:
            text = parts[0].astype(str)
            for part in parts[1:]:
                text = text + JOIN + part.astype(str)
            return text.rename(JOIN.join(frame.columns))
        return parts[0]
    return _without_missing(to_series(sensitive, name), name)


def encode_groups(
    sensitive: Any, *, known: Sequence[Any] | None = None, name: str = "sensitive_features", what: str = "group",
    where: str = "the training part",
) -> tuple[NDArray[np.int32], list[Any]]:  # fmt: skip
    """Group codes 0..K-1 and the group names, sorted.

    Args:
        sensitive: the group of each row.
        known: the names, as those of the training part; a group outside of them has no code, and that is an error.
        name: of the argument, for error messages.
        what: the values are, for error messages.
        where: the names are known from, for error messages.

    Returns:
        Codes `[rows]`, and the names.

    Raises:
        ValueError: a group is not among ``known``.
    """
    series = group_series(sensitive, name)
    if known is None:
        codes, values = pd.factorize(series, sort=True)
        return codes.astype(np.int32), list(values)
    names = list(known)
    codes = pd.Index(names).get_indexer(pd.Index(series))
    if (codes < 0).any():
        stranger = series.iloc[int(np.flatnonzero(codes < 0)[0])]
        raise ValueError(
            f"{name} holds the {what} {shown(stranger)}, which {where} does not have "
            f"(it has {listed(names)}); add rows of that {what} to {where} or leave its rows out."
        )
    return codes.astype(np.int32), names


def binary_labels(values: Any, name: str, *, pos_label: Any = None) -> NDArray[np.int8]:
    """Labels as 0 and 1, where 1 stands for `pos_label`.

    Without `pos_label` the values must be 0/1, False/True or -1/1. Predictions may hold one class only.
    """
    series = _without_missing(to_series(values, name), name)
    distinct = list(pd.unique(series))
    if pos_label is not None:
        if len(distinct) > 2 or (len(distinct) == 2 and pos_label not in distinct):
            raise ValueError(
                f"{name} must hold {shown(pos_label)} and one other value, but it holds {listed(distinct)}."
            )
        return np.asarray(series == pos_label).astype(np.int8)
    if not any(set(distinct) <= set(allowed) for allowed in _NEGATIVE_AND_POSITIVE):
        raise ValueError(
            f"{name} must hold 0/1, False/True or -1/1, but it holds {listed(distinct)}; "
            "name the positive class with pos_label."
        )
    return np.asarray(series == 1).astype(np.int8)


def distinct_texts(column: pd.Series[Any], missing: frozenset[str]) -> tuple[NDArray[np.int64], list[str | None]]:
    """Codes of a column's cells and the texts they stand for; a missing cell has code -1 or a text None.

    The same value is the same text wherever it comes from: 1, 1.0 and "1.0" are "1", True is "true".
    """
    codes, values = pd.factorize(column.astype(object))
    return codes, [text_of(value, missing) for value in values]


def text_of(value: Any, missing: frozenset[str]) -> str | None:
    """A cell as text, None where it is missing."""
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


def date_order(text: str) -> str | None:
    """How a date is written: "ymd", "dmy" or "mdy"; "?" where day and month could change places; "time" for a time of day
    alone; None for anything else.

    >>> [date_order(text) for text in ("2024-03-31", "31/3/24", "3/31/2024 08:15", "1.3.2024", "1/3/2024", "8:15", "12")]
    ['ymd', 'dmy', 'mdy', 'dmy', '?', 'time', None]
    """
    if not 4 <= len(text) < 40 or not text[0].isdigit():
        return None
    found = _DATE.fullmatch(text)
    if found is None:
        return "time" if _TIME.fullmatch(text) else None
    if found[1]:
        return "ymd"
    first, second = int(found[4]), int(found[5])
    if found[6] == "." or first > 12:
        return "dmy"
    return "mdy" if second > 12 else "?"


def days_of(column: pd.Series[Any], order: str, missing: frozenset[str]) -> tuple[Numbers, NDArray[np.bool_]]:
    """Every cell as days since 1970 (times of day are fractions), NaN where it is missing or no date; where it is the latter.

    A date that begins with its year is read as that; ``order`` is for the others.  Of years with two digits, 69 to 99 are 19..
    """
    codes, values = distinct_texts(column, missing)
    days = [np.nan if value is None else day_of(value, order) for value in values]
    absent = np.array([value is None for value in values] + [True], bool)[codes]
    numbers = np.array([*days, np.nan], np.float64)[codes]
    return numbers, np.isnan(numbers) & ~absent


def day_of(text: str, order: str) -> float:
    """Days since 1970, NaN where ``text`` is no date."""
    found = _DATE.fullmatch(text)
    if found is None:
        return np.nan
    if found[1]:
        year, month, day = int(found[1]), int(found[2]), int(found[3])
    else:
        day, month = (int(found[4]), int(found[5])) if order != "mdy" else (int(found[5]), int(found[4]))
        year = int(found[7]) + (0 if len(found[7]) == 4 else 1900 if int(found[7]) > 68 else 2000)
    try:
        whole = date(year, month, day).toordinal() - _EPOCH
    except ValueError:
        return np.nan
    hours, minutes, seconds = (float(part or 0) for part in found.groups()[7:10])
    return whole + (hours + minutes / 60 + seconds / 3600) / 24


def group_texts(
    frame: pd.DataFrame, columns: Sequence[str], missing: frozenset[str], *, own: bool = False
) -> NDArray[np.object_]:
    """The joined group of every row ("Black & Female"), None where a part is missing; with ``own`` that is written as one."""

    def join(cells: tuple[str | None, ...]) -> str | None:
        there = [MISSING_GROUP if own and cell is None else cell for cell in cells]
        return None if None in there else JOIN.join(cell for cell in there if cell is not None)

    if not columns:
        return np.full(len(frame), EVERYBODY, dtype=object)
    joined = np.empty(len(frame), dtype=object)
    joined[:] = [join(cells) for cells in zip(*(texts(frame[name], missing) for name in columns), strict=True)]
    return joined


def check_lengths(**columns: Any) -> None:
    """All the named columns must have the same, positive number of rows; those that are None are skipped."""
    lengths = {name: len(column) for name, column in columns.items() if column is not None}
    (first, expected), *others = lengths.items()
    if expected == 0:
        raise ValueError(f"{first} has no rows.")
    for name, length in others:
        if length != expected:
            raise ValueError(f"{name} has {length} rows but {first} has {expected}; they must describe the same rows.")


def check_columns(frame: pd.DataFrame, columns: Iterable[str], name: str) -> None:
    """Every one of `columns` must be in `frame`; a misspelt one is answered with the nearest existing name."""
    for column in columns:
        if column not in frame.columns:
            raise ValueError(f"{name}: there is no column {column!r}; {hint(column, frame.columns)}")


def is_number_column(column: pd.Series[Any]) -> bool:
    """Whether a column is to be read as numbers; truth values are categories."""
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def shown(value: Any) -> str:
    """A value as it is written in messages: 0, not np.int64(0)."""
    return repr(value.item() if isinstance(value, np.generic) else value)


def listed(values: Sequence[Any], limit: int = 8) -> str:
    """Values for a message, cut off when there are many."""
    some = ", ".join(shown(value) for value in values[:limit])
    return some + (f" and {len(values) - limit} more" if len(values) > limit else "")


def _is_table(values: Any) -> bool:
    return hasattr(values, "columns") and hasattr(values, "shape")


def _without_missing(series: pd.Series[Any], name: str) -> pd.Series[Any]:
    missing = np.flatnonzero(series.isna().to_numpy())
    if missing.size:
        raise ValueError(
            f"{name} has {missing.size} missing value(s), the first in row {missing[0]}; "
            "fill them in, give them a category of their own, or leave those rows out."
        )
    return series
