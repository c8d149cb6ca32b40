"""The sentences at the top of a page: right about chance, about the baseline, and about what must not be used."""

import numpy as np
import pandas as pd
import pytest

from fedbilevel.fairness.intervals import gap_ends
from fedbilevel.fairness.metrics import Counts
from fedbilevel.report.brief import brief_of, contrast_of
from fedbilevel.report.page import page
from fedbilevel.runs import RunFolder
from tests.report.folders import table1

METRIC = "equal_opportunity"
KEY = {"dataset": "outcome by sex", "split": "2 sites", "seed": 0}


def fitted(path, found=(), rates=(0.61, 0.64), positives=(100, 110), metric="equal_opportunity", command="fit"):
    """A fit of FedAvg and ours with these true-positive rates of ours."""
    configuration = {"target": "outcome", "positive": "ill", "metric": metric, "method": "fedbioacc"}
    with RunFolder.open(path, command=command, configuration=configuration) as folder:
        for method, change in (
            ("FedAvg", {}),
            ("FedBiOAcc, cells", {"gap": (-0.10, -0.15, -0.05), "accuracy": (-0.01, -0.02, 0.0)}),
        ):
            row = {**KEY, "method": method, "test_accuracy": 0.8, "test_balanced_accuracy": 0.7, "test_gap": 0.03}
            hits = np.rint(np.multiply(np.nan_to_num(rates), positives)).astype(int)
            ends = gap_ends(
                Counts(np.stack([0 * hits, 0 * hits, positives - hits, hits], axis=-1).reshape(-1, 2, 2)), METRIC
            )
            row["test_gap_low"], row["test_gap_high"] = map(float, ends)
            for name, values in change.items():
                row |= dict(zip((f"{name}_difference{end}" for end in ("", "_low", "_high")), values, strict=True))
            groups = pd.DataFrame({
                "part": "test", "group": [f"g{number}" for number in range(len(rates))], "count": np.multiply(positives, 3),
                "positives": positives, "true_positive_rate": rates, "false_positive_rate": 0.1, "selection_rate": 0.3,
            })  # fmt: skip
            findings = pd.DataFrame(list(found), columns=["code", "about", "sentence", "blocks"])
            folder.save(
                method, rows=pd.DataFrame([row]), groups=groups.assign(**KEY, method=method),
                others={"findings": findings.assign(method=method)} if found else {},
            )  # fmt: skip
        return folder.finish(order=["FedAvg", "FedBiOAcc, cells"])


def test_people_out_of_a_hundred_and_chance(tmp_path):
    verdict = brief_of(fitted(tmp_path)).verdict
    assert verdict[0] == "Of 100 rows with outcome = ill, the model finds 61 in the group g0 and 64 in the group g1."
    assert verdict[1].startswith("The difference is within what chance explains")
    assert "right about 80 of 100" in verdict[2]
    assert "about 70 (guessing: 50)" in verdict[2]
    assert "the gap is 10 points smaller (beyond noise, [-15.0, -5.0])" in verdict[3]
    assert "the accuracy is 1.0 points lower (not beyond noise, [-2.0, +0.0])" in verdict[3]


def test_a_difference_beyond_chance(tmp_path):
    sentence = brief_of(fitted(tmp_path, rates=(0.4, 0.8), positives=(1000, 1000))).verdict[1]
    # The interval of the gap .8 - .4 with 1,000 positives each: [.359, .439].
    assert "at least 36 in 100, and it may be 44" in sentence


def test_two_positives_hide_a_large_difference(tmp_path):
    sentence = brief_of(fitted(tmp_path, rates=(0.0, 0.4), positives=(2, 1000))).verdict[1]
    assert "within what chance explains" in sentence


def test_many_groups_are_told_by_their_ends(tmp_path):
    run = fitted(tmp_path, rates=(0.5, 0.7, 0.6, 0.65, np.nan), positives=(90, 80, 70, 60, 0))
    assert "between 50 in the group g0 and 70 in the group g1; 4 groups were compared" in brief_of(run).verdict[0]


def test_equalized_odds_tell_both_rates(tmp_path):
    verdict = brief_of(fitted(tmp_path, metric="equalized_odds")).verdict
    assert verdict[1].startswith("Of 100 rows without outcome = ill, it wrongly picks 10")
    assert verdict[2].startswith("The larger of the differences is within what chance explains")


@pytest.mark.parametrize("blocks", [True, False])
def test_findings_stand_at_the_top(tmp_path, blocks):
    run = fitted(tmp_path, [("selects-nobody", "ours", "The model says yes to nobody.", blocks)])
    brief = brief_of(run)
    assert brief.usable is not blocks
    assert brief.verdict[0].startswith("Do not use this model") is blocks
    html = page(run)
    assert html.index("The model says yes to nobody.") < html.index('id="results"')


def test_table_1_says_what_can_be_told_from_noise(tmp_path):
    run = table1(tmp_path, seeds=3)
    assert contrast_of(run) is None
    assert brief_of(run).verdict[0].startswith("In ")
    line = {"interval": "corrected", "splits": 5, "excludes_zero": True}
    told = pd.DataFrame([
        {**line, "method": "FedAvg", "metric": "test_accuracy", "mean": 0.85, "low": 0.84, "high": 0.86},
        {**line, "method": "FedAvg", "metric": "test_gap", "mean": 0.10, "low": 0.09, "high": 0.11},
        {**line, "method": "FedBiOAcc, cells", "metric": "test_accuracy", "mean": 0.85, "low": 0.84, "high": 0.86,
         "difference": -0.001, "difference_low": -0.002, "difference_high": 0.001},
        {**line, "method": "FedBiOAcc, cells", "metric": "test_gap", "mean": 0.02, "low": -0.01, "high": 0.05,
         "difference": -0.08, "difference_low": -0.1, "difference_high": -0.06},
    ])  # fmt: skip
    run.others.update({"contrast": told, "contrast-floors": pd.DataFrame([{"fair": 0.018, "fair_in_training": 0.023}])})
    told = contrast_of(run)
    assert told.table.rows[1][2] == ".0200 [.0000, .0500]"
    assert "the gap is 80% smaller than FedAvg's, beyond noise; accuracy changes by -0.10 points" in told.sentences[1]
    assert ".0180" in told.sentences[-1]
    assert ".0230" in told.sentences[-1]
    assert "80% smaller" in page(run)
