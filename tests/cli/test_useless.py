"""No useless model is called fair: a consortium of three files with 8 % positives, told the truth by the real command."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from fedbilevel.jobs.predict import fitted_model
from fedbilevel.report.reading import estimates, reading_of
from fedbilevel.runs import read

FIT = ["--target", "ill", "--sensitive", "group", "--steps", "400", "--weight-steps", "20", "--batch-size", "32"]


def site(number, rows=700):
    """8 % positives, hardly told by the score at probability 0.5; the group r has two positives in all."""
    rng = np.random.default_rng(number)
    group = rng.choice(["a", "b"], rows)
    score = rng.normal(size=rows)
    chance = 1 / (1 + np.exp(-(score - 2.9)))
    ill = rng.random(rows) < chance
    frame = pd.DataFrame({"score": score.round(3), "age": rng.integers(20, 80, rows), "group": group})
    frame["ill"] = np.where(ill, "yes", "no")
    rare = pd.DataFrame(
        {"score": [0.5] * 12, "age": 50, "group": "r", "ill": ["yes" if number else "no", *["no"] * 11]}
    )
    return pd.concat([frame, rare], ignore_index=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    home = tmp_path_factory.mktemp("consortium")
    paths = [home / f"{name}.csv" for name in ("north", "south", "west")]
    for number, path in enumerate(paths):
        site(number).to_csv(path, index=False)
    return paths


@pytest.fixture(scope="module")
def plain(files):
    from tests.cli.conftest import command

    out = files[0].parent / "plain"
    said = command("fit", *files, *FIT, "--out", out)
    assert said.code == 0, said.err
    return said, read(out), out


def test_a_model_that_selects_nobody_is_called_so_everywhere(plain, call, files):
    said, run, out = plain
    assert (run.rows["test_selection_rate"] < 0.004).all()
    assert not run.rows["usable"].any()
    codes = set(run.others["findings"]["code"])
    assert {"selects-nobody", "groups-left-out"} <= codes
    words = "FedAvg says yes to"
    page = (out / "page.html").read_text()
    assert words in said.out
    assert "use --threshold auto or --class-weight balanced" in said.out
    assert "FedPath says yes to" in page
    assert words in (out / "findings.csv").read_text()
    as_json = json.loads(call("fit", *files, *FIT, "--out", out, "--json").out)
    assert any(words in sentence for sentence in as_json["warnings"])
    assert {finding["code"] for finding in as_json["findings"]} == codes
    told = reading_of(run)
    assert {estimate.verdict for estimate in estimates(told, [*told.main, *told.shown_at("more")]).values()} == {""}
    assert "☆" not in page
    assert "★" not in page


def test_a_group_of_two_positives_is_in_no_file_and_not_in_the_gap(plain):
    said, run, out = plain
    assert set(run.groups["group"]) == {"a", "b"}
    assert "the group(s) r are left out of every table, total and gap" in said.out
    counts = run.groups[run.groups["method"] == "FedAvg"].groupby("part")[["count", "positives"]].sum()
    whole = pd.concat([site(number) for number in range(3)])
    shown = whole[whole["group"] != "r"]
    assert counts["count"].sum() == len(shown)
    assert counts["positives"].sum() == (shown["ill"] == "yes").sum()
    # Nothing that is written counts the rows of r: no total to subtract the others from.
    texts = [file.read_text() for file in out.glob("*.csv")] + [said.out, (out / "page.html").read_text()]
    for total in (len(whole), len(whole) // 3, int((whole["ill"] == "yes").sum())):
        assert not any(f"{total:,}" in text for text in texts if total > 999)


def test_minimum_cell_of_one_shows_all_and_its_interval_sees_how_few_two_are(call, files, tmp_path):
    said = call("fit", *files, *FIT, "--minimum-cell", "1", "--compare-with", "none", "--threshold", "0.05",
                "--out", tmp_path / "run")  # fmt: skip
    assert said.code == 0, said.err
    run = read(tmp_path / "run")
    assert set(run.groups["group"]) == {"a", "b", "r"}
    (row,) = run.rows.to_dict("records")
    few = run.groups[(run.groups["group"] == "r") & (run.groups["part"] == "test")]["positives"].item()
    if few:
        assert row["test_gap_high"] - row["test_gap_low"] > 0.4
        assert "few-rows" in set(run.others["findings"]["code"])
    else:
        assert "group-without-positives" in set(run.others["findings"]["code"])


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        (["--threshold", "auto"], lambda row: row["test_balanced_accuracy"] > 0.6),
        (["--threshold", "rate=0.2"], lambda row: abs(row["test_selection_rate"] - 0.2) < 0.06),
        (["--threshold", "recall=0.8"], lambda row: row["test_true_positive_rate"] > 0.6),
        (["--class-weight", "balanced"], lambda row: row["test_balanced_accuracy"] > 0.6),
        (["--threshold", "0.08"], lambda row: row["test_balanced_accuracy"] > 0.6),
    ],
)
def test_the_ways_out(call, files, tmp_path, options, holds):
    said = call("fit", *files, *FIT, *options, "--json", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    told = json.loads(said.out)
    for row in told["rows"]:
        assert holds(row), row
        assert row["test_auc"] > 0.65
    assert not any(finding["code"].startswith("selects") for finding in told["findings"])
    assert "FedAvg" in {finding["method"] for finding in told["findings"]}
    # The model file holds the threshold, and predict decides by it.
    model = fitted_model(tmp_path / "run")
    assert model.threshold == told["rows"][-1]["threshold"]
    answer = call("predict", tmp_path / "run", files[0], "--quiet")
    frame = pd.read_csv(__import__("io").StringIO(answer.out))
    sure = (frame["probability"] - model.threshold).abs() > 1e-6  # printed with six digits
    assert ((frame["prediction"] == "yes") == (frame["probability"] > model.threshold))[sure].all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--threshold", "often"], "threshold must be a number between 0 and 1, auto, or a rule"),
        (["--threshold", "rate=2"], "threshold must be a number between 0 and 1"),
        (["--class-weight", "heavy"], "class_weight must be balanced"),
        (
            ["--class-weight", "balanced", "--method", "fcfl"],
            "fcfl takes no class weights; use fedpath, fedbioacc, fedbio or fedavg",
        ),
        (["--class-weight", "balanced", "--compare-with", "fedreg"], "fedreg takes no class weights"),
    ],
)
def test_options_that_cannot_be_are_refused_in_a_sentence(call, files, tmp_path, options, words):
    said = call("fit", *files, *FIT, *options, "--quiet", "--out", tmp_path / "run")
    assert said.code == 2
    assert words in said.err
    assert said.err.count("\n") == 1


def test_a_site_without_positives_is_named(call, files, tmp_path):
    """A small one, where chance may do that; of a large one the command says that it cannot be, and stops."""
    pd.read_csv(files[2]).head(60).assign(ill="no").to_csv(tmp_path / "west.csv", index=False)
    said = call("fit", *files[:2], tmp_path / "west.csv", *FIT, "--class-weight", "balanced", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    assert "The site west has no positives: check how the target is written there" in said.out
    assert not read(tmp_path / "run").rows["usable"].any()
