"""From measured rows to tables: means, intervals, choices of settings, and duels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.fairness.intervals import across_splits, comparison_table, paired_difference
from fedbilevel.studies.fairness.data import TEST_SHARE
from fedbilevel.studies.fairness.design import BASELINE

METRICS = ("test_accuracy", "train_gap", "test_gap", "test_gap_majority", "test_lead")
LARGEST_LOSS = 0.005
"""Accuracy that a setting may cost on the rows set aside, against FedAvg, when settings are chosen."""


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
            there = [metric for metric in METRICS if both[metric].notna().all()]
            found = comparison_table(both, baseline=BASELINE, metrics=there, interval=interval, test_share=test_share)
            parts.append(found.loc[[method]].reset_index().assign(interval=interval))
    return pd.concat(parts, ignore_index=True)


def choose(rows: pd.DataFrame) -> pd.DataFrame:
    """Per split and method the setting with the smallest gap on the rows set aside, among those that lose at most half a
    point of accuracy there against FedAvg (if none does: the most accurate).  Splits in which not all settings of a
    method have been run are left out for it."""
    settings = rows.groupby("method")["setting"].nunique()
    there = rows.groupby(["split", "method"])["setting"].transform("nunique")
    rows = rows[there == rows["method"].map(settings)]
    reference = rows[rows["method"] == BASELINE].set_index("split")["aside_accuracy"]
    loss = rows["split"].map(reference) - rows["aside_accuracy"]
    allowed = loss <= LARGEST_LOSS
    ranked = rows.assign(_out=~allowed, _by=np.where(allowed, rows["aside_gap"], loss))
    best = ranked.sort_values(["_out", "_by"], kind="stable").drop_duplicates(["split", "method"])
    return best.drop(columns=["_out", "_by"]).sort_index()


def choose_once(rows: pd.DataFrame) -> pd.DataFrame:
    """Per method one setting for all splits, by the same rule with means over the splits: less at the mercy of few rows."""
    means = rows.groupby(["method", "setting"], sort=False)[["aside_accuracy", "aside_gap"]].mean().reset_index()
    best = choose(means.assign(split=0))
    return rows.merge(best[["method", "setting"]], on=["method", "setting"])


def fight(chosen: pd.DataFrame, ours: str = "FedBiOAcc, cells") -> pd.DataFrame:
    """Ours minus each other method with its chosen setting, paired by split.  ``dominates``: the gap's difference is below
    zero, its interval too, and the accuracy's interval does not lie below zero.  ``lead``: by how much the majority's
    true-positive rate is ahead, which tells methods apart whose gaps are near the floor."""
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
        if own["test_lead"].notna().all() and theirs["test_lead"].notna().all():
            lead = paired_difference(own["test_lead"], theirs["test_lead"])
            row |= {"lead": lead.estimate, "lead_low": lead.low, "lead_high": lead.high}
            row |= {"our_lead": float(own["test_lead"].mean()), "their_lead": float(theirs["test_lead"].mean())}
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
