"""Right-hand sides of the lemmas and of the two theorems, with the corrected constants, as plain functions.

Notation of the proofs (docs/theory.md), all averaged over clients:
consensus      Q_t  ‖x_t^(m) - xbar_t‖^2           inner_error     B_t  ‖y_t^(m) - y_m(x_t^(m))‖^2
outer_error    A_t  ‖nubar_t - mean of E[mu_t]‖^2   inner_momentum  C_t  ‖omega_t - grad_y g‖^2
dispersion     D_t  ‖nu_t^(m) - nubar_t‖^2          mean_square     E_t  ‖nubar_t‖^2        inner_square  F_t  ‖omega_t‖^2
Scalars or arrays go in, the same shape comes out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedbilevel.theory.constants import Constants
from fedbilevel.theory.steps import FedBiOAccSteps, FedBiOSteps, potential_weights

Values = Any  # floats or arrays


class Bound(NamedTuple):
    """A theorem's right-hand side: the named terms that add up to it.

    Attributes:
        terms: The terms by name; ``total`` is their sum.
    """

    terms: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.terms.values())


# --- FedBiO --------------------------------------------------------------------------------------------------------


def hypergradient_bias(constants: Constants, consensus: Values, inner_error: Values) -> Values:
    """Lemma "hypergradient bias": bound on ‖grad h(xbar_t) - nubar_t‖^2 (the factor 2 is missing in print)."""
    return constants.L_h**2 * ((1 + 2 * constants.rho**2) * consensus + 2 * inner_error)


def consensus_error(
    constants: Constants, steps: FedBiOSteps, inner_errors_so_far: Values, consensus_so_far: Values
) -> Values:
    """Lemma "consensus error", averaged over clients: bound on Ahat_t from the sums of B and Q since the last averaging."""
    scale = constants.L_h**2 * steps.local_steps * steps.outer_step**2
    heterogeneity = 6 * (steps.local_steps * steps.outer_step * constants.zeta) ** 2
    return 2 * scale * inner_errors_so_far + 12 * scale * consensus_so_far + heterogeneity


def jump_weight(constants: Constants, steps: FedBiOSteps) -> float:
    """What a unit of Ahat at a synchronisation, where y_x jumps with x, adds to the sum of B_t."""
    rates = constants.inner_rates(steps.inner_step)
    return rates.q_1_bar * constants.rho**2 / ((1 - rates.q) * (1 - rates.decay(steps.local_steps)))


def inner_drift(constants: Constants, steps: FedBiOSteps, first_inner_error: float, jumps: float) -> float:
    """Lemma "inner drift": bound on the sum of B_t, t = 1..T; ``jumps`` is the sum of Ahat at the synchronisations 1..S-1."""
    rates = constants.inner_rates(steps.inner_step)
    decay, gap = rates.decay(steps.local_steps), 1 - rates.q
    moved = (constants.rho * steps.outer_step * constants.M_h) ** 2
    return (
        first_inner_error / gap
        + first_inner_error / (gap * (1 - decay))
        + moved * rates.q_1 * rates.q_bar * (steps.rounds - 1) / (gap**2 * (1 - decay))
        + jump_weight(constants, steps) * jumps
        + rates.q_bar * moved * steps.total / gap
    )


def client_drift(
    constants: Constants, steps: FedBiOSteps, first_inner_error: float, smoothness: float | None = None
) -> float:
    """Lemma "client drift": bound on the sum of Ahat_t = mean ‖xhat_t^(m) - xbar_t‖^2 over t = 2..T+1.

    ``smoothness`` is L_h unless given.
    """
    rates = constants.inner_rates(steps.inner_step)
    decay, gap = rates.decay(steps.local_steps), 1 - rates.q
    local, L_h = steps.local_steps, constants.L_h if smoothness is None else smoothness
    smooth, moved = (L_h * local) ** 2, (constants.rho * constants.M_h) ** 2
    return steps.outer_step**2 * (
        6 * steps.rounds * smooth * first_inner_error / gap
        + 18 * (steps.rounds - 1) * smooth * moved / (gap**2 * (1 - decay))
        + 12 * L_h**2 * steps.total * local * (local - 1) * moved / gap
        + 18 * steps.total * (local * constants.zeta) ** 2
    )


def descent(
    constants: Constants,
    steps: FedBiOSteps,
    objective: Values,
    gradient_square: Values,
    consensus: Values,
    inner_error: Values,
) -> Values:
    """Descent lemma of FedBiO: bound on h(xbar_{t+1})."""
    bias = hypergradient_bias(constants, consensus, inner_error)
    return objective - steps.outer_step / 2 * gradient_square + steps.outer_step / 2 * bias


def fedbio_bound(constants: Constants, steps: FedBiOSteps, gap: float, first_inner_error: float) -> Bound:
    """Theorem 1: bound on the mean of ‖grad h(xbar_t)‖^2 over t = 1..T, for ``gap`` = h(xbar_1) - h*.

    Args:
        constants: The constants of the problem.
        steps: The steps of the run, from `fedbio_steps`.
        gap: h(xbar_1) - h*: how far the start is above the minimum.
        first_inner_error: B_1: the mean of ‖y - y(x)‖^2 over the clients at the start.

    Returns:
        A `Bound`.
    """
    total, square = steps.total, constants.L_h**2
    weight = square * (1 + 2 * constants.rho**2 + 2 * jump_weight(constants, steps))
    return Bound(
        {
            "start": 2 * gap / (steps.outer_step * total),
            "inner error": 2 * square * inner_drift(constants, steps, first_inner_error, 0.0) / total,
            "client drift": weight * client_drift(constants, steps, first_inner_error) / total,
        }
    )


# --- FedBiOAcc -----------------------------------------------------------------------------------------------------


class AccState(NamedTuple):
    """The seven errors of a step, and whether a synchronisation follows it. Fields may be arrays over steps."""

    outer_error: Values
    inner_error: Values
    inner_momentum: Values
    dispersion: Values
    mean_square: Values
    inner_square: Values
    consensus: Values
    synchronised: Values


def _outer_move(steps: FedBiOAccSteps, alpha: Values, state: AccState, jump: Values) -> Values:
    """mean ‖x_{t+1} - x_t^(m)‖^2: steps of size eta alpha nu; at a synchronisation the mean's step and the ``jump`` to it."""
    local = steps.outer_step**2 * alpha**2 * (state.dispersion + state.mean_square)
    averaged = steps.outer_step**2 * alpha**2 * state.mean_square + jump
    return np.where(state.synchronised, averaged, local)


def _oracle_move(steps: FedBiOAccSteps, alpha: Values, state: AccState) -> Values:
    """How far the oracle's point moves; for previous = "paper" it is asked again at the mean of x_t, so there is no jump."""
    outer = _outer_move(steps, alpha, state, 0.0 if steps.previous == "paper" else state.consensus)
    return outer + steps.inner_step**2 * alpha**2 * state.inner_square


def _momentum(
    constants: Constants, steps: FedBiOAccSteps, alpha: Values, state: AccState, error: Values, *, inner: bool
) -> Values:
    """Bound on the next error of a momentum: what is kept of this one, fresh noise, and how far the point has moved."""
    # Outer estimates are averaged over the clients, inner ones are not.
    c, lipschitz, averaged = (
        (steps.c_inner, constants.L, 1) if inner else (steps.c_outer, constants.L_h, constants.clients)
    )
    keep = 1 - c * alpha**2
    noise = 2 * (1 - keep) ** 2 * constants.sigma**2 / averaged
    moved = 2 * keep**2 * lipschitz**2 / averaged * _oracle_move(steps, alpha, state)
    plain = keep**2 * error + noise + moved
    if steps.previous == "local":
        return plain
    biased = keep**2 * (2 - keep) * error + lipschitz**2 * state.consensus * keep**2 * (2 - keep) / (1 - keep)
    return np.where(state.synchronised, biased + noise + moved, plain)


def outer_momentum(constants: Constants, steps: FedBiOAccSteps, alpha: Values, state: AccState) -> Values:
    """Lemma "outer momentum": bound on A_{t+1}."""
    return _momentum(constants, steps, alpha, state, state.outer_error, inner=False)


def inner_momentum(constants: Constants, steps: FedBiOAccSteps, alpha: Values, state: AccState) -> Values:
    """Lemma "inner momentum": bound on C_{t+1}."""
    return _momentum(constants, steps, alpha, state, state.inner_momentum, inner=True)


def inner_error(constants: Constants, steps: FedBiOAccSteps, alpha: Values, state: AccState) -> Values:
    """Lemma "inner drift" of FedBiOAcc: bound on B_{t+1}, for gamma <= 1/(6 L) and alpha_t <= 1."""
    gamma, mu = steps.inner_step, constants.mu
    return (
        (1 - mu * gamma * alpha / 4) * state.inner_error
        - 3 / 4 * gamma**2 * alpha * state.inner_square
        + 25 * gamma * alpha / (6 * mu) * state.inner_momentum
        + 25 * constants.rho**2 / (6 * mu * gamma * alpha) * _outer_move(steps, alpha, state, state.consensus)
    )


def dispersion(constants: Constants, steps: FedBiOAccSteps, alpha: Values, state: AccState) -> Values:
    """Lemma "momentum dispersion": bound on D_{t+1}; a synchronisation removes D_t but not what the next step adds."""
    local = steps.local_steps
    spread = constants.sigma**2 + 4 * (
        constants.G**2 + constants.zeta**2 + constants.L_h**2 * (state.inner_error + state.consensus)
    )
    kept = np.where(state.synchronised, 0.0, (1 + 1 / local) * state.dispersion)
    moved = constants.L_h**2 * _oracle_move(steps, alpha, state)
    return kept + 4 * local * (moved + (steps.c_outer * alpha**2) ** 2 * spread)


def acc_descent(
    constants: Constants,
    steps: FedBiOAccSteps,
    alpha: Values,
    objective: Values,
    gradient_square: Values,
    state: AccState,
) -> Values:
    """Descent lemma of FedBiOAcc: bound on h(xbar_{t+1}). The bias G and the inner error are missing in print."""
    step = steps.outer_step * alpha
    error = state.outer_error + constants.G**2 + constants.L_h**2 * (state.inner_error + state.consensus)
    gained = step / 2 * (1 - step * constants.L_h) * state.mean_square + step / 2 * gradient_square
    return objective - gained + 2 * step * error


def potential(
    constants: Constants, steps: FedBiOAccSteps, alpha_before: Values, objective: Values, state: AccState
) -> Values:
    """P_t = h(xbar_t) + lambda_A A_t / alpha_{t-1} + lambda_B B_t + lambda_C C_t / alpha_{t-1}."""
    weights = potential_weights(constants, steps)
    momentum = weights.outer_momentum * state.outer_error + weights.inner_momentum * state.inner_momentum
    return objective + momentum / alpha_before + weights.inner_error * state.inner_error


def spread(constants: Constants) -> float:
    """What separates the clients' stochastic hypergradients at a common x with y = y_x."""
    return constants.sigma**2 + 4 * constants.G**2 + 4 * constants.zeta**2


def dispersion_sum(constants: Constants, steps: FedBiOAccSteps, alphas: Values, state: AccState) -> Values:
    """Lemma "dispersion sum": bound on the sum of D_t / alpha_t, t <= T, for every T (where the feedback is <= 1/2)."""
    largest = float(alphas[0])
    moving = constants.L_h**2 * (steps.outer_step**2 * state.mean_square + steps.inner_step**2 * state.inner_square)
    refreshed = 4 * (steps.c_outer * largest * constants.L_h) ** 2 * state.inner_error
    sources = np.cumsum(alphas * (moving + refreshed) + spread(constants) * steps.c_outer**2 * alphas**3, axis=1)
    first = 6.06 * steps.local_steps * state.dispersion[:, :1] / largest
    return first + 2 * steps.dispersal * sources


def potential_rise(
    constants: Constants, steps: FedBiOAccSteps, total: int, initial_dispersion: float
) -> dict[str, float]:
    """What the potential may gain in T steps, by cause.

    Potential lemma: sum over t <= T of (eta alpha_t / 2)‖grad h‖^2 <= P_1 - P_{T+1} + the sum of these three.
    """
    weights = potential_weights(constants, steps)
    alphas = steps.alphas(total)[1:]
    dispersal = 2 * weights.dispersion * steps.dispersal
    variance = constants.sigma**2 * (
        weights.outer_momentum * steps.c_outer**2 / constants.clients + weights.inner_momentum * steps.c_inner**2
    )
    cubes = float(np.sum(alphas**3))
    return {
        "bias": 2 * steps.outer_step * constants.G**2 * float(np.sum(alphas)),
        "noise": (2 * variance + dispersal * steps.c_outer**2 * spread(constants)) * cubes,
        "first dispersion": 6.06 * weights.dispersion * steps.local_steps * initial_dispersion / float(alphas[0]),
    }


def fedbioacc_bound(constants: Constants, steps: FedBiOAccSteps, gap: float, first_inner_error: float) -> Bound:
    """Theorem 2, corrected: bound on the mean of E‖grad h(xbar_t)‖^2 over t = 1..T.

    All terms fall like T^(-2/3) (the noise with a logarithm) except the last: a biased hypergradient leaves a floor of
    about 6 G^2, which the printed theorem misses.

    Args:
        constants: The constants of the problem.
        steps: The steps of the run, from `fedbioacc_steps`.
        gap: h(xbar_1) - h*: how far the start is above the minimum.
        first_inner_error: B_1: the mean of ‖y - y(x)‖^2 over the clients at the start.

    Returns:
        A `Bound`.
    """
    alphas = steps.alphas(steps.total)
    weights = potential_weights(constants, steps)
    # D_1: clients start from different stochastic hypergradients, which nobody has averaged yet.
    first = constants.sigma**2 + 4 * (constants.G**2 + constants.L_h**2 * first_inner_error + constants.zeta**2)
    rise = potential_rise(constants, steps, steps.total, first)
    scale = 2 / (steps.outer_step * float(alphas[-1]) * steps.total)
    variance = constants.sigma**2 * (weights.outer_momentum / constants.clients + weights.inner_momentum)
    return Bound(
        {
            "start": scale * gap,
            "inner error": scale * weights.inner_error * first_inner_error,
            "first minibatches": scale * variance / float(alphas[0]),
            **{cause: scale * rise[cause] for cause in ("first dispersion", "noise", "bias")},
        }
    )
