"""FedBiOAcc equals the naive loop, with the mean or the local previous point."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from tests.references import phi
from tests.references.compare import close, cohorts
from tests.references.fedbioacc import fedbioacc
from tests.references.logistic import logistic
from tests.references.quadratic import quadratic
from tests.references.rows import drawn, whole

ROUNDS, STEPS = 4, 3
WEIGHTS = np.array([1.0, 3.0, 0.5])
CONSTANTS = {"inner_step": 1.0, "outer_step": 0.7, "delta": 0.8, "u": 2.0, "sigma": 1.3, "c_inner": 0.9, "c_outer": 1.4}

both = pytest.mark.parametrize("previous", ["paper", "local"])


def check(reference, estimator, oracle, rows, previous, *, batch_size=None, project=(None, None), **options):
    data = reference.data()
    rounds, constants = options.pop("rounds", ROUNDS), options.pop("constants", CONSTANTS)
    algorithm = fb.fedbioacc(
        reference.problem(project[0]),
        estimator,
        **constants,
        local_steps=STEPS,
        batch_size=batch_size,
        previous=previous,
    )
    replied = cohorts(algorithm, data, 4, rounds, **options) if "dropout" in options else None
    found = fb.simulate(algorithm, data, rounds, seed=4, record_every=None, **options)
    wanted = fedbioacc(
        reference,
        oracle,
        reference.start,
        rows,
        rounds=rounds,
        local_steps=STEPS,
        constants=constants,
        previous=previous,
        weights=options.get("weights", np.ones(data.clients)),
        cohorts=replied,
        project=project[1] or (lambda x: x),
    )
    close((found.outer, found.inner), wanted)
    return found, replied


@both
def test_deterministic_quadratic(previous):
    reference = quadratic()
    check(reference, fb.exact(), phi.exact(reference), whole, previous)
    check(reference, fb.exact(), phi.exact(reference), whole, previous, weights=WEIGHTS)
    # 1 - c alpha^2 is negative here: the loop clips it to zero
    forgetful = {**CONSTANTS, "c_inner": 9.0, "c_outer": 8.0}
    check(reference, fb.exact(), phi.exact(reference), whole, previous, constants=forgetful)


@both
def test_minibatches_quadratic_in_a_box(previous):
    reference = quadratic()
    project = (lambda x: jnp.clip(x, -0.25, 0.25), lambda x: np.clip(x, -0.25, 0.25))
    rows = drawn(reference.data(), 4, ROUNDS, STEPS, 3, 3, 1)
    oracle = phi.neumann(reference, 2, 0.6)
    found, _ = check(
        reference, fb.neumann(2, 0.6), oracle, rows, previous, batch_size=3, project=project, weights=WEIGHTS
    )
    assert np.isclose(np.abs(found.outer), 0.25).any(), "the box must bind"


@both
def test_logistic_minibatches(previous):
    reference = logistic()
    rows = drawn(reference.data(), 4, ROUNDS, STEPS, 8, 4, 1)
    check(reference, fb.neumann(3, 0.5), phi.neumann(reference, 3, 0.5), rows, previous, batch_size=8, weights=WEIGHTS)


@both
def test_partial_participation_and_dropout(previous):
    """Late clients start their own inner momentum; those that missed a round compare with the point they receive."""
    reference = quadratic(sizes=((6, 4),) * 5)
    rows = drawn(reference.data(), 4, 8, STEPS, 3, 3, 1)
    options = {"participation": 3, "dropout": 0.3, "weights": np.array([1.0, 2.0, 0.5, 1.0, 3.0])}
    oracle = phi.neumann(reference, 2, 0.6)
    _, replied = check(reference, fb.neumann(2, 0.6), oracle, rows, previous, batch_size=3, rounds=8, **options)
    patterns = ["".join("x" if client in active else "." for active in replied) for client in range(5)]
    assert any(re.search(r"x\.+x", pattern) for pattern in patterns), (
        f"a client must miss a round and return: {patterns}"
    )
    assert any(re.match(r"\.\.+x", pattern) for pattern in patterns), f"a client must join late: {patterns}"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"previous": "mean"}, "previous must be 'paper' or 'local', not 'mean'"),
        ({"delta": 0}, "delta must be a positive number, not 0"),
        ({"u": -1.0}, "u must be a positive number, not -1.0"),
        ({"sigma": float("nan")}, "sigma must be a positive number, not nan"),
        ({"c_inner": -2.0}, "c_inner must be a positive number, not -2.0"),
        ({"c_outer": 0.0}, "c_outer must be a positive number, not 0.0"),
    ],
)
def test_bad_arguments(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        fb.fedbioacc(quadratic().problem(), fb.exact(), **change)


def test_presets_refresh_the_momentum_or_not():
    """The paper's constants forget less than a hundredth of the first momentum per step, the tuned ones about a quarter."""
    paper = fb.fedbioacc(quadratic().problem(), fb.exact()).settings
    tuned = fb.fedbioacc(quadratic().problem(), fb.exact(), **fb.TUNED).settings
    forgotten = [s.c_outer * (s.delta / (s.u + s.sigma**2) ** (1 / 3)) ** 2 for s in (paper, tuned)]
    assert forgotten[0] == pytest.approx(0.01 / 2 ** (2 / 3))
    assert forgotten[1] == pytest.approx(4 / 9 ** (2 / 3))
