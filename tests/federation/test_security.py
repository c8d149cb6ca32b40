"""Who is kept out, by real processes over mutual TLS while a run is in progress, which goes on unharmed.

The coordinator's server is hostile: its own rules allow everything, so whatever is refused the sites refuse.
"""

import json
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest

pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")

from fedbilevel.engines.stages import REASONS
from fedbilevel.federation.operator.kits import Roster, establish
from fedbilevel.federation.protocol.policy import FILE
from fedbilevel.federation.protocol.record import read_status
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.vault import read_arrays
from tests.federation import programs
from tests.federation.federation import LEAD, LONG, MEMBER, ROOT, SITES, wait_for
from tests.federation.hostile import (
    context_of,
    disguised,
    honest_job,
    job_for_column,
    job_for_few_patients,
    job_that_expands,
    job_that_includes,
    job_with_class,
    job_with_code,
    job_with_log_classes,
    lasting,
    let_in,
)

pytestmark = pytest.mark.federation

REFUSED = ["code", "class", "expands", "file", "url", "log"]
SECRET = "secret.conf"
READ = "local/resources.json"
"""A file of a site that NVFlare's own command could show."""
COLUMNS = ("age", "sex", "outcome")
ROUNDS = 100_000
"""More than the attacks can last: the run in progress is still in progress when they are over."""


@pytest.fixture(scope="module")
def in_progress(federation):
    """A run of two sites that nobody may disturb; the third offers a table with a column that jobs may not read."""
    table(federation.folder / "rows.csv")
    policy = federation.kits.sites["site-3"] / "local" / FILE
    before = policy.read_text()
    offered = f'[data]\ntable = "{federation.folder / "rows.csv"}"\ncolumns = {json.dumps(COLUMNS)}\n'
    federation.offer("site-3", offered + '[approve]\nauto = true\nschemas = ["any"]\n')
    arguments = {"algorithm": "fedbio", "rounds": ROUNDS, "pace": 0.3, "options": {"batch_size": 4, "local_steps": 2}}
    run = federation.supervise(JobSettings("victim", programs.HELD, SITES[:2], arguments, seed=1, double=True))
    run.reach(3)
    yield run
    federation.offer("site-3", before)
    if not run.ended:
        federation.order(stop="victim").outcome()


def table(file):
    rng = np.random.default_rng(0)
    rows = {
        "age": rng.integers(20, 60, 60),
        "sex": rng.choice(["f", "m"], 60),
        "outcome": rng.choice(["no", "yes"], 60),
    }
    pd.DataFrame({**rows, "secret": rng.integers(0, 9, 60)}).to_csv(file, index=False)


@pytest.fixture(scope="module")
def listener():
    """Somebody who waits for a site to call; ``calls`` are those that came."""

    class Listener(socketserver.TCPServer):
        def __init__(self):
            self.calls = []
            super().__init__(("127.0.0.1", 0), lambda *call: self.calls.append(call))
            self.port = self.server_address[1]

    with Listener() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def attempts(federation, in_progress, listener):
    """Everything that is tried through NVFlare's own protocol, by one process, while the run goes on."""
    kits, home = federation.kits, federation.folder
    foreign = establish(home / "foreign", Roster(SITES, port=federation.port, admin_port=federation.admin_port)).kits
    (home / SECRET).write_text('password = "stolen-from-a-file"\n')
    honest = {"honest": str(honest_job(home, "by-others"))}
    order = {
        "foreign": {"user": foreign.user, "kit": str(foreign.admin), "login": 5.0},
        "site as coordinator": {"user": kits.user, "kit": str(disguised(federation, kits.user)), "login": 5.0},
        "site under its own name": {
            "user": "site-1", "kit": str(disguised(federation, "site-1")), "jobs": honest,
            "read": ["site-2", READ], "abort": in_progress.status["job"],
        },
        "member": {
            "user": MEMBER, "kit": str(kits.admin.parent / MEMBER), "jobs": honest, "abort": in_progress.status["job"],
        },
        "lead": {
            "user": LEAD, "kit": str(kits.admin.parent / LEAD), "read": ["site-2", READ],
            "jobs": {"patients": str(job_for_few_patients(home))},
        },
        "coordinator": {
            "user": kits.user, "kit": str(kits.admin), "read": ["site-2", READ], "wait": REFUSED,
            "jobs": {
                "column": str(job_for_column(home)),
                "code": str(job_with_code(home)), "class": str(job_with_class(home)),
                "expands": str(job_that_expands(home)), "file": str(job_that_includes(home, f'file("{home / SECRET}")')),
                "url": str(job_that_includes(home, f'url("http://127.0.0.1:{listener.port}/stolen")')),
                "log": str(job_with_log_classes(home)),
            },
        },
    }  # fmt: skip
    before = in_progress.status["round"]
    spoken = subprocess.run(
        [sys.executable, "-m", "tests.federation.acting", json.dumps(order)],
        capture_output=True, text=True, timeout=2 * LONG, cwd=ROOT, check=True, env=federation.environment,
    )  # fmt: skip
    told = json.loads(spoken.stdout.splitlines()[-1])
    in_progress.reach(before + 1)
    return told


@pytest.mark.parametrize("which", ["port", "admin_port"])
def test_without_a_certificate_nobody_gets_in(federation, in_progress, which):
    port = getattr(federation, which)
    assert let_in(port, context_of(federation.kits.sites["site-1"]), seconds=2), "not even a site is let in"
    assert not let_in(port, context_of(None))
    assert not let_in(port, None)


def test_processes_listen_on_loopback_only(federation, in_progress):
    """The server's name is a loopback name; workers speak to the process that started them."""
    for name in ("server", *SITES):
        listening = [
            connection.laddr.ip
            for process in federation.family(name)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert set(listening) <= {"127.0.0.1", "::1"}, name
        assert listening or name in SITES, name


@pytest.mark.parametrize("which", ["port", "admin_port"])
def test_a_foreign_certificate_is_refused(federation, attempts, which):
    stranger = federation.folder / "foreign/kits/site-1"
    assert not let_in(getattr(federation, which), context_of(stranger))
    assert attempts["foreign"].keys() == {"login"}
    assert attempts["foreign"]["login"] != "accepted"


def test_a_certificate_lets_its_site_in_until_it_ends(federation, in_progress):
    """By the server itself, whatever the site's own command says of the date."""
    valid, ended = (context_of(lasting(federation, "site-1", days)) for days in (1, -1))
    for port in (federation.port, federation.admin_port):
        assert let_in(port, valid, seconds=2)
        assert not let_in(port, ended)


def test_a_site_cannot_act_as_coordinator(federation, attempts):
    assert attempts["site as coordinator"].keys() == {"login"}, "a site took the coordinator's name"
    assert attempts["site as coordinator"]["login"] != "accepted"
    # Under its own name NVFlare lets it log in, without a role and so without any right.
    told = attempts["site under its own name"]
    assert told["read"] == "invalid_request"
    for action in ("abort", "honest"):
        assert "not authorized" in told.get(action, "not authorized"), told
    assert told["honest"] != "accepted"
    assert not (federation.kits.server / "fedbilevel-runs/by-others").exists()


def test_a_member_may_look_but_not_submit_or_stop(federation, attempts):
    told = attempts["member"]
    assert told["login"] == "accepted"
    assert "not authorized for 'submit_job'" in told["honest"]
    assert "not authorized" in told["abort"], told
    assert not (federation.kits.server / "fedbilevel-runs/by-others").exists()


@pytest.mark.parametrize("what", REFUSED)
def test_a_job_that_is_not_of_our_making_is_refused_before_it_is_read(federation, attempts, listener, what):
    """Code, classes, variables of the environment, files and addresses in HOCON, classes that log: nothing is run, made,
    expanded, read, called; and the site says so in its own words."""
    told = attempts["coordinator"]
    assert told[what] == "accepted", "the hostile server should have let it pass"
    assert "COMPLETED" not in told[f"end of {what}"]
    assert REASONS["job"] in told[f"end of {what}"]
    assert not list(federation.folder.glob("mark-*"))
    assert listener.calls == []
    runs = federation.kits.server / "fedbilevel-runs"
    heard = told[f"end of {what}"] + "".join(
        file.read_text(errors="replace")
        for file in runs.rglob("*")
        if file.is_file() and file.suffix in (".txt", ".json")
    )
    assert "stolen" not in heard
    assert f'"{Path.home()}"' not in heard


def test_workers_see_little_of_the_environment(federation, in_progress):
    """Whoever started the site's process may have had passwords in the environment."""
    for process in federation.family("site-1"):
        names = process.environ().keys()
        assert not {"FEDBILEVEL_TEST_PASSWORD", "NVIDIA_API_KEY", "AWS_SECRET_ACCESS_KEY"} & set(names)
        assert {"PATH", "PYTHONSAFEPATH", "MALLOC_ARENA_MAX"} <= names


@pytest.mark.parametrize(
    ("who", "what", "run", "reason"),
    [("coordinator", "column", "curious", "columns"), ("lead", "patients", "patients", "rows")],
)
def test_a_schema_beyond_the_policy_is_refused_in_the_sites_words(federation, attempts, who, what, run, reason):
    """One column more than is offered; rows picked out by calling the others missing, fewer than the site tells of."""
    assert attempts[who][what] == "accepted"
    folder = federation.kits.server / "fedbilevel-runs" / run
    wait_for(lambda: (read_status(folder) or {}).get("status") == "failed")
    status = read_status(folder)
    assert REASONS[reason] in status["sentence"]
    assert "secret" not in status["sentence"]
    assert not list(folder.glob("answer*"))


@pytest.mark.parametrize("who", ["coordinator", "lead"])
def test_files_of_a_site_cannot_be_read_from_afar(attempts, who):
    told = attempts[who]["read"]
    assert "allow_list" not in told
    assert "invalid_request" in told, f"the site does not know the command, whatever the server allows: {told}"


def test_the_run_in_progress_was_not_harmed(attempts, in_progress):
    """The first attempt is still the only one, and every exchange was answered, before and after."""
    in_progress.reach(in_progress.status["round"] + 3)
    assert in_progress.status["away"] == []
    _, about = read_arrays(in_progress.folder / "state.npz")
    assert about["progress"]["attempt"] == 1
    exchanges = pd.read_csv(in_progress.folder / "exchanges.csv", on_bad_lines="skip")
    assert set(exchanges["outcome"].iloc[:-2]) == {"answered"}
    assert "refused" not in in_progress.log


def test_a_run_that_is_stopped_stays_stopped(federation, in_progress):
    """Whoever watches it is told so and does not start it again; it could go on where it was."""
    assert federation.order(stop="victim").outcome() == "done"
    assert in_progress.outcome().startswith("Stopped: Run victim was stopped; the same command goes on")
    wait_for(lambda: in_progress.status["status"] != "running")
    assert in_progress.status["status"] == "stopped"
    assert len([line for line in in_progress.said if line.startswith("submitted")]) == 1
