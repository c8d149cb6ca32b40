"""What leaves a site, looked at number by number: replies of the plan and what the policy lists, nothing else."""

import jax
import numpy as np
import pytest

from fedbilevel.fairness.methods import Ladder
from fedbilevel.federation.protocol.policy import Source
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.vault import read_arrays
from tests.federation import programs
from tests.federation.direct import SITES, Direct, Runs, array_sites, coordinate, fair_array_sites, settings_for, site

pytestmark = pytest.mark.usefixtures("shared_compilation")


def numbers_in(value):
    """Every number of an answer, wherever it sits."""
    leaves = [leaf for leaf in jax.tree.leaves(value) if not isinstance(leaf, str)]
    return {float(number) for leaf in leaves for number in np.asarray(leaf).ravel()}


def test_no_row_no_inner_variable_no_momentum(tmp_path):
    settings = settings_for("fedbioacc", rounds=3, record_every=1, batch_size=4, local_steps=2)
    sites = array_sites(tmp_path, settings, tell=("objective",))
    kept = {name: [] for name in SITES}

    def remember(task, name, request, told):
        """Everything private a site has held so far: y, the y before, omega.  The x it sent it keeps too, as the second leaf:
        omega was estimated there."""
        if task == "work":
            for file in (tmp_path / name / "run").glob("after-*.npz"):
                arrays = read_arrays(file)[0]
                sent = arrays.pop("leaf1")
                assert sent.shape == programs.algorithm("fedbioacc").init(jax.random.key(0)).outer.shape
                kept[name].append(arrays)
        return told

    channel = Direct(sites, remember)
    coordinate(tmp_path, settings, channel)

    data = programs.client_data()
    for client, name in enumerate(SITES):
        left = [told for _, who, told in channel.seen if who == name]
        public = numbers_in(left)
        rows = numbers_in([leaf[client] for leaf in jax.tree.leaves((data.train, data.val))]) - {0.0}
        assert len(rows) > 1000
        assert not public & rows, "a number of the site's rows left it"
        private = numbers_in(kept[name])
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
    Runs(tmp_path, 2).submit()
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
    sites, secret = fair_array_sites(tmp_path, settings, rng, (61, 67, 71), 6, tell=("rows", "smoothness"))
    channel = Direct(sites)
    coordinate(tmp_path, settings, channel)
    # x and nu over four cells; the model; two counts of rows; one curvature; the rung of a ladder of sizes it stands on.
    allowed = {(4,), (6,), (2,), (1,), (Ladder(16).length,)}
    for task, name, told in channel.seen:
        arrays = [*told.get("arrays", []), *told.get("numbers", {}).values()]
        assert {array.shape for array in arrays} <= allowed
        assert not numbers_in(told) & (numbers_in(secret[name]["features"]) - {0.0, 1.0})
        assert set(told) <= {"arrays", "numbers", "rows"}, task


def test_a_site_that_tells_nothing_still_takes_part(tmp_path):
    run = Runs(tmp_path, 2, record_every=1)
    run.submit(tell=())
    assert {key for _, _, told in run.channel.seen for key in told} == {"arrays", "numbers"}
    history = run.table("history")
    assert history["objective"].isna().tolist() == [True, True]
    assert history["sites"].tolist() == [0, 0]


def test_a_request_of_another_run_is_refused(tmp_path):
    settings = settings_for("fedbio", rounds=2)
    asked = array_sites(tmp_path, settings)["site-1"]
    ours = {"digest": settings.digest}
    work = {**ours, "label": [0, 0, 0, 1], "since": None, "floor": None, "item": 0}
    for task, request, reason in (
        ("prepare", {"digest": "x"}, "run"),
        ("shell", ours, "request"),
        ("work", work, "stage"),
        # Whatever a request lacks, the site answers with a reason and stays up.
        ("work", ours, "site"),
    ):
        assert asked.answer(task, request) == {"refused": reason}


def test_programs_must_be_allowed_by_the_site(tmp_path):
    settings = settings_for("fedbio", rounds=2)
    with pytest.raises(ValueError, match="a program that this site does not allow"):
        site(tmp_path, "site-1", settings, Source())
