"""What a job runs: a program (`fedbilevel.engines.stages`), made on both ends by the same installed function.

Which survey and report leaves a site is the site's decision: see `fedbilevel.federation.protocol.policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import jax
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.engines.stages import Expected, Numbers, Program, Refused, Source, Stage
from fedbilevel.federation.protocol.payload import BadReply, to_tree
from fedbilevel.plan import Algorithm

__all__ = ["BUILT_IN", "ArrayProgram", "Numbers", "Program", "Stage", "answer_trees", "make_program"]

BUILT_IN = {
    "fair": "fedbilevel.fairness.program:fair_program",
    "audit": "fedbilevel.fairness.audit:audit_program",
    "tune": "fedbilevel.tuning.program:tune_program",
}
"""Programs of this package by their short names; they need no allow-list."""


def make_program(name: str, arguments: dict[str, Any], allowed: Sequence[str]) -> Program:
    """The program called ``name``; a "module:function" must be on the ``allowed`` list of whoever runs it."""
    path = BUILT_IN.get(name)
    if path is None:
        if ":" not in name:
            raise Refused("program", f"There is no program {name!r}: use {', '.join(BUILT_IN)}, or 'module:function'.")
        if name not in allowed:
            raise Refused("program", f"{name!r} is not among the functions this site allows.")
        path = name
    module, _, function = path.partition(":")
    made = getattr(import_module(module), function)(arguments)
    if not isinstance(made, Program):
        raise TypeError(f"{name} must return a Program, not {type(made).__name__}.")
    return made


def answer_trees(program: Program, agreed: Numbers, arrays: Sequence[Any]) -> list[Tree]:
    """The answers of the stages done, from their arrays."""
    answers: list[Tree] = []
    for number, answer in enumerate(arrays):
        stage = program.stage(number, agreed, answers)
        if stage is None:
            raise BadReply(f"there is no stage {number} to have an answer")
        server = jax.eval_shape(stage.algorithm.init, jax.random.key(0))
        like = jax.eval_shape(stage.algorithm.outer, server)
        answers.append(to_tree(answer, like, f"the answer of stage {number}"))
    return answers


class ArrayProgram:
    """One algorithm on arrays: for researchers, whose function builds it and who put an ``.npz`` file on every site.

    The file holds the leaves of the site's training rows as ``train0``, ``train1``, ... in the order of ``jax.tree.leaves``,
    and of its validation rows as ``val0``, ...
    """

    surveys = closing = 0

    def __init__(self, algorithm: Algorithm, rounds: int, example: tuple[Tree, Tree], weights: str = "uniform") -> None:
        self._stage = Stage(algorithm.name, algorithm, rounds, example, weights)

    def survey(self, number: int, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        return {}

    def expected(self, number: int | None) -> dict[str, Expected]:
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
                raise Refused("source", f"The site's arrays lack {missing[0]}, which the program reads.")
            return jax.tree.unflatten(structure, [arrays[f"{name}{i}"] for i in range(len(leaves))])

        train, val = self._stage.example
        return part("train", train), None if val is None else part("val", val)

    def report(self, source: Source, agreed: Numbers, answers: Sequence[Tree]) -> Numbers:
        return {}

    def doubt(self, source: Source, agreed: Numbers, scale: float) -> str | None:
        return "This program agrees on nothing." if agreed else None

    def cells(self, number: int, train: Tree) -> np.ndarray:
        return np.zeros(0, np.int64)

    def weights_behind(
        self, number: int, rows: Tree, message: Tree, agreed: Numbers, answers: Sequence[Tree]
    ) -> np.ndarray | None:
        return None
