"""Penalty tuning: ridge against its closed forms and finite differences, and penalties that find the useless features."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.tasks import ClientRows, Ridge, penalty_tuning, random_penalties
from fedbilevel.tasks.penalties import LARGEST, SMALLEST
from tests.references.compare import refusals
from tests.tasks.common import train

levels = pytest.mark.parametrize("lower_level", ["local", "global"])


def draws(seed, clients=3, columns=4, rows=7):
    generator = np.random.default_rng(seed)
    return [
        ClientRows(generator.standard_normal((clients, rows, columns)), generator.standard_normal((clients, rows)))
        for _ in range(3)
    ]


@given(st.integers(0, 10**6), st.sampled_from(["local", "global"]))
@hypothesis_settings(max_examples=25)
def test_the_closed_gradient_is_the_derivative_of_the_closed_objective(seed, lower_level):
    rows, val, _ = draws(seed)
    ridge, step = Ridge(rows, val, lower_level), 1e-5
    outer = np.random.default_rng(seed).uniform(-3, 1, 4)
    slopes = [(ridge.objective(outer + step * e) - ridge.objective(outer - step * e)) / (2 * step) for e in np.eye(4)]
    np.testing.assert_allclose(ridge.gradient(outer), slopes, rtol=1e-5, atol=1e-8)


@levels
def test_the_closed_solution_is_the_normal_equations(lower_level):
    rows, val, _ = draws(1)
    outer = np.array([-1.0, 0.5, -3.0, 0.0])
    solution = Ridge(rows, val, lower_level).inner_solution(outer)
    features, labels = np.asarray(rows.features), np.asarray(rows.labels)
    if lower_level == "global":
        features, labels = features.reshape(1, -1, 4), labels.reshape(1, -1)
    for client, fitted in enumerate(solution):
        a, t = (leaf[client if lower_level == "local" else 0] for leaf in (features, labels))
        np.testing.assert_allclose(fitted, np.linalg.solve(a.T @ a / len(t) + np.diag(np.exp(outer)), a.T @ t / len(t)))


@levels
def test_the_problem_has_the_closed_hypergradient_and_objective(lower_level):
    """The engine solves the problem itself, by Newton's method on automatic derivatives."""
    rows, val, test = draws(2)
    task = penalty_tuning(rows, val, test, lower_level=lower_level)
    step = 1 / task.curvature
    if lower_level == "local":
        algo = fb.fedbio(task.problem, fb.exact(), step, 1.0, local_steps=1)
    else:
        algo = fb.fedbio_global(task.problem, step, 1.0, step, local_steps=1)
    result = fb.simulate(algo, task.data, rounds=4, diagnostics="exact", record_every=4)
    ridge = Ridge.of(task)
    for row, outer in ((0, np.full(4, -4.0)), (1, np.asarray(result.outer))):
        recorded = result.history.iloc[row]
        np.testing.assert_allclose(
            recorded["hypergradient_squared_norm"], (ridge.gradient(outer) ** 2).sum(), rtol=1e-8
        )
        np.testing.assert_allclose(recorded["true_objective"], ridge.objective(outer), rtol=1e-10)
    solved = task.evaluate(result.outer, ridge.inner_solution(np.asarray(result.outer)))["explained"]
    margin = np.einsum("mnd,md->mn", test.features, ridge.inner_solution(np.asarray(result.outer)))
    expected = 1 - ((margin - test.labels) ** 2).sum() / ((test.labels - test.labels.mean()) ** 2).sum()
    assert solved == pytest.approx(expected)


@pytest.mark.parametrize(("link", "lower_level"), [("squared", "local"), ("logistic", "global")])
def test_useless_features_are_penalised_and_prediction_gains(link, lower_level):
    task = random_penalties(1, link=link, lower_level=lower_level)
    step = 0.5 / task.curvature
    result = train(task, step, task.outer_step / 2, 200, terms=10)
    outer = np.asarray(result.outer)
    informative = task.facts["informative"]
    assert outer.min() >= SMALLEST
    assert outer.max() <= LARGEST
    assert outer[~informative].mean() > outer[informative].mean() + 1
    if link == "squared":
        ridge = Ridge.of(task)
        start = np.full(60, -4.0)
        plain, tuned = (task.evaluate(x, ridge.inner_solution(x))["explained"] for x in (start, outer.astype(float)))
        assert ridge.objective(outer.astype(float)) < 0.5 * ridge.objective(start)
        assert tuned > plain + 0.2
    else:
        assert task.evaluate(outer, result.inner)["accuracy"] > 0.7


TRAIN, VAL, TEST = draws(0)
SINGLE = TEST._replace(features=TEST.features.astype(np.float32))
test_bad_input_gets_a_sentence = refusals(
    None,
    (lambda: penalty_tuning(TRAIN, VAL, TEST, link="probit"), "link must be 'squared' or 'logistic', not 'probit'"),
    (lambda: penalty_tuning(TRAIN, draws(0, columns=3)[1], TEST), r"val must have features \[clients, rows, 4\]"),
    (lambda: penalty_tuning(TRAIN, VAL, SINGLE), "test must hold floating-point numbers of one type", TypeError),
    (lambda: penalty_tuning(TRAIN, VAL, TEST, link="logistic"), "train must have labels 0 and 1"),
    (lambda: random_penalties(columns=4, informative=9), "informative=9 cannot exceed columns=4"),
    (lambda: random_penalties(noise=-1), "noise=-1 and heterogeneity=0.3 must be finite"),
    (lambda: Ridge(TRAIN, VAL, "none"), "lower_level must be"),
)
