"""Pieces that several algorithms share: inner gradients at several points, the arithmetic of recursive momenta, and phases
that can be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel import kernels
from fedbilevel.calculus import Calls, Tree, add, inner_gradient, no_calls, scale, subtract
from fedbilevel.hypergradients import Points
from fedbilevel.hypergradients.neumann import fused_inner_gradients, fused_serves
from fedbilevel.plan import LocalStep, Phase
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData


class Local(NamedTuple):
    """Nothing stays on a client but the count of what it computed, and its curvature where steps follow from it."""

    calls: Calls
    curvature: Any = None


class Reply(NamedTuple):
    """Where a client arrived, and its curvature where steps follow from it."""

    outer: Tree
    largest: Any = None


class Sum(NamedTuple):
    """Of a client's hypergradients: the reply where the server moves x."""

    total: Tree


class Told(NamedTuple):
    """What is sent either way, and the curvature where steps follow from it: the server's mean, or a client's own."""

    value: Tree
    largest: Any


def enroll(key: jax.Array) -> Local:
    return Local(no_calls())


LocalLoop = Callable[[Tree, Tree, LocalData, jax.Array], tuple[Tree, Tree, LocalStep]]


def inner_gradients(problem: BilevelProblem, points: Points, batches: Batches) -> tuple[Tree, ...]:
    """omega: the gradient of g in y at each point, on the same minibatch.

    Args:
        problem: whose inner loss is differentiated.
        points: pairs of an outer and an inner variable.
        batches: the minibatches of a step; the one for the inner loss is used.

    Returns:
        A gradient for each point.
    """
    if fused_serves(problem, batches):
        return fused_inner_gradients(problem, points, batches)
    loss = problem.inner_loss
    found: tuple[Tree, ...] = batches.inner(
        lambda batch: tuple(inner_gradient(loss, *point, batch) for point in points)
    )
    return found


def phase(name: str, send: Callable[[Any], Tree], loop: LocalLoop, absorb: Callable[[Any, Tree], Any]) -> Phase:
    """A phase whose ``work`` is ``loop`` without its record of steps; the compiler drops what nobody reads.

    Args:
        name: what the phase is called.
        send: server state -> message.
        loop: (message, local state, data, key) -> (reply, local state, a `LocalStep` of every step).
        absorb: (server state, mean reply) -> server state.

    Returns:
        The phase, which `fb.trace` can follow.
    """
    return Phase(name, send, lambda *arguments: loop(*arguments)[:2], absorb, trace=loop)


def cube_root_rate(delta: Any, u: Any, sigma: Any, step: jax.Array, like: Any) -> jax.Array:
    """alpha_t = delta / (u + sigma^2 t)^(1/3), in the type ``like``."""
    time = step.astype(like)
    first, start, spread = (jnp.asarray(value, like) for value in (delta, u, sigma))
    return first / kernels.cube_root(start + spread**2 * time)


def share_kept(constant: Any, alpha: jax.Array) -> jax.Array:
    """1 - c alpha^2, kept within [0, 1]: outside it the recursion would amplify old errors."""
    return jnp.clip(1 - jnp.asarray(constant, alpha.dtype) * alpha**2, 0, 1)


def corrected(now: Tree, before: Tree, momentum: Tree, kept: jax.Array) -> Tree:
    """now + kept * (momentum - before): the recursion of every such momentum."""
    return add(now, scale(kept, subtract(momentum, before)))
