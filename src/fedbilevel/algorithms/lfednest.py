"""LFedNest: FedNest with local hypergradients, few exchanges and a bias that heterogeneous clients keep.

D. A. Tarzanagh, M. Li, C. Thrampoulidis, S. Oymak, "FedNest: Federated Bilevel, Minimax, and Compositional Optimization",
ICML 2022 (the variant LFedNest).  A round is one outer iteration:

    T times:   y_i -= (beta/tau) grad_y g_i(x, y_i), tau times from y_i = y;   y = mean y_i
    then:      x_i -= (alpha/tau) Phi_i(x_i, y), tau times from x_i = x;       x = mean x_i

where Phi_i = grad_x f_i - (d2g_i/dxdy) [d2g_i/dy2]^-1 grad_y f_i is computed by the client alone, with its *own* Hessian.

Exchanges: T + 1, as the authors count: the broadcast of x that begins a round is not answered and travels with the first y.
Up per round and client: T inner vectors and x; down: x and T + 1 inner vectors.

By design it solves another problem where clients differ: the mean of the clients' Phi_i is not grad h, since a mean of inverses
is not the inverse of the mean, and local steps for y (tau > 1) drift.  With tau = 1 it stops where mean_i Phi_i(x, y(x)) = 0.

Differences from the paper: the local hypergradient is any estimator of this package (the paper's is a Neumann series:
``fb.neumann``); x is projected onto X where the problem has a projection.

Sources: notes on the paper, and the authors' program (github.com/ucr-optml/FedNest), with these local steps for y and x; its
series lacks the factor s with which it approaches the inverse.

Checked: iterates against a naive loop; that with tau = 1 it converges to the point above, known for quadratics, and how far
that is from the minimiser; that it converges to the minimiser when all clients are equal.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax

from fedbilevel.algorithms.arguments import Batch, Count, Estimator, OuterBatch, Positive, bilevel
from fedbilevel.algorithms.local import Reply, inner_gradients
from fedbilevel.algorithms.nested import BROADCAST, Held, enroll
from fedbilevel.calculus import Calls, Tree, counted, step_along
from fedbilevel.plan import Algorithm, Phase, Repeat
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler


class Server(NamedTuple):
    outer: Tree
    inner: Tree


@bilevel("global")
def lfednest(
    problem: BilevelProblem,
    hypergradient: Estimator,
    inner_step: Positive = 0.1,
    outer_step: Positive = 0.1,
    inner_rounds: Count = 1,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
) -> Algorithm:
    """LFedNest.  ``inner_step`` is beta, ``outer_step`` alpha, ``inner_rounds`` T, ``local_steps`` tau.

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        hypergradient: An estimator such as `neumann`; every client uses its own Hessian.
        inner_step: Step of the inner variable, positive.
        outer_step: Step of the outer variable, positive.
        inner_rounds: Rounds that improve the inner variable before each step of the outer one.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range, or the problem has the other lower level.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.tasks import random_quadratic
        >>> problem = random_quadratic(0, clients=3).problem("global")
        >>> fb.lfednest(problem, fb.exact()).name
        'lfednest'
    """
    sampler = Sampler(batch_size, outer_batch_size, hypergradient.train_batches, hypergradient.val_batches)

    def inner_work(message: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Tree, Held]:
        def step(inner: Tree, batches: Batches) -> tuple[Tree, None]:
            (gradient,) = inner_gradients(problem, ((local.outer, inner),), batches)
            return step_along(inner, -inner_step / local_steps, gradient), None

        inner, _ = Sampler(batch_size).walk(step, message, data, key, local_steps)
        return inner, counted(local, Calls(gradients=local_steps))

    def outer_work(message: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Reply, Held]:
        def step(held: tuple[Tree, Calls], batches: Batches) -> tuple[tuple[Tree, Calls], None]:
            outer, calls = held
            (estimate,), used = hypergradient(problem, ((outer, message),), batches)
            return (problem.into_set(step_along(outer, -outer_step / local_steps, estimate)), calls.plus(used)), None

        (outer, calls), _ = sampler.walk(step, (local.outer, local.calls), data, key, local_steps)
        return Reply(outer), local._replace(calls=calls)

    def absorb(server: Server, mean: Reply) -> Server:
        return server._replace(outer=problem.into_set(mean.outer))

    inner = Phase("inner", lambda server: server.inner, inner_work, lambda server, mean: server._replace(inner=mean))
    outer = Phase("outer", lambda server: server.inner, outer_work, absorb)
    return Algorithm(
        init=lambda key: Server(*problem.start(key)),
        enroll=partial(enroll, problem, hypergradient=hypergradient),
        plan=(BROADCAST, Repeat((inner,), inner_rounds), outer),
    )
