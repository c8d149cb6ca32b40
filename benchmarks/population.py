"""A hundred clients of a hundred, of ten thousand, of a million: in memory and on disk, a round should cost the same.

Every case is a fresh process on one core, so that reading ahead costs what it costs. The tables repeat after 10,000 clients;
memory and disk hold all of them. The file of a store is dropped from the system's cache before each run from disk.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Job, Measured, cores, digits, interleaved, markdown, measure, median, verdict

ROWS, COLUMNS, VALIDATION = 32, 16, 16
COHORT, BLOCK = 100, 10_000
ROUNDS = 1_000
POPULATIONS = (100, 10_000, 1_000_000)
SETTINGS = {"algorithm": "fedbioacc", "terms": 5, "batch_size": 16}
BASE = "FEDBILEVEL_BASE"
"""Names a checkout of an earlier version, to compare with."""


def collect(repeats: int, quick: bool, say: Any) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="population-")
    try:
        jobs: dict[str, Job] = {}
        for clients in POPULATIONS[: 2 if quick else 3]:
            jobs[f"{COHORT} of {clients:,}, memory"] = job(clients, COHORT, ROUNDS)
        most = POPULATIONS[1 if quick else 2]
        stored = job(most, COHORT, ROUNDS, store=f"{folder}/clients")
        say(f"writing {most:,} clients took {measure({**stored, 'cores': None, 'write': True})['write']:.3g} s")
        jobs[f"{COHORT} of {most:,}, disk"] = stored
        everybody = job(BLOCK, BLOCK, 10)
        jobs["10,000 of 10,000, memory"] = everybody
        base = os.environ.get(BASE)
        if base is not None:
            jobs["10,000 of 10,000, the version before"] = {**everybody, "base": base}
        return interleaved(jobs, repeats, say, lambda job: fresh(job, folder))
    finally:
        shutil.rmtree(folder)


def job(clients: int, cohort: int, rounds: int, store: str | None = None) -> Job:
    return {
        "kind": "population",
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        "store": store,
        "cores": cores()[-1:],
    }


def fresh(job: Job, folder: str) -> dict[str, float]:
    """A fresh process; compiling is not what is measured, so repetitions share their programs."""
    own = {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs"}
    return measure(job, {**own, "PYTHONPATH": f"{job['base']}/src"} if "base" in job else own)


def clients(rng: Any, count: int) -> Any:
    """The tables of so many clients, in memory."""
    import numpy as np
    import task

    import fedbilevel as fb

    def part(rows: int) -> dict[str, Any]:
        features = rng.standard_normal((count, rows, COLUMNS), dtype=np.float32)
        return {"features": features, "labels": (features[..., 0] > 0).astype(np.float32)}

    groups = rng.integers(0, task.GROUPS, (count, ROWS), dtype=np.int32)
    return fb.ClientData(train={**part(ROWS), "groups": groups}, val=part(VALIDATION))


def run(job: Job) -> dict[str, Any]:
    """In the process of its own: the first run compiles, the second is timed."""
    import numpy as np
    import ours
    import task

    import fedbilevel as fb

    count, cohort, store = job["clients"], job["cohort"], job["store"]
    block = clients(np.random.default_rng(0), min(count, BLOCK))
    if job.get("write"):
        start = time.perf_counter()
        fb.ClientStore.write(store, (block for _ in range(count // block.clients)))
        return {"write": time.perf_counter() - start}
    if store is None:
        times = count // block.clients

        def repeated(tree: dict[str, Any]) -> dict[str, Any]:
            return {name: np.tile(leaf, (times,) + (1,) * (leaf.ndim - 1)) for name, leaf in tree.items()}

        data: Any = fb.ClientData(repeated(block.train), repeated(block.val))
    else:
        data = fb.ClientStore(store)
    method = ours.algorithm(COLUMNS, task.Settings(**SETTINGS), np.float32, "autodiff")
    options = {"participation": cohort, "record_every": None}
    fb.simulate(method, data, 2, **options)
    if store is not None:
        file = os.open(Path(store) / "rows.bin", os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    start, cpu_start = time.perf_counter(), time.process_time()
    if store is not None:
        data = fb.ClientStore(store)
    seen = []
    fb.simulate(
        method, data, job["rounds"], seed=1, **options,
        progress=lambda told: seen.append((told.done, time.perf_counter(), time.process_time())),
    )  # fmt: skip
    end = time.perf_counter()
    # The first calls are short: how many rounds fill half a second is not known yet.
    (first, began, cpu), (last, stopped, cpu_end) = seen[min(2, len(seen) - 2)], seen[-1]
    return {
        "round": (stopped - began) / (last - first),
        "round cpu": (cpu_end - cpu) / (last - first),
        "first": seen[0][1] - start,
        "first cpu": seen[0][2] - cpu_start,
        "end": end - stopped,
    }


def table(measured: Measured) -> str:
    rows = []
    timed = ("round", "round cpu", "first", "first cpu", "end")
    for name, results in measured.items():
        numbers = [digits(1000 * median(results, key)) for key in timed]
        rows.append([name, *numbers, f"{median(results, 'megabytes'):.0f}"])
    header = ["milliseconds", "a round", "processor time of it", "to the end of round 1", "processor time of it"]
    header += ["result", "peak MB"]
    names = list(measured)

    def ratio(one: str, other: str, key: str = "round cpu") -> float:
        return median(measured[one], key) / median(measured[other], key)

    alone, disk = names[0], next(name for name in names if name.endswith("disk"))
    memory = disk.replace("disk", "memory")
    notes = [
        f"FedBiOAcc, Q = 5, batch 16, 5 local steps; {ROWS} rows of {COLUMNS} columns and {VALIDATION} for validation; "
        "one core, without compiling. Ratios are of processor time, which other work on the machine disturbs least. "
        "Before round 1 a large population's clients are read for a whole stretch of rounds.",
        "",
        verdict(f"{memory} / {alone}", ratio(memory, alone), 1.3, at_least=False),
        verdict(f"{disk} / {alone}", ratio(disk, alone), 2, at_least=False),
        verdict(f"{disk}: peak memory, MB", median(measured[disk], "megabytes"), 2048, at_least=False),
        f"- wall-clock ratios: {ratio(memory, alone, 'round'):.3g} in memory, {ratio(disk, alone, 'round'):.3g} from disk",
    ]
    before = [name for name in names if name.endswith("before")]
    if before:
        notes.append(verdict(f"{names[-2]} / {before[0]}", ratio(names[-2], before[0]), 1.05, at_least=False))
    return "\n".join([markdown(header, rows), "", *notes])
