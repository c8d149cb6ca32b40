"""Inner models, logistic regression for two and more classes and a small network, with their losses, decisions and soft rates.

A model is two functions: ``start(key) -> params`` and ``scores(params, features) -> [n]`` (two classes: logits of class 1) or
``[n, classes]``.  They are small frozen records, equal when their fields are: a program compiled for one serves its equals.
The last feature column is the constant 1, so there is no separate intercept.

Rates by group are smooth functions of the scores, which a gradient can lower.  With z the scores (logits of class 1) and T the
temperature, the soft true-positive rate of group a is

    r_a = mean of sigmoid(T z_i) over the rows i of group a with label 1.

T = 1 averages the predicted probabilities; large T approaches the rate of the decisions z > 0.  A group without such rows has
no rate: it is marked absent and left out of every gap, never counted as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree, squared_norm
from fedbilevel.problem import whole_number

MODELS = ("logistic", "mlp")


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
        return jnp.zeros(self.features if self.classes == 2 else (self.features, self.classes), jnp.float32)


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
        outputs = 1 if self.classes == 2 else self.classes

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
    """``scores`` and ``start`` of a classifier over ``features`` columns (the constant one included)."""

    kind: str
    features: int
    classes: int = 2
    hidden: int = 16

    def __post_init__(self) -> None:
        if self.kind not in MODELS:
            raise ValueError(f"model must be one of {', '.join(map(repr, MODELS))}, not {self.kind!r}.")
        whole_number("features", self.features)
        whole_number("classes", self.classes, least=2)
        whole_number("hidden", self.hidden)

    @property
    def scores(self) -> LinearScores | NetworkScores:
        return LinearScores() if self.kind == "logistic" else NetworkScores()

    @property
    def start(self) -> LinearStart | NetworkStart:
        if self.kind == "logistic":
            return LinearStart(self.features, self.classes)
        return NetworkStart(self.features, self.classes, self.hidden)


def row_losses(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Log loss of every row; ``labels`` hold class numbers."""
    if scores.ndim == 1:
        return jnp.logaddexp(scores, 0.0) - labels.astype(scores.dtype) * scores
    chosen = jnp.take_along_axis(scores, labels.astype(jnp.int32)[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - chosen


def mean_of(losses: jax.Array, real: jax.Array) -> jax.Array:
    """The mean over the rows that are ``real``; the others are padding."""
    return jnp.sum(jnp.where(real, losses, 0)) / jnp.sum(real, dtype=losses.dtype)


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


def probabilities(model: Model, params: Tree, features: Any) -> np.ndarray:
    """``[n, classes]`` in float64, rows summing to one; plain NumPy, so that predicting compiles nothing."""
    matrix = np.asarray(features, np.float64)
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    if model.kind == "logistic":
        scores = matrix @ tree
    else:
        scores = np.tanh(matrix @ tree["hidden"] + tree["hidden_bias"]) @ tree["output"] + tree["output_bias"]
    if model.classes == 2:
        scores = scores.reshape(len(matrix), 1)
        scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
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
    """Sum of ``values`` over the rows of each of ``count`` groups.

    One comparison per row and group instead of a scatter: groups are few, and a scatter runs row by row on a CPU.
    """
    members = groups[None, :] == jnp.arange(count, dtype=groups.dtype)[:, None]
    return jnp.sum(jnp.where(members, values[None, :], 0), axis=1)


def soft_true_positive_rates(
    scores: jax.Array, labels: jax.Array, groups: jax.Array, count: int, temperature: Any = 1.0
) -> Rates:
    """The rates that equal opportunity compares."""
    positive = labels.astype(scores.dtype)
    accepted = jax.nn.sigmoid(jnp.asarray(temperature, scores.dtype) * scores)
    return Rates.of(group_totals(positive * accepted, groups, count), group_totals(positive, groups, count))


def largest_gap(rates: Rates) -> jax.Array:
    """Largest difference between two present groups; 0 with fewer than two.

    Where several groups share the largest (or smallest) rate, the derivative is spread evenly over them, so that it is 0
    when all rates are equal.
    """
    values, present = rates
    highest = jnp.max(jnp.where(present, values, -jnp.inf))
    lowest = jnp.min(jnp.where(present, values, jnp.inf))
    # Chosen before subtracting: the branch not taken must not hand inf - inf to the derivative.
    some = jnp.any(present)
    return jnp.where(some, highest, 0) - jnp.where(some, lowest, 0)
