"""What a job runs: a program of surveys and stages, made on both ends by the same installed function.

A *program* turns the settings of a job into algorithms.  The coordinator and every site build it for themselves; nothing
but its numbers travels:

- *surveys*: numbers the sites tell before training (counts, sums, sums of squares), so that all agree on an encoding;
- *stages*: trainings one after the other, each an `Algorithm` with its rounds; a later stage may depend on the answers of the
  earlier ones (stage two of the bilevel methods trains on weights that stage one found);
- *reports*: numbers the sites tell at the end.

Which survey and report leaves a site is the site's decision: see `fedbilevel.federation.protocol.policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.federation.protocol.errors import Refused
from fedbilevel.federation.protocol.policy import Source
from fedbilevel.plan import Algorithm

Numbers = dict[str, np.ndarray]

BUILT_IN = {"fair": "fedbilevel.federation.protocol.fair:FairProgram"}
"""Programs of this package by their short names; they need no allow-list."""


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

    surveys: int
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


Factory = Callable[[dict[str, Any]], Program]


def make_program(name: str, arguments: dict[str, Any], allowed: Sequence[str]) -> Program:
    """The program called ``name``; a "module:function" must be on the ``allowed`` list of whoever runs it."""
    path = BUILT_IN.get(name)
    if path is None:
        if ":" not in name:
            raise Refused(f"There is no program {name!r}: use one of {', '.join(BUILT_IN)}, or 'module:function'.")
        if name not in allowed:
            raise Refused(f"The program {name!r} is not among the functions this site allows.")
        path = name
    module, _, function = path.partition(":")
    factory: Factory = getattr(import_module(module), function)
    made = factory(arguments)
    if not isinstance(made, Program):
        raise TypeError(f"{name} must return a Program, not {type(made).__name__}.")
    return made


class ArrayProgram:
    """One algorithm on arrays: for researchers, whose function builds it and who put an ``.npz`` file on every site.

    The file holds the leaves of the site's training rows as ``train0``, ``train1``, ... in the order of ``jax.tree.leaves``,
    and of its validation rows as ``val0``, ...
    """

    surveys = 0

    def __init__(self, algorithm: Algorithm, rounds: int, example: tuple[Tree, Tree], weights: str = "uniform") -> None:
        self._stage = Stage(algorithm.name, algorithm, rounds, example, weights)

    def survey(self, number: int, source: Source, agreed: Numbers) -> Numbers:
        return {}

    def agree(self, number: int, told: Sequence[Numbers], agreed: Numbers) -> Numbers:
        return {}

    def stage(self, number: int, agreed: Numbers, answers: Sequence[Tree]) -> Stage | None:
        return self._stage if number == 0 else None

    def rows(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> tuple[Tree, Tree]:
        arrays = source.arrays()

        def part(name: str, like: Tree) -> Tree:
            leaves, structure = jax.tree.flatten(like)
            missing = [f"{name}{i}" for i in range(len(leaves)) if f"{name}{i}" not in arrays]
            if missing:
                raise Refused(f"The site's arrays lack {missing[0]}, which the program reads.")
            return jax.tree.unflatten(structure, [arrays[f"{name}{i}"] for i in range(len(leaves))])

        train, val = self._stage.example
        return part("train", train), None if val is None else part("val", val)

    def report(self, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        return {}
