"""The commands as an operator types them, against real processes: stopped, killed and taken up again, with one result."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pandas as pd
import pytest

pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")

from fedbilevel import storage
from fedbilevel.federation.nvflare.console import OUTPUT
from fedbilevel.federation.operator.demo import policy_text
from fedbilevel.federation.operator.processes import end, running
from fedbilevel.federation.protocol.identity import KitIdentity
from fedbilevel.federation.protocol.policy import FILE, read_policy
from fedbilevel.federation.protocol.record import read_answers, read_status
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.site import Site
from fedbilevel.runs import read
from fedbilevel.tables.reading import open_table
from fedbilevel.tables.schema import Schema, infer
from tests.federation.direct import Direct, coordinate
from tests.federation.federation import LONG, SITES, wait_for

pytestmark = pytest.mark.federation

RUN = "operated"
ROWS, ROUNDS = 150, 60


@pytest.fixture(scope="module")
def tables(federation):
    """A table at every site, and a schema for all of them; afterwards the sites offer what they did before."""
    rng = np.random.default_rng(4)
    before = {}
    for site in SITES:
        age, sex = rng.integers(20, 70, ROWS), rng.choice(["f", "m"], ROWS)
        chance = 1 / (1 + np.exp((45 - age) / 10 - (sex == "m")))
        frame = pd.DataFrame({"age": age, "job": rng.choice(["cook", "judge"], ROWS), "sex": sex})
        frame["hired"] = np.where(rng.random(ROWS) < chance, "yes", "no")
        frame.to_csv(federation.folder / f"{site}.csv", index=False)
        before[site] = (federation.kits.sites[site] / "local" / FILE).read_text()
    first = open_table(federation.folder / "site-1.csv")
    schema = infer([first], target="hired", sensitive="sex").write(federation.folder / "schema.toml")
    for site in SITES:
        federation.offer(site, policy_text(federation.folder / f"{site}.csv", Schema.read(schema)))
    yield schema
    for site, policy in before.items():
        federation.offer(site, policy)


class Typed:
    """A command in a terminal of its own; what it prints is read while it runs."""

    def __init__(self, federation, *words):
        self.file = federation.folder / f"typed-{time.monotonic_ns()}.txt"
        with self.file.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedbilevel.cli", *map(str, words)],
                stdout=output, stderr=subprocess.STDOUT, cwd=federation.folder, env=federation.environment,
            )  # fmt: skip

    @property
    def printed(self):
        return self.file.read_text()

    def until(self, what):
        def going_on():
            assert self.process.poll() is None, self.printed

        wait_for(what, going_on, lambda: self.printed)

    def done(self, code=0):
        assert self.process.wait(LONG) == code, self.printed
        assert "Traceback" not in self.printed
        return self.printed


def test_a_run_is_stopped_killed_and_taken_up_again(federation, tables):
    """SIGTERM, kill -9 and `federate stop` each end a `submit`; the next one goes on, to the result of a run left alone."""
    out, home = federation.folder / "out", federation.folder / "kits"
    place = federation.kits.server / "fedbilevel-runs" / RUN
    words = ("federate", "submit", "--kits", home, "--schema", tables, "--method", "fedavg", "--steps", 5 * ROUNDS,
             "--batch-size", 16, "--min-sites", 2, "--run", RUN, "--out", out)  # fmt: skip

    def at_round(number):
        status = read_status(place) or {}
        return status.get("status") == "running" and status.get("round", 0) >= number

    submit = Typed(federation, *words)
    submit.until(lambda: at_round(2))
    submit.process.send_signal(signal.SIGTERM)
    assert "fedbilevel: Stopped; the same command goes on from the last complete round." in submit.done(130)
    reached = rounds_of(place)
    assert 2 <= reached < ROUNDS

    submit = Typed(federation, *words)
    submit.until(lambda: at_round(reached + 2))
    held = federation.workers("site-1")  # the run waits for it, however long the next command takes to start
    for process in held:
        process.suspend()
    submit.process.kill()
    submit.process.wait(LONG)
    assert read_status(place)["status"] == "running"

    again, status = Typed(federation, *words), Typed(federation, "federate", "status", "--kits", home, "--json")
    again.until(lambda: "the run is at work already; watching it" in again.printed)
    told = json.loads(status.done())
    assert {one["run"]: (one["status"], one["seen"]) for one in told["runs"]}[RUN] == ("running", "sums")
    stop = Typed(federation, "federate", "stop", "--run", RUN, "--kits", home)
    assert stop.done() == f"{RUN} is stopped; submit it again to go on.\n"
    for process in held:
        if process.is_running():
            process.resume()
    assert f"fedbilevel: Run {RUN} was stopped; the same command goes on" in again.done(2)

    words = tuple(1 if word == 2 else word for word in words)  # how many sites are needed may differ when going on
    printed = Typed(federation, *words).done()
    assert "submitted with site-1, site-2, site-3" in printed
    assert f"Model, tables and page are in {out}" in printed
    assert (place / "log.txt").read_text().count("going on with") == 2

    settings = JobSettings.from_json((place / "settings.json").read_text())
    assert settings.min_sites == 1
    policies = {site: read_policy(federation.kits.sites[site] / "local") for site in SITES}
    sites = {}
    for site, policy in policies.items():
        alone = federation.folder / "alone" / site
        alone.mkdir(parents=True)
        identity = KitIdentity(federation.kits.sites[site] / "startup", alone)
        sites[site] = Site(site, settings, policy, alone, lambda line: None, identity)
    with jax.enable_x64(False):
        wanted = coordinate(federation.folder / "alone", settings, Direct(sites))
    np.testing.assert_allclose(read_answers(place)[-1][0], wanted[0], rtol=1e-6)
    exchanges = pd.read_csv(out / "exchanges.csv")
    assert len(exchanges) == len(exchanges.drop_duplicates(["round", "site"])) == 3 * ROUNDS
    assert set(exchanges["outcome"]) == {"answered"}

    predict = Typed(federation, "predict", out, federation.folder / "site-2.csv")
    report, complete = Typed(federation, "report", out), Typed(federation, *words)
    assert predict.done().splitlines()[-1] == f"{ROWS} rows"
    assert "page.html" in report.done()
    assert f"Model, tables and page are in {out}" in complete.done()
    assert "submitted" not in complete.printed, "a complete run is read, not run again"
    assert (read(out).command, read(out).status) == ("federate", "complete")


def rounds_of(place):
    return len(pd.read_csv(place / "exchanges.csv")["round"].unique())


def test_a_site_is_stopped_and_started_by_command(federation):
    kit, before = federation.kits.sites["site-3"], federation.running.pop("site-3")
    assert re.fullmatch(r"site-3 is stopped \(\d process(es)?\)\.\n", Typed(federation, "federate", "stop", kit).done())
    before.wait(LONG)
    start = Typed(federation, "federate", "start", kit, "--background")
    assert start.done() == f"site-3 is registered with localhost:{federation.port}.\n"
    (process,) = running(kit)
    federation.running["site-3"] = process
    for place in (kit, federation.kits.server):
        assert storage.is_locked(place / f".{OUTPUT}.lock"), "somebody sees to it that it does not grow for ever"
    assert Typed(federation, "federate", "start", kit).done(2) == (
        f"fedbilevel: site-3 is running already (process {process.pid}): stop it first.\n"
    )


def test_a_site_with_its_own_key_joins_and_is_taken_out(federation):
    """It asks with NVFlare's own command; `federate site request` is in tests/cli."""
    home, folder = federation.folder / "newcomer", federation.folder / "kits"
    kit = home / "kit"
    type_ = lambda *words: Typed(federation, "federate", *words)  # noqa: E731
    home.mkdir()
    participant = {"name": "any", "participants": [{"name": "newcomer", "type": "client", "org": "newcomer"}]}
    (home / "newcomer.yaml").write_text(json.dumps(participant))  # which is YAML as well
    command = [sys.executable, "-m", "nvflare.cli", "cert", "request", "-p", home / "newcomer.yaml", "--out", home]
    subprocess.run(
        command, env={**federation.environment, "HOME": str(home)}, check=True, capture_output=True, timeout=LONG
    )
    type_("init", "--request", home / "newcomer.request.zip", "--out", folder).done()
    shutil.copytree(folder / "kits/newcomer", kit)
    type_("site", "install", kit, "--key", home / "newcomer.key").done()
    try:
        start = type_("start", kit)  # as a service manager runs it
        start.until(lambda: "newcomer is registered" in start.printed)
        assert connected(federation, folder)["newcomer"]
        assert "The server refuses it from now on." in type_("revoke", "newcomer", "--kits", folder).done()
        assert "newcomer" not in connected(federation, folder)
        start.process.terminate()
        start.done()
        assert running(kit) == []
        again = type_("start", kit)  # its certificate is as good as ever
        assert again.process.wait(LONG) != 0
        assert "newcomer ended at once" in again.printed
        assert "disabled" in (kit / OUTPUT).read_text()
    finally:
        end(running(kit))
    assert set(SITES) <= connected(federation, folder).keys()


def connected(federation, folder):
    told = Typed(federation, "federate", "status", "--kits", folder, "--json").done()
    return {row["site"]: row["connected"] for row in json.loads(told)["sites"] if row["connected"]}
