"""The splits of the fairness experiment: three tables, two ways to deal them to clients, any number of random splits.

Every split: 7:3 into training and test part, group proportions kept; the training part dealt to three clients; each client
sets 20 % of its rows (of every group) aside.  Nobody trains on the rows set aside: settings are chosen on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.datasets import Dataset, encode, load_adult, load_credit, partition
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.rows import padded
from fedbilevel.problem import ClientData
from fedbilevel.tables.columns import encode_groups

CLIENTS = 3
SHARES = (2, 2, 6)
TEST_SHARE = 0.3
SET_ASIDE = 0.2
DISTRIBUTIONS = ("iid", "noniid")


@dataclass(frozen=True)
class Case:
    """A table, its groups, and the paper's batch size for it.  ``width``: columns after encoding, rare categories counted."""

    name: str
    load: Callable[[], Dataset]
    batch_size: int
    width: int


CASES = {
    case.name: case
    for case in (
        Case("adult-sex", lambda: load_adult("sex"), 128, 112),
        Case("adult-race", lambda: load_adult("race"), 128, 112),
        Case("credit-status", lambda: load_credit("personal_status"), 32, 64),
    )
}


class Rows(NamedTuple):
    """Rows to evaluate a model on."""

    features: np.ndarray
    labels: np.ndarray
    groups: np.ndarray


class Split(NamedTuple):
    """``same``: each client's rows, which serve both levels; ``balanced``: the same rows with a group-balanced validation
    set taken out; ``train``, ``aside``, ``test``: all clients' training rows, the rows set aside, and the test part."""

    case: str
    distribution: str
    number: int
    model: Model
    groups: int
    capacity: int
    same: ClientData
    balanced: ClientData
    train: Rows
    aside: Rows
    test: Rows


@lru_cache(maxsize=4)
def table(name: str) -> Dataset:
    return CASES[name].load()


def make_split(case: Case, distribution: str, number: int) -> Split:
    """Split ``number`` of ``case``: a function of these three alone."""
    data = table(case.name)
    train, test = partition.train_test_split(data.groups, test_share=TEST_SHARE, seed=number)
    codes, names = encode_groups(data.groups.iloc[train])
    test_codes, _ = encode_groups(data.groups.iloc[test], known=names)
    if distribution == "iid":
        parts = partition.iid(len(train), CLIENTS, seed=number)
    elif distribution == "noniid":
        parts = partition.group_shares(codes, SHARES, seed=number)
    else:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, not {distribution!r}.")
    # Sorted by size, so that splits with clients of the same sizes share a compiled program.
    parts = sorted(parts, key=len)
    kept = partition.proportional_validation(codes, parts, share=SET_ASIDE, seed=number)
    used = np.sort(np.concatenate(kept.train))
    encoder = encode.clean_transformer(data.X.iloc[train[used]]).fit(data.X.iloc[train[used]])
    labels = data.y.to_numpy().astype(np.float32)
    features = widened(encode.feature_matrix(encoder, data.X.iloc[train]), case.width)

    def rows(index: Any) -> dict[str, np.ndarray]:
        return {"features": features[index], "labels": labels[train[index]], "groups": codes[index]}

    balanced = partition.balanced_validation(codes, kept.train, seed=number)
    capacity = _largest_client(codes)
    mine = [rows(index) for index in kept.train]
    pairs = [(rows(a), rows(b)) for a, b in zip(balanced.train, balanced.validation, strict=True)]
    aside = rows(np.concatenate(kept.validation))
    everybody = rows(used)
    small = capacity // 4
    return Split(
        case.name,
        distribution,
        number,
        Model("logistic", case.width),
        len(names),
        capacity,
        padded(ClientData.from_clients([(one, one) for one in mine]), capacity, capacity),
        padded(ClientData.from_clients(pairs), capacity, small),
        Rows(everybody["features"], everybody["labels"], everybody["groups"]),
        Rows(aside["features"], aside["labels"], aside["groups"]),
        Rows(
            widened(encode.feature_matrix(encoder, data.X.iloc[test]), case.width),
            labels[test],
            test_codes,
        ),
    )


def widened(features: np.ndarray, width: int) -> np.ndarray:
    """``width`` columns: zeros in front (they change nothing), the constant 1 behind."""
    missing = width - features.shape[1] - 1
    if missing < 0:
        raise ValueError(f"{features.shape[1]} columns do not fit into {width}.")
    rows = len(features)
    return np.concatenate([np.zeros((rows, missing), np.float32), features, np.ones((rows, 1), np.float32)], axis=1)


def _largest_client(codes: np.ndarray) -> int:
    """Rows of a client that got the largest share of every group."""
    largest = max(SHARES) / sum(SHARES)
    return int(np.ceil(largest * (1 - SET_ASIDE) * len(codes))) + 4 * int(codes.max() + 1)
