"""Tuning over sites gives what the simulation gives; doubtful rows are listed at their own site, and only counted elsewhere."""

import dataclasses
import json

import jax
import numpy as np
import pandas as pd
import pytest

from fedbilevel.algorithms.quasi_newton import Answer
from fedbilevel.engines.stages import TOGETHER
from fedbilevel.federation.operator.rehearsal import in_words, rehearse
from fedbilevel.federation.protocol.policy import TELL
from fedbilevel.federation.protocol.program import make_program
from fedbilevel.federation.protocol.record import Progress, read_answers
from fedbilevel.jobs import tune
from fedbilevel.jobs.predict import fitted_model
from fedbilevel.tables.schema import Column, Schema
from fedbilevel.tuning.program import tune_program
from fedbilevel.tuning.simulation import Tuner
from tests.federation.direct import SITES, Direct, coordinate
from tests.federation.test_fair import SIZES, table_sites

pytestmark = pytest.mark.usefixtures("shared_compilation")
SCHEMA = Schema(
    target="hired",
    classes=("no", "yes"),
    positive="yes",
    sensitive=(),
    groups=("everybody",),
    columns=(Column("age", "number", center=40.0), Column("job", "category", values=("cook", "judge"), pooled=True)),
)
WHAT = ("penalties", "classes", "sites", "rows")


def carried_out(folder, secure, what=WHAT, **policy):
    options = tune.TuneOptions(what, rounds=9, minimum_cell=1, splits=1, compare=False)
    settings = tune.job(SCHEMA, options, SITES, run="tune", secure=secure)
    sites = table_sites(folder, settings, columns=("age", "job", "hired"), tell=TELL, **policy)
    *_, params = coordinate(folder, settings, Direct(sites))
    return options, settings, sites, params


@pytest.mark.parametrize("secure", [False, True])
def test_sites_and_simulation_agree(tmp_path, secure):
    what = tuple(name for name in WHAT if name != "sites" or not secure)
    options, settings, sites, params = carried_out(tmp_path, secure, what)
    program, agreed = tune_program(settings.arguments), Progress.read(tmp_path / "runs/tune/state.npz").agreed
    rows = [program.reading.encoded(site.policy.source, agreed).model for site in sites.values()]
    alone = Tuner(secure).run(
        options.program(SCHEMA, 3, sum(SIZES) - 3), [(own["features"], own["labels"]) for own in rows], record=False
    )
    tolerance = 2e-4  # in single precision, and the moves solve systems with Hessians
    (answer,) = read_answers(tmp_path / "runs/tune")
    for found, wanted in zip(answer, jax.tree.leaves((alone.choices, alone.params)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=tolerance)
    np.testing.assert_allclose(params, alone.params, atol=tolerance)
    assert secure or np.ptp(answer[4]) > 0.1, "the weights of the sites are to move"
    made = tune.federated(settings, SCHEMA, options, tmp_path / "out", lambda: tmp_path / "runs/tune")
    learned = made.run.others["choices"]
    assert learned["kind"].value_counts().to_dict() == {
        "penalty": 3,
        "class weight": 2,
        "label smoothing": 1,
        **({} if secure else {"site weight": 3}),
        "label noise": 1,
    }
    assert learned.loc[learned["kind"] == "site weight", "name"].tolist() == ([] if secure else list(SITES))
    np.testing.assert_allclose(fitted_model(tmp_path / "out").params, params)
    assert ("Whose data helps" in (tmp_path / "out/page.html").read_text()) is not secure
    assert made.run.rows["bytes"].item() > 0


def test_doubtful_rows_stay_at_their_site(tmp_path):
    _, _, sites, _ = carried_out(tmp_path, False)
    reports = json.loads((tmp_path / "runs/tune/report.json").read_text())
    for name, site in sites.items():
        own = pd.read_csv(site.folder / "doubtful.csv")
        assert reports[name]["doubtful"] == [len(own)]
        assert (own["trust"] < 0.5).all()
    assert not list((tmp_path / "runs").rglob("doubtful*"))


def test_few_doubtful_rows_are_not_counted(tmp_path, monkeypatch):
    """...and neither are all but a few, since it is known how many rows there are."""
    _, _, sites, _ = carried_out(tmp_path, False, minimum_cell=1)
    program = tune_program(tune.job(SCHEMA, tune.TuneOptions(("rows",)), SITES).arguments)
    agreed = Progress.read(tmp_path / "runs/tune/state.npz").agreed
    source, params = next(iter(sites.values())).policy.source, program.model.start(jax.random.key(0))
    answers = [Answer(program.tuning_like().start(), params)]
    rows = SIZES[0] - 1
    for count, told in ((0, 0), (9, -1), (10, 10), (rows - 10, rows - 10), (rows - 9, -1), (rows, rows)):
        doubted = pd.DataFrame({"row": range(count)})
        monkeypatch.setattr(type(program), "doubtful", lambda *_, doubted=doubted: doubted)
        assert program.report(source, agreed, answers)["doubtful"] == [told]


def test_what_is_reported_of_a_tuning_adds_up(tmp_path):
    """Under secure sums too; a site that has too few doubtful rows to tell of them adds none."""
    reports = []
    for secure in (False, True):
        folder = tmp_path / str(secure)
        folder.mkdir()
        carried_out(folder, secure, ("penalties", "rows"))
        reports.append(json.loads((folder / "runs/tune/report.json").read_text()))
    single, together = reports[0].values(), reports[1][TOGETHER]
    assert together["doubtful"] == [sum(max(each["doubtful"][0], 0) for each in single)]
    assert np.array_equal(together["decisions"], np.sum([each["decisions"] for each in single], axis=0))


def test_weights_of_sites_are_nothing_that_a_sum_hides(tmp_path):
    """Every site's own number stands in its place of the sum, and other weights would single out its whole reply."""
    options = tune.TuneOptions(WHAT)
    with pytest.raises(ValueError, match=r"sites.*--secure-aggregation off"):
        tune.job(SCHEMA, options, SITES)
    with pytest.raises(ValueError, match=r"sites.*--secure"):
        tune.TuneOptions(WHAT, secure=True)
    settings = dataclasses.replace(tune.job(SCHEMA, options, SITES, secure=False), secure=True)
    sites = table_sites(tmp_path, settings, columns=("age", "job", "hired"), tell=TELL)
    with pytest.raises(ValueError, match="every site's own number"):
        coordinate(tmp_path, settings, Direct(sites))
    agreed = Progress.read(tmp_path / f"runs/{settings.run}/state.npz").agreed
    asked = {"digest": settings.digest, "stage": 0, "agreed": agreed, "answers": []}
    assert sites["site-1"].answer("prepare", asked) == {"refused": "single"}


def test_who_approves_it_reads_what_it_does(tmp_path):
    """Also what a schema calls missing, by which it could pick out a row."""
    _, settings, sites, _ = carried_out(tmp_path, False, ("penalties", "rows"))
    odd = dataclasses.replace(SCHEMA.columns[0], also_missing=("41.5",))
    schema = dataclasses.replace(SCHEMA, columns=(odd, SCHEMA.columns[1]))
    settings = dataclasses.replace(settings, arguments={**settings.arguments, "schema": schema.text()})
    policy = sites["site-1"].policy
    words = " ".join(in_words(settings, policy, tmp_path, *rehearse("site-1", settings, policy)))
    assert "It tunes penalties, rows of a logistic model, in 9 rounds, and fits it. It reads age, job." in words
    assert "In age, these count as missing: '41.5'." in words
    assert "how many rows have labels that are doubtful (1 number)" in words


def test_a_job_with_an_unknown_argument_is_refused():
    arguments = tune.job(SCHEMA, tune.TuneOptions(), SITES).arguments
    with pytest.raises(ValueError, match="no argument 'method'"):
        make_program("tune", {**arguments, "method": "fedavg"}, ())
