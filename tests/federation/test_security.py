"""Who is kept out, by real processes over mutual TLS while a run is in progress, which goes on unharmed.

The coordinator's server is hostile: its own rules allow everything, so whatever is refused the sites refuse.
"""

import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")

from fedbilevel.federation.operator.kits import Roster, establish
from fedbilevel.federation.protocol.policy import FILE
from fedbilevel.federation.protocol.record import read_status
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.vault import read_arrays
from tests.federation import programs
from tests.federation.federation import LONG, MEMBER, ROOT, SITES, wait_for
from tests.federation.hostile import (
    context_of,
    disguised,
    honest_job,
    job_for_column,
    job_with_class,
    job_with_code,
    let_in,
)

pytestmark = pytest.mark.federation

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
    federation.offer("site-3", f'[data]\ntable = "{federation.folder / "rows.csv"}"\ncolumns = {json.dumps(COLUMNS)}\n')
    arguments = {"algorithm": "fedbio", "rounds": ROUNDS, "options": {"batch_size": 4, "local_steps": 2}}
    run = federation.supervise(JobSettings("victim", programs.FUNCTION, SITES[:2], arguments, seed=1, double=True))
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
def attempts(federation, in_progress):
    """Everything that is tried through NVFlare's own protocol, by one process, while the run goes on."""
    kits, home = federation.kits, federation.folder
    foreign = establish(home / "foreign", Roster(SITES, port=federation.port, admin_port=federation.admin_port)).kits
    honest = {"honest": str(honest_job(home, "by-others"))}
    order = {
        "foreign": {"user": foreign.user, "kit": str(foreign.admin)},
        "site as coordinator": {"user": kits.user, "kit": str(disguised(federation, kits.user))},
        "site under its own name": {
            "user": "site-1", "kit": str(disguised(federation, "site-1")), "jobs": honest,
            "read": ["site-2", READ], "abort": in_progress.status["job"],
        },
        "member": {
            "user": MEMBER, "kit": str(kits.admin.parent / MEMBER), "jobs": honest, "abort": in_progress.status["job"],
        },
        "coordinator": {
            "user": kits.user, "kit": str(kits.admin), "read": ["site-2", READ], "wait": ["code", "class"],
            "jobs": {
                "column": str(job_for_column(home)), "code": str(job_with_code(home)), "class": str(job_with_class(home)),
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
    assert let_in(port, context_of(federation.kits.sites["site-1"])), "not even a site is let in"
    assert not let_in(port, context_of(None))
    assert not let_in(port, None)


@pytest.mark.parametrize("which", ["port", "admin_port"])
def test_a_foreign_certificate_is_refused(federation, attempts, which):
    stranger = federation.folder / "foreign/kits/site-1"
    assert not let_in(getattr(federation, which), context_of(stranger))
    assert attempts["foreign"].keys() == {"login"}
    assert attempts["foreign"]["login"] != "accepted"


def test_a_site_cannot_act_as_coordinator(federation, attempts):
    assert attempts["site as coordinator"].keys() == {"login"}, "a site took the coordinator's name"
    assert attempts["site as coordinator"]["login"] != "accepted"
    # Under its own name NVFlare lets it log in, without a role and so without any right.
    told = attempts["site under its own name"]
    for action in ("read", "abort", "honest"):
        assert "not authorized" in told.get(action, "not authorized"), told
    assert told["honest"] != "accepted"
    assert not (federation.kits.server / "fedbilevel-runs/by-others").exists()


def test_a_member_may_look_but_not_submit_or_stop(federation, attempts):
    told = attempts["member"]
    assert told["login"] == "accepted"
    assert "not authorized for 'submit_job'" in told["honest"]
    assert "not authorized" in told["abort"], told
    assert not (federation.kits.server / "fedbilevel-runs/by-others").exists()


def test_code_in_a_job_is_not_run_by_a_site(federation, attempts):
    told = attempts["coordinator"]
    assert told["code"] == "accepted", "the hostile server should have let it pass"
    assert "COMPLETED" not in told["end of code"]
    assert "BYOC not permitted" in told["end of code"]
    assert not list(federation.folder.glob("mark-*"))


def test_a_class_that_is_not_listed_is_not_made(federation, attempts):
    told = attempts["coordinator"]
    assert told["class"] == "accepted"
    assert "COMPLETED" not in told["end of class"]
    assert re.search(r"NPTrainer' at config path .* is not in allow_list", logs(federation))


def logs(federation):
    """All that the sites wrote down, their job's logs included."""
    return "\n".join(
        file.read_text(errors="replace") for kit in federation.kits.sites.values() for file in kit.rglob("*log*.txt")
    )


def test_a_column_outside_the_policy_is_refused_by_name(federation, attempts):
    assert attempts["coordinator"]["column"] == "accepted"
    folder = federation.kits.server / "fedbilevel-runs/curious"
    wait_for(lambda: (read_status(folder) or {}).get("status") == "failed")
    status = read_status(folder)
    assert "The job asks for the column 'secret', which this site does not offer." in status["sentence"]


def test_files_of_a_site_cannot_be_read_from_afar(attempts):
    told = attempts["coordinator"]["read"]
    assert "allow_list" not in told
    assert "not authorized" in told, told


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
