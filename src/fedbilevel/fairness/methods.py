"""The methods by name: how each is run (`Recipe`: every option, with the paper's default where it names one) and its algorithm.

FedPath, the default, solves the bilevel problem for the common model itself, in one stage.  FedBiO and FedBiOAcc take two
stages: the bilevel problem gives the weights of the groups or cells, then FedAvg trains one common model on rows weighted by
them.  (The clients' own inner models of stage one never leave them and are not used.)  All others train the model at once.
`fedbilevel.fairness.program` puts the stages together.

Unless steps are asked for, FedAvg, FedReg and second stages train their model to the end of its objective, by
`fedbilevel.algorithms.lbfgs` on whole local sets.  FedMinMax and FedFB find their group weights by their own steps first.  FCFL
and FairFed have no objective that stands still, and keep to their own steps: longer ones (1 / curvature) were worse by their
own measure on small tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel import kernels
from fedbilevel.algorithms.fedavg import fedavg
from fedbilevel.algorithms.fedbio import fedbio
from fedbilevel.algorithms.fedbioacc import fedbioacc
from fedbilevel.algorithms.lbfgs import lbfgs
from fedbilevel.calculus import Tree
from fedbilevel.fairness.baseline import serves_packed
from fedbilevel.fairness.fairfed import fairfed
from fedbilevel.fairness.fcfl import fcfl
from fedbilevel.fairness.fedfb import fedfb
from fedbilevel.fairness.fedminmax import fedminmax
from fedbilevel.fairness.fedpath import fedpath, rounds_of
from fedbilevel.fairness.fedreg import FairLoss, fedreg
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.models import (
    LinearScores,
    Model,
    RowLosses,
    mean_of,
    mistaken,
    penalty,
    predicted,
    recognised,
    row_losses,
)
from fedbilevel.hints import not_negative, positive, whole_number
from fedbilevel.hypergradients.neumann import neumann
from fedbilevel.plan import Algorithm
from fedbilevel.plugins import plugins, suited
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches

BILEVEL = ("fedbio", "fedbioacc", *plugins("local"))
METHODS = ("fedavg", "fedreg", "fedminmax", "fcfl", "fedfb", "fairfed", *BILEVEL, "fedpath")
PATH = "fedpath"
STRENGTHS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
"""Of FedPath's path; a strength that was asked for comes in between."""
LARGEST_LOSS = 0.005
"""Accuracy that ``strength="auto"`` spends at most."""
RIDGE = 1e-3
COMPARES_GROUPS = ("fedreg", "fedminmax", "fcfl", "fedfb", "fairfed")
"""Methods of one level that are defined by two or more groups."""
SINGLE_STEP = ("fedminmax", "fcfl")
"""They communicate after every step, so their local steps are 1 whatever is asked for."""

STEPS = 2000
STEP = 0.1
"""The paper's steps and learning rate, wherever one of the two is asked for, and of the paper's formulation."""
ENOUGH = 100
"""Rounds of `lbfgs`, most of which arrives after 30 to 70 (docs/algorithms.md) and then asks nobody."""
CELLS_STEPS = 1000
OUTER_BATCH = 512
WHOLE_UP_TO = 4096
"""Validation rows an outer step of "cells" reads: all, up to this many, else `OUTER_BATCH` of them."""
SMOOTH = 2.5
"""Step sizes are meant for losses at most this smooth (Adult, encoded: 2.4); for steeper ones they are divided."""
FCFL_STAGES = (800, 220)
"""Rounds of FCFL's two stages in its paper."""
FEDBIO_CELLS = {"inner_step": 0.16, "outer_step": 0.05}
FEDBIOACC_CELLS = {
    "delta": 1.0, "u": 100.0, "sigma": 1.0, "c_inner": 4.0, "c_outer": 4.0, "inner_step": 1.25, "outer_step": 0.5,
}  # fmt: skip
"""Constants for the "cells" formulation, chosen without test rows (docs/fairness.md).  What matters is that the inner models
are trained about as far as the model of stage two when the weights settle, because the gap shrinks as a model is trained:
weights that suit models trained further leave a gap in stage two.  Over 1,000 steps the inner steps add up to 160 (in stage
two: 2,000 times 0.1; a client's own model needs less).  u = 100 keeps alpha_t from falling early; c alpha_1^2 = 0.19."""


@dataclass(frozen=True)
class Recipe:
    """How a method is run.  ``None`` stands for the method's own default.

    ``steps``: of the model's training.  Without ``steps`` and ``step`` it ends by itself (`finishes`).  With one of them, and
    for the paper's formulation and other methods, it has 2,000 steps of 0.1 (FCFL: 1,020 rounds, as published).
    ``weight_steps``: of stage one, likewise 2,000 for the paper's formulation and 1,000 for "cells".  ``local_steps``: I, 5;
    always 1 for FedMinMax and FCFL.  ``step``: learning rate of the model.  ``inner_step``, ``outer_step``: of stage one
    (FedBiO: 0.1 and 0.1, FedBiOAcc: 1 and 1 times alpha_t, as in the paper; "cells": see `FEDBIO_CELLS` and
    `FEDBIOACC_CELLS`).  ``terms`` and ``series_step``: of the Neumann series.  ``outer_batch_size``: validation rows a step
    reads; by default the batch size ("paper"; at most all), or all of them up to `WHOLE_UP_TO` and `OUTER_BATCH` beyond
    ("cells": rates of small groups cannot be told from a few rows); "batch" is as many as an inner step draws, "whole" is all.
    ``penalty``: FedReg's.  ``group_step``, ``risks``: FedMinMax's.  ``epsilon``: FCFL's.  ``alpha``: FedFB's step of the
    groups' shares.  ``beta``: FairFed's, of the clients' weights.  ``client_weights``: "uniform" as in the paper, or "samples"
    (FedMinMax, FedFB, FairFed and FedPath are defined by the latter).
    ``train_on``: "all" rows of a client, or "train" to leave its validation rows out of the model's training.
    ``gap``, ``accuracy_loss``: what to aim at along FedPath's path instead of the formulation's strength: the smallest strength
    whose gap is at most this, or the smallest gap for at most this much accuracy; ``path``: the strengths there.
    FedPath reads all rows in every round and sets its steps itself: of the other options it reads none.
    ``finish``: whether the model is trained to the end; by default unless steps are asked for (`finishes`).

    Attributes:
        method: One of `METHODS`.
        formulation: Of the bilevel methods.
        steps: Of the model's training; None: the method's own.
        weight_steps: Of stage one; None: the formulation's own.
        local_steps: Between two exchanges.
        batch_size: Training rows of a step; None: all.
        outer_batch_size: Validation rows of a step.
        step: Learning rate of the model.
        inner_step: Of stage one; None: the method's own.
        outer_step: Of stage one; None: the method's own.
        terms: Of the Neumann series.
        series_step: Of the Neumann series.
        penalty: FedReg's.
        group_step: FedMinMax's.
        risks: FedMinMax's: "averaged" or "sent".
        epsilon: FCFL's.
        alpha: FedFB's.
        beta: FairFed's.
        client_weights: "uniform" or "samples".
        train_on: "all", or "train": without the validation rows.
        finish: Whether the model is trained to the end; None: unless steps are asked for.
        gap: FedPath's aim.
        accuracy_loss: FedPath's aim.
        path: FedPath's strengths.
        insists: Whether FedPath uses the formulation's strength also where the rows cannot tell what it gains.  It always does
            with another strength than the default.

    Raises:
        ValueError: The method is not known, or a number is out of its range.
    """

    method: str = "fedpath"
    formulation: Formulation = field(default_factory=lambda: Formulation(ridge=None))
    steps: int | None = None
    weight_steps: int | None = None
    local_steps: int = 5
    batch_size: int | None = 128
    outer_batch_size: int | str | None = None
    step: float | None = None
    inner_step: float | None = None
    outer_step: float | None = None
    terms: int = 5
    series_step: float = 0.5
    penalty: float = 0.1
    group_step: float = 0.1
    risks: str = "averaged"
    epsilon: float = 0.05
    alpha: float = 0.02
    beta: float = 0.1
    client_weights: str = "uniform"
    train_on: str = "all"
    finish: bool | None = None
    gap: float | None = None
    accuracy_loss: float | None = None
    path: Sequence[float] = STRENGTHS
    insists: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, not {self.method!r}.")
        if not isinstance(self.formulation, Formulation):
            raise TypeError(f"formulation must be a Formulation, not {type(self.formulation).__name__}.")
        for name in ("steps", "weight_steps", "batch_size"):
            whole_number(name, getattr(self, name), optional=True)
        whole_number("local_steps", self.local_steps)
        if self.method == PATH and self.formulation.kind != "cells":
            raise ValueError(
                f"formulation={self.formulation.kind!r} takes two stages: name fedbioacc or fedbio as the method with it."
            )
        for name in ("gap", "accuracy_loss"):
            if getattr(self, name) is not None and not 0 <= not_negative(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, such as 0.02, not {getattr(self, name)}.")
        check_aims(self.method, None, self.gap, self.accuracy_loss)
        for name in ("step", "series_step", "inner_step", "outer_step"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.train_on not in ("all", "train"):
            raise ValueError(f"train_on must be 'all' or 'train', not {self.train_on!r}.")
        if self.client_weights not in ("uniform", "samples"):
            raise ValueError(f"client_weights must be 'uniform' or 'samples', not {self.client_weights!r}.")

    def asked(self, groups: int, strength: float | None, share: float | None = None) -> Recipe:
        """For so many groups, with what people call the strength, and trained on all rows wherever some are set `apart`."""
        chosen = replace(self, train_on="all" if self.apart(groups, share) else "train")
        if self.method == PATH and groups == 1:  # there is nothing to even out
            strength, chosen = 0.0, replace(chosen, gap=None, accuracy_loss=None)
        if strength is None:
            return chosen
        form = replace(self.formulation, strength=strength)
        return replace(chosen, formulation=form, penalty=strength, insists=True)

    @property
    def exactly(self) -> bool:
        """Whether somebody asked for just this strength."""
        return self.insists or self.formulation.strength != Formulation.strength

    @property
    def strengths(self) -> tuple[float, ...]:
        """FedPath's path, without the unweighted model it starts from."""
        if self.gap is not None or self.accuracy_loss is not None:
            return tuple(self.path)
        asked = float(self.formulation.strength)
        return tuple(sorted({*self.path, asked})) if asked > 0 else ()

    def apart(self, groups: int, share: float | None = None) -> bool:
        """Whether validation rows are taken out of the training rows: where a ``share`` is asked for, and for the paper's
        group-balanced sets.  Else both levels read the same rows, and methods of one level know no others."""
        balanced = self.formulation.kind == "paper" and groups > 1
        return self.method in BILEVEL and (share is not None or balanced)

    def settled(
        self, smallest: int, val_smallest: int, val_largest: int, curvature: float, total: float = 1.0
    ) -> Recipe:
        """Batches that every client can draw, from how many rows clients have; smaller steps, also of stage one, where the
        features make the loss steeper (``curvature``, see `fedbilevel.fairness.program.smoothness`) than usual; and the ridge
        where none was asked for: `RIDGE`, but one over all rows for FedPath, which trains to the end."""
        if self.formulation.ridge is None:
            form = replace(self.formulation, ridge=1 / total if self.method == PATH else RIDGE)
            return replace(self, formulation=form).settled(smallest, val_smallest, val_largest, curvature, total)
        steeper = max(1.0, curvature / SMOOTH)
        batch = None if self.batch_size is None else min(self.batch_size, smallest)
        step = (STEP if self.step is None else self.step) / steeper
        chosen = replace(self, batch_size=batch, step=step, finish=self.finishes)
        chosen = replace(chosen, outer_batch_size=chosen._outer_batch(val_smallest, val_largest))
        if steeper == 1 or self.method not in BILEVEL:
            return chosen
        usual = self.constants()["inner_step"] if self.inner_step is None else self.inner_step
        return replace(chosen, inner_step=usual / steeper, series_step=self.series_step / steeper)

    @property
    def finishes(self) -> bool:
        """Whether the model is trained to the end: unless steps are asked for, by a number or by the paper's formulation,
        which stands for the paper's."""
        unasked = self.steps is None and self.step is None and self.formulation.kind != "paper"
        return unasked if self.finish is None else self.finish

    @property
    def to_the_end(self) -> bool:
        """Whether `lbfgs` alone trains it, on whole local sets."""
        return self.finishes and (self.method in BILEVEL or self.method in ("fedavg", "fedreg"))

    @property
    def finish_after(self) -> int | None:
        """Rounds after which FedMinMax and FedFB, their group weights found, train it to the end; None: never."""
        if not (self.finishes and self.method in ("fedminmax", "fedfb")):
            return None
        return -(-(STEPS if self.steps is None else self.steps) // self._between)

    def _outer_batch(self, smallest: int, largest: int) -> int | str:
        """Validation rows an outer step reads, from those of the smallest and of the largest client."""
        if self.outer_batch_size not in (None, "batch"):
            return self.outer_batch_size
        if self.batch_size is None:
            return "whole"
        if self.outer_batch_size == "batch":
            return self.batch_size
        if self.formulation.kind == "paper":
            return min(self.batch_size, smallest)
        return "whole" if largest <= WHOLE_UP_TO else min(OUTER_BATCH, smallest)

    def constants(self) -> dict[str, float]:
        """FedBiO's (also for other packages' methods) or FedBiOAcc's constants, before ``inner_step`` and ``outer_step``."""
        cells = self.formulation.kind == "cells"
        if self.method != "fedbioacc":
            return FEDBIO_CELLS if cells else {"inner_step": 0.1, "outer_step": 0.1}
        return FEDBIOACC_CELLS if cells else {"inner_step": 1.0, "outer_step": 1.0}

    @property
    def rounds(self) -> int:
        """Rounds of the model's training."""
        if self.method == PATH:
            return rounds_of(self.strengths)
        if self.to_the_end:
            return ENOUGH
        if self.method == "fcfl":
            return sum(FCFL_STAGES) if self.steps is None else self.steps
        steps = STEPS if self.steps is None else self.steps
        return -(-steps // self._between) + (0 if self.finish_after is None else ENOUGH)

    @property
    def weight_rounds(self) -> int:
        """Rounds of stage one."""
        default = STEPS if self.formulation.kind == "paper" else CELLS_STEPS
        return -(-(default if self.weight_steps is None else self.weight_steps) // self.local_steps)

    @property
    def total(self) -> tuple[int, int]:
        """Rounds and steps of all stages."""
        before = self.weight_rounds if self.method in BILEVEL else 0
        return before + self.rounds, before * self.local_steps + self.rounds * self._between

    @property
    def _between(self) -> int:
        """Steps of the model's training between two rounds."""
        return 1 if self.method in (*SINGLE_STEP, PATH) or self.to_the_end else self.local_steps

    def record_every(self, rows: int) -> int:
        """How often to record the longer stage for about so many rows of history."""
        return max(1, max(self.rounds, self.weight_rounds if self.method in BILEVEL else 0) // rows)


@dataclass(frozen=True)
class Ladder:
    """How many rows a client has, as far as batches depend on it: sums over clients tell how many of them stand on which rung,
    and not which.

    A client with a batch of training rows or more stands on the last rung, and so does one with `OUTER_BATCH` validation rows.
    Rungs are a row apart up to `OUTER_BATCH`, above that an eighth of a doubling.  One more number counts the clients with more
    validation rows than are read whole.
    """

    batch: int

    def place(self, rows: int, val_rows: int) -> np.ndarray:
        """A client's: one at its rung, by training and by validation rows."""
        parts = [np.zeros(len(rungs)) for rungs in self._rungs]
        for part, rungs, size in zip(parts, self._rungs, (rows, val_rows), strict=True):
            part[np.searchsorted(rungs, size, side="right") - 1] = 1
        return np.concatenate([*parts, [float(val_rows > WHOLE_UP_TO)]])

    def bounds(self, total: np.ndarray) -> tuple[int, int, int]:
        """From all clients' together: bounds below every client's training and validation rows, and one above the latter."""
        ends = np.cumsum([len(rungs) for rungs in self._rungs])
        train, val, (more,) = np.split(np.asarray(total), ends)
        least, val_least = (
            int(rungs[np.flatnonzero(part)[0]]) for rungs, part in zip(self._rungs, (train, val), strict=True)
        )
        return least, val_least, 2**53 if more else max(WHOLE_UP_TO, val_least)

    @property
    def length(self) -> int:
        return sum(len(rungs) for rungs in self._rungs) + 1

    @property
    def _rungs(self) -> tuple[np.ndarray, np.ndarray]:
        return _rungs(self.batch)


@cache
def _rungs(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Of training and of validation rows."""
    every = np.array([*range(1, OUTER_BATCH + 1), *(int(OUTER_BATCH * 2 ** (k / 8)) for k in range(1, 97))])
    most = max(batch, OUTER_BATCH)
    return (np.append(every[every < batch], batch), np.concatenate([[0], every[every < most], [most]]))


@dataclass(frozen=True)
class RowWeightedLoss:
    """Mean over the batch of each row's weight times its loss, plus ridge: what stage two minimises."""

    scores: Any
    ridge: float
    losses: RowLosses = row_losses

    def __call__(self, params: Tree, batch: Any) -> jax.Array:
        losses = self.losses(self.scores(params, batch["features"]), batch["labels"])
        return jnp.mean(batch["weights"] * losses) + penalty(params, self.ridge)

    @property
    def linear(self) -> str | None:
        """The leaf that kernels may read packed."""
        return "features" if isinstance(self.scores, LinearScores) and self.losses is row_losses else None

    def gradient_on(self, params: Tree, batches: Batches) -> Tree | None:
        """On the step's minibatch, by the kernel for packed rows where they are packed."""
        if batches.draws.inner is None or not serves_packed(batches.data, self.scores, params, self.losses):
            return None
        data = batches.data
        rows, indices = data.flat("train", batches.draws.inner)
        labels, weights = rows["labels"].astype(params.dtype), rows["weights"].astype(params.dtype)
        ridge = jnp.asarray(self.ridge, params.dtype)
        return kernels.weighted_gradient(data.features(rows, "features"), labels, weights, indices, params, ridge)

    def masked(self, params: Tree, batch: Any, real: jax.Array) -> jax.Array:
        """The same over the rows that are ``real``."""
        losses = batch["weights"] * self.losses(self.scores(params, batch["features"]), batch["labels"])
        return mean_of(losses, real) + penalty(params, self.ridge)


def check_aims(method: str, strength: Any, gap: Any, accuracy_loss: Any) -> None:
    """Refuse what says twice how much fairness to ask for, or says it to a method that has no path."""
    given = {"strength": strength, "gap": gap, "accuracy_loss": accuracy_loss}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} both say how much fairness to ask for: give one of them.")
    if method != PATH and named and named[0] != "strength":
        raise ValueError(
            f"{named[0]} is an aim along the path of fedpath, and {method} has none: leave one of them out."
        )


def path_algorithm(recipe: Recipe, model: Model, groups: int, rows: float, threshold: float) -> Algorithm:
    """FedPath; the recipe is settled."""
    form, ridge = replace(recipe.formulation, strength=0.0, ridge=None), float(recipe.formulation.ridge or 0)
    return fedpath(form, model, groups, rows, ridge, recipe.strengths, threshold=threshold)


def single_level(recipe: Recipe, model: Model, groups: int, counts: np.ndarray, rows: float) -> tuple[Algorithm, str]:
    """The algorithm that trains the model (for the bilevel methods: their second stage), and the clients' weights.

    FedAvg and the second stages read a leaf ``weights`` of the rows.  ``counts``: rows of every group over all clients
    (FedMinMax), or positive ones (FedFB; of more than two classes ``[class, group]``, of a number all); others ignore them.
    ``rows``: training rows of all clients, for FairFed.
    """
    ridge = float(recipe.formulation.ridge or 0)
    scores, start, losses = model.scores, model.start, model.losses
    compared = {"mean_prediction": predicted, "mean_error": mistaken}.get(str(recipe.formulation.metric), recognised)
    shared: dict[str, Any] = {"groups": groups, "ridge": ridge, "losses": losses, "compared": compared}
    if recipe.to_the_end:
        weighted = RowWeightedLoss(scores, ridge, losses)
        fair = FairLoss(scores, groups, recipe.penalty, ridge, losses=losses, compared=compared)
        return lbfgs(fair if recipe.method == "fedreg" else weighted, start), recipe.client_weights
    assert recipe.step is not None
    after = recipe.finish_after
    loop = (recipe.step, recipe.local_steps, recipe.batch_size)
    if recipe.method == "fedreg":
        return fedreg(scores, start, *loop, recipe.penalty, **shared), recipe.client_weights
    if recipe.method == "fcfl":
        first, second = FCFL_STAGES
        algorithm = fcfl(
            scores, start, recipe.step, epsilon=recipe.epsilon, stage_one=first, stage_two=second, rounds=recipe.rounds,
            **shared,
        )  # fmt: skip
        return algorithm, recipe.client_weights
    if recipe.method == "fedminmax":
        steps = (recipe.step, recipe.group_step)
        return fedminmax(
            scores, start, counts, *steps, recipe.batch_size, ridge, recipe.risks, losses, after
        ), "samples"
    if recipe.method == "fedfb":
        step, local_steps, batch_size = loop
        return fedfb(
            scores, start, counts, step, recipe.alpha, local_steps, batch_size, ridge, losses, after
        ), "samples"
    if recipe.method == "fairfed":
        return fairfed(scores, start, *loop, recipe.beta, rows=rows, classes=max(2, model.classes), **shared), "samples"
    return fedavg(RowWeightedLoss(scores, ridge, losses), start, *loop), recipe.client_weights


def bilevel_algorithm(recipe: Recipe, problem: BilevelProblem) -> Algorithm:
    """FedBiO, FedBiOAcc or another package's method with the constants of a settled recipe (`Recipe.settled`)."""
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
    if recipe.method != "fedbioacc":
        method = plugins("local")[recipe.method]
        return method(problem, **suited(method, {"hypergradient": series, **chosen}))
    return fedbioacc(problem, series, **chosen, previous="local" if recipe.formulation.kind == "cells" else "paper")
