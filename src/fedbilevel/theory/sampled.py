"""Constants of an arbitrary problem, estimated at sampled points and marked as estimates.

A sampled maximum never exceeds the true constant, so step sizes derived from it may be too large; ``safety`` multiplies
every upper constant (and divides mu). Hessians are formed densely: meant for problems with at most a few hundred variables.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import both_gradients, inner_gradient
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.sampling import LocalData
from fedbilevel.tasks.task import Array
from fedbilevel.theory.constants import Constants
from fedbilevel.theory.estimate import spectral
from fedbilevel.theory.oracles import everywhere, flat_problem, local_data, truth


def _derivatives(problem: BilevelProblem, outer: jax.Array, inner: jax.Array, data: LocalData) -> dict[str, jax.Array]:
    """The Hessians of g and f in (x, y), the gradient of f, y(x), and how far single rows' gradients spread."""
    size, both = outer.size, jnp.concatenate([outer, inner])

    def in_inner(batch: Any) -> jax.Array:
        return jnp.asarray(inner_gradient(problem.inner_loss, outer, inner, batch))

    def in_both(batch: Any) -> jax.Array:
        return jnp.concatenate(both_gradients(problem.outer_loss, outer, inner, batch))

    def variance(gradient: Any, rows: Any) -> jax.Array:
        values = jax.vmap(lambda row: gradient(jax.tree.map(lambda leaf: leaf[None], row)))(rows)
        return jnp.mean(jnp.sum((values - values.mean(axis=0)) ** 2, axis=1))

    return {
        "inner": jax.hessian(lambda z: problem.inner_loss(z[:size], z[size:], data.train))(both),
        "outer": jax.hessian(lambda z: problem.outer_loss(z[:size], z[size:], data.val))(both),
        "gradient": in_both(data.val),
        "solution": truth(problem, outer, data)[1],
        "variance": jnp.maximum(variance(in_inner, data.train), variance(in_both, data.val)),
    }


def _spectral(matrices: Array) -> float:
    return float(spectral(matrices).max())


def _longest(vectors: Array) -> float:
    return float(np.linalg.norm(vectors, axis=-1).max())


def sampled_constants(
    problem: BilevelProblem,
    data: ClientData,
    *,
    radius: float = 1.0,
    points: int = 16,
    batch_size: int | None = None,
    safety: float = 1.0,
    seed: int = 0,
) -> Constants:
    """Estimate every constant from ``points`` points, uniform in balls of ``radius`` around the start of the problem.

    sigma is the deviation with minibatches of ``batch_size`` rows (0 for whole sets) of the gradients; the hypergradient's
    own deviation and bias follow from `Constants.with_neumann`. Raises if an inner loss is not strongly convex at a
    sampled point.
    """
    if points < 2:
        raise ValueError(f"points must be at least 2, since Lipschitz constants compare two points; got {points}.")
    if not radius > 0 or not safety >= 1:
        raise ValueError(f"radius must be positive and safety at least 1, got {radius} and {safety}.")
    flat, clients = flat_problem(problem), local_data(data)
    start = flat.init(jax.random.key(0))
    places = tuple(
        centre + radius * jax.random.ball(key, centre.size, shape=(points,), dtype=centre.dtype)
        for key, centre in zip(jax.random.split(jax.random.key(seed), 2), start, strict=True)
    )
    answers = [everywhere(_derivatives, flat, places, client) for client in clients]
    derivatives = jax.tree.map(lambda *leaves: np.stack(leaves), *answers)
    gradients, solutions, size = derivatives["gradient"], derivatives["solution"], start[0].size
    blocks, crosses = derivatives["inner"][..., size:, size:], derivatives["inner"][..., :size, size:]
    smallest = np.linalg.eigvalsh(blocks).min(axis=(1, 2))
    if smallest.min() <= 0:
        raise ValueError(
            f"Assumption 1 (g is strongly convex in y) does not hold: the inner loss of client {smallest.argmin()} has "
            f"curvature {smallest.min():.3g} at a sampled point; add a ridge term to inner_loss or sample a smaller radius."
        )
    distances = np.linalg.norm(np.diff(np.concatenate(places, axis=1), axis=0), axis=1)[:, None, None]
    upper = {
        "L": max(_spectral(derivatives["inner"]), _spectral(derivatives["outer"])),
        "M": _longest(gradients),
        "C_gxy": _spectral(crosses),
        "L_gxy": _spectral(np.diff(crosses, axis=1) / distances),
        "L_gyy": _spectral(np.diff(blocks, axis=1) / distances),
    }
    for a, b in combinations(range(len(clients)), 2):
        apart = gradients[a] - gradients[b]
        pair = {
            "zeta_f": max(_longest(apart[:, :size]), _longest(apart[:, size:])),
            "zeta_gxy": _spectral(crosses[a] - crosses[b]),
            "zeta_gyy": _spectral(blocks[a] - blocks[b]),
            "zeta_gstar": _longest(solutions[a] - solutions[b]),
        }
        upper |= {name: max(value, upper.get(name, 0.0)) for name, value in pair.items()}
    if batch_size is not None:
        upper["sigma"] = float(np.sqrt(derivatives["variance"].max())) / batch_size**0.5
    return Constants(
        mu=float(smallest.min()) / safety,
        clients=len(clients),
        estimated=True,
        region=f"{points} sampled points within {radius:g} of the start",
        **{name: safety * value for name, value in upper.items()},
    )
