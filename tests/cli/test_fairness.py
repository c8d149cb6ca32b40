"""``fedbilevel fairness`` as a user meets it: a folder that lacks one measurement, and clear refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from fedbilevel.studies.fairness.design import entries
from fedbilevel.studies.fairness.study import QUICK


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
        (["--splits", "1"], "--splits"),
    ],
)
def test_bad_options_are_one_sentence(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_only_what_is_missing_in_the_folder_is_run(tmp_path):
    """Rows of the quick design with an impossible gap of 2, but one: the command must run that one and keep the others."""
    rows = []
    for job in QUICK.jobs():
        for entry in entries(QUICK, job):
            row = {"case": job.case, "distribution": job.distribution, "split": job.split, "method": entry.label}
            row |= {"setting": entry.setting, "default": True, "weights": "", "design": entry.mark()}
            for part in ("train", "aside", "test"):
                names = ("accuracy", "gap", "gap_majority", "lead")
                row |= {f"{part}_{name}": 0.9 if name == "accuracy" else 2.0 for name in names}
            rows.append(row)
    missing = next(i for i, row in enumerate(rows) if (row["method"], row["split"]) == ("FedAvg", 1))
    pd.DataFrame(rows).drop(index=missing).to_csv(tmp_path / "fairness-rows.csv", index=False)
    done = run("--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "German Credit by status, non-I.I.D. clients" in done.stdout
    assert "FedBiOAcc, cells" in done.stdout
    assert "With 2 splits the intervals say little" in done.stdout
    assert "not a measurement" in done.stdout
    found = pd.read_csv(tmp_path / "fairness-rows.csv")
    assert len(found) == len(rows) == 2 * 2 * 10
    measured = found[found["test_gap"] != 2]
    assert measured[["method", "split"]].values.tolist() == [["FedAvg", 1]]
    assert measured["test_gap"].between(0, 1).all()
    settings = json.loads((tmp_path / "fairness-settings.json").read_text(encoding="utf-8"))
    assert settings["steps"] == 100
    assert settings["splits_measured"]["credit-status"]["iid"]["FedMinMax group_step=0.1"] == 2
    assert settings["options"]["FedMinMax"]["risks"] == "sent"
    refused = run("--out", str(tmp_path))
    assert refused.returncode == 2
    assert f"holds {len(rows)} rows measured with other options" in " ".join(refused.stderr.split())
