"""FedBiOAcc: FedBiO with momentum-based variance reduction on both levels.

J. Li, F. Huang, H. Huang, "Local Stochastic Bilevel Optimization with Momentum-Based Variance Reduction", Alg. 3.

On client m, with alpha_t = delta / (u + sigma^2 t)^(1/3) and the same minibatches at both points:

    omega_t = grad_y g(x_t, y_t; B_y) + (1 - c_omega alpha_{t-1}^2) (omega_{t-1} - grad_y g(x_{t-1}, y_{t-1}; B_y))
    nu_t    = Phi(x_t, y_t; B_x)      + (1 - c_nu alpha_{t-1}^2)    (nu_{t-1} - Phi(x_{t-1}, y_{t-1}; B_x))
    y_{t+1} = y_t - gamma alpha_t omega_t         x_{t+1} = x_t - eta alpha_t nu_t

At t = 1 both momenta are the plain estimates.  After I steps nu_t is averaged together with

- ``previous="paper"``: x_t (line 17); x_{t+1} then follows, being linear in the two.  The next correction compares with the
  *mean* x_t although nu_t and omega_t were estimated at the local one: a bias, see docs/errata.md;
- ``previous="local"``: x_{t+1}, while each client keeps its own x_t for the next correction: no such bias.

Up per round and client: two outer-sized vectors, either way; down: two and the step number.

Differences from the paper: exactly I local steps in every round; two vectors up instead of the printed three; the factors
1 - c alpha^2 are kept within [0, 1]; where the problem has a projection, updates are projected.  A client that joins late
starts its inner momentum from its first plain estimate, and one that missed a round compares with the point it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.local import (
    check_bilevel,
    check_loop,
    corrected,
    cube_root_rate,
    inner_gradients,
    kind,
    local_loop,
    phase,
    settle_outer_batch,
    share_kept,
)
from fedbilevel.calculus import Calls, Tree, no_calls, select, step_along, zeros
from fedbilevel.hypergradients.base import Hypergradient
from fedbilevel.plan import Algorithm, LocalStep, View
from fedbilevel.problem import BilevelProblem, positive
from fedbilevel.sampling import Batches, LocalData


class Server(NamedTuple):
    """The current outer variable, the averaged previous one, the averaged momentum, and the steps done."""

    outer: Tree
    previous: Tree
    momentum: Tree
    step: jax.Array


class Message(NamedTuple):
    """``anchor``: mean x_t ("paper": the client takes the averaged step itself) or mean x_{t+1} ("local")."""

    anchor: Tree
    momentum: Tree
    step: jax.Array


class Reply(NamedTuple):
    outer: Tree
    momentum: Tree


class Local(NamedTuple):
    """What stays on a client: y, the previous point (x only with "local"), omega, the step it last finished, its calls."""

    inner: Tree
    previous_outer: Tree
    previous_inner: Tree
    momentum: Tree
    step: jax.Array
    calls: Calls


class Walk(NamedTuple):
    """The state of the local loop; ``step`` is t - 1."""

    outer: Tree
    inner: Tree
    previous_outer: Tree
    previous_inner: Tree
    outer_momentum: Tree
    inner_momentum: Tree
    step: jax.Array
    started: jax.Array
    calls: Calls


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("hypergradient", "inner_step", "outer_step", "delta", "u", "sigma", "c_inner", "c_outer"),
    meta_fields=("problem", "local_steps", "batch_size", "outer_batch_size", "previous"),
)
@dataclass(frozen=True)
class Settings:
    problem: BilevelProblem
    hypergradient: Hypergradient
    inner_step: Any
    outer_step: Any
    delta: Any
    u: Any
    sigma: Any
    c_inner: Any
    c_outer: Any
    local_steps: int
    batch_size: int | None
    outer_batch_size: int | None
    previous: str

    def alpha(self, step: jax.Array, like: Any) -> jax.Array:
        """alpha_t, in the dtype of the variable it scales."""
        return cube_root_rate(self.delta, self.u, self.sigma, step, like)

    def inner_rate(self, step: jax.Array, like: Any) -> jax.Array:
        return jnp.asarray(self.inner_step, like) * self.alpha(step, like)

    def outer_rate(self, step: jax.Array, like: Any) -> jax.Array:
        return jnp.asarray(self.outer_step, like) * self.alpha(step, like)


TUNED = {"delta": 1.0, "u": 8.0, "sigma": 1.0, "c_inner": 4.0, "c_outer": 4.0, "inner_step": 1.0, "outer_step": 0.3}
"""Constants that refresh the momentum (c alpha_1^2 about 1): ``fb.fedbioacc(problem, ..., **fb.TUNED)``.

With the paper's own (the defaults) c alpha_1^2 is below 0.01 and most of the first minibatch's error survives."""


def fedbioacc(
    problem: BilevelProblem,
    hypergradient: Hypergradient,
    inner_step: float = 1.0,
    outer_step: float = 1.0,
    local_steps: int = 5,
    batch_size: int | None = None,
    outer_batch_size: int | str | None = None,
    delta: float = 0.1,
    u: float = 1.0,
    sigma: float = 1.0,
    c_inner: float = 1.0,
    c_outer: float = 1.0,
    previous: str = "paper",
) -> Algorithm:
    """FedBiOAcc (Alg. 3).  ``inner_step`` is gamma, ``outer_step`` eta, ``c_inner`` c_omega, ``c_outer`` c_nu.

    The defaults of delta, u and c are the paper's (sigma is not given there); `TUNED` holds constants that work better.
    """
    check_bilevel("fedbioacc", problem, hypergradient)
    check_loop(local_steps, batch_size, outer_batch_size)
    rates = {"inner_step": inner_step, "outer_step": outer_step, "delta": delta}
    for name, value in {**rates, "u": u, "sigma": sigma, "c_inner": c_inner, "c_outer": c_outer}.items():
        positive(name, value)
    if previous not in ("paper", "local"):
        raise ValueError(f"previous must be 'paper' or 'local', not {previous!r}.")
    outer_batch = settle_outer_batch(batch_size, outer_batch_size)
    return build(
        Settings(
            problem,
            hypergradient,
            inner_step,
            outer_step,
            delta,
            u,
            sigma,
            c_inner,
            c_outer,
            local_steps,
            batch_size,
            outer_batch,
            previous,
        )
    )


def build(settings: Settings) -> Algorithm:
    problem = settings.problem
    paper = settings.previous == "paper"

    def descend(outer: Tree, momentum: Tree, step: jax.Array) -> Tree:
        return problem.into_set(step_along(outer, -settings.outer_rate(step, kind(outer)), momentum))

    def step(walk: Walk, batches: Batches) -> tuple[Walk, LocalStep]:
        points = ((walk.outer, walk.inner), (walk.previous_outer, walk.previous_inner))
        time = walk.step + 1
        before = settings.alpha(walk.step, kind(walk.outer))
        inner_kept = jnp.where(walk.started, share_kept(settings.c_inner, before), 0)
        outer_kept = jnp.where(walk.step > 0, share_kept(settings.c_outer, before), 0)
        now, then = inner_gradients(problem, points, batches)
        inner_momentum = corrected(now, then, walk.inner_momentum, inner_kept)
        (now, then), used = settings.hypergradient(problem, points, batches)
        outer_momentum = corrected(now, then, walk.outer_momentum, outer_kept)
        new_inner = step_along(walk.inner, -settings.inner_rate(time, kind(walk.inner)), inner_momentum)
        new_outer = descend(walk.outer, outer_momentum, time)
        calls = walk.calls.plus(used).plus(Calls(gradients=2))
        state = Walk(
            new_outer,
            new_inner,
            walk.outer,
            walk.inner,
            outer_momentum,
            inner_momentum,
            time,
            jnp.ones_like(walk.started),
            calls,
        )
        return state, LocalStep(walk.outer, walk.inner, outer_momentum, inner_momentum, new_outer)

    def loop(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local, LocalStep]:
        if paper:
            outer = descend(message.anchor, message.momentum, message.step)
            previous_outer = message.anchor
        else:
            outer = message.anchor
            previous_outer = select(local.step == message.step, local.previous_outer, message.anchor)
        start = Walk(
            outer,
            local.inner,
            previous_outer,
            local.previous_inner,
            message.momentum,
            local.momentum,
            message.step,
            local.step > 0,
            local.calls,
        )
        walk, steps = local_loop(
            step,
            start,
            data,
            key,
            local_steps=settings.local_steps,
            batch_size=settings.batch_size,
            outer_batch_size=settings.outer_batch_size,
            hypergradient=settings.hypergradient,
        )
        reply = Reply(walk.previous_outer if paper else walk.outer, walk.outer_momentum)
        own_point = None if paper else walk.previous_outer
        kept = Local(walk.inner, own_point, walk.previous_inner, walk.inner_momentum, walk.step, walk.calls)
        return reply, kept, steps

    def absorb(server: Server, mean: Reply) -> Server:
        step = server.step + settings.local_steps
        outer = descend(mean.outer, mean.momentum, step) if paper else problem.into_set(mean.outer)
        return Server(outer, mean.outer if paper else server.previous, mean.momentum, step)

    def init(key: jax.Array) -> Server:
        outer = problem.into_set(problem.init(key)[0])
        return Server(outer, outer, zeros(outer), jnp.zeros((), jnp.int32))

    def enroll(key: jax.Array) -> Local:
        outer, inner = problem.init(key)
        own_point = None if paper else problem.into_set(outer)
        return Local(inner, own_point, inner, zeros(inner), jnp.zeros((), jnp.int32), no_calls())

    def view(server: Server, local: Local) -> View:
        at_outer = server.previous if paper else local.previous_outer
        return View(local.inner, server.momentum, local.momentum, at_outer, local.previous_inner, local.calls)

    return Algorithm(
        name="fedbioacc",
        init=init,
        enroll=enroll,
        plan=(
            phase(
                "local",
                lambda server: Message(server.previous if paper else server.outer, server.momentum, server.step),
                loop,
                absorb,
            ),
        ),
        outer=lambda server: server.outer,
        view=view,
        objective=lambda outer, inner, data: problem.outer_loss(outer, inner, data.whole("val")),
        check=lambda data: problem.check(data, settings.batch_size, settings.outer_batch_size),
        settings=settings,
        build=build,
        local_steps=settings.local_steps,
        problem=problem,
    )
