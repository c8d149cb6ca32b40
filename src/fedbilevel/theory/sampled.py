"""Constants of an arbitrary problem, estimated at sampled points and marked as estimates.

A sampled maximum never exceeds the true constant, so step sizes derived from it may be too large; ``safety`` multiplies
every upper constant (and divides mu). Hessians are formed densely: meant for problems with at most a few hundred variables.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.theory.constants import Constants
from fedbilevel.theory.oracles import FlatProblem, Rows, rows_of

Array = NDArray[np.float64]


@partial(jax.jit, static_argnums=(0,))
def _derivatives(flat: FlatProblem, outers: jax.Array, inners: jax.Array, rows: Rows) -> dict[str, jax.Array]:
    """At every point: the Hessians of g and f in (x, y), the gradient of f, and y(x)."""
    size = flat.outer.size

    def at(outer: jax.Array, inner: jax.Array) -> dict[str, jax.Array]:
        both = jnp.concatenate([outer, inner])
        return {
            "inner": jax.hessian(lambda z: flat.inner_loss(z[:size], z[size:], rows))(both),
            "outer": jax.hessian(lambda z: flat.outer_loss(z[:size], z[size:], rows))(both),
            "gradient": jnp.concatenate(flat.outer_gradients(outer, inner, rows)),
            "solution": flat.inner_solution(outer, rows),
        }

    return jax.vmap(at)(outers, inners)


@partial(jax.jit, static_argnums=(0,))
def _noise(flat: FlatProblem, outers: jax.Array, inners: jax.Array, rows: Rows) -> jax.Array:
    """Deviation of one row's grad_y g and of one row's grad f, the larger, at the worst point."""

    def spread(gradient: Any, part: Any) -> jax.Array:
        values = jax.vmap(gradient)(jnp.arange(jax.tree.leaves(part)[0].shape[0]))
        return jnp.mean(jnp.sum((values - values.mean(axis=0)) ** 2, axis=1))

    def at(outer: jax.Array, inner: jax.Array) -> jax.Array:
        in_inner = spread(lambda row: flat.inner_gradient(outer, inner, rows.single(row)), rows.train)
        in_both = spread(lambda row: jnp.concatenate(flat.outer_gradients(outer, inner, rows.single(row))), rows.val)
        return jnp.maximum(in_inner, in_both)

    return jnp.sqrt(jnp.max(jax.vmap(at)(outers, inners)))


def _spectral(matrices: Array) -> float:
    return float(np.linalg.norm(matrices, ord=2, axis=(-2, -1)).max())


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
    flat, clients = FlatProblem(problem), rows_of(data)
    size = flat.outer.size
    keys = jax.random.split(jax.random.key(seed), 2)
    outers, inners = (
        start + radius * jax.random.ball(key, start.size, shape=(points,), dtype=start.dtype)
        for key, start in zip(keys, (flat.outer, flat.inner), strict=True)
    )
    found = [jax.tree.map(np.asarray, _derivatives(flat, outers, inners, rows)) for rows in clients]
    hessians = np.stack([client["inner"] for client in found])
    blocks, crosses = hessians[..., size:, size:], hessians[..., :size, size:]
    smallest = np.linalg.eigvalsh(blocks).min(axis=(1, 2))
    if smallest.min() <= 0:
        raise ValueError(
            f"Assumption 1 (g is strongly convex in y) does not hold: the inner loss of client {smallest.argmin()} has "
            f"curvature {smallest.min():.3g} at a sampled point; add a ridge term to inner_loss or sample a smaller radius."
        )
    both = np.concatenate([outers, inners], axis=1)
    distances = np.linalg.norm(np.diff(both, axis=0), axis=1)[:, None, None]
    gradients = np.stack([client["gradient"] for client in found])
    solutions = np.stack([client["solution"] for client in found])
    upper = {
        "L": max(_spectral(hessians), _spectral(np.stack([client["outer"] for client in found]))),
        "M": float(np.linalg.norm(gradients, axis=-1).max()),
        "C_gxy": _spectral(crosses),
        "L_gxy": _spectral(np.diff(crosses, axis=1) / distances),
        "L_gyy": _spectral(np.diff(blocks, axis=1) / distances),
    }
    for one, two in combinations(range(len(clients)), 2):
        apart = np.abs(gradients[one] - gradients[two])
        pair = {
            "zeta_f": max(float(np.linalg.norm(part, axis=-1).max()) for part in (apart[:, :size], apart[:, size:])),
            "zeta_gxy": _spectral(crosses[one] - crosses[two]),
            "zeta_gyy": _spectral(blocks[one] - blocks[two]),
            "zeta_gstar": float(np.linalg.norm(solutions[one] - solutions[two], axis=-1).max()),
        }
        upper |= {name: max(value, upper.get(name, 0.0)) for name, value in pair.items()}
    if batch_size is not None:
        upper["sigma"] = max(float(_noise(flat, outers, inners, rows)) for rows in clients) / batch_size**0.5
    return Constants(
        mu=float(smallest.min()) / safety,
        clients=len(clients),
        estimated=True,
        region=f"{points} sampled points within {radius:g} of the start",
        **{name: safety * value for name, value in upper.items()},
    )
