"""The site's own file, and the settings a job carries: every mistake is answered with one sentence."""

import dataclasses
import os
import re
import subprocess
import sys

import pytest

from fedbilevel.engines.stages import Refused
from fedbilevel.fairness import disclosure
from fedbilevel.federation.nvflare.job import SIGNED, check_job, write_job
from fedbilevel.federation.protocol.policy import FILE, Approval, Policy, Privacy, read_policy
from fedbilevel.federation.protocol.settings import JobSettings

GOOD = """
[data]
table = "rows.csv"
columns = ["age", "sex"]
[policy]
tell = ["rows"]
functions = ["lab.programs:one"]
minimum_rows = 20
minimum_batch = 8
minimum_cell = 3
[approve]
auto = true
schemas = ["any"]
rounds = 7
[privacy]
clip = 1.5
noise = 0.8
epsilon = 3.0
delta = 1e-6
[state]
folder = "/srv/state"
"""


def test_a_whole_file(tmp_path):
    (tmp_path / FILE).write_text(GOOD)
    policy = read_policy(tmp_path)
    assert policy.source.table == tmp_path / "rows.csv"
    assert policy.source.columns == ("age", "sex")
    assert (policy.tell, policy.functions) == (("rows",), ("lab.programs:one",))
    assert (policy.minimum_rows, policy.minimum_batch, policy.minimum_cell, policy.source.minimum_cell) == (20, 8, 3, 3)
    assert policy.approval == Approval(True, ("any",), (), 7)
    assert policy.privacy == Privacy(1.5, 0.8, 3, 1e-6)
    assert str(policy.folder) == "/srv/state"


def test_without_a_file_nothing_is_offered(tmp_path):
    assert read_policy(tmp_path) == Policy()
    assert Policy().minimum_cell == Policy().source.minimum_cell == disclosure.MINIMUM


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[data", "not readable as TOML"),
        ("[dat]\nx = 1", r"no section \[dat\]"),
        ("data = 1", r"no section \[data\]"),
        ("[data]\ntabel = 'x'", "no setting 'tabel'"),
        ("[data]\ntable = 'x'\narrays = 'y'", "names a table and arrays"),
        ("[data]\ncolumns = 'age'", "data.columns must be a list of names"),
        ("[data]\narrays = 'x'\nmapping = 'y'", "names a mapping but no table"),
        ("[policy]\ntell = ['secrets']", "lists 'secrets'; choose from rows"),
        ("[policy]\nminimum_rows = 0", "minimum_rows must be at least 1"),
        ("[policy]\nlargest_scale = 0", "largest_scale must be a positive number"),
        ("[approve]\nauto = 1", "approve.auto must be true or false"),
        ("[approve]\nruns = 0", "approve.runs must be at least 1"),
        ("[approve]\nmethods = 'fedavg'", "approve.methods must be a list of names"),
        ("[policy]\nminimum_cell = 0", "minimum_cell must be at least 1"),
        ("[policy]\nfunctions = [1]", "policy.functions must be a list of names"),
        ("[policy]\nsecret_draws = 'no'", "policy.secret_draws must be true or false"),
        ("[privacy]\nclip = -1", "privacy.clip must be a positive number"),
        ("[privacy]\nclip = 1\nnoise = -1", "privacy.noise must be a number of at least 0"),
        ("[privacy]\nclip = 1\nepsilon = 1", "privacy.epsilon needs privacy.noise"),
        ("[privacy]\nclip = 1\nnoise = 1\ndelta = 1.0", "privacy.delta must lie between 0 and 1"),
    ],
)
def test_mistakes_in_the_file(tmp_path, text, sentence):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_policy(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"run": "../x"}, "run must be a name"),
        ({"sites": ()}, "sites must list"),
        ({"sites": ("a", "a")}, "names a site twice"),
        ({"sites": ("a/b",)}, "sites must list"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**32}, "seed must be below"),
        ({"min_sites": 3}, "more than the 2 sites"),
        ({"reply_timeout": 0}, "reply_timeout must be a positive number"),
        ({"arguments": []}, "arguments must be a table"),
        ({"program": ""}, "program must be"),
    ],
)
def test_mistakes_in_a_job(change, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        dataclasses.replace(JobSettings("run", "fair", ("a", "b")), **change)


def test_settings_survive_json_and_know_what_makes_a_run():
    settings = JobSettings("run", "fair", ("a", "b"), {"x": [1, 2.5, None]}, seed=4, min_sites=1)
    assert JobSettings.from_json(settings.to_json()) == settings
    assert dataclasses.replace(settings, min_sites=2, reply_timeout=9).digest == settings.digest
    assert dataclasses.replace(settings, seed=5).digest != settings.digest
    assert settings.client("b") == 1
    with pytest.raises(ValueError, match="c is not one of the sites of run run: a, b"):
        settings.client("c")
    with pytest.raises(ValueError, match="does not know: nonsense"):
        JobSettings.from_json('{"run": "r", "nonsense": 1}')


def test_a_job_is_configuration_only(tmp_path):
    job = write_job(tmp_path, JobSettings("run", "fair", ("a", "b")))
    files = sorted(str(file.relative_to(job)) for file in job.rglob("*") if file.is_file())
    assert files == ["app/config/config_fed_client.json", "app/config/config_fed_server.json", "meta.json"]


def rewritten(name, change):
    def spoil(app):
        file = app / "config" / f"config_fed_{name}.json"
        file.write_text(change(file.read_text()))

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        rewritten("client", lambda text: text + " "),
        rewritten("client", lambda text: text.replace('"components": []', '"components": [{"path": "x.Y"}]')),
        rewritten("client", lambda text: text.replace("[]", "{$HOME}")),
        rewritten("client", lambda text: "[" * 100_000),
        rewritten("client", lambda text: re.sub(r'"settings": "[^"]*"', '"settings": "{$HOME}"', text)),
        rewritten("client", lambda text: re.sub(r'"settings": "', '"settings": "e30K', text)),
        rewritten("server", lambda text: text.replace("0.01", "-1.0")),
        lambda app: (app / "config/config_fed_client.json").rename(app / "config/config_fed_client.conf"),
        lambda app: (app / "config/log_config.json").write_text("{}"),
        lambda app: (app / "custom").mkdir(),
        lambda app: (app / "config/more").mkdir(),
        lambda app: (app / "config" / SIGNED[0]).write_bytes(b" " * 5_000_000),
        lambda app: (app / "config/config_fed_server.json").unlink(),
        lambda app: (app / "config/more.json").symlink_to(__file__),
    ],
)
def test_a_site_takes_jobs_of_our_own_making_only(tmp_path, spoil):
    settings = JobSettings("run", "fair", ("a", "b"), {"text": "{$HOME}"})
    app = write_job(tmp_path, settings) / "app"
    for name in SIGNED:
        (app / name).touch()
        (app / "config" / name).touch()
    assert check_job(app) == settings
    spoil(app)
    with pytest.raises(Refused, match="not one that this package writes, byte for byte"):
        check_job(app)


def test_a_site_hears_the_commands_that_runs_need_and_no_others():
    """NVFlare asks a site's rules only where the server says so: what reads files or makes classes is not there to be asked."""
    pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")
    script = (
        "from fedbilevel.federation.nvflare import validator as v\n"
        "heard = (v.ClientRequestProcessors.request_processors, v.AdminCommands.commands)\n"
        "print(*sorted(type(each).__name__ for each in sum(heard, [])), *v.ConfigFactory._fmt2Loader, sep=',')"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    names = told.strip().splitlines()[-1].split(",")
    assert names.pop() == "ConfigFormat.JSON"
    assert {"DeployProcessor", "StartJobProcessor", "AbortAppProcessor", "AbortCommand"} <= set(names)
    assert not [name for name in names if re.search("Shell|Log|Restart|Shutdown|Info(?!Processor$)|Errors|Stats", name)]
    assert len(names) == 14


def test_nothing_is_imported_from_the_folder_of_a_kit(monkeypatch, tmp_path):
    """Python would read an empty or a relative path there, where a site's process is started."""
    from fedbilevel.federation.operator.processes import kept_of

    monkeypatch.chdir(tmp_path)
    given = {"PYTHONPATH": os.pathsep.join(["", "src", "/lib", ""]), "PASSWORD": "x", "HOME": "/h"}
    kept = kept_of(given)
    assert kept == {"PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), "/lib"]), "HOME": "/h"}
