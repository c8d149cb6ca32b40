"""L-BFGS, conjugate gradients and signs at the server, against a naive loop and against closed forms."""

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.quasi_newton import minimised, quasi_newton
from fedbilevel.tasks.penalties import LARGEST, SMALLEST, Ridge, penalty_tuning, random_penalties
from fedbilevel.tasks.task import ClientRows
from tests.references import quasi_newton as naive
from tests.references.compare import close

SOLVED = 1e-7
"""Quasi-Newton steps until rounding is near."""


@pytest.fixture(scope="module")
def ridge():
    """Penalties over three clients with one model, in double precision."""
    rng = np.random.default_rng(0)
    truth = np.array([2.0, -1.0, 0.5, 0, 0, 0])

    def draw(rows):
        features = rng.normal(size=(3, rows, 6)) * [1, 2, 1, 3, 1, 0.5]
        return ClientRows(features, features @ truth + rng.normal(size=(3, rows)))

    rows = [draw(12), draw(20), draw(5)]
    return penalty_tuning(*rows, lower_level="global"), rows


@pytest.mark.parametrize("turns", [(4, 2, 8, 1), (2, 1, 2, 2)], ids=["usual", "few"])
def test_iterates(ridge, turns):
    task, (train, val, _) = ridge
    names = ("inner_turns", "adjoint_turns", "memory", "waits")
    algorithm = quasi_newton(task.problem, **dict(zip(names, turns, strict=True)))
    passed, inner = naive.penalties(train, val, np.full(6, -4.0), 9, *turns, SMALLEST, LARGEST)
    result = fb.simulate(algorithm, task.data, 9, record_every=None)
    close(np.asarray(result.outer), passed[-1])
    close(np.asarray(result.inner[0]), inner, SOLVED)
    assert len({tuple(x) for x in passed}) > 5, "x is to move"


def test_penalties_come_close_to_the_best_there_are():
    """Against gradient descent on the closed form: of what tuning can gain, less than a twentieth is left."""
    task = random_penalties(0, lower_level="global", clients=4, columns=20, informative=5)
    known = Ridge.of(task)
    x = start = np.full(20, -4.0)
    for _ in range(3000):
        x = np.clip(x - 20 * known.gradient(x), SMALLEST, LARGEST)
    found = fb.simulate(quasi_newton(task.problem), task.data, 30, record_every=None).outer
    gained, possible = (known.objective(start) - known.objective(np.asarray(at, float)) for at in (found, x))
    assert gained > 0.95 * possible


def test_the_inner_problem_alone(ridge):
    task, _ = ridge
    outer = np.linspace(-3, 0, 6)
    result = fb.simulate(minimised(task.problem, outer), task.data, 25, record_every=None)
    close(np.asarray(result.outer), Ridge.of(task).inner_solution(outer)[0], SOLVED)


def test_minibatches_are_refused(ridge):
    with pytest.raises(ValueError, match="reads whole sets"):
        quasi_newton(ridge[0].problem, batch_size=4)


def test_a_loss_that_is_no_number_is_stepped_back_from():
    """From zero, the first whole step along the gradient leaves the domain of the logarithm."""

    def loss(x, y, batch):
        return jax.numpy.sum(40 * y - jax.numpy.log1p(y * 30)) + 0 * jax.numpy.sum(x)

    problem = fb.BilevelProblem(loss, loss, lambda key: (np.zeros(1), np.zeros(1)), lower_level="global")
    rows = {"a": np.zeros((2, 3))}
    result = fb.simulate(minimised(problem, np.zeros(1)), fb.ClientData(train=rows, val=rows), 30, record_every=None)
    close(np.asarray(result.outer), np.array([1 / 40 - 1 / 30]), SOLVED)
