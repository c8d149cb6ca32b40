"""Six methods with the paper's formulation and two with ours, on Adult and German Credit, over many splits.

The paper's Table 1, made to bear weight: 20 random splits instead of one, 95 % intervals, differences to FedAvg taken within
each split, and for Adult by sex a grid of four settings a method, the best of them chosen split by split on rows that
nobody trained on.  Test rows are read once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.experiments.fairness_data import CASES, TEST_SHARE, Rows, Split, make_split
from fedbilevel.experiments.fairness_design import BASELINE, GRIDS, Design, Entry, entries, is_slow
from fedbilevel.experiments.fairness_files import ROWS_FILE, save_rows, write
from fedbilevel.fairness.intervals import across_splits, comparison_table, paired_difference
from fedbilevel.fairness.methods import fit
from fedbilevel.fairness.metrics import disparity

__all__ = ["FULL", "QUICK", "FairnessResult", "compare", "run", "summarise", "write"]

Report = Callable[[str, int, int], None]
FULL = Design()
QUICK = Design(cases=("credit-status",), splits=2, slow_splits=2, grid_cases=(), steps=100, weight_steps=50)
METRICS = ("test_accuracy", "train_gap", "test_gap", "test_gap_majority")
LARGEST_LOSS = 0.005
"""Accuracy that a setting may cost on the rows set aside, against FedAvg, when settings are chosen."""


@dataclass(frozen=True)
class FairnessResult:
    """``rows``: one row per case, distribution, split, method and setting.  ``table``: means, intervals and paired
    differences to FedAvg of every method with its default.  ``chosen``: the same for the settings chosen on the rows set
    aside.  ``fronts``: means of every setting.  ``duels``: ours minus each chosen baseline, paired."""

    rows: pd.DataFrame
    table: pd.DataFrame
    chosen: pd.DataFrame
    fronts: pd.DataFrame
    duels: pd.DataFrame
    settings: dict[str, Any]


def run(
    out: Path | None = None,
    quick: bool = False,
    progress: Report | None = None,
    design: Design | None = None,
    workers: int = 2,
) -> FairnessResult:
    """Run the experiment; with ``out`` also write tables and figures there.

    Rows are saved after every split, and splits already in ``out`` are not run again: a stopped run goes on, and a design
    with more splits adds to what is there.
    """
    plan = design or (QUICK if quick else FULL)
    tell = progress or (lambda part, done, total: None)
    jobs = plan.jobs()
    rows = _finished(out, plan)
    done = {(row["case"], row["distribution"], row["split"], is_slow(row["case"], row["method"])) for row in rows}
    left = [job for job in jobs if job not in done]
    with ThreadPoolExecutor(workers) as pool:
        # JAX lets go of the interpreter while it compiles and computes, so threads use the cores.
        for number, found in enumerate(pool.map(lambda job: one_split(plan, *job), left), 1):
            rows += found
            if out is not None:
                save_rows(pd.DataFrame(rows), out)
            tell("{} {}, split {}".format(*left[number - 1]), len(done) + number, len(jobs))
    result = summarise(pd.DataFrame(rows), asdict(plan))
    if out is not None:
        write(result, out)
    return result


def _finished(out: Path | None, design: Design) -> list[dict[str, Any]]:
    """Rows of earlier splits of the same design (apart from how many splits it has)."""
    if out is None or not (out / ROWS_FILE).exists():
        return []
    text = {"design": str, "setting": str, "weights": str}
    rows = pd.read_csv(out / ROWS_FILE, dtype=text).fillna({"setting": "", "weights": ""})
    rows = rows[rows["design"] == design.mark()]
    return [{str(name): value for name, value in row.items()} for row in rows.to_dict(orient="records")]


def one_split(design: Design, case_name: str, distribution: str, number: int, slow: bool) -> list[dict[str, Any]]:
    case = CASES[case_name]
    split = make_split(case, distribution, number)
    return [{**evaluate(entry, split), "design": design.mark()} for entry in entries(design, case, slow)]


def evaluate(entry: Entry, split: Split) -> dict[str, Any]:
    """Fit on one split and measure on its three sets of rows."""
    paper = entry.recipe.formulation.kind == "paper" and entry.recipe.method.startswith("fedbio")
    data = split.balanced if paper else split.same
    fitted = fit(entry.recipe, data, split.model, split.groups, seed=split.number, capacity=split.capacity)
    params = np.asarray(fitted.params)
    row: dict[str, Any] = {
        "case": split.case,
        "distribution": split.distribution,
        "split": split.number,
        "method": entry.label,
        "setting": entry.setting,
        "default": entry.default,
    }
    for part in ("train", "aside", "test"):
        row |= measured(part, getattr(split, part), params)
    row["weights"] = "" if fitted.weights is None else " ".join(f"{weight:.4f}" for weight in fitted.weights)
    return row


def measured(part: str, rows: Rows, params: np.ndarray) -> dict[str, float]:
    labels, decisions = rows.labels.astype(int), (rows.features @ params > 0).astype(int)
    found = {f"{part}_accuracy": float((labels == decisions).mean())}
    for name, method in (("gap", "between_groups"), ("gap_majority", "majority_vs_rest")):
        found[f"{part}_{name}"] = disparity(labels, decisions, sensitive_features=rows.groups, method=method).value
    return found


def summarise(rows: pd.DataFrame, settings: dict[str, Any]) -> FairnessResult:
    """All tables from the rows; nothing is run."""
    rows = rows.fillna({"setting": "", "weights": ""})
    tables, chosen, fronts, duels = [], [], [], []
    for (case, kind), group in rows.groupby(["case", "distribution"], sort=False):
        tables.append(compare(group[group["default"]]).assign(case=str(case), distribution=str(kind)))
        if group["setting"].nunique() > 1:
            best = choose(group)
            chosen.append(compare(best).assign(case=str(case), distribution=str(kind)))
            duels.append(fight(best).assign(case=str(case), distribution=str(kind)))
            fronts.append(front(group).assign(case=str(case), distribution=str(kind)))
    settings = {**settings, "grids": {name: [knob, list(values)] for name, (knob, values) in GRIDS.items()}}
    return FairnessResult(rows, _stacked(tables), _stacked(chosen), _stacked(fronts), _stacked(duels), settings)


def compare(rows: pd.DataFrame) -> pd.DataFrame:
    """Means, 95 % intervals and paired differences to FedAvg; a method with fewer splits is compared on those it has."""
    parts = []
    reference = rows[rows["method"] == BASELINE]
    for method, group in rows.groupby("method", sort=False):
        both = group if method == BASELINE else pd.concat([reference[reference["split"].isin(group["split"])], group])
        if group["split"].nunique() < 2:  # no interval from one split
            parts += [
                pd.DataFrame(
                    {"method": method, "metric": METRICS, "splits": 1, "mean": group[list(METRICS)].iloc[0].to_numpy()}
                ).assign(difference=np.nan, interval=interval)
                for interval in ("student", "corrected")
            ]
            continue
        for interval, test_share in (("student", None), ("corrected", TEST_SHARE)):
            found = comparison_table(both, baseline=BASELINE, metrics=METRICS, interval=interval, test_share=test_share)
            parts.append(found.loc[[method]].reset_index().assign(interval=interval))
    return pd.concat(parts, ignore_index=True)


def choose(rows: pd.DataFrame) -> pd.DataFrame:
    """Per split and method the setting with the smallest gap on the rows set aside, among those that lose at most half a
    point of accuracy there against FedAvg (if none does: the most accurate)."""
    reference = rows[rows["method"] == BASELINE].set_index("split")["aside_accuracy"]
    loss = rows["split"].map(reference) - rows["aside_accuracy"]
    allowed = loss <= LARGEST_LOSS
    ranked = rows.assign(_out=~allowed, _by=np.where(allowed, rows["aside_gap"], loss))
    best = ranked.sort_values(["_out", "_by"], kind="stable").drop_duplicates(["split", "method"])
    return best.drop(columns=["_out", "_by"]).sort_index()


def fight(chosen: pd.DataFrame, ours: str = "FedBiOAcc, cells") -> pd.DataFrame:
    """Ours minus each other method with its chosen setting, paired by split.  ``dominates``: the gap's difference is below
    zero, its interval too, and the accuracy's interval does not lie below zero."""
    out = []
    mine = chosen[chosen["method"] == ours].set_index("split")
    for method, group in chosen.groupby("method", sort=False):
        if method == ours or len(group) < 2:
            continue
        theirs = group.set_index("split")
        own = mine.loc[theirs.index]
        gap = paired_difference(own["test_gap"], theirs["test_gap"])
        accuracy = paired_difference(own["test_accuracy"], theirs["test_accuracy"])
        row: dict[str, Any] = {"ours": ours, "against": method, "splits": gap.size}
        for name, interval in (("gap", gap), ("accuracy", accuracy)):
            row |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
        row["relative_gap"] = float(own["test_gap"].mean() / theirs["test_gap"].mean() - 1)
        row["dominates"] = bool(gap.high < 0 and accuracy.high >= 0)
        out.append(row)
    return pd.DataFrame(out)


def front(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean test accuracy and gap of every method and setting, with 95 % intervals."""
    out = []
    for (method, setting), group in rows.groupby(["method", "setting"], sort=False):
        row: dict[str, Any] = {"method": method, "setting": setting, "splits": len(group)}
        for metric in ("test_accuracy", "test_gap"):
            if len(group) > 1:
                found = across_splits(group[metric])
                row |= {metric: found.estimate, f"{metric}_low": found.low, f"{metric}_high": found.high}
            else:
                row |= {metric: float(group[metric].iloc[0])}
        out.append(row)
    return pd.DataFrame(out)


def _stacked(frames: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
