"""Every kind of run over real processes, on a federation that is started once: fits, audits and tuning."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from fedbilevel import storage
from fedbilevel.engines.stages import TELL
from fedbilevel.federation.nvflare.job import RUNS
from fedbilevel.federation.protocol.policy import FILE, Source
from fedbilevel.jobs import audit, federate, tune
from fedbilevel.jobs.fit import FitOptions
from fedbilevel.jobs.predict import fitted_model
from fedbilevel.runs import read
from fedbilevel.tables.reading import open_table
from fedbilevel.tables.schema import Column, Schema
from tests.cli.test_audit import kinds
from tests.federation.direct import SITES, Direct, coordinate, site
from tests.federation.federation import LONG

pytestmark = pytest.mark.federation

FEATURES = (Column("guess", center=900.0), Column("p early"), Column("p late"))
CROSSED = ("f & east", "f & west", "m & east", "m & west")
TWO = Schema("stage", ("early", "late", "middle"), "late", ("sex", "region"), CROSSED, FEATURES)
THREE = Schema("stage", ("early", "late", "middle"), None, ("sex",), ("f", "m"), FEATURES)
NUMBER = Schema("cost", (), None, ("sex",), ("f", "m"), FEATURES, task="regression", center=900.0)
QUICK = {"steps": 20, "weight_steps": 10, "batch_size": 32, "compare_with": None}
FITS = {
    "two": (FitOptions(class_weight="balanced", threshold="auto", compare_with=None), TWO),  # the default method
    "three": (FitOptions("fedreg", threshold="auto", **QUICK), THREE),
    "number": (
        FitOptions("fedfb", task="regression", model="linear", metric="mean_error", loss="huber", **QUICK),
        NUMBER,
    ),
}
AUDITS = {"stage": "p", "cost": "guess"}


@pytest.fixture
def tables(federation, tmp_path):
    """The sites' tables, which they offer; at the last one few rows are from the east."""
    kept = {name: (federation.kits.sites[name] / "local" / FILE).read_text() for name in SITES}
    opened = []
    for number, name in enumerate(SITES):
        frame = kinds(400, number)
        if number == 2:
            frame["region"] = np.where(frame.index < 25, "east", "west")
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        opened.append(open_table(tmp_path / f"{name}.csv"))
        data = {"table": str(opened[-1].path.resolve()), "columns": list(frame.columns)}
        policy = {"data": data, "policy": {"tell": list(TELL)}, "approve": {"auto": True, "schemas": ["any"]}}
        federation.offer(name, storage.toml_text(policy))
    yield opened
    for name, policy in kept.items():
        federation.offer(name, policy)


def test_fits_and_audits_of_classes_and_numbers(federation, tables, tmp_path):
    """The models are those of sites in one process; the audits' numbers those of the files."""
    settings = {name: federate.job(fit, schema, SITES, run=f"kinds-{name}") for name, (fit, schema) in FITS.items()}
    orders = {name: federation.supervise(one) for name, one in settings.items()}
    audits = {target: audit_both_ways(federation, tables, tmp_path, target, said) for target, said in AUDITS.items()}
    wanted = {}
    for name, one in settings.items():  # meanwhile
        in_this_process(tmp_path, one)
        folder = tmp_path / one.run / "runs" / one.run
        federate.run(one, *FITS[name], tmp_path / f"alone-{name}", lambda folder=folder: folder)
        wanted[name] = fitted_model(tmp_path / f"alone-{name}").params
    for name, (fit, schema) in FITS.items():
        assert orders[name].finish()["status"] == "complete"
        out = tmp_path / f"run-{name}"
        result = federate.run(settings[name], fit, schema, out, lambda name=name: orders[name].folder)
        model = fitted_model(out)
        np.testing.assert_allclose(model.params, wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)
        row = result.run.rows.iloc[-1]
        assert row["train_gap_low"] <= row["train_gap"] <= row["train_gap_high"]
        if name == "two":
            assert 0 < model.threshold < 1
            assert model.threshold != 0.5
            assert result.run.others["gaps"]["by"].tolist() == ["sex & region", "sex", "region"]
            assert any("one of the sites" in said and "they count as one there" in said for said in result.warnings)
            assert len(result.run.weights) == 8
        if name == "three":
            assert model.threshold.sum() == pytest.approx(1)
            assert row["train_auc_low"] < row["train_auc"] < row["train_auc_high"]
        if name == "number":
            assert np.isfinite(row[["train_rmse", "train_r2_low", "train_mean_error"]].astype(float)).all()
    for target, (audited, here) in audits.items():
        told, complaint = audited.communicate(timeout=LONG)
        assert audited.returncode == 0, complaint
        rows = pd.DataFrame(json.loads(told)["rows"])
        for name in ("gap", "gap_low", *(("rmse", "r2") if target == "cost" else ("accuracy", "brier"))):
            np.testing.assert_allclose(rows[f"test_{name}"], here.rows[f"test_{name}"], rtol=1e-9, err_msg=name)
        assert len(read(tmp_path / target).groups)


def in_this_process(folder, settings):
    """The last of a run's arrays, from sites with the same tables."""
    sources = {each: Source(table=folder / f"{each}.csv", columns=tuple(kinds(1, 0).columns)) for each in SITES}
    here = {
        each: site(folder / settings.run, each, settings, source, tell=TELL, minimum_cell=10)
        for each, source in sources.items()
    }
    return coordinate(folder / settings.run, settings, Direct(here))[-1]


def test_tuning_by_command(federation, tables, tmp_path):
    """`federate tune`, with secure sums as it comes: the model of sites in one process, and a page."""
    schema = Schema("stage", TWO.classes, "late", (), ("everybody",), FEATURES)
    schema.write(tmp_path / "schema.toml")
    told = command(
        federation, "tune", "--schema", tmp_path / "schema.toml", "--rounds", "2", "--folds", "2", "--run", "kinds-tune",
        "--out", tmp_path / "tuned", "--json",
    )  # fmt: skip
    options = tune.TuneOptions(("penalties",), folds=2, rounds=2, splits=1, compare=False)
    wanted = in_this_process(tmp_path, tune.job(schema, options, SITES, run="kinds-tune", secure=True))
    answer, complaint = told.communicate(timeout=LONG)
    assert told.returncode == 0, complaint
    assert json.loads(answer)["folder"] == str(tmp_path / "tuned")
    np.testing.assert_allclose(fitted_model(tmp_path / "tuned").params, wanted, rtol=1e-4, atol=1e-5)
    assert set(read(tmp_path / "tuned").others["choices"]["kind"]) == {"penalty"}
    assert (tmp_path / "tuned/page.html").exists()
    log = (federation.kits.server / RUNS / "kinds-tune/log.txt").read_text()
    assert "secure sums of 3 sites or more: no single reply is seen" in log


def audit_both_ways(federation, tables, folder, target, prediction):
    """(The command at work on the sites, the audit of their files.)"""
    schema = audit.question(tables, target, prediction, ["sex"])
    schema.write(folder / f"{target}.toml")
    words = ("--schema", folder / f"{target}.toml", "--json", "--out", folder / target)
    return command(federation, "audit", *words), audit.run(
        tables, schema, folder / f"here-{target}", audit.AuditOptions()
    ).run


def command(federation, name, *words):
    """`federate NAME`, at work on the sites."""
    sites = (word for each in SITES for word in ("--site", each))
    kits = ("--admin", federation.kits.admin, "--server", federation.kits.server)
    return subprocess.Popen(
        [sys.executable, "-m", "fedbilevel.cli", "federate", name, *words, *kits, *sites],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=federation.environment,
    )  # fmt: skip
