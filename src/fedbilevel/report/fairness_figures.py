"""Figures of the fairness experiment, from its tables.  Needs matplotlib, the ``report`` extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedbilevel.studies.fairness.design import FairnessResult

_COLOURS = {  # told apart by colour-blind readers
    "FedAvg": "#000000",
    "FedReg": "#e69f00",
    "FedMinMax": "#56b4e9",
    "FCFL": "#cc79a7",
    "FedFB": "#0072b2",
    "FairFed": "#c8b900",
    "FedBiO, paper": "#999999",
    "FedBiOAcc, paper": "#666666",
    "FedBiO, cells": "#009e73",
    "FedBiOAcc, cells": "#d55e00",
}
_MARKS = dict(zip(_COLOURS, "*svD<>PXo^", strict=True))
_TITLES = {"adult-sex": "Adult by sex", "adult-race": "Adult by race", "credit-status": "German Credit by status"}
_KINDS = {"iid": "I.I.D.", "noniid": "non-I.I.D."}


def _figure(width: float, height: float, rows: int, columns: int) -> tuple[Figure, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Figures need matplotlib: install it with `pip install "fedbilevel[report]"`.') from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def plane(fronts: pd.DataFrame, floors: pd.DataFrame | None = None) -> Figure:
    """Accuracy against gap on test rows: one front per method, a point per setting with its 95 % intervals.

    A row of panels per case, a column per distribution; dotted: the gap of a model whose training rates are equal (``floors``).
    """
    cases, kinds = (list(dict.fromkeys(fronts[name])) for name in ("case", "distribution"))
    figure, axes = _figure(5.2 * len(kinds), 4.4 * len(cases), len(cases), len(kinds))
    known = {} if floors is None or not len(floors) else floors.set_index("case")["fair_in_training"].to_dict()
    for row, case in enumerate(cases):
        for column, kind in enumerate(kinds):
            panel = axes[row][column]
            group = fronts[(fronts["case"] == case) & (fronts["distribution"] == kind)]
            for method, own in group.groupby("method", sort=False):
                _front(panel, str(method), own)
            if case in known:
                panel.axvline(known[case], color="0.4", linewidth=0.9, linestyle=":")
            if len(group):
                _cut(panel, group)
            panel.set_title(f"{_TITLES.get(str(case), case)}, {_KINDS.get(str(kind), kind)}", fontsize=11)
            panel.set_xlabel("equal-opportunity gap, test rows (left is fairer)")
            panel.set_ylabel("accuracy, test rows")
            panel.grid(True, color="0.9", linewidth=0.8)
    axes[0][-1].legend(fontsize=7, loc="lower right")
    return figure


def _cut(panel: Axes, group: pd.DataFrame) -> None:
    """Settings that lose far more than the others would flatten them: they are named instead."""
    best = float(group["test_accuracy"].max())
    high = group["test_accuracy_high"] if "test_accuracy_high" in group else group["test_accuracy"]
    usual = float((high - group["test_accuracy"]).median())
    reach = 0.0025 if np.isnan(usual) else max(0.0025, 1.1 * usual)
    lowest = best - 0.0125 - reach
    below = group[group["test_accuracy"] < lowest]
    if len(below):
        panel.set_ylim(lowest, best + reach)
        lines = [
            f"{row['method']}, {row['setting']}: {row['test_accuracy']:.3f}, gap {row['test_gap']:.3f}"
            for _, row in below.iterrows()
        ]
        panel.text(0.02, 0.02, "not shown:\n" + "\n".join(lines), transform=panel.transAxes, fontsize=7, color="0.3")


def _front(panel: Axes, method: str, own: pd.DataFrame) -> None:
    own = own.sort_values("test_gap")
    across, up = own["test_gap"].to_numpy(float), own["test_accuracy"].to_numpy(float)
    errors: dict[str, Any] = {}
    if {"test_gap_low", "test_accuracy_low"} <= set(own.columns):
        errors = {
            "xerr": np.nan_to_num(own["test_gap_high"].to_numpy(float) - across),
            "yerr": np.nan_to_num(own["test_accuracy_high"].to_numpy(float) - up),
        }
    panel.errorbar(
        across, up, **errors, color=_COLOURS.get(method, "0.5"), marker=_MARKS.get(method, "o"), markersize=6,
        linewidth=1.2, elinewidth=0.6, capsize=0, label=method,
    )  # fmt: skip


def differences(table: pd.DataFrame) -> Figure:
    """Paired differences to FedAvg of every method with its default: gap and accuracy, with 95 % intervals."""
    cases = list(dict.fromkeys(zip(table["case"], table["distribution"], strict=True)))
    figure, axes = _figure(2.6 + 2.1 * len(cases), 5.4, 2, len(cases))
    student = table[(table["interval"] == "student") & table["difference"].notna()]
    for row, (metric, label) in enumerate((("test_gap", "gap"), ("test_accuracy", "accuracy"))):
        for column, (case, kind) in enumerate(cases):
            here = (student["case"] == case) & (student["distribution"] == kind) & (student["metric"] == metric)
            own = student[here]
            panel = axes[row][column]
            for place, (_, item) in enumerate(own[::-1].iterrows()):
                reach = item["difference_high"] - item["difference"]
                panel.errorbar(
                    item["difference"], place, xerr=reach, color=_COLOURS.get(item["method"], "0.5"), marker="o", markersize=4
                )  # fmt: skip
            panel.axvline(0, color="0.4", linewidth=0.8, linestyle="--")
            panel.set_yticks(range(len(own)), list(own["method"][::-1]) if column == 0 else [], fontsize=7)
            panel.tick_params(axis="x", labelsize=7)
            panel.locator_params(axis="x", nbins=4)
            panel.grid(True, axis="x", color="0.9", linewidth=0.8)
            if row == 0:
                panel.set_title(f"{_TITLES.get(case, case)}\n{_KINDS.get(kind, kind)}", fontsize=8)
            panel.set_xlabel(f"{label} minus FedAvg's", fontsize=8)
    return figure


def fairness_figures(result: FairnessResult) -> dict[str, Figure]:
    """``differences`` always; ``plane`` where grids were run."""
    figures = {"differences": differences(result.table)}
    if len(result.fronts):
        figures["plane"] = plane(result.fronts, result.floors)
    return figures
