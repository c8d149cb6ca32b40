"""Images: the shipped digits, MNIST's formats with every way they can be broken, and rows dealt to clients.

Everybody gets as many, nobody gets another's, and the skew is what the concentration says.
"""

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.tasks import digits, read_mnist
from fedbilevel.tasks.images import Images, deal, deal_images, deal_shards, from_bytes, gather, proportions
from tests.references.compare import refusals
from tests.tasks.common import IMAGES

GENERATOR = np.random.default_rng(0)
PIXELS = GENERATOR.integers(0, 256, (40, 4, 6), np.uint8)
LABELS = np.tile(np.arange(10, dtype=np.uint8), 4)


def idx(array):
    """An IDX file by its definition: two zero bytes, the type (8: bytes), the dimensions, their sizes, the data."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + array.tobytes()


def put(folder, end="", mark="-", parts=("train", "t10k")):
    for number, part in enumerate(parts):
        kept = slice(0, 30) if number == 0 else slice(30, 40)
        for kind, array, dimensions in (("images", PIXELS[kept], 3), ("labels", LABELS[kept], 1)):
            content = idx(array)
            name = f"{part}-{kind}{mark}idx{dimensions}-ubyte{end}"
            (folder / name).write_bytes(gzip.compress(content) if end else content)


def test_digits_keep_their_test_rows():
    one, two = digits(), digits()
    assert (one.pixels.shape, one.test_pixels.shape) == ((1258, 64), (539, 64))
    assert np.array_equal(one.test_pixels, two.test_pixels)
    assert one.pixels.min() == 0
    assert one.pixels.max() == 1
    shares = np.bincount(one.test_labels) / (np.bincount(one.labels) + np.bincount(one.test_labels))
    np.testing.assert_allclose(shares, 0.3, atol=0.005)
    together = np.concatenate([one.pixels, one.test_pixels])
    assert len(np.unique(together, axis=0)) == 1797


@pytest.mark.parametrize(("end", "mark"), [("", "-"), (".gz", "-"), ("", "."), (".gz", ".")])
def test_idx_files_are_read(tmp_path, end, mark):
    put(tmp_path, end, mark)
    images = read_mnist(tmp_path, pool=1)
    np.testing.assert_allclose(images.pixels, PIXELS[:30].reshape(30, -1) / 255, rtol=1e-6)
    assert np.array_equal(images.labels, LABELS[:30])
    assert np.array_equal(images.test_labels, LABELS[30:])
    assert images.source == "mnist"
    assert (images.pixels.dtype, images.labels.dtype) == (np.float32, np.int32)


def test_pooling_averages_squares(tmp_path):
    put(tmp_path)
    small = read_mnist(tmp_path, pool=2).pixels
    assert small.shape == (30, 6)
    np.testing.assert_allclose(small[3, 4], PIXELS[3, 2:4, 2:4].mean() / 255, rtol=1e-6)


def test_archives_are_read_and_test_rows_set_aside_where_there_are_none(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=PIXELS, y_train=LABELS)
    images = read_mnist(tmp_path, pool=1)
    assert (len(images.labels), len(images.test_labels)) == (30, 10)  # one of each class's four
    (tmp_path / "mnist.npz").unlink()
    np.savez(tmp_path / "mnist.npz", x_train=PIXELS[:30], y_train=LABELS[:30], x_test=PIXELS[30:], y_test=LABELS[30:])
    assert np.array_equal(read_mnist(tmp_path, pool=1).test_labels, LABELS[30:])


def archive(**arrays):
    """Puts mnist.npz beside the files; it is what is read."""
    return lambda folder: np.savez(folder / "mnist.npz", **arrays)


def replaced(kind, content):
    """Puts ``content``, or what it makes of the file, in the place of the training images or labels."""

    def spoil(folder):
        file = folder / f"train-{kind}-ubyte"
        file.write_bytes(content(file.read_bytes()) if callable(content) else content)

    return spoil


def broken_gzip(folder):
    (folder / "train-images-idx3-ubyte").unlink()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(PIXELS[:30]))[:-9])


def no_images(folder):
    replaced("images-idx3", idx(PIXELS[:0]))(folder)
    replaced("labels-idx1", idx(LABELS[:0]))(folder)


BROKEN = {
    "has no train-labels-idx1-ubyte": lambda folder: (folder / "train-labels-idx1-ubyte").unlink(),
    "has no t10k-labels-idx1-ubyte": lambda folder: (folder / "t10k-images-idx3-ubyte").write_bytes(idx(PIXELS)),
    "begins with the number 2051, but an IDX file of labels begins with 2049": replaced("labels-idx1", idx(PIXELS)),
    "735 bytes, but its header promises 736": replaced("images-idx3", lambda content: content[:-1]),
    "has 3 bytes, too few": replaced("images-idx3", b"\0\0\x08"),
    "is not a whole gzip file": broken_gzip,
    r"have 30 images but labels of shape \[29\]": replaced("labels-idx1", idx(LABELS[:29])),
    r"labels from 1 to 10; they must lie in 0..9": replaced("labels-idx1", idx(LABELS[:30] + np.uint8(1))),
    "hold no images": no_images,
    "mnist.npz cannot be read as a NumPy archive": lambda folder: (folder / "mnist.npz").write_bytes(b"not one"),
    "must hold x_train and y_train; it holds images": archive(images=PIXELS),
    "must hold images as bytes": archive(x_train=PIXELS / 255, y_train=LABELS),
    "labels of type <U1": archive(x_train=PIXELS, y_train=LABELS.astype("U1")),
    "cannot be read as a NumPy archive: Object": archive(x_train=np.array([object()]), y_train=LABELS),
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_broken_files_get_a_sentence_that_names_them(tmp_path, sentence):
    put(tmp_path, parts=("train",))
    BROKEN[sentence](tmp_path)
    with pytest.raises(ValueError, match=sentence) as error:
        read_mnist(tmp_path)
    assert str(tmp_path) in str(error.value)


POOLS = {0: "pool must be at least 1", 3: "pool=3 does not divide images of 4 x 6"}


@pytest.mark.parametrize("pool", [*POOLS, "nowhere"])
def test_bad_arguments(tmp_path, pool):
    put(tmp_path)
    with pytest.raises(ValueError, match=POOLS.get(pool, "is not a folder")):
        read_mnist(tmp_path, pool) if pool in POOLS else read_mnist(tmp_path / pool)


def skew(labels):
    """Mean over the clients of the share of their most frequent label."""
    return np.mean([np.bincount(client).max() / client.size for client in labels])


@given(
    st.integers(0, 1000), st.integers(1, 6), st.integers(1, 20), st.sampled_from([None, 0.05, 1.0, 100.0]), st.data()
)
def test_every_client_gets_its_number_and_no_row_is_dealt_twice(seed, clients, size, concentration, data):
    extra = data.draw(st.integers(0, 30))
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, clients * size + extra)
    dealt = deal(labels, proportions(4, clients, concentration, generator), size, generator)
    assert dealt.shape == (clients, size)
    assert np.unique(dealt).size == dealt.size
    assert dealt.min() >= 0
    assert dealt.max() < labels.size


def test_a_small_concentration_skews_and_none_does_not():
    labels = np.repeat(np.arange(10), 1000)
    skews = {}
    for concentration in (None, 100.0, 1.0, 0.1):
        generator = np.random.default_rng(3)
        shares = proportions(10, 8, concentration, generator)
        assert np.allclose(shares.sum(axis=1), 1)
        skews[concentration] = skew(labels[deal(labels, shares, 200, generator)])
    assert skews[None] < 0.2
    assert skews[None] < skews[1.0] < skews[0.1]
    assert skews[100.0] < 0.25
    assert skews[0.1] > 0.5


def test_labels_follow_the_shares_where_rows_last():
    labels = np.repeat(np.arange(3), 3000)
    shares = np.array([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]])
    dealt = labels[deal(labels, shares, 2000, np.random.default_rng(0))]
    counts = np.stack([np.bincount(client, minlength=3) for client in dealt]) / 2000
    np.testing.assert_allclose(counts, shares, atol=0.04)  # four standard errors
    assert counts[1, 0] == 0


def test_images_are_dealt_with_the_clients_own_proportions_and_test_rows_stay_test_rows():
    first, other, again = (
        deal_images(IMAGES, np.random.default_rng(seed), clients=6, sizes=(60, 40, 30), concentration=0.5)
        for seed in (5, 6, 5)
    )
    assert first.train.features.shape == (6, 60, 65)
    assert first.val.labels.shape == (6, 40)
    assert not np.array_equal(first.train.labels, other.train.labels)
    counts = [np.stack([np.bincount(client, minlength=10) for client in part.labels]) for part in first]
    alike = np.corrcoef((counts[0] / 60).ravel(), (counts[2] / 30).ravel())[0, 1]
    assert alike > 0.8
    assert all(np.array_equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))


@given(st.integers(0, 99), st.integers(1, 6), st.integers(1, 3))
def test_shards_are_runs_of_rows_sorted_by_label(seed, clients, shards):
    labels = np.random.default_rng(seed).integers(0, 10, 97)
    rows = deal_shards(labels, clients, shards, np.random.default_rng(seed))
    length = 97 // (clients * shards)
    assert rows.shape == (clients, shards * length)
    assert len(np.unique(rows)) == rows.size
    runs = labels[rows].reshape(clients * shards, length)
    runs = runs[np.argsort(runs[:, 0] * 100 + runs[:, -1])]
    assert (np.diff(runs.ravel()) >= 0).all()  # put back in order, they are the sorted labels


def test_images_in_shards_have_few_classes_and_test_rows_of_all():
    dealt = deal_images(IMAGES, np.random.default_rng(0), clients=10, sizes=(80, 40, 50), shards=2)
    seen = [len(np.unique(np.concatenate(both))) for both in zip(dealt.train.labels, dealt.val.labels, strict=True)]
    assert max(seen) <= 4  # two runs, each over one border of classes at most
    assert min(len(np.unique(own)) for own in dealt.test.labels) > 6


def test_bytes_become_images():
    held = from_bytes("mine", PIXELS[:30], LABELS[:30], PIXELS[30:], LABELS[30:], pool=2)
    assert (held.source, held.pixels.shape, held.test_pixels.shape) == ("mine", (30, 6), (10, 6))
    np.testing.assert_allclose(held.pixels[3, 0], PIXELS[3, :2, :2].mean() / 255, rtol=1e-6)


def test_scaling_centres_and_sizes_by_the_training_rows():
    generator = np.random.default_rng(0)
    train, other = generator.random((3, 20, 5), np.float32), generator.random((3, 8, 5), np.float32)
    labels = np.zeros(60, np.int32)
    images = Images("none", train.reshape(60, 5), labels, other.reshape(24, 5), labels[:24])
    rows, held = np.arange(60).reshape(3, 20), np.arange(24).reshape(3, 8)
    scaled, rest = (part.features for part in gather(images, rows, rows, held)[::2])
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled[..., :-1].mean(axis=(0, 1)), 0, atol=1e-6)
    np.testing.assert_allclose((scaled[..., :-1] ** 2).sum(axis=-1).mean(), 4, rtol=1e-5)
    assert (scaled[..., -1] == 1).all()
    assert (rest[..., -1] == 1).all()
    back = (other - train.mean(axis=(0, 1))) / rest[..., :-1]
    np.testing.assert_allclose(back, np.broadcast_to(back[0, 0, 0], back.shape), rtol=1e-4)


test_what_cannot_be_dealt_gets_a_sentence = refusals(
    None,
    (lambda: proportions(3, 2, -1, GENERATOR), "concentration=-1 must be a positive number"),
    (
        lambda: deal(np.zeros(10, int), np.full((2, 1), 1.0), 6, GENERATOR),
        "2 clients with 6 rows .* 12 rows, but .* 10",
    ),
    (lambda: deal_images(IMAGES, GENERATOR, clients=2, sizes=(3, 0, 3)), "validation must be at least 1"),
)
