"""The exact bilevel solution on pooled rows: its inner problem, its gradient, and that it finds the fair model."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.pooled import Bilevel, PooledRows, Solver, front

RIDGE = 1e-2


@pytest.fixture(scope="module")
def rows():
    """A group whose positives look less like positives: the gap of plain logistic regression is wide."""
    rng = np.random.default_rng(0)
    groups = rng.integers(2, size=2000)
    labels = (rng.random(2000) < 0.4).astype(float)
    first = rng.normal(size=2000) + 2 * labels * (groups == 0) + 0.8 * labels * (groups == 1)
    second = rng.normal(size=2000) + groups
    features = np.stack([first, second, np.ones(2000)], axis=1).astype(np.float32)
    return PooledRows(features, labels, groups)


@pytest.mark.parametrize("seed", [None, 1])
def test_the_inner_problem_is_scikit_learns(rows, seed):
    weights = np.ones(2000) if seed is None else np.random.default_rng(seed).uniform(0.1, 4, 2000)
    solver = Solver(rows.features, RIDGE)
    reference = LogisticRegression(C=1 / (RIDGE * 2000), fit_intercept=False, tol=1e-10, max_iter=2000)
    reference.fit(rows.features.astype(float), rows.labels, sample_weight=weights)
    found = solver.solve(rows.labels, weights)
    np.testing.assert_allclose(found, reference.coef_[0], atol=1e-4)  # `DECREMENT` is half a square by the Hessian
    np.testing.assert_allclose(solver.solve(rows.labels, weights), found, atol=1e-6)


def test_the_gradient_is_that_of_finite_differences(rows):
    form = Formulation(strength=3.0, ridge=RIDGE)
    problem = Bilevel(rows, 2, form, Solver(rows.features, RIDGE))
    x = np.array([0.3, -0.4, 0.1, 0.2])
    _, gradient = problem(x)
    ends = [(problem(x + step)[0], problem(x - step)[0]) for step in 0.05 * np.eye(4)]
    wanted = [(above - below) / 0.1 for above, below in ends]
    np.testing.assert_allclose(gradient, wanted, atol=3e-4)  # of the third order in the step


def test_the_front_trades_accuracy_for_the_gap(rows):
    models = front(rows, 2, Formulation(ridge=RIDGE), [0, 1, 30])
    counts = [Counts.of(rows.labels, rows.features @ params > 0, rows.groups, 2) for params in models.values()]
    gaps, accuracies = (
        [float(each.gap("equal_opportunity")) for each in counts],
        [float(each.overall("accuracy")) for each in counts],
    )
    assert gaps[0] > 0.3
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.08  # what is evened out is the soft gap
    assert accuracies[0] == max(accuracies)
    assert accuracies[2] > accuracies[0] - 0.08
