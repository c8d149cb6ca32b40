"""The figure of a bench for papers: every task's score against the bytes sent, one line an algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel.report.bench.page import NAMES, comparable, score_title
from fedbilevel.report.styles import DASHES, MARKERS, SERIES_LIGHT, styles

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fedbilevel.runs import Run


def bench_figure(run: Run) -> Figure:
    """Rows: lower levels; columns: tasks.  Means over seeds; dotted: ordinary training.  Scores far below it are cut off."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Figures need matplotlib: install it with `pip install "fedbilevel[report]"`.') from error
    history = comparable(run).history
    history = history.assign(megabytes=(history["bytes_up"] + history["bytes_down"]) / 1e6)
    levels, tasks = (list(dict.fromkeys(run.rows[name])) for name in ("split", "dataset"))
    names = list(dict.fromkeys(run.rows["method"]))
    looks = dict(zip(names, styles(names), strict=True))
    figure = Figure(figsize=(2.6 * len(tasks), 2.5 * len(levels) + 0.8), layout="constrained")
    panels = figure.subplots(len(levels), len(tasks), squeeze=False)
    handles: dict[str, Any] = {}
    for axes, (level, task) in zip(panels.flat, ((level, task) for level in levels for task in tasks), strict=True):
        own = run.rows[(run.rows["split"] == level) & (run.rows["dataset"] == task)]
        axes.set_title(f"{NAMES.get(task, task)}, {level}", fontsize=9)
        if not len(own):
            axes.set_axis_off()
            continue
        untuned = own.groupby("method")["untuned"].mean().iloc[0]
        axes.axhline(untuned, color="0.5", linestyle=":", linewidth=1)
        here = history[(history["split"] == level) & (history["dataset"] == task) & (history["round"] > 0)]
        for name, group in here.groupby("method", sort=False):
            mean = group.groupby("round")[["megabytes", "score"]].mean()
            look = looks[str(name)]
            dash = DASHES[look.dash]
            style = (0, tuple(map(float, dash.split()))) if dash else "-"
            (line,) = axes.plot(
                mean["megabytes"], mean["score"], color=SERIES_LIGHT[look.slot], linestyle=style, linewidth=1.2,
                marker=MARKERS[look.marker], markersize=3.5, markevery=4,
            )  # fmt: skip
            handles.setdefault(str(name), line)
        axes.set_xscale("log")
        _show_the_gain(axes, here, untuned)
        axes.set_ylabel(score_title(str(own["score_name"].iloc[0])), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(True, which="major", color="0.9", linewidth=0.7)
    for axes in panels[-1]:
        axes.set_xlabel("MB, up and down, all clients", fontsize=8)
    ordered = [name for name in names if name in handles]
    shown = [handles[name] for name in ordered]
    figure.legend(handles=shown, labels=ordered, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    return figure


def _show_the_gain(axes: Any, here: pd.DataFrame, untuned: float) -> None:
    """Limits from a little below ordinary training to the best score, and from the first bytes at which a mean is there."""
    means = here.groupby(["method", "round"])[["megabytes", "score"]].mean()
    top = float(np.nanmax(means["score"]))
    gain = abs(top - untuned)
    bottom = min(untuned, top) - 0.25 * gain
    axes.set_ylim(bottom, top + 0.08 * gain)
    seen = means.loc[means["score"] >= bottom, "megabytes"]
    axes.set_xlim(0.8 * float(seen.min()), 1.25 * float(seen.max()))
