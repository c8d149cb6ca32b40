"""Dealing rows to clients of equal sizes, alike or with labels skewed by a Dirichlet draw.  Pure functions of a seed.

Equal sizes let all clients run as one array.  The skew follows T.-M. H. Hsu, H. Qi and M. Brown, "Measuring the Effects of
Non-Identical Data Distribution for Federated Visual Classification" (2019): every client draws its own class
proportions, then the same number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbilevel.problem import whole_number
from fedbilevel.tasks.images import CLASSES, Images
from fedbilevel.tasks.task import ClientRows, whole_numbers

RowNumbers = NDArray[np.int64]


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


class Dealt(NamedTuple):
    train: ClientRows
    val: ClientRows
    test: ClientRows


def deal_images(
    images: Images,
    generator: np.random.Generator,
    *,
    clients: int,
    sizes: tuple[int, int, int],
    concentration: float | None = None,
) -> Dealt:
    """``sizes`` rows for training, validation and testing on every client, all three with the client's own proportions.

    Test rows come from the images set aside for testing, whatever the generator.
    """
    train, val, test = sizes
    whole_numbers({"clients": clients, "train": train, "validation": val, "test": test})
    shares = proportions(CLASSES, clients, concentration, generator)
    mixed = generator.permuted(deal(images.labels, shares, train + val, generator), axis=1)
    return gather(images, mixed[:, :train], mixed[:, train:], deal(images.test_labels, shares, test, generator))


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
