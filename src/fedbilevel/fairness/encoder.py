"""Raw tables to matrices for the estimator: the clean encoding, kept as plain numbers and lists so that it can be saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.datasets.encode import check_features, clean_transformer
from fedbilevel.tables.columns import check_columns, is_number_column, to_frame


@dataclass(frozen=True)
class TableEncoder:
    """Numbers standardised, categories one-hot, a constant 1 last; `learn` takes the statistics of a training table.

    A category first seen later becomes all zeros.  The same numbers as `datasets.encode.clean_transformer` gives.
    """

    columns: tuple[str, ...]
    numbers: tuple[str, ...]
    means: np.ndarray
    scales: np.ndarray
    categories: dict[str, list[Any]]

    @classmethod
    def learn(cls, table: Any) -> TableEncoder:
        frame = readable(table)
        fitted = clean_transformer(frame).fit(frame)
        steps = {name: (step, list(columns)) for name, step, columns in fitted.transformers_}
        scaler, numbers = steps.get("numbers", (None, []))
        one_hot, textual = steps.get("categories", (None, []))
        return cls(
            tuple(frame.columns),
            tuple(numbers),
            np.zeros(0) if scaler is None else np.asarray(scaler.mean_, np.float64),
            np.ones(0) if scaler is None else np.asarray(scaler.scale_, np.float64),
            {} if one_hot is None else {c: list(v) for c, v in zip(textual, one_hot.categories_, strict=True)},
        )

    @property
    def width(self) -> int:
        return len(self.numbers) + sum(map(len, self.categories.values())) + 1

    @property
    def feature_names(self) -> list[str]:
        shown = [f"{column}={value}" for column, values in self.categories.items() for value in values]
        return [*self.numbers, *shown, "1"]

    def transform(self, table: Any) -> np.ndarray:
        frame = readable(table)
        check_columns(frame, self.columns, "X")
        frame = frame[list(self.columns)]
        check_features(frame)
        for column in self.numbers:
            if not is_number_column(frame[column]):
                raise ValueError(f"X: the column {column!r} held numbers in the training part but holds text here.")
        out = np.ones((len(frame), self.width), np.float32)
        if self.numbers:
            values = frame[list(self.numbers)].to_numpy(np.float64)
            out[:, : len(self.numbers)] = (values - self.means) / self.scales
        place = len(self.numbers)
        for column, known in self.categories.items():
            codes = pd.Index(known).get_indexer(pd.Index(frame[column].astype(object)))
            out[:, place : place + len(known)] = codes[:, None] == np.arange(len(known))
            place += len(known)
        return out


def readable(table: Any) -> pd.DataFrame:
    """A pandas table whose text and category columns hold plain values."""
    frame = to_frame(table)
    plain = {
        column: frame[column].astype(object)
        for column in frame.columns
        if isinstance(frame[column].dtype, pd.CategoricalDtype)
    }
    return frame.assign(**plain) if plain else frame
