"""A run's model as a saved classifier, which `FairFederatedClassifier.load` reads and which predicts from raw tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedbilevel.fairness.inputs import named_weights
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.recipe import Recipe
from fedbilevel.fairness.trainer import Course
from fedbilevel.studies.table1.data import CLIENTS, Split
from fedbilevel.studies.table1.design import Job


def save_model(path: Path, split: Split, job: Job, recipe: Recipe, course: Course) -> None:
    from fedbilevel.fairness.estimator import FairFederatedClassifier

    form = recipe.formulation
    classifier = FairFederatedClassifier(
        recipe.method, formulation=form.kind, metric=form.metric, ridge=form.ridge, steps=recipe.steps,
        weight_steps=recipe.weight_steps, batch_size=recipe.batch_size, step=job.rate, random_state=job.seeds[0],
    )  # fmt: skip
    params = course.params[split.padding :]
    classifier.model_ = Model("logistic", len(params))
    classifier.params_ = params
    classifier.classes_ = np.array([0, 1])
    classifier.groups_ = split.names
    classifier.clients_ = [str(number) for number in range(CLIENTS)]
    classifier.encoder_ = split.encoder
    classifier.n_features_in_ = len(split.columns)
    if split.encoder is not None:
        classifier.feature_names_in_ = np.asarray(split.columns, dtype=object)
        classifier.means_, classifier.scales_ = split.encoder.means, split.encoder.scales
    else:
        classifier.means_, classifier.scales_ = np.zeros(len(params) - 1), np.ones(len(params) - 1)
    weights = course.weights
    classifier.group_weights_ = None if weights is None else named_weights(weights, split.names, classifier.classes_)
    classifier.history_ = pd.DataFrame()
    classifier.save(path)
