"""The eager PyTorch version with one process per client: torch.distributed over gloo on the loopback interface.

Each synchronisation is one `all_reduce` of the vectors the algorithm averages. `run` starts the processes, waits for
them for a bounded time and stops those that are left. This file is also what a child process executes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from stopwatch import Stopwatch
from task import Client, Settings
from torch_eager import LocalClient, Outcome

LOOPBACK = "127.0.0.1"


def synchronise(client: LocalClient, world: int) -> None:
    """Average over the processes; FedBiOAcc sends x_t and nu_t besides x_{t+1} (Alg. 3, line 17) in one message."""
    names = ("x",) if client.settings.algorithm == "fedbio" else ("x", "x_before", "nu")
    message = torch.cat([getattr(client, name) for name in names])
    dist.all_reduce(message)
    for name, part in zip(names, (message / world).chunk(len(names)), strict=True):
        setattr(client, name, part.clone())


def child(folder: Path, rank: int) -> None:
    """Run one client from the files the parent left in the folder and leave the result there."""
    job = json.loads((folder / "job.json").read_text())
    settings, steps, world = Settings(**job["settings"]), job["steps"], job["world"]
    with np.load(folder / f"client{rank}.npz") as arrays:
        data = Client(*(arrays[name] for name in Client._fields))
        indices = arrays.get("indices")
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"] * world + rank)
    limit = timedelta(seconds=job["timeout"])
    store = dist.TCPStore(LOOPBACK, job["port"], is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    scratch = LocalClient(data, settings)
    for t in range(1, job["warm_up"] + 1):
        scratch.step(t)
    client = LocalClient(data, settings)
    dist.barrier()
    with Stopwatch() as watch:
        for t in range(1, steps + 1):
            client.step(t, None if indices is None else indices[t - 1])
            if t % settings.local_steps == 0:
                synchronise(client, world)
        dist.barrier()
    times = {"seconds": watch.seconds, "cpu": watch.cpu}
    np.savez(folder / f"result{rank}.npz", outer=client.x.numpy(), inner=client.y.numpy(), **times)
    dist.destroy_process_group()


def run(
    clients: list[Client],
    settings: Settings,
    steps: int,
    indices: NDArray[np.int32] | None = None,
    seed: int = 0,
    warm_up: int = 0,
    timeout: float = 300.0,
) -> Outcome:
    """Run one process per client, after `warm_up` steps that count for nothing.

    RuntimeError if one of them fails, TimeoutError after `timeout` seconds.
    """
    world = len(clients)
    # The parent holds the meeting point, on a port the system picks: no race for a port that was free a moment ago.
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {"settings": asdict(settings), "steps": steps, "world": world, "seed": seed, "timeout": timeout}
        (folder / "job.json").write_text(json.dumps({**job, "warm_up": warm_up, "port": store.port}))
        for rank, client in enumerate(clients):
            extra = {} if indices is None else {"indices": indices[:, rank]}
            np.savez(folder / f"client{rank}.npz", **client._asdict(), **extra)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                command = [sys.executable, __file__, str(folder), str(rank)]
                children.append(subprocess.Popen(command, env=environment))
            deadline = time.monotonic() + timeout
            while any(process.poll() is None for process in children):
                failed = [rank for rank, process in enumerate(children) if process.poll() not in (None, 0)]
                if failed:
                    raise RuntimeError(f"torch.distributed: process of client {failed[0]} failed")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"torch.distributed: not finished after {timeout:.0f} s")
                time.sleep(0.05)
        finally:
            for process in children:
                if process.poll() is None:
                    process.kill()
                process.wait()
        failed = [rank for rank, process in enumerate(children) if process.returncode]
        if failed:
            raise RuntimeError(f"torch.distributed: process of client {failed[0]} failed")
        results = [dict(np.load(folder / f"result{rank}.npz")) for rank in range(world)]
    stacked = {key: np.stack([result[key] for result in results]) for key in ("outer", "inner", "seconds", "cpu")}
    return Outcome(stacked["outer"], stacked["inner"], float(stacked["seconds"].max()), float(stacked["cpu"].sum()))


if __name__ == "__main__":
    child(Path(sys.argv[1]), int(sys.argv[2]))
