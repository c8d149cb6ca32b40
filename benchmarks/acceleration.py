"""Where FedBiOAcc pays: noise x local steps x heterogeneity on quadratics, the map in docs/steps.md.

    python benchmarks/acceleration.py OUT.csv

Printed: what is left of the way to the minimum, h(x) - h* over h(0) - h*, after as many bytes as FedBiO sends in 30 exchanges
(geometric means over three draws of minibatches). Given steps: the best of eight outer steps in each cell. "auto": none is
given.
"""

import csv
import sys
from pathlib import Path

import numpy as np

import fedbilevel as fb
from fedbilevel.tasks import Task, known_quadratic

EXCHANGES, SEEDS, BATCH = 30, 3, 16
NOISES, LOCAL_STEPS, SPREADS = (0.03, 0.3, 1.0), (5, 20), (0.1, 1.0)
OUTER = tuple(0.5 * 4.0**power for power in np.linspace(-3, 2, 8))
CONSTANTS = {name: value for name, value in fb.TUNED.items() if not name.endswith("_step")}


def methods(task: Task, local_steps: int) -> dict[str, tuple[fb.Algorithm, int, float]]:
    """The algorithm, how many exchanges the bytes buy, and the unit of its outer steps (alpha_t is about 1/4)."""
    shared = {"local_steps": local_steps, "batch_size": BATCH}
    given = {"hypergradient": fb.neumann(30, 0.5 / task.curvature), "outer_step": 1.0, **shared}
    rate, problem = 1 / task.curvature, task.problem
    acc = {"inner_step": 4 * rate, **given, **CONSTANTS}
    return {
        "FedBiO": (fb.fedbio(problem, inner_step=rate, **given), EXCHANGES, 1.0),
        'FedBiOAcc, previous="local"': (fb.fedbioacc(problem, previous="local", **acc), EXCHANGES // 2, 4.0),
        'FedBiOAcc, send="outer"': (fb.fedbioacc(problem, send="outer", **acc), EXCHANGES, 4.0),
        "FedBiO, auto": (fb.fedbio(problem, **shared), EXCHANGES - 1, 0.0),
        'FedBiOAcc, send="outer", auto': (fb.fedbioacc(problem, send="outer", **shared), EXCHANGES - 1, 0.0),
    }


def left(task: Task, algorithm: fb.Algorithm, rounds: int, unit: float) -> float:
    """What is left of the way with the best of the steps."""
    steps = {"outer_step": [unit * step / algorithm.local_steps for step in OUTER]} if unit else {}
    found = fb.sweep(algorithm, task.data, rounds, range(SEEDS), record_every=None, **steps)
    shares = [1 - task.evaluate(np.asarray(one.outer), None)["progress"] for one in found.results]
    shares = np.nan_to_num(np.clip(shares, 1e-12, None), nan=np.inf)
    keys = found.table["outer_step"] if steps else np.zeros(SEEDS)
    return float(min(np.exp(np.log(shares[keys == key]).mean()) for key in set(keys)))


def main() -> None:
    with Path(sys.argv[1]).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("local_steps", "noise", "heterogeneity", "method", "left"))
        for local_steps in LOCAL_STEPS:
            for noise in NOISES:
                for spread in SPREADS:
                    task = known_quadratic(
                        7, gradient_noise=noise, hessian_noise=0.3 * noise, heterogeneity=spread, clients=4
                    )
                    for name, (algorithm, rounds, unit) in methods(task, local_steps).items():
                        share = left(task, algorithm, rounds, unit)
                        writer.writerow((local_steps, noise, spread, name, f"{share:.3g}"))
                        print(local_steps, noise, spread, name, f"{share:.3g}", flush=True)
                    file.flush()


if __name__ == "__main__":
    main()
