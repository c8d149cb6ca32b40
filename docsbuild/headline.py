"""The picture of the README and the landing page, from the stored results: `python docsbuild/headline.py`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
PLACES = {
    "FedAvg": (6, 6),
    "FedReg": (-14, 8),
    "FedMinMax": (-62, 8),
    "FCFL": (6, -14),
    "FedFB": (6, -14),
    "FairFed": (6, -14),
}
BARS = {
    "eager PyTorch": "torch eager", "PyTorch, 3 processes": "torch processes", "fedbilevel, two plain losses": "ours autodiff",
    "C, written by hand": "C portable", "fedbilevel, fused kernel": "ours fused",
}  # fmt: skip


def plane(axis: Axes) -> None:
    """Accuracy against the gap, every method with its default."""
    table = pd.read_csv(ROOT / "docs" / "figures" / "fairness-table.csv")
    table = table[(table["case"] == "adult-sex") & (table["distribution"] == "iid") & (table["interval"] == "student")]
    means = table.pivot_table(index="method", columns="metric", values=["mean", "low", "high"])
    for method, row in means.iterrows():
        if method not in PLACES and method != "FedBiOAcc, cells":
            continue
        gap, accuracy = row["mean"]["test_gap"], row["mean"]["test_accuracy"]
        ends = [[gap - row["low"]["test_gap"]], [row["high"]["test_gap"] - gap]]
        ours = method not in PLACES
        axis.errorbar(gap, accuracy, xerr=ends, fmt="^" if ours else "o", color="C3" if ours else "C7", capsize=3)
        place, label = ((-4, -16), "FedBiOAcc") if ours else (PLACES[method], method)
        axis.annotate(label, (gap, accuracy), xytext=place, textcoords="offset points", color="C3" if ours else "0.3")
    # What a model shows that is exactly fair on its training rows.
    floors = pd.read_csv(ROOT / "docs" / "figures" / "fairness-floors.csv").set_index("case")
    axis.axvline(floors.loc["adult-sex", "fair_in_training"], color="0.5", linestyle=":")
    axis.set(
        xlabel="gap in true-positive rates (left is fairer)",
        ylabel="test accuracy",
        xlim=(0, 0.29),
        ylim=(0.8445, 0.8497),
    )
    axis.set_title("Adult by sex: 20 splits, dotted: noise floor", fontsize=10)


def speed(axis: Axes) -> None:
    """Seconds of the same run by everybody."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "speed.json").read_text(encoding="utf-8"))["measured"]
    seconds = {
        label: median(2000 * one["run"] / one["steps"] for one in measured[f"FedBiOAcc Q=10 / {key}"])
        for label, key in BARS.items()
    }
    bars = axis.barh(
        list(seconds), list(seconds.values()), color=["C3" if "fedbilevel" in label else "C7" for label in seconds]
    )
    axis.bar_label(bars, [f" {value:.3g} s" for value in seconds.values()])
    axis.set(xscale="log", xlim=(0.3, 400), xlabel="seconds for 2,000 steps (log scale)")
    axis.invert_yaxis()
    axis.set_title("FedBiOAcc: 3 clients, 34,000 × 107", fontsize=10)


def draw() -> None:
    """One picture for the README; one for each panel for the site, where a phone shows them one below the other."""
    panels = {"plane": plane, "speed": speed}
    for name, wanted in {"headline": list(panels), **{f"headline-{panel}": [panel] for panel in panels}}.items():
        figure, axes = plt.subplots(1, len(wanted), figsize=(4.8 * len(wanted), 3.4), squeeze=False)
        for axis, panel in zip(axes[0], wanted, strict=True):
            panels[panel](axis)
            axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(ROOT / "docs" / "figures" / f"{name}.png", dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    draw()
