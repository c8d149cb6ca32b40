"""The two theorems, measured on quadratic clients whose gradients are known in closed form.

FedBiO (deterministic, eta = delta/sqrt(T)) on several random problems, FedBiOAcc (minibatches) with several noise seeds:
the mean of ‖grad h(xbar_t)‖^2 over t <= T against T, slopes with bootstrap intervals, and with the step sizes of the
theorems the measurement beside the bound. Then the same error against communicated bytes for I = 1, 5, 20 local steps, and
against the number of clients, where variance shrinks and bias does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pandas as pd

from fedbilevel.studies.rates.costs import communication, estimator_errors, speedup
from fedbilevel.studies.rates.design import BATCH, CLIENTS, DELTA, GAMMA, LOCAL_STEPS, PRESETS, Design
from fedbilevel.studies.rates.files import write
from fedbilevel.studies.rates.horizon import fedbio_rates, fedbioacc_rates
from fedbilevel.studies.rates.slopes import bootstrap_slope

__all__ = ["FULL", "QUICK", "RatesResult", "fit_slopes", "run", "write"]

Report = Callable[[str, int, int], None]
FULL = Design(
    horizons=(200, 600, 2000, 6000, 20000),
    instances=8,
    seeds=8,
    theory_seeds=2,
    communication_steps=3000,
    local_steps=(1, 5, 20),
    replicas=4096,
    client_counts=(1, 2, 4, 8, 16),
    client_steps=2000,
)
QUICK = Design(
    horizons=(50, 150, 500),
    instances=2,
    seeds=3,
    theory_seeds=2,
    communication_steps=400,
    local_steps=(1, 5),
    replicas=256,
    client_counts=(1, 4),
    client_steps=200,
)


@dataclass(frozen=True)
class RatesResult:
    """Tables of one run of the experiment.

    ``points``: algorithm, variant, horizon, run, mean_square. ``slopes``: algorithm, variant, range ("all" or "last decade"),
    slope, low, high, theory. ``bounds``: algorithm, variant, horizon, run, measured, bound, holds, inside (of the region for
    which the constants were computed). ``checks``: the inequalities behind the theorems' step sizes. ``communication``:
    algorithm, local_steps, run, step, bytes, mean_square. ``estimator``: clients, variance, bias_square of the averaged
    hypergradient estimator. ``speedup``: estimator, clients, run, mean_square, inner_error at the end of FedBiOAcc runs.
    """

    points: pd.DataFrame
    slopes: pd.DataFrame
    bounds: pd.DataFrame
    checks: pd.DataFrame
    communication: pd.DataFrame
    estimator: pd.DataFrame
    speedup: pd.DataFrame
    settings: dict[str, Any]


@contextmanager
def _double_precision() -> Iterator[None]:
    """The theorems' steps (1e-9 and below) would vanish in single precision. Restores the setting it found."""
    before = jax.config.values["jax_enable_x64"]
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def fit_slopes(points: pd.DataFrame) -> pd.DataFrame:
    """A slope for every variant, over all horizons and over the last decade."""
    rows = []
    for (algorithm, variant), group in points.groupby(["algorithm", "variant"], sort=False):
        table = group.pivot(index="run", columns="horizon", values="mean_square")
        horizons = table.columns.to_numpy(dtype=float)
        expected = -1 / 2 if algorithm == "fedbio" else -2 / 3
        for name, chosen in (("all", horizons > 0), ("last decade", horizons >= horizons[-1] / 10)):
            slope = bootstrap_slope(horizons[chosen], table.to_numpy()[:, chosen])
            row = {"algorithm": algorithm, "variant": variant, "range": name, "runs": len(table)}
            rows.append({**row, "slope": slope.value, "low": slope.low, "high": slope.high, "theory": expected})
    return pd.DataFrame(rows)


def run(out: Path | None, quick: bool = False, seed: int = 0, progress: Report | None = None) -> RatesResult:
    """Run the whole experiment; with ``out`` also write tables and figures there."""
    design = QUICK if quick else FULL
    tell = progress or (lambda part, done, total: None)
    names = (
        "FedBiO against T",
        "FedBiOAcc against T",
        "error against bytes",
        "estimator against clients",
        "runs against clients",
    )
    found: list[Any] = []
    with _double_precision():
        for number, part in enumerate((fedbio_rates, fedbioacc_rates, communication, estimator_errors, speedup)):
            tell(names[number], number, len(names))
            found.append(part(design, seed))
    tell("done", len(names), len(names))
    points = pd.DataFrame(found[0].points + found[1].points)
    result = RatesResult(
        points=points,
        slopes=fit_slopes(points),
        bounds=pd.DataFrame(found[0].bounds + found[1].bounds),
        checks=pd.DataFrame(found[0].checks + found[1].checks),
        communication=found[2],
        estimator=found[3],
        speedup=found[4],
        settings={
            "design": design._asdict(), "seed": seed, "local_steps": LOCAL_STEPS, "clients": CLIENTS, "batch_size": BATCH,
            "fedbio": {"delta": DELTA, "inner_step": GAMMA}, "fedbioacc": PRESETS,
        },
    )  # fmt: skip
    if out is not None:
        write(result, out)
    return result
