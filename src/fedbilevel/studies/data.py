"""The data sets with splits that studies run on: split, encoded and dealt to three clients.

7:3 into training and test part, group proportions kept.  The training part is dealt to the clients evenly ("iid"), or every
group 2:2:6 in an order of its own ("noniid").  Each client sets a fifth of its rows aside, group by group: nobody trains on
them, and settings are chosen on them.  Of the rest, the bilevel methods with the paper's formulation take a group-balanced
validation set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel.datasets import Dataset, load_adult, load_credit, partition
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.trainer import Clients
from fedbilevel.problem import ClientData
from fedbilevel.tables.columns import encode_groups
from fedbilevel.tables.encoder import Encoder

CLIENTS = 3
SHARES = (2, 2, 6)
TEST_SHARE = 0.3
SET_ASIDE = 0.2
DISTRIBUTIONS = ("iid", "noniid")
ENCODINGS = ("clean", "paper")
PARTS = ("train", "validation", "test")


class Source(NamedTuple):
    """A data set with its groups, and the paper's batch size for it.

    ``widths``: columns after either encoding, rare categories and the constant counted, rounded up to whole vectors.
    ``outer_batch``: validation rows a bilevel step reads in Table 1, at most the smallest client's on nearly every split
    (Adult 115 and more, Credit mostly 12): one number, so that both distributions run the same program.  ``by_size``: clients
    in the order of their sizes, so that splits with clients of the same sizes share a program.
    """

    load: Callable[[str], Dataset]
    batch_size: int
    widths: dict[str, int]
    outer_batch: int | None = None
    by_size: bool = False


SOURCES = {
    "adult": Source(lambda encoding: load_adult("race", encoding), 128, {"clean": 112, "paper": 224}, 64),
    "credit": Source(lambda encoding: load_credit("personal_status", encoding), 32, {"clean": 64, "paper": 24}, 8),
    "adult-sex": Source(lambda encoding: load_adult("sex", encoding), 128, {"clean": 112}, by_size=True),
    "adult-race": Source(lambda encoding: load_adult("race", encoding), 128, {"clean": 112}, by_size=True),
    "credit-status": Source(lambda encoding: load_credit("personal_status", encoding), 32, {"clean": 64}, by_size=True),
}


class Rows(NamedTuple):
    """Rows to measure a model on."""

    features: np.ndarray
    labels: np.ndarray
    groups: np.ndarray

    def decided(self, params: np.ndarray, groups: int) -> Counts:
        """How a linear model decides them."""
        return Counts.of(self.labels, self.features @ params > 0, self.groups, groups)

    def decided_by(self, scores: np.ndarray, groups: int) -> Counts:
        """How several models decide them whose ``scores`` ``[rows, models]`` these are: counts of every model."""
        models, size = scores.shape[1], 4 * groups
        own = 4 * self.groups.astype(np.int64) + 2 * self.labels.astype(np.int64)
        places = own[:, None] + (scores > 0) + size * np.arange(models)
        return Counts(np.bincount(places.ravel(), minlength=size * models).reshape(models, groups, 2, 2))


@dataclass(frozen=True, eq=False)
class Case:
    """A data set with a split.

    ``paper``: clients with a group-balanced validation set; ``whole``: both levels read all rows.  ``padding``: empty columns
    in front of the encoded ones.  ``train``: all rows trained on; ``validation``: those set aside.
    """

    source: str
    distribution: str
    number: int
    model: Model
    names: list[str]
    paper: Clients
    whole: Clients
    train: Rows
    validation: Rows
    test: Rows
    encoder: Encoder | None
    padding: int
    columns: list[str]

    def counts(self, part: str, params: np.ndarray) -> Counts:
        rows: Rows = getattr(self, part)
        return rows.decided(params, len(self.names))


class Cases:
    """The cases used last, of which Adult's take about 60 MB each: as many as Table 1 comes back to with its contrast."""

    def __init__(self) -> None:
        self.make = lru_cache(maxsize=8)(make_case)
        self.lock = threading.Lock()

    def get(self, *place: Any) -> Case:
        """What `make_case` gives."""
        # Making one is NumPy and pandas, which hold the interpreter: two threads would not be faster.
        with self.lock:
            return self.make(*place)


@lru_cache(maxsize=4)
def table(source: str, encoding: str = "clean") -> Dataset:
    return SOURCES[source].load(encoding)


@lru_cache(maxsize=8)
def halves(source: str, number: int, encoding: str) -> tuple[Dataset, np.ndarray, np.ndarray, Any, Any, list[Any]]:
    """A data set in training and test part: rows and group codes of either, and the groups' names.

    Kept for a while: both distributions have the same, and a study asks for them again at its end."""
    data = table(source, encoding)
    train, test = partition.train_test_split(data.groups, test_share=TEST_SHARE, seed=number)
    codes, names = encode_groups(data.groups.iloc[train])
    test_codes, _ = encode_groups(data.groups.iloc[test], known=names)
    return data, train, test, codes, test_codes, names


def make_case(source: str, distribution: str, number: int, encoding: str = "clean") -> Case:
    """Split ``number``: a function of these four alone."""
    about = SOURCES[source]
    data, train, test, codes, test_codes, names = halves(source, number, encoding)
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, not {distribution!r}.")
    if distribution == "iid":
        parts = partition.iid(len(train), CLIENTS, seed=number)
    else:
        parts = partition.group_shares(codes, SHARES, seed=number)
    if about.by_size:
        parts = sorted(parts, key=len)
    kept = partition.proportional_validation(codes, parts, share=SET_ASIDE, seed=number)
    balanced = partition.balanced_validation(codes, kept.train, seed=number)
    used, aside = (np.sort(np.concatenate(rows)) for rows in (kept.train, kept.validation))
    encoder, transform = _encoding(data, train[used], encoding)
    features, padding = widened(transform(data.X.iloc[train]), about.widths[encoding])
    test_features, _ = widened(transform(data.X.iloc[test]), about.widths[encoding])
    labels = data.y.to_numpy().astype(np.float32)

    def rows(index: np.ndarray) -> Rows:
        return Rows(features[index], labels[train[index]], codes[index])

    def leaves(clients: list[np.ndarray], capacity: int) -> dict[str, Any]:
        return _padded([rows(index) for index in clients], capacity)

    def sizes(clients: list[np.ndarray]) -> np.ndarray:
        return np.array([len(index) for index in clients], np.int32)

    # Of a client's rows, the inner level of the paper's formulation reads the first, those that are not in the balanced set.
    capacity = largest_client(codes)
    joined = [np.concatenate(pair) for pair in zip(balanced.train, balanced.validation, strict=True)]
    everything, held_out = leaves(joined, capacity), leaves(balanced.validation, capacity // 4)
    # One set of arrays serves both; only where clients are dealt by size, whole sets keep the order they were dealt in.
    whole = leaves(kept.train, capacity) if about.by_size else everything
    all_sizes = sizes(joined)
    both = ClientData(everything, held_out, sizes(balanced.train), sizes(balanced.validation))
    paper = Clients(ClientData(everything, None, all_sizes), both)
    return Case(
        source, distribution, number, Model("logistic", about.widths[encoding]), list(map(str, names)), paper,
        Clients(ClientData(whole, None, all_sizes), ClientData(whole, whole, all_sizes, all_sizes)), rows(used), rows(aside),
        Rows(test_features, labels[test], test_codes), encoder, padding, list(map(str, data.X.columns)),
    )  # fmt: skip


def _encoding(data: Dataset, rows: np.ndarray, encoding: str) -> tuple[Encoder | None, Callable[[Any], np.ndarray]]:
    """The clean encoding takes its statistics from ``rows``; the paper's table is already numbers."""
    if encoding == "paper":
        return None, lambda frame: np.pad(frame.to_numpy(np.float32), ((0, 0), (0, 1)), constant_values=1)
    encoder = Encoder.learn(data.X.iloc[rows], every_value=True)
    return encoder, encoder.transform


def widened(features: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """``width`` columns, zeros in front (they change nothing), and how many zeros those are."""
    missing = width - features.shape[1]
    if missing < 0:
        raise ValueError(f"{features.shape[1]} columns do not fit into {width}.")
    return np.ascontiguousarray(np.pad(features, ((0, 0), (missing, 0)))), missing


def largest_client(codes: np.ndarray) -> int:
    """Rows that a client with the largest share of every group can have, in any distribution; rounded, so that a table with
    other groups has as many and shares the programs that read none."""
    share = max(SHARES) / sum(SHARES)
    most = share * (1 - SET_ASIDE) * len(codes) + 4 * int(codes.max() + 1)
    return -(-int(np.ceil(most)) // 128) * 128


def _padded(clients: list[Rows], capacity: int) -> dict[str, Any]:
    """One array a leaf, on JAX's device, so that all runs share it."""
    leaves = {}
    for name in Rows._fields:
        parts = [getattr(client, name) for client in clients]
        array = np.zeros((len(parts), capacity, *parts[0].shape[1:]), parts[0].dtype)
        for number, part in enumerate(parts):
            array[number, : len(part)] = part
        leaves[name] = jax.device_put(array)
    return leaves
