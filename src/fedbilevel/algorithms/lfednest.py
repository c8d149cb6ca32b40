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
``fb.neumann``); x is projected onto X where the problem has a projection.  Steps set themselves unless they are given
(`fedbilevel.algorithms.steps`): beta is 1/L with L the clients' mean curvature, a number that each sends; x stands still
within a round, the sum of the Phi_i goes up in place of it, and the server moves x.

Sources: notes on the paper, and the authors' program (github.com/ucr-optml/FedNest), with these local steps for y and x; its
series lacks the factor s with which it approaches the inverse.

Checked: iterates against a naive loop; that with tau = 1 it converges to the point above, known for quadratics, and how far
that is from the minimiser; that it converges to the minimiser when all clients are equal.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, Estimator, Optimizer, OuterBatch, Step, bilevel
from fedbilevel.algorithms.local import Reply, Sum, Told, inner_gradients
from fedbilevel.algorithms.nested import BROADCAST, Held, enroll
from fedbilevel.algorithms.search import Search, solving
from fedbilevel.calculus import Calls, Tree, add, counted, step_along, zeros
from fedbilevel.plan import Algorithm, Phase, Repeat
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler


class Server(NamedTuple):
    """x, y, and what steps follow from where they set themselves."""

    outer: Tree
    inner: Tree
    largest: Any
    kept: Any


@bilevel("global")
def lfednest(
    problem: BilevelProblem,
    hypergradient: Estimator = "auto",
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    inner_rounds: Count = 1,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """LFedNest.  ``inner_step`` is beta, ``outer_step`` alpha, ``inner_rounds`` T, ``local_steps`` tau.

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        hypergradient: An estimator such as `neumann`; every client uses its own Hessian.
        inner_step: Step of the inner variable, positive.  "auto": it sets itself.
        outer_step: Step of the outer variable, positive.  "auto": it sets itself.
        inner_rounds: Rounds that improve the inner variable before each step of the outer one.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        outer_optimizer: An optax transformation for the outer variable at the server, instead of ``outer_step``.

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
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer)
    below = steps.Shared(problem.inner_loss, (inner_step,), asked=steps.asks(hypergradient))
    search = Search(problem, above, solving(problem, hypergradient, batch_size), (batch_size, outer_batch_size))

    def inner_work(message: Told, local: Held, data: LocalData, key: jax.Array) -> tuple[Told, Held]:
        own = Sampler(batch_size)
        local = below.look((local.outer, message.value), own.once(data, key), local)
        rate = below.rates(below.known(message.largest, local))[0] / local_steps

        def step(inner: Tree, batches: Batches) -> tuple[Tree, None]:
            (gradient,) = inner_gradients(problem, ((local.outer, inner),), batches)
            return step_along(inner, -rate, gradient), None

        inner, _ = own.walk(step, message.value, data, key, local_steps)
        return Told(inner, below.sent(local)), counted(local, Calls(gradients=local_steps))

    def outer_work(message: Tree, local: Held, data: LocalData, key: jax.Array) -> tuple[Reply | Sum, Held]:
        estimator = steps.bounded(hypergradient, local.curvature)

        def step(held: tuple[Tree, Tree, Calls], batches: Batches) -> tuple[tuple[Tree, Tree, Calls], None]:
            outer, total, calls = held
            (estimate,), used = estimator(problem, ((outer, message),), batches)
            new = problem.into_set(step_along(outer, -above.local / local_steps, estimate))
            return (new, add(total, estimate), calls.plus(used)), None

        first = local.outer, zeros(local.outer), local.calls
        (outer, total, calls), _ = sampler.walk(step, first, data, key, local_steps)
        return (Sum(total) if above.sums else Reply(outer)), local._replace(calls=calls)

    def settle(server: Server, mean: Told) -> Server:
        return server._replace(inner=mean.value, largest=mean.largest)

    def absorb(server: Server, mean: Reply | Sum) -> Server:
        outer, kept = above.moved(server.outer, server.kept, mean[0])
        return server._replace(outer=outer, kept=kept)

    def init(key: jax.Array) -> Server:
        outer, inner = problem.start(key)
        return Server(outer, inner, below.none_yet(inner), above.start(outer))

    inner = Phase("inner", lambda server: Told(server.inner, server.largest), inner_work, settle)
    outer = Phase("outer", lambda server: server.inner, outer_work, absorb)
    return Algorithm(
        init,
        partial(enroll, problem, below, hypergradient=hypergradient),
        plan=search.plan(BROADCAST, Repeat((inner,), inner_rounds), outer),
        check=above.check,
        remark=lambda server: above.remark(server.kept),
    )
