"""The files behind docs/bench.md, from a run folder of the bench: `python -m docsbuild.bench runs/bench`."""

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
from fedbilevel.report.bench import NAMES, SCORES, summarise

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


def kept(folder: Path, place: Path) -> None:
    """Scores, targets, ranking and the picture of the curves."""
    run = runs.read(folder)
    told = summarise(run.rows, run.history, run.configuration)
    for name in ("scores", "targets", "ranking"):
        getattr(told, name).to_csv(place / f"bench-{name}.csv", index=False)
    draw(told.rows, told.history, place / "bench-curves.png")


def draw(rows: pd.DataFrame, history: pd.DataFrame, file: Path) -> None:
    figure, axes = plt.subplots(2, len(TASKS), figsize=(14.5, 6.4))
    for line, level in zip(axes, ("local", "global"), strict=True):
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
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(file, dpi=100)
    plt.close(figure)


def curves(axis: Axes, rows: pd.DataFrame, history: pd.DataFrame) -> None:
    """Mean scores against mean bytes, moment by moment; cut off a little below ordinary training."""
    level, start, ends = rows["split"].iloc[0], rows["untuned"].mean(), []
    for colour, *names in DRAWN.values():
        name = names[list(reversed(LEVELS)).index(level)]
        for method, style in ((name, "--"), (f"{name}, auto", "-")):
            path = history[history["method"] == method].groupby("iteration")[["bytes", "score"]].mean()
            path = path[path["bytes"] > 0]
            if len(path):
                axis.plot(path["bytes"] / 1e6, path["score"], color=colour, linestyle=style, linewidth=1.3)
                ends.append(path["score"].max())
    span = max(ends) - start
    axis.axhline(start, color="0.4", linestyle=":")
    name = rows["score_name"].iloc[0]
    axis.set(xscale="log", ylim=(start - 0.15 * span, start + 1.08 * span))
    axis.set_ylabel(SCORES.get(name, name.replace("_", " ")))
    axis.grid(alpha=0.3)
    assert np.isfinite(axis.get_ylim()).all()


if __name__ == "__main__":
    kept(Path(sys.argv[1]), ROOT / "docs" / "figures")
