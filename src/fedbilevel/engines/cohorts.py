"""Runs that hold no more than the clients of the next rounds: whatever the population, a round costs what its cohort costs.

Cohorts are a function of the seed and the round, so they are known ahead.  Rounds come in stretches.  The rows of all clients
that a stretch asks are one small fleet, read while the stretch before computes; their local states are fetched when it begins
and put back when it is over.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedbilevel.calculus import Tree, bytes_of
from fedbilevel.engines.fleet import Drawn, Fleet, Layout
from fedbilevel.engines.hosts import first_writes, own_part, share_out, specs_like
from fedbilevel.engines.rounds import draw_ahead
from fedbilevel.engines.store import OpenFile
from fedbilevel.problem import ClientData

TOKEN = 64
"""Bytes at the beginning of a file of local states: a text that a checkpoint repeats, so that the two are known to belong
together."""
PLACES = 2_000
"""Clients of a stretch, at most, unless a single cohort has more: many, so that a call of the program is worth its while..."""
FLEET_BYTES = 2**26
"""...but no more than so many bytes of rows."""
MANY_BYTES = 2**26
"""Local states of a population in memory that are too many to be copied in every call of the program."""


class Source(Protocol):
    """Where the rows of clients are."""

    def read(self, numbers: np.ndarray, places: int) -> tuple[Tree, Tree]: ...


def stretch(cohort: int, client_bytes: int) -> int:
    """For how many rounds the clients are held together."""
    return max(1, min(PLACES // cohort, FLEET_BYTES // max(1, cohort * client_bytes)))


class LocalStates:
    """The local states of all clients, in memory or in a file; those that were never kept are what ``enrolled`` is.

    Clients get a place each in the order in which they are first kept.  So the clients of a stretch lie side by side when they
    are new, which in a large population nearly all are, and what is held grows with the clients that took part.  In a file
    every place is there twice.  The first time after `settled` that a client's state is kept it goes to the copy that the
    checkpoint does not mean, so a run that is killed finds all as it was when it was saved.  ``places``: of every client,
    counted from 1, negative where the second copy holds its state, 0 if it was never kept.
    """

    def __init__(self, clients: int, enrolled: Tree, file: Path | None, folder: Path | None, resumed: bool) -> None:
        """``file``: the name of a file that stays; ``folder``: where a file is that goes with the run; neither: in memory.

        ``resumed``: the file holds an earlier part of the run, and `go_on` comes next.
        """
        self.enrolled, self.structure = jax.tree.flatten(jax.tree.map(np.asarray, enrolled))
        self.size = sum(leaf.nbytes for leaf in self.enrolled)
        self.places = np.zeros(clients, np.int32)
        self.unsettled = np.zeros(clients, bool)
        self.taken = 0
        self.done, self.token = 0, first_writes(secrets.token_hex(TOKEN // 2))
        self.handle: OpenFile | None = None
        if file is None and folder is None:
            self.memory = np.empty((clients, self.size), np.uint8)  # takes no memory before it is written to
            return
        try:
            if file is None:
                number, name = tempfile.mkstemp(dir=folder)
                Path(name).unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                number = os.open(file, os.O_RDWR | os.O_CREAT | (0 if resumed else os.O_TRUNC), 0o666)
            self.handle = OpenFile(number)
            if not resumed:
                os.truncate(number, TOKEN + 2 * clients * self.size)
                os.pwrite(number, self.token.encode(), 0)
        except OSError as error:
            where = file or f"a temporary file in {folder}"
            raise OSError(f"Cannot keep the clients' local states in {where}: {error.strerror or error}.") from error

    def go_on(self, places: np.ndarray, token: str, done: int) -> bool:
        """As they were `settled` then; False if this is not the file of that time."""
        assert self.handle is not None
        if os.pread(self.handle.number, TOKEN, 0) != token.encode():
            return False
        self.places[:], self.token, self.done = places, token, done
        self.taken = int(np.abs(places).max(initial=0))
        return True

    def sync(self) -> None:
        """Everything that was kept is on the disk; a checkpoint can be written, and then all is `settled`."""
        assert self.handle is not None
        os.fsync(self.handle.number)

    def settled(self) -> None:
        self.unsettled[:] = False

    @property
    def kept(self) -> np.ndarray:
        """The numbers of the clients whose states were ever kept."""
        return np.flatnonzero(self.places)

    def read(self, numbers: np.ndarray, places: int | None = None) -> Tree:
        """The states of the clients of these ``numbers``, at the first of so many ``places``."""
        count = len(numbers) if places is None else places
        kept = np.flatnonzero(self.places[numbers])
        records = np.empty((len(kept), self.size), np.uint8)
        if self.handle is None:
            records[:] = self.memory[self.places[numbers[kept]] - 1]
        else:
            for here, offset in self._runs(numbers[kept]):
                together = np.empty((len(here), self.size), np.uint8)
                os.preadv(self.handle.number, [together.data], offset)
                records[here] = together
        leaves, end = [], 0
        for start in self.enrolled:
            own = np.ascontiguousarray(records[:, end : end + start.nbytes])
            leaf = np.empty((count, *start.shape), start.dtype)
            leaf[:] = start
            leaf[kept] = own.view(start.dtype).reshape(len(kept), *start.shape)
            leaves.append(leaf)
            end += start.nbytes
        return jax.tree.unflatten(self.structure, leaves)

    def keep(self, numbers: np.ndarray, states: Tree) -> None:
        """``states`` of these clients, at the first places of its leaves."""
        count = len(numbers)
        parts = [np.ascontiguousarray(leaf[:count]).reshape(count, -1) for leaf in jax.tree.leaves(own_part(states))]
        records = np.concatenate([part.view(np.uint8).reshape(count, -1) for part in parts], axis=1)
        new = numbers[self.places[numbers] == 0]
        if self.handle is not None:
            settled = numbers[~self.unsettled[numbers]]
            self.places[settled] *= -1
            self.unsettled[settled] = True
        self.places[new] = np.arange(self.taken + 1, self.taken + 1 + len(new))
        self.taken += len(new)
        if self.handle is None:
            self.memory[self.places[numbers] - 1] = records
            return
        for here, offset in self._runs(numbers):
            os.pwrite(self.handle.number, np.ascontiguousarray(records[here]).data, offset)

    def _runs(self, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Which of these clients lie side by side in the file, in order, and where."""
        places = self.places[numbers].astype(np.int64)
        copies = np.where(places > 0, places - 1, len(self.places) - places - 1)
        order = np.argsort(copies)
        for here in np.split(order, np.flatnonzero(np.diff(copies[order]) != 1) + 1):
            if len(here):
                yield here, TOKEN + int(copies[here[0]]) * self.size


class Stretch(NamedTuple):
    """The clients of a few rounds, by number, and their rows."""

    clients: np.ndarray
    fleet: Fleet


class Visits:
    """One run's way through the population."""

    def __init__(
        self, source: Source, data: ClientData, weights: np.ndarray, fleet: Fleet, layout: Layout, seed: int,
        states: LocalStates,
    ) -> None:  # fmt: skip
        """``data`` tells sizes, if not rows; ``fleet`` what all clients have in common."""
        self.source, self.data, self.weights, self.common = source, data, weights, fleet
        self.layout, self.seed, self.states = layout, seed, states
        self.reader = ThreadPoolExecutor(1, "read ahead")
        self.ahead: dict[int, Future[Stretch]] = {}

    def stretch(self, number: int) -> Stretch:
        """That of round ``number``; the next one is read meanwhile."""
        place = number // self.layout.stretch
        self.ahead = {one: self.ahead.get(one) or self.reader.submit(self._read, one) for one in (place, place + 1)}
        return self.ahead[place].result()

    def _read(self, place: int) -> Stretch:
        assert self.layout.cohort is not None
        first = np.int32(place * self.layout.stretch)
        numbers, times = map(np.asarray, draw_ahead(self.layout, self.common.ends, np.uint32(self.seed), first))
        if self.layout.mesh is None:
            clients, positions = np.unique(numbers, return_inverse=True)
            places = self.layout.stretch * self.layout.cohort
            drawn = Drawn(first, positions.reshape(times.shape).astype(np.int32), times)  # type: ignore[arg-type]
        else:
            clients, places, drawn = self._shared(first, numbers, times)
        train, val = self.source.read(clients, places)
        spare = np.zeros(places - len(clients), np.int32)

        def of_clients(values: Any) -> np.ndarray:
            return np.concatenate([np.asarray(values[clients]), spare.astype(values.dtype)])

        sizes = [of_clients(self.data.train_sizes), of_clients(self.data.val_sizes) if val is not None else spare]
        rest = (self.common.dropout, self.common.weight, None, drawn)
        before = 0 if self.layout.mesh is None else jax.process_index() * self.data.clients
        ids = np.concatenate([(before + clients).astype(np.int32), spare])
        fleet = Fleet(train, val, *sizes, of_clients(self.weights), ids, *rest)  # type: ignore[arg-type, call-arg]
        return Stretch(clients, share_out(fleet, specs_like(fleet), self.layout))

    def _shared(self, first: Any, numbers: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, int, Drawn]:
        """The clients that this process holds of the cohorts, the places it needs, and who takes part.

        All processes hold equally many places: as many as the one that is asked most, rounded up so that few programs serve
        all stretches.
        """
        owners = numbers // self.data.clients
        held = owners[..., None] == np.arange(jax.process_count())
        turns = np.take_along_axis(held.cumsum(axis=1), owners[..., None], axis=2)[..., 0] - 1
        step = max(1, numbers.shape[1] // 8)
        members = -(-int(held.sum(axis=1).max()) // step) * step
        mine = held[..., jax.process_index()]
        rounds, ranks = np.nonzero(mine)
        clients, positions = np.unique(numbers[mine] - jax.process_index() * self.data.clients, return_inverse=True)
        places = len(numbers) * members
        # Nobody's places are behind those of everybody, one for each of a round.
        shape = (len(numbers), members)
        filled = [np.broadcast_to(places + np.arange(members), shape), np.zeros(shape), np.zeros(shape)]
        rows = [np.array(values, np.int32) for values in filled]
        for row, values in zip(rows, (positions, times[mine], ranks), strict=True):
            row[rounds, turns[mine]] = values
        order = (owners * members + turns).astype(np.int32)
        return clients, places + members, Drawn(first, rows[0], rows[1], rows[2], order)  # type: ignore[arg-type]


class Held(NamedTuple):
    """Whose local states a moment has at hand (``clients``), of the run of ``visits``.  They may not have been kept yet."""

    visits: Visits
    clients: np.ndarray

    def keep(self, done: int, local: Tree) -> None:
        """Put the local states that are at hand after ``done`` rounds back to all others."""
        states = self.visits.states
        if done < states.done:
            raise RuntimeError(
                f"This run has gone on to round {states.done} and cannot go back to {done}: start it anew."
            )
        if len(self.clients):
            states.keep(self.clients, local)
        states.done = done


class ReadLater:
    """Something about each client of a store after a run, read when asked for: ``result.inner[7]``, ``result.inner[[3, 8]]``.

    It is valid until the run is taken up again.
    """

    def __init__(self, states: LocalStates, show: Any) -> None:
        self._states, self._show = states, show

    def __len__(self) -> int:
        return len(self._states.places)

    def __getitem__(self, clients: Any) -> Tree:
        numbers = np.arange(len(self))[clients]
        many = self._show(self._states.read(np.atleast_1d(numbers)))
        return many if np.ndim(numbers) else jax.tree.map(lambda leaf: leaf[0], many)

    def __repr__(self) -> str:
        return f"<one for each of {len(self):,} clients: index it by client numbers>"


def client_bytes(data: ClientData) -> int:
    """Of the rows of one client, with padding."""
    return sum(bytes_of(data.example(part)) for part in data.parts)
