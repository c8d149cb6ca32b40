"""A federation of real processes on this machine: a server and three sites with their own kits, over mutual TLS."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

import fedbilevel
from fedbilevel.engines.nvflare import processes
from fedbilevel.engines.nvflare.job import RUNS
from fedbilevel.engines.nvflare.policy import FILE
from fedbilevel.engines.nvflare.provision import provision
from fedbilevel.engines.nvflare.record import read_status
from tests.engines.nvflare import programs

ROOT = Path(fedbilevel.__file__).parents[2]
SITES = ("site-1", "site-2", "site-3")
FUNCTIONS = [programs.FUNCTION, programs.SEVERAL, programs.SPOILT]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Federation:
    def __init__(self, folder):
        self.folder = folder
        port, admin_port = free_ports(2)
        self.kits = provision(folder / "kits", list(SITES), port=port, admin_port=admin_port)
        for client, site in enumerate(SITES):
            programs.save_site(folder / f"{site}.npz", client)
            (self.kits.sites[site] / "local" / FILE).write_text(
                f'[data]\narrays = "{folder / site}.npz"\n[policy]\nfunctions = {FUNCTIONS!r}\n'
            )
        (self.kits.server / "local" / FILE).write_text(f"[policy]\nfunctions = {FUNCTIONS!r}\n")
        self.environment = {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            # Sites compile the same program, and again after every restart.
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "jax")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
        self.running = {}
        self.asked = []

    def start(self, *names):
        for name in names:
            kit = self.kits.server if name == "server" else self.kits.sites[name]
            self.running[name] = processes.start(kit, None if name == "server" else name, self.environment)

    def ready(self, *sites, seconds=60):
        asked = self.ask(wait=list(sites), seconds=seconds)
        assert asked.wait(seconds + 30) == 0, f"not all of {sites} came up; see {self.folder}"

    def ask(self, output=subprocess.DEVNULL, **order):
        """A process that speaks to the server as an operator does."""
        told = {
            "server": str(self.kits.server),
            "admin": str(self.kits.admin),
            "sites": {name: str(path) for name, path in self.kits.sites.items()},
            **order,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "tests.engines.nvflare.supervising", json.dumps(told)],
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )

    def family(self, name):
        return processes.family(self.running[name].pid)

    def workers(self, name):
        """The processes of the jobs alone."""
        return self.family(name)[1:]

    def kill(self, name):
        """Power cut: parent and workers at once."""
        for process in self.family(name):
            process.kill()
        self.running.pop(name).wait(10)

    def stop(self):
        started = [process for name in self.running for process in self.family(name)]
        for process in (*self.asked, *self.running.values()):
            processes.stop(process)
        _, left = psutil.wait_procs(started, timeout=5)
        assert not left, f"still running: {left}"

    def supervise(self, settings, **options):
        return Supervised(self, settings, options)


class Supervised:
    """`supervise` in another process, so that a test can do harm meanwhile."""

    def __init__(self, federation, settings, options):
        self.folder = federation.kits.server / RUNS / settings.run
        self.lines = federation.folder / f"{settings.run}.txt"
        with self.lines.open("w") as output:
            self.process = federation.ask(
                output,
                settings=settings.to_json(),
                jobs=str(federation.folder / "jobs"),
                options={"patience": 90.0, **options},
            )
        federation.asked.append(self.process)

    @property
    def said(self):
        return self.lines.read_text().splitlines()

    @property
    def status(self):
        return read_status(self.folder) or {}

    @property
    def log(self):
        return (self.folder / "log.txt").read_text()

    def until(self, what, seconds=90):
        """Wait for something to become true while the run goes on."""
        end = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, f"the run ended early: {self.status} {self.said}"
            assert time.monotonic() < end, f"the run is stuck: {self.status} {self.said}"
            time.sleep(0.05)

    def reach(self, round_number):
        self.until(lambda: self.status.get("status") == "running" and self.status.get("round", 0) >= round_number)

    def finish(self, seconds=120):
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run is not done: {self.status} {self.said}") from None
        return self.status
