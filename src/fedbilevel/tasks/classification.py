"""Three tasks whose lower level is a softmax regression on images: data cleaning, hyper-representation, loss tuning.

**Data cleaning.**  Training labels are partly wrong, validation labels are right, and the weights of the training rows are
learned so that a model trained with them does well on the validation rows.

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

**Hyper-representation.**  The clients share a representation and each (or all together) fit a linear head on top of it.

    inner:  g_m(x, y) = mean_i CE(y; phi_x(a_i), b_i) + ridge/2 |y|^2       the head, on training rows
    outer:  f_m(x, y) = mean_j CE(y; phi_x(a_j), b_j)                        the representation, on validation rows

phi_x is a small network with smooth activations, followed by a column of ones.  The head's problem is strongly convex.
Local lower levels give every client a head of its own (personalisation: clients differ in what they see, not in how it
looks); a global one fits a single head, as in D. A. Tarzanagh et al., FedNest, ICML 2022.

**Loss tuning** on imbalanced classes.  The training rows have a long tail, and the loss that a model is trained with is
learned so that the model does well on all classes alike.

    inner:  g_m(x, y) = mean_i w[b_i] CE(s * (a_i y) + o; b_i) + ridge/2 |y|^2     x = (offsets o, log scales, log weights)
    outer:  f_m(x, y) = mean_j v_j CE(y; a_j, b_j)                   plain loss, weights by which every class counts the same

One additive offset and one multiplicative scale for each class's logit, and one weight for each class: the parametric
cross-entropy of M. Li et al., AutoBalance, NeurIPS 2021, which FedNest tunes over clients.  All zeros is the ordinary
loss.  Decisions are made with the plain logits a y: what was learned acts through training only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedbilevel.calculus import Tree
from fedbilevel.hints import whole_number
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.tasks.images import CLASSES, Images, deal, deal_images, deal_shards, gather, proportions
from fedbilevel.tasks.task import FixedStart, Task, accuracy, largest_moment, shape, whole_numbers


def cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label] of every row."""
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - of_label


def softmax_loss(outer: Tree, inner: jax.Array, batch: Any) -> jax.Array:
    """Mean cross-entropy of a softmax regression: the outer loss where x acts through y alone."""
    return jnp.mean(cross_entropies(batch["features"] @ inner, batch["labels"]))


def penalty(ridge: float, inner: Tree) -> jax.Array:
    """ridge/2 times the squared norm."""
    return jnp.asarray(0.5 * ridge * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(inner)))


def balanced_accuracy(decisions: NDArray[Any], labels: NDArray[Any]) -> float:
    """Mean over the classes of the share of their rows that is decided rightly."""
    return float(np.mean([np.mean(decisions[labels == label] == label) for label in np.unique(labels)]))


# --- data cleaning -------------------------------------------------------------------------------------------------------

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
    shards: int | None = None,
    ridge: float = 0.01,
) -> Task:
    """One draw: ``train`` and ``validation`` rows a client, of whose training labels a share ``noise`` is wrong.

    ``noise``: one share, or one for each client.  A wrong label is any of the other nine, equally likely.
    ``concentration``: None deals alike; a number skews the clients' labels by a Dirichlet draw.  ``evaluate`` gives
    "accuracy" on test rows and "auc", the chance that a clean training row has a larger weight than a corrupted one.

    Args:
        images: From `digits` or `read_mnist`.
        seed: Draws the data.
        lower_level: "local" or "global".
        weights: "samples" (one for each row) or "trust" (a shared model of them); None: what suits the lower level.
        clients: How many.
        train: Training rows of a client.
        validation: Validation rows of a client.
        test: Test rows of a client.
        noise: Share of wrong labels, for all clients or for each.
        concentration: Of the Dirichlet draw of labels; None: alike.
        shards: Runs of rows sorted by label that make a client's rows, in place of a concentration.
        ridge: Of the inner loss.

    Returns:
        A `Task`.

    Raises:
        ValueError: A number is out of its range, or there are too few rows for so many clients.
    """
    kind = ("samples" if lower_level == "global" else "trust") if weights is None else weights
    if kind not in WEIGHTS:
        raise ValueError(f"weights must be 'samples' or 'trust', not {weights!r}.")
    generator = np.random.default_rng(seed)
    sizes = (train, validation, test)
    dealt = deal_images(images, generator, clients=clients, sizes=sizes, concentration=concentration, shards=shards)
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
    from scipy.stats import rankdata  # takes longer to import than JAX

    ranks = rankdata(scores)
    hits = int(positive.sum())
    return float((ranks[positive].sum() - hits * (hits + 1) / 2) / (hits * (positive.size - hits)))


# --- hyper-representation ------------------------------------------------------------------------------------------------

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
    """Random layers from the run's key (variance scale^2/in), a head of zeros."""

    widths: tuple[int, ...]
    scale: float = 1.0

    def __call__(self, key: jax.Array) -> tuple[Layers, jax.Array]:
        keys = jax.random.split(key, len(self.widths) - 1)
        layers = [
            self.scale * jax.random.normal(key, shape, jnp.float32) / shape[0] ** 0.5
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
    shards: int | None = None,
    ridge: float = 0.01,
    scale: float = 1.0,
) -> Task:
    """One draw; ``hidden`` are the widths of the representation's layers.  ``evaluate`` gives "accuracy" on test rows.

    Few training rows against many validation rows are the point: a head fits few rows well only if the representation
    is good.

    Args:
        images: From `digits` or `read_mnist`.
        seed: Draws the data.
        lower_level: "local" or "global".
        hidden: Widths of the layers.
        clients: How many.
        train: Training rows of a client.
        validation: Validation rows of a client.
        test: Test rows of a client.
        concentration: Of the Dirichlet draw of labels; None: alike.
        shards: Runs of rows sorted by label that make a client's rows, in place of a concentration.
        ridge: Of the inner loss.
        scale: Of the layers at the start, times one over the root of their inputs.

    Returns:
        A `Task`.

    Raises:
        ValueError: A number is out of its range, or there are too few rows for so many clients.
    """
    if not len(hidden):
        raise ValueError("hidden needs at least one width: without a layer there is no representation to learn.")
    for width in hidden:
        whole_number("hidden", width)
    generator = np.random.default_rng(seed)
    sizes = (train, validation, test)
    dealt = deal_images(images, generator, clients=clients, sizes=sizes, concentration=concentration, shards=shards)
    start = RepresentationStart((dealt.train.features.shape[-1], *map(int, hidden)), scale)

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


# --- loss tuning ---------------------------------------------------------------------------------------------------------

LARGEST = 1.0
"""Bound on |log scale| and |log weight|: it keeps the inner problem's curvature within e^3 of the plain loss's."""


class LossParameters(NamedTuple):
    """One number a class each."""

    offsets: Any
    log_scales: Any
    log_weights: Any


def scores_of(model: Any, features: Any, library: Any = jnp) -> Any:
    """Logits of a softmax regression, or of a network: a list whose last matrix is the head."""
    if not isinstance(model, list):
        return features @ model
    return represent(model[:-1], features, library) @ model[-1]


@dataclass(frozen=True)
class TunedLoss:
    ridge: float

    def __call__(self, outer: LossParameters, inner: Tree, batch: Any) -> jax.Array:
        logits = scores_of(inner, batch["features"]) * jnp.exp(outer.log_scales) + outer.offsets
        weights = jnp.exp(outer.log_weights)[batch["labels"]]
        return jnp.mean(weights * cross_entropies(logits, batch["labels"])) + penalty(self.ridge, inner)


def balanced_loss(outer: Tree, inner: Tree, batch: Any) -> jax.Array:
    """The plain loss with rows weighed so that every class counts the same."""
    return jnp.mean(batch["weights"] * cross_entropies(scores_of(inner, batch["features"]), batch["labels"]))


@dataclass(frozen=True)
class TuningStart:
    """The plain loss and a model of zeros or, with ``widths``, a network as `RepresentationStart` draws it."""

    columns: int
    widths: tuple[int, ...]
    scale: float

    def __call__(self, key: jax.Array) -> tuple[LossParameters, Tree]:
        plain = jnp.zeros(CLASSES, jnp.float32)
        if not self.widths:
            return LossParameters(plain, plain, plain), jnp.zeros((self.columns, CLASSES), jnp.float32)
        layers, head = RepresentationStart((self.columns, *self.widths), self.scale)(key)
        return LossParameters(plain, plain, plain), [*layers, head]


def bounded(outer: LossParameters) -> LossParameters:
    """The nearest point with scales and weights in [exp(-LARGEST), exp(LARGEST)]."""
    scales, weights = (jnp.clip(part, -LARGEST, LARGEST) for part in outer[1:])
    return LossParameters(outer.offsets, scales, weights)


def loss_tuning(
    images: Images,
    seed: int = 0,
    *,
    lower_level: str = "local",
    clients: int = 5,
    train: int = 50,
    validation_per_class: int = 6,
    validation: int | None = None,
    imbalance: float = 0.05,
    concentration: float | None = None,
    shards: int | None = None,
    hidden: Sequence[int] = (),
    ridge: float = 0.01,
    scale: float = 1.0,
) -> Task:
    """One draw: the k-th of the ten classes (in an order drawn by the seed) is ``imbalance ** (k / 9)`` times as frequent in
    training as the first.

    Every client has ``train`` rows of the long tail, skewed further by ``concentration`` or ``shards``.  It validates on
    ``validation_per_class`` rows of every class, or on ``validation`` rows of its own long tail, weighed so that every class
    counts the same.  With ``hidden`` the model is a network, and the inner problem is not convex.  ``evaluate`` gives
    "balanced_accuracy" (the score) and "tail_accuracy", the mean over the three rarest classes, on equally many test rows of
    every class, the same for all clients.

    Args:
        images: From `digits` or `read_mnist`.
        seed: Draws the data.
        lower_level: "local" or "global".
        clients: How many.
        train: Training rows of a client.
        validation_per_class: Validation rows of a client and class...
        validation: ...or validation rows of a client with the long tail of its training rows; None: the former.
        imbalance: How frequent the rarest class is, against the most frequent.
        concentration: Of the Dirichlet draw of labels; None: alike.
        shards: Runs of rows sorted by label that make a client's rows, in place of a concentration.
        hidden: Widths of a network's layers; none: a softmax regression.
        ridge: Of the inner loss.
        scale: Of these layers at the start, times one over the root of their inputs.

    Returns:
        A `Task`.

    Raises:
        ValueError: A number is out of its range, or there are too few rows for so many clients.
    """
    whole_numbers({"clients": clients, "train": train, "validation_per_class": validation_per_class})
    if shards is not None and (concentration is not None or validation is None):
        raise ValueError("shards takes a number of validation rows, and no concentration.")
    if not 0 < imbalance <= 1:
        raise ValueError(f"imbalance={imbalance!r} must lie in (0, 1]: the rarest class against the most frequent one.")
    generator = np.random.default_rng(seed)
    order = generator.permutation(CLASSES)
    frequency = np.empty(CLASSES)
    frequency[order] = imbalance ** (np.arange(CLASSES) / (CLASSES - 1))
    if validation is None:
        val = _equal_rows(images.labels, clients, validation_per_class, generator)
        free = np.setdiff1d(np.arange(images.labels.size), val)
    else:
        free = np.arange(images.labels.size)
    if shards is None:
        shares = proportions(CLASSES, clients, concentration, generator) * frequency
        shares /= shares.sum(axis=1, keepdims=True)
        rare = free[deal(images.labels[free], shares, train + (validation or 0), generator)]
    else:
        tail = _long_tail(images.labels, frequency, clients * (train + (validation or 0)), generator)
        rare = generator.permuted(tail[deal_shards(images.labels[tail], clients, shards, generator)], axis=1)
    if validation is not None:
        rare, val = np.split(rare, [train], axis=1)
    held = _equal_rows(images.test_labels, 1, int(np.bincount(images.test_labels, minlength=CLASSES).min()), generator)
    dealt = gather(images, rare, val, held)
    counted = np.bincount(dealt.val.labels.ravel(), minlength=CLASSES)
    weights = (dealt.val.labels.size / (CLASSES * np.maximum(counted, 1)))[dealt.val.labels].astype(np.float32)
    columns, widths = dealt.train.features.shape[-1], tuple(map(int, hidden))
    start, seen = TuningStart(columns, widths, scale), dealt.train.features
    if widths:  # no bound: what the head's problem curves where the network starts
        seen = represent([np.asarray(layer) for layer in start(jax.random.key(seed))[1][:-1]], seen, np)

    def evaluate(outer: Tree, inner: Tree) -> dict[str, float]:
        few = 1 if lower_level == "global" else clients  # they all have the same model there
        model = jax.tree.map(lambda leaf: np.asarray(leaf)[:few], inner)
        decisions = np.argmax(scores_of(model, dealt.test.features[0], np), axis=-1)
        labels = np.broadcast_to(dealt.test.labels[0], decisions.shape)
        tail = np.isin(labels, order[-3:])
        return {
            "balanced_accuracy": balanced_accuracy(decisions, labels),
            "tail_accuracy": balanced_accuracy(decisions[tail], labels[tail]),
        }

    return Task(
        name="imbalance",
        problem=BilevelProblem(TunedLoss(ridge), balanced_loss, start, bounded, lower_level=lower_level),
        data=ClientData(train=dealt.train.batch(), val={**dealt.val.batch(), "weights": weights}),
        evaluate=evaluate,
        score="balanced_accuracy",
        curvature=0.5 * largest_moment(seen) + ridge,
        outer_step=0.3,
        facts={"order": order, "frequency": frequency},
    )


def _long_tail(labels: Any, frequency: Any, total: int, generator: np.random.Generator) -> Any:
    """``total`` row numbers whose classes are as frequent as asked, up to rounding; a class gives no more rows than it has."""
    counts = np.bincount(labels, minlength=CLASSES)
    wanted = np.minimum(np.floor(frequency / frequency.sum() * total).astype(int), counts)
    while wanted.sum() < total:  # what rounding and small classes leave over goes to those with rows left
        room = np.flatnonzero(wanted < counts)
        if not room.size:
            raise ValueError(f"A long tail of {total} rows needs more than the {labels.size} there are: ask for fewer.")
        wanted[room[np.argmax((frequency / (wanted + 1))[room])]] += 1
    return np.concatenate(
        [generator.permutation(np.flatnonzero(labels == label))[: wanted[label]] for label in range(CLASSES)]
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
