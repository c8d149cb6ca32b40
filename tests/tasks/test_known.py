"""The quadratic task: its score is zero at the start and one at the known answer, for either lower level."""

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks import known_quadratic


@pytest.mark.parametrize("lower_level", ["local", "global"])
def test_progress_is_measured_against_the_known_answer(lower_level):
    task = known_quadratic(3, lower_level=lower_level, clients=3, outer_size=4, inner_size=5)
    outer, inner = task.problem.init(jax.random.key(0))
    assert task.evaluate(outer, inner)["progress"] == 0
    best = task.facts["clients"].minimiser()
    assert task.evaluate(best, inner)["progress"] == pytest.approx(1)
    assert task.evaluate(0.5 * best, inner)["progress"] == pytest.approx(0.75)  # quadratic: half way is three quarters
    assert known_quadratic(4, lower_level=lower_level, clients=3, outer_size=4, inner_size=5).problem == task.problem


def test_a_descent_arrives():
    task = known_quadratic(5, lower_level="global", clients=3, outer_size=4, inner_size=5)
    algo = fb.fedbio_global(task.problem, 0.5, 0.3, 0.5, local_steps=1)
    result = fb.simulate(algo, task.data, rounds=300, record_every=None)
    np.testing.assert_allclose(task.evaluate(result.outer, result.inner)["progress"], 1, atol=1e-3)
