"""Fresh processes, interleaved repetitions, medians, and what the machine is; shared by all sections of run.py."""

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PACKAGES = ("fedbilevel", "jax", "jaxlib", "numpy", "torch")

Job = dict[str, Any]
Measured = dict[str, list[dict[str, float]]]  # name of a job -> one result per repetition


def cores() -> list[int]:
    """Cores this process may use."""
    return sorted(os.sched_getaffinity(0))


def environment() -> dict[str, str]:
    """Return the environment of a measured process: no compilation cache that would hide the time to compile."""
    return {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_PLATFORMS": "cpu"}


def measure(job: Job, extra: Mapping[str, str] | None = None, timeout: float = 1800.0) -> dict[str, float]:
    """Run one job in a fresh process; a job that fails stops the benchmark with what it said."""
    command = [sys.executable, str(HERE / "measure.py"), json.dumps(job)]
    done = subprocess.run(
        command, env={**environment(), **(extra or {})}, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the measurement {job} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def interleaved(
    jobs: Mapping[str, Job],
    repeats: int,
    say: Callable[[str], None],
    action: Callable[[Job], dict[str, float]] = measure,
) -> Measured:
    """Measure A, B, C, A, B, C, ...: whatever else the machine does in between hits all of them."""
    measured: Measured = {name: [] for name in jobs}
    for number in range(repeats):
        for name, job in jobs.items():
            result = action(job)
            measured[name].append(result)
            shown = ", ".join(f"{key} {value:.3g}" for key, value in result.items())
            say(f"[{number + 1}/{repeats}] {name}: {shown}")
    return measured


def median(results: list[dict[str, float]], key: str) -> float:
    return statistics.median(result[key] for result in results)


def spread(results: list[dict[str, float]], key: str) -> str:
    """Smallest and largest value: what the noise of the machine did."""
    values = [result[key] for result in results]
    return f"{min(values):.3g}–{max(values):.3g}"


def digits(value: float) -> str:
    """Three digits, and thousands written out: 0.294, 56.9, 21,400."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 1000 else f"{value:.3g}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def verdict(what: str, value: float, bound: float, at_least: bool) -> str:
    met = value >= bound if at_least else value <= bound
    limit = f"{'at least' if at_least else 'at most'} {bound:g}"
    return f"- {what}: **{value:.3g}** (target: {limit}; {'met' if met else '**missed**'})"


def machine() -> dict[str, Any]:
    """Say where and when this was measured; nothing that names the host or its folders."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": len(cores()),
        "python": platform.python_version(),
        "compiler": compiler,
        **versions,
    }


def cpu_name() -> str:
    """Return the processor's name, and which vector instructions it has where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    vectors = next((label for flag, label in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "SSE2")
    return f"{fields.get('model name', platform.machine())}, {vectors}"


def save(section: str, repeats: int, measured: Any) -> None:
    RESULTS.mkdir(exist_ok=True)
    record = {"machine": machine(), "repeats": repeats, "measured": measured}
    (RESULTS / f"{section}.json").write_text(json.dumps(record, indent=1) + "\n")


def load(section: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"{section}.json").read_text())
    return record


def describe(record: dict[str, Any]) -> str:
    """One line under a table: when, where, with what."""
    it = record["machine"]
    versions = ", ".join(f"{name} {it[name]}" for name in PACKAGES if it[name] != "not installed")
    repeats = record["repeats"]
    taken = "One fresh process" if repeats == 1 else f"Medians of {repeats} fresh processes, taken in turn"
    return (
        f"*Measured {it['date']} on {it['cpu']}, {it['cores']} cores; Python {it['python']}, {versions}, "
        f"{it['compiler']}. {taken}.*"
    )


def write_pages() -> None:
    """Make the tables of the pages again from the stored results."""
    subprocess.run([sys.executable, "-m", "docsbuild.results"], cwd=HERE.parent, check=True, timeout=600)
