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


def prepared(algorithm: Algorithm, task: Task) -> Run:
    """The checked and laid-out simulation; it serves every setting of the step sizes."""
    return Run(algorithm, task.data, Options(record_every=1, diagnostics="cheap", devices=jax.devices()[:1]))


def walk(
    run: Run,
    settings: Any,
    task: Task,
    *,
    seed: int,
    exchanges: int,
    points: int,
    scores: bool,
) -> Walk:
    """Run until the server and the clients have talked ``exchanges`` times, looking up ``points`` times or a little more.

    The moments lie closer together at the beginning, where scores change fastest.
    """
    book, state = Book(run, settings, seed), begin(run.program, settings, np.uint32(seed))
    moments = iter(_moments(math.ceil(exchanges / most_exchanges(run.algorithm)), points))
    rows: list[dict[str, Any]] = []
    talked, seconds = 0, 0.0
    run.warm_up(settings)
    while True:
        began = time.perf_counter()
        # A series of random length may leave exchanges over when the planned moments are spent.
        count = next(moments, book.done + 1) - book.done if rows else 0
        after, found = _some_rounds(run, settings, seed, state, book.done, count)
        elapsed = time.perf_counter() - began if rows else 0.0
        seconds += elapsed
        if not (bool(_finite((after.server, after.local))) and np.isfinite(found["objective"][0])):
            return Walk(rows, None, None)
        talked += sum(int(found[name][0]) for name in found if name.startswith("messages/")) // task.data.clients
        book.note(found, 1, count, elapsed)
        state = counters_at_zero(after)
        row = {**book.rows[-1], "round": talked, "iteration": book.done, "seconds": seconds}
        done = talked >= exchanges
        result = book.result(state) if scores or done else None
        if scores and result is not None:
            row |= {f"test_{name}": value for name, value in task.evaluate(result.outer, result.inner).items()}
        rows.append(row)
        if result is not None and done:
            return Walk(rows, result.outer, result.inner)


def _moments(rounds: int, points: int) -> list[int]:
    """Numbers of rounds after which to look, the last being ``rounds``: as 1, 2, 3, ... first, then ever further apart.

    >>> _moments(200, 8)
    [1, 2, 5, 10, 21, 44, 94, 200]
    """
    return sorted({round(float(moment)) for moment in np.geomspace(1, rounds, points)})


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
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, inner))
    firsts = [leaf.mean(axis=0) if shared else leaf for leaf in leaves]
    ends = np.cumsum([leaf.size for leaf in firsts])[:-1]

    def tree(vector: Any) -> Tree:
        parts = zip(np.split(vector, ends), firsts, strict=True)
        return jax.tree.unflatten(structure, [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in parts])

    def flat(found: list[Any]) -> Any:
        return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in found])

    def value(vector: Any) -> tuple[float, Any]:
        loss, slope = _inner_value(task.problem, shared, outer, tree(vector), train)
        return float(loss), flat(jax.tree.leaves(slope))

    train = jax.device_put(task.data.train)
    solved = tree(minimize(value, flat(firsts), jac=True, method="L-BFGS-B", options={"maxiter": 200}).x)
    if not shared:
        return solved
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (task.data.clients, *leaf.shape)), solved)


@partial(jax.jit, static_argnames=("problem",))
def outer_value(problem: BilevelProblem, outer: Tree, inner: Tree, val: Tree) -> jax.Array:
    """The clients' mean outer loss over all validation rows."""
    return jnp.mean(jax.vmap(problem.outer_loss, in_axes=(None, 0, 0))(outer, inner, val))


@partial(jax.jit, static_argnames=("problem", "shared"))
def _inner_value(problem: BilevelProblem, shared: bool, outer: Tree, inner: Tree, train: Tree) -> Any:
    """The sum of the clients' inner losses (so that every client's gradient has its own scale) and its gradient."""

    def total(inner: Tree) -> jax.Array:
        axes = (None, None if shared else 0, 0)
        return jnp.sum(jax.vmap(problem.inner_loss, in_axes=axes)(outer, inner, train))

    return jax.value_and_grad(total)(inner)
