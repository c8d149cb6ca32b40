"""What plain logistic regression reaches on the paper's tables: writes benchmarks/results/logistic.csv, a line a split.

``python benchmarks/logistic.py``.  scikit-learn's `LogisticRegression` with its default ridge on all training rows
in one place, 7:3 splits with seeds 0 to 9 (Adult) and 0 to 19 (Credit).
"""

from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from fedbilevel import datasets
from fedbilevel.datasets import encode, partition

FILE = Path(__file__).parent / "results" / "logistic.csv"
CASES = (
    ("Adult by race", "adult", "race", "clean"), ("Adult by sex", "adult", "sex", "clean"),
    ("Adult by race", "adult", "race", "paper"), ("Credit by status", "credit", "personal_status", "clean"),
    ("Credit by sex", "credit", "sex", "clean"), ("Credit by status", "credit", "personal_status", "paper"),
)  # fmt: skip
LOAD = {"adult": datasets.load_adult, "credit": datasets.load_credit}


def split(data, encoding, seed):
    """Accuracy, AUC, the two gaps and the fewest positives of a group, on the test part."""
    train, test = partition.train_test_split(data.groups, test_share=0.3, seed=seed)
    if encoding == "clean":
        encoder = encode.clean_transformer(data.X.iloc[train]).fit(data.X.iloc[train])
        known, unseen = (encode.feature_matrix(encoder, data.X.iloc[part]) for part in (train, test))
    else:
        known, unseen = (np.asarray(data.X.iloc[part], float) for part in (train, test))
    y, groups = data.y.to_numpy(), data.groups.to_numpy()[test]
    model = LogisticRegression(max_iter=5000).fit(known, y[train])
    chance, truth = model.predict_proba(unseen)[:, 1], y[test]
    decided = chance > 0.5
    members = [(groups == group) & (truth == 1) for group in pd.unique(groups)]
    rates = [decided[one].mean() for one in members if one.any()]
    largest = pd.Series(groups).value_counts().index[0]
    pair = [decided[side & (truth == 1)].mean() for side in (groups == largest, groups != largest)]
    return {
        "accuracy": (decided == truth).mean(), "auc": roc_auc_score(truth, chance), "gap": max(rates) - min(rates),
        "gap_majority": abs(pair[0] - pair[1]), "positives": min(int(one.sum()) for one in members),
    }  # fmt: skip


def measured(file="benchmarks/results/logistic.csv"):
    """The table of the page: means over splits, standard deviations in brackets."""
    rows = pd.read_csv(FILE.parents[2] / file)
    lines = [
        "| data | encoding | accuracy | AUC | gap between groups | gap majority vs rest | fewest positives in a test group |",
        "|---|---|---|---|---|---|---:|",
    ]
    for (title, encoding), part in rows.groupby(["data", "encoding"], sort=False):
        told = lambda name, digits, part=part: (  # noqa: E731
            f"{part[name].mean():.{digits}f} ({part[name].std(ddof=1):.{digits}f})".replace("0.", ".")
        )
        cells = [title, encoding, told("accuracy", 4), told("auc", 4), told("gap", 3), told("gap_majority", 3)]
        lines.append(f"| {' | '.join(cells)} | {part['positives'].min()} |")
    return "\n".join(lines)


if __name__ == "__main__":
    rows = []
    for title, name, sensitive, encoding in CASES:
        data = LOAD[name](sensitive=sensitive, encoding=encoding)
        rows += [
            {"data": title, "encoding": encoding, "split": seed, **split(data, encoding, seed)}
            for seed in range(10 if name == "adult" else 20)
        ]
        print(title, encoding, flush=True)
    pd.DataFrame(rows).to_csv(FILE, index=False)
