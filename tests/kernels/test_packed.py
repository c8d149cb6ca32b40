"""Packed one-hot rows against the same rows in full: every kernel that takes them, and what is packed at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import kernels
from fedbilevel.kernels.packed import multiply

RAISED = (ValueError, jax.errors.JaxRuntimeError)
# Sums of at most a few hundred float32 terms, relative to the largest entry of the result.
TOLERANCE = 2e-5


def one_hot(rows, numbers, sizes, seed=0, constant=True, clients=2):
    """Standardised numbers between one-hot blocks, some rows without a category, and a constant."""
    rng = np.random.default_rng(seed)
    blocks = []
    for place, size in enumerate(sizes):
        block = np.eye(size, dtype=np.float32)[rng.integers(size, size=(clients, rows))]
        block[rng.random((clients, rows)) < 0.1] = 0
        blocks.append(block)
        if place < numbers:
            blocks.append(rng.normal(size=(clients, rows, 1)).astype(np.float32))
    if constant:
        blocks.append(np.ones((clients, rows, 1), np.float32))
    return np.concatenate(blocks, axis=-1)


def unpacked(rows):
    """By the definition, record by record."""
    records, columns = np.asarray(rows.records), np.asarray(rows.columns)
    table = np.zeros((*records.shape[:2], rows.length + 1), np.float32)
    for client in range(len(records)):
        numbers = len(columns[client])
        for row, record in enumerate(records[client]):
            table[client, row, record.view(np.uint16)[2 * numbers :][: rows.ones] // 2] = 1
            table[client, row, columns[client]] = record[:numbers].view(np.float32)
    return table[..., :-1]


# Lengths of every remainder by four: tables of one call begin cache lines, and so have gaps of several lengths between them.
SHAPES = [
    (3, (9, 7, 12, 30)),
    (3, (9, 7, 12, 32)),
    (3, (9, 7, 12, 31)),
    (0, (40, 25)),
    (17, (6,) * 17 + (90, 202)),
    (1, (300,)),
]


@pytest.mark.parametrize(("numbers", "sizes"), SHAPES)
def test_records_hold_the_whole_table(numbers, sizes):
    features = one_hot(50, numbers, sizes)
    found = kernels.packed(features)
    assert found.records.shape[-1] % 16 == 0
    np.testing.assert_array_equal(unpacked(found), features)


def test_dense_tables_and_other_types_are_left_alone():
    features = one_hot(50, 3, (9, 7, 12, 30))
    rng = np.random.default_rng(0)
    assert kernels.packed(rng.normal(size=(2, 50, 64)).astype(np.float32)) is None
    assert kernels.packed(features.astype(np.float64)) is None
    assert kernels.packed(one_hot(50, 1, (2, 2))) is None
    late = np.concatenate([features, rng.normal(size=(2, 200, features.shape[-1])).astype(np.float32)], axis=1)
    assert kernels.packed(late) is None


def operands(features, points, batch, terms, cells=5, seed=1):
    rng = np.random.default_rng(seed)
    rows, length = features.shape
    targets = (rng.random(rows) < 0.4).astype(np.float32)
    numbers = rng.integers(cells, size=rows).astype(np.int32)
    indices = rng.integers(rows, size=(terms + 1, batch)).astype(np.int32)
    inner, vectors = rng.normal(size=(2, points, length)).astype(np.float32)
    weights = rng.uniform(0.5, 2, size=(points, cells)).astype(np.float32)
    ridge, step = rng.uniform(0.01, 0.1, size=(2, points)).astype(np.float32)
    return targets, numbers, indices, inner, vectors, weights, ridge, step


def near(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        assert np.abs(np.asarray(got) - np.asarray(want)).max() <= TOLERANCE * max(1, np.abs(want).max())


@pytest.mark.parametrize("link", ["logistic", "squared"])
@pytest.mark.parametrize("points", [1, 2, 3])
@pytest.mark.parametrize(("batch", "terms"), [(1, 0), (7, 2), (16, 3), (130, 4)])
@pytest.mark.parametrize(("numbers", "sizes"), SHAPES[:-1])
def test_series_and_gradient_equal_those_of_full_rows(numbers, sizes, batch, terms, points, link):
    features = one_hot(90, numbers, sizes)[:1]
    rows = kernels.packed(features).flat()
    targets, cells, indices, inner, vectors, *tables, step = operands(features[0], points, batch, terms)
    both = (features[0], rows)
    full, few = (
        kernels.neumann(table, targets, cells, indices, inner, vectors, *tables, step, link=link) for table in both
    )
    near(few, full)
    full, few = (kernels.gradient(table, targets, cells, indices[0], inner, *tables, link=link) for table in both)
    near([few], [full])


@pytest.mark.parametrize("batch", [1, 33, 128])
def test_gradient_with_weights_of_rows_is_that_of_the_formula(batch):
    features = one_hot(90, 3, (9, 7, 12, 30))[:1]
    labels, _, indices, inner, *_ = operands(features[0], 1, batch, 0)
    weights = np.random.default_rng(2).uniform(0.5, 2, 90).astype(np.float32)
    rows, ridge = kernels.packed(features).flat(), jnp.asarray(0.1, jnp.float32)
    found = kernels.weighted_gradient(rows, labels, weights, indices[0], inner[0], ridge)

    batch_rows, own = features[0, indices[0]].astype(np.float64), weights[indices[0]]
    slopes = own * (1 / (1 + np.exp(-batch_rows @ inner[0])) - labels[indices[0]])
    near([found], [(slopes @ batch_rows / batch + 0.1 * inner[0]).astype(np.float32)])


@pytest.mark.parametrize("points", [1, 3, 10, 18])
@pytest.mark.parametrize(("start", "size"), [(0, 2000), (13, 1500), (3, 0), (7, 65)])
def test_losses_by_group_equal_those_of_full_rows(points, start, size):
    features = one_hot(2000, 3, (9, 7, 12, 30))[:1]
    rng = np.random.default_rng(0)
    labels, groups = (rng.random(2000) < 0.3).astype(np.float32), rng.integers(4, size=2000).astype(np.int32)
    inner = rng.normal(size=(points, features.shape[-1])).astype(np.float32)
    place = jnp.asarray(start, jnp.int32), jnp.asarray(size, jnp.int32)

    def losses(table):
        return jax.vmap(lambda own: kernels.group_losses(table, labels, groups, *place, own, count=5))(inner)

    near(losses(kernels.packed(features).flat()), losses(jnp.asarray(features[0])))


@pytest.mark.parametrize(("numbers", "sizes"), SHAPES)
@pytest.mark.parametrize(("start", "size"), [(0, 2000), (13, 1500), (3, 0), (7, 65)])
def test_sums_and_gradients_are_those_of_full_rows_to_the_last_bit(numbers, sizes, start, size):
    features = one_hot(2000, numbers, sizes)
    rng = np.random.default_rng(0)
    labels, groups = (rng.random(4000) < 0.3).astype(np.float32), rng.integers(4, size=4000).astype(np.int32)
    inner = rng.normal(size=(2, features.shape[-1])).astype(np.float32)
    places, rows = jnp.asarray([start, 2000 + start], jnp.int32), jnp.asarray([size, size // 2], jnp.int32)

    def sums(table):
        def one(start, size, own):
            return kernels.group_sums(table, labels, groups, start, size, own, jnp.float32(7), count=5)

        return jax.vmap(one)(places, rows, inner)

    full, few = sums(jnp.asarray(features.reshape(4000, -1))), sums(kernels.packed(features).flat())
    for got, want in zip(few, full, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("batch", [1, 33, 128])
@pytest.mark.parametrize(("numbers", "sizes"), SHAPES[:-1])
def test_functions_of_a_minibatch_read_packed_rows(numbers, sizes, batch):
    features = one_hot(90, numbers, sizes)[:1]
    labels, _, indices, inner, vectors, *_ = operands(features[0], 5, batch, 0)
    table = {"features": jnp.asarray(features[0]), "labels": jnp.asarray(labels)}
    packed = {"features": kernels.packed(features).flat()}

    def loss(y, rows):
        margins = rows["features"] @ y
        return jnp.mean(jnp.logaddexp(margins, 0) - rows["labels"] * margins)

    def derivatives(rows):
        slopes = [jax.grad(loss)(y, rows) for y in inner]
        return [*slopes, jax.jvp(lambda y: jax.grad(loss)(y, rows), (inner[0],), (vectors[0],))[1]]

    def both(leaves):
        return [kernels.over_rows(derivatives, table, indices[0], rows) for rows in (leaves, {})]

    near(*jax.jit(both)(packed))
    # Of several clients and seeds, and nothing is copied.
    program = jax.jit(jax.vmap(lambda rows: kernels.over_rows(derivatives, table, rows, packed)))
    text = program.lower(indices).compile().as_text()
    assert " dot(" not in text
    assert "_take_" not in text
    near([program(indices)[0][0]], [both({})[1][0]])


def test_rows_without_ones():
    features = np.zeros((2, 40, 64), np.float32)
    features[..., ::32] = np.random.default_rng(0).normal(size=(2, 40, 2))
    rows = kernels.packed(features)
    np.testing.assert_array_equal(unpacked(rows), features)
    targets, cells, indices, inner, _, *tables, _ = operands(features[0], 1, 20, 0)
    full, few = (
        kernels.gradient(table, targets, cells, indices[0], inner, *tables, link="logistic")
        for table in (features[0], kernels.Packed(rows.records[0], rows.columns[0], rows.ones, rows.length))
    )
    near([few], [full])


def test_clients_and_seeds_side_by_side():
    features = one_hot(40, 3, (9, 7, 12, 30), clients=3)
    targets, cells, indices, inner, _, weights, ridge, _ = operands(features[0], 1, 20, 2)
    rows = kernels.packed(features)

    def one(table, indices):
        return kernels.gradient(table, targets, cells, indices, inner, weights, ridge, link="logistic")

    near([jax.vmap(one, (0, None))(rows, indices[0])], [jax.vmap(one, (0, None))(jnp.asarray(features), indices[0])])
    seeds = jax.vmap(jax.vmap(one, (0, None)), (None, 0))
    near([seeds(rows, indices)], [seeds(jnp.asarray(features), indices)])


def test_what_is_not_there_is_refused():
    features = one_hot(40, 3, (9, 7, 12, 30))[:1]
    rows = kernels.packed(features).flat()
    targets, cells, indices, inner, vectors, *tables, step = operands(features[0], 1, 20, 2)

    def series(rows=rows, cells=cells, indices=indices, inner=inner):
        return kernels.neumann(rows, targets, cells, indices, inner, vectors, *tables, step, link="logistic")

    beyond, about = np.array(rows.records), (rows.ones, rows.length)
    beyond.view(np.uint16)[:, 6] = 65534
    between = np.array(rows.records)  # twice a column is even
    between.view(np.uint16)[:, 6] = 3

    def sums(rows=rows, groups=cells, inner=inner):
        place = jnp.int32(0), jnp.int32(40)
        return kernels.group_sums(rows, targets, groups, *place, inner[0], jnp.float32(7), count=5)

    def products(rows=rows, indices=indices, sums=False):
        return multiply(rows, indices[0], [inner[0, :20] if sums else inner[0]], sums)

    wrong = [
        (lambda: products(indices=indices + 40), "row"),
        (lambda: products(indices=indices + 40, sums=True), "row"),
        (lambda: products(rows=kernels.Packed(beyond, rows.columns, *about)), "column"),
        (lambda: series(cells=cells + 5), "cell"),
        (lambda: sums(groups=cells + 5), "group"),
        (lambda: sums(rows=kernels.Packed(beyond, rows.columns, *about)), "column"),
        (lambda: series(indices=indices + 40), "row"),
        (lambda: series(rows=kernels.Packed(beyond, rows.columns, *about)), "column"),
        (lambda: series(rows=kernels.Packed(between, rows.columns, *about)), "column"),
        (lambda: sums(rows=kernels.Packed(between, rows.columns, *about)), "column"),
        (lambda: series(rows=kernels.Packed(rows.records, np.asarray(rows.columns) + 99, *about)), "column"),
    ]
    for call, word in wrong:
        with pytest.raises(RAISED, match=word):
            jax.block_until_ready(call())
    with pytest.raises(ValueError, match="columns"):
        series(inner=inner[:, 1:])
    with pytest.raises(TypeError, match="cells"):
        series(cells=cells.astype(np.int64) if jax.config.jax_enable_x64 else cells.astype(np.float32))
