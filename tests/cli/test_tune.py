"""``fedbilevel tune``: the run folder, going on after a stop, predictions, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from fedbilevel.jobs import tune as job
from fedbilevel.jobs.tune import TuneOptions
from fedbilevel.runs import read
from fedbilevel.tables.reading import open_table
from fedbilevel.tables.schema import infer
from tests.cli.conftest import command

OPTIONS = ("--rounds", "5", "--splits", "2", "--minimum-cell", "1")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One table a site, of three columns that say something and one that does not; at "south" some labels are flipped."""
    rng, folder, made = np.random.default_rng(0), tmp_path_factory.mktemp("sites"), []
    for name, flipped in (("north", 0.0), ("south", 0.2)):
        age, sort, noise = (
            rng.normal(50, 10, 90).round(1),
            rng.choice(["red", "blue"], 90),
            rng.normal(size=90).round(2),
        )
        ill = (age - 50) / 5 + 2 * (sort == "red") + rng.normal(size=90) > 1
        ill = ill ^ (rng.random(90) < flipped)
        frame = pd.DataFrame({"age": age, "sort": sort, "noise": noise, "ill": np.where(ill, "yes", "no")})
        made.append(folder / f"{name}.csv")
        frame.to_csv(made[-1], index=False)
    return made


@pytest.fixture(scope="module")
def tuned(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    said = command("tune", *files, "--target", "ill", "--what", "penalties,sites,rows", *OPTIONS, "--out", folder)
    assert said.code == 0, said.err
    return folder, said


def test_the_folder_and_what_is_printed(tuned):
    folder, said = tuned
    run = read(folder)
    assert (run.command, run.status) == ("tune", "complete")
    assert run.rows["method"].tolist() == ["Search of 20", "Tuned"]
    assert run.rows["trainings"].tolist() == [21, 1]
    assert run.rows["bytes"][0] > 15 * run.rows["bytes"][1]
    assert run.rows["test_accuracy"].min() > 0.6
    assert run.models == ["search-of-20", "tuned"]
    learned = run.others["choices"]
    assert learned["split"].unique().tolist() == [0, 1]
    first = learned[learned["split"] == 0]
    assert first.loc[first["kind"] == "penalty", "name"].tolist() == ["common", "age", "sort", "noise"]
    assert first.loc[first["kind"] == "site weight", "name"].tolist() == ["north", "south"]
    assert len(run.others["candidates"]) == 20
    for words in ("What was learned", "site weight", "Search of 20", "page.html"):
        assert words in said.out
    assert "split 2: 5/5" in said.err


def test_doubtful_rows_are_listed_for_their_site_and_counted_elsewhere(tuned):
    folder, _ = tuned
    counts = read(folder).others["doubtful"].set_index("site")["doubtful_rows"].astype(int)
    for name in ("north", "south"):
        assert len(pd.read_csv(folder / "doubtful" / f"{name}.csv")) == counts[name]


def test_the_page_says_what_was_learned(tuned):
    page = (tuned[0] / "page.html").read_text()
    for words in ("Tuned across sites", "Penalties", "Whose data helps", "the search took 21 trainings", "doubtful"):
        assert words in page


def test_predictions_are_the_tuned_models(tuned, files):
    folder, _ = tuned
    said = command("predict", folder, files[0])
    assert said.out.startswith("prediction,probability\n")
    assert said.out.count("\n") == 91


def test_a_run_that_was_stopped_goes_on(files, tmp_path):
    tables = [open_table(file) for file in files]
    schema = infer(tables, target="ill", sensitive=[])
    options = TuneOptions(rounds=4, splits=2, minimum_cell=1, compare=False)
    whole = job.run(tables, schema, tmp_path / "whole", options).run

    def stops(what, done, total):
        if what == "split 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(tables, schema, tmp_path / "stopped", options, tell=stops)
    assert read(tmp_path / "stopped").status != "complete"
    after = job.run(tables, schema, tmp_path / "stopped", options).run
    pd.testing.assert_frame_equal(after.others["choices"], whole.others["choices"])


def test_a_site_with_one_class_is_refused_whatever_the_schema_says(files, tmp_path):
    tables = [open_table(file) for file in files]
    schema, south = infer(tables, target="ill", sensitive=[]), tmp_path / "south.csv"
    pd.read_csv(files[1]).assign(ill="yes").to_csv(south, index=False)
    with pytest.raises(ValueError, match="The site 'south' has only rows of the class 'yes'"):
        job.run([tables[0], open_table(south)], schema, tmp_path / "out")


def test_numbers_and_machines(files, tmp_path):
    said = command("tune", *files, "--target", "age", "--no-search", *OPTIONS, "--out", tmp_path / "age", "--json")
    told = json.loads(said.out)
    assert told["rows"][0]["method"] == "Tuned"
    assert "test_rmse" in told["rows"][0]
    assert {row["kind"] for row in told["learned"]} == {"penalty"}


@pytest.mark.parametrize(
    ("change", "more", "sentence"),
    [
        (lambda frame: frame.assign(ill="yes"), (), "The target 'ill' has no row with 'no' at south"),
        (lambda frame: frame.head(3), (), "'south' has 3 row(s) with a target (of 3)"),
        (lambda frame: frame, ("--site", "clinic"), "there is no column 'clinic'"),
        (lambda frame: frame, ("--what", "penalty"), "what must be among penalties"),
        (lambda frame: frame, ("--what", "penalties,features"), "for each column of the table, or for each feature"),
        (lambda frame: frame, ("--folds", "1"), "folds"),
    ],
)
def test_bad_input_gets_one_sentence(files, tmp_path, change, more, sentence):
    south = tmp_path / "south.csv"
    change(pd.read_csv(files[1])).to_csv(south, index=False)
    said = command("tune", files[0], south, "--target", "ill", *more, "--out", tmp_path / "out")
    assert (said.code, said.err.count("\n") < 9) == (2, True)
    assert sentence in " ".join(said.err.replace("│", " ").split())
    assert not (tmp_path / "out" / "rows.csv").exists()
