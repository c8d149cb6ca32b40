"""Inner models, linear ones and a small network, for classes and for numbers, with their losses, decisions and soft rates.

A model is two functions: ``start(key) -> params`` and ``scores(params, features) -> [n]`` (two classes: logits of class 1; a
number: the prediction, in standard deviations of the target from its mean) or ``[n, classes]``.  They are small frozen records,
equal when their fields are: a program compiled for one serves its equals.
The last feature column is the constant 1, so there is no separate intercept.

Rates by group are smooth functions of the scores, which a gradient can lower.  With z the scores (logits of class 1) and T the
temperature, the soft true-positive rate of group a is

    r_a = mean of sigmoid(T z_i) over the rows i of group a with label 1.

T = 1 averages the predicted probabilities; large T approaches the rate of the decisions z > 0.  A group without such rows has
no rate: it is marked absent and left out of every gap, never counted as 0.  With more than two classes every class has such a
rate, how often it is recognised, and the gap of the class in which groups differ most counts.  A number has means in the place
of rates: of the predictions, or of their errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree, squared_norm
from fedbilevel.hints import whole_number

MODELS = ("logistic", "linear", "mlp")
LOSSES = ("log", "squared", "huber")
BEYOND = 1.0
"""Errors beyond this, in standard deviations of the target, count by their size in Huber's loss and not by their square."""

RowLosses = Callable[[jax.Array, jax.Array], jax.Array]
"""``(scores, labels) -> [n]``."""
RowDerivatives = tuple[RowLosses, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]]
"""``(scores, labels)`` and ``(scores, labels, towards)``, both to the shape of the scores: the slope of a row's loss by its
scores, and how that changes ``towards`` other scores."""
Compared = Callable[..., tuple[jax.Array, jax.Array]]
"""``(scores, labels, temperature) -> (values, which rows count)``: what groups are compared by, see `recognised`."""


@dataclass(frozen=True)
class LinearScores:
    """``features @ params``: params ``[d]`` for two classes, ``[d, classes]`` for more."""

    def __call__(self, params: jax.Array, features: jax.Array) -> jax.Array:
        return features @ params


@dataclass(frozen=True)
class LinearStart:
    """All zeros: every class equally likely."""

    features: int
    classes: int

    def __call__(self, key: jax.Array) -> jax.Array:
        return jnp.zeros(self.features if self.classes <= 2 else (self.features, self.classes), jnp.float32)


@dataclass(frozen=True)
class NetworkScores:
    """One hidden layer of tanh units: smooth, so that second derivatives exist everywhere."""

    def __call__(self, params: Tree, features: jax.Array) -> jax.Array:
        hidden = jnp.tanh(features @ params["hidden"] + params["hidden_bias"])
        scores = hidden @ params["output"] + params["output_bias"]
        return jnp.asarray(scores[:, 0] if scores.shape[1] == 1 else scores)


@dataclass(frozen=True)
class NetworkStart:
    """Normal weights with variance 1 / inputs (Glorot's for tanh), zero biases."""

    features: int
    classes: int
    hidden: int

    def __call__(self, key: jax.Array) -> Tree:
        first, second = jax.random.split(key)
        outputs = 1 if self.classes <= 2 else self.classes

        def normal(key: jax.Array, inputs: int, units: int) -> jax.Array:
            scale = jnp.asarray(1 / np.sqrt(inputs), jnp.float32)
            return scale * jax.random.normal(key, (inputs, units), jnp.float32)

        return {
            "hidden": normal(first, self.features, self.hidden),
            "hidden_bias": jnp.zeros(self.hidden, jnp.float32),
            "output": normal(second, self.hidden, outputs),
            "output_bias": jnp.zeros(outputs, jnp.float32),
        }


@dataclass(frozen=True)
class Model:
    """``scores`` and ``start`` of a model over ``features`` columns (the constant one included).

    A classifier has the loss "log" and tells ``classes`` apart; "squared" and "huber" are for a number, which has 1.

    Attributes:
        kind: "logistic", "linear" or "mlp".
        features: Columns, the constant one included.
        classes: How many; 1 for a number.
        hidden: Units of the hidden layer of "mlp".
        loss: "log", "squared" or "huber".

    Raises:
        ValueError: The kind or the loss is not known, or a size is too small.
    """

    kind: str
    features: int
    classes: int = 2
    hidden: int = 16
    loss: str = "log"

    def __post_init__(self) -> None:
        if self.kind not in MODELS:
            raise ValueError(f"model must be one of {', '.join(map(repr, MODELS))}, not {self.kind!r}.")
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(map(repr, LOSSES))}, not {self.loss!r}.")
        whole_number("features", self.features)
        whole_number("hidden", self.hidden)
        if not self.regression:
            whole_number("classes", self.classes, least=2)
        elif self.classes != 1:
            raise ValueError(f"The loss {self.loss!r} is for a number: classes must be 1, not {self.classes}.")
        if self.kind == ("logistic" if self.regression else "linear"):
            other = (
                "a number, which takes model='linear'" if self.regression else "classes, which take model='logistic'"
            )
            raise ValueError(f"model={self.kind!r} cannot predict {other} or 'mlp'.")

    @property
    def regression(self) -> bool:
        return self.loss != "log"

    @property
    def scores(self) -> LinearScores | NetworkScores:
        return NetworkScores() if self.kind == "mlp" else LinearScores()

    @property
    def start(self) -> LinearStart | NetworkStart:
        if self.kind == "mlp":
            return NetworkStart(self.features, self.classes, self.hidden)
        return LinearStart(self.features, self.classes)

    @property
    def losses(self) -> RowLosses:
        return {"log": row_losses, "squared": squared_losses, "huber": huber_losses}[self.loss]

    @property
    def derivatives(self) -> RowDerivatives:
        """Of ``losses``.  They are written out: differentiating gives the same, in programs of several times the size."""
        return {
            "log": (row_slopes, row_bends), "squared": (squared_slopes, squared_bends), "huber": (huber_slopes, huber_bends)
        }[self.loss]  # fmt: skip

    @property
    def curvature(self) -> float:
        """Largest second derivative of a row's loss in its score."""
        return 1.0 if self.regression else 0.25


@jax.custom_jvp
def softplus(scores: jax.Array) -> jax.Array:
    """log(1 + e^z).  Its derivatives are said here: those of ``jnp.logaddexp`` look after infinities, in more operations."""
    return jnp.logaddexp(scores, 0.0)


@softplus.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return softplus(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]


def row_losses(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Log loss of every row; ``labels`` hold class numbers."""
    if scores.ndim == 1:
        return softplus(scores) - labels.astype(scores.dtype) * scores
    chosen = jnp.take_along_axis(scores, labels.astype(jnp.int32)[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - chosen


def row_slopes(scores: jax.Array, labels: jax.Array) -> jax.Array:
    if scores.ndim == 1:
        return jax.nn.sigmoid(scores) - labels.astype(scores.dtype)
    chosen = labels.astype(jnp.int32)[:, None] == jnp.arange(scores.shape[1], dtype=jnp.int32)
    return jax.nn.softmax(scores) - chosen.astype(scores.dtype)


def row_bends(scores: jax.Array, labels: jax.Array, towards: jax.Array) -> jax.Array:
    if scores.ndim == 1:
        chance = jax.nn.sigmoid(scores)
        return chance * (1 - chance) * towards
    chance = jax.nn.softmax(scores)
    return chance * (towards - jnp.sum(chance * towards, axis=1, keepdims=True))


def mean_of(losses: jax.Array, real: jax.Array) -> jax.Array:
    """The mean over the rows that are ``real``; the others are padding."""
    return jnp.sum(jnp.where(real, losses, 0)) / jnp.sum(real, dtype=losses.dtype)


def squared_losses(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Half the squared error of every row."""
    return (scores - labels.astype(scores.dtype)) ** 2 / 2


def squared_slopes(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return scores - labels.astype(scores.dtype)


def squared_bends(scores: jax.Array, labels: jax.Array, towards: jax.Array) -> jax.Array:
    return towards


def huber_losses(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Half the squared error up to `BEYOND`, and from there on a straight line."""
    size = jnp.abs(scores - labels.astype(scores.dtype))
    square = jnp.minimum(size, BEYOND)
    return square * (size - square / 2)


def huber_slopes(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.clip(squared_slopes(scores, labels), -BEYOND, BEYOND)


def huber_bends(scores: jax.Array, labels: jax.Array, towards: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(squared_slopes(scores, labels)) < BEYOND, towards, 0)


def penalty(params: Tree, ridge: Any) -> jax.Array:
    """``ridge / 2 * |params|^2``, over all parameters."""
    square = squared_norm(params)
    return jnp.asarray(0.5 * ridge, square.dtype) * square


def soft_decisions(scores: jax.Array, temperature: Any = 1.0) -> jax.Array:
    """``[n, classes - 1]`` (two classes: of class 1) or ``[n, classes]``: probabilities, sharpened by the temperature T.

    T = 1 gives the model's own probabilities, a large T its decisions.
    """
    sharp = jnp.asarray(temperature, scores.dtype) * scores
    return jax.nn.sigmoid(sharp)[:, None] if scores.ndim == 1 else jax.nn.softmax(sharp, axis=1)


def numbers(model: Model, params: Tree, features: Any) -> np.ndarray:
    """Scores in float64, ``[n]`` or ``[n, classes]``; plain NumPy, so that predicting compiles nothing."""
    matrix = np.asarray(features, np.float64)
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    if model.kind == "mlp":
        scores = np.tanh(matrix @ tree["hidden"] + tree["hidden_bias"]) @ tree["output"] + tree["output_bias"]
    else:
        scores = matrix @ tree
    return np.asarray(scores.reshape(len(matrix)) if model.classes <= 2 else scores)


def probabilities(model: Model, params: Tree, features: Any) -> np.ndarray:
    """``[n, classes]`` in float64, rows summing to one."""
    scores = numbers(model, params, features)
    if model.classes == 2:
        scores = np.stack([np.zeros_like(scores), scores], axis=1)
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


class Rates(NamedTuple):
    """``values[a]`` is the rate of group a where ``present[a]``, else 0 and meaningless."""

    values: jax.Array
    present: jax.Array

    @classmethod
    def of(cls, hits: jax.Array, rows: jax.Array) -> Rates:
        present = rows > 0
        return cls(hits / jnp.where(present, rows, 1), present)


def group_totals(values: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """Sum of ``values`` ``[..., n]`` over the rows of each of ``count`` groups.

    One comparison per row and group instead of a scatter: groups are few, and a scatter runs row by row on a CPU.
    """
    members = groups[None, :] == jnp.arange(count, dtype=groups.dtype)[:, None]
    return jnp.sum(jnp.where(members, values[..., None, :], 0), axis=-1)


def own_class(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """1 for the rows that a rate is among, else 0: ``[n]``, the positives, of two classes; ``[classes, n]`` of more."""
    if scores.ndim == 1:
        return labels.astype(scores.dtype)
    return (labels[None, :] == jnp.arange(scores.shape[1], dtype=labels.dtype)[:, None]).astype(scores.dtype)


def decided(scores: jax.Array) -> jax.Array:
    """The class of the largest score, as a number."""
    return (scores > 0).astype(jnp.int32) if scores.ndim == 1 else jnp.argmax(scores, axis=1).astype(jnp.int32)


def recognised(scores: jax.Array, labels: jax.Array, temperature: Any = None) -> tuple[jax.Array, jax.Array]:
    """What equal opportunity compares: (how far each row is recognised as of its class, `own_class`).

    By the probabilities sharpened by ``temperature``; None: by the decisions themselves.
    """
    among = own_class(scores, labels)
    if temperature is None:
        return among * own_class(scores, decided(scores)), among
    soft = soft_decisions(scores, temperature)
    return among * (soft[:, 0] if scores.ndim == 1 else soft.T), among


def predicted(scores: jax.Array, labels: jax.Array, temperature: Any = None) -> tuple[jax.Array, jax.Array]:
    """What "mean_prediction" compares: the predicted numbers of all rows."""
    return scores, jnp.ones_like(scores)


def mistaken(scores: jax.Array, labels: jax.Array, temperature: Any = None) -> tuple[jax.Array, jax.Array]:
    """What "mean_error" compares: how far predictions are above the truth, in all rows."""
    return scores - labels.astype(scores.dtype), jnp.ones_like(scores)


def group_rates(compared: tuple[jax.Array, jax.Array], groups: jax.Array, count: int) -> Rates:
    """The rate of every group (of more than two classes: for every class) from what is compared, and among which rows."""
    hits, among = (group_totals(values, groups, count) for values in compared)
    return Rates.of(hits, among)


def largest_gap(rates: Rates) -> jax.Array:
    """Largest difference between two present groups, and of several rates by group the largest of theirs; 0 with fewer than
    two groups.

    Where several groups share the largest (or smallest) rate, the derivative is spread evenly over them, so that it is 0
    when all rates are equal.
    """
    values, present = rates
    highest = jnp.max(jnp.where(present, values, -jnp.inf), axis=-1)
    lowest = jnp.min(jnp.where(present, values, jnp.inf), axis=-1)
    # Chosen before subtracting: the branch not taken must not hand inf - inf to the derivative.
    some = jnp.any(present, axis=-1)
    return jnp.max(jnp.where(some, highest, 0) - jnp.where(some, lowest, 0))
