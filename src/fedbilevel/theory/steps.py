"""Step sizes of both theorems, with every inequality their proofs need, checked.

Theorem 1 (FedBiO): gamma < 1/L, eta = delta / sqrt(T), and delta below four limits.

Theorem 2 (FedBiOAcc): delta = sigma^(2/3) / L_h; u so large that alpha_t <= 1/(16 I L_h) and c alpha_t^2 <= 1; eta so
small that no error term outweighs the descent. The paper's list of conditions on eta does not cover all error terms
(docs/errata.md), so eta is the largest number, up to a safety factor, that meets the inequalities of the corrected proof
(docs/theory.md) and, unless told otherwise, the paper's list as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from fedbilevel.tasks.task import Array
from fedbilevel.theory.constants import Constants, check_step

Previous = Literal["paper", "local"]
Conditions = Literal["printed", "needed"]
SAFETY = 0.99  # the theorems ask for strict inequalities
# alpha_k / alpha_l within a round is at most (1 + I/(u/sigma^2))^(1/3) <= 1 + 1/12288 once u >= (16 I)^3 sigma^2.
_RATIO = 1.01


class Check(NamedTuple):
    """One inequality left <= right.

    Attributes:
        name: The inequality in words.
        left: Its left-hand side.
        right: Its right-hand side.
        holds: Whether it holds.
    """

    name: str
    left: float
    right: float
    holds: bool


def check(name: str, left: float, right: float) -> Check:
    return Check(name, float(left), float(right), bool(left <= right * (1 + 1e-12)))


@dataclass(frozen=True)
class TheoremSteps:
    """Step sizes of a theorem for ``rounds`` rounds, and the inequalities its proof needs of them."""

    inner_step: float
    outer_step: float
    local_steps: int
    rounds: int
    delta: float
    checks: tuple[Check, ...]
    fixed: ClassVar[tuple[str, ...]] = ("inner_step", "outer_step", "local_steps")

    @property
    def holds(self) -> bool:
        """Whether every inequality holds."""
        return all(entry.holds for entry in self.checks)

    @property
    def total(self) -> int:
        """T, the number of local steps."""
        return self.rounds * self.local_steps

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the algorithm that the theorem fixes."""
        return {name: getattr(self, name) for name in self.fixed}


@dataclass(frozen=True)
class FedBiOSteps(TheoremSteps):
    """Steps of Theorem 1: ``fb.fedbio(problem, **steps.arguments(), ...)``.

    Attributes:
        inner_step: gamma.
        outer_step: eta.
        local_steps: I, steps between two averagings.
        rounds: S, how many averagings.
        delta: The constant of the schedule.
        checks: Every inequality that the proof needs, as `Check`.
    """


def check_counts(local_steps: int, rounds: int) -> None:
    if local_steps < 1 or rounds < 1:
        raise ValueError(f"local_steps and rounds must be at least 1, got {local_steps} and {rounds}.")


def check_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}.")


def fedbio_limits(constants: Constants, inner_step: float, local_steps: int) -> dict[str, float]:
    """The four upper limits on delta in Theorem 1, corrected: L_h for Gamma, and no factor q_1 q^I under the root."""
    rates = constants.inner_rates(inner_step)
    left = (1 - rates.q) * (1 - rates.decay(local_steps)) / rates.q_1_bar
    jump = math.inf if constants.rho == 0 else math.sqrt(left) / (2 * constants.L_h * constants.rho * local_steps)
    return {
        "averaging jump: delta < sqrt((1-q)(1-q_1 q^I)/q_1_bar) / (2 L_h rho I)": jump,
        "client drift: delta < 1 / (12 L_h I)": 1 / (12 * constants.L_h * local_steps),
        "inner step dominates: delta < mu gamma / 2": constants.mu * inner_step / 2,
        "delta < 1": 1.0,
    }


def fedbio_steps(
    constants: Constants, local_steps: int, rounds: int, *, inner_step: float | None = None, delta: float | None = None
) -> FedBiOSteps:
    """gamma, delta and eta = delta / sqrt(T) of Theorem 1, T = rounds * local_steps.

    Given values are kept and checked; those left out are the largest that the theorem allows, times 0.99.

    Args:
        constants: The constants of the problem.
        local_steps: I, steps between two averagings.
        rounds: S, how many averagings.
        inner_step: gamma, below 1/L; None: the largest that is allowed.
        delta: None: the largest that is allowed.

    Returns:
        `FedBiOSteps`, whose ``checks`` say which inequality holds.

    Raises:
        ValueError: A number is out of its range.

    Examples:
        >>> steps = fedbio_steps(Constants(L=2.0, mu=0.5, M=1.0, C_gxy=1.0), local_steps=5, rounds=100)
        >>> steps.holds, sorted(steps.arguments())
        (True, ['inner_step', 'local_steps', 'outer_step'])
    """
    check_counts(local_steps, rounds)
    gamma = SAFETY / constants.L if inner_step is None else inner_step
    check_step(gamma, constants.L, "inner_step", "Theorem 1")
    limits = fedbio_limits(constants, gamma, local_steps)
    chosen = SAFETY * min(limits.values()) if delta is None else delta
    check_positive("delta", chosen)
    eta = chosen / math.sqrt(rounds * local_steps)
    checks = (
        check("inner step: gamma < 1 / L", gamma, 1 / constants.L),
        *(check(name, chosen, limit) for name, limit in limits.items()),
        check("descent: eta < 1 / L_h", eta, 1 / constants.L_h),
    )
    return FedBiOSteps(gamma, eta, local_steps, rounds, chosen, checks)


# --- FedBiOAcc -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedBiOAccSteps(TheoremSteps):
    """Steps of Theorem 2: ``fb.fedbioacc(problem, **steps.arguments(), ...)``.

    Attributes:
        inner_step: gamma.
        outer_step: eta.
        local_steps: I, steps between two averagings.
        rounds: S, how many averagings.
        delta: The constant of the schedule.
        checks: Every inequality that the proof needs, as `Check`.
        u: Shift of the schedule ``alpha_t = delta / (u + sigma^2 t)^(1/3)``.
        sigma: Its noise.
        c_inner: c_omega, how fast the inner momentum forgets.
        c_outer: c_nu, how fast the outer momentum forgets.
        previous: "paper" or "local", the variant of the algorithm.
    """

    u: float
    sigma: float
    c_inner: float
    c_outer: float
    previous: Previous
    fixed: ClassVar[tuple[str, ...]] = (*TheoremSteps.fixed, "delta", "u", "sigma", "c_inner", "c_outer", "previous")

    def alphas(self, steps: int) -> Array:
        """alpha_0, alpha_1, ..., alpha_steps with alpha_t = delta / (u + sigma^2 t)^(1/3)."""
        return np.asarray(self.delta / np.cbrt(self.u + self.sigma**2 * np.arange(steps + 1.0)))

    @property
    def largest(self) -> float:
        """alpha_1."""
        return float(self.delta / (self.u + self.sigma**2) ** (1 / 3))

    @property
    def dispersal(self) -> float:
        """12 I^2 with the ratio of neighbouring alphas: what a source at step l adds to sum D_t / alpha_t over its round."""
        return 12 * _RATIO * self.local_steps**2


class PotentialWeights(NamedTuple):
    """Weights of the potential P_t = h + (a/alpha_{t-1}) A_t + b B_t + (c/alpha_{t-1}) C_t and of the dispersion sum."""

    outer_momentum: float
    inner_error: float
    inner_momentum: float
    dispersion: float


def potential_weights(constants: Constants, steps: FedBiOAccSteps) -> PotentialWeights:
    """lambda_A = 2 eta/(320 L_h^2), lambda_B = 1, lambda_C = gamma/(32 L^2), and K, the price of a unit of sum D_t/alpha_t.

    lambda_A is twice the paper's: half of the hypergradient error goes to the inner error, which the paper leaves out.
    """
    eta, gamma = steps.outer_step, steps.inner_step
    outer = 2 * eta / (320 * constants.L_h**2)
    inner = gamma / (32 * constants.L**2)
    lipschitz = outer * constants.L_h**2 / constants.clients + inner * constants.L**2
    pull = 25 * constants.rho**2 / (6 * constants.mu * gamma)
    # Terms that come with alpha_t D_t <= alpha_1^2 (D_t / alpha_t): drift of the mean, moving targets, the jump of y_x.
    slow = eta**3 / 128 + eta**2 * (2 * lipschitz + pull * (1 + _RATIO * steps.local_steps))
    fast = 0.0
    if steps.previous == "local":
        slow += 2 * _RATIO * eta**2 * steps.local_steps * lipschitz
    else:
        # Replacing x_t by its mean moves the point at which the momentum was estimated: a bias, paid by Young's inequality.
        ratios = outer * constants.L_h**2 / steps.c_outer + inner * constants.L**2 / steps.c_inner
        fast = _RATIO**3 * eta**2 * steps.local_steps * ratios
    return PotentialWeights(outer, 1.0, inner, slow * steps.largest**2 + fast)


def _growth(constants: Constants, sigma: float, delta: float, local_steps: int) -> float:
    """1/alpha_t - 1/alpha_{t-1} is at most this times alpha_t."""
    return sigma**2 / (24 * delta**3 * constants.L_h * local_steps)


def _printed_checks(constants: Constants, steps: FedBiOAccSteps) -> list[Check]:
    """The paper's own conditions on gamma and eta."""
    gamma, local_steps = steps.inner_step, steps.local_steps
    L, mu, L_h = constants.L, constants.mu, constants.L_h
    drift = 12 * (1 + constants.rho**2) / local_steps**2 + 97 / 256 + 1 / (120 * L) + 16 * local_steps**2 / mu
    on_gamma = {"inner step gamma < 1/(15 L)": 1 / (15 * L), "inner step gamma < 1": 1.0}
    on_eta = {
        "1/eta > 600 L^3/mu^3 + 1/(15 L) + 1": 1 / (600 * L**3 / mu**3 + 1 / (15 * L) + 1),
        "1/eta > 12(1+rho^2)/I^2 + 97/256 + 1/(120 L) + 16 I^2/mu": 1 / drift,
        "1/eta > 960 L_h^2/(mu gamma)": mu * gamma / (960 * L_h**2),
        "1/eta > 1/gamma": gamma,
        "1/eta > 40 L_h^2/(mu^3 gamma)": mu**3 * gamma / (40 * L_h**2),
    }
    return [
        check(f"printed: {name}", step, limit)
        for step, limits in ((gamma, on_gamma), (steps.outer_step, on_eta))
        for name, limit in limits.items()
    ]


def _balance_checks(constants: Constants, steps: FedBiOAccSteps) -> list[Check]:
    """No error may cost more than the descent, or its own decay, pays for: one inequality for each of the six errors."""
    eta, gamma, largest = steps.outer_step, steps.inner_step, steps.largest
    L, L_h, mu = constants.L, constants.L_h, constants.mu
    weights = potential_weights(constants, steps)
    growth = _growth(constants, steps.sigma, steps.delta, steps.local_steps)
    dispersal = 2 * steps.dispersal * weights.dispersion
    moving = (
        2 * weights.outer_momentum * L_h**2 / constants.clients + 2 * weights.inner_momentum * L**2 + dispersal * L_h**2
    )
    jump = _RATIO * steps.local_steps if steps.previous == "local" else 0.0
    again = 1 + 4 * steps.local_steps**2 * steps.c_outer**2 * largest**4 + jump
    checks = {
        "outer momentum error A: 2 eta <= lambda_A (c_nu - growth of 1/alpha)":
            (2 * eta, weights.outer_momentum * (steps.c_outer - growth)),
        "inner momentum error C: 25 gamma/(6 mu) <= lambda_C (c_omega - growth of 1/alpha)":
            (25 * gamma / (6 * mu), weights.inner_momentum * (steps.c_inner - growth)),
        "inner error B: 2 eta L_h^2 + its share of the dispersion <= mu gamma/4":
            (2 * eta * L_h**2 + 4 * dispersal * (steps.c_outer * largest * L_h) ** 2, mu * gamma / 4),
        "mean momentum E: what moving x costs <= what it gains, eta/2 (1 - eta alpha L_h)":
            (eta**2 * (moving + 25 * constants.rho**2 / (6 * mu * gamma)), eta / 2 * (1 - eta * largest * L_h)),
        "inner momentum F: what moving y costs <= 3/4": (moving, 0.75),
        "dispersion D: feedback of the dispersion on itself <= 1/2":
            (steps.dispersal * L_h**2 * eta**2 * largest**2 * again, 0.5),
    }  # fmt: skip
    return [check(name, *sides) for name, sides in checks.items()]


def _schedule_checks(constants: Constants, steps: FedBiOAccSteps) -> list[Check]:
    """Conditions on gamma, delta, u and the two c; eta does not enter."""
    largest, local_steps = steps.largest, steps.local_steps
    return [
        check("noise: sigma of the schedule >= sigma of Assumptions 4 and 6", constants.sigma, steps.sigma),
        check("inner step: gamma <= 1/(6 L)", steps.inner_step, 1 / (6 * constants.L)),
        check("schedule: u >= 2 sigma^2", 2 * steps.sigma**2, steps.u),
        check("schedule: u >= (16 I)^3 sigma^2", (16.0 * local_steps) ** 3 * steps.sigma**2, steps.u),
        check("schedule: alpha_t <= 1", largest, 1.0),
        check("schedule: alpha_t <= 1/(16 I L_h)", largest, 1 / (16 * local_steps * constants.L_h)),
        check("momentum: c_nu alpha_t^2 <= 1", steps.c_outer * largest**2, 1.0),
        check("momentum: c_omega alpha_t^2 <= 1", steps.c_inner * largest**2, 1.0),
        check("momentum: c_nu <= 2 * 320 L_h^2", steps.c_outer, 640 * constants.L_h**2),
    ]


def _largest(holds: Callable[[float], bool], start: float) -> float:
    """The largest number below start, to one part in 2^40, for which a downward closed condition holds."""
    good, bad = (start, start) if holds(start) else (0.0, start)
    for _ in range(200):
        if good > 0 and bad - good <= good * 2.0**-40:
            break
        middle = (good + bad) / 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def fedbioacc_steps(
    constants: Constants,
    local_steps: int,
    rounds: int,
    *,
    previous: Previous = "paper",
    conditions: Conditions = "printed",
    inner_step: float | None = None,
    outer_step: float | None = None,
    delta: float | None = None,
    u: float | None = None,
    c_inner: float | None = None,
    c_outer: float | None = None,
) -> FedBiOAccSteps:
    """gamma, eta, delta, u, c_nu and c_omega of Theorem 2, self-consistent.

    Given values are kept and checked, those left out follow the theorem. ``previous`` is the variant of the algorithm:
    "paper" replaces x_t by its average at a synchronisation, "local" keeps it. ``conditions="printed"`` respects the
    paper's conditions besides those of the corrected proof; "needed" only the latter, which allows larger steps.

    Args:
        constants: The constants of the problem.
        local_steps: I, steps between two averagings.
        rounds: S, how many averagings.
        previous: "paper" or "local", the variant of the algorithm.
        conditions: "printed" or "needed", which inequalities must hold.
        inner_step: gamma; None: it follows the theorem.
        outer_step: eta; None: the largest that is allowed.
        delta: The constant of the schedule; None: it follows the theorem.
        u: Shift of the schedule; None: it follows the theorem.
        c_inner: c_omega; None: it follows the theorem.
        c_outer: c_nu; None: it follows the theorem.

    Returns:
        `FedBiOAccSteps`, whose ``checks`` say which inequality holds.

    Raises:
        ValueError: A number is out of its range, or sigma is 0.

    Examples:
        >>> steps = fedbioacc_steps(Constants(L=2.0, mu=0.5, M=1.0, C_gxy=1.0, sigma=1.0), local_steps=5, rounds=100)
        >>> steps.holds, steps.u == (16 * 5) ** 3
        (True, True)
    """
    check_counts(local_steps, rounds)
    if previous not in ("paper", "local"):
        raise ValueError(f'previous must be "paper" or "local", got {previous!r}.')
    if conditions not in ("printed", "needed"):
        raise ValueError(f'conditions must be "printed" or "needed", got {conditions!r}.')
    sigma, L_h = constants.sigma, constants.L_h
    if sigma == 0:
        raise ValueError(
            "Theorem 2 scales its schedule with the sigma of Assumptions 4 and 6, which is 0 here: "
            "pass constants with a positive upper bound on the noise, e.g. dataclasses.replace(constants, sigma=1.0)."
        )
    largest_inner = 1 / max(15 * constants.L, 1.0) if conditions == "printed" else 1 / (6 * constants.L)
    gamma = SAFETY * largest_inner if inner_step is None else inner_step
    check_step(gamma, constants.L, "inner_step", "Theorem 2")
    scale = sigma ** (2 / 3) / L_h if delta is None else delta
    check_positive("delta", scale)
    growth = _growth(constants, sigma, scale, local_steps)
    outer = 320 * L_h**2 + growth if c_outer is None else c_outer
    inner = 160 * constants.L**2 / constants.mu + growth if c_inner is None else c_inner
    floor = max(
        2 * sigma**2,
        scale**3,
        (outer * scale**2) ** 1.5,
        (inner * scale**2) ** 1.5,
        (16.0 * local_steps) ** 3 * sigma**2,
        (16.0 * local_steps * L_h * scale) ** 3,
    )
    start = floor if u is None else u

    def build(eta: float, checks: tuple[Check, ...] = ()) -> FedBiOAccSteps:
        return FedBiOAccSteps(gamma, eta, local_steps, rounds, scale, checks, start, sigma, inner, outer, previous)

    def eta_checks(eta: float) -> list[Check]:
        printed = _printed_checks(constants, build(eta)) if conditions == "printed" else []
        return _balance_checks(constants, build(eta)) + printed

    # A given gamma, u or c may break an inequality that no eta can mend: judge only those that eta = 0 would meet.
    mendable = {entry.name for entry in eta_checks(0.0) if entry.holds}

    def fits(eta: float) -> bool:
        return all(entry.holds for entry in eta_checks(eta) if entry.name in mendable)

    eta = SAFETY * _largest(fits, gamma) if outer_step is None else outer_step
    check_positive("outer_step", eta)
    return build(eta, (*_schedule_checks(constants, build(eta)), *eta_checks(eta)))
