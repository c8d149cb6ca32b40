"""Clients on disk, for populations that do not fit into memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel import storage
from fedbilevel._version import __version__
from fedbilevel.calculus import Tree
from fedbilevel.problem import ClientData

FORMAT = 1
TOGETHER = 256
"""Clients that are checked and written together."""


class Leaf(NamedTuple):
    """One leaf of a client's rows: its part, its type, and the shape of one row."""

    part: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(self.dtype.itemsize * np.prod(self.shape, dtype=int))


class ClientStore:
    """The rows of many clients in a folder, where `simulate` takes a `ClientData`.

    With ``participation``, a round reads the rows of its cohort and no others; the cohorts of the next rounds are read while
    the present one computes.  The numbers are those of the same data in memory, bit for bit.  `write` makes the folder.

    Args:
        folder: What `write` made.

    Raises:
        ValueError: The folder was not made by `write`, or by another version.

    Examples:
        >>> import fedbilevel as fb, numpy as np, tempfile
        >>> folder = tempfile.mkdtemp() + "/clients"
        >>> fb.ClientStore.write(folder, (np.full((3 + number % 2, 2), number) for number in range(1000)))
        ClientStore(1000 clients; train 3 to 4 rows of int64[2])
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        try:
            about = json.loads((path / "store.json").read_text())
            if about["format"] != FORMAT:
                raise ValueError(
                    f"its format is {about['format']}, this is fedbilevel {__version__} with format {FORMAT}"
                )
            file = os.open(path / "rows.bin", os.O_RDONLY)
            sizes = np.load(path / "sizes.npy", mmap_mode="r")
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path} is not a folder that ClientStore.write made ({getattr(error, 'strerror', None) or error})."
            ) from error
        leaves = [Leaf(part, np.dtype(dtype), tuple(shape)) for part, dtype, shape in about["leaves"]]
        row = [sum(leaf.row_bytes for leaf in leaves if leaf.part == part) for part in about["parts"]]
        # One number a client, or one for all where they have the same sizes: then opening looks at no list of clients.
        self.lengths = sizes @ np.array(row, np.int64)
        self.ends = np.cumsum(self.lengths)
        self.folder, self.about, self.leaves, self.file = path, about, leaves, OpenFile(file)
        if hasattr(os, "posix_fadvise"):  # what lies around a client is not needed
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        self.outline = _outline(about, leaves, sizes)
        """Shapes, types and sizes of all clients, as a `ClientData` whose numbers are one and the same 0 and take no memory."""
        length = int(self.ends[-1]) * (about["clients"] if len(sizes) == 1 else 1)
        if os.fstat(file).st_size != length:
            raise ValueError(f"{path} is damaged: rows.bin has not the {length:,} bytes it was written with.")

    def __repr__(self) -> str:
        return repr(self.outline).replace("ClientData", "ClientStore", 1)

    @property
    def clients(self) -> int:
        return self.outline.clients

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of everything in the store."""
        return str(self.about["sha256"])

    @classmethod
    def write(cls, folder: str | Path, clients: Iterable[Any], mask: str | None = None) -> ClientStore:
        """Write ``clients``, any iterable, into a new folder.  It appears when all are written, or not at all.

        An item is a pair ``(train, val)`` or the training rows alone, as for `ClientData.from_clients`, or a `ClientData` of
        several clients.  Trees are dicts, lists and tuples of arrays.  ``mask="name"``: see `ClientData.with_mask`.
        """
        target = Path(folder)
        if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
            raise ValueError(f"folder={str(target)!r} exists already: choose another one, or remove it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, first, sizes, count = hashlib.sha256(), None, [], 0
        with storage.draft_folder(target) as draft:
            with (draft / "rows.bin").open("wb") as file:
                for group in _groups(clients):
                    try:
                        data = group if isinstance(group, ClientData) else ClientData.from_clients(group)
                        data.check_finite()
                        structure, leaves = _described(data)
                        first = first or (structure, leaves)
                        if first != (structure, leaves):
                            raise ValueError("their trees, types or row shapes are not those of the clients before.")
                        if mask is not None:
                            data.only(0).with_mask(mask, *data.parts)
                    except (TypeError, ValueError) as error:
                        raise type(error)(
                            f"In the clients from number {count} on, counted from 0 there: {error}"
                        ) from error
                    for record in _records(data):
                        digest.update(record)
                        file.write(record)
                    sizes.append(np.stack([getattr(data, f"{part}_sizes") for part in data.parts], axis=1))
                    count += data.clients
                if first is None:
                    raise ValueError("clients has no items: a store needs at least one client.")
                file.flush()
                os.fsync(file.fileno())
            each = np.concatenate(sizes)
            structure, leaves = first
            about = {"format": FORMAT, "version": __version__, "clients": count, "mask": mask, "parts": list(structure)}
            about |= {"structure": structure, "leaves": [(leaf.part, leaf.dtype.str, leaf.shape) for leaf in leaves]}
            about |= {"samples": each.max(axis=0).tolist()}
            digest.update(json.dumps(about).encode() + each.tobytes())
            np.save(draft / "sizes.npy", each[:1] if (each == each[0]).all() else each)
            storage.write_json(draft / "store.json", about | {"sha256": digest.hexdigest()})
        return cls(target)

    def _extents(self, numbers: np.ndarray) -> tuple[list[int], list[int]]:
        """Where the rows of these clients begin in the file, and how many bytes they take."""
        if len(self.lengths) == 1:
            return (numbers * self.lengths[0]).tolist(), np.broadcast_to(self.lengths, len(numbers)).tolist()
        lengths = self.lengths[numbers]
        return (self.ends[numbers] - lengths).tolist(), lengths.tolist()

    def read(self, numbers: np.ndarray, places: int) -> tuple[Tree, Tree]:
        """``(train, val)`` of the clients of these ``numbers``, at the first of so many ``places``; the others are zeros."""
        numbers = np.asarray(numbers, np.int64)
        arrays = [np.zeros((places, self.outline.samples(leaf.part), *leaf.shape), leaf.dtype) for leaf in self.leaves]
        sizes = {part: np.asarray(getattr(self.outline, f"{part}_sizes")[numbers]) for part in self.outline.parts}
        alike, kinds = np.unique(np.stack(list(sizes.values()), axis=1), axis=0, return_inverse=True)
        extents = self._extents(numbers)
        if hasattr(os, "posix_fadvise"):  # the disk can serve many requests at a time
            for offset, length in zip(*extents, strict=True):
                os.posix_fadvise(self.file.number, offset, length, os.POSIX_FADV_WILLNEED)
        for kind, rows in enumerate(alike):
            here = np.flatnonzero(kinds.ravel() == kind)
            count = dict(zip(sizes, rows.tolist(), strict=True))
            lengths = [leaf.row_bytes * count[leaf.part] for leaf in self.leaves]
            records = np.empty((len(here), sum(lengths)), np.uint8)
            for record, place in zip(records, here.tolist(), strict=True):
                if os.preadv(self.file.number, [record], extents[0][place]) != len(record):
                    raise ValueError(
                        f"{self.folder} was changed: rows.bin ends within client {numbers[place]}. Write it anew."
                    )
            ends = np.cumsum(lengths)
            for leaf, array, end, length in zip(self.leaves, arrays, ends, lengths, strict=True):
                own = np.ascontiguousarray(records[:, end - length : end]).view(leaf.dtype)
                array[here, : count[leaf.part]] = own.reshape(len(here), count[leaf.part], *leaf.shape)
        trees = _trees(self.about["structure"], arrays)
        if self.about["mask"] is not None:
            for part, own_sizes in sizes.items():
                mask = np.zeros(
                    (places, self.outline.samples(part)), getattr(self.outline, part)[self.about["mask"]].dtype
                )
                mask[: len(numbers)] = np.arange(mask.shape[1]) < own_sizes[:, None]
                trees[part][self.about["mask"]] = mask
        return trees["train"], trees.get("val")

    def load(self) -> ClientData:
        """All clients, in memory."""
        train, val = self.read(np.arange(self.clients), self.clients)
        sizes = (np.array(self.outline.train_sizes), None if val is None else np.array(self.outline.val_sizes))
        return ClientData(train, val, *sizes, mask=self.outline.mask)


class OpenFile:
    """An open file that is closed with the last reference to it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def _groups(clients: Iterable[Any]) -> Iterator[Any]:
    """Sets of several clients as they come, single clients many at a time."""
    held: list[Any] = []
    for item in clients:
        if held and (isinstance(item, ClientData) or len(held) == TOGETHER):
            yield held
            held = []
        if isinstance(item, ClientData):
            yield item
        else:
            held.append(item)
    if held:
        yield held


def _described(data: ClientData) -> tuple[dict[str, Any], list[Leaf]]:
    """The trees of the parts with numbers for their leaves, and the leaves in that order."""
    leaves: list[Leaf] = []
    structure = {}
    for part in data.parts:
        flat, form = jax.tree.flatten(getattr(data, part))
        numbers = jax.tree.unflatten(form, range(len(leaves), len(leaves) + len(flat)))
        structure[part] = _as_json(numbers)
        leaves += [Leaf(part, np.dtype(leaf.dtype), tuple(leaf.shape[2:])) for leaf in flat]
    return structure, leaves


def _as_json(tree: Tree) -> Any:
    """Numbers are leaves, and lists begin with what they are."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {key: _as_json(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return [type(tree).__name__, *map(_as_json, tree)]
    raise TypeError(f"a store keeps dicts with texts as keys, lists and tuples of arrays, not {type(tree).__name__}.")


def _trees(structure: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(structure, int):
        return arrays[structure]
    if isinstance(structure, dict):
        return {key: _trees(value, arrays) for key, value in structure.items()}
    inside = [_trees(value, arrays) for value in structure[1:]]
    return tuple(inside) if structure[0] == "tuple" else inside


def _outline(about: dict[str, Any], leaves: list[Leaf], sizes: np.ndarray) -> ClientData:
    samples = dict(zip(about["parts"], about["samples"], strict=True))
    zeros = [
        np.broadcast_to(np.zeros((), leaf.dtype), (about["clients"], samples[leaf.part], *leaf.shape))
        for leaf in leaves
    ]
    trees = _trees(about["structure"], zeros)
    if about["mask"] is not None:
        for part, tree in trees.items():
            kind = next((leaf.dtype for leaf in jax.tree.leaves(tree) if leaf.dtype.kind == "f"), np.float32)
            tree[about["mask"]] = np.broadcast_to(np.zeros((), kind), (about["clients"], samples[part]))
    columns = [np.broadcast_to(np.asarray(column, np.int32), about["clients"]) for column in np.transpose(sizes)]
    val_sizes = columns[1] if len(columns) > 1 else None
    return ClientData(trees["train"], trees.get("val"), columns[0], val_sizes, mask=about["mask"])


def _records(data: ClientData) -> Iterator[bytes]:
    """What is written for each client: its leaves one after the other, without padding."""
    leaves = [(part, np.asarray(leaf)) for part in data.parts for leaf in jax.tree.leaves(getattr(data, part))]
    sizes = {part: getattr(data, f"{part}_sizes").tolist() for part in data.parts}
    for client in range(data.clients):
        yield b"".join(leaf[client, : sizes[part][client]].tobytes() for part, leaf in leaves)
