"""An audit over sites: the same numbers as from the files, up to the bins; and nothing but counts leaves a site."""

import numpy as np
import pandas as pd
import pytest

from fedbilevel.federation.operator.rehearsal import in_words, rehearse
from fedbilevel.federation.protocol.coordinator import Coordinator
from fedbilevel.federation.protocol.policy import Policy, Source
from fedbilevel.federation.protocol.program import make_program
from fedbilevel.federation.protocol.record import Record
from fedbilevel.federation.protocol.settings import RunFailed
from fedbilevel.jobs import audit
from fedbilevel.tables.reading import open_table
from tests.cli.test_audit import kinds, rows
from tests.federation.direct import OPEN, Direct, site

COLUMNS = ("ill", "chance", "said", "sex", "stage", "p early", "p late", "p middle", "cost", "guess")
TELLS = {"tell": ("report",), "minimum_cell": 10}
FRAMES = {"site-1": rows(400, 1), "site-2": rows(300, 2)}


@pytest.fixture
def tables(tmp_path):
    for name, frame in FRAMES.items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    return [open_table(tmp_path / f"{name}.csv") for name in FRAMES]


def asked(home, schema, options=None, policies=None, out="out", **job):
    """(the channel, the result) of an audit over the sites."""
    options = options or audit.AuditOptions()
    settings = audit.job(schema, options, list(FRAMES), **job)
    policies = policies or {}
    sources = {name: Source(table=home / f"{name}.csv", columns=COLUMNS) for name in FRAMES}
    channel = Direct(
        {
            name: site(home, name, settings, source, **{**TELLS, **policies.get(name, {})})
            for name, source in sources.items()
        }
    )

    def supervised():
        record = Record(home / "runs" / settings.run, settings)
        try:
            Coordinator(settings, make_program(settings.program, settings.arguments, ()), record, channel).run()
        finally:
            record.close()
        return home / "runs" / settings.run

    return channel, audit.federated(settings, schema, options, home / out, supervised)


@pytest.mark.parametrize("prediction", ["chance", "said"])
def test_sites_give_the_numbers_of_the_files(tables, tmp_path, prediction):
    schema = audit.question(tables, "ill", prediction, ["sex"])
    here = audit.run(tables, schema, tmp_path / "here", audit.AuditOptions()).run
    channel, there = asked(tmp_path, schema)
    rough = {"test_auc"}
    numbers = [
        name for name in here.rows if name.startswith("test_") and name.rsplit("_", 1)[0] not in rough | {"test"}
    ]
    assert there.run.rows["split"].tolist() == here.rows["split"].tolist() == [*FRAMES, "all sites"]
    for name in numbers:
        if not name.startswith("test_auc"):
            np.testing.assert_allclose(there.run.rows[name], here.rows[name], rtol=1e-9, err_msg=name)
    if prediction == "chance":
        np.testing.assert_allclose(there.run.rows["test_auc"], here.rows["test_auc"], atol=0.01)
        assert (there.run.rows["test_auc"] != here.rows["test_auc"]).any(), "binned"
    for name in ("count", "positives", "true_positive_rate", "true_positive_rate_low", "accuracy"):
        pd.testing.assert_series_equal(there.run.groups[name], here.groups[name])
    assert {task for task, _, _ in channel.seen} == {"finish"}
    for _, _, answer in channel.seen:
        assert set(answer) == {"numbers"}
        told = answer["numbers"]
        scores = {name for name in told if name.startswith("scores/")}
        assert set(told) - scores == {"decisions", "hidden", "absent"}
        assert bool(scores) == (prediction == "chance")
        for counts in (told["decisions"].sum(axis=-1), told.get("scores/counts", np.zeros(0))):
            assert not ((counts > 0) & (counts < 10)).any()


@pytest.mark.parametrize(("target", "prediction"), [("stage", "p"), ("stage", "said"), ("cost", "guess")])
def test_three_classes_and_numbers_at_sites_are_those_of_the_files(tmp_path, target, prediction):
    for number, name in enumerate(FRAMES):
        kinds(300 + 100 * number, number).to_csv(tmp_path / f"{name}.csv", index=False)
    tables = [open_table(tmp_path / f"{name}.csv") for name in FRAMES]
    schema = audit.question(tables, target, prediction, ["sex"])
    here = audit.run(tables, schema, tmp_path / "here", audit.AuditOptions()).run
    channel, there = asked(tmp_path, schema)
    for name in here.rows:
        if name.startswith("test_") and not name.startswith("test_auc"):
            np.testing.assert_allclose(there.run.rows[name], here.rows[name], rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(there.run.rows["test_auc"], here.rows["test_auc"], atol=0.03)
    kept = [name for name in here.groups if here.groups[name].dtype.kind == "f" and not name.startswith("auc")]
    np.testing.assert_allclose(there.run.groups[kept], here.groups[kept], rtol=1e-9)
    what = {"cost": {"moments"}, "stage": {"decisions"}}[target] | {"hidden", "absent"}
    for _, _, answer in channel.seen:
        assert {name for name in answer["numbers"] if not name.startswith("scores/")} == what


def test_small_groups_stay_at_their_site(tables, tmp_path):
    frame = rows(300, 5, rare=6)
    frame.to_csv(tmp_path / "site-2.csv", index=False)
    schema = audit.question([tables[0], open_table(tmp_path / "site-2.csv")], "ill", "chance", ["sex"])
    channel, there = asked(tmp_path, schema)
    (told,) = [answer["numbers"] for _, name, answer in channel.seen if name == "site-2"]
    assert told["hidden"].tolist() == [0, 0, 2]
    assert told["decisions"].sum() == len(frame) - 6
    assert any("does not tell the group(s) x" in sentence for sentence in there.warnings)


def test_a_site_that_tells_nothing_is_named_and_one_that_cannot_stops_the_run(tables, tmp_path):
    schema = audit.question(tables, "ill", "chance", ["sex"])
    _, there = asked(tmp_path, schema, policies={"site-2": {"tell": ()}}, run="silent")
    assert any("site-2 told nothing and is not counted" in sentence for sentence in there.warnings)
    assert there.run.rows["split"].tolist() == ["all sites"]
    FRAMES["site-2"].assign(chance=7).to_csv(tmp_path / "site-2.csv", index=False)
    with pytest.raises(RunFailed, match="Only 1 of the 2 sites the run needs reported; missing: site-2"):
        asked(tmp_path, schema, run="broken", out="broken")


def test_who_approves_it_reads_what_it_does(tables, tmp_path):
    schema = audit.question(tables, "ill", "chance", ["sex"])
    settings = audit.job(schema, audit.AuditOptions(), ["site-1"])
    source = Source(table=tmp_path / "site-1.csv", columns=COLUMNS)
    policy = Policy(source, **{**OPEN, **TELLS})
    left, said = rehearse("site-1", settings, policy)
    words = " ".join(in_words(settings, policy, tmp_path, left, said))
    assert "It trains nothing" in words
    assert "It reads chance." in words
    assert "Nothing else leaves." in words
    assert {thing.task for thing in left} == {"finish"}


@pytest.mark.parametrize(("target", "prediction"), [("ill", "chance"), ("cost", "guess")])
def test_an_audit_of_few_rows_tells_nothing(tmp_path, target, prediction):
    """Cells that are large enough do not make a table that is: the minimum of rows holds for reports too."""
    for number, name in enumerate(FRAMES):
        few = kinds(300, number) if target == "cost" else rows(300, number)
        few[few["sex"] == few["sex"].iloc[0]].iloc[: 15 if name == "site-1" else 60].to_csv(
            tmp_path / f"{name}.csv", index=False
        )
    tables = [open_table(tmp_path / f"{name}.csv") for name in FRAMES]
    schema = audit.question(tables, target, prediction, ["sex"])
    told_of = audit.AuditOptions(minimum_cell=1)
    channel, _ = asked(
        tmp_path, schema, told_of, policies={"site-1": {"minimum_rows": 20, "minimum_cell": 1}}, min_sites=1
    )
    told = {name: answer["numbers"] for _, name, answer in channel.seen}
    assert told["site-1"] == {}
    assert told["site-2"]
