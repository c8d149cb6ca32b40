"""Federated data cleaning: training labels are partly wrong, validation labels are right, and the weights of the training
rows are learned so that a model trained with them does well on the validation rows.

    inner:  g_m(x, y) = mean_i w_i(x) CE(y; a_i, b_i) + ridge/2 |y|^2      softmax regression on noisy rows
    outer:  f_m(x, y) = mean_j CE(y; a_j, b_j)                              clean validation rows

Two ways to write the weights, both equal to one at the start, so that the start is ordinary training:

- ``weights="samples"``: one number a training row, w_i = 2 sigmoid(sqrt(N) x_i) over all N rows of all clients.  This is
  data cleaning as it stands in the literature (A. Shaban et al., AISTATS 2019, centrally; J. Li, F. Huang and H. Huang,
  NeurIPS 2023, over clients).  It belongs with a *global* lower level: all rows shape one model.  With local lower levels
  x falls apart into one piece a client, and nothing is left for the clients to learn from each other; it runs, but as a
  federation of strangers.  The factor sqrt(N) keeps step sizes independent of the number of rows.
- ``weights="trust"``: a shared model of which rows to trust, w_i = 2 sigmoid(a_i . x[:, b_i]) with one column of x for each
  *observed* label, in the spirit of a learned weighting function (J. Shu et al., Meta-Weight-Net, NeurIPS 2019).  What one
  client finds out about a wrong 8 helps the others, so it makes sense with *local* lower levels too.

The default is "samples" for a global lower level and "trust" for local ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from fedbilevel.calculus import Tree
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.tasks.deal import deal_images
from fedbilevel.tasks.images import CLASSES, Images
from fedbilevel.tasks.task import (
    FixedStart,
    Task,
    accuracy,
    cross_entropies,
    largest_moment,
    penalty,
    shape,
    softmax_loss,
)

WEIGHTS = ("samples", "trust")


@dataclass(frozen=True)
class CleaningInner:
    """g with weights of ``kind`` "samples" or "trust"; ``rows`` is N."""

    kind: str
    rows: int
    ridge: float

    def weights(self, outer: Any, batch: Any, library: Any = jnp) -> Any:
        """w_i(x) of a batch; ``library`` is NumPy for arrays that are not traced."""
        if self.kind == "samples":
            logit = outer[batch["row"]] * self.rows**0.5
        else:
            logit = library.take_along_axis(batch["features"] @ outer, batch["labels"][..., None], axis=-1)[..., 0]
        return 1 + library.tanh(logit / 2)  # 2 sigmoid(logit)

    def __call__(self, outer: jax.Array, inner: jax.Array, batch: Any) -> jax.Array:
        losses = cross_entropies(batch["features"] @ inner, batch["labels"])
        return jnp.mean(self.weights(outer, batch) * losses) + penalty(self.ridge, inner)


def data_cleaning(
    images: Images,
    seed: int = 0,
    *,
    lower_level: str = "local",
    weights: str | None = None,
    clients: int = 8,
    train: int = 100,
    validation: int = 50,
    test: int = 60,
    noise: float | Sequence[float] = 0.5,
    concentration: float | None = None,
    ridge: float = 0.01,
) -> Task:
    """One draw: ``train`` and ``validation`` rows a client, of whose training labels a share ``noise`` is wrong.

    ``noise``: one share, or one for each client.  A wrong label is any of the other nine, equally likely.
    ``concentration``: None deals alike; a number skews the clients' labels by a Dirichlet draw.  ``evaluate`` gives
    "accuracy" on test rows and "auc", the chance that a clean training row has a larger weight than a corrupted one.
    """
    kind = ("samples" if lower_level == "global" else "trust") if weights is None else weights
    if kind not in WEIGHTS:
        raise ValueError(f"weights must be 'samples' or 'trust', not {weights!r}.")
    generator = np.random.default_rng(seed)
    sizes = (train, validation, test)
    dealt = deal_images(images, generator, clients=clients, sizes=sizes, concentration=concentration)
    observed, corrupted = corrupt(dealt.train.labels, noise, generator)
    rows = np.arange(clients * train, dtype=np.int32).reshape(clients, train)
    batch = {"features": dealt.train.features, "labels": observed, "row": rows}
    model = shape(dealt.train.features.shape[-1], CLASSES)
    loss = CleaningInner(kind, rows.size, ridge)
    start = FixedStart(shape(rows.size) if kind == "samples" else model, model)

    def evaluate(outer: Tree, inner: Tree) -> dict[str, float]:
        decisions = np.argmax(dealt.test.features @ np.asarray(inner), axis=-1)
        learned = loss.weights(np.asarray(outer), batch, np)
        return {"accuracy": accuracy(decisions, dealt.test.labels), "auc": auc(learned.ravel(), ~corrupted.ravel())}

    return Task(
        name="cleaning",
        problem=BilevelProblem(loss, softmax_loss, start, lower_level=lower_level),
        data=ClientData(train=batch, val=dealt.val.batch()),
        evaluate=evaluate,
        score="accuracy",
        curvature=2 * (0.5 * largest_moment(dealt.train.features) + ridge),
        outer_step=1.0 if kind == "samples" else 20.0,
        facts={"corrupted": corrupted, "weights": kind},
    )


def corrupt(
    labels: NDArray[np.int32], noise: float | Sequence[float], generator: np.random.Generator
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Labels [clients, rows] of which an exact share on each client (rounded) is wrong, and which those are."""
    clients, rows = labels.shape
    shares = np.broadcast_to(np.asarray(noise, np.float64), (clients,)) if np.size(noise) in (1, clients) else None
    if shares is None or not ((shares >= 0) & (shares <= 1)).all():
        raise ValueError(f"noise={noise!r} must be a share in [0, 1], or one for each of the {clients} clients.")
    ranks = generator.permuted(np.tile(np.arange(rows), (clients, 1)), axis=1)
    corrupted = ranks < np.round(shares * rows)[:, None]
    shift = generator.integers(1, CLASSES, labels.shape)
    return np.where(corrupted, (labels + shift) % CLASSES, labels).astype(np.int32), corrupted


def auc(scores: NDArray[Any], positive: NDArray[np.bool_]) -> float:
    """The chance that a positive row has a larger score than a negative one, ties counting half; NaN without both."""
    if positive.all() or not positive.any():
        return float("nan")
    ranks = rankdata(scores)
    hits = int(positive.sum())
    return float((ranks[positive].sum() - hits * (hits + 1) / 2) / (hits * (positive.size - hits)))
