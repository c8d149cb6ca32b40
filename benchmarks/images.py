"""The tables of docs/results/images.md from the rows of ``fedbilevel bench --mnist`` and what FedNest's figures show."""

from pathlib import Path

import pandas as pd
from scipy import stats

FIGURES = Path(__file__).parents[1] / "docs/figures"
TASKS = {
    "mnist-representation": ("hyper-representation", "alike"),
    "mnist-representation-shards": ("hyper-representation", "shards"),
    "mnist-imbalance": ("loss tuning", "alike"),
    "mnist-imbalance-shards": ("loss tuning", "shards"),
    "mnist-cleaning": ("data cleaning", "alike"),
    "mnist-cleaning-shards": ("data cleaning", "shards"),
}
ROUNDS = 400
OURS_LIKE = {"hyper-representation": "FedNest, tau = 5", "loss tuning": "FedNest"}
"""The published curve that our FedNest, with five local steps, is to be held against."""


def scores():
    """Means over the draws in per cent with Student's intervals, and the published accuracy after as many exchanges."""
    rows = pd.read_csv(FIGURES / "images/rows.csv")
    printed = pd.read_csv(FIGURES / "images-published.csv")
    lines = [
        "| task | clients | method | ordinary training | score, % | each draw | published, % |",
        "|---|---|---|---:|---|---|---:|",
    ]
    for (task, method), table in rows.groupby(["dataset", "method"], sort=False):
        experiment, dealt = TASKS[task]
        found = printed.query(
            "experiment == @experiment and clients_dealt == @dealt and at == @ROUNDS and method == @OURS_LIKE.get(@experiment)"
        )["accuracy"]
        known = f"{found.item():.1f}" if method == "FedNest" and len(found) else ""
        values = 100 * table["score"]
        margin = stats.t.ppf(0.975, len(values) - 1) * values.sem()
        low, high = max(values.mean() - margin, 0), min(values.mean() + margin, 100)
        each = ", ".join(f"{value:.1f}" for value in values)
        untuned = f"{100 * table['untuned'].mean():.1f}"
        score = f"{values.mean():.1f} [{low:.1f}, {high:.1f}]"
        lines.append(f"| {experiment} | {dealt} | {method} | {untuned} | {score} | {each} | {known} |")
    return "\n".join(lines)
