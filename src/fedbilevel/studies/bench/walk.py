"""One run of one algorithm on one draw of a task: costs and scores along the way.

A run that diverges simply ends, which a search over step sizes meets all the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.plan import Algorithm, phases_of
from fedbilevel.problem import BilevelProblem
from fedbilevel.tasks.task import Task


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


def prepared(algorithm: Algorithm, task: Task) -> Simulation:
    """The checked and laid-out simulation; it serves every setting of the step sizes."""
    return Simulation(algorithm, task.data, Options(record_every=1, diagnostics="cheap", devices=jax.devices()[:1]))


def walk(
    run: Simulation,
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
    rows: list[dict[str, Any]] = []
    talked, began = 0, 0.0

    def stops() -> Iterator[int]:
        yield 0
        yield from _moments(math.ceil(exchanges / most_exchanges(run.algorithm)), points)
        while True:  # a series of random length may leave exchanges over when the planned moments are spent
            yield rows[-1]["iteration"] + 1

    run.compile(settings)
    for moment in run.rounds(settings, seed, stops()):
        row = moment.history[-1]
        if not (moment.finite and np.isfinite(row["objective"])):
            break
        began = began if rows else moment.seconds
        talked += int(np.sum(moment.state.messages)) // task.data.clients
        row = {**row, "round": talked, "iteration": moment.done, "seconds": moment.seconds - began}
        outer, inner = run.answer(settings, moment.state)
        if scores:
            row |= {f"test_{name}": value for name, value in task.evaluate(outer, inner).items()}
        rows.append(row)
        if talked >= exchanges:
            return Walk(rows, outer, inner)
    return Walk(rows, None, None)


def _moments(rounds: int, points: int) -> list[int]:
    """Numbers of rounds after which to look, the last being ``rounds``: as 1, 2, 3, ... first, then ever further apart.

    >>> _moments(200, 8)
    [1, 2, 5, 10, 21, 44, 94, 200]
    """
    return sorted({round(float(moment)) for moment in np.geomspace(1, rounds, points)})


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
