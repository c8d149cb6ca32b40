"""One run of one algorithm on one draw of a task: costs and scores along the way.

The engine's compiled program is driven directly, a few rounds at a time: that lets the test rows be looked at along the way,
and a run that diverges simply ends, which a search over step sizes meets all the time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedbilevel.calculus import Tree, all_finite
from fedbilevel.engines.book import Book
from fedbilevel.engines.options import Options
from fedbilevel.engines.program import advance, begin
from fedbilevel.engines.rounds import State, counters_at_zero
from fedbilevel.engines.simulate import Run
from fedbilevel.plan import Algorithm, phases_of
from fedbilevel.problem import BilevelProblem
from fedbilevel.tasks.task import Task

_finite = jax.jit(all_finite)


@dataclass(frozen=True)
class Walk:
    """``rows``: one a recorded moment, each with the exchanges, bytes and calls so far and, where asked for, the scores.
    ``outer`` and ``inner`` are None after a divergence."""

    rows: list[dict[str, Any]]
    outer: Tree
    inner: Tree

    @property
    def finite(self) -> bool:
        return self.outer is not None


def most_exchanges(algorithm: Algorithm) -> int:
    """Messages a client gets in one round of the plan, at most: "rounds" as papers count them."""
    return sum(times for _, times in phases_of(algorithm.plan))


def walk(
    algorithm: Algorithm,
    task: Task,
    *,
    seed: int,
    exchanges: int,
    points: int,
    scores: bool,
) -> Walk:
    """Run until the server and the clients have talked ``exchanges`` times, looking up about ``points`` times."""
    run = Run(algorithm, task.data, Options(record_every=1, diagnostics="cheap", devices=jax.devices()[:1]))
    settings = algorithm.settings
    book, state = Book(run, settings, seed), begin(run.program, settings, np.uint32(seed))
    every = max(1, math.ceil(exchanges / points / most_exchanges(algorithm)))
    rows: list[dict[str, Any]] = []
    talked, seconds = 0, 0.0
    run.warm_up(settings)
    while True:
        began = time.perf_counter()
        after, found = _some_rounds(run, settings, seed, state, book.done, every if rows else 0)
        elapsed = time.perf_counter() - began if rows else 0.0
        seconds += elapsed
        if not (bool(_finite((after.server, after.local))) and np.isfinite(found["objective"][0])):
            return Walk(rows, None, None)
        talked += sum(int(found[name][0]) for name in found if name.startswith("messages/")) // task.data.clients
        book.note(found, 1, every if rows else 0, elapsed)
        state = counters_at_zero(after)
        row = {**book.rows[-1], "round": talked, "iteration": book.done, "seconds": seconds}
        done = talked >= exchanges
        result = book.result(state) if scores or done else None
        if scores and result is not None:
            row |= {f"test_{name}": value for name, value in task.evaluate(result.outer, result.inner).items()}
        rows.append(row)
        if result is not None and done:
            return Walk(rows, result.outer, result.inner)


def _some_rounds(
    run: Run, settings: Any, seed: int, state: State, done: int, count: int
) -> tuple[State, dict[str, np.ndarray]]:
    """``count`` rounds and the row after them; none measures the state as it is."""
    numbers = map(np.int32, (done, 1, count))
    after, found = advance(run.program, settings, run.fleet, np.uint32(seed), state, *numbers)
    return jax.block_until_ready(after), {name: np.asarray(value)[:1] for name, value in found.items()}


def settled_inner(task: Task, outer: Tree, inner: Tree) -> Tree:
    """y(x), solved from ``inner`` (leaves [clients, ...]) on whole sets: what the outer variable alone is worth.

    For a global lower level all clients get the one solution.
    """
    from scipy.optimize import minimize

    shared = task.lower_level == "global"
    start = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), inner) if shared else inner
    flat, restore = ravel_pytree(start)

    def value(vector: np.ndarray) -> tuple[float, np.ndarray]:
        point = restore(jnp.asarray(vector, flat.dtype))
        loss, slope = _inner_value(task.problem, shared, outer, point, task.data.train)
        return float(loss), np.asarray(ravel_pytree(slope)[0], np.float64)

    found = minimize(value, np.asarray(flat, np.float64), jac=True, method="L-BFGS-B", options={"maxiter": 500})
    solved = restore(jnp.asarray(found.x, flat.dtype))
    if not shared:
        return solved
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (task.data.clients, *leaf.shape)), solved)


@partial(jax.jit, static_argnames=("problem", "shared"))
def _inner_value(problem: BilevelProblem, shared: bool, outer: Tree, inner: Tree, train: Tree) -> Any:
    """The sum of the clients' inner losses (so that every client's gradient has its own scale) and its gradient."""

    def total(inner: Tree) -> jax.Array:
        axes = (None, None if shared else 0, 0)
        return jnp.sum(jax.vmap(problem.inner_loss, in_axes=axes)(outer, inner, train))

    return jax.value_and_grad(total)(inner)
