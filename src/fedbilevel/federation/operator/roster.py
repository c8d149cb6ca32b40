"""Who takes part in a federation: the project file, its names and what each of them may do.

The file is NVFlare's own (``project.yml``, api_version 3), so that its tools can read it too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from fedbilevel import storage
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
