"""After a NaN: which round, which client, which step sizes.  Costs nothing until it happens."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from fedbilevel.calculus import all_finite
from fedbilevel.engines.fleet import Fleet, map_clients
from fedbilevel.engines.rounds import PARTICIPATION, State, choose
from fedbilevel.engines.simulation import Moment, Simulation, named_numbers
from fedbilevel.plan import client_key, phases_of


def blame(simulation: Simulation, settings: Any, seed: int, good: Moment, end: int) -> str:
    """``good`` was finite; somewhere before ``end`` rounds were done the state ceased to be.

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
    client = _culprit(silent, settings, seed, after(low))
    numbers = ", ".join(f"{name}={float(value):g}" for name, value in named_numbers(settings).items())
    return (
        f"The run diverged in round {good.done + low + 1}: {client} produced a NaN or infinity with {numbers}. "
        f"Try smaller steps."
    )


def _culprit(simulation: Simulation, settings: Any, seed: int, good: Moment) -> str:
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
    cohort = choose(fleet, loop.layout, client_key(key, number, 0, PARTICIPATION))
    took_part = np.zeros(len(fine), bool)
    took_part[slice(None) if cohort.positions is None else np.asarray(cohort.positions)] = np.asarray(cohort.active)
    bad = np.flatnonzero(~fine & took_part)
    return f"client {int(bad[0])}" if len(bad) else "the server's update"
