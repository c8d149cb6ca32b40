"""What the shipped tables have in common: the file in the package, and a table split into features, target and groups."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import pandas as pd

from fedbilevel.tables.columns import group_series

# Of the original, uncompressed files.
SHA256 = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    "german.data": "b21f3d81db8071257d5ff1deaeba1fd4303b62712e6fcc9715c7a86202cb5871",
}


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


def shipped(
    name: str,
    frame: pd.DataFrame,
    *,
    target: str,
    positive: str,
    sensitive: str | list[str],
    keep_sensitive: bool,
    encoding: str,
    encode: Callable[[pd.DataFrame], pd.DataFrame],
    description: str,
    never: tuple[str, ...] = (),
) -> Dataset:
    """A readable table divided into features, which ``encode`` rewrites, target and groups; ``never`` are no features."""
    columns = [sensitive] if isinstance(sensitive, str) else list(sensitive)
    categorical = [c for c in frame.columns if c != target and not pd.api.types.is_numeric_dtype(frame[c])]
    for column in columns or [""]:
        if column not in categorical:
            raise ValueError(f"sensitive={sensitive!r}: choose one or several of {', '.join(categorical)}.")
    if len(set(columns)) < len(columns):
        raise ValueError(f"sensitive={sensitive!r} names a column twice.")
    left_out = {target, *never} | (set() if keep_sensitive else set(columns))
    features = frame[[c for c in frame.columns if c not in left_out]]
    groups = frame[columns[0]] if isinstance(sensitive, str) else frame[columns]
    y = (frame[target] == positive).astype("int64")
    return Dataset(name, frame, encode(features), y, groups, target, positive, encoding, description)


def is_paper(encoding: str) -> bool:
    """Whether the paper's encoding is asked for."""
    if encoding not in ("clean", "paper"):
        raise ValueError(f"encoding={encoding!r} is unknown; choose 'clean' or 'paper'.")
    return encoding == "paper"


def read_file(name: str) -> bytes:
    """The original bytes of one of the files inside the package, which are compressed there."""
    return lzma.decompress(resources.files("fedbilevel.datasets").joinpath("data", f"{name}.xz").read_bytes())
