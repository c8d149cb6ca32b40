"""Labelled images, read and dealt to clients.

Scikit-learn's digits ship with it; MNIST comes from files of the user's own, read as distributed (IDX, gzipped or not) or as
one NumPy archive; nothing is downloaded.

Rows are dealt in equal sizes, which lets all clients run as one array: alike, or with labels skewed as in T.-M. H. Hsu,
H. Qi and M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification" (2019):
every client draws its own class proportions, then the same number of rows.  Pure functions of a seed.
"""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbilevel.hints import whole_number
from fedbilevel.tasks.task import ClientRows, whole_numbers

RowNumbers = NDArray[np.int64]
CLASSES = 10
TEST_SHARE = 0.3
"""Of each class, where a source has no test rows of its own.  Always the same rows: a seed never moves one into training."""
_IDX = {"images": (2051, 3), "labels": (2049, 1)}
"""The number an IDX file begins with (unsigned bytes, so many dimensions) and that number of dimensions."""
_NAMES = {"train": ("x_train", "y_train"), "t10k": ("x_test", "y_test")}


class Images(NamedTuple):
    """``pixels`` [rows, columns] in [0, 1] with integer ``labels`` 0..9, and the same for rows set aside for testing.

    Attributes:
        source: Where they come from.
        pixels: ``[rows, columns]`` in [0, 1].
        labels: ``[rows]``, 0 to 9.
        test_pixels: Those of the test rows.
        test_labels: Those of the test rows.
    """

    source: str
    pixels: NDArray[np.float32]
    labels: NDArray[np.int32]
    test_pixels: NDArray[np.float32]
    test_labels: NDArray[np.int32]


def digits() -> Images:
    """The 1,797 digits of 8 x 8 pixels in scikit-learn; 30 % of each class are test rows.

    Returns:
        `Images`.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return _set_aside("digits", (pixels / 16).astype(np.float32), labels.astype(np.int32))


def read_mnist(folder: str | Path, pool: int = 2) -> Images:
    """MNIST (or a set in its format) from a folder with the four IDX files, ``.gz`` or not, or with ``mnist.npz``.

    Files are named as distributed (``train-images-idx3-ubyte``, ``t10k-labels-idx1-ubyte.gz``; a dot before ``idx`` is
    accepted); the archive holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``.  Without the test files 30 % of
    each class are set aside.  ``pool`` averages squares of this side: 28 x 28 becomes 14 x 14; 1 keeps all.

    Args:
        folder: Where the files are.
        pool: Side of the squares of pixels that are averaged; 1 keeps all.

    Returns:
        `Images`.

    Raises:
        ValueError: Files are missing or broken.
    """
    home = Path(folder)
    if not home.is_dir():
        raise ValueError(f"{home} is not a folder: name the one that holds the MNIST files.")
    if pool < 1:
        raise ValueError(f"pool must be at least 1, not {pool}.")
    archive = home / "mnist.npz"
    parts = _read_archive(archive) if archive.exists() else _read_folder(home)
    if "t10k" in parts:
        return from_bytes("mnist", *parts["train"], *parts["t10k"], pool=pool)
    images, labels = parts["train"]
    return _set_aside("mnist", _pooled(images, pool), labels.astype(np.int32))


def from_bytes(source: str, images: Any, labels: Any, test_images: Any, test_labels: Any, pool: int = 2) -> Images:
    """`Images` from bytes [rows, height, width], such as `fedbilevel.datasets.load_images` gives."""
    parts = (_pooled(images, pool), labels.astype(np.int32), _pooled(test_images, pool), test_labels.astype(np.int32))
    return Images(source, *parts)


def read_idx(file: Path, kind: str) -> NDArray[np.uint8]:
    """One IDX file of ``kind`` "images" or "labels", gzipped if its name ends in .gz."""
    magic, dimensions = _IDX[kind]
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a whole gzip file ({error}): fetch it again.") from error
    head = 4 * (1 + dimensions)
    if len(content) < head:
        raise ValueError(f"{file} has {len(content)} bytes, too few for an IDX file of {kind}.")
    found, *shape = (int(number) for number in np.frombuffer(content, ">u4", 1 + dimensions))
    if found != magic:
        raise ValueError(f"{file} begins with the number {found}, but an IDX file of {kind} begins with {magic}.")
    expected = head + math.prod(shape)
    if len(content) != expected:
        raise ValueError(f"{file} has {len(content)} bytes, but its header promises {expected}: fetch it again.")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def _read_folder(home: Path) -> dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    parts = {}
    for part in ("train", "t10k"):
        files = {kind: _find(home, part, kind) for kind in _IDX}
        if part == "t10k" and not any(files.values()):
            continue
        for kind, file in files.items():
            if file is None:
                raise ValueError(
                    f"{home} has no {part}-{kind}-idx{_IDX[kind][1]}-ubyte (.gz or not) and no mnist.npz: "
                    f"put the MNIST files there."
                )
        images, labels = (read_idx(file, kind) for kind, file in files.items() if file is not None)
        parts[part] = _checked(f"{part} files of {home}", images, labels)
    return parts


def _find(home: Path, part: str, kind: str) -> Path | None:
    names = [f"{part}-{kind}{mark}idx{_IDX[kind][1]}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    return next((home / name for name in names if (home / name).exists()), None)


def _read_archive(file: Path) -> dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            held = set(archive.files)
            parts = {
                part: (archive[images], archive[labels])
                for part, (images, labels) in _NAMES.items()
                if {images, labels} <= held
            }
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} cannot be read as a NumPy archive: {error}") from error
    if "train" not in parts:
        raise ValueError(f"{file} must hold x_train and y_train; it holds {', '.join(sorted(held)) or 'nothing'}.")
    return {part: _checked(f"{part} part of {file}", *arrays) for part, arrays in parts.items()}


def _checked(
    what: str, images: NDArray[np.uint8], labels: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if images.ndim != 3 or images.dtype != np.uint8:
        raise ValueError(
            f"The {what} must hold images as bytes [rows, height, width], not {images.dtype}{list(images.shape)}."
        )
    if labels.shape != images.shape[:1]:
        raise ValueError(f"The {what} have {images.shape[0]} images but labels of shape {list(labels.shape)}.")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"The {what} have labels of type {labels.dtype}; they must be whole numbers.")
    if labels.size == 0:
        raise ValueError(f"The {what} hold no images.")
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise ValueError(f"The {what} have labels from {labels.min()} to {labels.max()}; they must lie in 0..9.")
    return images, labels


def _pooled(images: NDArray[np.uint8], pool: int) -> NDArray[np.float32]:
    rows, height, width = images.shape
    if height % pool or width % pool:
        raise ValueError(f"pool={pool} does not divide images of {height} x {width} pixels.")
    squares = images.reshape(rows, height // pool, pool, width // pool, pool)
    means = np.asarray(squares.mean(axis=(2, 4), dtype=np.float32) / np.float32(255))
    return means.reshape(rows, -1)


def _set_aside(source: str, pixels: NDArray[np.float32], labels: NDArray[np.int32]) -> Images:
    generator = np.random.default_rng(0)
    aside = np.zeros(labels.size, bool)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        aside[rows[: round(TEST_SHARE * rows.size)]] = True
    return Images(source, pixels[~aside], labels[~aside], pixels[aside], labels[aside])


# --- dealing ---------------------------------------------------------------------------------------------------------


def proportions(
    classes: int, clients: int, concentration: float | None, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Class proportions, [clients, classes]: equal (None), or one Dirichlet draw a client."""
    if concentration is None:
        return np.full((clients, classes), 1 / classes)
    if not (np.isfinite(concentration) and concentration > 0):
        raise ValueError(
            f"concentration={concentration!r} must be a positive number, or None for clients that are alike."
        )
    drawn = generator.dirichlet(np.full(classes, concentration), size=clients)
    return np.asarray((drawn + 1e-9) / (drawn + 1e-9).sum(axis=1, keepdims=True))


def deal(
    labels: NDArray[np.integer], shares: NDArray[np.float64], size: int, generator: np.random.Generator
) -> RowNumbers:
    """``size`` rows for each client, [clients, size]; no row twice; labels drawn by the client's ``shares``.

    Clients draw in turn, one row at a time, from the classes that still have rows: where a class runs out, its share goes
    to the others.
    """
    whole_number("size", size)
    clients, classes = shares.shape
    if clients * size > labels.size:
        raise ValueError(
            f"{clients} clients with {size} rows each need {clients * size} rows, but there are {labels.size}: "
            f"ask for fewer clients or rows."
        )
    heaps = [generator.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
    left = np.array([heap.size for heap in heaps])
    chances = generator.random((size, clients))
    dealt = np.empty((clients, size), np.int64)
    for turn in range(size):
        for client in range(clients):
            mass = np.cumsum(shares[client] * (left > 0))
            label = int(np.searchsorted(mass, chances[turn, client] * mass[-1], side="right"))
            label = min(label, int(np.flatnonzero(left)[-1]))  # rounding at the upper end
            left[label] -= 1
            dealt[client, turn] = heaps[label][left[label]]
    return dealt


def deal_shards(labels: NDArray[np.integer], clients: int, shards: int, generator: np.random.Generator) -> RowNumbers:
    """Rows sorted by label and cut into ``clients * shards`` equal runs, of which every client gets ``shards``:
    [clients, rows], as in B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
    (2017).  What is left over by the cut is dealt to nobody."""
    whole_numbers({"clients": clients, "shards": shards})
    length = labels.size // (clients * shards)
    if not length:
        raise ValueError(
            f"{clients} clients with {shards} shards each need more than the {labels.size} rows there are."
        )
    mixed = generator.permutation(labels.size)  # which rows of a class lie beside each other is chance
    ordered = mixed[np.argsort(labels[mixed], kind="stable")][: clients * shards * length]
    runs = ordered.reshape(clients * shards, length)
    return np.asarray(runs[generator.permutation(clients * shards)].reshape(clients, shards * length))


class Dealt(NamedTuple):
    train: ClientRows
    val: ClientRows
    test: ClientRows


def deal_images(
    images: Images, generator: np.random.Generator, *, clients: int, sizes: tuple[int, int, int],
    concentration: float | None = None, shards: int | None = None,
) -> Dealt:  # fmt: skip
    """``sizes`` rows for training, validation and testing on every client, all three with the client's own proportions.

    ``shards``: so many runs of rows sorted by label make a client's rows, and test rows are dealt alike.  Test rows come
    from the images set aside for testing, whatever the generator.
    """
    train, val, test = sizes
    whole_numbers({"clients": clients, "train": train, "validation": val, "test": test})
    if shards is not None and concentration is not None:
        raise ValueError("Clients differ by shards or by a concentration, not by both.")
    shares = proportions(CLASSES, clients, concentration, generator)
    if shards is None:
        dealt = deal(images.labels, shares, train + val, generator)
    else:
        dealt = deal_shards(images.labels, clients, shards, generator)
    mixed = generator.permuted(dealt, axis=1)
    if mixed.shape[1] < train + val:
        raise ValueError(f"{clients} clients have {mixed.shape[1]} rows each in shards, fewer than {train} + {val}.")
    own = mixed[:, : train + val]
    return gather(images, own[:, :train], own[:, train:], deal(images.test_labels, shares, test, generator))


def gather(images: Images, train: RowNumbers, val: RowNumbers, test: RowNumbers) -> Dealt:
    """The images with these numbers, scaled: columns centred by their mean over the training rows of all clients, rows of
    mean squared length 4, and a column of ones.  Clients can agree on these numbers by one averaging of their own means."""
    middle = images.pixels[train].mean(axis=(0, 1))
    length = np.sqrt(np.mean(np.sum((images.pixels[train] - middle) ** 2, axis=-1)) / 4)

    def part(pixels: NDArray[np.float32], labels: NDArray[np.int32], rows: RowNumbers) -> ClientRows:
        scaled = ((pixels[rows] - middle) / length).astype(np.float32)
        return ClientRows(np.concatenate([scaled, np.ones((*rows.shape, 1), np.float32)], axis=-1), labels[rows])

    known, held = (images.pixels, images.labels), (images.test_pixels, images.test_labels)
    return Dealt(part(*known, train), part(*known, val), part(*held, test))
