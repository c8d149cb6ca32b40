"""All methods behind one function: ``fit(recipe, data, model, groups)``.

FedBiO and FedBiOAcc take two stages: the bilevel problem gives the weights of the groups or cells, then FedAvg trains one
common model on rows weighted by them.  (The clients' own inner models of stage one never leave them and are not used.)  All
others train the model at once.

Every number that is not given takes the method's default: the paper's where it names one, see `Recipe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbilevel.algorithms.fedavg import fedavg
from fedbilevel.algorithms.fedbio import fedbio
from fedbilevel.algorithms.fedbioacc import fedbioacc
from fedbilevel.calculus import Tree, squared_norm
from fedbilevel.engines.result import ProgressCallback, Result
from fedbilevel.engines.simulate import simulate
from fedbilevel.fairness.fairfed import fairfed
from fedbilevel.fairness.fcfl import fcfl
from fedbilevel.fairness.fedfb import fedfb
from fedbilevel.fairness.fedminmax import fedminmax
from fedbilevel.fairness.fedreg import fedreg
from fedbilevel.fairness.formulation import fair_problem
from fedbilevel.fairness.models import Model, row_losses
from fedbilevel.fairness.recipe import (
    BILEVEL,
    COMPARES_GROUPS,
    FCFL_STAGES,
    METHODS,
    OUTER_BATCH,
    WHOLE_UP_TO,
    Recipe,
)
from fedbilevel.fairness.rows import add_leaves, marked, training_part
from fedbilevel.hypergradients.neumann import neumann
from fedbilevel.plan import Algorithm
from fedbilevel.problem import BilevelProblem, ClientData, whole_number
from fedbilevel.tables.columns import shown

COUNTED = ("fedminmax", "fedfb")
"""Methods whose server must know how many rows every group has, see `known_counts`."""


class Fitted(NamedTuple):
    """``params`` of the model; ``weights``: per group ("paper", FedMinMax; FedFB: of its positives) or cell ("cells"), None
    where a method has none; ``history``: the recorded rounds of all stages, bytes counted through; ``outer``: stage one's
    answer x."""

    params: Tree
    weights: np.ndarray | None
    history: pd.DataFrame
    outer: np.ndarray | None = None


@dataclass(frozen=True)
class RowWeightedLoss:
    """Mean over the batch of each row's weight times its loss, plus ridge: what stage two minimises."""

    scores: Any
    ridge: float

    def __call__(self, params: Tree, batch: Any) -> jax.Array:
        losses = row_losses(self.scores(params, batch["features"]), batch["labels"])
        square = squared_norm(params)
        return jnp.mean(batch["weights"] * losses) + jnp.asarray(0.5 * self.ridge, square.dtype) * square


def fit(
    recipe: Recipe,
    data: ClientData,
    model: Model,
    groups: int,
    *,
    seed: int = 0,
    record_every: int | None = None,
    capacity: int | None = None,
    progress: ProgressCallback | None = None,
    names: Sequence[Any] | None = None,
) -> Fitted:
    """Train ``model`` by the method of ``recipe`` on ``data``, whose rows hold ``features``, ``labels`` and ``groups``.

    Labels are class numbers, groups 0..``groups`` - 1; an optional leaf ``weights`` holds weights of single rows, for FedAvg
    and the bilevel methods.  ``record_every`` rounds a row of history is taken.  ``capacity``: pad every client's training
    rows to this many, so that tables of different sizes share one compiled program; padding is never read.
    ``names``: what sentences call the groups.
    """
    _check(recipe, data, model, groups)
    run = _Runs(seed, record_every, progress)
    if recipe.method in BILEVEL:
        return _two_stages(recipe, data, model, groups, run, capacity)
    rows = training_part(data, recipe.train_on, capacity)
    counts = known_counts(recipe, rows, groups)
    if (counts == 0).any() and recipe.method in COUNTED:
        empty = int(np.argmin(counts))
        which = f"number {empty}" if names is None else shown(names[empty])
        missing = "rows" if recipe.method == "fedminmax" else "positive rows"
        raise ValueError(
            f"{recipe.method} compares the losses of the groups' {missing}, but group {which} has none: leave that group "
            "out, or use fedbioacc, fedreg or fedavg."
        )
    algorithm, weights = single_level(recipe, model, groups, counts)
    used = _with_unit_weights(rows) if recipe.method == "fedavg" else rows
    result = run("model", algorithm, used, recipe.rounds, weights)
    return Fitted(result.outer, learned_weights(recipe, result.server, counts), run.history())


def single_level(recipe: Recipe, model: Model, groups: int, counts: np.ndarray) -> tuple[Algorithm, str]:
    """The algorithm that trains the model (for the bilevel methods: their second stage), and the clients' weights.

    FedAvg and the second stages read a leaf ``weights`` of the rows.  ``counts``: see `known_counts`.
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


def learned_weights(recipe: Recipe, server: Any, counts: np.ndarray) -> np.ndarray | None:
    """What a single-level method learned about the groups: FedMinMax's mu / rho, FedFB's mu / pi."""
    if recipe.method not in COUNTED:
        return None
    return np.asarray(np.asarray(server.group_weights, np.float64) / (counts / counts.sum()))


def group_counts(data: ClientData, groups: int) -> np.ndarray:
    """Training rows of every group over all clients."""
    return _counted(data, groups, np.ones(np.shape(data.train["groups"]), bool))


def known_counts(recipe: Recipe, data: ClientData, groups: int) -> np.ndarray:
    """What the server must know: rows of every group over all clients (FedMinMax), or its positive rows (FedFB)."""
    return (
        _counted(data, groups, np.asarray(data.train["labels"]) == 1)
        if recipe.method == "fedfb"
        else group_counts(data, groups)
    )


def _counted(data: ClientData, groups: int, which: np.ndarray) -> np.ndarray:
    real = np.arange(data.samples())[None, :] < np.asarray(data.train_sizes)[:, None]
    return np.bincount(np.asarray(data.train["groups"])[real & which], minlength=groups).astype(np.float64)


def bilevel_algorithm(recipe: Recipe, problem: BilevelProblem, data: ClientData) -> Algorithm:
    """FedBiO or FedBiOAcc with the recipe's constants."""
    cells = recipe.formulation.kind == "cells"
    series = neumann(recipe.terms, recipe.series_step)
    outer_batch = _outer_batch(recipe, data)
    steps = {"inner_step": recipe.inner_step, "outer_step": recipe.outer_step}
    chosen = {**recipe.constants(), **{name: value for name, value in steps.items() if value is not None}}
    if recipe.method == "fedbio":
        return fedbio(
            problem,
            series,
            chosen["inner_step"],
            chosen["outer_step"],
            recipe.local_steps,
            recipe.batch_size,
            outer_batch,
        )
    return fedbioacc(
        problem, series, local_steps=recipe.local_steps, batch_size=recipe.batch_size, outer_batch_size=outer_batch,
        previous="local" if cells else "paper", **chosen,
    )  # fmt: skip


def _outer_batch(recipe: Recipe, data: ClientData) -> int | str | None:
    if recipe.outer_batch_size is not None:
        return recipe.outer_batch_size
    if recipe.formulation.kind == "paper":
        return None if recipe.batch_size is None else min(recipe.batch_size, int(data.val_sizes.min()))
    small = recipe.batch_size is None or int(data.val_sizes.max()) <= WHOLE_UP_TO
    return "whole" if small else min(OUTER_BATCH, int(data.val_sizes.min()))


def marks_padding(recipe: Recipe, data: ClientData) -> bool:
    """Whether whole validation sets are read with their padding marked, so that clients of any sizes share one program.

    Otherwise every size would get a copy of it; with whole training sets that is so anyway.
    """
    whole = _outer_batch(recipe, data) == "whole"
    return whole and recipe.batch_size is not None and recipe.formulation.skips_padding()


class _Runs:
    """Simulations of one fit, one after the other, with their histories chained."""

    def __init__(self, seed: int, record_every: int | None, progress: ProgressCallback | None) -> None:
        self.seed, self.record_every, self.progress = seed, record_every, progress
        self.frames: list[pd.DataFrame] = []

    def __call__(self, stage: str, algorithm: Algorithm, data: ClientData, rounds: int, weights: str) -> Result:
        every = None if self.record_every is None else min(self.record_every, rounds)
        result = simulate(
            algorithm, data, rounds, self.seed, weights=weights, record_every=every, diagnostics="cheap", progress=self.progress
        )  # fmt: skip
        frame = result.history
        if len(frame):
            frame = frame.assign(stage=stage)
            if self.frames:
                # Traffic and time go on from the stage before; rounds and steps count within a stage.
                last = self.frames[-1].iloc[-1]
                counted = [name for name in ("bytes_up", "bytes_down", "seconds") if name in frame]
                frame = frame.assign(**{name: frame[name] + last[name] for name in counted})
            self.frames.append(frame)
        return result

    def history(self) -> pd.DataFrame:
        if not self.frames:
            return pd.DataFrame()
        table = pd.concat(self.frames, ignore_index=True)
        return table[["stage", *(name for name in table.columns if name != "stage")]]


def _two_stages(
    recipe: Recipe, data: ClientData, model: Model, groups: int, run: _Runs, capacity: int | None
) -> Fitted:
    form = recipe.formulation
    own = "weights" in data.train
    mark = marks_padding(recipe, data)
    problem = fair_problem(form, model, groups, row_weights=own)
    cells = form.cell_of(data.train["groups"], data.train["labels"], model.classes)
    algorithm = bilevel_algorithm(recipe, problem, data)
    bilevel = add_leaves(marked(data) if mark else data, cells=cells)
    outer = np.asarray(run("weights", algorithm, bilevel, recipe.weight_rounds, recipe.client_weights).outer)
    table = form.weights(outer)
    rows = training_part(data, recipe.train_on, capacity)
    looked_up = table[form.cell_of(rows.train["groups"], rows.train["labels"], model.classes)].astype(np.float32)
    if own:
        looked_up = looked_up * np.asarray(rows.train["weights"], np.float32)
    second, weights = single_level(recipe, model, groups, np.ones(groups))
    params = run("model", second, add_leaves(rows, weights=looked_up), recipe.rounds, weights).outer
    return Fitted(params, table, run.history(), outer)


def _with_unit_weights(rows: ClientData) -> ClientData:
    if "weights" in rows.train:
        return rows
    return add_leaves(rows, weights=np.ones(np.shape(rows.train["labels"]), np.float32))


def _check(recipe: Recipe, data: ClientData, model: Model, groups: int) -> None:
    whole_number("groups", groups)
    needed = {"features", "labels", "groups"}
    if not isinstance(data.train, dict) or not needed <= set(data.train):
        raise ValueError("Rows must be dicts with features, labels and groups.")
    if recipe.method in BILEVEL and data.val is None:
        raise ValueError(f"{recipe.method} needs validation rows: pass val= to ClientData.")
    compares = recipe.method in COMPARES_GROUPS
    if compares and model.classes != 2:
        raise ValueError(
            f"{recipe.method} is defined for two classes, not {model.classes}; use fedbioacc, fedbio or fedavg."
        )
    if compares and groups < 2:
        raise ValueError(f"{recipe.method} compares groups, but there is only one; use fedavg.")
    if compares and "weights" in data.train:
        raise ValueError(f"{recipe.method} takes no weights of single rows; use fedbioacc, fedbio or fedavg.")


__all__ = ["BILEVEL", "METHODS", "Fitted", "Recipe", "bilevel_algorithm", "fit", "group_counts", "single_level"]
