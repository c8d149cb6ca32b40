"""What leaves a site, looked at number by number: replies of the plan and what the policy lists, nothing else."""

import jax
import numpy as np
import pytest

from fedbilevel.federation.protocol.policy import Policy, Source
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.site import Site
from fedbilevel.federation.protocol.vault import read_arrays
from tests.federation import programs
from tests.federation.direct import SITES, Direct, array_sites, coordinate, settings_for

pytestmark = pytest.mark.usefixtures("shared_compilation")

OPTIONS = {"batch_size": 4, "local_steps": 2}


def numbers_in(value):
    """Every number of an answer, wherever it sits."""
    if isinstance(value, np.ndarray):
        return {float(number) for number in value.ravel()}
    if isinstance(value, dict):
        return set().union(set(), *(numbers_in(item) for item in value.values()))
    if isinstance(value, list | tuple):
        return set().union(set(), *(numbers_in(item) for item in value))
    return {float(value)} if isinstance(value, int | float) else set()


def test_no_row_no_inner_variable_no_momentum(tmp_path):
    settings = settings_for("fedbioacc", rounds=3, record_every=1, **OPTIONS)
    sites = array_sites(tmp_path, settings, tell=("objective",))
    kept = {name: [] for name in SITES}

    def remember(task, name, request, told):
        """Everything private a site has held so far: y, the y before, omega."""
        if task == "work":
            for file in (tmp_path / name / "run").glob("after-*.npz"):
                kept[name].append(read_arrays(file)[1])
        return told

    channel = Direct(sites, remember)
    coordinate(tmp_path, settings, channel)

    data = programs.client_data()
    for client, name in enumerate(SITES):
        left = [told for _, who, told in channel.seen if who == name]
        public = set().union(*(numbers_in(told) for told in left))
        rows = set().union(
            *(numbers_in(np.asarray(leaf[client])) for leaf in jax.tree.leaves((data.train, data.val)))
        ) - {0.0}
        assert len(rows) > 1000
        assert not public & rows, "a number of the site's rows left it"
        private = set().union(*(numbers_in(array) for state in kept[name] for array in state.values()))
        private -= {float(n) for n in range(200)}  # steps and counted calls: whole numbers that everybody can count
        assert len(private) > 10
        assert not public & private, "a number of the site's own state left it"
        for task, who, told in channel.seen:
            if who == name and task == "work":
                assert set(told) == {"arrays"}
                assert [array.shape for array in told["arrays"]] == [(programs.OUTER,), (programs.OUTER,)]
            elif who == name:
                assert set(told) <= {"objective", "numbers"}


def test_what_leaves_is_written_down_at_the_site(tmp_path):
    settings = settings_for("fedbio", rounds=2, **OPTIONS)
    coordinate(tmp_path, settings, Direct(array_sites(tmp_path, settings)))
    lines = [line.split(";")[1:] for line in (tmp_path / "site-1/run/left.csv").read_text().splitlines()]
    one = str(8 * programs.OUTER)
    assert lines == [
        ["prepare", "rows", "0", "0"],
        ["work", "arrays,seconds", "1", one],
        ["work", "arrays,seconds", "1", one],
        ["finish", "numbers", "0", "0"],
    ]


def test_labels_and_rows_of_a_table_stay(tmp_path):
    """Labels are few numbers, so they are looked for by their length: no array is as long as the table."""
    rng = np.random.default_rng(0)
    arguments = {
        "arrays": {"features": 6, "groups": 2},
        "recipe": {"method": "fedbioacc", "steps": 4, "weight_steps": 4, "local_steps": 2, "batch_size": 16},
        "validation": 0.2,
    }
    settings = JobSettings("fair", "fair", SITES, arguments, double=True)
    sites, secret = {}, {}
    for name, rows in zip(SITES, (61, 67, 71), strict=True):
        secret[name] = {
            "features": rng.normal(size=(rows, 6)).astype(np.float32),
            "labels": rng.integers(2, size=rows).astype(np.float32),
            "groups": rng.integers(2, size=rows).astype(np.int32),
        }
        np.savez(tmp_path / f"{name}.npz", **secret[name])
        policy = Policy(Source(arrays_file=tmp_path / f"{name}.npz"), tell=("rows", "smoothness"))
        sites[name] = Site(name, settings, policy, tmp_path / name, lambda line: None)
    channel = Direct(sites)
    coordinate(tmp_path, settings, channel)
    allowed = {(4,), (6,), (2,), (1,)}  # x and nu over four cells; the model; two counts of rows; one curvature
    for task, name, told in channel.seen:
        arrays = [*told.get("arrays", []), *told.get("numbers", {}).values()]
        assert {array.shape for array in arrays} <= allowed
        assert not numbers_in(told) & (numbers_in(secret[name]["features"]) - {0.0, 1.0})
        assert set(told) <= {"arrays", "numbers", "rows"}, task


def test_a_site_that_tells_nothing_still_takes_part(tmp_path):
    settings = settings_for("fedbio", rounds=2, record_every=1, **OPTIONS)
    channel = Direct(array_sites(tmp_path, settings, tell=()))
    coordinate(tmp_path, settings, channel)
    assert {key for _, _, told in channel.seen for key in told} == {"arrays", "numbers"}
    history = (tmp_path / "runs/run/history.csv").read_text().splitlines()
    assert [line.split(",")[3:5] for line in history[1:]] == [["nan", "0"], ["nan", "0"]]


def test_a_request_of_another_run_is_refused(tmp_path):
    settings = settings_for("fedbio", rounds=2, **OPTIONS)
    one = array_sites(tmp_path, settings)["site-1"]
    assert "another run" in one.answer("prepare", {"digest": "x"})["refused"]
    assert "no task" in one.answer("shell", {"digest": settings.digest})["refused"]
    assert (
        "not prepared"
        in one.answer(
            "work", {"digest": settings.digest, "label": [0, 0, 0, 1], "since": None, "floor": None, "item": 0}
        )["refused"]
    )
    # Whatever a request lacks, the site answers with a sentence and stays up.
    assert "KeyError at the site" in one.answer("work", {"digest": settings.digest})["refused"]


def test_programs_must_be_allowed_by_the_site(tmp_path):
    settings = settings_for("fedbio", rounds=2)
    with pytest.raises(ValueError, match="not among the functions this site allows"):
        Site("site-1", settings, Policy(), tmp_path, lambda line: None)
