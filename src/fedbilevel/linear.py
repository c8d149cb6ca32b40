"""Inner problems that are weighted generalised linear models: declared as such, they run on fused kernels.

    g(x, y; batch) = mean_i w(x)[cell_i] * phi(z_i . y, t_i) + ridge(x)/2 * |y|^2

``phi`` is the logistic loss (t in {0, 1}) or half the squared error.  The declaration carries its own loss, so the general
autodiff path computes exactly the same thing and serves as oracle and fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.calculus import Tree


def row_losses(link: str, margins: jax.Array, targets: jax.Array) -> jax.Array:
    """phi of every row."""
    if link == "logistic":
        return jnp.logaddexp(margins, 0.0) - targets * margins
    return 0.5 * (margins - targets) ** 2


@dataclass(frozen=True)
class LinearInner:
    """Names of the batch leaves and the two functions of the outer variable.

    ``cell_weights(outer)`` returns the table w, ``ridge(outer)`` a scalar (or pass a number for a constant ridge).
    ``kernel``: "auto" uses the fused kernels on minibatches where they can be built, "off" never, "require" refuses to run
    without them.

    Attributes:
        cell_weights: outer -> weights of the cells, ``[cells]``.
        ridge: outer -> scalar, or a number.
        link: "logistic" (targets 0 or 1) or "squared".
        features: Leaf of the batch with the features, ``[rows, columns]``.
        targets: Leaf with the targets, ``[rows]``.
        cells: Leaf with the number of each row's cell, ``[rows]``.
        kernel: "auto", "off" or "require".

    Raises:
        ValueError: The link or the kernel is not known, or the ridge is negative.
    """

    cell_weights: Callable[[Tree], jax.Array]
    ridge: Callable[[Tree], jax.Array] | float
    link: str = "logistic"
    features: str = "features"
    targets: str = "labels"
    cells: str = "groups"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        if self.link not in ("logistic", "squared"):
            raise ValueError(f"link must be 'logistic' or 'squared', not {self.link!r}.")
        if self.kernel not in ("auto", "off", "require"):
            raise ValueError(f"kernel must be 'auto', 'off' or 'require', not {self.kernel!r}.")
        if not callable(self.ridge) and not self.ridge >= 0:
            raise ValueError(f"ridge must not be negative, but is {self.ridge}.")

    @property
    def leaf(self) -> str | None:
        """The features' leaf, where the kernels may read it."""
        return None if self.kernel == "off" else self.features

    def ridge_at(self, outer: Tree, like: jax.Array) -> jax.Array:
        value = self.ridge(outer) if callable(self.ridge) else self.ridge
        return jnp.asarray(value, like.dtype)

    def __call__(self, outer: Tree, inner: jax.Array, batch: Any) -> jax.Array:
        """g itself."""
        table = self.cell_weights(outer).astype(inner.dtype)
        margin = batch[self.features] @ inner
        losses = row_losses(self.link, margin, batch[self.targets].astype(inner.dtype))
        return jnp.mean(table[batch[self.cells]] * losses) + 0.5 * self.ridge_at(outer, inner) * jnp.sum(inner**2)
