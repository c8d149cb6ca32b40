"""``fedbilevel predict``: the answer row by row, rules for cells, bounded memory, faults."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tracemalloc

import numpy as np
import pandas as pd
import pytest

from fedbilevel.fairness.saving import FittedModel
from fedbilevel.jobs.predict import Predictions, fitted_model
from fedbilevel.runs import read
from fedbilevel.tables.reading import open_table


def answer(said):
    assert said.code == 0, said.err
    return pd.read_csv(io.StringIO(said.out))


def by_hand(model, frame):
    """The logistic model on rows encoded cell by cell."""
    schema, encoder = model.schema, model.by_schema
    scaled = dict(
        zip([one.name for one in schema.numbers], zip(encoder.means, encoder.spreads, strict=True), strict=True)
    )
    out = []
    for _, row in frame.iterrows():
        features = []
        for column in schema.features:
            cell = str(row[column.name])
            missing = cell in schema.missing
            if column.kind == "number":
                mean, spread = scaled[column.name]
                features.append(0.0 if missing else (float(cell) - mean) / spread)
            else:
                features += [float(cell == value) for value in column.values]
                features += [float(not missing and cell not in column.values)] if column.pooled else []
            features += [float(missing)] if column.missing == "flag" else []
        out.append(1 / (1 + np.exp(-np.dot([*features, 1.0], np.asarray(model.params, np.float64)))))
    return np.array(out)


def test_one_row_for_every_row(call, fitted, table, tmp_path):
    folder, _, _ = fitted
    frame = table(50, seed=7).drop(columns=["loan", "sex"])
    frame.to_csv(tmp_path / "rows.csv", index=False, sep=";")
    said = call("predict", folder, tmp_path / "rows.csv", "--keep", "id", "--keep", "age")
    found = answer(said)
    assert list(found.columns) == ["id", "age", "prediction", "probability"]
    assert found["id"].tolist() == frame["id"].tolist()
    np.testing.assert_allclose(found["probability"], by_hand(fitted_model(folder), frame), atol=2e-6)
    np.testing.assert_array_equal(found["prediction"], np.where(found["probability"] > 0.5, "yes", "no"))
    assert "missing: age (1), job (1)" in said.err
    assert "rare among the training rows or new, read as their (other) values: job (1)" in said.err
    assert "no training row had" not in said.err


def test_measured_accuracy_is_that_of_the_predictions(call, fitted):
    folder, files, _ = fitted
    together = []
    for file in files:
        truth = pd.read_csv(file, keep_default_na=False)
        found = answer(call("predict", folder, file, "--quiet")).assign(loan=truth["loan"], sex=truth["sex"])
        together.append(found[(truth["loan"] != "") & (truth["sex"] != "NA")])
    rows = pd.concat(together)
    groups = read(folder).groups
    groups = groups[groups["method"] == "FedPath"]
    right = (groups["accuracy"] * groups["count"]).sum()
    assert round(right) == (rows["prediction"] == rows["loan"]).sum()


def test_other_models_formats_and_files(call, fitted, tmp_path):
    folder, files, _ = fitted
    frame = pd.read_csv(files[0], dtype=str, keep_default_na=False)
    frame.to_parquet(tmp_path / "rows.parquet")
    plain = call("predict", folder, files[0], "--model", "FedAvg", "--quiet")
    assert plain.err == ""
    assert call("predict", folder, tmp_path / "rows.parquet", "--model", "FedAvg", "--quiet").out == plain.out
    assert plain.out != call("predict", folder, files[0], "--quiet").out
    out = tmp_path / "answer.csv"
    assert call("predict", folder, files[0], "--model", "FedAvg", "--quiet", "--out", out) == (0, "", "")
    assert out.read_text() == plain.out
    lines = call("predict", folder, files[0], "--json", "--keep", "id").out.splitlines()
    assert len(lines) == len(frame)
    assert set(json.loads(lines[0])) == {"id", "prediction", "probability"}


def test_no_rows_no_predictions(call, fitted, tmp_path):
    (tmp_path / "rows.csv").write_text("age,score,job\n")
    said = call("predict", fitted[0], tmp_path / "rows.csv")
    assert (said.code, said.out, said.err) == (0, "prediction,probability\n", "0 rows\n")


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("age,score\n1,2\n", [], "there is no column 'job'"),
        ("age,score,jobs\n1,2,cook\n", [], "no column 'job'; did you mean 'jobs'?"),
        ("age,score,job\n1,2,cook\nold,2,cook\n", [], "line 3: the column 'age' must hold numbers"),
        ("age,score,job\n1,2\n", [], "line 2: 2 field(s)"),
        ("age,score,job\n1,2,cook\n", ["--keep", "name"], "no column 'name'"),
        ("age,score,job,prediction\n1,2,cook,x\n", ["--keep", "prediction"], "rename it"),
        ("age,score,job\n1,2,cook\n", ["--model", "luck"], "has no model 'luck'; there are 'FedAvg', 'FedPath'"),
        ("age,score,job\n1,2,cook\n", ["--out", "/proc/none/x.csv"], "cannot be written"),
    ],
)  # fmt: skip
def test_bad_rows_are_one_sentence(call, fitted, tmp_path, content, options, words):
    (tmp_path / "rows.csv").write_text(content)
    said = call("predict", fitted[0], tmp_path / "rows.csv", *options)
    assert said.code == 2
    assert words in said.err
    assert said.err.count("\n") == 1


def test_a_fault_leaves_an_earlier_answer_intact(call, fitted, tmp_path):
    (tmp_path / "rows.csv").write_text("age,score,job\n1,2,cook\nold,2,cook\n")
    out = tmp_path / "answer.csv"
    out.write_text("kept")
    assert call("predict", fitted[0], tmp_path / "rows.csv", "--out", out).code == 2
    assert out.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answer.csv", "rows.csv"]


@pytest.mark.parametrize("damage", ["cut", "none", "other", "newer"])
def test_damaged_models_are_one_sentence(call, refused, fitted, tmp_path, damage):
    folder = shutil.copytree(fitted[0], tmp_path / "run")
    model = folder / "models" / "fedpath.npz"
    words = {"cut": "damaged", "none": "has no model", "other": "damaged", "newer": "format 9"}[damage]
    if damage == "cut":
        model.write_bytes(model.read_bytes()[:200])
    elif damage == "none":
        model.unlink()
    else:
        arrays = dict(np.load(model))
        if damage == "other":
            arrays["params0"] = np.zeros(2, np.float32)
        else:
            about = json.loads(bytes(arrays["about"])) | {"format": 9}
            arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        np.savez(model, **arrays)
    refused(call("predict", folder, fitted[1][0]), words)


def test_folders_without_a_model(call, fitted, tmp_path):
    said = call("predict", tmp_path / "none", fitted[1][0])
    assert (said.code, "There is no folder" in said.err) == (2, True)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        FittedModel.read(tmp_path / "none.npz")
    np.savez(tmp_path / "other.npz", about=np.frombuffer(b'{"format": 1}', np.uint8))
    with pytest.raises(ValueError, match="is damaged"):
        FittedModel.read(tmp_path / "other.npz")


def test_memory_does_not_grow_with_the_rows(fitted, tmp_path):
    model = fitted_model(fitted[0])
    peaks = []
    for rows in (1000, 4000):
        (tmp_path / "rows.csv").write_text("age,score,job\n" + "31,0.5,cook\n" * rows)
        predictions = Predictions(model, open_table(tmp_path / "rows.csv"), rows=250)
        sizes = []
        tracemalloc.start()
        sizes = [len(frame) for frame in predictions]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (sum(sizes), max(sizes)) == (rows, 250)
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_one_sentence(fitted):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fedbilevel.cli", "predict", fitted[0], fitted[1][0], "--quiet"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
