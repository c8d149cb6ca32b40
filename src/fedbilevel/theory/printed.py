"""Statements as the paper prints them, kept to show where they fail. Nothing else in the package uses them.

docs/errata.md goes through the list; tests/theory/test_printed.py holds a concrete instance against each.
"""

from __future__ import annotations

import math

from fedbilevel.theory.constants import Constants
from fedbilevel.theory.steps import FedBiOSteps


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
    return (
        (1 + k.rho) * k.zeta_f
        + k.mu / k.M * k.zeta_gxy
        + k.M * k.C_gxy * k.zeta_gyy / k.mu**2
        + (k.L + k.L_gxy * k.mu / k.M + k.C_gxy * k.L / k.mu + k.M * k.C_gxy * k.L_gyy / k.mu**2) * k.zeta_gstar
    )


def hypergradient_bias(constants: Constants, consensus: float, inner_error: float) -> float:
    """Lemma "hypergradient bias" without the factor 2 and with the printed L_h."""
    return L_h(constants) ** 2 * ((1 + 2 * constants.rho**2) * consensus + inner_error)


def inner_drift(constants: Constants, steps: FedBiOSteps, first_inner_error: float, drift: float) -> float:
    """Lemma "inner drift": the weight of the averaging jumps carries a factor q_1 q^I; ``drift`` is the sum of all Ahat_t."""
    rates = constants.inner_rates(steps.inner_step)
    decay = rates.q_1 * rates.q**steps.local_steps
    gap, total = 1 - rates.q, steps.rounds * steps.local_steps
    moved = (constants.rho * steps.outer_step * constants.M_h) ** 2
    return (
        first_inner_error / gap
        + first_inner_error / (gap * (1 - decay))
        + moved * rates.q_1 * rates.q_bar * (steps.rounds - 1) / (gap**2 * (1 - decay))
        + rates.q_1_bar * constants.rho**2 * decay / (gap * (1 - decay)) * drift
        + rates.q_bar * moved * total / gap
    )


def delta_limit(constants: Constants, inner_step: float, local_steps: int) -> float:
    """The limit on delta in Theorem 1: Gamma for L_h and a factor q_1 q^I under the root."""
    rates = constants.inner_rates(inner_step)
    decay = rates.q_1 * rates.q**local_steps
    jump = math.sqrt((1 - rates.q) * (1 - decay)) / (
        2 * constants.Gamma * constants.rho * local_steps * math.sqrt(rates.q_1_bar * decay)
    )
    return min(jump, 1 / (12 * L_h(constants) * local_steps), constants.mu * inner_step / 2, 1.0)


def client_drift_coefficient(constants: Constants, inner_step: float, outer_step: float, local_steps: int) -> float:
    """What the proof of Lemma "client drift" needs to be at least 1/3, with its two sums taken correctly."""
    rates = constants.inner_rates(inner_step)
    decay = rates.q_1 * rates.q**local_steps
    scale = (constants.L_h * local_steps * outer_step) ** 2
    return 1 - 2 * rates.q_1_bar * scale * constants.rho**2 / ((1 - rates.q) * (1 - decay)) - 12 * scale


def fedbio_bound(constants: Constants, steps: FedBiOSteps, gap: float, first_inner_error: float) -> float:
    """Theorem 1: the last bracket holds T but is divided by T only once."""
    k, local, rounds = constants, steps.local_steps, steps.rounds
    rates, total, square = k.inner_rates(steps.inner_step), rounds * local, L_h(constants) ** 2
    decay, one = rates.q_1 * rates.q**local, 1 - rates.q
    moved = (k.rho * k.M_h) ** 2
    bracket = (
        6 * rounds * square * local**2 * first_inner_error / one
        + 18 * (rounds - 1) * square * local**2 * moved / (one**2 * (1 - decay))
        + 12 * square * total * local * (local - 1) * moved / one
        + 18 * total * (local * k.zeta) ** 2
    )
    weight = rates.q_1_bar * square * k.rho**2 * decay / (one * (1 - decay)) + square * (1 + 2 * k.rho**2)
    return (
        2 * gap / (steps.delta * math.sqrt(total))
        + square * first_inner_error / (one * total)
        + 2 * square * first_inner_error / (one * (1 - decay) * total)
        + steps.delta**2 * square * moved * rates.q_1 * rates.q_bar / (one**2 * (1 - rates.q**local) * local * total)
        + steps.delta**2 * square * rates.q_bar * moved / (one * total)
        + weight * bracket * steps.delta**2 / total
    )


def outer_weight(constants: Constants, local_steps: int) -> float:
    """c_nu / (320 L_h^2) of Theorem 2 with delta = sigma^(2/3) / (16 I L_h); the proof needs at most 2."""
    growth = (16 * local_steps * constants.L_h) ** 3 / (24 * constants.L_h * local_steps)
    return 1 + growth / (320 * constants.L_h**2)


def inner_momentum_at_averaging(
    constants: Constants,
    keep: float,
    inner_momentum: float,
    outer_step: float,
    inner_step: float,
    momenta: float,
    inner_square: float,
) -> float:
    """Lemma "inner momentum" at a synchronisation: as if omega had been estimated at the averaged x. Steps include alpha."""
    moved = 2 * outer_step**2 * momenta + inner_step**2 * inner_square
    return keep**2 * inner_momentum + 2 * (1 - keep) ** 2 * constants.sigma**2 + 2 * keep**2 * constants.L**2 * moved


def dispersion_sum(
    constants: Constants,
    outer_step: float,
    inner_step: float,
    c_outer: float,
    local_steps: int,
    mean_square: float,
    inner_square: float,
    cubes: float,
) -> float:
    """Lemma "dispersion sum" over one round; the sums of alpha_t E_t, alpha_t F_t and alpha_t^3 go in."""
    k = constants
    coefficient = 1 - 3 * (outer_step * c_outer) ** 2 * (1 + k.rho**2) / (16**3 * 32 * local_steps**2 * k.L_h**4)
    noise = c_outer**2 / k.L_h * (3 * k.sigma**2 / 32 + 3 * k.G**2 / 2 + 3 * k.zeta**2 / 16)
    right = 3 * outer_step**2 / 32 * mean_square + 3 * inner_step**2 / 64 * inner_square + noise * cubes
    return right / coefficient


def fedbioacc_bound(
    constants: Constants,
    *,
    inner_step: float,
    outer_step: float,
    delta: float,
    u: float,
    c_inner: float,
    c_outer: float,
    total: float,
    gap: float,
    first_inner_error: float,
) -> float:
    """Theorem 2: the bias G is multiplied by a factor that vanishes with T."""
    k, sigma = constants, constants.sigma
    outer, inner = 320 * k.L_h**2, 32 * k.L**2
    noise = (
        c_inner**2 * sigma**2 / (16 * k.L**2) + c_outer**2 * (sigma**2 / 5 + 2 * k.G**2 + 3 * k.zeta**2 / 16) / k.L_h**2
    )
    first = 2 * sigma**2 * (u ** (1 / 3) + sigma ** (2 / 3)) / delta
    bracket = (
        2 * (gap + first_inner_error) / outer_step
        + first * (1 / outer + inner_step / (outer_step * inner))
        + noise * 2 * delta**3 * math.log(total) / (outer_step * sigma**2)
    )
    return float(bracket * (u ** (1 / 3) / (delta * total) + sigma ** (2 / 3) / (delta * total ** (2 / 3))))
