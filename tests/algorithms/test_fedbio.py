"""FedBiO equals the naive loop."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from tests.references import phi
from tests.references.compare import close, cohorts
from tests.references.fedbio import fedbio
from tests.references.logistic import logistic
from tests.references.quadratic import quadratic
from tests.references.rows import drawn, whole

ROUNDS, STEPS = 4, 3
WEIGHTS = np.array([1.0, 3.0, 0.5])
LENGTHS = {"inner_step": 0.3, "outer_step": 0.2}


def check(
    reference, estimator, oracle, rows, *, batch_size=None, outer_batch_size=None, project=(None, None), **options
):
    """Run both and compare x and every client's y; project: for JAX, for NumPy."""
    data = reference.data()
    rounds = options.pop("rounds", ROUNDS)
    steps = {"local_steps": STEPS, "batch_size": batch_size, "outer_batch_size": outer_batch_size}
    algorithm = fb.fedbio(reference.problem(project[0]), estimator, **LENGTHS, **steps)
    replied = cohorts(algorithm, data, 3, rounds, **options) if "dropout" in options else None
    found = fb.simulate(algorithm, data, rounds, seed=3, record_every=None, **options)
    wanted = fedbio(
        reference,
        oracle,
        reference.start,
        rows,
        rounds=rounds,
        local_steps=STEPS,
        **LENGTHS,
        weights=options.get("weights", np.ones(data.clients)),
        cohorts=replied,
        project=project[1] or (lambda x: x),
    )
    close((found.outer, found.inner), wanted)
    return found, replied


def test_deterministic_quadratic_with_weights():
    reference = quadratic()
    check(reference, fb.exact(), phi.exact(reference), whole)
    check(reference, fb.exact(), phi.exact(reference), whole, weights=WEIGHTS)


def test_deterministic_quadratic_in_a_box():
    reference = quadratic()
    project = (lambda x: jnp.clip(x, -0.25, 0.25), lambda x: np.clip(x, -0.25, 0.25))
    oracle = phi.neumann(reference, 2, 0.6)
    found, _ = check(reference, fb.neumann(2, 0.6), oracle, whole, project=project, weights=WEIGHTS)
    assert np.isclose(np.abs(found.outer), 0.25).any(), "the box must bind"


@pytest.mark.parametrize("outer_batch_size", [2, "whole"])
def test_minibatches_quadratic(outer_batch_size):
    reference = quadratic()
    held = 2 if outer_batch_size == 2 else None
    rows = drawn(reference.data(), 3, ROUNDS, STEPS, 3, 3, 0 if outer_batch_size == "whole" else 1, held)
    oracle = phi.neumann(reference, 2, 0.6)
    check(reference, fb.neumann(2, 0.6), oracle, rows, batch_size=3, outer_batch_size=outer_batch_size)


def test_logistic_deterministic():
    reference = logistic()
    # conjugate gradients to a relative residual of 1e-13 are a dense solve up to rounding
    check(reference, fb.conjugate_gradient(steps=50, tolerance=1e-13), phi.exact(reference), whole)


def test_logistic_minibatches():
    reference = logistic()
    rows = drawn(reference.data(), 3, ROUNDS, STEPS, 8, 4, 1)
    oracle = phi.neumann(reference, 3, 0.5)
    check(reference, fb.neumann(3, 0.5), oracle, rows, batch_size=8, weights=WEIGHTS)


def test_partial_participation_and_dropout():
    reference = quadratic(sizes=((6, 4),) * 5)
    rows = drawn(reference.data(), 3, 8, STEPS, 3, 3, 1)
    oracle = phi.neumann(reference, 2, 0.6)
    options = {"participation": 0.6, "dropout": 0.4, "weights": np.array([1.0, 2.0, 0.5, 1.0, 3.0])}
    _, replied = check(reference, fb.neumann(2, 0.6), oracle, rows, batch_size=3, rounds=8, **options)
    assert {len(active) for active in replied} > {2, 3}, "the seed must show rounds with and without lost replies"


def test_a_round_in_which_every_reply_is_lost_changes_nothing():
    reference = quadratic(sizes=((6, 4),) * 2)
    _, replied = check(reference, fb.exact(), phi.exact(reference), whole, rounds=8, dropout=0.6)
    assert [] in replied, "the seed must show an empty round"


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"inner_step": -1.0}, ValueError, "inner_step must be a positive number, not -1.0"),
        ({"outer_step": 0.0}, ValueError, "outer_step must be a positive number, not 0.0"),
        ({"outer_step": float("inf")}, ValueError, "outer_step must be a positive number, not inf"),
        ({"outer_batch_size": "all"}, TypeError, "outer_batch_size must be a whole number, not 'all'"),
        ({"hypergradient": "exact"}, TypeError, r"hypergradient must be an estimator such as fb.exact\(\)"),
        ({"hypergradient": fb.exact}, TypeError, "hypergradient must be an estimator"),
        ({"problem": None}, TypeError, "The first argument must be a BilevelProblem, not NoneType"),
    ],
)
def test_bad_arguments(change, kind, sentence):
    with pytest.raises(kind, match=sentence):
        fb.fedbio(**{"problem": quadratic().problem(), "hypergradient": fb.exact(), **change})
