"""FedBiO: local bilevel descent with the outer variable averaged every I steps.

J. Li, F. Huang, H. Huang, "Local Stochastic Bilevel Optimization with Momentum-Based Variance Reduction", Alg. 2.

On client m, for each of the I local steps of a round:

    omega_t = grad_y g(x_t, y_t; B_y)           nu_t = Phi(x_t, y_t; B_x)
    y_{t+1} = y_t - gamma omega_t               x_{t+1} = x_t - eta nu_t

then x is averaged over the clients; y never leaves its client.  Up per round and client: one outer-sized vector; down: one.

Differences from the paper: every round has exactly I local steps (the printed rule ``t + 1 mod I = 0`` makes the first one
shorter); the outer variable is projected onto X after each update where the problem has a projection.  Steps set themselves
unless they are given, or follow an optimizer (`fedbilevel.algorithms.steps`): clients then reply the sum of their nu_t, which
is as long as x, and where eta is not given x stands still within a round but the first, in which clients search.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, Estimator, Optimizer, OuterBatch, Step, bilevel
from fedbilevel.algorithms.local import Reply, Sum, inner_gradients, phase
from fedbilevel.calculus import (
    Calls,
    Tree,
    add,
    dtype_of,
    no_calls,
    select,
    squared_norm,
    step_along,
    subtract,
    zeros,
)
from fedbilevel.plan import Algorithm, LocalStep
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler


class Server(NamedTuple):
    """x, and what its steps follow from where they set themselves."""

    outer: Tree
    kept: Any


class Local(NamedTuple):
    """What stays on a client: y, how much it computed, and what the inner steps follow from where they set themselves."""

    inner: Tree
    calls: Calls
    kept: Any


class Message(NamedTuple):
    """x, and how a search begins where one is made."""

    outer: Tree
    probe: Any


class Pace(NamedTuple):
    """Of a search: the step of x, the last hypergradient, and the sum of all their squared norms."""

    step: jax.Array
    last: Tree
    square: jax.Array

    def after(self, estimate: Tree, probe: jax.Array) -> Pace:
        square = squared_norm(estimate)
        first = probe / jnp.sqrt(jnp.maximum(square, steps.TINY))
        step = jnp.where(self.square > 0, steps.strode(self.step, estimate, self.last), first)
        return Pace(step, estimate, self.square + square)


def pace_at(outer: Tree) -> Pace:
    zero = jnp.zeros((), dtype_of(outer))
    return Pace(zero, zeros(outer), zero)


class Walk(NamedTuple):
    outer: Tree
    total: Tree
    pace: Any
    local: Local


@bilevel("local")
def fedbio(
    problem: BilevelProblem,
    hypergradient: Estimator = "auto",
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    inner_optimizer: Optimizer = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """FedBiO (Alg. 2).  ``inner_step`` is gamma, ``outer_step`` eta, ``local_steps`` I; steps set themselves unless given.

    ``batch_size=None`` uses whole local sets: deterministic.  ``outer_batch_size`` is the number of validation rows a step
    draws: None means ``batch_size``, "whole" all of them.  ``hypergradient="auto"``: conjugate gradients on whole sets, on
    minibatches a series that ends by itself.  ``outer_optimizer`` and ``inner_optimizer`` are optax transformations.

    Args:
        problem: A `BilevelProblem` with ``lower_level="local"``.
        hypergradient: An estimator such as `exact`, `conjugate_gradient` or `neumann`.  "auto" takes conjugate gradients on
            whole sets and, on minibatches, a series that ends by itself.
        inner_step: Step of the inner variable, positive. "auto": it sets itself.
        outer_step: Step of the outer variable, positive. "auto": it sets itself.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        inner_optimizer: An optax transformation for the inner variable, instead of ``inner_step``.
        outer_optimizer: An optax transformation for the outer variable at the server, instead of ``outer_step``.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range, or the problem has the other lower level.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.tasks import random_quadratic
        >>> quadratic = random_quadratic(0, clients=3)
        >>> result = fb.simulate(fb.fedbio(quadratic.problem()), quadratic.data(), rounds=200, record_every=None)
        >>> bool(abs(result.outer - quadratic.minimiser()).max() < 0.01)
        True
    """
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer)
    itself = inner_step is None and inner_optimizer is None
    ahead, share = steps.AHEAD if itself else 0, 1.0 if batch_size is None else steps.QUIET
    below = steps.Inner(problem, hypergradient, inner_step, inner_optimizer, ahead, share)
    train_batches, val_batches = hypergradient.train_batches + ahead, hypergradient.val_batches
    sampler = Sampler(batch_size, outer_batch_size, train_batches, val_batches)

    def loop(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply | Sum, Local, LocalStep]:
        searching = message.probe > 0 if above.searches else jnp.asarray(False)

        def step(walk: Walk, batches: Batches) -> tuple[Walk, LocalStep]:
            outer, total, pace, (inner, calls, kept) = walk
            kept, looked = below.look((outer, inner), batches, kept)
            inner, settling = below.settled(outer, inner, batches, kept, jnp.where(searching, steps.SETTLING, 1))
            points = ((outer, inner),)
            (inner_momentum,) = inner_gradients(problem, points, batches)
            (outer_momentum,), used = below.estimator(kept)(problem, points, batches)
            new_inner, kept = below.moved(inner, inner_momentum, kept)
            rate = above.local
            if above.searches:
                pace = pace.after(outer_momentum, message.probe)
                rate = jnp.where(searching, pace.step, 0)
            new_outer = problem.into_set(step_along(outer, -rate, outer_momentum))
            calls = calls.plus(used).plus(looked).plus(settling).plus(Calls(gradients=1))
            total = add(total, outer_momentum) if above.sums else total
            walk = Walk(new_outer, total, pace, Local(new_inner, calls, kept))
            return walk, LocalStep(outer, inner, outer_momentum, inner_momentum, new_outer)

        outer = message.outer
        first = Walk(outer, zeros(outer) if above.sums else None, pace_at(outer) if above.searches else None, local)
        walk, taken = sampler.walk(step, first, data, key, local_steps)
        if not above.sums:
            return Reply(walk.outer), walk.local, taken
        if not above.searches:
            return Sum(walk.total), walk.local, taken
        total = select(searching, subtract(outer, walk.outer), walk.total)
        return Sum(total, walk.pace.square / local_steps), walk.local, taken

    def init(key: jax.Array) -> Server:
        outer, _ = problem.start(key)
        return Server(outer, above.start(outer))

    def enroll(key: jax.Array) -> Local:
        _, inner = problem.start(key)
        return Local(inner, no_calls(hypergradient), below.start(inner, key))

    def send(server: Server) -> Message:
        return Message(server.outer, above.probe(server.kept))

    def absorb(server: Server, mean: Any) -> Server:
        moved = Server(*above.moved(*server, mean[0]))
        if not above.searches:
            return moved
        return select(server.kept.rounds == 0, Server(*above.found(*server, *mean)), moved)  # type: ignore[no-any-return]

    return Algorithm(
        init,
        enroll,
        plan=(phase("local", send, loop, absorb),),
        check=lambda data: steps.check_optimizers(problem, inner_optimizer, outer_optimizer),
        remark=lambda server: above.remark(server.kept),
    )
