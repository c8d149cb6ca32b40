"""A federation of real processes on this machine: a server and three sites with their own kits, over mutual TLS."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

import fedbilevel
from fedbilevel.federation.nvflare.job import RUNS
from fedbilevel.federation.operator import processes
from fedbilevel.federation.operator.demo import free_ports
from fedbilevel.federation.operator.kits import Roster, establish
from fedbilevel.federation.protocol.policy import FILE
from fedbilevel.federation.protocol.record import read_status
from tests.federation import programs

ROOT = Path(fedbilevel.__file__).parents[2]
SITES = ("site-1", "site-2", "site-3")
MEMBER, LEAD = "member@example.org", "lead@example.org"
FUNCTIONS = [programs.FUNCTION, programs.SEVERAL, programs.SPOILT, programs.HELD]
LARGEST_MEGABYTES = 4
"""Of a message that the coordinator takes."""
LONG = 600
"""Seconds after which something is stuck and not slow, on a machine with ten times as much to do as well.  Tests wait for
states; whatever cannot come any more fails at once."""


class Federation:
    def __init__(self, folder):
        self.folder = folder
        self.port, self.admin_port = free_ports(2)
        roster = Roster(SITES, port=self.port, admin_port=self.admin_port, people=((MEMBER, "member"), (LEAD, "lead")))
        self.kits = establish(folder / "kits", roster).kits
        for client, site in enumerate(SITES):
            programs.save_site(folder / f"{site}.npz", client)
            self.offer(
                site,
                f'[data]\narrays = "{folder / site}.npz"\n[policy]\nfunctions = {FUNCTIONS!r}\n'
                "minimum_rows = 1\nminimum_batch = 1\nsecure_sums = 'optional'\n"
                "[approve]\nauto = true\nrounds = 1000000\nruns = 1000\n",
            )
        (self.kits.server / "local" / FILE).write_text(
            f"[policy]\nfunctions = {FUNCTIONS!r}\nminimum_rows = 1\nlargest_megabytes = {LARGEST_MEGABYTES}\n"
        )
        added = {
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), str(ROOT / "src")]
            ),  # the package under test, not an installed one
            "JAX_PLATFORMS": "cpu",
            # Sites compile the same programs, and again after every restart.
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "jax")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        self.added, self.environment = added, {**os.environ, **added}
        self.running = {}
        self.orders = 0
        self.operator = subprocess.Popen(
            [sys.executable, "-m", "tests.federation.supervising"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
            env=self.environment,
        )  # fmt: skip

    def offer(self, site, policy):
        """Write a site's policy, with the batches of the simulation: it is read when a job starts."""
        if "secret_draws" not in policy:
            policy = policy.replace("[policy]\n", "[policy]\nsecret_draws = false\n")
        (self.kits.sites[site] / "local" / FILE).write_text(policy)

    def start(self, *names):
        for name in names:
            kit = self.kits.server if name == "server" else self.kits.sites[name]
            self.running[name] = processes.start(kit, self.added)

    def ready(self, *sites):
        outcome = self.order(wait=list(sites), seconds=LONG).outcome(LONG + 60)
        assert outcome == "done", f"{outcome}; see {self.folder}"

    def order(self, run=None, **what):
        """Something for the operator to do: an `Order` that can be waited for."""
        self.orders += 1
        place = None if run is None else self.kits.server / RUNS / run
        made = Order(self, self.folder / f"{run or 'order'}-{self.orders}", place)
        told = {
            "server": str(self.kits.server),
            "admin": str(self.kits.admin),
            "user": self.kits.user,
            "sites": {name: str(path) for name, path in self.kits.sites.items()},
            "lines": str(made.lines),
            "outcome": str(made.file),
            **what,
        }
        self.operator.stdin.write(json.dumps(told) + "\n")
        self.operator.stdin.flush()
        return made

    def supervise(self, settings, lose=False, **options):
        """``lose``: the server's first answer to a submission does not arrive."""
        told = {"settings": settings.to_json(), "jobs": str(self.folder / "jobs"), "lose": lose}
        return self.order(settings.run, **told, options={"patience": LONG, **options})

    def family(self, name):
        return processes.family(self.running[name].pid)

    def workers(self, name):
        """The processes of the jobs alone."""
        return self.family(name)[1:]

    def kill(self, name):
        """Power cut: parent and workers at once."""
        for process in self.family(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.running.pop(name).wait(LONG)

    def stop(self):
        self.operator.kill()
        self.operator.wait(LONG)
        with contextlib.suppress(BrokenPipeError):
            self.operator.stdin.close()
        places = [self.kits.server, *self.kits.sites.values()]
        processes.stop(*places)
        for process in self.running.values():
            process.wait(LONG)
        left = [process for kit in places for process in processes.running(kit)]
        assert not left, f"still running: {left}"


class Order:
    """Something the operator's process does, so that a test can do harm meanwhile; ``folder``: that of the run it is about."""

    def __init__(self, federation, stem, folder=None):
        self.federation, self.folder = federation, folder
        self.lines, self.file = stem.with_suffix(".txt"), stem.with_suffix(".end")

    @property
    def said(self):
        return self.lines.read_text().splitlines() if self.lines.exists() else []

    @property
    def ended(self):
        return self.file.exists()

    def outcome(self, seconds=LONG):
        def alive():
            assert self.federation.operator.poll() is None, "the operator's process has ended"

        wait_for(lambda: self.ended, alive, lambda: self.said, seconds)
        return self.file.read_text()

    # Of a run that is supervised.

    @property
    def status(self):
        return read_status(self.folder) or {}

    @property
    def log(self):
        file = self.folder / "log.txt"
        return file.read_text() if file.exists() else ""

    def until(self, what):
        """Wait for something to become true while the run goes on."""

        def going_on():
            assert not self.ended, f"the run ended early: {self.outcome()} {self.status} {self.said}"

        wait_for(what, going_on, lambda: (self.status, self.said))

    def reach(self, round_number):
        self.until(lambda: self.status.get("status") == "running" and self.status.get("round", 0) >= round_number)

    def finish(self):
        assert self.outcome() == "done", (self.status, self.said)
        return self.status


def wait_for(what, check=lambda: None, about=lambda: "", seconds=LONG):
    """Until ``what()`` is true; ``check`` complains where it cannot become so any more."""
    end = time.monotonic() + seconds
    while not what():
        check()
        assert time.monotonic() < end, f"it takes too long: {about()}"
        time.sleep(0.05)
