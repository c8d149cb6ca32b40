"""Small pieces of the estimator: weights with names, step sizes that suit the features, and checked rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pandas as pd


def named_weights(values: np.ndarray, groups: list[Any], classes: np.ndarray) -> pd.Series[float]:
    """Weights with their groups, or (group, label) cells, as index."""
    if len(values) == len(groups):
        return pd.Series(values, index=pd.Index(groups, name="group"), name="weight")
    cells = pd.MultiIndex.from_product([groups, classes.tolist()], names=["group", "label"])
    return pd.Series(values, index=cells, name="weight")


def smoothness(features: np.ndarray) -> float:
    """Largest curvature of the logistic loss: a quarter of the largest eigenvalue of the features' second moments.

    A sum over rows, so sites could compute it together without showing any row.
    """
    matrix = features.astype(np.float64)
    vector = np.ones(matrix.shape[1])
    size = 1.0
    for _ in range(30):
        vector = matrix.T @ (matrix @ vector) / len(matrix)
        size = float(np.linalg.norm(vector))
        if size == 0:
            return 0.0
        vector /= size
    return size / 4


def row_weights(sample_weight: Any, rows: int) -> np.ndarray | None:
    if sample_weight is None:
        return None
    weights = np.asarray(sample_weight, np.float64)
    if weights.shape != (rows,):
        raise ValueError(f"sample_weight must hold one number for each of the {rows} rows, not shape {weights.shape}.")
    if not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() == 0:
        raise ValueError("sample_weight must be finite, not negative, and not all zero.")
    return np.asarray(weights / weights.mean(), np.float32)


def same_length(name: str, found: int, rows: int) -> None:
    if found != rows:
        raise ValueError(f"{name} has {found} rows but X has {rows}; they must describe the same rows.")


def as_numpy(tree: Any, first: int = 0) -> Any:
    """Leaves as arrays, without those before ``first`` on their leading axis."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[first:], tree)
