"""Group fairness as a bilevel problem: weights of groups or cells outside, a weighted classifier inside.

    minimise over x    1/M sum_m F_m(y_m(x))      subject to   y_m(x) = argmin_y  mean_i w(x)[cell_i] loss_i(y) + ridge/2 |y|^2

The means run over client m's validation rows outside and its training rows inside.  Two formulations:

- ``"paper"``: one weight per group, w = K softmax(x); F is the mean loss on a group-balanced validation set.
- ``"cells"``: one weight per (group, label) cell, w = K C softmax(x); F adds ``strength`` times the mean squared gap between
  the groups' soft rates (`squared_gap`).  One weight per group cannot move a true-positive rate without moving the
  false-positive rate along; one per cell can.

Weights are positive and have mean one over the cells; x = 0 is the unweighted problem.

Where a number is predicted, a cell is a group together with whether the number is above its mean, and the gaps are those of the
mean predictions or mean errors, in standard deviations of the number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.fairness.models import Model, RowLosses, group_totals, mean_of, penalty, row_losses, soft_decisions
from fedbilevel.hints import not_negative, positive, whole_number
from fedbilevel.linear import LinearInner
from fedbilevel.problem import BilevelProblem, linear_problem

FORMULATIONS = ("cells", "paper")
REAL = "real"
"""The leaf that tells validation rows from padding, where they are read with it: see `ClientData.with_mask`."""

Deviation = Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]
"""``(decisions [n, columns], labels [n], groups [n], number of groups) -> scalar``, 0 when the groups are treated alike."""


def squared_gap(decisions: jax.Array, counting: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """Mean squared difference of two groups' rates, freed of the noise of few rows; two groups: their squared gap.

    Rates are taken over the rows where ``counting`` is 1.  With r_a the rate of group a over its n_a such rows, p_a its share
    of them, and v_a = (variance of its decisions) / (n_a - 1) the variance of r_a, the value is

        sum_{a != b} p_a p_b [(r_a - r_b)^2 - v_a - v_b]  /  sum_{a != b} p_a p_b.

    Draw two rows of different groups at random: this is the mean square of how far their groups' rates are apart.  So a group
    counts by its share, and a group of ten rows cannot pull the rates of all others to its own.

    E (r_a - r_b)^2 exceeds the squared difference of the true rates by v_a + v_b.  Left in, that excess would reward
    decisions that do not vary within a group (all rates 0, or all 1), the more so the fewer rows a group has in a
    batch.  Taken out, the value is unbiased given the n_a, whatever the batch size, and may be slightly negative.

    A group with fewer than two such rows has no variance and is left out; with fewer than two groups the value is 0.

    Args:
        decisions: softened decisions `[rows]`, between 0 and 1.
        counting: 1 for rows that the rate is a share of, else 0 `[rows]`.
        groups: numbers of the groups, from 0 `[rows]`.
        count: how many groups there are.

    Returns:
        One number, 0 where the groups' rates agree.
    """
    rows = group_totals(counting, groups, count)
    known = rows >= 2
    rows = jnp.where(known, rows, 2)
    rates = jnp.where(known, group_totals(counting * decisions, groups, count) / rows, 0)
    # Around the rate, not as a difference of two large sums (in float32 that would cost half the digits), and one
    # comparison per row and group, as in `group_totals`.
    members = groups[None, :] == jnp.arange(count, dtype=groups.dtype)[:, None]
    around = jnp.where(members, counting * (decisions[None, :] - rates[:, None]) ** 2, 0)
    noise = jnp.where(known, jnp.sum(around, axis=1) / (rows * (rows - 1)), 0)
    shares = jnp.where(known, rows, 0) / jnp.maximum(jnp.sum(jnp.where(known, rows, 0)), 1)
    pairs = jnp.sum(shares * (1 - shares))
    several = jnp.sum(known) >= 2
    # sum_{a != b} p_a p_b (r_a - r_b)^2 = 2 sum_a p_a (r_a - r)^2 with r = sum_a p_a r_a, and likewise for the v_a.
    between = jnp.sum(shares * (rates - jnp.sum(shares * rates)) ** 2)
    return jnp.where(several, 2 * (between - jnp.sum(shares * (1 - shares) * noise)) / jnp.where(several, pairs, 1), 0)


def compared(metric: str, decisions: jax.Array, labels: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """What a metric compares between groups: pairs (a value of every row, 1 for the rows that count)."""
    columns = decisions.shape[1]

    def among(label: int | None) -> jax.Array:
        return (jnp.full(decisions.shape[:1], True) if label is None else labels == label).astype(decisions.dtype)

    if metric in ("calibration", "mean_error"):
        numbered = columns == 1
        truth = labels[:, None] if numbered else labels[:, None] == jnp.arange(columns, dtype=labels.dtype)[None, :]
        error = decisions - truth.astype(decisions.dtype)
        if metric == "mean_error":
            return [(error[:, 0], among(None))]
        return [(error[:, c] * side[:, c], among(None)) for c in range(columns) for side in (decisions, 1 - decisions)]
    pairs: dict[str, list[tuple[int | None, int]]] = {
        "equal_opportunity": [(1, 0)] if columns == 1 else [(c, c) for c in range(columns)],
        "equalized_odds": [(label, column) for label in range(max(2, columns)) for column in range(columns)],
    }
    every: list[tuple[int | None, int]] = [(None, column) for column in range(columns)]
    return [(decisions[:, column], among(label)) for label, column in pairs.get(metric, every)]


def _summed(metric: str, decisions: jax.Array, labels: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """Sum of `squared_gap` of everything the metric compares."""
    parts = [squared_gap(values, counting, groups, count) for values, counting in compared(metric, decisions, labels)]
    return jnp.sum(jnp.stack(parts))


def equal_opportunity(decisions: jax.Array, labels: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """Two classes: the true-positive rates.  More: how often each class is recognised."""
    return _summed("equal_opportunity", decisions, labels, groups, count)


def equalized_odds(decisions: jax.Array, labels: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """Two classes: the true- and the false-positive rates.  More: every rate of deciding one class given another."""
    return _summed("equalized_odds", decisions, labels, groups, count)


def demographic_parity(decisions: jax.Array, labels: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """The rates of the decisions themselves, whatever the labels."""
    return _summed("demographic_parity", decisions, labels, groups, count)


def calibration(decisions: jax.Array, labels: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """How far probabilities are above the truth, among rows by how probable the class is and by how improbable: the means of
    (p - y) p and (p - y) (1 - p).  With p the probabilities themselves: the temperature is 1."""
    return _summed("calibration", decisions, labels, groups, count)


def mean_prediction(decisions: jax.Array, labels: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """The means of the predicted numbers, whatever the truth."""
    return _summed("mean_prediction", decisions, labels, groups, count)


def mean_error(decisions: jax.Array, labels: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """How far predictions are above the truth on average."""
    return _summed("mean_error", decisions, labels, groups, count)


METRICS: dict[str, Deviation] = {
    "equal_opportunity": equal_opportunity,
    "equalized_odds": equalized_odds,
    "demographic_parity": demographic_parity,
    "calibration": calibration,
    "mean_prediction": mean_prediction,
    "mean_error": mean_error,
}
OF_NUMBERS = ("mean_prediction", "mean_error")
"""The metrics for numbers; the others are for classes."""


@dataclass(frozen=True)
class Weights:
    """x -> one positive weight per cell, with mean one."""

    cells: int

    def __call__(self, outer: jax.Array) -> jax.Array:
        return jnp.asarray(self.cells, outer.dtype) * jax.nn.softmax(outer)


@dataclass(frozen=True)
class OuterLoss:
    """f: the mean validation loss (rows by their weights, where they have any), plus ``strength`` times ``deviation`` of the
    softened decisions, or of the predicted numbers (None: no such term).

    Where rows hold a leaf `REAL`, those without it do not count.  They belong to no group; ``deviation`` must not count them
    either, and `squared_gap` does not, since all its sums are over the rows of a group.
    """

    scores: Any
    groups: int
    strength: float
    temperature: float
    deviation: Deviation | None
    losses: RowLosses = row_losses

    def __call__(self, outer: Tree, inner: Tree, batch: Any) -> jax.Array:
        scores = self.scores(inner, batch["features"])
        losses = self.losses(scores, batch["labels"])
        if "weights" in batch:
            losses = batch["weights"].astype(losses.dtype) * losses
        groups = batch["groups"]
        if REAL in batch:
            real = batch[REAL] > 0
            groups = jnp.where(real, groups, -1)
            loss = mean_of(losses, real)
        else:
            loss = jnp.mean(losses)
        if self.deviation is None:
            return loss
        decisions = soft_decisions(scores, self.temperature) if self.losses is row_losses else scores[:, None]
        term = self.deviation(decisions, batch["labels"], groups, self.groups)
        return loss + jnp.asarray(self.strength, loss.dtype) * term


@dataclass(frozen=True)
class WeightedInner:
    """g for any model, and for rows with weights of their own (a leaf ``weights``, where there is one)."""

    scores: Any
    weights: Weights
    ridge: float
    losses: RowLosses = row_losses

    def __call__(self, outer: Tree, inner: Tree, batch: Any) -> jax.Array:
        losses = self.losses(self.scores(inner, batch["features"]), batch["labels"])
        table = self.weights(outer).astype(losses.dtype)[batch["cells"]]
        weights = batch["weights"].astype(losses.dtype) if "weights" in batch else jnp.ones_like(losses)
        return jnp.mean(weights * table * losses) + penalty(inner, self.ridge)


@dataclass(frozen=True)
class Start:
    """x = 0 (all weights one) and the model's own first parameters."""

    cells: int
    model: Any

    def __call__(self, key: jax.Array) -> tuple[jax.Array, Tree]:
        return jnp.zeros(self.cells, jnp.float32), self.model(key)


@dataclass(frozen=True)
class Formulation:
    """What is fair, and how much it counts.

    ``metric`` names one of `METRICS` or is a function of the same signature; ``temperature`` sharpens the soft decisions;
    ``ridge`` makes the inner problem strongly convex; None: the method's own (`Recipe.settled`).
    "paper" does not read ``metric``, ``strength`` and ``temperature``.

    Attributes:
        kind: "cells" or "paper".
        metric: What is evened out: a name, or a function of soft decisions.
        strength: How much fairness counts against the loss; not negative.
        temperature: How sharp the soft decisions are; positive.
        ridge: Of the inner loss; None: the method's own.

    Raises:
        ValueError: A word is not known, or a number is out of its range.
    """

    kind: str = "cells"
    metric: str | Deviation = "equal_opportunity"
    strength: float = 5.0
    temperature: float = 2.0
    ridge: float | None = 1e-3

    def __post_init__(self) -> None:
        if self.kind not in FORMULATIONS:
            raise ValueError(f"formulation must be one of {', '.join(map(repr, FORMULATIONS))}, not {self.kind!r}.")
        if isinstance(self.metric, str) and self.metric not in METRICS:
            raise ValueError(
                f"metric={self.metric!r} is unknown; choose one of {', '.join(METRICS)}, or pass a function."
            )
        if not isinstance(self.metric, str) and not callable(self.metric):
            raise TypeError(f"metric must be a name or a function, not {type(self.metric).__name__}.")
        not_negative("strength", self.strength)
        if self.ridge is not None:
            not_negative("ridge", self.ridge)
        positive("temperature", self.temperature)

    def cells(self, groups: int, classes: int) -> int:
        """How many weights there are; ``classes`` is 1 for a number."""
        return groups if self.kind == "paper" else groups * max(2, classes)

    def cell_of(self, groups: Any, labels: Any, classes: int) -> np.ndarray:
        """The cell of every row: its group, or group * classes + label, or 2 * group + whether a number is above its mean."""
        codes = np.asarray(groups).astype(np.int32)
        if self.kind == "paper":
            return codes
        known = np.asarray(labels) > 0 if classes == 1 else np.asarray(labels)
        return codes * np.int32(max(2, classes)) + known.astype(np.int32)

    def deviation(self) -> Deviation | None:
        if self.kind == "paper" or self.strength == 0:
            return None
        return METRICS[self.metric] if isinstance(self.metric, str) else self.metric

    @property
    def sharpness(self) -> float:
        """The temperature in use: calibration is about probabilities as they are."""
        return 1.0 if self.metric == "calibration" else float(self.temperature)

    def decisions(self, scores: jax.Array) -> jax.Array:
        """What is compared, ``[n, columns]``: softened decisions, or the predicted numbers."""
        return scores[:, None] if self.metric in OF_NUMBERS else soft_decisions(scores, self.sharpness)

    def skips_padding(self) -> bool:
        """Whether the outer loss can be trusted to leave padding out: not with a metric of the user's."""
        return self.deviation() is None or isinstance(self.metric, str)

    def weights(self, outer: Any) -> np.ndarray:
        """The learned weights w(x), in float64."""
        values = np.asarray(outer, np.float64)
        raised = np.exp(values - values.max())
        return np.asarray(len(values) * raised / raised.sum())


def statistics(form: Formulation, scores: jax.Array, labels: jax.Array, groups: jax.Array, count: int) -> jax.Array:
    """Sums over rows from which the squared gap of *all* clients' rows follows (`spread_of`): for everything compared and every
    group, how many rows count, and the sums of their values and of the squares, ``[compared, 3, groups]``.  Of a metric of the
    user's: its value times the rows, since only its mean over clients can be had."""
    decisions = form.decisions(scores)
    if not isinstance(form.metric, str):
        return jnp.asarray(len(labels), scores.dtype) * form.metric(decisions, labels, groups, count)
    parts = [
        group_totals(jnp.stack([counting, counting * values, counting * values**2]), groups, count)
        for values, counting in compared(form.metric, decisions, labels)
    ]
    return jnp.stack(parts)


def spread_of(form: Formulation, means: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
    """The sum of squared gaps (`squared_gap`) from `statistics` divided by the number of ``rows`` they are of, and its slope by
    these means; any axes may come before theirs.  How many rows count does not depend on any model: by that there is none.
    The slope is written out, like a row's (`Model.derivatives`)."""
    if not isinstance(form.metric, str):
        return means, jnp.ones_like(means)
    counted, sums, squares = (means[..., part, :] for part in range(3))
    number = jnp.asarray(rows, means.dtype) * counted
    known = number >= 2
    share, each = jnp.where(known, counted, 0), jnp.where(known, 1 / jnp.where(known, counted, 1), 0)
    less = jnp.where(known, number, 2) - 1
    total = jnp.sum(share, axis=-1, keepdims=True)
    share = share / jnp.where(total > 0, total, 1)
    rates, pairs = sums * each, share * (1 - share)
    apart, noise = rates - jnp.sum(share * rates, axis=-1, keepdims=True), pairs / less
    several = jnp.sum(known, axis=-1, keepdims=True) >= 2
    factor = jnp.where(several, 2 / jnp.where(several, jnp.sum(pairs, axis=-1, keepdims=True), 1), 0)
    value = jnp.sum(factor * (share * apart**2 - noise * (squares * each - rates**2)), axis=(-2, -1))
    by_rate = 2 * factor * (share * apart + noise * rates)
    return value, jnp.stack([jnp.zeros_like(means[..., 0, :]), by_rate * each, -factor * noise * each], axis=-2)


def fair_problem(
    formulation: Formulation, model: Model, groups: int, *, row_weights: bool = False, kernel: str = "auto"
) -> BilevelProblem:
    """The bilevel problem; batches hold ``features``, ``labels``, ``groups`` and, for training, ``cells``.

    Two-class logistic regression is declared linear and runs on the fused kernels; everything else, and rows with weights
    of their own (``row_weights``: a leaf ``weights``), on the general path.

    Args:
        formulation: What is fair, and how much it counts.
        model: The model that is trained.
        groups: How many groups there are.
        row_weights: Whether rows have weights of their own.
        kernel: "auto", "off" or "require": see `LinearInner`.

    Returns:
        A `BilevelProblem` with a local lower level: weights above, the model below.
    """
    whole_number("groups", groups)
    cells = formulation.cells(groups, model.classes)
    weights = Weights(cells)
    numbers = float(formulation.strength), formulation.sharpness
    outer_loss = OuterLoss(model.scores, groups, *numbers, formulation.deviation(), model.losses)
    start = Start(cells, model.start)
    ridge = float(formulation.ridge or 0)
    if model.kind == "logistic" and model.classes == 2 and not row_weights:
        linear = LinearInner(weights, ridge, cells="cells", kernel=kernel)
        return linear_problem(linear, outer_loss, start)
    return BilevelProblem(WeightedInner(model.scores, weights, ridge, model.losses), outer_loss, start)
