"""`fedbilevel federate` without a network: kits, certificates, checks at a site, and what is refused."""

import json
import logging
import shutil
import stat
import sys

import pytest

pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")

import yaml
from cryptography import x509

from fedbilevel import cli
from fedbilevel.cli.federate import check as federate_check
from fedbilevel.cli.federate import demo as federate_demo
from fedbilevel.cli.federate import parts as federate_parts
from fedbilevel.cli.federate import submit as federate_submit
from fedbilevel.federation.operator.demo import policy_text
from fedbilevel.tables.infer import infer
from fedbilevel.tables.reading import open_table

ROWS = 240


@pytest.fixture
def run(monkeypatch, capsys):
    """The command line in this process: (exit code, standard output, standard error)."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fedbilevel", "federate", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        told = capsys.readouterr()
        return code, told.out, told.err

    for module in (federate_check, federate_submit, federate_demo):
        monkeypatch.setattr(module, "prepare_jax", lambda: None)  # it is for the whole process
    level = logging.getLogger().level
    yield call
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(level)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A federation of two sites, made once; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("federation") / "fed"
    from fedbilevel.federation.operator.provision import provision

    provision(folder, ["north", "south"], server="fl.example.org", port=9102, admin_port=9103)
    return folder


@pytest.fixture
def federation(home, tmp_path):
    return shutil.copytree(home, tmp_path / "fed")


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "rows.csv"
    lines = [
        f"{20 + i % 40},{['red', 'blue', 'green'][i % 3]},{'FM'[i // 2 % 2]},{'yes' if (i * 7) % 10 < 4 else 'no'},{i}"
        for i in range(ROWS)
    ]
    file.write_text("\n".join(["age,colour,sex,outcome,secret", *lines]) + "\n")
    return file


@pytest.fixture
def schema(table, tmp_path):
    return infer([open_table(table)], target="outcome", sensitive="sex").write(tmp_path / "schema.toml")


def certificate(kit):
    name = "server.crt" if (kit / "startup/server.crt").exists() else "client.crt"
    return x509.load_pem_x509_certificate((kit / "startup" / name).read_bytes())


def test_init_writes_project_kits_and_says_what_to_do(run, tmp_path):
    out = tmp_path / "fed"
    code, told, _ = run("init", "--site", "north", "--site", "south", "--server", "fl.example.org", "--out", out)
    assert code == 0
    project = yaml.safe_load((out / "project.yml").read_text())
    assert [one["name"] for one in project["participants"]] == [
        "fl.example.org", "north", "south", "admin@coordinator.org",
    ]  # fmt: skip
    for words in (
        "send to the site north",
        "send to the site south",
        "stays with the coordinator",
        "port 8002",
        "8003",
    ):
        assert words in told
    assert {kit.name for kit in (out / "kits").iterdir()} == {
        "fl.example.org", "north", "south", "admin@coordinator.org",
    }  # fmt: skip
    assert "fl.example.org:8002" in (out / "kits/north/startup/fed_client.json").read_text()


def test_kits_hold_their_keys_alone_and_closed(home):
    for kit in (home / "kits").iterdir():
        assert stat.S_IMODE(kit.stat().st_mode) == 0o700
        (key,) = (kit / "startup").glob("*.key")
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE((home / "authority").stat().st_mode) == 0o700
    (state,) = (home / "authority").rglob("cert.json")
    assert set(json.loads(state.read_text())) == {"root_cert", "root_pri_key"}
    assert stat.S_IMODE(state.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["fl.example.org", "north"])
def test_kits_are_restricted(home, name):
    local = home / "kits" / name / "local"
    resources = json.loads((local / "resources.json").read_text())
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["class_allow_list"] == [
        "fedbilevel.federation.nvflare.controller.PlanController", "fedbilevel.federation.nvflare.executor.SiteExecutor",
    ]  # fmt: skip
    assert "/tmp/nvflare" not in (local / "resources.json").read_text()
    assert not {"site_log_streamer", "log_receiver"} & {one["id"] for one in resources["components"]}
    assert resources.get("allow_log_streaming", False) is False
    rights = json.loads((local / "authorization.json").read_text())["permissions"]
    for role, given in rights.items():
        assert isinstance(given, dict), f"{role} may do anything"
        assert {given.get("byoc", "none"), given.get("shell_commands", "none")} == {"none"}
    assert rights["member"] == {"view": "any"}


def test_a_moved_server_keeps_its_storage_inside(home, tmp_path):
    from fedbilevel.federation.operator.provision import settle

    moved = shutil.copytree(home / "kits/fl.example.org", tmp_path / "elsewhere")
    settle(moved)
    text = (moved / "local/resources.json").read_text()
    assert str(home) not in text
    assert f"{tmp_path}/elsewhere/storage/jobs" in text
    assert f"{tmp_path}/elsewhere/storage/snapshots" in text


def test_adding_a_site_leaves_the_others_alone(run, federation):
    before = {kit.name: certificate(kit).serial_number for kit in (federation / "kits").iterdir()}
    policy = federation / "kits/north/local/fedbilevel.toml"
    policy.write_text("[policy]\nminimum_rows = 77\n")
    code, told, _ = run("init", "--site", "west", "--member", "ann@example.org", "--out", federation)
    assert code == 0
    assert "send to the site west" in told
    assert "send to ann@example.org, a member" in told
    assert "site north" not in told
    assert {name: certificate(federation / "kits" / name).serial_number for name in before} == before
    assert "77" in policy.read_text()
    certificate(federation / "kits/west").verify_directly_issued_by(root(federation / "kits/north"))
    code, told, _ = run("init", "--site", "west", "--out", federation)
    assert (code, "Nothing to do" in told) == (0, True)


def root(kit):
    return x509.load_pem_x509_certificate((kit / "startup/rootCA.pem").read_bytes())


def test_renewing_one_certificate(run, federation):
    kits = federation / "kits"
    before = {name: certificate(kits / name).serial_number for name in ("north", "south")}
    (kits / "north/local/fedbilevel.toml").write_text("[policy]\nminimum_rows = 77\n")
    code, told, _ = run("init", "--renew", "north", "--out", federation)
    assert code == 0
    assert "north replaces its startup folder" in told
    assert certificate(kits / "north").serial_number != before["north"]
    assert certificate(kits / "south").serial_number == before["south"]
    certificate(kits / "north").verify_directly_issued_by(root(kits / "south"))
    assert "77" in (kits / "north/local/fedbilevel.toml").read_text()


def test_renewing_the_authority_renews_everybody(run, federation):
    kits = federation / "kits"
    old, serials = root(kits / "north"), {kit.name: certificate(kit).serial_number for kit in kits.iterdir()}
    code, told, _ = run("init", "--renew", "authority", "--json", "--out", federation)
    assert code == 0
    assert set(json.loads(told)["renewed"]) == set(serials)
    for kit in kits.iterdir():
        assert certificate(kit).serial_number != serials[kit.name]
        certificate(kit).verify_directly_issued_by(root(kit))
        assert root(kit) != old


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--site is missing"),
        (["--site", "a b"], "A site's name is made of letters"),
        (["--site", "north", "--site", "NORTH"], "'NORTH' is named twice"),
        (["--site", "server"], "A site's name is made of letters"),
        (["--site", "north", "--server", "under_score!"], "host name"),
        (["--site", "north", "--port", "8003"], "must differ"),
        (["--site", "north", "--port", "70000"], "between 1 and 65535"),
        (["--site", "north", "--coordinator", "ann"], "'ann' is not an e-mail address"),
        (["--site", "north", "--renew", "west"], "no participant 'west' to renew"),
    ],
)
def test_init_refuses(run, tmp_path, words, sentence):
    code, _, told = run("init", "--out", tmp_path / "fed", *words)
    assert code == 2
    assert told.startswith("fedbilevel: ")
    assert sentence in told
    assert told.count("\n") == 1
    assert not (tmp_path / "fed/kits").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--server", "other.example.org"], "made with server fl.example.org"),
        (["--port", "9999"], "made with port 9102"),
        (["--coordinator", "x@y.org"], "made with coordinator admin@coordinator.org"),
    ],
)
def test_a_federation_does_not_change_its_server(run, home, words, sentence):
    code, _, told = run("init", "--out", home, *words)
    assert (code, sentence in told) == (2, True), told


def test_init_spares_a_folder_of_others(run, tmp_path):
    (tmp_path / "thesis.tex").write_text("kept")
    code, _, told = run("init", "--site", "north", "--out", tmp_path)
    assert (code, "holds other files and no federation" in told) == (2, True)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_extra_is_named_where_it_is_missing(run, monkeypatch, tmp_path):
    monkeypatch.setattr(federate_parts, "find_spec", lambda name: None)
    for words in (["init", "--site", "a"], ["demo"], ["status"], ["submit"], ["start", tmp_path]):
        code, _, told = run(*words)
        assert (code, told) == (2, "fedbilevel: This command needs NVFlare: pip install 'fedbilevel[federation]'.\n")


def test_a_site_sees_what_would_leave(run, federation, table, schema):
    from fedbilevel.tables.schema import Schema

    kit = federation / "kits/north"
    (kit / "local/fedbilevel.toml").write_text(policy_text(table, Schema.read(schema)))
    code, told, _ = run("site", "check", kit, "--schema", schema, "--json")
    assert code == 0
    found = json.loads(told)
    assert (found["site"], found["server"]) == ("north", "fl.example.org:9102")
    assert found["columns"] == ["age", "colour", "outcome", "sex"]
    assert found["warnings"] == ["Replies leave without noise: [privacy] in local/fedbilevel.toml would add it."]
    by_task = {}
    for one in found["left"]:
        by_task.setdefault(one["task"], []).append(one)
    assert {one["name"].split("/")[0] for one in by_task["survey"]} == {"statistics", "rows", "smoothness"}
    # Four weights and their momentum in stage one, a model of as many numbers as there are features in stage two.
    replies = [one["shape"] for one in by_task["work"] if one["name"].startswith("reply")]
    assert set(replies[:-1]) == {"float32[4]"}
    assert [one["name"] for one in by_task["finish"]] == ["decisions"]
    assert max(one["bytes"] for one in found["left"]) < 8 * ROWS, "as much as a column left the site"
    assert not (kit / "fedbilevel-state").exists()


def test_a_check_warns_of_loosened_rules(run, federation, table, schema):
    from fedbilevel.tables.schema import Schema

    kit = federation / "kits/north"
    (kit / "local/fedbilevel.toml").write_text(
        policy_text(table, Schema.read(schema)) + "[privacy]\nclip = 1.0\nnoise = 0.0\n"
    )
    for name in ("resources.json", "authorization.json"):
        shutil.copy(kit / f"local/{name}.default", kit / f"local/{name}")
    code, told, _ = run("site", "check", kit, "--schema", schema, "--json", "--method", "fedavg")
    assert code == 0
    warnings = "\n".join(json.loads(told)["warnings"])
    for words in (
        "classes other than fedbilevel's",
        "allow_log_streaming",
        "project_admin bring code",
        "read files here",
    ):
        assert words in warnings


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ("", "names no table"),
        ('[data]\ntable = "none.csv"\ncolumns = ["age"]\n', "none.csv"),
        ('[data]\ntable = "TABLE"\ncolumns = ["age", "colour", "outcome"]\n', "column 'sex', which this site does not"),
        ('[data]\ntable = "TABLE"\ncolumns = ["age", "colour", "sex", "outcome", "weight"]\n', "'weight'"),
        ('[data]\ntable = "TABLE"\ncolumns = ["age", "colour", "sex", "outcome"]\n[policy]\ntell = ["rows"]\n',
         "does not tell its statistics"),
        ('[data]\ntable = "TABLE"\ncolumns = ["age", "colour", "sex", "outcome"]\n[policy]\nminimum_rows = 9999\n',
         "9999"),
        ("[data\n", "not readable as TOML"),
        ("[date]\n", "no section [date]"),
    ],
    ids=["empty", "no table", "barred", "absent", "untold", "few", "toml", "section"],
)  # fmt: skip
def test_a_check_refuses(run, federation, table, schema, policy, sentence):
    kit = federation / "kits/north"
    (kit / "local/fedbilevel.toml").write_text(policy.replace("TABLE", str(table)))
    code, _, told = run("site", "check", kit, "--schema", schema, "--method", "fedavg")
    assert code == 2
    assert sentence in told
    assert told.count("\n") == 1, told


def test_a_check_reads_the_kit_first(run, federation, schema, tmp_path):
    for kit, sentence in (
        (tmp_path, "is no kit"),
        (federation / "kits/fl.example.org", "the kit of a server, and a site's is needed"),
    ):
        code, _, told = run("site", "check", kit, "--schema", schema)
        assert (code, sentence in told) == (2, True), told
    shutil.copy(federation / "kits/south/startup/client.crt", federation / "kits/north/startup/rootCA.pem")
    code, _, told = run("site", "check", federation / "kits/north", "--schema", schema)
    assert (code, "was not issued by the authority beside it" in told) == (2, True)
    code, _, told = run("site", "check", federation / "kits/south")
    assert (code, "--schema is missing" in told) == (2, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["start", "KITS/admin@coordinator.org"], "only a server's and a site's are started"),
        (["stop"], "Name the kits whose processes are to end, or a --run."),
        (["stop", "KITS/north", "--run", "x"], "not both"),
        (["stop", "--run", "x", "--kits", "FED"], "There is no run 'x'"),
        (["submit", "--kits", "FED"], "--schema is missing"),
        (["submit", "--kits", "NONE", "--schema", "SCHEMA"], "holds no federation"),
        (["submit", "--admin", "KITS/north", "--schema", "SCHEMA"], "--admin and --server belong together"),
        (["submit", "--admin", "KITS/north", "--server", "KITS/fl.example.org", "--schema", "SCHEMA"],
         "kit of a site, and a person's is needed"),
        (["submit", "--kits", "FED", "--schema", "SCHEMA", "--site", "west"], "--site west: the federation has north, south"),
        (["submit", "--kits", "FED", "--schema", "SCHEMA", "--min-sites", "5"], "min_sites=5 is more than the 2 sites"),
        (["submit", "--kits", "FED", "--schema", "SCHEMA", "--method", "sgd"], "method must be one of"),
        (["submit", "--kits", "FED", "--schema", "SCHEMA", "--test", "NONE"], "NONE"),
        (["status", "NONE"], "is no kit"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(run, home, schema, tmp_path, words, sentence):
    places = {"KITS": home / "kits", "FED": home, "SCHEMA": schema, "NONE": tmp_path / "NONE"}
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    if words[0] == "submit":
        words += ["--out", str(tmp_path / "out")]
    code, _, told = run(*words)
    assert code == 2
    assert sentence in told
    assert told.count("\n") == 1, told


def test_status_of_kits(run, home):
    code, told, _ = run("status", home / "kits/north", home / "kits/fl.example.org", "--json")
    assert code == 0
    north, server = json.loads(told)["kits"]
    assert (north["kind"], north["process"], north["server"]) == ("site", None, "fl.example.org:9102")
    assert (server["kind"], server["name"]) == ("server", "fl.example.org")
    code, told, _ = run("stop", home / "kits/north")
    assert (code, told) == (0, "north was not running.\n")
