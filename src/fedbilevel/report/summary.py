"""Numbers of a page: means with intervals, which series is best, and whether that is beyond noise.

A series is *beyond noise* from another when the interval of their differences, taken seed by seed, excludes 0.  The best of k
series is compared with the k - 1 others at the level 1 - 0.05 / (k - 1) each, so that all these statements together are
wrong in at most 5 % of tables in which nothing differs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from fedbilevel.fairness.intervals import Interval, across_splits
from fedbilevel.report.reading import Block, Metric, Reading

LEVEL = 0.95


class Estimate(NamedTuple):
    """``verdict``: "best" (beyond noise from all others), "lead" (best mean, not beyond noise from all), "tied" (not
    beyond noise from the best), "" (worse than the best, or nothing can be said)."""

    block: Block
    series: int
    metric: Metric
    seeds: int
    mean: float
    sd: float
    low: float
    high: float
    verdict: str = ""


def spread(reading: Reading, values: Any, level: float = LEVEL) -> Interval:
    """Mean and interval of one number per seed; without a second number the interval is missing."""
    numbers = np.asarray(values, dtype=float)
    numbers = numbers[np.isfinite(numbers)]
    if numbers.size < 2:
        mean = float(numbers[0]) if numbers.size else np.nan
        return Interval(mean, np.nan, np.nan, level, "none", int(numbers.size))
    share = reading.test_share
    return across_splits(numbers, level=level, method="corrected" if share else "student", test_share=share)


def bands(reading: Reading, values: pd.Series[Any], places: pd.Series[Any]) -> pd.DataFrame:
    """`spread` at every place of a path at once: ``mean``, ``low``, ``high`` by place."""
    from scipy.special import stdtrit

    told = values.groupby(places.to_numpy()).agg(["mean", "std", "count"])
    count = told["count"].to_numpy(dtype=float)
    share = 1 / count + (reading.test_share / (1 - reading.test_share) if reading.test_share else 0.0)
    half = stdtrit(np.maximum(count - 1, 1), (1 + LEVEL) / 2) * told["std"].to_numpy(dtype=float) * np.sqrt(share)
    mean = told["mean"].to_numpy(dtype=float)
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half}, index=told.index.rename("round"))


def by_seed(frame: pd.DataFrame, column: str) -> pd.Series[Any]:
    """A column's finite numbers, by seed."""
    values = pd.Series(frame[column].to_numpy(dtype=float), index=frame["seed"].to_numpy())
    values = values[np.isfinite(values.to_numpy())]
    return cast("pd.Series[Any]", values if values.index.is_unique else values.groupby(level=0).mean())


def paired(reading: Reading, ours: pd.Series[Any], theirs: pd.Series[Any], level: float = LEVEL) -> Interval | None:
    """The mean difference over common seeds; None where fewer than two are common."""
    common = ours.index.intersection(theirs.index)
    if len(common) < 2:
        return None
    return spread(reading, (ours[common] - theirs[common]).to_numpy(), level)


class Estimates(dict[tuple[int, int, str], Estimate]):
    """The numbers of a table by (block, series, column)."""

    def at(self, block: Block, series: int, metric: Metric) -> Estimate | None:
        return self.get((block.number, series, metric.column))

    def has(self, block: Block, series: int) -> bool:
        return any(key[:2] == (block.number, series) for key in self)


def estimates(reading: Reading, columns: list[Metric]) -> Estimates:
    """Every number of a table, the best ones judged."""
    values: dict[tuple[int, str], dict[int, pd.Series[Any]]] = {}
    table = Estimates()
    for block, number, rows in reading.each(reading.rows):
        for metric in columns:
            series = by_seed(rows, metric.column)
            if not len(series):
                continue
            values.setdefault((block.number, metric.column), {})[number] = series
            interval = spread(reading, series.to_numpy())
            low, high = interval.low, interval.high
            given = [f"{metric.column}_low", f"{metric.column}_high"]
            if len(series) == 1 and set(given) <= set(rows.columns):  # a fit of one seed brings intervals of its own
                low, high = (float(rows[column].iloc[0]) for column in given)
            sd = float(series.std(ddof=1)) if len(series) > 1 else np.nan
            told = Estimate(block, number, metric, len(series), interval.estimate, sd, low, high)
            table[block.number, number, metric.column] = told
    better = {metric.column: metric.better for metric in columns}
    for (block_number, column), by_series in values.items():
        for number, verdict in verdicts(reading, by_series, better[column]).items():
            place = (block_number, number, column)
            table[place] = table[place]._replace(verdict=verdict)
    return table


def verdicts(reading: Reading, values: dict[int, pd.Series[Any]], better: str) -> dict[int, str]:
    """Which series is best, and from which others that is beyond noise; see `Estimate`."""
    if len(values) < 2:
        return {}
    sign = 1 if better == "higher" else -1
    best = max(values, key=lambda number: sign * float(values[number].mean()))
    level = 1 - (1 - LEVEL) / (len(values) - 1)
    said: dict[int, str] = {}
    clear = True
    for number, theirs in values.items():
        if number == best:
            continue
        interval = paired(reading, values[best], theirs, level)
        if interval is None or interval.low == interval.high:  # one seed, or no noise at all: nothing to judge by
            clear = False
        elif not interval.excludes_zero:
            clear = False
            said[number] = "tied"
    said[best] = "best" if clear else "lead"
    return said
