"""FedPath: its rounds against a naive loop, its end against the exact solution on pooled rows, its frontier and its aims."""

from __future__ import annotations

import warnings
from functools import cache

import jax
import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize

import fedbilevel as fb
from fedbilevel.fairness import FairFederatedClassifier
from fedbilevel.fairness.estimator import AimMissed
from fedbilevel.fairness.fedpath import FURTHEST, MEMORY, RADIUS, fedpath, rounds_of
from fedbilevel.fairness.formulation import METRICS, Formulation, spread_of, squared_gap, statistics
from fedbilevel.fairness.methods import Recipe
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.trainer import fit

TEMPERATURE, RIDGE = 2.0, 1e-3


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def rows_of(seed, n, low=0.18, signal=1.1, hint=1.6, columns=6):
    """The second group has few positives, and its features say so: a model finds far fewer of them."""
    rng = np.random.default_rng(seed)
    groups = (rng.random(n) < 0.3).astype(np.int32)
    labels = (rng.random(n) < np.where(groups == 1, low, 0.55)).astype(np.float32)
    features = rng.normal(size=(n, columns))
    features[:, 0] += signal * (2 * labels - 1)
    features[:, 1] += hint * groups
    features[:, -1] = 1
    return {"features": features.astype(np.float32), "labels": labels, "groups": groups}


def with_cells(rows):
    return {**rows, "cells": (2 * rows["groups"] + rows["labels"]).astype(np.int32)}


class Pooled:
    """Everything of equal opportunity on pooled rows, written out in float64."""

    def __init__(self, rows):
        self.z, self.y, self.g = (np.asarray(rows[k], np.float64) for k in ("features", "labels", "groups"))
        self.cell, self.n, self.d = (2 * self.g + self.y).astype(int), len(self.y), self.z.shape[1]

    def table(self, x):
        raised = np.exp(x - x.max())
        return 4 * raised / raised.sum()

    def weights(self, x):
        return self.table(x)[self.cell]

    def inner(self, x, y):
        score = self.z @ y
        return np.mean(self.weights(x) * (np.logaddexp(0, score) - self.y * score)) + RIDGE / 2 * y @ y

    def omega(self, x, y):
        return self.z.T @ (self.weights(x) * (sigmoid(self.z @ y) - self.y)) / self.n + RIDGE * y

    def hessian(self, x, y):
        p = sigmoid(self.z @ y)
        return (self.z * (self.weights(x) * p * (1 - p))[:, None]).T @ self.z / self.n + RIDGE * np.eye(self.d)

    def loss(self, y):
        score = self.z @ y
        return np.mean(np.logaddexp(0, score) - self.y * score)

    def rates(self, y):
        """Of every group: positives, their mean soft decision, its variance over them."""
        soft, told = sigmoid(TEMPERATURE * (self.z @ y)), []
        for group in (0, 1):
            here = soft[(self.g == group) & (self.y == 1)]
            told.append((len(here), here.mean(), here.var() / (len(here) - 1)))
        return told

    def spread(self, y):
        (_, one, noise), (_, two, other) = self.rates(y)
        return (one - two) ** 2 - noise - other

    def right_side(self, y, strength, epsilon=1e-6):
        """grad_y of L + strength D, by differences of D and the formula of L."""
        numeric = [
            (self.spread(y + epsilon * e) - self.spread(y - epsilon * e)) / (2 * epsilon) for e in np.eye(self.d)
        ]
        return self.z.T @ (sigmoid(self.z @ y) - self.y) / self.n + strength * np.array(numeric)

    def nu(self, x, y, u):
        along = (sigmoid(self.z @ y) - self.y) * (self.z @ u) / self.n
        by_cell, table = np.bincount(self.cell, along, 4), self.table(x)
        return -np.array([sum(table[c] * ((c == k) - table[k] / 4) * by_cell[c] for c in range(4)) for k in range(4)])

    def solved(self, x, start):
        y = start
        for _ in range(12):
            y = y - np.linalg.solve(self.hessian(x, y), self.omega(x, y))
        return y

    def exact(self, strength, x=None):
        """x and y(x) of the bilevel problem itself."""

        def value(x):
            y = self.solved(x, np.zeros(self.d))
            u = np.linalg.solve(self.hessian(x, y), self.right_side(y, strength))
            return self.loss(y) + strength * self.spread(y), self.nu(x, y, u)

        x = minimize(value, np.zeros(4) if x is None else x, jac=True, method="BFGS", options={"gtol": 1e-7}).x
        return x, self.solved(x, np.zeros(self.d))

    def measured(self, y):
        yes = self.z @ y > 0
        rates = [yes[(self.g == group) & (self.y == 1)].mean() for group in (0, 1)]
        return np.mean(yes == self.y), abs(rates[0] - rates[1])


def naive(pooled, strengths, products, steps, warm):
    """The rounds of FedPath without clients: dense Hessians, and the inverse of BFGS as a matrix."""
    d, x, y = pooled.d, np.zeros(4), np.zeros(pooled.d)
    pairs, kept, nu, bend, radius = [], (x, y), np.zeros(4), np.eye(4), RADIUS
    path = {}

    def inverse():
        made = np.eye(d) * ((pairs[-1][0] @ pairs[-1][1]) / (pairs[-1][1] @ pairs[-1][1]) if pairs else 1)
        for s, t in pairs:
            left = np.eye(d) - np.outer(s, t) / (s @ t)
            made = left @ made @ left.T + np.outer(s, s) / (s @ t)
        return made

    def solve(hessian, right):
        solution, residual, along = np.zeros(d), right, inverse() @ right
        for _ in range(products):
            along = along / np.linalg.norm(along)
            product = hessian @ along
            length = residual @ along / (along @ product)
            solution, residual = solution + length * along, residual - length * product
            pairs.append((along, product))
            del pairs[:-MEMORY]
            towards = inverse() @ residual
            along = towards - (towards @ product) / (along @ product) * along
        return solution

    def strength_at(t):
        return 0.0 if t < warm - 1 else strengths[min((t - warm + 1) // steps, len(strengths) - 1)]

    def value(point, strength):
        return pooled.loss(point[1]) + strength * pooled.spread(point[1])

    for t in range(rounds_of(strengths, steps, warm)):
        before = pooled.inner(x, y)
        new = x, y + solve(pooled.hessian(x, y), -pooled.omega(x, y))
        last, now = strength_at(t - 1), strength_at(t)
        good = pooled.inner(*new) <= before + 1e-5 and (t < warm or value(new, last) <= value(kept, last) + 1e-5)
        radius = min(1.5 * radius, 1.0) if good else (np.abs(x - kept[0]).max() / 2 if t >= warm else radius)
        x, y = new if good else kept
        path[last] = x, y
        u = solve(pooled.hessian(x, y), pooled.right_side(y, now))
        fresh = pooled.nu(x, y, u)
        step, change = x - kept[0], fresh - nu
        bend = bend * now / last if last else np.eye(4) * np.abs(fresh).max() / RADIUS
        if last == now and step @ step > 0:
            image = bend @ step
            share = 1 if step @ change >= 0.2 * step @ image else 0.8 * step @ image / (step @ image - step @ change)
            mixed = share * change + (1 - share) * image
            bend = bend - np.outer(image, image) / (step @ image) + np.outer(mixed, mixed) / (step @ mixed)
        kept, nu = (x, y), fresh
        if now:
            towards = -np.linalg.solve(bend, fresh)
            x = np.clip(x + towards * min(1, radius / np.abs(towards).max()), -4, 4)
    return path


def simulated(parts, strengths, **options):
    rows = sum(len(part["labels"]) for part in parts)
    model = Model("logistic", parts[0]["features"].shape[1])
    algorithm = fedpath(Formulation(), model, 2, rows, RIDGE, strengths, **options)
    data = fb.ClientData.from_clients([with_cells(part) for part in parts])
    rounds = rounds_of(strengths, *(options[name] for name in ("steps", "warm") if name in options))
    return fb.simulate(algorithm, data, rounds, weights="samples", record_every=None).outer


def test_rounds_are_those_of_a_naive_loop_however_rows_are_dealt():
    whole, strengths = rows_of(0, 400), (0.5, 2.0)
    options = {"products": 4, "steps": 2, "warm": 3}
    expected = naive(Pooled(whole), strengths, **options)
    first = whole["groups"] == 0  # one site has one group only, and rows of it are elsewhere too
    order = np.argsort(np.where(first & (np.arange(400) % 3 == 0), 0, 1), kind="stable")
    dealt = [{name: leaf[part] for name, leaf in whole.items()} for part in np.split(order, [90, 250])]
    for parts in ([whole], dealt):
        path = simulated(parts, strengths, **options)
        for place, (x, y) in enumerate(expected.values()):
            np.testing.assert_allclose(path.outer[place], x, atol=2e-3)
            np.testing.assert_allclose(path.inner[place], y, atol=2e-3)


def test_the_end_is_the_exact_solution_on_pooled_rows():
    """By default the loss is within 1e-3 of its minimum and the gap within .01; with more products and steps x is there."""
    whole = rows_of(1, 900)
    pooled = Pooled(whole)
    strengths = (0.2, 1.0, 5.0)
    parts = [{name: leaf[k::3] for name, leaf in whole.items()} for k in range(3)]
    x, y = pooled.exact(5.0)
    best = pooled.loss(y) + 5 * pooled.spread(y)
    usual, precise = simulated(parts, strengths), simulated(parts, strengths, products=8, steps=12)
    found = np.asarray(usual.inner[-1], np.float64)
    assert pooled.loss(found) + 5 * pooled.spread(found) < best + 1e-3
    assert abs(pooled.measured(found)[1] - pooled.measured(y)[1]) < 0.01
    np.testing.assert_allclose(precise.inner[-1], y, atol=2e-2)
    np.testing.assert_allclose(np.asarray(precise.outer[-1]) - np.mean(precise.outer[-1]), x - x.mean(), atol=5e-2)


@pytest.mark.parametrize("metric", ["equal_opportunity", "equalized_odds", "demographic_parity", "calibration"])
@pytest.mark.parametrize("classes", [2, 3])
def test_the_spread_of_averages_is_that_of_all_rows(metric, classes):
    """Whole rows in one place, or sums of three clients: the same squared gaps."""
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(300,) if classes == 2 else (300, 3)).astype(np.float32)
    labels, groups = rng.integers(0, classes, 300).astype(np.float32), rng.integers(0, 4, 300).astype(np.int32)
    form = Formulation(metric=metric)
    parts = np.split(np.arange(300), [50, 180])
    sums = sum(statistics(form, scores[p], labels[p], groups[p], 4) for p in parts)
    expected = METRICS[metric](form.decisions(scores), labels, groups, 4)
    np.testing.assert_allclose(spread_of(form, sums / 300, 300), expected, atol=1e-5)


@cache
def table():
    """Six thousand rows at four unlike sites; the unweighted model leaves a gap of .4."""
    rows = rows_of(3, 6000, low=0.12, signal=0.6, hint=3.2)
    rng = np.random.default_rng(4)
    site = np.where(rng.random(6000) < 0.5, rows["groups"], rng.integers(1, 4, 6000))
    return rows, site


def fitted(rows=None, **options):
    rows, site = table()[0] if rows is None else rows, table()[1]
    columns = rows["features"][:, :-1].astype(np.float64)
    model = FairFederatedClassifier(random_state=0, history_rows=0, **options)
    return model.fit(columns, rows["labels"], sensitive_features=rows["groups"], clients=site)


def test_a_gap_of_four_tenths_falls_near_the_price_of_the_pooled_frontier():
    """Below .08, for at most 1.3 times the accuracy that the exact solution on pooled rows gives for the same gap."""
    path = fitted().frontier_
    used = path[path["chosen"]].iloc[0]
    assert path["gap"][0] > 0.38
    assert used["gap"] < 0.08
    rows, _ = table()
    centred = rows["features"].astype(np.float64)
    centred[:, :-1] = (centred[:, :-1] - centred[:, :-1].mean(axis=0)) / centred[:, :-1].std(axis=0)
    pooled, x, frontier = Pooled({**rows, "features": centred}), None, []
    for strength in (1e-6, 0.5, 2.0, 5.0, 20.0):
        x, y = pooled.exact(strength, x)
        frontier.append(pooled.measured(y))
    accuracies, gaps = map(np.array, zip(*frontier, strict=True))
    loss = accuracies[0] - np.interp(used["gap"], gaps[::-1], accuracies[::-1])
    assert path["accuracy"][0] - used["accuracy"] <= 1.3 * loss + 1e-3


@pytest.mark.parametrize("strength", [5.0, 1e4])
def test_no_strength_ends_in_a_yes_to_everybody(strength):
    """However much fairness is asked for, a model that is used tells people apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AimMissed)
        model = fitted(strength=strength)
    rows, _ = table()
    said = model.predict(rows["features"][:, :-1].astype(np.float64))
    assert 0.05 < said.mean() < 0.95
    assert model.frontier_["accuracy"].min() > model.frontier_["accuracy"][0] - 0.15
    assert model.score(rows["features"][:, :-1].astype(np.float64), rows["labels"]) > 0.7


def test_aims_are_kept_or_a_warning_says_why():
    path = fitted(gap=0.15).frontier_
    used = path[path["chosen"]].index[0]
    assert path["gap"][used] <= 0.15 < path["gap"][used - 1]
    path = fitted(accuracy_loss=0.01).frontier_
    used = path[path["chosen"]].index[0]
    assert path["accuracy"][used] >= path["accuracy"][0] - 0.01
    assert path["gap"][used] == path["gap"][path["accuracy"] >= path["accuracy"][0] - 0.01].min()
    with pytest.warns(AimMissed, match="For a loss of accuracy of at most 0 no model of the path has a smaller gap"):
        model = fitted(accuracy_loss=0.0)
    assert (model.findings_[-1].code, model.frontier_["chosen"].tolist()[0]) == ("aim-missed", True)


def unlike(positives=0.4):
    """As many rows and columns as `table`.  The features tell yes from no better in the first group and do not tell the groups
    apart, so that no weights can help the second; of which a share of ``positives`` is kept."""
    rng = np.random.default_rng(6)
    rows = rows_of(3, 6000, low=0.5, hint=0.0)
    rows["features"][:, 0] = rng.normal(size=6000) + np.where(rows["groups"] == 1, 0.3, 1.2) * (2 * rows["labels"] - 1)
    rows["labels"] = np.where((rows["groups"] == 1) & (rng.random(6000) > 2 * positives), 0, rows["labels"])
    return rows


@pytest.mark.parametrize(
    ("rows", "gap", "words"),
    [
        (
            unlike(),
            0.02,
            r"was not reached: .* these do not tell enough. They put a row of 0 and one of 1 in order in 5\d% of",
        ),
        (unlike(0.005), 0.05, r"was not reached: .*; a group has \d+ rows to compare, too few to tell its rate"),
        (unlike(), 0.003, r"was not reached: .*; with so many rows even a fair model shows 0.0\d+ on average"),
        (table()[0], 0.02, r"is reached on the training rows, but with so many of them even a fair model shows 0.02"),
    ],
    ids=["features", "few rows", "floor", "floor, reached"],
)
def test_an_aim_that_is_missed_is_answered_with_the_reason(rows, gap, words):
    """Each of the three reasons, on a table made for it."""
    with pytest.warns(AimMissed, match=words):
        fitted(rows, gap=gap)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gap": 0.02, "strength": 1.0}, "strength and gap both say"),
        ({"gap": 0.02, "accuracy_loss": 0.01}, "gap and accuracy_loss both say"),
        ({"gap": 0.02, "method": "fedreg"}, "gap is an aim along the path of fedpath, and fedreg has none"),
        ({"gap": 2.0}, "gap must lie between 0 and 1"),
        ({"gap": 0.1, "threshold": "auto"}, "An aim is measured at a threshold that is known before training"),
        ({"formulation": "paper"}, "formulation='paper' takes two stages"),
        ({"validation": 0.2}, "fedpath reads all rows on both levels"),
        ({"model": "mlp"}, "fedpath follows the minimum of a convex loss.*name fedbioacc, fedbio or fedreg"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        fitted(**options)


def mine(decisions, labels, groups, count):
    return squared_gap(1 - decisions[:, 0], (labels == 0).astype(decisions.dtype), groups, count)


@pytest.mark.parametrize("metric", ["equalized_odds", "demographic_parity", "calibration", mine])
def test_every_metric_comes_down(metric):
    path = fitted(metric=metric, strength=20.0).frontier_
    used = path[path["chosen"]].iloc[0]
    assert used["gap"] < 0.75 * path["gap"][0]
    assert used["usable"]


def intersections():
    """Four groups of two columns, at two sites; a value that depends on both."""
    rng = np.random.default_rng(8)
    sex, region = rng.integers(0, 2, 1500), rng.integers(0, 2, 1500)
    columns = rng.normal(size=(1500, 3))
    columns[:, 0] += 1.2 * sex
    columns[:, 1] += 0.5 * region
    value = columns[:, 0] + columns[:, 2] - 0.6 * sex + 0.4 * rng.normal(size=1500)
    given = {"sensitive_features": pd.DataFrame({"sex": sex, "region": region}), "clients": np.arange(1500) % 2}
    return columns, value, given


def test_three_classes_and_intersections_come_down():
    columns, value, given = intersections()
    model = FairFederatedClassifier(strength=20.0, random_state=0, history_rows=0)
    path = model.fit(columns, np.digitize(value, [-0.8, 0.8]), **given).frontier_
    used = path[path["chosen"]].iloc[0]
    assert len(model.groups_) == 4
    assert used["gap"] < 0.7 * path["gap"][0]
    assert used["usable"]


def test_a_number_and_intersections_end_at_the_exact_solution():
    """Least squares on pooled rows, the weights of eight cells by L-BFGS-B: with more steps, as for classes, the objective is
    within 1e-3 of its minimum.  (At a strength where the weights stay inside their bounds: they bend a line only so far.)"""
    columns, value, given = intersections()
    z = np.c_[(columns - columns.mean(axis=0)) / columns.std(axis=0), np.ones(len(value))]
    t, group = (value - value.mean()) / value.std(), given["sensitive_features"].to_numpy() @ [2, 1]
    cell = (2 * group + (t > 0)).astype(int)
    share = np.bincount(group) / len(t)
    leaves = {"features": z, "labels": t, "groups": group, "cells": cell}
    kinds = (np.float32, np.float32, np.int32, np.int32)
    rows = {name: leaf.astype(kind) for (name, leaf), kind in zip(leaves.items(), kinds, strict=True)}
    form, model = Formulation(metric="mean_prediction"), Model("linear", 4, 1, loss="squared")
    algorithm = fedpath(form, model, 4, len(t), 1 / len(t), (0.05, 0.2), steps=12)
    data = fb.ClientData.from_clients([{name: leaf[k::2] for name, leaf in rows.items()} for k in range(2)])
    path = fb.simulate(algorithm, data, rounds_of((0.05, 0.2), 12), weights="samples", record_every=None).outer

    def solved(x):
        weights = (8 * np.exp(x) / np.exp(x).sum())[cell] / len(t)
        return z @ np.linalg.solve((z * weights[:, None]).T @ z + np.eye(z.shape[1]) / len(t), z.T @ (weights * t))

    def objective(said):
        parts = [said[group == g] for g in range(4)]
        means, noise = (
            np.array(each) for each in zip(*((p.mean(), p.var() / (len(p) - 1)) for p in parts), strict=True)
        )
        pairs = np.sum(share * (1 - share))
        between = np.sum(share * (means - share @ means) ** 2) - np.sum(share * (1 - share) * noise)
        return np.mean((said - t) ** 2) / 2 + 0.2 * 2 * between / pairs

    best = minimize(lambda x: objective(solved(x)), np.zeros(8), method="L-BFGS-B", bounds=[(-FURTHEST, FURTHEST)] * 8)
    first, last = (z @ np.ravel(np.asarray(path.inner[place], np.float64)) for place in (0, 2))
    assert objective(last) < best.fun + 1e-3 < objective(first)


def test_averages_of_secure_sums_lead_to_the_same_place():
    parts = [rows_of(seed, 300) for seed in (5, 6)]
    data = fb.ClientData.from_clients(parts)
    recipe = Recipe(path=(0.5, 2.0), formulation=Formulation(strength=2.0), train_on="train")
    plain, summed = (fit(FairProgram(recipe, Model("logistic", 6), 2, secure=on), data) for on in (False, True))
    np.testing.assert_allclose(plain.params, summed.params, atol=1e-3)
    assert plain.history.empty
    assert jax.tree.leaves(plain.answers[-1].inner)[0].shape == (3, 6)
