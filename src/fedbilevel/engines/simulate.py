"""The simulation engine: all clients in one process (or spread over JAX devices and hosts), all rounds in one program."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.calculus import all_finite
from fedbilevel.engines.book import Book, Pace
from fedbilevel.engines.diagnose import level_for
from fedbilevel.engines.diverge import blame
from fedbilevel.engines.fleet import CHUNK, Fleet, Layout, host_fleet, size_groups
from fedbilevel.engines.hosts import client_mesh, place_fleet, place_state
from fedbilevel.engines.options import Options, chance, client_weights, cohort_size
from fedbilevel.engines.program import Program, advance, begin, without_mesh
from fedbilevel.engines.result import Diverged, Interrupted, Progress, ProgressCallback, Result
from fedbilevel.engines.rounds import State, Traffic, counters_at_zero, traffic
from fedbilevel.engines.store import Store
from fedbilevel.plan import Algorithm
from fedbilevel.problem import ClientData, whole_number
from fedbilevel.sampling import NeedsWholeSet


def simulate(
    algorithm: Algorithm,
    data: ClientData,
    rounds: int,
    seed: int = 0,
    *,
    weights: Any = "uniform",
    participation: float | int | None = None,
    dropout: float = 0.0,
    record_every: int | None = 1,
    diagnostics: str = "auto",
    progress: ProgressCallback | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    client_chunk: int | None = CHUNK,
    devices: Sequence[Any] | None = None,
) -> Result:
    """Run ``rounds`` rounds of ``algorithm`` over all clients.

    ``weights``: "uniform" (the paper), "samples" (training rows), or one number per client.  ``participation``: a fraction
    or a number of clients sampled without replacement each round.  ``dropout``: the chance that a client's reply is lost;
    it then also keeps its earlier local state.  ``record_every``: a row of history every so many rounds; None records
    nothing and costs nothing.  ``diagnostics``: "cheap" (objective, consensus, bytes, calls), "exact" or
    "conjugate_gradient" (also the true hypergradient and the errors of the theory), "auto" (exact where that is quick).

    ``checkpoint``: a file the run is saved to, every ``checkpoint_every`` rounds (default: about once in ten seconds) and at
    its end; if it exists the run goes on from there, to bit-identical results.  Ctrl-C raises `Interrupted` between two
    rounds, with the run so far.  A NaN or infinity raises `Diverged`.

    With several JAX devices (or, after ``jax.distributed.initialize``, hosts) the clients are spread over them; on several
    hosts each process passes the clients it holds.

    >>> import fedbilevel as fb, jax.numpy as jnp, numpy as np
    >>> algo = fb.fedavg(lambda model, batch: jnp.mean((model - batch) ** 2), init=np.zeros(()), step=0.25, local_steps=1)
    >>> result = fb.simulate(algo, fb.ClientData(train=np.array([[1.0], [3.0]])), rounds=50)
    >>> print(f"{result.outer:.3f}")
    2.000
    """
    options = Options(weights, participation, dropout, record_every, diagnostics, client_chunk, devices)
    run = Run(algorithm, data, options)
    return run.execute(algorithm.settings, rounds, seed, progress, checkpoint, checkpoint_every)


class Run:
    """A checked and laid-out simulation: everything but the seed, the step sizes and the number of rounds."""

    def __init__(self, algorithm: Algorithm, data: ClientData, options: Options) -> None:
        if not isinstance(data, ClientData):
            raise TypeError(f"data must be a ClientData, not {type(data).__name__}.")
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                f"algorithm must be an Algorithm such as fb.fedbio(...) returns, not {type(algorithm).__name__}."
            )
        whole_number("record_every", options.record_every, optional=True)
        whole_number("client_chunk", options.client_chunk, optional=True)
        algorithm.check(data)
        self.algorithm, self.data, self.options = algorithm, data, options
        self.level = None if options.record_every is None else level_for(options.diagnostics, algorithm, data)
        self.weights = client_weights(options.weights, data)
        mesh, clients = client_mesh(options.devices, data.clients)
        layout = Layout(
            clients,
            clients if mesh is None else -(-clients // mesh.size) * mesh.size,
            padded=not data.equal_sizes(),
            exact_val=data.val is not None and data.equal_sizes("val"),
            chunk=options.client_chunk,
            cohort=cohort_size(options.participation, clients),
            dropout=chance(options.dropout) > 0,
            mesh=mesh,
        )
        self._lay_out(layout)

    def _lay_out(self, layout: Layout) -> None:
        """Trace the work once without computing: it tells the bytes per message and whether whole sets are read."""
        grouped = replace(without_mesh(layout), groups=size_groups(self.data)) if layout.padded else layout
        fleet = host_fleet(self.data, self.weights, self.options.dropout)
        try:
            self.traffic: Traffic = traffic(self.algorithm, layout, fleet)
        except NeedsWholeSet:
            layout = grouped
            self.traffic = traffic(self.algorithm, layout, fleet)
        if layout.padded and self.level is not None:
            layout = without_mesh(layout)  # recording reads whole sets in groups, and those live on one device
        # Sizes are part of a program only where it reads whole sets: other clients of the same shapes then share it.
        measuring = grouped if layout.padded and self.level is not None else layout
        self.program = Program(self.algorithm.build, layout, measuring, self.level)
        self.fleet: Fleet = place_fleet(fleet, layout)

    def on(self, data: ClientData) -> Run:
        """The same simulation on other clients; with arrays of the same shapes nothing is traced or compiled again."""
        if self.program.layout.groups is not None or _shapes(data) != _shapes(self.data):
            return Run(self.algorithm, data, self.options)
        other = copy(self)
        other.data, other.weights = data, client_weights(self.options.weights, data)
        other.fleet = place_fleet(host_fleet(data, other.weights, self.options.dropout), self.program.layout)
        return other

    def walk(self, settings: Any, seed: int, stops: Iterable[int]) -> Iterator[tuple[int, State]]:
        """The state after each of the rounds in ``stops`` (rising; 0 is the start), for runs that record nothing."""
        if self.level is not None:
            raise ValueError("walk shows the states themselves: give record_every=None.")
        state = place_state(begin(self.program, settings, np.uint32(seed)), self.program.layout)
        done = 0
        for stop in stops:
            if stop > done:
                state, _ = self._advance(settings, seed, state, done, stop - done, 1)
            done = stop
            yield stop, jax.block_until_ready(state)

    def warm_up(self, settings: Any) -> None:
        """Compile without running a round, so that threads find the program ready."""
        state = place_state(begin(self.program, settings, np.uint32(0)), self.program.layout)
        jax.block_until_ready(self._advance(settings, 0, state, 0, 0, 1))

    def _advance(self, settings: Any, seed: int, state: State, first: int, blocks: int, every: int) -> Any:
        numbers = map(np.int32, (first, blocks, every))
        return advance(self.program, settings, self.fleet, np.uint32(seed), state, *numbers)

    def execute(
        self,
        settings: Any,
        rounds: int,
        seed: int,
        progress: ProgressCallback | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int | None = None,
        in_one_go: bool = False,
    ) -> Result:
        whole_number("rounds", rounds)
        whole_number("seed", seed, least=0)
        whole_number("checkpoint_every", checkpoint_every, optional=True)
        if seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, not {seed}.")
        state = place_state(begin(self.program, settings, np.uint32(seed)), self.program.layout)
        book = Book(self, settings, seed)
        store = None if checkpoint is None else Store(Path(checkpoint), checkpoint_every, self, settings, seed, rounds)
        if store is not None and store.exists():
            state = store.resume(book, state)
        if self.level is not None and not book.rows:
            book.note(self._advance(settings, seed, state, 0, 1, 0)[1], 1, 0, 0.0)
        pace = Pace(measured=not in_one_go and jax.process_count() == 1)
        try:
            while book.done < rounds:
                every, blocks = pace.next(rounds - book.done, self.options.record_every)
                if store is not None:
                    blocks = max(1, min(blocks, store.left(book.done) // every))
                began = time.perf_counter()
                after, rows = self._advance(settings, seed, state, book.done, blocks, every)
                after = jax.block_until_ready(after)
                pace.learn(blocks * every, time.perf_counter() - began)
                if not _finite(after):
                    sentence = blame(self.program, settings, self.fleet, seed, state, book.done, blocks * every)
                    raise Diverged(sentence, book.result(state))
                book.note(rows, blocks, every, time.perf_counter() - began)
                state = counters_at_zero(after)
                if store is not None and (store.due(book.done) or book.done == rounds):
                    store.save(book, state)
                if progress is not None:
                    progress(Progress(book.done, rounds, book.seconds, book.rows[-1] if book.rows else {}))
        except KeyboardInterrupt:
            if store is not None:
                store.save(book, state)
            kept_in = "" if store is None else f", saved in {store.file}: the same call goes on from there"
            raise Interrupted(f"Stopped after round {book.done} of {rounds}{kept_in}.", book.result(state)) from None
        return book.result(state)


def _shapes(data: ClientData) -> Any:
    described = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), (data.train, data.val))
    return jax.tree.flatten(described), data.equal_sizes(), data.val is not None and data.equal_sizes("val")


_finite_leaves = jax.jit(all_finite)


def _finite(state: State) -> bool:
    return bool(_finite_leaves((state.server, state.local)))
