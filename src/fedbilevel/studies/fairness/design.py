"""What `fedbilevel fairness` compares: ten entries with their defaults, and four grids of the same size.

The paper's Table 1, made to bear weight: six methods with the paper's formulation, two with ours and two of others, on 20
random splits instead of one, with 95 % intervals, differences to FedAvg taken within each split, and a grid of four settings
a method, the best of them chosen on rows that nobody trained on.  Test rows are read once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedbilevel import storage
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.recipe import BILEVEL, SINGLE_STEP, Recipe
from fedbilevel.problem import whole_number
from fedbilevel.runs import Run, RunFolder
from fedbilevel.studies.data import CLIENTS, DISTRIBUTIONS, SET_ASIDE, SHARES, SOURCES, TEST_SHARE, Cases
from fedbilevel.studies.driver import Part, Report, Study, conduct, listed
from fedbilevel.studies.fairness.measure import BASELINE, evaluate, standard, summarise

CASES = ("adult-sex", "adult-race", "credit-status")
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
TABLES = ("table", "chosen", "fronts", "duels", "floors")
ROWS = "fairness-rows"
WORKERS = 2


class Entry(NamedTuple):
    """A method with one setting.  ``default``: the setting it runs with when nothing is chosen."""

    label: str
    recipe: Recipe
    setting: str = ""
    default: bool = True


class Slice(NamedTuple):
    """Of one case: the slow entries or the others, with their defaults or the other settings of their grids."""

    case: str
    distribution: str
    number: int
    slow: bool
    grid: bool

    @property
    def key(self) -> str:
        which = f"{'slow ' if self.slow else ''}{'grids' if self.grid else 'defaults'}"
        return f"{self.case} {self.distribution} {self.number} {which}"


@dataclass(frozen=True)
class FairnessResult:
    """``rows``: one row per case, distribution, split, method and setting.  ``table``: means, intervals and paired
    differences to FedAvg of every method with its default.  ``chosen``: the same for the settings chosen on the rows set
    aside, split by split or once for all.  ``fronts``: means of every setting.  ``duels``: ours minus each chosen baseline,
    paired.  ``floors``: the gap that a fair model would show.  ``settings``: what was run."""

    rows: pd.DataFrame
    table: pd.DataFrame
    chosen: pd.DataFrame
    fronts: pd.DataFrame
    duels: pd.DataFrame
    floors: pd.DataFrame
    settings: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> FairnessResult:
        rows = run.others[ROWS]
        tables: dict[str, Any] = {name: run.others.get(f"fairness-{name}", pd.DataFrame()) for name in TABLES}
        return cls(rows, **tables, settings={**run.configuration, "splits_measured": splits_measured(rows)})


@dataclass(frozen=True)
class Design(Study):
    """``splits`` random splits of every case; the grids run on the cases in ``grid_cases``."""

    cases: tuple[str, ...] = CASES
    distributions: tuple[str, ...] = DISTRIBUTIONS
    splits: int = 20
    grid_cases: tuple[str, ...] = CASES
    steps: int | None = None
    weight_steps: int | None = None
    _cases: Cases = field(default_factory=Cases, repr=False, compare=False)

    command = "fairness"
    grows = True

    def configuration(self) -> dict[str, Any]:
        """What all cases, splits and grids share: others may be added."""
        return {
            "quick": self.steps is not None, "steps": self.steps, "weight_steps": self.weight_steps,
            "metric": "equal_opportunity", "convention": "between_groups", "test_share": TEST_SHARE,
            "set_aside": SET_ASIDE, "clients": CLIENTS, "shares": SHARES,
            "batch_size": {case: SOURCES[case].batch_size for case in CASES},
            "grids": {label: [knob, *values] for label, (knob, values) in GRIDS.items()},
            "options": {entry.label: _options(entry.recipe) for entry in self.lineup(CASES[0])},
        }  # fmt: skip

    def slices(self) -> list[Slice]:
        """The first case comes first, defaults before grids and slow entries late, so that a stopped run has the most
        important parts; within each part split by split."""
        first, rest = self.cases[:1], self.cases[1:]
        order = (
            (first, False, False), (first, False, True), (rest, False, False), (first, True, False), (first, True, True),
            (rest, True, False), (rest, False, True), (rest, True, True),
        )  # fmt: skip
        slices = [
            Slice(case, distribution, number, slow, grid)
            for cases, slow, grid in order
            for number in range(self.splits)
            for case in cases
            for distribution in self.distributions
        ]
        return [slice for slice in slices if self.entries(slice)]

    def parts(self) -> list[Part]:
        return [
            Part((slice.key,), slice, f"{slice.case} {slice.distribution}", cost=len(self.entries(slice)), rank=rank)
            for rank, slice in enumerate(self.slices())
        ]

    def compute(self, part: Part) -> dict[str, dict[str, Any]]:
        case = self._cases.get(*part.what[:3])
        rows = pd.DataFrame([evaluate(case, *entry) for entry in self.entries(part.what)])
        return {part.keys[0]: {"rows": standard(rows), "others": {ROWS: rows}}}

    def merged(self, folder: RunFolder) -> tuple[list[str], dict[str, pd.DataFrame]]:
        order = sorted(folder.keys)
        parts = folder.parts()
        rows = self._sorted(pd.concat([parts[key][ROWS] for key in order]))
        tables = {name: table for name, table in summarise(rows).items() if len(table)}
        return order, {
            "rows": standard(rows),
            ROWS: rows,
            **{f"fairness-{name}": table for name, table in tables.items()},
        }

    def write(self, run: Run) -> None:
        from fedbilevel.report.studies import write_figures

        result = FairnessResult.of(run)
        storage.write_json(run.path / "fairness-settings.json", result.settings)
        write_figures("fairness", vars(result), run.path)

    def entries(self, slice: Slice) -> list[Entry]:
        """Everything that runs in one slice."""
        if slice.grid and slice.case not in self.grid_cases:
            return []
        every = [other for entry in self.lineup(slice.case) for other in _settings(entry)]
        return [
            entry for entry in every if is_slow(slice.case, entry.label) == slice.slow and entry.default != slice.grid
        ]

    def lineup(self, case: str) -> list[Entry]:
        """All methods with their defaults."""
        # A client's own training rows serve the outer level of "cells", hence train_on="train"; the balanced sets of the
        # paper's formulation are taken out of them and come back for stage two.
        basic = Recipe(
            "fedavg",
            Formulation("paper"),
            steps=self.steps,
            weight_steps=self.weight_steps,
            batch_size=SOURCES[case].batch_size,
            train_on="train",
        )
        cells = replace(basic, formulation=Formulation("cells"))
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

    def _sorted(self, rows: pd.DataFrame) -> pd.DataFrame:
        """In the order of the design, however the parts came about."""
        labels = [entry.label for entry in self.lineup(CASES[0])]
        places = {name: place for names in (CASES, DISTRIBUTIONS, labels) for place, name in enumerate(names)}
        return rows.sort_values(
            ["case", "distribution", "split", "method"],
            kind="stable",
            ignore_index=True,
            key=lambda column: column if column.name == "split" else column.map(places),
        )


FULL = Design()
QUICK = Design(cases=("credit-status",), splits=2, grid_cases=(), steps=100, weight_steps=50)


def chosen_design(
    cases: str | None = None, splits: int | None = None, grids: bool = True, quick: bool = False
) -> Design:
    """`FULL` or `QUICK`, with other cases (names separated by commas) or another number of splits."""
    usual = QUICK if quick else FULL
    names = usual.cases if cases is None else listed("--cases", cases, CASES)
    number = usual.splits if splits is None else splits
    whole_number("--splits", number, least=2)
    return replace(usual, cases=names, splits=number, grid_cases=names if grids and not quick else ())


def run(
    out: Path | None = None,
    design: Design = FULL,
    report: Report | None = None,
    line: str = "",
    workers: int = WORKERS,
) -> FairnessResult:
    """Run the study; with ``out`` into a run folder, with tables and figures.

    What is in the folder is kept and not run again: a stopped run goes on, and a design with other cases or more splits adds
    to what is there.  A folder of other options is refused.
    """
    return FairnessResult.of(conduct(design, out, report, line, workers))


def is_slow(case: str, label: str) -> bool:
    """Every round of FCFL reads all rows."""
    return case.startswith("adult") and label == "FCFL"


def _settings(entry: Entry) -> list[Entry]:
    if entry.label not in GRIDS:
        return [entry]
    knob, values = GRIDS[entry.label]
    form = entry.recipe.formulation
    inside = knob == "strength"
    usual = getattr(form if inside else entry.recipe, knob)
    if usual not in values:
        raise ValueError(f"The grid of {entry.label} must hold its default {knob}={usual}.")
    settings = []
    for value in values:
        change: dict[str, Any] = {"formulation": replace(form, strength=value)} if inside else {knob: value}
        recipe = replace(entry.recipe, **change)
        settings.append(Entry(entry.label, recipe, f"{knob}={value:g}", value == usual))
    return settings


def splits_measured(rows: pd.DataFrame) -> dict[str, Any]:
    """How many splits of every setting, by case and distribution."""
    measured: dict[str, Any] = {}
    counted = rows.groupby(["case", "distribution", "method", "setting"], sort=False)["split"].nunique()
    for case, distribution, method, setting, splits in counted.reset_index(name="splits").itertuples(index=False):
        measured.setdefault(case, {}).setdefault(distribution, {})[f"{method} {setting}".strip()] = int(splits)
    return measured


def _options(recipe: Recipe) -> dict[str, Any]:
    """The options a method reads, defaults filled in."""
    form = recipe.formulation
    options: dict[str, Any] = {"rounds": recipe.rounds, "step": recipe.step, "ridge": form.ridge}
    options["local_steps"] = 1 if recipe.method in SINGLE_STEP else recipe.local_steps
    options |= {name: getattr(recipe, name) for name in KNOBS.get(recipe.method, ())}
    if recipe.method in BILEVEL:
        options |= {"formulation": form.kind, "weight_rounds": recipe.weight_rounds, **recipe.constants()}
        options |= {"terms": recipe.terms, "series_step": recipe.series_step}
        if form.kind == "cells":
            options |= {"metric": form.metric, "strength": form.strength, "temperature": form.temperature}
    return options
