"""The constants of the analysis and what follows from them.

The letters are those of the paper (Li, Huang, Huang: "Local Stochastic Bilevel Optimization with Momentum-Based
Variance Reduction"), so that a formula can be held beside its source. Where the printed formula is wrong the one here
is the corrected one; docs/errata.md lists every such place with the test that shows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple


class InnerRates(NamedTuple):
    """The contraction factors of the inner descent at one inner step gamma (Lemma "inner drift").

    Attributes:
        q: ``1 - mu gamma / 2``: what a step leaves of the inner error.
        q_bar: ``1 + 2 / (mu gamma)``: the price of a move of x.
        q_1: ``1 + mu gamma / 4``: what an averaging makes of the inner error.
        q_1_bar: ``1 + 4 / (mu gamma)``: the price of the jump of x at an averaging.
    """

    q: float
    q_bar: float
    q_1: float
    q_1_bar: float

    def decay(self, local_steps: int) -> float:
        """q_1 q^I: what one round leaves of the inner error it began with."""
        return self.q_1 * self.q**local_steps


_ASSUMPTION = {
    "L": "Assumptions 2 and 3 (f and g have L-Lipschitz gradients)",
    "mu": "Assumption 1 (g is mu-strongly convex in y)",
    "M": "Assumption 2 (the gradient of f is bounded by M)",
    "C_gxy": "Assumption 3a (the cross derivative of g is bounded by C_gxy)",
    "L_gxy": "Assumption 3b (the cross derivative of g is L_gxy-Lipschitz)",
    "L_gyy": "Assumption 3b (the inner Hessian of g is L_gyy-Lipschitz)",
    "zeta_f": "Assumption 5a-b (gradients of f differ between clients by at most zeta_f)",
    "zeta_gxy": "Assumption 5c (cross derivatives of g differ between clients by at most zeta_gxy)",
    "zeta_gyy": "Assumption 5d (inner Hessians of g differ between clients by at most zeta_gyy)",
    "zeta_gstar": "Assumption 5e (inner solutions differ between clients by at most zeta_gstar)",
    "sigma": "Assumptions 4 and 6 (the noise of every oracle has deviation at most sigma)",
    "G": "Assumption 6 (the mean of the hypergradient estimator is off by at most G)",
}


@dataclass(frozen=True)
class Constants:
    """What the theorems assume about a federated bilevel problem.

    L, mu, M, C_gxy, L_gxy, L_gyy as in Assumptions 1-3; zeta_f, zeta_gxy, zeta_gyy, zeta_gstar as in Assumption 5;
    sigma bounds the deviation of the inner gradient and of the hypergradient estimator, G the bias of the latter
    (Assumptions 4 and 6). ``clients`` is the number of clients (M in the paper's sums; a name of its own here, since M
    is also the gradient bound). ``estimated`` says that the numbers come from samples and may be too small, ``region``
    says in words where they hold.

    Attributes:
        L: Lipschitz constant of the gradients of f and g.
        mu: Strong convexity of g in y, positive.
        M: Bound on the gradient of f.
        C_gxy: Bound on the cross derivative of g.
        L_gxy: Lipschitz constant of the cross derivative of g.
        L_gyy: Lipschitz constant of the inner Hessian of g.
        zeta_f: How far gradients of f differ between clients.
        zeta_gxy: How far cross derivatives of g differ between clients.
        zeta_gyy: How far inner Hessians of g differ between clients.
        zeta_gstar: How far inner solutions differ between clients.
        sigma: Bound on the deviation of the inner gradient and of the hypergradient estimator.
        G: Bound on the bias of the hypergradient estimator.
        clients: How many there are.
        estimated: Whether the numbers come from samples and may be too small.
        region: In words, where they hold.

    Raises:
        ValueError: A number contradicts an assumption, which the sentence names.

    Examples:
        >>> constants = Constants(L=2.0, mu=0.5, M=1.0, C_gxy=1.0)
        >>> constants.rho, constants.Gamma, constants.L_bar
        (2.0, 6.0, 18.0)
    """

    L: float
    mu: float
    M: float
    C_gxy: float
    L_gxy: float = 0.0
    L_gyy: float = 0.0
    zeta_f: float = 0.0
    zeta_gxy: float = 0.0
    zeta_gyy: float = 0.0
    zeta_gstar: float = 0.0
    sigma: float = 0.0
    G: float = 0.0
    clients: int = 1
    estimated: bool = False
    region: str = ""

    def __post_init__(self) -> None:
        for name, assumption in _ASSUMPTION.items():
            value, positive = getattr(self, name), name in ("L", "mu")
            if not math.isfinite(value) or value < 0 or (value == 0 and positive):
                wanted = "a positive number" if positive else "a number that is not negative"
                raise ValueError(f"{assumption} does not hold: {name} must be {wanted}, got {value}.")
        # A computed L and a computed mu of the same matrix may differ by rounding.
        slack = 1 + 1e-9
        if self.mu > self.L * slack:
            raise ValueError(
                f"Assumptions 1 and 3 contradict each other: mu = {self.mu} is larger than L = {self.L}; "
                "the curvature of g cannot be below mu and above L at once."
            )
        if self.C_gxy > self.L * slack:
            raise ValueError(
                f"Assumption 3 contradicts itself: C_gxy = {self.C_gxy} is larger than L = {self.L}, but the cross "
                "derivative is a block of the Hessian that L bounds; raise L."
            )
        if self.clients < 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}.")

    @property
    def rho(self) -> float:
        """The inner solution y_x is rho-Lipschitz in x (Proposition 2b): C_gxy / mu."""
        return self.C_gxy / self.mu

    @property
    def C(self) -> float:
        """‖Phi(x, y) - grad h(x)‖ <= C ‖y - y_x‖ (Proposition 2a)."""
        return (
            self.L
            + self.L * self.C_gxy / self.mu
            + self.M * (self.L_gxy / self.mu + self.L_gyy * self.C_gxy / self.mu**2)
        )

    @property
    def Gamma(self) -> float:
        """Phi(x, y) is Gamma-Lipschitz in (x, y) (Proposition 2d). The formula is that of C, term by term."""
        return self.C

    @property
    def L_bar(self) -> float:
        """grad h is L_bar-Lipschitz (Proposition 2c, with the divisions by mu restored); equals (1 + rho) Gamma."""
        return self.L + (self.L + self.C) * self.rho + self.M * (self.L_gxy / self.mu + self.L_gyy * self.rho / self.mu)

    @property
    def L_h(self) -> float:
        """max(L_bar, Gamma, C)."""
        return max(self.L_bar, self.C)

    @property
    def M_h(self) -> float:
        """‖Phi(x, y)‖ <= M_h = M (1 + C_gxy / mu)."""
        return self.M * (1 + self.rho)

    @property
    def zeta(self) -> float:
        """‖grad h_m(x) - grad h_j(x)‖ <= zeta (Proposition 3, with M/mu where mu/M is printed)."""
        return (
            (1 + self.rho) * self.zeta_f
            + self.M / self.mu * self.zeta_gxy
            + self.M * self.C_gxy * self.zeta_gyy / self.mu**2
            + self.C * self.zeta_gstar
        )

    def inner_rates(self, inner_step: float) -> InnerRates:
        """q, q_bar, q_1 and q_1_bar at inner step gamma < 1/L."""
        check_step(inner_step, self.L, "inner_step", "Theorem 1 and Lemma 'inner drift'")
        product = self.mu * inner_step
        return InnerRates(1 - product / 2, 1 + 2 / product, 1 + product / 4, 1 + 4 / product)

    def G_1(self, terms: int, step: float) -> float:
        """Bound on the bias of the Neumann estimator with Q = terms Hessian products (Proposition 1a)."""
        check_step(step, self.L, "step", "Proposition 1")
        return float((1 - step * self.mu) ** (terms + 1) * self.M * self.L / self.mu)

    def G_2(self, terms: int, step: float) -> float:
        """Bound on the deviation of the Neumann estimator (Proposition 1b; what is printed there is its square)."""
        check_step(step, self.L, "step", "Proposition 1")
        factors = terms + 1
        square = (
            2 * self.M**2
            + 12 * (self.M * self.L * step * factors) ** 2
            + 4 * (self.M * self.L * self.sigma * factors) ** 2 * (terms + 2) * step**4
        )
        return math.sqrt(square)

    def with_neumann(self, terms: int, step: float) -> Constants:
        """The same problem when its hypergradient is estimated by a Neumann series: G = G_1 and sigma >= G_2."""
        return replace(self, G=self.G_1(terms, step), sigma=max(self.sigma, self.G_2(terms, step)))


def check_step(step: float, L: float, argument: str, where: str) -> None:
    """A step of gradient descent on g must lie below 1/L."""
    if not 0 < step < 1 / L:
        raise ValueError(
            f"{where} needs 0 < {argument} < 1/L with the L of Assumption 3, here 1/L = {1 / L:.6g}; got {step:.6g}."
        )
