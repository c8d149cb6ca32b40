"""What a task is: a bilevel problem, the clients' rows, and how to judge an answer on rows nobody trained on.

And what several tasks are made of: a start, a score, a bound on curvature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedbilevel.calculus import Tree
from fedbilevel.hints import whole_number
from fedbilevel.problem import BilevelProblem, ClientData

Array = NDArray[np.float64]
LOWER_LEVELS = ("local", "global")

Evaluate = Callable[[Tree, Tree], dict[str, float]]
"""(outer, inner with leaves [clients, ...]) -> named numbers on held-out rows."""


@dataclass(frozen=True)
class Task:
    """One draw of a task.

    ``evaluate(outer, inner)`` measures on held-out rows; ``score`` names the one of its numbers that stands for the whole,
    larger being better.  ``curvature`` bounds the curvature of the inner loss, so 1/curvature is a safe inner step;
    ``outer_step`` is an outer step of the right order of magnitude: where a search begins, not a recommendation.
    ``facts`` holds what the draw knows and no algorithm sees, such as which labels were corrupted.

    Two draws of one task that differ in nothing but the seed have *equal* problems: they share one compiled program.

    Attributes:
        name: Of the task.
        problem: The two losses.
        data: The clients' rows.
        evaluate: (outer, inner of all clients) -> numbers by name.
        score: Which of them stands for the whole; larger is better.
        curvature: Bound of the inner loss's curvature.
        outer_step: Where a search for an outer step begins.
        facts: What no algorithm sees.
    """

    name: str
    problem: BilevelProblem
    data: ClientData
    evaluate: Evaluate
    score: str
    curvature: float
    outer_step: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lower_level(self) -> str:
        return self.problem.lower_level


class ClientRows(NamedTuple):
    """Rows of all clients: ``features`` [clients, rows, columns] and ``labels`` [clients, rows].

    Attributes:
        features: ``[clients, rows, columns]``.
        labels: ``[clients, rows]``.
    """

    features: NDArray[Any]
    labels: NDArray[Any]

    def batch(self) -> dict[str, NDArray[Any]]:
        return self._asdict()


@dataclass(frozen=True)
class FixedStart:
    """``init`` of a problem that starts where no key decides: trees of shapes, filled with ``outer_value`` and zeros."""

    outer: Tree
    inner: Tree
    outer_value: float = 0.0

    def __call__(self, key: jax.Array) -> tuple[Tree, Tree]:
        def filled(tree: Tree, value: float) -> Tree:
            return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, leaf.dtype), tree)

        return filled(self.outer, self.outer_value), filled(self.inner, 0.0)


def shape(*sizes: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, np.dtype(dtype))


def whole_numbers(values: Mapping[str, int]) -> None:
    """Every value is a whole number of at least one, or a sentence names the one that is not."""
    for name, value in values.items():
        whole_number(name, value)


def accuracy(decisions: NDArray[Any], labels: NDArray[Any]) -> float:
    """Share of rows decided rightly, over all clients."""
    return float(np.mean(decisions == labels))


def second_moments(features: NDArray[Any]) -> NDArray[Any]:
    """The mean of a a' over every client's rows, [clients, columns, columns], from [clients, rows, columns]."""
    return np.asarray(np.einsum("mni,mnj->mij", features, features) / features.shape[1])


def largest_moment(features: NDArray[Any]) -> float:
    """The largest eigenvalue of any client's second moments.

    It bounds the curvature of least squares; half of it bounds that of softmax regression, a quarter that of logistic
    regression.
    """
    rows, columns = features.shape[1:]
    if rows < columns:  # the same eigenvalues from the smaller matrix
        features = np.swapaxes(features, 1, 2) * (columns / rows) ** 0.5
    return float(np.linalg.eigvalsh(second_moments(features).astype(np.float64)).max())
