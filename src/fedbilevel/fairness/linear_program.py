"""Small linear programs over the simplex, solved inside a compiled program.

    maximise c.alpha    subject to    alpha >= 0,   sum(alpha) = 1,   A alpha >= 0

by the dual simplex method: the vertex "all weight on the largest c" is optimal when A is ignored, and each pivot repairs
one violated constraint while keeping that optimality.  The answer is a vertex, exact up to rounding; an interior-point
method of fixed length would stop near one.  FCFL's program needs few pivots, often none, on a table of some
(clients + 2) x (clients + 2) numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.calculus import Tree, dot, squared_norm

ROUNDING = 64
"""Violations of up to this many units of rounding, relative to the largest entry of A, count as satisfied."""
PIVOTS = 20
"""Pivots allowed per variable and constraint; random programs of 2 to 40 variables needed fewer than two."""


class Solution(NamedTuple):
    """``point`` is alpha where ``solved``; where not (the program is infeasible), it is not meaningful."""

    point: jax.Array
    solved: jax.Array
    pivots: jax.Array


class _State(NamedTuple):
    """basic = table[:, -1] + table[:, :-1] @ nonbasic, row by row; the last row is the objective.

    Variables are numbered: alpha first, then the slacks s = A alpha.
    """

    table: jax.Array
    basic: jax.Array
    nonbasic: jax.Array
    failed: jax.Array
    pivots: jax.Array


def maximise(objective: jax.Array, constraints: jax.Array, allowed: jax.Array | None = None) -> Solution:
    """``objective`` c ``[n]``, ``constraints`` A ``[m, n]``; where ``allowed`` is False, alpha is held at 0."""
    rows, size = constraints.shape
    usable = jnp.ones(size, bool) if allowed is None else allowed
    largest = jnp.max(jnp.abs(constraints), initial=0)
    matrix = constraints / jnp.where(largest > 0, largest, 1)
    height = jnp.max(jnp.abs(objective))
    prices = objective / jnp.where(height > 0, height, 1)
    tolerance = float(ROUNDING * jnp.finfo(objective.dtype).eps)

    best = jnp.argmax(jnp.where(usable, prices, -jnp.inf)).astype(jnp.int32)
    # alpha_best = 1 - the others: eliminate it.  Its column stays in the table, empty and never entered.
    left = jnp.ones(size, objective.dtype).at[best].set(0)
    table = jnp.concatenate(
        [
            jnp.column_stack([(matrix - matrix[:, best][:, None]) * left, matrix[:, best]]),
            jnp.append(-left, 1)[None],
            jnp.append((prices - prices[best]) * left, prices[best])[None],
        ]
    )
    numbers = jnp.arange(size + rows, dtype=jnp.int32)
    state = _State(
        table,
        jnp.append(numbers[size:], best),
        jnp.where(numbers[:size] == best, -1, numbers[:size]),
        jnp.asarray(False),
        jnp.zeros((), jnp.int32),
    )
    enterable = jnp.append(usable, jnp.ones(rows, bool))
    limit = PIVOTS * (size + rows)

    def unfinished(state: _State) -> jax.Array:
        violated = jnp.min(state.table[:-1, -1]) < -tolerance
        return violated & ~state.failed & (state.pivots < limit)

    def pivot(state: _State) -> _State:
        return _pivot(state, enterable, tolerance, state.pivots >= limit // 2)

    final = jax.lax.while_loop(unfinished, pivot, state)
    values = jnp.zeros(size + rows, table.dtype).at[final.basic].set(final.table[:-1, -1])
    point = jnp.maximum(values[:size], 0)
    total = jnp.sum(point)
    solved = jnp.any(usable) & ~final.failed & (jnp.min(final.table[:-1, -1]) >= -tolerance)
    return Solution(point / jnp.where(total > 0, total, 1), solved, final.pivots)


def _pivot(state: _State, enterable: jax.Array, tolerance: float, careful: jax.Array) -> _State:
    """Exchange one violated basic variable for the nonbasic one that keeps the objective row non-positive.

    ``careful``: choose by smallest variable number (Bland's rule), slower but unable to run in circles.
    """
    table, basic, nonbasic, _, pivots = state
    values = table[:-1, -1]
    violated = values < -tolerance
    worst = jnp.argmin(values)
    first = jnp.argmin(jnp.where(violated, basic, jnp.iinfo(jnp.int32).max))
    row = jnp.where(careful, first, worst)

    across = table[row, :-1]
    helps = (across > tolerance) & (nonbasic >= 0) & enterable[nonbasic]
    ratios = jnp.where(helps, -table[-1, :-1] / jnp.where(helps, across, 1), jnp.inf)
    tied = helps & (ratios <= jnp.min(ratios) + tolerance)
    # Among equals the largest pivot loses the least accuracy.
    stable = jnp.argmax(jnp.where(tied, across, -jnp.inf))
    lowest = jnp.argmin(jnp.where(tied, nonbasic, jnp.iinfo(jnp.int32).max))
    column = jnp.where(careful, lowest, stable)

    divisor = table[row, column]
    solved_for = (-table[row] / divisor).at[column].set(1 / divisor)
    down = table[:, column]
    exchanged = (table.at[:, column].set(0) + down[:, None] * solved_for[None]).at[row].set(solved_for)
    failed = ~jnp.any(helps)
    exchanged = jnp.where(failed, table, exchanged)
    swapped = (basic.at[row].set(nonbasic[column]), nonbasic.at[column].set(basic[row]))
    basic, nonbasic = (jnp.where(failed, old, new) for old, new in zip((basic, nonbasic), swapped, strict=True))
    return _State(exchanged, basic, nonbasic, failed, pivots + 1)


def balance(loss_gradient: Tree, gap_gradient: Tree, satisfied: jax.Array) -> jax.Array:
    """alpha_2 of FCFL's stage one.  Its programs have one free number, so their vertices are written out."""
    loss_loss, gap_gap = squared_norm(loss_gradient), squared_norm(gap_gradient)
    loss_gap = dot(loss_gradient, gap_gradient)
    for_loss = (loss_gap > loss_loss).astype(loss_loss.dtype)
    # <d, g_l> = (1 - s) |g_l|^2 + s <g_g, g_l> stays non-negative up to this s.
    opposed = loss_gap < 0
    furthest = jnp.where(opposed, loss_loss / jnp.where(opposed, loss_loss - loss_gap, 1), 1)
    for_gap = jnp.where(gap_gap >= loss_gap, furthest, 0)
    return jnp.where(satisfied, for_loss, for_gap)


def gram(stacked: Tree) -> jax.Array:
    """Inner products of all pairs, the leading axis of every leaf counting the vectors."""
    flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(stacked)]
    products = [rows @ rows.T for rows in flat]
    return jnp.asarray(sum(products[1:], products[0]))
