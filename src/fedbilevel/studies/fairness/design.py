"""What the fairness experiment compares: ten entries with their defaults, and four grids of the same size."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.recipe import BILEVEL, SINGLE_STEP, Recipe
from fedbilevel.studies.fairness.data import CASES, DISTRIBUTIONS, Case

if TYPE_CHECKING:
    import pandas as pd

PAPER = Formulation("paper")
OURS = Formulation("cells")
BASELINE = "FedAvg"
OWN = ("FedBiO, cells", "FedBiOAcc, cells")
GRIDS = {
    "FedReg": ("penalty", (0.1, 0.3, 1.0, 3.0)),
    "FedMinMax": ("group_step", (0.01, 0.03, 0.1, 0.3)),
    "FCFL": ("epsilon", (0.01, 0.02, 0.05, 0.1)),
    "FedBiOAcc, cells": ("strength", (1.0, 2.0, 5.0, 10.0)),
}
"""The fairness knob of each method and four values of it, the default among them."""
KNOBS = {
    "fedavg": (), "fedreg": ("penalty",), "fedminmax": ("group_step", "risks"), "fcfl": ("epsilon",), "fedfb": ("alpha",),
    "fairfed": ("beta",),
}  # fmt: skip
"""What a single-level method reads of a recipe beside the options that all read."""
CELLS_TERM = "mean squared gap, noise taken out"
"""Names the term in the outer loss of "cells": rows measured with another one are not taken over."""


@dataclass(frozen=True)
class Entry:
    """A method with one setting.  ``default``: the setting it runs with when nothing is chosen."""

    label: str
    recipe: Recipe
    setting: str = ""
    default: bool = True

    def mark(self) -> str:
        """What a row of this entry depends on, and nothing else: rows with equal marks belong together."""
        recipe, form = self.recipe, self.recipe.formulation
        read: dict[str, Any] = {"method": recipe.method, "ridge": form.ridge, "rounds": recipe.rounds}
        read |= {
            name: getattr(recipe, name) for name in ("local_steps", "batch_size", "step", "client_weights", "train_on")
        }
        if recipe.method in BILEVEL:
            names = ("weight_rounds", "outer_batch_size", "inner_step", "outer_step", "terms", "series_step")
            read |= {name: getattr(recipe, name) for name in names} | {"kind": form.kind, **recipe.constants()}
            if form.kind == "cells":
                read |= {name: getattr(form, name) for name in ("metric", "strength", "temperature")}
                read["term"] = CELLS_TERM
        else:
            read |= {name: getattr(recipe, name) for name in KNOBS[recipe.method]}
        return f"{zlib.crc32(repr(sorted(read.items())).encode()):08x}"


class Job(NamedTuple):
    """Part of a split: its slow entries or the others, with their defaults or the other settings of their grids."""

    case: str
    distribution: str
    split: int
    slow: bool
    grid: bool


@dataclass(frozen=True)
class Design:
    """``splits`` random splits of every case; ``slow_splits`` of them for FCFL on Adult, whose every round reads all rows; the
    grids run on the cases in ``grid_cases``."""

    cases: tuple[str, ...] = tuple(CASES)
    distributions: tuple[str, ...] = DISTRIBUTIONS
    splits: int = 20
    slow_splits: int = 20
    grid_cases: tuple[str, ...] = tuple(CASES)
    steps: int | None = None
    weight_steps: int | None = None

    def jobs(self) -> list[Job]:
        """The first case comes first, defaults before grids and slow entries late, so that a stopped run has the most
        important parts; within each part split by split."""
        first, rest = self.cases[:1], self.cases[1:]
        order = (
            (first, False, False), (first, False, True), (rest, False, False), (first, True, False), (first, True, True),
            (rest, True, False), (rest, False, True), (rest, True, True),
        )  # fmt: skip
        jobs = [
            Job(case, kind, number, slow, grid)
            for cases, slow, grid in order
            for number in range(self.slow_splits if slow else self.splits)
            for case in cases
            for kind in self.distributions
        ]
        return [job for job in jobs if entries(self, job)]


def entries(design: Design, job: Job) -> list[Entry]:
    """Everything that runs in one job."""
    if job.grid and job.case not in design.grid_cases:
        return []
    found = [other for entry in lineup(design, CASES[job.case]) for other in _settings(entry)]
    return [entry for entry in found if is_slow(job.case, entry.label) == job.slow and entry.default != job.grid]


def lineup(design: Design, case: Case) -> list[Entry]:
    """All methods with their defaults."""
    # A client's own training rows serve the outer level of "cells", hence train_on="train"; the balanced sets of the paper's
    # formulation are taken out of them and come back for stage two.
    basic = Recipe(
        "fedavg",
        PAPER,
        steps=design.steps,
        weight_steps=design.weight_steps,
        batch_size=case.batch_size,
        train_on="train",
    )
    cells = replace(basic, formulation=OURS)
    return [
        Entry(BASELINE, basic),
        Entry("FedReg", replace(basic, method="fedreg")),
        # Group risks from the rows of the step itself: all rows in each of 2,000 rounds would take ten times as long.
        Entry("FedMinMax", replace(basic, method="fedminmax", risks="sent")),
        Entry("FCFL", replace(basic, method="fcfl")),
        Entry("FedFB", replace(basic, method="fedfb")),
        Entry("FairFed", replace(basic, method="fairfed")),
        Entry("FedBiO, paper", replace(basic, method="fedbio", train_on="all")),
        Entry("FedBiOAcc, paper", replace(basic, method="fedbioacc", train_on="all")),
        Entry("FedBiO, cells", replace(cells, method="fedbio")),
        Entry("FedBiOAcc, cells", replace(cells, method="fedbioacc")),
    ]


def is_slow(case: str, label: str) -> bool:
    return case.startswith("adult") and label == "FCFL"


def _settings(entry: Entry) -> list[Entry]:
    if entry.label not in GRIDS:
        return [entry]
    knob, values = GRIDS[entry.label]
    inside = knob == "strength"
    holder = entry.recipe.formulation if inside else entry.recipe
    usual = getattr(holder, knob)
    if usual not in values:
        raise ValueError(f"The grid of {entry.label} must hold its default {knob}={usual}.")
    out = []
    for value in values:
        if inside:
            recipe = replace(entry.recipe, formulation=replace(entry.recipe.formulation, strength=value))
        else:
            recipe = replace(entry.recipe, **{knob: value})  # type: ignore[arg-type]
        out.append(Entry(entry.label, recipe, f"{knob}={value:g}", value == usual))
    return out


def described(rows: pd.DataFrame) -> dict[str, Any]:
    """What the measured ``rows`` are: how many splits of every setting, and the options behind the settings."""
    counted = rows.groupby(["case", "distribution", "method", "setting"], sort=False)["split"].nunique()
    measured: dict[str, Any] = {}
    for row in counted.reset_index(name="splits").itertuples(index=False):
        case, kind, method, setting, splits = row
        measured.setdefault(case, {}).setdefault(kind, {})[f"{method} {setting}".strip()] = int(splits)
    options = {entry.label: _options(entry.recipe) for entry in lineup(Design(), CASES["adult-sex"])}
    batches = {case.name: case.batch_size for case in CASES.values()}
    grids = {name: [knob, list(values)] for name, (knob, values) in GRIDS.items()}
    return {"splits_measured": measured, "options": options, "batch_size": batches, "grids": grids}


def _options(recipe: Recipe) -> dict[str, Any]:
    """The options a method reads, defaults filled in; steps as in the full design."""
    form = recipe.formulation
    found: dict[str, Any] = {"rounds": recipe.rounds, "step": recipe.step, "ridge": form.ridge}
    found["local_steps"] = 1 if recipe.method in SINGLE_STEP else recipe.local_steps
    found |= {name: getattr(recipe, name) for name in KNOBS.get(recipe.method, ())}
    if recipe.method in BILEVEL:
        found |= {"formulation": form.kind, "weight_rounds": recipe.weight_rounds, **recipe.constants()}
        found |= {"terms": recipe.terms, "series_step": recipe.series_step}
        if form.kind == "cells":
            found |= {"metric": form.metric, "strength": form.strength, "temperature": form.temperature}
    return found
