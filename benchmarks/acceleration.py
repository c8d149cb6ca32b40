"""Where FedBiOAcc pays: noise x local steps x heterogeneity on quadratics, the map in docs/steps.md.

    python benchmarks/acceleration.py OUT.csv

What is left of the way to the minimum, h(x) - h* over h(0) - h*, after as many bytes as FedBiO sends in 40 exchanges: the best
of nine outer steps in each cell, geometric means over four runs with noise of their own. The loops are those of
tests/references in NumPy, all steps and runs side by side: nothing is compiled, and a cell takes a second.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np

import fedbilevel as fb

EXCHANGES, RUNS, CLIENTS, SIZE, RIDGE = 40, 4, 4, 6, 0.1
NOISES, LOCAL_STEPS, SPREADS = (0.0, 0.1, 1.0), (1, 5, 20), (0.1, 1.0)
OUTER = np.repeat(4.0 ** np.linspace(-4, 1, 9), RUNS)
"""Outer steps of a round, one column a run; divided by the number of local steps."""
METHODS = {
    "FedBiO": ("plain", 1),
    'FedBiOAcc, previous="local"': ("averaged", 2),
    'FedBiOAcc, send="outer"': ("alone", 1),
}
"""Kind of momentum, and how many times as much as FedBiO it sends."""


class Clients:
    """g = y'Hy/2 - y'(A x + b) with 1 <= H <= 4, f = |y - p|^2 / 2 + ridge/2 |x|^2.

    ``noise`` moves A, b, p and (for omega) H in every step; the inverse is that of the mean H, so that nu is unbiased.
    """

    def __init__(self, spread: float, noise: float) -> None:
        self.noise, draws = noise, np.random.default_rng(0)
        bases = [np.linalg.qr(draws.normal(size=(SIZE, SIZE)))[0] for _ in range(CLIENTS + 1)]
        whole = [base * np.linspace(1, 4, SIZE) @ base.T for base in bases]
        mix = lambda own, shared: spread * own + (1 - spread) * shared  # noqa: E731
        self.H = np.stack([mix(own, whole[-1]) for own in whole[:-1]])
        sizes = ((SIZE, SIZE), (SIZE,), (SIZE,))
        self.A, self.b, self.p = (
            np.stack([mix(draws.normal(size=size), shared) for _ in range(CLIENTS)])
            for size in sizes
            for shared in [draws.normal(size=size)]
        )
        response = np.linalg.solve(self.H, self.A)
        rest = np.linalg.solve(self.H, self.b[..., None])[..., 0] - self.p
        curved = np.mean(np.swapaxes(response, 1, 2) @ response, axis=0) + RIDGE * np.eye(SIZE)
        best = -np.linalg.solve(curved, np.mean(np.einsum("mij,mi->mj", response, rest), axis=0))
        self.left = lambda x: np.einsum("ri,ij,rj->r", x - best, curved, x - best) / (best @ curved @ best)

    def sample(self, draws: np.random.Generator) -> tuple[Any, ...]:
        """One noisy draw for every run and client: H, A, b, p."""
        tilt, bend, *rest = (draws.normal(size=(len(OUTER), *part.shape)) for part in (self.H, self.A, self.b, self.p))
        moved = (self.H + 0.1 * self.noise * (tilt + np.swapaxes(tilt, -1, -2)), self.A + 0.3 * self.noise * bend)
        return (*moved, *(part + self.noise * own for part, own in zip((self.b, self.p), rest, strict=True)))

    def directions(self, x: Any, y: Any, sample: tuple[Any, ...]) -> tuple[Any, Any]:
        """omega and nu."""
        H, A, b, p = sample
        times = lambda matrix, vector: (matrix @ vector[..., None])[..., 0]  # noqa: E731
        adjoint = np.linalg.solve(self.H, (y - p)[..., None])[..., 0]
        return times(H, y) - times(A, x) - b, RIDGE * x + times(np.swapaxes(A, -1, -2), adjoint)


def run(clients: Clients, kind: str, rounds: int, local_steps: int) -> Any:
    """What is left in every run."""
    draws, shape = np.random.default_rng(1), (len(OUTER), CLIENTS, SIZE)
    x, y, omega, nu, before, t = np.zeros(shape), np.zeros(shape), 0.0, 0.0, None, 0
    eta, k = OUTER[:, None, None] / local_steps, fb.TUNED
    alpha = lambda t: 1.0 if kind == "plain" else k["delta"] / np.cbrt(k["u"] + k["sigma"] ** 2 * t)  # noqa: E731
    unit = 1.0 if kind == "plain" else 4.0  # alpha_t is about a quarter
    for _ in range(rounds):
        walked = 0.0
        for _ in range(local_steps):
            sample, kept = clients.sample(draws), 0.0 if before is None else max(0.0, 1 - k["c_outer"] * alpha(t) ** 2)
            now = clients.directions(x, y, sample)
            if kind == "plain" or before is None:
                omega, nu = now
            else:
                then = clients.directions(*before, sample)
                omega, nu = (n + kept * (m - b) for n, m, b in zip(now, (omega, nu), then, strict=True))
            before, t = (x, y), t + 1
            y, x, walked = (
                y - 0.25 * min(1.0, unit * alpha(t)) * omega,
                x - unit * eta * alpha(t) * nu,
                walked + alpha(t),
            )
        mean = np.mean(x, axis=1, keepdims=True)
        if kind == "averaged":
            nu = np.broadcast_to(np.mean(nu, axis=1, keepdims=True), shape)
        elif kind == "alone":
            nu = nu + (x - mean) / (unit * eta * walked)
        x = np.broadcast_to(mean, shape)
    return clients.left(x[:, 0])


def main() -> None:
    with Path(sys.argv[1]).open("w", newline="") as file, np.errstate(over="ignore", invalid="ignore"):
        writer = csv.writer(file)
        writer.writerow(("local_steps", "noise", "heterogeneity", "method", "left"))
        for local_steps in LOCAL_STEPS:
            for noise in NOISES:
                for spread in SPREADS:
                    clients = Clients(spread, noise)
                    for name, (kind, costs) in METHODS.items():
                        found = np.nan_to_num(
                            run(clients, kind, EXCHANGES // costs, local_steps), nan=np.inf, posinf=np.inf
                        )
                        best = np.exp(np.log(np.maximum(found, 1e-14)).reshape(-1, RUNS).mean(axis=1)).min()
                        writer.writerow((local_steps, noise, spread, name, f"{best:.2g}"))
                        print(local_steps, noise, spread, name, f"{best:.2g}", flush=True)


if __name__ == "__main__":
    main()
