"""Problems and client data: what is accepted, how it is stored, what is refused."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import fedbilevel as fb
from tests.references.compare import refusals

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


ones, stacked, listed = np.ones, fb.ClientData, fb.ClientData.from_clients
ONE_ROW, LEAF = ones((1, 1)), r"Every leaf of train must be \[clients, samples, ...\] .* got shapes"
test_bad_data_and_problems = refusals(
    None,
    (lambda: stacked(train=None), "ClientData needs training rows: pass train="),
    (lambda: stacked(train={}), "ClientData got an empty tree as train"),
    (lambda: stacked(ones((2, 3)), {}), "ClientData got an empty tree as val"),
    (lambda: stacked(ones(3)), rf"{LEAF} \[\(3,\)\]"),
    (lambda: stacked({"a": ones((2, 3)), "b": ones((2, 4))}), rf"{LEAF} \[\(2, 3\), \(2, 4\)\]"),
    (lambda: stacked(ones((2, 3)), ones((3, 3))), "train has 2 clients but val has 3"),
    (lambda: stacked(ones((0, 3))), "train has no clients"),
    (lambda: stacked(ones((2, 0))), "Client 0 has no train samples: leave it out or give it rows"),
    (lambda: stacked(ones((2, 3)), train_sizes=[3, 0]), "Client 1 has no train samples"),
    (lambda: stacked(ones((2, 3)), train_sizes=[3]), r"train_sizes must have one number per client \(2\)"),
    (
        lambda: stacked(ones((2, 3)), train_sizes=[3, 4]),
        "train_sizes claims 4 rows for a client, but the leaves hold 3",
    ),
    (lambda: listed([]), "from_clients needs at least one client"),
    (lambda: listed([(1, 2, 3)]), r"Each client must be a pair \(train, val\)"),
    (lambda: listed([(ONE_ROW, ONE_ROW), ONE_ROW]), "Either every client has validation rows or none has"),
    (lambda: listed([{"a": ONE_ROW}, {"b": ONE_ROW}]), "The train trees of the clients have different structures"),
    (lambda: listed([{"a": ones(2), "b": ones(3)}]), r"train leaves of client 0 have different .* samples: \{2, 3\}"),
    (lambda: listed([np.float64(3.0)]), "client 0 have different numbers of samples"),
    (lambda: listed([ones((2, 3)), ones((2, 4))]), "A leaf of train differs between clients beyond its length"),
    (lambda: listed([ones((2, 3)), ones((0, 3))]), "Client 1 has no train samples"),
    (lambda: listed([{"a": ones(2)}, {"a": ones(0)}], mask="m"), "Client 1 has no train samples"),
    (lambda: listed([ones((2, 3))], mask="m"), "mask='m' needs dicts without that key"),
    (lambda: listed([{"m": ones(2)}], mask="m"), "mask='m' needs dicts without that key"),
    (lambda: stacked(np.array([["a", "b"]])), "A leaf of train has type <U1: encode text and dates as", TypeError),
    (lambda: stacked(np.array([[None, 1]])), "A leaf of train has type object", TypeError),
    (lambda: fb.BilevelProblem(None, len, len), "inner_loss must be a function, not NoneType", TypeError),
    (lambda: fb.BilevelProblem(len, 3.0, len), "outer_loss must be a function, not float", TypeError),
    (lambda: fb.BilevelProblem(len, len, (0, 0)), "init must be a function, not tuple", TypeError),
)
