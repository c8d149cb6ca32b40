"""After a NaN: which round, which client, which step sizes.  Costs nothing until it happens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from fedbilevel.calculus import all_finite
from fedbilevel.engines.fleet import Fleet, map_clients
from fedbilevel.engines.options import named_numbers
from fedbilevel.engines.program import Program, advance
from fedbilevel.engines.rounds import PARTICIPATION, State, choose
from fedbilevel.plan import client_key, phases_of


def blame(program: Program, settings: Any, fleet: Fleet, seed: int, good: State, first: int, rounds: int) -> str:
    """``good`` was finite after ``first`` rounds; somewhere in the next ``rounds`` it ceased to be.

    The number of rounds is an argument of the compiled program, so the last good round is found by bisection with it.
    """
    silent = replace(program, level=None)

    def after(count: int) -> State:
        state: State = advance(silent, settings, fleet, np.uint32(seed), good, *map(np.int32, (first, 1, count)))[0]
        return state

    low, high = 0, rounds
    while high - low > 1:
        middle = (low + high) // 2
        state = after(middle)
        low, high = (middle, high) if bool(all_finite((state.server, state.local))) else (low, middle)
    client = culprit(silent, settings, fleet, seed, after(low) if low else good, first + low)
    numbers = ", ".join(f"{name}={float(value):g}" for name, value in named_numbers(settings).items())
    return (
        f"The run diverged in round {first + low + 1}: {client} produced a NaN or infinity with {numbers}. "
        f"Try smaller steps."
    )


def culprit(program: Program, settings: Any, fleet: Fleet, seed: int, state: State, number: int) -> str:
    if program.layout.mesh is not None:
        return "a client"  # its state lives on another device; the round and the steps are what helps

    key = jax.random.key(seed)

    @jax.jit
    def finite(state: State, fleet: Fleet) -> jax.Array:
        algorithm = program.build(settings)
        layout = replace(program.layout, cohort=None)
        phase, _ = next(iter(phases_of(algorithm.plan)))
        message = phase.send(state.server)
        keys = jax.vmap(partial(client_key, key, number, 0))(fleet.ids)
        results = map_clients(
            lambda data, item: phase.work(message, item[0], data, item[1]), fleet, (state.local, keys), layout
        )
        return jax.vmap(all_finite)(results)

    fine = np.asarray(finite(state, fleet))
    cohort = choose(fleet, program.layout, client_key(key, number, 0, PARTICIPATION))
    took_part = np.zeros(len(fine), bool)
    took_part[slice(None) if cohort.positions is None else np.asarray(cohort.positions)] = np.asarray(cohort.active)
    bad = np.flatnonzero(~fine & took_part)
    return f"client {int(bad[0])}" if len(bad) else "the server's update"
