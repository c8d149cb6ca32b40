"""Drawing by the kernels: the keys and rows that ``jax.random`` gives, to the last bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import kernels
from fedbilevel.kernels import build, draw
from fedbilevel.plan import client_key
from fedbilevel.sampling import LocalData, Sampler

pytestmark = pytest.mark.skipif(not kernels.available(), reason=str(kernels.why_not()))
SIZES = ((1, 1), (11_000, 64), (2**31 - 1, 70_000))


def local(train, val):
    return LocalData({"a": jnp.zeros((1, 1))}, {"a": jnp.zeros((1, 1))}, *map(jnp.int32, (0, train, val)))


def drawn(key, train, val):
    return Sampler(19, 7, train_batches=2, val_batches=3).draw(local(train, val), key, 5)


def both(monkeypatch, function, *arguments):
    """By the kernels, and without them."""
    assert build.ready()
    fast = jax.jit(lambda *given: function(*given))(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(build, "ready", lambda: False)
        slow = jax.jit(lambda *given: function(*given))(*arguments)
    return fast, slow


@pytest.mark.parametrize(("train", "val"), SIZES)
def test_rows_are_those_of_jax(monkeypatch, train, val):
    seeds = jnp.arange(4, dtype=jnp.uint32) * 1_000_000_007
    for one in (
        lambda seed: drawn(jax.random.key(seed), train, val),
        lambda seed: jax.vmap(lambda size: drawn(jax.random.key(seed), size, val))(jnp.array([1, 5, train])),
    ):
        jax.tree.map(np.testing.assert_array_equal, *both(monkeypatch, jax.vmap(one), seeds))


def test_keys_are_those_of_jax(monkeypatch):
    def keys(seed, clients):
        of = jax.vmap(lambda client: client_key(jax.random.key(seed), 2**20 + 3, jnp.int32(1), client))
        return jax.random.key_data(of(clients))

    fast, slow = both(monkeypatch, keys, jnp.uint32(5), jnp.array([0, 1, 2**31 - 2], jnp.int32))
    np.testing.assert_array_equal(fast, slow)
    assert len({tuple(key) for key in np.asarray(fast).tolist()}) == 3


def test_other_generators_are_left_alone(monkeypatch):
    assert draw.serves(jax.random.key(0))
    assert not draw.serves(jax.random.key(0, impl="rbg"))
    assert not draw.serves(jax.random.PRNGKey(0))
    with jax.threefry_partitionable(False):
        assert not draw.serves(jax.random.key(0))
    monkeypatch.setattr(build, "_load", functools.cache(build._load.__wrapped__))
    assert not draw.serves(jax.random.key(0)), "nobody waits for a compiler in order to draw"


def test_a_step_draws_its_share_of_the_round():
    key, sampler, data = jax.random.key(3), Sampler(19, 7, train_batches=2, val_batches=3), local(11_000, 64)
    whole = sampler.draw(data, key, 5)
    taken = sampler.walk(lambda state, batches: (state, batches.draws), None, data, key, 5)[1]
    jax.tree.map(np.testing.assert_array_equal, taken, whole)
    words = jax.random.bits(key, (5 * (3 * 19 + 3 * 7),), jnp.uint32)
    every = np.concatenate([np.concatenate([whole.inner[:, None], whole.train], axis=1).ravel(), whole.val.ravel()])
    sizes = np.where(np.arange(len(every)) < 5 * 3 * 19, 11_000, 64).astype(np.uint64)
    np.testing.assert_array_equal(every, np.asarray(words, np.uint64) * sizes >> np.uint64(32))
