"""Tuning over sites gives what the simulation gives; doubtful rows are listed at their own site, and only counted elsewhere."""

import json

import jax
import numpy as np
import pandas as pd
import pytest

from fedbilevel.algorithms.quasi_newton import Answer
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


def carried_out(folder, secure, **policy):
    options = tune.TuneOptions(WHAT, rounds=9, minimum_cell=1, splits=1, compare=False)
    settings = tune.job(SCHEMA, options, SITES, run="tune", secure=secure)
    sites = table_sites(folder, settings, columns=("age", "job", "hired"), tell=TELL, **policy)
    *_, params = coordinate(folder, settings, Direct(sites))
    return options, settings, sites, params


@pytest.mark.parametrize("secure", [False, True])
def test_sites_and_simulation_agree(tmp_path, secure):
    options, settings, sites, params = carried_out(tmp_path, secure)
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
    assert np.ptp(answer[4]) > 0.1, "the weights of the sites are to move"
    made = tune.federated(settings, SCHEMA, options, tmp_path / "out", lambda: tmp_path / "runs/tune")
    learned = made.run.others["choices"]
    assert learned["kind"].value_counts().to_dict() == {
        "penalty": 3,
        "class weight": 2,
        "label smoothing": 1,
        "site weight": 3,
        "label noise": 1,
    }
    assert learned.loc[learned["kind"] == "site weight", "name"].tolist() == list(SITES)
    np.testing.assert_allclose(fitted_model(tmp_path / "out").params, params)
    assert "Whose data helps" in (tmp_path / "out/page.html").read_text()
    assert made.run.rows["bytes"].item() > 0


def test_doubtful_rows_stay_at_their_site(tmp_path):
    _, _, sites, _ = carried_out(tmp_path, False)
    reports = json.loads((tmp_path / "runs/tune/report.json").read_text())
    for name, site in sites.items():
        own = pd.read_csv(site.folder / "doubtful.csv")
        assert reports[name]["doubtful"] == [len(own)]
        assert (own["trust"] < 0.5).all()
    assert not list((tmp_path / "runs").rglob("doubtful*"))


def test_few_doubtful_rows_are_not_counted(tmp_path):
    _, _, sites, _ = carried_out(tmp_path, False, minimum_cell=1)
    program = tune_program(tune.job(SCHEMA, tune.TuneOptions(("rows",)), SITES).arguments)
    agreed = Progress.read(tmp_path / "runs/tune/state.npz").agreed
    (answers,) = (make_answers(program, tmp_path),)
    source = next(iter(sites.values())).policy.source
    counted = program.report(source, agreed, answers)["doubtful"]
    listed = program.own_files(source, agreed, answers)["doubtful.csv"].count("\n") - 1
    assert counted == [listed if listed == 0 or listed >= 10 else -1]


def make_answers(program, folder):
    """An answer that doubts a few rows: trust by age alone."""
    choices = program.tuning_like().start()
    params = program.model.start(jax.random.key(0))
    trust = np.zeros(params.shape, np.float32)
    trust[0] = -3.0
    return [Answer(choices._replace(trust=trust), params)]


def test_a_job_with_an_unknown_argument_is_refused():
    arguments = tune.job(SCHEMA, tune.TuneOptions(), SITES).arguments
    with pytest.raises(ValueError, match="no argument 'method'"):
        make_program("tune", {**arguments, "method": "fedavg"}, ())
