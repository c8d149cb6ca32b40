"""Which rows every client reads in every step, as plain NumPy: drawn by the package, handed to the naive loops."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.plan import client_key
from fedbilevel.sampling import Batches, Draws, LocalData, Sampler


class Rows(NamedTuple):
    """Row numbers of one step; None is the whole set.  ``train`` and ``val`` have one row of numbers per minibatch."""

    inner: np.ndarray | None = None
    train: np.ndarray | None = None
    val: np.ndarray | None = None

    def factor(self, number):
        return None if self.train is None else self.train[number]

    def held_out(self, number=0):
        return None if self.val is None else self.val[number]


def batches(train, val, draws=Draws()):  # noqa: B008
    """What an estimator is handed: one client's rows, and which of them are drawn."""
    number = jnp.zeros((), jnp.int32)
    return Batches(LocalData(*jax.tree.map(jnp.asarray, (train, val)), number, number + 1, number + 1), draws)


def whole(round_number, client, step, at=0, steps=None, more=1):
    """Every step reads everything."""
    return Rows()


@partial(jax.jit, static_argnames=("sampler", "steps", "half"))
def _draw(seed, number, ordinal, client, train_size, val_size, sampler, steps, half):
    key = client_key(jax.random.key(seed), number, ordinal, client)
    key = key if half is None else jax.random.split(key)[half]
    return sampler.draw(LocalData(None, None, client, train_size, val_size), key, steps)


def by_phase(data, seed, batch_size, outer_batch_size=None):
    """A function (round, ordinal of the phase, client, ...) -> [Rows of each step], following the keys an engine must use.

    ``train`` and ``val`` count the minibatches beside the inner one; ``inner=False``: no training rows are drawn.  ``half``:
    the phase splits its key and draws these from one half.  ``more``: minibatches are so many times as large.
    """

    def rows(number, ordinal, client, steps=1, inner=True, train=0, val=0, half=None, more=1):
        if batch_size is outer_batch_size is None:
            return [Rows()] * steps
        sizes = data.train_sizes[client], np.int32(0) if data.val is None else data.val_sizes[client]
        sampler = Sampler(more * batch_size if inner else None, more * (outer_batch_size or batch_size), train, val)
        found = _draw(seed, number, ordinal, client, *sizes, sampler=sampler, steps=steps, half=half)
        leaves = [None if leaf is None else np.asarray(leaf) for leaf in found]
        return [Rows(*(None if leaf is None else leaf[i] for leaf in leaves)) for i in range(steps)]

    return rows


def drawn(data, seed, rounds, steps, batch_size, train_batches=0, val_batches=0, outer_batch_size=None, ordinal=0):
    """For plans of one phase, or of one and a search: a function (round, client, step, ordinal, steps, more) -> Rows."""
    read = cache(by_phase(data, seed, batch_size, outer_batch_size))

    def rows(number, client, step, at=ordinal, count=steps, more=1):
        assert number < rounds
        return read(number, at, client, count, True, train_batches, val_batches, None, more)[step]

    return rows
