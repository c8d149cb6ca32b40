"""The algorithms behind the methods' names.

FedBiO and FedBiOAcc take two stages: the bilevel problem gives the weights of the groups or cells, then FedAvg trains one
common model on rows weighted by them.  (The clients' own inner models of stage one never leave them and are not used.)  All
others train the model at once.  `fedbilevel.fairness.program` puts the stages together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.fedavg import fedavg
from fedbilevel.algorithms.fedbio import fedbio
from fedbilevel.algorithms.fedbioacc import fedbioacc
from fedbilevel.calculus import Tree, squared_norm
from fedbilevel.fairness.fairfed import fairfed
from fedbilevel.fairness.fcfl import fcfl
from fedbilevel.fairness.fedfb import fedfb
from fedbilevel.fairness.fedminmax import fedminmax
from fedbilevel.fairness.fedreg import fedreg
from fedbilevel.fairness.models import Model, row_losses
from fedbilevel.fairness.recipe import FCFL_STAGES, Recipe
from fedbilevel.hypergradients.neumann import neumann
from fedbilevel.plan import Algorithm
from fedbilevel.problem import BilevelProblem


@dataclass(frozen=True)
class RowWeightedLoss:
    """Mean over the batch of each row's weight times its loss, plus ridge: what stage two minimises."""

    scores: Any
    ridge: float

    def __call__(self, params: Tree, batch: Any) -> jax.Array:
        losses = row_losses(self.scores(params, batch["features"]), batch["labels"])
        square = squared_norm(params)
        return jnp.mean(batch["weights"] * losses) + jnp.asarray(0.5 * self.ridge, square.dtype) * square


def single_level(recipe: Recipe, model: Model, groups: int, counts: np.ndarray) -> tuple[Algorithm, str]:
    """The algorithm that trains the model (for the bilevel methods: their second stage), and the clients' weights.

    FedAvg and the second stages read a leaf ``weights`` of the rows.  ``counts``: rows of every group over all clients
    (FedMinMax), or positive ones (FedFB); others do not read them.
    """
    ridge = float(recipe.formulation.ridge)
    scores, start = model.scores, model.start
    loop = (recipe.step, recipe.local_steps, recipe.batch_size)
    if recipe.method == "fedreg":
        return fedreg(scores, start, *loop, recipe.penalty, groups=groups, ridge=ridge), recipe.client_weights
    if recipe.method == "fcfl":
        first, second = FCFL_STAGES
        algorithm = fcfl(
            scores, start, recipe.step, groups=groups, epsilon=recipe.epsilon, stage_one=first, stage_two=second,
            rounds=recipe.rounds, ridge=ridge,
        )  # fmt: skip
        return algorithm, recipe.client_weights
    if recipe.method == "fedminmax":
        steps = (recipe.step, recipe.group_step)
        return fedminmax(scores, start, counts, *steps, recipe.batch_size, ridge, recipe.risks), "samples"
    if recipe.method == "fedfb":
        step, local_steps, batch_size = loop
        return fedfb(scores, start, counts, step, recipe.alpha, local_steps, batch_size, ridge), "samples"
    if recipe.method == "fairfed":
        return fairfed(scores, start, *loop, recipe.beta, groups=groups, ridge=ridge), "samples"
    return fedavg(RowWeightedLoss(scores, ridge), start, *loop), recipe.client_weights


def bilevel_algorithm(recipe: Recipe, problem: BilevelProblem) -> Algorithm:
    """FedBiO or FedBiOAcc with the recipe's constants; the recipe is settled (`Recipe.settled`)."""
    series = neumann(recipe.terms, recipe.series_step)
    steps = {"inner_step": recipe.inner_step, "outer_step": recipe.outer_step}
    chosen: dict[str, Any] = {
        **recipe.constants(),
        **{name: value for name, value in steps.items() if value is not None},
        "local_steps": recipe.local_steps,
        "batch_size": recipe.batch_size,
        "outer_batch_size": recipe.outer_batch_size,
    }
    if recipe.method == "fedbio":
        return fedbio(problem, series, **chosen)
    return fedbioacc(problem, series, **chosen, previous="local" if recipe.formulation.kind == "cells" else "paper")
