"""FedBiO and FedBiOAcc, with the mean or the local previous point, equal their naive loops."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from tests.references import phi
from tests.references.compare import close, cohorts
from tests.references.fedbio import fedbio
from tests.references.fedbioacc import fedbioacc
from tests.references.logistic import logistic
from tests.references.quadratic import quadratic
from tests.references.rows import drawn, whole

SEED, ROUNDS, STEPS = 4, 4, 3
WEIGHTS = np.array([1.0, 3.0, 0.5])
LENGTHS = {"inner_step": 0.3, "outer_step": 0.2}
CONSTANTS = {"inner_step": 1.0, "outer_step": 0.7, "delta": 0.8, "u": 2.0, "sigma": 1.3, "c_inner": 0.9, "c_outer": 1.4}
BOX = (lambda x: jnp.clip(x, -0.25, 0.25), lambda x: np.clip(x, -0.25, 0.25))
"""For JAX, for NumPy."""


@pytest.fixture(params=["fedbio", "paper", "local"])
def method(request):
    """FedBiO, or FedBiOAcc with either previous point."""
    return request.param


def check(method, reference, estimator, oracle, rows=whole, *, project=(None, None), constants=CONSTANTS, **options):
    """Run both and compare x and every client's y."""
    data, rounds = reference.data(), options.pop("rounds", ROUNDS)
    sizes = {"local_steps": STEPS} | {size: options.pop(size, None) for size in ("batch_size", "outer_batch_size")}
    problem = reference.problem(project[0])
    if method == "fedbio":
        algorithm, loop, chosen = fb.fedbio(problem, estimator, **LENGTHS, **sizes), fedbio, LENGTHS
    else:
        algorithm = fb.fedbioacc(problem, estimator, **constants, **sizes, previous=method)
        loop, chosen = fedbioacc, {"constants": constants, "previous": method}
    replied = cohorts(algorithm, data, SEED, rounds, **options) if "dropout" in options else None
    found = fb.simulate(algorithm, data, rounds, seed=SEED, record_every=None, **options)
    shared = {"rounds": rounds, "local_steps": STEPS, "weights": options.get("weights", np.ones(data.clients))}
    kept = project[1] or (lambda x: x)
    wanted = loop(reference, oracle, reference.start, rows, **chosen, **shared, cohorts=replied, project=kept)
    close((found.outer, found.inner), wanted)
    return found, replied


def test_deterministic_quadratic_with_weights(method):
    reference = quadratic()
    check(method, reference, fb.exact(), phi.exact(reference))
    check(method, reference, fb.exact(), phi.exact(reference), weights=WEIGHTS)
    # 1 - c alpha^2 is negative here: the loop clips it to zero
    forgetful = {**CONSTANTS, "c_inner": 9.0, "c_outer": 8.0}
    check(method, reference, fb.exact(), phi.exact(reference), constants=forgetful)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_quadratic_in_a_box(method, batch_size):
    reference = quadratic()
    rows = whole if batch_size is None else drawn(reference.data(), SEED, ROUNDS, STEPS, 3, 3, 1)
    oracle, options = phi.neumann(reference, 2, 0.6), {"batch_size": batch_size, "weights": WEIGHTS}
    found, _ = check(method, reference, fb.neumann(2, 0.6), oracle, rows, project=BOX, **options)
    assert np.isclose(np.abs(found.outer), 0.25).any(), "the box must bind"


@pytest.mark.parametrize("outer_batch_size", [2, "whole"])
def test_validation_minibatches_of_their_own_size(outer_batch_size):
    reference = quadratic()
    held = (0, None) if outer_batch_size == "whole" else (1, 2)
    rows = drawn(reference.data(), SEED, ROUNDS, STEPS, 3, 3, *held)
    options = {"batch_size": 3, "outer_batch_size": outer_batch_size}
    check("fedbio", reference, fb.neumann(2, 0.6), phi.neumann(reference, 2, 0.6), rows, **options)


def test_logistic_deterministic():
    reference = logistic()
    # conjugate gradients to a relative residual of 1e-13 are a dense solve up to rounding
    check("fedbio", reference, fb.conjugate_gradient(steps=50, tolerance=1e-13), phi.exact(reference))


def test_logistic_minibatches(method):
    reference = logistic()
    rows = drawn(reference.data(), SEED, ROUNDS, STEPS, 8, 4, 1)
    oracle = phi.neumann(reference, 3, 0.5)
    check(method, reference, fb.neumann(3, 0.5), oracle, rows, batch_size=8, weights=WEIGHTS)


@pytest.mark.parametrize("sampling", ["uniform", "proportional"])
def test_partial_participation_and_dropout(method, sampling):
    """Late clients start their own inner momentum; those that missed a round compare with the point they receive."""
    reference = quadratic(sizes=((6, 4),) * 5)
    rows = drawn(reference.data(), SEED, 8, STEPS, 3, 3, 1)
    options = {
        "participation": 0.6,
        "sampling": sampling,
        "dropout": 0.3,
        "weights": np.array([1.0, 2.0, 0.5, 1.0, 3.0 if sampling == "uniform" else 8.0]),
    }
    oracle = phi.neumann(reference, 2, 0.6)
    _, replied = check(method, reference, fb.neumann(2, 0.6), oracle, rows, batch_size=3, rounds=8, **options)
    if sampling == "proportional":
        assert max(share for active in replied for share in active.values()) > 1, "someone must be drawn twice"
        return
    assert {len(active) for active in replied} >= {2, 3}, "the seed must show rounds with and without lost replies"
    patterns = ["".join("x" if client in active else "." for active in replied) for client in range(5)]
    assert any(re.search(r"x\.+x", pattern) for pattern in patterns), (
        f"someone must miss a round and return: {patterns}"
    )
    assert any(re.match(r"\.\.+x", pattern) for pattern in patterns), f"a client must join late: {patterns}"


def test_a_round_in_which_every_reply_is_lost_changes_nothing():
    reference = quadratic(sizes=((6, 4),) * 2)
    _, replied = check("fedbio", reference, fb.exact(), phi.exact(reference), rounds=8, dropout=0.6)
    assert {} in replied, "the seed must show an empty round"


def test_presets_refresh_the_momentum_or_not():
    """The paper's constants forget less than a hundredth of the first momentum per step, the tuned ones about a quarter."""
    paper = fb.fedbioacc(quadratic().problem(), fb.exact(), 1.0, 1.0).settings
    tuned = fb.fedbioacc(quadratic().problem(), fb.exact(), **fb.TUNED).settings
    forgotten = [s.c_outer * (s.delta / (s.u + s.sigma**2) ** (1 / 3)) ** 2 for s in (paper, tuned)]
    assert forgotten[0] == pytest.approx(0.01 / 2 ** (2 / 3))
    assert forgotten[1] == pytest.approx(4 / 9 ** (2 / 3))
