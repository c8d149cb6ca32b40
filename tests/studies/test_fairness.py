"""The fairness experiment: its splits, its choices, its tables, and a small run that is stopped and goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedbilevel.fairness.rows import client_rows
from fedbilevel.studies.fairness import study as fairness
from fedbilevel.studies.fairness.data import CASES, Rows, make_split, widened
from fedbilevel.studies.fairness.design import GRIDS, Design, Job, entries, lineup
from fedbilevel.studies.fairness.floor import expected_gap, floors
from fedbilevel.studies.fairness.tables import choose, choose_once

CREDIT = CASES["credit-status"]
SMALL = Design(("credit-status",), ("iid",), splits=2, slow_splits=2, grid_cases=(), steps=40, weight_steps=20)


@pytest.fixture(scope="module")
def split():
    return make_split(CREDIT, "noniid", 3)


def rows_of(features):
    return {row.tobytes() for row in np.ascontiguousarray(features)}


def test_parts_of_a_split_share_no_row_and_keep_all(split):
    sizes = [len(part.labels) for part in (split.train, split.aside, split.test)]
    assert sum(sizes) == 1000
    assert sizes[2] == 300
    assert sizes[1] == pytest.approx(0.2 * 700, abs=12)
    train, aside, test = (rows_of(part.features) for part in (split.train, split.aside, split.test))
    assert not train & aside
    assert not (train | aside) & test


def test_clients_hold_the_training_rows_and_nothing_else(split):
    held = [client_rows(split.same, "train", client) for client in range(3)]
    assert set().union(*(rows_of(part["features"]) for part in held)) == rows_of(split.train.features)
    for client in range(3):
        np.testing.assert_array_equal(
            client_rows(split.same, "train", client)["features"], client_rows(split.same, "val", client)["features"]
        )
        val = client_rows(split.balanced, "val", client)["groups"]
        counts = np.bincount(val)
        assert len(set(counts[counts > 0])) == 1


def test_a_split_is_a_function_of_its_number(split):
    again, other = make_split(CREDIT, "noniid", 3), make_split(CREDIT, "noniid", 4)
    np.testing.assert_array_equal(again.test.features, split.test.features)
    assert rows_of(other.test.features) != rows_of(split.test.features)
    with pytest.raises(ValueError, match="distribution must be one of"):
        make_split(CREDIT, "sorted", 0)


def test_statistics_come_from_training_rows_only(split):
    features = split.train.features
    numbers = np.flatnonzero([len(np.unique(column)) > 30 for column in features.T])
    assert len(numbers) >= 2
    np.testing.assert_allclose(features[:, numbers].mean(axis=0), 0, atol=1e-5)


def test_widened_adds_zeros_before_and_a_one_behind():
    assert widened(np.full((1, 2), 5.0, np.float32), 5).tolist() == [[0, 0, 5, 5, 1]]
    with pytest.raises(ValueError, match="do not fit"):
        widened(np.zeros((1, 3), np.float32), 3)


def everything(design, case):
    return [
        e for slow in (False, True) for grid in (False, True) for e in entries(design, Job(case, "iid", 0, slow, grid))
    ]


def test_grids_have_equal_sizes_and_hold_their_defaults():
    found = everything(Design(), "adult-sex")
    for method in GRIDS:
        own = [entry for entry in found if entry.label == method]
        assert len(own) == 4
        assert sum(entry.default for entry in own) == 1
        assert len({entry.recipe for entry in own}) == 4
    assert {entry.label for entry in entries(Design(), Job("adult-sex", "iid", 0, True, False))} == {"FCFL"}
    assert len(everything(Design(grid_cases=()), "credit-status")) == 10


def test_every_entry_has_its_own_mark_which_only_its_own_options_change():
    found = everything(Design(), "adult-sex")
    assert len({entry.mark() for entry in found}) == len(found)
    for entry in lineup(Design(), CASES["adult-sex"]):
        form = entry.recipe.formulation
        stronger = replace(entry, recipe=replace(entry.recipe, formulation=replace(form, strength=7.0)))
        assert (stronger.mark() == entry.mark()) == (not entry.label.endswith("cells"))
        shorter = replace(entry, recipe=replace(entry.recipe, steps=7))
        assert shorter.mark() != entry.mark()


def test_jobs_cover_every_entry_of_every_split_once_and_the_first_case_first():
    design = Design(splits=4, slow_splits=2)
    jobs = design.jobs()
    ran = [(*job[:3], entry.label, entry.setting) for job in jobs for entry in entries(design, job)]
    assert len(ran) == len(set(ran)) == 2 * (4 * 18 + 2 * 4) * 2 + 2 * 4 * 22
    assert [job.case for job in jobs[:16]] == ["adult-sex"] * 16


def test_designs_by_name():
    assert fairness.chosen_design() == fairness.FULL
    assert fairness.chosen_design(quick=True) == fairness.QUICK
    wanted = fairness.chosen_design("credit-status, adult-sex", 5, grids=False)
    assert (wanted.cases, wanted.splits, wanted.grid_cases) == (("credit-status", "adult-sex"), 5, ())
    with pytest.raises(ValueError, match="'adult-age' is unknown"):
        fairness.chosen_design("adult-age")


def test_measures_by_hand():
    rows = Rows(
        np.array([[1.0], [1], [-1], [-1], [1], [1]]), np.array([1.0, 1, 1, 0, 1, 0]), np.array([0, 0, 0, 0, 1, 1])
    )
    found = fairness.measured("test", rows, np.array([1.0]))
    assert found["test_accuracy"] == pytest.approx(4 / 6)
    assert found["test_gap"] == pytest.approx(1 / 3)
    assert found["test_lead"] == pytest.approx(2 / 3 - 1)


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
    found = floors(pd.DataFrame({"case": ["credit-status", "c"]}), splits=2).set_index("case")
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


def test_choice_is_made_on_rows_set_aside_under_the_accuracy_rule():
    rows = made_up()
    # The fairer setting of FedReg costs two points, so the other is chosen, whatever the test rows say.
    rows.loc[rows["setting"] == "penalty=2", "test_gap"] = 0.9
    chosen = choose(rows)
    assert set(chosen[chosen["method"] == "FedReg"]["setting"]) == {"penalty=2"}
    assert len(chosen) == 6 * 3


def test_one_choice_for_all_splits_goes_by_means():
    rows = made_up()
    rows.loc[(rows["setting"] == "penalty=2") & (rows["split"] == 3), "aside_accuracy"] = 0.5  # one bad split only
    assert "penalty=1" in set(choose(rows)["setting"])
    rows.loc[rows["setting"] == "penalty=2", "aside_accuracy"] = 0.849
    assert set(choose_once(rows)["setting"]) == {"", "penalty=2", "strength=5"}
    assert len(choose_once(rows)) == 6 * 3


def test_splits_without_all_settings_are_not_chosen_from():
    rows = made_up()
    rows = rows[~((rows["setting"] == "penalty=2") & (rows["split"] > 3))]
    chosen = choose(rows)
    assert chosen[chosen["method"] == "FedReg"]["split"].tolist() == [0, 1, 2, 3]


def test_without_an_allowed_setting_the_most_accurate_is_chosen():
    rows = made_up()
    rows = rows[rows["setting"] != "penalty=2"]
    assert set(choose(rows)["setting"]) == {"", "penalty=1", "strength=5"}


def test_tables_hold_means_and_paired_differences():
    rows = made_up()
    result = fairness.summarise(rows, {})
    student = result.table[result.table["interval"] == "student"].set_index(["method", "metric"])
    ours = rows[rows["method"] == "FedBiOAcc, cells"]["test_gap"].to_numpy()
    base = rows[rows["method"] == "FedAvg"]["test_gap"].to_numpy()
    row = student.loc[("FedBiOAcc, cells", "test_gap")]
    assert row["mean"] == pytest.approx(ours.mean())
    assert row["difference"] == pytest.approx((ours - base).mean())
    assert row["excludes_zero"]
    duel = result.duels.set_index(["choice", "against"]).loc[("each split", "FedReg")]
    assert duel["dominates"]
    assert duel["gap"] == pytest.approx(-0.03, abs=0.003)
    assert len(result.fronts) == 4


def test_a_method_with_fewer_splits_is_compared_on_those_it_has():
    rows = made_up()
    rows = rows[~((rows["method"] == "FedReg") & (rows["split"] > 2))]
    table = fairness.compare(rows[rows["default"]]).set_index(["method", "metric", "interval"])
    assert table.loc[("FedReg", "test_gap", "student"), "splits"] == 3
    assert table.loc[("FedAvg", "test_gap", "student"), "splits"] == 6


def test_a_small_run_writes_its_files_and_goes_on_where_it_stopped(tmp_path):
    told = []
    first = fairness.run(tmp_path, design=replace(SMALL, splits=1), workers=1, progress=lambda *news: told.append(news))
    assert told[-1][1:] == (1, 1)
    told.clear()
    result = fairness.run(tmp_path, design=SMALL, workers=1, progress=lambda *news: told.append(news))
    assert [news[1] for news in told] == [2]
    assert result.rows.groupby("method")["split"].nunique().tolist() == [2] * 10
    before = first.rows.set_index("method")["test_accuracy"]
    after = result.rows[result.rows["split"] == 0].set_index("method")["test_accuracy"]
    pd.testing.assert_series_equal(before, after.astype(float))
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {
        "fairness-rows.csv", "fairness-table.csv", "fairness-settings.json", "fairness-differences.png",
        "fairness-differences.svg", "fairness-floors.csv",
    }  # fmt: skip
    assert result.rows["test_accuracy"].between(0.5, 1).all()


def by_dice(job, missing):
    """What `one_job` gives, without training."""
    rng = np.random.default_rng(job.split)
    rows = []
    for entry in missing:
        row = {"case": job.case, "distribution": job.distribution, "split": job.split, "method": entry.label}
        row |= {"setting": entry.setting, "default": entry.default, "weights": "", "design": entry.mark()}
        for part in ("train", "aside", "test"):
            row |= {f"{part}_{name}": rng.random() for name in ("accuracy", "gap", "gap_majority", "lead")}
        rows.append(row)
    return rows


def test_another_command_adds_to_a_folder_and_other_options_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fairness, "one_job", by_dice)
    monkeypatch.setattr(fairness, "write", lambda result, out: None)
    first = fairness.run(tmp_path, design=SMALL)
    both = fairness.run(tmp_path, design=replace(SMALL, distributions=("noniid",)))
    assert both.rows.groupby("distribution").size().to_dict() == {"iid": 20, "noniid": 20}
    assert len(fairness.run(tmp_path, design=replace(SMALL, splits=1)).rows) == 40, "fewer splits remove nothing"
    kept = pd.read_csv(tmp_path / "fairness-rows.csv").iloc[:20]
    pd.testing.assert_series_equal(kept["test_gap"], first.rows["test_gap"])
    words = r"holds 40 rows measured with other options than these \(such as FedAvg on credit-status\)"
    with pytest.raises(ValueError, match=words):
        fairness.run(tmp_path, design=replace(SMALL, steps=41))
    (tmp_path / "fairness-rows.csv").write_text("case,method,setting,design\n")
    with pytest.raises(ValueError, match="has no column distribution"):
        fairness.run(tmp_path, design=SMALL)


def test_figures_of_every_kind_can_be_drawn():
    from fedbilevel.report.fairness_figures import fairness_figures

    figures = fairness_figures(fairness.summarise(made_up(), {}))
    assert set(figures) == {"plane", "differences"}
    assert len(figures["plane"].axes[0].get_legend_handles_labels()[1]) == 3
