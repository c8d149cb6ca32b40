"""``fedbilevel fit``: the run folder, the ways to name sites, faults, and going on after a stop."""

from __future__ import annotations

import dataclasses
import errno
import json
import os

import numpy as np
import pandas as pd
import pytest

from fedbilevel import storage
from fedbilevel.fairness import bootstrap_difference
from fedbilevel.fairness.disclosure import Visible
from fedbilevel.jobs import fit as job
from fedbilevel.jobs.fit import FitOptions
from fedbilevel.jobs.measuring import differences
from fedbilevel.jobs.predict import fitted_model
from fedbilevel.jobs.sites import Part, joined, prepare, read_sites
from fedbilevel.runs import read
from fedbilevel.tables.encoder import Encoder, combine, parse, site_statistics
from fedbilevel.tables.reading import open_table
from fedbilevel.tables.schema import Schema


def test_the_folder_and_what_is_printed(fitted):
    folder, files, said = fitted
    run = read(folder)
    assert (run.command, run.status) == ("fit", "complete")
    assert run.configuration["metric"] == "equal_opportunity"
    assert run.configuration["files"] == [str(file) for file in files]
    assert run.line.startswith("fedbilevel fit ")
    assert run.rows["method"].tolist() == ["FedAvg", "FedPath"]
    assert run.rows["dataset"].tolist() == ["loan by sex"] * 2
    assert run.rows["test_accuracy"].between(0.6, 1).all()
    assert (run.rows["test_accuracy_low"] <= run.rows["test_accuracy"]).all()
    assert run.rows["bytes_up"].min() > 0
    assert run.rows["steps"].tolist() == [40, 32]
    assert run.weights["label"].tolist() == ["no", "yes"] * 2
    assert set(run.groups["part"]) == {"train", "test"}
    assert run.history["stage"].unique().tolist() == ["model"]
    assert run.models == ["fedavg", "fedpath"]
    path = pd.read_csv(folder / "frontier.csv")
    assert path.columns.tolist() == [
        "strength", "accuracy", "gap", "floor", "usable", "chosen", "test_accuracy", "test_gap", "method",
    ]  # fmt: skip
    assert path["strength"][path["chosen"]].tolist() == [5.0]
    used, row = path[path["chosen"]].iloc[0], run.rows.iloc[-1]
    for name in ("test_accuracy", "test_gap"):
        assert used[name] == pytest.approx(row[name])
    # With every row left out: about the training rows' own, and not better.
    assert row["train_accuracy"] - 0.03 < used["accuracy"] < row["train_accuracy"]
    assert used["gap"] == pytest.approx(row["train_gap"], abs=0.03)
    assert "Frontier: accuracy against gap" in (folder / "page.html").read_text()
    assert Schema.read(folder / "schema.toml").positive == "yes"
    for words in (
        "an identifier",
        "north",
        "FedPath",
        "95 % intervals",
        "recall",
        "AUC",
        "page.html",
    ):
        assert words in said.out
    assert "2 row(s) without a value of 'loan' were left out." in said.out
    assert "2 row(s) without a value of sex were left out." in said.out
    assert "FedAvg: 8/8" in said.err
    assert "\x1b" not in said.out + said.err


def test_calibration_and_the_pooled_limit(call, fitted, quick, tmp_path):
    """Both from files to the page: the gap, its interval, a sentence, and the limit beside the path."""
    _, files, _ = fitted
    said = call("fit", *files, *quick, "--metric", "calibration", "--pooled-frontier", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    run, page = read(tmp_path / "run"), (tmp_path / "run" / "page.html").read_text()
    assert "gap of calibration" in said.out
    assert "Probabilities promise" in said.out
    assert "the training rows of all sites were read in one place, on this machine" in said.out
    row, path = run.rows.iloc[-1], run.others["frontier"]
    assert row["test_gap_low"] <= row["test_gap"] <= row["test_gap_high"]
    assert row["gap_difference_low"] <= row["gap_difference"] <= row["gap_difference_high"]
    used = path[path["chosen"]].iloc[0]
    assert used["test_gap"] == pytest.approx(row["test_gap"], abs=1e-5)
    assert used["gap"] == pytest.approx(row["train_gap"], abs=5e-3), "with every row left out"
    first = path.iloc[0]
    for part in ("", "test_"):  # unweighted, both are the same logistic regression
        assert first[f"pooled_{part}gap"] == pytest.approx(first[f"{part}gap"], abs=2e-3)
    assert path["pooled_gap"].iloc[-1] < first["pooled_gap"]
    assert "Pooled: the same problem solved on the rows of all sites in one place" in page
    assert "calibration gap" in page


def test_the_same_command_again_shows_the_same(call, refused, fitted, quick):
    folder, files, said = fitted
    kept = {path.name: path.read_bytes() for path in folder.glob("*.csv")}
    again = call("fit", *files, *quick, "--out", folder)
    assert (again.code, again.out) == (0, said.out)
    assert kept == {path.name: path.read_bytes() for path in folder.glob("*.csv")}
    other = call("fit", *files, *quick, "--out", folder, "--seed", "3", "--quiet")
    refused(other, "was begun with seed = 0, and now seed is 3")
    assert kept == {path.name: path.read_bytes() for path in folder.glob("*.csv")}


def test_json_quiet_and_the_schema_file(call, refused, fitted, quick, tmp_path, table):
    """One file dealt to two clients, by a schema that was edited; FedAvg alone."""
    path = tmp_path / "all.csv"
    table(480).to_csv(path, index=False)
    schema = Schema.read(fitted[0] / "schema.toml")
    dataclasses.replace(schema, positive="no").write(tmp_path / "mine.toml")
    options = ["--method", "fedavg", "--steps", "40", "--batch-size", "16", "--schema", tmp_path / "mine.toml"]
    said = call("fit", path, *options, "--clients", "2", "--json", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert [row["method"] for row in found["rows"]] == ["FedAvg"]
    assert [site["site"] for site in found["sites"]] == ["client 1", "client 2"]
    assert found["weights"] == []
    positives = sum(group["positives"] for group in found["groups"])
    assert positives == ((table(480)["loan"] == "no") & table(480)["sex"].isin(["f", "m"])).sum()
    quiet = call("fit", path, *options, "--clients", "2", "--quiet", "--out", tmp_path / "run")
    assert quiet == (0, "", "")
    other = call("fit", path, *options, "--target", "job", "--out", tmp_path / "other")
    refused(other, "--target says 'job' but the schema")


def test_a_site_column_gives_the_same_as_one_file_a_site(fitted, tmp_path):
    folder, files, _ = fitted
    schema = Schema.read(folder / "schema.toml")
    frames = [pd.read_csv(file, dtype=str, keep_default_na=False).assign(where=file.stem) for file in files]
    pd.concat(frames).sample(frac=1, random_state=0).to_parquet(tmp_path / "all.parquet")
    by_column = dataclasses.replace(schema, site="where")
    apart = read_sites([open_table(file) for file in files], schema)
    together = read_sites([open_table(tmp_path / "all.parquet")], by_column)
    assert [site.name for site in together] == [site.name for site in apart] == ["north", "south"]
    for one, other in zip(apart, together, strict=True):
        assert one.left_out == other.left_out == (1, 1)
        assert sorted(one.cells) == sorted(other.cells)


def prepared_again(fitted, *which):
    """The rows of a run, or of some of its files, once more."""
    folder, files, _ = fitted
    schema = Schema.read(folder / "schema.toml")
    return prepare(read_sites([open_table(file) for file in which or files], schema), schema, test_share=0.3, seed=0)


def test_the_model_is_that_of_sites_that_share_sums_only(fitted):
    """Every site by itself: its split, its sums, its encoded rows; the arrays the training reads are the same."""
    folder, files, _ = fitted
    prepared = prepared_again(fitted)
    schema = prepared.encoder.schema
    alone = [prepared_again(fitted, file) for file in files]
    agreed = Encoder.from_statistics(schema, combine([site.encoder.statistics for site in reversed(alone)]))
    for one, other in zip(prepared.encoder.statistics, agreed.statistics, strict=True):
        np.testing.assert_array_equal(one, other)
    for part, site in zip(prepared.train, alone, strict=True):
        np.testing.assert_array_equal(part.labels, site.train[0].labels)
    frame = next(iter(open_table(files[0]).chunks()))
    np.testing.assert_array_equal(agreed.transform(frame), prepared.encoder.transform(parse(schema, frame)))
    assert fitted_model(folder).by_schema.means.tolist() == agreed.means.tolist()
    assert all(0.25 < len(test.labels) / 238 < 0.35 for test in prepared.test)


@pytest.fixture
def broken(call, refused, tmp_path, quick, table):
    """Check that ``fit`` refuses a changed table or other options."""

    def check(words, *options, change=None, content=None):
        path = tmp_path / "site.csv"
        if content is not None:
            path.write_bytes(content)
        else:
            table().assign(**(change or {})).to_csv(path, index=False)
        refused(call("fit", path, *quick, "--out", tmp_path / "run", "--quiet", *options), words)
        assert not (tmp_path / "run" / "run.toml").exists()

    return check


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        ([], {"loan": [f"v{i}" for i in range(240)]}, "it must be a class"),
        ([], {"sex": [f"g{i}" for i in range(240)]}, "makes more than 50 groups"),
        (["--target", "lone"], {}, "no column 'lone'; did you mean 'loan'?"),
        (["--clients", "100"], {}, "every site needs 4 at least"),
        (["--site", "job"], {"job": ["a"] * 238 + ["b"] * 2}, "The site 'b' has 2 row(s)"),
        (["--site", "job"], {}, "the site column 'job' is empty"),
        (["--site", "clinic"], {}, "there is no column 'clinic'"),
        (["--clients", "2", "--site", "job"], {"job": ["a", "b"] * 120}, "exclude each other"),
        (["--method", "fedsgd"], {}, "method must be one of"),
        (["--metric", "luck"], {}, "metric='luck' is unknown"),
        (["--strength", "much"], {}, "--strength must be a number or auto"),
        (["--strength", "1", "--method", "fedavg"], {}, "--strength means nothing to fedavg"),
        (
            ["--strength", "1", "--method", "fedbioacc", "--formulation", "paper"],
            {},
            "--strength means nothing to fedbioacc with the paper's",
        ),
        (["--formulation", "paper"], {}, "formulation='paper' takes two stages: name fedbioacc or fedbio"),
        (["--gap", "0.02", "--strength", "1"], {}, "strength and gap both say how much fairness to ask for"),
        (["--gap", "0.02", "--method", "fedreg"], {}, "gap is an aim along the path of fedpath, and fedreg has none"),
        (["--test-share", "1.5"], {}, "--test-share must lie between 0 and 1"),
        (["--pooled-frontier", "--method", "fedavg"], {}, "--pooled-frontier draws the limit of fedpath"),
        (["--model", "mlp"], {}, "fedpath follows the minimum of a convex loss, and a network's has many"),
        (["--compare-with", "luck"], {}, "--compare-with must be one of"),
        (["--schema", "none.toml"], {}, "There is no file none.toml"),
        (["--out", "/proc/none"], {}, "cannot be made"),
        (["--positive", "maybe"], {}, "--positive 'maybe' is no value of 'loan'"),
    ],
)
def test_bad_input_is_one_sentence(broken, options, change, words):
    broken(words, *options, change=change)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"loan,sex,age\n", "has no rows"),
        (b"loan,sex,age\nyes,f\n", "line 2: 2 field(s)"),
        (b"loan,sex,age\nyes,f,1\nno,m,\x00\n", "NUL"),
        (b"loan,sex,age\nyes,f,1\nno,m,2\n", "needs 4 at least"),
        (b"loan,sex,age\n" + b"yes,f,1\nno,m,1\n" * 20, "No column is left as a feature"),
    ],
)
def test_bad_files_are_one_sentence(broken, content, words):
    broken(words, content=content)


def test_sites_that_disagree_and_the_same_file_twice(call, refused, fitted, quick, tmp_path, table):
    _, files, _ = fitted
    other = tmp_path / "other.csv"
    table().rename(columns={"age": "years"}).to_csv(other, index=False)
    for second, words in ((other, "north has the column 'age', but other has not"), (files[0], "is named twice")):
        refused(call("fit", files[0], second, *quick, "--out", tmp_path / "run", "--quiet"), words)


def test_read_only_folder(call, refused, fitted, quick, tmp_path, monkeypatch):
    _, files, _ = fitted
    monkeypatch.setattr("fedbilevel.cli.terminal.os.access", lambda path, mode: mode != os.W_OK or path != tmp_path)
    refused(call("fit", *files, *quick, "--out", tmp_path, "--quiet"), "is read-only")


@pytest.mark.parametrize("fault", ["full disk", "Ctrl-C"])
def test_a_stopped_run_goes_on_and_ends_the_same(call, refused, fitted, quick, tmp_path, monkeypatch, fault):
    folder, files, _ = fitted
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        if fault == "full disk":
            real = storage.draft

            def full(target, *mode):
                if "fedpath" in target.name:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(target, *mode)

            patch.setattr(storage, "draft", full)
        else:
            usual = job.train

            def stopped(options, *rest, **more):
                if options.method == "fedpath":
                    raise KeyboardInterrupt
                return usual(options, *rest, **more)

            patch.setattr(job, "train", stopped)
        said = call("fit", *files, *quick, "--out", out, "--quiet")
    assert said.code == (2 if fault == "full disk" else 130)
    assert ("No space left" in said.err) == (fault == "full disk")
    assert said.err.count("\n") == 1
    assert read(out).rows["method"].tolist() == ["FedAvg"]
    refused(call("predict", out, files[0]), "is not finished")
    assert call("fit", *files, *quick, "--out", out, "--quiet").code == 0
    for table in ("rows", "groups", "weights", "history"):
        mine, whole = (getattr(read(path), table).drop(columns="seconds", errors="ignore") for path in (out, folder))
        pd.testing.assert_frame_equal(mine, whole)


def some_rows(rows=400, groups=3, seed=0):
    rng = np.random.default_rng(seed)
    part = Part(
        np.zeros((rows, 1), np.float32),
        rng.integers(0, 2, rows, dtype=np.int32),
        rng.integers(0, groups, rows, dtype=np.int32),
    )
    ours, theirs = (rng.random((2, rows)) < 0.3 + 0.4 * part.labels) ^ (rng.random((2, rows)) < 0.1)
    return part, ours, theirs


@pytest.mark.parametrize("metric", ["equal_opportunity", "equalized_odds", "demographic_parity"])
def test_differences_of_two_models_are_those_of_the_rows(metric):
    """Estimates are exact; intervals hold those of redrawn rows, which see less, and are at most twice as wide."""
    rows, ours, theirs = some_rows()
    groups = np.array(["a", "b", "c"])[rows.groups]
    visible = Visible(np.ones(3, bool), np.zeros(3, bool))
    found = differences(rows, ours, theirs, visible, metric)
    for name, prefix in ((metric, "gap"), ("accuracy", "accuracy")):
        pair = bootstrap_difference(name, rows.labels, ours.astype(int), theirs.astype(int), sensitive_features=groups)
        np.testing.assert_allclose(found[f"{prefix}_difference"], pair.estimate)
        width, theirs_width = (
            found[f"{prefix}_difference_high"] - found[f"{prefix}_difference_low"],
            pair.high - pair.low,
        )
        assert 0.8 * theirs_width < width < 2.2 * theirs_width
    left_out = differences(rows, ours, theirs, Visible(np.array([True, True, False]), np.zeros(3, bool)), metric)
    two = rows.take(rows.groups < 2)
    alone = differences(two, ours[rows.groups < 2], theirs[rows.groups < 2], visible, metric)
    assert left_out == alone


def test_the_strength_is_chosen_by_the_rule():
    choose = job._choice
    table = pd.DataFrame(
        {
            "strength": [0, 1, 2, 5],
            "accuracy": [0.85, 0.849, 0.846, 0.80],
            "gap": [0.2, 0.1, 0.05, 0.01],
            "usable": True,
        }
    )
    assert choose(table) == 2  # 5 is fairer and costs too much
    assert choose(table.assign(accuracy=[0.85, 0.80, 0.82, 0.81])) == 2  # all cost too much: the most accurate
    assert choose(table.assign(gap=[0.2, np.nan, 0.3, 0.1])) == 2
    assert choose(table.assign(usable=[True, True, False, True])) == 1  # the fairest one selects nobody
    assert choose(table.assign(usable=False)) == 2


def test_folds_hold_out_every_row_once_and_share_a_shape():
    rows, _, _ = some_rows(101)
    owner = job._folds(rows, seed=1)
    assert sorted(np.bincount(owner)) == [33, 34, 34]
    cells = 2 * rows.groups + rows.labels
    for cell in range(6):
        counts = np.bincount(owner[cells == cell], minlength=3)
        assert counts.max() - counts.min() <= 1
    assert {len(job._without(rows, owner, fold).labels) for fold in range(3)} == {67}


def test_strength_auto_looks_at_training_rows_only(call, fitted, quick, tmp_path, monkeypatch):
    """FedAvg stands in for every candidate, which saves compiling; the last fit is the real one."""
    _, files, _ = fitted
    monkeypatch.setitem(job.STRENGTHS, "cells", (5.0, 7.0))
    seen = []
    usual = job.train

    def noted(options, program, parts, *, record=True, **more):
        if record:
            return usual(options, program, parts, **more)
        seen.append((options.strength, joined(parts)))
        program = dataclasses.replace(program, recipe=dataclasses.replace(program.recipe, method="fedavg"))
        return usual(options, program, parts, record=False)

    monkeypatch.setattr(job, "train", noted)
    out = tmp_path / "run"
    said = call("fit", *files, *quick, "--strength", "auto", "--method", "fedbioacc", "--out", out, "--quiet")
    assert said.code == 0, said.err
    search = pd.read_csv(out / "strengths.csv")
    assert search["strength"].tolist() == [0.0, 5.0, 7.0]
    assert search["chosen"].tolist() == [False, True, False]
    assert search["accuracy"].between(0.6, 1).all()
    assert read(out).rows["setting"].tolist() == ["", "strength=5"]
    allowed = {row.tobytes() for row in joined(prepared_again(fitted).train).features}
    assert [strength for strength, _ in seen] == [None] * 3 + [5.0] * 3 + [7.0] * 3
    assert all(row.tobytes() in allowed for _, part in seen for row in part.features)


def test_options_reach_the_recipe():
    options = FitOptions(method="fedreg", strength=0.3, steps=7, batch_size=64, client_weights="samples")
    recipe = options.recipe(groups=2)
    assert (recipe.penalty, recipe.steps, recipe.batch_size, recipe.client_weights) == (0.3, 7, 64, "samples")
    assert options.program(5, 2, curvature=5.0).curvature == 5.0
    paper = FitOptions("fedbioacc", "paper").recipe(groups=2)
    assert (paper.train_on, paper.formulation.kind) == ("all", "paper")
    assert FitOptions(strength=2.0).recipe(groups=2).formulation.strength == 2.0
    assert FitOptions(strength="auto").recipe(groups=2).accuracy_loss == 0.005


def test_help_is_fast_and_has_an_example(imported):
    said, modules = imported("fit", "--help")
    assert "fedbilevel fit site1.csv site2.csv --target income" in said
    assert not {"jax", "pandas", "sklearn", "pyarrow"} & modules


def test_statistics_of_training_rows_only(fitted):
    folder, files, _ = fitted
    model = fitted_model(folder)
    schema = model.schema
    trained = prepared_again(fitted).encoder
    assert model.by_schema.means.tolist() == trained.means.tolist()
    assert model.by_schema.spreads.tolist() == trained.spreads.tolist()
    assert model.by_schema.statistics.rows.tolist() == [1], "a model file does not count rows"
    everything = [
        site_statistics(schema, site.rows) for site in read_sites([open_table(file) for file in files], schema)
    ]
    assert combine(everything).rows[0] == 476
