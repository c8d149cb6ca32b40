"""FedBiO: local bilevel descent with the outer variable averaged every I steps.

J. Li, F. Huang, H. Huang, "Local Stochastic Bilevel Optimization with Momentum-Based Variance Reduction", Alg. 2.

On client m, for each of the I local steps of a round:

    omega_t = grad_y g(x_t, y_t; B_y)           nu_t = Phi(x_t, y_t; B_x)
    y_{t+1} = y_t - gamma omega_t               x_{t+1} = x_t - eta nu_t

then x is averaged over the clients; y never leaves its client.  Up per round and client: one outer-sized vector; down: one.

Differences from the paper: every round has exactly I local steps (the printed rule ``t + 1 mod I = 0`` makes the first one
shorter); the outer variable is projected onto X after each update where the problem has a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from fedbilevel.algorithms.local import (
    check_bilevel,
    check_loop,
    inner_gradients,
    local_loop,
    phase,
    settle_outer_batch,
)
from fedbilevel.calculus import Calls, Tree, no_calls, step_along
from fedbilevel.hypergradients.base import Hypergradient
from fedbilevel.plan import Algorithm, LocalStep, View
from fedbilevel.problem import BilevelProblem, positive
from fedbilevel.sampling import Batches, LocalData


class Local(NamedTuple):
    """What stays on a client: y and how much it computed."""

    inner: Tree
    calls: Calls


class Reply(NamedTuple):
    outer: Tree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("hypergradient", "inner_step", "outer_step"),
    meta_fields=("problem", "local_steps", "batch_size", "outer_batch_size"),
)
@dataclass(frozen=True)
class Settings:
    problem: BilevelProblem
    hypergradient: Hypergradient
    inner_step: Any
    outer_step: Any
    local_steps: int
    batch_size: int | None
    outer_batch_size: int | None


def fedbio(
    problem: BilevelProblem,
    hypergradient: Hypergradient,
    inner_step: float = 0.1,
    outer_step: float = 0.1,
    local_steps: int = 5,
    batch_size: int | None = None,
    outer_batch_size: int | str | None = None,
) -> Algorithm:
    """FedBiO (Alg. 2).  ``inner_step`` is gamma, ``outer_step`` eta, ``local_steps`` I.

    ``batch_size=None`` uses whole local sets: deterministic.  ``outer_batch_size`` is the number of validation rows a step
    draws: None means ``batch_size``, "whole" all of them.
    """
    check_bilevel("fedbio", problem, hypergradient)
    check_loop(local_steps, batch_size, outer_batch_size)
    positive("inner_step", inner_step)
    positive("outer_step", outer_step)
    outer_batch = settle_outer_batch(batch_size, outer_batch_size)
    return build(Settings(problem, hypergradient, inner_step, outer_step, local_steps, batch_size, outer_batch))


def build(settings: Settings) -> Algorithm:
    problem = settings.problem

    def step(state: tuple[Tree, Tree, Calls], batches: Batches) -> tuple[tuple[Tree, Tree, Calls], LocalStep]:
        outer, inner, calls = state
        points = ((outer, inner),)
        (inner_momentum,) = inner_gradients(problem, points, batches)
        (outer_momentum,), used = settings.hypergradient(problem, points, batches)
        new_inner = step_along(inner, -settings.inner_step, inner_momentum)
        new_outer = problem.into_set(step_along(outer, -settings.outer_step, outer_momentum))
        calls = calls.plus(used).plus(Calls(gradients=1))
        return (new_outer, new_inner, calls), LocalStep(outer, inner, outer_momentum, inner_momentum, new_outer)

    def loop(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local, LocalStep]:
        (outer, inner, calls), steps = local_loop(
            step,
            (message, local.inner, local.calls),
            data,
            key,
            local_steps=settings.local_steps,
            batch_size=settings.batch_size,
            outer_batch_size=settings.outer_batch_size,
            hypergradient=settings.hypergradient,
        )
        return Reply(outer), Local(inner, calls), steps

    return Algorithm(
        name="fedbio",
        init=lambda key: problem.into_set(problem.init(key)[0]),
        enroll=lambda key: Local(problem.init(key)[1], no_calls()),
        plan=(phase("local", lambda server: server, loop, lambda server, mean: problem.into_set(mean.outer)),),
        outer=lambda server: server,
        view=lambda server, local: View(inner=local.inner, calls=local.calls),
        objective=lambda outer, inner, data: problem.outer_loss(outer, inner, data.whole("val")),
        check=lambda data: problem.check(data, settings.batch_size, settings.outer_batch_size),
        settings=settings,
        build=build,
        local_steps=settings.local_steps,
        problem=problem,
    )
