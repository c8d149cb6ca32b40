"""The operator's hand on a federation: logging in, who is there, which jobs there are, stopping a run, staying with one.

NVFlare does not resume a job whose server was killed, aborts one whose worker died, and does not let a restarted site back
into a running one.  `Supervisor` does all three: it submits the same run again, which goes on from its last complete round.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.hci.proto import MetaStatusValue

from fedbilevel import storage
from fedbilevel.federation.nvflare.job import RUNS, read_twins, write_job
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
TWIN_SECONDS = 120.0
"""How long a site counts as there twice after that was last seen."""
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
    """What the server says: the jobs that really run, and for every site that answers the jobs it works on.  It was asked for
    the jobs at ``at``; the sites' answers may have taken long."""

    jobs: tuple[str, ...]
    sites: dict[str, tuple[str, ...]]
    at: float = field(default_factory=lambda: time.monotonic(), compare=False)


def look(opened: Session) -> Seen:
    asked = time.monotonic()
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
        # A site that answers with an error, or not at all, says nothing about what it is working on.
        if "job_id" in answer or answer.get("status") == MetaStatusValue.NO_JOBS:
            jobs = [answer["job_id"]] if "job_id" in answer else []
            sites[answer["client_name"]] = (*sites.get(answer["client_name"], ()), *jobs)
    return Seen(tuple(job.job_id for job in info.job_info), sites, asked)


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


def twins(kits: Kits) -> set[str]:
    """Sites whose kits are in use twice."""
    now = time.time()
    return {site for site, seen in read_twins(kits.server).items() if now - seen < TWIN_SECONDS}


def end_jobs(opened: Session, run: str) -> list[str]:
    """End every job of a run, those that wait for their start too; which there were."""
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
    return alive


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
        return bool(end_jobs(opened, run)) or watched


STARTING = 20.0
"""Seconds a job may be called running before its worker is listed."""
PAUSE, LONGEST_PAUSE = 5.0, 120.0
"""Seconds before something is tried a third time; twice as long every further time, until it is the longest."""
STEADY = 60.0
"""Seconds after which a site that has stayed with the run counts as one that never left it."""
SUBMISSION = "submission.json"
"""What is being submitted, in the run's folder until the server has said which job it became."""
FULL = (errno.ENOSPC, errno.EDQUOT)
LEAST_FREE = 1 << 20
"""Bytes; with fewer a run cannot go on."""


def pause(times: int) -> float:
    """Seconds to wait after something has failed so many times: none at first."""
    return 0.0 if times < 2 else min(PAUSE * 2.0 ** (times - 2), LONGEST_PAUSE)


@dataclass
class Supervisor:
    """Submits a run and stays with it until it is complete, submitting it again whenever a fault has ended its job or a
    site that was away is back.  A job of the run that is at work already is taken up.

    A site that leaves the run again and again is named and left out for longer and longer; so are pauses between jobs in which
    no round was done.

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
    mark: tuple[Any, ...] = ()
    """Where the run stands: stage and round..."""
    moved: float = field(default_factory=lambda: time.monotonic())
    """...and when that last changed."""
    job: str | None = None
    ours: set[str] = field(default_factory=set)
    """All jobs that this supervisor has submitted."""
    listed: bool = False
    """Whether the server has listed the job's worker..."""
    running: float | None = None
    """...and since when it has called the job running without that."""
    asked: set[str] = field(default_factory=set)
    """The sites the job was submitted with..."""
    worked: dict[str, float] = field(default_factory=dict)
    """...those seen working on it, since when..."""
    left: set[str] = field(default_factory=set)
    """...and those that have left it."""
    falls: dict[str, tuple[int, float]] = field(default_factory=dict)
    """How often a site has left the run, and when last."""
    begun: tuple[Any, ...] = ()
    """Where the run stood when the job was submitted..."""
    fruitless: int = 0
    """...and how many jobs have ended there since it moved..."""
    again: float = 0.0
    """...and when to submit the next one."""
    twins: set[str] = field(default_factory=set)
    """Sites that were said to be there twice."""
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
                if isinstance(error, OSError) and error.errno in FULL:
                    raise RunFailed(f"{error}: free space; the same command goes on.") from error
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
            self.begun, self.asked = self.mark, set(status.get("sites", self.settings.sites))
            self.say("the run is at work already; watching it")

    def _attend(self, opened: Session, seen: Seen) -> None:
        """One look: submit where no job of ours lives, and call back those who can take part again."""
        self._notice_twins()
        if self.job is not None and self._is_over(opened, seen):
            self.job = None
            self.fruitless = self.fruitless + 1 if self.mark == self.begun else 0
            self.again = time.monotonic() + pause(self.fruitless)
        if self.job is None:
            if not self._complete():  # it may have been completed since the last look
                self._submit(opened, seen)
            return
        now = time.monotonic()
        working = {site for site, jobs in seen.sites.items() if self.job in jobs}
        self.worked = dict.fromkeys(working, now) | self.worked
        for site in [site for site in working & self.falls.keys() - self.left if now - self.worked[site] > STEADY]:
            del self.falls[site]
        idle = {site for site in self.settings.sites if site in seen.sites} - working
        for site in sorted(idle & self.worked.keys() - self.left):
            self._leaves(site)
        # A site that was asked and never worked has declined; calling it again would change nothing.
        back = sorted(
            site for site in idle if (site in self.left or site not in self.asked) and not self._resting(site)
        )
        if back and self._told().get("status") == "running":
            self.say(f"{', '.join(back)} can take part again")
            opened.abort_job(self.job)
            self.job = None
        self._check_patience("nothing has moved")

    def _leaves(self, site: str) -> None:
        """A site has left the job, by a fault of its own."""
        self.left.add(site)
        times = self.falls.get(site, (0, 0.0))[0] + 1
        self.falls[site] = times, time.monotonic()
        if times > 1:
            self.say(f"{site} has left the run {times} times; it is called again in {pause(times):g} s")

    def _resting(self, site: str) -> bool:
        times, last = self.falls.get(site, (0, 0.0))
        return time.monotonic() < last + pause(times)

    def _is_over(self, opened: Session, seen: Seen) -> bool:
        assert self.job is not None
        told = self._told()
        if told.get("status") in ("stopped", "waiting"):
            self.say(told["sentence"])
            for site in told.get("missing", ()):
                if site in self.worked and site not in self.left:
                    self._leaves(site)
            # NVFlare would keep the place of a job for minutes, waiting for a word of a site that is gone.
            self._end(opened)
            return True
        if self.job in seen.jobs:
            self.listed = True
            return False
        status = opened.get_job_status(self.job)
        if status in WAITING:
            return False
        if status == "RUNNING" and not self.listed:
            # A server that was killed takes its job for running for ever; a new one for a moment only.
            self.running = self.running or time.monotonic()
            if seen.at - self.running <= STARTING:
                return False
        if not self._complete():
            self.say("the job ended before the run did")
        self._end(opened)
        return True

    def _end(self, opened: Session) -> None:
        with contextlib.suppress(Exception):  # it may be over
            opened.abort_job(self.job)

    def _submit(self, opened: Session, seen: Seen) -> None:
        """Once all sites are there, or enough of them and the time to gather is over."""
        now, sites = time.monotonic(), self.settings.sites
        if self.fruitless > 1 and shutil.disk_usage(self.folder).free < LEAST_FREE:
            raise RunFailed(f"The disk of {self.folder} is full: free space; the same command goes on.")
        if now < self.again:
            self._check_patience(f"{self.fruitless} jobs ended before a round was done")
            return
        since, before = self.gathering or (now, None)
        resting = [site for site in sites if self._resting(site)]
        there = [site for site in sites if site in seen.sites and site not in resting]
        missing = len(sites) - len(there)
        if len(there) >= self.settings.needed and (missing == len(resting) or now > since + self.gather):
            self.job = self._hand_in(opened, resting)
            self.listed, self.running, self.gathering, self.begun = False, None, None, self.mark
            self.asked, self.worked, self.left = set(there), {}, set()
            self.say(f"submitted with {', '.join(there)}")
            return
        if there != before:
            self.say(f"waiting for {', '.join(site for site in sites if site not in there)}")
        self.gathering = since, there
        self._check_patience(f"the sites that answer are too few ({', '.join(there) or 'none'})")

    def _hand_in(self, opened: Session, without: list[str]) -> str:
        """The job of a new submission.  What is submitted is written down first, with a token by which the server knows it
        again: where its answer is lost, the same is submitted once more, and stays one job."""
        file, settings = self.folder / SUBMISSION, self.settings.to_json()
        begun = json.loads(file.read_text()) if file.exists() else {}
        if begun.get("settings") != settings:
            if {*end_jobs(opened, self.settings.run)} - self.ours:
                self.say("an earlier job of the run was ended")
            begun = {"token": uuid.uuid4().hex, "settings": settings, "without": without}
            storage.write_json(file, begun)
        job = write_job(self.jobs, self.settings, begun["without"])
        try:
            made = str(opened.submit_job(str(job), submit_token=begun["token"]))
        except Exception as error:
            if "token" in str(error):  # the server knows it for something else
                file.unlink()
            raise
        file.unlink()
        self.ours.add(made)
        return made

    def _notice_twins(self) -> None:
        there = twins(self.kits)
        for site in sorted(there & {*self.settings.sites} - self.twins):
            self.say(
                f"{site} is there twice: a copy of its kit is in use, and only one of the two is heard. Stop the other."
            )
        self.twins |= there

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
        if status.get("status") == "running" and (mark := (status.get("stage"), status.get("round"))) != self.mark:
            self.mark, self.moved = mark, time.monotonic()
        return False

    def _check_patience(self, what: str) -> None:
        if time.monotonic() - self.moved > self.patience:
            often = [f"{site} has left it {times} times" for site, (times, _) in self.falls.items() if times > 1]
            what = "; ".join([what, *often])
            raise RunFailed(f"The run has not moved for {self.patience:g} s: {what}. It can be submitted again.")
