"""Constants of concrete problems: exact where they can be, rigorous from data, estimated and marked otherwise."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import theory
from fedbilevel.tasks import random_quadratic
from tests.theory.loops import at_start, ball, inner_oracle, outer_oracle
from tests.theory.test_constants import assert_propositions_2_and_3, norm
from tests.theory.test_lemmas import logistic_constants, logistic_problem


def test_quadratic_constants_are_exact_where_no_region_enters():
    q = random_quadratic(0, clients=4, strong_convexity=0.2, coupling=0.7)
    k = theory.quadratic_constants(q, ball(q, 0.5))
    spectra = np.linalg.eigvalsh(q.inner_hessian)
    assert k.mu == pytest.approx(spectra.min())
    assert k.C_gxy == pytest.approx(0.7)
    joint = [np.block([[np.zeros((3, 3)), -a.T], [-a, h]]) for a, h in zip(q.inner_cross, q.inner_hessian, strict=True)]
    assert pytest.approx(max(np.abs(np.linalg.eigvalsh(j)).max() for j in joint)) == k.L
    assert (k.L_gxy, k.L_gyy, k.sigma, k.clients) == (0, 0, 0, 4)
    worst = max(np.linalg.norm(a - b, 2) for a in q.inner_cross for b in q.inner_cross)
    assert k.zeta_gxy == pytest.approx(worst)


def test_quadratic_noise_is_the_deviation_of_minibatches():
    q = random_quadratic(3, clients=2, gradient_noise=0.7)
    batch, draws = 3, 20000
    k = theory.quadratic_constants(q, ball(q), batch_size=batch)
    x, y = at_start(q, draws)
    deviations = []
    for oracle in (inner_oracle, outer_oracle):
        values = oracle(q, np.random.default_rng(0), draws, batch)(x, y)
        deviations.append(np.sqrt(((values - values.mean(axis=0)) ** 2).sum(axis=-1).mean(axis=0)).max())
    assert k.sigma == pytest.approx(max(deviations), rel=0.03)


def test_a_path_outside_the_region_is_noticed():
    q = random_quadratic(0)
    algorithm = fb.fedbio(q.problem(), fb.exact(), inner_step=0.3, outer_step=0.3, local_steps=2)
    path = theory.path_of(fb.trace(algorithm, q.data(), rounds=3))
    assert theory.covering_region(path, q).contains(path, q)
    assert not ball(q, 1e-3, 1e3).contains(path, q)
    assert not ball(q, 1e3, 1e-3).contains(path, q)


def test_logistic_constants_hold_at_random_points():
    generator = np.random.default_rng(1)
    problem, data = logistic_problem(generator)
    k = logistic_constants(data)
    oracles = theory.ProblemOracles(problem, data)
    x, other_x = (2 * generator.standard_normal((30, 2, 2)) for _ in range(2))
    y, other_y = (2 * generator.standard_normal((30, 2, 3)) for _ in range(2))

    assert_propositions_2_and_3(oracles, k, (x, y), (other_x, other_y))
    distance = np.hypot(norm(x - other_x), norm(y - other_y))
    inner = norm(oracles.inner_gradient(x, y) - oracles.inner_gradient(other_x, other_y))
    assert (inner <= k.L * distance).all()
    # The inner solutions are stationary, to rounding.
    assert norm(oracles.inner_gradient(x, oracles.inner_solution(x))).max() < 1e-10


def test_logistic_constants_without_ridge_name_the_assumption():
    with pytest.raises(ValueError, match=r"Assumption 1 .*ridge must be positive"):
        theory.logistic_constants([], [], [], ridge=0.0, weights=theory.softmax_weights(2))


def test_logistic_noise_covers_single_rows():
    generator = np.random.default_rng(2)
    problem, data = logistic_problem(generator, clients=1)
    k = logistic_constants(data, batch_size=1)
    single = fb.ClientData(*({name: leaf[0][:, None] for name, leaf in data.train.items()} for _ in range(2)))
    oracles = theory.ProblemOracles(problem, single)  # every row a client
    rows = oracles.inner_gradient(np.zeros((20, 2)), np.ones((20, 3)))
    deviation = np.sqrt(((rows - rows.mean(axis=0)) ** 2).sum(axis=1).mean())
    assert 0.1 * k.sigma < deviation <= k.sigma
    assert (k.zeta_f, k.zeta_gyy, k.zeta_gstar) == (0, 0, 0)


def test_sampled_constants_approach_the_exact_ones_from_inside():
    q = random_quadratic(4, clients=2, gradient_noise=0.5)
    exact = theory.quadratic_constants(q, ball(q))
    found = theory.sampled_constants(q.problem(), q.data(), radius=1.0, points=8, batch_size=4, safety=2.0)
    assert found.estimated
    assert "8 sampled points" in found.region
    for name in ("L", "C_gxy", "zeta_gxy", "zeta_gyy"):  # twice the truth: that is the safety asked for
        assert getattr(found, name) == pytest.approx(2 * getattr(exact, name), rel=1e-9), name
    assert found.mu == pytest.approx(exact.mu / 2, rel=1e-9)
    for name in ("M", "zeta_f", "zeta_gstar"):
        assert 0.3 * getattr(exact, name) < getattr(found, name) / 2 <= getattr(exact, name) * (1 + 1e-6), name
    assert max(found.L_gxy, found.L_gyy) < 1e-10
    assert found.sigma == pytest.approx(2 * 0.5 / 2, rel=0.1)  # safety 2, deviation .5, four rows


def test_a_loss_that_is_not_strongly_convex_is_refused():
    problem = fb.BilevelProblem(
        inner_loss=lambda x, y, batch: jnp.sum(jnp.cos(y)) * jnp.mean(batch) + x @ y,
        outer_loss=lambda x, y, batch: jnp.sum(y**2),
        init=lambda key: (jnp.zeros(2), jnp.zeros(2)),
    )
    data = fb.ClientData(train=np.ones((1, 3)), val=np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"Assumption 1 .* client 0 has curvature -"):
        theory.sampled_constants(problem, data)
    with pytest.raises(ValueError, match="points must be at least 2"):
        theory.sampled_constants(problem, data, points=1)
    with pytest.raises(ValueError, match="radius must be positive"):
        theory.sampled_constants(problem, data, radius=0.0)
