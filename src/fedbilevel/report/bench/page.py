"""What the page of a bench has beyond every page: the ranking, the costs to reach a target, and comparable histories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from html import escape

import numpy as np
import pandas as pd

from fedbilevel.report.bench.tables import CELL, RANKED, summarise
from fedbilevel.report.scales import shown
from fedbilevel.runs import Run

GRID = 24
"""Moments a line keeps where its seeds were looked at in different ones."""
NAMES = {
    "quadratic": "Quadratics",
    "ridge": "Ridge penalties",
    "logistic": "Logistic penalties",
    "cleaning": "Data cleaning",
    "representation": "Hyper-representation",
    "imbalance": "Loss tuning",
}
SCORES = {"progress": "progress to the minimum", "explained": "variance explained"}
"""Where the name of a score does not say it."""


def score_title(name: str) -> str:
    return SCORES.get(name, name.replace("_", " "))


def section(run: Run) -> str:
    """The ranking and the table of targets as HTML, for below the main table; nothing for an empty run."""
    if not len(run.rows) or not len(run.history):
        return ""
    found = summarise(run.rows, run.history, run.configuration)
    html = (
        f"<h3>What the scores are</h3>{_score_list(found.scores)}"
        "<p>Ordinary training: the outer variable where it starts and the inner problem solved. <i>Score, solved</i> is that "
        "of the final outer variable with the inner problem solved: what was learned, apart from how far the inner variable "
        "lags.</p>"
        "<h3>Ranking by bytes to a target</h3>"
        f"<p>A target is the score of ordinary training plus {100 * RANKED:.0f} % of the largest gain that any algorithm here "
        "ends with, draw by draw. Algorithms are ranked on every task by how many draws they reach it on, then by bytes; all "
        "are given the same number of exchanges and the same number of step sizes to try.</p>"
    )
    for level, group in found.ranking.groupby("split", sort=False):
        tasks = [name for name in group.columns if name.startswith("rank_") and group[name].notna().any()]
        heads = ["Algorithm", "Mean rank", "Tasks reached", "Bytes against the best"]
        heads += [NAMES.get(name.removeprefix("rank_"), name.removeprefix("rank_")) for name in tasks]
        rows = [
            [
                str(row["method"]),
                f"{row['mean_rank']:.1f}",
                f"{row['reached']}/{row['tasks']}",
                "–" if np.isnan(row["ratio"]) else f"{row['ratio']:.2f}×",
                *("–" if np.isnan(row[name]) else f"{row[name]:g}" for name in tasks),
            ]
            for _, row in group.iterrows()
        ]
        html += listing(f"Ranks, {level} lower level", heads, rows)
    html += "<details><summary>Costs to reach the targets</summary>"
    heads = ["Task", "Lower level", "Algorithm", "Share of the gain", "Reached", "Bytes", "Exchanges", "Gradients"]
    rows = [
        [
            NAMES.get(str(row["dataset"]), str(row["dataset"])),
            str(row["split"]),
            str(row["method"]),
            f"{100 * row['share']:.0f} %",
            f"{row['reached']}/{row['seeds']}",
            _with_interval(row),
            shown(round(row["round"], 1) if row["round"] == row["round"] else np.nan, "count"),
            shown(round(row["gradient_calls"]) if row["round"] == row["round"] else np.nan, "count"),
        ]
        for _, row in found.targets.iterrows()
    ]
    html += listing(
        "Costs to reach the targets", [*heads, "Hessian-vector", "Seconds"], _with_rest(rows, found.targets)
    )
    return (
        html
        + "<p>Geometric means over the draws that reach the target, with 95 % intervals for the bytes where all draws "
        "do.</p></details>"
    )


def _score_list(scores: pd.DataFrame) -> str:
    levels = list(dict.fromkeys(scores["split"]))
    rows = []
    for task, group in scores.groupby("dataset", sort=False):
        untuned = group.groupby("split")["untuned"].mean()
        title = score_title(str(group["score_name"].iloc[0]))
        ordinary = [shown(untuned.get(level, np.nan), "number") for level in levels]
        rows.append([NAMES.get(str(task), str(task)), title, *ordinary])
    heads = ["Task", "Score", *(f"Ordinary training, {level}" for level in levels)]
    return listing("Scores of the tasks, means over draws", heads, rows)


def _with_rest(rows: list[list[str]], targets: pd.DataFrame) -> list[list[str]]:
    more = zip(targets["hvp_calls"], targets["seconds"], strict=True)
    return [
        [*row, shown(round(products) if products == products else np.nan, "count"), shown(seconds, "seconds")]
        for row, (products, seconds) in zip(rows, more, strict=True)
    ]


def _with_interval(row: pd.Series[float]) -> str:
    text = shown(row["bytes"], "bytes")
    if row["bytes_low"] != row["bytes_low"]:
        return text
    return f"{text} [{shown(row['bytes_low'], 'bytes')}, {shown(row['bytes_high'], 'bytes')}]"


def listing(caption: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A plain table in the page's own style."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="listing">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def comparable(run: Run) -> Run:
    """The same run with histories whose seeds share their moments, so that means over seeds can be drawn.

    Where the number of exchanges in a step is drawn at random, every seed was looked at in moments of its own; costs and
    scores are interpolated to common ones.
    """
    if not len(run.history):
        return run
    parts = [_on_common_rounds(group) for _, group in run.history.groupby(CELL, sort=False)]
    return replace(run, history=pd.concat(parts, ignore_index=True))


def _on_common_rounds(group: pd.DataFrame) -> pd.DataFrame:
    paths = [path.sort_values("round") for _, path in group.groupby("seed", sort=False)]
    if all(np.array_equal(path["round"], paths[0]["round"]) for path in paths):
        return group
    last = min(int(path["round"].max()) for path in paths)
    grid = np.unique(np.concatenate([[0], np.geomspace(1, max(last, 1), GRID).round()])).astype(np.int64)
    parts = []
    for path in paths:
        places = path["round"].to_numpy(dtype=float)
        numbers = {
            name: np.interp(grid, places, path[name].to_numpy(dtype=float)).astype(path[name].dtype)
            for name in path.columns
            if path[name].dtype.kind in "fiu" and name not in ("round", "seed")
        }
        words = {name: path[name].iloc[0] for name in path.columns if path[name].dtype.kind not in "fiu"}
        parts.append(pd.DataFrame({**words, **numbers, "seed": path["seed"].iloc[0], "round": grid}))
    return pd.concat(parts, ignore_index=True)[list(group.columns)]
