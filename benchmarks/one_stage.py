"""Which one-stage method for fair weights?  FedPath beside methods for global lower levels on the same "cells" problem.

``python benchmarks/one_stage.py ROWS.csv [MOST]`` measures what is not in the file yet, MOST methods in this call.  `settings`
makes a table of docs/fairness.md from the file that is kept.

Employment by disability (sites: years) and Adult by sex (three I.I.D. clients), as docs/study-protocol.md divides them, splits
0 to 2; both were touched before that study.  Strength 5 and a ridge of one over the rows for everybody, and all read all
their rows.  SimFBO, FedBiOAcc and FedMSA run 400 rounds of 5 local steps; their D is the mean of the clients' own.  (SimFBO
with equal local steps, and the same steps at server and clients, is FedBiO for global lower levels.)  Every setting of `STEPS`
is run, and the one counts whose model has the smallest objective on all training rows: up to four runs for one.  FedMSA's
steps set themselves.  Bytes are one client's, for one run.
"""

import ast
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

import fedbilevel as fb
from fedbilevel import storage
from fedbilevel.engines.result import Diverged
from fedbilevel.fairness import FairFederatedClassifier
from fedbilevel.fairness.formulation import Formulation, fair_problem, spread_of, statistics
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.models import Model
from fedbilevel.studies.tables import clients, divided
from fedbilevel.tables.encoder import Encoder

CASES = {"employment-disability": "natural", "adult-sex": "iid"}
SPLITS, ROUNDS, STRENGTH = 3, 400, 5.0
STEPS: dict[str, list[dict[str, Any]]] = {
    "simfbo": [
        {"inner_step": i, "adjoint_step": i, "outer_step": o}
        for i, o in ((0.5, 0.02), (0.5, 0.1), (0.5, 0.5), (0.1, 0.1))
    ],
    "fedbioacc_global": [{"inner_step": 2.0, "adjoint_step": 2.0, "outer_step": o} for o in (0.1, 0.5, 2.0)],
    "fedmsa": [{}],
}
NAMES = {
    "fedpath": "FedPath",
    "simfbo": "SimFBO (FedBiO, global)",
    "fedbioacc_global": "FedBiOAcc, global",
    "fedmsa": "FedMSA",
}
KEPT = Path(__file__).parents[1] / "docs" / "figures" / "one-stage-rows.csv"


def one(case: str, split: int, method: str) -> Iterator[dict[str, Any]]:
    """A row for every setting of one method."""
    train, test, names = divided(case, split)
    held = clients(train, CASES[case], split)
    encoder = Encoder.learn(train.features)
    features, outside = encoder.transform(train.features), encoder.transform(test.features)
    form = Formulation(strength=STRENGTH, ridge=1 / len(features))
    whole = {"features": features, "labels": train.labels.astype(np.float32), "groups": train.codes}

    def measured(params: np.ndarray, bytes_up: float, bytes_down: float, setting: dict[str, Any]) -> dict[str, Any]:
        scores = features.astype(np.float64) @ params
        loss = np.mean(np.logaddexp(scores, 0) - train.labels * scores)
        sums = statistics(form, scores.astype(np.float32), whole["labels"], train.codes, len(names))
        counts = Counts.of(test.labels, outside @ params > 0, test.codes, len(names))
        return {
            "case": case, "split": split, "method": method, "setting": str(setting),
            "objective": loss + STRENGTH * float(spread_of(form, sums / len(scores), len(scores))),
            "test_accuracy": float(counts.overall("accuracy")), "test_gap": float(counts.gap("equal_opportunity")),
            "bytes_up": bytes_up / len(set(held)), "bytes_down": bytes_down / len(set(held)),
        }  # fmt: skip

    if method == "fedpath":
        model = FairFederatedClassifier(random_state=split)
        model.fit(train.features, train.labels, sensitive_features=train.groups, clients=held)
        last = model.history_.iloc[-1]
        yield measured(np.asarray(model.params_, np.float64), last["bytes_up"], last["bytes_down"], {})
        return
    problem = replace(fair_problem(form, Model("logistic", features.shape[1]), len(names)), lower_level="global")
    cells = {**whole, "cells": form.cell_of(train.codes, train.labels, 2)}
    rows = [{name: leaf[held == client] for name, leaf in cells.items()} for client in dict.fromkeys(held)]
    data = fb.ClientData.from_clients([(each, {n: v for n, v in each.items() if n != "cells"}) for each in rows])
    for setting in STEPS[method]:
        algorithm = getattr(fb, method)(problem, **setting, local_steps=5)
        try:
            result = fb.simulate(algorithm, data, ROUNDS, seed=split, weights="samples", record_every=ROUNDS)
        except Diverged:
            yield {"case": case, "split": split, "method": method, "setting": str(setting), "objective": np.inf}
            continue
        params = np.mean(np.asarray(jax.tree.leaves(result.inner)[0], np.float64), axis=0)
        last = result.history.iloc[-1]
        yield measured(params, last["bytes_up"], last["bytes_down"], setting)


def run(file: Path, most: int = 1000) -> None:
    """``most``: methods to measure in this call."""
    warnings.simplefilter("ignore")
    known = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=["case", "split", "method"])
    for split in range(SPLITS):
        for case in CASES:
            for method in NAMES:
                if (
                    most > 0
                    and not ((known["case"] == case) & (known["split"] == split) & (known["method"] == method)).any()
                ):
                    rows = pd.DataFrame(list(one(case, split, method)))
                    known = pd.concat([known, rows], ignore_index=True)
                    storage.write(file, known.to_csv(index=False, float_format="%.6g"))
                    print(rows.to_string(), flush=True)
                    most -= 1


def settings() -> str:
    """Every setting on split 0 of employment by disability, as docs/fairness.md shows it."""
    rows = pd.read_csv(KEPT).query("case == 'employment-disability' and split == 0")
    lines = ["| method | steps (y and u, x) | test accuracy | test gap | objective, training rows | kB up, down |",
             "|---|---|---:|---:|---:|---:|"]  # fmt: skip
    rows["method"] = pd.Categorical(rows["method"], list(NAMES))
    for row in rows.sort_values(["method", "objective"]).to_dict("records"):
        steps = ast.literal_eval(row["setting"])
        shown = f"{steps['inner_step']:g}, {steps['outer_step']:g}" if steps else "none to choose"
        rates = " | ".join(f"{row[name]:.4f}"[1:] for name in ("test_accuracy", "test_gap", "objective"))
        sent = ", ".join(f"{row[name] / 1000:.0f}" for name in ("bytes_up", "bytes_down"))
        lines.append(f"| {NAMES[row['method']]} | {shown} | {rates} | {sent} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
