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

from typing import NamedTuple

import jax

from fedbilevel.algorithms.arguments import Batch, Count, Estimator, OuterBatch, Positive, bilevel
from fedbilevel.algorithms.local import Reply, inner_gradients, phase
from fedbilevel.calculus import Calls, Tree, no_calls, step_along
from fedbilevel.plan import Algorithm, LocalStep
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler


class Local(NamedTuple):
    """What stays on a client: y and how much it computed."""

    inner: Tree
    calls: Calls


@bilevel("local")
def fedbio(
    problem: BilevelProblem,
    hypergradient: Estimator,
    inner_step: Positive = 0.1,
    outer_step: Positive = 0.1,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
) -> Algorithm:
    """FedBiO (Alg. 2).  ``inner_step`` is gamma, ``outer_step`` eta, ``local_steps`` I.

    ``batch_size=None`` uses whole local sets: deterministic.  ``outer_batch_size`` is the number of validation rows a step
    draws: None means ``batch_size``, "whole" all of them.
    """
    sampler = Sampler(batch_size, outer_batch_size, hypergradient.train_batches, hypergradient.val_batches)

    def step(state: tuple[Tree, Tree, Calls], batches: Batches) -> tuple[tuple[Tree, Tree, Calls], LocalStep]:
        outer, inner, calls = state
        points = ((outer, inner),)
        (inner_momentum,) = inner_gradients(problem, points, batches)
        (outer_momentum,), used = hypergradient(problem, points, batches)
        new_inner = step_along(inner, -inner_step, inner_momentum)
        new_outer = problem.into_set(step_along(outer, -outer_step, outer_momentum))
        calls = calls.plus(used).plus(Calls(gradients=1))
        return (new_outer, new_inner, calls), LocalStep(outer, inner, outer_momentum, inner_momentum, new_outer)

    def loop(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local, LocalStep]:
        (outer, *kept), steps = sampler.walk(step, (message, *local), data, key, local_steps)
        return Reply(outer), Local(*kept), steps

    return Algorithm(
        init=lambda key: problem.start(key)[0],
        enroll=lambda key: Local(problem.start(key)[1], no_calls(hypergradient)),
        plan=(phase("local", lambda server: server, loop, lambda server, mean: problem.into_set(mean.outer)),),
        outer=lambda server: server,
    )
