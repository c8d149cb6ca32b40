"""How a method is run: every option with its default, the paper's where it names one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedbilevel.fairness.formulation import Formulation
from fedbilevel.problem import positive, whole_number

METHODS = ("fedavg", "fedreg", "fedminmax", "fcfl", "fedfb", "fairfed", "fedbio", "fedbioacc")
BILEVEL = ("fedbio", "fedbioacc")
COMPARES_GROUPS = ("fedreg", "fedminmax", "fcfl", "fedfb", "fairfed")
"""Methods of one level that are defined by two or more groups, for two classes."""
SINGLE_STEP = ("fedminmax", "fcfl")
"""They communicate after every step, so their local steps are 1 whatever is asked for."""

STEPS = 2000
CELLS_STEPS = 1000
OUTER_BATCH = 512
WHOLE_UP_TO = 4096
"""Validation rows an outer step of "cells" reads: all, up to this many, else `OUTER_BATCH` of them."""
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

    ``steps``: of the model's training, 2,000 (FCFL: 1,020 rounds, as published).  ``weight_steps``: of stage one, likewise
    2,000 for the paper's formulation and 1,000 for "cells".  ``local_steps``: I, 5; always 1 for
    FedMinMax and FCFL.  ``step``: learning rate of the model.  ``inner_step``, ``outer_step``: of stage one (FedBiO: 0.1 and
    0.1, FedBiOAcc: 1 and 1 times alpha_t, as in the paper; "cells": see `FEDBIO_CELLS` and `FEDBIOACC_CELLS`).  ``terms`` and
    ``series_step``: of the Neumann series.  ``outer_batch_size``: validation rows a step reads; by default the batch
    size ("paper"; at most all), or all of them up to `WHOLE_UP_TO` and `OUTER_BATCH` beyond ("cells": rates of small groups
    cannot be told from a few rows).  ``penalty``: FedReg's.  ``group_step``, ``risks``: FedMinMax's.
    ``epsilon``: FCFL's.  ``alpha``: FedFB's step of the groups' shares.  ``beta``: FairFed's, of the clients' weights.
    ``client_weights``: "uniform" as in the paper, or "samples" (FedMinMax, FedFB and FairFed are defined by the latter).
    ``train_on``: "all" rows of a client, or "train" to leave its validation rows out of the model's training.
    """

    method: str = "fedbioacc"
    formulation: Formulation = field(default_factory=Formulation)
    steps: int | None = None
    weight_steps: int | None = None
    local_steps: int = 5
    batch_size: int | None = 128
    outer_batch_size: int | str | None = None
    step: float = 0.1
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

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, not {self.method!r}.")
        if not isinstance(self.formulation, Formulation):
            raise TypeError(f"formulation must be a Formulation, not {type(self.formulation).__name__}.")
        for name in ("steps", "weight_steps"):
            whole_number(name, getattr(self, name), optional=True)
        whole_number("local_steps", self.local_steps)
        for name in ("step", "series_step", "inner_step", "outer_step"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.train_on not in ("all", "train"):
            raise ValueError(f"train_on must be 'all' or 'train', not {self.train_on!r}.")
        if self.client_weights not in ("uniform", "samples"):
            raise ValueError(f"client_weights must be 'uniform' or 'samples', not {self.client_weights!r}.")

    def slower(self, factor: float) -> Recipe:
        """The same with the default steps of stage one divided by ``factor``; for losses that are steeper than usual."""
        if factor == 1 or self.method not in BILEVEL:
            return self
        usual = self.constants()["inner_step"] if self.inner_step is None else self.inner_step
        return replace(self, inner_step=usual / factor, series_step=self.series_step / factor)

    def constants(self) -> dict[str, float]:
        """FedBiO's or FedBiOAcc's constants, before ``inner_step`` and ``outer_step`` replace them."""
        cells = self.formulation.kind == "cells"
        if self.method == "fedbio":
            return FEDBIO_CELLS if cells else {"inner_step": 0.1, "outer_step": 0.1}
        return FEDBIOACC_CELLS if cells else {"inner_step": 1.0, "outer_step": 1.0}

    @property
    def rounds(self) -> int:
        """Rounds of the model's training."""
        if self.method == "fcfl":
            return sum(FCFL_STAGES) if self.steps is None else self.steps
        steps = STEPS if self.steps is None else self.steps
        return -(-steps // (1 if self.method in SINGLE_STEP else self.local_steps))

    @property
    def weight_rounds(self) -> int:
        """Rounds of stage one."""
        default = STEPS if self.formulation.kind == "paper" else CELLS_STEPS
        return -(-(default if self.weight_steps is None else self.weight_steps) // self.local_steps)
