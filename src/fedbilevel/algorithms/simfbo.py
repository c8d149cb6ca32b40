"""SimFBO and ShroFBO: one loop over x, y and the adjoint v, clients send sums of directions, the server takes the steps.

Y. Yang, P. Xiao, K. Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel Learning", NeurIPS
2023.  With the directions (nu, omega, q) of `fedbilevel.algorithms.coupled`, client i with tau_i local steps:

    for k = 0 .. tau_i - 1:    y_i -= eta_y omega_k        v_i -= eta_v q_k        x_i -= eta_x nu_k
    reply:                     Q_i = sum_k (nu_k, omega_k, q_k)
    server, SimFBO:            y -= gamma_y sum_i p_i Q_i^y      v = Proj_r(v - gamma_v sum_i p_i Q_i^v)
                               x -= gamma_x sum_i p_i Q_i^x
    server, ShroFBO:           the same with  rho Q_i / tau_i  in place of Q_i,   rho = sum_i p_i tau_i

Clients with more local steps count more in SimFBO, which then solves a problem with weights p_i tau_i: ShroFBO divides that
out.  With equal tau_i the two are the same.  Every round is one exchange.  Up per round and client: three directions (and
one number, ShroFBO); down: x, y and v.

Differences from the paper: its coefficients a_i^(k) are 1 (so that ||a_i||_1 = tau_i); the p_i are renormalised over the
clients that answer; one validation minibatch serves both gradients of f and one training minibatch both second derivatives;
r is infinite unless given; x is projected onto X where the problem has a projection.  Steps set themselves unless they are
given (`fedbilevel.algorithms.steps`): eta_y = eta_v = 1/L to 1/(max_i tau_i L) with L the clients' mean curvature, and
eta_x = 0; the server moves x by its own rule.

Sources: notes on the paper and its abstract; we had neither its text nor a program to compare with.

Checked: iterates against a naive loop, with unequal tau_i; convergence to the known minimiser of heterogeneous quadratics
with one local step; with unequal tau_i and small local steps, that SimFBO goes to the minimiser of the problem weighted by
tau_i and ShroFBO to the right one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import coupled, steps
from fedbilevel.algorithms.arguments import Batch, CountOrEach, MaybePositive, Optimizer, OuterBatch, Step, bilevel
from fedbilevel.algorithms.coupled import Meeting, Point, Server
from fedbilevel.algorithms.local import Local, Told
from fedbilevel.calculus import add, counted, dtype_of, scale, select, zeros
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.sampling import Batches, LocalData


class Reply(NamedTuple):
    """Sums over the local steps (divided by their number, ShroFBO), their number where the server needs it, and the client's
    curvature where steps follow from it."""

    sums: Point
    steps: jax.Array | None
    largest: Any


@bilevel("global")
def simfbo(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    adjoint_step: Step = "auto",
    local_steps: CountOrEach = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    server_inner_step: MaybePositive = None,
    server_outer_step: MaybePositive = None,
    server_adjoint_step: MaybePositive = None,
    radius: MaybePositive = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """SimFBO.  ``inner_step``, ``outer_step`` and ``adjoint_step`` are the clients' eta_y, eta_x and eta_v; those of the
    server (the gammas) are the same unless given.  ``local_steps``: tau, or one number per client.

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        inner_step: The clients' step of the inner variable.  "auto": it sets itself.
        outer_step: The clients' step of the outer variable.  "auto": it sets itself.
        adjoint_step: The clients' step of u.  "auto": it sets itself.
        local_steps: Steps between two exchanges: one number, or one for each client.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        server_inner_step: The server's step of the inner variable.  None: the clients'.
        server_outer_step: The server's step of the outer variable.  None: the clients'.
        server_adjoint_step: The server's step of u.  None: the clients'.
        radius: u is kept within a ball of this radius.  None: no bound.
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
        >>> fb.simfbo(problem, local_steps=[1, 2, 4]).settings.local_steps
        (1, 2, 4)
    """
    own = (outer_step, inner_step, adjoint_step)
    servers = (server_outer_step, server_inner_step, server_adjoint_step)
    return _algorithm(
        False, problem, local_steps, own, servers, radius, (batch_size, outer_batch_size), outer_optimizer
    )


@bilevel("global")
def shrofbo(
    problem: BilevelProblem,
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    adjoint_step: Step = "auto",
    local_steps: CountOrEach = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    server_inner_step: MaybePositive = None,
    server_outer_step: MaybePositive = None,
    server_adjoint_step: MaybePositive = None,
    radius: MaybePositive = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """ShroFBO: `simfbo` that is robust to clients with different numbers of local steps.  The same arguments.

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        inner_step: The clients' step of the inner variable.  "auto": it sets itself.
        outer_step: The clients' step of the outer variable.  "auto": it sets itself.
        adjoint_step: The clients' step of u.  "auto": it sets itself.
        local_steps: Steps between two exchanges: one number, or one for each client.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        server_inner_step: The server's step of the inner variable.  None: the clients'.
        server_outer_step: The server's step of the outer variable.  None: the clients'.
        server_adjoint_step: The server's step of u.  None: the clients'.
        radius: u is kept within a ball of this radius.  None: no bound.
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
        >>> fb.shrofbo(problem, local_steps=[1, 2, 4]).name
        'shrofbo'
    """
    own = (outer_step, inner_step, adjoint_step)
    servers = (server_outer_step, server_inner_step, server_adjoint_step)
    return _algorithm(True, problem, local_steps, own, servers, radius, (batch_size, outer_batch_size), outer_optimizer)


def _algorithm(
    normalised: bool,
    problem: BilevelProblem,
    counts: Any,
    rates: tuple[Any, Any, Any],
    server_rates: tuple[Any, Any, Any],
    radius: Any,
    sizes: tuple[Any, Any],
    optimizer: Any,
) -> Algorithm:
    if optimizer is not None and server_rates[0] is not None:
        raise ValueError("Give server_outer_step or outer_optimizer, not both: an optimizer has a step of its own.")
    each = not isinstance(counts, int)
    most, sampler = max(counts) if each else counts, coupled.sampler(*sizes)
    above = steps.Outer(problem, rates[0], most, optimizer, eager=True)
    below = steps.Shared(problem.inner_loss, rates[1:], most)
    meeting = Meeting(problem, above, below, sizes)

    def work(message: Told, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        own = jnp.asarray(counts, jnp.int32)[data.number] if each else jnp.asarray(counts, jnp.int32)  # tau_i
        local = below.look(message.value[:2], sampler.once(data, key), local)
        clients = (above.local, *below.rates(below.known(message.largest, local)))

        def step(held: tuple[Point, Point, jax.Array], batches: Batches) -> tuple[tuple[Point, Point, jax.Array], None]:
            point, sums, number = held
            (along,) = coupled.directions(problem, (point,), batches)
            if each:
                along = select(number < own, along, zeros(along))
            return (coupled.descend(problem, point, along, clients), add(sums, along), number + 1), None

        first = (message.value, zeros(message.value), jnp.zeros((), jnp.int32))
        (_, sums, _), _ = sampler.walk(step, first, data, key, most)
        share = own.astype(dtype_of(message.value.outer))
        sums, count = (scale(1 / share, sums), share) if normalised else (sums, None)
        return Reply(sums, count, below.sent(local)), counted(local, coupled.direction_calls(own))

    def absorb(server: Server, mean: Reply) -> Server:
        along = mean.sums if mean.steps is None else scale(mean.steps, mean.sums)
        clients = (above.local, *below.rates(below.shared(mean.largest, server.heading)))
        servers = tuple(own if rate is None else rate for rate, own in zip(server_rates, clients, strict=True))
        point, kept = coupled.descend(problem, server.point, along, servers, radius), server.kept
        if above.sums and server_rates[0] is None:
            outer, kept = above.moved(server.point.outer, kept, along.outer)
            point = point._replace(outer=outer)
        return meeting.after(server, point, mean.largest, kept)

    def check(data: ClientData) -> None:
        above.check(data)
        if each and len(counts) != data.clients:
            raise ValueError(f"local_steps has {len(counts)} numbers, but there are {data.clients} clients.")

    local = Phase("local", meeting.told, work, absorb)
    return Algorithm(
        meeting.init,
        meeting.enroll,
        plan=meeting.plan(local) if server_rates[0] is None else (local,),
        outer=meeting.outer,
        check=check,
        remark=meeting.remark,
    )
