"""FedBiO: local bilevel descent with the outer variable averaged every I steps.

J. Li, F. Huang, H. Huang, "Local Stochastic Bilevel Optimization with Momentum-Based Variance Reduction", Alg. 2.

On client m, for each of the I local steps of a round:

    omega_t = grad_y g(x_t, y_t; B_y)           nu_t = Phi(x_t, y_t; B_x)
    y_{t+1} = y_t - gamma omega_t               x_{t+1} = x_t - eta nu_t

then x is averaged over the clients; y never leaves its client.  Up per round and client: one outer-sized vector; down: one.

Differences from the paper: every round has exactly I local steps (the printed rule ``t + 1 mod I = 0`` makes the first one
shorter); the outer variable is projected onto X after each update where the problem has a projection.  Steps set themselves
unless they are given, or follow an optimizer (`fedbilevel.algorithms.steps`): clients then reply the sum of their nu_t, which
is as long as x, and where eta is not given x stands still within a round, and the first round is a search for the scale of x.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, Estimator, Optimizer, OuterBatch, Step, bilevel
from fedbilevel.algorithms.local import Reply, Sum, inner_gradients, phase
from fedbilevel.algorithms.search import Search, solving
from fedbilevel.calculus import Calls, Tree, add, no_calls, step_along, zeros
from fedbilevel.plan import Algorithm, LocalStep, View
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


class Walk(NamedTuple):
    outer: Tree
    total: Tree
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
    below = steps.settling(problem, hypergradient, inner_step, inner_optimizer, batch_size)
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer, settled=below.ahead > 0)
    sampler = Sampler(batch_size, outer_batch_size, below.train_batches, hypergradient.val_batches)
    search = Search(problem, above, solving(problem, hypergradient, batch_size), (batch_size, outer_batch_size))

    def step(walk: Walk, batches: Batches) -> tuple[Walk, LocalStep]:
        outer, total, (inner, calls, kept) = walk
        kept, looked = below.look((outer, inner), batches, kept)
        inner, settling = below.settled(outer, inner, batches, kept)
        points = ((outer, inner),)
        (inner_momentum,) = inner_gradients(problem, points, batches)
        (outer_momentum,), used = below.estimator(kept)(problem, points, batches)
        new_inner, kept = below.moved(inner, inner_momentum, kept)
        new_outer = problem.into_set(step_along(outer, -above.local, outer_momentum))
        local = Local(new_inner, calls.plus(used).plus(looked).plus(settling).plus(Calls(gradients=1)), kept)
        total = add(total, outer_momentum) if above.sums else total
        return Walk(new_outer, total, local), LocalStep(outer, inner, outer_momentum, inner_momentum, new_outer)

    def loop(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply | Sum, Local, LocalStep]:
        first = Walk(message, zeros(message) if above.sums else None, local)
        walk, taken = sampler.walk(step, first, data, key, local_steps)
        return Sum(walk.total) if above.sums else Reply(walk.outer), walk.local, taken

    def init(key: jax.Array) -> Server:
        outer, _ = problem.start(key)
        return Server(outer, above.start(outer))

    def enroll(key: jax.Array) -> Local:
        _, inner = problem.start(key)
        return Local(inner, no_calls(hypergradient), below.start(inner, key))

    def absorb(server: Server, mean: Reply | Sum) -> Server:
        return Server(*above.moved(*server, mean[0]))

    return Algorithm(
        init,
        enroll,
        plan=search.plan(phase("local", lambda server: server.outer, loop, absorb)),
        view=lambda server, local: View(inner=local.kept.answer(local.inner), calls=local.calls),
        check=lambda data: steps.check_optimizers(problem, inner_optimizer, outer_optimizer),
        remark=lambda server: above.remark(server.kept),
    )
