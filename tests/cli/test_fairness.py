"""``fedbilevel fairness`` as a user meets it: a folder that lacks one measurement, its page, and clear refusals."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from fedbilevel.runs import RunFolder
from fedbilevel.studies.fairness import QUICK, ROWS, standard

GAP = 0.125


def test_help_has_an_example(process):
    assert "fedbilevel fairness --out" in process("fairness", "--help").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cases", "adult-sex,adult-age"], "fedbilevel: --cases names 'adult-age', which is unknown; choose from"),
        (["--splits", "1"], "--splits"),
        (["--as-it-is"], "--as-it-is is for the study over tables"),
        (
            ["--as-it-is", "--tables", "bar", "--out", "."],
            "--as-it-is needs --out: name the folder of a run that was begun",
        ),
    ],
)
def test_bad_options_are_one_sentence(call, arguments, words):
    done = call("fairness", *arguments)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


def test_only_what_is_missing_in_the_folder_is_run(process, call, tmp_path):
    """Rows of the quick design with an invented gap, but one split: the command must run that and keep the others."""
    out = tmp_path / "run"
    with RunFolder.open(out, command="fairness", configuration=QUICK.configuration(), grows=True) as folder:
        for slice in QUICK.slices()[1:]:
            rows = []
            for entry in QUICK.entries(slice):
                row = {"case": slice.case, "distribution": slice.distribution, "split": slice.number}
                row |= {"method": entry.label, "setting": entry.setting, "default": True, "weights": ""}
                for part in ("train", "aside", "test"):
                    row |= {f"{part}_{name}": GAP for name in ("accuracy", "gap", "gap_majority", "lead")}
                rows.append(row)
            folder.save(slice.key, rows=standard(pd.DataFrame(rows)), others={ROWS: pd.DataFrame(rows)})
    done = process("fairness", "--quick", "--out", out)
    assert done.code == 0, done.err
    for words in (
        "German Credit by status, non-I.I.D. clients", "FedBiOAcc, cells", "With 2 splits the intervals say little",
        "not a measurement",
    ):  # fmt: skip
        assert words in done.out
    assert "4/4, done" in done.err
    kept = pd.read_csv(out / "fairness-rows.csv")
    assert len(kept) == 2 * 2 * 11
    measured = kept[kept["test_gap"] != GAP]
    assert measured[["distribution", "split"]].drop_duplicates().values.tolist() == [["iid", 0]]
    assert len(measured) == 11
    assert measured["test_gap"].between(0, 1).all()
    settings = json.loads((out / "fairness-settings.json").read_text(encoding="utf-8"))
    assert settings["steps"] == 100
    assert settings["splits_measured"]["credit-status"]["iid"]["FedMinMax group_step=0.1"] == 2
    assert settings["options"]["FedMinMax"]["risks"] == "sent"
    refused = call("fairness", "--out", out)
    assert refused.code == 2
    assert "was begun with quick = True, and now quick is False: name another folder" in " ".join(refused.err.split())
    assert call("report", out, "--quiet").code == 0
    assert "FedBiOAcc, cells" in (out / "page.html").read_text()
    assert "run (2)" in call("compare", out, out).out
