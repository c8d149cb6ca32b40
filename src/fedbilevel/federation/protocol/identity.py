"""Who a site is to the other sites: the certificate and key in its kit, and the certificates it has come to know.

The coordinator passes certificates on, and whoever holds the federation's authority could make new ones in a site's name.  So a
site keeps the first key it has seen of every other site, in ``peers.json`` among its states, and takes no other after it.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from fedbilevel import storage
from fedbilevel.federation.protocol.secure import Insecure

PEERS = "peers.json"
_PSS = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


class KitIdentity:
    """The identity in the folder ``startup`` of a kit; ``folder`` holds the states of the site."""

    def __init__(self, startup: Path, folder: Path) -> None:
        self.certificate = (startup / "client.crt").read_bytes()
        key = serialization.load_pem_private_key((startup / "client.key").read_bytes(), None)
        assert isinstance(key, rsa.RSAPrivateKey)  # NVFlare signs with no other kind
        self._key = key
        self._root = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
        self._peers = folder / PEERS

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message, _PSS, hashes.SHA256())

    def verify(self, name: str, certificate: bytes, message: bytes, signature: bytes) -> None:
        try:
            shown = x509.load_pem_x509_certificate(certificate)
            shown.verify_directly_issued_by(self._root)
            (common,) = shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise Insecure(f"The certificate of {name} was not issued by this federation's authority.") from error
        if common.value != name or not shown.not_valid_before_utc <= datetime.now(UTC) <= shown.not_valid_after_utc:
            raise Insecure(f"The certificate of {name} is another participant's, or has ended.")
        key = shown.public_key()
        if not isinstance(key, rsa.RSAPublicKey):
            raise Insecure(f"The certificate of {name} has a key of a kind that is not known here.")
        key.verify(signature, message, _PSS, hashes.SHA256())
        self._pin(name, key)

    def _pin(self, name: str, key: rsa.RSAPublicKey) -> None:
        """The same key as when ``name`` was first met."""
        public = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        fingerprint = hashlib.sha256(public).hexdigest()
        with storage.lock(self._peers.with_suffix(".lock"), seconds=-1):
            known = json.loads(self._peers.read_text()) if self._peers.exists() else {}
            if known.setdefault(name, fingerprint) != fingerprint:
                raise Insecure(
                    f"The key of {name} is not the one this site knows it by. Ask the people there whether they have a new "
                    f"one; if they do, take {name} out of {self._peers}."
                )
            storage.write_json(self._peers, known, mode=0o600)
