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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.lighter.provision import prepare_builders, prepare_packager, prepare_project
from nvflare.lighter.provisioner import Provisioner

from fedbilevel.federation.operator.roster import ADMIN, FILE, PROJECT, Roster, read_roster
from fedbilevel.federation.protocol.policy import FILE as POLICY
from fedbilevel.federation.protocol.record import write_text

CLASSES = (
    "fedbilevel.federation.nvflare.controller.PlanController",
    "fedbilevel.federation.nvflare.executor.SiteExecutor",
)
"""All that a job may name."""
AUTHORITY, KITS = "authority", "kits"
EVERYTHING = "authority"
"""What to renew for a new authority, and with it every certificate."""
STORAGE = "storage"

_LOOK = {"view": "any"}
_NOTHING_FOREIGN = {"shell_commands": "none", "byoc": "none", "server-predeployed-flwr": "none"}
_OWN_JOBS = {
    "submit_job": "any", "clone_job": "none", "manage_job": "n:submitter", "download_job": "n:submitter",
}  # fmt: skip
_ALL_JOBS = {"submit_job": "any", "clone_job": "none", "manage_job": "any", "download_job": "any"}
RIGHTS: dict[str, dict[str, dict[str, str]]] = {
    "server": {
        "project_admin": {**_LOOK, **_ALL_JOBS, "operate": "any", **_NOTHING_FOREIGN},
        "lead": {**_LOOK, **_OWN_JOBS, "operate": "none", **_NOTHING_FOREIGN},
        "member": _LOOK,
    },
    "site": {
        "project_admin": {**_LOOK, **_ALL_JOBS, "operate": "none", **_NOTHING_FOREIGN},
        "lead": {**_LOOK, **_OWN_JOBS, "operate": "none", **_NOTHING_FOREIGN},
        "member": _LOOK,
    },
}
"""What roles may do on a kit.  NVFlare's default lets a project_admin do anything, shipping code and reading files of a site
included; here a site runs the two classes of this package, and everything else about it is the site's own affair."""

TEMPLATE = """\
# What this site allows. Nobody else can change this file; jobs that ask for more are refused.
# Without a table the site takes part in nothing. Check it with: fedbilevel federate site check KIT --schema schema.toml

[data]
# table = "/data/patients.csv"            # CSV or Parquet; relative paths start here
# columns = ["age", "sex", "outcome"]     # the columns jobs may read; no other one is opened

[policy]
# tell: what may leave besides the replies of training. "rows", "smoothness" and "statistics" are needed to agree on an
# encoding and step size; "groups" by fedminmax and fedfb only; "report" are rows by group, class and decision at the end.
tell = ["rows", "seconds", "objective", "smoothness", "statistics"]
minimum_rows = 20                         # no statistics and no training on fewer rows
# minimum_batch = 32                      # no steps on fewer rows than this

# [privacy]                               # clipping and noise on every reply; the run stops when the budget is spent
# clip = 1.0
# noise = 1.0
# epsilon = 8.0
# delta = 1e-5
"""


@dataclass(frozen=True)
class Kits:
    """The folder of every participant's kit, by name."""

    server: Path
    admin: Path
    sites: dict[str, Path]
    user: str = ADMIN


@dataclass(frozen=True)
class Established:
    """What `establish` did: ``made`` new kits and ``renewed`` certificates, by name."""

    roster: Roster
    kits: Kits
    made: tuple[str, ...]
    renewed: tuple[str, ...]


def provision(
    folder: Path,
    sites: Sequence[str],
    *,
    server: str = "localhost",
    port: int = 8002,
    admin_port: int = 8003,
    user: str = ADMIN,
    people: Sequence[tuple[str, str]] = (),
) -> Kits:
    """Write the kits of a federation under ``folder``."""
    return establish(folder, Roster(tuple(sites), server, port, admin_port, user, tuple(people))).kits


def establish(folder: Path, roster: Roster, renew: Collection[str] = ()) -> Established:
    """Make a federation, or add to the one that is in ``folder``.

    Kits that are there stay as they are.  ``renew`` names participants who get new certificates: the ``startup`` of their
    kits is replaced, their ``local`` rules are not touched.  "authority" renews the authority and everybody.
    """
    folder = folder.resolve()
    known = None
    if (folder / FILE).exists():
        known = read_roster(folder)
        roster = known.joined(roster)
    elif folder.exists() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise ValueError(f"{folder} holds other files and no federation: name a new or empty folder.")
    strange = sorted(set(renew) - {*roster.names, EVERYTHING})
    if strange:
        raise ValueError(f"There is no participant {strange[0]!r} to renew; there are {', '.join(roster.names)}.")
    new = tuple(name for name in roster.names if known is None or name not in known.names)
    everybody = EVERYTHING in renew
    renewed = tuple(name for name in roster.names if name not in new and (everybody or name in renew))
    if new or renewed:
        _issue(folder, roster, (*new, *renewed), new_authority=everybody)
        roster.write(folder)
    return Established(roster, kits_of(folder, roster), new, renewed)


def kits_of(folder: Path, roster: Roster) -> Kits:
    home = folder / KITS
    return Kits(
        home / roster.server,
        home / roster.coordinator,
        {site: home / site for site in roster.sites},
        roster.coordinator,
    )


def read_kits(folder: Path) -> Kits:
    """The kits of a federation made by `establish`."""
    return kits_of(folder.resolve(), read_roster(folder))


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
    file.unlink()
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as handle:
        json.dump(kept, handle)


def restrict(kit: Path) -> None:
    """The local rules of one kit: two classes, no foreign code, no log that travels, nothing in shared folders."""
    local, startup = kit / "local", kit / "startup"
    kind = "server" if (startup / "fed_server.json").exists() else "site"
    if not (kind == "server" or (startup / "fed_client.json").exists()):
        return  # a person's kit has no rules of its own
    resources = _read(local, "resources.json")
    resources["class_list_enforcement_mode"] = "enforce"
    resources["class_allow_list"] = list(CLASSES)
    if kind == "site":
        # NVFlare would send a site's error log to the server, and errors quote values.
        resources["allow_log_streaming"] = False
    resources["components"] = [
        one for one in resources["components"] if one["id"] not in ("site_log_streamer", "log_receiver")
    ]
    write_text(local / "resources.json", json.dumps(resources, indent=1) + "\n")
    settle(kit)
    rules = {"format_version": "1.0", "permissions": RIGHTS[kind]}
    write_text(local / "authorization.json", json.dumps(rules, indent=1) + "\n")
    if kind == "site" and not (local / POLICY).exists():
        write_text(local / POLICY, TEMPLATE)


def close(kit: Path) -> None:
    """A kit holds a private key: nobody else on this machine may read it."""
    kit.chmod(0o700)
    for key in (kit / "startup").glob("*.key"):
        key.chmod(0o600)


def settle(kit: Path) -> None:
    """Point a server's storage into its kit, wherever the kit is now: NVFlare wants absolute paths."""
    file = kit / "local" / "resources.json"
    if not file.exists():
        return
    resources = json.loads(file.read_text())
    before = json.dumps(resources)
    home = kit.resolve() / STORAGE
    persistor = resources.get("snapshot_persistor", {}).get("args", {}).get("storage", {}).get("args", {})
    if persistor:
        persistor["root_dir"] = str(home / "snapshots")
    for one in resources.get("components", ()):
        if one.get("id") == "job_manager":
            one["args"]["uri_root"] = str(home / "jobs")
    if json.dumps(resources) != before:
        write_text(file, json.dumps(resources, indent=1) + "\n")


def _read(local: Path, name: str) -> dict[str, Any]:
    file = local / name
    found: dict[str, Any] = json.loads((file if file.exists() else local / f"{name}.default").read_text())
    return found
