"""Error against the number of steps T, and against the theorems' bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import fedbilevel as fb
from fedbilevel import theory
from fedbilevel.studies.rates.design import BATCH, CLIENTS, DELTA, GAMMA, LOCAL_STEPS, PRESETS, WORKERS, Design
from fedbilevel.tasks.quadratic import QuadraticClients, random_quadratic
from fedbilevel.theory.steps import Conditions, Previous

Rows = list[dict[str, Any]]
_VARIANTS: tuple[Previous, ...] = ("paper", "local")
_CONDITIONS: tuple[Conditions, ...] = ("printed", "needed")


class Tables(NamedTuple):
    """Rows of the tables points, bounds and checks."""

    points: Rows
    bounds: Rows
    checks: Rows


def _together(parts: list[Tables]) -> Tables:
    return Tables(*([row for part in parts for row in part[number]] for number in range(3)))


def _averages(mean: NDArray[Any], clients: QuadraticClients, horizons: NDArray[Any]) -> NDArray[Any]:
    """Mean of ‖grad h(xbar_t)‖^2 over t = 1..T, for every horizon T."""
    squares = (clients.gradient(mean) ** 2).sum(axis=-1)
    return np.asarray(np.cumsum(squares)[horizons - 1] / horizons)


def _start(clients: QuadraticClients) -> tuple[float, float]:
    """h(x_1) - h* and the inner error at the start."""
    everywhere = np.broadcast_to(clients.outer, (clients.clients, clients.outer.size))
    error = float(((clients.inner - clients.inner_solution(everywhere)) ** 2).sum(axis=1).mean())
    return float(clients.objective(clients.outer)) - clients.minimum(), error


def _row_checks(algorithm: str, variant: str, checks: tuple[theory.Check, ...]) -> Rows:
    return [{"algorithm": algorithm, "variant": variant, **check._asdict()} for check in checks]


def fedbio_rates(design: Design, seed: int) -> Tables:
    """FedBiO over random problems that share one start, with eta = delta/sqrt(T) and with the steps of Theorem 1."""
    drawn = [random_quadratic(seed + number, clients=CLIENTS) for number in range(design.instances)]
    instances = [QuadraticClients(q.train, q.val, drawn[0].outer, drawn[0].inner) for q in drawn]
    problem = instances[0].problem()

    def one(horizon: int, number: int) -> Tables:
        clients, horizons = instances[number], np.array([horizon])

        def walk(arguments: dict[str, Any]) -> theory.Path:
            algorithm = fb.fedbio(problem, fb.exact(), **arguments)
            return theory.path_of(fb.trace(algorithm, clients.data(), rounds=horizon // LOCAL_STEPS))

        def measure(path: theory.Path) -> float:
            return float(_averages(path.outer[0].mean(axis=1), clients, horizons)[0])

        usual = walk({"inner_step": GAMMA, "outer_step": DELTA / horizon**0.5, "local_steps": LOCAL_STEPS})
        region = theory.covering_region(usual, clients)
        constants = theory.quadratic_constants(clients, region)
        steps = theory.fedbio_steps(constants, LOCAL_STEPS, horizon // LOCAL_STEPS)
        slow = walk(dict(steps.arguments()))
        measured, bound = measure(slow), theory.fedbio_bound(constants, steps, *_start(clients)).total
        common = {"algorithm": "fedbio", "horizon": horizon, "run": number}
        point = {**common, "variant": "eta = delta/sqrt(T)", "mean_square": measure(usual)}
        row = {**common, "variant": "theorem 1", "measured": measured, "bound": bound, "holds": measured <= bound}
        row["inside"] = region.contains(slow, clients)
        return Tables([point], [row], _row_checks("fedbio", f"T = {horizon}, problem {number}", steps.checks))

    def all_instances(horizon: int) -> Tables:
        return _together([one(horizon, number) for number in range(design.instances)])

    # One program per horizon: two of them compile and run at a time, the longest first.
    with ThreadPoolExecutor(WORKERS) as pool:
        return _together(list(pool.map(all_instances, sorted(design.horizons, reverse=True)))[::-1])


def fedbioacc_rates(design: Design, seed: int) -> Tables:
    """FedBiOAcc with practical constants and with those of Theorem 2, for both treatments of x_t at an averaging.

    The schedule does not know T, so one long run serves every horizon.
    """
    clients = random_quadratic(seed, clients=CLIENTS, gradient_noise=1.0)
    problem, data, start = clients.problem(), clients.data(), _start(clients)
    horizons = np.array(design.horizons)
    rounds = int(horizons[-1]) // LOCAL_STEPS

    def walk(arguments: dict[str, Any], seeds: int) -> theory.Path:
        settings = {"local_steps": LOCAL_STEPS, **arguments}
        algorithm = fb.fedbioacc(problem, fb.exact(), batch_size=BATCH, **settings)
        return theory.path_of(
            *(fb.trace(algorithm, data, rounds=rounds, seed=seed + number) for number in range(seeds))
        )

    def measure(path: theory.Path) -> NDArray[Any]:
        return np.array([_averages(run.mean(axis=1), clients, horizons) for run in path.outer])

    def practical(previous: Previous, preset: str) -> tuple[Rows, theory.Path]:
        path = walk({**PRESETS[preset], "previous": previous}, design.seeds)
        common = {"algorithm": "fedbioacc", "variant": f'{preset} constants, previous="{previous}"'}
        rows = [
            {**common, "horizon": horizon, "run": number, "mean_square": float(value)}
            for number, values in enumerate(measure(path))
            for horizon, value in zip(design.horizons, values, strict=True)
        ]
        return rows, path

    def theoretical(previous: Previous, conditions: Conditions, region: theory.Region) -> Tables:
        constants = theory.quadratic_constants(clients, region, batch_size=BATCH)
        steps = theory.fedbioacc_steps(constants, LOCAL_STEPS, rounds, previous=previous, conditions=conditions)
        path = walk(dict(steps.arguments()), design.theory_seeds)
        inside = region.contains(path, clients)
        variant = f'theorem 2, {conditions} conditions, previous="{previous}"'
        rows = []
        for horizon, value in zip(design.horizons, measure(path).mean(axis=0), strict=True):
            bound = theory.fedbioacc_bound(constants, replace(steps, rounds=horizon // LOCAL_STEPS), *start).total
            row = {
                "algorithm": "fedbioacc",
                "variant": variant,
                "horizon": horizon,
                "run": -1,
                "measured": float(value),
            }
            rows.append({**row, "bound": bound, "holds": bool(value <= bound), "inside": inside})
        return Tables([], rows, _row_checks("fedbioacc", variant, steps.checks))

    def one(previous: Previous) -> Tables:
        rows, path = practical(previous, "tuned")
        more, _ = practical(previous, "paper")
        region = theory.covering_region(path, clients)
        return _together(
            [Tables(rows + more, [], []), *(theoretical(previous, conditions, region) for conditions in _CONDITIONS)]
        )

    with ThreadPoolExecutor(WORKERS) as pool:
        return _together(list(pool.map(one, _VARIANTS)))
