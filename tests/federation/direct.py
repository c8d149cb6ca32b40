"""A federation in one process: the coordinator calls the sites directly, through a channel that can be made to fail."""

import jax
import numpy as np
import pandas as pd

from fedbilevel.federation.protocol.compiled import local_data
from fedbilevel.federation.protocol.coordinator import Coordinator, Reply
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

    ``seen`` keeps everything that left a site.
    """

    def __init__(self, sites, fault=None):
        self.all, self.fault, self.seen, self.waits = sites, fault, [], []

    def sites(self):
        return list(self.all)

    def ask(self, task, requests, awaited, seconds):
        self.waits.append((task, set(requests), set(awaited)))
        replies = {}
        for name, request in requests.items():
            # What travels is a copy: nobody may lean on sharing memory.
            answer = self.all[name].answer(task, copied(request))
            if self.fault is not None:
                answer = self.fault(task, name, request, answer)
            if answer is not None:
                self.seen.append((task, name, answer))
                replies[name] = Reply(copied(answer), 0.01)
        return replies


def copied(value):
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)


OPEN = {
    "minimum_rows": 1, "minimum_batch": 1, "minimum_cell": 1,
    "approval": Approval(auto=True, schemas=("any",), rounds=10**6, runs=1000),
}  # fmt: skip
"""A site without bounds, where bounds are not what a test is about."""


def site(folder, name, settings, source, say=lambda line: None, **policy):
    """A site with its own state folder."""
    return Site(name, settings, Policy(source, **{**OPEN, **policy}), folder / name, say)


def array_sites(folder, settings, names=SITES, double=True, **policy):
    """Sites of the quadratic task."""
    for name in names:
        programs.save_site(folder / f"{name}.npz", settings.client(name), double)
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


def settings_for(name, rounds=4, run="run", min_sites=None, record_every=None, weights="uniform", **options):
    arguments = {"algorithm": name, "rounds": rounds, "options": options, "weights": weights}
    return JobSettings(
        run, programs.FUNCTION, SITES, arguments, seed=5, double=True, min_sites=min_sites, record_every=record_every,
        reply_timeout=1,
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


def written_out(algorithm, data, rounds, seed, lost=()):
    """A run of a one-phase algorithm written out.

    ``lost``: the (round, client) whose reply does not count, with which the client keeps its earlier state.
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
        server = phase.absorb(server, jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *replies))
    return np.asarray(algorithm.outer(server))
