"""What `fedbilevel rates` runs: the two theorems on quadratic clients whose gradients are known in closed form.

FedBiO (deterministic, eta = delta/sqrt(T)) and FedBiOAcc (minibatches, with and without noise in the Hessian) on the same
number of random problems, FedBiOAcc several times on each: means of ‖grad h(xbar_t)‖^2 against T, over all t <= T and over
the second half alone, and their slopes.  With the step sizes of the theorems the measurement stands beside the bound.  Then
the same error against communicated bytes for I = 1, 5, 20 local steps, and against the number of clients, where variance
shrinks and bias does not.

A slope is fitted to every problem's runs; the estimate is the mean over the problems, with Student's interval
over them.  No two problems share a seed, so the spread of their slopes holds both what differs between problems and what
differs between runs.  How often such intervals cover is measured (`coverage_in_a_model`, `coverage_of_redrawn_runs`).

Tables of a run (`Run.tables`):

- points: algorithm, variant, horizon, problem, run, mean_square (over t <= T), late_mean_square (over T/2 < t <= T).
- slopes: algorithm, variant, average ("all t" or "second half"), range ("all" or "last decade"), slope, low, high, theory.
- coverage: case, problems, runs, coverage (of intervals at 95 %), width, replications.
- bounds: algorithm, variant, horizon, run, measured, bound, holds, inside (of the region that the constants are for).
- checks: the inequalities behind the theorems' step sizes.
- communication: algorithm, local_steps, run, step, bytes, mean_square.
- estimator: clients, variance, bias_square of the averaged hypergradient estimator.
- speedup: estimator, clients, run, mean_square, inner_error at the end of FedBiOAcc runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from numpy.typing import NDArray

import fedbilevel as fb
from fedbilevel import storage, theory
from fedbilevel.calculus import Tree
from fedbilevel.engines.diagnose import STEPS
from fedbilevel.engines.simulation import ROWS, CompiledLoop, Options, Simulation, advance, begin
from fedbilevel.fairness.intervals import Interval, across_splits
from fedbilevel.plan import Algorithm
from fedbilevel.problem import BilevelProblem
from fedbilevel.runs import Run, RunFolder
from fedbilevel.studies.driver import Part, Report, Study, conduct
from fedbilevel.tasks.quadratic import QuadraticClients, random_quadratic
from fedbilevel.theory.steps import Conditions, Previous

BATCH = 2
LOCAL_STEPS = 5
CLIENTS = 4
BOUNDED = 8
"""Problems on which Theorem 1's bound is held against a run."""
DELTA = 0.5
GAMMA = 0.5
"""Practical FedBiO: eta = DELTA / sqrt(T) and inner step GAMMA."""
_ONES = dict.fromkeys(("u", "sigma", "c_inner", "c_outer", "inner_step", "outer_step"), 1.0)
PRESETS: dict[str, dict[str, Any]] = {
    "tuned": dict(fb.TUNED),
    "brisk": {**_ONES, "delta": 1.0, "u": 8.0},
    "paper": {**_ONES, "delta": 0.1},
}
"""Constants of FedBiOAcc.  With the brisk ones x follows its momentum faster than the momentum forgets, which is where
t^(-2/3) can be seen: c alpha_t is far below outer_step times the curvature of h from the first few thousand steps on."""
HESSIAN_NOISE = 0.3
SERIES = (30, 0.5)
"""Terms and step of the Neumann series where Hessians are noisy.  Inverting a noisy Hessian would be biased; the truncated
series is off by .75^31, about 1e-4."""
MEASURED = {"hypergradient_squared_norm": "mean_square", "seed": "run"}
AVERAGES = {"all t": "mean_square", "second half": "late_mean_square"}
FEDBIO = "eta = delta/sqrt(T)"
VARIANTS: tuple[Previous, ...] = ("paper", "local")
ACCELERATED: tuple[tuple[str, Previous, bool], ...] = (
    *((preset, previous, False) for preset in PRESETS for previous in VARIANTS),
    *((preset, "local", True) for preset in ("tuned", "brisk")),
)
"""What is measured of FedBiOAcc: constants, treatment of x_t at an averaging, and whether Hessians are noisy."""
CONDITIONS: tuple[Conditions, ...] = ("printed", "needed")

Tables = dict[str, pd.DataFrame]
Records = list[dict[str, Any]]
WORKERS = 2


@dataclass(frozen=True)
class Design(Study):
    """How much is run."""

    horizons: tuple[int, ...]
    bound_horizons: tuple[int, ...]
    instances: int
    seeds: int
    replications: int
    theory_seeds: int
    communication_steps: int
    local_steps: tuple[int, ...]
    replicas: int
    client_counts: tuple[int, ...]
    client_steps: int
    variants: tuple[tuple[str, Previous, bool], ...] = ACCELERATED
    seed: int = 0

    command = "rates"

    def configuration(self) -> dict[str, Any]:
        amounts = {name: value for name, value in vars(self).items() if name != "seed"}
        mode = next((name for name, design in MODES.items() if design == replace(self, seed=0)), "other")
        return {
            "mode": mode, "seed": self.seed, "design": amounts, "local_steps": LOCAL_STEPS,
            "clients": CLIENTS, "batch_size": BATCH,
            "fedbio": {"delta": DELTA, "inner_step": GAMMA}, "fedbioacc": PRESETS, "hessian_noise": HESSIAN_NOISE,
        }  # fmt: skip

    def parts(self) -> list[Part]:
        """Every part is a function and what it is called with; the longest horizons go first."""
        sent = product(("fedbio", "fedbioacc"), self.local_steps)
        return [
            *(_part("FedBiO against T", fedbio_slopes, horizon, rank=(1, -horizon)) for horizon in self.horizons),
            *(_part("FedBiOAcc against T", fedbioacc_slopes, *of, rank=(0, not of[-1])) for of in self.variants),
            *(_part("bounds", fedbio_bounds, horizon, rank=(1, -horizon)) for horizon in self.bound_horizons),
            *(_part("bounds", fedbioacc_bounds, previous, rank=(1, 0)) for previous in VARIANTS),
            *(_part("error against bytes", communication, *pair) for pair in sent),
            _part("estimator against clients", estimator_errors),
            *(_part("runs against clients", speedup, name) for name in ("unbiased", "truncated")),
            _part("coverage of the intervals", coverage_in_a_model),
        ]

    def compute(self, part: Part) -> dict[str, dict[str, Any]]:
        tables = part.what(self)
        rows = standard(tables) if {"points", "bounds"} & tables.keys() else None
        return {part.keys[0]: {"rows": rows, "others": {f"rates-{name}": table for name, table in tables.items()}}}

    def merged(self, folder: RunFolder) -> tuple[list[str], dict[str, pd.DataFrame]]:
        order, _ = super().merged(folder)
        parts = folder.parts()
        points, covered = (
            pd.concat([parts[key][name] for key in order if name in parts[key]], ignore_index=True)
            for name in ("rates-points", "rates-coverage")
        )
        coverage = pd.concat([covered, coverage_of_redrawn_runs(points, self)], ignore_index=True)
        return order, {"rates-slopes": fit_slopes(points), "rates-coverage": coverage}

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
    horizons=(200, 600, 2000, 6000, 20000), bound_horizons=(200, 600, 2000), instances=8, seeds=2, replications=1000,
    theory_seeds=2, communication_steps=3000, local_steps=(1, 5, 20), replicas=4096, client_counts=(1, 2, 4, 8, 16),
    client_steps=1000,
)  # fmt: skip
LONG = replace(
    FULL, horizons=(*FULL.horizons, 60000), bound_horizons=FULL.horizons, instances=10, seeds=3, replications=10000,
    client_steps=2000,
)  # fmt: skip
QUICK = Design(
    horizons=(50, 150, 500), bound_horizons=(50, 150), instances=2, seeds=2, replications=100, theory_seeds=2,
    communication_steps=400, local_steps=(1, 5), replicas=256, client_counts=(1, 4), client_steps=200,
    variants=(("brisk", "local", False),),
)  # fmt: skip
MODES = {"default": FULL, "long": LONG, "quick": QUICK}


def run(out: Path | None, mode: str = "default", seed: int = 0, report: Report | None = None, line: str = "") -> Run:
    """Run the whole study; with ``out`` into a run folder, with tables and figures."""
    with double_precision():
        return conduct(replace(MODES[mode], seed=seed), out, report, line, WORKERS)


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
    """Points or bounds as rows of a run folder."""
    if "bounds" in tables:
        table = tables["bounds"].rename(columns={"measured": "mean_square"})
    else:
        table = tables["points"].assign(run=tables["points"].groupby(["variant", "horizon"]).cumcount())
    table["horizon"] = [f"T = {horizon}" for horizon in table["horizon"]]
    return table.rename(columns={"horizon": "dataset", "algorithm": "split", "variant": "method", "run": "seed"})


@cache
def _problems(
    seed: int, count: int, gradient_noise: float, hessian_noise: float
) -> tuple[BilevelProblem, list[QuadraticClients]]:
    """Random problems that share one start, that of the first, and so one compiled program."""
    noise: dict[str, Any] = {"gradient_noise": gradient_noise, "hessian_noise": hessian_noise}
    drawn = [random_quadratic(seed + number, clients=CLIENTS, **noise) for number in range(count)]
    return drawn[0].problem(), [QuadraticClients(q.train, q.val, drawn[0].outer, drawn[0].inner) for q in drawn]


def _averages(squares: NDArray[Any], horizon: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Means over t = 1..T and over the second half of these, of squares [..., steps]."""
    return squares[..., :horizon].mean(axis=-1), squares[..., horizon // 2 : horizon].mean(axis=-1)


def squares_along(
    algorithm: Algorithm, instances: Sequence[QuadraticClients], runs: int, rounds: int, seed: int = 0
) -> NDArray[Any]:
    """‖grad h(xbar_t)‖^2 at every step, [problems, runs, steps]: the runs of `fb.trace`, all in one program.  Seeds count from
    ``seed`` through the runs of the first problem, then of the second."""
    options = Options(devices=jax.local_devices()[:1])
    made = [Simulation(algorithm, clients.data(), options, level=STEPS) for clients in instances]
    loop, settings = made[0].loop, algorithm.settings
    fleets = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(simulation.fleet for simulation in made))
    means = [
        jnp.asarray(np.stack([getattr(clients, name).mean(axis=0) for clients in instances]))
        for name in ("client_curvature", "client_slope")
    ]
    seeds = jnp.arange(seed, seed + len(instances) * runs, dtype=jnp.uint32).reshape(len(instances), runs)
    state = jax.vmap(jax.vmap(lambda seed: begin(loop, settings, seed)))(seeds)
    found = []
    for done in range(0, rounds, ROWS):
        blocks = min(ROWS, rounds - done)
        state, squares = _squares(loop, settings, fleets, *means, seeds, state, np.int32(done), np.int32(blocks))
        found.append(np.asarray(squares)[..., : blocks * algorithm.local_steps])
    return np.concatenate(found, axis=-1)


@partial(jax.jit, static_argnames=("loop",))
def _squares(
    loop: CompiledLoop, settings: Any, fleets: Tree, curvatures: Any, slopes: Any, seeds: Any, states: Any, first: Any,
    blocks: Any,
) -> tuple[Any, jax.Array]:  # fmt: skip
    def one(fleet: Tree, curvature: jax.Array, slope: jax.Array, seed: Any, state: Any) -> tuple[Any, jax.Array]:
        state, steps = advance(loop, settings, fleet, seed, state, first, blocks, np.int32(1))
        mean = steps.outer.mean(axis=1).reshape(-1, slope.size)  # over the clients; rounds and local steps in a row
        return state, jnp.sum((mean @ curvature + slope) ** 2, axis=-1)

    of_problem = jax.vmap(one, in_axes=(None, None, None, 0, 0))
    return jax.vmap(of_problem)(fleets, curvatures, slopes, seeds, states)


def _points(algorithm: str, variant: str, horizons: Iterable[int], squares: NDArray[Any]) -> Tables:
    rows = []
    for horizon in horizons:
        whole, late = _averages(squares, horizon)
        for problem, run in np.ndindex(whole.shape):
            row = {"algorithm": algorithm, "variant": variant, "horizon": horizon, "problem": problem, "run": run}
            rows.append({**row, "mean_square": whole[problem, run], "late_mean_square": late[problem, run]})
    return {"points": pd.DataFrame(rows)}


def fedbio_slopes(horizon: int, design: Design) -> Tables:
    """FedBiO with eta = delta/sqrt(T) for one T."""
    problem, instances = _problems(design.seed, design.instances, 0.0, 0.0)
    steps = {"inner_step": GAMMA, "outer_step": DELTA / horizon**0.5, "local_steps": LOCAL_STEPS}
    squares = squares_along(fb.fedbio(problem, fb.exact(), **steps), instances, 1, horizon // LOCAL_STEPS)
    return _points("fedbio", FEDBIO, [horizon], squares)


def fedbioacc_slopes(preset: str, previous: Previous, noisy: bool, design: Design) -> Tables:
    """FedBiOAcc; the schedule does not know T, so one long run serves every horizon."""
    problem, instances = _problems(design.seed, design.instances, 1.0, HESSIAN_NOISE if noisy else 0.0)
    estimator: Any = fb.neumann(*SERIES) if noisy else fb.exact()
    settings = {"batch_size": BATCH, "local_steps": LOCAL_STEPS, "previous": previous, **PRESETS[preset]}
    algorithm = fb.fedbioacc(problem, estimator, **settings)
    squares = squares_along(algorithm, instances, design.seeds, design.horizons[-1] // LOCAL_STEPS, design.seed)
    variant = f'{preset} constants, previous="{previous}"' + (", noisy Hessians" if noisy else "")
    return _points("fedbioacc", variant, design.horizons, squares)


def _start(clients: QuadraticClients) -> tuple[float, float]:
    """h(x_1) - h* and the inner error at the start."""
    everywhere = np.broadcast_to(clients.outer, (clients.clients, clients.outer.size))
    error = float(((clients.inner - clients.inner_solution(everywhere)) ** 2).sum(axis=1).mean())
    return float(clients.objective(clients.outer)) - clients.minimum(), error


def _checks(algorithm: str, variant: str, checks: tuple[theory.Check, ...]) -> Records:
    return [{"algorithm": algorithm, "variant": variant, **check._asdict()} for check in checks]


def fedbio_bounds(horizon: int, design: Design) -> Tables:
    """FedBiO with the steps of Theorem 1, on the first problems, in the region that eta = delta/sqrt(T) needs."""
    problem, instances = _problems(design.seed, min(design.instances, BOUNDED), 0.0, 0.0)
    bounds, checks = [], []
    for number, clients in enumerate(instances):

        def walk(arguments: dict[str, Any], clients: QuadraticClients = clients) -> theory.Path:
            algorithm = fb.fedbio(problem, fb.exact(), **arguments)
            return theory.path_of(fb.trace(algorithm, clients.data(), rounds=horizon // LOCAL_STEPS))

        usual = walk({"inner_step": GAMMA, "outer_step": DELTA / horizon**0.5, "local_steps": LOCAL_STEPS})
        region = theory.covering_region(usual, clients)
        constants = theory.quadratic_constants(clients, region)
        steps = theory.fedbio_steps(constants, LOCAL_STEPS, horizon // LOCAL_STEPS)
        slow = walk(dict(steps.arguments()))
        bounds += _measured("fedbio", "theorem 1", number, slow, clients, region, {
            horizon: theory.fedbio_bound(constants, steps, *_start(clients)).total
        })  # fmt: skip
        checks += _checks("fedbio", f"T = {horizon}, problem {number}", steps.checks)
    return {"bounds": pd.DataFrame(bounds), "checks": pd.DataFrame(checks)}


def fedbioacc_bounds(previous: Previous, design: Design) -> Tables:
    """FedBiOAcc on the first problem with the steps of Theorem 2, for one treatment of x_t at an averaging, in the region that
    the tuned constants need."""
    problem, (clients,) = _problems(design.seed, 1, 1.0, 0.0)
    data, start = clients.data(), _start(clients)
    rounds = design.bound_horizons[-1] // LOCAL_STEPS

    def walk(arguments: dict[str, Any], seeds: int) -> theory.Path:
        """The runs of all seeds."""
        settings = {"local_steps": LOCAL_STEPS, **arguments}
        algorithm = fb.fedbioacc(problem, fb.exact(), batch_size=BATCH, **settings)
        return theory.path_of(
            *(fb.trace(algorithm, data, rounds=rounds, seed=design.seed + number) for number in range(seeds))
        )

    region = theory.covering_region(walk({**PRESETS["tuned"], "previous": previous}, design.seeds), clients)
    constants = theory.quadratic_constants(clients, region, batch_size=BATCH)
    bounds, checks = [], []
    for conditions in CONDITIONS:
        steps = theory.fedbioacc_steps(constants, LOCAL_STEPS, rounds, previous=previous, conditions=conditions)
        variant = f'theorem 2, {conditions} conditions, previous="{previous}"'
        bounds += _measured("fedbioacc", variant, -1, walk(dict(steps.arguments()), design.theory_seeds), clients, region, {
            horizon: theory.fedbioacc_bound(constants, replace(steps, rounds=horizon // LOCAL_STEPS), *start).total
            for horizon in design.bound_horizons
        })  # fmt: skip
        checks += _checks("fedbioacc", variant, steps.checks)
    return {"bounds": pd.DataFrame(bounds), "checks": pd.DataFrame(checks)}


def _measured(
    algorithm: str, variant: str, run: int, path: theory.Path, clients: QuadraticClients, region: theory.Region,
    bounds: dict[int, float],
) -> Records:  # fmt: skip
    """The mean over the seeds of a path beside the bound of every horizon."""
    squares = (clients.gradient(path.outer.mean(axis=2)) ** 2).sum(axis=-1).mean(axis=0)
    rows, inside = [], region.contains(path, clients)
    for horizon, bound in bounds.items():
        measured = float(_averages(squares, horizon)[0])
        row = {"algorithm": algorithm, "variant": variant, "horizon": horizon, "run": run, "measured": measured}
        rows.append({**row, "bound": bound, "holds": measured <= bound, "inside": inside})
    return rows


def communication(name: str, local_steps: int, design: Design) -> Tables:
    """Error against bytes for a number of local steps a round, the number of steps being the same."""
    clients = random_quadratic(design.seed, clients=CLIENTS, gradient_noise=1.0)
    problem, rounds = clients.problem(), design.communication_steps // local_steps
    plain: dict[str, Any] = {"inner_step": GAMMA, "outer_step": 0.1}
    tuned: dict[str, Any] = {"batch_size": BATCH, "previous": "local", **PRESETS["tuned"]}
    make, options, runs = (fb.fedbio, plain, 1) if name == "fedbio" else (fb.fedbioacc, tuned, min(design.seeds, 3))
    algorithm = make(problem, fb.exact(), local_steps=local_steps, **options)
    seeds = [design.seed + number for number in range(runs)]
    every = max(1, rounds // 200)
    swept = fb.sweep(algorithm, clients.data(), rounds, seeds, record_every=every, workers=1, diagnostics="exact")
    table = swept.history.rename(columns=MEASURED)
    table["bytes"] = table["bytes_up"] + table["bytes_down"]
    table = table[["run", "step", "bytes", "mean_square"]]
    return {"communication": table.assign(algorithm=name, local_steps=local_steps)}


def _equal_clients(seed: int, clients: int, hessian_noise: float) -> QuadraticClients:
    """Clients with the same losses: what is left between them is minibatch noise alone."""
    alone = random_quadratic(seed, clients=1, gradient_noise=1.0, hessian_noise=hessian_noise)
    train, val = jax.tree.map(lambda leaf: np.repeat(leaf, clients, axis=0), (alone.train, alone.val))
    return QuadraticClients(train, val, alone.outer, alone.inner)


def estimator_errors(design: Design, terms: int = 2, step: float = 0.5) -> Tables:
    """Variance and squared bias of the mean over M clients of one Neumann estimate each."""
    clients = _equal_clients(design.seed, design.replicas, hessian_noise=0.3)
    algorithm = fb.fedbio(clients.problem(), fb.neumann(terms, step), 0.1, 0.1, local_steps=1, batch_size=BATCH)
    estimates = np.asarray(fb.trace(algorithm, clients.data(), rounds=1, seed=design.seed).outer_momentum[0])
    alone = _equal_clients(design.seed, 1, hessian_noise=0.3)
    truth = alone.hypergradient(alone.outer[None], alone.inner[None])[0]
    spread = float(estimates.var(axis=0, ddof=1).sum())
    # The mean over all replicas still carries spread / replicas of variance: take it off the squared bias.
    bias = float(((estimates.mean(axis=0) - truth) ** 2).sum()) - spread / design.replicas
    counts = 2 ** np.arange((design.replicas // 32).bit_length())
    groups = [estimates.reshape(-1, count, estimates.shape[1]).mean(axis=1) for count in counts]
    variances = [float(group.var(axis=0, ddof=1).sum()) for group in groups]
    return {"estimator": pd.DataFrame({"clients": counts, "variance": variances, "bias_square": bias})}


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
        tables.append(table.rename(columns=MEASURED).assign(estimator=name, clients=count))
    return {"speedup": pd.concat(tables)}


def slopes_of(horizons: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Least-squares slopes of the logarithm of the expected value against log T, from values [..., runs, horizons].

    The logarithm of a mean over few runs is too small by half its relative variance, which differs between horizons; an
    estimate of that is added.
    """
    if horizons.size < 2 or values.ndim < 2 or values.shape[-1] != horizons.size:
        raise ValueError(f"values must be [..., runs, horizons] with at least two horizons, got {values.shape}.")
    if not (values > 0).all():
        raise ValueError("values must be positive: a logarithm is taken.")
    means, runs = values.mean(axis=-2), values.shape[-2]
    logs = np.log(means)
    if runs > 1:
        logs += values.var(axis=-2, ddof=1) / means**2 / (2 * runs)
    centred = np.log(horizons) - np.log(horizons).mean()
    return np.asarray(logs @ centred / (centred @ centred))


def mean_slope(horizons: NDArray[Any], values: NDArray[Any]) -> Interval:
    """The mean over problems of their slopes, from values [problems, runs, horizons].

    >>> slope = mean_slope(np.array([10.0, 100.0]), np.array([[[1.0, 0.1], [2.0, 0.2]], [[3.0, 0.3], [3.0, 0.3]]]))
    >>> round(slope.estimate, 6), round(slope.low, 6), round(slope.high, 6)
    (-1.0, -1.0, -1.0)
    """
    return across_splits(slopes_of(horizons, values))


def _cubes(points: pd.DataFrame) -> Iterator[tuple[dict[str, Any], NDArray[Any], NDArray[Any]]]:
    """For every variant, average and range: their names, the horizons, and the values [problems, runs, horizons]."""
    for (algorithm, variant), group in points.groupby(["algorithm", "variant"], sort=False):
        order = group.sort_values(["problem", "run", "horizon"])
        horizons = np.unique(order["horizon"]).astype(float)
        shape = (order["problem"].nunique(), order["run"].nunique(), horizons.size)
        for average, column in AVERAGES.items():
            cube = order[column].to_numpy(dtype=float).reshape(shape)
            for name, chosen in (("all", horizons > 0), ("last decade", horizons >= horizons[-1] / 10)):
                about = {"algorithm": algorithm, "variant": variant, "average": average, "range": name}
                yield about, horizons[chosen], cube[..., chosen]


def fit_slopes(points: pd.DataFrame) -> pd.DataFrame:
    """A slope for every variant and average, over all horizons and over the last decade."""
    lines = []
    for about, horizons, values in _cubes(points):
        slope = mean_slope(horizons, values)
        line = {**about, "problems": len(values), "runs": values.shape[1]}
        line |= {"slope": slope.estimate, "low": slope.low, "high": slope.high}
        lines.append({**line, "theory": -1 / 2 if about["algorithm"] == "fedbio" else -2 / 3})
    return pd.DataFrame(lines)


def _coverage(truth: float, slopes: NDArray[Any]) -> dict[str, Any]:
    """How many of the intervals from slopes [replications, problems] hold the truth, and how wide they are."""
    found = [across_splits(own) for own in slopes]
    inside = [interval.low <= truth <= interval.high for interval in found]
    width = np.mean([interval.high - interval.low for interval in found])
    return {"coverage": float(np.mean(inside)), "width": float(width), "replications": len(slopes)}


def coverage_in_a_model(design: Design) -> Tables:
    """Intervals for a slope that is known.

    A problem's slope is -2/3 and an error of deviation .05, normal or skewed (an exponential); its level is log-normal.  A run
    multiplies every horizon by a gamma variable of mean one, whose relative variance falls like T^(-1/3) from 1/4 at the
    first, as that of averages over steps that are correlated over t^(2/3) does.
    """
    generator = np.random.default_rng(design.seed)
    horizons, rows = np.array(design.horizons, float), []
    size = design.replications, design.instances
    for case in ("normal", "skewed"):
        errors = generator.standard_normal(size) if case == "normal" else generator.exponential(size=size) - 1
        powers = horizons ** (-2 / 3 + 0.05 * errors[..., None, None])
        shape = 4 * (horizons / horizons[0]) ** (1 / 3)
        noise = generator.gamma(shape, 1 / shape, (*size, design.seeds, horizons.size))
        values = np.exp(generator.standard_normal(size))[..., None, None] * powers * noise
        about = {"case": f"model, {case} slopes", "problems": design.instances, "runs": design.seeds}
        rows.append({**about, **_coverage(-2 / 3, slopes_of(horizons, values))})
    return {"coverage": pd.DataFrame(rows)}


def coverage_of_redrawn_runs(points: pd.DataFrame, design: Design) -> pd.DataFrame:
    """Intervals from problems, and of each problem runs, redrawn from the measured ones, which are all there is: the slope to
    be covered is that of the measured."""
    generator = np.random.default_rng(design.seed)
    rows = []
    for about, horizons, values in _cubes(points):
        problems, runs, _ = values.shape
        picked = generator.integers(problems, size=(design.replications // 10, problems))
        of_them = generator.integers(runs, size=(*picked.shape, runs))
        redrawn = slopes_of(horizons, values[picked[..., None], of_them])
        case = ", ".join(("redrawn", about["variant"], about["average"], about["range"]))
        found = _coverage(mean_slope(horizons, values).estimate, redrawn)
        rows.append({"case": case, "problems": problems, "runs": runs, **found})
    return pd.DataFrame(rows)
