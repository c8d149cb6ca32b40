"""The tables of a bench from its rows and history: means with intervals, costs to reach a target, and the ranking.

A target is set for each task, lower level and seed: what ordinary training scores on that draw, plus a share of the *gain*,
the largest improvement over it that any algorithm of the bench ends with there.  A run reaches it at the first moment its
score is there; between two recorded moments costs are interpolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.fairness.intervals import across_splits

CELL = ["dataset", "split", "method"]
SHARES = (0.5, 0.9)
RANKED = 0.9
"""The share of the gain that the ranking asks for."""
COSTS = ("round", "bytes", "gradient_calls", "hvp_calls", "cross_calls", "seconds")


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
    rows, history = (frame.assign(bytes=frame["bytes_up"] + frame["bytes_down"]) for frame in (rows, history))
    scores = score_table(rows)
    targets = target_table(rows, history)
    return BenchResult(rows, history, scores, targets, ranking_table(targets), configuration)


def score_table(rows: pd.DataFrame) -> pd.DataFrame:
    out = []
    for key, group in rows.groupby(CELL, sort=False):
        row: dict[str, Any] = {**dict(zip(CELL, key, strict=True)), "score_name": group["score_name"].iloc[0]}
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
    if numbers.size < 2 or not np.isfinite(numbers).all():
        mean = float(numbers.mean()) if np.isfinite(numbers).all() else np.nan
        return {name: mean, f"{name}_low": np.nan, f"{name}_high": np.nan}
    found = across_splits(numbers)
    return {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}


def gains(rows: pd.DataFrame) -> dict[Any, float]:
    """Per task, lower level and seed the largest improvement over ordinary training; a diverged run has none."""
    improved = rows.assign(gain=(rows["score"] - rows["untuned"]).fillna(0.0))
    return {key: float(gain) for key, gain in improved.groupby(["dataset", "split", "seed"])["gain"].max().items()}


def target_table(rows: pd.DataFrame, history: pd.DataFrame) -> pd.DataFrame:
    largest, out = gains(rows), []
    paths = dict(iter(history.groupby([*CELL, "seed"], sort=False)))
    for key, group in rows.groupby(CELL, sort=False):
        own = {seed: largest[key[0], key[1], seed] for seed in group["seed"]}
        start = dict(zip(group["seed"], group["untuned"], strict=True))
        for share in SHARES:
            crossings = [
                crossing(paths.get((*key, seed), history.iloc[:0]), start[seed] + share * gain)
                for seed, gain in own.items()
                if gain > 0
            ]
            arrived = [moment for moment in crossings if moment is not None]
            row: dict[str, Any] = {**dict(zip(CELL, key, strict=True)), "share": share}
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
    part = (target - scores[last - 1]) / (scores[last] - scores[last - 1])
    ends = path[list(COSTS)].iloc[[last - 1, last]].to_numpy(dtype=float)
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
    asked = targets[(targets["share"] == RANKED) & (targets["gain"] > 0)].copy()
    out = []
    for level, at_level in asked.groupby("split", sort=False):
        places, ratios = {}, {}
        for task, group in at_level.groupby("dataset", sort=False):
            ahead = group.assign(missed=-group["reached"], needs=group["bytes"].fillna(np.inf))
            order = ahead.groupby(["missed", "needs"]).ngroup().rank(method="average")
            places[task] = dict(zip(group["method"], order, strict=True))
            least = ahead.sort_values(["missed", "needs"])["needs"].iloc[0]
            usual = group["reached"] * 2 > group["seeds"]
            ratios[task] = {
                name: need / least
                for name, need, kept in zip(group["method"], ahead["needs"], usual, strict=True)
                if kept
            }
        for method in dict.fromkeys(at_level["method"]):
            own = [ranks[method] for ranks in places.values() if method in ranks]
            factors = [found[method] for found in ratios.values() if method in found]
            out.append(
                {
                    "split": level,
                    "method": method,
                    "mean_rank": float(np.mean(own)),
                    "tasks": len(own),
                    "reached": len(factors),
                    "ratio": float(np.exp(np.mean(np.log(factors)))) if factors else np.nan,
                    **{f"rank_{task}": ranks.get(method, np.nan) for task, ranks in places.items()},
                }
            )
    if not out:  # nobody gained anything
        return pd.DataFrame(columns=["split", "method", "mean_rank", "tasks", "reached", "ratio"])
    return pd.DataFrame(out).sort_values(["split", "mean_rank"], kind="stable", ignore_index=True)
