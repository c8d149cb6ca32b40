"""Faults, one process: lost and spoilt replies, crashes at any moment, lost states.  Real processes: test_federation.py."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from fedbilevel.federation.protocol.errors import RunFailed, TooFewSites
from fedbilevel.federation.protocol.record import Record, read_answers, read_status
from tests.federation import programs
from tests.federation.direct import SITES, Direct, array_sites, coordinate, settings_for
from tests.federation.reference import written_out

OPTIONS = {"batch_size": 4, "local_steps": 2}
ROUNDS = 4

pytestmark = pytest.mark.usefixtures("shared_compilation")


class Crash(Exception):
    """The coordinator's process is gone."""


@pytest.fixture(scope="module")
def reference():
    """The run written out: ``lost`` holds the (round, client) whose reply does not count."""

    def run(lost=()):
        return written_out(programs.algorithm("fedbio", **OPTIONS), programs.client_data(), ROUNDS, 5, lost)

    return run


def lose(round_number, site, answer=None):
    """A fault in one exchange: the reply is lost, or ``answer(reply)`` in its place."""

    def fault(task, name, request, told):
        if task == "work" and name == site and request["label"][1] == round_number:
            return None if answer is None else answer(told)
        return told

    return fault


def exchanges(folder):
    return pd.read_csv(folder / "runs/run/exchanges.csv")


def log(folder):
    return (folder / "runs/run/log.txt").read_text()


def test_without_faults_the_reference_agrees(tmp_path, reference):
    settings = settings_for("fedbio", ROUNDS, **OPTIONS)
    found = coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings)))
    np.testing.assert_allclose(found[0], reference(), rtol=1e-12)


def test_a_lost_reply(tmp_path, reference):
    settings = settings_for("fedbio", ROUNDS, min_sites=2, **OPTIONS)
    channel = Direct(array_sites(tmp_path, settings), lose(1, "site-2"))
    found = coordinate(tmp_path, settings, channel)
    np.testing.assert_allclose(found[0], reference({(1, 1)}), rtol=1e-12)
    rows = exchanges(tmp_path)
    assert list(rows.loc[rows["site"] == "site-2", "outcome"]) == ["answered", "no answer", "answered", "answered"]
    assert rows.loc[rows["outcome"] == "no answer", "bytes_up"].eq(0).all()
    assert "site-2 did not answer within 1 s; going on without it" in log(tmp_path)
    assert "site-2 is back" in log(tmp_path)
    # The round after the loss asks the lost site, and does not wait for it.
    asked = [(requests, awaited) for task, requests, awaited in channel.waits if task == "work"]
    assert asked[2] == (set(SITES), {"site-1", "site-3"})
    assert asked[3] == (set(SITES), set(SITES))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda told: {"arrays": [np.full(4, np.nan)]}, "holds a NaN or an infinity"),
        (lambda told: {"arrays": [np.full(4, np.inf)]}, "holds a NaN or an infinity"),
        (lambda told: {"arrays": [np.zeros(5)]}, r"float64\[5\] instead of float64\[4\]"),
        (lambda told: {"arrays": [np.zeros(4, np.float32)]}, r"float32\[4\] instead of float64\[4\]"),
        (lambda told: {"arrays": [np.zeros(4), np.zeros(4)]}, "2 arrays instead of 1"),
        (lambda told: {"arrays": [[0.0] * 4]}, "something other than arrays"),
        (lambda told: {"arrays": "x"}, "something other than arrays"),
        (lambda told: {}, "something other than arrays"),
        (lambda told: {"refused": "I will not."}, "I will not"),
    ],
    ids=["nan", "infinite", "shape", "dtype", "count", "lists", "text", "nothing", "refused"],
)
def test_a_spoilt_reply_is_refused_and_named(tmp_path, reference, spoil, sentence):
    settings = settings_for("fedbio", ROUNDS, min_sites=2, **OPTIONS)
    found = coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings), lose(2, "site-3", spoil)))
    np.testing.assert_allclose(found[0], reference({(2, 2)}), rtol=1e-12)
    (row,) = exchanges(tmp_path).query("outcome != 'answered'").itertuples()
    assert (row.round, row.site) == (2, "site-3")
    assert row.outcome.startswith("refused")
    assert pd.Series([log(tmp_path)]).str.contains(f"the reply of site-3 was refused: .*{sentence}").all()


def test_with_too_few_good_replies_the_run_stops_with_a_sentence(tmp_path):
    settings = settings_for("fedbio", ROUNDS, **OPTIONS)
    spoil = lose(1, "site-3", lambda told: {"arrays": [np.full(4, np.nan)]})
    with pytest.raises(
        RunFailed, match=r"Only 2 of the 3 sites .* missing: site-3\. site-3: array 0 of its reply holds"
    ):
        coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings), spoil))


def test_a_missing_site_makes_the_run_wait_and_go_on_to_the_same_result(tmp_path, reference):
    settings = settings_for("fedbio", ROUNDS, **OPTIONS)
    with pytest.raises(
        TooFewSites, match=r"Only 2 of the 3 sites the run needs answered in round 3 .* missing: site-2\."
    ):
        coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings), lose(2, "site-2")))
    assert len(exchanges(tmp_path)) == 6, "the round that failed is not in the table"
    found = coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings)))
    np.testing.assert_allclose(found[0], reference(), rtol=1e-12)
    assert len(exchanges(tmp_path)) == 3 * ROUNDS


@pytest.mark.parametrize("moment", [1, 3, 5, 6, 8, 9])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_coordinator_dies_at_any_moment(tmp_path, reference, moment, when):
    """``moment`` counts replies; "after": the site has done its work, and its reply is lost with the coordinator."""
    settings = settings_for("fedbio", ROUNDS, record_every=1, **OPTIONS)
    done = []

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
        coordinate(tmp_path, settings, Dying(array_sites(tmp_path, settings), fault))
    found = coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings)))  # all processes are new
    np.testing.assert_allclose(found[0], reference(), rtol=1e-12)
    rows = exchanges(tmp_path)
    assert len(rows) == len(rows.drop_duplicates(["round", "site"])) == 3 * ROUNDS
    assert list(pd.read_csv(tmp_path / "runs/run/history.csv")["round"]) == [1, 2, 3, 4]
    assert read_status(tmp_path / "runs/run")["status"] == "complete"


def test_a_complete_run_is_not_run_again(tmp_path):
    settings = settings_for("fedbio", ROUNDS, **OPTIONS)
    first = coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings)))
    channel = Direct(array_sites(tmp_path, settings))
    again = coordinate(tmp_path, settings, channel)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[0], read_answers(tmp_path / "runs/run")[0][0])
    assert channel.waits == []


def test_sites_restart_between_any_two_rounds(tmp_path, reference):
    settings = settings_for("fedbio", ROUNDS, **OPTIONS)
    channel = Direct(array_sites(tmp_path, settings))
    usual = channel.ask

    def ask(task, requests, awaited, seconds):
        if task == "work":
            channel.all = array_sites(tmp_path, settings)
            prepare = {"digest": settings.digest, "stage": 0, "agreed": {}, "answers": []}
            usual("prepare", dict.fromkeys(SITES, prepare), set(SITES), 1)
        return usual(task, requests, awaited, seconds)

    channel.ask = ask
    found = coordinate(tmp_path, settings, channel)
    np.testing.assert_allclose(found[0], reference(), rtol=1e-12)


def test_a_site_that_lost_its_disk_enrols_anew_and_says_so(tmp_path, reference):
    settings = settings_for("fedbio", ROUNDS, **OPTIONS)

    def fault(task, name, request, told):
        if task == "work" and request["label"][1] == 2:
            raise Crash
        return told

    with pytest.raises(Crash):
        coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings), fault))
    shutil.rmtree(tmp_path / "site-2")
    found = coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings)))
    assert "site-2 had lost its state and enrolled anew" in log(tmp_path)
    assert np.abs(found[0] - reference()).max() > 1e-9, "another state gives another run, which is why it is said"


def test_a_coordinator_restored_from_an_old_backup_is_refused(tmp_path):
    longer = settings_for("fedbio", ROUNDS, run="long", **OPTIONS)
    states = []

    def fault(task, name, request, told):
        if task == "work" and name == "site-1":
            file = tmp_path / "runs/long/state.npz"
            states.append(file.read_bytes())
            if len(states) == ROUNDS:
                raise Crash
        return told

    with pytest.raises(Crash):
        coordinate(tmp_path, longer, Direct(array_sites(tmp_path, longer), fault))
    (tmp_path / "runs/long/state.npz").write_bytes(states[1])
    with pytest.raises(RunFailed, match="the coordinator went back too far"):
        coordinate(tmp_path, longer, Direct(array_sites(tmp_path, longer)))


def test_a_late_joiner_takes_part_from_the_round_it_joins(tmp_path, reference):
    settings = settings_for("fedbio", ROUNDS, min_sites=2, **OPTIONS)

    def fault(task, name, request, told):
        if task == "work" and request["label"][1] == 2:
            raise Crash
        return told

    with pytest.raises(Crash):
        coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings, ("site-1", "site-3")), fault))
    assert "absent: site-2" in log(tmp_path)
    found = coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings)))
    np.testing.assert_allclose(found[0], reference({(0, 1), (1, 1)}), rtol=1e-12)
    assert exchanges(tmp_path).groupby("round")["site"].count().tolist() == [2, 2, 3, 3]


def test_one_that_stays_away_is_named_at_the_end(tmp_path, reference):
    settings = settings_for("fedbio", ROUNDS, min_sites=2, **OPTIONS)
    found = coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings, ("site-1", "site-3"))))
    np.testing.assert_allclose(found[0], reference({(r, 1) for r in range(ROUNDS)}), rtol=1e-12)
    assert "without site-2 at the end" in read_status(tmp_path / "runs/run")["sentence"]


def test_a_folder_belongs_to_one_run_and_one_coordinator(tmp_path):
    settings = settings_for("fedbio", ROUNDS, **OPTIONS)
    record = Record(tmp_path / "run", settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbilevel.federation.protocol.record.LOCK_SECONDS", 0.0)
        with pytest.raises(RunFailed, match="Another coordinator is at work"):
            Record(tmp_path / "run", settings)
    record.close()
    with pytest.raises(RunFailed, match="holds another run of the name 'run'"):
        Record(tmp_path / "run", settings_for("fedbio", ROUNDS + 1, **OPTIONS))
    Record(tmp_path / "run", settings_for("fedbio", ROUNDS, min_sites=1, **OPTIONS)).close()
    assert json.loads((tmp_path / "run/settings.json").read_text())["min_sites"] == 1


def test_a_damaged_state_is_not_guessed_at(tmp_path):
    settings = settings_for("fedbio", ROUNDS, **OPTIONS)
    record = Record(tmp_path / "run", settings)
    (tmp_path / "run/state.npz").write_bytes(b"PK\x03\x04 damaged")
    with pytest.raises(RunFailed, match="cannot be read"):
        record.resume()
    record.close()
