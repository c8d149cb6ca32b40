"""Rates by group as smooth functions of the scores: what a gradient can lower.

With z the scores (logits of class 1), T the temperature and R the rows that count (positives for the true-positive rate,
negatives for the false-positive rate, all rows for the selection rate), the soft rate of group a is

    r_a = mean of sigmoid(T z_i) over the rows i in R with group a.

T = 1 averages the predicted probabilities; large T approaches the rate of the decisions z > 0.  A group without rows in R
has no rate: it is marked absent and left out of every gap, never counted as 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Rates(NamedTuple):
    """``values[a]`` is the rate of group a where ``present[a]``, else 0 and meaningless."""

    values: jax.Array
    present: jax.Array


SoftRates = Callable[[jax.Array, jax.Array, jax.Array, int, Any], Rates]
"""``(scores, labels, groups, number of groups, temperature) -> Rates``."""


def group_totals(values: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """Sum of ``values`` over the rows of each of ``count`` groups.

    One comparison per row and group instead of a scatter: groups are few, and a scatter runs row by row on a CPU.
    """
    members = groups[None, :] == jnp.arange(count, dtype=groups.dtype)[:, None]
    return jnp.sum(jnp.where(members, values[None, :], 0), axis=1)


def soft_true_positive_rates(
    scores: jax.Array, labels: jax.Array, groups: jax.Array, count: int, temperature: Any = 1.0
) -> Rates:
    """Over the rows with label 1: the rates that equal opportunity compares."""
    return _rates(scores, labels.astype(scores.dtype), groups, count, temperature)


def soft_false_positive_rates(
    scores: jax.Array, labels: jax.Array, groups: jax.Array, count: int, temperature: Any = 1.0
) -> Rates:
    """Over the rows with label 0: with the true-positive rates, those of equalized odds."""
    return _rates(scores, 1 - labels.astype(scores.dtype), groups, count, temperature)


def soft_selection_rates(
    scores: jax.Array, labels: jax.Array, groups: jax.Array, count: int, temperature: Any = 1.0
) -> Rates:
    """Over all rows: the rates that demographic parity compares.  ``labels`` are not read."""
    return _rates(scores, jnp.ones_like(scores), groups, count, temperature)


def _rates(scores: jax.Array, counting: jax.Array, groups: jax.Array, count: int, temperature: Any) -> Rates:
    accepted = jax.nn.sigmoid(jnp.asarray(temperature, scores.dtype) * scores)
    rows = group_totals(counting, groups, count)
    present = rows > 0
    return Rates(group_totals(counting * accepted, groups, count) / jnp.where(present, rows, 1), present)


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
