"""``fedbilevel fairness`` as a user meets it: a quick run into a folder, going on from it, and clear refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pandas as pd
import pytest


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "fedbilevel.cli", "fairness", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


def test_help_has_an_example():
    assert "fedbilevel fairness --out" in run("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cases", "adult-sex,adult-age"], "fedbilevel: cases: 'adult-age' is unknown; choose among adult-sex,"),
        (["--cases", ","], "fedbilevel: cases is empty"),
        (["--splits", "1"], "--splits"),
    ],
)
def test_bad_options_are_one_sentence(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_quick_run_fills_its_folder_and_the_next_one_takes_its_rows(tmp_path):
    out = tmp_path / "fair"
    done = run("--quick", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "credit-status, noniid" in done.stdout
    assert "FedBiOAcc, cells" in done.stdout
    rows = pd.read_csv(out / "fairness-rows.csv")
    assert len(rows) == 2 * 2 * 8
    settings = json.loads((out / "fairness-settings.json").read_text(encoding="utf-8"))
    assert settings["steps"] == 100
    assert settings["splits_measured"]["credit-status"]["iid"]["FedMinMax group_step=0.1"] == 2
    assert settings["options"]["FedMinMax"]["risks"] == "sent"
    # Rows that carry this design's marks are believed, so a number put there must come back: nothing was run again.
    rows["test_gap"] = 0.25
    rows.to_csv(out / "fairness-rows.csv", index=False)
    again = run("--quick", "--out", str(out))
    assert again.returncode == 0, again.stderr
    assert "0.2500" in again.stdout
    assert pd.read_csv(out / "fairness-rows.csv")["test_gap"].eq(0.25).all()
