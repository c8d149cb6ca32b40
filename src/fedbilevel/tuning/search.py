"""What people do instead: candidates for one ridge penalty, each trained by FedAvg, judged on rows that every site holds out.

All candidates are trained side by side as one model with a further axis, on the same minibatches: what each would be by
itself. A candidate with a large penalty takes shorter steps, as `Recipe.settled` does for steep losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.fedavg import fedavg
from fedbilevel.datasets import partition
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.fairness.methods import STEP, STEPS, Recipe
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.program import smoothness
from fedbilevel.fairness.trainer import capacity_for, padded
from fedbilevel.problem import ClientData
from fedbilevel.tuning.problem import UNPENALISED
from fedbilevel.tuning.simulation import Labelled

CANDIDATES = tuple(float(value) for value in np.logspace(-5, 0, 20))
PARTS = 4
"""One of so many parts of a site's rows is held out."""


class Candidates(NamedTuple):
    """Models, one for each ridge, with the step it takes; the numbers travel along unchanged, so that others compile
    nothing."""

    params: Any
    ridges: Any
    steps: Any


@dataclass(frozen=True)
class SideBySide:
    """The sum of the candidates' losses, each times its step: with a step of one, each walks as it would alone."""

    model: Model

    def __call__(self, candidates: Candidates, batch: Any) -> jax.Array:
        def one(params: jax.Array, ridge: jax.Array) -> jax.Array:
            losses = self.model.losses(self.model.scores(params, batch["features"]), batch["labels"])
            square = jnp.sum(params[:-1] ** 2) * ridge + UNPENALISED * jnp.sum(params[-1] ** 2)
            return jnp.mean(losses) + square / 2

        ridges, steps = jax.lax.stop_gradient(candidates[1:])
        return jnp.sum(jax.vmap(one)(candidates.params, ridges) * steps)


class Searched(NamedTuple):
    """The chosen ridge and the model trained with it on all rows; what every candidate lost on the rows held out; bytes of all
    trainings and of one, over all sites."""

    ridge: float
    params: np.ndarray
    losses: np.ndarray
    bytes_all: int
    bytes_one: int


class Search:
    """Searches over rows of the same shapes with one compilation."""

    def __init__(self, model: Model, candidates: Sequence[float] = CANDIDATES, recipe: Recipe | None = None) -> None:
        self.model, self.candidates = model, tuple(candidates)
        self.recipe = recipe or Recipe("fedavg", steps=STEPS, step=STEP, client_weights="samples")
        self._made: dict[Any, Simulation] = {}

    def run(self, sites: Sequence[Labelled], seed: int = 0) -> Searched:
        kept, out = [], []
        for number, (features, labels) in enumerate(sites):
            codes = np.zeros(len(labels)) if self.model.regression else labels
            held = partition.folds(codes, PARTS, seed=seed + number) == 0
            kept.append((features[~held], labels[~held]))
            out.append((features[held], labels[held]))
        trained, bytes_one = self._trained(kept, self.candidates, seed)
        rows, labels = (np.concatenate(parts) for parts in zip(*out, strict=True))
        losses = np.array([held_out_loss(self.model, params, rows, labels) for params in trained])
        best = int(np.argmin(losses))
        final, again = self._trained(sites, (self.candidates[best],), seed)
        return Searched(self.candidates[best], final[0], losses, len(self.candidates) * bytes_one + again, bytes_one)

    def _trained(self, sites: Sequence[Labelled], ridges: tuple[float, ...], seed: int) -> tuple[np.ndarray, int]:
        """A model for every ridge, and the bytes of one training."""
        curvature = max(smoothness(features, self.model.curvature) for features, _ in sites)
        smallest = min(len(labels) for _, labels in sites)
        settled = [self.recipe.settled(smallest, smallest, smallest, curvature + ridge) for ridge in ridges]
        rows = [{"features": x.astype(np.float32), "labels": y.astype(np.float32)} for x, y in sites]
        data = ClientData.from_clients(rows)
        data = padded(data, capacity_for(int(data.train_sizes.max())))
        one = self.model.start(jax.random.key(0))
        start = Candidates(
            np.zeros((len(ridges), *one.shape), np.float32),
            np.array(ridges, np.float32),
            np.array([each.step for each in settled], np.float32),
        )
        batch, local = settled[0].batch_size, self.recipe.local_steps
        algorithm = fedavg(SideBySide(self.model), start, step=1.0, local_steps=local, batch_size=batch)
        known = len(ridges), batch, data.train["features"].shape
        if known not in self._made:
            self._made[known] = Simulation(algorithm, data, Options("samples"))
        simulation = self._made[known].on(data)
        *_, last = simulation.rounds(algorithm.settings, seed, [self.recipe.rounds])
        models = simulation.answer(algorithm.settings, last.state)[0].params
        each_way = int(np.prod(one.shape)) * 4 * self.recipe.rounds * len(sites)
        return np.asarray(models), 2 * each_way


def held_out_loss(model: Model, params: np.ndarray, features: np.ndarray, labels: np.ndarray) -> float:
    """Mean loss of rows a model was not trained on."""
    scores = np.asarray(features, np.float64) @ np.asarray(params, np.float64)
    if model.regression:
        return float(np.mean((scores - labels) ** 2) / 2)
    if scores.ndim == 1:
        return float(np.mean(np.logaddexp(0, scores) - labels * scores))
    top = scores.max(axis=1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(scores - top).sum(axis=1))
    return float(np.mean(total - scores[np.arange(len(labels)), labels.astype(int)]))
