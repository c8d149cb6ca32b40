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
r is infinite unless given; x is projected onto X where the problem has a projection.

Sources: notes on the paper and its abstract; we had neither its text nor a program to compare with.

Checked: iterates against a naive loop, with unequal tau_i; convergence to the known minimiser of heterogeneous quadratics
with one local step; with unequal tau_i and small local steps, that SimFBO goes to the minimiser of the problem weighted by
tau_i and ShroFBO to the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.coupled import (
    Point,
    check_global,
    descend,
    direction_calls,
    directions,
    draw_steps,
    first_point,
)
from fedbilevel.algorithms.local import check_rates, kind, settle_outer_batch
from fedbilevel.calculus import Calls, add, no_calls, scale, select, zeros
from fedbilevel.plan import Algorithm, Phase, View
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.sampling import Batches, LocalData


class Local(NamedTuple):
    """Nothing stays on a client but the count of what it computed."""

    calls: Calls


class Reply(NamedTuple):
    """Sums over the local steps (divided by their number, ShroFBO), and their number where the server needs it."""

    sums: Point
    steps: jax.Array | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "inner_step", "outer_step", "adjoint_step", "server_inner_step", "server_outer_step", "server_adjoint_step", "radius",
    ),
    meta_fields=("problem", "local_steps", "batch_size", "outer_batch_size", "normalised"),
)  # fmt: skip
@dataclass(frozen=True)
class Settings:
    """``local_steps``: one number for all clients, or one for each."""

    problem: BilevelProblem
    inner_step: Any
    outer_step: Any
    adjoint_step: Any
    server_inner_step: Any
    server_outer_step: Any
    server_adjoint_step: Any
    radius: Any
    local_steps: int | tuple[int, ...]
    batch_size: int | None
    outer_batch_size: int | None
    normalised: bool


def simfbo(
    problem: BilevelProblem,
    inner_step: float = 0.1,
    outer_step: float = 0.1,
    adjoint_step: float = 0.1,
    local_steps: int | Sequence[int] = 5,
    batch_size: int | None = None,
    outer_batch_size: int | str | None = None,
    server_inner_step: float | None = None,
    server_outer_step: float | None = None,
    server_adjoint_step: float | None = None,
    radius: float | None = None,
) -> Algorithm:
    """SimFBO.  ``inner_step``, ``outer_step`` and ``adjoint_step`` are the clients' eta_y, eta_x and eta_v; those of the
    server (the gammas) are the same unless given.  ``local_steps``: tau, or one number per client.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks import random_quadratic
    >>> problem = random_quadratic(0, clients=3).problem("global")
    >>> fb.simfbo(problem, local_steps=[1, 2, 4]).settings.local_steps
    (1, 2, 4)
    """
    options = (inner_step, outer_step, adjoint_step, local_steps, batch_size, outer_batch_size)
    return _make("simfbo", problem, *options, server_inner_step, server_outer_step, server_adjoint_step, radius)


def shrofbo(
    problem: BilevelProblem,
    inner_step: float = 0.1,
    outer_step: float = 0.1,
    adjoint_step: float = 0.1,
    local_steps: int | Sequence[int] = 5,
    batch_size: int | None = None,
    outer_batch_size: int | str | None = None,
    server_inner_step: float | None = None,
    server_outer_step: float | None = None,
    server_adjoint_step: float | None = None,
    radius: float | None = None,
) -> Algorithm:
    """ShroFBO: `simfbo` that is robust to clients with different numbers of local steps.  The same arguments."""
    options = (inner_step, outer_step, adjoint_step, local_steps, batch_size, outer_batch_size)
    return _make("shrofbo", problem, *options, server_inner_step, server_outer_step, server_adjoint_step, radius)


def _make(
    name: str,
    problem: BilevelProblem,
    inner_step: Any,
    outer_step: Any,
    adjoint_step: Any,
    local_steps: Any,
    batch_size: Any,
    outer_batch_size: Any,
    server_inner_step: Any,
    server_outer_step: Any,
    server_adjoint_step: Any,
    radius: Any,
) -> Algorithm:
    each = isinstance(local_steps, Sequence | np.ndarray) and not isinstance(local_steps, str)
    if each and not len(local_steps):
        raise ValueError("local_steps needs one number per client, but it is empty.")
    for number in local_steps if each else (local_steps,):
        check_global(name, problem, number, batch_size, outer_batch_size)
    check_rates(inner_step=inner_step, outer_step=outer_step, adjoint_step=adjoint_step, radius=radius)
    check_rates(
        server_inner_step=server_inner_step,
        server_outer_step=server_outer_step,
        server_adjoint_step=server_adjoint_step,
    )
    counts = tuple(map(int, local_steps)) if each else int(local_steps)
    outer_batch = settle_outer_batch(batch_size, outer_batch_size)
    return build(
        Settings(
            problem,
            inner_step,
            outer_step,
            adjoint_step,
            server_inner_step,
            server_outer_step,
            server_adjoint_step,
            radius,
            counts,
            batch_size,
            outer_batch,
            name == "shrofbo",
        )
    )


def build(settings: Settings) -> Algorithm:
    problem, counts = settings.problem, settings.local_steps
    most = counts if isinstance(counts, int) else max(counts)
    rates = (settings.outer_step, settings.inner_step, settings.adjoint_step)
    given = (settings.server_outer_step, settings.server_inner_step, settings.server_adjoint_step)
    server_rates = tuple(own if rate is None else rate for rate, own in zip(given, rates, strict=True))

    def own_steps(data: LocalData) -> jax.Array:
        """tau_i."""
        if isinstance(counts, int):
            return jnp.asarray(counts, jnp.int32)
        return jnp.asarray(counts, jnp.int32)[data.number]

    def work(message: Point, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        own = own_steps(data)

        def step(held: tuple[Point, Point], item: tuple[jax.Array, Any]) -> tuple[tuple[Point, Point], None]:
            point, sums = held
            number, drawn = item
            (along,) = directions(problem, (point,), Batches(data, drawn))
            if not isinstance(counts, int):
                along = select(number < own, along, zeros(along))
            return (descend(problem, point, along, rates, None), add(sums, along)), None

        draws = draw_steps(data, key, most, settings.batch_size, settings.outer_batch_size)
        numbers = jnp.arange(most, dtype=jnp.int32)
        (_, sums), _ = jax.lax.scan(step, (message, zeros(message)), (numbers, draws))
        share = own.astype(kind(message.outer))
        reply = Reply(scale(1 / share, sums), share) if settings.normalised else Reply(sums, None)
        return reply, Local(local.calls.plus(direction_calls(own)))

    def absorb(server: Point, mean: Reply) -> Point:
        along = mean.sums if mean.steps is None else scale(mean.steps, mean.sums)
        return descend(problem, server, along, server_rates, settings.radius)

    def check(data: ClientData) -> None:
        problem.check(data, settings.batch_size, settings.outer_batch_size)
        if not isinstance(counts, int) and len(counts) != data.clients:
            raise ValueError(f"local_steps has {len(counts)} numbers, but there are {data.clients} clients.")

    return Algorithm(
        name="shrofbo" if settings.normalised else "simfbo",
        init=lambda key: first_point(problem, key),
        enroll=lambda key: Local(no_calls()),
        plan=(Phase("local", lambda server: server, work, absorb),),
        outer=lambda server: server.outer,
        view=lambda server, local: View(inner=server.inner, calls=local.calls),
        objective=lambda outer, inner, data: problem.outer_loss(outer, inner, data.whole("val")),
        check=check,
        settings=settings,
        build=build,
        local_steps=most,
        problem=problem,
    )
