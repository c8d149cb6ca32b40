"""Means, intervals and verdicts against numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedbilevel.report.comparison import as_table, compare, difference
from fedbilevel.report.reading import bands, estimates, printed, published, reading_of, spread, verdicts
from fedbilevel.runs import RunFolder
from tests.report.folders import METHODS, bench, fit, table1


def folder(path, values, split_seeds=None, configuration=None, command="table1"):
    """A run of one case with the given test gaps: {method: [by seed]}."""
    rows = [
        {"dataset": "d", "split": "s", "method": name, "seed": seed, "test_gap": gap, "test_accuracy": 0.5 + gap / 10,
         "split_seed": split_seeds[seed] if split_seeds else 0}
        for name, gaps in values.items() for seed, gap in enumerate(gaps)
    ]  # fmt: skip
    with RunFolder.open(path, command=command, configuration=configuration or {}) as run:
        run.save("all", rows=pd.DataFrame(rows))
        return run.finish()


def told(run, column="test_gap"):
    read = reading_of(run)
    found = estimates(read, read.main)
    return {read.names[cell.series]: cell for cell in found.values() if cell.metric.column == column}


def test_mean_sd_and_interval(tmp_path):
    cell = told(folder(tmp_path / "a", {"A": [0.1, 0.2, 0.3]}))["A"]
    assert (cell.seeds, cell.mean, cell.sd) == (3, pytest.approx(0.2), pytest.approx(0.1))
    half = stats.t.ppf(0.975, 2) * 0.1 / np.sqrt(3)
    assert (cell.low, cell.high) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))
    assert cell.verdict == ""  # there is nobody to be better than


NOISE, WOBBLE = np.array([0.0, 0.01, -0.01, 0.02, -0.02]), np.array([0.01, -0.01, 0.0, 0.005, -0.004])
TWO = {"good": 0.10 + NOISE, "bad": 0.30 + NOISE + WOBBLE / 10}


@pytest.mark.parametrize(
    ("values", "column", "wanted"),
    [
        ({**TWO, "same": 0.101 + NOISE + WOBBLE}, "test_gap", {"good": "lead", "same": "tied", "bad": ""}),
        (TWO, "test_gap", {"good": "best", "bad": ""}),
        (
            TWO,
            "test_accuracy",
            {"good": "", "bad": "best"},
        ),  # higher is better for accuracy, which here goes with the gap
        # Seeds that are one run are not best beyond noise, but others may be against them.
        ({"A": [0.1] * 3, "B": [0.2, 0.21, 0.22]}, "test_gap", {"A": "lead", "B": ""}),
        ({"A": [0.3] * 3, "B": [0.2, 0.21, 0.22]}, "test_gap", {"A": "", "B": "best"}),
        # Without noise nothing is beyond it.
        ({"A": [0.1, 0.1], "B": [0.2, 0.2]}, "test_gap", {"A": "lead", "B": ""}),
        ({"A": [0.1], "B": [0.2]}, "test_gap", {"A": "lead", "B": ""}),
    ],
)
def test_best_beyond_noise_tied_and_worse(tmp_path, values, column, wanted):
    cells = told(folder(tmp_path / "a", values), column)
    assert {name: cell.verdict for name, cell in cells.items()} == wanted
    assert all(np.isnan([cell.sd, cell.low]).all() for cell in cells.values() if cell.seeds == 1)


def test_the_level_is_shared_between_the_comparisons(tmp_path):
    gaps = np.array([0.02, 0.03, 0.006, 0.025])
    read = reading_of(folder(tmp_path / "a", {"x": [0.0] * 4}))
    alone = stats.t.interval(0.95, 3, gaps.mean(), stats.sem(gaps))
    shared = stats.t.interval(1 - 0.05 / 3, 3, gaps.mean(), stats.sem(gaps))
    assert alone[0] > 0 > shared[0]
    best = pd.Series([0.0, 0.1, 0.2, 0.3])  # shared by all: it cancels
    other, far = best + gaps, best + np.array([1.0, 1.1, 1.0, 1.2])
    assert verdicts(read, {0: best, 1: other}, "lower") == {0: "best"}
    assert verdicts(read, {0: best, 1: other, 2: far, 3: far + 1}, "lower") == {0: "lead", 1: "tied"}
    # One run beside several is not judged.
    assert verdicts(read, {0: best, 1: pd.Series([0.5])}, "lower") == {0: "lead", 1: "untold"}


def test_overlapping_splits_widen_the_interval(tmp_path):
    values = {"A": [0.1, 0.2, 0.3]}
    narrow = told(folder(tmp_path / "a", values, configuration={"test_share": 0.3}))["A"]
    wide = told(folder(tmp_path / "b", values, [0, 1, 2], {"test_share": 0.3}))["A"]
    factor = np.sqrt((1 / 3 + 0.3 / 0.7) / (1 / 3))
    assert wide.high - wide.mean == pytest.approx(factor * (narrow.high - narrow.mean))


def test_missing_numbers_are_left_out(tmp_path):
    cell = told(folder(tmp_path / "a", {"A": [0.1, np.nan, 0.3], "B": [np.nan] * 3}))
    assert (cell["A"].seeds, cell["A"].mean) == (2, pytest.approx(0.2))
    assert "B" not in cell


def test_a_fit_brings_its_own_intervals(tmp_path):
    run = fit(tmp_path / "fit")
    cell = told(run)["FedBiOAcc, cells"]
    assert (cell.low, cell.high) == (run.rows["test_gap_low"].iloc[0], run.rows["test_gap_high"].iloc[0])


def test_bands_are_spreads(tmp_path):
    read = reading_of(folder(tmp_path / "a", {"A": [0.1, 0.2, 0.3]}))
    values, places = pd.Series([1.0, 2.0, 4.0, 5.0, 7.0]), pd.Series([10, 10, 10, 20, 20])
    found = bands(read, values, places)
    for place in (10, 20):
        one = spread(read, values[places == place])
        assert found.loc[place].tolist() == pytest.approx([one.estimate, one.low, one.high])


def test_the_paper_s_table():
    assert len(published()) == 2 * 2 * 6 * 3
    assert printed("credit", "noniid", "FedBiOAcc", "test_gap") == (0.1021, 0.0011)
    assert printed("credit", "noniid", "FedBiOAcc, cells", "test_gap") is None
    assert printed("mine", "iid", "FedAvg", "test_gap") is None


def test_printed_figures_only_beside_what_they_measure(tmp_path):
    few = {"FedAvg": METHODS["FedAvg"]}
    options = {"seeds": 1, "methods": few, "datasets": ("adult",), "splits": ("iid",)}
    read = reading_of(table1(tmp_path / "a", **options))
    assert read.published(read.blocks[0], "FedAvg", "test_gap") == (0.0420, 0.0034)
    other = reading_of(table1(tmp_path / "b", **options, metric="equalized_odds"))
    assert other.published(other.blocks[0], "FedAvg", "test_gap") is None
    assert other.published(other.blocks[0], "FedAvg", "test_accuracy") == (0.8239, 0.0167)
    own = {"paper": {"d": {"s": {"A": {"test_gap": [0.5, 0.1]}}}}}
    given = reading_of(folder(tmp_path / "c", {"A": [0.1]}, configuration=own, command="fit"))
    assert given.published(given.blocks[0], "A", "test_gap") == (0.5, 0.1)


def test_paired_and_unpaired_differences(tmp_path):
    ours = pd.DataFrame({"seed": [0, 1, 2], "split_seed": 0, "v": [1.0, 2.0, 4.0]})
    theirs = pd.DataFrame({"seed": [2, 1, 0], "split_seed": 0, "v": [3.5, 1.0, 0.2]})
    found = difference(ours, theirs, "v")
    exact = stats.ttest_1samp([0.8, 1.0, 0.5], 0).confidence_interval(0.95)
    assert found["pairing"] == "paired"
    assert (found["difference"], found["low"], found["high"]) == pytest.approx((2.3 / 3, exact.low, exact.high))
    found = difference(ours, theirs.assign(split_seed=[7, 8, 9]), "v")
    exact = stats.ttest_ind(ours["v"], theirs["v"], equal_var=False).confidence_interval(0.95)
    assert found["pairing"] == "unpaired"
    assert (found["difference"], found["low"], found["high"]) == pytest.approx((2.3 / 3, exact.low, exact.high))
    assert difference(ours, theirs.assign(v=np.nan), "v") is None


def test_runs_side_by_side(tmp_path):
    one = folder(tmp_path / "one", {"A": [0.1, 0.2, 0.4], "B": [0.3, 0.3, 0.2]}, configuration={"steps": 10})
    two = folder(tmp_path / "two", {"A": [0.2, 0.3, 0.6]}, configuration={"steps": 20})
    found = compare([one, two])
    row = found.differences[found.differences["measure"] == "test_gap"].iloc[0]
    assert (row["method"], row["run"], row["pairing"], row["seeds"]) == ("A", "two", "paired", 3)
    assert row["difference"] == pytest.approx(0.4 / 3)
    assert found.options.to_dict("records") == [{"option": "steps", "one": "10", "two": "20"}]
    table = as_table(found)
    assert table[table["method"] == "B"]["two minus one"].tolist() == ["", ""]
    assert table[(table["method"] == "A") & (table["measure"] == "test gap")]["two"].item() == ".3667 ± .2082"


def test_fits_of_different_methods_meet_beside_their_baseline(tmp_path):
    one = folder(tmp_path / "one", {"FedAvg": [0.4], "FedReg": [0.3]}, configuration={"method": "fedreg"})
    two = folder(tmp_path / "two", {"FedAvg": [0.4], "FedBiO, cells": [0.1]}, configuration={"method": "fedbio"})
    bare = folder(tmp_path / "bare", {"FedAvg": [0.4]}, configuration={"method": "fedavg"})
    found = compare([one, two, bare])
    gaps = found.cells[found.cells["measure"] == "test_gap"]
    assert gaps[["method", "run", "mean"]].to_numpy().tolist() == [
        ["each run's own", "one", 0.3], ["each run's own", "two", 0.1], ["each run's own", "bare", 0.4],
        ["FedAvg", "one", 0.4], ["FedAvg", "two", 0.4], ["FedAvg", "bare", 0.4],
    ]  # fmt: skip
    # Two runs of one method need no other name for it.
    again = folder(tmp_path / "again", {"FedAvg": [0.4], "FedReg": [0.2]}, configuration={"method": "fedreg"})
    assert compare([one, again]).cells["method"].unique().tolist() == ["FedAvg", "FedReg"]


def test_gaps_of_different_metrics_are_not_subtracted(tmp_path):
    one = folder(tmp_path / "one", {"A": [0.1, 0.2]})
    two = folder(tmp_path / "two", {"A": [0.2, 0.3]}, configuration={"metric": "demographic_parity"})
    found = compare([one, two])
    assert set(found.differences["measure"]) == {"test_accuracy"}
    assert "different metrics" in found.notes[0]


def test_what_cannot_be_compared_is_said(tmp_path):
    one = folder(tmp_path / "one", {"A": [0.1, 0.2]})
    with pytest.raises(ValueError, match="two run folders"):
        compare([one])
    with pytest.raises(ValueError, match=r"one and \S+two have no methods in common \(A; B\)"):
        compare([one, folder(tmp_path / "two", {"B": [0.1, 0.2]})])
    with pytest.raises(ValueError, match="--measure speed is no column of numbers"):
        compare([one, one], ["speed"])


def test_fits_with_other_groups_say_why_they_are_not_compared(tmp_path):
    one, two = (fit(tmp_path / name, name=f"loan by {name}") for name in ("sex", "race"))
    two.configuration["sensitive"] = ["race", "age"]
    with pytest.raises(ValueError, match=r"sex and \S+race have different groups \(sex; race & age\): .*--sensitive"):
        compare([one, two])
    more = fit(tmp_path / "more", name="loan by sex", group_names=("f", "m", "x"))
    found = compare([one, more])
    assert "The gaps of loan by sex compare different groups (f, m; f, m, x): no differences" in found.notes[0]
    assert not any(measure.endswith("gap") for measure in found.differences["measure"])
    assert "test_accuracy" in set(found.differences["measure"])


def test_a_benchmark_is_read_by_task(tmp_path):
    read = reading_of(bench(tmp_path / "bench"))
    assert [metric.column for metric in read.main] == ["score", "solved", "objective"]
    assert (read.word("dataset"), read.word("method")) == ("Task", "Algorithm")


def test_a_search_that_is_not_finished_shows_the_better_rate(tmp_path):
    cell = {"dataset": "d", "split": "s", "method": "A", "seed": 0}
    rows = [
        {**cell, "test_gap": 0.1, "validation_accuracy": 0.7},
        {**cell, "test_gap": 0.3, "validation_accuracy": 0.8},
    ]
    with RunFolder.open(tmp_path / "run", command="table1", configuration={}) as run:
        run.save("all", rows=pd.DataFrame(rows))
        assert told(run.finish())["A"].mean == 0.3
