"""The simulation engine: all clients in one process (or spread over JAX devices and hosts), all rounds in one program."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedbilevel.calculus import all_finite
from fedbilevel.engines import checkpoint as saving
from fedbilevel.engines.diagnose import level_for
from fedbilevel.engines.diverge import blame
from fedbilevel.engines.fleet import CHUNK, Fleet, Layout, size_groups
from fedbilevel.engines.hosts import client_mesh, place_fleet, place_state, seen_from_here
from fedbilevel.engines.program import ROWS, Program, advance, begin, look, without_mesh
from fedbilevel.engines.result import Diverged, Interrupted, Progress, ProgressCallback, Result
from fedbilevel.engines.rounds import State, Traffic, traffic
from fedbilevel.plan import Algorithm
from fedbilevel.problem import ClientData, whole_number
from fedbilevel.sampling import NeedsWholeSet

SLICE_SECONDS = 0.5
"""How long one call of the program aims to take: how soon Ctrl-C, progress and saving get their turn."""


@dataclass(frozen=True)
class Options:
    """How to simulate, apart from what: shared by `simulate` and `sweep`, checked once."""

    weights: Any = "uniform"
    participation: float | int | None = None
    dropout: float = 0.0
    record_every: int | None = None
    diagnostics: str = "auto"
    client_chunk: int | None = CHUNK
    devices: Sequence[Any] | None = None


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
            raise TypeError(f"algorithm must be an Algorithm such as fb.fedbio(...) returns, not {type(algorithm).__name__}.")
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
            chunk=options.client_chunk,
            cohort=cohort_size(options.participation, clients),
            dropout=_chance(options.dropout) > 0,
            mesh=mesh,
        )
        self._lay_out(layout)

    def _lay_out(self, layout: Layout) -> None:
        """Trace the work once without computing: it tells the bytes per message and whether whole sets are read."""
        grouped = replace(without_mesh(layout), groups=size_groups(self.data)) if layout.padded else layout
        try:
            self.traffic: Traffic = traffic(self.algorithm, without_mesh(layout), self._fleet(without_mesh(layout)))
        except NeedsWholeSet:
            layout = grouped
            self.traffic = traffic(self.algorithm, layout, self._fleet(layout))
        if layout.padded and layout.mesh is not None and self.level is not None:
            layout = without_mesh(layout)  # recording reads whole sets of unequal sizes: those groups live on one device
        measuring = grouped if layout.padded else layout
        self.program = Program(self.algorithm.build, layout, measuring, self.level)
        self.fleet: Fleet = place_fleet(self._fleet(layout), layout)

    def _fleet(self, layout: Layout) -> Fleet:
        data = self.data
        val_sizes = np.zeros(data.clients, np.int32) if data.val is None else data.val_sizes
        return Fleet(
            data.train,
            data.val,
            np.asarray(data.train_sizes),  # type: ignore[arg-type]
            np.asarray(val_sizes),  # type: ignore[arg-type]
            self.weights,  # type: ignore[arg-type]
            np.arange(data.clients, dtype=np.int32),  # type: ignore[arg-type]
            np.asarray(self.options.dropout, np.float32),  # type: ignore[arg-type]
        )

    def warm_up(self, settings: Any) -> None:
        """Compile without running a round, so that threads find the program ready."""
        state = place_state(begin(self.program, settings, np.uint32(0)), self.program.layout)
        if self.level is not None:
            look(self.program, settings, self.fleet, state)
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
        if seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, not {seed}.")
        whole_number("checkpoint_every", checkpoint_every, optional=True)
        state = place_state(begin(self.program, settings, np.uint32(seed)), self.program.layout)
        book = Book(self, settings, seed, rounds)
        file = None if checkpoint is None else Path(checkpoint)
        if file is not None:
            run = {"seed": seed, "options": repr(replace(self.options, devices=None)), "x64": jax.config.jax_enable_x64}
            book.mark = saving.fingerprint(self.algorithm.name, settings, run, (self.data.train, self.data.val))
            if file.exists():
                done, kept, rows, seconds = saving.load(file, book.mark, state)
                state, book.rows, book.done, book.before = kept, rows, done, seconds
        if self.level is not None and not book.rows:
            book.note_start(look(self.program, settings, self.fleet, state))
        pace = Pace(rounds if in_one_go else None)
        saved_at, saved_when = book.done, time.perf_counter()
        try:
            while book.done < rounds:
                every, blocks = pace.next(rounds - book.done, self.options.record_every)
                if checkpoint_every is not None:
                    blocks = max(1, min(blocks, (saved_at + checkpoint_every - book.done) // every))
                began = time.perf_counter()
                after, rows = self._advance(settings, seed, state, book.done, blocks, every)
                after = jax.block_until_ready(after)
                pace.learn(blocks * every, time.perf_counter() - began)
                if not _finite(after):
                    raise Diverged(
                        blame(self.program, settings, self.fleet, seed, state, book.done, blocks * every),
                        book.result(state),
                    )
                book.note(rows, blocks, every, time.perf_counter() - began)
                state = after._replace(contacts=jnp.zeros((), jnp.int32), replies=jnp.zeros((), jnp.int32))
                due = (
                    book.done - saved_at >= checkpoint_every
                    if checkpoint_every is not None
                    else time.perf_counter() - saved_when > 10
                )
                if file is not None and (due or book.done == rounds):
                    saving.save(file, book.mark, book.done, state, book.rows, book.seconds)
                    saved_at, saved_when = book.done, time.perf_counter()
                if progress is not None:
                    progress(Progress(book.done, rounds, book.seconds, book.rows[-1] if book.rows else {}))
        except KeyboardInterrupt:
            if file is not None:
                saving.save(file, book.mark, book.done, state, book.rows, book.seconds)
            kept_in = f", saved in {file}: the same call goes on from there" if file is not None else ""
            raise Interrupted(f"Stopped after round {book.done} of {rounds}{kept_in}.", book.result(state)) from None
        return book.result(state)


class Book:
    """The host's side of a run: rounds done, rows of history, and the columns only the host knows."""

    def __init__(self, run: Run, settings: Any, seed: int, rounds: int) -> None:
        self.run, self.settings, self.seed, self.rounds = run, settings, seed, rounds
        self.mark = ""
        self.done = 0
        self.before = 0.0
        self.rows: list[dict[str, Any]] = []
        self.contacts = self.replies = 0
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.began

    def note_start(self, row: dict[str, Any]) -> None:
        self.rows.append(self._complete({name: np.asarray(value).item() for name, value in row.items()}, 0, 0, 0, 0.0))

    def note(self, rows: dict[str, Any], blocks: int, every: int, seconds: float) -> None:
        if self.rows:
            self.contacts, self.replies = self.rows[-1]["contacts"], self.rows[-1]["replies"]
        arrays = {name: np.asarray(value)[:blocks] for name, value in rows.items()}
        for number in range(blocks if arrays else 0):
            row = {name: array[number].item() for name, array in arrays.items()}
            contacts, replies = self.contacts + row.pop("contacts"), self.replies + row.pop("replies")
            # Within one call only its end is on the clock: rounds take equal shares.
            elapsed = self.seconds - seconds * (1 - (number + 1) / blocks)
            self.rows.append(self._complete(row, self.done + (number + 1) * every, contacts, replies, elapsed))
        self.done += blocks * every

    def _complete(self, row: dict[str, Any], done: int, contacts: int, replies: int, seconds: float) -> dict[str, Any]:
        halves = [name[:-5] for name in row if name.endswith("/high")]
        counts = {name: (row.pop(f"{name}/high") << 15) + row.pop(f"{name}/low") for name in halves}
        return {
            "round": done,
            "step": done * self.run.algorithm.local_steps,
            **row,
            "bytes_up": replies * self.run.traffic.up,
            "bytes_down": contacts * self.run.traffic.down,
            "contacts": contacts,
            "replies": replies,
            **counts,
            "seconds": seconds,
        }

    def result(self, state: State) -> Result:
        algorithm = self.run.algorithm.build(self.settings)
        server, local = seen_from_here(state, self.run.program.layout)
        inner = jax.vmap(lambda own: algorithm.view(server, own).inner)(local)
        return Result(
            algorithm.outer(server),
            inner,
            pd.DataFrame(self.rows),
            self.done,
            self.seed,
            {name: float(value) for name, value in named_numbers(self.settings).items()},
            server,
            local,
        )


class Pace:
    """Chooses how many rounds the next call runs: about half a second's worth, measured as it goes."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.rate: float | None = None

    def next(self, left: int, record_every: int | None) -> tuple[int, int]:
        """(rounds per block, blocks)."""
        every = 1 if record_every is None else min(record_every, left)
        cap = left if record_every is None else min(left // every, ROWS) * every
        if self.most is None:
            cap = min(cap, 1 if self.rate is None else max(1, int(SLICE_SECONDS * self.rate)))
        return every, max(1, cap // every)

    def learn(self, rounds: int, seconds: float) -> None:
        # The first call compiles; growing fourfold at most keeps one lucky clock reading from making a long call.
        rate = rounds / max(seconds, 1e-6)
        self.rate = rate if self.rate is None else min(rate, 4 * self.rate)


def client_weights(weights: Any, data: ClientData) -> np.ndarray:
    if isinstance(weights, str):
        if weights == "uniform":
            return np.ones(data.clients)
        if weights == "samples":
            return np.asarray(data.train_sizes, np.float64)
        raise ValueError(f"weights must be 'uniform', 'samples' or one number per client, not {weights!r}.")
    values = np.asarray(weights, np.float64)
    if values.shape != (data.clients,):
        raise ValueError(f"weights must have one number per client ({data.clients}), not shape {values.shape}.")
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() == 0:
        raise ValueError("weights must be finite, not negative, and not all zero.")
    return values


def cohort_size(participation: float | int | None, clients: int) -> int | None:
    if participation is None:
        return None
    if isinstance(participation, bool) or not isinstance(participation, int | float | np.number):
        raise TypeError(f"participation must be a fraction or a number of clients, not {participation!r}.")
    if isinstance(participation, float):
        if not 0 < participation <= 1:
            raise ValueError(f"participation as a fraction must lie in (0, 1], not {participation}.")
        count = max(1, round(participation * clients))
    else:
        count = int(participation)
        if not 1 <= count <= clients:
            raise ValueError(f"participation as a number must lie in 1..{clients} (the clients there are), not {count}.")
    return None if count == clients else count


def _chance(dropout: float) -> float:
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a probability in [0, 1), not {dropout!r}.")
    return float(dropout)


_finite_leaves = jax.jit(all_finite)


def _finite(state: State) -> bool:
    return bool(_finite_leaves((state.server, state.local)))


def named_numbers(settings: Any) -> dict[str, Any]:
    """The float hyper-parameters by the names `sweep` takes."""
    leaves = jax.tree_util.tree_flatten_with_path(settings)[0]
    return {path_name(path): leaf for path, leaf in leaves if np.ndim(leaf) == 0}


def path_name(path: tuple[Any, ...]) -> str:
    """Nested names joined by an underscore: ``hypergradient_step``."""
    return "_".join(str(getattr(entry, "name", getattr(entry, "key", entry))) for entry in path)
