"""Training on encoded sites: the options of a fit as a recipe, and the recipe run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from fedbilevel.calculus import Tree
from fedbilevel.datasets import partition
from fedbilevel.engines.result import Progress
from fedbilevel.fairness.estimator import SMALLEST_CAPACITY, SMOOTH
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.methods import fit
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.recipe import BILEVEL, METHODS, Recipe
from fedbilevel.jobs.fit.data import Part
from fedbilevel.problem import ClientData

NAMES = {
    "fedavg": "FedAvg", "fedreg": "FedReg", "fedminmax": "FedMinMax", "fcfl": "FCFL", "fedfb": "FedFB",
    "fairfed": "FairFed", "fedbio": "FedBiO", "fedbioacc": "FedBiOAcc",
}  # fmt: skip
HISTORY_ROWS = 20
VALIDATION_SHARE = 0.2
STRENGTHS = {"cells": (0.5, 2.0, 5.0, 10.0), "fedreg": (0.03, 0.1, 0.3, 1.0)}
"""What ``strength="auto"`` chooses from."""


@dataclass(frozen=True)
class FitOptions:
    """How to fit; what is None takes the method's default.  See `Recipe` and `FairFederatedClassifier` for the meaning."""

    method: str = "fedbioacc"
    formulation: str = "cells"
    metric: str = "equal_opportunity"
    strength: float | str | None = None
    steps: int | None = None
    weight_steps: int | None = None
    local_steps: int = 5
    batch_size: int = 128
    step: float = 0.1
    ridge: float = 1e-3
    model: str = "logistic"
    hidden: int = 16
    client_weights: str = "uniform"
    test_share: float = 0.3
    seed: int = 0
    compare_with: str | None = "fedavg"

    def __post_init__(self) -> None:
        if not 0 < self.test_share < 1:
            raise ValueError(f"--test-share must lie between 0 and 1, not {self.test_share}.")
        if self.compare_with is not None and self.compare_with not in METHODS:
            raise ValueError(f"--compare-with must be one of {', '.join(METHODS)} or none, not {self.compare_with!r}.")
        if self.strength is not None and self.knob is None:
            which = f"{self.method} with the paper's formulation" if self.method in BILEVEL else self.method
            raise ValueError(
                f"--strength means nothing to {which}; it is for fedbio and fedbioacc with cells, and fedreg."
            )
        if isinstance(self.strength, str) and self.strength != "auto":
            raise ValueError(f"--strength must be a number or auto, not {self.strength!r}.")
        self.recipe(batch_rows=self.batch_size, smooth=0.0, groups=2)

    @property
    def knob(self) -> str | None:
        """Whose strengths there are to choose from: "cells", "fedreg", or None."""
        if self.method in BILEVEL:
            return "cells" if self.formulation == "cells" else None
        return "fedreg" if self.method == "fedreg" else None

    @property
    def label(self) -> str:
        """What the method is called in tables."""
        name = NAMES.get(self.method, self.method)
        return f"{name}, {self.formulation}" if self.method in BILEVEL else name

    def baseline(self) -> FitOptions | None:
        """The same for the method to compare with; None where there is none, or it is this one."""
        if self.compare_with in (None, self.method):
            return None
        return replace(self, method=str(self.compare_with), strength=None, compare_with=None)

    def recipe(self, *, batch_rows: int, smooth: float, groups: int) -> Recipe:
        """Steps are divided where the encoded features make the loss steeper than usual, as the estimator does."""
        slower = max(1.0, smooth / SMOOTH)
        form = Formulation(self.formulation, self.metric, ridge=self.ridge)
        number = None if self.strength is None or isinstance(self.strength, str) else float(self.strength)
        plain = Recipe(
            self.method,
            form if number is None else replace(form, strength=number),
            self.steps,
            self.weight_steps,
            self.local_steps,
            min(self.batch_size, batch_rows),
            step=self.step / slower,
            client_weights=self.client_weights,
            train_on="all" if self._apart(groups) else "train",
        )
        if number is not None:
            plain = replace(plain, penalty=number)
        return plain.slower(slower)

    def _apart(self, groups: int) -> bool:
        return self.method in BILEVEL and self.formulation == "paper" and groups > 1

    def configuration(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class Trained(NamedTuple):
    """``weights``: of groups or cells, or None; ``recipe``: what was run."""

    params: Tree
    weights: np.ndarray | None
    history: pd.DataFrame
    recipe: Recipe
    model: Model
    seconds: float


def train(
    options: FitOptions,
    parts: Sequence[Part],
    groups: int,
    smooth: float,
    *,
    record: bool = True,
    tell: Callable[[int, int], None] | None = None,
    names: Sequence[str] | None = None,
) -> Trained:
    """Run the method on the sites' training rows; ``tell(done, rounds)`` hears how far it is; ``names``: of the groups."""
    started = time.perf_counter()
    apart = options._apart(groups)
    data = _client_data(parts, apart)
    recipe = options.recipe(batch_rows=int(data.train_sizes.min()), smooth=smooth, groups=groups)
    model = Model(options.model, parts[0].features.shape[1], 2, options.hidden)
    rounds = recipe.rounds + (recipe.weight_rounds if recipe.method in BILEVEL else 0)
    capacity = max(SMALLEST_CAPACITY, 1 << (max(len(part.labels) for part in parts) - 1).bit_length())
    fitted = fit(
        recipe,
        data,
        model,
        groups,
        seed=options.seed,
        record_every=max(1, max(recipe.rounds, recipe.weight_rounds) // HISTORY_ROWS) if record else None,
        capacity=None if recipe.method == "fcfl" else capacity,
        progress=None if tell is None else _Heard(tell, rounds),
        names=names,
    )
    params = jax.tree.map(np.asarray, fitted.params)
    return Trained(params, fitted.weights, fitted.history, recipe, model, time.perf_counter() - started)


class _Heard:
    """Rounds of the stages counted through."""

    def __init__(self, tell: Callable[[int, int], None], rounds: int) -> None:
        self.tell, self.rounds = tell, rounds
        self.before, self.last = 0, 0

    def __call__(self, progress: Progress) -> None:
        if progress.done < self.last:
            self.before += self.last
        self.last = progress.done
        self.tell(min(self.before + progress.done, self.rounds), self.rounds)


def _client_data(parts: Sequence[Part], apart: bool) -> ClientData:
    """Each site's rows for both levels, or (the paper's formulation) with a group-balanced validation set taken out."""

    def rows(part: Part, index: Any = slice(None)) -> dict[str, np.ndarray]:
        return {
            "features": part.features[index],
            "labels": part.labels[index].astype(np.float32),
            "groups": part.groups[index],
        }

    if not apart:
        return ClientData.from_clients([(rows(part), rows(part)) for part in parts])
    ends = np.cumsum([0, *(len(part.labels) for part in parts)])
    owned = [np.arange(first, last) for first, last in pairwise(ends)]
    codes = np.concatenate([part.groups for part in parts])
    split = partition.balanced_validation(codes, owned, size=VALIDATION_SHARE)
    pairs = zip(parts, ends[:-1], split.train, split.validation, strict=True)
    return ClientData.from_clients(
        [(rows(part, train - start), rows(part, val - start)) for part, start, train, val in pairs]
    )
