"""Recorded runs, what is true along them, and the verdict on an inequality between the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from fedbilevel.tasks.task import Array


class Oracles(Protocol):
    """The truth, vectorised over leading axes: x is [..., clients, dx], y is [..., clients, dy], a common x is [..., dx]."""

    def inner_solution(self, outer: Array) -> Array: ...
    def inner_gradient(self, outer: Array, inner: Array) -> Array: ...
    def hypergradient(self, outer: Array, inner: Array) -> Array: ...
    def client_gradient(self, outer: Array) -> Array: ...
    def objective(self, outer: Array) -> Array: ...


class Path(NamedTuple):
    """Arrays [seeds, steps, clients, size]: x_t, y_t, nu_t before averaging, omega_t, and xhat_{t+1} before averaging."""

    outer: Array
    inner: Array
    outer_momentum: Array
    inner_momentum: Array
    proposed: Array


def path_of(*traces: Any) -> Path:
    """Stack the traces of one or more seeds; trees become vectors."""
    if not traces:
        raise ValueError("path_of needs at least one trace.")

    def flat(tree: Any) -> Array:
        leaves = [np.asarray(leaf, dtype=np.float64) for leaf in jax.tree.leaves(tree)]
        return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], axis=-1)

    return Path(*(np.stack([flat(getattr(trace, name)) for trace in traces]) for name in Path._fields))


@dataclass(frozen=True)
class Evaluation:
    """Both sides of one lemma, [seeds, points]; ``steps`` are the values of t (or of T for sums)."""

    name: str
    steps: NDArray[np.int64]
    left: Array
    right: Array

    @property
    def margin(self) -> Array:
        """Mean over seeds of left - right; not positive where the lemma holds."""
        return np.asarray((self.left - self.right).mean(axis=0))

    @property
    def error(self) -> Array:
        """Standard error of the margin (zero for a single run)."""
        seeds = self.left.shape[0]
        if seeds == 1:
            return np.zeros(self.left.shape[1])
        return np.asarray((self.left - self.right).std(axis=0, ddof=1) / np.sqrt(seeds))

    @property
    def holds_at(self) -> NDArray[np.bool_]:
        """Point by point: margin <= 4 standard errors and the rounding of both sides."""
        rounding = 1e-11 * (np.abs(self.left) + np.abs(self.right)).max(axis=0) + 1e-13
        return np.asarray(self.margin <= 4 * self.error + rounding)

    @property
    def holds(self) -> bool:
        return bool(self.holds_at.all())

    @property
    def tightness(self) -> float:
        """Largest ratio left/right of the means: 1 means that the bound is attained."""
        right = self.right.mean(axis=0)
        ratio = np.divide(self.left.mean(axis=0), right, out=np.zeros_like(right), where=right > 0)
        return float(ratio.max(initial=0.0))
