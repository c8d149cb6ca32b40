"""Rates by group as smooth functions of the scores: what a gradient can lower.

With z the scores (logits of class 1) and T the temperature, the soft true-positive rate of group a is

    r_a = mean of sigmoid(T z_i) over the rows i of group a with label 1.

T = 1 averages the predicted probabilities; large T approaches the rate of the decisions z > 0.  A group without such rows has
no rate: it is marked absent and left out of every gap, never counted as 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Rates(NamedTuple):
    """``values[a]`` is the rate of group a where ``present[a]``, else 0 and meaningless."""

    values: jax.Array
    present: jax.Array


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
    rows = group_totals(positive, groups, count)
    present = rows > 0
    return Rates(group_totals(positive * accepted, groups, count) / jnp.where(present, rows, 1), present)


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
