"""A run's model as a saved classifier, which `FairFederatedClassifier.load` reads and which predicts from raw tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbilevel.fairness.models import Model
from fedbilevel.fairness.recipe import Recipe
from fedbilevel.fairness.saving import FittedModel, Scaling
from fedbilevel.fairness.trainer import Fitted
from fedbilevel.studies.table1.data import CLIENTS, Split
from fedbilevel.studies.table1.design import Job


def save_model(path: Path, split: Split, job: Job, recipe: Recipe, course: Fitted) -> None:
    form, params = recipe.formulation, course.params[split.padding :]
    remembered = {
        "options": {
            "method": recipe.method, "formulation": form.kind, "metric": form.metric, "ridge": form.ridge,
            "steps": recipe.steps, "weight_steps": recipe.weight_steps, "batch_size": recipe.batch_size,
            "step": job.rate, "random_state": job.seeds[0],
        },
        "clients": [str(number) for number in range(CLIENTS)],
        "features": len(split.columns),
        "names": None if split.encoder is None else split.columns,
        "history": {},
    }  # fmt: skip
    FittedModel(
        split.encoder or Scaling(np.zeros(len(params) - 1), np.ones(len(params) - 1)),
        Model("logistic", len(params)),
        params,
        np.array([0, 1]),
        split.names,
        course.weights,
        recipe.method,
        remembered,
    ).write(path)
