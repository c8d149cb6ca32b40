"""Many fits of one recipe: any seeds, learning rates and clients of the same shapes, with nothing traced or compiled twice.

`Trainer.run` computes what `fedbilevel.fairness.methods.fit` computes, to the last bit, and shows models on the way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.engines.simulation import Options, Simulation, with_numbers
from fedbilevel.fairness.formulation import Formulation, fair_problem
from fedbilevel.fairness.methods import bilevel_algorithm, known_counts, learned_weights, marks_padding, single_level
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.recipe import BILEVEL, Recipe
from fedbilevel.fairness.rows import marked
from fedbilevel.plan import Algorithm
from fedbilevel.problem import ClientData

STOPS = 10
"""How often a run is looked at on its way, besides its start."""


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients' rows as all methods read them, from one set of arrays (leaves ``[clients, rows, ...]``, padded).

    Of each client's ``sizes`` rows in ``train``, the bilevel methods' inner level reads the first ``inner_sizes``, and its
    outer level the rows in ``val``.  Where the two levels are to share their rows, ``val`` is ``train``.
    """

    train: dict[str, Any]
    val: dict[str, Any]
    sizes: np.ndarray
    inner_sizes: np.ndarray
    val_sizes: np.ndarray
    groups: int

    def single(self) -> ClientData:
        """For the methods of one level."""
        return ClientData(self.train, None, self.sizes)

    def weighted(self, weights: Any = None) -> ClientData:
        """The same with a weight for every row (None: one)."""
        own = np.ones(np.shape(self.train["labels"]), np.float32) if weights is None else weights
        return ClientData({**self.train, "weights": own}, None, self.sizes)

    def bilevel(self, form: Formulation, classes: int) -> ClientData:
        cells = form.cell_of(self.train["groups"], self.train["labels"], classes)
        return ClientData({**self.train, "cells": cells}, self.val, self.inner_sizes, self.val_sizes)


class Stop(NamedTuple):
    """A run on its way.  Costs are those of all stages so far, summed over the clients; ``calls`` counts gradients,
    Hessian-vector products and cross products."""

    stage: str
    round: int
    step: int
    outer: np.ndarray
    inner: np.ndarray | None
    calls: tuple[int, ...]
    bytes_up: int
    bytes_down: int


class Course(NamedTuple):
    """A finished run: ``params`` of the model, learned ``weights`` or None, the stops on the way, seconds of computing."""

    params: np.ndarray
    weights: np.ndarray | None
    stops: list[Stop]
    seconds: float

    @property
    def diverged(self) -> bool:
        return not bool(np.isfinite(self.params).all())


class Trainer:
    """A recipe laid out for clients like those of ``example``; `compile` once, then `run` from any thread."""

    def __init__(self, recipe: Recipe, example: Federation, model: Model) -> None:
        self.recipe, self.model, self.groups = recipe, model, example.groups
        self.bilevel: Simulation | None = None
        if recipe.method in BILEVEL:
            data = example.bilevel(recipe.formulation, model.classes)
            self.marks = marks_padding(recipe, data)
            problem = fair_problem(recipe.formulation, model, example.groups)
            first = bilevel_algorithm(recipe, problem, data)
            self.bilevel = Simulation(first, self._marked(data), Options(recipe.client_weights))
        second, weights = self._second(example)
        self.weighted = recipe.method in (*BILEVEL, "fedavg")
        self.second = Simulation(second, example.weighted() if self.weighted else example.single(), Options(weights))

    def _second(self, federation: Federation) -> tuple[Algorithm, str]:
        return single_level(self.recipe, self.model, federation.groups, self._counts(federation))

    def _counts(self, federation: Federation) -> np.ndarray:
        return known_counts(self.recipe, federation.single(), federation.groups)

    def _marked(self, data: ClientData) -> ClientData:
        return marked(data) if self.marks else data

    def compile(self) -> None:
        for run in (self.bilevel, self.second):
            if run is not None:
                run.compile(run.algorithm.settings)

    def run(self, federation: Federation, seed: int, rate: float | None = None, stops: int = STOPS) -> Course:
        """Train from ``seed``.  ``rate`` replaces the recipe's learning rate; a bilevel method's inner step grows alike."""
        began = time.perf_counter()
        recipe = self.recipe
        factor = 1.0 if rate is None else rate / recipe.step
        form, weights, table = recipe.formulation, None, None
        seen: list[Stop] = []
        if self.bilevel is not None:
            run = self.bilevel.on(self._marked(federation.bilevel(form, self.model.classes)))
            settings = run.algorithm.settings
            settings = with_numbers(settings, {"inner_step": settings.inner_step * factor})
            seen += _walk("weights", run, settings, seed, recipe.weight_rounds, stops, None)
            table = form.weights(seen[-1].outer)
            cells = form.cell_of(federation.train["groups"], federation.train["labels"], self.model.classes)
            weights = table[cells].astype(np.float32)
        run = self.second.on(federation.weighted(weights) if self.weighted else federation.single())
        settings = with_numbers(self._second(federation)[0].settings, {"step": recipe.step * factor})
        last = None
        for stop, server in _states("model", run, settings, seed, recipe.rounds, stops, seen[-1] if seen else None):
            seen.append(stop)
            last = server
        learned = learned_weights(recipe, last, self._counts(federation)) if table is None else table
        return Course(seen[-1].outer, learned, seen, time.perf_counter() - began)


def _walk(
    stage: str, run: Simulation, settings: Any, seed: int, rounds: int, stops: int, before: Stop | None
) -> list[Stop]:
    return [stop for stop, _ in _states(stage, run, settings, seed, rounds, stops, before)]


def _states(
    stage: str, run: Simulation, settings: Any, seed: int, rounds: int, stops: int, before: Stop | None
) -> Iterator[tuple[Stop, Any]]:
    """Each stop with the server's state; costs go on from the stage before."""
    places = sorted({round(rounds * number / stops) for number in range(stops + 1)}) if stops else [rounds]
    algorithm, traffic = run.algorithm, run.traffic
    first = (0, 0, 0) if before is None else before.calls
    up, down = (0, 0) if before is None else (before.bytes_up, before.bytes_down)
    for number, state, *_ in run.rounds(settings, seed, places):
        view = algorithm.view(state.server, state.local)
        spent = (int(np.asarray(count, np.int64).sum()) for count in view.calls)
        yield (
            Stop(
                stage,
                number,
                number * algorithm.local_steps,
                np.asarray(algorithm.outer(state.server)),
                None if view.inner is None else np.asarray(view.inner),
                tuple(a + b for a, b in zip(first, spent, strict=True)),
                up + number * traffic.up * run.data.clients,
                down + number * traffic.down * run.data.clients,
            ),
            state.server,
        )
