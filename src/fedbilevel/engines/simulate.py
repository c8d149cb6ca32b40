"""The simulation engine: all clients in one process (or spread over JAX devices and hosts), all rounds in one program."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import all_finite
from fedbilevel.engines.checkpoint import Checkpoint
from fedbilevel.engines.diagnose import STEPS, level_for
from fedbilevel.engines.fleet import CHUNK, Fleet, map_clients
from fedbilevel.engines.progress import listener
from fedbilevel.engines.result import Diverged, Interrupted, Progress, ProgressCallback, Result
from fedbilevel.engines.rounds import State, choose
from fedbilevel.engines.simulation import Moment, Options, Simulation, named_numbers
from fedbilevel.engines.store import ClientStore
from fedbilevel.hints import whole_number
from fedbilevel.hypergradients.exact import dense_hessian
from fedbilevel.plan import Algorithm, LocalStep, client_key, phases_of
from fedbilevel.problem import ClientData

SLICE_SECONDS = 0.5
"""How long one call of the program aims to take: how soon Ctrl-C, progress and saving get their turn."""


def simulate(
    algorithm: Algorithm,
    data: ClientData | ClientStore,
    rounds: int,
    seed: int = 0,
    *,
    weights: Any = "uniform",
    participation: float | int | None = None,
    sampling: str = "proportional",
    dropout: float = 0.0,
    record_every: int | None = 1,
    diagnostics: str = "auto",
    progress: bool | ProgressCallback | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    client_chunk: int | None = CHUNK,
    devices: Sequence[Any] | None = None,
    secure: bool = False,
    message_dtype: str | None = None,
) -> Result:
    """Run ``rounds`` rounds of ``algorithm`` over all clients.

    ``data`` may be a `ClientStore`: with ``participation``, only a few cohorts are in memory at a time.  The local states
    are then in a file beside the checkpoint or, without one, in a temporary file beside the rows; ``inner`` and ``local`` of
    the result are read from it by client numbers.

    With several JAX devices (or, after ``jax.distributed.initialize``, hosts) the clients are spread over them.  On several
    hosts each process passes the clients it holds.

    Args:
        algorithm: What to run, such as ``fb.fedbio(problem)``.
        data: The clients' rows.
        rounds: How many rounds, at least one.
        seed: Seed of all random numbers, in [0, 2**32).
        weights: "uniform" (the paper), "samples" (training rows), or one number for each client.
        participation: Share or number of clients that take part in a round; None: all.
        sampling: "proportional" draws clients in proportion to their weights and averages equally, which on average is the
            weighted mean of all.  "uniform" draws all alike and averages by weight, which is not: with weights 9 : 1 and one
            of two clients a round, both count the same.
        dropout: Chance in [0, 1) that a client's reply is lost.  The client then keeps its earlier local state.
        record_every: Rounds between two rows of the history; None records nothing and costs nothing.
        diagnostics: "cheap": objective, consensus, bytes, calls.  "exact" or "conjugate_gradient": also the true
            hypergradient and the errors of the theory.  "cohort": the objective of the clients that took part, consensus and
            bytes; its cost does not grow with the clients that did not.  "auto": exact where that is quick; else cheap, or
            cohort where there are ten times as many clients.
        progress: True draws a bar on a terminal or in a notebook; a function gets a `Progress` about twice a second.
        checkpoint: A file to save to, also at the end.  If it exists the run continues from it, to bit-identical results.
        checkpoint_every: Rounds between two saves; None: about ten seconds.
        client_chunk: Clients computed side by side; None: all.
        devices: JAX devices to spread the clients over; None: all.
        secure: Round averages as secure sums over real sites do, so that a run over sites gives the same numbers.  Nothing
            is hidden from anybody: it is a simulation.
        message_dtype: "bfloat16" rounds every array that travels to two bytes a number.  None: arrays travel as they are.

    Returns:
        A `Result`.

    Raises:
        Diverged: A NaN or an infinity appeared.
        Interrupted: Ctrl-C; the run so far is in its ``result``.
        CheckpointError: The file belongs to another run.
        ValueError: An option is out of its range, or the data do not fit the problem.
        TypeError: A loss or an option is of the wrong kind.

    Examples:
        >>> import fedbilevel as fb, jax.numpy as jnp, numpy as np
        >>> algo = fb.fedavg(lambda model, batch: jnp.mean((model - batch) ** 2), init=np.zeros(()), step=0.25, local_steps=1)
        >>> result = fb.simulate(algo, fb.ClientData(train=np.array([[1.0], [3.0]])), rounds=50)
        >>> print(f"{result.outer:.3f}")
        2.000
    """
    options = Options(
        weights, participation, sampling, dropout, record_every, diagnostics, client_chunk, devices, secure,
        message_dtype=message_dtype,
    )  # fmt: skip
    simulation = Simulation(algorithm, data, options)
    with listener(progress, algorithm.name) as told:
        return execute(simulation, algorithm.settings, rounds, seed, told, checkpoint, checkpoint_every)


def execute(
    simulation: Simulation,
    settings: Any,
    rounds: int,
    seed: int,
    progress: ProgressCallback | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    in_one_go: bool = False,
) -> Result:
    """One run from the start, or from its checkpoint, to the end.  ``in_one_go``: without a look at the clock."""
    whole_number("rounds", rounds)
    whole_number("seed", seed, least=0)
    whole_number("checkpoint_every", checkpoint_every, optional=True)
    if seed >= 2**32:
        raise ValueError(f"seed must be below 2**32, not {seed}.")
    if checkpoint is None:
        saved, moment = None, simulation.start(settings, seed)
    else:
        saved = Checkpoint(Path(checkpoint), checkpoint_every, simulation, settings, seed, rounds)
        resumed = saved.exists()
        moment = simulation.start(settings, seed, saved.local, resumed)
        moment = saved.load(moment) if resumed else moment
    every = simulation.options.record_every
    if simulation.level is not None and not moment.history:
        moment = next(simulation.rounds(settings, seed, [moment.done], since=moment))
    pace = Pace(measured=not in_one_go and jax.process_count() == 1)
    heard = len(moment.history) if moment.done else 0  # rows that the callback, or that of the stopped run, was told

    def stops() -> Iterator[int]:
        while moment.done < rounds:
            row = moment.done - moment.done % (
                every or 1
            )  # where the latest row is, if one is due every so many rounds
            left = rounds - row
            yield row + pace.next(left, left if saved is None else saved.left(row), every)

    try:
        for after in simulation.rounds(settings, seed, stops(), every, moment):
            if not after.finite:
                sentence = _blame(simulation, settings, seed, moment, after.done)
                raise Diverged(sentence, simulation.result(settings, seed, moment))
            pace.learn(after.done - moment.done, after.seconds - moment.seconds)
            moment = after
            if saved is not None and (saved.due(moment.done) or moment.done == rounds):
                saved.save(moment)
            if progress is not None:
                rows, heard = moment.history[heard:], len(moment.history)
                progress(
                    Progress(moment.done, rounds, moment.seconds, moment.history[-1] if moment.history else {}, rows)
                )
    except KeyboardInterrupt:
        kept_in = ""
        if saved is not None:
            saved.save(moment)
            kept_in = f", saved in {saved.file}: the same call goes on from there"
        sentence = f"Stopped after round {moment.done} of {rounds}{kept_in}."
        raise Interrupted(sentence, simulation.result(settings, seed, moment)) from None
    unsolved = [
        row["round"] for row in moment.history if np.isnan(row.get("true_objective", 0)) > np.isnan(row["objective"])
    ]
    if unsolved:
        warnings.warn(
            f"At {len(unsolved)} of {len(moment.history)} recorded rounds, first {unsolved[0]}, a client's inner problem could "
            "not be solved, so the columns that rest on it are NaN: it is not convex there, has no minimum, or is too badly "
            "conditioned. Use diagnostics='cheap' to leave these columns out, or add a ridge to the inner loss.",
            RuntimeWarning,
            stacklevel=3,
        )
    for remark in (_missed_solves(simulation, settings, moment), simulation.algorithm.remark(moment.state.server)):
        if remark is not None:
            warnings.warn(remark, RuntimeWarning, stacklevel=3)
    return simulation.result(settings, seed, moment)


def _missed_solves(simulation: Simulation, settings: Any, moment: Moment) -> str | None:
    """What to say at the end of a run whose estimator could not solve all its linear systems."""
    if (found := simulation.solves(settings, moment)) is None or not (missed := int(found[1].missed.sum())):
        return None
    numbers, solves = found
    bent, clients = int(solves.bent.sum()), numbers[solves.missed > 0]
    where = f"at client {clients[0]}" if len(clients) == 1 else f"at {len(clients)} clients, first {clients[0]}"
    rounds = [row["round"] for row in moment.history if row["solves_missed"]]
    since = f" (in the history since round {rounds[0]})" if rounds else ""
    reasons = [
        missed > bent and f"{missed - bent} ran out of products: allow more of them (steps), accept a larger tolerance, take "
        "preconditioner='diagonal' where the inner variables differ in scale, or add a ridge to the inner loss.",
        bent and f"{bent} met a direction in which the inner loss curves downwards or not at all and stopped there: it is not "
        "strongly convex, so add a ridge to it; on_negative_curvature='refuse' ends a run at the first of them.",
    ]  # fmt: skip
    return (
        f"Conjugate gradients missed their tolerance in {missed} of {int(solves.count.sum())} solves, {where}{since}, with a "
        f"relative residual of up to {float(solves.worst.max()):.2g}: the hypergradients there are not accurate. "
        + " ".join(reason for reason in reasons if reason)
    )


class Pace:
    """Chooses how many rounds the next call runs: about half a second's worth where that is ``measured``, else all."""

    def __init__(self, measured: bool) -> None:
        self.measured = measured
        self.rate: float | None = None

    def next(self, left: int, most: int, every: int | None) -> int:
        """Of ``left`` rounds, at most ``most`` (but one row's at least) and as many as fill rows of ``every`` rounds."""
        every, most = min(every or 1, left), min(left, most)
        if self.measured:
            most = min(most, 1 if self.rate is None else max(1, int(SLICE_SECONDS * self.rate)))
        return every * max(1, most // every)

    def learn(self, rounds: int, seconds: float) -> None:
        # The first call may compile, and one lucky clock reading must not make a long call: grow fourfold at most.
        rate = rounds / max(seconds, 1e-6)
        self.rate = rate if self.rate is None else min(rate, 4 * self.rate)


def _blame(simulation: Simulation, settings: Any, seed: int, good: Moment, end: int) -> str:
    """After a NaN: which round, which client, which step sizes.  Costs nothing until it happens.

    ``good`` was finite; somewhere before ``end`` rounds were done the state ceased to be.

    The number of rounds is an argument of the compiled program, so the last good round is found by bisection with it.
    """
    silent = copy(simulation)
    silent.level, silent.loop = None, replace(simulation.loop, level=None)

    def after(count: int) -> Moment:
        return next(silent.rounds(settings, seed, [good.done + count], since=good))

    low, high = 0, end - good.done
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if after(middle).finite else (low, middle)
    last, first_bad = after(low), after(low + 1)
    solved = simulation.solves(settings, first_bad)
    if solved is not None and (bent_at := solved[0][solved[1].bent > 0]).size:
        return (
            f"Round {first_bad.done} was refused: conjugate gradients met negative curvature (or none) in the inner loss of "
            f"client {bent_at[0]}, where the hypergradient is not defined. Add a ridge to the inner loss, "
            "or take fb.conjugate_gradient(on_negative_curvature='stop'): it goes on with the best answer so far."
        )
    client = _culprit(silent, settings, seed, last, first_bad)
    bent = _smallest_curvature(simulation, settings, last)
    remedy = "Try smaller steps."
    if bent is not None and not bent > 0:
        remedy = (
            f"The Hessian of an inner loss is not positive definite there (smallest eigenvalue {bent:.3g}): the inner problem "
            "must be strongly convex in its variable, so add a ridge to the inner loss."
        )
    numbers = ", ".join(f"{name}={float(value):g}" for name, value in named_numbers(settings).items())
    with_numbers = f" with {numbers}" if numbers else ""
    return (
        f"The run diverged in round {good.done + low + 1}: {client} produced a NaN or infinity{with_numbers}. {remedy}"
    )


def _smallest_curvature(simulation: Simulation, settings: Any, good: Moment) -> float | None:
    """Of the clients' inner Hessians (or, with a global lower level, of their mean) where the run was last finite; None where
    there is none, or where it is too large or too far away to look at."""
    loop, data = simulation.loop, simulation.data
    problem = loop.build(settings).problem
    if (
        problem is None
        or good.held
        or loop.layout.mesh is not None
        or level_for("auto", simulation.algorithm, data) != "exact"
    ):
        return None
    outer, inner = simulation.answer(settings, good.state)
    hessians = []
    for client in range(data.clients):
        rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.only(client).train)
        own = jax.tree.map(lambda leaf, client=client: leaf[client], inner)
        hessians.append(dense_hessian(problem, (outer, own), rows))
    if problem.lower_level == "global":
        hessians = [jnp.tensordot(simulation.weights / simulation.weights.sum(), jnp.stack(hessians), axes=1)]
    return min(float(jnp.linalg.eigvalsh(hessian)[0]) for hessian in hessians)


def _culprit(simulation: Simulation, settings: Any, seed: int, good: Moment, bad_one: Moment) -> str:
    if bad_one.held is not None:
        clients = bad_one.held.clients
        fine = np.asarray(jax.vmap(all_finite)(bad_one.state.local))[: len(clients)]
        return "the server's update" if fine.all() else f"client {int(clients[~fine][0])}"
    loop, fleet, number = simulation.loop, simulation.fleet, good.done
    if loop.layout.mesh is not None:
        return "a client"  # its state lives on another device; the round and the steps are what helps

    key = jax.random.key(seed)

    @jax.jit
    def finite(state: State, fleet: Fleet) -> jax.Array:
        algorithm = loop.build(settings)
        layout = replace(loop.layout, cohort=None)
        phase, _ = next(iter(phases_of(algorithm.plan)))
        message = phase.send(state.server)
        keys = jax.vmap(partial(client_key, key, number, 0))(fleet.ids)
        results = map_clients(
            lambda data, item: phase.work(message, item[0], data, item[1]), fleet, (state.local, keys), layout
        )
        return jax.vmap(all_finite)(results)

    fine = np.asarray(finite(good.state, fleet))
    cohort = choose(fleet, loop.layout, key, number)
    took_part = np.zeros(len(fine), bool)
    took_part[slice(None) if cohort.positions is None else np.asarray(cohort.positions)] = np.asarray(cohort.active)
    bad = np.flatnonzero(~fine & took_part)
    return f"client {int(bad[0])}" if len(bad) else "the server's update"


def trace(algorithm: Algorithm, data: ClientData, rounds: int, seed: int = 0, *, weights: Any = "uniform") -> LocalStep:
    """Run like `simulate` with all clients taking part, and return the `LocalStep` of every step and client: what the
    theory's lemmas are evaluated on.

    Leaves are ``[rounds * local_steps, clients, ...]``.  Memory grows with the rounds: meant for small problems.

    Args:
        algorithm: What to run, such as ``fb.fedbio(problem)``.
        data: The clients' rows.
        rounds: How many rounds, at least one.
        seed: Where all randomness starts.
        weights: As in `simulate`.

    Returns:
        A `LocalStep` whose leaves are ``[rounds * local_steps, clients, ...]``.

    Raises:
        ValueError: The algorithm has several phases, or does not record its steps.
    """
    whole_number("rounds", rounds)
    if not (len(algorithm.plan) == 1 and getattr(algorithm.plan[0], "trace", None)):
        raise ValueError(f"{algorithm.name} cannot be traced: it needs a single phase that records its local steps.")
    simulation = Simulation(algorithm, data, Options(weights, devices=jax.local_devices()[:1]), level=STEPS)
    *_, end = simulation.rounds(algorithm.settings, seed, [rounds], every=1)

    def in_order(*parts: np.ndarray) -> jax.Array:
        """[rounds, clients, local steps, ...] -> [all steps, clients, ...]"""
        whole = np.moveaxis(np.concatenate(parts), 2, 1)
        return jnp.asarray(whole.reshape((-1, *whole.shape[2:])))

    return jax.tree.map(in_order, *end.history)  # type: ignore[no-any-return]
