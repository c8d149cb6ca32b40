"""The fairness experiment: its splits, its choices, its tables, and a small run that is stopped and goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedbilevel.runs import read
from fedbilevel.studies import fairness
from fedbilevel.studies.data import make_case, widened
from fedbilevel.studies.fairness import GRIDS, Design, Slice, choose, choose_once, expected_gap, summarise

SMALL = Design(("credit-status",), ("iid",), splits=2, grid_cases=(), steps=40, weight_steps=20)


@pytest.fixture(scope="module")
def case():
    return make_case("credit-status", "noniid", 3)


def test_a_split_is_a_function_of_its_number(case):
    again, other = (make_case("credit-status", "noniid", number) for number in (3, 4))
    np.testing.assert_array_equal(again.test.features, case.test.features)
    assert not np.array_equal(other.test.features, case.test.features)
    with pytest.raises(ValueError, match="distribution must be one of"):
        make_case("credit-status", "sorted", 0)


def test_widened_adds_zeros_before():
    features, padding = widened(np.full((1, 2), 5.0, np.float32), 4)
    assert (features.tolist(), padding) == ([[0, 0, 5, 5]], 2)
    with pytest.raises(ValueError, match="do not fit"):
        widened(np.zeros((1, 3), np.float32), 2)


def everything(design, case):
    slices = [Slice(case, "iid", 0, slow, grid) for slow in (False, True) for grid in (False, True)]
    return [entry for slice in slices for entry in design.entries(slice)]


def test_grids_have_equal_sizes_and_hold_their_defaults():
    entries = everything(Design(), "adult-sex")
    for method in GRIDS:
        settings = [entry for entry in entries if entry.label == method]
        assert len(settings) == 4
        assert sum(entry.default for entry in settings) == 1
        assert len({entry.recipe for entry in settings}) == 4
    assert {entry.label for entry in Design().entries(Slice("adult-sex", "iid", 0, True, False))} == {"FCFL"}
    assert len(everything(Design(grid_cases=()), "credit-status")) == 11


def test_slices_cover_every_entry_of_every_split_once_and_the_first_case_first():
    design = Design(splits=4)
    slices = design.slices()
    ran = [(*slice[:3], entry.label, entry.setting) for slice in slices for entry in design.entries(slice)]
    assert len(ran) == len(set(ran)) == 3 * 2 * 4 * 23
    assert [slice.case for slice in slices[:16]] == ["adult-sex"] * 16
    assert len({part.keys for part in design.parts()}) == len(slices)


def test_designs_by_name():
    assert fairness.chosen_design() == fairness.FULL
    assert fairness.chosen_design(quick=True) == fairness.QUICK
    wanted = fairness.chosen_design("credit-status, adult-sex", 5, grids=False)
    assert (wanted.cases, wanted.splits, wanted.grid_cases) == (("credit-status", "adult-sex"), 5, ())


def test_floor_of_two_groups_is_the_mean_of_a_folded_normal():
    counts, rate = np.array([400, 2000]), 0.6
    spread = np.sqrt(rate * (1 - rate) * np.sum(1 / counts))
    assert expected_gap(counts, rate) == pytest.approx(np.sqrt(2 / np.pi) * spread, rel=0.03)
    both = np.sqrt(spread**2 + rate * (1 - rate) * np.sum(1 / np.array([800, 4000])))
    assert expected_gap(counts, rate, 2 * counts) == pytest.approx(np.sqrt(2 / np.pi) * both, rel=0.03)
    assert expected_gap(np.array([400, 0]), rate) == 0
    with pytest.raises(ValueError, match="rate must lie"):
        expected_gap(counts, 1.5)


def test_floors_of_a_case_grow_with_small_groups():
    found = fairness.floors(pd.DataFrame({"case": ["credit-status", "c"]}), splits=2).set_index("case")
    assert found.index.tolist() == ["credit-status"]
    row = found.loc["credit-status"]
    assert row["smallest"] < 15 < row["largest"]
    assert 0.1 < row["fair"] < row["fair_in_training"] < 0.6


def made_up(splits=6, seed=0):
    """Rows as the experiment would give them: method B has two settings, one fair and one accurate."""
    rng = np.random.default_rng(seed)
    rows = []
    for split in range(splits):
        shared = 0.01 * rng.normal()
        for method, setting, default, accuracy, gap in (
            ("FedAvg", "", True, 0.85, 0.10),
            ("FedReg", "penalty=1", True, 0.83, 0.01),
            ("FedReg", "penalty=2", False, 0.848, 0.06),
            ("FedBiOAcc, cells", "strength=5", True, 0.849, 0.03),
        ):
            row = {"case": "c", "distribution": "iid", "split": split, "method": method, "setting": setting}
            row |= {"default": default, "weights": ""}
            for part in ("train", "aside", "test"):
                noise = 0.001 * rng.normal(size=2)
                row |= {f"{part}_accuracy": accuracy + shared + noise[0], f"{part}_gap": gap + shared / 5 + noise[1]}
                row[f"{part}_gap_majority"] = row[f"{part}_lead"] = row[f"{part}_gap"]
            rows.append(row)
    return pd.DataFrame(rows)


def test_choices_are_made_on_rows_set_aside_under_the_accuracy_rule():
    rows = made_up()
    of = rows["setting"] == "penalty=2"
    # The fairer setting of FedReg costs two points, so the other is chosen, whatever the test rows say.
    chosen = choose(rows.assign(test_gap=rows["test_gap"].mask(of, 0.9)))
    assert set(chosen[chosen["method"] == "FedReg"]["setting"]) == {"penalty=2"}
    assert len(chosen) == 6 * 3
    # A split without all settings is not chosen from; without an allowed setting the most accurate is taken.
    chosen = choose(rows[~(of & (rows["split"] > 3))])
    assert chosen[chosen["method"] == "FedReg"]["split"].tolist() == [0, 1, 2, 3]
    assert set(choose(rows[~of])["setting"]) == {"", "penalty=1", "strength=5"}
    # One choice for all splits goes by means, so that one bad split changes nothing.
    rows.loc[of, "aside_accuracy"] = 0.849
    rows.loc[of & (rows["split"] == 3), "aside_accuracy"] = 0.5
    assert "penalty=1" in set(choose(rows)["setting"])
    rows.loc[of, "aside_accuracy"] = 0.849
    assert set(choose_once(rows)["setting"]) == {"", "penalty=2", "strength=5"}
    assert len(choose_once(rows)) == 6 * 3


def test_tables_hold_means_and_paired_differences():
    rows = made_up()
    tables = summarise(rows)
    student = tables["table"][tables["table"]["interval"] == "student"].set_index(["method", "metric"])
    ours = rows[rows["method"] == "FedBiOAcc, cells"]["test_gap"].to_numpy()
    base = rows[rows["method"] == "FedAvg"]["test_gap"].to_numpy()
    row = student.loc[("FedBiOAcc, cells", "test_gap")]
    assert row["mean"] == pytest.approx(ours.mean())
    assert row["difference"] == pytest.approx((ours - base).mean())
    assert row["excludes_zero"]
    duel = tables["duels"].set_index(["choice", "against"]).loc[("each split", "FedReg")]
    assert duel["dominates"]
    assert duel["gap"] == pytest.approx(-0.03, abs=0.003)
    assert len(tables["fronts"]) == 4


def test_a_method_with_fewer_splits_is_compared_on_those_it_has():
    rows = made_up()
    rows = rows[~((rows["method"] == "FedReg") & (rows["split"] > 2))]
    table = fairness.compare(rows[rows["default"]]).set_index(["method", "metric", "interval"])
    assert table.loc[("FedReg", "test_gap", "student"), "splits"] == 3
    assert table.loc[("FedAvg", "test_gap", "student"), "splits"] == 6


def test_a_small_run_is_a_folder_that_goes_on(tmp_path):
    told = []
    first = fairness.run(tmp_path, replace(SMALL, splits=1), told.append, workers=1).tables["rows"]
    assert told[-1][:2] == (1, 1)
    told.clear()
    rows = fairness.run(tmp_path, SMALL, told.append, workers=1).tables["rows"]
    assert [standing.done for standing in told] == [1, 2]
    assert rows.groupby("method")["split"].nunique().tolist() == [2] * 11
    before = first.set_index("method")["test_accuracy"]
    after = rows[rows["split"] == 0].set_index("method")["test_accuracy"]
    pd.testing.assert_series_equal(before, after)
    assert {file.name for file in tmp_path.glob("fairness-*")} == {
        "fairness-rows.csv", "fairness-table.csv", "fairness-settings.json", "fairness-differences.png",
        "fairness-differences.svg", "fairness-floors.csv",
    }  # fmt: skip
    assert rows["test_accuracy"].between(0.5, 1).all()
    kept = read(tmp_path)
    assert kept.rows[["dataset", "split", "seed", "split_seed"]].drop_duplicates().values.tolist() == [
        ["credit-status", "iid", 0, 0], ["credit-status", "iid", 1, 1],
    ]  # fmt: skip
    assert kept.rows["validation_gap"].tolist() == rows["aside_gap"].tolist()


def by_dice(case, label, recipe, setting, default):
    """What `evaluate` gives, without training."""
    rng = np.random.default_rng(case[2])
    row = {"case": case[0], "distribution": case[1], "split": case[2], "method": label, "setting": setting}
    row |= {"default": default, "weights": ""}
    for part in ("train", "aside", "test"):
        row |= {f"{part}_{name}": rng.random() for name in ("accuracy", "gap", "gap_majority", "lead")}
    return row


def test_another_command_adds_to_a_folder_and_other_options_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fairness, "evaluate", by_dice)
    monkeypatch.setattr(Design, "write", lambda self, run: None)
    monkeypatch.setattr(fairness.Cases, "get", lambda self, *place: place)
    small = replace(SMALL, grid_cases=("credit-status",))
    first = fairness.run(tmp_path, SMALL).tables["rows"]
    both = fairness.run(tmp_path, replace(small, distributions=("noniid",)))
    assert both.tables["rows"].groupby("distribution").size().to_dict() == {"iid": 22, "noniid": 46}
    assert len(fairness.run(tmp_path, replace(SMALL, splits=1)).tables["rows"]) == 68, "fewer splits remove nothing"
    kept = read(tmp_path)
    pd.testing.assert_series_equal(kept.tables["rows"]["test_gap"].iloc[:22], first["test_gap"])
    assert len(kept.rows) == 44, "defaults only"
    assert len(both.tables["chosen"])
    assert fairness.splits_measured(both.tables["rows"])["credit-status"]["noniid"]["FedReg penalty=3"] == 2
    with pytest.raises(ValueError, match="was begun with steps = 40, and now steps is 41"):
        fairness.run(tmp_path, replace(SMALL, steps=41))


def test_figures_of_every_kind_can_be_drawn():
    from fedbilevel.report.paper import picture
    from fedbilevel.report.studies import fairness as charts

    figures = {chart.key: picture(chart) for chart in charts(summarise(made_up()))}
    assert set(figures) == {"plane", "differences"}
    assert len(figures["plane"].legends[0].texts) == 3
