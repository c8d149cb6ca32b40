"""Is a federated linear model trained to the end?  Defaults against scikit-learn on the pooled rows, with the same ridge.

    python benchmarks/trained.py    # writes results/trained.json, a table of docs/results/methods.md

Per table: 7:3 split number 0, four I.I.D. clients, the package's own encoding.  ``excess``: loss (with ridge, on training rows)
above that of ``LogisticRegression(solver="newton-cholesky", tol=1e-8)``; ``points``: test accuracy minus its.  FedAvg
as published: 2,000 steps of 0.1, I = 5, batch 128.  ``rounds``: those that asked the clients.  FedReg is compared with its own
objective, minimised by SciPy from the model it found: how much lower does that get?
"""

from __future__ import annotations

import warnings
from typing import Any

import harness
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


def table() -> str:
    rows = [
        [f"{one['table']} by {one['groups']}", f"{one['rows']:,} × {one['columns']}",
         f"{one['loss']:.4f}, {one['accuracy']:.4f}",
         *(f"{one[name][0]:.1e}, {one[name][1]:+.2f}" for name in ("published", "default")), f"{one['rounds']}",
         f"{one['fedreg_further']:.1e}" if "fedreg_further" in one else ""]
        for one in harness.load("trained")["measured"]
    ]  # fmt: skip
    heads = ["table", "rows × columns", "pooled: loss, accuracy", "FedAvg, 2,000 steps of 0.1: excess, points",
             "`fb.lbfgs`: excess, points", "rounds", "FedReg, further"]  # fmt: skip
    return harness.markdown(heads, rows)


def main() -> None:
    warnings.simplefilter("ignore")
    told: list[dict[str, Any]] = []
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
        one: dict[str, Any] = {"table": name, "groups": sensitive}
        for kind, options in (("published", {"step": 0.1}), ("default", {})):
            model = FairFederatedClassifier("fedavg", **options, random_state=0)
            model.fit(data.X.iloc[train], labels.astype(int), clients=held)
            features, others = (
                model.encoder_.transform(data.X.iloc[part]).astype(np.float64) for part in (train, test)
            )
            if kind == "published":
                best = LogisticRegression(
                    C=1 / (RIDGE * len(train)), fit_intercept=False, solver="newton-cholesky", tol=1e-8, max_iter=1000
                )
                limit = best.fit(features, labels).coef_[0]
                reference = float(np.mean((others @ limit > 0) == outside))
                one |= {"rows": len(features), "columns": features.shape[1]}
                one |= {"loss": loss(limit, features, labels), "accuracy": reference}
            params = np.asarray(model.params_, np.float64)
            points = 100 * (float(np.mean((others @ params > 0) == outside)) - reference)
            one[kind] = [loss(params, features, labels) - one["loss"], points]
        one["rounds"] = int(model.history_["gradient_calls"].iloc[-1]) // CLIENTS
        fair = FairFederatedClassifier("fedreg", random_state=0)
        fair.fit(data.X.iloc[train], labels.astype(int), sensitive_features=data.groups.iloc[train], clients=held)
        codes = np.unique(data.groups.iloc[train], return_inverse=True)[1].astype(np.int32)
        params = np.asarray(fair.params_, np.float64)
        one["fedreg_further"] = further(params, features.astype(np.float32), labels, codes, parts)
        told.append(one)
        print(one, flush=True)
    harness.save("trained", 1, told)
    harness.write_pages()


if __name__ == "__main__":
    main()
