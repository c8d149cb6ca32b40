"""What is measured, section by section, and the Markdown table each section becomes.

A section has `collect`, which measures and returns something JSON can hold, and `table`, which needs nothing but that.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fits
import peers
import population
import profiles
import tables
from harness import (
    Job,
    Measured,
    cores,
    describe,
    environment,
    interleaved,
    load,
    markdown,
    measure,
    median,
    spread,
    verdict,
)

FULL_STEPS = 2_000
EAGER, PROCESSES, PORTABLE, NATIVE = "torch eager", "torch processes", "C portable", "C native"
AUTODIFF, FUSED = "ours autodiff", "ours fused"
VARIANTS = (EAGER, PROCESSES, PORTABLE, NATIVE, AUTODIFF, FUSED)
CASES = (("FedBiO", 5), ("FedBiO", 10), ("FedBiOAcc", 5), ("FedBiOAcc", 10))
HEADLINE = {"algorithm": "fedbioacc", "terms": 10}

Say = Callable[[str], None]


class Section(NamedTuple):
    collect: Callable[[int, bool, Say], dict[str, Any]]  # (repeats, quick, say)
    table: Callable[[dict[str, Any]], str]
    needs_torch: bool = False
    needs_check: bool = True  # it times implementations that check.py compares
    repeats: int = 5  # where the command does not say


def one_core() -> list[int]:
    """Return the last core: interrupts tend to go to the first."""
    return cores()[-1:]


# ---- speed: the same runs by everybody -------------------------------------------------------------------------------


def collect_speed(repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    jobs: dict[str, Job] = {}
    for name, terms in CASES[-1:] if quick else CASES:
        for variant in VARIANTS:
            slow = variant in (EAGER, PROCESSES)
            jobs[f"{name} Q={terms} / {variant}"] = {
                "kind": "speed",
                "variant": variant,
                "cores": None if variant == PROCESSES else one_core(),
                "settings": {"algorithm": name.lower(), "terms": terms},
                "steps": (20 if quick else 200) if slow else FULL_STEPS,
            }
    return interleaved(jobs, repeats, say)


def table_speed(measured: Measured) -> str:
    cases = list(dict.fromkeys(name.split(" / ")[0] for name in measured))
    rows, once, ratios = [], [], {}
    for case in cases:
        results = {variant: measured[f"{case} / {variant}"] for variant in VARIANTS}
        full = {v: median(r, "run") * FULL_STEPS / median(r, "steps") for v, r in results.items()}
        pairs = ((EAGER, AUTODIFF), (EAGER, FUSED), (FUSED, PORTABLE), (FUSED, NATIVE))
        ratios[case] = [full[a] / full[b] for a, b in pairs]
        rows.append([case, *(f"{full[v]:.3g}" for v in VARIANTS), *(f"{ratio:.3g}" for ratio in ratios[case])])
        for variant in (PORTABLE, NATIVE, AUTODIFF, FUSED):
            compiling = median(results[variant], "compile")
            numbers = (compiling, full[variant], compiling + full[variant], median(results[variant], "cpu"))
            once.append([f"{case}, {variant}", *(f"{n:.3g}" for n in numbers), spread(results[variant], "run")])
    header = ["seconds", *VARIANTS, "eager / autodiff", "eager / fused", "fused / C portable", "fused / C native"]
    steps = {variant: int(measured[f"{cases[0]} / {variant}"][0]["steps"]) for variant in (EAGER, PROCESSES)}
    notes = [
        f"Eager PyTorch was timed on {steps[EAGER]} steps and the three processes on {steps[PROCESSES]}, scaled to "
        f"{FULL_STEPS:,} (their time is linear in the steps); everything else ran all {FULL_STEPS:,}. One core, but "
        "for the three processes, which had all. Time to compile is not in this table but in the next. The kernels of "
        "the fused path are built for the machine they run on, like C native.",
        "",
        verdict(f"{cases[-1]}: eager PyTorch / ours on the general path", ratios[cases[-1]][0], 30, at_least=True),
        verdict(f"{cases[-1]}: ours on linear models / C portable", ratios[cases[-1]][2], 3, at_least=False),
    ]
    second = markdown(["seconds", "compile", "run", "total", "processor time of the run", "run, least to most"], once)
    return "\n".join([markdown(header, rows), "", *notes, "", second])


# ---- seeds: a sweep on all cores against one run on one --------------------------------------------------------------

SEEDS = 20


def collect_seeds(repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    jobs: dict[str, Job] = {}
    steps = 200 if quick else FULL_STEPS
    for variant, path in ((AUTODIFF, "autodiff"), (FUSED, "fused")):
        common: Job = {"settings": HEADLINE, "steps": steps}
        jobs[f"{path} / one seed, one core"] = {"kind": "speed", "variant": variant, "cores": one_core(), **common}
        for strategy in STRATEGIES:
            job = {"kind": "seeds", "path": path, "strategy": strategy, "first": 0, "count": SEEDS, **common}
            jobs[f"{path} / {strategy}"] = job
    return interleaved(jobs, repeats, say)


STRATEGIES = ("threads", "map", "vmap", "processes")


def table_seeds(measured: Measured) -> str:
    rows, verdicts = [], []
    for path in ("autodiff", "fused"):
        one = median(measured[f"{path} / one seed, one core"], "run")
        rows.append([f"{path}, one seed on one core", f"{one:.3g}", "1", "", ""])
        times = {}
        for strategy in STRATEGIES:
            results = measured[f"{path} / {strategy}"]
            times[strategy] = median(results, "run")
            numbers = (times[strategy], times[strategy] / one, median(results, "compile"))
            rows.append([f"{path}, {strategy}", *(f"{n:.3g}" for n in numbers), f"{median(results, 'megabytes'):.0f}"])
        verdicts.append(verdict(f"{path}: {SEEDS} seeds / one seed", times[STRATEGIES[0]] / one, 10.2, at_least=False))
    header = [f"FedBiOAcc Q=10, {SEEDS} seeds on all cores", "seconds", "/ one seed", "compile", "peak MB"]
    return "\n".join([markdown(header, rows), "", *verdicts])


# ---- clients: the time of one client's step must not depend on how many there are ------------------------------------

CLIENTS = (3, 10, 100, 1_000, 10_000)
CLIENT_ROWS, CLIENT_COLUMNS, CLIENT_VALIDATION = 64, 32, 16


def collect_clients(repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    jobs: dict[str, Job] = {}
    for clients in CLIENTS:
        # The same number of client-steps everywhere: what a call of `simulate` costs besides them weighs the same.
        steps = (200_000 if quick else 400_000) // clients // 5 * 5
        for variant in (AUTODIFF, FUSED, PORTABLE):
            sizes = {"rows": CLIENT_ROWS, "features": CLIENT_COLUMNS, "validation": CLIENT_VALIDATION}
            jobs[f"{clients} / {variant}"] = {
                "kind": "speed",
                "variant": variant,
                "cores": one_core(),
                "settings": {"algorithm": "fedbioacc", "terms": 5, "batch_size": 16},
                "gaussian": {"clients": clients, **sizes},
                "steps": steps,
            }
    return interleaved(jobs, repeats, say)


def table_clients(measured: Measured) -> str:
    rows = []
    times: dict[str, dict[int, float]] = {}
    variants = (AUTODIFF, FUSED, PORTABLE)
    for clients in CLIENTS:
        numbers = []
        for variant in variants:
            results = measured[f"{clients} / {variant}"]
            per_step = median(results, "run") / median(results, "steps") / clients * 1e6
            times.setdefault(variant, {})[clients] = per_step
            numbers += [f"{per_step:.3g}", f"{median(results, 'megabytes'):.0f}"]
        data = clients * (CLIENT_ROWS + CLIENT_VALIDATION) * CLIENT_COLUMNS * 4 / 2**20
        rows.append([f"{clients:,}", f"{data:.3g}", *numbers])
    header = ["clients", "data, MB"]
    for variant in variants:
        header += [f"{variant}, µs", "peak MB"]
    notes = [
        f"Microseconds of one step of one client: FedBiOAcc, Q = 5, batch 16, {CLIENT_ROWS} rows of {CLIENT_COLUMNS} "
        "columns each, one core, without compiling.",
        "",
        *(
            verdict(
                f"{variant}: 10,000 clients / 100 clients", times[variant][10_000] / times[variant][100], 1.2, False
            )
            for variant in (AUTODIFF, FUSED)
        ),
    ]
    return "\n".join([markdown(header, rows), "", *notes])


# ---- inner: from a hundred to a million coefficients -----------------------------------------------------------------

# (coefficients, rows of a client, batch, steps timed in PyTorch, steps timed in ours, wanted ratio)
MOVED = "bytes moved in a second"
DIMENSIONS = ((100, 4_000, 128, 100, 2_000, 30.0), (10_000, 400, 32, 50, 200, 5.0), (1_000_000, 16, 4, 5, 20, 1.5))


def collect_inner(repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    jobs: dict[str, Job] = {}
    for features, rows, batch, eager_steps, our_steps, _ in DIMENSIONS:
        for variant in (EAGER, AUTODIFF, FUSED):
            steps = eager_steps if variant == EAGER else our_steps
            jobs[f"{features} / {variant}"] = {
                "kind": "speed",
                "variant": variant,
                "cores": one_core(),
                "settings": {**HEADLINE, "batch_size": batch},
                "gaussian": {"clients": 3, "rows": rows, "features": features, "validation": max(batch, rows // 4)},
                "steps": max(5, steps // 50 * 5) if quick else steps,
            }
    jobs[MOVED] = {"kind": "bandwidth", "cores": one_core(), "times": 20}
    return interleaved(jobs, repeats, say)


def least_bytes(features: int, batch: int) -> int:
    """What one step of FedBiOAcc must move if a minibatch and an inner variable leave the caches, for one client.

    Both points share their rows.  Every factor of the series reads its rows twice, first for the products with both y and both
    directions, then for the new directions; these, and both sums, are read and written.  The gradients of both losses read
    their rows twice, the cross derivative reads its own once; y, its momentum and the earlier y are read and written.
    """
    rows, vector = 4 * batch * features, 4 * features
    return HEADLINE["terms"] * (2 * rows + 12 * vector) + 5 * rows + 15 * vector


def table_inner(measured: Measured) -> str:
    rows, verdicts = [], []
    for features, count, batch, _, _, wanted in DIMENSIONS:
        results = {variant: measured[f"{features} / {variant}"] for variant in (EAGER, AUTODIFF, FUSED)}
        step = {v: median(r, "run") / median(r, "steps") * 1e3 for v, r in results.items()}
        numbers = [text for v, r in results.items() for text in (f"{step[v]:.3g}", f"{median(r, 'megabytes'):.0f}")]
        ratio = step[EAGER] / step[AUTODIFF]
        rows.append(
            [f"{features:,}", f"{count:,}", str(batch), *numbers, f"{ratio:.3g}", f"{step[EAGER] / step[FUSED]:.3g}"]
        )
        verdicts.append(verdict(f"{features:,} coefficients: eager PyTorch / ours autodiff", ratio, wanted, True))
    header = ["coefficients", "rows", "batch", "eager, ms", "MB", "autodiff, ms", "MB", "fused, ms", "MB"]
    header += ["eager / autodiff", "eager / fused"]
    if MOVED in measured:
        features, _, batch, *_ = DIMENSIONS[-1]
        moved = median(measured[MOVED], "bytes")
        limit = 3 * least_bytes(features, batch) / moved
        verdicts.append(
            f"- {features:,} coefficients: a step must move {3 * least_bytes(features, batch) / 1e9:.3g} GB, at "
            f"{moved / 1e9:.3g} GB/s {1e3 * limit:.3g} ms of processor time"
        )
        for variant in (AUTODIFF, FUSED):
            results = measured[f"{features} / {variant}"]
            spent = median(results, "cpu") / median(results, "steps")
            verdicts.append(verdict(f"{features:,} coefficients: {variant} / this limit", spent / limit, 1.5, False))
    note = (
        "Milliseconds of one step of three clients: FedBiOAcc, Q = 10, one core, without compiling; peak memory in MB."
    )
    return "\n".join([markdown(header, rows), "", note, "", *verdicts])


# ---- startup: from the start of a process to its first step ----------------------------------------------------------


def timed(command: list[str], environ: dict[str, str]) -> dict[str, float]:
    start = time.perf_counter()
    subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True, timeout=300)
    return {"total": time.perf_counter() - start}


def collect_startup(repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    script = Path(sys.executable).with_name("fedbilevel")
    for path in ("autodiff", "fused"):
        job: Job = {"kind": "startup", "path": path, "settings": HEADLINE, "cores": None}
        with tempfile.TemporaryDirectory() as folder:
            cache = {
                "JAX_ENABLE_COMPILATION_CACHE": "true",
                "JAX_COMPILATION_CACHE_DIR": folder,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }

            def first_step(job: Job, cache: dict[str, str] = cache) -> dict[str, float]:
                start = time.perf_counter()
                parts = measure(job, cache)
                return {**parts, "total": time.perf_counter() - start}

            measured |= interleaved({f"first step, {path}, cold": job}, 1, say, first_step)
            measured |= interleaved({f"first step, {path}, warm": job}, repeats, say, first_step)
    commands = {f"fedbilevel {option}": {"command": [str(script), option]} for option in ("--help", "--version")}
    if not script.exists():
        raise RuntimeError("the command `fedbilevel` is not installed beside this Python: install the package first")
    measured |= interleaved(commands, repeats, say, lambda job: timed(job["command"], environment()))
    return measured


def table_startup(measured: Measured) -> str:
    rows = []
    for name, results in measured.items():
        parts = [f"{median(results, key):.3g}" if key in results[0] else "" for key in ("import", "data", "first step")]
        rows.append([name, *parts, f"{median(results, 'total'):.3g}"])
    notes = [
        verdict(
            f"first step, {path}, warm cache, seconds", median(measured[f"first step, {path}, warm"], "total"), 3, False
        )
        for path in ("autodiff", "fused")
    ]
    notes += [
        verdict(f"`fedbilevel {option}`, seconds", median(measured[f"fedbilevel {option}"], "total"), 1, False)
        for option in ("--help", "--version")
    ]
    return "\n".join([markdown(["seconds", "import", "data", "first step", "whole process"], rows), "", *notes])


SECTIONS = {
    "speed": Section(collect_speed, table_speed, needs_torch=True),
    "seeds": Section(collect_seeds, table_seeds),
    "clients": Section(collect_clients, table_clients),
    "population": Section(population.collect, population.table, needs_check=False),
    "peers": Section(peers.collect, peers.table, needs_check=False, repeats=1),
    "inner": Section(collect_inner, table_inner, needs_torch=True),
    "startup": Section(collect_startup, table_startup),
    "fit": Section(fits.collect, fits.table, needs_check=False),
    "profile": Section(profiles.collect, profiles.table, needs_check=False, repeats=1),
    **{name: Section(tables.collector(name), tables.table) for name in tables.SECTIONS},
}


def shown(name: str) -> str:
    """A section as it stands on the page."""
    try:
        record = load(name)
    except FileNotFoundError:
        return f"Not measured yet: `python benchmarks/run.py {name}`."
    return f"{SECTIONS[name].table(record['measured'])}\n\n{describe(record)}"
