"""Concrete instances on which statements fail as printed, each beside the corrected statement, which holds there.

docs/errata.md refers to these tests by name.
"""

import dataclasses
import math

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import theory
from fedbilevel.tasks import InnerSample, OuterSample, QuadraticClients, random_quadratic
from fedbilevel.theory import bounds, printed
from tests.theory.loops import NOISY, at_start, ball, fedbio_loop, fedbioacc_loop, outer_oracle


def scalar_clients(*, hessian, cross, offset, weight, linear, outer=0.0, inner=0.0):
    """Clients with one-dimensional x and y; `weight` are 2 x 2 matrices, `linear` pairs; one sample each."""
    many = len(hessian)
    train = InnerSample(
        np.reshape(hessian, (many, 1, 1, 1)), np.reshape(cross, (many, 1, 1, 1)), np.reshape(offset, (many, 1, 1))
    )
    val = OuterSample(np.reshape(weight, (many, 1, 2, 2)), np.reshape(linear, (many, 1, 2)))
    return QuadraticClients(train, val, np.array([outer]), np.array([inner]))


def opposite_pulls(coupling=0.1, slope=1.0):
    """h = 0, but client 1 pulls x to one side and client 2 to the other: f = +-slope x, y(x) = coupling x."""
    pulls, linear = {"hessian": [1.0] * 2, "cross": [coupling] * 2, "offset": [0.0] * 2}, [[slope, 0], [-slope, 0]]
    return scalar_clients(**pulls, weight=np.zeros((2, 2, 2)), linear=linear)


def equal_objectives(start):
    """The same h on both clients, whose inner solutions differ."""
    pulls = {"hessian": [1.0] * 2, "cross": [1.0] * 2, "offset": [0.0, 1.0]}
    losses = {"weight": [np.diag([0.0, 1.0])] * 2, "linear": [[0, 0.0], [0, 1.0]]}
    return scalar_clients(**pulls, **losses, outer=start, inner=start)


def steep(**start):
    """One client whose h curves far more than its losses: h = 12.5 x^2."""
    return scalar_clients(
        hessian=[0.1], cross=[0.5], offset=[0.0], weight=[np.diag([0.0, 1.0])], linear=[[0, 0]], **start
    )


def deviation_of(q, draws, terms, step):
    """Deviation of the Neumann estimator at the start of one client, from draws of single rows."""
    samples = outer_oracle(q, np.random.default_rng(0), draws, 1, (terms, step))(*at_start(q, draws))[:, 0]
    return float(np.sqrt(((samples - samples.mean(axis=0)) ** 2).sum(axis=1).mean()))


def test_smoothness_of_h_needs_divisions_by_mu():
    q = steep()
    k = theory.quadratic_constants(q, ball(q, 1.0, 5.0))
    curvature = q.client_curvature[0, 0, 0]
    assert curvature == pytest.approx(25)
    assert printed.L_bar(k) < printed.L_h(k) < curvature <= k.L_bar
    assert k.L_bar == pytest.approx((1 + k.rho) * k.Gamma)


def test_heterogeneity_needs_m_over_mu():
    q = scalar_clients(
        hessian=[0.1, 0.1], cross=[0.02, 0.05], offset=[0.0] * 2, weight=np.zeros((2, 2, 2)), linear=[[0, 10.0]] * 2
    )
    k = theory.quadratic_constants(q, ball(q, 0.0))
    gap = abs(q.client_gradient(np.zeros((2, 1)))[0, 0] - q.client_gradient(np.zeros((2, 1)))[1, 0])
    assert printed.zeta(k) < 0.01 * gap
    assert gap <= k.zeta * (1 + 1e-12)


def test_hypergradient_bias_fails_with_the_printed_constants():
    rho, smooth = 10.0, 1.1
    direction = np.array([1.0, rho]) / math.hypot(1, rho)
    weight = smooth * np.outer(direction, direction)
    q = scalar_clients(
        hessian=[0.1] * 2, cross=[0.1 * rho] * 2, offset=[0.0] * 2, weight=[weight, -weight], linear=np.zeros((2, 2))
    )
    k = theory.quadratic_constants(q, ball(q, 1.0, 40.0))
    outer = np.array([[1.0], [-1.0]])
    inner = q.inner_solution(outer) + 2 * rho * outer
    assert outer.mean() == 0
    left = float(((q.hypergradient(outer, inner).mean(axis=0) - q.gradient(np.zeros(1))) ** 2).sum())
    consensus, inner_error = 1.0, (2 * rho) ** 2
    assert left > printed.hypergradient_bias(k, consensus, inner_error)
    assert left <= bounds.hypergradient_bias(k, consensus, inner_error)
    # With the corrected L_h the printed inequality is true as well: see docs/errata.md.
    assert left <= k.L_h**2 * ((1 + 2 * k.rho**2) * consensus + inner_error)


def test_inner_drift_loses_the_jumps_at_averaging():
    q = opposite_pulls()
    k = theory.quadratic_constants(q, ball(q))
    steps = theory.fedbio_steps(k, local_steps=20, rounds=10, inner_step=0.99 / k.L, delta=1e-4)
    path = fedbio_loop(q, steps, 10)
    total = theory.fedbio_lemmas(k, steps, path, q)["inner drift"]
    spread = path.proposed - path.proposed.mean(axis=2, keepdims=True)
    everything = float((spread**2).sum(axis=-1).mean(axis=-1).sum())
    assert total.left[0, -1] > 2 * printed.inner_drift(k, steps, 0.0, everything)
    assert total.holds


def test_printed_delta_does_not_leave_a_third():
    k = theory.Constants(L=1.0, mu=0.2, M=1.0, C_gxy=1.0)
    gamma, local = 0.99, 20
    limit = printed.delta_limit(k, gamma, local)
    assert printed.client_drift_coefficient(k, gamma, limit, local) < 0
    corrected = theory.fedbio_steps(k, local_steps=local, rounds=1, inner_step=gamma).delta
    assert printed.client_drift_coefficient(k, gamma, corrected, local) > 1 / 3


def test_printed_theorem_1_does_not_vanish():
    k = theory.Constants(L=2.0, mu=0.5, M=1.0, C_gxy=1.0, zeta_f=1.0)

    def both(rounds):
        steps = theory.fedbio_steps(k, local_steps=5, rounds=rounds)
        return printed.fedbio_bound(k, steps, 1.0, 1.0), bounds.fedbio_bound(k, steps, 1.0, 1.0).total

    early, late = both(10**9), both(10**15)
    assert late[0] == pytest.approx(early[0], rel=0.2)
    assert late[0] > 0.01
    assert late[1] == pytest.approx(early[1] * 10**-3, rel=0.01)


def test_consensus_error_holds_on_average_but_not_for_each_client():
    """Same h for both clients (so zeta = 0 in truth), but y starts at the solution of the first only."""
    q = equal_objectives(1.0)
    np.testing.assert_allclose(*q.client_gradient(np.array([[0.7], [0.7]])))
    eta = 0.01
    path = fedbio_loop(q, {"inner_step": 0.1, "outer_step": eta, "local_steps": 1}, 1)
    k = dataclasses.replace(theory.quadratic_constants(q, ball(q, 2.0)), zeta_f=0.0, zeta_gstar=0.0)
    first = path.proposed[0, 0, 0] - path.proposed[0, 0].mean(axis=0)
    own_error = path.inner[0, 0, 0] - q.inner_solution(path.outer)[0, 0, 0]
    assert own_error == 0
    assert float(first @ first) > 2 * k.L_h**2 * eta**2 * float(own_error @ own_error) + 6 * eta**2 * k.zeta**2
    steps = theory.fedbio_steps(k, 1, 1, inner_step=0.1, delta=eta)
    assert theory.fedbio_lemmas(k, steps, path, q)["consensus error"].holds


@pytest.mark.parametrize("local_steps", [1, 2, 5, 20])
def test_printed_delta_of_theorem_2_only_works_for_one_local_step(local_steps):
    assert (printed.outer_weight(NOISY, local_steps) <= 2) == (local_steps == 1)
    steps = theory.fedbioacc_steps(NOISY, local_steps, rounds=10)
    assert steps.c_outer <= 2 * 320 * NOISY.L_h**2
    assert steps.holds


def fixed_point_of_a_biased_estimator():
    """One client at rest under a truncated Neumann series: nu = 0 and omega = 0, but grad h is not zero."""
    terms, step = 0, 0.5
    q = scalar_clients(hessian=[0.5], cross=[0.5], offset=[0.0], weight=[np.eye(2)], linear=[[1.0, 3.0]])
    # Psi(x, y(x)) = (x - 1) + step * 0.5 * (x - 3) * (terms + 1 = 1) is zero at:
    rest = (1 + step * 0.5 * 3) / (1 + step * 0.5)
    q = QuadraticClients(q.train, q.val, np.array([rest]), np.array([rest]))
    k = theory.quadratic_constants(q, ball(q))
    return q, dataclasses.replace(k, sigma=1.0).with_neumann(terms, step), terms, step


def test_a_bias_leaves_a_floor_that_printed_theorem_2_denies():
    q, k, terms, step = fixed_point_of_a_biased_estimator()
    steps = theory.fedbioacc_steps(k, local_steps=2, rounds=50)
    path = fedbioacc_loop(q, steps.arguments(), 50, neumann=(terms, step))
    np.testing.assert_allclose(path.outer, path.outer[0, 0, 0, 0], rtol=1e-12)  # it never moves, whatever T
    square = float(q.gradient(q.outer) @ q.gradient(q.outer))
    assert square > 0.1
    gap = float(q.objective(q.outer)) - q.minimum()
    assert printed.fedbioacc_bound(k, steps, total=1e60, gap=gap, first_inner_error=0.0) < square
    terms_now = bounds.fedbioacc_bound(k, steps, gap, 0.0).terms
    assert terms_now["bias"] > 4 * k.G**2 * (1 - 1e-9) > square


def test_outer_momentum_error_does_not_contract_towards_grad_h():
    """Lemma "hypergradient bias" of FedBiOAcc measures nu against grad h and drops a cross term that is not zero."""
    q, k, terms, step = fixed_point_of_a_biased_estimator()
    # nu = 0 before and after the step, E = F = D = B = sigma = 0
    error, refresh = float(q.gradient(q.outer) @ q.gradient(q.outer)), 0.01
    assert error > (1 - refresh) ** 2 * error + 8 * refresh**2 * k.G**2
    mean = q.neumann_hypergradient(q.outer[None], q.inner[None], terms, step)
    assert abs(mean[0, 0]) < 1e-15  # measured against the mean of the estimator the error is zero, and stays so


def test_inner_momentum_is_biased_by_averaging_x():
    q = opposite_pulls(coupling=10.0)
    given = {"inner_step": 0.05, "outer_step": 1.0, "delta": 0.01, "u": 1.0, "c_inner": 100.0, "c_outer": 100.0}
    k = dataclasses.replace(theory.quadratic_constants(q, ball(q)), sigma=0.001)
    for previous in ("paper", "local"):
        steps = theory.fedbioacc_steps(k, 10, 2, previous=previous, **given)
        path = fedbioacc_loop(q, steps.arguments(), 2)
        state = theory.acc_state(steps, path, q)
        after = float(state.inner_momentum[0, 10])  # t = 11, the first step after the averaging
        if previous == "local":
            assert after < 1e-25
            continue
        noiseless = dataclasses.replace(k, sigma=0.0)
        allowed = printed.inner_momentum_at_averaging(noiseless, steps, steps.alphas(20)[1:], state)[0, 9]
        assert after > 2 * allowed
        assert theory.fedbioacc_lemmas(k, steps, path, q)["inner momentum"].holds


def test_dispersion_is_not_zero_at_the_start():
    q = opposite_pulls()
    k = dataclasses.replace(theory.quadratic_constants(q, ball(q)), sigma=1.0)
    steps = theory.fedbioacc_steps(k, 5, 1, u=1e9, outer_step=1e-3)
    path = fedbioacc_loop(q, steps.arguments(), 1)
    state = theory.acc_state(steps, path, q)
    alpha = steps.alphas(5)[1:]
    assert float(alpha[0]) < 1 / (16 * k.L_h * 5)
    allowed = printed.dispersion_sum(dataclasses.replace(k, sigma=0.0), steps, alpha, state)[0]
    assert float((alpha * state.dispersion[0]).sum()) > 2 * allowed
    assert theory.fedbioacc_lemmas(k, steps, path, q)["dispersion sum"].holds


def test_dispersion_grows_with_the_inner_error():
    """Same h on both clients and nu just averaged: the printed recursion allows no new dispersion, y_m - y_m(x) makes it."""
    q = equal_objectives(0.0)
    x, y = np.zeros((2, 1)), np.full((2, 1), 0.5)
    alpha, gamma, refresh, local = 0.01, 1e-6, 0.5, 5
    omega = q.inner_gradient(x, y)
    moved = y - gamma * alpha * omega
    nu = q.hypergradient(x, moved) + (1 - refresh) * (0.0 - q.hypergradient(x, y))
    dispersion = float(((nu - nu.mean(axis=0)) ** 2).mean())
    k = theory.quadratic_constants(q, ball(q, 2.0))
    k = dataclasses.replace(k, zeta_f=0.0, zeta_gstar=0.0)
    printed_right = 4 * local * (k.L_h * alpha * gamma) ** 2 * float((omega**2).mean())  # E = D = G = sigma = zeta = 0
    assert dispersion > 1e6 * printed_right
    steps = dataclasses.replace(
        theory.fedbioacc_steps(dataclasses.replace(k, sigma=1.0), local, 1),
        inner_step=gamma,
        c_outer=refresh / alpha**2,
    )
    inner_error = float(((y - q.inner_solution(x)) ** 2).mean())
    state = bounds.AccState(0.0, inner_error, 0.0, 0.0, 0.0, float((omega**2).mean()), 0.0, True)
    assert dispersion <= bounds.dispersion(k, steps, alpha, state)


def test_descent_needs_the_smoothness_of_h():
    q = steep(outer=1.0, inner=5.0)
    k = dataclasses.replace(theory.quadratic_constants(q, ball(q, 1.0, 5.0)), sigma=1.0)
    gradient = q.gradient(q.outer)
    square, length = float(gradient @ gradient), 0.05
    before, after = float(q.objective(q.outer)), float(q.objective(q.outer - length * gradient))
    as_printed = before - (length / 2 - length**2 * k.L / 2) * square - length / 2 * square
    assert after > as_printed
    steps = dataclasses.replace(theory.fedbioacc_steps(k, 1, 1), outer_step=length)
    state = bounds.AccState(0.0, 0.0, 0.0, 0.0, square, 0.0, 0.0, True)
    assert after <= bounds.acc_descent(k, steps, 1.0, before, square, state)


def test_jump_term_of_the_potential_lost_a_gamma():
    mu, gamma, alpha, local = 0.5, 0.05, 0.01, 5
    exact = (1 + 8 / (mu * gamma * alpha)) * alpha**2
    assert exact > 16 * local * alpha / mu / 5
    mu, gamma, local = 0.5, 0.001, 1
    assert (1 + 8 / (mu * gamma * alpha)) * alpha**2 > 16 * local * alpha / mu
    assert (1 + 8 / (mu * gamma * alpha)) * alpha**2 <= 16 * local * alpha / (mu * gamma)


def test_first_outer_error_is_not_noise_alone():
    """A_1 <= sigma^2 is claimed; without noise A_1 against grad h is the inner error, against the mean of mu it is 0."""
    q = random_quadratic(3)
    outer, inner = np.broadcast_to(q.outer, (3, 3)), np.broadcast_to(q.inner, (3, 4))
    first = q.hypergradient(outer, inner).mean(axis=0)
    assert float(((first - q.gradient(q.outer)) ** 2).sum()) > 0.1


def test_bias_is_g_1_and_deviation_g_2():
    """Proposition 1 gives the bias first; Assumption 6 takes "sigma = G_1 and G = G_2", the wrong way round."""
    terms, step, draws = 30, 0.5, 4000
    q = random_quadratic(1, clients=1, gradient_noise=0.05, hessian_noise=0.3, samples=64, strong_convexity=0.9)
    k = theory.quadratic_constants(q, ball(q, 0.0), batch_size=1)
    deviation = deviation_of(q, draws, terms, step)
    mean = q.neumann_hypergradient(q.outer[None], q.inner[None], terms, step)
    bias = float(np.linalg.norm(mean - q.hypergradient(q.outer[None], q.inner[None])))
    assert bias <= k.G_1(terms, step) < deviation <= k.G_2(terms, step)


def test_g_2_is_printed_as_its_square():
    terms, step = 5, 0.5
    q = random_quadratic(2, clients=1, gradient_noise=0.01, hessian_noise=0.3, samples=64)
    small = QuadraticClients(q.train, OuterSample(1e-5 * q.val.hessian, 1e-5 * q.val.linear), q.outer, q.inner)
    k = theory.quadratic_constants(small, ball(small, 0.0), batch_size=1)
    variance = deviation_of(small, 4000, terms, step) ** 2
    number_in_print = k.G_2(terms, step) ** 2
    assert number_in_print**2 < variance <= number_in_print


def test_the_papers_constants_hardly_refresh_the_momentum():
    """delta = .1, u = 1, c = 1 (sigma is not given, 1 assumed): what survives of the first minibatch after 2,000 steps."""

    def surviving(delta, u, sigma, c):
        alphas = delta / np.cbrt(u + sigma**2 * np.arange(1, 2000))
        return float(np.prod(np.clip(1 - c * alphas**2, 0, 1)))

    assert surviving(0.1, 1.0, 1.0, 1.0) == pytest.approx(0.7, abs=0.03)
    tuned = {name: fb.TUNED[name] for name in ("delta", "u", "sigma")}
    assert surviving(**tuned, c=fb.TUNED["c_outer"]) < 1e-12
