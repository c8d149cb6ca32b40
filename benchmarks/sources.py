"""Which sites help: the table in docs/networks.md.

    python benchmarks/sources.py OUT.csv

Six sites of 100 digits, two of which have 90 % wrong labels; a small convolutional network for all, and a weight for each site.
100 rounds of five local steps on minibatches of 16 rows, with steps that set themselves; five draws.  Ordinary training is the
same with weights that stay equal, the oracle the same with weights for the clean sites alone.  Means and 95 % intervals
(Student) are of the runs that do not diverge.
"""

import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy import stats

import fedbilevel as fb
from fedbilevel.tasks import Task, digits, source_weighting

DRAWS, ROUNDS, BATCH = 5, 100, 16
STILL = 1e-9
"""An outer step with which weights stay what they are."""
FAR = -20.0
"""The logit of a site that has no weight."""
METHODS = {
    "ordinary training": (fb.fedbio_global, {"outer_step": STILL}),
    "F2SA": (fb.f2sa, {}),
    "PBGD": (fb.pbgd, {}),
    "BOME": (fb.bome, {}),
    "MEHA": (fb.meha, {}),
    "FedBiO, global": (fb.fedbio_global, {}),
    "oracle": (fb.fedbio_global, {"outer_step": STILL}),
}


def begun(problem: fb.BilevelProblem, outer: np.ndarray) -> fb.BilevelProblem:
    return replace(problem, init=lambda key: (jnp.asarray(outer, jnp.float32), problem.init(key)[1]))


def above(ones: np.ndarray, others: np.ndarray) -> float:
    """The chance that one of ``ones`` is larger than one of ``others``; a tie is a half."""
    return float(np.mean((ones[:, None] > others) + 0.5 * (ones[:, None] == others)))


def measured(name: str, task: Task, seed: int) -> dict[str, Any]:
    make, options = METHODS[name]
    bad = task.facts["spoiled"]
    problem = begun(task.problem, np.where(bad, FAR, 0.0)) if name == "oracle" else task.problem
    algorithm = make(problem, batch_size=BATCH, **options)
    try:
        found = fb.simulate(algorithm, task.data, ROUNDS, seed=seed, record_every=None)
    except fb.Diverged:
        return {"method": name, "seed": seed, **dict.fromkeys(("accuracy", "auc", "spoiled", "sites"), np.nan)}
    weights = np.asarray(jax.nn.softmax(found.outer)).round(6)  # equal ones differ by rounding
    scores = task.evaluate(found.outer, found.inner)
    return {
        "method": name, "seed": seed, "accuracy": scores["accuracy"], "auc": above(weights[~bad], weights[bad]),
        "spoiled": float(weights[bad].sum()), "sites": float(1 / np.sum(weights**2)),
    }  # fmt: skip


def main() -> None:
    (out,) = sys.argv[1:]
    rows = []
    for seed in range(DRAWS):
        task = source_weighting(digits(), seed)
        for name in METHODS:
            rows.append(measured(name, task, seed))
            print(rows[-1], flush=True)
    runs = pd.DataFrame(rows)
    table = runs.groupby("method", sort=False).agg(
        ended=("accuracy", "count"),
        accuracy=("accuracy", "mean"), sem=("accuracy", "sem"), auc=("auc", "mean"), spoiled=("spoiled", "mean"),
        most=("spoiled", "max"), sites=("sites", "mean"),
    )  # fmt: skip
    table["interval"] = stats.t.ppf(0.975, table["ended"] - 1) * table.pop("sem")
    table.to_csv(out, float_format="%.6g")


if __name__ == "__main__":
    main()
