"""Loss tuning on imbalanced classes: the training rows have a long tail, and the loss that a model is trained with is
learned so that the model does well on all classes alike.

    inner:  g_m(x, y) = mean_i w[b_i] CE(s * (a_i y) + o; b_i) + ridge/2 |y|^2     x = (offsets o, log scales, log weights)
    outer:  f_m(x, y) = mean_j CE(y; a_j, b_j)                                       plain loss, every class equally often

One additive offset and one multiplicative scale for each class's logit, and one weight for each class: the parametric
cross-entropy of M. Li et al., AutoBalance, NeurIPS 2021, which D. A. Tarzanagh et al., FedNest, ICML 2022, tune over
clients.  All zeros is the ordinary loss.  Decisions are made with the plain logits a y: what was learned acts through
training only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.tasks.deal import deal, gather, proportions
from fedbilevel.tasks.images import CLASSES, Images
from fedbilevel.tasks.task import (
    FixedStart,
    Task,
    balanced_accuracy,
    cross_entropies,
    largest_moment,
    penalty,
    shape,
    softmax_loss,
    whole_numbers,
)

LARGEST = 1.0
"""Bound on |log scale| and |log weight|: it keeps the inner problem's curvature within e^3 of the plain loss's."""


class LossParameters(NamedTuple):
    """One number a class each."""

    offsets: Any
    log_scales: Any
    log_weights: Any


@dataclass(frozen=True)
class TunedLoss:
    ridge: float

    def __call__(self, outer: LossParameters, inner: jax.Array, batch: Any) -> jax.Array:
        logits = (batch["features"] @ inner) * jnp.exp(outer.log_scales) + outer.offsets
        weights = jnp.exp(outer.log_weights)[batch["labels"]]
        return jnp.mean(weights * cross_entropies(logits, batch["labels"])) + penalty(self.ridge, inner)


def bounded(outer: LossParameters) -> LossParameters:
    """The nearest point with scales and weights in [exp(-LARGEST), exp(LARGEST)]."""
    return outer._replace(
        log_scales=jnp.clip(outer.log_scales, -LARGEST, LARGEST),
        log_weights=jnp.clip(outer.log_weights, -LARGEST, LARGEST),
    )


def loss_tuning(
    images: Images,
    seed: int = 0,
    *,
    lower_level: str = "local",
    clients: int = 5,
    train: int = 50,
    validation_per_class: int = 6,
    imbalance: float = 0.05,
    concentration: float | None = None,
    ridge: float = 0.01,
) -> Task:
    """One draw: the k-th of the ten classes (in an order drawn by the seed) is ``imbalance ** (k / 9)`` times as frequent in
    training as the first.

    Every client has ``train`` rows of the long tail, skewed further by ``concentration``, and ``validation_per_class``
    rows of every class.  ``evaluate`` gives "balanced_accuracy" (the score) and "tail_accuracy", the mean over the three
    rarest classes, on equally many test rows of every class, the same for all clients.
    """
    whole_numbers({"clients": clients, "train": train, "validation_per_class": validation_per_class})
    if not 0 < imbalance <= 1:
        raise ValueError(f"imbalance={imbalance!r} must lie in (0, 1]: the rarest class against the most frequent one.")
    generator = np.random.default_rng(seed)
    order = generator.permutation(CLASSES)
    frequency = np.empty(CLASSES)
    frequency[order] = imbalance ** (np.arange(CLASSES) / (CLASSES - 1))
    val = _equal_rows(images.labels, clients, validation_per_class, generator)
    free = np.setdiff1d(np.arange(images.labels.size), val)
    shares = proportions(CLASSES, clients, concentration, generator) * frequency
    rare = free[deal(images.labels[free], shares / shares.sum(axis=1, keepdims=True), train, generator)]
    held = _equal_rows(images.test_labels, 1, int(np.bincount(images.test_labels, minlength=CLASSES).min()), generator)
    dealt = gather(images, rare, val, held)
    one_a_class = shape(CLASSES)
    start = FixedStart(
        LossParameters(one_a_class, one_a_class, one_a_class), shape(dealt.train.features.shape[-1], CLASSES)
    )

    def evaluate(outer: Tree, inner: Tree) -> dict[str, float]:
        decisions = np.argmax(dealt.test.features[0] @ np.asarray(inner), axis=-1)
        labels = np.broadcast_to(dealt.test.labels[0], decisions.shape)
        tail = np.isin(labels, order[-3:])
        return {
            "balanced_accuracy": balanced_accuracy(decisions, labels),
            "tail_accuracy": balanced_accuracy(decisions[tail], labels[tail]),
        }

    return Task(
        name="imbalance",
        problem=BilevelProblem(TunedLoss(ridge), softmax_loss, start, bounded, lower_level=lower_level),
        data=ClientData(train=dealt.train.batch(), val=dealt.val.batch()),
        evaluate=evaluate,
        score="balanced_accuracy",
        curvature=0.5 * largest_moment(dealt.train.features) + ridge,
        outer_step=0.3,
        facts={"order": order, "frequency": frequency},
    )


def _equal_rows(labels: Any, clients: int, per_class: int, generator: np.random.Generator) -> Any:
    """[clients, classes * per_class] row numbers: equally many of every class on every client, no row twice."""
    parts = []
    for label in range(CLASSES):
        rows = generator.permutation(np.flatnonzero(labels == label))
        if rows.size < clients * per_class:
            raise ValueError(
                f"Class {label} has {rows.size} rows, but {clients} client(s) with {per_class} of each class need "
                f"{clients * per_class}: ask for fewer."
            )
        parts.append(rows[: clients * per_class].reshape(clients, per_class))
    return np.concatenate(parts, axis=1)
