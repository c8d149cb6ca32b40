"""A run of a one-phase algorithm written out: who is lost in which round is given, and everything else follows."""

import jax
import numpy as np

from fedbilevel.federation.protocol.compiled import local_data
from fedbilevel.plan import client_key


def written_out(algorithm, data, rounds, seed, lost=()):
    """``lost``: the (round, client) whose reply does not count, with which the client keeps its earlier state."""
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
