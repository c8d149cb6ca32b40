"""What `fedbilevel fairness` compares: eleven entries with their defaults, and four grids of the same size.

The paper's Table 1, made to bear weight: six methods with the paper's formulation, three with ours and two of others, on 20
random splits instead of one, with 95 % intervals, differences to FedAvg taken within each split, and a grid of four settings
a method, the best of them chosen on rows that nobody trained on.  Test rows are read once, at the end.

Tables of a run (`Run.tables`; chosen, fronts and duels only where grids were run):

- rows: one row per case, distribution, split, method and setting.
- table: means, intervals and paired differences to FedAvg of every method with its default.
- chosen: the same for the settings chosen on the rows set aside, split by split or once for all.
- fronts: means of every setting.
- duels: ours minus each chosen baseline, paired.
- floors: the gap that a fair model shows by chance, and that of one which is exactly fair on its training rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel import storage
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.intervals import across_splits, comparison_table, paired_difference
from fedbilevel.fairness.methods import BILEVEL, SINGLE_STEP, STEP, Recipe
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.trainer import Trainer
from fedbilevel.hints import whole_number
from fedbilevel.report.scales import Span
from fedbilevel.runs import Run, RunFolder
from fedbilevel.studies import data
from fedbilevel.studies.data import DISTRIBUTIONS, PARTS, SOURCES, Case, Cases
from fedbilevel.studies.driver import Part, Report, Study, conduct, listed

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
ROWS = "fairness-rows"
BASELINE = "FedAvg"
STANDARD = {
    "case": "dataset", "distribution": "split", "split": "seed", "aside_accuracy": "validation_accuracy",
    "aside_gap": "validation_gap", "aside_gap_majority": "validation_gap_majority", "aside_lead": "validation_lead",
}  # fmt: skip
"""The study's names of columns, and what every run folder calls them."""
METRICS = ("test_accuracy", "train_gap", "test_gap", "test_gap_majority", "test_lead")
DRAWS = 20_000
RATES = {"adult-sex": 0.58, "adult-race": 0.58, "credit-status": 0.55}
"""FedAvg's true-positive rate on the training rows of split 0, rounded."""
LARGEST_LOSS = 0.005
"""Accuracy that a setting may cost on the rows set aside, against FedAvg, when settings are chosen."""
WORKERS = 2
EFFORTS = {
    "fedavg": {"model": "brief"},
    "fedreg": {"model": "brief"},
    "fedminmax": {"model": "plain"},
    **{name: {"weights": "plain", "model": "brief"} for name in BILEVEL},
}
"""How much XLA optimises the stages of methods that give the same bits with less, and hardly later: what a round does is in
kernels.  Models with few rounds on small minibatches need least."""


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
class Design(Study):
    """``splits`` random splits of every case; the grids run on the cases in ``grid_cases``.  ``methods``: labels of the
    entries that run; None: all."""

    cases: tuple[str, ...] = CASES
    distributions: tuple[str, ...] = DISTRIBUTIONS
    splits: int = 20
    grid_cases: tuple[str, ...] = CASES
    steps: int | None = None
    weight_steps: int | None = None
    methods: tuple[str, ...] | None = None
    _cases: Cases = field(default_factory=Cases, repr=False, compare=False)

    command = "fairness"
    grows = True

    def configuration(self) -> dict[str, Any]:
        """What all cases, splits and grids share: others may be added."""
        return {
            "quick": self.steps is not None, "steps": self.steps, "weight_steps": self.weight_steps,
            "metric": "equal_opportunity", "convention": "between_groups", "test_share": data.TEST_SHARE,
            "set_aside": data.SET_ASIDE, "clients": data.CLIENTS, "shares": data.SHARES,
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
        # In the order of the design, however the parts came about.
        labels = (entry.label for entry in self.lineup(CASES[0]))
        places = {name: place for place, name in enumerate((*CASES, *DISTRIBUTIONS, *labels))}
        rows = pd.concat([parts[key][ROWS] for key in order]).sort_values(
            ["case", "distribution", "split", "method"], kind="stable", ignore_index=True,
            key=lambda column: column.map(lambda value: places.get(value, value)),
        )  # fmt: skip
        tables = {f"fairness-{name}": table for name, table in summarise(rows).items() if len(table)}
        return order, {"rows": standard(rows), ROWS: rows, **tables}

    def write(self, run: Run) -> None:
        from fedbilevel.report.studies import write_figures

        settings = {**run.configuration, "splits_measured": splits_measured(run.tables["rows"])}
        storage.write_json(run.path / "fairness-settings.json", settings)
        write_figures("fairness", run.tables, run.path)

    def entries(self, slice: Slice) -> list[Entry]:
        """Everything that runs in one slice."""
        if slice.grid and slice.case not in self.grid_cases:
            return []
        slow = {"FCFL"} if slice.case.startswith("adult") else set()  # every round of FCFL reads all rows
        every = [other for entry in self.lineup(slice.case) for other in _settings(entry)]
        return [entry for entry in every if (entry.label in slow) == slice.slow and entry.default != slice.grid]

    def lineup(self, case: str) -> list[Entry]:
        """All methods with their defaults."""
        # A client's own training rows serve the outer level of "cells", hence train_on="train"; the balanced sets of the
        # paper's formulation are taken out of them and come back for stage two.
        steps: dict[str, Any] = {"steps": self.steps, "weight_steps": self.weight_steps}
        batch_size = SOURCES[case].batch_size
        basic = Recipe("fedavg", Formulation("paper"), **steps, batch_size=batch_size, step=STEP, train_on="train")
        cells = replace(basic, formulation=Formulation("cells"))
        every = [
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
            Entry("FedPath", replace(cells, method="fedpath", formulation=Formulation(ridge=None))),
        ]
        return [entry for entry in every if self.methods is None or entry.label in self.methods]


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
    out: Path | None = None, design: Design = FULL, report: Report | None = None, line: str = "", workers: int = WORKERS
) -> Run:
    """Run the study; with ``out`` into a run folder, with tables and figures.

    What is in the folder is kept and not run again: a stopped run goes on, and a design with other cases or more splits adds
    to what is there.  A folder of other options is refused.
    """
    return conduct(design, out, report, line, workers)


def _settings(entry: Entry) -> list[Entry]:
    if entry.label not in GRIDS:
        return [entry]
    knob, values = GRIDS[entry.label]
    form = entry.recipe.formulation
    inside = knob == "strength"
    usual = getattr(form if inside else entry.recipe, knob)
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


def trainer_of(case: Case, recipe: Recipe) -> Trainer:
    """For the clients of one split, which are its example."""
    paper = recipe.formulation.kind == "paper" and recipe.method in BILEVEL
    efforts = EFFORTS.get(recipe.method, {})
    return Trainer(
        FairProgram(recipe, case.model, len(case.names)), case.paper if paper else case.whole, efforts=efforts
    )


def evaluate(case: Case, label: str, recipe: Recipe, setting: str, default: bool) -> dict[str, Any]:
    """Fit on one split and measure on its three sets of rows.

    The gap of a fair model is positive by chance alone; its lead (the majority's true-positive rate minus that of all others)
    is 0 on average, so a mean over splits can show that it is.
    """
    trainer = trainer_of(case, recipe)
    fitted = trainer.run(trainer.example, case.number)
    row: dict[str, Any] = {"case": case.source, "distribution": case.distribution, "split": case.number}
    row |= {"method": label, "setting": setting, "default": default}
    for part in PARTS:
        counts, name = case.counts(part, np.asarray(fitted.params)), "aside" if part == "validation" else part
        row |= {
            f"{name}_accuracy": float(counts.overall("accuracy")),
            f"{name}_gap": float(counts.gap("equal_opportunity")),
            f"{name}_gap_majority": float(counts.gap("equal_opportunity", "majority_vs_rest")),
            f"{name}_lead": float(counts.lead("true_positive_rate")),
        }
    row["weights"] = "" if fitted.weights is None else " ".join(f"{weight:.4f}" for weight in fitted.weights)
    return row


def standard(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with default settings, as a run folder names their columns."""
    usual = rows[rows["default"]].drop(columns="default")
    return usual.assign(split_seed=usual["split"]).rename(columns=STANDARD)


def summarise(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """All tables from the rows; nothing is run."""
    frames: dict[str, list[pd.DataFrame]] = {"table": [], "chosen": [], "fronts": [], "duels": []}
    for (case, distribution), group in rows.groupby(["case", "distribution"], sort=False):
        place = {"case": str(case), "distribution": str(distribution)}
        frames["table"].append(compare(group[group["default"]]).assign(**place))
        if (group.groupby("method")["setting"].nunique() > 1).any():
            for choice, best in (("each split", choose(group)), ("once", choose_once(group))):
                frames["chosen"].append(compare(best).assign(choice=choice, **place))
                frames["duels"].append(fight(best).assign(choice=choice, **place))
            frames["fronts"].append(front(group).assign(**place))
    tables = {name: pd.concat(some, ignore_index=True) if some else pd.DataFrame() for name, some in frames.items()}
    return {**tables, "floors": floors(rows)}


def compare(rows: pd.DataFrame) -> pd.DataFrame:
    """Means, 95 % intervals and paired differences to FedAvg; a method with fewer splits is compared on those it has."""
    parts = []
    reference = rows[rows["method"] == BASELINE]
    for method, group in rows.groupby("method", sort=False):
        both = group if method == BASELINE else pd.concat([reference[reference["split"].isin(group["split"])], group])
        there = [metric for metric in METRICS if both[metric].notna().all()]
        for interval, test_share in (("student", None), ("corrected", data.TEST_SHARE)):
            if group["split"].nunique() < 2:  # no interval from one split
                alone = {
                    "method": method,
                    "metric": METRICS,
                    "splits": 1,
                    "mean": group[list(METRICS)].iloc[0].to_numpy(),
                }
                found = pd.DataFrame(alone).assign(difference=np.nan)
            else:
                how: dict[str, Any] = {"interval": interval, "test_share": test_share}
                found = comparison_table(both, baseline=BASELINE, metrics=there, **how).loc[[method]].reset_index()
            parts.append(found.assign(interval=interval))
    return pd.concat(parts, ignore_index=True)


def choose(rows: pd.DataFrame) -> pd.DataFrame:
    """Per split and method the setting with the smallest gap on the rows set aside, among those that lose at most half a
    point of accuracy there against FedAvg (if none does: the most accurate).  Splits in which not all settings of a
    method have been run are left out for it."""
    settings = rows.groupby("method")["setting"].nunique()
    there = rows.groupby(["split", "method"])["setting"].transform("nunique")
    rows = rows[there == rows["method"].map(settings)]
    reference = rows[rows["method"] == BASELINE].set_index("split")["aside_accuracy"]
    loss = rows["split"].map(reference) - rows["aside_accuracy"]
    allowed = loss <= LARGEST_LOSS
    ranked = rows.assign(_out=~allowed, _by=np.where(allowed, rows["aside_gap"], loss))
    best = ranked.sort_values(["_out", "_by"], kind="stable").drop_duplicates(["split", "method"])
    return best.drop(columns=["_out", "_by"]).sort_index()


def choose_once(rows: pd.DataFrame) -> pd.DataFrame:
    """Per method one setting for all splits, by the same rule with means over the splits: less at the mercy of few rows."""
    means = rows.groupby(["method", "setting"], sort=False)[["aside_accuracy", "aside_gap"]].mean().reset_index()
    best = choose(means.assign(split=0))
    return rows.merge(best[["method", "setting"]], on=["method", "setting"])


def fight(chosen: pd.DataFrame, ours: str = "FedBiOAcc, cells") -> pd.DataFrame:
    """Ours minus each other method with its chosen setting, paired by split.  ``dominates``: the gap's difference is below
    zero, its interval too, and the accuracy's interval does not lie below zero.  ``lead``: by how much the majority's
    true-positive rate is ahead, which tells methods apart whose gaps are near the floor."""
    out = []
    mine = chosen[chosen["method"] == ours].set_index("split")
    for method, group in chosen.groupby("method", sort=False):
        if method == ours or len(group) < 2:
            continue
        theirs = group.set_index("split")
        own = mine.loc[theirs.index]
        row: dict[str, Any] = {"ours": ours, "against": method, "splits": len(group)}
        for name in ("gap", "accuracy", "lead"):
            pair = [table[f"test_{name}"] for table in (own, theirs)]
            if all(values.notna().all() for values in pair):
                row |= Span(*paired_difference(*pair)[:3]).columns(name)
        if "lead" in row:
            row |= {"our_lead": float(own["test_lead"].mean()), "their_lead": float(theirs["test_lead"].mean())}
        row["relative_gap"] = float(own["test_gap"].mean() / theirs["test_gap"].mean() - 1)
        row["dominates"] = bool(row["gap_high"] < 0 and row["accuracy_high"] >= 0)
        out.append(row)
    return pd.DataFrame(out)


def front(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean test accuracy and gap of every method and setting, with 95 % intervals."""
    out = []
    for (method, setting), group in rows.groupby(["method", "setting"], sort=False):
        row: dict[str, Any] = {"method": method, "setting": setting, "splits": len(group)}
        for metric in ("test_accuracy", "test_gap"):
            several = len(group) > 1
            row |= Span(*(across_splits(group[metric])[:3] if several else group[metric])).columns(metric)
        out.append(row)
    return pd.DataFrame(out)


def expected_gap(positives: np.ndarray, rate: float, learned_on: np.ndarray | None = None, seed: int = 0) -> float:
    """The mean gap of a fair model on groups with these numbers of positives; ``learned_on``: those of its training part.

    If every group has the true rate q, a part with n_a positives of group a still shows a largest minus smallest rate of

        E [ max_a B_a / n_a  -  min_a B_a / n_a ],    B_a ~ Binomial(n_a, q),

    which for two groups is about sqrt(2/pi) sqrt(q (1 - q) (1/n_0 + 1/n_1)): the floor of a model whose fairness is given.  A
    model whose fairness was *learned* has rates that are equal on its training rows at best.  Those are a sample, too, so its
    true rates differ by the error of that sample, and its floor adds the variance of the training part to that of the test.

    Groups without positives are left out.  Both parts are drawn from the same binomials; the training part's error has the
    opposite sign, which does not matter for the mean.
    """
    counts = np.asarray(positives)
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must lie between 0 and 1, not {rate}.")
    kept = counts > 0
    rng = np.random.default_rng(seed)
    rates = rng.binomial(counts[kept], rate, (DRAWS, int(kept.sum()))) / counts[kept]
    if learned_on is not None:
        others = np.maximum(np.asarray(learned_on)[kept], 1)
        rates = rates + rng.binomial(others, rate, rates.shape) / others
    return float(np.mean(rates.max(axis=1) - rates.min(axis=1)))


def floors(rows: pd.DataFrame, splits: int = 20) -> pd.DataFrame:
    """Per case: positives of the smallest and largest group in a test part, and both floors, at FedAvg's true-positive rate.

    ``rows``: those of the study; only which cases occur is read.
    """
    lines = []
    for case in dict.fromkeys(rows["case"]):
        if case not in SOURCES:
            continue
        positives, gaps = [], []
        for number in range(splits):
            table, train, test, codes, test_codes, names = data.halves(case, number, "clean")
            labels = table.y.to_numpy()
            inside = np.bincount(codes[labels[train] == 1], minlength=len(names))
            outside = np.bincount(test_codes[labels[test] == 1], minlength=len(names))
            used = np.round((1 - data.SET_ASIDE) * inside).astype(int)
            positives.append(outside)
            gaps.append([expected_gap(outside, RATES[case], learned_on) for learned_on in (None, used)])
        counts, (fair, fair_in_training) = np.array(positives), map(np.mean, zip(*gaps, strict=True))
        ends = {"smallest": counts.min(axis=1).mean(), "largest": counts.max(axis=1).mean()}
        floor = {"rate": RATES[case], "fair": fair, "fair_in_training": fair_in_training}
        lines.append({"case": case, "groups": counts.shape[1], **ends, **floor})
    return pd.DataFrame(lines)
