"""The whole of Table 1 against one run of one of its methods in eager PyTorch.

Every measurement is the command itself, `fedbilevel table1`, in a fresh process: start-up, data, compilation, training,
measuring, and the run folder. "first": all caches empty, so that the fused kernels are built and every program is compiled.
"later": with the caches that the first run left.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Job, Measured, cores, interleaved, measure, median, spread, verdict

FULL_STEPS = 2_000
EAGER = "torch eager, one run"
COMMANDS: dict[str, list[str]] = {
    "table1, first": [],
    "table1, later": [],
    "table1, many splits": ["--splits", "many"],
    "table1, grid": ["--grid"],
}
RUNS = {"table1, grid": 960}
LIMITS = {"table1, first": 0.6, "table1, later": 0.4, "table1, grid": 2.0}
MEMORY = 2048.0
SECTIONS = {
    "table1": ("table1, first", "table1, later"),
    "table1-many": ("table1, many splits",),
    "table1-grid": ("table1, grid",),
}


def command(job: Job) -> dict[str, float]:
    """Seconds and peak memory of the command in a fresh process."""
    script = Path(sys.executable).with_name("fedbilevel")
    if not script.exists():
        raise RuntimeError("the command `fedbilevel` is not installed beside this Python: install the package first")
    with tempfile.TemporaryDirectory() as folder:
        if job["cold"]:
            job["caches"].append(tempfile.mkdtemp(dir=job["under"]))
        environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": job["caches"][-1]}
        environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        out = str(Path(folder) / "run")
        start = time.perf_counter()
        process = subprocess.Popen([str(script), "table1", "--quiet", "--out", out, *job["options"]], env=environ)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"fedbilevel table1 {job['options']} failed with exit code {process.returncode}")
    return {"run": seconds, "cpu": usage.ru_utime + usage.ru_stime, "megabytes": usage.ru_maxrss / 1024}


def collector(section: str) -> Callable[[int, bool, Callable[[str], None]], dict[str, Any]]:
    def collect(repeats: int, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
        settings = {"algorithm": "fedbioacc", "terms": 10}
        eager: Job = {
            "kind": "speed", "variant": "torch eager", "cores": cores()[-1:], "settings": settings,
            "steps": 20 if quick else 200,
        }  # fmt: skip
        short = ["--steps", "20", "--seeds", "2"] if quick else []
        with tempfile.TemporaryDirectory() as under:
            caches: list[str] = []  # of the cold commands; a later one takes the latest
            jobs: dict[str, Job] = {EAGER: eager}
            for name in SECTIONS[section]:
                options = [*COMMANDS[name], *short]
                jobs[name] = {"options": options, "cold": name != "table1, later", "caches": caches, "under": under}
            return interleaved(jobs, repeats, say, lambda job: measure(job) if "kind" in job else command(job))

    return collect


def table(measured: Measured) -> str:
    eager = measured[EAGER]
    one = median(eager, "run") * FULL_STEPS / median(eager, "steps")
    lines = [
        "| seconds | runs | wall | / one eager run | processor time | peak MB | wall, least to most |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        f"| FedBiOAcc Q=10 on Adult-like data, eager PyTorch | 1 | {one:.3g} | 1 | | {median(eager, 'megabytes'):.0f} | |",
    ]
    verdicts = []
    for name, results in measured.items():
        if name == EAGER:
            continue
        wall = median(results, "run")
        numbers = (wall, wall / one, median(results, "cpu"))
        cells = [name, str(RUNS.get(name, 240)), *(f"{n:.3g}" for n in numbers), f"{median(results, 'megabytes'):.0f}"]
        lines.append(f"| {' | '.join([*cells, spread(results, 'run')])} |")
        if name in LIMITS:
            verdicts.append(verdict(f"{name} / one eager run", wall / one, LIMITS[name], at_least=False))
    peak = max(median(results, "megabytes") for name, results in measured.items() if name != EAGER)
    verdicts.append(
        f"- peak memory, MB: **{peak:.0f}** (target: at most {MEMORY:.0f}; {'met' if peak <= MEMORY else '**missed**'})"
    )
    note = (
        f"Eager PyTorch was timed on {int(median(eager, 'steps'))} steps on one core and scaled to {FULL_STEPS:,}. The "
        "commands had all cores. FCFL draws nothing at random, so on one split its ten runs are one and are computed once; "
        'with many splits nothing is shared. All but "later" begin with empty caches.'
    )
    return "\n".join([*lines, "", note, "", *verdicts])
