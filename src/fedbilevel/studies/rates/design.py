"""What `fedbilevel rates` runs: the two theorems on quadratic clients whose gradients are known in closed form.

FedBiO (deterministic, eta = delta/sqrt(T)) on several random problems, FedBiOAcc (minibatches) with several noise seeds:
the mean of ‖grad h(xbar_t)‖^2 over t <= T against T, slopes with bootstrap intervals, and with the step sizes of the
theorems the measurement beside the bound.  Then the same error against communicated bytes for I = 1, 5, 20 local steps, and
against the number of clients, where variance shrinks and bias does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pandas as pd

from fedbilevel import storage
from fedbilevel.runs import Run, RunFolder
from fedbilevel.studies.driver import Part, Report, Study, conduct
from fedbilevel.studies.rates import measure

TABLES = ("points", "slopes", "bounds", "checks", "communication", "estimator", "speedup")
WORKERS = 2


@dataclass(frozen=True)
class RatesResult:
    """Tables of one run of the study.

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

    @classmethod
    def of(cls, run: Run) -> RatesResult:
        tables: dict[str, Any] = {name: run.others[f"rates-{name}"] for name in TABLES}
        return cls(**tables, settings=run.configuration)

    def summary(self) -> dict[str, Any]:
        """What the study found, in plain numbers."""
        return {
            "settings": self.settings,
            "slopes": self.slopes.to_dict(orient="records"),
            "points_below_bound": int(self.bounds["holds"].sum()),
            "points_with_bound": len(self.bounds),
            "all_inside_region": bool(self.bounds["inside"].all()),
            "all_step_conditions_hold": bool(self.checks["holds"].all()),
        }


@dataclass(frozen=True)
class Design(Study):
    """How much is run."""

    horizons: tuple[int, ...]
    instances: int
    seeds: int
    theory_seeds: int
    communication_steps: int
    local_steps: tuple[int, ...]
    replicas: int
    client_counts: tuple[int, ...]
    client_steps: int
    seed: int = 0

    command = "rates"

    def configuration(self) -> dict[str, Any]:
        amounts = {name: value for name, value in vars(self).items() if name != "seed"}
        return {
            "quick": replace(self, seed=0) == QUICK, "seed": self.seed, "design": amounts,
            "local_steps": measure.LOCAL_STEPS, "clients": measure.CLIENTS, "batch_size": measure.BATCH,
            "fedbio": {"delta": measure.DELTA, "inner_step": measure.GAMMA}, "fedbioacc": measure.PRESETS,
        }  # fmt: skip

    def parts(self) -> list[Part]:
        """Every part is a function and what it is called with; the longest horizons go first."""
        found = [
            _part("FedBiO against T", measure.fedbio_rates, horizon, rank=(0, -horizon)) for horizon in self.horizons
        ]
        found += [_part("FedBiOAcc against T", measure.fedbioacc_rates, previous) for previous in measure.VARIANTS]
        found += [
            _part("error against bytes", measure.communication, name, local)
            for name in ("fedbio", "fedbioacc")
            for local in self.local_steps
        ]
        found.append(_part("estimator against clients", measure.estimator_errors))
        found += [_part("runs against clients", measure.speedup, name) for name in ("unbiased", "truncated")]
        return found

    def compute(self, part: Part) -> dict[str, dict[str, Any]]:
        tables = part.what(self)
        rows = measure.rows(tables) if "points" in tables else None
        return {part.keys[0]: {"rows": rows, "others": {f"rates-{name}": table for name, table in tables.items()}}}

    def merged(self, folder: RunFolder) -> tuple[list[str], dict[str, pd.DataFrame]]:
        order, _ = super().merged(folder)
        parts = folder.parts()
        points = [parts[key]["rates-points"] for key in order if "rates-points" in parts[key]]
        return order, {"rates-slopes": measure.fit_slopes(pd.concat(points, ignore_index=True))}

    def write(self, run: Run) -> None:
        from fedbilevel.report.studies import write_figures

        result = RatesResult.of(run)
        storage.write_json(run.path / "rates-summary.json", result.summary())
        write_figures("rates", vars(result), run.path)


def _part(title: str, function: Callable[..., Any], *arguments: Any, rank: Any = (1,)) -> Part:
    key = " ".join(map(str, (function.__name__, *arguments)))
    return Part((key,), partial(function, *arguments), title, rank=rank)


FULL = Design(
    horizons=(200, 600, 2000, 6000, 20000), instances=8, seeds=8, theory_seeds=2, communication_steps=3000,
    local_steps=(1, 5, 20), replicas=4096, client_counts=(1, 2, 4, 8, 16), client_steps=2000,
)  # fmt: skip
QUICK = Design(
    horizons=(50, 150, 500), instances=2, seeds=3, theory_seeds=2, communication_steps=400, local_steps=(1, 5),
    replicas=256, client_counts=(1, 4), client_steps=200,
)  # fmt: skip


def run(
    out: Path | None, quick: bool = False, seed: int = 0, report: Report | None = None, line: str = ""
) -> RatesResult:
    """Run the whole study; with ``out`` into a run folder, with tables and figures."""
    with double_precision():
        return RatesResult.of(conduct(replace(QUICK if quick else FULL, seed=seed), out, report, line, WORKERS))


@contextmanager
def double_precision() -> Iterator[None]:
    """The theorems' steps (1e-9 and below) would vanish in single precision. Restores the setting it found."""
    before = jax.config.values["jax_enable_x64"]
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
