"""How a run's tables are to be read: which columns tell the cases apart, which the series, what was measured; and the numbers
of a page: means with intervals, which series is best, and whether that is beyond noise.

A series is *beyond noise* from another when the interval of their differences, taken seed by seed, excludes 0.  The best of k
series is compared with the k - 1 others at the level 1 - 0.05 / (k - 1) each, so that all these statements together are
wrong in at most 5 % of tables in which nothing differs.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from fedbilevel.fairness.findings import of_model
from fedbilevel.fairness.intervals import Interval, across_splits
from fedbilevel.fairness.metrics import Counts
from fedbilevel.report.charts import USUAL, Style, styles
from fedbilevel.report.scales import Span
from fedbilevel.runs import Run

METRIC, LEVEL = "equal_opportunity", 0.95
GAPS = {
    "equal_opportunity": ("equal-opportunity gap", "EqOpp"),
    "equalized_odds": ("equalized-odds gap", "EqOdds"),
    "demographic_parity": ("demographic-parity gap", "DemPar"),
    "calibration": ("calibration gap", "Calib"),
    "mean_error": ("gap of mean errors", "error gap"),
    "mean_prediction": ("gap of mean predictions", "prediction gap"),
}
WORDS = {
    "adult": "Adult",
    "credit": "Credit",
    "iid": "I.I.D.",
    "noniid": "non-I.I.D.",
    "local": "local lower level",
    "global": "global lower level",
    "adult-sex": "Adult by sex",
    "adult-race": "Adult by race",
    "credit-status": "German Credit by status",
    "credit-sex": "German Credit by sex",
    "census-sex": "Census by sex",
    "census-race": "Census by race",
    "law-school-race": "Law school by race",
    "law-school-sex": "Law school by sex",
    "compas-race": "COMPAS by race",
    "compas-sex": "COMPAS by sex",
    "heart-sex": "Heart by sex",
    "employment-race": "Employment by race",
    "employment-disability": "Employment by disability",
    "employment-sex": "Employment by sex",
    "natural": "natural sites",
    "fedbio": "FedBiO",
    "fedbioacc": "FedBiOAcc",
}
"""Names of ours as a reader knows them; everything else is shown as it is."""
HEADS = {
    "bench": {"dataset": "Task", "split": "Lower level", "method": "Algorithm"},
    "rates": {"dataset": "Local steps", "split": "Algorithm", "method": "Variant"},
    "fit": {"dataset": "Data", "split": "Sites", "method": "Method"},
    "tune": {"dataset": "Data", "split": "Sites", "method": "Method"},
    "federate": {"dataset": "Data", "split": "Sites", "method": "Method"},
    "audit": {"dataset": "Data", "split": "Site", "method": "Prediction"},
}
"""What a command's columns are called; other commands': as in `_USUAL_HEADS`."""
_USUAL_HEADS = {"dataset": "Dataset", "split": "Distribution", "method": "Method"}


class Metric(NamedTuple):
    """A column of the rows: ``better`` is "higher" or "lower", ``format`` one of `scales.shown`.

    ``place``: where a page shows it: "main", "more" or "cost".
    """

    column: str
    label: str
    short: str
    better: str
    format: str
    place: str = ""


class Block(NamedTuple):
    """One combination of the facets, such as a dataset and its distribution: a block of the table, a panel of a figure."""

    number: int
    key: tuple[str, ...]
    title: str


@cache
def _asset(name: str) -> list[dict[str, str]]:
    text = resources.files("fedbilevel.report").joinpath("assets", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def metrics(gap: str = METRIC, *, costs: bool = False) -> dict[str, Metric]:
    """Every column that can be compared between series, with ``costs`` also what a run sent and computed."""
    long, short = GAPS.get(gap, (f"gap ({gap})", "Gap"))
    known = {row["column"]: Metric(**row) for row in _asset("columns.csv") if costs or row["place"] != "cost"}
    if gap.startswith("mean_"):  # of a number, in its own units
        known |= {name: metric._replace(format="number") for name, metric in known.items() if name.endswith("_gap")}
    return {
        name: metric._replace(label=metric.label.format(gap=long), short=metric.short.format(gap=short))
        for name, metric in known.items()
    }


@cache
def published() -> dict[tuple[str, str, str, str], tuple[float, float]]:
    """Table 1 of the paper as printed: (dataset, split, method, column) -> (mean, standard deviation) of ten runs."""
    return {
        (row["dataset"], row["split"], row["method"], column): (float(row[column]), float(row[f"{column}_sd"]))
        for row in _asset("published.csv") for column in row if f"{column}_sd" in row
    }  # fmt: skip


def printed(dataset: str, split: str, method: str, column: str) -> tuple[float, float] | None:
    """The paper's cell for one of ours; None where the paper has none.

    Our "FedBiO, paper" is the paper's FedBiO; our own formulation "FedBiO, cells" is not in the paper.

    >>> printed("adult", "iid", "FedBiO, paper", "test_gap"), printed("adult", "iid", "FedBiO, cells", "test_gap")
    ((0.0337, 0.0012), None)
    """
    return published().get((dataset, split, method.removesuffix(", paper"), column))


@dataclass(frozen=True)
class Reading:
    """A run, read: what the figures and tables are made from."""

    run: Run
    facets: tuple[str, ...]
    series: str
    blocks: tuple[Block, ...]
    names: tuple[str, ...]
    gap: str

    def word(self, column: str) -> str:
        """A facet's or the series' column as a heading."""
        heads = HEADS.get(self.run.command, _USUAL_HEADS)
        return heads.get(column, column.replace("_", " ").capitalize())

    @cached_property
    def rows(self) -> pd.DataFrame:
        rows = self.run.rows
        keys = [*self.facets, self.series, "seed"]
        if rows.duplicated(keys).any():  # a search that is not finished: as it will choose, on rows set aside
            rows = (
                rows.sort_values("validation_accuracy", ascending=False, kind="stable")
                .drop_duplicates(keys)
                .sort_index()
            )
        if "bytes" not in rows.columns and {"bytes_up", "bytes_down"} <= set(rows.columns):
            rows = rows.assign(bytes=rows["bytes_up"] + rows["bytes_down"])
        return rows

    @cached_property
    def styles(self) -> list[Style]:
        return styles(self.names)

    def shown_at(self, place: str) -> list[Metric]:
        known = metrics(self.gap, costs=True).values()
        return [metric for metric in known if metric.place == place and self.holds(metric.column)]

    @cached_property
    def main(self) -> list[Metric]:
        # A benchmark's score is the accuracy where a task has one.
        scored = self.holds("score")
        return [metric for metric in self.shown_at("main") if metric.column != "test_accuracy" or not scored]

    @cached_property
    def fixed_split(self) -> bool:
        """Whether all seeds of a case saw the same division of the rows."""
        if "split_seed" not in self.rows.columns or not len(self.rows):
            return True
        return bool((self.rows.groupby(list(self.facets))["split_seed"].nunique() <= 1).all())

    @cached_property
    def test_share(self) -> float | None:
        """Known where random splits overlap and the intervals have to be corrected for it."""
        share = self.run.configuration.get("test_share")
        return float(share) if isinstance(share, float) and 0 < share < 1 and not self.fixed_split else None

    def holds(self, column: str) -> bool:
        """Whether a column says anything: run folders fill what a command does not measure with nothing or 0."""
        values = self.rows.get(column)
        if values is None or not pd.api.types.is_numeric_dtype(values):
            return False
        told = values.to_numpy(dtype=float)
        told = told[np.isfinite(told)]
        return bool(told.size and (column in ("train_gap", "test_gap") or (told != 0).any()))

    def each(self, frame: pd.DataFrame) -> Iterator[tuple[Block, int, pd.DataFrame]]:
        """The parts of a table, block by block and series by series, in the order of the page."""
        columns = [*self.facets, self.series]
        if not len(frame) or not set(columns) <= set(frame.columns):
            return
        groups = dict(iter(frame.astype(dict.fromkeys(columns, str)).groupby(columns, sort=False)))
        for block in self.blocks:
            for number, name in enumerate(self.names):
                if (members := groups.get((*block.key, name))) is not None:
                    yield block, number, members

    def keys(self, block: Block, series: int) -> dict[str, str]:
        """What a row of a table belongs to, in words."""
        facets = {self.word(name): WORDS.get(part, part) for name, part in zip(self.facets, block.key, strict=True)}
        return {**facets, self.word(self.series): self.names[series]}

    def published(self, block: Block, name: str, column: str) -> tuple[float, float] | None:
        """The paper's mean and standard deviation for a number of ours, where there is one to be compared with."""
        given: Any = self.run.configuration.get("paper")
        for key in (*block.key, name, column):
            given = given.get(key) if isinstance(given, dict) else None
        if isinstance(given, list) and len(given) == 2:
            return float(given[0]), float(given[1])
        if self.run.command != "table1" or (column.endswith("_gap") and self.gap != METRIC):
            return None
        return printed(*block.key, name, column) if len(block.key) == 2 else None

    def printed_columns(self, columns: list[Metric]) -> set[str]:
        """Those that the paper has figures for."""
        return {
            metric.column for metric in columns
            if any(self.published(block, name, metric.column) for block in self.blocks for name in self.names)
        }  # fmt: skip

    @cached_property
    def useless(self) -> set[tuple[int, int]]:
        """(block, series) of results that get no mark of being best: by what the run found, or (in most of its seeds) because
        the model selects (almost) nobody or everybody."""
        if "usable" in self.rows.columns:
            return {(block.number, number) for block, number, rows in self.each(self.rows) if not rows["usable"].all()}
        told: dict[tuple[int, int], list[bool]] = {}
        test = self.run.groups[self.run.groups["part"] == "test"] if len(self.run.groups) else self.run.groups
        for block, number, groups in self.each(test):
            for _, each in groups.groupby("seed"):
                told.setdefault((block.number, number), []).append(selects_all_or_none(each))
        return {place for place, useless in told.items() if np.mean(useless) > 0.5}

    @cached_property
    def how_sure(self) -> str:
        """What the intervals of this run mean, in one or two sentences."""
        if self.seeds < 2:
            given = {"test_accuracy_low", "test_rmse_low"} & set(self.rows.columns)
            return "Intervals: 95 %, as the run gives them." if given else "One seed only: there are no intervals."
        if self.test_share:
            return "Intervals: 95 % over random splits, corrected for their overlap."
        if self.fixed_split:
            return (
                "Intervals: 95 % (Student) for the mean over seeds on one and the same split of the rows; another split may "
                "differ by more."
            )
        return "Intervals: 95 % (Student) for the mean over splits; splits of one table overlap, so they are a little short."

    @cached_property
    def seeds(self) -> int:
        """The most that any series has in a block."""
        return int(self.rows.groupby([*self.facets, self.series])["seed"].nunique().max()) if len(self.rows) else 0


def reading_of(run: Run, facets: tuple[str, ...] = ("dataset", "split")) -> Reading:
    """Read a run: its blocks are a dataset and its distribution (of a benchmark: a task and its lower level)."""
    rows, series = run.rows, "method"
    keys = list(dict.fromkeys(tuple(map(str, key)) for key in rows[list(facets)].itertuples(index=False)))
    # By first appearance, all distributions of a dataset together.
    first, rest = (list(dict.fromkeys(part)) for part in ([key[0] for key in keys], [key[1:] for key in keys]))
    keys.sort(key=lambda key: (first.index(key[0]), rest.index(key[1:])))
    blocks = tuple(Block(number, key, title_of(key)) for number, key in enumerate(keys))
    usual = [name for group in USUAL for name in group]
    names = list(dict.fromkeys(rows[series].astype(str)))
    ordered = sorted(names, key=lambda name: usual.index(name) if name in usual else len(usual))
    return Reading(run, facets, series, blocks, tuple(ordered), str(run.configuration.get("metric", METRIC)))


def selects_all_or_none(groups: pd.DataFrame) -> bool:
    """Whether a model's decisions, by the rates of its groups, are (almost) all the same; see `fairness.findings`."""
    rows, positives = groups["count"].to_numpy(float), groups["positives"].to_numpy(float)
    true, false = (np.nan_to_num(groups[f"{which}_positive_rate"].to_numpy(float)) for which in ("true", "false"))
    hits, alarms = np.rint(true * positives), np.rint(false * (rows - positives))
    cells = [[rows - positives - alarms, alarms], [positives - hits, hits]]
    found = of_model(Counts(np.moveaxis(np.array(cells), -1, 0).astype(np.int64)), [], METRIC, few=0)
    return any(finding.code.startswith("selects") for finding in found)


def title_of(key: Sequence[str]) -> str:
    """A block's, or part of it, in words."""
    return ", ".join(WORDS.get(part, part) for part in key if part)


class Estimate(NamedTuple):
    """``verdict``: "best" (beyond noise from all others), "lead" (best mean, not beyond noise from all, or of one run),
    "tied" (not beyond noise from the best), "untold" (one run beside several of the best), "" (worse than the best, or
    nothing can be said)."""

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
            mean, low, high, *_ = spread(reading, series)
            if len(series) == 1:  # a fit of one seed brings intervals of its own
                _, low, high = Span.of(rows.iloc[0], metric.column)
            told = Estimate(block, number, metric, len(series), mean, float(series.std()), low, high)
            table[block.number, number, metric.column] = told
    better = {metric.column: metric.better for metric in columns}
    useless = reading.useless
    for (block_number, column), by_series in values.items():
        judged = {number: series for number, series in by_series.items() if (block_number, number) not in useless}
        for number, verdict in verdicts(reading, judged, better[column]).items():
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
    # Seeds that all give one number are one run: nothing is known of its noise.
    clear = values[best].nunique() > 1
    for number, theirs in values.items():
        if number == best:
            continue
        interval = paired(reading, values[best], theirs, level)
        if interval is None or interval.low == interval.high:  # one seed, or no noise at all: nothing to judge by
            clear = False
            if interval is None and len(values[best]) > 1:
                said[number] = "untold"
        elif not interval.excludes_zero:
            clear = False
            said[number] = "tied"
    said[best] = "best" if clear else "lead"
    return said
