"""An audit: predictions that some model has made, summed by group, label and decision; nothing is trained.

The schema of an audit has the predictions for features.  Of two classes one column: a number is the probability of the positive
class, and a row is selected where it is above the threshold; a category is a decision, written like the target or as 0 and 1.
Of more classes one column of decisions, or one of probabilities for each, of which the largest decides.  Of a number, the
predicted one.

`AuditProgram` asks every site of a federation for one thing, the sums of `report_of`, and only they leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbilevel.calculus import Tree
from fedbilevel.engines.stages import Expected, Numbers, Refused, Source, Stage
from fedbilevel.fairness.disclosure import MINIMUM, Visible
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.moments import SUMS, Moments
from fedbilevel.fairness.scores import Scores
from fedbilevel.fairness.thresholds import decisions
from fedbilevel.hints import whole_number
from fedbilevel.tables.columns import MISSING_CODE, UNKNOWN_CODE, listed
from fedbilevel.tables.encoder import Parsed, parse
from fedbilevel.tables.profile import Profile
from fedbilevel.tables.schema import Column, Schema, column_of

YES = "1"
"""A decision for the positive class, where decisions are not written like the target."""
ROUNDING = 0.02
"""How far the probabilities of a row may be from adding up to 1."""


class Predicted(NamedTuple):
    """Rows that have a prediction.  ``labels`` and what was ``said``: places of classes, or distances of numbers to the
    schema's center; ``chances``: [n, classes], None without probabilities; ``absent``: how many rows have no prediction."""

    labels: NDArray[Any]
    groups: NDArray[np.int32]
    said: NDArray[Any]
    chances: NDArray[np.float64] | None
    absent: int

    def take(self, kept: NDArray[np.bool_], codes: NDArray[np.int64]) -> Predicted:
        """Some of the rows, their groups numbered anew."""
        chances = None if self.chances is None else self.chances[kept]
        return Predicted(self.labels[kept], codes[kept].astype(np.int32), self.said[kept], chances, self.absent)


def class_columns(prediction: str, classes: Sequence[str]) -> list[str]:
    """The columns of probabilities of more than two classes, as `fedbilevel predict` names them."""
    return [f"{prediction} {name}" for name in classes]


def prediction_columns(
    name: str,
    profiles: Mapping[str, Mapping[str, Profile]],
    labels: Sequence[str],
    classes: Sequence[str],
    positive: str | None,
) -> tuple[Column, ...]:
    """What the predictions are, from the ``profiles`` of their columns by column and site.  ``labels``: what is told apart,
    nothing where it is a number; ``classes``: how it is written."""
    if len(labels) > 2 and name not in profiles:
        wanted = class_columns(name, labels)
        lacking = [column for column in wanted if column not in profiles]
        if lacking:
            raise ValueError(
                f"There is no column {lacking[0]!r}: of {len(labels)} classes, --prediction names a column of decisions, or "
                f"what {listed(wanted, 3)} begin with, a column of probabilities for each."
            )
        each = zip(wanted, labels, strict=True)
        return tuple(_probability(column, profiles[column], classes, of, False) for column, of in each)
    own = profiles[name]
    values = {value for profile in own.values() for value in profile.counts}
    if not values:
        raise ValueError(f"The prediction column {name!r} is empty: name a column that holds what the model said.")
    if not labels:
        column = column_of(name, list(own.values()), rare=1, most=1)
        if column.kind != "number" or column.also_missing:
            odd = next((word for profile in own.values() for word in profile.odd), "no numbers")
            raise ValueError(f"The prediction column {name!r} holds {odd!r}: give the predicted number of every row.")
        return (replace(column, missing="plain", center=0.0, note=""),)
    for words in (tuple(classes), *([("0", YES)] if positive is not None else [])):
        if values <= set(words):
            return (Column(name, "category", words),)
    if positive is None:
        strange = sorted(values - set(classes))[0]
        raise ValueError(
            f"The prediction column {name!r} holds {strange!r}: give decisions written like the target ({listed(classes)}), or "
            f"a column of probabilities for each class ({listed(class_columns('P', classes), 2)}) with --prediction P."
        )
    return (_probability(name, own, classes, positive, True),)


def _probability(name: str, own: Mapping[str, Profile], classes: Sequence[str], of: str, alone: bool) -> Column:
    """A column of probabilities, or a sentence about the first cell that is none.  ``alone``: it may hold decisions instead."""
    comma = any(profile.comma for profile in own.values())
    foreign = any(word not in classes for profile in own.values() for word in profile.odd)
    for site, profile in own.items():
        strange = next((word for word in profile.odd if not foreign or word not in classes), None)
        if strange is None and profile.distribution[0].size:
            low, high = profile.distribution[0][[0, -1]]
            strange = f"{low:g}" if low < 0 else f"{high:g}" if high > 1 else None
        if strange is not None:
            either = f", or decisions written like the target ({listed(classes)}) or as 0 and 1" if alone else ""
            raise ValueError(
                f"The prediction column {name!r} holds {strange!r} at {site}: give the probability of {of!r}, from 0 to 1"
                f"{either}; a --mapping translates them."
            )
    return Column(name, "number", decimal="," if comma else ".")


def yes_code(column: Column, positive: str) -> int:
    """The place among the values of decisions of the one that selects."""
    return column.values.index(positive if positive in column.values else YES)


def predicted(schema: Schema, rows: Parsed, threshold: float = 0.5) -> Predicted:
    """The predictions in parsed ``rows``, all of which have a label and a group."""
    columns = schema.features
    cells: NDArray[Any] = np.stack([rows.cells[column.name] for column in columns], axis=1)
    what, must = listed([column.name for column in columns], 3), "lie between 0 and 1"
    if columns[0].kind == "category":
        absent, outside = (np.any(cells == code, axis=1) for code in (MISSING_CODE, UNKNOWN_CODE))
        must = f"be one of {listed(columns[0].values)}"
    else:
        absent = np.isnan(cells).any(axis=1)
        outside = ~absent & ~((cells >= 0) & (cells <= 1)).all(axis=1) & (not schema.regression)
        if len(columns) > 1 and not outside.any():
            outside, must = ~absent & ~(np.abs(cells.sum(axis=1) - 1) <= ROUNDING), "add up to 1"
    if outside.any():
        raise ValueError(f"The prediction column(s) {what} must {must}; {int(outside.sum()):,} row(s) do not.")
    labels, groups, kept = rows.labels[~absent], rows.groups[~absent], cells[~absent]
    chances = None
    if schema.regression:
        labels, said = labels - schema.center, kept[:, 0] - schema.center
    elif columns[0].kind == "category":
        said = kept[:, 0]
        said = said if schema.positive is None else (said == yes_code(columns[0], schema.positive)) * 1
    else:
        chances = np.asarray(kept if len(columns) > 1 else np.concatenate([1 - kept, kept], axis=1), np.float64)
        said = decisions(chances, threshold)
    return Predicted(labels, groups, said, chances, int(absent.sum()))


def report_of(
    sums: Counts | Moments, visible: Visible, labels: Any = None, groups: Any = None, probability: Any = None
) -> Numbers:
    """What a client tells of a model and its rows: `Counts` of decisions or `Moments` of numbers and, with a ``probability``,
    the `Scores` of the rows.

    Groups that are too small to be told come as one, last, or not at all (``visible``); ``hidden`` says which: 0 told, 1
    together, 2 not at all.
    """
    what, values = ("moments", sums.sums) if isinstance(sums, Moments) else ("decisions", sums.cells)
    numbers = {what: visible.sums(values), "hidden": visible.pooled + 2 * visible.left_out}
    if probability is not None:
        # Microaggregated as they are told: a pooled group's rows are one group's.
        names = len(visible.shown)
        codes = np.where(visible.shown, np.arange(names), np.where(visible.pooled, names, names + 1))
        scores = Scores.of(labels, probability, codes[np.asarray(groups)], names + 2, max(visible.minimum, 2))
        numbers |= scores.of_groups(range(names + 1)).packed()
    return numbers


def report_expected(groups: int, classes: int, scored: bool) -> dict[str, Expected]:
    """What `report_of` tells of so many groups and classes; of numbers where there are no classes."""
    hidden = {"hidden": Expected((groups,), high=2)}
    if classes < 2:
        return {"moments": Expected((groups + 1, len(SUMS)), -1e30, 1e30), **hidden}
    told = {"decisions": Expected((groups + 1, classes, classes)), **hidden}
    return {**told, **(Scores.expected(groups + 1, classes) if scored else {})}


@dataclass(frozen=True, eq=False)
class AuditProgram:
    """No survey and no training; one report.  ``minimum``: smaller counts are not told, and a site may ask for more."""

    schema: Schema
    threshold: float = 0.5
    minimum: int = MINIMUM

    surveys = closing = 0

    def __post_init__(self) -> None:
        whole_number("minimum_cell", self.minimum)
        if not isinstance(self.threshold, float) or not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must lie between 0 and 1, not {self.threshold!r}.")
        check_audited(self.schema)

    def survey(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree] = ()) -> Numbers:
        return {}

    def expected(self, number: int | None) -> dict[str, Expected]:
        groups, classes = len(self.schema.groups), len(self.schema.labels)
        scored = self.schema.features[0].kind == "number"
        return {"absent": Expected((1,)), **report_expected(groups, classes, scored)}

    def agree(self, number: int, told: Sequence[Numbers], agreed: Numbers) -> Numbers:
        return {}

    def stage(self, number: int, agreed: Numbers, answers: Sequence[Tree]) -> Stage | None:
        return None

    def rows(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> tuple[Tree, Tree]:
        raise Refused("stage", "An audit trains nothing.")

    def report(self, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        frame = source.frame(tuple(self.schema.needed()))
        rows = parse(self.schema, frame, labelled=True, source="The site's table").complete()
        found, minimum = predicted(self.schema, rows, self.threshold), max(self.minimum, source.minimum_cell)
        groups, classes, chances = len(self.schema.groups), len(self.schema.labels), found.chances
        if self.schema.regression:
            sums = Moments.of(found.labels, found.said, found.groups, groups)
            numbers = report_of(sums, Visible.of(sums.rows[:, None], minimum))
        else:
            counts = Counts.of(found.labels, found.said, found.groups, groups, classes=classes)
            visible = Visible.of(counts.cells.sum(axis=-1), minimum)
            scored = chances if chances is None or classes > 2 else chances[:, 1]
            numbers = report_of(counts, visible, found.labels, found.groups, scored)
        return {**numbers, "absent": np.array([found.absent if found.absent >= minimum else 0])}

    def doubt(self, source: Source, agreed: Numbers, scale: float) -> str | None:
        return "An audit agrees on nothing." if agreed else None

    def cells(self, number: int, train: Tree) -> np.ndarray:
        return np.zeros(0, np.int64)

    def weights_behind(
        self, number: int, rows: Tree, message: Tree, agreed: Numbers, answers: Sequence[Tree]
    ) -> np.ndarray | None:
        return None


def check_audited(schema: Schema) -> None:
    """The features of an audit's schema are the predictions."""
    numbers = ["number"] * (len(schema.labels) if len(schema.labels) > 2 else 1)
    if [column.kind for column in schema.features] not in ([numbers] if schema.regression else [numbers, ["category"]]):
        raise ValueError(
            "The features of an audit's schema are the predictions: one column, or probabilities of each of several classes; "
            "`fedbilevel audit` writes it."
        )


def audit_program(arguments: dict[str, Any]) -> AuditProgram:
    """The program of a job of a federation.  Its arguments: ``schema`` (the text of an audit's schema file), ``threshold``,
    ``minimum_cell``."""
    strange = set(arguments) - {"schema", "threshold", "minimum_cell"}
    if strange:
        raise ValueError(
            f"The audit has no argument {sorted(strange)[0]!r}; it has schema, threshold and minimum_cell."
        )
    schema = replace(Schema.parse(str(arguments.get("schema")), "The job's schema"), site=None)
    return AuditProgram(schema, arguments.get("threshold", 0.5), arguments.get("minimum_cell", MINIMUM))
