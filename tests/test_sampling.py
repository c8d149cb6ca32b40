"""Minibatches: uniform, with replacement, from a client's own rows, a function of its key alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.sampling import Batches, Draws, LocalData, Sampler, scaled

words = st.integers(0, 2**32 - 1)


@given(st.lists(words, min_size=20, max_size=20), st.integers(1, 2**31 - 1))
def test_scaled_is_the_high_word_of_the_product(bits, size):
    found = scaled(jnp.asarray(np.array(bits, np.uint32)), jnp.asarray(size, jnp.int32))
    assert found.dtype == jnp.int32
    assert np.asarray(found).tolist() == [(word * size) >> 32 for word in bits]


@pytest.mark.parametrize("size", [1, 2**16 - 1, 2**16, 2**16 + 1, 2**31 - 1])
def test_scaled_at_its_corners(size):
    corners = [0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 1]
    found = scaled(jnp.asarray(np.array(corners, np.uint32)), jnp.asarray(size, jnp.int32))
    assert np.asarray(found).tolist() == [(word * size) >> 32 for word in corners]
    assert int(found.max()) == size - 1


def test_scaled_is_uniform():
    """Evenly spaced words hit every row equally often, up to one."""
    found = scaled(jnp.arange(2**16, dtype=jnp.uint32) << 16, jnp.asarray(1000, jnp.int32))
    counts = np.bincount(np.asarray(found), minlength=1000)
    assert counts.min() >= 65
    assert counts.max() <= 66


def local(train_size=7, val_size=5):
    number = jnp.zeros((), jnp.int32)
    return LocalData(None, None, number, number + train_size, number + val_size)


def test_shapes_and_ranges():
    draws = Sampler(3, 2, train_batches=4, val_batches=1).draw(local(), jax.random.key(0), 40)
    assert draws.inner.shape == (40, 3)
    assert draws.train.shape == (40, 4, 3)
    assert draws.val.shape == (40, 1, 2)
    for drawn, size in ((draws.inner, 7), (draws.train, 7), (draws.val, 5)):
        assert set(np.unique(drawn)) == set(range(size)), "every row is drawn, no other"


def test_minibatches_of_one_round_are_independent():
    """No two of the minibatches of a step, nor of two steps, repeat one another."""
    draws = Sampler(8, train_batches=3).draw(local(2**20), jax.random.key(1), 5)
    rows = np.concatenate([draws.inner[:, None], draws.train], axis=1).reshape(-1, 8)
    assert len({tuple(row) for row in rows.tolist()}) == 20


@pytest.mark.parametrize(
    ("sizes", "present"),
    [
        ({"batch_size": None}, (False, False, False)),
        ({"batch_size": None, "outer_batch_size": None, "train_batches": 2, "val_batches": 1}, (False, False, False)),
        ({"batch_size": 2}, (True, False, False)),
        ({"batch_size": 2, "outer_batch_size": None, "train_batches": 2, "val_batches": 1}, (True, True, False)),
        ({"batch_size": None, "outer_batch_size": 2, "train_batches": 2, "val_batches": 1}, (False, False, True)),
    ],
)
def test_none_is_the_whole_set(sizes, present):
    draws = Sampler(**sizes).draw(local(), jax.random.key(0), 3)
    assert tuple(part is not None for part in draws) == present


def test_rows_of_a_shared_and_of_an_own_leaf():
    leaf = jnp.arange(24.0).reshape(2, 6, 2)
    size = jnp.asarray(6, jnp.int32)
    shared = LocalData({"a": leaf}, leaf, jnp.asarray(1, jnp.int32), size, size, shared=True)
    own = LocalData({"a": leaf[1]}, leaf[1], jnp.asarray(1, jnp.int32), size, size)
    rows = jnp.array([4, 0, 4], jnp.int32)
    for data in (shared, own, replace(shared, own=({"a": leaf[1]}, leaf[1]))):
        np.testing.assert_array_equal(data.rows("train", rows)["a"], leaf[1][rows])
        np.testing.assert_array_equal(data.whole("val"), leaf[1])
        merged, numbers = data.flat("train", rows)
        np.testing.assert_array_equal(merged["a"][numbers], leaf[1][rows])


def test_padded_leaves_are_read_with_a_mask_only():
    number = jnp.ones((), jnp.int32)
    leaf = jnp.arange(6.0).reshape(2, 3)
    data = LocalData(leaf, leaf, number, number, 2 * number, shared=True, padded=("train",))
    assert data.whole("val").tolist() == [3, 4, 5]
    with pytest.raises(RuntimeError, match="A whole train set was read that its tracing did not show"):
        data.whole("train")
    for part, real in (("train", [True, False, False]), ("val", [True, True, False])):
        rows, mask = data.whole_with_mask(part)
        assert (rows.tolist(), mask.tolist()) == ([3, 4, 5], real)


def test_who_reads_whole_sets_is_noticed():
    seen = []
    leaf = jnp.arange(3.0)
    one = jnp.int32(1)
    data = LocalData(leaf, leaf, 0 * one, one, one, padded=("train",), notice=lambda *read: seen.append(read))
    assert data.whole("train").tolist() == [0, 1, 2]
    assert data.whole_with_mask("val")[1].tolist() == [True, False, False]
    assert seen == [("train", True), ("val", False)]


def test_batches_pick_their_minibatch():
    leaf = jnp.arange(10.0)
    number = jnp.asarray(10, jnp.int32)
    draws = Draws(jnp.array([1, 2]), jnp.array([[3, 4], [5, 6]]), jnp.array([[7, 8]]))
    batches = Batches(LocalData(leaf, 10 * leaf, 0 * number, number, number), draws)
    assert batches.inner().tolist() == [1, 2]
    assert batches.train(0).tolist() == [3, 4]
    assert batches.train(1).tolist() == [5, 6]
    assert batches.val(0).tolist() == [70, 80]
    assert not batches.whole_train
    whole = Batches(batches.data, Draws())
    assert whole.whole_train
    assert whole.inner().tolist() == whole.train(3).tolist() == leaf.tolist()
