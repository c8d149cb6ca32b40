"""What the fair baselines share: a binary classifier given by its scores, its loss, and the checks of its data.

A batch is a dict ``{"features": [n, ...], "labels": [n] of 0 and 1, "groups": [n] of 0..K-1}``; a model is any tree of
parameters with ``scores(params, features) -> [n]``, the logits of class 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree, squared_norm
from fedbilevel.problem import ClientData, shapes_of

Scores = Callable[[Tree, jax.Array], jax.Array]
"""``(params, features [n, ...]) -> [n]``."""

LEAVES = ("features", "labels", "groups")


def row_losses(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Logistic loss of every row."""
    return jnp.logaddexp(scores, 0.0) - labels.astype(scores.dtype) * scores


def penalty(params: Tree, ridge: Any) -> jax.Array:
    """``ridge / 2 * |params|^2``, over all parameters."""
    square = squared_norm(params)
    return jnp.asarray(0.5 * ridge, square.dtype) * square


def plain_loss(scores: Scores, ridge: Any) -> Callable[[Tree, Tree], jax.Array]:
    """Mean logistic loss plus ridge: what FedAvg would minimise."""
    return lambda params, batch: (
        jnp.mean(row_losses(scores(params, batch["features"]), batch["labels"])) + penalty(params, ridge)
    )


def check_scores(scores: Any) -> None:
    if not callable(scores):
        raise TypeError(f"scores must be a function (params, features) -> [n], not {type(scores).__name__}.")


def not_negative(name: str, value: Any) -> None:
    """Like `fedbilevel.problem.positive`, with 0 allowed."""
    if isinstance(value, jax.core.Tracer):
        return
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, not {value!r}.")
    if not (np.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a number of at least 0, not {value}.")


def check_rows(data: ClientData, groups: int, scores: Scores, first: Callable[[jax.Array], Tree]) -> None:
    """Names, shapes and values of the training rows, and what ``scores`` makes of them."""
    train = data.train
    if not isinstance(train, dict) or set(train) != set(LEAVES):
        given = sorted(map(str, train)) if isinstance(train, dict) else type(train).__name__
        raise ValueError(f"Training rows must be a dict with features, labels and groups, not {given}.")
    real = np.arange(data.samples())[None, :] < np.asarray(data.train_sizes)[:, None]
    labels, numbers = np.asarray(train["labels"]), np.asarray(train["groups"])
    for name, array in (("labels", labels), ("groups", numbers)):
        if array.ndim != 2:
            raise ValueError(f"{name} must have one number per row ([clients, samples]), not shape {array.shape}.")
    if not np.isin(labels[real], (0, 1)).all():
        wrong = labels[real][~np.isin(labels[real], (0, 1))][0]
        raise ValueError(f"labels must be 0 or 1, but one is {wrong}: encode the classes first.")
    if not np.issubdtype(numbers.dtype, np.integer):
        raise TypeError(f"groups must be whole numbers 0..{groups - 1}, but their type is {numbers.dtype}.")
    if numbers[real].min() < 0 or numbers[real].max() >= groups:
        raise ValueError(
            f"groups must lie in 0..{groups - 1} (groups={groups}), but the data hold "
            f"{int(numbers[real].min())}..{int(numbers[real].max())}."
        )
    params = shapes_of(first, "init", jax.random.key(0))
    features = data.example("train")["features"]
    found = shapes_of(scores, "scores", params, features)
    if getattr(found, "shape", None) != features.shape[:1]:
        raise ValueError(
            f"scores must return one number per row (shape {features.shape[:1]}), not {getattr(found, 'shape', found)}."
        )
