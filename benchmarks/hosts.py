"""Weak scaling on one machine: one, two and four processes joined on loopback, each with a store of its own.

    python benchmarks/hosts.py [--repeats 3]

Every process holds 10,000 clients and brings 50 to each round, so that the work of a process stays the same. A machine with
fewer cores than processes cannot run them side by side: the processor time of a process shows what joining costs, the clock
also shows the waiting. FedBiOAcc, the task of `population.py`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HELD, ASKED, ROUNDS, HOSTS = 10_000, 50, 200, (1, 2, 4)
LIMIT = 900


def child(port: int, count: int, number: int, folder: str) -> None:
    """One process: its store, a short run that compiles, and the run that is timed."""
    import jax

    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number, initialization_timeout=300)
    import numpy as np
    import ours
    import population
    import task

    import fedbilevel as fb

    store = fb.ClientStore.write(
        f"{folder}/{count}-{number}", [population.clients(np.random.default_rng(number), HELD)]
    )
    method = ours.algorithm(population.COLUMNS, task.Settings(**population.SETTINGS), np.float32, "autodiff")
    run: dict[str, Any] = {"participation": ASKED * count, "record_every": None}
    fb.simulate(method, store, 2, **run)
    seen = []
    fb.simulate(
        method, store, ROUNDS, seed=1, **run, checkpoint=f"{folder}/{count}.npz", checkpoint_every=ROUNDS // 2,
        progress=lambda told: seen.append((told.done, time.perf_counter(), time.process_time())),
    )  # fmt: skip
    (first, began, cpu), (last, ended, cpu_end) = seen[0], seen[-1]
    print(json.dumps({"round": (ended - began) / (last - first), "cpu": (cpu_end - cpu) / (last - first)}))


def measured(count: int, folder: str) -> dict[str, float]:
    """The means over the processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-W", "ignore", __file__, "--child", str(port), str(count)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen([*command, str(number), folder], stdout=subprocess.PIPE, text=True, env=environment)
        for number in range(count)
    ]
    try:
        spoken = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{count} processes ended with {[process.returncode for process in processes]}")
    told = [json.loads(text.splitlines()[-1]) for text in spoken]
    return {name: statistics.mean(one[name] for one in told) for name in told[0]}


def shown() -> str:
    """The table of the page."""
    from harness import describe, digits, load, markdown

    try:
        record = load("hosts")
    except FileNotFoundError:
        return "Not measured yet: `python benchmarks/hosts.py`."
    middle = {
        count: {name: statistics.median(one[name] for one in runs) for name in ("round", "cpu")}
        for count, runs in record["measured"].items()
    }
    rows = [
        [count, f"{int(count) * HELD:,}", str(int(count) * ASKED), digits(1e3 * own["round"]), digits(1e3 * own["cpu"]),
         digits(own["cpu"] / middle["1"]["cpu"])]
        for count, own in middle.items()
    ]  # fmt: skip
    header = [
        "processes",
        "clients",
        "asked in a round",
        "a round, ms",
        "processor time of a process, ms",
        "/ one process",
    ]
    return f"{markdown(header, rows)}\n\n{describe(record)}"


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1:2] == ["--child"]:
        port, count, number, folder = sys.argv[2:]
        child(int(port), int(count), int(number), folder)
        return
    from harness import save, write_pages

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    found: dict[str, list[dict[str, float]]] = {str(count): [] for count in HOSTS}
    for _ in range(repeats):
        for count in HOSTS:
            with tempfile.TemporaryDirectory() as folder:
                found[str(count)].append(measured(count, folder))
            print(count, found[str(count)][-1], flush=True)
    save("hosts", repeats, found)
    write_pages()


if __name__ == "__main__":
    main()
