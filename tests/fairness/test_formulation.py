"""The formulations against naive NumPy, and their derivatives against finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.engines.diagnose import true_hypergradient
from fedbilevel.fairness.formulation import (
    METRICS,
    OF_NUMBERS,
    REAL,
    Formulation,
    OuterLoss,
    WeightedInner,
    Weights,
    demographic_parity,
    equal_opportunity,
    equalized_odds,
    fair_problem,
    squared_gap,
)
from fedbilevel.fairness.models import Model, soft_decisions

ROUNDING = 1e-12  # float64 sums in another order


def rows(seed=0, n=60, d=4, groups=3, classes=2, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return {
        "features": np.concatenate([rng.normal(size=(n, d - 1)), np.ones((n, 1))], axis=1).astype(dtype),
        "labels": rng.integers(classes, size=n).astype(dtype),
        "groups": rng.integers(groups, size=n).astype(np.int32),
    }


def naive_gap(decided, groups, count):
    """Pairs of groups, one after the other; ``decided`` and ``groups``: the rows that count."""
    parts = [decided[groups == group] for group in range(count)]
    parts = [part for part in parts if len(part) >= 2]
    top = bottom = 0.0
    for one, first in enumerate(parts):
        for other, second in enumerate(parts):
            if one != other:
                noise = first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second)
                weight = len(first) * len(second)
                top += weight * ((first.mean() - second.mean()) ** 2 - noise)
                bottom += weight
    return top / bottom if bottom else 0.0


def naive_deviation(metric, decisions, labels, groups, count):
    """Group by group and label by label, with loops."""
    columns = decisions.shape[1]
    everyone = np.ones(len(labels), bool)
    if metric == "calibration":
        truth = labels[:, None] if columns == 1 else labels[:, None] == np.arange(columns)
        both = np.concatenate([(decisions - truth) * decisions, (decisions - truth) * (1 - decisions)], axis=1)
        return sum(naive_gap(column, groups, count) for column in both.T)
    if metric == "demographic_parity":
        questions = [(everyone, column) for column in range(columns)]
    elif metric == "equal_opportunity":
        pairs = [(1, 0)] if columns == 1 else [(c, c) for c in range(columns)]
        questions = [(labels == label, column) for label, column in pairs]
    else:
        questions = [(labels == label, column) for label in range(max(2, columns)) for column in range(columns)]
    return sum(naive_gap(decisions[among, column], groups[among], count) for among, column in questions)


def measured(metric, *rows):
    """A metric of decisions, labels and groups, as one program."""
    return jax.jit(metric, static_argnums=3)(*rows)


measured_and_slope = jax.jit(jax.value_and_grad(equal_opportunity), static_argnums=3)
OF_CLASSES = [metric for metric in METRICS if metric not in OF_NUMBERS]


@pytest.mark.parametrize("metric", OF_NUMBERS)
def test_deviation_of_numbers_is_that_of_a_rate_of_all_rows(metric):
    data, said = rows(1), np.random.default_rng(2).normal(size=(60, 1))
    values = said - data["labels"][:, None] if metric == "mean_error" else said
    found = measured(METRICS[metric], said, data["labels"], data["groups"], 3)
    wanted = naive_deviation("demographic_parity", values, data["labels"], data["groups"], 3)
    assert found == pytest.approx(wanted, abs=ROUNDING)


@pytest.mark.parametrize("metric", OF_CLASSES)
@pytest.mark.parametrize("classes", [2, 3])
def test_deviation_equals_loops(metric, classes):
    data = rows(1, classes=classes)
    rng = np.random.default_rng(2)
    scores = rng.normal(size=60 if classes == 2 else (60, classes))
    decisions = np.asarray(soft_decisions(jnp.asarray(scores), 4.0))
    found = measured(METRICS[metric], decisions, data["labels"], data["groups"], 3)
    assert found == pytest.approx(naive_deviation(metric, decisions, data["labels"], data["groups"], 3), abs=ROUNDING)


def test_two_groups_give_the_squared_gap_without_its_noise():
    decisions = jnp.array([0.9, 0.7, 0.2, 0.4, 0.6])
    found = measured(squared_gap, decisions, jnp.ones(5), jnp.array([0, 0, 1, 1, 1]), 2)
    assert found == pytest.approx((0.8 - 0.4) ** 2 - 0.02 / 2 - 0.04 / 3, abs=ROUNDING)


def test_mean_over_small_batches_is_the_value_of_the_whole_population():
    """Every way to draw two rows of either group, with replacement, as batches are drawn: unbiased whatever the batch size."""
    first, second = np.array([0.9, 0.1, 0.6]), np.array([0.3, 0.2])
    pairs_of = [[(a, b) for a in part for b in part] for part in (first, second)]
    drawn = jnp.asarray([[*one, *other] for one in pairs_of[0] for other in pairs_of[1]])
    groups, count = jnp.array([0, 0, 1, 1]), jnp.ones(4)
    found = jax.jit(jax.vmap(lambda row: squared_gap(row, count, groups, 2)))(drawn)
    assert found.min() < 0  # an unbiased estimate of something near zero must be
    assert found.mean() == pytest.approx((first.mean() - second.mean()) ** 2, abs=ROUNDING)


def test_a_small_group_counts_by_its_share():
    """Three rows far off among 400: a mean over groups would be pulled to them, a mean over pairs of rows is not."""
    decisions = jnp.concatenate([jnp.full(200, 0.6), jnp.full(200, 0.6), jnp.full(3, 0.0)])
    groups = jnp.repeat(jnp.array([0, 1, 2]), jnp.array([200, 200, 3]), total_repeat_length=403)
    found = measured(squared_gap, decisions, jnp.ones(403), groups, 3)
    far = 2 * 2 * 200 * 3
    assert found == pytest.approx(0.36 * far / (far + 2 * 200 * 200), abs=ROUNDING)
    assert found < 0.03 * 0.36 * 2


def test_groups_with_fewer_than_two_positives_are_left_out_and_the_gradient_stays_finite():
    decisions = jnp.array([[0.9], [0.9], [0.1], [0.1], [0.7], [0.3], [0.3]])
    labels, groups = jnp.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]), jnp.array([0, 0, 1, 1, 2, 3, 3])
    value, slope = measured_and_slope(decisions, labels, groups, 4)
    assert value == pytest.approx(0.8**2)
    np.testing.assert_allclose(np.asarray(slope)[:, 0], [0.8, 0.8, -0.8, -0.8, 0, 0, 0], atol=ROUNDING)


@pytest.mark.parametrize("labels", [np.zeros(3), np.array([1.0, 1.0, 0.0])])
def test_nothing_to_compare_gives_zero_not_nan(labels):
    decisions, groups = jnp.full((3, 1), 0.5), jnp.array([0, 0, 1])
    value, slope = measured_and_slope(decisions, jnp.asarray(labels), groups, 2)
    assert value == 0
    np.testing.assert_array_equal(np.asarray(slope), 0)


def test_equal_treatment_costs_nothing():
    decisions, groups = jnp.tile(jnp.array([[0.8], [0.8], [0.2], [0.2]]), (2, 1)), jnp.array([0, 1, 0, 1] * 2)
    labels = jnp.array([1.0, 1.0, 0.0, 0.0] * 2)
    for metric in (equal_opportunity, equalized_odds):
        assert measured(metric, decisions, labels, groups, 2) == pytest.approx(0, abs=ROUNDING)
    # Everybody at one table: the rates agree as far as four rows a group can tell, which is less than nothing.
    assert measured(demographic_parity, decisions, labels, groups, 2) == pytest.approx(-2 * 0.12 / 4, abs=ROUNDING)


def test_weights_are_positive_with_mean_one():
    outer = np.array([0.3, -2.0, 1.0, 0.0])
    found = np.asarray(Weights(4)(jnp.asarray(outer)))
    np.testing.assert_allclose(found, Formulation().weights(outer), rtol=ROUNDING)
    assert found.min() > 0
    assert found.mean() == pytest.approx(1)


def test_cells_number_groups_and_labels():
    groups, labels = np.array([0, 1, 2]), np.array([1.0, 0.0, 1.0])
    assert Formulation("cells").cell_of(groups, labels, 2).tolist() == [1, 2, 5]
    assert Formulation("paper").cell_of(groups, labels, 2).tolist() == [0, 1, 2]
    assert (Formulation("cells").cells(3, 2), Formulation("paper").cells(3, 2)) == (6, 3)


def test_outer_loss_is_loss_plus_strength_times_deviation():
    data, model = rows(3), Model("logistic", 4)
    inner = np.random.default_rng(4).normal(size=4)
    margin = data["features"] @ inner
    loss = np.mean(np.log1p(np.exp(margin)) - data["labels"] * margin)
    soft = 1 / (1 + np.exp(-4 * margin))
    expected = loss + 2.5 * naive_deviation("equal_opportunity", soft[:, None], data["labels"], data["groups"], 3)
    found = OuterLoss(model.scores, 3, 2.5, 4.0, equal_opportunity)(None, jnp.asarray(inner), data)
    assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("kind", ["cells", "paper"])
def test_linear_declaration_and_general_loss_agree(kind):
    form = Formulation(kind, ridge=0.1)
    data = rows(5, groups=2)
    data["cells"] = form.cell_of(data["groups"], data["labels"], 2)
    model = Model("logistic", 4)
    linear, general = fair_problem(form, model, 2), fair_problem(form, model, 2, row_weights=True)
    assert linear.linear is not None
    assert general.linear is None
    outer = jnp.asarray(np.random.default_rng(6).normal(size=form.cells(2, 2)))
    inner = jnp.asarray(np.random.default_rng(7).normal(size=4))
    assert linear.inner_loss(outer, inner, data) == pytest.approx(
        float(general.inner_loss(outer, inner, data)), rel=1e-10
    )
    table, margin = form.weights(outer)[data["cells"]], data["features"] @ np.asarray(inner)
    by_hand = np.mean(table * (np.log1p(np.exp(margin)) - data["labels"] * margin)) + 0.05 * np.sum(np.square(inner))
    assert linear.inner_loss(outer, inner, data) == pytest.approx(by_hand, rel=1e-10)


def test_row_weights_multiply_cell_weights():
    inner = WeightedInner(Model("logistic", 4).scores, Weights(2), 0.0)
    data = {**rows(8, groups=2), "cells": rows(8, groups=2)["groups"]}
    weighted = {**data, "weights": np.where(np.arange(60) < 30, 2.0, 0.0)}
    half = {name: leaf[:30] for name, leaf in data.items()}
    params = jnp.asarray(np.random.default_rng(9).normal(size=4))
    assert inner(jnp.zeros(2), params, weighted) == pytest.approx(float(inner(jnp.zeros(2), params, half)), rel=1e-12)


def test_exact_hypergradient_matches_finite_differences_through_the_solved_inner_problem():
    form = Formulation(strength=3.0, ridge=0.2)
    train, val = rows(10, groups=2), rows(11, groups=2)
    train["cells"] = form.cell_of(train["groups"], train["labels"], 2)
    problem = fair_problem(form, Model("logistic", 4), 2)

    def solved(outer):
        inner = np.zeros(4)
        table = form.weights(outer)[train["cells"]]
        for _ in range(12):  # Newton's method in plain NumPy
            chance = 1 / (1 + np.exp(-train["features"] @ inner))
            slope = train["features"].T @ (table * (chance - train["labels"])) / 60 + 0.2 * inner
            curve = (train["features"].T * (table * chance * (1 - chance))) @ train["features"] / 60 + 0.2 * np.eye(4)
            inner = inner - np.linalg.solve(curve, slope)
        return jnp.asarray(inner)

    outer = jnp.asarray(np.random.default_rng(12).normal(size=4))
    true = jax.jit(lambda x, y: true_hypergradient(problem, x, y, lambda function: function(train, val), "exact"))
    found, loss = true(outer, jnp.zeros(4))[0], jax.jit(problem.outer_loss)
    tiny = 1e-5
    for axis in range(4):
        shift = jnp.zeros(4).at[axis].set(tiny)
        ends = [loss(o, solved(o), val) for o in (outer + shift, outer - shift)]
        assert found[axis] == pytest.approx(float(ends[0] - ends[1]) / (2 * tiny), abs=1e-6)


@pytest.mark.parametrize("metric", OF_CLASSES)
def test_marked_padding_changes_nothing(metric):
    data = rows(15, classes=3)
    longer = {name: np.concatenate([leaf, np.ones((9, *leaf.shape[1:]), leaf.dtype)]) for name, leaf in data.items()}
    longer[REAL] = (np.arange(69) < 60).astype(np.float64)
    form, model = Formulation(metric=metric, strength=3.0), Model("logistic", 4, 3)
    inner = jnp.asarray(np.random.default_rng(16).normal(size=(4, 3)))
    loss = fair_problem(form, model, 3).outer_loss
    values = [
        jax.jit(jax.value_and_grad(lambda y, batch=batch: loss(None, y, batch)))(inner) for batch in (data, longer)
    ]
    np.testing.assert_allclose(values[0][0], values[1][0], atol=ROUNDING)
    np.testing.assert_allclose(values[0][1], values[1][1], atol=ROUNDING)


def test_equal_records_share_one_compiled_program():
    first, second = (fair_problem(Formulation(strength=2.0), Model("logistic", 4), 2) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != fair_problem(Formulation(strength=3.0), Model("logistic", 4), 2)


def test_a_function_of_ones_own_serves_as_metric():
    def tilt(decisions, labels, groups, count):
        return jnp.mean(decisions)

    problem = fair_problem(Formulation(metric=tilt, strength=2.0), Model("logistic", 4), 2)
    data = rows(14, groups=2)
    without = fair_problem(Formulation(strength=0), Model("logistic", 4), 2).outer_loss(None, jnp.zeros(4), data)
    assert problem.outer_loss(None, jnp.zeros(4), data) == pytest.approx(float(without) + 2.0 * 0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "cell"}, "formulation must be one of"),
        ({"metric": "fairness"}, "metric='fairness' is unknown"),
        ({"metric": 3}, "name or a function"),
        ({"strength": -1.0}, "strength must be"),
        ({"strength": True}, "strength must be a number"),
        ({"ridge": float("nan")}, "ridge must be"),
        ({"temperature": 0.0}, "temperature must be a positive"),
    ],
)
def test_bad_options_are_one_sentence(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Formulation(**options)
