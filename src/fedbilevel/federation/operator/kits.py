"""Reading a kit: whose it is, how long its certificate lasts, and whether its rules are still those it was made with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from fedbilevel.federation.operator.provision import CLASSES

SOON_DAYS = 30
"""From when on people are told that a certificate ends."""
FILES = {"server": "fed_server.json", "site": "fed_client.json", "person": "fed_admin.json"}


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
    found = next((one for one, file in FILES.items() if (folder / "startup" / file).is_file()), None)
    if found is None:
        raise ValueError(f"{folder} is no kit: it has no startup folder made by `fedbilevel federate init`.")
    if kind is not None and found != kind:
        raise ValueError(f"{folder} is the kit of a {found}, and a {kind}'s is needed.")
    startup = folder / "startup"
    about = _json(startup / FILES[found])
    certificate = _certificate(startup / ("server.crt" if found == "server" else "client.crt"))
    root = _certificate(startup / "rootCA.pem")
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ValueError(
            f"The certificate in {startup} was not issued by the authority beside it: take both from one delivery."
        ) from error
    try:
        (common,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if found == "person":
            address = f"{about['admin']['host']}:{about['admin']['port']}"
        else:
            address = str(about["servers"][0]["service"]["target"])
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{startup / FILES[found]} is damaged: take the kit from a new delivery.") from error
    return Kit(folder, found, str(common.value), address, certificate.not_valid_after_utc)


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
    """What the rules of a kit allow beyond those it was made with, in sentences."""
    local = kit.folder / "local"
    found = []
    resources = _json(local / "resources.json") if (local / "resources.json").exists() else {}
    more = [name for name in resources.get("class_allow_list", ["*"]) if name not in CLASSES]
    if more or resources.get("class_list_enforcement_mode") != "enforce":
        found.append(
            f"local/resources.json lets jobs run classes other than fedbilevel's ({', '.join(more[:2]) or 'any'})."
        )
    if kit.kind == "site" and resources.get("allow_log_streaming", True):
        found.append("local/resources.json lets logs of this site travel to the server (allow_log_streaming).")
    rules = _json(local / "authorization.json") if (local / "authorization.json").exists() else {}
    for role, rights in rules.get("permissions", {"anybody": "any"}).items():
        given = {right: rights if isinstance(rights, str) else rights.get(right, "none") for right in FORBIDDEN}
        found += [
            f"local/authorization.json lets a {role} {FORBIDDEN[right]} ({right})."
            for right, who in given.items()
            if who != "none"
        ]
    return found


FORBIDDEN = {"byoc": "bring code", "shell_commands": "read files here from afar"}


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}).") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged.")
    return found


def _certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is missing or no certificate: take the kit from a new delivery.") from error
