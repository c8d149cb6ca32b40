"""Staying with a run, against a server that is made up: what `Supervisor` does at every turn."""

import contextlib
import json
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

    def submit_job(self, path):
        self.submitted.append(path)
        return f"job-{len(self.submitted)}"

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

    def play(server, settings=SETTINGS, ended=0, **options):
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


def seen(jobs=(), sites=None, status=None):
    """A turn: what the server says, after the coordinator has written ``status``."""

    def turn(server):
        if status is not None:
            server.tell(*status)
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
        [ALL, "the job ended before the run did", ALL], [],
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
    assert play(server, ended=1) == ["an earlier job of the run was ended", ALL]


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
    assert end_jobs(opened, "run") == 2
    assert opened.aborted == ["a", "b"], "c is of a server that was killed"


def test_a_site_that_is_cut_off_does_not_hide_the_others():
    assert look(Operator(running=["a"])) == Seen(("a",), dict.fromkeys(SITES, ("a",)))
    opened = Operator(silent=["site-2"])
    assert look(opened).sites == {"site-1": ("a",), "site-3": ("a",)}
    assert opened.seconds == sessions.MESSAGE_SECONDS


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
