"""The files behind docs/bench.md, from run folders of the bench, one or one for each kind of lower level:
`python -m docsbuild.bench runs/bench-local runs/bench-global`.

Lines of a lower level that no run is about stay as they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from docsbuild.results import ROOT
from docsbuild.studies import LEVELS, TASKS
from fedbilevel import runs
from fedbilevel.report.bench import NAMES, SCORES, together

DRAWN = {
    "FedBiO": ("C0", "FedBiO", "FedBiO, global"),
    "FedBiOAcc": ("C1", 'FedBiOAcc, send="outer"', "FedBiOAcc, global"),
    "SimFBO": ("C2", "", "SimFBO"),
    "FedMSA": ("C3", "", "FedMSA"),
    "FedNest": ("C4", "", "FedNest"),
    "F2SA": ("C5", "F2SA", "F2SA, global"),
    "BOME": ("C6", "BOME", "BOME, global"),
}
"""Colour, and the method's names with local and global lower levels: a few of each kind, so that lines can be told apart."""


def kept(folders: list[Path], place: Path) -> None:
    """Scores, targets, ranking and the picture of the curves."""
    told = together([*map(runs.read, folders)])
    for name in ("scores", "targets", "ranking"):
        file, new = place / f"bench-{name}.csv", getattr(told, name)
        before = pd.read_csv(file)
        before = before[~before["split"].isin(new["split"])]
        pd.concat([new, before], ignore_index=True).to_csv(file, index=False)
    draw(told.rows, told.history, place / "bench-curves.png")


def draw(rows: pd.DataFrame, history: pd.DataFrame, file: Path) -> None:
    levels = [level for level in ("local", "global") if level in set(rows["split"])]
    figure, axes = plt.subplots(len(levels), len(TASKS), figsize=(14.5, 3.2 * len(levels)), squeeze=False)
    for line, level in zip(axes, levels, strict=True):
        for axis, task in zip(line, TASKS, strict=True):
            curves(axis, *(part[(part["dataset"] == task) & (part["split"] == level)] for part in (rows, history)))
            axis.set_title(f"{NAMES[task]}, {level}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("MB, up and down, all clients")
    shown = [Line2D([], [], color=colour, label=name) for name, (colour, *_) in DRAWN.items()]
    kinds = [
        Line2D([], [], color="0.3", linestyle=style, label=label) for style, label in (("-", "auto"), ("--", "tuned"))
    ]
    figure.legend(handles=[*shown, *kinds], loc="lower center", ncols=len(DRAWN) + 2, frameon=False)
    figure.tight_layout(rect=(0, 0.1 / len(levels), 1, 1))
    figure.savefig(file, dpi=100)
    plt.close(figure)


def curves(axis: Axes, rows: pd.DataFrame, history: pd.DataFrame) -> None:
    """Mean scores against bytes, cut off a little below ordinary training."""
    level, start, ends = rows["split"].iloc[0], rows["untuned"].mean(), []
    for colour, *names in DRAWN.values():
        name = names[list(reversed(LEVELS)).index(level)]
        for method, style in ((name, "--"), (f"{name}, auto", "-")):
            paths = [path[path["bytes"] > 0] for _, path in history[history["method"] == method].groupby("seed")]
            if paths:
                sent, scores = middle(paths)
                axis.plot(sent / 1e6, scores, color=colour, linestyle=style, linewidth=1.3)
                ends.append(scores.max())
    span = max(ends) - start
    axis.axhline(start, color="0.4", linestyle=":")
    name = rows["score_name"].iloc[0]
    axis.set(xscale="log", ylim=(start - 0.15 * span, start + 1.08 * span))
    axis.set_ylabel(SCORES.get(name, name.replace("_", " ")))
    axis.grid(alpha=0.3)


def middle(paths: list[pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """The mean over draws, which were looked at in different moments: between two of them a score is a straight line over the
    logarithm of the bytes."""
    logs = [np.log(path["bytes"].to_numpy(dtype=float)) for path in paths]
    grid = np.linspace(max(one[0] for one in logs), min(one[-1] for one in logs), 60)
    scores = [np.interp(grid, one, path["score"]) for one, path in zip(logs, paths, strict=True)]
    return np.exp(grid), np.mean(scores, axis=0)


if __name__ == "__main__":
    kept([*map(Path, sys.argv[1:])], ROOT / "docs" / "figures")
