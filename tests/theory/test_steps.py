"""Step sizes of the theorems: self-consistent, complete, and accepted by the algorithms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel import theory
from fedbilevel.tasks import random_quadratic
from tests.theory.loops import NOISY, PLAIN, ball

CONSTANTS = st.builds(
    lambda L, ratio, cross, M, curved, zeta, sigma, bias, clients: theory.Constants(
        L=L, mu=ratio * L, M=M, C_gxy=cross * L, L_gxy=curved, L_gyy=curved,
        zeta_f=zeta, sigma=sigma, G=bias, clients=clients,
    ),
    st.floats(0.01, 50), st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.floats(0.01, 20), st.floats(0, 3),
    st.floats(0, 10), st.floats(1e-3, 10), st.floats(0, 1), st.integers(1, 50),
)  # fmt: skip


@given(CONSTANTS, st.integers(1, 30), st.integers(1, 10**6))
def test_theorem_1_steps_meet_their_conditions_with_room_for_nothing_more(k, local_steps, rounds):
    steps = theory.fedbio_steps(k, local_steps, rounds)
    assert steps.holds
    assert steps.outer_step == pytest.approx(steps.delta / np.sqrt(rounds * local_steps))
    wider = theory.fedbio_steps(k, local_steps, rounds, inner_step=steps.inner_step, delta=1.02 * steps.delta)
    assert not wider.holds


@given(CONSTANTS, st.integers(1, 30), st.sampled_from(["paper", "local"]), st.sampled_from(["printed", "needed"]))
def test_theorem_2_steps_are_self_consistent(k, local_steps, previous, conditions):
    steps = theory.fedbioacc_steps(k, local_steps, 100, previous=previous, conditions=conditions)
    assert steps.holds, [check for check in steps.checks if not check.holds]
    alphas = steps.alphas(1000)
    assert (np.diff(alphas) < 0).all()
    assert steps.c_outer * alphas[1] ** 2 <= 1
    # What the proof takes from the schedule: 1/alpha_t - 1/alpha_{t-1} <= sigma^2 alpha_t / (24 delta^3 L_h I).
    growth = steps.sigma**2 / (24 * steps.delta**3 * k.L_h * local_steps)
    assert (np.diff(1 / alphas) <= growth * alphas[1:] * (1 + 1e-6)).all()
    ratio = alphas[:-local_steps] / alphas[local_steps:]
    assert ratio.max() <= 1.01
    assert (steps.delta, steps.c_outer - growth) == pytest.approx((k.sigma ** (2 / 3) / k.L_h, 320 * k.L_h**2))


def test_needed_conditions_allow_larger_steps():
    printed = theory.fedbioacc_steps(NOISY, 5, 100)
    needed = theory.fedbioacc_steps(NOISY, 5, 100, conditions="needed")
    assert needed.outer_step > 10 * printed.outer_step
    assert {c.name for c in needed.checks} < {c.name for c in printed.checks}


def test_a_step_just_too_large_is_listed_as_failing():
    steps = theory.fedbioacc_steps(NOISY, 5, 100, conditions="needed")
    wider = theory.fedbioacc_steps(NOISY, 5, 100, conditions="needed", outer_step=steps.outer_step / 0.98)
    assert steps.holds
    assert [c.name.split(":")[0] for c in wider.checks if not c.holds] == ["inner error B"]
    small_u = theory.fedbioacc_steps(NOISY, 5, 100, u=1.0)
    failing = {c.name.split(":")[1].strip() for c in small_u.checks if not c.holds}
    assert {"u >= 2 sigma^2", "alpha_t <= 1/(16 I L_h)", "c_nu alpha_t^2 <= 1"} <= failing


@pytest.mark.parametrize("previous", ["paper", "local"])
def test_steps_go_straight_into_the_algorithms(previous):
    q = random_quadratic(0, gradient_noise=0.2)
    k = theory.quadratic_constants(q, ball(q), batch_size=2)
    first = theory.fedbio_steps(k, 3, 2)
    problem, data = q.problem(), q.data()
    taken = fb.trace(fb.fedbio(problem, hypergradient=fb.exact(), **first.arguments()), data, rounds=2)
    np.testing.assert_allclose(taken.proposed, taken.outer - first.outer_step * taken.outer_momentum, rtol=1e-12)
    second = theory.fedbioacc_steps(k, 3, 2, previous=previous)
    algorithm = fb.fedbioacc(problem, hypergradient=fb.exact(), batch_size=2, **second.arguments())
    taken = fb.trace(algorithm, data, rounds=2)
    lengths = second.outer_step * second.alphas(6)[1:, None, None]
    np.testing.assert_allclose(taken.proposed, taken.outer - lengths * taken.outer_momentum, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"local_steps": 0, "rounds": 1}, "local_steps and rounds must be at least 1"),
        ({"local_steps": 1, "rounds": 1, "inner_step": 0.6}, "Theorem . needs 0 < inner_step < 1/L"),
        ({"local_steps": 1, "rounds": 1, "delta": 0.0}, "delta must be positive"),
    ],
)
def test_bad_arguments(arguments, sentence):
    for function in (theory.fedbio_steps, theory.fedbioacc_steps):
        with pytest.raises(ValueError, match=sentence):
            function(NOISY, **arguments)


def test_theorem_2_needs_a_noise_level_and_known_names():
    with pytest.raises(ValueError, match="sigma of Assumptions 4 and 6, which is 0"):
        theory.fedbioacc_steps(PLAIN, 5, 10)
    for option, sentence in (
        ({"previous": "global"}, "previous must be"),
        ({"conditions": "none"}, "conditions must be"),
        ({"outer_step": 0.0}, "outer_step must be positive"),
    ):
        with pytest.raises(ValueError, match=sentence):
            theory.fedbioacc_steps(NOISY, 5, 10, **option)
