"""What a bench says: its tables from its rows and history, and what its page has beyond every page.

A target is set for each task, lower level and seed: what ordinary training scores on that draw, plus a share of the *gain*,
the largest improvement over it that any algorithm of the bench ends with there.  A run reaches it at the first moment its
score is there; between two recorded moments costs are interpolated, to whole exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.fairness.intervals import across_splits
from fedbilevel.report.charts import Columns, Listing
from fedbilevel.report.scales import Span, shown
from fedbilevel.runs import Run

PLACE = ["dataset", "split", "method"]
HALF, RANKED = 0.5, 0.9
"""Shares of the gain: half of it is reported too; the ranking asks for the second.  Some tasks ask for another one, and are
not ranked."""
COSTS = ("round", "bytes", "gradient_calls", "hvp_calls", "cross_calls", "seconds")

NAMES = {
    "quadratic": "Quadratics",
    "precise": "Quadratics to .999",
    "precise-20": "Quadratics to .999, I = 20",
    "ridge": "Ridge penalties",
    "logistic": "Logistic penalties",
    "cleaning": "Data cleaning",
    "representation": "Hyper-representation",
    "imbalance": "Loss tuning",
    "mnist-representation": "MNIST, hyper-representation",
    "mnist-representation-shards": "MNIST, hyper-representation, shards",
    "mnist-imbalance": "MNIST, loss tuning",
    "mnist-imbalance-shards": "MNIST, loss tuning, shards",
    "mnist-cleaning": "MNIST, data cleaning",
    "mnist-cleaning-shards": "MNIST, data cleaning, shards",
}
SCORES = {"progress": "progress to the minimum", "explained": "variance explained"}
"""Where the name of a score does not say it."""
GRID = 24
"""Moments a line keeps where its seeds were looked at in different ones."""


@dataclass(frozen=True)
class BenchResult:
    """``rows``: one a run; ``history``: one a recorded moment.

    ``scores``: per task, lower level and algorithm the score, the score with the inner problem solved, the objective and
    the costs at the end, and the chosen step sizes.  ``targets``: the costs to reach each share of the gain.  ``ranking``:
    per lower level the algorithms by their mean rank over the tasks in bytes to the target.
    """

    rows: pd.DataFrame
    history: pd.DataFrame
    scores: pd.DataFrame
    targets: pd.DataFrame
    ranking: pd.DataFrame
    configuration: dict[str, Any]


def summarise(rows: pd.DataFrame, history: pd.DataFrame, configuration: dict[str, Any]) -> BenchResult:
    """All tables; nothing is run."""
    rows, history = map(with_bytes, (rows, history))
    scores = score_table(rows)
    targets = target_table(rows, history)
    return BenchResult(rows, history, scores, targets, ranking_table(targets), configuration)


def together(each: Sequence[Run]) -> BenchResult:
    """What several runs say that have no task with the same lower level in common, such as one for each lower level."""
    rows, history = (pd.concat([getattr(run, name) for run in each], ignore_index=True) for name in ("rows", "history"))
    return summarise(rows, history, each[0].configuration)


def with_bytes(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(bytes=frame["bytes_up"] + frame["bytes_down"])


def score_table(rows: pd.DataFrame) -> pd.DataFrame:
    out = []
    for key, group in rows.groupby(PLACE, sort=False):
        row: dict[str, Any] = {**dict(zip(PLACE, key, strict=True)), "score_name": group["score_name"].iloc[0]}
        row |= {"seeds": len(group), "diverged": int(group["diverged"].sum()), "untuned": group["untuned"].mean()}
        for name in ("score", "solved", "objective"):
            row |= _interval(name, group[name])
        row |= {name: group[name].mean() for name in ("rounds", "bytes", *COSTS[2:])}
        row |= {name: group[name].iloc[0] for name in ("inner_factor", "outer_factor", "tried", "diverged_in_tuning")}
        out.append(row)
    return pd.DataFrame(out)


def _interval(name: str, values: pd.Series[Any]) -> dict[str, float]:
    """Mean and 95 % interval (Student) over the seeds; missing where a run diverged or there is one seed only."""
    numbers = values.to_numpy(dtype=float)
    if not np.isfinite(numbers).all():
        return Span(np.nan).columns(name)
    return Span(*(across_splits(numbers)[:3] if numbers.size > 1 else numbers)).columns(name)


def gains(rows: pd.DataFrame) -> dict[Any, float]:
    """Per task, lower level and seed the largest improvement over ordinary training; a diverged run has none."""
    improved = rows.assign(gain=(rows["score"] - rows["untuned"]).fillna(0.0))
    return {key: float(gain) for key, gain in improved.groupby(["dataset", "split", "seed"])["gain"].max().items()}


def target_table(rows: pd.DataFrame, history: pd.DataFrame) -> pd.DataFrame:
    largest, out = gains(rows), []
    paths = dict(iter(history.groupby([*PLACE, "seed"], sort=False)))
    for key, group in rows.groupby(PLACE, sort=False):
        own = {seed: largest[key[0], key[1], seed] for seed in group["seed"]}
        start = dict(zip(group["seed"], group["untuned"], strict=True))
        for share in (HALF, group["share"].iloc[0] if "share" in group else RANKED):
            crossings = [
                crossing(paths.get((*key, seed), history.iloc[:0]), start[seed] + share * gain)
                for seed, gain in own.items()
                if gain > 0
            ]
            arrived = [moment for moment in crossings if moment is not None]
            row: dict[str, Any] = {**dict(zip(PLACE, key, strict=True)), "share": share}
            row |= {"gain": float(np.mean(list(own.values()))), "seeds": len(crossings), "reached": len(arrived)}
            row |= _typical(arrived, everybody=len(arrived) == len(crossings))
            out.append(row)
    return pd.DataFrame(out)


def crossing(path: pd.DataFrame, target: float) -> dict[str, float] | None:
    """The costs at which a run's score first reaches ``target``; None if it never does.

    >>> path = pd.DataFrame({"score": [0.0, 0.4, 0.8], **{name: [0, 10, 20] for name in COSTS}})
    >>> crossing(path, 0.6)["bytes"]
    15.0
    """
    scores = path["score"].to_numpy(dtype=float)
    there = np.flatnonzero(scores >= target)
    if not there.size:
        return None
    last = int(there[0])
    if last == 0:
        return {name: float(path[name].iloc[0]) for name in COSTS}
    ends = path[list(COSTS)].iloc[[last - 1, last]].to_numpy(dtype=float)
    exchanges = ends[1, 0] - ends[0, 0]
    part = np.ceil((target - scores[last - 1]) / (scores[last] - scores[last - 1]) * exchanges) / exchanges
    return dict(zip(COSTS, (ends[0] + part * (ends[1] - ends[0])).tolist(), strict=True))


def _typical(moments: list[dict[str, float]], everybody: bool) -> dict[str, float]:
    """Geometric means over the seeds that arrived and, if that is ``everybody``, a 95 % interval for the bytes.

    An interval over those who happened to arrive would say nothing about the next seed.
    """
    if not moments:
        return {**dict.fromkeys(COSTS, np.nan), "bytes_low": np.nan, "bytes_high": np.nan}
    logs = {name: np.log(np.maximum([moment[name] for moment in moments], 1e-9)) for name in COSTS}
    row = {name: float(np.exp(values.mean())) for name, values in logs.items()}
    if len(moments) < 2 or not everybody:
        return {**row, "bytes_low": np.nan, "bytes_high": np.nan}
    found = across_splits(logs["bytes"])
    return {**row, "bytes_low": float(np.exp(found.low)), "bytes_high": float(np.exp(found.high))}


def ranking_table(targets: pd.DataFrame) -> pd.DataFrame:
    """Algorithms by their mean rank in bytes to the target.

    On each task those that reach it on more seeds come first, among equals those that need fewer bytes.  ``ratio`` is the
    geometric mean of an algorithm's bytes against the first one's, over the tasks it reaches on most seeds.
    """
    asked = targets[(targets["share"] == RANKED) & (targets["gain"] > 0)]
    if not len(asked):  # nobody gained anything
        return pd.DataFrame(columns=["split", "method", "mean_rank", "tasks", "reached", "ratio"])
    asked = asked.assign(missed=-asked["reached"], needs=asked["bytes"].fillna(np.inf))
    order, task = asked.groupby(["split", "dataset", "missed", "needs"]).ngroup(), [asked["split"], asked["dataset"]]
    least = asked.assign(order=order).sort_values("order").groupby(["split", "dataset"])["needs"].transform("first")
    usual = asked["reached"] * 2 > asked["seeds"]
    asked = asked.assign(rank=order.groupby(task).rank(), log=np.log((asked["needs"] / least)[usual]))
    by = asked.groupby(["split", "method"], sort=False)
    table = by.agg(mean_rank=("rank", "mean"), tasks=("rank", "size"), reached=("log", "count"), ratio=("log", "mean"))
    ranks = asked.pivot_table("rank", ["split", "method"], "dataset")[list(dict.fromkeys(asked["dataset"]))]
    table = table.assign(ratio=np.exp(table["ratio"])).join(ranks.add_prefix("rank_")).reset_index()
    return table.sort_values(["split", "mean_rank"], kind="stable", ignore_index=True)


def extra(run: Run) -> dict[str, Any] | None:
    """What stands below the main table of a bench's page: what the scores are, the ranking, and the costs to reach the
    targets; nothing for a run without histories."""
    if not len(run.history):
        return None
    told = summarise(run.rows, run.history, run.configuration)
    titled = lambda row: NAMES.get(row["dataset"], row["dataset"])  # noqa: E731
    targets: Columns = {
        "Task": titled,
        "Lower level": itemgetter("split"),
        "Algorithm": itemgetter("method"),
        "Share of the gain": lambda row: f"{100 * row['share']:.0f} %",
        "Reached": lambda row: f"{row['reached']}/{row['seeds']}",
        "Bytes": lambda row: Span.of(row, "bytes").text("bytes"),
        "Exchanges": lambda row: _count(row["round"], 1),
        "Gradients": lambda row: _count(row["gradient_calls"]),
        "Hessian-vector": lambda row: _count(row["hvp_calls"]),
        "Seconds": lambda row: shown(row["seconds"], "seconds"),
    }
    scores = told.scores.pivot_table("untuned", ["dataset", "score_name"], "split", sort=False)
    ordinary: Columns = {
        "Task": titled, "Score": lambda row: SCORES.get(row["score_name"], row["score_name"].replace("_", " ")),
        **{f"Ordinary training, {level}": _at(level, lambda value: shown(value, "number")) for level in scores.columns},
    }  # fmt: skip
    rankings = [
        Listing.of(f"Ranks, {level} lower level", group, {
            "Algorithm": itemgetter("method"),
            "Mean rank": lambda row: f"{row['mean_rank']:.1f}",
            "Tasks reached": lambda row: f"{row['reached']}/{row['tasks']}",
            "Bytes against the best": _at("ratio", "{:.2f}×".format),
            **{NAMES.get(name[5:], name[5:]): _at(name, "{:g}".format) for name in group.columns
               if name.startswith("rank_") and group[name].notna().any()},
        })
        for level, group in told.ranking.groupby("split", sort=False)
    ]  # fmt: skip
    return {
        "scores": Listing.of("Scores of the tasks, means over draws", scores.reset_index(), ordinary),
        "rankings": rankings,
        "targets": Listing.of("Costs to reach the targets", told.targets, targets),
        "share": round(100 * RANKED),
    }


def _at(column: str, text: Callable[[float], str]) -> Callable[[dict[Any, Any]], str]:
    return lambda row: "–" if np.isnan(row[column]) else text(row[column])


def _count(value: float, decimals: int = 0) -> str:
    return shown(round(value, decimals) if np.isfinite(value) else np.nan, "count")


def comparable(run: Run) -> Run:
    """The same run with histories whose seeds share their moments, so that means over seeds can be drawn.

    Where the number of exchanges in a step is drawn at random, every seed was looked at in moments of its own; costs and
    scores are interpolated to common ones.
    """
    if not len(run.history):
        return run
    parts = [_on_common_rounds(group) for _, group in run.history.groupby(PLACE, sort=False)]
    return replace(run, history=pd.concat(parts, ignore_index=True))


def _on_common_rounds(group: pd.DataFrame) -> pd.DataFrame:
    paths = [path.sort_values("round") for _, path in group.groupby("seed", sort=False)]
    if all(np.array_equal(path["round"], paths[0]["round"]) for path in paths):
        return group
    last = min(int(path["round"].max()) for path in paths)
    grid = np.unique(np.concatenate([[0], np.geomspace(1, max(last, 1), GRID).round()])).astype(np.int64)
    parts = []
    for path in paths:
        even = path.iloc[np.zeros(len(grid), int)].reset_index(drop=True).assign(round=grid)
        for name in path.select_dtypes("number").columns.difference(["round", "seed"]):
            even[name] = np.interp(grid, path["round"], path[name]).astype(path[name].dtype)
        parts.append(even)
    return pd.concat(parts, ignore_index=True)
