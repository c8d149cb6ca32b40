"""Slopes on a log-log scale with bootstrap confidence intervals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Slope(NamedTuple):
    """A fitted exponent and the percentile interval of its bootstrap."""

    value: float
    low: float
    high: float


def fit(horizons: NDArray[Any], values: NDArray[Any]) -> float:
    """Least-squares slope of log values against log horizons."""
    return float(np.polyfit(np.log(horizons), np.log(values), 1)[0])


def bootstrap_slope(
    horizons: NDArray[Any], runs: NDArray[Any], *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> Slope:
    """Slope of the mean over runs [runs, horizons]; whole runs are resampled, since horizons of one run are dependent.

    >>> slope = bootstrap_slope(np.array([10.0, 100.0]), np.array([[1.0, 0.1], [2.0, 0.2]]))
    >>> round(slope.value, 6), round(slope.low, 6), round(slope.high, 6)
    (-1.0, -1.0, -1.0)
    """
    if runs.ndim != 2 or runs.shape[1] != horizons.size or horizons.size < 2:
        raise ValueError(
            f"runs must be [runs, horizons] with at least two horizons, got {runs.shape} and {horizons.size}."
        )
    if not (runs > 0).all():
        raise ValueError("runs must be positive: a logarithm is taken.")
    generator = np.random.default_rng(seed)
    picks = generator.integers(runs.shape[0], size=(resamples, runs.shape[0]))
    logs = np.log(runs[picks].mean(axis=1))
    centred = np.log(horizons) - np.log(horizons).mean()
    slopes = logs @ centred / (centred @ centred)
    low, high = np.quantile(slopes, [(1 - level) / 2, (1 + level) / 2])
    return Slope(fit(horizons, runs.mean(axis=0)), float(low), float(high))
