"""A fair fit as a program of surveys and stages (`fedbilevel.engines.stages`): survey, agree, learn weights, train, measure.

FedAvg to FairFed and FedPath train the model in one stage, FedBiO and FedBiOAcc in two.  FedPath's answer is a whole path of
models; `FairProgram.place` says which of them is used, from what the sites told of each on the way.  The simulation
(`fedbilevel.fairness.trainer`) and the federation run the same `FairProgram`; the estimator, the commands and the studies only
make one.

What the sites tell before training: with a schema, counts, sums and sums of squares of the number columns (``statistics``);
then how many rows they have (``rows``, and whether a batch can be drawn of them: `Ladder`), that times the curvature of the
logistic loss on them (``smoothness``, which bounds the step size), how many rows (FedMinMax) or positive rows (FedFB) of every
group (``groups``), and for balanced class weights how many of every class (``labels``).  All of these add up, so secure sums
serve them.  After training, where a threshold is to be chosen: the `Scores` of rows set aside
(``scores``).  No count below the site's minimum cell is told.  A method that compares groups tells of every cell as it trains:
groups of a site with a small one are compared as one group there, with the next smallest where that takes (`Visible`), and in
the second stage of a bilevel method each has its own weights again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.datasets import partition
from fedbilevel.engines.stages import Expected, Numbers, Refused, Source, Stage
from fedbilevel.fairness.audit import report_expected, report_of
from fedbilevel.fairness.baseline import LEAVES
from fedbilevel.fairness.disclosure import MINIMUM, Visible
from fedbilevel.fairness.formulation import METRICS, OF_NUMBERS, Formulation, fair_problem
from fedbilevel.fairness.frontier import Frontier, frontier_of
from fedbilevel.fairness.methods import (
    BILEVEL,
    COMPARES_GROUPS,
    PATH,
    Ladder,
    Recipe,
    bilevel_algorithm,
    path_algorithm,
    single_level,
)
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.models import Model, numbers, probabilities
from fedbilevel.fairness.moments import Moments
from fedbilevel.fairness.scores import Scores, added_up
from fedbilevel.fairness.thresholds import ASIDE, Threshold, decisions
from fedbilevel.hints import whole_number
from fedbilevel.tables.columns import shown
from fedbilevel.tables.encoder import Encoder, Parsed, Statistics, combine, parse, site_statistics
from fedbilevel.tables.schema import Schema

COUNTED = {"fedminmax": "rows", "fedfb": "positive rows"}
"""Methods whose server must know how many rows every group has, and which rows (of a number: all)."""
SINGLE = ("fcfl",)
"""Methods whose server needs every client's reply by itself, which secure sums hide."""
VALIDATION_SHARE = 0.2
JOB = ("schema", "arrays", "recipe", "formulation", "model", "validation", "class_weight", "threshold", "minimum_cell")


class Rows(NamedTuple):
    """One client's encoded rows, dicts of arrays: those of the bilevel problem, those the model is trained on, and those set
    aside to choose a threshold on; and which groups may be told by themselves, None where that was not asked."""

    train: dict[str, np.ndarray]
    val: dict[str, np.ndarray]
    model: dict[str, np.ndarray]
    aside: dict[str, np.ndarray] | None = None
    visible: Visible | None = None


@dataclass(frozen=True, eq=False)
class FairProgram:
    """``model``: its features and classes are those of the encoded rows; ``groups``: how many.

    ``schema``: how a table is read; None where rows come as arrays.  ``share``: the share of a site's rows that the outer
    problem of a bilevel method is set apart.  ``curvature``: of the logistic loss, None where the sites tell it.  ``names``:
    what sentences call the groups.  ``row_weights``: rows have weights of their own.  ``class_weight``: "balanced" (rows /
    (classes * rows of the class), over all clients), or one number a class, scaled to mean one over the rows; they multiply
    the rows' weights in all losses.
    ``threshold``: of decisions.  ``minimum``: smaller counts leave no client; a site may ask for more.  ``secure``: averages of
    a simulation are rounded as secure sums are.
    """

    # What only sums are needed of, and the form in which it adds up.
    summed = ("statistics", "rows", "smoothness", "groups", "labels", "scores", "report")
    added_up = staticmethod(added_up)

    recipe: Recipe
    model: Model
    groups: int
    schema: Schema | None = None
    share: float | None = None
    curvature: float | None = 0.0
    names: Sequence[Any] | None = None
    row_weights: bool = False
    class_weight: str | Sequence[float] | None = None
    threshold: Threshold = field(default_factory=Threshold)
    minimum: int = MINIMUM
    secure: bool = False
    _tables: dict[int, Parsed] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        whole_number("groups", self.groups)
        if self.share is not None and not 0 < self.share < 1:
            raise ValueError(f"validation must lie between 0 and 1 or be None, not {self.share}.")
        whole_number("minimum_cell", self.minimum)
        self._check_task()
        if self.model.regression and self.threshold != Threshold():
            raise ValueError("A threshold is for classes, and a number has none: leave it out.")
        if self.model.classes > 2 and self.threshold not in (Threshold(), Threshold("auto")):
            raise ValueError(
                f"threshold {self.threshold} is about one positive class, and there are {self.model.classes} classes: auto "
                "weighs them against each other; or name one of them as positive."
            )
        self._check_class_weight()
        method = self.recipe.method
        if not isinstance(self.secure, bool):
            raise TypeError(f"secure must be True or False, not {self.secure!r}.")
        if self.secure:
            check_secure(method)
        if method == PATH and self.model.kind == "mlp":
            raise ValueError(
                "fedpath follows the minimum of a convex loss, and a network's has many: name fedbioacc, fedbio or fedreg as "
                "the method with model='mlp', or use the model logistic (of a number: linear)."
            )
        if method == PATH and self.share is not None:
            raise ValueError("fedpath reads all rows on both levels: leave validation out, or use fedbioacc or fedbio.")
        if (self.recipe.gap, self.recipe.accuracy_loss) != (None, None) and self.threshold.tuned:
            raise ValueError(
                f"An aim is measured at a threshold that is known before training, and {self.threshold} is chosen after it: "
                "name a number, or leave the threshold or the aim out."
            )
        if method not in COMPARES_GROUPS:
            return
        if self.groups < 2:
            raise ValueError(f"{method} compares groups, but there is only one; use fedavg.")
        if self.row_weights:
            raise ValueError(f"{method} takes no weights of single rows; use fedpath, fedbioacc, fedbio or fedavg.")
        if self.class_weight is not None:
            raise ValueError(
                f"{method} takes no class weights; use fedpath, fedbioacc, fedbio or fedavg, or a threshold."
            )

    def _check_class_weight(self) -> None:
        given = self.class_weight
        if given is not None and self.model.regression:
            raise ValueError("class_weight is for classes, and a number has none: leave it out.")
        if given is None or given == "balanced":
            return
        if isinstance(given, str):
            raise ValueError(f"class_weight must be balanced, one number a class or None, not {given!r}.")
        weights = np.asarray(given, np.float64)
        if weights.shape != (self.model.classes,) or not (np.isfinite(weights) & (weights > 0)).all():
            raise ValueError(
                f"class_weight must hold a positive number for each of the {self.model.classes} classes, not {given!r}."
            )

    def _check_task(self) -> None:
        """Metrics and methods for classes, or for numbers."""
        metric, numbers = self.recipe.formulation.metric, self.model.regression
        known = [name for name in METRICS if (name in OF_NUMBERS) == numbers]
        if isinstance(metric, str) and metric not in known:
            what = "a number" if numbers else "classes"
            raise ValueError(f"metric={metric!r} does not suit {what}; use {' or '.join(known)}.")

    @property
    def ladder(self) -> Ladder:
        return Ladder(self.recipe.batch_size or 1)

    @property
    def surveys(self) -> int:
        return 2

    @property
    def closing(self) -> int:
        return int(self.threshold.tuned)

    @property
    def weighted(self) -> bool:
        """Whether rows have a leaf ``weights``."""
        return self.row_weights or self.class_weight is not None

    @property
    def two_stages(self) -> bool:
        return self.recipe.method in BILEVEL

    @property
    def path(self) -> bool:
        """Whether the answer is a path of models."""
        return self.recipe.method == PATH

    @property
    def compares(self) -> bool:
        """Whether replies tell of groups one by one."""
        return self.recipe.method != "fedavg"

    # Before training.

    def survey(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        if number == 2:
            rows = self.encoded(source, agreed).aside
            assert rows is not None
            return self.scores_aside(rows, self.params(answers, agreed), self._minimum(source)).packed()
        if number == 1:
            return self.told(self.encoded(source, agreed), self._minimum(source))
        if self.schema is None:
            return {}
        sums = site_statistics(self.schema, self._table(source))
        return {f"statistics/{name}": np.asarray(value) for name, value in sums._asdict().items()}

    def told(self, rows: Rows, minimum: int | None = None) -> Numbers:
        """What a client tells of its encoded rows."""
        size, val_size = len(rows.train["labels"]), len(rows.val["labels"])
        told = {"rows": np.array([size, val_size]), "rows/sizes": self.ladder.place(size, val_size)}
        if self.curvature is None:
            told["smoothness"] = np.array([size * smoothness(rows.train["features"], self.model.curvature)])
        if self.recipe.method in COUNTED:
            told["groups"] = self._counted(rows)
        if self.class_weight is not None:
            told["labels"] = self._labels(rows, minimum)
        return told

    def _counted(self, rows: Rows) -> np.ndarray:
        """Rows of every group (FedMinMax, or of a number), or its positive ones (FedFB); of more than two classes
        ``[class, group]``."""
        labels, groups, classes = rows.model["labels"], rows.model["groups"], self.model.classes
        if self.recipe.method == "fedfb" and classes > 2:
            cells = np.bincount(labels.astype(np.int64) * self.groups + groups, minlength=classes * self.groups)
            return cells.reshape(classes, self.groups).astype(np.float64)
        every = self.recipe.method == "fedminmax" or self.model.regression
        return np.bincount(groups, np.ones(len(labels)) if every else labels, self.groups)

    def _labels(self, rows: Rows, minimum: int | None) -> np.ndarray:
        """Rows of every class.  Groups that the report will leave out do not count, or they would follow from both."""
        visible = rows.visible or self._visible(rows, minimum)
        return np.asarray(self._cells(rows.model)[~visible.left_out].sum(axis=0))

    def scores_aside(self, rows: dict[str, np.ndarray], params: Tree, minimum: int | None = None) -> Scores:
        """What a client tells of the rows set aside, all groups as one; nothing where they are too few of a label."""
        least = self.minimum if minimum is None else minimum
        probability = self._scored(probabilities(self.model, params, rows["features"]))
        scores = Scores.of(rows["labels"], probability, np.zeros(len(probability), np.int64), 1, max(least, 2))
        few = ((scores.rows > 0) & (scores.rows < least)).any()
        return Scores(scores.cells * (not few), scores.sums * (not few))

    def expected(self, number: int | None) -> dict[str, Expected]:
        groups, classes = self.groups, self.model.classes
        if number is None:
            return report_expected(groups, 0 if self.model.regression else classes, scored=True)
        if number == 2:
            return Scores.expected(1, classes)
        if number == 0:
            columns = () if self.schema is None else (len(self.schema.centers),)
            bounds = {"counts": (0.0, 1e12), "sums": (-1e30, 1e30), "squares": (0.0, 1e30)}
            sums = {f"statistics/{name}": Expected(columns, *bounds[name]) for name in bounds}
            return {"statistics/rows": Expected((1,), 1), **sums} if columns else {}
        told = {"rows": Expected((2,), (1, 0)), "rows/sizes": Expected((self.ladder.length,), high=1)}
        if self.curvature is None:
            told["smoothness"] = Expected((1,))
        if self.recipe.method in COUNTED:
            by_class = self.recipe.method == "fedfb" and classes > 2
            told["groups"] = Expected((classes, groups) if by_class else (groups,))
        return told if self.class_weight is None else {**told, "labels": Expected((classes,))}

    def agree(self, number: int, told: Sequence[Numbers], agreed: Numbers) -> Numbers:
        if number == 0:
            if self.schema is None:
                return {}
            each = [Statistics(*(share[f"statistics/{name}"] for name in Statistics._fields)) for share in told]
            return {f"statistics/{name}": value for name, value in combine(each)._asdict().items()}
        if number == 2:
            first, *others = (Scores.received(share) for share in told)
            return {"threshold": np.atleast_1d(self.threshold.choose(sum(others, first)))}
        total = sum(float(share["rows"][0]) for share in told)
        smallest, val_smallest, val_largest = self.ladder.bounds(
            np.sum([share["rows/sizes"] for share in told], axis=0)
        )
        curvature = self.curvature
        if curvature is None:
            # The largest eigenvalue of a mean of matrices is at most the mean of theirs.
            curvature = sum(float(share["smoothness"][0]) for share in told) / total
        common = {
            "rows": np.array([smallest, int(total), val_smallest, val_largest]),
            "smoothness": np.array([curvature]),
        }
        if self.recipe.method in COUNTED:
            common["groups"] = np.sum([share["groups"] for share in told], axis=0)
            self._check_counts(common["groups"])
        if self.class_weight is not None:
            common["labels"] = np.sum([share["labels"] for share in told], axis=0)
            if not common["labels"].all():
                raise ValueError(
                    "Class weights need training rows of every class: check the target, and the sites' minimum cells."
                )
        return common

    def class_weights(self, agreed: Numbers) -> np.ndarray | None:
        """One weight a class, with mean one over the rows of all clients; None where classes have none."""
        if self.class_weight is None:
            return None
        labels = agreed["labels"]
        weights = 1 / labels if self.class_weight == "balanced" else np.asarray(self.class_weight, np.float64)
        return np.asarray(weights * labels.sum() / (weights * labels).sum())

    def decides(self, agreed: Numbers) -> float | np.ndarray:
        """The threshold of decisions; one a class of more than two, where it was chosen."""
        if not self.threshold.tuned:
            return self.threshold.value
        return agreed["threshold"] if self.model.classes > 2 else float(agreed["threshold"][0])

    def _scored(self, chances: np.ndarray) -> np.ndarray:
        """The probabilities that `Scores` takes: of the second of two classes, or of all."""
        return chances[:, 1] if self.model.classes == 2 else chances

    def _check_counts(self, counts: np.ndarray) -> None:
        if (counts > 0).all():
            return
        *label, empty = (int(place) for place in np.unravel_index(np.argmin(counts), counts.shape))
        which = f"number {empty}" if self.names is None else shown(self.names[empty])
        rows = f"rows of class number {label[0]}" if label else COUNTED[self.recipe.method]
        raise ValueError(
            f"{self.recipe.method} compares the losses of the groups' {'rows' if self.model.regression else rows}, but group "
            f"{which} has none, or too few at every site to tell: leave that group out, or use fedpath, fedreg or fedavg."
        )

    def settled(self, agreed: Numbers) -> Recipe:
        """The method's options, with steps that suit the features and batches that every client can draw."""
        smallest, total, val_smallest, val_largest = (int(count) for count in agreed["rows"])
        curvature = float(agreed["smoothness"][0])
        return self.recipe.settled(smallest, val_smallest, val_largest, curvature, total)

    def encoder(self, agreed: Numbers) -> Encoder:
        """The encoding all sites agreed on."""
        assert self.schema is not None
        return Encoder.from_statistics(
            self.schema, Statistics(*(agreed[f"statistics/{name}"] for name in Statistics._fields))
        )

    # Training.

    def stage(self, number: int, agreed: Numbers, answers: Sequence[Tree]) -> Stage | None:
        recipe = self.settled(agreed)
        if number > self.two_stages:
            return None
        rows = {
            "features": _rows_of(np.float32, self.model.features),
            "labels": _rows_of(np.float32),
            "groups": _rows_of(np.int32),
        }
        if self.weighted:
            rows["weights"] = _rows_of(np.float32)
        if self.two_stages and number == 0:
            problem = fair_problem(recipe.formulation, self.model, self.groups, row_weights=self.weighted)
            example = ({**rows, "cells": _rows_of(np.int32)}, rows)
            algorithm = bilevel_algorithm(recipe, problem)
            return Stage("weights", algorithm, recipe.weight_rounds, example, recipe.client_weights)
        if self.path:
            at = self.threshold.value if not self.threshold.tuned else 0.5
            algorithm = path_algorithm(recipe, self.model, self.groups, float(agreed["rows"][1]), at)
            return Stage("model", algorithm, recipe.rounds, ({**rows, "cells": _rows_of(np.int32)}, None), "samples")
        if self.two_stages or recipe.method == "fedavg":
            rows["weights"] = _rows_of(np.float32)
        counts = agreed.get("groups", np.ones(self.groups))
        algorithm, weights = single_level(recipe, self.model, self.groups, counts, float(agreed["rows"][1]))
        return Stage("model", algorithm, recipe.rounds, (rows, None), weights)

    def training_rows(
        self, number: int, rows: dict[str, Any], answers: Sequence[Tree], agreed: Numbers
    ) -> dict[str, Any]:
        """A stage's training rows, with the cells whose weights are learned, or, where there is an answer, the weights that
        were; arrays ``[n, ...]`` of one client or ``[clients, n, ...]`` of all."""
        form = self.recipe.formulation
        rows = self.with_weights(rows, agreed)
        if self.two_stages or self.path:
            cells = form.cell_of(rows["groups"], rows["labels"], self.model.classes)
            if len(answers) == 0:
                return {**rows, "cells": cells}
            learned = answers[0].outer[self.place(answers, agreed)] if self.path else answers[0]
            weights = form.weights(learned)[cells].astype(np.float32)
            if self.weighted:
                weights = weights * np.asarray(rows["weights"], np.float32)
            return {**rows, "weights": weights}
        if self.recipe.method == "fedavg" and not self.weighted:
            return {**rows, "weights": np.ones(np.shape(rows["labels"]), np.float32)}
        return rows

    def with_weights(self, rows: dict[str, Any], agreed: Numbers) -> dict[str, Any]:
        """Rows with the weights of their classes, on top of their own."""
        classes = self.class_weights(agreed)
        if classes is None:
            return rows
        weights = classes.astype(np.float32)[np.asarray(rows["labels"]).astype(np.int64)]
        return {**rows, "weights": weights * np.asarray(rows.get("weights", 1), np.float32)}

    def rows(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> tuple[Tree, Tree]:
        rows = self.encoded(source, agreed)
        bilevel = self.two_stages and number == 0
        train = rows.train if bilevel else rows.model
        val = self.with_weights(rows.val, agreed) if bilevel else None
        return self.training_rows(number, train, answers, agreed), val

    # Afterwards.

    def params(self, answers: Sequence[Tree], agreed: Numbers) -> Tree:
        """The model that is used."""
        if not self.path:
            return answers[-1]
        place = self.place(answers, agreed)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[place], answers[-1].inner)

    def place(self, answers: Sequence[Tree], agreed: Numbers) -> int:
        """Where on the path that model is."""
        return self.frontier(answers, agreed).place

    def frontier(self, answers: Sequence[Tree], agreed: Numbers) -> Frontier:
        """The path as the sites' averages on their training rows show it."""
        recipe = self.settled(agreed)
        names, total = self.names or list(range(self.groups)), float(agreed["rows"][1])
        return frontier_of(answers[-1], recipe, self.model, total, names, self.minimum)

    def weights(self, agreed: Numbers, answers: Sequence[Tree], server: Any) -> np.ndarray | None:
        """What was learned about the groups ("paper"), cells ("cells") or, by the ``server`` of a method of one level, groups:
        FedMinMax's mu / rho, FedFB's mu / pi (of more than two classes: by group, then class).  None for other methods."""
        if self.two_stages or self.path:
            learned = answers[0].outer[self.place(answers, agreed)] if self.path else answers[0]
            return self.recipe.formulation.weights(learned)
        if self.recipe.method not in COUNTED:
            return None
        counts = agreed["groups"]
        weights = np.asarray(server.group_weights, np.float64) / (counts / counts.sum(axis=-1, keepdims=True))
        return np.asarray(weights.T.reshape(-1))

    def report(self, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        """How often every group and class got every decision, and which probabilities; see `report_of`.  Of a number, sums by
        group (`Moments`)."""
        *_, rows, _, visible = self.encoded(source, agreed)
        assert visible is not None
        if self.model.regression:
            said = numbers(self.model, self.params(answers, agreed), rows["features"])
            return report_of(Moments.of(rows["labels"], said, rows["groups"], self.groups), visible)
        predicted = probabilities(self.model, self.params(answers, agreed), rows["features"])
        decided = decisions(predicted, self.decides(agreed))
        counts = Counts.of(rows["labels"], decided, rows["groups"], self.groups, classes=self.model.classes)
        return report_of(counts, visible, rows["labels"], rows["groups"], self._scored(predicted))

    # What a site makes sure of.

    def doubt(self, source: Source, agreed: Numbers, scale: float) -> str | None:
        first = set() if self.schema is None else {f"statistics/{name}" for name in Statistics._fields}
        second = {"rows", "smoothness"} | ({"groups"} if self.recipe.method in COUNTED else set())
        second |= set() if self.class_weight is None else {"labels"}
        third = {"threshold"} if self.threshold.tuned else set()
        if set(agreed) not in (set(), first, first | second, first | second | third):
            return f"It holds {', '.join(sorted(agreed))}."
        if not agreed:
            return None
        if self.schema is not None:
            own = site_statistics(self.schema, self._table(source))
            common = Statistics(*(agreed[f"statistics/{name}"] for name in Statistics._fields))
            doubt = doubt_statistics(self.schema, own, common, scale)
            if doubt is not None or set(agreed) == first:
                return doubt
        rows = self.encoded(source, agreed)
        sizes = np.array([len(rows.train["labels"]), len(rows.val["labels"])]).repeat(2)
        told = agreed["rows"]
        if told.shape != (4,) or ((told - sizes) * [1, -1, 1, -1] > 0).any():
            return f"The site's own {sizes[0]} and {sizes[2]} rows lie outside {told.tolist()}."
        if "groups" in second and not (agreed["groups"] >= self._counted(rows)).all():
            return "A group has more rows at this site than at all of them."
        if "labels" in second and not (agreed["labels"] >= self._labels(rows, self._minimum(source))).all():
            return "A class has more rows at this site than at all of them."
        chosen, size = agreed.get("threshold"), self.model.classes if self.model.classes > 2 else 1
        if chosen is not None and not (chosen.shape == (size,) and (chosen > 0).all() and (chosen < 1).all()):
            return "The threshold is no number between 0 and 1, or not one a class."
        return None

    def cells(self, number: int, train: Tree) -> np.ndarray:
        """Rows by group and class (a number: side of the mean), wherever the method compares groups or gives them weights."""
        return self._cells(train).ravel() if self.compares and number == 0 else np.zeros(0, np.int64)

    def _cells(self, rows: Tree) -> np.ndarray:
        """Rows by group and class; of a number by group and, where groups are compared, side of the mean."""
        labels, classes = np.asarray(rows["labels"]), self.model.classes
        if self.model.regression:
            labels, classes = labels > 0, 2
        cells = np.bincount(rows["groups"] * classes + labels.astype(np.int32), minlength=self.groups * classes)
        cells = cells.reshape(self.groups, classes)
        return cells.sum(axis=1, keepdims=True) if self.model.regression and not self.compares else cells

    def weights_behind(
        self, number: int, rows: Tree, message: Tree, agreed: Numbers, answers: Sequence[Tree]
    ) -> np.ndarray | None:
        """By the weights of the cells, where the message says them or moves them; by those found in stage one; by those of the
        groups (FedMinMax, FedFB)."""
        if (self.two_stages or self.path) and number == 0:
            own: np.ndarray | None = rows.get("weights")
            if message is None or (self.path and not hasattr(message, "outer")):
                return own
            return self._least_even(message, rows["cells"]) * (1 if own is None else own)
        if hasattr(message, "row_weights"):
            weights, labels = np.asarray(message.row_weights, np.float64), np.asarray(rows["labels"])
            if weights.ndim == 2:  # FedFB's, of every class
                return np.asarray(weights[labels.astype(np.int64), rows["groups"]])
            weights = weights[rows["groups"]]
            every = self.recipe.method == "fedminmax" or self.model.regression
            return weights if every else np.where(labels > 0, weights, 1.0)
        learned: np.ndarray | None = rows.get("weights")
        return learned

    def _least_even(self, message: Any, cells: np.ndarray) -> np.ndarray:
        """The weights of rows that the outer variable in a message stands for, or those that its momentum leads to within a
        round, whichever are further from equal."""
        form, method = self.recipe.formulation, self.recipe.method
        if method in ("fedbio", PATH):
            return np.asarray(form.weights(message.outer if method == PATH else message)[cells])
        chosen = {"delta": 0.1, "u": 1.0, **self.recipe.constants()}
        step = chosen["outer_step"] if self.recipe.outer_step is None else self.recipe.outer_step
        reach = step * chosen["delta"] / chosen["u"] ** (1 / 3) * self.recipe.local_steps
        moved = np.asarray(message.anchor, np.float64) - reach * np.asarray(message.momentum, np.float64)
        each = [form.weights(outer)[cells] for outer in (message.anchor, moved)]
        return max(each, key=lambda weights: float(np.sum(weights**2) / np.sum(weights) ** 2))

    # A site's rows.

    def divided(self, groups: np.ndarray, parts: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The training and validation rows of clients that hold the rows ``parts``."""
        if not self.recipe.apart(self.groups, self.share):
            return [(part, part) for part in parts]
        share = self.share or VALIDATION_SHARE
        if self.recipe.formulation.kind == "paper" and self.groups > 1:
            split = partition.balanced_validation(groups, parts, size=share)
        else:
            split = partition.proportional_validation(groups, parts, share=share)
        return list(zip(split.train, split.validation, strict=True))

    def set_aside(
        self, groups: np.ndarray, labels: np.ndarray, parts: Sequence[np.ndarray], minimum: int | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The rows of every client to train on, and those to choose a threshold on.

        Of each group and label every fifth row; or every fourth, third or second where that takes for ``minimum`` rows of each
        label, since fewer are not told."""
        if not self.threshold.tuned:
            return [(part, part[:0]) for part in parts]
        least = self.minimum if minimum is None else minimum
        divided = []
        for part in parts:
            label = np.asarray(labels[part], np.int64)
            cells = np.asarray(groups[part], np.int64) * self.model.classes + label
            order = np.argsort(cells, kind="stable")
            rank = np.empty(len(part), np.int64)
            rank[order] = np.arange(len(part)) - np.searchsorted(cells[order], cells[order])
            for every in (*ASIDE, ASIDE[0]):
                aside = rank % every == every - 1
                if np.bincount(label[aside], minlength=self.model.classes).min() >= least:
                    break
            divided.append((part[~aside], part[aside]))
        return divided

    def _visible(self, rows: Rows, minimum: int | None) -> Visible:
        """Which groups a client may tell, its number of rows being known; where groups are compared, of every label too."""
        parts = [rows.train, rows.model] if self.compares else [rows.model]
        least = self.minimum if minimum is None else minimum
        return Visible.of([self._cells(part) for part in parts], least, "labels" if self.compares else "rows")

    def _compared_as_told(self, rows: Rows, visible: Visible) -> Rows:
        """Wherever groups are compared, those that are told together have the number of the largest of them."""
        same = np.arange(self.groups, dtype=np.int32)
        if self.compares and visible.pooled.any():
            sizes = self._cells(rows.model).sum(axis=1)
            same[visible.pooled] = np.argmax(np.where(visible.pooled, sizes, -1))
        train, val, model = ({**part, "groups": same[part["groups"]]} for part in rows[:3])
        return Rows(train, val, rows.model if self.two_stages else model, rows.aside, visible)

    def _minimum(self, source: Source) -> int:
        """A site may ask for more than the job, and a job cannot ask for less than the site."""
        return max(self.minimum, source.minimum_cell)

    def _table(self, source: Source) -> Parsed:
        """A site's table as read, once a job, without rows that have no label or group."""
        assert self.schema is not None
        if id(source) not in self._tables:
            columns = (
                *(column.name for column in self.schema.features),
                self.schema.target,
                *(name for name in self.schema.sensitive if all(name != c.name for c in self.schema.features)),
            )
            parsed = parse(self.schema, source.frame(columns), labelled=True, source="The site's table")
            self._tables[id(source)] = without_few(parsed.complete(), source.minimum_cell)
        return self._tables[id(source)]

    def _arrays(self, source: Source, agreed: Numbers) -> tuple[np.ndarray, ...]:
        if self.schema is not None:
            table, encoder = self._table(source), self.encoder(agreed)
            encoded = encoder.transform(table)
            # Categories, flags, and numbers that the scaling has cut: a column that a handful of rows have says nothing.
            shown = np.where(few_differ(encoded, source.minimum_cell), 0, encoded)
            return shown, encoder.standardised(table.labels), table.groups
        arrays = source.arrays()
        missing = [name for name in LEAVES if name not in arrays]
        if missing:
            raise Refused("source", f"The site's arrays lack {missing[0]}.")
        return tuple(arrays[name] for name in LEAVES)

    def encoded(self, source: Source, agreed: Numbers) -> Rows:
        """A site's rows as the stages read them."""
        features, labels, groups = self._arrays(source, agreed)
        if features.ndim != 2 or features.shape[1] != self.model.features or len(features) == 0:
            raise Refused("source", "The features are not a table of the width the job names, or have no rows.")
        strange = groups.min() < 0 or groups.max() >= self.groups or not np.isfinite(labels).all()
        if strange or (not self.model.regression and (labels.min() < 0 or labels.max() >= self.model.classes)):
            raise Refused("source", "Labels or groups lie outside the numbers the job names.")
        whole = {
            "features": np.asarray(features, np.float32),
            "labels": np.asarray(labels, np.float32),
            "groups": np.asarray(groups, np.int32),
        }
        ((kept, aside),) = self.set_aside(groups, labels, [np.arange(len(features))], self._minimum(source))
        ((train, val),) = self.divided(groups, [kept])
        apart = self.recipe.apart(self.groups, self.share)
        # What the model is trained on: all rows, in the order of the simulation.
        taken = (train, val, np.concatenate([train, val]) if apart else train, aside)
        parts = [{name: leaf[index] for name, leaf in whole.items()} for index in taken]
        rows = Rows(parts[0], parts[1], parts[2], parts[3])
        return self._compared_as_told(rows, self._visible(rows, self._minimum(source)))


def check_secure(method: str) -> None:
    """Refuse a method that secure sums cannot serve."""
    if method in SINGLE:
        raise ValueError(
            f"{method} needs every client's reply by itself, which secure sums hide: use fedpath, fedbioacc, fedbio, fedavg, "
            "fedreg, fedminmax or fedfb, or leave secure sums out."
        )


def fair_program(arguments: dict[str, Any]) -> FairProgram:
    """The program of a job of a federation.  Its arguments:

    schema       the text of a schema file; or, for sites that offer arrays (features, labels, groups), None and
    arrays       {"features": columns, "groups": how many, "classes": how many}
    recipe       options of `Recipe` but the formulation
    formulation  options of `Formulation`
    model        {"kind": "logistic", "linear" or "mlp", "hidden": units, "loss": "log", or "squared" or "huber" for a number}
    validation   the share of a site's rows that the outer problem of a bilevel method is set apart, or None
    class_weight  None, "balanced" or a list of numbers; threshold: see `Threshold`; minimum_cell: smaller counts are not told
    """
    strange = set(arguments) - set(JOB)
    if strange:
        raise ValueError(f"The fair program has no argument {sorted(strange)[0]!r}; use {', '.join(JOB)}.")
    text = arguments.get("schema")
    if (text is None) == (arguments.get("arrays") is None):
        raise ValueError("The fair program needs either a schema or the sizes of arrays.")
    schema = None if text is None else replace(Schema.parse(text, "The job's schema"), site=None)
    if schema is None:
        sizes = {"classes": 2, **arguments["arrays"]}
    else:
        sizes = {
            "features": len(schema.feature_names),
            "groups": len(schema.groups),
            "classes": max(1, len(schema.labels)),
        }
    groups = int(sizes["groups"])
    form = Formulation(**_options(Formulation, arguments.get("formulation", {})))
    recipe = Recipe(**_options(Recipe, arguments.get("recipe", {})), formulation=form)
    share = arguments.get("validation")
    return FairProgram(
        recipe.asked(groups, None, share),
        Model(
            **{"kind": "logistic", **arguments.get("model", {})},
            features=int(sizes["features"]),
            classes=int(sizes["classes"]),
        ),
        groups,
        schema,
        share,
        curvature=None,
        names=None if schema is None else schema.groups,
        class_weight=arguments.get("class_weight"),
        threshold=Threshold.parse(arguments.get("threshold")),
        minimum=arguments.get("minimum_cell", MINIMUM),
    )


def few_differ(values: np.ndarray, least: int) -> np.ndarray:
    """By column: whether some rows differ from most others, but fewer than ``least``."""
    most = np.partition(values, len(values) // 2, axis=0)[len(values) // 2]
    differing = np.sum(values != most, axis=0)
    return np.asarray((differing > 0) & (differing < least))


def without_few(table: Parsed, least: int) -> Parsed:
    """Numbers that fewer than ``least`` rows have, the others all having the same or none, become as theirs: sums over such a
    column would tell them.  Where fewer than ``least`` have none, these get the median, or their number would follow."""
    cells = dict(table.cells)
    for name, values in table.cells.items():
        there = values[~np.isnan(values)] if values.dtype.kind == "f" else values[:0]
        if 0 < len(there) < least:
            cells[name] = np.full_like(values, np.nan)
            continue
        if len(there) and few_differ(there[:, None], least).any():
            cells[name] = np.where(np.isnan(values), values, np.median(there))
        if len(there) and 0 < len(values) - len(there) < least:
            cells[name] = np.where(np.isnan(values), np.median(there), cells[name])
    return replace(table, cells=cells)


def doubt_statistics(schema: Schema, own: Statistics, common: Statistics, scale: float) -> str | None:
    """Why sums over all sites cannot contain those of one; or why scaling by them would be far from that site's own.

    What is left without the site must be sums over other rows: counts and squares are not negative, and by Cauchy and Schwarz
    the square of a sum is at most count times squares.  A site with a share f of the rows then has a mean within sqrt(1/f)
    common spreads and a spread of at most sqrt(1/f) common ones: ``scale`` bounds how small a part it can be said to be.
    """
    if any(getattr(own, name).shape != getattr(common, name).shape for name in Statistics._fields):
        return "The statistics are not those of the schema's columns."
    rest = Statistics(*(whole - part for whole, part in zip(common, own, strict=True)))
    rounding = 1e-9 * (1 + np.abs(common.squares))
    if (rest.rows < 0).any() or (rest.counts < 0).any() or (rest.squares < -rounding).any():
        return "The sums over all sites are smaller than this site's own."
    if (rest.sums**2 > (rest.counts + 1e-9 * common.counts) * (rest.squares + rounding)).any():
        return "What the sums leave to the other sites cannot be sums over rows."
    if not len(schema.centers):
        return None
    encoder = Encoder.from_statistics(schema, common)
    mean, spread_of_target = ([], []) if encoder.target is None else ([one] for one in encoder.target)
    means, spreads = np.array([*encoder.means, *mean]), np.array([*encoder.spreads, *spread_of_target])
    count = np.maximum(own.counts, 1)
    shift = own.sums / count
    spread = np.sqrt(np.maximum(own.squares / count - shift**2, 0))
    away = np.abs(shift + schema.centers - means)
    beyond = (own.counts > 0) & (np.maximum(away, spread) > scale * spreads)
    if beyond.any():
        column = [*(one.name for one in schema.numbers), schema.target][int(np.argmax(beyond))]
        return f"The common scaling of {column!r} is more than {scale:g} times away from this site's own."
    return None


def smoothness(features: np.ndarray, of_a_row: float = 0.25) -> float:
    """Largest curvature of the loss: that of a row's loss in its score (log loss: a quarter, see `Model.curvature`) times the
    largest eigenvalue of the features' second moments.

    A sum over rows, so sites could compute it together without showing any row.
    """
    matrix = features.astype(np.float64)
    # Where there are more rows than columns, their second moments once are less work than all rows thirty times.
    moments = matrix.T @ matrix if matrix.shape[1] < len(matrix) else None
    vector = np.ones(matrix.shape[1])
    size = 1.0
    for _ in range(30):
        vector = (matrix.T @ (matrix @ vector) if moments is None else moments @ vector) / len(matrix)
        size = float(np.linalg.norm(vector))
        if size == 0:
            return 0.0
        vector /= size
    return size * of_a_row


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
