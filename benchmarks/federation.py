"""What a round costs over real sites: a server and three sites on this machine, mutual TLS, FedBiOAcc on Adult.

    python benchmarks/federation.py    # measure; write results/federation.json and the table of docs/federation-measured.md

What a site costs that waits for another one, and how much a kit's files grow by a round, are measured too.
Needs the `federation` extra. Keep the machine quiet meanwhile.
"""

import argparse
import importlib.metadata
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pandas as pd

SITES = ["site-1", "site-2", "site-3"]
TARGET = 0.25
ENDS = ("complete", "failed", "waiting", "stopped")
OURS = "ours"
WAITED, WATCHED = 20.0, 20.0
"""Seconds a site has waited before it is looked at, and is looked at."""
RECIPE = {"method": "fedbioacc", "local_steps": 5, "batch_size": 128}


def adult_sites(folder: Path, sites: list[str]) -> dict[str, Any]:
    """A file of encoded rows for every site; the sizes the job names."""
    from fedbilevel.datasets.partition import iid
    from fedbilevel.datasets.shipped import TRAIN_ROWS, load_adult
    from fedbilevel.tables.columns import encode_groups
    from fedbilevel.tables.encoder import Encoder

    data = load_adult("race")
    table = data.X.iloc[:TRAIN_ROWS]
    features = Encoder.learn(table).transform(table)
    groups, names = encode_groups(data.sensitive.iloc[:TRAIN_ROWS])
    labels = data.y.to_numpy(np.float32)
    for site, part in zip(sites, iid(TRAIN_ROWS, len(sites)), strict=True):
        np.savez(folder / f"{site}.npz", features=features[part], labels=labels[part], groups=groups[part])
    return {"features": int(features.shape[1]), "groups": len(names)}


def round_times(folder: Path, stage: int) -> list[float]:
    """Seconds from the end of one round to the end of the next: messages, work, averaging and saving."""
    rows = pd.read_csv(folder / "exchanges.csv")
    ends = rows[rows["stage"] == stage].groupby("round")["at"].max().to_numpy()
    return [float(value) for value in np.diff(ends)]


def grown(kits: Any) -> int:
    """Bytes of all logs of a federation."""
    names = ("*.log*", "log*.txt", "log*.json", "error_log.txt", "audit*", "left.csv")
    files = {file for kit in (kits.server, *kits.sites.values()) for name in names for file in kit.rglob(name)}
    return sum(file.stat().st_size for file in files if file.is_file())


def waiting(kits: Any, opened: Any, folder: Path, sizes: dict[str, Any]) -> dict[str, float]:
    """What a site's worker takes while the run waits for another one: share of a core, threads, bytes in memory."""
    from fedbilevel.federation.nvflare.job import write_job
    from fedbilevel.federation.operator.processes import is_parent, running
    from fedbilevel.federation.operator.sessions import end_jobs, run_folder
    from fedbilevel.federation.protocol.record import read_status
    from fedbilevel.federation.protocol.settings import JobSettings

    recipe = {**RECIPE, "weight_steps": 50_000, "steps": 150}
    settings = JobSettings("waiting", "fair", tuple(SITES), {"arrays": sizes, "recipe": recipe, "validation": 0.2})
    began = time.monotonic()
    opened.submit_job(str(write_job(folder / "jobs", settings)))
    while (read_status(run_folder(kits, settings.run)) or {}).get("round", 0) < 3:
        if time.monotonic() - began > 120:
            raise RuntimeError("the run does not begin")
        time.sleep(0.2)
    (cut,) = [process for process in running(kits.sites[SITES[-1]]) if not is_parent(process)]
    (worker,) = [process for process in running(kits.sites[SITES[0]]) if not is_parent(process)]
    cut.suspend()
    try:
        time.sleep(WAITED)
        began, spent = time.monotonic(), sum(worker.cpu_times()[:2])
        time.sleep(WATCHED)
        share = (sum(worker.cpu_times()[:2]) - spent) / (time.monotonic() - began)
        return {"share": share, "threads": worker.num_threads(), "memory": worker.memory_info().rss}
    finally:
        cut.resume()
        end_jobs(opened, settings.run)


@contextmanager
def running_sites(folder: Path, sites: list[str], policy: str, fixed: dict[str, float], **more: str) -> Iterator[Any]:
    """The kits of a server and sites that are up; ``policy``: besides the data, FOLDER/SITE.npz; ``fixed``: seconds it took."""
    from fedbilevel.federation.operator import processes
    from fedbilevel.federation.operator.demo import free_ports
    from fedbilevel.federation.operator.kits import Roster, establish
    from fedbilevel.federation.operator.sessions import wait_for_sites
    from fedbilevel.federation.protocol.policy import FILE

    port, admin_port = free_ports(2)
    began = time.perf_counter()
    kits = establish(folder / "federation", Roster(tuple(sites), port=port, admin_port=admin_port)).kits
    fixed["provision"] = time.perf_counter() - began
    for site in sites:
        (kits.sites[site] / "local" / FILE).write_text(
            f'[data]\narrays = "{folder / site}.npz"\n[policy]\nminimum_cell = 1\nsecure_sums = "optional"\n'
            f"{policy}[approve]\nauto = true\nrounds = 1000000\n"
        )
    began = time.perf_counter()
    environment = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"), **more}
    with processes.started(kits, environment):
        there = wait_for_sites(kits, sites, 60 + 20 * len(sites))
        if len(there) < len(sites):
            raise RuntimeError(f"only {there} came up")
        fixed["start"] = time.perf_counter() - began
        yield kits


def collect(repeats: int, say: Any, kinds: dict[str, bool], sites: list[str], idle: bool = True) -> dict[str, Any]:
    """``kinds``: names of what is measured one after the other, again and again, and whether it has secure sums."""
    from fedbilevel.federation.nvflare.job import write_job
    from fedbilevel.federation.operator.sessions import run_folder, session
    from fedbilevel.federation.protocol.record import read_status
    from fedbilevel.federation.protocol.settings import JobSettings

    measured: dict[str, Any] = {"rounds": {kind: [] for kind in kinds}, "fixed": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = adult_sites(folder, sites)
        with running_sites(folder, sites, "", measured["fixed"]) as kits, session(kits) as opened:
            for number, kind in product(range(repeats), kinds):
                recipe = {**RECIPE, "weight_steps": 300, "steps": 150}
                arguments = {"arrays": sizes, "recipe": recipe, "validation": 0.2}
                run = f"bench-{number}-{kinds[kind]:d}"
                settings = JobSettings(run, "fair", tuple(sites), arguments, secure=kinds[kind])
                before, began = grown(kits), time.perf_counter()
                opened.submit_job(str(write_job(folder / "jobs", settings)))
                where = run_folder(kits, settings.run)
                while (status := read_status(where) or {}).get("status") not in ENDS:
                    if time.perf_counter() - began > 600:
                        raise RuntimeError(str(status))
                    time.sleep(0.2)
                if status["status"] != "complete":
                    raise RuntimeError(str(status))
                whole = time.perf_counter() - began
                rows = pd.read_csv(where / "exchanges.csv")
                times = round_times(where, 0)
                found = {
                    "bilevel": times,
                    "model": round_times(where, 1),
                    "site": rows.loc[rows["round"] > 0, "site_seconds"].astype(float).median(),
                    "bytes_up": int(rows.loc[rows["stage"] == 0, "bytes_up"].iloc[0]),
                    "bytes_down": int(rows.loc[rows["stage"] == 0, "bytes_down"].iloc[0]),
                    "outside": whole - float(rows["at"].max() - rows["at"].min()),
                    "log_bytes": (grown(kits) - before) / len(rows.drop_duplicates(["stage", "round", "ordinal"])),
                }
                measured["rounds"][kind].append(found)
                say(f"{kind}: median {statistics.median(times):.3f} s a round")
            if idle:
                measured["waiting"] = waiting(kits, opened, folder, sizes)
    return measured


def rounds() -> str:
    """A round over three real sites, and what belongs to it: the table of docs/federation-measured.md."""
    record = harness.load("federation")
    measured, it = record["measured"], record["machine"]
    ours, fixed, idle = measured["rounds"][OURS], measured["fixed"], measured["waiting"]
    times = {stage: [value for one in ours for value in one[stage]] for stage in ("bilevel", "model")}
    lines = [
        [name, f"{statistics.median(found):.3f} s", f"{np.quantile(found, 0.9):.3f} s", str(len(found))]
        for name, found in (("FedBiOAcc, the weights", times["bilevel"]), ("FedAvg, the model", times["model"]))
    ]
    site, outside, logs = (statistics.median(one[name] for one in ours) for name in ("site", "outside", "log_bytes"))
    kept = "met" if statistics.median(times["bilevel"]) <= TARGET else "**missed**"
    return (
        harness.markdown(["a round on Adult", "median", "90 % within", "rounds"], lines)
        + f"""

- Target for a round of FedBiOAcc: {TARGET} s; {kept}. The sites compute for {1000 * site:.0f} ms of it.
- Each site sends {ours[0]["bytes_up"]} bytes and receives {ours[0]["bytes_down"]} in that round.
- Fixed costs: the kits take {fixed["provision"]:.1f} s. The server and three sites are up after {fixed["start"]:.1f} s. A job
  takes {outside:.0f} s outside its rounds: processes, imports, reading, compiling.
- A site that waits for another one takes {100 * idle["share"]:.1f} % of a core, {idle["threads"]} threads and \
{idle["memory"] / 1e6:.0f} MB.
- All logs of the server and three sites grow by {logs / 1000:.1f} kB a round.

*Measured {it["date"]} on {it["cpu"]}, {it["cores"]} cores shared by all four parties; Python {it["python"]}, \
NVFlare {it["nvflare"]}, jax {it["jax"]}.*"""
    )


def large() -> str:
    """Of benchmarks/large.py: many sites, large models, many rounds."""
    record = harness.load("large")
    rows = []
    for one in record["measured"]:
        first, last = one["seen"][0], one["seen"][-1]
        rounds = last["round"] - first["round"]
        spent = [f"{1000 * (last[who] - first[who]) / rounds:.0f}" for who in ("coordinator_seconds", "site_seconds")]
        memory = [
            " → ".join(f"{one['seen'][place][who]:.0f}" for place in (0, len(one["seen"]) // 2, -1))
            for who in ("coordinator", "site")
        ]
        rows.append(
            [f"{one['sites']}", f"{one['numbers']:,}", "yes" if one["secure"] else "no",
             f"{one['done']:,}" + (f" of {one['rounds']:,}" if one["done"] < one["rounds"] else ""),
             f"{one['median_seconds']:.2f} s", f"{one['median_late']:.2f} s", *spent, *memory,
             f"{last['logs'] / 1e3:.1f} MB", f"{one['load'][0]:.0f}"]
        )  # fmt: skip
    head = ["sites", "numbers", "secure sums", "rounds", "a round", "of the last tenth", "coordinator, ms", "a site, ms",
            "coordinator, MB", "a site, MB", "all logs", "load"]  # fmt: skip
    it = record["machine"]
    notes = "".join(
        f"- {one['sites']} sites, {one['numbers']:,} numbers: {one['note']}\n\n"
        for one in record["measured"]
        if one.get("note")
    )
    return f"{harness.markdown(head, rows)}\n\n{notes}*Measured {it['date']} on {it['cpu']}, {it['cores']} cores.*"


def stress() -> str:
    """Of benchmarks/stress.py: how often the tests with real processes passed beside busy loops."""
    if not (harness.RESULTS / "stress.json").exists():
        return "No suite has been run to its end yet."
    from stress import LOOPS, TIMES, in_a_row

    record = harness.load("stress")
    runs, it = record["measured"], record["machine"]
    rows, failed = [], []
    for run in runs:
        bad = {name: how for name, how in run["tests"].items() if how != "passed"}
        counts = [
            str(len(run["tests"]) - len(bad)),
            str(len(bad)),
            f"{run['seconds'] / 60:.0f} min",
            str(run.get("together", 1)),
            f"{run['load']:.0f}",
        ]
        rows.append([run["ended"], f"`{run['commit']}`", run["outcome"], *counts])
        failed += [f"- `{run['commit']}`, {how}: `{name}`" for name, how in bad.items()]
    head = ["ended", "commit", "suite", "tests passed", "other", "took", "suites at a time", "load"]
    others = "\n\nTests that did not pass:\n\n" + "\n".join(failed) if failed else ""
    return (
        f"**{min(in_a_row(runs), TIMES)} of {TIMES}** suites in a row have passed, beside {LOOPS} loops that never rest, on "
        f"{it['cores']} cores ({it['cpu']}). Load is the mean of the last 15 minutes of a suite, the loops included.\n\n"
        f"{harness.markdown(head, rows)}{others}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    found = collect(options.repeats, lambda text: print(text, flush=True), {OURS: False}, SITES)
    harness.save("federation", options.repeats, found)
    path = harness.RESULTS / "federation.json"
    text = path.read_text().replace('"jax":', f'"nvflare": "{importlib.metadata.version("nvflare")}",\n  "jax":', 1)
    path.write_text(text)
    harness.write_pages()
    print(rounds())


if __name__ == "__main__":
    main()
