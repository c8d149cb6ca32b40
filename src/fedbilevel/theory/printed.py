"""Statements as the paper prints them, kept to show where they fail. Nothing else in the package uses them.

docs/errata.md goes through the list; tests/theory/test_printed.py holds a concrete instance against each.
"""

from __future__ import annotations

import math

from fedbilevel.theory import bounds
from fedbilevel.theory.bounds import AccState, Values
from fedbilevel.theory.constants import Constants
from fedbilevel.theory.steps import FedBiOAccSteps, FedBiOSteps


def L_bar(constants: Constants) -> float:
    """Proposition 2c with products by mu."""
    k = constants
    return (k.L + k.C) * k.C_gxy * k.mu + k.L + k.M * (k.L_gxy * k.M * k.mu + k.L_gyy * k.C_gxy * k.mu**2)


def L_h(constants: Constants) -> float:
    """max(L_bar, Gamma, C) with the printed L_bar."""
    return max(L_bar(constants), constants.Gamma, constants.C)


def zeta(constants: Constants) -> float:
    """Proposition 3 with mu/M."""
    k = constants
    wrong = k.mu / k.M - k.M / k.mu
    return k.zeta + wrong * (k.zeta_gxy + k.L_gxy * k.zeta_gstar)


def hypergradient_bias(constants: Constants, consensus: float, inner_error: float) -> float:
    """Lemma "hypergradient bias" without the factor 2 and with the printed L_h."""
    return L_h(constants) ** 2 * ((1 + 2 * constants.rho**2) * consensus + inner_error)


def inner_drift(constants: Constants, steps: FedBiOSteps, first_inner_error: float, drift: float) -> float:
    """Lemma "inner drift": the weight of the averaging jumps carries a factor q_1 q^I; ``drift`` is the sum of all Ahat_t."""
    decay = constants.inner_rates(steps.inner_step).decay(steps.local_steps)
    return bounds.inner_drift(constants, steps, first_inner_error, decay * drift)


def delta_limit(constants: Constants, inner_step: float, local_steps: int) -> float:
    """The limit on delta in Theorem 1: Gamma for L_h and a factor q_1 q^I under the root."""
    rates = constants.inner_rates(inner_step)
    decay = rates.decay(local_steps)
    jump = math.sqrt((1 - rates.q) * (1 - decay)) / (
        2 * constants.Gamma * constants.rho * local_steps * math.sqrt(rates.q_1_bar * decay)
    )
    return min(jump, 1 / (12 * L_h(constants) * local_steps), constants.mu * inner_step / 2, 1.0)


def client_drift_coefficient(constants: Constants, inner_step: float, outer_step: float, local_steps: int) -> float:
    """What the proof of Lemma "client drift" needs to be at least 1/3, with its two sums taken correctly."""
    rates = constants.inner_rates(inner_step)
    scale = (constants.L_h * local_steps * outer_step) ** 2
    jumps = 2 * rates.q_1_bar * scale * constants.rho**2 / ((1 - rates.q) * (1 - rates.decay(local_steps)))
    return 1 - jumps - 12 * scale


def fedbio_bound(constants: Constants, steps: FedBiOSteps, gap: float, first_inner_error: float) -> float:
    """Theorem 1: the last bracket holds T but is divided by T only once."""
    k, local, total = constants, steps.local_steps, steps.total
    rates, square = k.inner_rates(steps.inner_step), L_h(k) ** 2
    decay, gap_q = rates.decay(local), 1 - rates.q
    moved = (k.rho * k.M_h) ** 2
    bracket = bounds.client_drift(k, steps, first_inner_error, smoothness=L_h(k)) / steps.outer_step**2
    weight = square * (bounds.jump_weight(k, steps) * decay + 1 + 2 * k.rho**2)
    return (
        2 * gap / (steps.delta * math.sqrt(total))
        + square * first_inner_error / (gap_q * total)
        + 2 * square * first_inner_error / (gap_q * (1 - decay) * total)
        + steps.delta**2 * square * moved * rates.q_1 * rates.q_bar / (gap_q**2 * (1 - rates.q**local) * local * total)
        + steps.delta**2 * square * rates.q_bar * moved / (gap_q * total)
        + weight * bracket * steps.delta**2 / total
    )


def outer_weight(constants: Constants, local_steps: int) -> float:
    """c_nu / (320 L_h^2) of Theorem 2 with delta = sigma^(2/3) / (16 I L_h); the proof needs at most 2."""
    growth = (16 * local_steps * constants.L_h) ** 3 / (24 * constants.L_h * local_steps)
    return 1 + growth / (320 * constants.L_h**2)


def inner_momentum_at_averaging(constants: Constants, steps: FedBiOAccSteps, alpha: Values, state: AccState) -> Values:
    """Lemma "inner momentum" at a synchronisation: as if omega had been estimated at the averaged x."""
    keep = 1 - steps.c_inner * alpha**2
    moved = 2 * (steps.outer_step * alpha) ** 2 * (state.dispersion + state.mean_square)
    moved = moved + (steps.inner_step * alpha) ** 2 * state.inner_square
    kept = keep**2 * state.inner_momentum
    return kept + 2 * (1 - keep) ** 2 * constants.sigma**2 + 2 * keep**2 * constants.L**2 * moved


def dispersion_sum(constants: Constants, steps: FedBiOAccSteps, alpha: Values, state: AccState) -> Values:
    """Lemma "dispersion sum" over the steps of one round."""
    k, eta = constants, steps.outer_step
    coefficient = 1 - 3 * (eta * steps.c_outer) ** 2 * (1 + k.rho**2) / (16**3 * 32 * steps.local_steps**2 * k.L_h**4)
    noise = steps.c_outer**2 / k.L_h * (3 * k.sigma**2 / 32 + 3 * k.G**2 / 2 + 3 * k.zeta**2 / 16)
    moved = 3 * eta**2 / 32 * state.mean_square + 3 * steps.inner_step**2 / 64 * state.inner_square
    return (alpha * moved + noise * alpha**3).sum(axis=-1) / coefficient


def fedbioacc_bound(
    constants: Constants, steps: FedBiOAccSteps, total: float, gap: float, first_inner_error: float
) -> float:
    """Theorem 2: the bias G is multiplied by a factor that vanishes with T."""
    k, sigma, eta, delta = constants, constants.sigma, steps.outer_step, steps.delta
    noise = (
        steps.c_inner**2 * sigma**2 / (16 * k.L**2)
        + steps.c_outer**2 * (sigma**2 / 5 + 2 * k.G**2 + 3 * k.zeta**2 / 16) / k.L_h**2
    )
    root = steps.u ** (1 / 3)
    first = 2 * sigma**2 * (root + sigma ** (2 / 3)) / delta
    bracket = (
        2 * (gap + first_inner_error) / eta
        + first * (1 / (320 * k.L_h**2) + steps.inner_step / (eta * 32 * k.L**2))
        + noise * 2 * delta**3 * math.log(total) / (eta * sigma**2)
    )
    return float(bracket * (root / (delta * total) + sigma ** (2 / 3) / (delta * total ** (2 / 3))))
