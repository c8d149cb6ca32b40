"""Who takes part in a federation, and the kits with certificates that they get: NVFlare's provisioning, then our own
restrictions; and reading a kit back.

::

    project.yml            who takes part: NVFlare's own file (api_version 3), so that its tools can read it too
    authority/             the key that signs certificates: whoever has it can make new participants
    requests/NAME.csr      what sites that keep their own keys asked for
    kits/NAME/startup      a participant's certificate and addresses
    kits/NAME/local        its own rules, which no job can change; for a site fedbilevel.toml among them

Private keys are not kept anywhere but in the kits, or at sites that made their own (`operator.keys`).  On every kit jobs may
name two classes, this package's controller and executor; they may not bring code; nobody may look into a site's files from
afar, and no log of a site travels.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID
from nvflare.lighter.provision import prepare_builders, prepare_packager, prepare_project
from nvflare.lighter.provisioner import Provisioner

from fedbilevel import storage
from fedbilevel.federation.nvflare.console import LOG_BYTES, LOGS
from fedbilevel.federation.nvflare.job import CONTROLLER, EXECUTOR
from fedbilevel.federation.operator import keys
from fedbilevel.federation.protocol.policy import FILE as POLICY
from fedbilevel.federation.protocol.settings import NAME

PROJECT = "fedbilevel"
FILE = "project.yml"
ADMIN = "admin@coordinator.org"
ROLES = ("project_admin", "lead", "member")
"""What people can be: the coordinator, somebody else who may submit, somebody who may look."""
LONGEST_NAME = 63
"""What fits into a certificate's common name, and a host name's part."""
ROOT_DAYS = 3650
"""How long the federation's own authority lasts; NVFlare's certificates for participants last 360 days."""
AUTHORITY, KITS, REQUESTS = "authority", "kits", "requests"
EVERYTHING = "authority"
"""What to renew for a new authority, and with it every certificate."""
STORAGE = "storage"
STEWARD = "fedbilevel.federation.nvflare.steward.Steward"
QUIET = (
    "nvflare.private.fed.client.client_runner", "nvflare.private.fed.client.communicator",
    "nvflare.private.fed.server.server_runner", "nvflare.private.fed.server.server_commands",
    "nvflare.apis.impl.wf_comm_server",
)  # fmt: skip
"""Loggers of NVFlare with several lines a round."""
CLASSES = (CONTROLLER, EXECUTOR)
BEFORE = ("fedbilevel.engines.nvflare.controller.PlanController", "fedbilevel.engines.nvflare.executor.SiteExecutor")
"""What the two classes were called in version 0.1.0, whose kits list these names."""
SOON_DAYS = 30
"""From when on people are told that a certificate ends."""
FILES = {"server": "fed_server.json", "site": "fed_client.json", "person": "fed_admin.json"}
MANIFEST = "startup/manifest.json"
SITE_RESOURCES: dict[str, Any] = {
    "format_version": 2,
    "class_list_enforcement_mode": "enforce",
    "class_allow_list": list(CLASSES),
    # NVFlare would send a site's error log to the server, and errors quote values.
    "allow_log_streaming": False,
    "app_validator": {"path": "fedbilevel.federation.nvflare.validator.JobValidator", "args": {}},
    "client": {"retry_timeout": 30, "compression": "Gzip"},
    "components": [
        {
            "id": "resource_manager",
            "path": "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager",
            "args": {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300},
        },
        {
            "id": "resource_consumer",
            "path": "nvflare.app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer",
            "args": {},
        },
        {
            "id": "process_launcher",
            "path": "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher",
            "args": {},
        },
    ],
}
"""``local/resources.json`` of a site's kit, all of it."""
SITE_FILES = {
    "startup": {
        "fed_client.json", "client.crt", "client.key", "rootCA.pem", "start.sh", "sub_start.sh", "stop_fl.sh",
        "manifest.json", "signature.json",
    },
    "local": {
        "resources.json", "authorization.json", "log_config.json", POLICY, "resources.json.default",
        "authorization.json.default", "log_config.json.default", "privacy.json.sample",
    },
}  # fmt: skip
"""All that these folders of a site's kit hold.  What ends on ``.sh`` is NVFlare's own and is never run here."""
OWN = (".csv", ".parquet", ".npz", ".toml")
"""Files of the site that may lie beside its policy: tables, arrays, mappings."""
LOG_CLASSES = ("logging.", "nvflare.fuel.utils.log_utils.")
FORBIDDEN = {"byoc": "bring code", "shell_commands": "read files here from afar", "operate": "operate this site"}
"""Rights in words."""
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
_EMAIL = re.compile(r"[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+")
_RESERVED = ("server", "all", "client", "admin")


@dataclass(frozen=True)
class Roster:
    """A federation's participants.  ``people``: e-mail addresses with their roles, the coordinator's excepted."""

    sites: tuple[str, ...]
    server: str = "localhost"
    port: int = 8002
    admin_port: int = 8003
    coordinator: str = ADMIN
    people: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.server):
            raise ValueError(
                f"The server's name must be a host name the sites can reach (such as fl.example.org), not {self.server!r}."
            )
        for name, port in (("port", self.port), ("admin port", self.admin_port)):
            if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
                raise ValueError(f"The {name} must lie between 1 and 65535, not {port!r}.")
        if self.port == self.admin_port:
            raise ValueError(f"The port and the admin port must differ; both are {self.port}.")
        if not self.sites:
            raise ValueError("A federation needs one site at least: name it.")
        for site in self.sites:
            if not NAME.fullmatch(site) or len(site) > LONGEST_NAME or site.lower() in _RESERVED:
                raise ValueError(
                    f"A site's name is made of letters, digits, '.', '_' and '-' (at most {LONGEST_NAME}, and not "
                    f"{', '.join(_RESERVED)}), unlike {site!r}."
                )
        for person, role in ((self.coordinator, "project_admin"), *self.people):
            if not _EMAIL.fullmatch(person) or len(person) > LONGEST_NAME:
                raise ValueError(f"{person!r} is not an e-mail address, which is what people are named by.")
            if role not in ROLES:
                raise ValueError(f"{person} cannot be a {role!r}; there are {', '.join(ROLES)}.")
        seen: set[str] = set()
        for name in self.names:
            if name.lower() in seen:
                raise ValueError(f"{name!r} is named twice: every participant needs a name of its own.")
            seen.add(name.lower())

    @property
    def names(self) -> tuple[str, ...]:
        """All participants: the server, the coordinator, the sites, the people."""
        return (self.server, self.coordinator, *self.sites, *(person for person, _ in self.people))

    def joined(self, other: Roster) -> Roster:
        """This roster with the other's sites and people added."""
        for what in ("server", "port", "admin_port", "coordinator"):
            here, there = getattr(self, what), getattr(other, what)
            if here != there:
                raise ValueError(
                    f"The federation was made with {what.replace('_', ' ')} {here}, and now it is to be {there}: every kit "
                    "would have to change. Name another folder for a new federation."
                )
        known = dict(self.people)
        for person, role in other.people:
            if known.get(person, role) != role:
                raise ValueError(f"{person} is a {known[person]} already; a certificate says so. Use another address.")
        sites = [*self.sites, *(site for site in other.sites if site not in self.sites)]
        people = [*self.people, *(entry for entry in other.people if entry not in self.people)]
        return replace(self, sites=tuple(sites), people=tuple(people))

    def project(self, names: tuple[str, ...] | None = None) -> dict[str, Any]:
        """NVFlare's project; with ``names`` only these besides the server, which it always wants."""
        ports = {"fed_learn_port": self.port, "admin_port": self.admin_port}
        server = {"name": self.server, "type": "server", "org": "coordinator", **ports}
        others: list[dict[str, Any]] = [
            {"name": site, "type": "client", "org": re.sub(r"\W", "_", site)} for site in self.sites
        ]
        for person, role in ((self.coordinator, "project_admin"), *self.people):
            others.append({"name": person, "type": "admin", "org": "coordinator", "role": role})
        builders: dict[str, dict[str, Any]] = {
            "workspace.WorkspaceBuilder": {"template_file": ["master_template.yml"]},
            "static_file.StaticFileBuilder": {"config_folder": "config", "scheme": "tcp"},
            "cert.CertBuilder": {"root_valid_days": ROOT_DAYS},
            "signature.SignatureBuilder": {},
        }
        return {
            "api_version": 3,
            "name": PROJECT,
            "description": "federated training with fedbilevel",
            "participants": [server, *(each for each in others if names is None or each["name"] in names)],
            "builders": [{"path": f"nvflare.lighter.impl.{name}", "args": given} for name, given in builders.items()],
        }

    def write(self, folder: Path) -> None:
        text = "# Who takes part; written by `fedbilevel federate init`, which also adds to it.\n"
        storage.write(folder / FILE, text + yaml.safe_dump(self.project(), sort_keys=False))


def read_roster(folder: Path) -> Roster:
    """The roster of a federation's folder; one sentence where there is none."""
    file = folder / FILE
    try:
        project = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no federation ({FILE} is missing): make one with `fedbilevel federate init`."
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read ({' '.join(str(error).split())[:120]}).") from error
    try:
        kinds: dict[str, list[dict[str, Any]]] = {"server": [], "client": [], "admin": []}
        for participant in project["participants"]:
            kinds[participant["type"]].append(participant)
        (server,) = kinds["server"]
        people = [(person["name"], person["role"]) for person in kinds["admin"]]
        (coordinator,) = (name for name, role in people if role == "project_admin")
        return Roster(
            tuple(site["name"] for site in kinds["client"]), server["name"], server["fed_learn_port"],
            server["admin_port"], coordinator, tuple(person for person in people if person[0] != coordinator),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a project file of `fedbilevel federate init` ({error}).") from error


def rights(kind: str) -> dict[str, dict[str, str]]:
    """What roles may do on a kit.  NVFlare's default lets a project_admin do anything, shipping code and reading files of a
    site included; here a site runs the two classes of this package, and everything else about it is the site's own affair."""
    look = {"view": "any"}
    coordinator = {
        **look, "submit_job": "any", "clone_job": "none", "manage_job": "any", "download_job": "any",
        "operate": "any" if kind == "server" else "none", "shell_commands": "none", "byoc": "none",
        "server-predeployed-flwr": "none",
    }  # fmt: skip
    lead = {**coordinator, "manage_job": "n:submitter", "download_job": "n:submitter", "operate": "none"}
    return {"project_admin": coordinator, "lead": lead, "member": look}


@dataclass(frozen=True)
class Kits:
    """Where the kits are: the server's, the one of the person ``user`` who operates, and those of the sites by name."""

    server: Path
    admin: Path
    sites: dict[str, Path]
    user: str


@dataclass(frozen=True)
class Established:
    """What `establish` did: ``made`` new kits and ``renewed`` certificates, by name; ``requests``: of those without keys."""

    roster: Roster
    kits: Kits
    made: tuple[str, ...]
    renewed: tuple[str, ...]
    requests: dict[str, keys.Request]


def establish(
    folder: Path, roster: Roster, renew: Collection[str] = (), requests: Collection[keys.Request] = ()
) -> Established:
    """Make a federation, or add to the one that is in ``folder``.

    Kits that are there stay as they are.  ``renew`` names participants who get new certificates: the ``startup`` of their
    kits is replaced, their ``local`` rules are not touched.  "authority" renews the authority and everybody.  Sites with
    ``requests``, now or before, get certificates of the keys that they made themselves.
    """
    folder = folder.resolve()
    known: tuple[str, ...] = ()
    if (folder / FILE).exists():
        before = read_roster(folder)
        roster, known = before.joined(roster), before.names
    elif folder.exists() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise ValueError(f"{folder} holds other files and no federation: name a new or empty folder.")
    strange = sorted(set(renew) - {*roster.names, EVERYTHING})
    if strange:
        raise ValueError(f"There is no participant {strange[0]!r} to renew; there are {', '.join(roster.names)}.")
    everybody = EVERYTHING in renew
    for request in requests:
        if request.name in known and not (everybody or request.name in renew):
            raise ValueError(f"{request.name} has a certificate already: --renew {request.name} replaces it.")
    gone = set(roster.sites) & set(keys.refused_sites(kits_of(folder, roster).server))
    if gone:
        raise ValueError(f"{min(gone)} was taken out of this federation: give the site another name.")
    new = tuple(name for name in roster.names if name not in known)
    renewed = tuple(name for name in known if everybody or name in renew)
    if new or renewed:
        kept = [keys.read_request(file) for file in sorted((folder / REQUESTS).glob("*.csr"))]
        asked = {each.name: each for each in (*kept, *requests) if each.name in (*new, *renewed)}
        _issue(folder, roster, (*new, *renewed), asked, new_authority=everybody)
        roster.write(folder)
    return Established(roster, kits_of(folder, roster), new, renewed, asked if new or renewed else {})


def take_out(folder: Path, site: str) -> None:
    """Forget a site: it is not in the roster, and the server whose kit is here refuses it."""
    roster = read_roster(folder)
    if site not in roster.sites:
        raise ValueError(f"There is no site {site!r}; there are {', '.join(roster.sites)}.")
    if len(roster.sites) == 1:
        raise ValueError(f"{site} is the only site: a federation needs one at least.")
    keys.refuse_site(kits_of(folder, roster).server, site)
    replace(roster, sites=tuple(name for name in roster.sites if name != site)).write(folder)
    shutil.rmtree(folder / KITS / site, ignore_errors=True)
    (folder / REQUESTS / f"{site}.csr").unlink(missing_ok=True)


def kits_of(folder: Path, roster: Roster) -> Kits:
    home = folder.resolve() / KITS
    sites = {site: home / site for site in roster.sites}
    return Kits(home / roster.server, home / roster.coordinator, sites, roster.coordinator)


def _issue(
    folder: Path, roster: Roster, names: tuple[str, ...], requests: dict[str, keys.Request], *, new_authority: bool
) -> None:
    """Certificates and kits for ``names``; all of them, or nothing is changed."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{AUTHORITY}.{os.getpid()}.tmp"
    try:
        if (folder / AUTHORITY).exists() and not new_authority:
            shutil.copytree(folder / AUTHORITY, draft)
        draft.mkdir(mode=0o700, exist_ok=True)
        draft.chmod(0o700)
        made = _run_nvflare(draft, roster, names)
        home = folder / KITS
        home.mkdir(exist_ok=True)
        for name, request in requests.items():
            keys.sign(made / name / "startup", request, _state(draft))
        for name in names:
            if _place(made / name, home / name):
                restrict(home / name)
            write_manifest(home / name)
            close(home / name)
        shutil.rmtree(made)
        _forget_keys(draft)
        if (folder / AUTHORITY).exists():
            shutil.rmtree(folder / AUTHORITY)
        draft.replace(folder / AUTHORITY)
        for name, request in requests.items():
            (folder / REQUESTS).mkdir(exist_ok=True)
            storage.write(folder / REQUESTS / f"{name}.csr", request.pem)
    except OSError as error:
        raise ValueError(f"Kits cannot be written to {folder} ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _run_nvflare(workspace: Path, roster: Roster, names: tuple[str, ...]) -> Path:
    project = roster.project(names)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        ready = prepare_project(project)
        context = Provisioner(str(workspace), prepare_builders(project), prepare_packager(project)).provision(ready)
    if context.get("build_error"):
        reason = next((line for line in said.getvalue().splitlines() if line.startswith("Exception")), "")
        raise RuntimeError(f"NVFlare could not make the kits. {reason}".strip())
    return Path(context.get_result_location())


def _place(made: Path, target: Path) -> bool:
    """A new kit (True), or a new ``startup`` in a kit that has been in use."""
    if not target.exists():
        shutil.move(made, target)
        return True
    old = target / f".startup.{os.getpid()}.old"
    (target / "startup").rename(old)
    shutil.move(made / "startup", target / "startup")
    shutil.rmtree(old)
    return False


def _state(workspace: Path) -> Path:
    return workspace / PROJECT / "state" / "cert.json"


def _forget_keys(workspace: Path) -> None:
    """Of NVFlare's state only the authority is kept: private keys of participants belong into their kits alone."""
    file = _state(workspace)
    kept = {name: value for name, value in json.loads(file.read_text()).items() if name.startswith("root_")}
    storage.write_json(file, kept, mode=0o600)


def restrict(kit: Path) -> None:
    """The local rules of one kit: two classes, no foreign code, no log that travels, nothing in shared folders."""
    local, startup = kit / "local", kit / "startup"
    kind = "server" if (startup / "fed_server.json").exists() else "site"
    if not (kind == "server" or (startup / "fed_client.json").exists()):
        return  # a person's kit has no rules of its own
    file = local / "resources.json"
    resources = json.loads((file if file.exists() else local / "resources.json.default").read_text())
    resources["class_list_enforcement_mode"] = "enforce"
    resources["class_allow_list"] = list(CLASSES)
    resources["components"] = [each for each in resources["components"] if each["id"] != "log_receiver"]
    storage.write_json(file, SITE_RESOURCES if kind == "site" else resources)
    settle(kit)
    storage.write_json(local / "log_config.json", _log_config(local / "log_config.json.default"))
    storage.write_json(local / "authorization.json", {"format_version": "1.0", "permissions": rights(kind)})
    if kind == "site" and not (local / POLICY).exists():
        storage.write(local / POLICY, (files(__package__) / "site.toml").read_text())


def _log_config(made: Path) -> dict[str, Any]:
    """NVFlare's own, with bounded files (`nvflare.console` bounds what is printed) and without lines for every round."""
    config = _json(made)
    for handler in config["handlers"].values():
        if "maxBytes" in handler:
            handler |= {"maxBytes": LOG_BYTES, "backupCount": LOGS}
    for name in QUIET:
        config["loggers"][name] = {"level": "WARNING"}
    return config


def write_manifest(kit: Path) -> None:
    """What is in a kit, by hash: changes on the way to a site, and later ones, are noticed there."""
    storage.write_json(kit / MANIFEST, {"format": 1, "files": _hashes(kit)})


def _hashes(kit: Path) -> dict[str, str]:
    """Of all files that decide what a kit does, but for the site's own."""
    entries = [entry for place in ("startup", "local") for entry in sorted((kit / place).rglob("*")) if entry.is_file()]
    names = {str(entry.relative_to(kit)): entry for entry in entries}
    return {
        name: hashlib.sha256(entry.read_bytes()).hexdigest()
        for name, entry in names.items()
        # A site's own key arrives later; `open_kit` holds it against the certificate.
        if name != MANIFEST and entry.suffix != ".key" and not _is_own(entry)
    }


def _is_own(entry: Path) -> bool:
    """The site's own policy, what editors leave beside it, and data or a mapping, which are no code and no configuration."""
    return entry.name.startswith((".", POLICY)) or (entry.suffix in OWN and entry.is_file())


def close(kit: Path) -> None:
    """A kit holds a private key: nobody else on this machine may read it."""
    kit.chmod(0o700)
    for key in (kit / "startup").glob("*.key"):
        key.chmod(0o600)


def settle(kit: Path) -> None:
    """Point a server's storage into its kit, wherever the kit is now: NVFlare wants absolute paths; and have it make sure of
    what `steward` says.

    A kit of version 0.1.0 also gets the new names of the classes it allows, and a site's the check of jobs.
    """
    file = kit / "local" / "resources.json"
    if not file.exists():
        return
    text = file.read_text()
    resources = json.loads(text)
    home = kit.resolve() / STORAGE
    if "snapshot_persistor" in resources:
        steward = {"id": "steward", "path": STEWARD, "args": {"kit": str(kit.resolve())}}
        resources["components"] = [each for each in resources["components"] if each["id"] != "steward"] + [steward]
    persistor = resources.get("snapshot_persistor", {}).get("args", {}).get("storage", {}).get("args", {})
    if persistor:
        persistor["root_dir"] = str(home / "snapshots")
    for component in resources.get("components", ()):
        if component.get("id") == "job_manager":
            component["args"]["uri_root"] = str(home / "jobs")
    if "class_allow_list" in resources:
        renamed = dict(zip(BEFORE, CLASSES, strict=True))
        resources["class_allow_list"] = [renamed.get(name, name) for name in resources["class_allow_list"]]
    older = {**SITE_RESOURCES, "app_validator": None}
    if {**resources, "app_validator": None} == older and "app_validator" not in resources:
        resources = SITE_RESOURCES
    if resources != json.loads(text):
        storage.write_json(file, resources)


@dataclass(frozen=True)
class Kit:
    """A participant's kit.  ``kind``: server, site or person.  ``address``: where its server is."""

    folder: Path
    kind: str
    name: str
    address: str
    until: datetime

    @property
    def days_left(self) -> int:
        return (self.until - datetime.now(UTC)).days


def open_kit(folder: Path, kind: str | None = None) -> Kit:
    """The kit in ``folder``, checked; ``kind`` says which is wanted."""
    folder = folder.resolve()
    startup = folder / "startup"
    what = next((what for what, file in FILES.items() if (startup / file).is_file()), None)
    if what is None:
        raise ValueError(f"{folder} is not a kit: it has no startup folder made by `fedbilevel federate init`.")
    if kind is not None and what != kind:
        raise ValueError(f"{folder} is the kit of a {what}, and a {kind}'s is needed.")
    about = _json(startup / FILES[what])
    own = "server" if what == "server" else "client"
    certificate, name = read_certificate(startup / f"{own}.crt")
    root, _ = read_certificate(startup / "rootCA.pem")
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ValueError(
            f"The certificate in {startup} was not issued by the authority beside it: take both from one delivery."
        ) from error
    try:
        if what == "person":
            address = f"{about['admin']['host']}:{about['admin']['port']}"
        else:
            address = str(about["servers"][0]["service"]["target"])
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{startup / FILES[what]} is damaged: take the kit from a new delivery.") from error
    keys.check_key(startup / f"{own}.key", certificate, name)
    return Kit(folder, what, name, address, certificate.not_valid_after_utc)


def install_key(kit: Path, key: Path) -> Kit:
    """Put the key that a site made itself into its kit."""
    certificate, name = read_certificate(kit / "startup/client.crt")
    storage.write(kit / "startup/client.key", keys.check_key(key, certificate, name), mode=0o600)
    close(kit)
    return open_kit(kit, "site")


def check_dates(kit: Kit) -> str | None:
    """A sentence where the certificate ends soon; refused where it has ended."""
    if kit.days_left < 0:
        raise ValueError(
            f"The certificate of {kit.name} ended on {kit.until:%Y-%m-%d}: ask the coordinator for a new one "
            f"(`fedbilevel federate init --renew {kit.name}`)."
        )
    if kit.days_left < SOON_DAYS:
        return f"The certificate of {kit.name} ends on {kit.until:%Y-%m-%d}: ask the coordinator for a new one."
    return None


def loosened(kit: Kit) -> list[str]:
    """In sentences: what a kit holds and allows beyond what kits are made with, and what has changed since it was made."""
    resources = _json(kit.folder / "local/resources.json", absent={})
    allowed = resources.get("class_allow_list", ["*"])
    more = [name for name in allowed if name not in (*CLASSES, *BEFORE)]
    sentences = []
    if more or resources.get("class_list_enforcement_mode") != "enforce":
        sentences.append(
            f"local/resources.json lets jobs run classes other than fedbilevel's ({', '.join(more[:2]) or 'any'})."
        )
    if set(BEFORE) & set(allowed):
        sentences.append(
            "local/resources.json names the classes of version 0.1.0: `fedbilevel federate start` writes the new names."
        )
    if kit.kind == "site":
        sentences += _strange_in_site(kit.folder, resources)
    expected = rights(kit.kind)
    rules = _json(kit.folder / "local/authorization.json", absent={})
    for role, given in rules.get("permissions", {"anybody": "any"}).items():
        given = dict.fromkeys(FORBIDDEN, given) if isinstance(given, str) else given
        sentences += [
            f"local/authorization.json lets a {role} {FORBIDDEN.get(right, right)} ({right}: {value})."
            for right, value in given.items()
            if value != "none" and value != expected.get(role, {}).get(right)
        ]
    return sentences


def _strange_in_site(folder: Path, resources: dict[str, Any]) -> list[str]:
    """What a site's kit holds that no site's kit is made with: files, components, settings, log handlers; or has lost."""
    sentences = [
        f"{entry.relative_to(folder)} is no file of a kit" + ("; code in it would run here." if entry.is_dir() else ".")
        for place, known in SITE_FILES.items()
        for entry in sorted((folder / place).iterdir())
        if entry.name not in known and not _is_own(entry)
    ]
    if resources.get("allow_log_streaming", True):
        sentences.append("local/resources.json lets logs of this site travel to the server (allow_log_streaming).")
    if "app_validator" not in resources:
        sentences.append(
            "local/resources.json does not check jobs byte by byte: `fedbilevel federate start` adds that."
        )
    elif resources["app_validator"] != SITE_RESOURCES["app_validator"]:
        sentences.append("local/resources.json checks jobs by a class other than fedbilevel's (app_validator).")
    components = [each for each in resources.get("components", ()) if each not in SITE_RESOURCES["components"]]
    sentences += [f"local/resources.json starts a component of its own ({each.get('path')})." for each in components]
    strange = sorted(resources.keys() - SITE_RESOURCES.keys())
    sentences += [f"local/resources.json has a setting of its own ({name})." for name in strange]
    logging = next(
        (name for name in ("log_config.json", "log_config.json.default") if (folder / "local" / name).exists()), ""
    )
    if logging:
        classes = re.findall(r'"(?:class|\(\))"\s*:\s*"([^"]*)"', (folder / "local" / logging).read_text())
        sentences += [
            f"local/{logging} logs by a class of its own ({name})."
            for name in classes
            if not name.startswith(LOG_CLASSES)
        ]
    about = _json(folder / "startup" / FILES["site"])
    if about != _site_startup(about):
        sentences.append("startup/fed_client.json has settings of its own: connections may be other than mutual TLS.")
    listed = _json(folder / MANIFEST, absent={}).get("files", {})
    made = {name: digest for name, digest in listed.items() if not name.endswith(".key")}
    if made:
        now = _hashes(folder)
        changed = [name for name in sorted(made.keys() | now.keys()) if made.get(name) != now.get(name)]
        sentences += [f"{name} is not as it was when the kit was made." for name in changed]
    return sentences


def _site_startup(about: dict[str, Any]) -> dict[str, Any]:
    """``startup/fed_client.json`` of a site with this name and server, all of it."""
    try:
        server, name = about["servers"][0], about["client"]["fqsn"]
        target, identity = server["service"]["target"], server["identity"]
    except (LookupError, TypeError):
        return {}
    keys = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem"}
    return {
        "format_version": 2,
        "servers": [{"name": PROJECT, "service": {"target": target, "scheme": "tcp"}, "identity": identity}],
        "client": {**keys, "fqsn": name, "is_leaf": True, "connection_security": "mtls"},
    }


def _json(file: Path, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    if absent is not None and not file.exists():
        return absent
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged.")
    return content


def read_certificate(file: Path) -> tuple[x509.Certificate, str]:
    """With the name that it is for."""
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        (common,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is missing or no certificate: take the kit from a new delivery.") from error
    return certificate, str(common.value)
