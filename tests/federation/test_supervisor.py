"""Staying with a run, against a server that is made up: what `Supervisor` does at every turn."""

import contextlib
import errno
import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")

from fedbilevel import storage
from fedbilevel.federation.operator import sessions
from fedbilevel.federation.operator.kits import Kits
from fedbilevel.federation.operator.sessions import STOP, WATCH, NoServer, Seen, Supervisor, end_jobs, look, stop_run
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed, Stopped

SITES = ("site-1", "site-2", "site-3")
SETTINGS = JobSettings("run", "fair", SITES, min_sites=2)


class Server:
    """A server whose story is told: ``turns`` are called one after the other at every look and say what is seen."""

    def __init__(self, folder, *turns):
        self.folder, self.turns = folder, list(turns)
        self.submitted, self.aborted, self.reached = [], [], True
        self.tokens, self.deployed, self.lost = [], [], 0

    def submit_job(self, path, submit_token):
        """A token that was seen before is the job it was; ``lost`` answers do not arrive."""
        meta = json.loads((Path(path) / "meta.json").read_text())
        if submit_token not in self.tokens:
            self.tokens.append(submit_token)
            self.deployed.append(meta["deploy_map"]["app"][1:])
            self.submitted.append(path)
        if self.lost:
            self.lost -= 1
            raise ConnectionError("no reply in time")
        return f"job-{self.tokens.index(submit_token) + 1}"

    def abort_job(self, job):
        self.aborted.append(job)

    def get_job_status(self, job):
        return "RUNNING"

    def tell(self, status, job=None, **more):
        told = {"status": status, "job": job or f"job-{len(self.submitted)}", "sentence": "so it is", **more}
        (self.folder / "status.json").write_text(json.dumps(told))

    def look(self, opened):
        return self.turns.pop(0)(self)


def everybody(job=None):
    return dict.fromkeys(SITES, () if job is None else (job,))


@pytest.fixture
def told(tmp_path, monkeypatch):
    """(kits, run folder, a function that plays a story and returns what was said)."""
    kits = Kits(tmp_path / "server", tmp_path / "admin", {}, "ann")
    folder = tmp_path / "server/fedbilevel-runs/run"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sessions, "POLL", 0.0)
    lines = []

    def play(server, settings=SETTINGS, ended=(), **options):
        @contextlib.contextmanager
        def session(kits):
            if not server.reached:
                raise NoServer("The server does not answer ann.")
            yield server

        monkeypatch.setattr(sessions, "session", session)
        monkeypatch.setattr(sessions, "look", server.look)
        monkeypatch.setattr(sessions, "end_jobs", lambda opened, run: ended)
        Supervisor(kits, settings, tmp_path / "jobs", lines.append, **options).run()
        assert server.turns == []
        return lines

    return folder, play, lines


def seen(jobs=(), sites=None, status=None, **more):
    """A turn: what the server says, after the coordinator has written ``status``."""

    def turn(server):
        if status is not None:
            server.tell(*status, **more)
        return Seen(tuple(jobs), everybody() if sites is None else sites)

    return turn


ALL = "submitted with site-1, site-2, site-3"
RUNNING, COMPLETE = ("running",), ("complete",)
TWO = {"site-1": ("job-1",), "site-2": ("job-1",)}
AGAIN = {"site-1": ("job-2",), "site-2": ("job-2",), "site-3": ()}
WORKING = seen(["job-1"], everybody("job-1"), RUNNING)
STORIES = {
    "submitted once and watched": (
        [seen(), WORKING, seen(["job-1"], everybody("job-1"), COMPLETE)], [ALL], [],
    ),
    "a site that is back is called and one that declined is not": (
        [
            seen(),
            WORKING,
            seen(["job-1"], TWO, RUNNING),  # site-3 is gone
            seen(["job-1"], {**TWO, "site-3": ()}, RUNNING),  # and back, without the job
            seen(),
            seen(["job-2"], AGAIN, RUNNING),
            seen(["job-2"], AGAIN, COMPLETE),
        ],
        [ALL, "site-3 can take part again", ALL], ["job-1"],
    ),
    "a job that was stopped is submitted again, its place at the server let go of": (
        [seen(), seen([], None, ("stopped",)), seen(["job-2"], None, COMPLETE)], [ALL, "so it is", ALL], ["job-1"],
    ),
    "a job that waits is submitted again, its place at the server let go of": (
        [seen(), seen([], None, ("waiting",)), seen(["job-2"], None, COMPLETE)], [ALL, "so it is", ALL], ["job-1"],
    ),
    "a job whose worker vanished is submitted again at once": (
        [seen(), seen(["job-1"], None, RUNNING), seen([]), seen([], None, COMPLETE)],
        [ALL, "the job ended before the run did", ALL], ["job-1"],
    ),
    "those who are missing are named and waited for": (
        [seen([], {"site-1": (), "site-2": ()}), seen([], {"site-1": (), "site-2": ()}), seen(), seen([], None, COMPLETE)],
        ["waiting for site-3", ALL], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_a_run_is_stayed_with(told, story):
    folder, play, _ = told
    turns, said, aborted = STORIES[story]
    server = Server(folder, *turns)
    assert play(server) == said
    assert (len(server.submitted), server.aborted) == (said.count(ALL), aborted)
    assert not storage.is_locked(folder / WATCH)


@pytest.fixture
def clock(monkeypatch):
    """The supervisor's clock, which a story moves."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(sessions.time, "monotonic", lambda: made.now)
    return made


def after(clock, seconds, turn):
    def later(server):
        clock.now += seconds
        return turn(server)

    return later


def test_a_site_that_leaves_again_and_again_is_left_out_for_longer_and_taken_back(told, clock):
    folder, play, _ = told
    gone = lambda job: {"site-1": (job,), "site-2": (job,), "site-3": ()}  # noqa: E731
    round_of = lambda number: {"stage": "model", "round": number}  # noqa: E731
    server = Server(
        folder,
        seen(), WORKING, seen(["job-1"], gone("job-1"), RUNNING, **round_of(1)),  # called back at once
        seen(), seen(["job-2"], everybody("job-2"), RUNNING, **round_of(2)),
        seen(["job-2"], gone("job-2"), RUNNING, **round_of(3)),  # and left to itself for a while
        after(clock, 4, seen(["job-2"], gone("job-2"), RUNNING, **round_of(4))),
        after(clock, 2, seen(["job-2"], gone("job-2"), RUNNING, **round_of(5))),
        seen(), seen(["job-3"], everybody("job-3"), RUNNING, **round_of(6)),
        seen(["job-3"], gone("job-3"), RUNNING, **round_of(7)),
        seen([], everybody()),  # the job ends meanwhile: another one, without that site
        seen(["job-4"], gone("job-4"), RUNNING, **round_of(8)),
        after(clock, 11, seen(["job-4"], gone("job-4"), RUNNING, **round_of(9))),
        seen(), seen(["job-5"], everybody("job-5"), RUNNING, **round_of(10)),
        after(clock, 61, seen(["job-5"], everybody("job-5"), RUNNING, **round_of(10))),  # it has behaved
        seen(["job-5"], gone("job-5"), RUNNING, **round_of(11)),  # so this is the first time
        seen(), seen(["job-6"], everybody("job-6"), COMPLETE),
    )  # fmt: skip
    back, two = "site-3 can take part again", "submitted with site-1, site-2"
    assert play(server) == [
        ALL, back, ALL, "site-3 has left the run 2 times; it is called again in 5 s", back, ALL,
        "site-3 has left the run 3 times; it is called again in 10 s", "the job ended before the run did", two,
        back, ALL, back, ALL,
    ]  # fmt: skip
    assert server.deployed[3] == ["site-1", "site-2"]
    assert all(sites == [*SITES] for number, sites in enumerate(server.deployed) if number != 3)


def test_jobs_that_do_nothing_are_not_submitted_without_end(told, clock):
    """A needed site leaves every job: pauses grow, the site is named, patience ends, though every job is a new one."""
    folder, play, lines = told
    times = []

    def turn(server):
        clock.now += 1.0
        job = f"job-{len(server.submitted)}"
        if len(times) < len(server.submitted):
            times.append(clock.now)
            return seen([job], everybody(job), RUNNING)(server)
        return (
            seen([], everybody(), ("waiting",), missing=["site-3"])(server)
            if server.submitted
            else Seen((), everybody())
        )

    with pytest.raises(
        RunFailed, match=r"has not moved for 200 s: .*; site-3 has left it \d times\. It can be submitted again"
    ):
        play(Server(folder, *[turn] * 1000), JobSettings("run", "fair", SITES), patience=200.0)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == sorted(gaps)
    assert len(times) <= 8
    assert "site-3 has left the run 4 times; it is called again in 20 s" in lines


@pytest.mark.parametrize("killed", [False, True])
def test_a_submission_whose_answer_is_lost_stays_one_job(told, killed):
    """``killed``: nobody asks again but another `submit`."""
    folder, play, _ = told
    server = Server(folder, seen())
    server.lost = 1
    if killed:
        with pytest.raises(RunFailed, match="cannot be reached"):
            play(server, patience=-1.0)
    server.turns += [seen(["job-1"], everybody()), seen(["job-1"], everybody("job-1"), ("complete", "job-1"))]
    assert play(server)[-1] == ALL
    assert len(server.submitted) == 1
    assert not (folder / sessions.SUBMISSION).exists()


def test_a_job_that_starts_late_is_waited_for_and_one_that_never_does_is_ended(told, clock, monkeypatch):
    folder, play, _ = told
    states = iter(["SUBMITTED"] * 2 + ["RUNNING"] * 3)
    monkeypatch.setattr(Server, "get_job_status", lambda server, job: next(states))
    late = [after(clock, 15, seen()) for _ in range(5)]  # 30 s in the queue, then 30 s without a worker
    server = Server(folder, seen(), *late, seen(["job-2"], everybody("job-2"), COMPLETE))
    assert play(server) == [ALL, "the job ended before the run did", ALL]
    assert server.aborted == ["job-1"]


def test_a_look_that_takes_long_does_not_end_a_job_that_has_just_started(told, clock):
    """The server is asked for its jobs first and for its sites then, which takes half a minute where they are starved."""
    folder, play, _ = told

    def starved(server):
        made = seen()(server)
        clock.now += 30
        return made

    server = Server(folder, seen(), seen(), starved, WORKING, seen(["job-1"], everybody("job-1"), COMPLETE))
    assert play(server) == [ALL]
    assert server.aborted == []


def test_a_full_disk_is_no_server_that_is_gone(told, monkeypatch):
    folder, play, lines = told

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "job")

    monkeypatch.setattr(sessions, "write_job", full)
    with pytest.raises(RunFailed, match="No space left on device: 'job': free space; the same command goes on"):
        play(Server(folder, seen()))
    assert lines == []


def test_a_site_that_is_there_twice_is_named(told):
    folder, play, _ = told
    (folder.parents[1] / "twins.json").write_text(
        json.dumps({"site-2": time.time(), "site-1": 0, "other": time.time()})
    )
    said = play(Server(folder, seen(), seen(["job-1"], everybody("job-1"), COMPLETE)))
    assert said == [
        "site-2 is there twice: a copy of its kit is in use, and only one of the two is heard. Stop the other.", ALL,
    ]  # fmt: skip


def test_a_job_that_is_at_work_is_taken_up(told):
    folder, play, _ = told
    server = Server(folder, seen(["old"], everybody("old")), seen(["old"], everybody("old"), ("complete", "old")))
    server.tell("running", "old", sites=list(SITES))
    (folder / "settings.json").write_text(SETTINGS.to_json())
    assert play(server) == ["the run is at work already; watching it"]
    assert server.submitted == []


def test_a_job_with_other_settings_is_ended_first(told):
    folder, play, _ = told
    server = Server(folder, seen(["old"], everybody("old")), seen(["job-1"], None, COMPLETE))
    server.tell("running", "old")
    (folder / "settings.json").write_text(JobSettings("run", "fair", SITES).to_json())
    assert play(server, ended=["old"]) == ["an earlier job of the run was ended", ALL]


def test_with_the_time_to_gather_over_enough_sites_will_do(told):
    folder, play, _ = told
    two = {"site-1": (), "site-2": ()}
    server = Server(folder, seen([], two), seen([], two, COMPLETE))
    assert play(server, gather=-1.0) == ["submitted with site-1, site-2"]


def test_a_server_that_is_gone_is_waited_for(told):
    folder, play, lines = told
    server = Server(folder)
    server.reached = False
    with pytest.raises(RunFailed, match=r"has not moved for -1 s: the server cannot be reached .*does not answer ann"):
        play(server, patience=-1.0)
    assert lines == ["the server does not answer; waiting for it"]


def test_a_run_stopped_on_purpose_is_left_alone(told):
    folder, play, _ = told

    def stopped(server):
        (folder / STOP).touch()
        return Seen((), everybody())

    server = Server(folder, seen(), stopped)
    with pytest.raises(Stopped, match="Run run was stopped; the same command goes on"):
        play(server)
    assert len(server.submitted) == 1
    play(Server(folder, seen(), seen([], None, COMPLETE)))
    assert not (folder / STOP).exists(), "submitting again is meant to go on"


def test_a_run_that_failed_says_why(told):
    folder, play, _ = told
    with pytest.raises(RunFailed, match="so it is"):
        play(Server(folder, seen(), seen(["job-1"], None, ("failed",))))


def test_only_one_watches_a_run(told):
    folder, play, _ = told
    with (
        storage.lock(folder / WATCH),
        pytest.raises(RunFailed, match="Run run is being watched already, by another `submit`"),
    ):
        play(Server(folder))


class Operator:
    """A session of an operator: jobs by (id, name, status), and sites that answer or do not."""

    def __init__(self, jobs=(), running=(), silent=()):
        self.jobs, self.running, self.silent, self.aborted, self.asked = jobs, running, silent, [], []

    def get_system_info(self):
        clients = [SimpleNamespace(name=site) for site in SITES]
        return SimpleNamespace(client_info=clients, job_info=[SimpleNamespace(job_id=job) for job in self.running])

    def list_jobs(self, name_prefix):
        return [
            {"job_id": job, "job_name": name, "status": status}
            for job, name, status in self.jobs
            if name.startswith(name_prefix)
        ]

    def abort_job(self, job):
        self.aborted.append(job)

    def set_timeout(self, seconds):
        self.seconds = seconds

    def get_client_job_status(self, names=SITES):
        self.asked.append(tuple(names))
        if set(names) & set(self.silent):
            raise ConnectionError("no reply in time")
        return [{"client_name": name, "job_id": "a"} for name in names]


def test_jobs_of_a_run_are_ended_and_no_others():
    opened = Operator(
        [("a", "run", "RUNNING"), ("b", "run", "SUBMITTED"), ("c", "run", "RUNNING"), ("d", "run-2", "SUBMITTED"),
         ("e", "run", "FINISHED:COMPLETED")],
        running=["a"],
    )  # fmt: skip
    assert end_jobs(opened, "run") == opened.aborted == ["a", "b"], "c is of a server that was killed"


def test_a_site_that_is_cut_off_does_not_hide_the_others():
    assert look(Operator(running=["a"])) == Seen(("a",), dict.fromkeys(SITES, ("a",)))
    opened = Operator(silent=["site-2"])
    assert look(opened).sites == {"site-1": ("a",), "site-3": ("a",)}
    assert opened.seconds == sessions.MESSAGE_SECONDS


def test_an_error_does_not_count_as_a_site_without_work():
    opened = Operator()
    opened.get_client_job_status = lambda names=SITES: [
        {"client_name": "site-1", "status": "error"}, {"client_name": "site-2", "status": "no_jobs"},
        {"client_name": "site-3", "status": "no_reply"},
    ]  # fmt: skip
    assert look(opened).sites == {"site-2": ()}


def test_stopping_a_run(tmp_path, monkeypatch):
    kits = Kits(tmp_path / "server", tmp_path / "admin", {}, "ann")
    folder = tmp_path / "server/fedbilevel-runs/run"
    with pytest.raises(ValueError, match="There is no run 'run' in "):
        stop_run(kits, "run")
    folder.mkdir(parents=True)
    (folder / "status.json").write_text('{"status": "stopped"}')
    opened = Operator()
    monkeypatch.setattr(sessions, "session", lambda kits: contextlib.nullcontext(opened))
    assert not stop_run(kits, "run")
    with storage.lock(folder / WATCH):
        assert stop_run(kits, "run"), "somebody watches it, who is told to stop"
    assert (folder / STOP).exists()
