"""Every lemma with its corrected constants, along runs on many random instances."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import theory
from fedbilevel.tasks import InnerSample, OuterSample, QuadraticClients, random_quadratic
from tests.references.logistic import losses
from tests.theory.loops import ball, fedbio_loop, fedbioacc_loop

VARIANTS = pytest.mark.parametrize("previous", ["paper", "local"])


def instance(seed, **options):
    generator = np.random.default_rng(seed)
    q = random_quadratic(
        seed,
        clients=int(generator.integers(1, 6)),
        outer_size=int(generator.integers(1, 5)),
        inner_size=int(generator.integers(1, 6)),
        strong_convexity=float(generator.uniform(0.05, 0.9)),
        coupling=float(generator.uniform(0.05, 1.5)),
        heterogeneity=float(generator.uniform(0, 1.5)),
        **options,
    )
    return q, int(generator.integers(1, 8)), int(generator.integers(3, 12))


def broken(evaluations):
    return {name: e.margin.max() for name, e in evaluations.items() if not e.holds}


def covering(q, path, **options):
    """The constants that hold along a path."""
    return theory.quadratic_constants(q, theory.covering_region(path, q), **options)


def unlimited(q, **options):
    """For quadratics only M and the zetas depend on the region, and step sizes use neither."""
    return theory.quadratic_constants(q, ball(q), **options)


@pytest.mark.parametrize("seed", range(40))
def test_fedbio_lemmas_and_theorem_with_theorem_steps(seed):
    q, local_steps, rounds = instance(seed)
    steps = theory.fedbio_steps(unlimited(q), local_steps, rounds)
    path = fedbio_loop(q, steps, rounds)
    region = theory.covering_region(path, q)
    assert region.contains(path, q)
    k = theory.quadratic_constants(q, region)
    lemmas = theory.fedbio_lemmas(k, steps, path, q, q.minimum())
    assert set(lemmas) == {
        "hypergradient bias", "consensus error", "inner drift", "client drift", "descent", "theorem 1"
    }  # fmt: skip
    assert not broken(lemmas)


@pytest.mark.parametrize("seed", range(40))
def test_fedbio_lemmas_with_steps_as_large_as_each_lemma_allows(seed):
    """gamma just below 1/L and eta just below 1/L_h: all but the client drift, which asks for less."""
    q, local_steps, rounds = instance(100 + seed)
    k = unlimited(q)
    eta = 0.99 / k.L_h
    steps = theory.fedbio_steps(k, local_steps, rounds, delta=eta * np.sqrt(rounds * local_steps))
    assert steps.outer_step == pytest.approx(eta)
    path = fedbio_loop(q, steps, rounds)
    k = covering(q, path)
    lemmas = theory.fedbio_lemmas(k, steps, path, q)
    lemmas.pop("client drift")
    assert not broken(lemmas)


def test_the_lemmas_are_not_vacuous():
    """f = x y and a weakly coupled g: the bounds come within a small factor of equality, the tests above could fail."""
    q = QuadraticClients(
        InnerSample(np.ones((2, 1, 1, 1)), np.full((2, 1, 1, 1), 0.01), np.zeros((2, 1, 1))),
        OuterSample(np.broadcast_to([[0.0, 1.0], [1.0, 0.0]], (2, 1, 2, 2)), np.zeros((2, 1, 2))),
        outer=np.zeros(1),
        inner=np.ones(1),
    )
    k = unlimited(q)
    steps = theory.fedbio_steps(k, 3, 10, inner_step=0.1, delta=0.1)
    path = fedbio_loop(q, steps, 10)
    k = covering(q, path)
    lemmas = theory.fedbio_lemmas(k, steps, path, q)
    assert lemmas["hypergradient bias"].tightness > 0.4
    assert lemmas["inner drift"].tightness > 0.02
    halved = dataclasses.replace(k, L=k.L / 2, mu=k.mu / 2, C_gxy=k.C_gxy / 2)
    assert not theory.fedbio_lemmas(halved, steps, path, q)["hypergradient bias"].holds


def acc_arguments(previous, local_steps):
    return {
        "inner_step": 0.1, "outer_step": 0.05, "local_steps": local_steps, "delta": 1.0, "u": 8.0, "sigma": 1.0,
        "c_inner": 3.0, "c_outer": 3.5, "previous": previous,
    }  # fmt: skip


def acc_steps(k, arguments, rounds):
    given = {name: value for name, value in arguments.items() if name not in ("local_steps", "sigma")}
    return theory.fedbioacc_steps(dataclasses.replace(k, sigma=1.0), arguments["local_steps"], rounds, **given)


def assert_recursions(*arguments, **options):
    lemmas = theory.fedbioacc_lemmas(*arguments, **options)
    one_step = ("outer momentum", "inner momentum", "inner drift", "dispersion", "descent")
    assert not broken({name: lemmas[name] for name in one_step})


@VARIANTS
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(12))
def test_fedbioacc_recursions_with_practical_steps(seed, noise, previous):
    """Steps far above the theorem's: the one-step lemmas hold for any eta, gamma <= 1/(6 L), c alpha^2 <= 1; in expectation,
    and without noise on every run."""
    q, local_steps, rounds = instance((300 if noise else 400) + seed, gradient_noise=noise)
    arguments, size = acc_arguments(previous, local_steps), {"batch_size": 2} if noise else {}
    arguments["inner_step"] = min(0.1 if noise else 1.0, 0.99 / (6 * unlimited(q, **size).L))
    drawn = {"seeds": 100, "batch": 2, "seed": seed} if noise else {}
    path = fedbioacc_loop(q, arguments, rounds, **drawn)
    k = covering(q, path, **size)
    steps = acc_steps(k, arguments, rounds)
    assert_recursions(k, steps, path, q)
    if not noise and previous == "local":  # without noise and without the bias of averaging x_t the momenta are exact
        state = theory.acc_state(steps, path, q)
        assert max(state.outer_error.max(), state.inner_momentum.max()) < 1e-24


@pytest.mark.parametrize("conditions", ["printed", "needed"])
@VARIANTS
@pytest.mark.parametrize("seed", range(6))
def test_potential_and_theorem_2_with_theorem_steps(seed, previous, conditions):
    q, local_steps, rounds = instance(500 + seed, gradient_noise=0.5)
    k = unlimited(q, batch_size=2)
    steps = theory.fedbioacc_steps(k, local_steps, rounds, previous=previous, conditions=conditions)
    path = fedbioacc_loop(q, steps.arguments(), rounds, seeds=50, batch=2, seed=seed)
    k = covering(q, path, batch_size=2)
    lemmas = theory.fedbioacc_lemmas(k, steps, path, q, q.minimum())
    assert {"potential", "dispersion sum", "theorem 2"} < set(lemmas)
    assert not broken(lemmas)


@pytest.mark.parametrize("seed", range(4))
def test_biased_estimators_are_measured_against_their_mean(seed):
    terms, step = 2, 0.5
    q, local_steps, rounds = instance(600 + seed, gradient_noise=0.3, hessian_noise=0.3)
    arguments = acc_arguments("local", local_steps)
    arguments["inner_step"] = 0.99 / (6 * unlimited(q, batch_size=2).L)
    step = min(step, 0.9 / unlimited(q, batch_size=2).L)
    path = fedbioacc_loop(q, arguments, rounds, seeds=100, batch=2, neumann=(terms, step), seed=seed)
    k = covering(q, path, batch_size=2).with_neumann(terms, step)

    def mean(outer, inner):
        return q.neumann_hypergradient(outer, inner, terms, step)

    assert_recursions(k, acc_steps(k, arguments, rounds), path, q, mean_estimator=mean)


@pytest.mark.parametrize("previous", [None, "paper", "local"])
def test_recorded_runs_are_the_naive_loops(previous):
    q = random_quadratic(7, clients=3)
    if previous is None:
        arguments = {"inner_step": 0.3, "outer_step": 0.05, "local_steps": 4}
        algorithm = fb.fedbio(q.problem(), fb.exact(), **arguments)
        naive = fedbio_loop(q, arguments, 3)
    else:
        arguments = acc_arguments(previous, 4)
        algorithm = fb.fedbioacc(q.problem(), fb.exact(), **arguments)
        naive = fedbioacc_loop(q, arguments, 3)
    recorded = theory.path_of(fb.trace(algorithm, q.data(), rounds=3))
    for name, mine, theirs in zip(theory.Path._fields, naive, recorded, strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-9, atol=1e-11, err_msg=name)


def logistic_problem(generator, clients=2, rows=20, size=3, ridge=0.5):
    features = generator.standard_normal((clients, rows, size)) / 2
    labels = (features @ generator.standard_normal(size) + 0.3 * generator.standard_normal((clients, rows)) > 0) * 1.0
    rows = {"features": features, "labels": labels, "groups": generator.integers(2, size=(clients, rows))}
    inner_loss = fb.LinearInner(lambda outer: 2 * jax.nn.softmax(outer), ridge, kernel="off")
    problem = fb.BilevelProblem(
        inner_loss,
        lambda outer, inner, batch: jnp.mean(losses(inner, batch)),
        lambda key: (jnp.zeros(2), jnp.zeros(size)),
    )
    return problem, fb.ClientData(train=rows, val=rows)


def logistic_constants(data, ridge=0.5, **options):
    features, groups = list(data.train["features"]), list(data.train["groups"])
    return theory.logistic_constants(
        features, groups, features, ridge=ridge, weights=theory.softmax_weights(2), **options
    )


def test_lemmas_along_a_logistic_run():
    """Nothing quadratic: L_gxy and L_gyy count, inner solutions come from Newton's method, constants from the data."""
    problem, data = logistic_problem(np.random.default_rng(0))
    k = logistic_constants(data)
    steps = theory.fedbio_steps(k, local_steps=3, rounds=5)
    algorithm = fb.fedbio(problem, fb.exact(), **steps.arguments())
    path = theory.path_of(fb.trace(algorithm, data, rounds=5))
    oracles = theory.ProblemOracles(problem, data)
    lemmas = theory.fedbio_lemmas(k, steps, path, oracles, minimum=0.0)  # the log loss is never negative
    assert len(lemmas) == 6
    assert not broken(lemmas)


def test_potential_is_the_sum_it_is_defined_as():
    q = random_quadratic(8, clients=2, gradient_noise=0.3)
    k = unlimited(q, batch_size=2)
    steps = theory.fedbioacc_steps(k, 3, 4)
    path = fedbioacc_loop(q, steps.arguments(), 4, seeds=2, batch=2)
    levels = theory.potential_along(k, steps, path, q)
    assert levels.shape == (2, 12)
    t, seed = 5, 1
    x, y, nu, omega = (part[seed, t - 1] for part in path[:4])
    before = steps.delta / (steps.u + steps.sigma**2 * (t - 1)) ** (1 / 3)
    expected = (
        float(q.objective(x.mean(axis=0)))
        + 2 * steps.outer_step / (320 * k.L_h**2) / before * ((nu.mean(0) - q.hypergradient(x, y).mean(0)) ** 2).sum()
        + ((y - q.inner_solution(x)) ** 2).sum(axis=1).mean()
        + steps.inner_step / (32 * k.L**2) / before * ((omega - q.inner_gradient(x, y)) ** 2).sum(axis=1).mean()
    )
    assert levels[seed, t - 1] == pytest.approx(expected, rel=1e-12)


def test_path_needs_a_trace():
    with pytest.raises(ValueError, match="at least one trace"):
        theory.path_of()
