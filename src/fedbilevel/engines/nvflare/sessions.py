"""The operator's hand on a federation: who is there, submit, and stay with a run until it is complete.

NVFlare does not resume a job whose server was killed, aborts one whose worker died, and does not let a restarted site back
into a running one.  `supervise` does all three: it submits the same run again, which goes on from its last complete round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from fedbilevel.engines.nvflare.errors import RunFailed
from fedbilevel.engines.nvflare.job import RUNS, write_job
from fedbilevel.engines.nvflare.policy import read_policy
from fedbilevel.engines.nvflare.provision import Kits
from fedbilevel.engines.nvflare.record import read_status
from fedbilevel.engines.nvflare.settings import JobSettings

POLL = 0.5
"""Seconds between two looks at a run."""
LOOK_SECONDS = 3.0
"""How long the sites have to say what they are working on."""
STARTING = 20.0
"""Seconds a new job may be called running before its worker is listed."""
Say = Callable[[str], None]


class NoServer(ConnectionError):
    """The coordinator's server cannot be reached."""


@contextlib.contextmanager
def session(kits: Kits, seconds: float = 10.0) -> Iterator[Session]:
    """An operator's session, always closed: an open one keeps Python alive."""
    made = new_secure_session(kits.user, str(kits.admin), timeout=seconds, auto_login_max_tries=1)
    try:
        yield made
    finally:
        with contextlib.suppress(Exception):
            made.close()


@dataclass(frozen=True)
class Seen:
    """What the server says: the jobs that really run, and for every site that answers the jobs it works on."""

    jobs: tuple[str, ...]
    sites: dict[str, tuple[str, ...]]


def look(opened: Session) -> Seen:
    info = opened.get_system_info()
    told: list[dict[str, str]] = []
    if info.client_info:
        # While a cut connection is being given up, the server may be too slow to say who is there: look again later.
        opened.set_timeout(LOOK_SECONDS)
        with contextlib.suppress(ConnectionError):
            told = opened.get_client_job_status() or []
        opened.unset_timeout()
    sites: dict[str, tuple[str, ...]] = {}
    for one in told:
        if one.get("status") != "no_reply":
            known = sites.get(one["client_name"], ())
            sites[one["client_name"]] = (*known, one["job_id"]) if "job_id" in one else known
    return Seen(tuple(job.job_id for job in info.job_info), sites)


def wait_for_sites(kits: Kits, sites: Sequence[str], seconds: float) -> list[str]:
    """Wait until ``sites`` answer; those that do when the time is over."""
    end = time.monotonic() + seconds
    there: list[str] = []
    while True:
        with contextlib.suppress(Exception), session(kits) as opened:
            while time.monotonic() < end:
                seen = look(opened).sites
                there = [site for site in sites if site in seen]
                if len(there) == len(sites):
                    return there
                time.sleep(POLL)
        if time.monotonic() >= end:
            return there
        time.sleep(POLL)


def run_folder(kits: Kits, run: str) -> Path:
    """Where the coordinator keeps a run: on the machine whose kit this is."""
    policy = read_policy(kits.server / "local")
    return (policy.folder or kits.server / RUNS) / run


def supervise(
    kits: Kits,
    settings: JobSettings,
    *,
    jobs: Path,
    say: Say,
    patience: float = 600.0,
    gather: float = 30.0,
    stop: Callable[[], bool] = lambda: False,
) -> Path:
    """Submit a run and stay with it until it is complete, submitting it again whenever a fault has ended its job or a
    site that was away is back.  Returns the run's folder; raises `RunFailed` where the run cannot go on.

    ``patience``: seconds without any progress after which to give up.  ``gather``: how long to wait for all sites before
    starting with those that are there (at least ``min_sites``).  ``stop`` is asked regularly; True leaves the run as it is.
    """
    return _Supervisor(kits, settings, jobs, say, patience, gather, stop).run()


class _Supervisor:
    def __init__(
        self,
        kits: Kits,
        settings: JobSettings,
        jobs: Path,
        say: Say,
        patience: float,
        gather: float,
        stop: Callable[[], bool],
    ) -> None:
        self.kits, self.settings, self.jobs, self.say, self.stop = kits, settings, jobs, say, stop
        self.patience, self.gather = patience, gather
        self.folder = run_folder(kits, settings.run)
        self.mark, self.moved = "", time.monotonic()
        self.job: str | None = None
        self.submitted = 0.0
        self.asked: set[str] = set()
        """The sites the job was submitted with..."""
        self.worked: set[str] = set()
        """...and those seen working on it."""

    def run(self) -> Path:
        while not (self._complete() or self.stop()):
            try:
                with session(self.kits) as opened:
                    while not (self._complete() or self.stop()):
                        self._attend(opened, look(opened))
                        time.sleep(POLL)
            except RunFailed:
                raise
            except Exception as error:  # NVFlare raises many kinds when its server is gone
                self._check_patience(f"the server cannot be reached ({type(error).__name__}: {error})")
                time.sleep(POLL)
        return self.folder

    def _attend(self, opened: Session, seen: Seen) -> None:
        """One look: submit where no job of ours lives, and call back those who can take part again."""
        if self.job is None or self._is_over(opened, seen):
            self._submit(opened)
        else:
            working = {site for site, jobs in seen.sites.items() if self.job in jobs}
            self.worked |= working
            idle = {site for site in self.settings.sites if site in seen.sites} - working
            # A site that was asked and never worked has declined; calling it again would change nothing.
            back = sorted(site for site in idle if site in self.worked or site not in self.asked)
            if back and self._told().get("status") == "running":
                self.say(f"{', '.join(back)} can take part again")
                opened.abort_job(self.job)
                self.job = None
        self._check_patience("nothing has moved")

    def _is_over(self, opened: Session, seen: Seen) -> bool:
        if self._told().get("status") in ("stopped", "waiting"):
            self.say(self._told()["sentence"])
            return True
        if self.job in seen.jobs:
            return False
        status = opened.get_job_status(self.job)
        if status in ("SUBMITTED", "APPROVED", "DISPATCHED"):
            return False
        # A server that was killed takes its job for running for ever; a new one for a moment only.
        return status != "RUNNING" or time.monotonic() - self.submitted > STARTING

    def _submit(self, opened: Session) -> None:
        end = time.monotonic() + self.gather
        while not self.stop():
            seen = look(opened).sites
            there = [site for site in self.settings.sites if site in seen]
            everybody = len(there) == len(self.settings.sites)
            if everybody or (len(there) >= self.settings.needed and time.monotonic() > end):
                break
            self._check_patience(f"the sites that answer are too few ({', '.join(there) or 'none'})")
            time.sleep(POLL)
        if self.stop():
            return
        self.job = str(opened.submit_job(str(write_job(self.jobs, self.settings))))
        self.submitted, self.asked, self.worked = time.monotonic(), set(there), set()
        self.say(f"submitted with {', '.join(there)}")

    def _told(self) -> dict[str, Any]:
        """What the coordinator says of our job; nothing where it speaks of an earlier one."""
        status = read_status(self.folder) or {}
        return status if status.get("job") == self.job else {}

    def _complete(self) -> bool:
        status = read_status(self.folder) or {}
        if status.get("status") == "complete":
            return True
        if self._told().get("status") == "failed":
            raise RunFailed(str(status.get("sentence")))
        mark = "/".join(str(status.get(name)) for name in ("job", "status", "stage", "round"))
        if mark != self.mark:
            self.mark, self.moved = mark, time.monotonic()
        return False

    def _check_patience(self, what: str) -> None:
        if time.monotonic() - self.moved > self.patience:
            raise RunFailed(f"The run has not moved for {self.patience:g} s: {what}. It can be submitted again.")
