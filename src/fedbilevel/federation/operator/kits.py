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

from fedbilevel.federation.operator.provision import BEFORE, CLASSES

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
    startup = folder / "startup"
    what = next((what for what, file in FILES.items() if (startup / file).is_file()), None)
    if what is None:
        raise ValueError(f"{folder} is no kit: it has no startup folder made by `fedbilevel federate init`.")
    if kind is not None and what != kind:
        raise ValueError(f"{folder} is the kit of a {what}, and a {kind}'s is needed.")
    about = _json(startup / FILES[what])
    certificate = _certificate(startup / ("server.crt" if what == "server" else "client.crt"))
    root = _certificate(startup / "rootCA.pem")
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ValueError(
            f"The certificate in {startup} was not issued by the authority beside it: take both from one delivery."
        ) from error
    try:
        (common,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if what == "person":
            address = f"{about['admin']['host']}:{about['admin']['port']}"
        else:
            address = str(about["servers"][0]["service"]["target"])
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{startup / FILES[what]} is damaged: take the kit from a new delivery.") from error
    return Kit(folder, what, str(common.value), address, certificate.not_valid_after_utc)


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
    sentences = []
    resources = _json(kit.folder / "local/resources.json", absent={})
    allowed = resources.get("class_allow_list", ["*"])
    more = [name for name in allowed if name not in (*CLASSES, *BEFORE)]
    if more or resources.get("class_list_enforcement_mode") != "enforce":
        sentences.append(
            f"local/resources.json lets jobs run classes other than fedbilevel's ({', '.join(more[:2]) or 'any'})."
        )
    if set(BEFORE) & set(allowed):
        sentences.append(
            "local/resources.json names the classes of version 0.1.0: `fedbilevel federate start` writes the new names."
        )
    if kit.kind == "site" and resources.get("allow_log_streaming", True):
        sentences.append("local/resources.json lets logs of this site travel to the server (allow_log_streaming).")
    rules = _json(kit.folder / "local/authorization.json", absent={})
    for role, given in rules.get("permissions", {"anybody": "any"}).items():
        sentences += [
            f"local/authorization.json lets a {role} {deed} ({right})."
            for right, deed in FORBIDDEN.items()
            if (given if isinstance(given, str) else given.get(right, "none")) != "none"
        ]
    return sentences


FORBIDDEN = {"byoc": "bring code", "shell_commands": "read files here from afar"}


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


def _certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is missing or no certificate: take the kit from a new delivery.") from error
