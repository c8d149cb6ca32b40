"""An audit: predictions that some model has made, counted by group, label and decision; nothing is trained.

The schema of an audit has one feature, the prediction.  A number is the probability of the positive class, and a row is
selected where it is above the threshold.  A category is a decision, written like the target or as 0 and 1.

`AuditProgram` asks every site of a federation for one thing, the counts of `report_of`, and only they leave it.
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
from fedbilevel.fairness.scores import Scores
from fedbilevel.problem import whole_number
from fedbilevel.tables.columns import MISSING_CODE, UNKNOWN_CODE, listed
from fedbilevel.tables.encoder import Parsed, parse
from fedbilevel.tables.profile import Profile
from fedbilevel.tables.schema import Column, Schema

YES = "1"
"""A decision for the positive class, where decisions are not written like the target."""


class Predicted(NamedTuple):
    """Rows that have a prediction, as codes; ``absent``: how many have none.  ``probability``: None for decisions."""

    labels: NDArray[np.int32]
    groups: NDArray[np.int32]
    decided: NDArray[np.bool_]
    probability: NDArray[np.float64] | None
    absent: int

    @property
    def cells(self) -> NDArray[np.int64]:
        """Group and label of every row as one code."""
        return np.asarray(2 * self.groups.astype(np.int64) + self.labels)


def prediction_column(name: str, profiles: Mapping[str, Profile], classes: Sequence[str], positive: str) -> Column:
    """What the prediction is, from the ``profiles`` of the column at every site: decisions, where all its values are classes
    of the target or all are 0 and 1; else probabilities."""
    values = {value for profile in profiles.values() for value in profile.counts}
    if not values:
        raise ValueError(f"The prediction column {name!r} is empty: name a column of probabilities or decisions.")
    for words in (tuple(classes), ("0", YES)):
        if values <= set(words):
            return Column(name, "category", words)
    comma = any(profile.comma for profile in profiles.values())
    foreign = any(word not in classes for profile in profiles.values() for word in profile.odd)
    for site, profile in profiles.items():
        strange = next((word for word in profile.odd if not foreign or word not in classes), None)
        if strange is None and profile.distribution[0].size:
            low, high = profile.distribution[0][[0, -1]]
            strange = f"{low:g}" if low < 0 else f"{high:g}" if high > 1 else None
        if strange is not None:
            raise ValueError(
                f"The prediction column {name!r} holds {strange!r} at {site}: give the probability of {positive!r}, from 0 to "
                f"1, or decisions written like the target ({listed(classes)}) or as 0 and 1; a --mapping translates them."
            )
    return Column(name, "number", decimal="," if comma else ".")


def yes_code(column: Column, positive: str) -> int:
    """The place among the values of decisions of the one that selects."""
    return column.values.index(positive if positive in column.values else YES)


def predicted(schema: Schema, rows: Parsed, threshold: float = 0.5) -> Predicted:
    """The predictions in parsed ``rows``, all of which have a label and a group."""
    (column,) = schema.features
    cells = rows.cells[column.name]
    if column.kind == "number":
        absent = np.isnan(cells)
        outside = ~absent & ~((cells >= 0) & (cells <= 1))
        must = "lie between 0 and 1"
    else:
        absent, outside = cells == MISSING_CODE, cells == UNKNOWN_CODE
        must = f"be one of {listed(column.values)}"
    if outside.any():
        raise ValueError(f"The prediction column {column.name!r} must {must}; {int(outside.sum()):,} row(s) do not.")
    labels, groups, kept = rows.labels[~absent], rows.groups[~absent], cells[~absent]
    if column.kind == "number":
        return Predicted(labels, groups, kept > threshold, np.asarray(kept, np.float64), int(absent.sum()))
    decided = kept == yes_code(column, str(schema.positive))
    return Predicted(labels, groups, np.asarray(decided), None, int(absent.sum()))


def report_of(counts: Counts, visible: Visible, labels: Any, groups: Any, probability: Any = None) -> Numbers:
    """What a client tells of decisions about its rows: their `Counts` and, with a ``probability``, the `Scores` of the rows.

    Groups that are too small to be told come as one, last, or not at all (``visible``); ``hidden`` says which: 0 told, 1
    together, 2 not at all.
    """
    numbers = {"decisions": visible.sums(counts.cells), "hidden": visible.pooled + 2 * visible.left_out}
    if probability is not None:
        # Microaggregated as they are told: a pooled group's rows are one group's.
        names = len(visible.shown)
        codes = np.where(visible.shown, np.arange(names), np.where(visible.pooled, names, names + 1))
        scores = Scores.of(labels, probability, codes[np.asarray(groups)], names + 2, max(visible.minimum, 2))
        numbers |= Scores(scores.cells[:-1], scores.sums[:-1]).packed()
    return numbers


def report_expected(groups: int, classes: int, scored: bool) -> dict[str, Expected]:
    """What `report_of` tells of so many groups and classes."""
    told = {"decisions": Expected((groups + 1, classes, classes)), "hidden": Expected((groups,), high=2)}
    return {**told, **(Scores.expected(groups + 1) if scored else {})}


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
        if len(self.schema.features) != 1:
            raise ValueError("The schema of an audit has one feature, the prediction; `fedbilevel audit` writes it.")

    def survey(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree] = ()) -> Numbers:
        return {}

    def expected(self, number: int | None) -> dict[str, Expected]:
        groups, scored = len(self.schema.groups), self.schema.features[0].kind == "number"
        return {"absent": Expected((1,)), **report_expected(groups, 2, scored)}

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
        counts = Counts.of(found.labels, found.decided, found.groups, len(self.schema.groups))
        visible = Visible.of(counts.cells.sum(axis=-1), minimum)
        numbers = report_of(counts, visible, found.labels, found.groups, found.probability)
        return {**numbers, "absent": np.array([found.absent if found.absent >= minimum else 0])}

    def doubt(self, source: Source, agreed: Numbers, scale: float) -> str | None:
        return "An audit agrees on nothing." if agreed else None

    def cells(self, number: int, train: Tree) -> np.ndarray:
        return np.zeros(0, np.int64)

    def weights_behind(self, number: int, train: Tree, message: Tree) -> np.ndarray | None:
        return None


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
