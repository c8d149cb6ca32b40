"""The paper's Table 1: two datasets, two distributions, six methods, ten seeds; 240 runs, or 960 with the learning rates.

The options, every constant they resolve to, the runs, and how the learning rate of a method is chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel import kernels
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.methods import Recipe
from fedbilevel.fairness.metrics import CONVENTIONS, CRITERIA, Counts, area
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.saving import FittedModel, named_weights
from fedbilevel.fairness.trainer import Fitted, Stop, Trainer, client_rows
from fedbilevel.hints import whole_number
from fedbilevel.plugins import plugins
from fedbilevel.runs import Run, RunFolder, read
from fedbilevel.studies import data, fairness
from fedbilevel.studies.data import CLIENTS, DISTRIBUTIONS, ENCODINGS, SOURCES, Case, Cases, Rows
from fedbilevel.studies.driver import Part, Report, Study, conduct
from fedbilevel.tables.encoder import Encoder

DATASETS = ("adult", "credit")
PAPER = {
    "fedavg": "FedAvg", "fedreg": "FedReg", "fedminmax": "FedMinMax", "fcfl": "FCFL", "fedbio": "FedBiO",
    "fedbioacc": "FedBiOAcc",
}  # fmt: skip
OURS = {"fedbio-cells": "FedBiO, cells", "fedbioacc-cells": "FedBiOAcc, cells"}
LABELS = {**PAPER, **OURS, **{name: name for name in plugins("local")}}
"""Methods by the names the command takes, and how they are shown."""
SHORT = {"paper": tuple(PAPER), "ours": tuple(OURS), "all": tuple(LABELS)}
RATES = (0.001, 0.01, 0.1, 1.0)
"""The paper's search."""
RATE = 0.1
"""Without a search; the paper: "most algorithms get best performance at 0.1 or 1"."""
TERMS = 10
"""Q of the Neumann series: the paper does not say."""
SPLITS = ("one", "many")
CONTRAST = fairness.Design(
    ("adult-sex",), ("iid",), grid_cases=(), methods=("FedAvg", "FedReg", "FedBiOAcc, paper", "FedBiOAcc, cells")
)
"""Beside the table, one comparison that its splits can tell from noise: two groups with thousands of positives each."""
TOGETHER = {"fedminmax": 10}
"""Methods whose rounds read whole local sets, and how many of their runs on one split go side by side: a row is then read once
for all of them."""
STOPS = 10
"""How often a run is looked at on its way, besides its start."""
EXACT = ("test_accuracy", "train_accuracy", "validation_accuracy", "train_gap", "test_gap", "validation_gap", "weights")
"""What `verify` compares."""

Gap = Callable[..., np.ndarray]
"""(counts, convention of the run unless another is given) -> the gap, of every model."""
POSITIVE = ("favourable", "other")
"""Which label counts as positive in the gaps: the one that is good for a person, or the other."""
# Milliseconds of one run on one core of an ordinary machine: only for guessing the time that is left.
_COST = {
    "adult": {"fedavg": 60, "fedreg": 70, "fedminmax": 220, "fcfl": 2000, "fedbio": 500, "fedbioacc": 700},
    "credit": {"fedavg": 20, "fedreg": 30, "fedminmax": 70, "fcfl": 60, "fedbio": 120, "fedbioacc": 170},
}


class Trial(NamedTuple):
    """Runs of one computation: one seed; several side by side (`TOGETHER`); or all where the method draws nothing at random."""

    dataset: str
    distribution: str
    method: str
    rate: float
    split_seed: int
    seeds: tuple[int, ...]

    @property
    def label(self) -> str:
        return LABELS[self.method]

    def key(self, seed: int) -> str:
        return f"{self.dataset} {self.distribution} {self.method} {self.rate:g} {seed}"

    def part(self) -> Part:
        known = _COST[self.dataset]
        runs = len(self.seeds) if self.method in TOGETHER else 1
        cost = runs * known.get(self.method.removesuffix("-cells"), known["fedbio"]) / 1000
        return Part(
            tuple(map(self.key, self.seeds)),
            self,
            f"{self.dataset} {self.distribution} {self.label}",
            program=(self.dataset, self.method, runs),
            cost=cost,
            # Split by split, so that few are needed at a time; and what takes longest first, so that nothing long comes last.
            rank=(self.split_seed, -cost, self.dataset, self.distribution),
        )


@dataclass(frozen=True)
class Design(Study):
    """The options of the command; see `configuration` for all they resolve to.  ``contrast``: splits of `CONTRAST`."""

    datasets: tuple[str, ...] = DATASETS
    distributions: tuple[str, ...] = DISTRIBUTIONS
    methods: tuple[str, ...] = tuple(PAPER)
    seeds: int = 10
    steps: int = 2000
    splits: str = "one"
    grid: bool = False
    encoding: str = "clean"
    metric: str = "equal_opportunity"
    convention: str = "between_groups"
    contrast: int = 0
    positive_label: str = "favourable"
    _cases: Cases = field(default_factory=Cases, repr=False, compare=False)
    _trainers: dict[Any, Trainer] = field(default_factory=dict, repr=False, compare=False)

    command = "table1"

    def __post_init__(self) -> None:
        several = {"datasets": DATASETS, "distributions": DISTRIBUTIONS, "methods": tuple(LABELS)}
        for name, allowed in several.items():
            values = getattr(self, name)
            if not values:
                raise ValueError(f"--{name} is empty: name one or several of {', '.join(allowed)}.")
            for value in values:
                if value not in allowed:
                    raise ValueError(f"--{name} {value}: unknown; choose from {', '.join(allowed)}.")
            object.__setattr__(self, name, tuple(value for value in allowed if value in values))
        single = {"splits": SPLITS, "encoding": ENCODINGS, "metric": tuple(CRITERIA), "convention": CONVENTIONS}
        single["positive_label"] = POSITIVE
        for name, choices in single.items():
            if getattr(self, name) not in choices:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} {getattr(self, name)}: unknown; choose {', '.join(choices)}.")
        whole_number("--seeds", self.seeds)
        whole_number("--steps", self.steps)

    @property
    def rates(self) -> tuple[float, ...]:
        return RATES if self.grid else (RATE,)

    def recipe(self, dataset: str, method: str) -> Recipe:
        source = SOURCES[dataset]
        cells = method in OURS
        basic = Recipe(
            method.removesuffix("-cells"),
            Formulation("cells", self.metric) if cells else Formulation("paper"),
            steps=self.steps,
            weight_steps=None if cells and self.steps == 2000 else self.steps,
            batch_size=source.batch_size,
            step=RATE,
            terms=TERMS,
        )
        # "cells" reads the training rows on both levels, so joining the two would count them twice.
        return replace(basic, train_on="train") if cells else replace(basic, outer_batch_size=source.outer_batch)

    def configuration(self) -> dict[str, Any]:
        """Every resolved option, and the constants that the paper leaves open."""
        recipes = {LABELS[method]: self.recipe(self.datasets[0], method) for method in self.methods}
        usual = Recipe()
        return {
            "datasets": self.datasets, "distributions": self.distributions, "methods": self.methods,
            "seeds": self.seeds, "steps": self.steps, "splits": self.splits, "rates": self.rates,
            "encoding": self.encoding, "metric": self.metric, "convention": self.convention, "contrast": self.contrast,
            "positive_label": self.positive_label,
            "test_share": data.TEST_SHARE, "set_aside": data.SET_ASIDE, "clients": data.CLIENTS, "shares": data.SHARES,
            "batch_size": {name: SOURCES[name].batch_size for name in self.datasets},
            "outer_batch_size": {name: SOURCES[name].outer_batch for name in self.datasets},
            "sensitive": {"adult": "race", "credit": "personal_status"},
            "local_steps": usual.local_steps, "ridge": Formulation().ridge, "terms": TERMS,
            "series_step": usual.series_step, "penalty": usual.penalty, "group_step": usual.group_step,
            "epsilon": usual.epsilon,
            "rounds": {name: recipe.rounds for name, recipe in recipes.items()},
        }  # fmt: skip

    def trials(self) -> Iterator[Trial]:
        """All runs, in the order of the table."""
        for place in product(self.datasets, self.distributions, self.methods, self.rates):
            if self.splits == "one" and place[2] == "fcfl":
                # Whole local sets from a fixed start: on one split every seed gives the same run.
                yield Trial(*place, 0, tuple(range(self.seeds)))
            elif self.splits == "one":
                most = TOGETHER.get(place[2], 1)
                for first in range(0, self.seeds, most):
                    yield Trial(*place, 0, tuple(range(first, min(first + most, self.seeds))))
            else:
                for seed in range(self.seeds):
                    yield Trial(*place, seed, (seed,))

    def parts(self) -> list[Part]:
        return [*(trial.part() for trial in self.trials()), *self.contrasts()]

    def contrasts(self) -> list[Part]:
        """The parts of `CONTRAST`: among the first, since they are long."""
        slices = replace(CONTRAST, splits=self.contrast).slices()
        cost = 2.0
        return [
            Part((f"contrast {slice.number}",), slice, "Adult by sex", "contrast", cost, (0, -cost, "", slice.number))
            for slice in slices
        ]

    def prepare(self, part: Part) -> None:
        if isinstance(part.what, Trial):
            self._trainer(part.what, self._case(part.what))
            return
        case = self._cases.get(*part.what[:3])
        for entry in CONTRAST.entries(part.what):
            fairness.trainer_of(case, entry.recipe).compile()

    def compute(self, part: Part) -> dict[str, dict[str, Any]]:
        """Of several seeds that one run serves, only the seed differs."""
        if not isinstance(part.what, Trial):
            case = self._cases.get(*part.what[:3])
            rows = pd.DataFrame([fairness.evaluate(case, *entry) for entry in CONTRAST.entries(part.what)])
            return {part.keys[0]: {"others": {"contrast-rows": rows}}}
        trial: Trial = part.what
        results = {}
        for seeds, tables in self.run(trial):
            model = tables.pop("model")
            for seed in seeds:
                named = {
                    name: {**table, "seed": [seed] * len(table["seed"])} if table else table
                    for name, table in tables.items()
                }
                results[trial.key(seed)] = {**named, "models": {trial.key(seed).replace(" ", "-"): model}}
        return results

    def run(self, trial: Trial) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
        """The tables of each run of a trial, marked with its first seed, its model, and the seeds that it stands for."""
        case = self._case(trial)
        trainer = self._trainer(trial, case)
        clients = case.whole if trial.method in OURS else case.paper
        each = [trial.seeds]
        if trial.method in TOGETHER:
            each = [(seed,) for seed in trial.seeds]
            fits = trainer.run_together(clients, trial.seeds, trial.rate, STOPS)
        else:
            fits = [trainer.run(clients, trial.seeds[0], trial.rate, STOPS)]
        setting = {"split_seed": trial.split_seed, "setting": f"learning rate {trial.rate:g}", "rate": trial.rate}
        for seeds, fitted in zip(each, fits, strict=True):
            marks = {"dataset": trial.dataset, "split": trial.distribution, "method": trial.label, "seed": seeds[0]}
            yield seeds, measured(case, trainer.program.recipe, fitted, marks, setting, self._gap)

    def _gap(self, counts: Counts, convention: str | None = None) -> np.ndarray:
        read = counts if self.positive_label == "favourable" else counts.other_label()
        return read.gap(self.metric, convention or self.convention)

    def _case(self, trial: Trial) -> Case:
        return self._cases.get(trial.dataset, trial.distribution, trial.split_seed, self.encoding)

    def _trainer(self, trial: Trial, case: Case) -> Trainer:
        recipe = self.recipe_for(trial, case)
        # Rare splits need a smaller batch than the others, and with it a program of their own.
        together = trial.seeds if trial.method in TOGETHER else None
        place = (trial.dataset, trial.method, recipe.outer_batch_size, together and len(together))
        if place not in self._trainers:
            program = FairProgram(recipe, case.model, len(case.names), names=case.names)
            clients = case.whole if trial.method in OURS else case.paper
            trainer = Trainer(program, clients, efforts=fairness.EFFORTS.get(recipe.method, {}))
            trainer.compile(together)
            self._trainers[place] = trainer
        return self._trainers[place]

    def recipe_for(self, trial: Trial, case: Case) -> Recipe:
        """The recipe, its outer batch cut to the smallest client's validation rows where a split has so few."""
        recipe = self.recipe(trial.dataset, trial.method)
        if not isinstance(recipe.outer_batch_size, int):
            return recipe
        smallest = int(case.paper.bilevel.val_sizes.min())
        return replace(recipe, outer_batch_size=min(recipe.outer_batch_size, smallest))

    def merged(self, folder: RunFolder) -> tuple[list[str], dict[str, pd.DataFrame]]:
        """With a search, the runs with the chosen rates, and a table of all runs.

        The rate of a method is the one with the highest accuracy on the rows set aside (on one split: the mean over the
        seeds); of equals the one with the smaller gap there.  Test rows have no say.
        """
        order = [key for trial in self.trials() for key in trial.part().keys]
        parts = folder.parts() if self.contrast or self.grid else {}
        tables = {}
        if self.contrast:
            rows = pd.concat([parts[part.keys[0]]["contrast-rows"] for part in self.contrasts()], ignore_index=True)
            tables["contrast"] = fairness.compare(rows)
            tables["contrast-floors"] = fairness.floors(rows, self.contrast)
        if not self.grid:
            return order, tables
        every = pd.concat([parts[key]["rows"] for key in order], ignore_index=True)
        by = ["dataset", "split", "method", "split_seed"]
        means = every.groupby([*by, "rate"], sort=False)[["validation_accuracy", "validation_gap"]].mean().reset_index()
        ranked = means.fillna({"validation_accuracy": -np.inf, "validation_gap": np.inf}).sort_values(
            ["validation_accuracy", "validation_gap", "rate"], ascending=[False, True, True], kind="stable"
        )
        best = ranked.drop_duplicates(by).set_index(by)["rate"]
        chosen = every["rate"].to_numpy() == best.loc[list(every[by].itertuples(index=False, name=None))].to_numpy()
        return [key for key, kept in zip(order, chosen, strict=True) if kept], tables | {
            "grid": every.assign(chosen=chosen)
        }


def named(text: str, short: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> tuple[str, ...]:
    """A list as the command line takes it: names with commas; ``short`` ones stand for several."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    return tuple(dict.fromkeys(name for word in words for name in short.get(word, (word,))))


def from_configuration(kept: dict[str, Any]) -> Design:
    """The design of a run folder."""
    names = [field.name for field in fields(Design) if field.name not in ("grid", "_cases", "_trainers")]
    try:
        known = {"contrast": 0, "positive_label": "favourable", **kept}  # older folders do not say these two
        return Design(**{name: known[name] for name in names}, grid=len(kept["rates"]) > 1)
    except KeyError as error:
        raise ValueError(f"run.toml does not say {error}: this is not a folder of `fedbilevel table1`.") from error


def run(
    design: Design, out: str | Path, report: Report | None = None, line: str = "", workers: int | None = None
) -> Run:
    """Run what ``out`` does not hold yet, and return all of it."""
    kernels.begin()
    return conduct(design, out, report, line, workers)


class Verified(NamedTuple):
    """A run computed again: ``differences`` by column, empty where everything agrees."""

    row: dict[str, Any]
    differences: dict[str, tuple[Any, Any]]


def verify(path: str | Path, seed: int | None = None) -> Verified:
    """Compute one run of a folder again, chosen at random (by ``seed``), and compare what was measured."""
    kept = read(path)
    if kept.command != "table1":
        raise ValueError(f"{path} holds a run of {kept.command!r}; only those of 'table1' can be verified.")
    if not len(kept.rows):
        raise ValueError(f"{path} holds no finished run yet: let it compute one first.")
    design = from_configuration(kept.configuration)
    row = kept.rows.iloc[int(np.random.default_rng(seed).integers(len(kept.rows)))]
    method = next(name for name, label in LABELS.items() if label == row["method"])
    place = (row["dataset"], row["split"], method, float(row["rate"]), int(row["split_seed"]))
    # Runs that went side by side do so again: their sums are taken in the same order.
    (trial,) = (trial for trial in design.trials() if trial[:5] == place and row["seed"] in trial.seeds)
    again = next(tables for seeds, tables in design.run(trial) if row["seed"] in seeds)["rows"]
    pairs = {name: (row[name], again[name][0] if name in again else np.nan) for name in EXACT}
    differences = {name: (a, b) for name, (a, b) in pairs.items() if not (a == b or (a != a and b != b))}
    return Verified({str(name): value for name, value in row.items()}, differences)


def measured(
    case: Case, recipe: Recipe, fitted: Fitted, marks: dict[str, Any], setting: dict[str, Any], gap: Gap
) -> dict[str, Any]:
    """Rows, groups, weights and history of one run, as columns, and ``model``, which writes its file.

    ``marks``: which run it is; ``setting``: further columns of its row.
    """
    ends = [list(stops)[-1] for _, stops in groupby(fitted.stops, key=lambda stop: stop.stage)]
    weights = None if fitted.weights is None else named_weights(fitted.weights, case.names, np.array(["0", "1"]))
    # One product with the rows serves all stops; the last is the answer.
    models = np.stack([stop.outer for stop in fitted.stops if stop.stage == "model"], axis=1)
    scores, tests = case.train.features @ models, case.test.features @ models
    decided = case.test.decided_by(tests, len(case.names))
    row, groups = {**marks, **setting}, {}
    if not fitted.diverged:
        counted = {
            "train": Counts(case.train.decided_by(scores[:, -1:], len(case.names)).cells[0]),
            "validation": case.counts("validation", fitted.params),
            "test": Counts(decided.cells[-1]),
        }
        for part, counts in counted.items():
            row[f"{part}_accuracy"] = float(counts.overall("accuracy"))
            row |= {f"{part}_gap": float(gap(counts)), f"{part}_gap_majority": float(gap(counts, "majority_vs_rest"))}
        row["test_balanced_accuracy"] = float(counted["test"].balanced_accuracy())
        row["test_auc"] = area(case.test.labels, tests[:, -1].astype(np.float64))
        groups = _by_group(counted, case.names, marks)
    row |= {"rounds": sum(stop.round for stop in ends), "steps": sum(stop.step for stop in ends), **_costs(ends[-1])}
    told = "" if weights is None else json.dumps([round(float(weight), 6) for weight in weights])
    row |= {"seconds": round(fitted.seconds, 6), "weights": told, "diverged": fitted.diverged}
    objectives = _mean_losses(case.train.labels, scores)
    return {
        "rows": {name: [value] for name, value in row.items()},
        "groups": groups,
        "weights": {} if weights is None else _marked(weights.reset_index().to_dict("list"), marks),
        "history": _history(case, fitted, objectives, decided.overall("accuracy"), gap(decided), marks),
        "model": partial(_save_model, case, recipe, fitted, setting["rate"], marks["seed"]),
    }


def _marked(columns: dict[Any, Any], marks: dict[str, Any]) -> dict[str, Any]:
    """The same rows, which tell which run they belong to."""
    size = len(next(iter(columns.values())))
    return columns | {name: [mark] * size for name, mark in marks.items()}


def _by_group(counted: dict[str, Counts], names: list[str], marks: dict[str, Any]) -> dict[str, Any]:
    """What a model does in every group, on training and on test rows."""
    parts = {part: counted[part].columns() for part in ("train", "test")}
    found = {name: np.concatenate([columns[name] for columns in parts.values()]) for name in parts["test"]}
    del found["negatives"]
    places = {"part": [part for part in parts for _ in names], "group": [*names, *names]}
    return _marked({**places, **found}, marks)


def _costs(stop: Stop) -> dict[str, int]:
    calls = dict(zip(("gradient_calls", "hvp_calls", "cross_calls"), stop.calls, strict=True))
    return {"bytes_up": stop.bytes_up, "bytes_down": stop.bytes_down, **calls}


def _history(
    case: Case, fitted: Fitted, losses: np.ndarray, accuracies: np.ndarray, gaps: np.ndarray, marks: dict[str, Any]
) -> dict[str, Any]:
    """One row a stop: the objective of its stage, and for models also what they do on the test rows."""
    columns: dict[str, list[Any]] = {"stage": [stop.stage for stop in fitted.stops]}
    columns |= {name: [getattr(stop, name) for stop in fitted.stops] for name in ("round", "step")}
    columns |= {name: [_costs(stop)[name] for stop in fitted.stops] for name in _costs(fitted.stops[0])}
    before = [stop for stop in fitted.stops if stop.stage == "weights"]
    columns["objective"] = [*(_validation_loss(case, stop) for stop in before), *losses.tolist()]
    unknown = [np.nan] * len(before)
    columns |= {"test_accuracy": [*unknown, *accuracies.tolist()], "test_gap": [*unknown, *gaps.tolist()]}
    return _marked(columns, marks)


def _mean_losses(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The mean log loss of every model from its ``scores``, a column each."""
    each = np.maximum(scores, 0) + np.log1p(np.exp(-np.abs(scores))) - labels[:, None] * scores
    return np.asarray(each.mean(axis=0, dtype=np.float64))


def _validation_loss(case: Case, stop: Stop) -> float:
    """Mean over the clients of their inner model's loss on their validation rows; ridge and fairness term apart."""
    if stop.inner is None:
        return float("nan")
    held = [Rows(**client_rows(case.paper.bilevel, "val", client)) for client in range(CLIENTS)]
    scores = [rows.features @ inner[:, None] for rows, inner in zip(held, stop.inner, strict=True)]
    losses = [_mean_losses(rows.labels, own)[0] for rows, own in zip(held, scores, strict=True)]
    return float(np.mean(losses))


def _save_model(case: Case, recipe: Recipe, fitted: Fitted, rate: float, seed: int, path: Path) -> None:
    """As a saved classifier, which `FairFederatedClassifier.load` reads and which predicts from raw tables."""
    form, params = recipe.formulation, fitted.params[case.padding :]
    remembered = {
        "options": {
            "method": recipe.method, "formulation": form.kind, "metric": form.metric, "ridge": form.ridge,
            "steps": recipe.steps, "weight_steps": recipe.weight_steps, "batch_size": recipe.batch_size, "step": rate,
            "random_state": seed,
        },
        "clients": [str(number) for number in range(CLIENTS)],
        "features": len(case.columns),
        "names": None if case.encoder is None else case.columns,
        "history": {},
    }  # fmt: skip
    width = len(params) - 1
    encoder = case.encoder or Encoder.of_values([f"x{i}" for i in range(width)], np.zeros(width), np.ones(width))
    model, classes = Model("logistic", len(params)), np.array([0, 1])
    FittedModel(encoder, model, params, classes, case.names, fitted.weights, recipe.method, remembered).write(path)
