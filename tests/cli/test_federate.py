"""`fedbilevel federate` without a network: kits, certificates, checks at a site, and what is refused."""

import base64
import contextlib
import json
import logging
import re
import shutil
import socket
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from nvflare.private.fed.server.client_manager import ClientManager

from fedbilevel.engines.stages import Refused
from fedbilevel.federation.operator import kits, processes
from fedbilevel.federation.operator.demo import free_ports, policy_text
from fedbilevel.federation.operator.kits import (
    BEFORE,
    CLASSES,
    SITE_RESOURCES,
    Roster,
    establish,
    loosened,
    open_kit,
    read_roster,
    settle,
    write_manifest,
)
from fedbilevel.federation.operator.sessions import NoServer
from fedbilevel.federation.protocol.approval import pending, read_approved
from fedbilevel.federation.protocol.policy import read_policy
from fedbilevel.federation.protocol.site import Site
from fedbilevel.jobs.federate import job
from fedbilevel.jobs.fit import FitOptions
from fedbilevel.tables.reading import open_table
from fedbilevel.tables.schema import Schema, infer

ROWS = 240


@pytest.fixture
def run(monkeypatch, call):
    """The command line in this process: (exit code, standard output, standard error)."""
    for name in ("federate", "submit"):  # what it changes holds for the whole process
        monkeypatch.setattr(sys.modules[f"fedbilevel.cli.{name}"], "prepare_jax", lambda: None)
    level = logging.getLogger().level
    yield lambda *words: call("federate", *words)
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(level)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A federation of two sites, made once; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("federation") / "fed"
    establish(folder, Roster(("north", "south"), "fl.example.org", 9102, 9103))
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


@pytest.fixture
def north(federation, table, schema):
    """The kit of a site that lets runs by the schema read its table."""
    kit = federation / "kits/north"
    (kit / "local/fedbilevel.toml").write_text(policy_text(table, Schema.read(schema)))
    return kit


@pytest.fixture
def done(run):
    """What a command prints that ends well."""

    def check(*words):
        code, told, complaint = run(*words)
        assert code == 0, complaint
        return told

    return check


def certificate(kit, name=None):
    name = name or ("server.crt" if (kit / "startup/server.crt").exists() else "client.crt")
    return x509.load_pem_x509_certificate((kit / "startup" / name).read_bytes())


def root(kit):
    return certificate(kit, "rootCA.pem")


def serials(federation):
    return {kit.name: certificate(kit).serial_number for kit in (federation / "kits").iterdir()}


def test_init_writes_project_kits_and_says_what_to_do(done, tmp_path):
    out = tmp_path / "fed"
    told = done("init", "--site", "north", "--site", "south", "--server", "fl.example.org", "--out", out)
    project = yaml.safe_load((out / "project.yml").read_text())
    names = ["fl.example.org", "north", "south", "admin@coordinator.org"]
    assert [participant["name"] for participant in project["participants"]] == names
    for words in ("site north", "site south"):
        assert f"send to the {words}" in told
    for words in ("stays with the coordinator", "port 8002", "8003"):
        assert words in told
    assert {kit.name for kit in (out / "kits").iterdir()} == set(names)
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


@pytest.mark.parametrize("name", ["fl.example.org", "north"])
def test_logs_of_a_kit_are_bounded(home, name):
    """Four files of 10 MB each; what NVFlare says in every round is not written."""
    config = json.loads((home / "kits" / name / "local/log_config.json").read_text())
    files = {key: handler for key, handler in config["handlers"].items() if "filename" in handler}
    assert len(files) >= 4
    for handler in files.values():
        assert handler["class"] == "logging.handlers.RotatingFileHandler"
        assert (handler["maxBytes"], handler["backupCount"]) == (10_000_000, 3)
    for logger in ("client.client_runner", "server.server_runner", "client.communicator"):
        assert config["loggers"][f"nvflare.private.fed.{logger}"]["level"] == "WARNING"


@pytest.mark.parametrize(("days", "code"), [(40, 0), (29, 0), (-1, 2)])
def test_the_end_of_a_certificate_is_told_before_it_comes(run, federation, monkeypatch, days, code):
    opened, started = open_kit(federation / "kits/north"), []
    until = datetime.now(UTC) + timedelta(days=days, hours=1)
    monkeypatch.setattr(kits, "open_kit", lambda *_: replace(opened, until=until))
    process = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(processes, "start", lambda *_, **__: started.append("it was") or process)
    monkeypatch.setattr(processes, "is_up", lambda *_: True)
    ended, _, told = run("start", federation / "kits/north", "--background")
    assert (ended, len(started)) == (code, int(code == 0))
    sentence = f"ended on {until:%Y-%m-%d}" if days < 0 else f"ends on {until:%Y-%m-%d}"
    assert (f"The certificate of north {sentence}: ask the coordinator for a new one" in told) == (days < 30)


def test_a_moved_server_keeps_its_storage_inside(home, tmp_path):
    moved = shutil.copytree(home / "kits/fl.example.org", tmp_path / "elsewhere")
    settle(moved)
    text = (moved / "local/resources.json").read_text()
    assert str(home) not in text
    assert f"{tmp_path}/elsewhere/storage/jobs" in text
    assert f"{tmp_path}/elsewhere/storage/snapshots" in text


def test_a_kit_of_the_first_version_gets_the_new_names_of_its_classes(done, north, schema):
    file = north / "local/resources.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "class_allow_list": ["lab.Own", *BEFORE]}))
    told = done("site", "check", north, "--schema", schema, "--json", "--method", "fedavg")
    first, second, *_ = json.loads(told)["warnings"]
    assert "classes other than fedbilevel's (lab.Own)" in first
    assert "names the classes of version 0.1.0: `fedbilevel federate start` writes the new names" in second
    settle(north)
    assert json.loads(file.read_text())["class_allow_list"] == ["lab.Own", *CLASSES]
    first = {name: value for name, value in SITE_RESOURCES.items() if name != "app_validator"}
    file.write_text(json.dumps({**first, "class_allow_list": list(BEFORE)}))
    settle(north)
    assert json.loads(file.read_text()) == SITE_RESOURCES, "jobs are checked there too from now on"


def test_adding_a_site_leaves_the_others_alone(done, federation):
    before = serials(federation)
    policy = federation / "kits/north/local/fedbilevel.toml"
    policy.write_text("[policy]\nminimum_rows = 77\n")
    told = done("init", "--site", "west", "--member", "ann@example.org", "--out", federation)
    assert "send to the site west" in told
    assert "send to ann@example.org, a member" in told
    assert "site north" not in told
    assert {name: number for name, number in serials(federation).items() if name in before} == before
    assert "77" in policy.read_text()
    certificate(federation / "kits/west").verify_directly_issued_by(root(federation / "kits/north"))
    assert "Nothing to do" in done("init", "--site", "west", "--out", federation)


def test_renewing_one_certificate(done, federation):
    kits, before = federation / "kits", serials(federation)
    (kits / "north/local/fedbilevel.toml").write_text("[policy]\nminimum_rows = 77\n")
    told = done("init", "--renew", "north", "--out", federation)
    assert "north replaces its startup folder" in told
    after = serials(federation)
    assert {name for name in before if after[name] != before[name]} == {"north"}
    certificate(kits / "north").verify_directly_issued_by(root(kits / "south"))
    assert "77" in (kits / "north/local/fedbilevel.toml").read_text()


def test_renewing_the_authority_renews_everybody(done, federation):
    kits, before = federation / "kits", serials(federation)
    old = root(kits / "north")
    told = done("init", "--renew", "authority", "--json", "--out", federation)
    assert set(json.loads(told)["renewed"]) == set(before)
    for kit in kits.iterdir():
        assert certificate(kit).serial_number != before[kit.name]
        certificate(kit).verify_directly_issued_by(root(kit))
        assert root(kit) != old


@pytest.fixture
def asked(done, federation, tmp_path):
    """A site that made its own key, with the kit it got for its request."""
    told = done("site", "request", "east", "--out", tmp_path / "east")
    answer = json.loads(done("init", "--request", tmp_path / "east/east.csr", "--out", federation, "--json"))
    assert answer["made"] == ["east"]
    assert answer["fingerprints"]["east"] in told
    return shutil.copytree(federation / "kits/east", tmp_path / "kit"), tmp_path / "east/east.key"


def test_a_site_keeps_its_own_key(done, run, refused, federation, asked):
    kit, key = asked
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert not list((federation / "kits/east").rglob("*.key"))
    own = serialization.load_pem_private_key(key.read_bytes(), None).public_key()
    assert certificate(kit).public_key() == own
    certificate(kit).verify_directly_issued_by(root(kit))
    refused(run("status", kit), "client.key is missing. A site that made its key itself puts it there")
    refused(run("site", "install", kit, "--key", federation / "kits/north/startup/client.key"), "not the key of the")
    done("site", "install", kit, "--key", key)
    assert loosened(open_kit(kit, "site")) == []
    shutil.copy(federation / "kits/north/startup/client.key", kit / "startup/client.key")
    refused(run("status", kit), "is not the key of the certificate of east")


def test_renewing_the_certificate_of_a_site_with_its_own_key(done, run, refused, federation, asked, tmp_path):
    kit, _ = asked
    done("init", "--renew", "east", "--out", federation)
    assert certificate(federation / "kits/east").public_key() == certificate(kit).public_key()
    assert certificate(federation / "kits/east").serial_number != certificate(kit).serial_number
    done("site", "request", "east", "--out", tmp_path / "new")
    new = ("init", "--request", tmp_path / "new/east.csr", "--out", federation)
    refused(run(*new), "east has a certificate already: --renew east replaces it")
    done(*new, "--renew", "east")
    assert certificate(federation / "kits/east").public_key() != certificate(kit).public_key()
    assert not (federation / "kits/east/startup/client.key").exists()


def test_a_site_that_is_taken_out_does_not_come_back(done, run, refused, monkeypatch, federation):
    monkeypatch.setattr("fedbilevel.federation.operator.sessions.session", unreachable)
    assert "It will refuse south when it starts" in done("revoke", "south", "--kits", federation)
    disabled = json.loads((federation / "kits/fl.example.org/disabled_clients.json").read_text())
    assert disabled == {"disabled_clients": ["south"]}
    server = ClientManager()
    server.set_disabled_clients_file(str(federation / "kits/fl.example.org/disabled_clients.json"))
    assert server.disabled_clients == {"south"}, "as a server reads it when it starts"
    assert read_roster(federation).sites == ("north",)
    assert not (federation / "kits/south").exists()
    refused(run("init", "--site", "south", "--out", federation), "south was taken out of this federation")
    refused(run("revoke", "north", "--kits", federation), "north is the only site")
    refused(run("revoke", "west", "--kits", federation), "There is no site 'west'")


def unreachable(*_):
    raise NoServer("no server")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("kits/north/startup/client.crt", "is no request for a site's certificate"), ("nowhere.csr", "is no request")],
)
def test_only_a_request_is_signed(run, refused, federation, name, sentence):
    refused(run("init", "--request", federation / name, "--out", federation), sentence)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (lambda: rsa.generate_private_key(65537, 1024), "a key other than RSA of 2048 bits or more"),
        (lambda: ec.generate_private_key(ec.SECP256R1()), "a key other than RSA of 2048 bits or more"),
        (None, "is no request of one site, signed by its own key"),
    ],
    ids=["short", "elliptic", "signed by another"],
)
def test_weak_and_foreign_keys_are_not_signed(run, refused, federation, tmp_path, key, sentence):
    """The last one asks for the key of somebody else: its signature is of other bytes."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "east")])
    made = rsa.generate_private_key(65537, 2048) if key is None else key()
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(made, hashes.SHA256())
    der = bytearray(request.public_bytes(serialization.Encoding.DER))
    if key is None:
        der[-1] ^= 1
    text = base64.encodebytes(bytes(der)).decode()
    (tmp_path / "east.csr").write_text(
        f"-----BEGIN CERTIFICATE REQUEST-----\n{text}-----END CERTIFICATE REQUEST-----\n"
    )
    refused(run("init", "--request", tmp_path / "east.csr", "--out", federation), sentence)


@pytest.fixture(scope="module")
def request_of_nvflare(tmp_path_factory):
    """What ``nvflare cert request`` makes at a site: a folder with the key, and the archive that is sent."""
    folder = tmp_path_factory.mktemp("nvflare")
    participant = {"name": "anything", "participants": [{"name": "east", "type": "client", "org": "east_hospital"}]}
    (folder / "east.yaml").write_text(yaml.safe_dump(participant))
    command = [sys.executable, "-m", "nvflare.cli", "cert", "request", "-p", "east.yaml", "--out", "east"]
    subprocess.run(command, cwd=folder, env={"HOME": str(folder)}, check=True, capture_output=True, timeout=600)
    return folder / "east"


def test_a_site_may_ask_with_nvflares_own_request(done, federation, request_of_nvflare, tmp_path):
    """The same kit, without a key, and renewed for the same key; the fingerprint is the one in NVFlare's ``request.json``."""
    sent = request_of_nvflare / "east.request.zip"
    answer = json.loads(done("init", "--request", sent, "--out", federation, "--json"))
    about = json.loads((request_of_nvflare / "request.json").read_text())
    assert answer["fingerprints"]["east"].replace(" ", "") == about["public_key_sha256"]
    done("init", "--renew", "east", "--out", federation)
    assert not list((federation / "kits/east").rglob("*.key"))
    kit = shutil.copytree(federation / "kits/east", tmp_path / "kit")
    done("site", "install", kit, "--key", request_of_nvflare / "east.key")
    assert loosened(open_kit(kit, "site")) == []
    theirs, usual = certificate(kit), certificate(federation / "kits/north")
    theirs.verify_directly_issued_by(root(kit))
    names = [{name.oid: name.value for name in one.subject} for one in (theirs, usual)]
    assert names[0].keys() == names[1].keys()
    assert names[0][x509.NameOID.COMMON_NAME] == "east"
    assert theirs.not_valid_after_utc - usual.not_valid_after_utc < timedelta(days=1), "360 days, not NVFlare's 1,095"


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries | {"request.json": entries["request.json"].replace(b'"client"', b'"server"')},
        lambda entries: entries | {"request.json": entries["request.json"].replace(b'"east"', b'"../east"')},
        lambda entries: entries | {"request.json": b"[]"},
        lambda entries: entries | {"east.csr": bytes(1 << 17)},
        lambda entries: {name: entry for name, entry in entries.items() if name != "east.csr"},
        lambda entries: entries | {"east.csr": entries["east.csr"][:-60]},
    ],
    ids=["of a server", "another name", "no table", "nothing", "no request", "cut"],
)
def test_a_request_of_nvflare_that_is_none(run, refused, federation, request_of_nvflare, tmp_path, change):
    with zipfile.ZipFile(request_of_nvflare / "east.request.zip") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "changed.zip", "w") as archive:
        for name, entry in change(entries).items():
            archive.writestr(name, entry)
    refused(
        run("init", "--request", tmp_path / "changed.zip", "--out", federation),
        "is no request for a site's certificate",
    )


def test_no_connection_of_others_is_given_the_port_of_a_server_that_is_down():
    """As a machine gives them to whoever connects: a site that looks for its server could be given the server's own."""
    with contextlib.ExitStack() as stack:
        taken = {stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(20)}
        found = free_ports(20)
        assert len({*found}) == 20
        assert max(found) < min(taken)
        for port in found:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert not {*found} & {*free_ports(20)}, "they are taken now"


def test_how_long_certificates_last(home):
    """Participants 360 days, the authority ten years."""
    for kit in (home / "kits").iterdir():
        days = [(one.not_valid_after_utc - datetime.now(UTC)).days for one in (certificate(kit), root(kit))]
        assert days[0] in (359, 360)
        assert 3649 <= days[1] <= 3650


def test_a_key_is_not_overwritten_and_a_name_is_checked(run, refused, asked, tmp_path):
    refused(run("site", "request", "east", "--out", tmp_path / "east"), "east.key exists already")
    refused(run("site", "request", "server", "--out", tmp_path), "A site's name is made of")


def test_init_spares_a_folder_of_others(run, refused, tmp_path):
    (tmp_path / "thesis.tex").write_text("kept")
    refused(run("init", "--site", "north", "--out", tmp_path), "holds other files and no federation")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_extra_is_named_where_it_is_missing(run, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["fedbilevel.cli.federate"], "find_spec", lambda name: None)
    for words in (["init", "--site", "a"], ["demo"], ["status"], ["submit"], ["start", tmp_path]):
        code, _, told = run(*words)
        assert (code, told) == (2, "fedbilevel: This command needs NVFlare: pip install 'fedbilevel[federation]'.\n")


@pytest.mark.parametrize(
    ("version", "safe"),
    [((3, 11, 7), "3.11.8"), ((3, 12, 1), "3.12.2"), ((3, 11, 8), None), ((3, 12, 2), None), ((3, 13, 0), None)],
)
def test_a_check_names_a_python_whose_parser_may_fail(done, north, schema, monkeypatch, version, safe):
    sentence = processes.python_doubt(version)
    assert (sentence is None) == (safe is None)
    if safe:
        assert f"Python {'.'.join(map(str, version))} " in sentence
        assert f"Python {safe} or newer" in sentence
        monkeypatch.setattr(processes, "python_doubt", lambda: sentence)
        told = done("site", "check", north, "--schema", schema, "--method", "fedavg")
        assert f"Note: {sentence}" in told


def test_a_site_sees_what_would_leave(done, north, schema, monkeypatch):
    monkeypatch.setattr(processes, "python_doubt", lambda: None)
    told = done("site", "check", north, "--schema", schema, "--method", "fedbioacc", "--json")
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
    assert [one["name"].split("/")[0] for one in by_task["finish"]] == ["decisions", "hidden", *["scores"] * 3]
    # The rung of a ladder of sizes is one place among zeros, and says no more than a number of rows.
    numbers = [one["bytes"] for one in found["left"] if one["name"] != "rows/sizes"]
    assert max(numbers) < 8 * ROWS, "as much as a column left the site"
    assert not (north / "fedbilevel-state").exists()
    usual = json.loads(done("site", "check", north, "--schema", schema, "--json"))
    # Models, probes like them, sums by group and class, one number a cell: nothing is as long as a column.
    shapes = {one["shape"] for one in usual["left"] if one["name"].startswith("reply")}
    models = {"float32[5]", "float32[16, 5]"}
    assert shapes == models | {"float32[]", "float32[4]", "float32[1, 3, 2]", "float32[2, 2, 2]"}


def test_a_check_warns_of_loosened_rules(done, north, schema):
    with (north / "local/fedbilevel.toml").open("a") as policy:
        policy.write("[privacy]\nclip = 1.0\nnoise = 0.0\n")
    for name in ("resources.json", "authorization.json"):
        shutil.copy(north / f"local/{name}.default", north / f"local/{name}")
    told = done("site", "check", north, "--schema", schema, "--json", "--method", "fedavg")
    warnings = "\n".join(json.loads(told)["warnings"])
    for words in (
        "classes other than fedbilevel's",
        "allow_log_streaming",
        "project_admin bring code",
        "read files here",
        "does not check jobs byte by byte",
        "local/authorization.json is not as it was when the kit was made",
    ):
        assert words in warnings


def test_a_sites_own_files_beside_its_policy_are_no_implants(done, north, schema, table):
    shutil.copy(table, north / "local/rows.csv")
    for name in ("mapping.toml", "fedbilevel.toml~", ".fedbilevel.toml.swp"):
        (north / "local" / name).touch()
    warnings = json.loads(done("site", "check", north, "--schema", schema, "--json", "--method", "fedavg"))["warnings"]
    assert not [warning for warning in warnings if "kit" in warning]


def custom_code(local):
    (local / "custom").mkdir()
    (local / "custom/implant.py").write_text("raise SystemExit('it ran')\n")


def component(local):
    resources = json.loads((local / "resources.json").read_text())
    resources["components"].append({"id": "implant", "path": "implant.Implant", "args": {}})
    (local / "resources.json").write_text(json.dumps(resources))


def more_resources(local):
    (local / "more__p_resources.json").write_text(
        json.dumps({"components": [{"id": "implant", "path": "implant.Implant"}]})
    )


def rights(local):
    rules = json.loads((local / "authorization.json").read_text())
    rules["permissions"]["project_admin"]["operate"] = "any"
    (local / "authorization.json").write_text(json.dumps(rules))


def in_clear(local):
    file = local.parent / "startup/fed_client.json"
    file.write_text(file.read_text().replace('"mtls"', '"clear"'))


def log_handler(local):
    text = (local / "log_config.json.default").read_text()
    (local / "log_config.json").write_text(text.replace("logging.StreamHandler", "implant.Handler"))


@pytest.mark.parametrize("forged", [False, True], ids=["manifest of init", "forged manifest"])
@pytest.mark.parametrize(
    ("implant", "sentence"),
    [
        (custom_code, "local/custom is no file of a kit; code in it would run here."),
        (component, "local/resources.json starts a component of its own (implant.Implant)."),
        (more_resources, "local/more__p_resources.json is no file of a kit."),
        (rights, "local/authorization.json lets a project_admin operate this site (operate: any)."),
        (in_clear, "startup/fed_client.json has settings of its own: connections may be other than mutual TLS."),
        (log_handler, "local/log_config.json logs by a class of its own (implant.Handler)."),
    ],
)
def test_an_implant_is_noticed_by_check_and_keeps_the_site_from_starting(
    run, refused, done, north, schema, implant, sentence, forged
):
    """Whoever makes the kits could put it there and make the manifest fit: kits are held against the package's own rules."""
    implant(north / "local")
    if forged:
        write_manifest(north)
    warnings = json.loads(done("site", "check", north, "--schema", schema, "--json", "--method", "fedavg"))["warnings"]
    assert sentence in warnings
    assert any("not as it was when the kit was made" in warning for warning in warnings) is not forged
    refused(run("start", north), sentence)
    assert not (north / "console.log").exists()


def test_a_site_that_made_the_changes_itself_starts_its_kit_as_it_is(done, north, monkeypatch):
    started = []
    process = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(processes.subprocess, "Popen", lambda command, **_: started.append(command) or process)
    monkeypatch.setattr(processes, "is_up", lambda *_: True)
    custom_code(north / "local")
    done("start", north, "--background", "--as-it-is")
    assert len(started) == 1


def test_a_person_approves_what_waits(run, refused, done, north, schema, tmp_path):
    pytest.importorskip("dp_accounting", reason="needs the privacy extra")
    policy = north / "local/fedbilevel.toml"
    policy.write_text(
        policy.read_text().replace("auto = true", "auto = false") + "[privacy]\nclip = 1.0\nnoise = 40.0\n"
    )
    assert done("site", "approve", north) == "No run waits.\n"
    settings = job(
        FitOptions(method="fedavg", steps=100, compare_with=None), Schema.read(schema), ["north"], run="first"
    )
    with pytest.raises(Refused, match="waits for the approval"):
        Site("north", settings, read_policy(north / "local"), north / "fedbilevel-state", print)
    assert done("site", "approve", north) == "Waiting for approval: first.\n"
    refused(run("site", "approve", north, "second"), "No run 'second' waits here; there are: first.")
    told = done("site", "approve", north, "first")
    for words in (
        "It trains a logistic model by fedavg, in 20 rounds.",
        "It reads age, colour",
        "It predicts outcome (positive: yes)",
        "This site would be ready for model: 240 training rows",
        "Before training, exactly and on no privacy account: how many rows there are (1 number)",
        "In every round: what training replies, part 1 (5 numbers)",
        "40 replies with noise: epsilon 0 spent so far",
        f"first is not approved (--yes {settings.digest}).",
    ):
        assert words in told
    assert "first is approved" in done("site", "approve", north, "first", "--yes", settings.digest)
    Site("north", settings, read_policy(north / "local"), north / "fedbilevel-state", print)


def test_a_run_that_was_replaced_is_not_approved(run, refused, done, north, schema, monkeypatch):
    """Two runs can have one name: a person approves the one that was shown, however the other got in between."""
    policy, state = north / "local/fedbilevel.toml", north / "fedbilevel-state"
    policy.write_text(policy.read_text().replace("auto = true", "auto = false"))
    shown, other = (
        job(FitOptions(method="fedavg", steps=steps, compare_with=None), Schema.read(schema), ["north"], run="first")
        for steps in (100, 200)
    )
    sentence = "The run 'first' that waits is not the one that was shown: look at it again."

    def arrives(settings):
        with pytest.raises(Refused, match="waits for the approval"):
            Site("north", settings, read_policy(north / "local"), state, print)

    arrives(shown)
    told = json.loads(done("site", "approve", north, "first", "--json"))
    assert (told["approved"], told["fingerprint"]) == (False, shown.digest)
    arrives(other)
    refused(run("site", "approve", north, "first", "--yes", shown.digest), sentence)

    arrives(shown)
    asked = []
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(typer, "confirm", lambda question: asked.append(question) or arrives(other) is None)
    refused(run("site", "approve", north, "first", "--quiet"), sentence)
    assert asked == ["May it take part?"]
    assert read_approved(state) == {}
    assert pending(state) == {"first": other}, "it waits to be looked at"
    monkeypatch.setattr(typer, "confirm", lambda question: True)
    assert "first is approved" in done("site", "approve", north, "first")
    assert list(read_approved(state)) == [other.digest]


OFFER = '[data]\ntable = "TABLE"\ncolumns = ["age", "colour", "sex", "outcome"]\n'


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ("", "names no table"),
        ('[data]\ntable = "none.csv"\ncolumns = ["age"]\n', "none.csv"),
        (
            OFFER.replace(', "sex"', ""),
            "asks for a column that this site does not offer; its own log names it. It is 'sex'",
        ),
        (OFFER.replace("sex", 'sex", "weight'), "'weight'"),
        (OFFER + '[policy]\ntell = ["rows"]\n', "does not tell its statistics"),
        (OFFER + "[policy]\nminimum_rows = 9999\n", "9999"),
        ("[data\n", "not readable as TOML"),
        ("[date]\n", "no section [date]"),
    ],
    ids=["empty", "no table", "barred", "absent", "untold", "few", "toml", "section"],
)
def test_a_check_refuses(run, refused, north, table, schema, policy, sentence):
    (north / "local/fedbilevel.toml").write_text(policy.replace("TABLE", str(table)))
    refused(run("site", "check", north, "--schema", schema, "--method", "fedavg"), sentence)


def test_a_check_reads_the_kit_first(run, refused, federation, schema, tmp_path):
    kits = federation / "kits"
    shutil.copy(kits / "south/startup/client.crt", kits / "north/startup/rootCA.pem")
    for kit, sentence in (
        (tmp_path, "is not a kit"),
        (kits / "fl.example.org", "the kit of a server, and a site's is needed"),
        (kits / "north", "was not issued by the authority beside it"),
    ):
        refused(run("site", "check", kit, "--schema", schema), sentence)
    refused(run("site", "check", kits / "south"), "--schema is missing")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("init --out NEW", "--site is missing"),
        ("init --out NEW --site a/b", "A site's name is made of letters"),
        ("init --out NEW --site north --site NORTH", "'NORTH' is named twice"),
        ("init --out NEW --site server", "A site's name is made of letters"),
        ("init --out NEW --site north --server under_score!", "host name"),
        ("init --out NEW --site north --port 8003", "must differ"),
        ("init --out NEW --site north --port 70000", "between 1 and 65535"),
        ("init --out NEW --site north --coordinator ann", "'ann' is not an e-mail address"),
        ("init --out NEW --site north --renew west", "no participant 'west' to renew"),
        ("init --out FED --server other.example.org", "made with server fl.example.org"),
        ("init --out FED --port 9999", "made with port 9102"),
        ("init --out FED --coordinator x@y.org", "made with coordinator admin@coordinator.org"),
        ("start KITS/admin@coordinator.org", "only a server's and a site's are started"),
        ("stop", "Name the kits whose processes are to end, or a --run."),
        ("stop KITS/north --run x", "not both"),
        ("stop --run x --kits FED", "There is no run 'x'"),
        ("submit --kits FED", "--schema is missing"),
        ("submit --kits NONE --schema SCHEMA", "holds no federation"),
        ("submit --admin KITS/north --schema SCHEMA", "--admin and --server belong together"),
        ("submit --admin KITS/north --server KITS/fl.example.org --schema SCHEMA", "kit of a site, and a person's is needed"),
        ("submit --kits FED --schema SCHEMA --site west", "--site west: the federation has north, south"),
        ("submit --kits FED --schema SCHEMA --min-sites 5", "min_sites=5 is more than the 2 sites"),
        ("submit --kits FED --schema SCHEMA --method sgd", "method must be one of"),
        ("submit --kits FED --schema SCHEMA --test NONE", "NONE"),
        ("status NONE", "is not a kit"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(run, refused, home, schema, tmp_path, words, sentence):
    places = {"KITS": home / "kits", "FED": home, "SCHEMA": schema, "NONE": tmp_path / "NONE", "NEW": tmp_path / "new"}
    words = [re.sub(r"^[A-Z]+", lambda match: str(places.get(match[0], match[0])), word) for word in words.split()]
    refused(run(*words, *(["--out", tmp_path / "out"] if words[0] == "submit" else [])), sentence)
    assert not (tmp_path / "new/kits").exists()


def test_status_of_kits(done, home):
    told = done("status", home / "kits/north", home / "kits/fl.example.org", "--json")
    north, server = json.loads(told)["kits"]
    assert (north["kind"], north["process"], north["server"]) == ("site", None, "fl.example.org:9102")
    assert (server["kind"], server["name"]) == ("server", "fl.example.org")
    assert done("stop", home / "kits/north") == "north was not running.\n"


def test_containers_start_a_kit_with_few_rights():
    root = Path(__file__).parents[2]
    steps = (root / "deploy/Containerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", steps, re.M) for name in line.split()]
    assert copied
    for name in copied:
        assert (root / name).exists()
        assert f"!{name}" in (root / ".dockerignore").read_text().splitlines()
    services = yaml.safe_load((root / "deploy/compose.yaml").read_text())["services"]
    assert services.keys() == {"server", "site"}
    for name, service in services.items():
        assert service["profiles"] == [name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    assert services["site"]["volumes"][1].endswith(":ro")
    assert "ports" not in services["site"]
