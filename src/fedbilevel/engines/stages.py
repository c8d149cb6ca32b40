"""What both engines run: a program of surveys and stages.

A *program* turns options into algorithms.  Over real sites the coordinator and every site build it for themselves, and nothing
but its numbers travels; in one process a simulation asks it the same questions:

- *surveys*: numbers the sites tell before training (counts, sums, sums of squares), so that all agree on an encoding;
- *stages*: trainings one after the other, each an `Algorithm` with its rounds; a later stage may depend on the answers of the
  earlier ones (stage two of the bilevel methods trains on weights that stage one found);
- *reports*: numbers the sites tell at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.plan import Algorithm

if TYPE_CHECKING:
    import pandas as pd

Numbers = dict[str, np.ndarray]


class Refused(ValueError):
    """A site (or the coordinator) will not do what a job asks for.  The sentence may travel: it holds no data."""


class Source(Protocol):
    """A site's data as programs see it: a table of which only some columns can be read, or named arrays."""

    def frame(self, columns: tuple[str, ...]) -> pd.DataFrame: ...

    def arrays(self) -> Numbers: ...


class Stage(NamedTuple):
    """One training.  ``weights``: "uniform" or "samples" (the sites then tell how many rows they train on).

    ``example``: the ``(train, val)`` rows of a site as a tree of ``jax.ShapeDtypeStruct`` whose leading axis, the rows, may be
    of any length; val None where there are no validation rows.  From it the coordinator knows what every reply must be.
    """

    name: str
    algorithm: Algorithm
    rounds: int
    example: tuple[Tree, Tree]
    weights: str = "uniform"


@runtime_checkable
class Program(Protocol):
    """See the module's text.  ``agreed`` holds what the surveys agreed on, ``answers`` the outer variables so far."""

    @property
    def surveys(self) -> int:
        """How many surveys there are; survey k may use what the ones before agreed on."""

    def survey(self, number: int, source: Source, agreed: Numbers) -> Numbers:
        """On a site: its share."""

    def agree(self, number: int, told: Sequence[Numbers], agreed: Numbers) -> Numbers:
        """On the coordinator: what follows from all shares; added to ``agreed``."""

    def stage(self, number: int, agreed: Numbers, answers: Sequence[Tree]) -> Stage | None:
        """On both: the training that comes next, None when all is done."""

    def rows(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> tuple[Tree, Tree]:
        """On a site: its own ``(train, val)`` rows for that stage."""

    def report(self, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        """On a site, after the last stage: numbers about the result on its rows."""
