"""Kits with certificates for the coordinator, the sites and the people: NVFlare's provisioning, then our own restrictions.

On every kit jobs may name this package's classes and NVFlare's, and may not bring code; the coordinator keeps jobs and
snapshots in its own kit instead of a shared temporary folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.lighter.provision import prepare_builders, prepare_packager, prepare_project
from nvflare.lighter.provisioner import Provisioner

PACKAGE = "fedbilevel.engines.nvflare."
ADMIN = "admin@coordinator.org"


@dataclass(frozen=True)
class Kits:
    """The folder of every participant's kit, by name."""

    server: Path
    admin: Path
    sites: dict[str, Path]
    user: str = ADMIN


def project_of(sites: list[str], server: str, port: int, admin_port: int, name: str, user: str) -> dict[str, Any]:
    """NVFlare's project file as a dict."""
    lighter = "nvflare.lighter.impl"
    return {
        "api_version": 3,
        "name": name,
        "description": "federated training with fedbilevel",
        "participants": [
            {
                "name": server,
                "type": "server",
                "org": "coordinator",
                "fed_learn_port": port,
                "admin_port": admin_port,
            },
            *({"name": site, "type": "client", "org": re.sub(r"\W", "_", site)} for site in sites),
            {"name": user, "type": "admin", "org": "coordinator", "role": "project_admin"},
        ],
        "builders": [
            {"path": f"{lighter}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{lighter}.static_file.StaticFileBuilder", "args": {"config_folder": "config", "scheme": "tcp"}},
            {"path": f"{lighter}.cert.CertBuilder"},
            {"path": f"{lighter}.signature.SignatureBuilder"},
        ],
    }


def provision(
    folder: Path,
    sites: list[str],
    *,
    server: str = "localhost",
    port: int = 8002,
    admin_port: int = 8003,
    name: str = "fedbilevel",
    user: str = ADMIN,
) -> Kits:
    """Write the kits of a new federation under ``folder``."""
    project = project_of(sites, server, port, admin_port, name, user)
    with contextlib.redirect_stdout(io.StringIO()):
        ready = prepare_project(project)
        context = Provisioner(str(folder), prepare_builders(project), prepare_packager(project)).provision(ready)
    if context.get("build_error"):
        raise RuntimeError(f"Provisioning into {folder} failed.")
    home = Path(context.get_result_location())
    kits = Kits(home / server, home / user, {site: home / site for site in sites}, user)
    for kit in (kits.server, *kits.sites.values()):
        restrict(kit)
    return kits


def restrict(kit: Path) -> None:
    """The local rules of one kit: only named classes, no foreign code, nothing in shared folders."""
    local = kit / "local"
    resources = _read(local, "resources.json")
    allowed = resources.get("class_allow_list", [])
    if PACKAGE not in allowed:
        resources["class_allow_list"] = [*allowed, PACKAGE]
    text = json.dumps(resources, indent=1).replace("/tmp/nvflare/", f"{kit}/storage/")
    (local / "resources.json").write_text(text + "\n")
    rules = _read(local, "authorization.json")
    for rights in rules["permissions"].values():
        if "byoc" in rights:
            rights["byoc"] = "none"
    (local / "authorization.json").write_text(json.dumps(rules, indent=1) + "\n")


def _read(local: Path, name: str) -> dict[str, Any]:
    file = local / name
    found: dict[str, Any] = json.loads((file if file.exists() else local / f"{name}.default").read_text())
    return found
