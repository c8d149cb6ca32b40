"""Closed forms of the quadratic clients against finite differences, automatic differentiation and brute force."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel import theory
from fedbilevel.tasks import QuadraticClients, known_quadratic, random_quadratic
from tests.references.compare import refusals


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_gradient_is_the_derivative_of_the_objective(seed, clients, outer_size, inner_size):
    q = random_quadratic(seed, clients=clients, outer_size=outer_size, inner_size=inner_size, gradient_noise=0.3)
    x, step = np.random.default_rng(seed).standard_normal(outer_size), 1e-5
    slopes = [(q.objective(x + step * e) - q.objective(x - step * e)) / (2 * step) for e in np.eye(outer_size)]
    np.testing.assert_allclose(q.gradient(x), slopes, rtol=1e-6, atol=1e-8)
    everywhere = np.broadcast_to(x, (clients, outer_size))
    np.testing.assert_allclose(q.client_gradient(everywhere).mean(axis=0), q.gradient(x), rtol=1e-10, atol=1e-12)
    solution = q.inner_solution(everywhere)
    np.testing.assert_allclose(q.inner_gradient(everywhere, solution), 0, atol=1e-12)
    np.testing.assert_allclose(
        q.hypergradient(everywhere, solution), q.client_gradient(everywhere), rtol=1e-9, atol=1e-11
    )


def test_the_same_draw_is_the_same_problem():
    """What was compiled for one serves the other."""
    first, again, other = (
        random_quadratic(seed, clients=clients).problem() for seed, clients in ((0, 2), (0, 2), (1, 2))
    )
    assert first == again
    assert first != other
    np.testing.assert_array_equal(first.init(None)[0], random_quadratic(0, clients=2).outer)


def test_minimiser_is_where_the_gradient_vanishes():
    q = random_quadratic(1, clients=4)
    assert np.abs(q.gradient(q.minimiser())).max() < 1e-12
    generator = np.random.default_rng(0)
    others = q.minimiser() + generator.standard_normal((100, 3))
    assert (q.objective(others) > q.minimum()).all()


def test_losses_agree_with_the_closed_forms():
    q = random_quadratic(2, clients=3, gradient_noise=0.4, hessian_noise=0.2)
    oracles = theory.ProblemOracles(q.problem(), q.data())
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((5, 3, 3)), generator.standard_normal((5, 3, 4))
    cases = {"inner_solution": (x,), "inner_gradient": (x, y), "hypergradient": (x, y), "objective": (x[:, 0],)}
    for name, arguments in cases.items():
        np.testing.assert_allclose(
            getattr(oracles, name)(*arguments), getattr(q, name)(*arguments), rtol=1e-8, atol=1e-10
        )


def test_neumann_mean_tends_to_the_hypergradient():
    q = random_quadratic(3, clients=2)
    x, y = np.ones((2, 3)), np.ones((2, 4))
    target = q.hypergradient(x, y)
    errors = [np.linalg.norm(q.neumann_hypergradient(x, y, terms, 0.9) - target) for terms in (0, 5, 20, 60)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9


def test_noise_has_the_stated_size_and_mean_zero():
    q = random_quadratic(4, clients=3, gradient_noise=0.7, hessian_noise=0.5, samples=20)
    for leaf, mean in ((q.train.offset, q.inner_offset), (q.val.linear, q.outer_linear)):
        deviation = np.sqrt(((leaf - mean[:, None]) ** 2).sum(axis=2).mean(axis=1))
        np.testing.assert_allclose(deviation, 0.7)
    spectra = np.linalg.eigvalsh(q.train.hessian)
    assert spectra.min() >= 0.5 * np.linalg.eigvalsh(q.inner_hessian).min() * (1 - 1e-12)
    assert np.ptp(q.train.hessian, axis=1).max() > 0.1


def test_heterogeneity_zero_makes_equal_clients():
    q = random_quadratic(5, clients=3, heterogeneity=0.0)
    assert np.ptp(q.client_curvature, axis=0).max() < 1e-12
    assert np.ptp(q.client_slope, axis=0).max() < 1e-12
    assert np.ptp(random_quadratic(5, clients=3).client_slope, axis=0).max() > 0.1


def assert_arrives(algorithm, q, answers, rounds):
    """From the start to the minimiser of ``answers``, and the engine's own measurements agree at both ends."""
    result = fb.simulate(algorithm, q.data(), rounds=rounds, record_every=rounds)
    np.testing.assert_allclose(result.outer, answers.minimiser(), atol=1e-6)
    first, last = (result.history.iloc[row] for row in (0, -1))
    assert last["true_objective"] == pytest.approx(answers.minimum(), rel=1e-9)
    np.testing.assert_allclose(first["hypergradient_squared_norm"], (answers.gradient(q.outer) ** 2).sum())


def test_algorithms_run_on_them_unchanged():
    q = random_quadratic(6, clients=3, gradient_noise=0.2)
    assert_arrives(fb.fedbio(q.problem(), fb.exact(), inner_step=0.5, outer_step=0.05, local_steps=1), q, q, 600)


def test_pooled_clients_answer_the_global_lower_level():
    """y(x) and grad h of the mean losses, from the clients' own matrices."""
    q = random_quadratic(7, clients=4, gradient_noise=0.2)
    x = np.array([0.3, -1.0, 0.5])
    hessian, cross, offset = (leaf.mean(axis=0) for leaf in (q.inner_hessian, q.inner_cross, q.inner_offset))
    y = np.linalg.solve(hessian, cross @ x + offset)
    pooled = q.pooled()
    np.testing.assert_allclose(pooled.inner_solution(x[None])[0], y)
    points = np.tile(x, (4, 1)), np.tile(y, (4, 1))
    in_outer, in_inner = (part.mean(axis=0) for part in q.outer_gradients(*points))
    np.testing.assert_allclose(pooled.gradient(x), in_outer + cross.T @ np.linalg.solve(hessian, in_inner))
    assert q.problem("global").lower_level == "global"
    assert q.problem().lower_level == "local"
    assert_arrives(fb.fedbio_global(q.problem("global"), 0.5, 0.1, 0.5, local_steps=1), q, pooled, 1500)


PLAIN = random_quadratic(0)


def other(train=None, **val):
    """The same clients with other samples."""
    parts = PLAIN.train._replace(**(train or {})), PLAIN.val._replace(**val)
    return QuadraticClients(*parts, PLAIN.outer, PLAIN.inner)


test_bad_input_gets_a_sentence = refusals(
    None,
    (lambda: random_quadratic(0, hessian_noise=1.0), "hessian_noise must lie in"),
    (lambda: random_quadratic(0, strong_convexity=2.0), "strong_convexity must lie in"),
    (lambda: other({"offset": np.zeros((3, 1, 9))}), "train.offset has shape"),
    (lambda: other({"hessian": 0 * PLAIN.train.hessian}), "Assumption 1 .*smallest eigenvalue"),
    (lambda: other(hessian=-PLAIN.val.hessian).minimiser(), "no unique minimiser"),
)


@pytest.mark.parametrize("lower_level", ["local", "global"])
def test_progress_is_measured_against_the_known_answer(lower_level):
    task = known_quadratic(3, lower_level=lower_level, clients=3, outer_size=4, inner_size=5)
    outer, inner = task.problem.init(jax.random.key(0))
    assert task.evaluate(outer, inner)["progress"] == 0
    best = task.facts["clients"].minimiser()
    assert task.evaluate(best, inner)["progress"] == pytest.approx(1)
    assert task.evaluate(0.5 * best, inner)["progress"] == pytest.approx(0.75)  # quadratic: half way is three quarters
    assert known_quadratic(4, lower_level=lower_level, clients=3, outer_size=4, inner_size=5).problem == task.problem
