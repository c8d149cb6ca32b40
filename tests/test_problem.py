"""Problems and client data: what is accepted, how it is stored, what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbilevel as fb

sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=5)


def rows(count, start, kind=np.float64):
    return {"a": (start + np.arange(2 * count)).reshape(count, 2).astype(kind), "n": np.arange(count)}


@given(sizes)
def test_from_clients_keeps_every_row(pairs):
    clients = [(rows(train, 10 * i), rows(val, -10 * i)) for i, (train, val) in enumerate(pairs)]
    data = fb.ClientData.from_clients(clients)
    assert data.clients == len(pairs)
    assert data.train_sizes.tolist() == [train for train, _ in pairs]
    assert data.val_sizes.tolist() == [val for _, val in pairs]
    assert data.samples("train") == max(train for train, _ in pairs)
    assert data.equal_sizes() == (len(set(pairs)) == 1)
    for number, (train, val) in enumerate(clients):
        alone = data.only(number)
        assert alone.clients == 1
        assert alone.equal_sizes()
        for name in ("a", "n"):
            np.testing.assert_array_equal(alone.train[name][0], train[name])
            np.testing.assert_array_equal(alone.val[name][0], val[name])
            assert alone.train[name].dtype == train[name].dtype


@given(sizes)
def test_masks_mark_the_real_rows(pairs):
    clients = [(rows(train, 1), rows(val, 1)) for train, val in pairs]
    data = fb.ClientData.from_clients(clients, mask="real")
    assert data.equal_sizes()
    assert (data.train_sizes.tolist(), data.val_sizes.tolist()) == tuple(map(list, zip(*pairs, strict=True)))
    assert data.train["real"].dtype == np.float64
    np.testing.assert_array_equal(data.train["real"].sum(axis=1), [train for train, _ in pairs])
    for mask, (_, count) in zip(data.val["real"], pairs, strict=True):
        assert mask.tolist() == [1.0] * count + [0.0] * (len(mask) - count)


def test_mask_follows_the_floats():
    data = fb.ClientData.from_clients([rows(2, 0, np.float32), rows(1, 0, np.float32)], mask="m")
    assert data.train["m"].dtype == np.float32


def test_training_rows_alone():
    data = fb.ClientData.from_clients([np.ones((3, 2)), np.ones((1, 2))])
    assert data.val is None
    assert data.train_sizes.tolist() == [3, 1]
    assert data.only(1).train.shape == (1, 1, 2)


def test_leaves_keep_their_types():
    data = fb.ClientData(
        train={"a": np.ones((2, 3), np.float32), "b": np.array([[1, 2, 3], [4, 5, 6]])}, val=jnp.ones((2, 1))
    )
    assert data.train["a"].dtype == np.float32
    assert data.train["b"].dtype == np.int64
    assert data.example("train")["a"].shape == (3,)
    assert data.train_sizes.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: fb.ClientData(train=None), ValueError, "ClientData needs training rows: pass train="),
        (lambda: fb.ClientData(train={}), ValueError, "ClientData got an empty tree as train"),
        (lambda: fb.ClientData(np.ones((2, 3)), {}), ValueError, "ClientData got an empty tree as val"),
        (
            lambda: fb.ClientData(np.ones(3)),
            ValueError,
            r"Every leaf of train must be \[clients, samples, ...\].*\(3,\)",
        ),
        (
            lambda: fb.ClientData({"a": np.ones((2, 3)), "b": np.ones((2, 4))}),
            ValueError,
            r"Every leaf of train must be .* got shapes \[\(2, 3\), \(2, 4\)\]",
        ),
        (lambda: fb.ClientData(np.ones((2, 3)), np.ones((3, 3))), ValueError, "train has 2 clients but val has 3"),
        (lambda: fb.ClientData(np.ones((0, 3))), ValueError, "train has no clients"),
        (
            lambda: fb.ClientData(np.ones((2, 0))),
            ValueError,
            "Client 0 has no train samples: leave it out or give it rows",
        ),
        (lambda: fb.ClientData(np.ones((2, 3)), train_sizes=[3, 0]), ValueError, "Client 1 has no train samples"),
        (
            lambda: fb.ClientData(np.ones((2, 3)), train_sizes=[3]),
            ValueError,
            r"train_sizes must have one number per client \(2\)",
        ),
        (
            lambda: fb.ClientData(np.ones((2, 3)), train_sizes=[3, 4]),
            ValueError,
            "train_sizes claims 4 rows for a client, but the leaves hold 3",
        ),
        (
            lambda: fb.ClientData(np.array([["a", "b"]])),
            TypeError,
            "A leaf of train has type <U1: encode text and dates as numbers",
        ),
        (lambda: fb.ClientData(np.array([[None, 1]])), TypeError, "A leaf of train has type object"),
        (lambda: fb.ClientData.from_clients([]), ValueError, "from_clients needs at least one client"),
        (lambda: fb.ClientData.from_clients([(1, 2, 3)]), ValueError, r"Each client must be a pair \(train, val\)"),
        (
            lambda: fb.ClientData.from_clients([(np.ones((1, 1)), np.ones((1, 1))), np.ones((1, 1))]),
            ValueError,
            "Either every client has validation rows or none has",
        ),
        (
            lambda: fb.ClientData.from_clients([{"a": np.ones((1, 1))}, {"b": np.ones((1, 1))}]),
            ValueError,
            "The train trees of the clients have different structures",
        ),
        (
            lambda: fb.ClientData.from_clients([{"a": np.ones(2), "b": np.ones(3)}]),
            ValueError,
            r"The train leaves of client 0 have different numbers of samples: \{2, 3\}",
        ),
        (
            lambda: fb.ClientData.from_clients([np.float64(3.0)]),
            ValueError,
            "client 0 have different numbers of samples",
        ),
        (
            lambda: fb.ClientData.from_clients([np.ones((2, 3)), np.ones((2, 4))]),
            ValueError,
            "A leaf of train differs between clients beyond its length",
        ),
        (
            lambda: fb.ClientData.from_clients([np.ones((2, 3)), np.ones((0, 3))]),
            ValueError,
            "Client 1 has no train samples",
        ),
        (
            lambda: fb.ClientData.from_clients([{"a": np.ones(2)}, {"a": np.ones(0)}], mask="m"),
            ValueError,
            "Client 1 has no train samples",
        ),
        (
            lambda: fb.ClientData.from_clients([np.ones((2, 3))], mask="m"),
            ValueError,
            "mask='m' needs dicts without that key",
        ),
        (
            lambda: fb.ClientData.from_clients([{"m": np.ones(2)}], mask="m"),
            ValueError,
            "mask='m' needs dicts without that key",
        ),
        (lambda: fb.BilevelProblem(None, len, len), TypeError, "inner_loss must be a function, not NoneType"),
        (lambda: fb.BilevelProblem(len, 3.0, len), TypeError, "outer_loss must be a function, not float"),
        (lambda: fb.BilevelProblem(len, len, (0, 0)), TypeError, "init must be a function, not tuple"),
    ],
)
def test_bad_data_and_problems(make, kind, sentence):
    with pytest.raises(kind, match=sentence):
        make()
