"""Inner models: logistic regression for two and more classes, and a small network.

A model is two functions: ``start(key) -> params`` and ``scores(params, features) -> [n]`` (two classes: logits of class 1) or
``[n, classes]``.  They are small frozen records, equal when their fields are: a program compiled for one serves its equals.
The last feature column is the constant 1, so there is no separate intercept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
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
