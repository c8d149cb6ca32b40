"""What is measured of one run: accuracy and gaps on three sets of rows, rates by group, convergence and cost; its model."""

from __future__ import annotations

import json
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.fairness.counts import Counts
from fedbilevel.fairness.metrics import auc
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.recipe import Recipe
from fedbilevel.fairness.saving import FittedModel, Scaling, named_weights
from fedbilevel.fairness.trainer import Fitted, Stop
from fedbilevel.studies.data import CLIENTS, PARTS, Case, Rows

Criterion = tuple[str, str]
"""The metric of the gaps, and how groups are compared."""


def measured(
    case: Case, recipe: Recipe, fitted: Fitted, marks: dict[str, Any], setting: dict[str, Any], criterion: Criterion
) -> dict[str, Any]:
    """Rows, groups, weights and history of one run, as a run folder takes them, and ``model``, which writes its file.

    ``marks``: which run it is; ``setting``: further columns of its row.
    """
    ends = [list(stops)[-1] for _, stops in groupby(fitted.stops, key=lambda stop: stop.stage)]
    counts = {} if fitted.diverged else {part: case.counts(part, fitted.params) for part in PARTS}
    weights = None if fitted.weights is None else named_weights(fitted.weights, case.names, np.array(["0", "1"]))
    row: dict[str, Any] = {
        **marks,
        **setting,
        **_quality(case, fitted, counts, criterion),
        "rounds": sum(stop.round for stop in ends),
        "steps": sum(stop.step for stop in ends),
        **_costs(ends[-1]),
        "seconds": round(fitted.seconds, 6),
        "weights": "" if weights is None else json.dumps([round(float(weight), 6) for weight in weights]),
        "diverged": fitted.diverged,
    }
    groups = [
        counts[part].table(case.names).drop(columns="negatives").reset_index().assign(part=part)
        for part in ("train", "test")
        if part in counts
    ]
    return {
        "rows": pd.DataFrame([row]),
        "groups": pd.concat(groups, ignore_index=True).assign(**marks) if groups else pd.DataFrame(),
        "weights": pd.DataFrame() if weights is None else weights.reset_index().assign(**marks),
        "history": _history(case, fitted, criterion).assign(**marks),
        "model": partial(_save_model, case, recipe, fitted, setting["rate"], marks["seed"]),
    }


def _costs(stop: Stop) -> dict[str, int]:
    calls = dict(zip(("gradient_calls", "hvp_calls", "cross_calls"), stop.calls, strict=True))
    return {"bytes_up": stop.bytes_up, "bytes_down": stop.bytes_down, **calls}


def _quality(case: Case, fitted: Fitted, counted: dict[str, Counts], criterion: Criterion) -> dict[str, float]:
    quality = {}
    for part, counts in counted.items():
        quality[f"{part}_accuracy"] = float(counts.overall("accuracy"))
        quality[f"{part}_gap"] = float(counts.gap(*criterion))
        quality[f"{part}_gap_majority"] = float(counts.gap(criterion[0], "majority_vs_rest"))
    if "test" in counted:
        quality["test_balanced_accuracy"] = float(counted["test"].balanced_accuracy())
        quality["test_auc"] = auc(case.test.labels, case.test.features @ fitted.params)
    return quality


def _history(case: Case, fitted: Fitted, criterion: Criterion) -> pd.DataFrame:
    """One row a stop: the objective of its stage, and for models also what they do on the test rows."""
    models = [stop for stop in fitted.stops if stop.stage == "model"]
    params = np.stack([stop.outer for stop in models], axis=1)
    losses, decisions = iter(_mean_losses(case.train, params)), iter((case.test.features @ params > 0).T)
    lines = []
    for stop in fitted.stops:
        line = {"stage": stop.stage, "round": stop.round, "step": stop.step, **_costs(stop)}
        if stop.stage == "weights":
            line["objective"] = _validation_loss(case, stop)
        else:
            counts = Counts.of(case.test.labels, next(decisions), case.test.groups, len(case.names))
            line["objective"] = float(next(losses))
            line["test_accuracy"] = float(counts.overall("accuracy"))
            line["test_gap"] = float(counts.gap(*criterion))
        lines.append(line)
    return pd.DataFrame(lines)


def _mean_losses(rows: Rows, params: np.ndarray) -> np.ndarray:
    """The mean log loss of every model (a column of ``params``) on ``rows``."""
    scores = rows.features @ params
    return np.asarray((np.logaddexp(scores, 0) - rows.labels[:, None] * scores).mean(axis=0, dtype=np.float64))


def _validation_loss(case: Case, stop: Stop) -> float:
    """Mean over the clients of their inner model's loss on their validation rows; ridge and fairness term apart."""
    if stop.inner is None:
        return float("nan")
    data = case.paper.bilevel
    means = []
    for client, size in enumerate(data.val_sizes):
        rows = Rows(*(np.asarray(data.val[name])[client, :size] for name in Rows._fields))
        means.append(float(_mean_losses(rows, stop.inner[client][:, None])[0]))
    return float(np.mean(means))


def _save_model(case: Case, recipe: Recipe, fitted: Fitted, rate: float, seed: int, path: Path) -> None:
    """As a saved classifier, which `FairFederatedClassifier.load` reads and which predicts from raw tables."""
    form, params = recipe.formulation, fitted.params[case.padding :]
    remembered = {
        "options": {
            "method": recipe.method, "formulation": form.kind, "metric": form.metric, "ridge": form.ridge,
            "steps": recipe.steps, "weight_steps": recipe.weight_steps, "batch_size": recipe.batch_size, "step": rate,
            "random_state": seed,
        },
        "clients": [str(number) for number in range(CLIENTS)],
        "features": len(case.columns),
        "names": None if case.encoder is None else case.columns,
        "history": {},
    }  # fmt: skip
    encoder = case.encoder or Scaling(np.zeros(len(params) - 1), np.ones(len(params) - 1))
    model, classes = Model("logistic", len(params)), np.array([0, 1])
    FittedModel(encoder, model, params, classes, case.names, fitted.weights, recipe.method, remembered).write(path)
