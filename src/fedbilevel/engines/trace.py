"""Every local step of every client, recorded: what the theory's lemmas are evaluated on."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.engines.fleet import Fleet, Layout, map_clients
from fedbilevel.engines.options import Options
from fedbilevel.engines.rounds import start
from fedbilevel.engines.simulate import Run
from fedbilevel.plan import Algorithm, LocalStep, Phase, client_key, weighted_mean
from fedbilevel.problem import ClientData, whole_number


def trace(algorithm: Algorithm, data: ClientData, rounds: int, seed: int = 0, *, weights: Any = "uniform") -> LocalStep:
    """Run like `simulate` with all clients taking part, and return the `LocalStep` of every step and client.

    Leaves are ``[rounds * local_steps, clients, ...]``.  Memory grows with the rounds: meant for small problems.
    """
    whole_number("rounds", rounds)
    for item in algorithm.plan:
        if len(algorithm.plan) != 1 or not isinstance(item, Phase) or item.trace is None:
            raise ValueError(
                f"{algorithm.name} cannot be traced: it needs a single phase that records its local steps."
            )
    run = Run(algorithm, data, Options(weights=weights, devices=jax.local_devices()[:1]))
    return _trace(algorithm.build, run.program.layout, rounds, algorithm.settings, run.fleet, np.uint32(seed))  # type: ignore[no-any-return]


@partial(jax.jit, static_argnames=("build", "layout", "rounds"))
def _trace(build: Any, layout: Layout, rounds: int, settings: Any, fleet: Fleet, seed: Any) -> Any:
    algorithm: Algorithm = build(settings)
    phase = algorithm.plan[0]
    assert isinstance(phase, Phase)
    assert phase.trace is not None
    loop = phase.trace
    key = jax.random.key(seed)
    state = start(algorithm, layout, key)
    weights = fleet.weights / jnp.sum(fleet.weights)

    def one_round(held: tuple[Any, Any], number: jax.Array) -> tuple[tuple[Any, Any], Any]:
        server, local = held
        message = phase.send(server)
        keys = jax.vmap(partial(client_key, key, number, 0))(fleet.ids)
        replies, local, steps = map_clients(
            lambda data, item: loop(message, item[0], data, item[1]), fleet, (local, keys), layout
        )
        return (phase.absorb(server, weighted_mean(replies, weights)), local), steps

    _, steps = jax.lax.scan(one_round, (state.server, state.local), jnp.arange(rounds, dtype=jnp.int32))
    # [rounds, clients, local steps, ...] -> [all steps, clients, ...]
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 2, 1).reshape((-1, leaf.shape[1], *leaf.shape[3:])), steps)
