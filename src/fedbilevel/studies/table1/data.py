"""The data of Table 1: Adult by race and German Credit by status and sex, split, encoded and dealt to three clients.

7:3 into training and test part, group proportions kept.  The training part is dealt to the clients evenly ("iid"), or every
group 2:2:6 in an order of its own ("noniid").  Each client sets a fifth of its rows aside, group by group: nobody trains on
them, and learning rates are chosen on them.  Of the rest, the bilevel methods take the group-balanced validation set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel.datasets import Dataset, load_adult, load_credit, partition
from fedbilevel.fairness.encoder import TableEncoder
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.trainer import Clients
from fedbilevel.problem import ClientData
from fedbilevel.tables.columns import encode_groups

CLIENTS = 3
SHARES = (2, 2, 6)
TEST_SHARE = 0.3
SET_ASIDE = 0.2
DISTRIBUTIONS = ("iid", "noniid")
ENCODINGS = ("clean", "paper")


@dataclass(frozen=True)
class Case:
    """A dataset, and the paper's batch size for it.

    ``widths``: columns after either encoding, rare categories and the constant counted, rounded up to whole vectors.
    ``outer_batch``: validation rows a bilevel step reads, at most the smallest client's on nearly every split (Adult 115 and
    more, Credit mostly 12): one number, so that both distributions run the same program.
    """

    name: str
    load: Callable[[str], Dataset]
    batch_size: int
    outer_batch: int
    widths: dict[str, int]


CASES = {
    case.name: case
    for case in (
        Case("adult", lambda encoding: load_adult("race", encoding), 128, 64, {"clean": 112, "paper": 224}),
        Case("credit", lambda encoding: load_credit("personal_status", encoding), 32, 8, {"clean": 64, "paper": 24}),
    )
}


class Rows(NamedTuple):
    """Rows to measure a model on."""

    features: np.ndarray
    labels: np.ndarray
    groups: np.ndarray


@dataclass(frozen=True, eq=False)
class Split:
    """``paper``: with a group-balanced validation set; ``cells``: both levels read all rows.  ``padding``: empty columns in
    front of the encoded ones.  ``train``: all rows trained on; ``validation``: those set aside."""

    dataset: str
    distribution: str
    number: int
    model: Model
    names: list[str]
    paper: Clients
    cells: Clients
    train: Rows
    validation: Rows
    test: Rows
    encoder: TableEncoder | None
    padding: int
    columns: list[str]


@lru_cache(maxsize=4)
def table(name: str, encoding: str) -> Dataset:
    return CASES[name].load(encoding)


def make_split(dataset: str, distribution: str, number: int, encoding: str) -> Split:
    """Split ``number``: a function of these four alone."""
    case = CASES[dataset]
    data = table(dataset, encoding)
    train, test = partition.train_test_split(data.groups, test_share=TEST_SHARE, seed=number)
    codes, names = encode_groups(data.groups.iloc[train])
    test_codes, _ = encode_groups(data.groups.iloc[test], known=names)
    if distribution == "iid":
        parts = partition.iid(len(train), CLIENTS, seed=number)
    else:
        parts = partition.group_shares(codes, SHARES, seed=number)
    kept = partition.proportional_validation(codes, parts, share=SET_ASIDE, seed=number)
    balanced = partition.balanced_validation(codes, kept.train, seed=number)
    used = np.sort(np.concatenate(kept.train))
    aside = np.sort(np.concatenate(kept.validation))
    width = case.widths[encoding]
    encoder, transform = _encoding(data, train[used], encoding)
    features, padding = widened(transform(data.X.iloc[train]), width)
    test_features, _ = widened(transform(data.X.iloc[test]), width)
    labels = data.y.to_numpy().astype(np.float32)

    def rows(index: np.ndarray) -> Rows:
        return Rows(features[index], labels[train[index]], codes[index])

    capacity = largest_client(codes)
    pairs = list(zip(balanced.train, balanced.validation, strict=True))
    ordered = [np.concatenate(pair) for pair in pairs]
    sizes = np.array([len(part) for part in ordered], np.int32)
    everything = _padded([rows(part) for part in ordered], capacity)
    held_out = _padded([rows(val) for _, val in pairs], capacity // 4)
    inner_sizes = np.array([len(part) for part, _ in pairs], np.int32)
    val_sizes = np.array([len(val) for _, val in pairs], np.int32)
    # Of a client's rows, the inner level of the paper's formulation reads the first, those that are not in the balanced set.
    model = ClientData(everything, None, sizes)
    return Split(
        dataset,
        distribution,
        number,
        Model("logistic", width),
        [str(name) for name in names],
        Clients(model, ClientData(everything, held_out, inner_sizes, val_sizes)),
        Clients(model, ClientData(everything, everything, sizes, sizes)),
        rows(used),
        rows(aside),
        Rows(test_features, labels[test], test_codes),
        encoder,
        padding,
        [str(column) for column in data.X.columns],
    )


def _encoding(
    data: Dataset, rows: np.ndarray, encoding: str
) -> tuple[TableEncoder | None, Callable[[Any], np.ndarray]]:
    """The clean encoding takes its statistics from ``rows``; the paper's table is already numbers."""
    if encoding == "paper":
        return None, lambda frame: np.concatenate(
            [frame.to_numpy(np.float32), np.ones((len(frame), 1), np.float32)], axis=1
        )
    encoder = TableEncoder.learn(data.X.iloc[rows])
    return encoder, encoder.transform


def widened(features: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """``width`` columns, zeros in front (they change nothing), and how many zeros those are."""
    missing = width - features.shape[1]
    if missing < 0:
        raise ValueError(f"{features.shape[1]} columns do not fit into {width}.")
    return np.ascontiguousarray(np.pad(features, ((0, 0), (missing, 0)))), missing


def largest_client(codes: np.ndarray) -> int:
    """Rows that a client with the largest share of every group can have, in any distribution."""
    share = max(SHARES) / sum(SHARES)
    return int(np.ceil(share * (1 - SET_ASIDE) * len(codes))) + 4 * int(codes.max() + 1)


def _padded(clients: list[Rows], capacity: int) -> dict[str, Any]:
    """One array a leaf, on JAX's device, so that all runs share it."""
    whole = {}
    for name in Rows._fields:
        parts = [getattr(client, name) for client in clients]
        array = np.zeros((len(parts), capacity, *parts[0].shape[1:]), parts[0].dtype)
        for number, part in enumerate(parts):
            array[number, : len(part)] = part
        whole[name] = jax.device_put(array)
    return whole
