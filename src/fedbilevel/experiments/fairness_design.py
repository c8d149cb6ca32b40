"""What the fairness experiment compares: eight entries with their defaults, and four grids of the same size."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

from fedbilevel.experiments.fairness_data import CASES, DISTRIBUTIONS, Case
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.recipe import Recipe

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


@dataclass(frozen=True)
class Entry:
    """A method with one setting.  ``default``: the setting it runs with when nothing is chosen."""

    label: str
    recipe: Recipe
    setting: str = ""
    default: bool = True


@dataclass(frozen=True)
class Design:
    """``splits`` random splits of every case; ``slow_splits`` of them for FCFL on Adult, whose every round reads all rows (it
    comes last); the grids run on the cases in ``grid_cases``."""

    cases: tuple[str, ...] = tuple(CASES)
    distributions: tuple[str, ...] = DISTRIBUTIONS
    splits: int = 20
    slow_splits: int = 20
    grid_cases: tuple[str, ...] = ("adult-sex",)
    steps: int | None = None
    weight_steps: int | None = None

    def jobs(self) -> list[tuple[str, str, int, bool]]:
        """(case, distribution, split, slow entries?): the first case, then the others split by split, then what is slow."""
        first, rest = self.cases[:1], self.cases[1:]
        found = [(case, kind, n, False) for n in range(self.splits) for case in first for kind in self.distributions]
        found += [(case, kind, n, False) for n in range(self.splits) for case in rest for kind in self.distributions]
        slow = [case for case in self.cases if is_slow(case, "FCFL")]
        return found + [
            (case, kind, n, True) for n in range(self.slow_splits) for case in slow for kind in self.distributions
        ]

    def mark(self) -> str:
        """What the rows of a split depend on: splits with equal marks belong together."""
        settings = ", ".join(f"{name}={values}" for name, (_, values) in GRIDS.items())
        text = f"{self.grid_cases} {self.steps} {self.weight_steps} {settings} {PAPER} {OURS} {Recipe()}"
        return f"{zlib.crc32(text.encode()):08x}"


def entries(design: Design, case: Case, slow: bool) -> list[Entry]:
    """Everything that runs on one split: the slow entries, or all the others."""
    # A client's own training rows serve the outer level of "cells", hence train_on="train"; the balanced sets of the paper's
    # formulation are taken out of them and come back for stage two.
    common = {"batch_size": case.batch_size, "steps": design.steps, "weight_steps": design.weight_steps}
    basic = Recipe("fedavg", PAPER, train_on="train", **common)  # type: ignore[arg-type]
    cells = replace(basic, formulation=OURS)
    found = [
        Entry(BASELINE, basic),
        Entry("FedReg", replace(basic, method="fedreg")),
        # Group risks from the rows of the step itself: all rows in each of 2,000 rounds would take ten times as long.
        Entry("FedMinMax", replace(basic, method="fedminmax", risks="sent")),
        Entry("FCFL", replace(basic, method="fcfl")),
        Entry("FedBiO, paper", replace(basic, method="fedbio", train_on="all")),
        Entry("FedBiOAcc, paper", replace(basic, method="fedbioacc", train_on="all")),
        Entry("FedBiO, cells", replace(cells, method="fedbio")),
        Entry("FedBiOAcc, cells", replace(cells, method="fedbioacc")),
    ]
    if case.name in design.grid_cases:
        found = [other for entry in found for other in _settings(entry)]
    return [entry for entry in found if is_slow(case.name, entry.label) == slow]


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
