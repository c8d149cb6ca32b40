"""``fedbilevel audit``: any model's predictions by site and group, against sums written out; what is small stays hidden."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, roc_auc_score

from fedbilevel.fairness.disclosure import Visible
from fedbilevel.jobs.audit import by_group
from fedbilevel.report.card import card as card_of
from fedbilevel.runs import read
from fedbilevel.tables.schema import Schema

ASKED = ["--target", "ill", "--sensitive", "sex"]


def rows(count, seed, rare=0):
    """Predictions of a model that finds fewer women; ``rare`` rows of a third group."""
    rng = np.random.default_rng(seed)
    sex = np.array(["x"] * rare + list(rng.choice(["f", "m"], count - rare)))
    score = rng.normal(size=count) + 0.5 * (sex == "m")
    chance = 1 / (1 + np.exp(1 - 1.5 * score))
    ill = rng.random(count) < chance
    return pd.DataFrame(
        {
            "sex": sex,
            "chance": chance.round(4),
            "said": np.where(chance > 0.5, "yes", "no"),
            "flag": (chance > 0.5).astype(int),
            "ill": np.where(ill, "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """(files, frames) of three sites; the last has a few rows of a group that the others have not."""
    home = tmp_path_factory.mktemp("sites")
    frames = {"north": rows(400, 1), "south": rows(300, 2), "west": rows(160, 3, rare=6)}
    files = [home / f"{name}.csv" for name in frames]
    for file, frame in zip(files, frames.values(), strict=True):
        frame.to_csv(file, index=False)
    return files, frames


def by_hand(frame, decided):
    """Rates of some rows, written out."""
    ill = frame["ill"] == "yes"
    return {
        "count": len(frame),
        "positives": ill.sum(),
        "true_positive_rate": (decided & ill).sum() / ill.sum(),
        "false_positive_rate": (decided & ~ill).sum() / (~ill).sum(),
        "selection_rate": decided.mean(),
        "accuracy": (decided == ill).mean(),
        "brier": brier_score_loss(ill, frame["chance"]),
        "auc": roc_auc_score(ill, frame["chance"]),
        "calibration": frame["chance"].mean() - ill.mean(),
    }


def test_every_number_is_what_the_rows_say(call, sites, tmp_path):
    files, frames = sites
    said = call("audit", *files, *ASKED, "--prediction", "chance", "--threshold", "0.3", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    run = read(tmp_path / "run")
    seen = {name: frame[frame["sex"] != "x"] for name, frame in frames.items()}
    wanted = {**seen, "all sites": pd.concat(seen.values())}
    assert run.rows["split"].tolist() == list(wanted)
    for where, frame in wanted.items():
        row = run.rows.set_index("split").loc[where]
        expected = by_hand(frame, frame["chance"] > 0.3)
        for name in set(expected) - {"count", "positives"}:
            np.testing.assert_allclose(row[f"test_{name}"], expected[name], rtol=1e-12, err_msg=f"{where} {name}")
            assert row[f"test_{name}_low"] <= row[f"test_{name}"] <= row[f"test_{name}_high"]
        groups = run.groups[run.groups["split"] == where].set_index("group")
        assert list(groups.index) == ["f", "m"]
        for group in groups.index:
            there = frame[frame["sex"] == group]
            expected = by_hand(there, there["chance"] > 0.3)
            for name, value in expected.items():
                np.testing.assert_allclose(
                    groups.loc[group, name], value, rtol=1e-12, err_msg=f"{where} {group} {name}"
                )
        gap = abs(groups.loc["f", "true_positive_rate"] - groups.loc["m", "true_positive_rate"])
        np.testing.assert_allclose(row["test_gap"], gap, rtol=1e-12)
    assert "the group(s) x are left out of every table" in said.out
    assert "chance is read as the probability of 'yes'." in said.out
    html = (tmp_path / "run" / "page.html").read_text()
    assert "Predictions, audited: ill by sex" in html
    assert "the group(s) x are left out" in html
    assert "Predicted and observed" in html
    assert call("report", tmp_path / "run").code == 0
    card = card_of(run)
    assert "nothing was trained" in card
    assert "| north |" in card
    assert card.count("| f | ") == 1, "the groups of all sites together"
    assert Schema.read(tmp_path / "run" / "schema.toml").groups == ("f", "m", "x")


def test_probabilities_text_and_zeros_and_ones_decide_alike(call, sites, tmp_path):
    files, _ = sites
    told = {}
    for column in ("chance", "said", "flag"):
        said = call("audit", *files, *ASKED, "--prediction", column, "--out", tmp_path / column, "--json")
        assert said.code == 0, said.err
        told[column] = json.loads(said.out)
    rates = ["test_accuracy", "test_gap", "test_gap_low", "test_true_positive_rate", "test_selection_rate"]
    first, *others = ([[row[name] for name in rates] for row in one["rows"]] for one in told.values())
    assert others == [first, first]
    assert told["said"]["rows"][0]["test_auc"] is None
    assert "no AUC" in told["said"]["notes"][0]
    assert "calibration" in told["chance"]
    assert "calibration" not in told["flag"]


def test_without_groups_and_with_a_site_column(call, sites, tmp_path):
    _, frames = sites
    together = pd.concat([frame.assign(ward=name) for name, frame in frames.items()])
    together.to_csv(tmp_path / "all.csv", index=False)
    asked = ["--target", "ill", "--prediction", "chance", "--site", "ward", "--out", tmp_path / "run"]
    said = call("audit", tmp_path / "all.csv", *asked)
    assert said.code == 0, said.err
    run = read(tmp_path / "run")
    assert run.rows["split"].tolist() == [*frames, "all sites"]
    assert run.rows["test_gap"].isna().all()
    assert set(run.groups["group"]) == {"everybody"}
    np.testing.assert_allclose(
        run.rows["test_accuracy"].iloc[-1], ((together["chance"] > 0.5) == (together["ill"] == "yes")).mean()
    )


def kinds(count, seed):
    """Predictions of a stage (three classes: probabilities and decisions) and of a cost, by sex and region."""
    rng = np.random.default_rng(seed)
    chances = rng.dirichlet([4, 2, 1.5], count).round(3)
    chances[:, 0] = 1 - chances[:, 1:].sum(axis=1)
    stage = np.array(["early", "late", "middle"])
    cost = 900 + 80 * rng.normal(size=count)
    frame = pd.DataFrame(
        {
            "sex": rng.choice(["f", "m"], count),
            "region": rng.choice(["east", "west"], count),
            "stage": stage[(rng.random((count, 1)) > chances.cumsum(axis=1)).sum(axis=1)],
            "said": stage[chances.argmax(axis=1)],
            "cost": cost.round(2),
            "guess": (cost + 40 * rng.normal(size=count) + 10).round(2),
        }
    )
    return frame.assign(**{f"p {name}": chances[:, place] for place, name in enumerate(stage)})


@pytest.fixture(scope="module")
def of_kinds(tmp_path_factory):
    """(files, frames) of two sites."""
    home = tmp_path_factory.mktemp("kinds")
    frames = {"north": kinds(400, 1), "south": kinds(300, 2)}
    files = [home / f"{name}.csv" for name in frames]
    for file, frame in zip(files, frames.values(), strict=True):
        frame.to_csv(file, index=False)
    return files, frames


def test_three_classes_are_audited_by_probabilities_and_by_decisions(call, of_kinds, tmp_path):
    files, frames = of_kinds
    whole, classes = pd.concat(frames.values()), ["early", "late", "middle"]
    told = {}
    for column in ("p", "said"):
        out = tmp_path / column
        asked = [
            "--target",
            "stage",
            "--prediction",
            column,
            "--sensitive",
            "sex",
            "--sensitive",
            "region",
            "--out",
            out,
        ]
        said = call("audit", *files, *asked)
        assert said.code == 0, said.err
        told[column] = read(out), said.out
    (run, out), (decided, _) = told["p"], told["said"]
    assert "p early, p late, p middle are read as probabilities; the largest decides." in out
    last, own = run.rows.iloc[-1], np.array(classes) == whole["stage"].to_numpy()[:, None]
    chances = whole[[f"p {name}" for name in classes]].to_numpy()
    oracles = {
        "accuracy": (whole["said"] == whole["stage"]).mean(),
        "balanced_accuracy": np.mean([(whole["said"] == name)[whole["stage"] == name].mean() for name in classes]),
        "auc": roc_auc_score(whole["stage"], chances, multi_class="ovr", labels=classes),
        "brier": ((chances - own) ** 2).sum(axis=1).mean() / 2,
    }
    for name, value in oracles.items():
        assert last[f"test_{name}"] == pytest.approx(value), name
        assert last[f"test_{name}_low"] < value < last[f"test_{name}_high"]
    same = ["split", "test_accuracy", "test_gap", "test_gap_low", "test_gap_high"]
    pd.testing.assert_frame_equal(run.rows[same], decided.rows[same])
    assert decided.rows["test_auc"].isna().all()
    assert run.others["gaps"]["by"].tolist() == ["sex & region", "sex", "region"]
    women = run.groups[(run.groups["split"] == "all sites") & (run.groups["group"] == "f")].set_index("label")
    here = (whole["sex"] == "f").to_numpy()
    for place, name in enumerate(classes):
        rate = (whole["said"] == name)[here & own[:, place]].mean()
        assert women.loc[name, "true_positive_rate"] == pytest.approx(rate)
    html = (tmp_path / "p" / "page.html").read_text()
    assert "Predicted and observed" in html
    assert "(probabilities in `p early`, `p late`, `p middle`)" in card_of(run)


def test_predicted_numbers_are_audited_in_their_units(call, of_kinds, tmp_path):
    files, frames = of_kinds
    said = call(
        "audit", *files, "--target", "cost", "--prediction", "guess", "--sensitive", "sex", "--out", tmp_path / "run"
    )
    assert said.code == 0, said.err
    run, whole = read(tmp_path / "run"), pd.concat(frames.values())
    error = whole["guess"] - whole["cost"]
    means = error.groupby(whole["sex"]).mean()
    last = run.rows.iloc[-1]
    oracles = {
        "rmse": np.sqrt((error**2).mean()), "mae": error.abs().mean(), "mean_error": error.mean(),
        "mean_target": whole["cost"].mean(), "mean_prediction": whole["guess"].mean(),
        "r2": 1 - (error**2).mean() / whole["cost"].var(ddof=0), "gap": np.ptp(means),
    }  # fmt: skip
    for name, value in oracles.items():
        assert last[f"test_{name}"] == pytest.approx(value), name
    groups = run.groups[run.groups["split"] == "all sites"].set_index("group")
    np.testing.assert_allclose(groups["mean_error"], means)
    for words in ("guess is read as the predicted number, in the units of cost.", "gap of mean errors", "RMSE"):
        assert words in said.out
    assert "Means and errors of the groups" in (tmp_path / "run" / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "stage", "--prediction", "p", "--threshold", "0.3"], "but 'stage' has 3 classes; leave it out"),
        (["--target", "stage", "--prediction", "guess"], "give decisions written like the target"),
        (["--target", "stage", "--prediction", "q"], "there is no column 'q'"),
        (["--target", "cost", "--prediction", "said"], "give the predicted number of every row"),
        (
            ["--target", "cost", "--prediction", "guess", "--metric", "equal_opportunity"],
            "choose one of mean_prediction",
        ),
        (["--target", "cost", "--prediction", "guess", "--threshold", "0.3"], "but 'cost' is a number; leave it out"),
    ],
)
def test_what_does_not_suit_several_classes_or_numbers_is_one_sentence(
    call, refused, of_kinds, tmp_path, options, words
):
    refused(call("audit", *of_kinds[0], "--sensitive", "sex", *options, "--out", tmp_path / "run"), words)


def test_probabilities_of_three_classes_must_be_whole(call, refused, of_kinds, tmp_path):
    lacking = of_kinds[1]["north"].drop(columns="p late")
    asked = ["audit", tmp_path / "north.csv", "--target", "stage", "--prediction", "p", "--out", tmp_path / "run", "-q"]
    for frame, words in (
        (lacking, "There is no column 'p late': of 3 classes"),
        (lacking.assign(**{"p late": 0.9}), "must add up to 1; 400 row(s) do not"),
    ):
        frame.to_csv(tmp_path / "north.csv", index=False)
        refused(call(*asked), words)


def test_a_mapping_translates_what_a_site_writes_differently(call, sites, tmp_path):
    files, frames = sites
    south = tmp_path / "south.csv"
    frames["south"].assign(said=frames["south"]["said"].str.upper()).to_csv(south, index=False)
    rules = tmp_path / "mapping.toml"
    rules.write_text('format = 1\n[sites.south.columns.said]\nvalues = {YES = "yes", NO = "no"}\n')
    told = []
    for number, (own, more) in enumerate([(files[1], []), (south, ["--mapping", rules])]):
        out = tmp_path / f"run{number}"
        said = call("audit", files[0], own, *ASKED, "--prediction", "said", *more, "--out", out, "--json")
        assert said.code == 0, said.err
        told.append(json.loads(said.out))
    assert told[0]["rows"] == told[1]["rows"]
    assert (tmp_path / "run1" / "mapping.toml").exists()


def changed(column, values):
    return lambda frame: frame.assign(**{column: values(frame)})


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (None, ["--prediction", "chanse"], "north.csv: there is no column 'chanse'; did you mean 'chance'?"),
        (None, [], "--prediction is missing: name the column that holds what the model said."),
        (None, ["--prediction", "ill"], "The column 'ill' is named twice among target, prediction"),
        (None, ["--prediction", "said", "--threshold", "0.2"], "of one positive class, but 'said' holds decisions"),
        (None, ["--prediction", "chance", "--metric", "luck"], "--metric"),
        (None, ["--prediction", "chance", "--minimum-cell", "9999", "-q"], "Every group has fewer than 9999 positives"),
        (None, ["--prediction", "chance", "--positive", "maybe"], "--positive 'maybe' is no value of 'ill'"),
        (
            changed("chance", lambda frame: 100 * frame["chance"]),
            ["--prediction", "chance"],
            "at south: give the probability of 'yes', from 0 to 1, or decisions written like the target ('no', 'yes')",
        ),
        (changed("said", lambda frame: frame["said"].str.upper()), ["--prediction", "said"], "' at south: give the"),
        (changed("said", lambda frame: ""), ["--prediction", "said"], ""),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_said_in_one_sentence(call, refused, sites, tmp_path, change, options, words):
    files, frames = sites
    south = tmp_path / "south.csv"
    (frames["south"] if change is None else change(frames["south"])).to_csv(south, index=False)
    said = call("audit", files[0], south, *ASKED, *options, "--out", tmp_path / "run")
    if words:
        refused(said, words)
        assert not (tmp_path / "run" / "run.toml").exists()
    else:
        assert said.code == 0, said.err
        assert f"{len(frames['south']):,} row(s) without a prediction were left out." in said.out


def test_useless_predictions_and_sites_without_positives_are_found(call, refused, tmp_path):
    frame = rows(300, 4)
    frame.assign(chance=0.01).to_csv(tmp_path / "north.csv", index=False)
    frame[frame["ill"] == "no"].to_csv(tmp_path / "south.csv", index=False)
    files = [tmp_path / "north.csv", tmp_path / "south.csv"]
    asked = ["audit", *files, *ASKED, "--prediction", "chance", "--out", tmp_path / "run", "--json"]
    refused(call(*asked), "The target 'ill' has no row with 'yes' at south")
    (tmp_path / "mapping.toml").write_text('format = 1\nchecked = ["ill"]\n')
    said = call(*asked, "--mapping", tmp_path / "mapping.toml")
    assert said.code == 0, said.err
    codes = {finding["code"] for finding in json.loads(said.out)["findings"]}
    assert {"selects-nobody", "site-without-positives"} <= codes
    sentences = " ".join(json.loads(said.out)["warnings"])
    assert "choose another threshold (--threshold), or another model" in sentences
    assert "--class-weight" not in sentences


def test_a_group_that_is_small_at_one_site_does_not_follow_from_the_others(call, sites, tmp_path):
    files, frames = sites
    east = frames["west"].assign(sex=["m"] * 155 + ["f"] * 5)
    east.to_csv(tmp_path / "east.csv", index=False)
    said = call("audit", *files[:2], tmp_path / "east.csv", *ASKED, "--prediction", "chance", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    groups = read(tmp_path / "run").groups.groupby("split")["group"].apply(list).to_dict()
    assert groups == {"north": ["f", "m"], "south": ["everybody"], "east": ["everybody"], "all sites": ["f", "m"]}
    assert "The site(s) east, south are not shown by group" in said.out


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), min_size=3, max_size=3), min_size=1, max_size=5),
    st.integers(1, 12),
)  # fmt: skip
def test_nothing_small_is_shown_or_follows_by_subtraction(table, minimum):
    counts = np.array(table)
    whole = Visible.of(counts.sum(axis=1), minimum, "labels").shown
    shown = by_group(counts, whole, minimum)
    small = ((counts > 0) & (counts < minimum)).any(axis=(1, 2))
    assert not (shown & (small | ~whole)).any()
    if whole.all() and not small.any():
        assert shown.all()
    if shown.any() and not shown.all():
        left = counts[~shown].sum(axis=0)
        assert (~shown).sum() > 1
        assert ((left == 0) | (left >= minimum)).all()
