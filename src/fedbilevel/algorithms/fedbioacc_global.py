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

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.coupled import (
    Point,
    check_global,
    descend,
    direction_calls,
    directions,
    draw_steps,
    first_point,
)
from fedbilevel.algorithms.local import (
    check_rates,
    corrected,
    cube_root_rate,
    kind,
    settle_outer_batch,
    share_kept,
)
from fedbilevel.calculus import Calls, no_calls, select, zeros
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
    outer: Any
    inner: Any
    adjoint: Any
    momenta: Point | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "inner_step", "outer_step", "adjoint_step", "delta", "u", "sigma", "c_inner", "c_outer", "c_adjoint", "radius",
    ),
    meta_fields=("problem", "local_steps", "batch_size", "outer_batch_size", "average_momenta"),
)  # fmt: skip
@dataclass(frozen=True)
class Settings:
    problem: BilevelProblem
    inner_step: Any
    outer_step: Any
    adjoint_step: Any
    delta: Any
    u: Any
    sigma: Any
    c_inner: Any
    c_outer: Any
    c_adjoint: Any
    radius: Any
    local_steps: int
    batch_size: int | None
    outer_batch_size: int | None
    average_momenta: bool


def fedbioacc_global(
    problem: BilevelProblem,
    inner_step: float = 1.0,
    outer_step: float = 1.0,
    adjoint_step: float = 1.0,
    local_steps: int = 5,
    batch_size: int | None = None,
    outer_batch_size: int | str | None = None,
    delta: float = 1.0,
    u: float = 8.0,
    sigma: float = 1.0,
    c_inner: float = 4.0,
    c_outer: float = 4.0,
    c_adjoint: float = 4.0,
    radius: float | None = None,
    average_momenta: bool = True,
) -> Algorithm:
    """FedBiOAcc for a global lower level.  ``inner_step`` is gamma, ``outer_step`` eta, ``adjoint_step`` tau, ``u`` u_0.

    The defaults of delta, u and c keep c alpha_1^2 near 1, like `fedbilevel.TUNED`: the momenta forget their first
    minibatches.
    """
    check_global("fedbioacc_global", problem, local_steps, batch_size, outer_batch_size)
    check_rates(inner_step=inner_step, outer_step=outer_step, adjoint_step=adjoint_step, delta=delta, u=u, sigma=sigma)
    check_rates(c_inner=c_inner, c_outer=c_outer, c_adjoint=c_adjoint, radius=radius)
    if not isinstance(average_momenta, bool):
        raise TypeError(f"average_momenta must be True or False, not {average_momenta!r}.")
    outer_batch = settle_outer_batch(batch_size, outer_batch_size)
    return build(
        Settings(
            problem,
            inner_step,
            outer_step,
            adjoint_step,
            delta,
            u,
            sigma,
            c_inner,
            c_outer,
            c_adjoint,
            radius,
            local_steps,
            batch_size,
            outer_batch,
            average_momenta,
        )
    )


def build(settings: Settings) -> Algorithm:
    problem, averaged = settings.problem, settings.average_momenta
    steps = (settings.outer_step, settings.inner_step, settings.adjoint_step)
    constants = (settings.c_outer, settings.c_inner, settings.c_adjoint)

    def alpha(step: jax.Array, point: Point) -> jax.Array:
        return cube_root_rate(settings.delta, settings.u, settings.sigma, step, kind(point.outer))

    def work(message: Server, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        def step(held: tuple[Point, Point, Point, Any, Any], drawn: Any) -> tuple[Any, None]:
            point, previous, momenta, done, started = held
            now, before = directions(problem, (point, previous), Batches(data, drawn))
            last, rate = alpha(done, point), alpha(done + 1, point)
            kept = [jnp.where(started, share_kept(constant, last), 0) for constant in constants]
            momenta = Point(*map(corrected, now, before, momenta, kept))
            rates = tuple(jnp.asarray(step, rate.dtype) * rate for step in steps)
            new = descend(problem, point, momenta, rates, settings.radius)  # type: ignore[arg-type]
            return (new, point, momenta, done + 1, jnp.ones_like(started)), None

        own: Any = message.momenta if averaged else local.momenta
        started = (message.step if averaged else local.step) > 0
        previous = select(local.step == message.step, local.previous, message.point)
        count = settings.local_steps
        draws = draw_steps(data, key, count, settings.batch_size, settings.outer_batch_size)
        first = (message.point, previous, own, message.step, started)
        (point, previous, momenta, done, _), _ = jax.lax.scan(step, first, draws, length=count)
        reply = Reply(*point, momenta if averaged else None)
        calls = local.calls.plus(direction_calls(2 * count))
        return reply, Local(previous, None if averaged else momenta, done, calls)

    def absorb(server: Server, mean: Reply) -> Server:
        point = Point(problem.into_set(mean.outer), mean.inner, mean.adjoint)
        return Server(point, mean.momenta, server.step + settings.local_steps)

    def init(key: jax.Array) -> Server:
        point = first_point(problem, key)
        return Server(point, zeros(point) if averaged else None, jnp.zeros((), jnp.int32))

    def enroll(key: jax.Array) -> Local:
        point = first_point(problem, key)
        return Local(point, None if averaged else zeros(point), jnp.zeros((), jnp.int32), no_calls())

    return Algorithm(
        name="fedbioacc_global",
        init=init,
        enroll=enroll,
        plan=(Phase("local", lambda server: server, work, absorb),),
        outer=lambda server: server.point.outer,
        view=lambda server, local: View(inner=server.point.inner, calls=local.calls),
        objective=lambda outer, inner, data: problem.outer_loss(outer, inner, data.whole("val")),
        check=lambda data: problem.check(data, settings.batch_size, settings.outer_batch_size),
        settings=settings,
        build=build,
        local_steps=settings.local_steps,
        problem=problem,
    )
