"""Staying with a run until it is complete.

NVFlare does not resume a job whose server was killed, aborts one whose worker died, and does not let a restarted site back
into a running one.  `Supervisor` does all three: it submits the same run again, which goes on from its last complete round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session

from fedbilevel.federation.nvflare import sessions
from fedbilevel.federation.nvflare.job import write_job
from fedbilevel.federation.nvflare.sessions import Kits, Say, Seen
from fedbilevel.federation.protocol.errors import RunFailed, Stopped
from fedbilevel.federation.protocol.record import held, read_status
from fedbilevel.federation.protocol.settings import JobSettings

STARTING = 20.0
"""Seconds a new job may be called running before its worker is listed."""


@dataclass
class Supervisor:
    """Submits a run and stays with it until it is complete, submitting it again whenever a fault has ended its job or a
    site that was away is back.  A job of the run that is at work already is taken up.

    ``patience``: seconds without any progress after which to give up.  ``gather``: how long to wait for all sites before
    starting with those that are there (at least ``min_sites``).  ``stop`` is asked regularly; True leaves the run as it is.
    """

    kits: Kits
    settings: JobSettings
    jobs: Path
    say: Say
    patience: float = 600.0
    gather: float = 30.0
    stop: Callable[[], bool] = lambda: False
    mark: str = ""
    moved: float = field(default_factory=time.monotonic)
    """When ``mark``, where the run stands, last changed."""
    job: str | None = None
    submitted: float = 0.0
    listed: bool = False
    """Whether the server has listed the job's worker."""
    asked: set[str] = field(default_factory=set)
    """The sites the job was submitted with..."""
    worked: set[str] = field(default_factory=set)
    """...and those seen working on it."""
    gathering: tuple[float, list[str]] | None = None
    """While there is no job: since when the sites are waited for, and which were there at the last look."""

    def run(self) -> Path:
        """The run's folder; `RunFailed` where the run cannot go on, `Stopped` where somebody stopped it (`stop_run`)."""
        run = self.settings.run
        self.folder = sessions.run_folder(self.kits, run)
        self.folder.mkdir(parents=True, exist_ok=True)
        with held(
            self.folder / sessions.WATCH,
            0.0,
            f"Run {run} is being watched already, by another `submit`: leave it to that.",
        ):
            (self.folder / sessions.STOP).unlink(missing_ok=True)
            self._watch()
        return self.folder

    def _watch(self) -> None:
        unreachable, begun = False, False
        while not (self._complete() or self.stop()):
            try:
                with sessions.session(self.kits) as opened:
                    if unreachable:
                        self.say("the server answers again")
                    unreachable = False
                    while not (self._complete() or self.stop()):
                        seen = sessions.look(opened)
                        if not begun:
                            self._take_up(opened, seen)
                            begun = True
                        self._attend(opened, seen)
                        time.sleep(sessions.POLL)
            except (RunFailed, Stopped):
                raise
            except Exception as error:  # NVFlare raises many kinds when its server is gone
                if not unreachable:
                    self.say("the server does not answer; waiting for it")
                unreachable, self.gathering = True, None
                self._check_patience(f"the server cannot be reached ({type(error).__name__}: {error})")
                time.sleep(sessions.POLL)

    def _take_up(self, opened: Session, seen: Seen) -> None:
        """A submission that was killed leaves its job at work: go on with it if it is the same, and else end it."""
        status = read_status(self.folder) or {}
        file = self.folder / "settings.json"
        same = file.exists() and file.read_text() == self.settings.to_json()
        if same and status.get("status") == "running" and status.get("job") in seen.jobs:
            self.job, self.listed = str(status["job"]), True
            self.submitted, self.asked = time.monotonic(), set(status.get("sites", self.settings.sites))
            self.say("the run is at work already; watching it")
        elif sessions.end_jobs(opened, self.settings.run):
            self.say("an earlier job of the run was ended")

    def _attend(self, opened: Session, seen: Seen) -> None:
        """One look: submit where no job of ours lives, and call back those who can take part again."""
        if self.job is not None and self._is_over(opened, seen):
            self.job = None
        if self.job is None:
            if not self._complete():  # it may have been completed since the last look
                self._submit(opened, seen)
            return
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
        assert self.job is not None
        if self._told().get("status") in ("stopped", "waiting"):
            self.say(self._told()["sentence"])
            # NVFlare would keep the place of a job for minutes, waiting for a word of a site that is gone.
            with contextlib.suppress(Exception):
                opened.abort_job(self.job)
            return True
        if self.job in seen.jobs:
            self.listed = True
            return False
        status = opened.get_job_status(self.job)
        if status in sessions.WAITING:
            return False
        # A server that was killed takes its job for running for ever; a new one for a moment only.
        over = status != "RUNNING" or self.listed or time.monotonic() - self.submitted > STARTING
        if over and not self._complete():
            self.say("the job ended before the run did")
        return over

    def _submit(self, opened: Session, seen: Seen) -> None:
        """Once all sites are there, or enough of them and the time to gather is over."""
        now, sites = time.monotonic(), self.settings.sites
        since, before = self.gathering or (now, None)
        there = [site for site in sites if site in seen.sites]
        if len(there) == len(sites) or (len(there) >= self.settings.needed and now > since + self.gather):
            self.job = str(opened.submit_job(str(write_job(self.jobs, self.settings))))
            self.submitted, self.listed, self.gathering = time.monotonic(), False, None
            self.asked, self.worked = set(there), set()
            self.say(f"submitted with {', '.join(there)}")
            return
        if there != before:
            self.say(f"waiting for {', '.join(site for site in sites if site not in there)}")
        self.gathering = since, there
        self._check_patience(f"the sites that answer are too few ({', '.join(there) or 'none'})")

    def _told(self) -> dict[str, Any]:
        """What the coordinator says of our job; nothing where it speaks of an earlier one."""
        status = read_status(self.folder) or {}
        return status if status.get("job") == self.job else {}

    def _complete(self) -> bool:
        status = read_status(self.folder) or {}
        if status.get("status") == "complete":
            return True
        if (self.folder / sessions.STOP).exists():
            raise Stopped(
                f"Run {self.settings.run} was stopped; the same command goes on from its last complete round."
            )
        if self._told().get("status") == "failed":
            raise RunFailed(str(status.get("sentence")))
        mark = "/".join(str(status.get(name)) for name in ("job", "status", "stage", "round"))
        if mark != self.mark:
            self.mark, self.moved = mark, time.monotonic()
        return False

    def _check_patience(self, what: str) -> None:
        if time.monotonic() - self.moved > self.patience:
            raise RunFailed(f"The run has not moved for {self.patience:g} s: {what}. It can be submitted again.")
