"""Real processes on loopback with mutual TLS: the numbers of `simulate`, and every fault survived."""

import re
import shutil
import time

import numpy as np
import pandas as pd
import pytest

import fedbilevel as fb

pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")

from fedbilevel.federation.operator import processes
from fedbilevel.federation.operator.sessions import twins
from fedbilevel.federation.protocol.record import read_answers
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.vault import read_arrays
from tests.federation import programs
from tests.federation.direct import written_out
from tests.federation.federation import LONG, SITES, wait_for

pytestmark = pytest.mark.federation

OPTIONS = {"batch_size": 4, "local_steps": 2}
NAMES = {True: ["fedbio", "fedbioacc", "fedavg"], False: ["fedbio", "fedbioacc", "fedavg"], "single": ["fcfl"]}
"""By whether they compute in float64, with secure sums; and in float64 without, what needs single replies."""
SPOILT_ROUNDS = 4
WAIT = 2.0
"""Seconds a round waits for a site that two others can do without."""


def settings_for(run, program, rounds, double=True, **more):
    arguments = {"rounds": rounds, "options": OPTIONS, "double": double, **more.pop("arguments", {})}
    secure = "min_sites" not in more  # a secure sum of three sites needs them all
    return JobSettings(run, program, SITES, arguments, seed=9, double=double, **{"secure": secure, **more})


def submissions(run):
    return len([line for line in run.said if line.startswith("submitted")])


def expected(name, rounds, double, secure=True):
    kind = np.float64 if double else np.float32
    if name == "fcfl":
        rows = [(programs.fair_rows(client, kind), None) for client in range(3)]
        made, data = programs.fair_algorithm(kind), fb.ClientData.from_clients(rows)
    else:
        made, data = programs.algorithm(name, double, **OPTIONS), programs.client_data(double)
    return np.asarray(fb.simulate(made, data, rounds, seed=9, record_every=None, secure=secure).outer)


@pytest.fixture(scope="module")
def side_by_side(federation):
    """Five runs at once on the same sites: they must not disturb one another, and starting them together is quicker.

    The server takes four at once: the last one waits for its turn, and once it has it for `test_a_worker_that_is_killed...`.
    """
    made = {
        kind: settings_for(
            f"same-{kind}", programs.SEVERAL, 5, bool(kind), arguments={"algorithms": names}, record_every=5,
            secure=kind != "single",
        )
        for kind, names in NAMES.items()
    }  # fmt: skip
    made["spoilt"] = settings_for("spoilt", programs.SPOILT, SPOILT_ROUNDS, min_sites=2, reply_timeout=LONG)
    hold = federation.folder / "hold-fallen"
    hold.touch()
    made["fallen"] = settings_for(
        "fallen", programs.HELD, 700, arguments={"algorithm": "fedavg", "pace": 0.3, "hold": str(hold)}, min_sites=2,
        reply_timeout=120.0,
    )  # fmt: skip
    return {name: federation.supervise(settings, lose=name == "spoilt") for name, settings in made.items()}


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(True, 0), (False, 1e-5), ("single", 1e-10)], ids=["float64", "float32", "single"]
)
def test_the_numbers_of_the_simulation(side_by_side, kind, tolerance):
    run, names = side_by_side[kind], NAMES[kind]
    wanted = [expected(name, 5, bool(kind), kind != "single") for name in names]  # meanwhile
    assert run.finish()["status"] == "complete"
    for name, one, (found,) in zip(names, wanted, read_answers(run.folder), strict=True):
        assert found.dtype == one.dtype
        np.testing.assert_allclose(found, one, rtol=tolerance, atol=tolerance * np.abs(one).max(), err_msg=name)
    exchanges = pd.read_csv(run.folder / "exchanges.csv")
    assert len(exchanges) == len(names) * 5 * 3
    assert (exchanges["outcome"] == "answered").all()
    assert run.status["secure"] is (kind != "single")
    assert (exchanges[["bytes_up", "bytes_down", "seconds", "site_seconds"]] > 0).all(axis=None)
    assert np.isfinite(pd.read_csv(run.folder / "history.csv")["objective"]).all()


def without(client):
    """A stage of the spoilt run: the rounds of FedAvg without that client."""
    made, data = programs.algorithm("fedavg", **OPTIONS), programs.client_data()
    return written_out(made, data, SPOILT_ROUNDS, 9, {(r, client) for r in range(SPOILT_ROUNDS)})


def test_spoilt_replies(side_by_side):
    """NaN at site-2, then a wrong shape from site-3: refused, named, and the run is that of the others; and it is one job,
    although the server's answer to its submission was lost."""
    run = side_by_side["spoilt"]
    assert run.finish()["status"] == "complete"
    assert "the server does not answer; waiting for it" in run.said
    assert submissions(run) == 1
    _, about = read_arrays(run.folder / "state.npz")
    assert about["progress"]["attempt"] == 1
    for (found,), client in zip(read_answers(run.folder)[:2], (1, 2), strict=True):
        np.testing.assert_allclose(found, without(client), rtol=1e-10)
    assert "the reply of site-2 was refused: The reply is not finite." in run.log, "by the site itself"
    assert "the reply of site-3 was refused: array 0 of its reply is float64[4] instead of float64[5]" in run.log


def test_replies_that_cannot_be_read(side_by_side):
    """Neither ends the job; both are named, and the run is that of the others."""
    run = side_by_side["spoilt"]
    assert run.finish()["status"] == "complete"
    for (found,) in read_answers(run.folder)[2:]:
        np.testing.assert_allclose(found, without(1), rtol=1e-10)
    for what in ("it cannot be decoded", "it is larger than the coordinator takes (its largest_megabytes)"):
        assert f"the reply of site-2 was refused: its reply was not read: {what}" in run.log
    assert run.said.count("submitted with site-1, site-2, site-3") == 1
    assert run.log.count("site-2 is left out of the next 2 rounds: 3 bad replies in a row") == 2, "of either kind"


def test_a_worker_that_is_killed_again_and_again(federation, side_by_side):
    """Two of three suffice: the job goes on, and the site is called back less and less often.  It is one job, however long it
    had to wait for its turn."""
    run = side_by_side["fallen"]
    (federation.folder / "hold-fallen").unlink()
    for times in (1, 2):
        run.until(lambda times=times: submissions(run) == times)
        run.until(lambda: federation.workers("site-3") and "site-3" in run.status.get("sites", ()))
        for worker in federation.workers("site-3"):
            worker.kill()
        stood = run.status.get("round", 0)
        run.until(lambda stood=stood: run.status.get("round", 0) > stood + 2)
    run.until(lambda: "site-3 has left the run 2 times; it is called again in 5 s" in run.said)
    assert "the job ended before the run did" not in run.said
    assert federation.order(run="fallen", stop="fallen").outcome() == "done"
    assert run.outcome().startswith("Stopped")


def test_kills_and_cuts_change_nothing_and_a_site_that_waits_costs_little(federation):
    """kill -9 of a site, of a site's worker, of the coordinator's worker, of the server; a site cut off for some seconds.

    All sites are needed: while one is cut off the others wait, and ask now and then.  That it does not say what it is working
    on does not make it one that has left.
    """
    rounds = 70
    settings = settings_for(
        "kills", programs.FUNCTION, rounds, arguments={"algorithm": "fedbioacc"}, reply_timeout=120.0
    )
    run = federation.supervise(settings)

    run.reach(4)
    federation.kill("site-2")
    federation.start("site-2")
    wanted = expected("fedbioacc", rounds, True)  # while the run waits for the site

    run.reach(10)
    for worker in federation.workers("site-1"):
        worker.kill()

    run.reach(16)
    for worker in federation.workers("server"):
        worker.kill()

    run.reach(22)
    federation.kill("server")
    federation.start("server")

    run.reach(28)
    cut = federation.family("site-3")
    for process in cut:
        process.suspend()
    stood, jobs = run.status["round"], submissions(run)
    time.sleep(13)  # from then on they ask as seldom as they ever do
    (worker,) = federation.workers("site-1")
    began, spent = time.monotonic(), sum(worker.cpu_times()[:2])
    time.sleep(10)
    share = (sum(worker.cpu_times()[:2]) - spent) / (time.monotonic() - began)
    threads = worker.num_threads()
    assert run.status["round"] <= stood + 1, "without the site that was cut off the run is to wait"
    for process in cut:
        process.resume()
    run.reach(stood + 3)
    assert submissions(run) == jobs
    print(f"a site that waits: {100 * share:.1f} % of a core, {threads} threads")
    assert share < 0.02
    assert threads < 60

    assert run.finish()["status"] == "complete"
    ((found,),) = read_answers(run.folder)
    np.testing.assert_array_equal(found, wanted)
    exchanges = pd.read_csv(run.folder / "exchanges.csv")
    assert len(exchanges) == len(exchanges.drop_duplicates(["round", "site"])) == 3 * rounds
    assert (exchanges["outcome"] == "answered").all(), "every site lost a state or a round"
    assert submissions(run) >= 5


def test_late_slow_and_lost_sites(federation):
    """Two of three suffice: one joins late, one is slow for a while, one stays away; the result is that of who took part."""
    rounds = 80
    hold = federation.folder / "hold"
    arguments = {"algorithm": "fedbio", "hold": str(hold)}
    settings = settings_for("absences", programs.HELD, rounds, arguments=arguments, min_sites=2, reply_timeout=WAIT)
    federation.kill("site-3")
    run = federation.supervise(settings, gather=1.0)
    run.reach(3)
    hold.touch()
    federation.start("site-3")
    run.until(lambda: "site-3 can take part again" in run.said)
    hold.unlink()
    run.until(lambda: "going on with" in run.log)
    run.reach(run.status.get("round", 0) + 5)

    slow = federation.workers("site-2")
    for process in slow:
        process.suspend()
    run.reach(run.status["round"] + 3)
    for process in slow:
        process.resume()
    run.until(lambda: "site-2 is back" in run.log)

    federation.kill("site-1")
    status = run.finish()
    federation.start("site-1")
    assert status["status"] == "complete"
    assert "site-1" in status["away"]
    assert re.search("without .*site-1.* at the end", status["sentence"])
    for sentence in ("absent: site-3", f"site-2 did not answer within {WAIT:g} s", "site-1 did not answer"):
        assert sentence in run.log
    exchanges = pd.read_csv(run.folder / "exchanges.csv")
    there = set(exchanges.loc[exchanges["outcome"] == "answered", ["round", "site"]].itertuples(index=False, name=None))
    lost = {(r, c) for r in range(rounds) for c, site in enumerate(SITES) if (r, site) not in there}
    assert {client for _, client in lost} == {0, 1, 2}
    wanted = written_out(programs.algorithm("fedbio", **OPTIONS), programs.client_data(), rounds, 9, lost)
    ((found,),) = read_answers(run.folder)
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    federation.ready("site-1")


def test_a_copied_kit_of_a_site_that_is_there_already_is_noticed(federation):
    copied = shutil.copytree(
        federation.kits.sites["site-3"], federation.folder / "copied", ignore=shutil.ignore_patterns("*-*-*-*-*")
    )
    process = processes.start(copied, federation.added)
    try:
        wait_for(lambda: "site-3" in twins(federation.kits))
    finally:
        processes.end(processes.family(process.pid))
        process.wait(LONG)
        federation.kill("site-3")
        federation.start("site-3")
    federation.ready("site-3")
