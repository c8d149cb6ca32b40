"""What a round costs over real sites: a server and three sites on this machine, mutual TLS, FedBiOAcc on Adult.

    python benchmarks/federation.py             # measure; write results/federation.json and docs/federation-measured.md
    python benchmarks/federation.py --render    # the page from the stored results

Our settings beside NVFlare's own defaults (sites ask for work every 2 s, arrays are downloaded apart from their message).
Needs the `federation` extra. Keep the machine quiet meanwhile.
"""

import argparse
import importlib.metadata
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pandas as pd

PAGE = harness.HERE.parent / "docs" / "federation-measured.md"
SITES = ["site-1", "site-2", "site-3"]
TARGET = 0.25
VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {"request_interval": 0.01, "inline": True},
    "sites ask every 2 s (NVFlare's default), arrays inline": {"request_interval": 2.0, "inline": True},
    "arrays downloaded (NVFlare's default), sites ask every 0.01 s": {"request_interval": 0.01, "inline": False},
    "NVFlare's defaults": {"request_interval": 2.0, "inline": False},
}
RECIPE = {"method": "fedbioacc", "local_steps": 5, "batch_size": 128}


def adult_sites(folder: Path) -> dict[str, Any]:
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
    for site, part in zip(SITES, iid(TRAIN_ROWS, 3), strict=True):
        np.savez(folder / f"{site}.npz", features=features[part], labels=labels[part], groups=groups[part])
    return {"features": int(features.shape[1]), "groups": len(names)}


def free_ports() -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def round_times(folder: Path, stage: int) -> list[float]:
    """Seconds from the end of one round to the end of the next: messages, work, averaging and saving."""
    rows = pd.read_csv(folder / "exchanges.csv")
    ends = rows[rows["stage"] == stage].groupby("round")["at"].max().to_numpy()
    return [float(value) for value in np.diff(ends)]


def collect(repeats: int, say: Any) -> dict[str, Any]:
    from fedbilevel.federation.nvflare.job import write_job
    from fedbilevel.federation.operator import processes
    from fedbilevel.federation.operator.kits import Roster, establish
    from fedbilevel.federation.operator.sessions import run_folder, session, wait_for_sites
    from fedbilevel.federation.protocol.policy import FILE
    from fedbilevel.federation.protocol.record import read_status
    from fedbilevel.federation.protocol.settings import JobSettings

    measured: dict[str, Any] = {"rounds": {name: [] for name in VARIANTS}, "fixed": {}}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        sizes = adult_sites(folder)
        port, admin_port = free_ports()
        began = time.perf_counter()
        kits = establish(folder / "federation", Roster(tuple(SITES), port=port, admin_port=admin_port)).kits
        measured["fixed"]["provision"] = time.perf_counter() - began
        for site in SITES:
            (kits.sites[site] / "local" / FILE).write_text(
                f'[data]\narrays = "{folder / site}.npz"\n[policy]\nminimum_cell = 1\n[approve]\nauto = true\n'
            )
        began = time.perf_counter()
        environment = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder / "jax")}
        stack.enter_context(processes.started(kits, environment))
        there = wait_for_sites(kits, SITES, 60)
        if len(there) < 3:
            raise RuntimeError(f"only {there} came up")
        measured["fixed"]["start"] = time.perf_counter() - began
        with session(kits) as opened:
            for number in range(repeats):
                for variant, tuning in VARIANTS.items():
                    slow = tuning["request_interval"] > 1
                    if slow and number > 0:
                        continue  # two seconds a round need no second look
                    recipe = {**RECIPE, "weight_steps": 40 if slow else 300, "steps": 5 if slow else 150}
                    settings = JobSettings(
                        f"bench-{number}-{len(measured['rounds'][variant])}-{list(VARIANTS).index(variant)}",
                        "fair",
                        tuple(SITES),
                        {"arrays": sizes, "recipe": recipe, "validation": 0.2},
                    )
                    began = time.perf_counter()
                    opened.submit_job(str(write_job(folder / "jobs", settings, **tuning)))
                    where = run_folder(kits, settings.run)
                    while (read_status(where) or {}).get("status") not in ("complete", "failed", "waiting", "stopped"):
                        if time.perf_counter() - began > 240:
                            raise RuntimeError(f"{variant}: {read_status(where)}")
                        time.sleep(0.2)
                    status = read_status(where) or {}
                    if status["status"] != "complete":
                        raise RuntimeError(f"{variant}: {status}")
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
                    }
                    measured["rounds"][variant].append(found)
                    say(f"{variant}: median {statistics.median(times):.3f} s a round")
    return measured


def table(record: dict[str, Any]) -> str:
    measured = record["measured"]
    head = "| a round of FedBiOAcc on Adult | median | 90 % within | rounds |\n| --- | ---: | ---: | ---: |\n"
    lines = []
    for name, found in measured["rounds"].items():
        times = [value for one in found for value in one["bilevel"]]
        lines.append(f"| {name} | {statistics.median(times):.3f} s | {np.quantile(times, 0.9):.3f} s | {len(times)} |")
    ours = measured["rounds"]["ours"]
    median = statistics.median(value for one in ours for value in one["bilevel"])
    model = statistics.median(value for one in ours for value in one["model"])
    site = statistics.median(one["site"] for one in ours)
    outside = statistics.median(one["outside"] for one in ours)
    fixed, it = measured["fixed"], record["machine"]
    return (
        head
        + "\n".join(lines)
        + f"\n\nTarget: {TARGET} s; {'met' if median <= TARGET else '**missed**'}. Of our round the sites compute for "
        f"{1000 * site:.0f} ms. A round of stage two (FedAvg of the model): {model:.3f} s. Per site and round of FedBiOAcc "
        f"{ours[0]['bytes_up']} bytes go up and {ours[0]['bytes_down']} down. Fixed costs: kits {fixed['provision']:.1f} s, "
        f"server and three sites up {fixed['start']:.1f} s, {outside:.0f} s per job outside its rounds (processes, imports, "
        f"reading, compiling).\n\n*Measured {it['date']} on {it['cpu']}, {it['cores']} cores shared by all four parties; "
        f"Python {it['python']}, NVFlare {it['nvflare']}, jax {it['jax']}.*"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if not options.render:
        found = collect(options.repeats, lambda text: print(text, flush=True))
        harness.save("federation", options.repeats, found)
        path = harness.RESULTS / "federation.json"
        text = path.read_text().replace('"jax":', f'"nvflare": "{importlib.metadata.version("nvflare")}",\n  "jax":', 1)
        path.write_text(text)
    record = harness.load("federation")
    page = f"# A federated round, measured\n\n`python benchmarks/federation.py`\n\n{table(record)}\n"
    PAGE.write_text(page)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
