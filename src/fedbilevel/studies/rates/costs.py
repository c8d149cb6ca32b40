"""Error against communicated bytes, and against the number of clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd

import fedbilevel as fb
from fedbilevel.studies.rates.design import BATCH, CLIENTS, GAMMA, LOCAL_STEPS, PRESETS, WORKERS, Design
from fedbilevel.tasks.quadratic import OuterSample, QuadraticClients, random_quadratic


def communication(design: Design, seed: int) -> pd.DataFrame:
    """Error against bytes for several numbers of local steps a round, the number of steps being the same."""
    clients = random_quadratic(seed, clients=CLIENTS, gradient_noise=1.0)
    problem, data = clients.problem(), clients.data()

    def one(job: tuple[str, int]) -> pd.DataFrame:
        name, local_steps = job
        rounds = design.communication_steps // local_steps
        if name == "fedbio":
            algorithm = fb.fedbio(problem, fb.exact(), inner_step=GAMMA, outer_step=0.1, local_steps=local_steps)
        else:
            algorithm = fb.fedbioacc(
                problem, fb.exact(), batch_size=BATCH, local_steps=local_steps, previous="local", **PRESETS["tuned"]
            )
        seeds = range(1 if name == "fedbio" else min(design.seeds, 3))
        found = fb.sweep(
            algorithm,
            data,
            rounds,
            [seed + k for k in seeds],
            record_every=max(1, rounds // 200),
            workers=1,
            diagnostics="exact",
        )
        table = found.history.rename(columns={"hypergradient_squared_norm": "mean_square", "seed": "run"})
        table["bytes"] = table["bytes_up"] + table["bytes_down"]
        table = table[["run", "step", "bytes", "mean_square"]]
        return table.assign(algorithm=name, local_steps=local_steps)

    jobs = [(name, local) for name in ("fedbio", "fedbioacc") for local in design.local_steps]
    with ThreadPoolExecutor(WORKERS) as pool:
        return pd.concat(list(pool.map(one, jobs)), ignore_index=True)


def _equal_clients(seed: int, clients: int, hessian_noise: float) -> QuadraticClients:
    """Clients with the same losses: what is left between them is minibatch noise alone."""
    one = random_quadratic(seed, clients=1, gradient_noise=1.0, hessian_noise=hessian_noise)
    train = type(one.train)(*(np.repeat(leaf, clients, axis=0) for leaf in one.train))
    val = OuterSample(*(np.repeat(leaf, clients, axis=0) for leaf in one.val))
    return QuadraticClients(train, val, one.outer, one.inner)


def estimator_errors(design: Design, seed: int, terms: int = 2, step: float = 0.5) -> pd.DataFrame:
    """Variance and squared bias of the mean over M clients of one Neumann estimate each."""
    clients = _equal_clients(seed, design.replicas, hessian_noise=0.3)
    algorithm = fb.fedbio(clients.problem(), fb.neumann(terms, step), local_steps=1, batch_size=BATCH)
    estimates = np.asarray(fb.trace(algorithm, clients.data(), rounds=1, seed=seed).outer_momentum[0])
    one = _equal_clients(seed, 1, hessian_noise=0.3)
    truth = one.hypergradient(one.outer[None], one.inner[None])[0]
    spread = float(estimates.var(axis=0, ddof=1).sum())
    # The mean over all replicas still carries spread / replicas of variance: take it off the squared bias.
    bias = float(((estimates.mean(axis=0) - truth) ** 2).sum()) - spread / design.replicas
    rows, count = [], 1
    while count <= design.replicas // 32:
        groups = estimates.reshape(-1, count, estimates.shape[1]).mean(axis=1)
        rows.append({"clients": count, "variance": float(groups.var(axis=0, ddof=1).sum()), "bias_square": bias})
        count *= 2
    return pd.DataFrame(rows)


def speedup(design: Design, seed: int) -> pd.DataFrame:
    """The error FedBiOAcc ends with against the number of clients: unbiased and truncated hypergradients."""
    most = max(design.client_counts)
    clients = _equal_clients(seed, most, hessian_noise=0.0)
    problem, data = clients.problem(), clients.data()
    rounds = design.client_steps // LOCAL_STEPS
    seeds = [seed + number for number in range(design.seeds)]

    def one(name: str) -> pd.DataFrame:
        hypergradient: Any = fb.exact() if name == "unbiased" else fb.neumann(terms=1, step=0.5)
        algorithm = fb.fedbioacc(
            problem, hypergradient, batch_size=BATCH, local_steps=LOCAL_STEPS, previous="local", **PRESETS["tuned"]
        )
        tables = []
        for count in design.client_counts:
            # A client of weight zero counts for nothing, so one compiled program serves every number of clients.
            weights = np.where(np.arange(most) < count, 1.0, 0.0)
            every = max(1, rounds // 100)
            found = fb.sweep(
                algorithm, data, rounds, seeds, weights=weights, record_every=every, workers=1, diagnostics="exact"
            )
            late = found.history[found.history["round"] > rounds // 2]
            table = late.groupby("seed")[["hypergradient_squared_norm", "inner_error"]].mean().reset_index()
            table = table.rename(columns={"hypergradient_squared_norm": "mean_square", "seed": "run"})
            tables.append(table.assign(estimator=name, clients=count))
        return pd.concat(tables)

    with ThreadPoolExecutor(WORKERS) as pool:
        return pd.concat(list(pool.map(one, ("unbiased", "truncated"))), ignore_index=True)
