"""Step sizes of Theorem 1 (FedBiO), with every inequality its proof needs, checked.

gamma < 1/L, eta = delta / sqrt(T), and delta below four limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fedbilevel.theory.constants import Constants, check_step

SAFETY = 0.99  # the theorems ask for strict inequalities


class Check(NamedTuple):
    """One inequality left <= right."""

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
    """Steps of Theorem 1: ``fb.fedbio(problem, **steps.arguments(), ...)``."""


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
