"""Is a federated linear model trained to the end?  Defaults against scikit-learn on the pooled rows, with the same ridge.

    python benchmarks/trained.py

Per table: 7:3 split number 0, four I.I.D. clients, the package's own encoding.  ``excess``: loss (with ridge, on training rows)
above that of ``LogisticRegression(solver="newton-cholesky", tol=1e-8)``; ``points``: test accuracy minus its.  FedAvg
as published: 2,000 steps of 0.1, I = 5, batch 128.  ``rounds``: those that asked the clients.  FedReg is compared with its own
objective, minimised by SciPy from the model it found: how much lower does that get?
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from fedbilevel import datasets
from fedbilevel.datasets import partition
from fedbilevel.fairness import FairFederatedClassifier
from fedbilevel.fairness.fedreg import FairLoss
from fedbilevel.fairness.models import LinearScores

TABLES = (
    ("adult", "sex", None), ("credit", "sex", None), ("heart", "sex", None), ("employment", "disability", 80_000),
    ("employment", "sex", 80_000),
)  # fmt: skip
RIDGE, CLIENTS = 1e-3, 4


def loss(params: np.ndarray, features: np.ndarray, labels: np.ndarray) -> float:
    scores = features @ params
    return float(np.mean(np.logaddexp(scores, 0) - labels * scores) + RIDGE / 2 * params @ params)


def further(params: np.ndarray, features: np.ndarray, labels: np.ndarray, groups: np.ndarray, parts: Any) -> float:
    """How much lower SciPy gets FedReg's objective, the mean over the clients, from ``params``."""
    fair = FairLoss(LinearScores(), int(groups.max()) + 1, 0.1, RIDGE)
    rows = [{"features": features[own], "labels": labels[own], "groups": groups[own]} for own in parts]
    both = jax.jit(jax.value_and_grad(lambda point: sum(fair(point, own) for own in rows) / len(rows)))

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = both(np.asarray(point, np.float32))
        return float(value), np.asarray(slope, np.float64)

    return objective(params)[0] - float(minimize(objective, params, jac=True, method="BFGS").fun)


def main() -> None:
    warnings.simplefilter("ignore")
    print("| table | rows × columns | pooled: loss, accuracy | FedAvg, 2,000 steps of 0.1: excess, points "
          "| default: excess, points | rounds | FedReg, further |")  # fmt: skip
    print("|---|---|---|---|---|---:|---:|")
    for name, sensitive, most in TABLES:
        data = datasets.load(name, sensitive)
        rows = np.arange(len(data.y))
        if most is not None:
            rows = np.sort(np.random.default_rng(0).choice(rows, most, replace=False))
        train, test = (rows[part] for part in partition.train_test_split(data.groups.iloc[rows], seed=0))
        held = np.empty(len(train), int)
        parts = partition.iid(len(train), CLIENTS, seed=0)
        for client, own in enumerate(parts):
            held[own] = client
        labels, outside = (data.y.to_numpy()[part].astype(np.float64) for part in (train, test))
        cells = []
        for options in ({"step": 0.1}, {}):
            model = FairFederatedClassifier("fedavg", **options, random_state=0)
            model.fit(data.X.iloc[train], labels.astype(int), clients=held)
            features, others = (
                model.encoder_.transform(data.X.iloc[part]).astype(np.float64) for part in (train, test)
            )
            if not cells:
                best = LogisticRegression(
                    C=1 / (RIDGE * len(train)), fit_intercept=False, solver="newton-cholesky", tol=1e-8, max_iter=1000
                )
                limit = best.fit(features, labels).coef_[0]
                reference = float(np.mean((others @ limit > 0) == outside))
                cells.append(f"{loss(limit, features, labels):.4f}, {reference:.4f}")
            params = np.asarray(model.params_, np.float64)
            points = 100 * (float(np.mean((others @ params > 0) == outside)) - reference)
            cells.append(f"{loss(params, features, labels) - loss(limit, features, labels):.1e}, {points:+.2f}")
        asked = int(model.history_["gradient_calls"].iloc[-1]) // CLIENTS
        fair = FairFederatedClassifier("fedreg", random_state=0)
        fair.fit(data.X.iloc[train], labels.astype(int), sensitive_features=data.groups.iloc[train], clients=held)
        codes = np.unique(data.groups.iloc[train], return_inverse=True)[1].astype(np.int32)
        left = further(np.asarray(fair.params_, np.float64), features.astype(np.float32), labels, codes, parts)
        shape = f"{features.shape[0]:,} × {features.shape[1]}"
        print(f"| {name} by {sensitive} | {shape} | {' | '.join(cells)} | {asked} | {left:.1e} |", flush=True)


if __name__ == "__main__":
    main()
