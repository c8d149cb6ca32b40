"""What follows from the constants, held against the functions they are about."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel import theory
from fedbilevel.tasks import random_quadratic
from tests.theory.loops import PLAIN, at_start, ball, outer_oracle


def points(q, generator, count, radius=1.0):
    """Points of the region, one per client."""

    def around(centre):
        vectors = generator.standard_normal((count, q.clients, centre.size))
        lengths = radius * generator.uniform(size=(count, q.clients, 1)) ** (1 / centre.size)
        return centre + lengths * vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    return around(q.outer), around(q.inner)


def norm(vectors):
    return np.linalg.norm(vectors, axis=-1)


def assert_propositions_2_and_3(oracles, k, point, other, slack=1.0):
    (x, y), (other_x, other_y) = point, other
    solution, gradient, phi = oracles.inner_solution(x), oracles.client_gradient(x), oracles.hypergradient(x, y)
    distance, apart = np.hypot(norm(x - other_x), norm(y - other_y)), norm(x - other_x)
    assert (norm(phi - gradient) <= slack * k.C * norm(y - solution)).all()
    assert (norm(solution - oracles.inner_solution(other_x)) <= slack * k.rho * apart).all()
    assert (norm(gradient - oracles.client_gradient(other_x)) <= slack * k.L_bar * apart).all()
    assert (norm(phi - oracles.hypergradient(other_x, other_y)) <= slack * k.Gamma * distance).all()
    assert (norm(phi) <= slack * k.M_h).all()
    gradients = oracles.client_gradient(np.broadcast_to(x[:, :1], x.shape))
    assert (norm(gradients[:, :, None] - gradients[:, None]) <= slack * k.zeta).all()


@given(st.integers(0, 10**6), st.floats(0.05, 1.0), st.floats(0.05, 2.0))
def test_proposition_2_and_3_on_random_quadratics(seed, strong_convexity, coupling):
    q = random_quadratic(seed, clients=3, strong_convexity=strong_convexity, coupling=coupling)
    k = theory.quadratic_constants(q, ball(q))
    generator = np.random.default_rng(seed)
    assert_propositions_2_and_3(q, k, points(q, generator, 50), points(q, generator, 50), slack=1 + 1e-9)


@given(st.floats(0.01, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 5.0), st.floats(0.0, 5.0), st.floats(0.0, 5.0))
def test_gamma_is_c_and_l_bar_is_one_plus_rho_times_gamma(mu, cross, bound, cross_lipschitz, hessian_lipschitz):
    k = theory.Constants(L=1.0, mu=mu, M=bound, C_gxy=cross, L_gxy=cross_lipschitz, L_gyy=hessian_lipschitz)
    # Propositions 2a and 2d, each as it stands.
    assert pytest.approx(1 + cross / mu + bound * (cross_lipschitz / mu + hessian_lipschitz * cross / mu**2)) == k.C
    assert k.Gamma == pytest.approx(
        1 + bound * cross_lipschitz / mu + cross * (1 / mu + bound * hessian_lipschitz / mu**2)
    )
    assert k.L_bar == pytest.approx((1 + k.rho) * k.Gamma)
    assert k.L_h == pytest.approx(k.L_bar)


def test_inner_rates_contract():
    q, q_bar, q_1, q_1_bar = PLAIN.inner_rates(0.4)
    assert (q, q_bar, q_1, q_1_bar) == pytest.approx((0.9, 11.0, 1.05, 21.0))
    assert q * q_1 < 1


@pytest.mark.parametrize("terms", [0, 1, 4, 12])
def test_neumann_bias_and_deviation_stay_within_proposition_1(terms):
    step, draws = 0.6, 3000
    q = random_quadratic(5, clients=2, gradient_noise=0.5, hessian_noise=0.4)
    k = theory.quadratic_constants(q, ball(q, 0.0), batch_size=1)
    x, y = at_start(q, draws)
    samples = outer_oracle(q, np.random.default_rng(1), draws, 1, (terms, step))(x, y)
    mean = q.neumann_hypergradient(x[0], y[0], terms, step)
    bias = norm(mean - q.hypergradient(x[0], y[0]))
    deviation = np.sqrt(((samples - mean) ** 2).sum(axis=-1).mean(axis=0))
    assert (bias <= k.G_1(terms, step)).all()
    assert (deviation <= k.G_2(terms, step)).all()
    error = norm(samples.mean(axis=0) - mean)
    assert (error <= 5 * deviation / np.sqrt(draws)).all()  # the closed form of the mean is the mean
    changed = k.with_neumann(terms, step)
    assert (changed.G, changed.sigma) == (k.G_1(terms, step), max(k.sigma, k.G_2(terms, step)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mu": 0.0}, "Assumption 1 .*mu must be a positive number, got 0.0"),
        ({"mu": -1.0}, "Assumption 1 "),
        ({"mu": 3.0}, "Assumptions 1 and 3 contradict"),
        ({"M": -1.0}, "Assumption 2 "),
        ({"L": float("nan")}, "Assumptions 2 and 3 "),
        ({"C_gxy": 2.5}, "Assumption 3 contradicts itself"),
        ({"C_gxy": -0.1}, "Assumption 3a"),
        ({"L_gyy": -1.0}, "Assumption 3b"),
        ({"sigma": -1.0}, "Assumptions 4 and 6"),
        ({"zeta_gyy": float("inf")}, "Assumption 5d"),
        ({"G": -1.0}, "Assumption 6"),
        ({"clients": 0}, "clients must be at least 1"),
    ],
)
def test_constants_that_break_an_assumption_name_it(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(PLAIN, **change)


@pytest.mark.parametrize("step", [0.0, -0.1, 0.5, 2.0])
def test_steps_outside_zero_to_one_over_l_are_refused(step):
    with pytest.raises(ValueError, match=r"Theorem 1.*Assumption 3"):
        PLAIN.inner_rates(step)
    with pytest.raises(ValueError, match="Proposition 1 needs 0 < step < 1/L"):
        PLAIN.G_1(3, step)


def test_region_is_kept_in_words():
    q = random_quadratic(0)
    assert "‖x - x_1‖ <= 1" in theory.quadratic_constants(q, ball(q)).region
    assert not theory.quadratic_constants(q, ball(q)).estimated
    assert dataclasses.replace(PLAIN, estimated=True).estimated
