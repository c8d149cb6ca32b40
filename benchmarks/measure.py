"""One measurement in a process of its own: reads a job (JSON) from its argument, prints the result as its last line.

The process pins itself to the job's cores before anything else is imported, so that thread pools see only those. Every
result has seconds of `compile` and `run`, the processor time of the run (`cpu`), the `steps` that were timed, and the
peak of resident memory in megabytes.
"""

import json
import os
import resource
import sys
from typing import Any


def speed(job: dict[str, Any]) -> dict[str, Any]:
    """Time one implementation on the Adult-like task or on dense tables of any size."""
    import task

    settings = task.Settings(**job["settings"])
    sizes = job.get("gaussian")
    clients = task.adult_like() if sizes is None else task.gaussian(**sizes)
    steps, variant = job["steps"], job["variant"]
    warm_up = min(steps, 2 * settings.local_steps)  # PyTorch's first calls load and choose kernels
    compiling = 0.0
    if variant == "torch eager":
        import torch_eager

        torch_eager.run(clients, settings, warm_up)
        outcome = torch_eager.run(clients, settings, steps)
    elif variant == "torch processes":
        import torch_processes

        outcome = torch_processes.run(clients, settings, steps, warm_up=warm_up)
    elif variant in ("C portable", "C native"):
        import fused

        outcome = fused.run(clients, settings, steps, target="portable" if variant == "C portable" else "native")
        compiling = outcome.compile_seconds
    elif variant in ("ours autodiff", "ours fused"):
        import ours

        outcome = ours.run(clients, settings, steps, path="autodiff" if variant == "ours autodiff" else "fused")
        compiling = outcome.compile_seconds
    else:
        raise ValueError(f"variant: nobody knows {variant!r}")
    return {"run": outcome.seconds, "cpu": outcome.cpu, "compile": compiling, "steps": steps}


def seeds(job: dict[str, Any]) -> dict[str, Any]:
    """Time many seeds with one strategy."""
    import sweeps
    import task

    settings = task.Settings(**job["settings"])
    numbers = range(job["first"], job["first"] + job["count"])
    if job["strategy"] == "processes":
        outcome = sweeps.processes(job)
    else:
        outcome = sweeps.STRATEGIES[job["strategy"]](task.adult_like(), settings, job["steps"], numbers, job["path"])
    times = {"run": outcome.seconds, "cpu": outcome.cpu, "compile": outcome.compile_seconds}
    own = {} if outcome.megabytes is None else {"megabytes": outcome.megabytes}
    return {**times, **own, "steps": job["steps"]}


def startup(job: dict[str, Any]) -> dict[str, Any]:
    """Import, build the task and make the first step; the parent measures the time from the start of the process."""
    import time

    start = time.perf_counter()
    import ours

    imported = time.perf_counter()
    import task

    settings = task.Settings(**{**job["settings"], "local_steps": 1})
    clients = task.adult_like()
    made = time.perf_counter()
    method = ours.algorithm(clients[0].rows.shape[1], settings, clients[0].rows.dtype, job["path"])
    ours.fb.simulate(method, ours.client_data(clients), rounds=1, record_every=None)
    return {"import": imported - start, "data": made - imported, "first step": time.perf_counter() - made}


def population(job: dict[str, Any]) -> dict[str, Any]:
    """Time rounds of a cohort out of many clients."""
    import population

    return population.run(job)


def bandwidth(job: dict[str, Any]) -> dict[str, Any]:
    """Bytes that one core moves in a second of processor time: a sum of two arrays into a third, far beyond the caches."""
    import statistics
    import time

    import numpy as np

    one, two, three = (np.ones(2**25, np.float32) for _ in range(3))
    took = []
    for _ in range(job["times"]):
        start = time.process_time()
        np.add(one, two, out=three)
        took.append(time.process_time() - start)
    return {"bytes": 3 * one.nbytes / statistics.median(took)}


def profile(job: dict[str, Any]) -> dict[str, Any]:
    """Where processor seconds go."""
    import profiles

    return profiles.run(job)


def fit(job: dict[str, Any]) -> dict[str, Any]:
    """Fits of an estimator, from a process's start."""
    import fits

    return fits.run(job)


def main() -> None:
    job = json.loads(sys.argv[1])
    if job.get("cores") is not None:
        os.sched_setaffinity(0, job["cores"])
    kinds = {each.__name__: each for each in (speed, seeds, startup, population, bandwidth, profile, fit)}
    result = kinds[job["kind"]](job)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"megabytes": peak, **result}))


if __name__ == "__main__":
    main()
