"""The fair methods over sites give what the simulated methods give, from tables and from arrays."""

import dataclasses
import json
import re
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from fedbilevel.engines.stages import TOGETHER
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.models import numbers, probabilities
from fedbilevel.fairness.moments import Moments
from fedbilevel.fairness.program import fair_program
from fedbilevel.fairness.scores import Scores
from fedbilevel.fairness.trainer import dealt, fit, tuned_threshold
from fedbilevel.federation.protocol.policy import TELL, Source
from fedbilevel.federation.protocol.program import answer_trees
from fedbilevel.federation.protocol.record import Progress, read_answers
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed
from fedbilevel.jobs import federate
from fedbilevel.jobs.federate import job
from fedbilevel.jobs.fit import FitOptions
from fedbilevel.jobs.measuring import received
from fedbilevel.jobs.predict import fitted_model
from fedbilevel.problem import ClientData
from fedbilevel.tables.encoder import combine, site_statistics
from fedbilevel.tables.schema import Column, Schema
from tests.federation.direct import SITES, Direct, coordinate, fair_array_sites, site
from tests.references.digits import last_digits_moved

pytestmark = pytest.mark.usefixtures("shared_compilation")

SIZES = (40, 48, 48)  # two alike: what one of them compiles serves the other
SCHEMA = Schema(
    target="hired",
    classes=("no", "yes"),
    positive="yes",
    sensitive=("sex",),
    groups=("f", "m"),
    columns=(Column("age", "number", center=40.0), Column("job", "category", values=("cook", "judge"), pooled=True)),
)


THREE = dataclasses.replace(SCHEMA, classes=("maybe", "no", "yes"), positive=None)


def tables():
    """One table per site, with unequal sizes, a rare job and a missing target."""
    rng = np.random.default_rng(1)
    made = []
    for size in SIZES:
        age = rng.normal(40, 12, size).round(1)
        sex = rng.choice(["f", "m"], size)
        chance = 1 / (1 + np.exp(-(age - 40) / 10 - (sex == "m")))
        frame = pd.DataFrame(
            {
                "age": age,
                "job": rng.choice(["cook", "judge", "pilot"], size, p=[0.5, 0.4, 0.1]),
                "sex": sex,
                "hired": np.where(rng.random(size) < chance, "yes", "no"),
                "diary": "not for jobs",
            }
        )
        frame.loc[3, "hired"] = ""
        made.append(frame)
    return made


def test_a_site_with_a_mapping_of_its_own_trains_as_one_that_needs_none(tmp_path):
    """The file lies beside the site's table and brings it into the schema's language."""
    settings = settings_for("fedavg", steps=6)
    plain = table_sites(tmp_path, settings)
    (wanted,) = coordinate(tmp_path, settings, Direct(plain))
    # New sites: what was agreed in a run is kept, and the mapped ages differ in the last digit.
    (tmp_path / "new").mkdir()
    fresh = table_sites(tmp_path / "new", settings)
    file, mapping = tmp_path / "new" / f"{SITES[1]}.csv", tmp_path / "mapping.toml"
    own = tables()[1].rename(columns={"sex": "Geschlecht"})
    own.assign(hired=own["hired"].map({"yes": "1", "no": "0", "": ""}), age=own["age"] * 12).to_csv(file, index=False)
    mapping.write_text(
        f'format = 1\n[sites.{SITES[1]}]\nrename = {{Geschlecht = "sex"}}\n'
        f'[sites.{SITES[1]}.columns.hired]\nvalues = {{1 = "yes", 0 = "no"}}\n'
        f"[sites.{SITES[1]}.columns.age]\nfactor = {1 / 12!r}\n"
    )
    offered = Source(table=file, columns=("age", "job", "sex", "hired"), mapping=mapping)
    mapped = {**fresh, SITES[1]: site(tmp_path / "mapped", SITES[1], settings, offered, tell=TELL)}
    (found,) = coordinate(tmp_path / "again", settings, Direct(mapped))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)
    other = dataclasses.replace(offered, table=file.rename(tmp_path / "site-9.csv"))
    with pytest.raises(ValueError, match=r"none for 'site-9', as .* is called: add"):
        other.frame(("age",))


def of_three_classes():
    """The same tables, every third row undecided."""
    return [frame.assign(hired=frame["hired"].where(frame.index % 3 != 1, "maybe")) for frame in tables()]


def table_sites(folder, settings, columns=("age", "job", "sex", "hired"), frames=None, **policy):
    made = {}
    for name, frame in zip(SITES, frames or tables(), strict=True):
        file = folder / f"{name}.csv"
        frame.to_csv(file, index=False)
        made[name] = site(folder, name, settings, Source(table=file, columns=columns), **{"tell": TELL, **policy})
    return made


def settings_for(method, schema=SCHEMA, more=None, **recipe):
    arguments = {
        "minimum_cell": 1,
        "recipe": {"method": method, "batch_size": 16, "local_steps": 2, **recipe},
        "validation": 0.25 if method.startswith("fedbio") else None,
        **({"schema": schema.text()} if schema else {"arrays": {"features": 5, "groups": 2}}),
        **(more or {}),
    }
    return JobSettings("fair", "fair", SITES, arguments, seed=7, double=True)


def rounding(program):
    """FedPath solves systems with a Hessian in single precision, and the condition of these (310 on the tables above, with the
    ridge) makes that much more of the last digit: `test_same_numbers.test_what_fedpath_makes_of_the_last_digit`."""
    return 310 * 1.2e-7 if program.path else 1e-6


def agrees(folder, settings, sites):
    """The federated model is the simulated one: the program, what was agreed on, and what it gives in one process."""
    coordinate(folder, settings, Direct(sites))
    program, agreed = fair_program(settings.arguments), Progress.read(folder / "runs/fair/state.npz").agreed
    params = program.params(answer_trees(program, agreed, read_answers(folder / "runs/fair")), agreed)
    rows = [program.encoded(site.policy.source, agreed) for site in sites.values()]
    data = ClientData.from_clients([(site.train, site.val) for site in rows])
    # The clients do not tell their curvature again.
    alone = dataclasses.replace(program, curvature=float(agreed["smoothness"][0]))
    expected = fit(alone, data, seed=7)
    atol = rounding(program)
    if (
        program.path
    ):  # on some processors sums differ by more than there: by as much as where last digits of the rows do
        moved = {**data.train, "features": last_digits_moved(np.asarray(data.train["features"]))}
        digits = np.abs(fit(alone, dataclasses.replace(data, train=moved), seed=7).params - expected.params).max()
        assert digits < 1e-3
        atol += 4 * digits
    np.testing.assert_allclose(params, expected.params, rtol=2e-5, atol=atol)
    return program, agreed, expected


@pytest.mark.parametrize(
    ("method", "recipe"),
    [
        ("fedavg", {"steps": 8, "client_weights": "samples"}),
        ("fedreg", {"steps": 6}),
        ("fedminmax", {"steps": 4}),
        ("fcfl", {"steps": 6}),
        ("fedfb", {"steps": 6}),
        ("fairfed", {"steps": 6}),
        ("fedbio", {"steps": 6, "weight_steps": 4}),
        ("fedbioacc", {"steps": 6, "weight_steps": 4}),
        ("fedpath", {"path": [1.0]}),
    ],
)
def test_a_table_per_site(tmp_path, method, recipe):
    # With rows left out, the true-positive rates of these tables are alike: there FedPath has nothing to do.
    more = {"formulation": {"metric": "equalized_odds"}} if method == "fedpath" else None
    settings = settings_for(method, more=more, **recipe)
    program, agreed, expected = agrees(tmp_path, settings, table_sites(tmp_path, settings))
    together = combine([site_statistics(SCHEMA, kept[kept["hired"] != ""]) for kept in tables()])
    for name, value in together._asdict().items():
        np.testing.assert_array_equal(agreed[f"statistics/{name}"], value)
    if method.startswith("fedbio"):
        (outer,), _ = read_answers(tmp_path / "runs/fair")
        weights = program.recipe.formulation.weights(outer)
        np.testing.assert_allclose(weights, expected.weights, rtol=1e-5)
        assert np.ptp(weights) > 1e-4, "stage one is to move the weights"
    if method == "fedpath":
        assert np.ptp(expected.weights) > 0.1
        path = expected.frontier.table
        assert path["strength"].tolist() == [0, 1, 5]
        assert path["gap"][2] < path["gap"][0]
    decided = pd.read_json(tmp_path / "runs/fair/report.json").loc["decisions"]
    assert [np.sum(decided[name]) for name in SITES] == [size - 1 for size in SIZES]


@pytest.mark.parametrize("method", ["fedreg", "fedminmax", "fcfl", "fedfb", "fairfed", "fedbioacc", "fedpath"])
def test_three_classes_at_sites(tmp_path, method):
    """The simulated model; what the sites report; and, of one method, the run folder with every class of every group."""
    steps = {"steps": 4} | ({"weight_steps": 2} if method == "fedbioacc" else {"path": [1.0]})
    settings = settings_for(method, THREE, more={"minimum_cell": 1}, **steps)
    _, _, expected = agrees(tmp_path, settings, table_sites(tmp_path, settings, frames=of_three_classes()))
    assert expected.params.shape == (len(THREE.feature_names), 3)
    decided = pd.read_json(tmp_path / "runs/fair/report.json").loc["decisions"]
    *cells, pooled = np.sum([decided[name] for name in SITES], axis=0)
    cells = np.array(cells)
    assert (cells.shape, pooled.sum()) == ((2, 3, 3), 0)
    assert cells.sum() == sum(SIZES) - len(SITES)
    if method != "fedbioacc":
        return
    fit = FitOptions(method, steps=4, weight_steps=2, compare_with=None, minimum_cell=1)
    done = federate.run(settings, fit, THREE, tmp_path / "out", lambda: tmp_path / "runs/fair")
    assert done.run.groups["label"].tolist() == ["maybe", "no", "yes"] * 2
    assert done.run.groups["positives"].tolist() == cells.sum(axis=-1).ravel().tolist()
    assert float(done.run.rows["train_gap"].iloc[0]) == Counts(cells).gap("equal_opportunity")
    assert len(done.run.weights) == 6


def test_calibration_within_groups_at_sites(tmp_path):
    """The simulated model; and the gap in the run folder is that of the rows that the sites hold."""
    settings = settings_for("fedpath", more={"formulation": {"metric": "calibration"}}, path=[1.0])
    sites = table_sites(tmp_path, settings)
    program, agreed, expected = agrees(tmp_path, settings, sites)
    assert expected.frontier.table["gap"].iloc[-1] < expected.frontier.table["gap"][0]
    options = FitOptions(metric="calibration", compare_with=None, minimum_cell=1)
    done = federate.run(settings, options, SCHEMA, tmp_path / "out", lambda: tmp_path / "runs/fair")
    parts = [program.encoded(one.policy.source, agreed).model for one in sites.values()]
    features, labels, groups = (np.concatenate([p[name] for p in parts]) for name in ("features", "labels", "groups"))
    chance = probabilities(program.model, expected.params, features)[:, 1]
    means = np.array([
        [np.mean((side * (chance - labels))[groups == g]) for g in range(2)] for side in (chance, 1 - chance)
    ])  # fmt: skip
    row = done.run.rows.iloc[0]
    assert row["train_gap"] == pytest.approx(np.ptp(means, axis=1).max(), abs=1e-4)
    assert row["train_gap_low"] <= row["train_gap"] <= row["train_gap_high"]


@pytest.mark.parametrize("method", ["fedavg", "fedbioacc", "fedpath"])
def test_class_weights_and_threshold_are_those_of_the_simulation(tmp_path, method):
    more = {"class_weight": "balanced", "threshold": "auto", "minimum_cell": 2, "validation": None}
    settings = settings_for(method, more=more, steps=6, weight_steps=4, path=[1.0])
    sites = table_sites(tmp_path, settings)
    coordinate(tmp_path, settings, Direct(sites))
    program, agreed = fair_program(settings.arguments), Progress.read(tmp_path / "runs/fair/state.npz").agreed
    params = program.params(answer_trees(program, agreed, read_answers(tmp_path / "runs/fair")), agreed)
    arrays = [program._arrays(site.policy.source, agreed) for site in sites.values()]
    features, labels, groups = (np.concatenate(column) for column in zip(*arrays, strict=True))
    leaves = {"features": features, "labels": labels.astype(np.float32), "groups": groups.astype(np.int32)}
    ends = np.cumsum([0, *(len(each[0]) for each in arrays)])
    owned = [np.arange(first, last) for first, last in pairwise(ends)]
    kept, aside = zip(*program.set_aside(groups, labels, owned), strict=True)
    for part, trained, held in zip(owned, kept, aside, strict=True):
        assert sorted([*trained, *held]) == list(part)
        cells = [[row for row in part if 2 * groups[row] + labels[row] == cell] for cell in range(4)]
        divisions = [sorted(row for members in cells for row in members[k - 1 :: k]) for k in (5, 4, 3, 2)]
        assert sorted(held) in divisions
    alone = dataclasses.replace(program, curvature=float(agreed["smoothness"][0]))
    expected = fit(alone, dealt(alone, leaves, kept), seed=7)
    np.testing.assert_allclose(params, expected.params, rtol=2e-5, atol=rounding(program))
    counts = np.bincount(labels[np.concatenate(kept)])
    np.testing.assert_allclose(program.class_weights(agreed), counts.sum() / (2 * counts))
    assert program.decides(agreed) == tuned_threshold(alone, expected.params, leaves, aside)
    report = json.loads((tmp_path / "runs/fair/report.json").read_text())
    decided = probabilities(program.model, expected.params, features[kept[0]])[:, 1] > program.decides(agreed)
    told = np.array(report[SITES[0]]["decisions"])
    assert told.sum() == len(kept[0])
    assert told[..., 1].sum() == decided.sum()


def test_a_job_cannot_lower_the_minimum_cell_of_a_site(tmp_path):
    settings = settings_for("fedavg", steps=2)
    sites = table_sites(tmp_path, settings, minimum_cell=10)
    coordinate(tmp_path, settings, Direct(sites))
    reports = json.loads((tmp_path / "runs/fair/report.json").read_text())
    hidden = 0
    for name, frame in zip(SITES, tables(), strict=True):
        rows = frame[frame["hired"] != ""]
        cells = np.array([[((rows.sex == g) & (rows.hired == y)).sum() for y in ("no", "yes")] for g in ("f", "m")])
        told = np.array(reports[name]["decisions"]).sum(axis=-1)
        assert not ((told > 0) & (told < 10)).any()
        histogram = Scores.unpacked(reports[name]).cells
        assert not ((histogram > 0) & (histogram < 10)).any()
        np.testing.assert_array_equal(histogram.sum(axis=-1), told)
        rest = cells.sum() - told.sum()
        assert rest == 0 or rest >= 10, "the site tells its rows: what is missing follows"
        hidden += (cells < 10).any()
    assert hidden, "some site is to have a small cell"


@pytest.mark.parametrize(
    ("method", "more", "sentence"),
    [
        ("fedfb", {}, "A group, class or column has fewer rows"),
        ("fedavg", {"class_weight": "balanced"}, "Class weights need training rows of every class"),
    ],
)
def test_small_counts_are_not_told_before_training(tmp_path, method, more, sentence):
    settings = settings_for(method, more=more, steps=2)
    with pytest.raises((RunFailed, ValueError), match=sentence):
        coordinate(tmp_path, settings, Direct(table_sites(tmp_path, settings, minimum_cell=30)))


RARE = Schema("ill", ("no", "yes"), "yes", ("group",), ("a", "b", "r"), columns=(Column("score", "number"),))


def rare_tables():
    """8 % positives; the group r has one positive at every site; the last site has none at all."""
    rng = np.random.default_rng(3)
    for number in range(3):
        score = rng.normal(size=600)
        ill = np.where(rng.random(600) < 1 / (1 + np.exp(2.9 - score)), "yes", "no")
        frame = pd.DataFrame({"score": score, "group": rng.choice(["a", "b"], 600), "ill": ill})
        few = pd.DataFrame({"score": [0.5] * 15, "group": "r", "ill": ["yes"] + ["no"] * 14})
        whole = pd.concat([frame, few], ignore_index=True)
        yield whole.assign(ill="no") if number == 2 else whole


TUNED = {"threshold": "auto", "class_weight": "balanced"}


@pytest.mark.parametrize(("options", "secure"), [({}, False), (TUNED, False), (TUNED, True)])
def test_the_folder_of_a_run_over_sites_tells_what_it_may_and_what_is_wrong(tmp_path, options, secure):
    """With secure sums it is known of all sites together."""
    fit_options = FitOptions(method="fedavg", steps=200, batch_size=32, compare_with=None, **options)
    settings = job(fit_options, RARE, SITES, secure=secure)
    sites = {}
    for name, frame in zip(SITES, rare_tables(), strict=True):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        source = Source(table=tmp_path / f"{name}.csv", columns=("score", "group", "ill"))
        sites[name] = site(tmp_path, name, settings, source, tell=TELL, minimum_cell=10)

    channel = Direct(sites)

    def supervised():
        coordinate(tmp_path, settings, channel)
        return tmp_path / "runs" / settings.run

    result = federate.run(settings, fit_options, RARE, tmp_path / "out", supervised)
    (row,) = result.run.rows.to_dict("records")
    codes = set(result.run.others["findings"]["code"])
    assert {"groups-hidden", *(() if secure else ("site-without-positives",))} <= codes
    assert ("selects-nobody" in codes) == (not options)
    assert not row["usable"]
    whose = "one of the sites" if secure else "site-1"
    assert any(f"at {whose} for its minimum cell" in sentence for sentence in result.warnings)
    assert any("The site site-3 has no positives" in sentence for sentence in result.warnings) is not secure
    model = fitted_model(tmp_path / "out")
    if options:
        assert model.threshold == row["threshold"] != 0.5
        assert row["train_balanced_accuracy"] > 0.6
    assert 0.65 < row["train_auc"] < 0.9
    assert row["train_auc_low"] < row["train_auc"] < row["train_auc_high"]
    shown = result.run.groups
    assert {"a", "b"} <= set(shown["group"])
    assert shown.loc[shown["group"] == "r", "positives"].tolist() == [0], (
        "zero, at the last site, is shown; ones are not"
    )
    small = shown[["count", "positives"]].to_numpy()
    assert not ((small > 0) & (small < 10)).any()
    assert ("The site site-3 has no positives" in result.page.read_text()) is not secure
    kept = json.loads((tmp_path / "runs" / settings.run / "report.json").read_text())
    if not secure:
        assert kept["site-1"]["hidden"][2] > 0
        return
    assert kept.keys() == {TOGETHER}
    assert not any(told.get("numbers") for _, _, told in channel.seen), "no number of a single site"
    agreed, program = Progress.read(tmp_path / "runs" / settings.run / "state.npz").agreed, sites["site-1"].program
    answers = answer_trees(program, agreed, read_answers(tmp_path / "runs" / settings.run))
    alone = [program.report(each.policy.source, agreed, answers) for each in sites.values()]
    wanted, found = received(alone, RARE), received([kept[TOGETHER]], RARE)
    np.testing.assert_array_equal(found.sums.cells, wanted.sums.cells)
    np.testing.assert_array_equal(found.scores.cells, wanted.scores.cells)
    np.testing.assert_allclose(found.scores.sums, wanted.scores.sums, rtol=1e-14)
    assert found.names == wanted.names


@pytest.mark.parametrize(
    "method", ["fedreg", "fedminmax", "fcfl", "fedfb", "fairfed", "fedbio", "fedbioacc", "fedpath"]
)
def test_a_rare_group_at_a_site_is_compared_together_with_the_next_smallest(tmp_path, method):
    """One positive of the group r at two sites: they train, nothing small is told, and the sentence says what was done."""
    fit_options = FitOptions(method=method, steps=6, weight_steps=4, batch_size=32, compare_with=None)
    settings = job(
        fit_options, RARE, SITES, secure=False
    )  # with secure sums nobody sees the reports that are looked at here
    sites, frames = {}, list(rare_tables())
    frames[2] = frames[1].assign(group=frames[1]["group"].replace("r", "a").where(frames[1].index % 4 > 0, "r"))
    for name, frame in zip(SITES, frames, strict=True):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        source = Source(table=tmp_path / f"{name}.csv", columns=("score", "group", "ill"))
        sites[name] = site(tmp_path, name, settings, source, tell=TELL, minimum_cell=10)
    channel = Direct(sites)

    def supervised():
        coordinate(tmp_path, settings, channel)
        return tmp_path / "runs" / settings.run

    result = federate.run(settings, fit_options, RARE, tmp_path / "out", supervised)
    assert np.isfinite(result.run.rows["train_accuracy"]).all()
    said = [sentence for sentence in result.warnings if "where training compares groups, they count as one" in sentence]
    assert len(said) == 2
    program, agreed = (
        fair_program(settings.arguments),
        Progress.read(tmp_path / "runs" / settings.run / "state.npz").agreed,
    )
    for name, frame in zip(SITES, frames, strict=True):
        here = program.encoded(sites[name].policy.source, agreed)
        cells = program.cells(0, here.train)
        assert not ((cells > 0) & (cells < 10)).any()
        assert cells.sum() == len(frame), "every row takes part"
        if method.startswith("fedbio"):  # in the second stage a row has the weight of its own group
            assert np.bincount(here.model["groups"], minlength=3)[2] == (frame["group"] == "r").sum()
        hidden = here.visible.pooled
        assert hidden.sum() == (0 if name == SITES[2] else 2)
        # What the report tells is what was compared: no difference of the two is a small count.
        told = np.array(json.loads((tmp_path / "runs" / settings.run / "report.json").read_text())[name]["decisions"])
        together = cells.reshape(3, 2)
        np.testing.assert_array_equal(told.sum(axis=-1)[:3], np.where(hidden[:, None], 0, together))
        np.testing.assert_array_equal(told.sum(axis=-1)[3], together[hidden].sum(axis=0))


def test_arrays_per_site(tmp_path):
    settings = settings_for("fedavg", schema=None, steps=4)
    sites, _ = fair_array_sites(tmp_path, settings, np.random.default_rng(2), SIZES, 5, tell=TELL)
    agrees(tmp_path, settings, sites)


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ({"columns": ("age", "job", "hired")}, "asks for a column that this site does not offer; its own log names it"),
        ({"tell": ("rows",)}, "does not tell its statistics"),
        ({"tell": ("rows", "statistics", "smoothness")}, "does not tell its groups"),
        ({"minimum_rows": 1000}, "fewer rows under the job's schema than it works on"),
        ({"minimum_batch": 100}, "batches are smaller than this site allows"),
        ({"minimum_cell": 30}, "A group, class or column has fewer rows"),
    ],
)
def test_what_a_site_forbids_is_refused_and_named(tmp_path, policy, sentence):
    settings = settings_for("fedminmax", steps=2)
    with pytest.raises(RunFailed, match=sentence):
        coordinate(tmp_path, settings, Direct(table_sites(tmp_path, settings, **policy)))


STATISTICS = "statistics/rows"
NUMBERS = {
    "nothing": (0, lambda told: {}, "lacks 'statistics/counts'"),
    "something else": (0, lambda told: {**told, "x" * 5000: told[STATISTICS]}, "holds a strange 'x{40}'"),
    "a shape": (0, lambda told: {**told, "statistics/sums": np.zeros(7)}, r"is of shape \[7\] instead of \[1\]"),
    "no rows": (0, lambda told: {**told, STATISTICS: np.zeros(1)}, "'statistics/rows' .* holds a number that cannot be"),
    "less than none": (0, lambda told: {**told, "statistics/squares": np.array([-1.0])}, "holds a number that cannot be"),
    "one row": (1, lambda told: {**told, "rows": np.array([1, 20])}, "tells of fewer rows than the 10 that the coordinator"),
    "no number": (1, lambda told: {**told, "smoothness": np.array([np.nan])}, "holds a NaN or an infinity"),
    "no table": (1, lambda told: [1], "is not a table of named arrays"),
    "a place": (2, lambda told: {**told, "scores/places": told["scores/places"] + 10**6}, "holds a number that cannot be"),
    "lengths": (2, lambda told: {**told, "scores/places": told["scores/places"][1:]}, "holds lists of different lengths"),
    "a report": (None, lambda told: {"decisions": told["decisions"]}, "the report lacks 'hidden'"),
    "a bent report": (None, lambda told: {**told, "decisions": -told["decisions"]}, "holds a number that cannot be"),
}  # fmt: skip


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_that_cannot_be_are_named_at_their_site_and_the_others_go_on(tmp_path, what):
    number, spoil, sentence = NUMBERS[what]
    settings = settings_for("fedavg", steps=2, more={"threshold": "auto"})
    settings = dataclasses.replace(settings, min_sites=2)

    def fault(task, name, request, told):
        here = (
            task == ("finish" if number is None else "survey") and name == "site-2" and request.get("survey") == number
        )
        return {"numbers": spoil(told["numbers"])} if here else told

    coordinate(tmp_path, settings, Direct(table_sites(tmp_path, settings), fault), least=10)
    log = (tmp_path / "runs" / settings.run / "log.txt").read_text()
    first, *others = [line for line in log.splitlines() if "refused" in line]
    assert re.search(f"the reply of site-2 was refused: .*{sentence}", first)
    assert len(first) < 300
    assert all("site-2 was refused: What is said to be agreed on does not fit" in line for line in others), others
    reports = json.loads((tmp_path / "runs" / settings.run / "report.json").read_text())
    assert {"site-1", "site-3"} <= set(reports)
    assert number is not None or "site-2" not in reports


def test_a_broken_table_does_not_quote_its_cells(tmp_path):
    settings = settings_for("fedavg", steps=2)
    sites = table_sites(tmp_path, settings)
    frame = tables()[1].astype(object)
    frame.loc[7, "age"] = "secret-77"
    frame.to_csv(tmp_path / "site-2.csv", index=False)
    channel = Direct(sites)
    with pytest.raises(RunFailed, match="site-2: Something went wrong at the site; its own log says what") as caught:
        coordinate(tmp_path, settings, channel)
    assert "secret" not in str(caught.value) + repr(channel.seen)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"oops": 1}, "has no argument 'oops'"),
        ({"arrays": {"features": 3, "groups": 2}}, "either a schema or the sizes"),
        ({"recipe": {"metod": "fedavg"}}, "Recipe has no option 'metod'"),
        ({"recipe": {"formulation": {}}}, "Recipe has no option 'formulation'"),
        ({"recipe": []}, "must be a table"),
        ({"validation": 2}, "validation must lie between 0 and 1"),
        ({"threshold": "often"}, "threshold must be a number between 0 and 1"),
        ({"class_weight": [1, -1]}, "a positive number for each of the 2 classes"),
        ({"minimum_cell": 0}, "minimum_cell must be at least 1"),
        ({"schema": "target ="}, "no valid TOML"),
    ],
)
def test_bad_arguments(change, sentence):
    arguments = settings_for("fedavg").arguments
    with pytest.raises((ValueError, TypeError), match=sentence):
        fair_program({**arguments, **change})


def test_jobs_cannot_bring_functions():
    settings = settings_for("fedavg")
    assert "lambda" not in settings.to_json()
    with pytest.raises(ValueError, match="text, numbers, lists and tables only"):
        dataclasses.replace(settings, arguments={"recipe": {"metric": len}}).to_json()


NUMBER = dataclasses.replace(SCHEMA, target="pay", classes=(), positive=None, task="regression", center=50.0)


def with_pay():
    """The same tables with a number to predict, which is missing once; men are paid more than their age says."""
    rng = np.random.default_rng(5)
    made = []
    for frame in tables():
        pay = (30 + 0.5 * frame["age"] + 4 * (frame["sex"] == "m") + 2 * rng.normal(size=len(frame))).round(2)
        made.append(frame.assign(pay=pay.astype(object).where(frame.index != 5, "")))
    return made


@pytest.mark.parametrize("method", ["fedavg", "fedreg", "fedminmax", "fcfl", "fairfed", "fedbioacc", "fedpath"])
def test_numbers_at_sites(tmp_path, method):
    """The simulated model, on a target scaled by what the sites agreed on; their sums; the run folder in the table's units."""
    steps = {"steps": 40} | ({"weight_steps": 4} if method == "fedbioacc" else {"path": [1.0]})
    more = {"minimum_cell": 1, "model": {"kind": "linear", "loss": "squared"}, "formulation": {"metric": "mean_error"}}
    settings = settings_for(method, NUMBER, more=more, **steps)
    sites = table_sites(tmp_path, settings, ("age", "job", "sex", "pay"), with_pay())
    program, agreed, expected = agrees(tmp_path, settings, sites)
    frame = pd.concat([one[one["pay"] != ""] for one in with_pay()], ignore_index=True)
    encoder, pay = program.encoder(agreed), frame["pay"].astype(float)
    np.testing.assert_allclose(encoder.target, (pay.mean(), pay.std(ddof=0)), rtol=1e-12)
    told = pd.read_json(tmp_path / "runs/fair/report.json").loc["moments"]
    sums = np.sum([told[name] for name in SITES], axis=0)
    said = numbers(program.model, expected.params, encoder.transform(frame))
    groups = encoder.groups(frame)
    wanted = Moments.of(encoder.standardised(pay.to_numpy()), said, groups, 2).sums
    np.testing.assert_allclose(sums[:2], wanted, rtol=1e-3, atol=1e-3)
    if method != "fedbioacc":
        return
    fit = FitOptions(
        method, metric="mean_error", model="linear", task="regression", steps=40, weight_steps=4, compare_with=None,
        minimum_cell=1,
    )  # fmt: skip
    done = federate.run(settings, fit, NUMBER, tmp_path / "out", lambda: tmp_path / "runs/fair")
    error = encoder.target[0] + encoder.target[1] * said - pay.to_numpy()
    means = [error[groups == group].mean() for group in range(2)]
    row = done.run.rows.iloc[0]
    assert row["train_rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-3)
    assert row["train_gap"] == pytest.approx(abs(means[0] - means[1]), rel=1e-2)
    assert done.run.groups["mean_target"].tolist() == pytest.approx([pay[groups == g].mean() for g in range(2)])
    assert done.run.weights["label"].tolist() == ["below the mean", "above the mean"] * 2
    assert "tabular-regression" in (tmp_path / "out" / "model-card.md").read_text()
