"""The operator's hand on a federation: logging in, who is there, which jobs there are, stopping a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvflare.fuel.flare_api.flare_api import Session

from fedbilevel import storage
from fedbilevel.federation.nvflare.job import RUNS
from fedbilevel.federation.protocol.policy import read_policy
from fedbilevel.federation.protocol.record import read_status

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


@dataclass(frozen=True)
class Kits:
    """Where the kits are: the server's, the one of the person ``user`` who operates, and those of the sites by name."""

    server: Path
    admin: Path
    sites: dict[str, Path]
    user: str


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
