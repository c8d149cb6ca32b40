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
starts its inner momentum from its first plain estimate; one that missed a round compares nu, the server's, with the point it
receives, and omega, its own, with the point where it was estimated.

Steps set themselves unless they are given, or follow optimizers (`fedbilevel.algorithms.steps`).  gamma or eta then takes the
place of gamma alpha_t or eta alpha_t, and alpha_t says how much the momenta forget, with the constants of `TUNED` unless others
are given.  Where eta is not a number the server moves x along the averaged nu, x stands still within a round, and nu alone
goes up; where the server goes back to the start, nu starts anew.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, Estimator, Optimizer, OuterBatch, Step, bilevel, one_of
from fedbilevel.algorithms.local import corrected, cube_root_rate, inner_gradients, phase, share_kept
from fedbilevel.calculus import Calls, Tree, dtype_of, no_calls, scale, select, step_along, zeros
from fedbilevel.plan import Algorithm, LocalStep, View
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler


class Server(NamedTuple):
    """The current outer variable, the averaged previous one, the averaged momentum, the steps done, and what outer steps
    follow from where they are not numbers."""

    outer: Tree
    previous: Tree
    momentum: Tree
    step: jax.Array
    kept: Any


class Message(NamedTuple):
    """``anchor``: mean x_t ("paper": the client takes the averaged step itself) or mean x_{t+1} ("local")."""

    anchor: Tree
    momentum: Tree
    step: jax.Array


class Reply(NamedTuple):
    outer: Tree
    momentum: Tree


class Momentum(NamedTuple):
    """The reply where the server moves x."""

    momentum: Tree


class Local(NamedTuple):
    """What stays on a client: y, the previous point, omega, the step it last finished, its calls, and what inner steps follow
    from where they are not numbers."""

    inner: Tree
    previous_outer: Tree
    previous_inner: Tree
    momentum: Tree
    step: jax.Array
    calls: Calls
    kept: Any


class Walk(NamedTuple):
    """The state of the local loop; ``step`` is t - 1.  ``previous_outer`` is where nu was estimated, ``own_outer`` where
    omega was: two points only at the first step after a round that the client missed."""

    outer: Tree
    inner: Tree
    previous_outer: Tree
    previous_inner: Tree
    own_outer: Tree
    outer_momentum: Tree
    inner_momentum: Tree
    step: jax.Array
    started: jax.Array
    calls: Calls
    kept: Any


TUNED = {"delta": 1.0, "u": 8.0, "sigma": 1.0, "c_inner": 4.0, "c_outer": 4.0, "inner_step": 1.0, "outer_step": 0.3}
"""Constants that refresh the momentum (c alpha_1^2 about 1): ``fb.fedbioacc(problem, ..., **fb.TUNED)``.
With the paper's own c alpha_1^2 is below 0.01 and most of the first minibatch's error survives."""
PAPER = {"delta": 0.1, "u": 1.0, "sigma": 1.0, "c_inner": 1.0, "c_outer": 1.0}


def _constants(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that are not given: the paper's with steps that are numbers, else those of `TUNED`."""
    numbers = arguments["inner_step"] is not None and arguments["outer_step"] is not None
    own = {name: (PAPER if numbers else TUNED)[name] for name in PAPER if arguments[name] is None}
    return {**arguments, **own}


@bilevel("local", _constants)
def fedbioacc(
    problem: BilevelProblem,
    hypergradient: Estimator = "auto",
    inner_step: Step = "auto",
    outer_step: Step = "auto",
    local_steps: Count = 5,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
    delta: Step = "auto",
    u: Step = "auto",
    sigma: Step = "auto",
    c_inner: Step = "auto",
    c_outer: Step = "auto",
    previous: Annotated[str, one_of("paper", "local")] = "paper",
    inner_optimizer: Optimizer = None,
    outer_optimizer: Optimizer = None,
) -> Algorithm:
    """FedBiOAcc (Alg. 3).  ``inner_step`` is gamma, ``outer_step`` eta, ``c_inner`` c_omega, ``c_outer`` c_nu.

    Steps set themselves unless given, see `fedbio`.  delta, u and c are the paper's where both steps are given (sigma is not
    given there); `TUNED` holds constants that work better, and that serve where a step is not given.

    Args:
        problem: A `BilevelProblem` with ``lower_level="local"``.
        hypergradient: An estimator such as `exact`, `conjugate_gradient` or `neumann`.  "auto" takes conjugate gradients on
            whole sets and, on minibatches, a series that ends by itself.
        inner_step: gamma: alpha_t times this is the step of the inner variable. "auto": it sets itself.
        outer_step: eta: alpha_t times this is the step of the outer variable. "auto": it sets itself.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        delta: Scale of alpha_t = delta / (u + sigma^2 t)^(1/3). "auto": 0.1 where both steps are given, else that of
            `TUNED`.
        u: How late alpha_t begins to fall.
        sigma: How fast alpha_t falls.
        c_inner: How fast the inner momentum forgets: by c alpha_t^2 a step.
        c_outer: The same for the outer momentum.
        previous: "paper" averages the outer variable of before the last step too; "local" keeps it, which removes a bias at
            the same cost.
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
        >>> problem = random_quadratic(0, clients=3).problem()
        >>> fb.fedbioacc(problem, previous="local").name
        'fedbioacc'
    """
    sampler = Sampler(batch_size, outer_batch_size, hypergradient.train_batches, hypergradient.val_batches)
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer)
    below = steps.Inner(problem, hypergradient, inner_step, inner_optimizer)
    paper = previous == "paper" and not above.sums

    def alpha(step: jax.Array, variable: Tree) -> jax.Array:
        """alpha_t, in the dtype of the variable it scales."""
        return cube_root_rate(delta, u, sigma, step, dtype_of(variable))

    def along(variable: Tree, momentum: Tree, factor: Any, step: jax.Array) -> Tree:
        """One step of length ``factor`` times alpha_t against ``momentum``."""
        rate = alpha(step, variable)
        return step_along(variable, -(jnp.asarray(factor, rate.dtype) * rate), momentum)

    def descend(outer: Tree, momentum: Tree, step: jax.Array) -> Tree:
        return outer if outer_step is None else problem.into_set(along(outer, momentum, outer_step, step))

    def step(walk: Walk, batches: Batches) -> tuple[Walk, LocalStep]:
        points = ((walk.outer, walk.inner), (walk.previous_outer, walk.previous_inner))
        kept, looked = below.look(points[0], batches, walk.kept)
        time, before = walk.step + 1, alpha(walk.step, walk.outer)
        inner_kept = jnp.where(walk.started, share_kept(c_inner, before), 0)
        outer_kept = jnp.where(walk.step > 0, share_kept(c_outer, before), 0)
        now, then = inner_gradients(problem, (points[0], (walk.own_outer, points[1][1])), batches)
        inner_momentum = corrected(now, then, walk.inner_momentum, inner_kept)
        (now, then), used = below.estimator(kept)(problem, points, batches)
        outer_momentum = corrected(now, then, walk.outer_momentum, outer_kept)
        outer = descend(walk.outer, outer_momentum, time)
        if inner_step is None:
            inner, kept = below.moved(walk.inner, inner_momentum, kept)
        else:
            inner = along(walk.inner, inner_momentum, inner_step, time)
        calls, momenta = walk.calls.plus(used).plus(looked).plus(Calls(gradients=2)), (outer_momentum, inner_momentum)
        state = Walk(outer, inner, *points[0], walk.outer, *momenta, time, jnp.array(True), calls, kept)
        return state, LocalStep(*points[0], outer_momentum, inner_momentum, outer)

    def loop(
        message: Message, local: Local, data: LocalData, key: jax.Array
    ) -> tuple[Reply | Momentum, Local, LocalStep]:
        anchor, momentum, done = message
        was_here, own_outer = local.step == done, local.previous_outer
        if paper:
            own_outer = select(was_here, anchor, own_outer)
            points = descend(anchor, momentum, done), local.inner, anchor, local.previous_inner
        else:
            points = anchor, local.inner, select(was_here, own_outer, anchor), local.previous_inner
        start = Walk(*points, own_outer, momentum, local.momentum, done, local.step > 0, local.calls, local.kept)
        walk, taken = sampler.walk(step, start, data, key, local_steps)
        arrived = Reply(walk.previous_outer if paper else walk.outer, walk.outer_momentum)
        reply = Momentum(walk.outer_momentum) if above.sums else arrived
        last = walk.previous_outer, walk.previous_inner, walk.inner_momentum
        return reply, Local(walk.inner, *last, walk.step, walk.calls, walk.kept), taken

    def absorb(server: Server, mean: Any) -> Server:
        done = server.step + local_steps
        if above.sums:
            outer, kept = above.moved(server.outer, server.kept, scale(local_steps, mean.momentum))
            back = steps.began_anew(kept)
            return Server(outer, server.previous, mean.momentum, jnp.where(back, 0, done), kept)
        outer = descend(mean.outer, mean.momentum, done) if paper else problem.into_set(mean.outer)
        return Server(outer, mean.outer if paper else server.previous, mean.momentum, done, server.kept)

    def init(key: jax.Array) -> Server:
        outer, _ = problem.start(key)
        return Server(outer, outer, zeros(outer), jnp.zeros((), jnp.int32), above.start(outer))

    def enroll(key: jax.Array) -> Local:
        outer, inner = problem.start(key)
        first = zeros(inner), jnp.zeros((), jnp.int32), no_calls(hypergradient), below.start(inner, key)
        return Local(inner, outer, inner, *first)

    def send(server: Server) -> Message:
        return Message(server.previous if paper else server.outer, server.momentum, server.step)

    def view(server: Server, local: Local) -> View:
        nu_at = omega_at = local.previous_outer
        if paper:
            nu_at, omega_at = server.previous, select(local.step == server.step, server.previous, omega_at)
        return View(local.inner, server.momentum, local.momentum, nu_at, local.previous_inner, local.calls, omega_at)

    return Algorithm(
        init,
        enroll,
        plan=(phase("local", send, loop, absorb),),
        view=view,
        check=lambda data: steps.check_optimizers(problem, inner_optimizer, outer_optimizer),
        remark=lambda server: above.remark(server.kept),
    )
