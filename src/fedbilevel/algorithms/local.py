"""Pieces that several algorithms share: checked settings, inner gradients at several points, the loop of local steps, and
the arithmetic of recursive momenta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.calculus import Tree, add, inner_gradient, scale, subtract
from fedbilevel.hypergradients import linear_fused
from fedbilevel.hypergradients.base import Hypergradient, Points
from fedbilevel.plan import LocalStep, Phase
from fedbilevel.problem import BilevelProblem, positive, whole_number
from fedbilevel.sampling import Batches, LocalData, draw_round

LocalLoop = Callable[[Tree, Tree, LocalData, jax.Array], tuple[Tree, Tree, LocalStep]]


def check_problem(name: str, problem: Any, lower_level: str) -> None:
    """``name`` solves problems with this lower level and refuses the other: their answers differ."""
    if not isinstance(problem, BilevelProblem):
        raise TypeError(f"The first argument must be a BilevelProblem, not {type(problem).__name__}.")
    if problem.lower_level != lower_level:
        others = "fedbio or fedbioacc" if lower_level == "global" else "fedbio_global, simfbo or fednest"
        raise ValueError(
            f"{name} solves problems with a {lower_level} lower level, but this one's is {problem.lower_level}: make it "
            f"with lower_level={lower_level!r}, or use a method for the other kind such as {others}."
        )


def check_bilevel(name: str, problem: Any, hypergradient: Any) -> None:
    """A method for local lower levels with a hypergradient estimator."""
    check_problem(name, problem, "local")
    check_estimator(hypergradient)


def check_estimator(hypergradient: Any) -> None:
    if not (callable(hypergradient) and hasattr(hypergradient, "train_batches")):
        raise TypeError(
            "hypergradient must be an estimator such as fb.exact(), fb.conjugate_gradient() or fb.neumann(terms=10), "
            f"not {hypergradient!r}."
        )


def check_loop(local_steps: Any, batch_size: Any, outer_batch_size: Any = None) -> None:
    whole_number("local_steps", local_steps)
    whole_number("batch_size", batch_size, optional=True)
    if outer_batch_size != "whole":
        whole_number("outer_batch_size", outer_batch_size, optional=True)


def check_rates(**rates: Any) -> None:
    """Steps and other numbers that must be positive, by their names; None is a number that was left out."""
    for name, value in rates.items():
        if value is not None:
            positive(name, value)


def settle_outer_batch(batch_size: int | None, outer_batch_size: int | str | None) -> int | None:
    """None follows ``batch_size``; "whole" is the whole validation set."""
    if outer_batch_size == "whole":
        return None
    return batch_size if outer_batch_size is None else int(outer_batch_size)


def inner_gradients(problem: BilevelProblem, points: Points, batches: Batches) -> tuple[Tree, ...]:
    """omega: the gradient of g in y at each point, on the same minibatch."""
    if linear_fused.applies(problem, batches):
        return linear_fused.inner_gradients(problem, points, batches)
    batch = batches.inner()
    return tuple(inner_gradient(problem.inner_loss, outer, inner, batch) for outer, inner in points)


def local_loop(
    step: Callable[[Any, Batches], tuple[Any, LocalStep]],
    carry: Any,
    data: LocalData,
    key: jax.Array,
    *,
    local_steps: int,
    batch_size: int | None,
    outer_batch_size: int | None,
    hypergradient: Hypergradient,
) -> tuple[Any, LocalStep]:
    """``local_steps`` steps on one client, with every minibatch of the round drawn ahead."""
    draws = draw_round(
        data,
        key,
        local_steps,
        batch_size=batch_size,
        outer_batch_size=outer_batch_size,
        train_batches=hypergradient.train_batches,
        val_batches=hypergradient.val_batches,
    )
    result: tuple[Any, LocalStep] = jax.lax.scan(
        lambda state, drawn: step(state, Batches(data, drawn)), carry, draws, length=local_steps
    )
    return result


def phase(name: str, send: Callable[[Any], Tree], loop: LocalLoop, absorb: Callable[[Any, Tree], Any]) -> Phase:
    """A phase whose ``work`` is ``loop`` without its record of steps; the compiler drops what nobody reads."""
    return Phase(name, send, lambda *arguments: loop(*arguments)[:2], absorb, trace=loop)


def kind(tree: Tree) -> Any:
    """The type of a variable's numbers."""
    return jax.tree.leaves(tree)[0].dtype


def cube_root_rate(delta: Any, u: Any, sigma: Any, step: jax.Array, like: Any) -> jax.Array:
    """alpha_t = delta / (u + sigma^2 t)^(1/3), in the type ``like``."""
    time = step.astype(like)
    first, start, spread = (jnp.asarray(value, like) for value in (delta, u, sigma))
    return first / jnp.cbrt(start + spread**2 * time)


def share_kept(constant: Any, alpha: jax.Array) -> jax.Array:
    """1 - c alpha^2, kept within [0, 1]: outside it the recursion would amplify old errors."""
    return jnp.clip(1 - jnp.asarray(constant, alpha.dtype) * alpha**2, 0, 1)


def corrected(now: Tree, before: Tree, momentum: Tree, kept: jax.Array) -> Tree:
    """now + kept * (momentum - before): the recursion of every such momentum."""
    return add(now, scale(kept, subtract(momentum, before)))
