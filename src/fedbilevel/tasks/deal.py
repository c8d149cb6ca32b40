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
) -> NDArray[np.int64]:
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


class Part(NamedTuple):
    """Rows of all clients: ``features`` [clients, rows, columns] and ``labels`` [clients, rows]."""

    features: NDArray[np.float32]
    labels: NDArray[np.int32]

    def batch(self) -> dict[str, NDArray[np.generic]]:
        return {"features": self.features, "labels": self.labels}


class Dealt(NamedTuple):
    train: Part
    val: Part
    test: Part


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
    whole_number("clients", clients)
    for name, size in (("train", train), ("validation", val), ("test", test)):
        whole_number(name, size)
    shares = proportions(CLASSES, clients, concentration, generator)
    own = deal(images.labels, shares, train + val, generator)
    own = generator.permuted(own, axis=1)
    held = deal(images.test_labels, shares, test, generator)
    rows = (own[:, :train], own[:, train:], held)
    pixels = (images.pixels, images.pixels, images.test_pixels)
    labels = (images.labels, images.labels, images.test_labels)
    scaled = scale(*(pool[index] for pool, index in zip(pixels, rows, strict=True)))
    return Dealt(*(Part(a, pool[index]) for a, pool, index in zip(scaled, labels, rows, strict=True)))


def scale(train: NDArray[np.float32], *others: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
    """Columns centred by their mean over the training rows of all clients, rows of mean squared length 4, and a column of
    ones.  Clients can agree on these numbers by one averaging of their own means."""
    middle = train.mean(axis=(0, 1))
    length = np.sqrt(np.mean(np.sum((train - middle) ** 2, axis=-1)) / 4)

    def one(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        shifted = ((pixels - middle) / length).astype(np.float32)
        return np.concatenate([shifted, np.ones((*pixels.shape[:-1], 1), np.float32)], axis=-1)

    return tuple(one(pixels) for pixels in (train, *others))
