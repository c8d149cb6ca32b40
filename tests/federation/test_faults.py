"""Faults, one process: lost and spoilt replies, crashes at any moment, lost states.  Real processes: test_federation.py."""

import errno
import json
import re
import shutil
from copy import copy
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from fedbilevel.federation.protocol import coordinator
from fedbilevel.federation.protocol.coordinator import Reply
from fedbilevel.federation.protocol.policy import Policy
from fedbilevel.federation.protocol.record import Record, read_answers
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed, TooFewSites
from fedbilevel.federation.protocol.site import DRAWS
from tests.federation import programs
from tests.federation.direct import SITES, Direct, Runs, array_sites, coordinate, written_out

ROUNDS = 4

pytestmark = pytest.mark.usefixtures("shared_compilation")


class Crash(Exception):
    """The coordinator's process is gone."""


@pytest.fixture
def runs(tmp_path):
    """A run of which all sites, or with ``min_sites`` two, are needed."""
    return lambda **settings: Runs(tmp_path, ROUNDS, **settings)


def wanted(lost=()):
    """The run written out: ``lost`` holds the (round, client) whose reply does not count."""
    algorithm = programs.algorithm("fedbio", batch_size=4, local_steps=2)
    return written_out(algorithm, programs.client_data(), ROUNDS, 5, lost)


def agrees(answer, lost=()):
    np.testing.assert_allclose(answer, wanted(lost), rtol=1e-12)
    return True


def lose(round_number, site, answer=None):
    """A fault in one exchange: the reply is lost, or ``answer(reply)`` in its place."""

    def fault(task, name, request, told):
        if task == "work" and name == site and request["label"][1] == round_number:
            return None if answer is None else answer(told)
        return told

    return fault


def crash_in(round_number):
    def fault(task, name, request, told):
        if task == "work" and request["label"][1] == round_number:
            raise Crash
        return told

    return fault


def test_without_faults_the_reference_agrees(runs):
    assert agrees(runs().submit())


def test_a_lost_reply(runs):
    run = runs(min_sites=2)
    assert agrees(run.submit(lose(1, "site-2")), {(1, 1)})
    rows = run.table("exchanges")
    assert list(rows.loc[rows["site"] == "site-2", "outcome"]) == ["answered", "no answer", "answered", "answered"]
    assert rows.loc[rows["outcome"] == "no answer", "bytes_up"].eq(0).all()
    assert "site-2 did not answer within 1 s; going on without it" in run.log
    assert "site-2 is back" in run.log
    # The round after the loss asks the lost site, and does not wait for it.
    asked = [(requests, awaited) for task, requests, awaited in run.channel.waits if task == "work"]
    assert asked[2] == (set(SITES), {"site-1", "site-3"})
    assert asked[3] == (set(SITES), set(SITES))


@pytest.mark.parametrize(
    ("spoilt", "sentence"),
    [
        ({"arrays": [np.full(4, np.nan)]}, "holds a NaN or an infinity"),
        ({"arrays": [np.full(4, np.inf)]}, "holds a NaN or an infinity"),
        ({"arrays": [np.full(4, 1e200)]}, r"holds 1e\+200, which is too large to compute with"),
        ({"arrays": [np.zeros(5)]}, r"float64\[5\] instead of float64\[4\]"),
        ({"arrays": [np.zeros(4, np.float32)]}, r"float32\[4\] instead of float64\[4\]"),
        ({"arrays": [np.zeros(4), np.zeros(4)]}, "2 arrays instead of 1"),
        ({"arrays": [[0.0] * 4]}, "something other than arrays"),
        ({"arrays": "x"}, "something other than arrays"),
        ({}, "something other than arrays"),
        ({"refused": "budget"}, "This site has spent its privacy budget"),
        # A sentence of the site's own could forge lines of the log, or be as long as it likes.
        ({"refused": "no\n2026-01-01 00:00:00 site-1 left" * 1000}, "It refused without a reason we know.\n"),
    ],
    ids=["nan", "infinite", "large", "shape", "dtype", "count", "lists", "text", "nothing", "refused", "forged"],
)
def test_a_spoilt_reply_is_refused_and_named(runs, spoilt, sentence):
    run = runs(min_sites=2)
    assert agrees(run.submit(lose(2, "site-3", lambda told: spoilt)), {(2, 2)})
    (row,) = run.table("exchanges").query("outcome != 'answered'").itertuples()
    assert (row.round, row.site) == (2, "site-3")
    assert row.outcome.startswith("refused")
    assert re.search(f"the reply of site-3 was refused: .*{sentence}", run.log)


def test_a_site_whose_replies_are_bad_is_left_out_for_longer_and_longer_and_taken_back(tmp_path):
    """Bad in rounds 0, 1 and 2: left out of two rounds.  Bad again: of four.  Good from then on: in every round."""
    run = Runs(tmp_path, 16, min_sites=2)

    def fault(task, name, request, told):
        bad = task == "work" and name == "site-2" and request["label"][1] < 8
        return {"arrays": [np.full(4, np.nan)]} if bad else told

    run.submit(fault)
    rows = run.table("exchanges").query("site == 'site-2'")
    assert list(rows["round"]) == [0, 1, 2, 5, *range(10, 16)]
    assert list(rows["outcome"].str.startswith("answered")) == [False] * 4 + [True] * 6
    assert "site-2 is left out of the next 2 rounds: 3 bad replies in a row" in run.log
    assert "site-2 is left out of the next 4 rounds: 4 bad replies in a row" in run.log


def test_who_is_left_out_is_asked_where_the_others_are_too_few(tmp_path):
    run = Runs(tmp_path, 6, min_sites=2)

    def fault(task, name, request, told):
        bad = task == "work" and (name == "site-2" if request["label"][1] < 3 else name == "site-3")
        return {"arrays": [np.full(4, np.nan)]} if bad else told

    run.submit(fault)
    rows = run.table("exchanges").query("round == 3")
    assert list(rows["site"]) == ["site-1", "site-3", "site-2"]
    assert list(rows["outcome"].str.startswith("answered")) == [True, False, True]


def test_a_reply_that_the_channel_could_not_read_is_one_of_its_site(runs):
    class Garbled(Direct):
        def ask(self, task, requests, awaited, seconds):
            replies = super().ask(task, requests, awaited, seconds)
            if task == "work":
                replies["site-2"] = Reply({}, 0.1, "its reply was not read: it cannot be decoded")
            return replies

    run = runs(min_sites=2)
    assert agrees(run.submit(channel=Garbled), {(r, 1) for r in range(ROUNDS)})
    assert "the reply of site-2 was refused: its reply was not read: it cannot be decoded" in run.log
    shutil.rmtree(run.home)
    with pytest.raises(RunFailed, match="site-2: its reply was not read"):
        runs().submit(channel=Garbled)


def test_who_sent_the_largest_number_is_named_when_a_run_diverges(runs, monkeypatch):
    made = coordinator.Compiled

    def diverging(*about):
        compiled = copy(made(*about))
        absorb = compiled.absorb
        compiled.absorb = lambda *given, **item: (*absorb(*given, **item)[:2], False)
        return compiled

    monkeypatch.setattr(coordinator, "Compiled", diverging)
    with pytest.raises(RunFailed, match=r"Try smaller steps\. The largest number came from site-3: 1e\+06"):
        runs().submit(lose(0, "site-3", lambda told: {"arrays": [np.full(4, -1e6)]}))


@pytest.mark.parametrize("lost", ["prepare", "both"])
def test_a_pause_between_two_stages_costs_a_site_the_rounds_it_misses(tmp_path, lost):
    """``both``: the request to prepare itself for the second stage is lost, and that of its first round as well."""
    arguments = {"algorithms": ["fedavg", "fedbio"], "rounds": ROUNDS, "options": {"batch_size": 4, "local_steps": 2},
                 "double": True}  # fmt: skip
    settings = JobSettings("run", programs.SEVERAL, SITES, arguments, seed=5, double=True, min_sites=2, reply_timeout=1)
    missed = {("prepare", 0), ("work", 0)} if lost == "both" else {("prepare", 0)}

    def fault(task, name, request, told):
        stage, number = (request["stage"], 0) if task == "prepare" else request.get("label", (0, 0))[:2]
        return None if name == "site-2" and stage == 1 and (task, number) in missed else told

    sites = array_sites(tmp_path, settings, functions=(programs.SEVERAL,))
    coordinate(tmp_path, settings, Direct(sites, fault), functions=(programs.SEVERAL,))
    rows = pd.read_csv(tmp_path / "runs/run/exchanges.csv").query("site == 'site-2' and stage == 1")
    assert list(rows["round"]) == list(range(ROUNDS))
    assert list(rows["outcome"] == "answered") == [lost == "prepare", True, True, True]


def test_lines_of_the_log_cannot_be_forged(runs):
    record = Record(runs().home, runs().settings)
    record.say("a reply\n2026-01-01 00:00:00 site-1 left" + "x" * 100_000)
    record.close()
    lines = (record.folder / "log.txt").read_text().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("    2026-01-01")
    assert len(lines[1]) < 10_000


def test_a_full_disk_says_so(runs, monkeypatch):
    """The job ends with the cause, for which room was kept."""
    controller = pytest.importorskip("fedbilevel.federation.nvflare.controller", reason="needs the federation extra")
    run = runs()

    def save(record, progress):
        raise OSError(errno.ENOSPC, "No space left on device")

    def status(record, *told, **more):
        assert not (run.home / "reserve").exists(), "no room for last words"
        written(record, *told, **more)

    written = Record.status
    monkeypatch.setattr(Record, "save", save)
    monkeypatch.setattr(Record, "status", status)
    monkeypatch.setattr(
        controller, "read_job", lambda *_: (run.settings, Policy(functions=(programs.FUNCTION,)), run.home.parent)
    )
    made, panics = controller.PlanController("settings"), []
    made.system_panic = lambda sentence, context: panics.append(sentence)
    context = SimpleNamespace(get_workspace=lambda: None, get_job_id=lambda: "job", get_prop=lambda name: None)
    made.control_flow(SimpleNamespace(triggered=False), context)
    (sentence,) = panics
    assert re.fullmatch(
        r"The coordinator cannot write to .*run \(No space left on device\): free space, and submit .*", sentence
    )
    assert (run.status["status"], run.status["sentence"]) == ("failed", sentence)
    assert sentence in run.log


def test_with_too_few_good_replies_the_run_stops_with_a_sentence(runs):
    with pytest.raises(
        RunFailed, match=r"Only 2 of the 3 sites .* missing: site-3\. site-3: array 0 of its reply holds"
    ):
        runs().submit(lose(1, "site-3", lambda told: {"arrays": [np.full(4, np.nan)]}))


def test_a_missing_site_makes_the_run_wait_and_go_on_to_the_same_result(runs):
    run = runs()
    with pytest.raises(
        TooFewSites, match=r"Only 2 of the 3 sites the run needs answered in round 3 .* missing: site-2\."
    ):
        run.submit(lose(2, "site-2"))
    assert len(run.table("exchanges")) == 6, "the round that failed is not in the table"
    assert agrees(run.submit())
    assert len(run.table("exchanges")) == 3 * ROUNDS


@pytest.mark.parametrize("moment", [1, 3, 5, 6, 8, 9])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_coordinator_dies_at_any_moment(runs, moment, when):
    """``moment`` counts replies; "after": the site has done its work, and its reply is lost with the coordinator."""
    run, done = runs(record_every=1), []

    class Dying(Direct):
        def ask(self, task, requests, awaited, seconds):
            if task == "work" and when == "before" and len(done) + 1 > moment:
                raise Crash
            return super().ask(task, requests, awaited, seconds)

    def fault(task, name, request, told):
        if task == "work":
            done.append(name)
            if when == "after" and len(done) == moment:
                raise Crash
        return told

    with pytest.raises(Crash):
        run.submit(fault, channel=Dying)
    assert agrees(run.submit())
    rows = run.table("exchanges")
    assert len(rows) == len(rows.drop_duplicates(["round", "site"])) == 3 * ROUNDS
    assert list(run.table("history")["round"]) == [1, 2, 3, 4]
    assert run.status["status"] == "complete"


def test_a_complete_run_is_not_run_again(runs):
    run = runs()
    first = run.submit()
    np.testing.assert_array_equal(first, run.submit())
    np.testing.assert_array_equal(first, read_answers(run.home)[0][0])
    assert run.channel.waits == []


@pytest.mark.parametrize("secret", [False, True], ids=["known draws", "secret draws"])
def test_sites_restart_between_any_two_rounds(runs, tmp_path, secret):
    run = runs()

    class Restarting(Direct):
        def ask(self, task, requests, awaited, seconds):
            if task == "work":
                self.all = array_sites(run.folder, run.settings, secret_draws=secret)
                prepare = {"digest": run.settings.digest, "stage": 0, "agreed": {}, "answers": []}
                super().ask("prepare", dict.fromkeys(SITES, prepare), set(SITES), 1)
            return super().ask(task, requests, awaited, seconds)

    answer = run.submit(channel=Restarting, secret_draws=secret)
    if not secret:
        assert agrees(answer)
        return
    undisturbed = Runs(tmp_path / "undisturbed", ROUNDS)
    for site in SITES:
        (undisturbed.folder / site / "run").mkdir(parents=True)
        shutil.copy(run.folder / site / "run" / DRAWS, undisturbed.folder / site / "run")
    np.testing.assert_array_equal(answer, undisturbed.submit(secret_draws=True))
    assert np.abs(answer - wanted()).max() > 1e-6, "other batches"


def test_a_site_that_lost_its_disk_enrols_anew_and_says_so(runs):
    run = runs()
    with pytest.raises(Crash):
        run.submit(crash_in(2))
    shutil.rmtree(run.folder / "site-2")
    found = run.submit()
    assert "site-2 had lost its state and enrolled anew" in run.log
    assert np.abs(found - wanted()).max() > 1e-9, "another state gives another run, which is why it is said"


def test_a_coordinator_restored_from_an_old_backup_is_refused(runs):
    run, states = runs(), []

    def fault(task, name, request, told):
        if task == "work" and name == "site-1":
            states.append((run.home / "state.npz").read_bytes())
            if len(states) == ROUNDS:
                raise Crash
        return told

    with pytest.raises(Crash):
        run.submit(fault)
    (run.home / "state.npz").write_bytes(states[1])
    with pytest.raises(RunFailed, match="The coordinator went back further than this site keeps"):
        run.submit()


def test_a_late_joiner_takes_part_from_the_round_it_joins(runs):
    run = runs(min_sites=2)
    with pytest.raises(Crash):
        run.submit(crash_in(2), ("site-1", "site-3"))
    assert "absent: site-2" in run.log
    assert agrees(run.submit(), {(0, 1), (1, 1)})
    assert run.table("exchanges").groupby("round")["site"].count().tolist() == [2, 2, 3, 3]


def test_one_that_stays_away_is_named_at_the_end(runs):
    run = runs(min_sites=2)
    assert agrees(run.submit(names=("site-1", "site-3")), {(r, 1) for r in range(ROUNDS)})
    assert "without site-2 at the end" in run.status["sentence"]


def test_a_folder_belongs_to_one_run_and_one_coordinator(runs, monkeypatch):
    run = runs()
    record = Record(run.home, run.settings)
    monkeypatch.setattr("fedbilevel.federation.protocol.record.LOCK_SECONDS", 0.0)
    with pytest.raises(RunFailed, match="Another coordinator is at work"):
        Record(run.home, run.settings)
    record.close()
    with pytest.raises(RunFailed, match="holds another run of the name 'run'"):
        Record(run.home, Runs(run.folder, ROUNDS + 1).settings)
    Record(run.home, runs(min_sites=1).settings).close()
    assert json.loads((run.home / "settings.json").read_text())["min_sites"] == 1


def test_a_damaged_state_is_not_guessed_at(runs):
    run = runs()
    record = Record(run.home, run.settings)
    (run.home / "state.npz").write_bytes(b"PK\x03\x04 damaged")
    with pytest.raises(RunFailed, match="cannot be read"):
        record.resume()
    record.close()
