"""Do cell weights that were learned with a linear model make trees fair?  The protocol is in docs/trees.md.

``python benchmarks/trees.py ROWS.csv [SECONDS [TABLE...]]`` measures what is not in the file yet, split by split.  The
census is fetched first: ``fedbilevel data get census``.  ``python -m docsbuild.results`` makes the tables of the page from
docs/figures/trees-rows.csv.
"""

import sys
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier

from fedbilevel import storage
from fedbilevel.datasets import load, partition
from fedbilevel.fairness import FairFederatedClassifier
from fedbilevel.fairness.intervals import across_splits

ROOT = Path(__file__).parents[1]
SPLITS, TEST_SHARE, CLIENTS = 20, 0.3, 3
TABLES = {  # data set, groups, rows drawn for each split, by natural sites
    "adult": ("sex", 16_000, False),
    "employment": ("disability", 16_000, True),
    "census": ("sex", 20_000, False),
}
TITLES = {"adult": "Adult by sex", "employment": "Employment by disability", "census": "Census by sex"}
ARMS = {
    "logistic": "logistic, no weights",
    "logistic weighted": "logistic, weights",
    "trees": "trees, pooled, no weights",
    "trees weighted": "trees, pooled, weights",
    "sites": "trees at single sites, no weights",
    "sites weighted": "trees at single sites, weights",
}
PAIRS = [("logistic", "logistic weighted"), ("trees", "trees weighted"), ("sites", "sites weighted")]


table = lru_cache(load)


def measure(name: str, split: int) -> list[dict[str, object]]:
    """All six models on one split."""
    sensitive, drawn, natural = TABLES[name]
    data = table(name, sensitive)
    y, groups = data.y.to_numpy(), data.groups.to_numpy()
    both = pd.DataFrame({"group": groups, "label": y})
    rows = np.sort(np.random.default_rng([split, 0]).choice(len(y), drawn, replace=False))
    train, test = (
        rows[part] for part in partition.train_test_split(both.iloc[rows], test_share=TEST_SHARE, seed=split)
    )
    if natural:
        site = data.sites.to_numpy()[train]
    else:
        site = np.zeros(len(train), int)
        for number, part in enumerate(partition.iid(len(train), CLIENTS, seed=split)):
            site[part] = number

    options = {"history_rows": 0, "random_state": split}
    asked = {"sensitive_features": groups[train], "clients": site}
    plain = FairFederatedClassifier("fedavg", **options).fit(data.X.iloc[train], y[train], **asked)
    fair = FairFederatedClassifier("fedbioacc", **options).fit(data.X.iloc[train], y[train], **asked)
    weight = fair.group_weights_.reindex(pd.MultiIndex.from_arrays([groups[train], y[train]])).to_numpy()
    features, unseen = (fair.encoder_.transform(data.X.iloc[part]) for part in (train, test))

    def trees(part: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        model = HistGradientBoostingClassifier(random_state=split)
        model.fit(features[part], y[train][part], None if weights is None else weights[part])
        return model.predict_proba(unseen)[:, 1]

    def mean(weights: np.ndarray | None) -> np.ndarray:
        parts = [np.flatnonzero(site == one) for one in np.unique(site)]
        return np.average([trees(part, weights) for part in parts], axis=0, weights=[len(part) for part in parts])

    every = np.arange(len(train))
    chances = {
        "logistic": plain.predict_proba(data.X.iloc[test])[:, 1],
        "logistic weighted": fair.predict_proba(data.X.iloc[test])[:, 1],
        "trees": trees(every, None),
        "trees weighted": trees(every, weight),
        "sites": mean(None),
        "sites weighted": mean(weight),
    }
    codes, names = pd.factorize(groups[test], sort=True)
    found = []
    for arm, chance in chances.items():
        decided = chance > 0.5
        rates = [float(decided[(codes == group) & (y[test] == 1)].mean()) for group in range(len(names))]
        found.append(
            {
                "table": name, "split": split, "arm": arm, "accuracy": float((decided == y[test]).mean()),
                "gap": max(rates) - min(rates), "selected": float(decided.mean()),
                **{f"rate {number}": rate for number, rate in enumerate(rates)},
                "groups": "; ".join(map(str, names)),
                "weights": " ".join(f"{value:.4f}" for value in fair.group_weights_),
            }
        )  # fmt: skip
    return found


def run(target: Path, seconds: float = float("inf"), *names: str) -> None:
    """Measure what is missing, for so many ``seconds`` and these tables; the file is written anew after every split."""
    began = time.monotonic()
    rows = pd.read_csv(target).to_dict("records") if target.exists() else []
    done = {(row["table"], row["split"]) for row in rows}
    for split in range(SPLITS):
        for name in names or TABLES:
            if (name, split) not in done and time.monotonic() - began < seconds:
                rows += measure(name, split)
                storage.write(target, pd.DataFrame(rows).to_csv(index=False))
                print(name, split, f"{time.process_time():.0f} s", flush=True)


def short(value: float, form: str = ".4f") -> str:
    return format(value, form).replace("0.", ".", 1).replace("-", "−")


def interval(values: pd.Series, how: str = "student", form: str = ".4f") -> str:
    found = across_splits(values.to_numpy(), method=how, test_share=TEST_SHARE)
    return f"{short(found.estimate, form)} [{short(found.low, form)}, {short(found.high, form)}]"


def arms(name: str, file: str = "docs/figures/trees-rows.csv") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Accuracy and gap of one table: a line a split, a column a model."""
    rows = pd.read_csv(ROOT / file)
    part = rows[rows["table"] == name]
    return part.pivot(index="split", columns="arm", values="accuracy"), part.pivot(
        index="split", columns="arm", values="gap"
    )


def measured(name: str) -> str:
    """The models of one table: every mean, and for weights the paired difference to the same model without."""
    accuracy, gap = arms(name)
    without = {after: before for before, after in PAIRS}
    lines = [
        f"| {len(gap)} splits | accuracy | gap | gap's difference | share removed | accuracy's difference |",
        "|---|---|---|---|---:|---|",
    ]
    for arm, label in ARMS.items():
        cells = [label, interval(accuracy[arm]), interval(gap[arm]), "", "", ""]
        if arm in without:
            before = without[arm]
            cells[3] = interval(gap[arm] - gap[before], "corrected", "+.4f")
            cells[4] = f"{1 - gap[arm].mean() / gap[before].mean():.0%}"
            cells[5] = interval(accuracy[arm] - accuracy[before], "corrected", "+.4f")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts() -> str:
    """The three conditions of the protocol, for trees on every table."""
    lines = [
        "| table | model | gap falls | half of what the logistic model gains | accuracy falls by less than a point "
        "| carries over |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        accuracy, gap = arms(name)
        removed = {after: 1 - gap[after].mean() / gap[before].mean() for before, after in PAIRS}
        for before, after in PAIRS[1:]:
            fall, cost = (
                across_splits((one[after] - one[before]).to_numpy(), method="corrected", test_share=TEST_SHARE)
                for one in (gap, accuracy)
            )
            held = [fall.high < 0, removed[after] >= removed["logistic weighted"] / 2, cost.low > -0.01]
            words = ["yes" if one else "no" for one in (*held, all(held))]
            lines.append(f"| {title} | {ARMS[before].removesuffix(', no weights')} | {' | '.join(words)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(Path(sys.argv[1]), *map(float, sys.argv[2:3]), *sys.argv[3:])
