"""Hyper-representation: the clients share a representation and each (or all together) fit a linear head on top of it.

    inner:  g_m(x, y) = mean_i CE(y; phi_x(a_i), b_i) + ridge/2 |y|^2       the head, on training rows
    outer:  f_m(x, y) = mean_j CE(y; phi_x(a_j), b_j)                        the representation, on validation rows

phi_x is a small network with smooth activations, followed by a column of ones.  The head's problem is strongly convex.
Local lower levels give every client a head of its own (personalisation: clients differ in what they see, not in how it
looks); a global one fits a single head, as in D. A. Tarzanagh et al., FedNest, ICML 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.problem import BilevelProblem, ClientData, whole_number
from fedbilevel.tasks.deal import deal_images
from fedbilevel.tasks.images import CLASSES, Images
from fedbilevel.tasks.task import Task, accuracy, penalty, softmax_loss

Layers = list[jax.Array]
"""One weight matrix [in, out] a layer; the input's column of ones serves as the first bias."""


def represent(layers: Any, features: Any, library: Any = jnp) -> Any:
    """phi_x(a) and a column of ones; the last layer's output has mean squared length of about one a unit at most."""
    hidden = features
    for matrix in layers:
        hidden = library.tanh(hidden @ matrix)
    return library.concatenate([hidden, library.ones_like(hidden[..., :1])], axis=-1)


@dataclass(frozen=True)
class HeadLoss:
    """Cross-entropy of the head on the representation; ``ridge`` is zero for the outer loss."""

    ridge: float = 0.0

    def __call__(self, outer: Layers, inner: jax.Array, batch: Any) -> jax.Array:
        loss = softmax_loss(outer, inner, {**batch, "features": represent(outer, batch["features"])})
        return loss + penalty(self.ridge, inner) if self.ridge else loss


@dataclass(frozen=True)
class RepresentationStart:
    """Random layers from the run's key (variance 1/in), a head of zeros."""

    widths: tuple[int, ...]

    def __call__(self, key: jax.Array) -> tuple[Layers, jax.Array]:
        keys = jax.random.split(key, len(self.widths) - 1)
        layers = [
            jax.random.normal(key, shape, jnp.float32) / shape[0] ** 0.5
            for key, shape in zip(keys, pairwise(self.widths), strict=True)
        ]
        return layers, jnp.zeros((self.widths[-1] + 1, CLASSES), jnp.float32)


def hyper_representation(
    images: Images,
    seed: int = 0,
    *,
    lower_level: str = "local",
    hidden: Sequence[int] = (16,),
    clients: int = 8,
    train: int = 50,
    validation: int = 100,
    test: int = 60,
    concentration: float | None = None,
    ridge: float = 0.01,
) -> Task:
    """One draw; ``hidden`` are the widths of the representation's layers.  ``evaluate`` gives "accuracy" on test rows.

    Few training rows against many validation rows are the point: a head fits few rows well only if the representation
    is good.
    """
    if not len(hidden):
        raise ValueError("hidden needs at least one width: without a layer there is no representation to learn.")
    for width in hidden:
        whole_number("hidden", width)
    generator = np.random.default_rng(seed)
    sizes = (train, validation, test)
    dealt = deal_images(images, generator, clients=clients, sizes=sizes, concentration=concentration)
    start = RepresentationStart((dealt.train.features.shape[-1], *map(int, hidden)))

    def evaluate(outer: Tree, inner: Tree) -> dict[str, float]:
        seen = represent([np.asarray(matrix) for matrix in outer], dealt.test.features, np)
        return {"accuracy": accuracy(np.argmax(seen @ np.asarray(inner), axis=-1), dealt.test.labels)}

    return Task(
        name="representation",
        problem=BilevelProblem(HeadLoss(ridge), HeadLoss(), start, lower_level=lower_level),
        data=ClientData(train=dealt.train.batch(), val=dealt.val.batch()),
        evaluate=evaluate,
        score="accuracy",
        curvature=0.5 * (hidden[-1] + 1) + ridge,
        outer_step=5.0,
    )
