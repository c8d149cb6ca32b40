"""What a task is: a bilevel problem, the clients' rows, and how to judge an answer on rows nobody trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedbilevel.calculus import Tree
from fedbilevel.problem import BilevelProblem, ClientData

LOWER_LEVELS = ("local", "global")

Evaluation = Callable[[Tree, Tree], dict[str, float]]
"""(outer, inner with leaves [clients, ...]) -> named numbers on held-out rows."""


@dataclass(frozen=True)
class Task:
    """One draw of a task.

    ``evaluate(outer, inner)`` measures on held-out rows; ``score`` names the one of its numbers that stands for the whole,
    larger being better.  ``curvature`` bounds the curvature of the inner loss, so 1/curvature is a safe inner step;
    ``outer_step`` is an outer step of the right order of magnitude: where a search begins, not a recommendation.
    ``facts`` holds what the draw knows and no algorithm sees, such as which labels were corrupted.

    Two draws of one task that differ in nothing but the seed have *equal* problems: they share one compiled program.
    """

    name: str
    lower_level: str
    problem: BilevelProblem
    data: ClientData
    evaluate: Evaluation
    score: str
    curvature: float
    outer_step: float
    facts: Mapping[str, Any] = field(default_factory=dict)


def check_lower_level(lower_level: str) -> None:
    if lower_level not in LOWER_LEVELS:
        raise ValueError(f"lower_level must be 'local' or 'global', not {lower_level!r}.")


def cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label] of every row."""
    own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - own


def penalty(ridge: float, tree: Tree) -> jax.Array:
    """ridge/2 times the squared norm."""
    return jnp.asarray(0.5 * ridge * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def accuracy(decisions: NDArray[Any], labels: NDArray[Any]) -> float:
    """Share of rows decided rightly, over all clients."""
    return float(np.mean(decisions == labels))


def balanced_accuracy(decisions: NDArray[Any], labels: NDArray[Any]) -> float:
    """Mean over the classes of the share of their rows that is decided rightly."""
    return float(np.mean([np.mean(decisions[labels == label] == label) for label in np.unique(labels)]))


def softmax_curvature(features: NDArray[Any], ridge: float) -> float:
    """A bound on the curvature of softmax regression's mean loss: half the largest eigenvalue of the mean a a', plus ridge.

    ``features``: [clients, rows, columns]; the bound holds for every client.
    """
    second = np.einsum("mni,mnj->mij", features, features) / features.shape[1]
    return float(0.5 * np.linalg.eigvalsh(second.astype(np.float64)).max() + ridge)
