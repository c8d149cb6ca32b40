"""What both engines run: a program of surveys and stages.

A *program* turns options into algorithms.  Over real sites the coordinator and every site build it for themselves, and nothing
but its numbers travels; in one process a simulation asks it the same questions:

- *surveys*: numbers the sites tell before training (counts, sums, sums of squares), so that all agree on an encoding;
- *stages*: trainings one after the other, each an `Algorithm` with its rounds; a later stage may depend on the answers of the
  earlier ones (stage two of the bilevel methods trains on weights that stage one found);
- *closing surveys*: numbers the sites tell after the last stage, so that all agree on what to make of it (a threshold);
- *reports*: numbers the sites tell at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:  # an operator's process reads the reasons and needs no more
    import pandas as pd

    from fedbilevel.calculus import Tree
    from fedbilevel.plan import Algorithm

Numbers = dict[str, np.ndarray]


TELL = ("rows", "groups", "labels", "scores", "seconds", "objective", "smoothness", "statistics", "report")
"""What a site may tell besides the replies of the plan's phases."""
REASONS = {
    "job": "The job is not one that this package writes, byte for byte; the site's own log says what differs.",
    "run": "The request belongs to another run than the job this site was given.",
    "request": "The request is not one that the protocol knows.",
    "stage": "The site was not prepared for this stage, or the program has none of that number.",
    "program": "The job names a program that this site does not allow.",
    "approval": "The run waits for the approval of a person at this site (`fedbilevel federate site approve`).",
    "bounds": "The run is outside the bounds of what this site approves by itself; its own log says which.",
    "columns": "The job asks for a column that this site does not offer; its own log names it.",
    "source": "The site does not offer data of the kind the job asks for.",
    "rows": "This site has fewer rows under the job's schema than it works on.",
    "cells": "A group, class or column has fewer rows than this site tells of: leave it or the site out, or use fedavg.",
    "batch": "The job's batches are smaller than this site allows.",
    "weights": "The weights single out fewer rows than this site works on.",
    "agreed": "What is said to be agreed on does not fit this site's own share, or has changed.",
    "suit": "The site's rows do not suit the algorithm; its own log says why.",
    "large": "The message is larger than this site sends or takes.",
    "often": "The run has been asked for more replies than its rounds need.",
    "back": "The coordinator went back further than this site keeps its states.",
    "lost": "The site has lost its state, which all sites of a sum must have alike: go on without it, or submit a new run.",
    "finite": "The reply is not finite.",
    "whole": "The reply holds whole numbers, which this site's privacy settings cannot blur.",
    "budget": "This site has spent its privacy budget.",
    "account": "The site cannot read its own privacy account, so it releases nothing more.",
    "accountant": "The site's privacy settings need the package dp-accounting, 0.6 or later: install fedbilevel[privacy].",
    "secure": "This site takes part in secure sums only: submit the run without --secure-aggregation off.",
    "single": "The method tells of every site by itself, which secure sums hide: use fedpath or fedavg; tune without sites.",
    "cohort": "The sums of this run could be of fewer sites, or of others, than this site wants its numbers to be among.",
    "sums": "The site refuses its part in a secure sum; its own log says why.",
    "range": "The site's numbers are not finite, or beyond 2^124, which a secure sum cannot hold.",
    "site": "Something went wrong at the site; its own log says what.",
} | {f"tell {name}": f"This site does not tell its {name}, which the run needs." for name in TELL}
"""Everything a site can say when it does not do what it is asked: these sentences, and never a word of a job or a table."""


TOGETHER = "all sites"
"""In place of a site's name: what the sites have told in sum."""


class Refused(ValueError):
    """A site will not do what a job asks for.  The sentence of ``reason`` travels; ``detail`` stays in the site's own log."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{REASONS[reason]} {detail}".strip())
        self.reason = reason


class Source(Protocol):
    """A site's data as programs see it: a table of which only some columns can be read, or named arrays.

    ``number``: the site's own among those of the run.  ``minimum_cell``: the site tells no count of people below it, and a
    column counts only where so many rows differ (1: any).
    """

    @property
    def number(self) -> int: ...

    @property
    def minimum_cell(self) -> int: ...

    def frame(self, columns: tuple[str, ...]) -> pd.DataFrame: ...

    def arrays(self) -> Numbers: ...


class Expected(NamedTuple):
    """An array that a site tells: its shape ((-1,): a list as long as the others), and between what its numbers lie."""

    shape: tuple[int, ...]
    low: float | tuple[float, ...] = 0.0
    high: float = 1e12


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
        """How many surveys there are before training; survey k may use what the ones before agreed on."""

    @property
    def closing(self) -> int:
        """How many there are after training; they are numbered on."""

    def survey(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        """On a site: its share; ``answers`` are there for closing surveys."""

    def expected(self, number: int | None) -> dict[str, Expected]:
        """On the coordinator: what a site's share of survey ``number`` holds, or (None) its report."""

    def agree(self, number: int, told: Sequence[Numbers], agreed: Numbers) -> Numbers:
        """On the coordinator: what follows from all shares; added to ``agreed``."""

    def stage(self, number: int, agreed: Numbers, answers: Sequence[Tree]) -> Stage | None:
        """On both: the training that comes next, None when all is done."""

    def rows(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> tuple[Tree, Tree]:
        """On a site: its own ``(train, val)`` rows for that stage."""

    def report(self, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        """On a site, after the last stage: numbers about the result on its rows."""

    # What a site asks of its own program before anything leaves.

    def doubt(self, source: Source, agreed: Numbers, scale: float) -> str | None:
        """Why ``agreed`` cannot follow from this site's own share and those of others; None where it can.

        ``scale``: how far a common scaling may be from the site's own."""

    def cells(self, number: int, train: Tree) -> np.ndarray:
        """How many rows there are of everything that replies of stage ``number`` tell of one by one."""

    def weights_behind(
        self, number: int, rows: Tree, message: Tree, agreed: Numbers, answers: Sequence[Tree]
    ) -> np.ndarray | None:
        """How much every row of ``rows`` counts in the reply to ``message`` (None: as the stage starts, of training rows or of
        validation rows); None: all alike.  Where replies tell of parts of the rows one by one, [part, row]."""
