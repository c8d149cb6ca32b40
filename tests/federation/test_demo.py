"""The demo, end to end: one command, real processes, a complete run folder, nothing left."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import psutil
import pytest

pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")

from fedbilevel.jobs.predict import fitted_model
from fedbilevel.runs import read
from tests.federation.federation import LONG, wait_for

pytestmark = pytest.mark.federation

SITES = ["north", "south", "west"]


def demo(tmp_path, *words):
    home = tmp_path / "temporary"
    home.mkdir()
    # A shell lets its background jobs ignore Ctrl-C, and they hand that on; a handler of ours does not travel.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "fedbilevel.cli", "federate", "demo", "--out", str(tmp_path / "run"), *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(home), "XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


def left(tmp_path):
    """Processes that name a file of this demo."""
    found = []
    for process in psutil.process_iter():
        try:
            found += [process] if any(str(tmp_path) in word for word in process.cmdline()) else []
        except psutil.Error:
            continue
    return found


def test_one_command_trains_over_three_sites_and_cleans_up(tmp_path):
    process = demo(
        tmp_path, "--rows", "900", "--method", "fedbioacc", "--steps", "20", "--weight-steps", "10", "--json"
    )
    told, complaint = process.communicate(timeout=LONG)
    assert process.returncode == 0, complaint
    assert left(tmp_path) == []
    assert list((tmp_path / "temporary").iterdir()) == []
    answer = json.loads(told)
    run = read(tmp_path / "run")
    assert (run.command, run.status) == ("federate", "complete")
    assert run.configuration["sites"] == SITES
    (row,) = run.rows.itertuples()
    assert (row.rounds, row.steps) == (2 + 4, 30)
    # Every round and site is there, and the bytes are those of the arrays.
    exchanges = pd.read_csv(tmp_path / "run/exchanges.csv")
    assert len(exchanges) == 3 * 6
    assert set(exchanges["outcome"]) == {"answered"}
    assert exchanges["bytes_up"].sum() == row.bytes_up
    assert run.history.groupby("stage")["round"].max().to_dict() == {"model": 4, "weights": 2}
    assert np.isfinite(run.history["objective"]).all()
    # Rates of groups are those of the model on the rows: the sites' counts on theirs, ours on the test rows.
    assert set(run.groups["part"]) == {"train", "test"}
    train = run.groups[run.groups["part"] == "train"]
    assert train["count"].sum() == 900
    right = (train["accuracy"] * train["count"]).sum() / 900
    assert right == pytest.approx(row.train_accuracy)
    assert np.ptp(train["true_positive_rate"]) == pytest.approx(row.train_gap)
    assert list(run.weights["group"].unique()) == ["Female", "Male"]
    assert run.weights["weight"].sum() == pytest.approx(4)
    assert [one["rows"] for one in answer["sites"]] == [None] * 3, "they are told in sum"
    assert "Rows and rates of the sites are known in sum, and of no single one (secure sums)." in answer["notes"]
    assert fitted_model(tmp_path / "run").schema.target == "income"
    assert "FedBiOAcc" in (tmp_path / "run/page.html").read_text()


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path):
    process = demo(tmp_path, "--rows", "900", "--quiet")
    try:
        # The command itself, a server, three sites.
        wait_for(lambda: len(left(tmp_path)) >= 1 + 4 or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == 130
    assert complaint.startswith("fedbilevel: ")
    assert "Traceback" not in complaint
    assert left(tmp_path) == []
    assert list((tmp_path / "temporary").iterdir()) == []
