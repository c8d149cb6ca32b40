"""Which rows every client reads in every step, as plain NumPy: drawn by the package, handed to the naive loops."""

from typing import NamedTuple

import jax
import numpy as np

from fedbilevel.plan import client_key
from fedbilevel.sampling import Draws, LocalData, draw_round


class Rows(NamedTuple):
    """Row numbers of one step; None is the whole set.  ``train`` and ``val`` have one row of numbers per minibatch."""

    inner: np.ndarray | None = None
    train: np.ndarray | None = None
    val: np.ndarray | None = None

    def factor(self, number):
        return None if self.train is None else self.train[number]

    def held_out(self):
        return None if self.val is None else self.val[0]


def whole(round_number, client, step):
    """Every step reads everything."""
    return Rows()


def drawn(data, seed, rounds, steps, batch_size, train_batches=0, val_batches=0, outer_batch_size=None):
    """A function (round, client, step) -> Rows, following the keys an engine must use."""
    seed_key = jax.random.key(seed)
    val_sizes = np.zeros_like(data.train_sizes) if data.val is None else data.val_sizes

    def one(number, client, train_size, val_size) -> Draws:
        own = LocalData(None, None, client, train_size, val_size)
        key = client_key(seed_key, number, 0, client)
        return draw_round(
            own,
            key,
            steps,
            batch_size=batch_size,
            outer_batch_size=batch_size if outer_batch_size is None else outer_batch_size,
            train_batches=train_batches,
            val_batches=val_batches,
        )

    clients = np.arange(data.clients, dtype=np.int32)
    over_clients = jax.vmap(one, in_axes=(None, 0, 0, 0))
    over_rounds = jax.jit(jax.vmap(over_clients, in_axes=(0, None, None, None)))
    draws = over_rounds(np.arange(rounds, dtype=np.int32), clients, data.train_sizes, val_sizes)
    inner, train, val = (None if leaf is None else np.asarray(leaf) for leaf in draws)

    def rows(number, client, step):
        place = (number, client, step)
        return Rows(*(None if leaf is None else leaf[place] for leaf in (inner, train, val)))

    return rows
