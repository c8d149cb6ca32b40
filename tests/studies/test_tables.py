"""The study over tables: its splits, its statistics, and a small run that is stopped and goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedbilevel.datasets import CATALOGUE
from fedbilevel.report import page
from fedbilevel.report.studies import ranks
from fedbilevel.studies import tables
from fedbilevel.studies.driver import Part, conduct
from fedbilevel.studies.tables import CASES, OURS, Design, Slice, chosen_design, clients, divided, summarise
from tests.references.compare import refusals

SMALL = Design(("heart-sex", "credit-sex"), ("natural", "iid"), 2, ("FedAvg", "FedReg", OURS), quick=True)


def test_the_protocol_names_every_case():
    page = (__import__("pathlib").Path(__file__).parents[2] / "docs" / "study-protocol.md").read_text()
    for case in CASES.values():
        marked = next(line for line in page.splitlines() if line.startswith(f"| {case.table} by {case.sensitive} |"))
        assert f"| {case.splits} |" in marked
        assert case.rows is None or f"{case.rows:,}" in marked
        assert case.bar or "yes" in marked
    assert sum(case.bar for case in CASES.values()) >= 8


def test_splits_have_equal_sizes_and_differ():
    """So that all splits of a case run one compiled program."""
    train, test, names = divided("heart-sex", 0)
    again, other = divided("heart-sex", 0)[0], divided("heart-sex", 1)[0]
    pd.testing.assert_frame_equal(train.features, again.features)
    assert not train.features.index.equals(other.features.index)
    assert len(train.labels) + len(test.labels) == 920
    for kind in ("natural", "iid", "noniid"):
        sizes = [
            np.unique(clients(part, kind, number), return_counts=True)[1] for number, part in ((0, train), (1, other))
        ]
        np.testing.assert_array_equal(*sizes)
    assert names == ["female", "male"]


def test_small_groups_and_sites_are_joined():
    values = pd.Series(["a"] * 5 + ["b"] * 4 + ["c", "d"])
    assert set(tables._joined(values, ["c", "d"], 2)) == {"a", "b", "(small)"}
    assert set(tables._joined(values, ["d"], 2)) == {"a", "b", "c", "d"}, "one small group is not joined with itself"
    assert set(tables._joined(values, ["a", "b", "c", "d"], 1)) == {"a", "b", "c", "d"}


def test_slices_go_split_by_split_with_the_bar_first():
    design = Design(("adult-sex", "heart-sex", "credit-sex"))
    slices = list(design.slices())
    first = [slice for slice in slices if slice.method in ("", "FedAvg")][:4]
    kinds = {"pooled": "", **dict.fromkeys(("natural", "iid", "noniid"), "FedAvg")}
    assert first == [Slice("heart-sex", kind, tables.FIRST_SPLIT, method) for kind, method in kinds.items()]
    assert [slice.number for slice in slices] == sorted(slice.number for slice in slices)
    counts = pd.Series([slice.case for slice in slices]).value_counts()
    methods = len(tables.METHODS)
    wanted = {
        "heart-sex": 20 * (1 + 3 * methods),
        "credit-sex": 20 * (1 + 2 * methods),
        "adult-sex": 10 * (1 + 2 * methods),
    }
    assert counts.to_dict() == wanted
    assert [Slice.of(slice.key) for slice in slices] == slices
    assert [slice.method for slice in sorted(slices[:4], key=Slice.place)] == ["FedAvg", "FedReg", "FedMinMax", ""]


def test_a_split_that_some_methods_lack_does_not_count_yet():
    rows, points, *_ = invented()
    stopped = (rows["seed"] == 9) & (rows["method"] != "FedAvg") & (rows["dataset"] == "compas-sex")
    found = summarise(rows[~stopped], points)
    splits = found["duels"].groupby("dataset")["splits"].unique().explode().to_dict()
    assert splits == {"heart-sex": 10, "compas-sex": 9, "law-school-sex": 10}
    whole = rows[(rows["seed"] < 9) | (rows["dataset"] != "compas-sex")]
    pd.testing.assert_frame_equal(found["overall"], summarise(whole, points)["overall"])


def test_the_hull_is_concave_and_is_interpolated():
    gaps, accuracies = np.array([0.3, 0.1, 0.2, 0.0, 0.15, 0.4]), np.array([0.9, 0.86, 0.87, 0.8, 0.5, 0.89])
    on = tables.hull(gaps, accuracies)
    assert on == [3, 1, 0], "0.2 lies below the line from 0.1 to 0.3, and 0.4 below 0.3"
    assert tables.reached(-1.0, gaps[on]) == {0: 1.0}
    assert tables.reached(9.0, gaps[on]) == {2: 1.0}
    assert tables.reached(0.2, gaps[on]) == pytest.approx({1: 0.5, 2: 0.5})


@pytest.mark.parametrize(
    ("gap", "accuracy", "wanted"),
    [(1, 1, "win"), (1, 0, "better"), (0, 0, "tie"), (0, -1, "worse"), (-1, -1, "loss"), (1, -1, "trade")],
)
def test_verdicts(gap, accuracy, wanted):
    assert tables.verdict(gap, accuracy) == wanted


def test_holm():
    assert tables.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


def invented():
    """Ours has a smaller gap than A by 0.1 at the same accuracy, B has both better, C fails once."""
    rng = np.random.default_rng(0)
    rows, points = [], []
    for name in ("heart-sex", "compas-sex", "law-school-sex"):
        for number in range(10):
            noise = rng.normal(0, 0.002, 2)
            made = {"FedAvg": (0.80, 0.2), OURS: (0.80, 0.1), "B": (0.82, 0.05), "C": (0.80, 0.1)}
            for method, (accuracy, gap) in made.items():
                row = {
                    "dataset": name,
                    "split": "natural" if name == "heart-sex" else "iid",
                    "method": method,
                    "seed": number,
                }
                own = rng.normal(0, 0.001, 2)
                row |= {"test_accuracy": accuracy + noise[0] + own[0], "test_gap": gap + noise[1] + own[1]}
                row |= dict.fromkeys(("test_auc", "test_calibration", "test_brier"), 0.5 + own[0])
                if method == "C" and number == 3:
                    row |= dict.fromkeys(tables.METRICS, np.nan)
                rows.append(row)
            for setting, accuracy, gap in ((0.0, 0.81, 0.2), (1.0, 0.804, 0.1), (30.0, 0.7, 0.0)):
                point = {"dataset": name, "seed": number, "kind": "exact", "setting": setting, "floor": 0.01}
                points.append({**point, "test_accuracy": accuracy + noise[0], "test_gap": gap})
    return pd.DataFrame(rows), pd.DataFrame(points)


def test_tables_follow_from_rows():
    found = summarise(*invented())
    duels = found["duels"].set_index(["dataset", "against"])["verdict"]
    assert set(duels[:, "FedAvg"]) == {"better"}
    assert set(duels[:, "B"]) == {"loss"}
    assert set(duels[:, "C"]) <= {"tie", "better"}, "one failure is not told from noise"
    verdicts = found["verdicts"]
    np.testing.assert_allclose(verdicts["difference"], -0.004, atol=0.001)
    assert not verdicts["within"].any()
    assert found["pooled_frontier"].groupby("dataset")["hull"].sum().tolist() == [3, 3, 3]
    ranks = found["overall"].query("which == 'all' and metric == 'test_gap'").set_index("method")["mean_rank"]
    assert ranks.idxmin() == "B"
    assert ranks["FedAvg"] >= 3
    c = found["summary"].query("method == 'C' and metric == 'test_accuracy'")["mean"]
    np.testing.assert_allclose(c, 0.72, atol=0.01)


def test_ranks_are_drawn_with_critical_differences():
    """Bars as long as Nemenyi's critical difference, in the order of the ranks; 3 cases of the bar and no others: one panel."""
    overall = summarise(*invented())["overall"]
    chart = ranks(overall)
    assert {panel.variant for panel in chart.panels} == {"test_gap", "test_accuracy"}
    (panel,) = (panel for panel in chart.panels if panel.variant == "test_gap")
    assert panel.title == "Cases of the bar (3)"
    assert panel.groups[0] == "B"
    assert panel.groups[-1] == "FedAvg"
    for mark in panel.marks:
        # Demsar (2006), table 5: q = 2.569 for four methods at 5 %.
        assert mark.x_high - mark.x_low == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 3)), abs=2e-3)
        assert mark.x_high - mark.x == pytest.approx(mark.x - mark.x_low)
    assert "Friedman" in chart.note


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    """Two tables, two splits; the first call stops in its second split."""
    out, compute = tmp_path / "run", Design.compute

    def stops(self, part: Part):
        if part.what.number > tables.FIRST_SPLIT:
            raise KeyboardInterrupt
        return compute(self, part)

    monkeypatch.setattr(Design, "compute", stops)
    with pytest.raises(KeyboardInterrupt):
        conduct(SMALL, out, workers=1)

    def later(self, part: Part):
        return compute(self, part) if part.what.number > tables.FIRST_SPLIT else None

    monkeypatch.setattr(Design, "compute", later)
    run = conduct(SMALL, out, workers=1)
    assert len(run.rows) == 3 * 2 * 3
    assert set(run.rows["dataset"]) == {"heart-sex", "credit-sex"}
    assert run.rows[list(tables.METRICS)].notna().all(axis=None)
    sites = run.tables["sites"]
    assert set(sites["site"]) == {"Cleveland", "Budapest", "Long Beach", "Switzerland"}
    assert sites.groupby(["method", "seed"])["rows"].sum().eq(276).all()
    assert len(run.tables["pooled"]) == 2 * 2 * 10
    assert len(run.tables["verdicts"]) == 3
    small = run.tables["small_sites"].set_index("method").loc[OURS]
    sizes = sites.groupby("site")["rows"].first()
    assert (small["smallest"], small["rows"], small["splits"]) == ("Switzerland", sizes.min(), 2)
    ours, theirs = (
        run.rows[(run.rows["method"] == name) & (run.rows["split"] == "natural")] for name in (OURS, "FedAvg")
    )
    np.testing.assert_allclose(
        small["at_all"], np.mean(ours["test_accuracy"].to_numpy() - theirs["test_accuracy"].to_numpy())
    )
    (out / "frontier.csv").write_text("a table of an earlier version")
    again = conduct(SMALL, out, compute=False)
    assert "frontier" not in again.tables
    pd.testing.assert_frame_equal(again.tables["pooled_frontier"], run.tables["pooled_frontier"])
    written = page.write(out)
    assert "heart-sex" in written.read_text()


def test_a_fit_that_fails_is_a_row_without_numbers(monkeypatch):
    monkeypatch.setitem(tables.METHODS, "broken", {"method": "fedavg", "batch_size": -1})
    row, sites = tables.measured("credit-sex", "iid", 0, "broken", {})
    assert "batch_size" in row["failed"]
    assert "test_gap" not in row
    assert not sites


test_bad_options_are_one_sentence = refusals(
    lambda given: chosen_design(*given),
    (("heart-age",), "--tables names 'heart-age', which is unknown; choose from"),
    (("heart-sex", 1), "--splits"),
)


def test_a_table_that_is_not_here_is_named(monkeypatch):
    gone = replace(CATALOGUE["compas"], package=replace(CATALOGUE["compas"].package, sha256="0" * 64))
    monkeypatch.setitem(CATALOGUE, "compas", gone)
    with pytest.raises(ValueError, match=r"needs the data set compas.*fedbilevel data get compas"):
        chosen_design("compas-sex")
    assert chosen_design("heart-sex", quick=True).splits == 2
