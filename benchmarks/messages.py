"""Messages in bfloat16 against messages as they are: bytes, and how far the iterates part.

``python benchmarks/messages.py`` writes benchmarks/results/messages.csv.  "alone": rounded without the differences of
`fedbilevel.engines.messages`, which shows what they are for.  Distances are of the outer variable, relative to how far the run
in float32 went from its start; "seeds": how far those runs part from each other.
"""

from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np
import pandas as pd

import fedbilevel as fb
from fedbilevel.engines import messages
from fedbilevel.tasks import random_penalties, random_quadratic

FILE = Path(__file__).parent / "results" / "messages.csv"
ROUNDS, SEEDS = 300, range(3)
NOISE = {"gradient_noise": 0.3, "hessian_noise": 0.1}


def quadratics():
    """Problem, rows, a bound of the inner curvature, an outer step."""
    made = random_quadratic(0, clients=8, outer_size=20, inner_size=30, **NOISE)
    return made.problem(), made.data(), 1.5, 0.1


def penalties():
    made = random_penalties(0, clients=8)
    return made.problem, made.data, made.curvature, made.outer_step


TASKS = {"quadratics": quadratics, "ridge penalties": penalties}
METHODS = {"FedBiO": fb.fedbio, "FedBiOAcc": fb.fedbioacc}


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def runs(algorithm, data, kind):
    """Last outer variables and objectives over the seeds, and the kilobytes of one run."""
    found = fb.sweep(algorithm, data, ROUNDS, seeds=SEEDS, message_dtype=kind, diagnostics="cheap")
    table = found.table
    return (
        [flat(run.outer) for run in found.results],
        table["objective"].mean(),
        (table["bytes_up"] + table["bytes_down"]).iloc[0] / 1e3,
    )


def measured(task, method):
    problem, data, curvature, step = task()
    tuned = fb.TUNED if method is fb.fedbioacc else {}
    steps = {**tuned, "inner_step": 1 / curvature, "outer_step": step, "batch_size": 8}
    algorithm = method(problem, fb.neumann(terms=5, step=1 / curvature), **steps)
    start = flat(algorithm.outer(algorithm.init(jax.random.key(0))))
    plain, objective, size = runs(algorithm, data, None)
    went = [np.linalg.norm(x - start) for x in plain]
    noise = np.linalg.norm(np.std(plain, axis=0, ddof=1)) / np.mean(went)
    row = {"kb_float32": size, "objective_float32": objective, "seeds": noise}
    short, row["objective_bfloat16"], row["kb_bfloat16"] = runs(algorithm, data, "bfloat16")
    row["distance"] = np.mean([np.linalg.norm(a - b) / c for a, b, c in zip(short, plain, went, strict=True)])
    with patch.object(messages, "sums_up", lambda phase: False):
        jax.clear_caches()
        alone, row["objective_alone"], _ = runs(algorithm, data, "bfloat16")
    jax.clear_caches()
    row["distance_alone"] = np.mean([np.linalg.norm(a - b) / c for a, b, c in zip(alone, plain, went, strict=True)])
    return row


if __name__ == "__main__":
    rows = []
    for task, make in TASKS.items():
        for name, method in METHODS.items():
            rows.append({"task": task, "method": name, **measured(make, method)})
            print(rows[-1], flush=True)
            pd.DataFrame(rows).to_csv(FILE, index=False)
