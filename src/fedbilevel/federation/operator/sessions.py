"""The operator's hand on a federation: logging in, who is there, which jobs there are, stopping a run, staying with one.

NVFlare does not resume a job whose server was killed, aborts one whose worker died, and does not let a restarted site back
into a running one.  `Supervisor` does all three: it submits the same run again, which goes on from its last complete round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session

from fedbilevel import storage
from fedbilevel.federation.nvflare.job import RUNS, write_job
from fedbilevel.federation.operator.kits import Kits
from fedbilevel.federation.protocol.policy import read_policy
from fedbilevel.federation.protocol.record import held, read_status
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed, Stopped

POLL = 0.5
"""Seconds between two looks at a run."""
MESSAGE_SECONDS = 20.0
"""How long the server may take to answer; with NVFlare's 5 s a busy machine looks like one that is down."""
LOOK_SECONDS = 3.0
"""How long the sites have to say what they are working on."""
LOGOUT_SECONDS = 2.0
WAITING = ("SUBMITTED", "APPROVED", "DISPATCHED")
"""What NVFlare calls jobs that will start by themselves."""
WATCH = "watch"
"""Held in a run's folder by the one `submit` that watches the run."""
STOP = "stop"
"""Lies in a run's folder when somebody stopped the run on purpose; the next submission takes it away."""
Say = Callable[[str], None]


class NoServer(ConnectionError):
    """The coordinator's server cannot be reached, or does not let this person in."""


@contextlib.contextmanager
def session(kits: Kits, seconds: float = 10.0) -> Iterator[Session]:
    """An operator's session, always closed: an open one keeps Python alive.

    ``seconds``: how long to try to connect; a server that took the connection has ``MESSAGE_SECONDS`` to answer.
    """
    made = Session(kits.user, str(kits.admin))
    made.api.auto_login_max_tries = 1
    made.api.authenticate_msg_timeout = MESSAGE_SECONDS
    made.set_timeout(MESSAGE_SECONDS)
    try:
        try:
            made.try_connect(seconds)
        except Exception as error:  # NVFlare raises many kinds when its server is gone
            reason = " ".join(str(error).split())[:160]
            raise NoServer(f"The server does not answer {kits.user} ({reason}).") from error
        yield made
    finally:
        with contextlib.suppress(Exception):
            made.set_timeout(LOGOUT_SECONDS)
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
        opened.set_timeout(LOOK_SECONDS)
        try:
            told = opened.get_client_job_status() or []
        except ConnectionError:
            # The server waits for all of them, and one that is cut off makes its answer too late: ask one by one.
            for client in info.client_info:
                with contextlib.suppress(ConnectionError):
                    told += opened.get_client_job_status([client.name]) or []
        finally:
            opened.set_timeout(MESSAGE_SECONDS)
    sites: dict[str, tuple[str, ...]] = {}
    for answer in told:
        if answer.get("status") != "no_reply":
            jobs = [answer["job_id"]] if "job_id" in answer else []
            sites[answer["client_name"]] = (*sites.get(answer["client_name"], ()), *jobs)
    return Seen(tuple(job.job_id for job in info.job_info), sites)


def wait_for_sites(kits: Kits, sites: Sequence[str], seconds: float) -> list[str]:
    """Wait until ``sites`` answer; those that do when the time is over."""
    end = time.monotonic() + seconds
    there: list[str] = []
    while time.monotonic() < end:
        with contextlib.suppress(Exception), session(kits) as opened:
            while time.monotonic() < end:
                seen = look(opened).sites
                there = [site for site in sites if site in seen]
                if len(there) == len(sites):
                    return there
                time.sleep(POLL)
        time.sleep(POLL)
    return there


def disable(kits: Kits, site: str) -> None:
    """A running server drops the site and does not register it again."""
    with session(kits) as opened:
        opened.disable_client(site)


def run_folder(kits: Kits, run: str) -> Path:
    """Where the coordinator keeps a run: on the machine whose kit this is."""
    policy = read_policy(kits.server / "local")
    return (policy.folder or kits.server / RUNS) / run


def end_jobs(opened: Session, run: str) -> int:
    """End every job of a run, those that wait for their start too; how many there were."""
    running = {job.job_id for job in opened.get_system_info().job_info}
    # A server that was killed takes the jobs it had for running for ever.
    alive = [
        about["job_id"]
        for about in opened.list_jobs(name_prefix=run)
        if about.get("job_name") == run and (about["job_id"] in running or about.get("status") in WAITING)
    ]
    for job in alive:
        with contextlib.suppress(Exception):  # it may end by itself meanwhile
            opened.abort_job(job)
    return len(alive)


def stop_run(kits: Kits, run: str) -> bool:
    """Stop a run on purpose: its job ends, and a `submit` that watches it does not start it again.

    False where nothing was at work on it.  It can be submitted again, and goes on from its last complete round.
    """
    folder = run_folder(kits, run)
    if read_status(folder) is None and not storage.is_locked(folder / WATCH):
        raise ValueError(f"There is no run {run!r} in {folder.parent}.")
    watched = storage.is_locked(folder / WATCH)
    (folder / STOP).touch()
    with session(kits) as opened:
        return end_jobs(opened, run) > 0 or watched


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
        self.folder = run_folder(self.kits, run)
        self.folder.mkdir(parents=True, exist_ok=True)
        with held(
            self.folder / WATCH,
            0.0,
            f"Run {run} is being watched already, by another `submit`: leave it to that.",
        ):
            (self.folder / STOP).unlink(missing_ok=True)
            self._watch()
        return self.folder

    def _watch(self) -> None:
        unreachable, begun = False, False
        while not (self._complete() or self.stop()):
            try:
                with session(self.kits) as opened:
                    if unreachable:
                        self.say("the server answers again")
                    unreachable = False
                    while not (self._complete() or self.stop()):
                        seen = look(opened)
                        if not begun:
                            self._take_up(opened, seen)
                            begun = True
                        self._attend(opened, seen)
                        time.sleep(POLL)
            except (RunFailed, Stopped):
                raise
            except Exception as error:  # NVFlare raises many kinds when its server is gone
                if not unreachable:
                    self.say("the server does not answer; waiting for it")
                unreachable, self.gathering = True, None
                self._check_patience(f"the server cannot be reached ({type(error).__name__}: {error})")
                time.sleep(POLL)

    def _take_up(self, opened: Session, seen: Seen) -> None:
        """A submission that was killed leaves its job at work: go on with it if it is the same, and else end it."""
        status = read_status(self.folder) or {}
        file = self.folder / "settings.json"
        same = file.exists() and file.read_text() == self.settings.to_json()
        if same and status.get("status") == "running" and status.get("job") in seen.jobs:
            self.job, self.listed = str(status["job"]), True
            self.submitted, self.asked = time.monotonic(), set(status.get("sites", self.settings.sites))
            self.say("the run is at work already; watching it")
        elif end_jobs(opened, self.settings.run):
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
        if status in WAITING:
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
        if (self.folder / STOP).exists():
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
