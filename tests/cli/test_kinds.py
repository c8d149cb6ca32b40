"""Every kind of table: more than two classes, several sensitive columns, by ``fit`` and ``predict``; and ``export``."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pandas as pd
import pytest

from fedbilevel.fairness import FairFederatedClassifier, disparity
from fedbilevel.jobs.predict import fitted_model
from fedbilevel.runs import read

QUICK = ["--steps", "40", "--weight-steps", "20", "--batch-size", "16"]


def patients(rows=260, seed=0):
    """A disease in three stages, groups by sex and region, a missing cell here and there."""
    rng = np.random.default_rng(seed)
    sex, region = rng.choice(["f", "m"], rows), rng.choice(["east", "west"], rows, p=[0.3, 0.7])
    marker = rng.normal(size=rows) + 0.5 * (sex == "m")
    worse = marker + 0.6 * rng.normal(size=rows)
    frame = pd.DataFrame(
        {
            "marker": marker.round(3),
            "ward": rng.choice(["A", "B", "C"], rows),
            "smoker": rng.choice(["no", "yes"], rows),
            "sex": sex,
            "region": region,
            "stage": np.select([worse < -0.2, worse < 0.9], ["early", "late"], "middle"),
            "cost": (900 + 70 * marker - 30 * (region == "east") + 20 * rng.normal(size=rows)).round(2),
        }
    ).astype(object)
    frame.loc[3, "marker"] = ""
    frame.loc[5, "ward"] = "?"
    return frame


@pytest.fixture(scope="session")
def staged(tmp_path_factory):
    """(run folder, files, what the command said) of three classes by sex and region."""
    from tests.cli.conftest import command

    home = tmp_path_factory.mktemp("stages")
    files = [home / "north.csv", home / "south.csv"]
    for number, file in enumerate(files):
        patients(seed=number).drop(columns="cost").to_csv(file, index=False)
    named = ["--target", "stage", "--sensitive", "sex", "--sensitive", "region", "--minimum-cell", "5"]
    said = command("fit", *files, *named, *QUICK, "--threshold", "auto", "--out", home / "run")
    assert said.code == 0, said.err
    return home / "run", files, said


@pytest.fixture(scope="session")
def costed(tmp_path_factory):
    """The same of a number by region."""
    from tests.cli.conftest import command

    home = tmp_path_factory.mktemp("costs")
    files = [home / "north.csv", home / "south.csv"]
    for number, file in enumerate(files):
        patients(seed=number).drop(columns="stage").to_csv(file, index=False)
    quick = ["--steps", "200", "--weight-steps", "40", "--batch-size", "32"]
    said = command("fit", *files, "--target", "cost", "--sensitive", "region", *quick, "--out", home / "run")
    assert said.code == 0, said.err
    return home / "run", files, said


def women_and_men(groups):
    """The largest difference, over the classes, of how often women and men of it are recognised."""
    rates = groups[groups["by"] == "sex"].pivot(index="label", columns="group", values="true_positive_rate")
    return (rates["f"] - rates["m"]).abs().max()


def test_three_classes_from_files_to_page(staged):
    folder, _, said = staged
    run = read(folder)
    assert "3 classes: early, late, middle" in said.out
    assert run.rows["test_accuracy"].min() > 0.4
    assert run.rows[["test_gap", "test_gap_low", "test_balanced_accuracy", "gap_difference"]].iloc[-1].notna().all()
    # Of each class held against the others; and what the threshold of every class is.
    for name in ("auc", "brier"):
        ends = run.rows[[f"test_{name}_low", f"test_{name}", f"test_{name}_high"]]
        assert (ends.diff(axis=1).iloc[:, 1:] > 0).all(axis=None)
    crossed = run.groups[run.groups["by"] == "sex & region"]
    assert crossed[["auc", "brier", "calibration", "calibration_low"]].notna().all(axis=None)
    assert set(run.others["calibration"]["label"]) == {"early", "late", "middle"}
    assert run.rows["threshold"].str.match(r"early 0\.\d+, late 0\.\d+, middle 0\.\d+").all()
    for word in ("AUC", "Brier score", "threshold", "groups.csv and the page show every class"):
        assert word in said.out
    test = run.groups[(run.groups["part"] == "test") & (run.groups["method"] == "FedAvg")]
    # Both columns together, and each by itself, over the groups that are shown.
    assert test["by"].unique().tolist() == ["sex & region", "sex", "region"]
    women = test[(test["group"] == "f") & (test["by"] == "sex")]
    crossed = test[test["group"].str.startswith("f & ")]
    assert women["positives"].tolist() == crossed.groupby("label")["positives"].sum().tolist()
    gaps = run.others["gaps"]
    assert gaps["by"].tolist() == ["sex & region", "sex", "region"] * 4
    assert "by sensitive column" in said.out
    here = gaps[(gaps["part"] == "test") & (gaps["method"] == "FedAvg")].set_index("by")
    assert here["gap"]["sex"] == pytest.approx(women_and_men(test), abs=1e-9)
    assert here["gap"]["sex & region"] == run.rows["test_gap"].iloc[0]
    whole = test[test["group"] == "f & west"]
    assert whole["label"].tolist() == ["early", "late", "middle"]
    assert whole["positives"].sum() == whole["count"].iloc[0]
    assert len(run.weights) == 4 * 3
    page = (folder / "page.html").read_text()
    assert "f &amp; west, class late" in page
    assert "Predicted and observed" in page


def test_predictions_of_three_classes(call, staged, tmp_path):
    folder = staged[0]
    new = patients(60, seed=9)
    new.drop(columns="stage").to_csv(tmp_path / "new.csv", index=False)
    said = call("predict", folder, tmp_path / "new.csv", "--keep", "sex")
    assert said.code == 0, said.err
    found = pd.read_csv(io.StringIO(said.out))
    classes = ["early", "late", "middle"]
    chances = found[[f"probability {name}" for name in classes]]
    np.testing.assert_allclose(chances.sum(axis=1), 1, atol=2e-6)
    model = fitted_model(folder)
    multiples = chances.to_numpy() / model.threshold
    assert found["prediction"].tolist() == np.array(classes)[multiples.argmax(axis=1)].tolist()
    np.testing.assert_allclose(chances, model.probabilities(new), atol=1e-6)
    gap = disparity(new["stage"], found["prediction"], sensitive_features=new[["sex", "region"]])
    assert 0 <= gap.value <= 1
    again = call("predict", folder, tmp_path / "new.csv", "--keep", "probability late")
    assert (again.code, again.out) == (2, "")


@pytest.mark.parametrize("threshold", ["0.3", "rate=0.1", "recall=0.8"])
def test_thresholds_that_need_one_positive_class_are_refused_for_three(call, refused, staged, tmp_path, threshold):
    asked = ["--target", "stage", "--sensitive", "sex", "--out", tmp_path / "run", "--quiet"]
    words = f"threshold {threshold} is about one positive class, and there are 3 classes: auto weighs them"
    refused(call("fit", *staged[1], *asked, "--threshold", threshold), words)


def cells_of(model, frame, missing=("", "?")):
    """A table's columns as the graph takes them."""
    given = {}
    for column in model.encoder.columns:
        cells = frame[column.name].astype(str)
        numbers = pd.to_numeric(cells.where(~cells.isin(missing)), errors="coerce").to_numpy(float)
        given[column.name] = (numbers if column.kind == "number" else cells.to_numpy(object))[:, None]
    return given


@pytest.mark.parametrize("inputs", ["columns", "features"])
def test_onnx_says_what_the_model_says(call, staged, tmp_path, inputs):
    onnxruntime = pytest.importorskip("onnxruntime")
    folder = staged[0]
    file = tmp_path / "model.onnx"
    said = call("export", folder, "--onnx", file, "--inputs", inputs, "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["difference"] < 1e-6
    model, rows = fitted_model(folder), patients(80, seed=3)
    rows.loc[2, "ward"], rows.loc[4, "smoker"] = "Z", ""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    encoded = model.by_schema.transform(rows)
    given = cells_of(model, rows) if inputs == "columns" else {"features": encoded}
    prediction, chances = session.run(["prediction", "probabilities"], given)
    wanted = model.probabilities(rows)
    np.testing.assert_allclose(chances, wanted, rtol=0, atol=1e-6)
    assert prediction.tolist() == model.classes[model.decided(wanted)].tolist()


def test_onnx_of_two_classes_and_of_the_estimator(call, fitted, tmp_path):
    """A model's file, columns called like the outputs, and a matrix of numbers."""
    onnxruntime = pytest.importorskip("onnxruntime")
    folder, _, _ = fitted
    assert call("export", folder / "models" / "fedavg.npz", "--onnx", tmp_path / "a.onnx").code == 0
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"prediction": rng.normal(size=90), "probabilities": rng.choice(["a", "b"], 90)})
    y = (X["prediction"] + 0.3 * rng.normal(size=90) > 0).to_numpy().astype(int)
    for table in (X, X[["prediction"]].to_numpy()):
        network = {"model": "mlp", "hidden": 3, "random_state": 0}  # not every start gets anywhere in so few steps
        clf = FairFederatedClassifier("fedavg", steps=30, batch_size=16, history_rows=0, **network)
        file = clf.fit(table, y).save(tmp_path / "model.npz")
        said = call("export", file, "--onnx", tmp_path / "b.onnx")
        assert (said.code, "largest difference" in said.out) == (0, True), said.err
        session = onnxruntime.InferenceSession(tmp_path / "b.onnx", providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_outputs()]
        assert names == (["prediction_", "probabilities_"] if table is X else ["prediction", "probabilities"])
        given = {name: X[[name]].to_numpy() for name in X.columns} if table is X else {"X": table}
        prediction, chances = session.run(None, given)
        np.testing.assert_allclose(chances, clf.predict_proba(table), rtol=0, atol=1e-6)
        assert prediction.tolist() == clf.predict(table).tolist()


def test_exports_that_cannot_be_made_are_one_sentence(call, refused, fitted, tmp_path, monkeypatch):
    folder = fitted[0]
    file = folder / "models" / "fedavg.npz"
    refused(call("export", folder), "--onnx or --card is missing")
    refused(call("export", folder, "--onnx", tmp_path / "none" / "m.onnx"), "cannot be written")
    refused(
        call("export", folder, "--onnx", tmp_path / "m.onnx", "--inputs", "rows"),
        "--inputs must be columns or features",
    )
    refused(call("export", file, "--card", tmp_path / "card.md"), "--card needs the run folder")
    refused(call("export", file, "--onnx", tmp_path / "m.onnx", "--model", "FedAvg"), "is one model")
    monkeypatch.setitem(sys.modules, "onnx", None)
    refused(call("export", folder, "--onnx", tmp_path / "m.onnx"), "pip install 'fedbilevel[export]'")
    assert list(tmp_path.iterdir()) == []


def test_the_card_tells_data_results_and_limits(call, staged, fitted, tmp_path):
    folder = staged[0]
    text = (folder / "model-card.md").read_text()
    assert call("export", folder, "--card", tmp_path / "card.md", "--quiet") == (0, "", "")
    assert (tmp_path / "card.md").read_text() == text
    headings = [line for line in text.splitlines() if line.startswith("#")]
    for heading in ("## Model description", "### Intended uses & limitations", "## Training Procedure", "### Hyperparameters",
                    "## Evaluation Results", "## How to Get Started with the Model", "## Citation"):  # fmt: skip
        assert heading in headings
    run = read(folder)
    accuracy = run.rows.iloc[-1]
    shown = (
        f"{accuracy['test_accuracy']:.3f} [{accuracy['test_accuracy_low']:.3f}, {accuracy['test_accuracy_high']:.3f}]"
    )
    for words in ("one of 3 classes (`early`, `late`, `middle`)", "by `sex` and `region` (crossed)", shown, "| north |",
                  "| f & west | late |", "fedbilevel predict", run.line):  # fmt: skip
        assert words in text, words
    loans = (fitted[0] / "model-card.md").read_text()
    assert "`yes` or `no`" in loans
    assert "2 row(s) without a value of 'loan' were left out." in loans
    assert "`id` (an identifier" in loans


def test_a_number_from_files_to_page(call, costed, tmp_path):
    """In the units of the table: rows, measures, weights, page, card, predictions and graph."""
    folder, _, said = costed
    run, model = read(folder), fitted_model(folder)
    assert "a number (regression)" in said.out
    assert "gap of mean errors" in said.out
    assert (run.configuration["task"], run.configuration["metric"]) == ("regression", "mean_error")
    assert run.rows["test_r2"].between(0.7, 1).all()
    assert run.rows["test_rmse"].between(15, 45).all()
    assert run.rows[["test_gap_low", "rmse_difference", "gap_difference_high"]].iloc[-1].notna().all()
    assert run.rows["test_accuracy"].isna().all()
    tested = run.groups[run.groups["part"] == "test"]
    assert tested["mean_target"].between(800, 1000).all()
    assert (tested["mean_error_low"] < tested["mean_error_high"]).all()
    assert run.weights["label"].tolist() == ["below the mean", "above the mean"] * 2
    rows = patients(60, seed=9)
    rows.drop(columns=["stage", "cost"]).to_csv(tmp_path / "new.csv", index=False)
    predicted = call("predict", folder, tmp_path / "new.csv", "--keep", "sex")
    found = pd.read_csv(io.StringIO(predicted.out))
    assert found.columns.tolist() == ["sex", "prediction"]
    np.testing.assert_allclose(found["prediction"], model.predicted(rows), atol=1e-5)
    assert np.corrcoef(found["prediction"], rows["cost"].astype(float))[0, 1] > 0.8
    onnxruntime = pytest.importorskip("onnxruntime")
    assert call("export", folder, "--onnx", tmp_path / "m.onnx").code == 0
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (graph,) = session.run(["prediction"], cells_of(model, rows))
    np.testing.assert_allclose(graph, model.predicted(rows), rtol=1e-9)
    page, card = (folder / "page.html").read_text(), (folder / "model-card.md").read_text()
    for words in ("Means and errors of the groups", "gap of mean errors", "Test RMSE"):
        assert words in page, words
    for words in ("tabular-regression", "that predicts `cost`: a number", "| east |", "mean error"):
        assert words in card, words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--metric", "equal_opportunity"], "metric='equal_opportunity' does not suit a number"),
        (["--threshold", "auto"], "A threshold is for classes, and a number has none"),
        (["--loss", "absolute"], "loss must be one of"),
        (["--task", "classification"], "more than 20 values"),
        (["--model", "logistic"], "cannot predict a number, which takes model='linear'"),
    ],
)
def test_what_does_not_suit_a_number_is_one_sentence(call, refused, costed, tmp_path, options, words):
    named = ["--target", "cost", "--sensitive", "region", "--quiet", "--out", tmp_path / "run"]
    refused(call("fit", *costed[1], *named, *options), words)
