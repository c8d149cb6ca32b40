"""Clients' rows rearranged: training and validation rows joined, leaves added, padding to a common length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.fairness.formulation import REAL
from fedbilevel.problem import ClientData


def client_rows(data: ClientData, part: str, client: int) -> Tree:
    """One client's real rows."""
    size = int(getattr(data, f"{part}_sizes")[client])
    return jax.tree.map(lambda leaf: np.asarray(leaf)[client, :size], getattr(data, part))


def joined(data: ClientData) -> list[Tree]:
    """Per client its training rows followed by its validation rows (where it has any)."""
    clients = range(data.clients)
    if data.val is None:
        return [client_rows(data, "train", client) for client in clients]
    shared = data.val.keys()
    pairs = ((client_rows(data, "train", client), client_rows(data, "val", client)) for client in clients)
    return [{name: np.concatenate([train[name], val[name]]) for name in shared} for train, val in pairs]


def training_part(data: ClientData, which: str, capacity: int | None = None) -> ClientData:
    """The rows a single-level method trains on: "all" of a client's, or those in "train"."""
    if which == "all":
        clients = joined(data)
    else:
        clients = [client_rows(data, "train", client) for client in range(data.clients)]
    return padded(ClientData.from_clients(clients), capacity)


def padded(data: ClientData, capacity: int | None, val_capacity: int | None = None) -> ClientData:
    """The same clients with the sample axis lengthened to ``capacity`` rows; None leaves it."""
    train = _lengthened(data.train, capacity)
    val = None if data.val is None else _lengthened(data.val, val_capacity)
    return replace(data, train=train, val=val)


def marked(data: ClientData) -> ClientData:
    """``data`` with padding among the validation rows marked: a program that reads whole validation sets then serves clients
    of any sizes."""
    return data.with_mask(REAL, "val")


def _lengthened(tree: Tree, capacity: int | None) -> Tree:
    def longer(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        missing = 0 if capacity is None else capacity - array.shape[1]
        if missing < 0:
            raise ValueError(f"capacity={capacity} is below the {array.shape[1]} rows of the largest client.")
        return np.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)])

    return jax.tree.map(longer, tree)
