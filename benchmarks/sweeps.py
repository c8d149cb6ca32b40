"""Ways to run many seeds: what `fedbilevel.sweep` does, and what it was chosen over.

`threads` is the library's own sweep. `map` and `vmap` put all seeds into one compiled program, one after the other or
side by side. `processes` gives every core a process of its own with its share of the seeds.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ours
from stopwatch import Stopwatch
from task import Client, Settings

import fedbilevel as fb
from fedbilevel.engines.simulation import Options, Simulation, advance, begin


class Outcome(NamedTuple):
    seconds: float
    cpu: float
    compile_seconds: float
    megabytes: float | None = None  # of the worker processes, where there are any


def threads(clients: list[Client], settings: Settings, steps: int, seeds: Iterable[int], path: ours.Path) -> Outcome:
    """Run the library's sweep; a first sweep of one round compiles."""
    data, seeds = ours.client_data(clients), list(seeds)
    method = ours.algorithm(clients[0].rows.shape[1], settings, clients[0].rows.dtype, path)
    rounds = ours.whole_rounds(settings, steps)
    return twice(lambda count: fb.sweep(method, data, rounds=count, seeds=seeds, diagnostics="cheap"), rounds)


def in_one_program(transform: Callable[..., Any]) -> Callable[..., Outcome]:
    """Make a strategy of a transformation: one program for all seeds."""

    def strategy(
        clients: list[Client], settings: Settings, steps: int, seeds: Iterable[int], path: ours.Path
    ) -> Outcome:
        method = ours.algorithm(clients[0].rows.shape[1], settings, clients[0].rows.dtype, path)
        run = Simulation(method, ours.client_data(clients), Options(record_every=None))

        @jax.jit
        def program(fleet: Any, seeds: jax.Array, rounds: jax.Array) -> Any:
            def one(seed: jax.Array) -> Any:
                state = begin(run.loop, method.settings, seed)
                return advance(run.loop, method.settings, fleet, seed, state, 0, 1, rounds)[0]

            return transform(one, seeds)

        numbers = jnp.asarray(list(seeds), jnp.uint32)
        return twice(
            lambda count: jax.block_until_ready(program(run.fleet, numbers, jnp.asarray(count))),
            ours.whole_rounds(settings, steps),
        )

    return strategy


def twice(action: Callable[[int], Any], rounds: int) -> Outcome:
    """Do it for one round, which compiles, and then for all."""
    with Stopwatch() as compiling:
        action(1)
    with Stopwatch() as watch:
        action(rounds)
    return Outcome(watch.seconds, watch.cpu, compiling.seconds)


def processes(job: dict[str, Any]) -> Outcome:
    """Divide the job's seeds among as many fresh processes as there are cores, each on its own core."""
    cores = sorted(os.sched_getaffinity(0))
    share = -(-job["count"] // len(cores))
    script = str(Path(__file__).with_name("measure.py"))
    children = []
    try:
        for number, core in enumerate(cores):
            part = {"first": number * share, "count": min(share, job["count"] - number * share)}
            command = [sys.executable, script, json.dumps({**job, **part, "strategy": "threads", "cores": [core]})]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        replies = [child.communicate(timeout=1800)[0] for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    if any(child.returncode for child in children):
        raise RuntimeError("a process of the sweep failed")
    results = [json.loads(reply.splitlines()[-1]) for reply in replies]
    return Outcome(
        max(r["run"] for r in results),
        sum(r["cpu"] for r in results),
        max(r["compile"] for r in results),
        sum(r["megabytes"] for r in results),
    )


STRATEGIES: dict[str, Callable[..., Outcome]] = {
    "threads": threads,
    "map": in_one_program(jax.lax.map),
    "vmap": in_one_program(lambda one, seeds: jax.vmap(one)(seeds)),
}
