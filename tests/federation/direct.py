"""A federation in one process: the coordinator calls the sites directly, through a channel that can be made to fail."""

import atexit
import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from fedbilevel.engines.fixed import mean_on_host
from fedbilevel.federation.protocol.compiled import local_data
from fedbilevel.federation.protocol.coordinator import Coordinator, Reply
from fedbilevel.federation.protocol.identity import KitIdentity
from fedbilevel.federation.protocol.payload import to_arrays
from fedbilevel.federation.protocol.policy import Approval, Policy, Source
from fedbilevel.federation.protocol.program import make_program
from fedbilevel.federation.protocol.record import Record, read_status
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.site import Site
from fedbilevel.plan import client_key
from tests.federation import programs

SITES = ("site-1", "site-2", "site-3")


class Direct:
    """A channel whose sites are objects.  ``fault(task, site, request, answer)`` may change an answer, drop it (None) or raise.

    ``meddle(task, site, request)`` returns what the site is asked instead.  ``seen`` keeps everything that left a site.
    """

    def __init__(self, sites, fault=None, meddle=None):
        self.all, self.fault, self.meddle, self.seen, self.waits = sites, fault, meddle, [], []

    def sites(self):
        return list(self.all)

    def ask(self, task, requests, awaited, seconds):
        self.waits.append((task, set(requests), set(awaited)))
        replies = {}
        for name, request in requests.items():
            # What travels is a copy: nobody may lean on sharing memory.
            sent = copied(request)
            answer = self.all[name].answer(task, sent if self.meddle is None else self.meddle(task, name, sent))
            if self.fault is not None:
                answer = self.fault(task, name, request, answer)
            if answer is not None:
                self.seen.append((task, name, answer))
                replies[name] = Reply(copied(answer), 0.01)
        return replies


def copied(value):
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)


OPEN = {
    "minimum_rows": 1, "minimum_batch": 1, "minimum_cell": 1, "secure_sums": "optional", "secret_draws": False,
    "approval": Approval(auto=True, schemas=("any",), rounds=10**6, runs=1000),
}  # fmt: skip
"""A site without bounds, where bounds are not what a test is about, and with the batches of the simulation."""


def site(folder, name, settings, source, say=lambda line: None, **policy):
    """A site with its own state folder."""
    identity = KitIdentity(startup(name), folder / name) if settings.secured else None
    return Site(name, settings, Policy(source, **{**OPEN, **policy}), folder / name, say, identity)


@cache
def startup(name, authority="authority"):
    """A folder with the certificate and key of a site, issued by one authority for all."""
    folder = Path(tempfile.mkdtemp(prefix="fedbilevel-kit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    key = rsa.generate_private_key(65537, 2048)
    issuer = None if name == authority else x509.load_pem_x509_certificate(_authority(authority).read_bytes())
    signer = key if issuer is None else load_pem_private_key(_authority(authority, "client.key").read_bytes(), None)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1)).not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )  # fmt: skip
    (folder / "client.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "client.crt").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / "rootCA.pem").write_bytes((issuer or made).public_bytes(Encoding.PEM))
    return folder


def _authority(name, file="client.crt"):
    return startup(name, name) / file


def array_sites(folder, settings, names=SITES, **policy):
    """Sites of the quadratic task."""
    for name in names:
        programs.save_site(folder / f"{name}.npz", settings.client(name), settings.double)
    policy = {"functions": (programs.FUNCTION,), **policy}
    return {name: site(folder, name, settings, Source(arrays_file=folder / f"{name}.npz"), **policy) for name in names}


def fair_array_sites(folder, settings, rng, sizes, features, **policy):
    """(sites with rows, labels and groups in arrays, these arrays by site)."""
    sites, secret = {}, {}
    for name, size in zip(SITES, sizes, strict=True):
        secret[name] = {
            "features": rng.normal(size=(size, features)).astype(np.float32),
            "labels": rng.integers(2, size=size).astype(np.float32),
            "groups": rng.integers(2, size=size).astype(np.int32),
        }
        np.savez(folder / f"{name}.npz", **secret[name])
        sites[name] = site(folder, name, settings, Source(arrays_file=folder / f"{name}.npz"), **policy)
    return sites, secret


def settings_for(
    name,
    rounds=4,
    run="run",
    min_sites=None,
    record_every=None,
    weights="uniform",
    secure=False,
    sites=SITES,
    double=True,
    **options,
):
    arguments = {"algorithm": name, "rounds": rounds, "options": options, "weights": weights, "double": double}
    return JobSettings(
        run, programs.FUNCTION, sites, arguments, seed=5, double=double, min_sites=min_sites, record_every=record_every,
        reply_timeout=1, secure=secure,
    )  # fmt: skip


def coordinate(folder, settings, channel, functions=(programs.FUNCTION,), least=1):
    """One submission; the answer's arrays of the last stage."""
    record = Record(folder / "runs" / settings.run, settings)
    try:
        program = make_program(settings.program, settings.arguments, functions)
        return to_arrays(Coordinator(settings, program, record, channel, least).run()[-1])
    finally:
        record.close()


class Runs:
    """One run of FedBiO in a folder, submitted as often as a test likes; every submission has new processes."""

    def __init__(self, folder, rounds=4, **settings):
        self.folder, self.home = folder, folder / "runs/run"
        self.settings = settings_for("fedbio", rounds, **{"batch_size": 4, "local_steps": 2, **settings})

    def submit(self, fault=None, names=SITES, channel=Direct, **policy):
        self.channel = channel(array_sites(self.folder, self.settings, names, **policy), fault)
        return coordinate(self.folder, self.settings, self.channel)[0]

    def table(self, name):
        return pd.read_csv(self.home / f"{name}.csv")

    @property
    def log(self):
        return (self.home / "log.txt").read_text()

    @property
    def status(self):
        return read_status(self.home)


def written_out(algorithm, data, rounds, seed, lost=(), secure=False, weight=1.0):
    """A run of a one-phase algorithm written out.

    ``lost``: the (round, client) whose reply does not count, with which the client keeps its earlier state.  ``weight``: of
    every client, which the rounding of secure sums depends on.
    """
    (phase,) = algorithm.plan
    work = jax.jit(phase.work)
    key = jax.random.key(seed)
    count = data.clients
    own = [jax.tree.map(lambda leaf, c=c: leaf[c], (data.train, data.val)) for c in range(count)]
    server, local = algorithm.init(key), [algorithm.enroll(key) for _ in range(count)]
    for number in range(rounds):
        message = phase.send(server)
        replies = []
        for client in range(count):
            if (number, client) not in lost:
                reply, local[client] = work(
                    message, local[client], local_data(*own[client], client), client_key(key, number, 0, client)
                )
                replies.append(reply)
        if secure:
            replied = jax.tree.map(lambda *leaves: np.stack(leaves), *replies)
            mean = mean_on_host(replied, np.full(len(replies), weight), np.full(count, weight))
        else:
            mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *replies)
        server = phase.absorb(server, mean)
    return np.asarray(algorithm.outer(server))
