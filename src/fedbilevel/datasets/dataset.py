"""What a loader returns: one table, split into features, target and sensitive groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedbilevel.tables.columns import group_series


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A classification table with sensitive groups.

    Attributes:
        name: short name, for titles and file names.
        frame: the whole readable table: features, sensitive columns and target.
        X: the features; the sensitive columns are left out unless they were asked for.
        y: the target as 0 and 1.
        sensitive: the sensitive column, or a table of them if several were asked for.
        target_name: the column of `frame` that `y` was made of.
        positive: what `y` = 1 means.
        encoding: "clean" (raw typed columns) or "paper" (numbers, as preprocessed for the paper).
        description: source, licence and what was done to the data.
    """

    name: str
    frame: pd.DataFrame
    X: pd.DataFrame
    y: pd.Series[int]
    sensitive: pd.Series[Any] | pd.DataFrame
    target_name: str
    positive: str
    encoding: str
    description: str

    @property
    def groups(self) -> pd.Series[Any]:
        """The sensitive group of each row as one column of text; several columns joined ("Black & Female")."""
        return group_series(self.sensitive, "sensitive").astype(str)

    def __repr__(self) -> str:
        rows, columns = self.X.shape
        return (
            f"Dataset({self.name!r}, encoding={self.encoding!r}, rows={rows}, columns={columns}, "
            f"target={self.target_name!r}, groups={self.groups.nunique()})"
        )


def split_table(
    frame: pd.DataFrame, *, target: str, sensitive: str | list[str], keep_sensitive: bool, never: tuple[str, ...] = ()
) -> tuple[pd.DataFrame, pd.Series[Any] | pd.DataFrame]:
    """Feature columns and sensitive column(s) of a shipped table; `never` lists columns that are no features."""
    columns = [sensitive] if isinstance(sensitive, str) else list(sensitive)
    categorical = [c for c in frame.columns if c != target and not pd.api.types.is_numeric_dtype(frame[c])]
    for column in columns or [""]:
        if column not in categorical:
            raise ValueError(f"sensitive={sensitive!r}: choose one or several of {', '.join(categorical)}.")
    if len(set(columns)) < len(columns):
        raise ValueError(f"sensitive={sensitive!r} names a column twice.")
    left_out = {target, *never} | (set() if keep_sensitive else set(columns))
    features = frame[[c for c in frame.columns if c not in left_out]]
    return features, frame[columns[0]] if isinstance(sensitive, str) else frame[columns]


def check_encoding(encoding: str) -> None:
    if encoding not in ("clean", "paper"):
        raise ValueError(f"encoding={encoding!r} is unknown; choose 'clean' or 'paper'.")
