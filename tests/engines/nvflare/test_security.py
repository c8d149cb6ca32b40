"""Who is kept out, by real processes over mutual TLS while a run is in progress, which goes on unharmed.

The coordinator's server is hostile here: its own rules allow everything, so whatever is refused the sites refuse.
"""

import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")

from fedbilevel.datasets.schema import Column, Schema
from fedbilevel.datasets.schema_toml import text
from fedbilevel.engines.nvflare.job import write_job
from fedbilevel.engines.nvflare.policy import FILE
from fedbilevel.engines.nvflare.provision import establish, provision
from fedbilevel.engines.nvflare.record import read_status
from fedbilevel.engines.nvflare.roster import read_roster
from fedbilevel.engines.nvflare.settings import JobSettings
from fedbilevel.engines.nvflare.vault import read_arrays
from tests.engines.nvflare import programs
from tests.engines.nvflare.federation import ROOT, SITES, Federation

pytestmark = pytest.mark.federation

MEMBER = "member@example.org"
READ = "local/resources.json"
"""A file of a site that NVFlare's own command could show."""
COLUMNS = ("age", "sex", "outcome")
ROUNDS = 100_000
"""More than the attacks can last: the run in progress is still in progress when they are over."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("security"))
    roster = read_roster(made.folder / "kits")
    establish(made.folder / "kits", type(roster)(roster.sites, roster.server, roster.port, roster.admin_port,
                                                 people=((MEMBER, "member"),)))  # fmt: skip
    table(made.folder / "rows.csv")
    # The third site offers a table with one column that jobs may not read.
    (made.kits.sites["site-3"] / "local" / FILE).write_text(
        f'[data]\ntable = "{made.folder / "rows.csv"}"\ncolumns = {json.dumps(COLUMNS)}\n'
    )
    allow_everything(made.kits.server / "local")
    try:
        made.start("server", *SITES)
        made.ready(*SITES)
        yield made
    finally:
        made.stop()


def table(file):
    rng = np.random.default_rng(0)
    rows = {
        "age": rng.integers(20, 60, 60),
        "sex": rng.choice(["f", "m"], 60),
        "outcome": rng.choice(["no", "yes"], 60),
    }
    pd.DataFrame({**rows, "secret": rng.integers(0, 9, 60)}).to_csv(file, index=False)


def allow_everything(local):
    resources = json.loads((local / "resources.json").read_text())
    resources["class_allow_list"] = ["*"]
    (local / "resources.json").write_text(json.dumps(resources))
    rules = json.loads((local / "authorization.json").read_text())
    rules["permissions"]["project_admin"] = "any"
    (local / "authorization.json").write_text(json.dumps(rules))


@pytest.fixture(scope="module")
def in_progress(federation):
    """A run of two sites that nobody may disturb."""
    arguments = {"algorithm": "fedbio", "rounds": ROUNDS, "options": {"batch_size": 4, "local_steps": 2}}
    run = federation.supervise(JobSettings("victim", programs.FUNCTION, SITES[:2], arguments, seed=1, double=True))
    run.reach(3)
    return run


@pytest.fixture(scope="module")
def attempts(federation, in_progress):
    """Everything that is tried through NVFlare's own protocol, by one process, while the run goes on."""
    kits, home = federation.kits, federation.folder
    foreign = provision(home / "foreign", list(SITES), **ports(federation))
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
        [sys.executable, "-m", "tests.engines.nvflare.acting", json.dumps(order)],
        capture_output=True, text=True, timeout=240, cwd=ROOT, check=True,
    )  # fmt: skip
    told = json.loads(spoken.stdout.splitlines()[-1])
    in_progress.reach(before + 1)
    return told


def ports(federation):
    about = json.loads((federation.kits.server / "startup/fed_server.json").read_text())["servers"][0]
    return {"port": int(about["service"]["target"].split(":")[1]), "admin_port": about["admin_port"]}


def disguised(federation, user):
    """A coordinator's kit with a site's certificate in it."""
    kit = shutil.copytree(federation.kits.admin, federation.folder / f"disguised-{user}")
    for name in ("client.crt", "client.key"):
        shutil.copy(federation.kits.sites["site-1"] / "startup" / name, kit / "startup" / name)
    about = json.loads((kit / "startup/fed_admin.json").read_text())
    about["admin"]["username"] = user
    (kit / "startup/fed_admin.json").write_text(json.dumps(about))
    return kit


def honest_job(home, run, **more):
    arguments = {"algorithm": "fedbio", "rounds": 1, "options": {"batch_size": 4, "local_steps": 1}}
    settings = JobSettings(run, programs.FUNCTION, SITES[:2], arguments, double=True, **more)
    return write_job(home / "tried", settings)


def job_with_code(home):
    """The same job with a module of its own, which leaves a mark wherever it is imported."""
    job = honest_job(home, "with-code")
    custom = job / "app/custom"
    custom.mkdir()
    custom.joinpath("brought.py").write_text(
        "import os, pathlib\n"
        f"pathlib.Path({str(home)!r}, f'mark-{{os.getpid()}}').touch()\n"
        "from fedbilevel.engines.nvflare.executor import SiteExecutor\n"
        "class Brought(SiteExecutor):\n    pass\n"
    )
    change_executor(job, "brought.Brought")
    return job


def job_with_class(home):
    """The same job with an executor of NVFlare's own, which writes and sends whatever its arguments say."""
    job = honest_job(home, "with-class")
    change_executor(job, "nvflare.app_common.np.np_trainer.NPTrainer", {})
    return job


def change_executor(job, path, arguments=None):
    file = job / "app/config/config_fed_client.json"
    config = json.loads(file.read_text())
    executor = config["executors"][0]["executor"]
    executor["path"] = path
    if arguments is not None:
        executor["args"] = arguments
    file.write_text(json.dumps(config))


def job_for_column(home):
    """A fit on one column more than site-3 lists."""
    columns = (Column("age"), Column("secret"), Column("sex", kind="ignore"))
    schema = Schema("outcome", ("no", "yes"), "yes", ("sex",), ("f", "m"), columns)
    settings = JobSettings("curious", "fair", ("site-3",), {"schema": text(schema), "recipe": {"method": "fedavg"}})
    return write_job(home / "tried", settings)


def let_in(port, context):
    """Whether the server keeps a connection; without TLS (None) it is sent something that is no handshake."""
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        try:
            if context is None:
                channel.sendall(b"hello\n" * 20)
            else:
                channel = stack.enter_context(context.wrap_socket(channel, server_hostname="localhost"))
            channel.settimeout(2)
            return bool(channel.recv(1))
        except TimeoutError:
            return True  # it holds the line
        except (ssl.SSLError, ConnectionError):
            return False


def context_of(kit):
    """TLS that trusts the federation's server, with the certificate of a kit (None: without one)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if kit is not None:
        context.load_cert_chain(kit / "startup/client.crt", kit / "startup/client.key")
    return context


@pytest.mark.parametrize("which", ["port", "admin_port"])
def test_without_a_certificate_nobody_gets_in(federation, in_progress, which):
    port = ports(federation)[which]
    assert let_in(port, context_of(federation.kits.sites["site-1"])), "not even a site is let in"
    assert not let_in(port, context_of(None))
    assert not let_in(port, None)


@pytest.mark.parametrize("which", ["port", "admin_port"])
def test_a_foreign_certificate_is_refused(federation, attempts, which):
    stranger = federation.folder / "foreign/kits/site-1"
    assert not let_in(ports(federation)[which], context_of(stranger))
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
    end = time.monotonic() + 60
    while (read_status(folder) or {}).get("status") != "failed":
        assert time.monotonic() < end
        time.sleep(0.2)
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
    about, _ = read_arrays(in_progress.folder / "state.npz")
    assert about["progress"]["attempt"] == 1
    exchanges = pd.read_csv(in_progress.folder / "exchanges.csv", on_bad_lines="skip")
    assert set(exchanges["outcome"].iloc[:-2]) == {"answered"}
    assert "refused" not in in_progress.log
