"""How the clients of a simulation are laid out: together, in chunks, in groups of equal size, or over devices.

A `Layout` is static (part of the compiled program); a `Fleet` holds the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.problem import ClientData
from fedbilevel.sampling import LocalData, PackedLeaves

AXIS = "clients"
CHUNK = 16
"""Clients vmapped together when there are more than twice as many: beyond about ten a step's minibatches leave the cache
(measured by ``benchmarks/run.py clients``)."""
PADDING = 64 * 2**20
"""Bytes of padding from which on clients whose whole sets are masked run in bands of about one size.  In the default fair fit
of 6,000 rows of Adult, half of them at one of 16 clients, 22 MB of padding cost 0.9 processor seconds a fit, and a second band
3.0 to compile, once: from about 70 MB on the first fit gains already."""


@dataclass(frozen=True)
class Layout:
    """``clients`` are real ones; ``places`` counts the ghosts that fill up the last device.  ``padded``: the parts whose
    sample axis holds padding that no mask marks.  ``groups``: the ``(positions, train rows, val rows)`` of clients that run
    together when such a part is read whole: those of one size where it is cut, those of about one size where it is masked.
    ``cohort``: how many clients a round samples; None for all.  ``proportional``: they are drawn in proportion to their
    weights.  ``zeros``: some weights are 0.  ``secure``: averages are those of secure sums.  ``stretch``: for how many rounds
    a fleet holds the clients that they sample, and no others; 0 where it holds everybody.
    """

    clients: int
    places: int
    padded: tuple[str, ...] = ()
    chunk: int | None = None
    cohort: int | None = None
    proportional: bool = False
    zeros: bool = False
    dropout: bool = False
    groups: tuple[tuple[tuple[int, ...], int, int], ...] | None = None
    mesh: Any = None
    secure: bool = False
    stretch: int = 0

    @property
    def gathers_cohort(self) -> bool:
        """Whether only the sampled clients are computed; otherwise all are, and the others' results are dropped."""
        return self.cohort is not None and self.groups is None and (self.mesh is None or self.stretch > 0)

    @property
    def masks(self) -> bool:
        """Whether a round may compute clients whose replies do not count."""
        sampled = self.cohort is not None and (self.proportional or not self.gathers_cohort or self.mesh is not None)
        return self.dropout or self.zeros or sampled or self.places != self.clients


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """Who takes part in the rounds from ``first`` on: ``positions`` in the fleet, and how often each was drawn, leaves
    ``[rounds, cohort]``.

    On several hosts both are of the members that this one holds, filled up with nobody.  ``ranks``: their places in the
    cohort; ``order``: where each place of the cohort is among the members of all hosts, one after the other.
    """

    first: jax.Array
    positions: jax.Array
    times: jax.Array
    ranks: jax.Array | None = None
    order: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fleet:
    """The arrays of all clients at hand (on one device of several: its share).  ``ids`` are global client numbers;
    ``weight`` is that of all clients anywhere together; ``ends`` is where the share of each of them ends on the line
    that cohorts are drawn from, if they are drawn in proportion; ``drawn``: cohorts that were drawn before;
    ``packed``: what `LocalData` has under this name, of all clients."""

    train: Tree
    val: Tree
    train_sizes: jax.Array
    val_sizes: jax.Array
    weights: jax.Array
    ids: jax.Array
    dropout: jax.Array
    weight: jax.Array
    ends: jax.Array | None = None
    drawn: Drawn | None = None
    packed: PackedLeaves = field(default_factory=dict)


def map_clients(
    function: Callable[[LocalData, Tree], Any], fleet: Fleet, per_client: Tree, layout: Layout, positions: Any = None
) -> Any:
    """``function(data of one client, its slice of per_client)`` for all clients, results stacked in their order.

    ``positions`` picks some of the clients (their ``per_client`` is then already picked).
    """
    if layout.groups is not None:
        return _by_groups(function, fleet, per_client, layout)
    count = fleet.ids.shape[0] if positions is None else positions.shape[0]
    chunk = layout.chunk
    small = chunk is None or count <= 2 * chunk
    if small and positions is None and not layout.padded:
        sizes = (fleet.train_sizes, fleet.val_sizes)
        own = LocalData(fleet.train, fleet.val, fleet.ids, *sizes, number=fleet.ids, packed=fleet.packed)
        return jax.vmap(function)(own, per_client)
    numbers = jnp.arange(count, dtype=jnp.int32) if positions is None else positions
    each = (fleet.ids, fleet.train_sizes, fleet.val_sizes)
    rows = (fleet.train, fleet.val) if small and positions is None else None

    def one(item: tuple[Any, Any, Any, Any]) -> Any:
        place, (number, train_size, val_size), rows, own = item
        shared = (place, train_size, val_size, True, number, layout.padded)
        data = LocalData(fleet.train, fleet.val, *shared, own=rows, packed=fleet.packed)
        return function(data, own)

    items = (numbers, each if positions is None else [leaf[positions] for leaf in each], rows, per_client)
    return jax.vmap(one)(items) if small else jax.lax.map(one, items, batch_size=chunk)


def _by_groups(function: Callable[[LocalData, Tree], Any], fleet: Fleet, per_client: Tree, layout: Layout) -> Any:
    assert layout.groups is not None
    pieces: list[Any] = []
    order: list[int] = []
    for positions, train_rows, val_rows in layout.groups:
        index = np.asarray(positions)
        data = LocalData(
            jax.tree.map(lambda leaf, index=index, rows=train_rows: picked(leaf, index)[:, :rows], fleet.train),
            jax.tree.map(lambda leaf, index=index, rows=val_rows: picked(leaf, index)[:, :rows], fleet.val),
            jnp.arange(len(index), dtype=jnp.int32),
            picked(fleet.train_sizes, index),
            picked(fleet.val_sizes, index),
            number=picked(fleet.ids, index),
        )
        own = jax.tree.map(lambda leaf, index=index: picked(leaf, index), per_client)
        few = layout.chunk is None or len(index) <= 2 * layout.chunk
        if few:
            pieces.append(jax.vmap(function)(data, own))
        else:
            pieces.append(jax.lax.map(lambda item: function(*item), (data, own), batch_size=layout.chunk))
        order.extend(positions)
    back = np.argsort(np.asarray(order))
    return jax.tree.map(lambda *parts: picked(jnp.concatenate(parts), back), *pieces)


STRETCHES = 4
"""Stretches of neighbours up to which clients are picked by slices."""


def picked(leaf: jax.Array, index: np.ndarray) -> jax.Array:
    """``leaf[index]``.  Slices instead of gathers: about 30 % less to compile, of four methods on clients of two sizes."""
    first = np.flatnonzero(np.diff(index, prepend=index[0] - 2) != 1)
    if len(first) > STRETCHES:
        return leaf[index]
    ends = [*first[1:], len(index)]
    parts = [jax.lax.slice_in_dim(leaf, index[a], index[b - 1] + 1) for a, b in zip(first, ends, strict=True)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def size_groups(data: ClientData) -> tuple[tuple[tuple[int, ...], int, int], ...]:
    """Clients by (training rows, validation rows), padding that a mask marks being rows."""
    spans = (data.samples(part) if data.marked(part) else getattr(data, f"{part}_sizes") for part in data.parts)
    return _together([np.broadcast_to(span, data.clients) for span in spans])


def size_bands(data: ClientData, parts: set[str]) -> tuple[tuple[tuple[int, ...], int, int], ...] | None:
    """Clients of about one size, for ``parts`` that are read whole with a mask: at most a fifth of their rows is padding.

    None unless that spares half of all rows, and `PADDING`.  Sizes are rounded so that clients of nearly the same sizes share a
    program.
    """
    spans = [np.full(data.clients, data.samples(part)) for part in data.parts]
    spared = held = 0.0
    for place, part in enumerate(data.parts):
        if part in parts:
            spans[place] = np.minimum(_rounded(getattr(data, f"{part}_sizes")), data.samples(part))
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(getattr(data, part)))
            held, spared = held + size, spared + size * (1 - spans[place].mean() / data.samples(part))
    return _together(spans) if spared >= max(PADDING, held / 2) else None


def _rounded(sizes: np.ndarray) -> np.ndarray:
    """Up to the next of 4, 5, 6 and 7 times a power of two."""
    unit = 2.0 ** np.floor(np.log2(np.maximum(sizes, 4)) - 2)
    return np.asarray(np.ceil(sizes / unit) * unit, int)


def _together(spans: list[np.ndarray]) -> tuple[tuple[tuple[int, ...], int, int], ...]:
    """Clients by their rows in each part."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for client, sizes in enumerate(zip(*(span.tolist() for span in spans), strict=True)):
        groups.setdefault(sizes, []).append(client)
    return tuple((tuple(members), sizes[0], sizes[-1]) for sizes, members in sorted(groups.items()))


def host_fleet(data: ClientData, weights: np.ndarray, dropout: float, weight: Any = 1, ends: Any = None) -> Fleet:
    """The clients of ``data`` as arrays of this process, not yet on a device."""
    ids = np.arange(data.clients, dtype=np.int32)
    val_sizes = np.zeros_like(ids) if data.val is None else data.val_sizes
    sizes = (data.train_sizes, val_sizes)
    return Fleet(data.train, data.val, *sizes, weights, ids, np.asarray(dropout, np.float32), weight, ends)  # type: ignore[arg-type]


LINE = 2**31 - 1
"""The length of the line that cohorts are drawn from: as many places as 32 bits can tell apart without a sign."""


def ends_of_shares(weights: np.ndarray) -> np.ndarray:
    """Every client's share of the line, in proportion to its weight, by where it ends."""
    ends = np.cumsum(weights, dtype=np.float64)
    return np.asarray(np.floor(ends / ends[-1] * LINE), np.int32)
