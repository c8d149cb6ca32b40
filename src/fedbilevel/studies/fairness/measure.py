"""What the fairness study measures, and the tables that follow: means, intervals, choices of settings, duels, and floors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.fairness.intervals import across_splits, comparison_table, paired_difference
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.recipe import BILEVEL, Recipe
from fedbilevel.fairness.trainer import Trainer
from fedbilevel.studies.data import PARTS, SET_ASIDE, SOURCES, TEST_SHARE, Case, halves

BASELINE = "FedAvg"
STANDARD = {
    "case": "dataset", "distribution": "split", "split": "seed", "aside_accuracy": "validation_accuracy",
    "aside_gap": "validation_gap", "aside_gap_majority": "validation_gap_majority", "aside_lead": "validation_lead",
}  # fmt: skip
"""The study's names of columns, and what every run folder calls them."""
METRICS = ("test_accuracy", "train_gap", "test_gap", "test_gap_majority", "test_lead")
DRAWS = 20_000
RATES = {"adult-sex": 0.58, "adult-race": 0.58, "credit-status": 0.55}
"""FedAvg's true-positive rate on the training rows of split 0, rounded."""
LARGEST_LOSS = 0.005
"""Accuracy that a setting may cost on the rows set aside, against FedAvg, when settings are chosen."""


def evaluate(case: Case, label: str, recipe: Recipe, setting: str, default: bool) -> dict[str, Any]:
    """Fit on one split and measure on its three sets of rows.

    The gap of a fair model is positive by chance alone; its lead (the majority's true-positive rate minus that of all others)
    is 0 on average, so a mean over splits can show that it is.
    """
    paper = recipe.formulation.kind == "paper" and recipe.method in BILEVEL
    clients = case.paper if paper else case.whole
    fitted = Trainer(FairProgram(recipe, case.model, len(case.names)), clients).run(clients, case.number)
    row: dict[str, Any] = {"case": case.source, "distribution": case.distribution, "split": case.number}
    row |= {"method": label, "setting": setting, "default": default}
    for part in PARTS:
        counts, name = case.counts(part, np.asarray(fitted.params)), "aside" if part == "validation" else part
        row |= {
            f"{name}_accuracy": float(counts.overall("accuracy")),
            f"{name}_gap": float(counts.gap("equal_opportunity")),
            f"{name}_gap_majority": float(counts.gap("equal_opportunity", "majority_vs_rest")),
            f"{name}_lead": float(counts.lead("true_positive_rate")),
        }
    row["weights"] = "" if fitted.weights is None else " ".join(f"{weight:.4f}" for weight in fitted.weights)
    return row


def standard(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with default settings, as a run folder names their columns."""
    usual = rows[rows["default"]].drop(columns="default")
    return usual.assign(split_seed=usual["split"]).rename(columns=STANDARD)


def summarise(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """All tables from the rows; nothing is run."""
    frames: dict[str, list[pd.DataFrame]] = {"table": [], "chosen": [], "fronts": [], "duels": []}
    for (case, distribution), group in rows.groupby(["case", "distribution"], sort=False):
        place = {"case": str(case), "distribution": str(distribution)}
        frames["table"].append(compare(group[group["default"]]).assign(**place))
        if (group.groupby("method")["setting"].nunique() > 1).any():
            for choice, best in (("each split", choose(group)), ("once", choose_once(group))):
                frames["chosen"].append(compare(best).assign(choice=choice, **place))
                frames["duels"].append(fight(best).assign(choice=choice, **place))
            frames["fronts"].append(front(group).assign(**place))
    tables = {name: pd.concat(some, ignore_index=True) if some else pd.DataFrame() for name, some in frames.items()}
    return {**tables, "floors": floors(rows)}


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


def expected_gap(positives: np.ndarray, rate: float, learned_on: np.ndarray | None = None, seed: int = 0) -> float:
    """The mean gap of a fair model on groups with these numbers of positives; ``learned_on``: those of its training part.

    If every group has the true rate q, a part with n_a positives of group a still shows a largest minus smallest rate of

        E [ max_a B_a / n_a  -  min_a B_a / n_a ],    B_a ~ Binomial(n_a, q),

    which for two groups is about sqrt(2/pi) sqrt(q (1 - q) (1/n_0 + 1/n_1)): the floor of a model whose fairness is given.  A
    model whose fairness was *learned* has rates that are equal on its training rows at best.  Those are a sample, too, so its
    true rates differ by the error of that sample, and its floor adds the variance of the training part to that of the test.

    Groups without positives are left out.  Both parts are drawn from the same binomials; the training part's error has the
    opposite sign, which does not matter for the mean.
    """
    counts = np.asarray(positives)
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must lie between 0 and 1, not {rate}.")
    kept = counts > 0
    rng = np.random.default_rng(seed)
    rates = rng.binomial(counts[kept], rate, (DRAWS, int(kept.sum()))) / counts[kept]
    if learned_on is not None:
        others = np.maximum(np.asarray(learned_on)[kept], 1)
        rates = rates + rng.binomial(others, rate, rates.shape) / others
    return float(np.mean(rates.max(axis=1) - rates.min(axis=1)))


def floors(rows: pd.DataFrame, splits: int = 20) -> pd.DataFrame:
    """Per case: positives of the smallest and largest group in a test part, and both floors, at FedAvg's true-positive rate.

    ``rows``: those of the study; only which cases occur is read.
    """
    lines = []
    for case in dict.fromkeys(rows["case"]):
        if case not in SOURCES:
            continue
        positives, fair, fair_in_training = [], [], []
        for number in range(splits):
            data, train, test, codes, test_codes, names = halves(case, number)
            labels = data.y.to_numpy()
            inside = np.bincount(codes[labels[train] == 1], minlength=len(names))
            outside = np.bincount(test_codes[labels[test] == 1], minlength=len(names))
            used = np.round((1 - SET_ASIDE) * inside).astype(int)
            positives.append(outside)
            fair.append(expected_gap(outside, RATES[case]))
            fair_in_training.append(expected_gap(outside, RATES[case], used))
        counts = np.array(positives)
        lines.append(
            {
                "case": case,
                "groups": counts.shape[1],
                "smallest": float(counts.min(axis=1).mean()),
                "largest": float(counts.max(axis=1).mean()),
                "rate": RATES[case],
                "fair": float(np.mean(fair)),
                "fair_in_training": float(np.mean(fair_in_training)),
            }
        )
    return pd.DataFrame(lines)
