"""Images: the shipped digits, and MNIST's formats with every way they can be broken."""

import gzip

import numpy as np
import pytest

from fedbilevel.tasks import digits, read_mnist

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


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        read_mnist(tmp_path / "nowhere")
    put(tmp_path)
    with pytest.raises(ValueError, match="pool must be at least 1"):
        read_mnist(tmp_path, pool=0)
    with pytest.raises(ValueError, match="pool=3 does not divide images of 4 x 6"):
        read_mnist(tmp_path, pool=3)
