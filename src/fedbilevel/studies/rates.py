"""What `fedbilevel rates` runs: the two theorems on quadratic clients whose gradients are known in closed form.

FedBiO (deterministic, eta = delta/sqrt(T)) on several random problems, FedBiOAcc (minibatches) with several noise seeds:
the mean of ‖grad h(xbar_t)‖^2 over t <= T against T, slopes with bootstrap intervals, and with the step sizes of the
theorems the measurement beside the bound.  Then the same error against communicated bytes for I = 1, 5, 20 local steps, and
against the number of clients, where variance shrinks and bias does not.

Tables of a run (`Run.tables`):

- points: algorithm, variant, horizon, run, mean_square.
- slopes: algorithm, variant, range ("all" or "last decade"), slope, low, high, theory.
- bounds: algorithm, variant, horizon, run, measured, bound, holds, inside (of the region that the constants are for).
- checks: the inequalities behind the theorems' step sizes.
- communication: algorithm, local_steps, run, step, bytes, mean_square.
- estimator: clients, variance, bias_square of the averaged hypergradient estimator.
- speedup: estimator, clients, run, mean_square, inner_error at the end of FedBiOAcc runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from numpy.typing import NDArray

import fedbilevel as fb
from fedbilevel import storage, theory
from fedbilevel.runs import Run, RunFolder
from fedbilevel.studies.driver import Part, Report, Study, conduct
from fedbilevel.tasks.quadratic import OuterSample, QuadraticClients, random_quadratic
from fedbilevel.theory.steps import Conditions, Previous

BATCH = 2
LOCAL_STEPS = 5
CLIENTS = 4
DELTA = 0.5
GAMMA = 0.5
"""Practical FedBiO: eta = DELTA / sqrt(T) and inner step GAMMA."""
PRESETS: dict[str, dict[str, Any]] = {
    "tuned": dict(fb.TUNED),
    "paper": {"delta": 0.1, **dict.fromkeys(("u", "sigma", "c_inner", "c_outer", "inner_step", "outer_step"), 1.0)},
}
VARIANTS: tuple[Previous, ...] = ("paper", "local")
CONDITIONS: tuple[Conditions, ...] = ("printed", "needed")

Tables = dict[str, pd.DataFrame]
Records = list[dict[str, Any]]
WORKERS = 2


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
            "local_steps": LOCAL_STEPS, "clients": CLIENTS, "batch_size": BATCH,
            "fedbio": {"delta": DELTA, "inner_step": GAMMA}, "fedbioacc": PRESETS,
        }  # fmt: skip

    def parts(self) -> list[Part]:
        """Every part is a function and what it is called with; the longest horizons go first."""
        found = [_part("FedBiO against T", fedbio_rates, horizon, rank=(0, -horizon)) for horizon in self.horizons]
        found += [_part("FedBiOAcc against T", fedbioacc_rates, previous) for previous in VARIANTS]
        found += [
            _part("error against bytes", communication, name, local)
            for name in ("fedbio", "fedbioacc")
            for local in self.local_steps
        ]
        found.append(_part("estimator against clients", estimator_errors))
        found += [_part("runs against clients", speedup, name) for name in ("unbiased", "truncated")]
        return found

    def compute(self, part: Part) -> dict[str, dict[str, Any]]:
        tables = part.what(self)
        rows = standard(tables) if "points" in tables else None
        return {part.keys[0]: {"rows": rows, "others": {f"rates-{name}": table for name, table in tables.items()}}}

    def merged(self, folder: RunFolder) -> tuple[list[str], dict[str, pd.DataFrame]]:
        order, _ = super().merged(folder)
        parts = folder.parts()
        points = [parts[key]["rates-points"] for key in order if "rates-points" in parts[key]]
        return order, {"rates-slopes": fit_slopes(pd.concat(points, ignore_index=True))}

    def write(self, run: Run) -> None:
        from fedbilevel.report.studies import write_figures

        bounds = run.tables["bounds"]
        summary = {
            "settings": run.configuration,
            "slopes": run.tables["slopes"].to_dict(orient="records"),
            "points_below_bound": int(bounds["holds"].sum()),
            "points_with_bound": len(bounds),
            "all_inside_region": bool(bounds["inside"].all()),
            "all_step_conditions_hold": bool(run.tables["checks"]["holds"].all()),
        }
        storage.write_json(run.path / "rates-summary.json", summary)
        write_figures("rates", run.tables, run.path)


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


def run(out: Path | None, quick: bool = False, seed: int = 0, report: Report | None = None, line: str = "") -> Run:
    """Run the whole study; with ``out`` into a run folder, with tables and figures."""
    with double_precision():
        return conduct(replace(QUICK if quick else FULL, seed=seed), out, report, line, WORKERS)


@contextmanager
def double_precision() -> Iterator[None]:
    """The theorems' steps (1e-9 and below) would vanish in single precision. Restores the setting it found."""
    before = jax.config.values["jax_enable_x64"]
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def standard(tables: Tables) -> pd.DataFrame:
    """Points and bounds as rows of a run folder."""
    bounds = tables["bounds"].rename(columns={"measured": "mean_square"})
    both = pd.concat([tables["points"], bounds], ignore_index=True)
    both["horizon"] = [f"T = {horizon}" for horizon in both["horizon"]]
    return both.rename(columns={"horizon": "dataset", "algorithm": "split", "variant": "method", "run": "seed"})


def _averages(mean: NDArray[Any], clients: QuadraticClients, horizons: NDArray[Any]) -> NDArray[Any]:
    """Mean of ‖grad h(xbar_t)‖^2 over t = 1..T, for every horizon T."""
    squares = (clients.gradient(mean) ** 2).sum(axis=-1)
    return np.asarray(np.cumsum(squares)[horizons - 1] / horizons)


def _start(clients: QuadraticClients) -> tuple[float, float]:
    """h(x_1) - h* and the inner error at the start."""
    everywhere = np.broadcast_to(clients.outer, (clients.clients, clients.outer.size))
    error = float(((clients.inner - clients.inner_solution(everywhere)) ** 2).sum(axis=1).mean())
    return float(clients.objective(clients.outer)) - clients.minimum(), error


def _checks(algorithm: str, variant: str, checks: tuple[theory.Check, ...]) -> Records:
    return [{"algorithm": algorithm, "variant": variant, **check._asdict()} for check in checks]


def _tables(points: Records, bounds: Records, checks: Records) -> Tables:
    return {"points": pd.DataFrame(points), "bounds": pd.DataFrame(bounds), "checks": pd.DataFrame(checks)}


def fedbio_rates(horizon: int, design: Design) -> Tables:
    """FedBiO over random problems that share one start, with eta = delta/sqrt(T) and with the steps of Theorem 1."""
    drawn = [random_quadratic(design.seed + number, clients=CLIENTS) for number in range(design.instances)]
    instances = [QuadraticClients(q.train, q.val, drawn[0].outer, drawn[0].inner) for q in drawn]
    problem, horizons = instances[0].problem(), np.array([horizon])
    points, bounds, checks = [], [], []
    for number, clients in enumerate(instances):

        def walk(arguments: dict[str, Any], clients: QuadraticClients = clients) -> tuple[theory.Path, float]:
            algorithm = fb.fedbio(problem, fb.exact(), **arguments)
            path = theory.path_of(fb.trace(algorithm, clients.data(), rounds=horizon // LOCAL_STEPS))
            return path, float(_averages(path.outer[0].mean(axis=1), clients, horizons)[0])

        usual, error = walk({"inner_step": GAMMA, "outer_step": DELTA / horizon**0.5, "local_steps": LOCAL_STEPS})
        region = theory.covering_region(usual, clients)
        constants = theory.quadratic_constants(clients, region)
        steps = theory.fedbio_steps(constants, LOCAL_STEPS, horizon // LOCAL_STEPS)
        slow, measured = walk(dict(steps.arguments()))
        bound = theory.fedbio_bound(constants, steps, *_start(clients)).total
        common = {"algorithm": "fedbio", "horizon": horizon, "run": number}
        points.append({**common, "variant": "eta = delta/sqrt(T)", "mean_square": error})
        row = {**common, "variant": "theorem 1", "measured": measured, "bound": bound, "holds": measured <= bound}
        bounds.append({**row, "inside": region.contains(slow, clients)})
        checks += _checks("fedbio", f"T = {horizon}, problem {number}", steps.checks)
    return _tables(points, bounds, checks)


def fedbioacc_rates(previous: Previous, design: Design) -> Tables:
    """FedBiOAcc with practical constants and with those of Theorem 2, for one treatment of x_t at an averaging.

    The schedule does not know T, so one long run serves every horizon.
    """
    clients = random_quadratic(design.seed, clients=CLIENTS, gradient_noise=1.0)
    problem, data, start = clients.problem(), clients.data(), _start(clients)
    horizons = np.array(design.horizons)
    rounds = int(horizons[-1]) // LOCAL_STEPS

    def walk(arguments: dict[str, Any], seeds: int) -> tuple[theory.Path, NDArray[Any]]:
        """The runs of all seeds, and their errors [seeds, horizons]."""
        settings = {"local_steps": LOCAL_STEPS, **arguments}
        algorithm = fb.fedbioacc(problem, fb.exact(), batch_size=BATCH, **settings)
        traces = (fb.trace(algorithm, data, rounds=rounds, seed=design.seed + number) for number in range(seeds))
        path = theory.path_of(*traces)
        return path, np.array([_averages(run.mean(axis=1), clients, horizons) for run in path.outer])

    paths, points, bounds, checks = [], [], [], []
    for preset in ("tuned", "paper"):
        path, errors = walk({**PRESETS[preset], "previous": previous}, design.seeds)
        paths.append(path)
        common = {"algorithm": "fedbioacc", "variant": f'{preset} constants, previous="{previous}"'}
        points += [
            {**common, "horizon": horizon, "run": number, "mean_square": float(value)}
            for number, values in enumerate(errors)
            for horizon, value in zip(design.horizons, values, strict=True)
        ]
    region = theory.covering_region(paths[0], clients)
    constants = theory.quadratic_constants(clients, region, batch_size=BATCH)
    for conditions in CONDITIONS:
        steps = theory.fedbioacc_steps(constants, LOCAL_STEPS, rounds, previous=previous, conditions=conditions)
        path, errors = walk(dict(steps.arguments()), design.theory_seeds)
        inside = region.contains(path, clients)
        variant = f'theorem 2, {conditions} conditions, previous="{previous}"'
        for horizon, value in zip(design.horizons, errors.mean(axis=0), strict=True):
            bound = theory.fedbioacc_bound(constants, replace(steps, rounds=horizon // LOCAL_STEPS), *start).total
            row = {
                "algorithm": "fedbioacc",
                "variant": variant,
                "horizon": horizon,
                "run": -1,
                "measured": float(value),
            }
            bounds.append({**row, "bound": bound, "holds": bool(value <= bound), "inside": inside})
        checks += _checks("fedbioacc", variant, steps.checks)
    return _tables(points, bounds, checks)


def communication(name: str, local_steps: int, design: Design) -> Tables:
    """Error against bytes for a number of local steps a round, the number of steps being the same."""
    clients = random_quadratic(design.seed, clients=CLIENTS, gradient_noise=1.0)
    problem, rounds = clients.problem(), design.communication_steps // local_steps
    if name == "fedbio":
        algorithm = fb.fedbio(problem, fb.exact(), inner_step=GAMMA, outer_step=0.1, local_steps=local_steps)
    else:
        algorithm = fb.fedbioacc(
            problem, fb.exact(), batch_size=BATCH, local_steps=local_steps, previous="local", **PRESETS["tuned"]
        )
    seeds = [design.seed + number for number in range(1 if name == "fedbio" else min(design.seeds, 3))]
    every = max(1, rounds // 200)
    swept = fb.sweep(algorithm, clients.data(), rounds, seeds, record_every=every, workers=1, diagnostics="exact")
    table = swept.history.rename(columns={"hypergradient_squared_norm": "mean_square", "seed": "run"})
    table["bytes"] = table["bytes_up"] + table["bytes_down"]
    table = table[["run", "step", "bytes", "mean_square"]]
    return {"communication": table.assign(algorithm=name, local_steps=local_steps)}


def _equal_clients(seed: int, clients: int, hessian_noise: float) -> QuadraticClients:
    """Clients with the same losses: what is left between them is minibatch noise alone."""
    alone = random_quadratic(seed, clients=1, gradient_noise=1.0, hessian_noise=hessian_noise)
    train = type(alone.train)(*(np.repeat(leaf, clients, axis=0) for leaf in alone.train))
    val = OuterSample(*(np.repeat(leaf, clients, axis=0) for leaf in alone.val))
    return QuadraticClients(train, val, alone.outer, alone.inner)


def estimator_errors(design: Design, terms: int = 2, step: float = 0.5) -> Tables:
    """Variance and squared bias of the mean over M clients of one Neumann estimate each."""
    clients = _equal_clients(design.seed, design.replicas, hessian_noise=0.3)
    algorithm = fb.fedbio(clients.problem(), fb.neumann(terms, step), local_steps=1, batch_size=BATCH)
    estimates = np.asarray(fb.trace(algorithm, clients.data(), rounds=1, seed=design.seed).outer_momentum[0])
    alone = _equal_clients(design.seed, 1, hessian_noise=0.3)
    truth = alone.hypergradient(alone.outer[None], alone.inner[None])[0]
    spread = float(estimates.var(axis=0, ddof=1).sum())
    # The mean over all replicas still carries spread / replicas of variance: take it off the squared bias.
    bias = float(((estimates.mean(axis=0) - truth) ** 2).sum()) - spread / design.replicas
    rows, count = [], 1
    while count <= design.replicas // 32:
        groups = estimates.reshape(-1, count, estimates.shape[1]).mean(axis=1)
        rows.append({"clients": count, "variance": float(groups.var(axis=0, ddof=1).sum()), "bias_square": bias})
        count *= 2
    return {"estimator": pd.DataFrame(rows)}


def speedup(name: str, design: Design) -> Tables:
    """The error FedBiOAcc ends with against the number of clients, with "unbiased" or "truncated" hypergradients."""
    most = max(design.client_counts)
    clients = _equal_clients(design.seed, most, hessian_noise=0.0)
    hypergradient: Any = fb.exact() if name == "unbiased" else fb.neumann(terms=1, step=0.5)
    sizes: dict[str, Any] = {"batch_size": BATCH, "local_steps": LOCAL_STEPS}
    algorithm = fb.fedbioacc(clients.problem(), hypergradient, previous="local", **sizes, **PRESETS["tuned"])
    rounds = design.client_steps // LOCAL_STEPS
    seeds = [design.seed + number for number in range(design.seeds)]
    options: dict[str, Any] = {"record_every": max(1, rounds // 100), "workers": 1, "diagnostics": "exact"}
    tables = []
    for count in design.client_counts:
        # A client of weight zero counts for nothing, so one compiled program serves every number of clients.
        weights = np.where(np.arange(most) < count, 1.0, 0.0)
        history = fb.sweep(algorithm, clients.data(), rounds, seeds, weights=weights, **options).history
        late = history[history["round"] > rounds // 2]
        table = late.groupby("seed")[["hypergradient_squared_norm", "inner_error"]].mean().reset_index()
        table = table.rename(columns={"hypergradient_squared_norm": "mean_square", "seed": "run"})
        tables.append(table.assign(estimator=name, clients=count))
    return {"speedup": pd.concat(tables)}


class Slope(NamedTuple):
    """A fitted exponent and the percentile interval of its bootstrap."""

    value: float
    low: float
    high: float


def fit(horizons: NDArray[Any], values: NDArray[Any]) -> float:
    """Least-squares slope of log values against log horizons."""
    return float(np.polyfit(np.log(horizons), np.log(values), 1)[0])


def bootstrap_slope(
    horizons: NDArray[Any], runs: NDArray[Any], *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> Slope:
    """Slope of the mean over runs [runs, horizons]; whole runs are resampled, since horizons of one run are dependent.

    >>> slope = bootstrap_slope(np.array([10.0, 100.0]), np.array([[1.0, 0.1], [2.0, 0.2]]))
    >>> round(slope.value, 6), round(slope.low, 6), round(slope.high, 6)
    (-1.0, -1.0, -1.0)
    """
    if runs.ndim != 2 or runs.shape[1] != horizons.size or horizons.size < 2:
        raise ValueError(
            f"runs must be [runs, horizons] with at least two horizons, got {runs.shape} and {horizons.size}."
        )
    if not (runs > 0).all():
        raise ValueError("runs must be positive: a logarithm is taken.")
    generator = np.random.default_rng(seed)
    picks = generator.integers(runs.shape[0], size=(resamples, runs.shape[0]))
    logs = np.log(runs[picks].mean(axis=1))
    centred = np.log(horizons) - np.log(horizons).mean()
    slopes = logs @ centred / (centred @ centred)
    low, high = np.quantile(slopes, [(1 - level) / 2, (1 + level) / 2])
    return Slope(fit(horizons, runs.mean(axis=0)), float(low), float(high))


def fit_slopes(points: pd.DataFrame) -> pd.DataFrame:
    """A slope for every variant, over all horizons and over the last decade."""
    lines = []
    for (algorithm, variant), group in points.groupby(["algorithm", "variant"], sort=False):
        table = group.pivot(index="run", columns="horizon", values="mean_square")
        horizons = table.columns.to_numpy(dtype=float)
        expected = -1 / 2 if algorithm == "fedbio" else -2 / 3
        for name, chosen in (("all", horizons > 0), ("last decade", horizons >= horizons[-1] / 10)):
            slope = bootstrap_slope(horizons[chosen], table.to_numpy()[:, chosen])
            line = {"algorithm": algorithm, "variant": variant, "range": name, "runs": len(table)}
            lines.append({**line, "slope": slope.value, "low": slope.low, "high": slope.high, "theory": expected})
    return pd.DataFrame(lines)
