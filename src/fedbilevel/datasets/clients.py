"""The last step before training: each client's rows as the arrays the losses read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.datasets.partition import ValidationSplit
from fedbilevel.tables.columns import check_lengths

Batch = dict[str, NDArray[Any]]


def client_batches(
    features: NDArray[Any], labels: Any, groups: NDArray[np.integer[Any]], split: ValidationSplit
) -> list[tuple[Batch, Batch]]:
    """Per client its training and validation arrays, as `ClientData.from_clients` takes them.

    Each is a dict: "features" float32 [rows, columns], "labels" float32 [rows], "groups" int32 [rows].

    Args:
        features: the encoded matrix of all rows.
        labels: 0 or 1 for every row.
        groups: the group code of every row, 0 to K-1; see `tables.encode_groups`.
        split: who holds which rows; see `partition.balanced_validation`.
    """
    matrix = np.asarray(features, dtype=np.float32)
    if matrix.ndim != 2:
        raise ValueError(f"features must be a matrix [rows, columns], but its shape is {matrix.shape}.")
    target = np.asarray(labels, dtype=np.float32)
    codes = np.asarray(groups)
    if codes.dtype.kind not in "iu":
        raise TypeError(f"groups must be whole-number codes, not {codes.dtype}; make them with tables.encode_groups.")
    check_lengths(features=matrix, labels=target, groups=codes)
    if not np.isfinite(matrix).all():
        raise ValueError("features holds values that are not finite; fill missing values in before encoding.")
    if not np.isin(target, (0.0, 1.0)).all():
        raise ValueError("labels must hold 0 and 1 only.")

    def rows(index: NDArray[np.int64]) -> Batch:
        return {"features": matrix[index], "labels": target[index], "groups": codes[index].astype(np.int32)}

    return [(rows(train), rows(val)) for train, val in zip(split.train, split.validation, strict=True)]
