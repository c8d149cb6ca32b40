"""Many sites, large models, many rounds, over real processes: seconds, memory and logs.

    python benchmarks/large.py --sites 10 --numbers 1000000 --rounds 2000 [--secure] [--limit SECONDS]

A server and the sites run on this machine over mutual TLS.  The work of a site is a step of FedAvg towards the mean of eight
numbers, so what is measured is everything around it.  Memory (resident, in MB) of the coordinator's worker and of a site's, and
the bytes of all logs, are read as the rounds go by.  After ``--limit`` seconds the run is stopped, and what it did is told.
Each combination of sites, numbers and ``--secure`` has a line in results/large.json and in docs/federation-measured.md.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import federation
import harness
import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.federation.protocol.program import ArrayProgram

FUNCTION = "large:program"


def towards_the_mean(model: Any, batch: Any) -> Any:
    return 0.5 * ((model - batch["goal"].mean()) ** 2).mean() * model.size


def program(arguments: dict[str, Any]) -> ArrayProgram:
    made = fb.fedavg(towards_the_mean, np.zeros(arguments["numbers"], np.float32), 0.1, 1, None)
    example = {"goal": jax.ShapeDtypeStruct((8,), np.float32)}
    return ArrayProgram(made, arguments["rounds"], (example, None))


def watched(kits: Any, done: int) -> dict[str, float]:
    """After ``done`` rounds: of the workers of the coordinator and of one site, MB in memory and processor seconds; kB of all
    logs."""
    from fedbilevel.federation.operator.processes import is_parent, running

    told: dict[str, float] = {"round": done, "logs": federation.grown(kits) / 1e3}
    for who, kit in (("coordinator", kits.server), ("site", next(iter(kits.sites.values())))):
        workers = [process for process in running(kit) if not is_parent(process)]
        told[who] = sum(process.memory_info().rss for process in workers) / 1e6
        told[f"{who}_seconds"] = sum(sum(process.cpu_times()[:2]) for process in workers)
    return told


def main() -> None:
    from fedbilevel.federation.nvflare.job import write_job
    from fedbilevel.federation.operator.sessions import end_jobs, run_folder, session
    from fedbilevel.federation.protocol.policy import FILE
    from fedbilevel.federation.protocol.record import read_status
    from fedbilevel.federation.protocol.settings import JobSettings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("sites", 10), ("numbers", 1_000_000), ("rounds", 2000)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--secure", action="store_true")
    parser.add_argument("--limit", type=float, default=7200.0)
    parser.add_argument("--note", default="", help="what a reader must know of this run")
    options = parser.parse_args()
    sites = [f"site-{number:02d}" for number in range(options.sites)]
    seen: list[dict[str, float]] = []
    allowed = f'functions = ["{FUNCTION}"]\nminimum_rows = 1\nminimum_batch = 1\n'
    paths = os.pathsep.join([str(harness.HERE), os.environ.get("PYTHONPATH", "")])
    fixed: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, site in enumerate(sites):
            np.savez(folder / f"{site}.npz", train0=np.full(8, number, np.float32))
        with federation.running_sites(folder, sites, allowed, fixed, PYTHONPATH=paths) as kits, session(kits) as opened:
            (kits.server / "local" / FILE).write_text(f"[policy]\n{allowed}")
            arguments = {"numbers": options.numbers, "rounds": options.rounds}
            settings = JobSettings(
                "large", FUNCTION, tuple(sites), arguments, secure=options.secure, reply_timeout=600.0, start_timeout=600.0,
            )  # fmt: skip
            opened.submit_job(str(write_job(folder / "jobs", settings)))
            where, began = run_folder(kits, settings.run), time.monotonic()
            while (status := read_status(where) or {}).get("status") not in federation.ENDS:
                if time.monotonic() - began > options.limit:
                    break
                done = status.get("round", 0)
                if done and (not seen or done - seen[-1]["round"] >= options.rounds / 40):
                    seen.append(watched(kits, done))
                    print(seen[-1], flush=True)
                time.sleep(0.2)
            times = federation.round_times(where, 0)
            late = times[-max(1, len(times) // 10) :]
            told = {
                **vars(options), **fixed, "status": status.get("status"), "done": len(times) + 1, "load": os.getloadavg(),
                "median_seconds": statistics.median(times), "median_late": statistics.median(late),
                "seconds": sum(times), "seen": seen,
                "bytes": [status.get("bytes_down"), status.get("bytes_up")],
                "run_folder": sum(file.stat().st_size for file in where.rglob("*") if file.is_file()) / 1e3,
            }  # fmt: skip
            if told["status"] == "running":
                end_jobs(opened, settings.run)
    file = harness.RESULTS / "large.json"
    which = ("sites", "numbers", "secure")
    others = harness.load("large")["measured"] if file.exists() else []
    kept = [one for one in others if any(one[name] != told[name] for name in which)]
    harness.save("large", 1, sorted([*kept, told], key=lambda one: [one[name] for name in which]))
    harness.write_pages()
    print(json.dumps({name: value for name, value in told.items() if name != "seen"}, indent=1))


if __name__ == "__main__":
    main()
