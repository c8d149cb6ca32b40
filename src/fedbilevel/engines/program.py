"""The compiled program of a simulation: as many rounds as asked for, recorded as often as asked for.

How many rounds to run is an argument, not part of the program: one compilation serves any length, and stopping between
two calls (to save, to report, to look for a NaN) cannot change a single bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fedbilevel.engines.diagnose import measure
from fedbilevel.engines.fleet import AXIS, Fleet, Layout
from fedbilevel.engines.rounds import State, run_round, start
from fedbilevel.plan import Algorithm

ROWS = 256
"""History rows one call can return."""


@dataclass(frozen=True)
class Program:
    """The static part: what is compiled.  ``level`` None records nothing."""

    build: Any
    layout: Layout
    measuring: Layout
    level: str | None


def _sharded(program: Program, function: Any, arguments: tuple[Any, ...], outputs: Any) -> Any:
    """Run ``function`` on every device's share of the clients."""
    if program.layout.mesh is None:
        return function(*arguments)
    each, same = PartitionSpec(AXIS), PartitionSpec()
    fleet = Fleet(each, each, each, each, each, each, same)  # type: ignore[arg-type]
    state = State(same, each, same, same, same, same, same)  # type: ignore[arg-type]
    specs = {"fleet": fleet, "state": state, "same": same}
    inputs = tuple(
        specs["fleet" if isinstance(a, Fleet) else "state" if isinstance(a, State) else "same"] for a in arguments
    )
    mapped = jax.shard_map(
        function,
        mesh=program.layout.mesh,
        in_specs=inputs,
        out_specs=jax.tree.map(specs.__getitem__, outputs),
        check_vma=False,
    )
    return mapped(*arguments)


@partial(jax.jit, static_argnames=("program",))
def begin(program: Program, settings: Any, seed: Any) -> State:
    return start(program.build(settings), program.layout, jax.random.key(seed))


@partial(jax.jit, static_argnames=("program",))
def advance(
    program: Program,
    settings: Any,
    fleet: Fleet,
    seed: Any,
    state: State,
    first: Any,
    blocks: Any,
    every: Any,
) -> tuple[State, dict[str, jax.Array]]:
    """``blocks`` times: ``every`` rounds, then a row.  ``first`` is the number of rounds done before.

    One block of no rounds measures the state as it is: the row before round 1 comes from the same compiled program.
    """

    def inside(settings: Any, fleet: Fleet, seed: Any, state: State, first: Any, blocks: Any, every: Any) -> Any:
        algorithm: Algorithm = program.build(settings)
        key = jax.random.key(seed)
        watch = program.level is not None

        def rounds(block: Any, state: State) -> State:
            done = first + block * every
            result: State = jax.lax.fori_loop(
                0, every, lambda i, held: run_round(algorithm, program.layout, fleet, key, held, done + i, watch), state
            )
            return result

        if not watch:
            return jax.lax.fori_loop(0, blocks, rounds, state), {}

        def recorded(block: Any, held: tuple[State, dict[str, Any]]) -> tuple[State, dict[str, Any]]:
            state, rows = held
            state = rounds(block, state)
            row = _row(algorithm, program, fleet, state)
            return state, {name: rows[name].at[block].set(value) for name, value in row.items()}

        shapes = jax.eval_shape(lambda: _row(algorithm, program, fleet, state))
        rows = {name: jnp.zeros((ROWS,), shape.dtype) for name, shape in shapes.items()}
        return jax.lax.fori_loop(0, blocks, recorded, (state, rows))

    arguments = (settings, fleet, seed, state, first, blocks, every)
    return _sharded(program, inside, arguments, ("state", "same"))  # type: ignore[no-any-return]


def _row(algorithm: Algorithm, program: Program, fleet: Fleet, state: State) -> dict[str, jax.Array]:
    assert program.level is not None
    row = measure(algorithm, program.measuring, fleet, state, program.level)
    counted = {"messages": state.messages, "answers": state.answers}
    each = {f"{name}/{number}": value[number] for name, value in counted.items() for number in range(value.shape[0])}
    return {**row, "contacts": state.contacts, "replies": state.replies, **each}


def without_mesh(layout: Layout) -> Layout:
    return replace(layout, mesh=None, places=layout.clients)
