"""Table 1: what is run, on which rows, how a stopped run goes on, and that learning rates never see a test row."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedbilevel.datasets import load_credit, partition
from fedbilevel.fairness import FairFederatedClassifier, equal_opportunity_difference
from fedbilevel.problem import ClientData
from fedbilevel.runs import model_file, read
from fedbilevel.runs.files import digest
from fedbilevel.studies import table1
from fedbilevel.studies.data import SET_ASIDE, SOURCES, TEST_SHARE, make_case
from fedbilevel.studies.table1 import LABELS, RATES, SHORT, Design, Trial, from_configuration, named

SMALL = Design(("credit",), ("iid", "noniid"), ("fedavg", "fcfl"), seeds=3, steps=20)
PROGRAM = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
from fedbilevel.studies.table1 import Design, run
def report(standing):
    print(standing.done, flush=True)
run(Design(("credit",), ("iid", "noniid"), ("fedavg", "fcfl"), seeds=3, steps=20), sys.argv[1], report, workers=1)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    told = []
    run = table1.run(SMALL, tmp_path_factory.mktemp("table1") / "run", told.append, "fedbilevel table1", workers=2)
    assert [standing.done for standing in told] == sorted(standing.done for standing in told)
    assert (told[-1].done, told[-1].total) == (12, 12)
    return run


def same_rows(a, b):
    """All that was measured; the seconds it took are another matter."""
    for name in ("rows", "groups", "weights", "history"):
        left, right = (getattr(run, name).drop(columns="seconds", errors="ignore") for run in (a, b))
        pd.testing.assert_frame_equal(left, right, check_exact=True)


def test_the_full_design_is_the_papers():
    assert sum(len(trial.seeds) for trial in Design().trials()) == 240
    keys = [key for part in Design(grid=True).parts() for key in part.keys]
    assert len(keys) == len(set(keys)) == 960
    for dataset, batch in (("adult", 128), ("credit", 32)):
        for method in Design().methods:
            recipe = Design().recipe(dataset, method)
            assert recipe.batch_size == batch
            assert recipe.rounds == (2000 if method in ("fedminmax", "fcfl") else 400)
            assert (recipe.step, recipe.penalty, recipe.group_step) == (0.1, 0.1, 0.1)
    assert Design().recipe("adult", "fedbio").weight_rounds == 400
    # Where nothing is drawn at random, ten seeds on one split are one run; on ten splits they are not.
    assert [len(trial.seeds) for trial in Design().trials() if trial.method == "fcfl"] == [10] * 4
    assert all(trial.seeds == (trial.split_seed,) for trial in Design(splits="many").trials())
    # FedMinMax reads whole sets: its seeds on one split go side by side.
    sides = [trial.seeds for trial in Design(("credit",), ("iid",), ("fedminmax",), seeds=13).trials()]
    assert sides == [tuple(range(10)), (10, 11, 12)]
    assert from_configuration(json.loads(json.dumps(Design(grid=True).configuration()))) == Design(grid=True)


@pytest.mark.parametrize("distribution", ["iid", "noniid"])
@pytest.mark.parametrize(
    ("dataset", "encoding"), [("credit", "clean"), ("credit", "paper"), ("adult", "paper"), ("credit-status", "clean")]
)
def test_no_row_is_used_twice(dataset, encoding, distribution):
    """Rows of clients, validation and test part are all of them, each once."""
    case = make_case(dataset, distribution, 1, encoding)
    parts = {name: len(getattr(case, name).labels) for name in ("train", "validation", "test")}
    total = sum(parts.values())
    assert total == (32561 if dataset == "adult" else 1000)
    assert parts["test"] == round(TEST_SHARE * total)
    assert abs(parts["validation"] - SET_ASIDE * (1 - TEST_SHARE) * total) < 12
    data, whole, sizes = case.paper.bilevel, case.whole.bilevel, case.paper.model.train_sizes
    assert sizes.sum() == parts["train"]
    np.testing.assert_array_equal(data.train_sizes + data.val_sizes, sizes)
    assert data.val_sizes.min() >= (SOURCES[dataset].outer_batch or 0)

    def in_order(rows):
        return rows[np.lexsort(rows.T)]

    for held in (data.train, whole.train, whole.val):
        together = np.concatenate([np.asarray(held["features"])[k, :size] for k, size in enumerate(sizes)])
        np.testing.assert_array_equal(in_order(together), in_order(case.train.features))
    assert (together[:, -1] == 1).all()
    if dataset != "adult":  # where no two people are alike
        every = np.concatenate([getattr(case, name).features for name in parts])
        assert len(np.unique(every, axis=0)) == total
    for k, size in enumerate(data.val_sizes):
        counts = np.bincount(np.asarray(data.val["groups"])[k, :size], minlength=len(case.names))
        assert (counts == counts[0]).all(), "the validation set holds equally many rows of every group"
        first = data.train_sizes[k]
        held = np.asarray(data.val["features"])[k, :size]
        np.testing.assert_array_equal(held, np.asarray(data.train["features"])[k, first : first + size])
    if distribution == "noniid":
        largest = np.bincount(case.train.groups).argmax()
        groups = np.asarray(data.train["groups"])
        held = np.array([(groups[k, :size] == largest).sum() for k, size in enumerate(sizes)])
        np.testing.assert_allclose(np.sort(held / held.sum()), [0.2, 0.2, 0.6], atol=0.02)


def test_a_split_with_few_validation_rows_gets_a_smaller_batch():
    design, trial = Design(), Trial("credit", "iid", "fedbio", 0.1, 0, (0,))
    case = make_case("credit", "iid", 0, "clean")
    assert design.recipe_for(trial, case).outer_batch_size == 8
    bilevel = case.paper.bilevel
    few = ClientData(bilevel.train, bilevel.val, bilevel.train_sizes, np.array([16, 4, 16], np.int32))
    case = replace(case, paper=case.paper._replace(bilevel=few))
    assert design.recipe_for(trial, case).outer_batch_size == 4
    assert design.recipe_for(trial._replace(method="fedbio-cells"), case).outer_batch_size is None


def test_statistics_of_the_encoding_come_from_training_rows_only():
    case = make_case("credit", "iid", 0, "clean")
    numbers = case.train.features[:, case.padding : case.padding + len(case.encoder.numbers)]
    np.testing.assert_allclose(numbers.mean(axis=0), 0, atol=1e-6)
    assert np.abs(case.test.features[:, case.padding : case.padding + 3].mean(axis=0)).max() > 1e-3


def test_rows_tell_what_the_saved_models_do(finished):
    """Every model, loaded from its file, predicts the raw test rows as the table says."""
    data = load_credit("personal_status")
    assert len(finished.models) == 12
    for row in finished.rows.to_dict("records"):
        method = next(name for name, label in LABELS.items() if label == row["method"])
        trial = Trial("credit", row["split"], method, row["rate"], 0, (row["seed"],))
        case = make_case("credit", row["split"], 0, "clean")
        classifier = FairFederatedClassifier.load(model_file(finished, trial.key(row["seed"]).replace(" ", "-")))
        _, test = partition.train_test_split(data.groups, test_share=TEST_SHARE, seed=0)
        predicted = classifier.predict(data.X.iloc[test])
        truth = data.y.to_numpy()[test]
        assert row["test_accuracy"] == (predicted == truth).mean()
        gap = equal_opportunity_difference(truth, predicted, sensitive_features=data.groups.iloc[test])
        assert abs(row["test_gap"] - gap) < 1e-12
        accepted = case.validation.features[:, case.padding :] @ classifier.params_ > 0
        assert row["validation_accuracy"] == (accepted == case.validation.labels).mean()
        marks = ["split", "method", "seed"]
        last = finished.history.set_index(marks).loc[[tuple(row[mark] for mark in marks)]].iloc[-1]
        assert last["test_accuracy"] == row["test_accuracy"]
        assert last["bytes_up"] == row["bytes_up"] > 0
    groups = finished.groups.query("part == 'test' and split == 'iid' and method == 'FedAvg' and seed == 0")
    assert groups["count"].sum() == 300
    assert sorted(groups["group"]) == sorted(data.groups.unique())


def test_killed_and_started_again_gives_the_same(finished, tmp_path):
    def start(lines):
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
        while lines and (line := child.stdout.readline()):
            lines -= int(line) > 0
        if lines == 0:
            child.kill()
        child.communicate(timeout=120)

    start(2)
    kept = read(tmp_path / "run")
    assert kept.status == "running"
    assert 0 < len(kept.rows) < 12
    same_rows(table1.run(SMALL, tmp_path / "run", workers=1), finished)


def test_one_run_computed_again_is_the_same(finished, tmp_path):
    for seed in (0, 1):
        assert table1.verify(finished.path, seed).differences == {}
    rows = finished.path / "rows.csv"
    kept, about = rows.read_bytes(), (finished.path / "run.toml").read_text()
    try:
        first = finished.rows.assign(test_accuracy=0.5)
        first.to_csv(rows, index=False)
        with pytest.raises(ValueError, match="damaged or was changed"):
            table1.verify(finished.path, 0)
        old = about.split('"rows.csv" = "')[1].split('"')[0]
        (finished.path / "run.toml").write_text(about.replace(old, digest(rows.read_bytes())))
        assert set(table1.verify(finished.path, 0).differences) == {"test_accuracy"}
    finally:
        rows.write_bytes(kept)
        (finished.path / "run.toml").write_text(about)


def test_runs_side_by_side_are_kept_by_seed_and_verified(tmp_path):
    run = table1.run(Design(("credit",), ("iid",), ("fedminmax",), seeds=3, steps=20), tmp_path / "run", workers=1)
    assert run.rows["seed"].tolist() == [0, 1, 2]
    assert len(run.models) == 3
    assert run.history.groupby("seed")["objective"].last().nunique() == 3
    assert table1.verify(run.path, 0).differences == {}


def test_learning_rates_are_chosen_on_the_rows_set_aside(tmp_path):
    design = Design(("credit",), ("iid",), ("fedavg",), seeds=2, steps=20, grid=True)
    run = table1.run(design, tmp_path / "run", workers=1)
    every = pd.read_csv(tmp_path / "run" / "grid.csv")
    assert sorted(every["rate"].unique()) == sorted(RATES)
    assert len(every) == 8
    by_rate = every.groupby("rate")["validation_accuracy"].mean()
    best = run.rows["rate"].unique()
    assert len(best) == 1
    assert by_rate[best[0]] == by_rate.max()
    assert run.rows["setting"].unique() == [f"learning rate {best[0]:g}"]
    assert set(every.loc[every["chosen"], "rate"]) == {best[0]}
    assert len(run.models) == 2


def test_choice_ignores_test_rows_and_diverged_runs():
    class Folder:
        def __init__(self, rows):
            self.rows = rows

        def parts(self):
            return {key: {"rows": row} for key, row in self.rows.items()}

    design = Design(("credit",), ("iid",), ("fedavg",), seeds=1, steps=5, grid=True)
    said = {0.001: (0.7, 0.3, 0.9), 0.01: (0.8, 0.2, 0.1), 0.1: (0.8, 0.1, 0.0), 1.0: (np.nan, np.nan, 1.0)}
    rows = {}
    for trial in design.trials():
        accuracy, gap, test = said[trial.rate]
        marks = {
            "dataset": "credit",
            "split": "iid",
            "method": "FedAvg",
            "split_seed": 0,
            "seed": 0,
            "rate": trial.rate,
        }
        found = {"validation_accuracy": accuracy, "validation_gap": gap, "test_accuracy": test}
        rows[trial.key(0)] = pd.DataFrame([{**marks, **found}])
    order, extra = design.merged(Folder(rows))
    assert order == ["credit iid fedavg 0.1 0"], "the highest validation accuracy, of equals the smaller gap"
    assert extra["grid"]["chosen"].tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"datasets": ("compas",)}, "--datasets compas: unknown; choose from adult, credit"),
        ({"methods": ()}, "--methods is empty: name one or several of fedavg"),
        ({"splits": "two"}, "--splits two: unknown; choose one, many"),
        ({"metric": "accuracy"}, "--metric accuracy: unknown; choose equal_opportunity"),
        ({"seeds": 0}, "--seeds must be at least 1"),
    ],
)
def test_bad_options(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Design(**change)


def test_lists_of_methods():
    assert named("FedAvg, fcfl,") == ("fedavg", "fcfl")
    assert named("fedavg,ours", SHORT) == ("fedavg", "fedbio-cells", "fedbioacc-cells")
    assert len(named("all", SHORT)) == 8
    assert Design(methods=("fcfl", "fedavg")).methods == ("fedavg", "fcfl")
