"""The compiled loop of a simulation: as many rounds as asked for, recorded as often as asked for.

How many rounds to run is an argument, not part of the program: one compilation serves any length, and stopping between
two calls (to save, to report, to look for a NaN) cannot change a single bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.engines.diagnose import STEPS, measure
from fedbilevel.engines.fleet import Fleet, Layout
from fedbilevel.engines.hosts import specs_like
from fedbilevel.engines.rounds import State, run_round, run_traced_round, start
from fedbilevel.plan import Algorithm

ROWS = 256
"""Rows of history one call can return."""


@dataclass(frozen=True)
class CompiledLoop:
    """The static part: what is compiled.  ``level`` None records nothing; ``measuring`` is the layout of what records."""

    build: Any
    layout: Layout
    measuring: Layout
    level: str | None


@partial(jax.jit, static_argnames=("loop",))
def begin(loop: CompiledLoop, settings: Any, seed: Any) -> State:
    return start(loop.build(settings), loop.layout, jax.random.key(seed))


@partial(jax.jit, static_argnames=("loop",))
def advance(
    loop: CompiledLoop, settings: Any, fleet: Fleet, seed: Any, state: State, first: Any, blocks: Any, every: Any
) -> tuple[State, Any]:
    """``blocks`` times: ``every`` rounds, then a row.  ``first`` is the number of rounds done before.

    One block of no rounds measures the state as it is: the row before round 1 comes from the same compiled program.
    """

    def inside(settings: Any, fleet: Fleet, seed: Any, state: State, first: Any, blocks: Any, every: Any) -> Any:
        algorithm: Algorithm = loop.build(settings)
        key = jax.random.key(seed)

        def rounds(block: Any, state: State) -> State:
            done, watch = first + block * every, loop.level is not None
            result: State = jax.lax.fori_loop(
                0, every, lambda i, held: run_round(algorithm, loop.layout, fleet, key, held, done + i, watch), state
            )
            return result

        if loop.level is None:
            return jax.lax.fori_loop(0, blocks, rounds, state), {}

        def recorded(block: Any, held: tuple[State, Any]) -> tuple[State, Any]:
            state, kept = held
            row: Any
            if loop.level == STEPS:
                state, row = run_traced_round(algorithm, loop.layout, fleet, key, state, first + block)
            else:
                state = rounds(block, state)
                row = _row(algorithm, loop, fleet, state)
            return state, jax.tree.map(lambda rows, value: rows.at[block].set(value), kept, row)

        shapes = jax.eval_shape(
            lambda: (
                run_traced_round(algorithm, loop.layout, fleet, key, state, first)[1]
                if loop.level == STEPS
                else _row(algorithm, loop, fleet, state)
            )
        )
        rows = jax.tree.map(lambda shape: jnp.zeros((ROWS, *shape.shape), shape.dtype), shapes)
        return jax.lax.fori_loop(0, blocks, recorded, (state, rows))

    arguments = (settings, fleet, seed, state, first, blocks, every)
    if loop.layout.mesh is None:
        return inside(*arguments)  # type: ignore[no-any-return]
    # Every device runs its share of the clients.
    outputs = (specs_like(state), specs_like(None))
    shared = jax.shard_map(
        inside, mesh=loop.layout.mesh, in_specs=tuple(map(specs_like, arguments)), out_specs=outputs, check_vma=False
    )
    return shared(*arguments)  # type: ignore[no-any-return]


def _row(algorithm: Algorithm, loop: CompiledLoop, fleet: Fleet, state: State) -> dict[str, jax.Array]:
    assert loop.level is not None
    row = measure(algorithm, loop.measuring, fleet, state, loop.level)
    counted = {"messages": state.messages, "answers": state.answers}
    each = {f"{name}/{number}": value[number] for name, value in counted.items() for number in range(value.shape[0])}
    return {**row, "contacts": state.contacts, "replies": state.replies, **each}
