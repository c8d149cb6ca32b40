"""Keys made at home: a site makes its private key itself, and nobody else ever holds it.

::

    the site          federate site request north              north.key stays, north.csr goes to the coordinator
    the coordinator   federate init --request north.csr        a kit without a key, which is no secret
    the site          federate site install KIT --key north.key

A request is a PKCS #10 file, so OpenSSL or a hardware module can make one too; or the ``NAME.request.zip`` of
``nvflare cert request``, which has such a file in it.  It proves that its sender has the key; that the sender is the site is
for people to find out: both sides see the key's fingerprint and compare it by telephone.

A site is taken out by its name: the server refuses to register it from then on, whatever certificate it shows.  Names of sites
that were taken out are not given again.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from fedbilevel import storage

KEY_BITS = 3072
LEAST_BITS = 2048
"""NVFlare signs with RSA keys only."""
LARGEST = 1 << 16
"""Bytes of a request, or of a file in one; the usual have two thousand."""
DISABLED = "disabled_clients.json"
"""In the server's kit: sites that NVFlare refuses to register."""


@dataclass(frozen=True)
class Request:
    """A site's wish for a certificate of this key."""

    name: str
    pem: bytes

    @property
    def key(self) -> rsa.RSAPublicKey:
        key = x509.load_pem_x509_csr(self.pem).public_key()
        assert isinstance(key, rsa.RSAPublicKey)
        return key

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)


def fingerprint(key: rsa.RSAPublicKey) -> str:
    """SHA-256 of a public key, in groups that can be read out.

    >>> key = rsa.RSAPublicNumbers(65537, 2**2047 + 1).public_key()
    >>> len(fingerprint(key).split()), fingerprint(key) == fingerprint(key)
    (16, True)
    """
    digest = hashlib.sha256(_spki(key)).hexdigest()
    return " ".join(digest[start : start + 4] for start in range(0, 64, 4))


def _spki(key: rsa.RSAPublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def make_request(name: str, folder: Path) -> tuple[Path, Path, Request]:
    """A new key, closed to others, and the request for it; neither replaces a file that is there."""
    files = folder / f"{name}.key", folder / f"{name}.csr"
    for file in files:
        if file.exists():
            raise ValueError(f"{file} exists already: a kit may rest on it. Move it away, or name another --out.")
    key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    pem = request.public_bytes(serialization.Encoding.PEM)
    folder.mkdir(parents=True, exist_ok=True)
    closed = serialization.NoEncryption()
    kind = serialization.PrivateFormat.TraditionalOpenSSL
    storage.write(files[0], key.private_bytes(serialization.Encoding.PEM, kind, closed), mode=0o600)
    storage.write(files[1], pem)
    return (*files, Request(name, pem))


def read_request(file: Path) -> Request:
    """Checked: it is one, it is signed by the key it asks for, and it names one site."""
    try:
        pem = _request_of_nvflare(file) if zipfile.is_zipfile(file) else _start(file.open("rb"))
        request = x509.load_pem_x509_csr(pem)
        valid = request.is_signature_valid
    except (OSError, ValueError, TypeError, LookupError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{file} is no request for a site's certificate: ask the site for its .csr file, or its .request.zip of NVFlare."
        ) from error
    key, names = request.public_key(), request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not valid or len(names) != 1:
        raise ValueError(f"{file} is no request of one site, signed by its own key: ask the site for a new one.")
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size < LEAST_BITS:
        raise ValueError(f"{file} asks for a key other than RSA of {LEAST_BITS} bits or more: ask for a new one.")
    return Request(str(names[0].value), pem)


def _request_of_nvflare(file: Path) -> bytes:
    """The PKCS #10 file of ``nvflare cert request``.  What else is in the archive (project, organisation, when) is not used:
    the roster says who takes part, and the certificate is the one that every site of it gets."""
    with zipfile.ZipFile(file) as archive:
        about = json.loads(_start(archive.open("request.json")))
        if about["cert_type"] != "client":  # a server's or a person's
            raise ValueError(about["cert_type"])
        return _start(archive.open(f"{about['name']}.csr"))


def _start(file: IO[bytes]) -> bytes:
    with file:
        return file.read(LARGEST)


def sign(startup: Path, request: Request, authority: Path) -> None:
    """In a kit that was made with a key, the same certificate for the key that was asked for, and no key."""
    root = json.loads(authority.read_text())
    signer = serialization.load_pem_private_key(root["root_pri_key"].encode(), password=None)
    assert isinstance(signer, rsa.RSAPrivateKey)
    made = x509.load_pem_x509_certificate((startup / "client.crt").read_bytes())
    builder = x509.CertificateBuilder(made.issuer, made.subject, request.key, x509.random_serial_number())
    builder = builder.not_valid_before(made.not_valid_before_utc).not_valid_after(made.not_valid_after_utc)
    for extension in made.extensions:
        value = extension.value
        if isinstance(value, x509.SubjectKeyIdentifier):
            value = x509.SubjectKeyIdentifier.from_public_key(request.key)
        builder = builder.add_extension(value, extension.critical)
    signed = builder.sign(signer, hashes.SHA256())
    storage.write(startup / "client.crt", signed.public_bytes(serialization.Encoding.PEM))
    (startup / "client.key").unlink()


def check_key(file: Path, certificate: x509.Certificate, name: str) -> bytes:
    """The private key of a certificate; one sentence where it is missing, or another."""
    try:
        pem = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{file} is missing. A site that made its key itself puts it there: "
            f"fedbilevel federate site install KIT --key {name}.key."
        ) from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}).") from error
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no private key in PEM form without a password.") from error
    pair = key.public_key(), certificate.public_key()
    if not (isinstance(pair[0], rsa.RSAPublicKey) and isinstance(pair[1], rsa.RSAPublicKey) and pair[0] == pair[1]):
        raise ValueError(
            f"{file} is not the key of the certificate of {name}: take the key that its request was made with."
        )
    return pem


def refused_sites(server: Path) -> list[str]:
    """The sites that the server with this kit does not register."""
    file = server / DISABLED
    try:
        return list(json.loads(file.read_text())["disabled_clients"]) if file.exists() else []
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{file} is damaged: restore it, or sites that were taken out come back.") from error


def refuse_site(server: Path, name: str) -> None:
    storage.write_json(server / DISABLED, {"disabled_clients": sorted({*refused_sites(server), name})})
