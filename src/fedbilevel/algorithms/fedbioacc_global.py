"""FedBiOAcc with a global lower level: recursive momenta for x, y and the adjoint u, all six vectors averaged every I steps.

J. Li, F. Huang, H. Huang, "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level
Problems", NeurIPS 2023 (FedBiOAcc).

With z = (x, y, u), d(z; B) = (nu, omega, q) the directions of `fedbio_global` and alpha_t = delta / (u_0 + sigma^2 t)^(1/3),
on client m with the same minibatches at both points:

    m_t = d(z_t; B) + (1 - c alpha_{t-1}^2) (m_{t-1} - d(z_{t-1}; B))        one c for each part; m_1 = d(z_1; B)
    x_{t+1} = x_t - eta alpha_t m_t^x       y_{t+1} = y_t - gamma alpha_t m_t^y       u_{t+1} = Proj_r(u_t - tau alpha_t m_t^u)

After I steps z_{t+1} *and* m_t are averaged; each client keeps its own z_t for the next correction.  Every round is one
exchange.  Up per round and client: x, y, u and their three momenta; down: the same and the step number.

Averaging the momenta is what removes client drift: a client's own momentum keeps pushing it along its own direction
(docs/algorithms.md has the measurement).  ``average_momenta=False`` is that variant, for comparison: three vectors each way.

Differences from the paper: those of `fedbio_global`; the factors 1 - c alpha^2 are kept within [0, 1]; a client that missed
a round compares with the point it receives, since its own no longer belongs to the averaged momenta.

Sources: as for `fedbio_global`.  That the momenta are averaged too stands in the notes, and was measured both ways.

Checked: iterates against a naive loop; convergence to the known minimiser of heterogeneous quadratics, and the drift of
`fedbio_global` and of the variant without averaged momenta beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import coupled
from fedbilevel.algorithms.arguments import Batch, Count, Flag, MaybePositive, OuterBatch, Positive, bilevel
from fedbilevel.algorithms.coupled import Point
from fedbilevel.algorithms.local import corrected, cube_root_rate, share_kept
from fedbilevel.calculus import Calls, Tree, dtype_of, no_calls, select, zeros
from fedbilevel.plan import Algorithm, Phase, View
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData


class Server(NamedTuple):
    """z_{t+1}, the averaged momenta (None where clients keep theirs), and the steps t done."""

    point: Point
    momenta: Point | None
    step: jax.Array


class Local(NamedTuple):
    """What stays on a client: z_t, its momenta where they are not averaged, the step it last finished, its calls."""

    previous: Point
    momenta: Point | None
    step: jax.Array
    calls: Calls


class Reply(NamedTuple):
    outer: Tree
    inner: Tree
    adjoint: Tree
    momenta: Point | None


@bilevel("global")
def fedbioacc_global(
    problem: BilevelProblem,
    inner_step: Positive = 1.0,
    outer_step: Positive = 1.0,
    adjoint_step: Positive = 1.0,
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    delta: Positive = 1.0,
    u: Positive = 8.0,
    sigma: Positive = 1.0,
    c_inner: Positive = 4.0,
    c_outer: Positive = 4.0,
    c_adjoint: Positive = 4.0,
    radius: MaybePositive = None,
    average_momenta: Flag = True,
) -> Algorithm:
    """FedBiOAcc for a global lower level.  ``inner_step`` is gamma, ``outer_step`` eta, ``adjoint_step`` tau, ``u`` u_0.

    The defaults of delta, u and c keep c alpha_1^2 near 1, like `fedbilevel.TUNED`: the momenta forget their first
    minibatches.

    Args:
        problem: A `BilevelProblem` with ``lower_level="global"``.
        inner_step: alpha_t times this is the step of the inner variable.
        outer_step: alpha_t times this is the step of the outer variable.
        adjoint_step: alpha_t times this is the step of u.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        delta: Scale of alpha_t = delta / (u + sigma^2 t)^(1/3).
        u: How late alpha_t begins to fall.
        sigma: How fast alpha_t falls.
        c_inner: How fast the inner momentum forgets: by c alpha_t^2 a step.
        c_outer: The same for the outer momentum.
        c_adjoint: The same for that of u.
        radius: u is kept within a ball of this radius.  None: no bound.
        average_momenta: False: every client keeps its own momenta, for comparison.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range, or the problem has the other lower level.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.tasks import random_quadratic
        >>> problem = random_quadratic(0, clients=3).problem("global")
        >>> fb.fedbioacc_global(problem, 0.3, 0.1, 0.3).name
        'fedbioacc_global'
    """
    sampler, averaged = coupled.sampler(batch_size, outer_batch_size), average_momenta

    def alpha(step: jax.Array, point: Point) -> jax.Array:
        return cube_root_rate(delta, u, sigma, step, dtype_of(point.outer))

    def step(held: tuple[Point, Point, Point, Any, Any], batches: Batches) -> tuple[Any, None]:
        point, previous, momenta, done, started = held
        now, before = coupled.directions(problem, (point, previous), batches)
        last, rate = alpha(done, point), alpha(done + 1, point)
        kept = [jnp.where(started, share_kept(constant, last), 0) for constant in (c_outer, c_inner, c_adjoint)]
        momenta = Point(*map(corrected, now, before, momenta, kept))
        rates = Point(*(jnp.asarray(step, rate.dtype) * rate for step in (outer_step, inner_step, adjoint_step)))
        new = coupled.descend(problem, point, momenta, rates, radius)
        return (new, point, momenta, done + 1, jnp.ones_like(started)), None

    def work(message: Server, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        momenta, done = (message.momenta, message.step) if averaged else (local.momenta, local.step)
        previous = select(local.step == message.step, local.previous, message.point)
        first = (message.point, previous, momenta, message.step, done > 0)
        (point, previous, momenta, done, _), _ = sampler.walk(step, first, data, key, local_steps)
        calls = local.calls.plus(coupled.direction_calls(2 * local_steps))
        sent, kept = (momenta, None) if averaged else (None, momenta)
        return Reply(point.outer, point.inner, point.adjoint, sent), Local(previous, kept, done, calls)

    def absorb(server: Server, mean: Reply) -> Server:
        point = coupled.into_set(problem, Point(mean.outer, mean.inner, mean.adjoint))
        return Server(point, mean.momenta, server.step + local_steps)

    def init(key: jax.Array) -> Server:
        point = coupled.first_point(problem, key)
        return Server(point, zeros(point) if averaged else None, jnp.zeros((), jnp.int32))

    def enroll(key: jax.Array) -> Local:
        point = coupled.first_point(problem, key)
        return Local(point, None if averaged else zeros(point), jnp.zeros((), jnp.int32), no_calls())

    return Algorithm(
        init,
        enroll,
        plan=(Phase("local", lambda server: server, work, absorb),),
        outer=lambda server: server.point.outer,
        view=lambda server, local: View(inner=server.point.inner, calls=local.calls),
    )
