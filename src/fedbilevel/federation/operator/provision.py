"""Kits with certificates for the coordinator, the sites and the people: NVFlare's provisioning, then our own restrictions.

::

    project.yml            who takes part
    authority/             the key that signs certificates: whoever has it can make new participants
    kits/NAME/startup      a participant's certificate and addresses
    kits/NAME/local        its own rules, which no job can change; for a site fedbilevel.toml among them

Private keys are not kept anywhere but in the kits.  On every kit jobs may name two classes, this package's controller and
executor; they may not bring code; nobody may look into a site's files from afar, and no log of a site travels.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from nvflare.lighter.provision import prepare_builders, prepare_packager, prepare_project
from nvflare.lighter.provisioner import Provisioner

from fedbilevel import storage
from fedbilevel.federation.nvflare.job import CONTROLLER, EXECUTOR
from fedbilevel.federation.nvflare.sessions import Kits
from fedbilevel.federation.operator.roster import FILE, PROJECT, Roster, read_roster
from fedbilevel.federation.protocol.policy import FILE as POLICY

AUTHORITY, KITS = "authority", "kits"
EVERYTHING = "authority"
"""What to renew for a new authority, and with it every certificate."""
STORAGE = "storage"
CLASSES = (CONTROLLER, EXECUTOR)
BEFORE = ("fedbilevel.engines.nvflare.controller.PlanController", "fedbilevel.engines.nvflare.executor.SiteExecutor")
"""What the two classes were called in version 0.1.0, whose kits list these names."""


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
class Established:
    """What `establish` did: ``made`` new kits and ``renewed`` certificates, by name."""

    roster: Roster
    kits: Kits
    made: tuple[str, ...]
    renewed: tuple[str, ...]


def establish(folder: Path, roster: Roster, renew: Collection[str] = ()) -> Established:
    """Make a federation, or add to the one that is in ``folder``.

    Kits that are there stay as they are.  ``renew`` names participants who get new certificates: the ``startup`` of their
    kits is replaced, their ``local`` rules are not touched.  "authority" renews the authority and everybody.
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
    new = tuple(name for name in roster.names if name not in known)
    renewed = tuple(name for name in known if everybody or name in renew)
    if new or renewed:
        _issue(folder, roster, (*new, *renewed), new_authority=everybody)
        roster.write(folder)
    return Established(roster, kits_of(folder, roster), new, renewed)


def kits_of(folder: Path, roster: Roster) -> Kits:
    home = folder.resolve() / KITS
    sites = {site: home / site for site in roster.sites}
    return Kits(home / roster.server, home / roster.coordinator, sites, roster.coordinator)


def _issue(folder: Path, roster: Roster, names: tuple[str, ...], *, new_authority: bool) -> None:
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
        for name in names:
            if _place(made / name, home / name):
                restrict(home / name)
            close(home / name)
        shutil.rmtree(made)
        _forget_keys(draft)
        if (folder / AUTHORITY).exists():
            shutil.rmtree(folder / AUTHORITY)
        draft.replace(folder / AUTHORITY)
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


def _forget_keys(workspace: Path) -> None:
    """Of NVFlare's state only the authority is kept: private keys of participants belong into their kits alone."""
    file = workspace / PROJECT / "state" / "cert.json"
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
    if kind == "site":
        # NVFlare would send a site's error log to the server, and errors quote values.
        resources["allow_log_streaming"] = False
    streams = ("site_log_streamer", "log_receiver")
    resources["components"] = [each for each in resources["components"] if each["id"] not in streams]
    storage.write_json(file, resources)
    settle(kit)
    storage.write_json(local / "authorization.json", {"format_version": "1.0", "permissions": rights(kind)})
    if kind == "site" and not (local / POLICY).exists():
        storage.write(local / POLICY, (files(__package__) / "site.toml").read_text())


def close(kit: Path) -> None:
    """A kit holds a private key: nobody else on this machine may read it."""
    kit.chmod(0o700)
    for key in (kit / "startup").glob("*.key"):
        key.chmod(0o600)


def settle(kit: Path) -> None:
    """Point a server's storage into its kit, wherever the kit is now: NVFlare wants absolute paths.

    A kit of version 0.1.0 also gets the new names of the classes it allows.
    """
    file = kit / "local" / "resources.json"
    if not file.exists():
        return
    text = file.read_text()
    resources = json.loads(text)
    home = kit.resolve() / STORAGE
    persistor = resources.get("snapshot_persistor", {}).get("args", {}).get("storage", {}).get("args", {})
    if persistor:
        persistor["root_dir"] = str(home / "snapshots")
    for component in resources.get("components", ()):
        if component.get("id") == "job_manager":
            component["args"]["uri_root"] = str(home / "jobs")
    if "class_allow_list" in resources:
        renamed = dict(zip(BEFORE, CLASSES, strict=True))
        resources["class_allow_list"] = [renamed.get(name, name) for name in resources["class_allow_list"]]
    if resources != json.loads(text):
        storage.write_json(file, resources)
