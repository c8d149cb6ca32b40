"""Training on encoded sites: the options of a fit as a recipe, and the recipe run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.recipe import BILEVEL, METHODS, Recipe
from fedbilevel.fairness.trainer import Fitted, Tell, capacity_for, dealt, fit
from fedbilevel.jobs.fit.data import Part, joined

NAMES = {
    "fedavg": "FedAvg", "fedreg": "FedReg", "fedminmax": "FedMinMax", "fcfl": "FCFL", "fedfb": "FedFB",
    "fairfed": "FairFed", "fedbio": "FedBiO", "fedbioacc": "FedBiOAcc",
}  # fmt: skip
HISTORY_ROWS = 20
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
        self.recipe(groups=2)

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

    def recipe(self, groups: int) -> Recipe:
        """The same as a method's options."""
        recipe = Recipe(
            self.method,
            Formulation(self.formulation, self.metric, ridge=self.ridge),
            self.steps,
            self.weight_steps,
            self.local_steps,
            self.batch_size,
            step=self.step,
            client_weights=self.client_weights,
        )
        return recipe.asked(groups, None if isinstance(self.strength, str) else self.strength)

    def program(self, features: int, groups: int, curvature: float, names: Sequence[str] | None = None) -> FairProgram:
        """For rows of so many ``features``; ``names``: of the groups."""
        model = Model(self.model, features, 2, self.hidden)
        return FairProgram(self.recipe(groups), model, groups, curvature=curvature, names=names)

    def configuration(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def train(
    options: FitOptions, program: FairProgram, parts: Sequence[Part], *, record: bool = True, tell: Tell | None = None
) -> Fitted:
    """Run ``program`` on the sites' training rows; ``tell`` hears how far it is."""
    rows = joined(parts)
    leaves = {"features": rows.features, "labels": rows.labels.astype(np.float32), "groups": rows.groups}
    ends = np.cumsum([0, *(len(part.labels) for part in parts)])
    return fit(
        program,
        dealt(program, leaves, [np.arange(first, last) for first, last in pairwise(ends)]),
        seed=options.seed,
        record_every=program.recipe.record_every(HISTORY_ROWS) if record else None,
        capacity=None if program.recipe.method == "fcfl" else capacity_for(max(len(part.labels) for part in parts)),
        tell=tell,
    )
