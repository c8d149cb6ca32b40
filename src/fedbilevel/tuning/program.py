"""Tuning as a program of surveys and stages (`fedbilevel.engines.stages`): encode, tune, fit, report.

Rows are read, encoded, counted and reported on as those of a fit by FedAvg are: by its `FairProgram`.  One stage tunes the
choices by the K models of `fedbilevel.tuning.problem`, then fits the model that is used, on all rows with these choices.
``solver`` says by which algorithm; it takes no step that anybody would have to choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pandas as pd

from fedbilevel.algorithms.quasi_newton import MOVES, quasi_newton
from fedbilevel.calculus import Tree
from fedbilevel.datasets import partition
from fedbilevel.engines.stages import Expected, Numbers, Source, Stage
from fedbilevel.fairness.disclosure import MINIMUM
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.methods import Recipe
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.program import FairProgram
from fedbilevel.hints import whole_number
from fedbilevel.plan import Algorithm
from fedbilevel.tables.columns import EVERYBODY
from fedbilevel.tables.encoder import Encoder
from fedbilevel.tables.schema import Column, Schema
from fedbilevel.tuning.problem import Choices, OnAllRows, Ridge, Tuning, check_what, not_summed

FOLDS = 3
ROUNDS = 15
DOUBTFUL = 0.5
"""A row is doubtful where it is trusted less than this; rows are trusted 1 at first."""
JOB = ("schema", "what", "folds", "rounds", "sites", "fold_seed", "minimum_cell")


def solver(tuning: Tuning, rounds: int) -> Algorithm:
    """In units of the prior's spreads its curvature is 1/N; and so much of the loss is what one row can tell."""
    row = 1 / tuning.rows
    told = (tuning.problem(), rounds, tuning.units(), row, row, Ridge(tuning), OnAllRows(tuning))
    return quasi_newton(*told, remembered=max(rounds, MOVES))


@dataclass(frozen=True, eq=False)
class TuneProgram:
    """``reading``: how rows are read, told of and reported on.  ``columns``: see `Tuning`; ``sites``: how many there are;
    ``rows``: of all of them, None where they tell it; ``fold_seed``: where the folds start."""

    reading: FairProgram
    what: tuple[str, ...]
    columns: tuple[int, ...]
    sites: int
    rows_of_all: int | None = None
    folds: int = FOLDS
    rounds: int = ROUNDS
    fold_seed: int = 0

    def __post_init__(self) -> None:
        check_what(self.what, self.reading.model)
        whole_number("folds", self.folds, least=2)
        whole_number("rounds", self.rounds)

    @property
    def summed(self) -> tuple[str, ...]:
        return self.reading.summed

    @property
    def single(self) -> str | None:
        """Why secure sums hide nothing of it."""
        return not_summed(self.what)

    @property
    def model(self) -> Model:
        return self.reading.model

    @property
    def schema(self) -> Schema | None:
        return self.reading.schema

    @property
    def surveys(self) -> int:
        return self.reading.surveys

    @property
    def closing(self) -> int:
        return self.reading.closing

    # What a fit by FedAvg tells, and no more.

    def survey(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        return self.reading.survey(number, source, agreed, answers)

    def expected(self, number: int | None) -> dict[str, Expected]:
        counted = {"doubtful": Expected((1,), -1)} if number is None and "rows" in self.what else {}
        return {**self.reading.expected(number), **counted}

    def agree(self, number: int, told: Sequence[Numbers], agreed: Numbers) -> Numbers:
        return self.reading.agree(number, told, agreed)

    def doubt(self, source: Source, agreed: Numbers, scale: float) -> str | None:
        return self.reading.doubt(source, agreed, scale)

    def encoder(self, agreed: Numbers) -> Encoder:
        return self.reading.encoder(agreed)

    def report(self, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        """What a fit tells; and how many of the site's rows are doubtful, -1 where these or the others are fewer than it tells
        of."""
        told = self.reading.report(source, agreed, [answer.model for answer in answers])
        if "rows" not in self.what:
            return told
        rows = self.reading.encoded(source, agreed).model
        count, least = len(self._doubted(rows, answers)), max(self.reading.minimum, source.minimum_cell)
        few = any(0 < part < least for part in (count, len(rows["labels"]) - count))
        return {**told, "doubtful": np.array([-1 if few else count])}

    def added_up(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """In a form that adds up over sites, of what is told or of what is expected."""
        count = told.get("doubtful")
        doubtful = {} if count is None or isinstance(count, Expected) else {"doubtful": np.maximum(count, 0)}
        return {**self.reading.added_up(told), **doubtful}

    def own_files(self, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> dict[str, str]:
        """What stays at the site: its doubtful rows."""
        if "rows" not in self.what:
            return {}
        rows = self.reading.encoded(source, agreed).model
        return {"doubtful.csv": self._doubted(rows, answers).to_csv(index=False)}

    def _doubted(self, rows: dict[str, np.ndarray], answers: Sequence[Tree]) -> pd.DataFrame:
        return self.doubtful(answers[0].outer, rows["features"], rows["labels"])

    # Training.

    def tuning(self, agreed: Numbers) -> Tuning:
        rows = self.rows_of_all or int(agreed["statistics/rows"][0])
        counts = tuple(int(count) for count in agreed["labels"]) if "classes" in self.what else None
        return Tuning(self.model, self.what, self.folds, self.columns, self.sites, rows, counts)

    def stage(self, number: int, agreed: Numbers, answers: Sequence[Tree]) -> Stage | None:
        rows = example(self.model)
        algorithm = solver(self.tuning(agreed), self.rounds)
        return Stage("tune", algorithm, self.rounds + 1, (rows, rows), "samples") if number == 0 else None

    def rows(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> tuple[Tree, Tree]:
        rows = self.reading.encoded(source, agreed).model
        folded = self.folded(rows["features"], rows["labels"], source.number)
        return folded, folded

    def folded(self, features: np.ndarray, labels: np.ndarray, site: int) -> dict[str, np.ndarray]:
        """One site's rows as the stages read them; folds keep the proportions of the classes."""
        codes = np.zeros(len(labels)) if self.model.regression else labels
        count = len(labels)
        return {
            "features": np.asarray(features, np.float32),
            "labels": np.asarray(labels, np.float32),
            "weights": np.ones(count, np.float32),
            "folds": partition.folds(codes, self.folds, seed=self.fold_seed + site).astype(np.int32),
            "site": np.full(count, site, np.int32),
        }

    def doubtful(self, choices: Choices, features: np.ndarray, labels: np.ndarray) -> pd.DataFrame:
        """Rows whose labels are not believed, the least first; for the site that holds them."""
        batch = {"features": np.asarray(features, np.float32), "labels": np.asarray(labels, np.float32)}
        trust = np.asarray(self.tuning_like().trust(np.asarray(choices.trust), batch, np))
        places = np.flatnonzero(trust < DOUBTFUL)
        table = pd.DataFrame({"row": places, "label": batch["labels"][places].astype(int), "trust": trust[places]})
        return table.sort_values("trust", kind="stable")

    def tuning_like(self) -> Tuning:
        """For what needs no counts of rows."""
        return Tuning(self.model, self.what, self.folds, self.columns, self.sites, self.rows_of_all or 1)

    def cells(self, number: int, train: Tree) -> np.ndarray:
        """The models are told apart by fold, and class weights by class."""
        classes = self.model.classes if "classes" in self.what else 1
        labels = train["labels"].astype(np.int64) if "classes" in self.what else 0
        return np.bincount(train["folds"] * classes + labels, minlength=self.folds * classes)

    def weights_behind(
        self, number: int, rows: Tree, message: Tree, agreed: Numbers, answers: Sequence[Tree]
    ) -> np.ndarray | None:
        """By fold, and by the choices that a message holds: of classes and of trust (weights of sites are the same for all rows
        of one).  As the stage starts, by what makes classes count alike where the choices are judged."""
        folds = np.arange(self.folds)[:, None] == rows["folds"]
        labels = rows["labels"].astype(np.int64)
        if message is None:
            alike = self.tuning(agreed).alike
            return None if alike is None else folds * alike[labels]
        choices = next((part for part in _parts(message) if isinstance(part, Choices)), None)
        if choices is None:
            return None
        weights = np.ones(len(labels))
        if choices.classes is not None:
            weights = weights * np.exp(np.asarray(choices.classes, np.float64))[labels]
        if choices.trust is not None:
            weights = weights * self.tuning_like().trust(np.asarray(choices.trust), rows, np)
        return np.asarray(folds * weights)


def _parts(message: Tree) -> Sequence[Any]:
    return [message] if not isinstance(message, tuple) or isinstance(message, Choices) else list(message)


def example(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
    shapes: dict[str, tuple[Any, ...]] = {"features": (1, model.features), "labels": (1,), "weights": (1,)}
    rows = {name: jax.ShapeDtypeStruct(shape, np.dtype(np.float32)) for name, shape in shapes.items()}
    return rows | {name: jax.ShapeDtypeStruct((1,), np.dtype(np.int32)) for name in ("folds", "site")}


def column_places(columns: Sequence[Column]) -> tuple[int, ...]:
    """Which column of the table every feature is of."""
    return tuple(place for place, column in enumerate(columns) for _ in column.features)


def reading_of(model: Model, what: Sequence[str], schema: Schema | None = None, minimum: int = MINIMUM) -> FairProgram:
    """How a tuning reads rows: as FedAvg, whose sites tell how many there are of each class where class weights are tuned."""
    told = "balanced" if "classes" in what else None
    names = [EVERYBODY] if schema is None else schema.groups
    form = Formulation(metric="mean_error" if model.regression else "equal_opportunity")
    recipe = Recipe("fedavg", form, client_weights="samples")
    return FairProgram(recipe, model, len(names), schema, names=names, class_weight=told, minimum=minimum)


def tune_program(arguments: dict[str, Any]) -> TuneProgram:
    """The program of a job of a federation.  Its arguments: ``schema``, the text of a schema file; ``what``, a list;
    ``sites``, how many; and, if not the usual, ``folds``, ``rounds``, ``fold_seed`` and ``minimum_cell``."""
    strange = set(arguments) - set(JOB)
    if strange:
        raise ValueError(f"The tune program has no argument {sorted(strange)[0]!r}; use {', '.join(JOB)}.")
    schema = replace(Schema.parse(arguments["schema"], "The job's schema"), site=None)
    number = schema.regression
    model = Model(
        "linear" if number else "logistic",
        len(schema.feature_names),
        1 if number else len(schema.labels),
        loss="squared" if number else "log",
    )
    what = tuple(arguments["what"])
    counts = {name: int(arguments[name]) for name in ("folds", "rounds", "fold_seed") if name in arguments}
    reading = reading_of(model, what, schema, arguments.get("minimum_cell", MINIMUM))
    return TuneProgram(reading, what, column_places(schema.features), int(arguments["sites"]), **counts)
