"""Many seeds and many step sizes with one compiled program.

On a CPU every run is its own call of the program, on as many threads as there are cores: JAX lets go of the interpreter
while it computes.  This was measured against a batched (vmapped) program, a sequential map inside one program, and worker
processes (``benchmarks/run.py seeds``).  On accelerators the runs are batched instead.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pandas as pd

from fedbilevel.algorithms.arguments import Kind
from fedbilevel.engines.fleet import CHUNK
from fedbilevel.engines.plot import plot
from fedbilevel.engines.progress import listener
from fedbilevel.engines.result import Diverged, Progress, ProgressCallback, Result, table_html
from fedbilevel.engines.simulate import execute
from fedbilevel.engines.simulation import Options, Simulation, named_numbers, with_numbers
from fedbilevel.engines.store import ClientStore
from fedbilevel.hints import hint, positive, whole_number
from fedbilevel.plan import Algorithm
from fedbilevel.problem import ClientData

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Sweep:
    """``results``: one `Result` per combination, in the order of ``table`` (its seeds and hyper-parameters, and the last
    recorded row); ``history``: all rows of all runs; ``values``: names of the hyper-parameters that were swept.

    Attributes:
        results: One `Result` for each combination.
        table: Seeds, hyper-parameters and the last recorded row of each.
        history: All rows of all runs.
        values: Names of the hyper-parameters that were swept.
    """

    results: list[Result]
    table: pd.DataFrame
    history: pd.DataFrame
    values: tuple[str, ...] = ()

    def __repr__(self) -> str:
        over = [f"{self.table[name].nunique()} of {name}" for name in ("seed", *self.values)]
        diverged = int(self.table["diverged"].sum())
        told = f"{len(self.results)} runs: {', '.join(over)}" + (f"; {diverged} diverged" if diverged else "")
        return f"Sweep({told})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>" + table_html(self.table)

    def plot(self, column: str = "objective", against: str = "round", ax: Axes | None = None) -> Axes:
        """A column of the histories as curves, one colour a combination; see `fedbilevel.plot`."""
        return plot(self, column=column, against=against, ax=ax)

    @property
    def outer(self) -> Any:
        """The outer variables of all runs, stacked."""
        return jax.tree.map(
            lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *[r.outer for r in self.results]
        )


def sweep(
    algorithm: Algorithm,
    data: ClientData | ClientStore,
    rounds: int,
    seeds: Iterable[int] = (0,),
    *,
    weights: Any = "uniform",
    participation: float | int | None = None,
    sampling: str = "proportional",
    dropout: float = 0.0,
    record_every: int | None = None,
    diagnostics: str = "auto",
    progress: bool | ProgressCallback | None = None,
    client_chunk: int | None = CHUNK,
    devices: Sequence[Any] | None = None,
    workers: int | None = None,
    message_dtype: str | None = None,
    **values: Sequence[float],
) -> Sweep:
    """Every combination of ``seeds`` and of the given values of float hyper-parameters.

    Hyper-parameters go by the algorithm's own argument names (``outer_step=[.01, .1]``), those of its hypergradient with
    ``hypergradient_`` in front (``hypergradient_step=[.1, .5]``).  A run that diverges does not stop the others: its
    `Result` says so in ``diverged``.  ``record_every=None`` records the last round only.  ``workers``: threads; default one
    per core.  ``progress``: True draws a bar, a function gets a `Progress` after every run.

    Args:
        algorithm: What to run, such as ``fb.fedbio(problem)``.
        data: The clients' rows.
        rounds: How many rounds, at least one.
        seeds: Whole numbers, such as ``range(10)``.
        weights: "uniform" (the paper), "samples" (training rows), or one number per client.
        participation: Share or number of clients that take part in a round; None: all.
        sampling: "proportional" (to the weights, averaged equally: right on average) or "uniform".
        dropout: Chance in [0, 1) that a reply is lost.
        record_every: Rounds between two rows of the history; None: the last round only.
        diagnostics: As in `simulate`.
        progress: True for a bar over the runs, or a function of a `Progress`.
        client_chunk: As in `simulate`.
        devices: As in `simulate`.
        workers: Threads; None: one per core.
        message_dtype: As in `simulate`.
        values: Values to try, by the name of the hyper-parameter.

    Returns:
        A `Sweep`.

    Raises:
        ValueError: A hyper-parameter is not known, or a value is out of its range.
        TypeError: Values or seeds are not lists.

    Examples:
        >>> import fedbilevel as fb, jax.numpy as jnp, numpy as np
        >>> algo = fb.fedavg(lambda model, batch: jnp.mean((model - batch) ** 2), init=np.zeros(()), step=0.1, local_steps=1)
        >>> data = fb.ClientData(train=np.array([[1.0], [3.0]]))
        >>> found = fb.sweep(algo, data, rounds=20, seeds=range(2), step=[0.1, 0.4])
        >>> found.table[["seed", "step"]].to_numpy().tolist()
        [[0.0, 0.1], [1.0, 0.1], [0.0, 0.4], [1.0, 0.4]]
    """
    whole_number("rounds", rounds)
    whole_number("workers", workers, optional=True)
    if not isinstance(seeds, Iterable):
        raise TypeError(f"seeds must be several whole numbers, such as range({seeds}), not {seeds!r}.")
    seed_list = list(seeds)
    if not seed_list:
        raise ValueError("sweep needs at least one seed.")
    for seed in seed_list:
        whole_number("seed", seed, least=0)
    kinds = getattr(type(algorithm.settings), "kinds", {})
    automatic = [name for name, kind in kinds.items() if kind.traced and getattr(algorithm.settings, name) is None]
    known = {*named_numbers(algorithm.settings), *automatic}
    for name, choices in values.items():
        if name not in known:
            raise ValueError(f"{algorithm.name} has no float hyper-parameter {name!r}; {hint(name, sorted(known), 20)}")
        if not isinstance(choices, Iterable):
            raise TypeError(f"{name} must be a list of values to try, such as [{choices}], not {choices!r}.")
        if not len(choices):
            raise ValueError(f"{name} needs at least one value.")
        settle = kinds.get(name, Kind(positive)).settle
        for value in choices:
            if settle(name, value) is None:
                raise ValueError(f"{name} can be swept over numbers only, not {value!r}.")
    options = Options(
        weights, participation, sampling, dropout, record_every or rounds, diagnostics, client_chunk, devices,
        message_dtype=message_dtype,
    )  # fmt: skip
    plans = [dict(zip(values, map(float, choice), strict=True)) for choice in product(*values.values())]
    simulation = Simulation(algorithm.build(with_numbers(algorithm.settings, plans[0])), data, options)
    jobs = [(with_numbers(algorithm.settings, chosen), chosen, seed) for chosen in plans for seed in seed_list]
    simulation.compile(jobs[0][0])

    def one(job: tuple[Any, dict[str, float], int]) -> Result:
        settings, _, seed = job
        try:
            return execute(simulation, settings, rounds, seed, in_one_go=True)
        except Diverged as failure:
            return replace(failure.result, diverged=str(failure))

    results: list[Result] = []
    spread = simulation.loop.layout.mesh is not None  # its collectives already use every device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = 1 if spread else min(workers or cores, len(jobs))
    with listener(progress, f"{algorithm.name}, runs") as told, ThreadPoolExecutor(count) as pool:
        for number, result in enumerate(pool.map(one, jobs), 1):
            results.append(result)
            if told is not None:
                told(Progress(number, len(jobs), float("nan"), {}))
    return _collect(results, [(seed, chosen) for _, chosen, seed in jobs])


def _collect(results: list[Result], jobs: list[tuple[int, dict[str, float]]]) -> Sweep:
    rows, frames = [], []
    for result, (seed, chosen) in zip(results, jobs, strict=True):
        labels = {"seed": seed, **chosen}
        # FedAvg's step size is called like the column that counts steps: the swept value keeps the name.
        own = result.history.rename(columns={name: f"history_{name}" for name in labels})
        last: dict[str, Any] = dict(own.iloc[-1]) if len(own) else {}
        rows.append({**labels, **last, "diverged": result.diverged is not None})
        frames.append(own.assign(**labels))
    history = pd.concat(frames, ignore_index=True)
    return Sweep(results, pd.DataFrame(rows), history, tuple(jobs[0][1]))
