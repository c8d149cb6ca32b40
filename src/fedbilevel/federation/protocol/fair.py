"""The fair methods as a program for real sites: FedAvg to FairFed in one stage, FedBiO and FedBiOAcc in two.

What the sites tell before training: with a schema, counts, sums and sums of squares of the number columns (``statistics``);
then how many rows they have (``rows``), the curvature of the logistic loss on them (``smoothness``, one number that bounds
the step size), and how many rows (FedMinMax) or positive rows (FedFB) of every group (``groups``).  Arguments of a job:

    schema       the text of a schema file; or, for sites that offer arrays (features, labels, groups), None and
    arrays       {"features": columns, "groups": how many, "classes": how many}
    recipe       options of `fedbilevel.fairness.recipe.Recipe` but the formulation
    formulation  options of `fedbilevel.fairness.formulation.Formulation`
    model        {"kind": "logistic" or "mlp", "hidden": units}
    validation   the share of a site's rows that the outer problem of a bilevel method is set apart, or None
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.datasets import partition
from fedbilevel.fairness.counts import Counts
from fedbilevel.fairness.formulation import Formulation, fair_problem
from fedbilevel.fairness.inputs import smoothness
from fedbilevel.fairness.methods import COUNTED, bilevel_algorithm, single_level
from fedbilevel.fairness.models import Model, probabilities
from fedbilevel.fairness.recipe import BILEVEL, COMPARES_GROUPS, OUTER_BATCH, WHOLE_UP_TO, Recipe
from fedbilevel.federation.protocol.errors import Refused
from fedbilevel.federation.protocol.policy import Source
from fedbilevel.federation.protocol.program import Numbers, Stage
from fedbilevel.tables.encoder import Encoder, Parsed, Statistics, combine, parse, site_statistics
from fedbilevel.tables.schema import Schema

SMOOTH = 2.5
"""The curvature for which the default steps were chosen, as in the estimator."""
KNOWN = ("schema", "arrays", "recipe", "formulation", "model", "validation")


class Rows(NamedTuple):
    """A site's encoded rows, each a dict of arrays; ``apart``: validation rows are not among the training rows."""

    train: dict[str, np.ndarray]
    val: dict[str, np.ndarray]
    apart: bool


class FairProgram:
    """See the module's text."""

    surveys = 2

    def __init__(self, arguments: dict[str, Any]) -> None:
        strange = set(arguments) - set(KNOWN)
        if strange:
            raise ValueError(f"The fair program has no argument {sorted(strange)[0]!r}; use {', '.join(KNOWN)}.")
        text, arrays = arguments.get("schema"), arguments.get("arrays")
        if (text is None) == (arrays is None):
            raise ValueError("The fair program needs either a schema or the sizes of arrays.")
        self.schema: Schema | None = (
            None if text is None else replace(Schema.parse(text, "The job's schema"), site=None)
        )
        sizes = arrays or {}
        self.groups = int(sizes["groups"]) if self.schema is None else len(self.schema.groups)
        self.classes = int(sizes.get("classes", 2)) if self.schema is None else 2
        width = int(sizes["features"]) if self.schema is None else len(self.schema.feature_names)
        self.model = Model(**{"kind": "logistic", **arguments.get("model", {})}, features=width, classes=self.classes)
        self.plain = Recipe(
            **_options(Recipe, arguments.get("recipe", {})),
            formulation=Formulation(**_options(Formulation, arguments.get("formulation", {}))),
        )
        self.share = arguments.get("validation")
        if self.share is not None and not 0 < self.share < 1:
            raise ValueError(f"validation must lie between 0 and 1 or be None, not {self.share}.")
        compares = self.plain.method in COMPARES_GROUPS
        if compares and (self.classes != 2 or self.groups < 2):
            raise ValueError(f"{self.plain.method} is defined for two classes and at least two groups; use fedbioacc.")
        self._read: tuple[Parsed | dict[str, np.ndarray], np.ndarray] | None = None

    # Before training.

    def survey(self, number: int, source: Source, agreed: Numbers) -> Numbers:
        if number == 0:
            if self.schema is None:
                return {}
            table, _ = self._table(source)
            assert isinstance(table, Parsed)
            found = site_statistics(self.schema, table)
            return {f"statistics/{name}": np.asarray(value) for name, value in found._asdict().items()}
        rows = self._encoded(source, agreed)
        told = {
            "rows": np.array([len(rows.train["labels"]), len(rows.val["labels"])]),
            "smoothness": np.array([smoothness(rows.train["features"])]),
        }
        if self.plain.method in COUNTED:
            own = self._model_rows(rows)
            counted = np.ones(len(own["labels"])) if self.plain.method == "fedminmax" else own["labels"]
            told["groups"] = np.bincount(own["groups"], counted, self.groups)
        return told

    def agree(self, number: int, told: Sequence[Numbers], agreed: Numbers) -> Numbers:
        if number == 0:
            if self.schema is None:
                return {}
            each = [Statistics(*(one[f"statistics/{name}"] for name in Statistics._fields)) for one in told]
            return {f"statistics/{name}": value for name, value in combine(each)._asdict().items()}
        train, val = (np.array([int(one["rows"][part]) for one in told]) for part in (0, 1))
        curvature = np.array([float(one["smoothness"][0]) for one in told])
        found = {
            "rows": np.array([train.min(), train.max(), val.min(), val.max()]),
            # The largest eigenvalue of a mean of matrices is at most the mean of theirs.
            "smoothness": np.array([float(np.average(curvature, weights=train))]),
        }
        if self.plain.method in COUNTED:
            found["groups"] = np.sum([one["groups"] for one in told], axis=0)
        return found

    # Training.

    def stage(self, number: int, agreed: Numbers, answers: Sequence[Tree]) -> Stage | None:
        recipe = self.recipe(agreed)
        two = recipe.method in BILEVEL
        if number >= 1 + two:
            return None
        if two and number == 0:
            problem = fair_problem(recipe.formulation, self.model, self.groups)
            val = self._example()
            example = ({**val, "cells": _rows_of(np.int32)}, val)
            algorithm = bilevel_algorithm(recipe, problem, None)  # type: ignore[arg-type]  # the batch is settled
            return Stage("weights", algorithm, recipe.weight_rounds, example, recipe.client_weights)
        train = self._example()
        if two or recipe.method == "fedavg":
            train["weights"] = _rows_of(np.float32)
        counts = agreed["groups"] if recipe.method in COUNTED else np.ones(self.groups)
        algorithm, weights = single_level(recipe, self.model, self.groups, counts)
        return Stage("model", algorithm, recipe.rounds, (train, None), weights)

    def rows(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> tuple[Tree, Tree]:
        recipe, rows = self.recipe(agreed), self._encoded(source, agreed)
        form = recipe.formulation
        if recipe.method in BILEVEL and number == 0:
            cells = form.cell_of(rows.train["groups"], rows.train["labels"], self.classes)
            return {**rows.train, "cells": cells}, rows.val
        found = self._model_rows(rows)
        if recipe.method in BILEVEL:
            table = form.weights(np.asarray(answers[0]))
            cells = form.cell_of(found["groups"], found["labels"], self.classes)
            found["weights"] = table[cells].astype(np.float32)
        elif recipe.method == "fedavg":
            found["weights"] = np.ones(len(found["labels"]), np.float32)
        return found, None

    def report(self, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        """Rows by group, class and decision, ``[groups, classes, classes]``: every rate and gap follows from them."""
        found = self._model_rows(self._encoded(source, agreed))
        decided = np.argmax(probabilities(self.model, answers[-1], found["features"]), axis=1)
        return {
            "decisions": Counts.of(found["labels"], decided, found["groups"], self.groups, classes=self.classes).cells
        }

    def recipe(self, agreed: Numbers) -> Recipe:
        """The method's options, with steps that suit the features and batches that every site can draw."""
        smallest, _, val_smallest, val_largest = (int(count) for count in agreed["rows"])
        smooth = max(1.0, float(agreed["smoothness"][0]) / SMOOTH)
        plain = self.plain
        batch = None if plain.batch_size is None else min(plain.batch_size, smallest)
        settled = replace(plain, batch_size=batch, step=plain.step / smooth, train_on="all" if self._apart else "train")
        outer = _outer_batch(settled, val_smallest, val_largest)
        return replace(settled, outer_batch_size="whole" if outer is None else outer).slower(smooth)

    def encoder(self, agreed: Numbers) -> Encoder:
        """The encoding all sites agreed on."""
        assert self.schema is not None
        return Encoder(self.schema, Statistics(*(agreed[f"statistics/{name}"] for name in Statistics._fields)))

    def _example(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "features": _rows_of(np.float32, self.model.features),
            "labels": _rows_of(np.float32),
            "groups": _rows_of(np.int32),
        }

    # A site's rows.

    def _table(self, source: Source) -> tuple[Parsed | dict[str, np.ndarray], np.ndarray]:
        """The rows as read, once a job, without those that have no label or group; and their groups."""
        if self._read is None:
            if self.schema is None:
                arrays = source.arrays()
                missing = [name for name in ("features", "labels", "groups") if name not in arrays]
                if missing:
                    raise Refused(f"The site's arrays lack {missing[0]}.")
                self._read = ({name: arrays[name] for name in ("features", "labels", "groups")}, arrays["groups"])
            else:
                columns = (
                    *(column.name for column in self.schema.features),
                    self.schema.target,
                    *(name for name in self.schema.sensitive if all(name != c.name for c in self.schema.features)),
                )
                parsed = parse(self.schema, source.frame(columns), labelled=True, source="The site's table")
                assert parsed.labels is not None
                assert parsed.groups is not None
                kept = parsed.take(np.flatnonzero((parsed.labels >= 0) & (parsed.groups >= 0)))
                assert kept.groups is not None
                self._read = (kept, kept.groups)
        return self._read

    def _encoded(self, source: Source, agreed: Numbers) -> Rows:
        table, groups = self._table(source)
        if isinstance(table, Parsed):
            encoder = self.encoder(agreed)
            features, labels = encoder.transform(table), encoder.labels(table)
        else:
            features, labels = table["features"], table["labels"]
        if features.ndim != 2 or features.shape[1] != self.model.features or len(features) == 0:
            raise Refused("The site's features are not a table of the width the job names, or have no rows.")
        if groups.min() < 0 or groups.max() >= self.groups or labels.min() < 0 or labels.max() >= self.classes:
            raise Refused("The site's labels or groups lie outside the numbers the job names.")
        whole = {
            "features": np.asarray(features, np.float32),
            "labels": np.asarray(labels, np.float32),
            "groups": np.asarray(groups, np.int32),
        }
        everything = np.arange(len(features))
        if not self._apart:
            return Rows(whole, whole, False)
        if self._balanced:
            split = partition.balanced_validation(groups, [everything], size=self.share or 0.2)
        else:
            split = partition.proportional_validation(groups, [everything], share=self.share or 0.2)

        def some(index: np.ndarray) -> dict[str, np.ndarray]:
            return {name: leaf[index] for name, leaf in whole.items()}

        return Rows(some(split.train[0]), some(split.validation[0]), True)

    def _model_rows(self, rows: Rows) -> dict[str, np.ndarray]:
        """What the model is trained on: all rows, in the order of the simulation."""
        if not rows.apart:
            return dict(rows.train)
        return {name: np.concatenate([rows.train[name], rows.val[name]]) for name in rows.train}

    @cached_property
    def _balanced(self) -> bool:
        return self.plain.formulation.kind == "paper" and self.groups > 1

    @cached_property
    def _apart(self) -> bool:
        return self.plain.method in BILEVEL and (self.share is not None or self._balanced)


def _outer_batch(recipe: Recipe, smallest: int, largest: int) -> int | str | None:
    """Validation rows an outer step reads: the rule of the simulated methods, from the smallest and largest site."""
    if recipe.outer_batch_size is not None:
        return recipe.outer_batch_size
    if recipe.formulation.kind == "paper":
        return None if recipe.batch_size is None else min(recipe.batch_size, smallest)
    small = recipe.batch_size is None or largest <= WHOLE_UP_TO
    return "whole" if small else min(OUTER_BATCH, smallest)


def _options(kind: type, given: Any) -> dict[str, Any]:
    """Options by name, from a job: unknown ones are named, functions cannot come."""
    if not isinstance(given, dict):
        raise TypeError(f"The options of {kind.__name__} must be a table, not {type(given).__name__}.")
    known = {entry.name for entry in fields(kind)} - {"formulation"}
    for name in given:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no option {name!r}; there are {', '.join(sorted(known))}.")
    return dict(given)


def _rows_of(kind: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *shape), np.dtype(kind))
