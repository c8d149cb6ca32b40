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

``send="outer"``: x_{t+1} alone goes up, and its mean and the step number down, as much as in FedBiO.  Each client keeps its
nu and its x_t, and corrects nu at the next round by what averaging did to its iterate, with the sum over the steps of the
round:

    nu_m <- nu_m + (x_m - mean_i x_i) / (eta sum_t alpha_t)

x_m - mean x is -eta sum_t alpha_t (nu_m,t - mean nu_t), so that nu_m loses the average deviation of its round.  The mean of
the nu is kept exactly; of the deviations there remains by how much the last one differs from the average one of the round,
which is zero where nu does not change within a round.  This is the dual update of consensus methods (ProxSkip, Scaffnew):
the correction is the multiplier of the constraint x_m = mean x.  The paper's proof takes the momenta to be equal after a
round; here it would need one term more, the deviations that remain, of the size of the changes of nu within a round, which
its lemmas bound already.  With projections inside the set the formula is the same; where the projection binds, nu is
corrected by less.  A client that missed a round does not know the mean of its own last one, and starts nu from a plain
estimate.

Differences from the paper: exactly I local steps in every round; two vectors up instead of the printed three; the factors
1 - c alpha^2 are kept within [0, 1]; where the problem has a projection, updates are projected.  A client that joins late
starts its inner momentum from its first plain estimate; one that missed a round compares nu, the server's, with the point it
receives, and omega, its own, with the point where it was estimated.

Steps set themselves unless they are given, or follow optimizers (`fedbilevel.algorithms.steps`).  gamma or eta then takes the
place of gamma alpha_t or eta alpha_t, and alpha_t says how much the momenta forget, with the constants of `EVEN` unless others
are given.  Where eta is not a number the server moves x along the averaged nu, x stands still within a round, and nu alone
goes up; after a search nu starts anew.  With ``send="outer"`` nu does not come down either: clients
find the averaged one from how far x moved, and the length of the server's step comes with x.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms import steps
from fedbilevel.algorithms.arguments import Batch, Count, Estimator, Optimizer, OuterBatch, Step, bilevel, one_of
from fedbilevel.algorithms.local import corrected, cube_root_rate, inner_gradients, phase, share_kept
from fedbilevel.algorithms.search import Search, solving
from fedbilevel.calculus import (
    Calls,
    Tree,
    add,
    dtype_of,
    no_calls,
    scale,
    select,
    squared_norm,
    step_along,
    subtract,
    zeros,
)
from fedbilevel.plan import Algorithm, LocalStep, View
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import Batches, LocalData, Sampler


class Server(NamedTuple):
    """The current outer variable, the averaged previous one, the averaged momentum (None where clients keep theirs), the steps
    done, what outer steps follow from where they are not numbers, and the last of these where it is sent."""

    outer: Tree
    previous: Tree
    momentum: Tree
    step: jax.Array
    kept: Any
    rate: Any


class Message(NamedTuple):
    """``anchor``: mean x_t ("paper": the client takes the averaged step itself) or mean x_{t+1} ("local")."""

    anchor: Tree
    momentum: Tree
    step: jax.Array
    rate: Any


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
    own: Any
    """(nu, x_{t+1}) where only the latter goes up."""


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
    known: jax.Array
    calls: Calls
    kept: Any


TUNED = {"delta": 1.0, "u": 8.0, "sigma": 1.0, "c_inner": 4.0, "c_outer": 4.0, "inner_step": 1.0, "outer_step": 0.3}
"""Constants that refresh the momentum (c alpha_1^2 about 1): ``fb.fedbioacc(problem, ..., **fb.TUNED)``.
With the paper's own c alpha_1^2 is below 0.01 and most of the first minibatch's error survives."""
PAPER = {"delta": 0.1, "u": 1.0, "sigma": 1.0, "c_inner": 1.0, "c_outer": 1.0}
EVEN = {"delta": 1.0, "u": 8.0, "sigma": 1e-3, "c_inner": 2.0, "c_outer": 2.0}
"""Where steps do not shrink: alpha_t stays 1/2, and the momenta forget half of what they hold in every step.  With those of
`TUNED` they forget less and less while the noise of y, which keeps moving, goes on entering: on ridge penalties such runs lost
half of what they had gained."""


def anew(server: Any) -> Any:
    """After a search: the next momenta are plain estimates."""
    return server._replace(step=jnp.zeros_like(server.step))


def _constants(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that are not given: the paper's with steps that are numbers, else those of `EVEN`."""
    if arguments["send"] == "outer" and arguments["outer_optimizer"] is not None:
        raise ValueError(
            'Give send="outer" or outer_optimizer, not both: clients cannot tell nu from how an optimizer moved x.'
        )
    numbers = arguments["inner_step"] is not None and arguments["outer_step"] is not None
    own = {name: (PAPER if numbers else EVEN)[name] for name in PAPER if arguments[name] is None}
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
    send: Annotated[str, one_of("both", "outer")] = "both",
) -> Algorithm:
    """FedBiOAcc (Alg. 3).  ``inner_step`` is gamma, ``outer_step`` eta, ``c_inner`` c_omega, ``c_outer`` c_nu.

    Steps set themselves unless given, see `fedbio`.  delta, u and c are the paper's where both steps are given (sigma is not
    given there), and those of `EVEN` otherwise; `TUNED` holds constants that work better with given steps.

    Args:
        problem: A `BilevelProblem` with ``lower_level="local"``.
        hypergradient: An estimator such as `exact`, `conjugate_gradient` or `neumann`.  "auto" takes conjugate gradients on
            whole sets and, on minibatches, a series that ends by itself.
        inner_step: gamma: alpha_t times this is the step of the inner variable. "auto": it sets itself.
        outer_step: eta: alpha_t times this is the step of the outer variable. "auto": it sets itself.
        local_steps: Steps of a client between two exchanges.
        batch_size: Training rows a step draws, with replacement.  None reads the whole local set: deterministic.
        outer_batch_size: Validation rows a step draws.  None follows ``batch_size``, "whole" reads all.
        delta: Scale of alpha_t = delta / (u + sigma^2 t)^(1/3). "auto": 0.1 where both steps are given, else
            1.
        u: How late alpha_t begins to fall.
        sigma: How fast alpha_t falls.
        c_inner: How fast the inner momentum forgets: by c alpha_t^2 a step.
        c_outer: The same for the outer momentum.
        previous: "paper" averages the outer variable of before the last step too; "local" keeps it, which removes a bias at
            the same cost.
        inner_optimizer: An optax transformation for the inner variable, instead of ``inner_step``.
        outer_optimizer: An optax transformation for the outer variable at the server, instead of ``outer_step``.
        send: "both" sends x and its momentum; "outer" sends x alone, and clients correct their own momenta.

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
    below = steps.settling(problem, hypergradient, inner_step, inner_optimizer, batch_size)
    above = steps.Outer(problem, outer_step, local_steps, outer_optimizer, settled=below.ahead > 0)
    sampler = Sampler(batch_size, outer_batch_size, below.train_batches, hypergradient.val_batches)
    search = Search(problem, above, solving(problem, hypergradient, batch_size), (batch_size, outer_batch_size), anew)
    alone = send == "outer"
    paper = previous == "paper" and not above.sums and not alone

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
        kept, looked = below.look((walk.outer, walk.inner), batches, walk.kept)
        inner, settling = below.settled(walk.outer, walk.inner, batches, kept)
        points = ((walk.outer, inner), (walk.previous_outer, walk.previous_inner))
        time, before = walk.step + 1, alpha(walk.step, walk.outer)
        inner_kept = jnp.where(walk.started, share_kept(c_inner, before), 0)
        outer_kept = jnp.where(walk.known, share_kept(c_outer, before), 0)
        now, then = inner_gradients(problem, (points[0], (walk.own_outer, points[1][1])), batches)
        inner_momentum = corrected(now, then, walk.inner_momentum, inner_kept)
        (now, then), used = below.estimator(kept)(problem, points, batches)
        outer_momentum = corrected(now, then, walk.outer_momentum, outer_kept)
        outer = descend(walk.outer, outer_momentum, time)
        if inner_step is None:
            inner, kept = below.moved(inner, inner_momentum, kept)
        else:
            inner = along(inner, inner_momentum, inner_step, time)
        calls = walk.calls.plus(used).plus(looked).plus(settling).plus(Calls(gradients=2))
        at, momenta, true = points[0], (outer_momentum, inner_momentum), jnp.array(True)
        state = Walk(outer, inner, at[0], at[1], walk.outer, *momenta, time, true, true, calls, kept)
        return state, LocalStep(*points[0], outer_momentum, inner_momentum, outer)

    def loop(
        message: Message, local: Local, data: LocalData, key: jax.Array
    ) -> tuple[Reply | Momentum, Local, LocalStep]:
        anchor, momentum, done, rate = message
        was_here, own_outer, known = local.step == done, local.previous_outer, done > 0
        if alone:
            momentum, known = averaged(anchor, local.own, done, rate), known & was_here
        if paper:
            own_outer = select(was_here, anchor, own_outer)
            points = descend(anchor, momentum, done), local.inner, anchor, local.previous_inner
        else:
            points = anchor, local.inner, select(was_here, own_outer, anchor), local.previous_inner
        start = Walk(*points, own_outer, momentum, local.momentum, done, local.step > 0, known, local.calls, local.kept)
        walk, taken = sampler.walk(step, start, data, key, local_steps)
        arrived = Reply(walk.previous_outer if paper else walk.outer, walk.outer_momentum)
        reply = Momentum(walk.outer_momentum) if above.sums else arrived._replace(momentum=None) if alone else arrived
        last = walk.previous_outer, walk.previous_inner, walk.inner_momentum
        own = (walk.outer_momentum, walk.outer) if alone else None
        return reply, Local(walk.inner, *last, walk.step, walk.calls, walk.kept, own), taken

    def averaged(anchor: Tree, own: tuple[Tree, Tree], done: jax.Array, rate: Any) -> Tree:
        """A client's nu after a round in which it took part, from the x it is sent: exact where the server moved x."""
        momentum, arrived = own
        if above.sums:
            return scale(1 / jnp.maximum(rate, steps.TINY), subtract(arrived, anchor))
        rates = alpha(done - jnp.arange(local_steps, dtype=done.dtype), anchor)
        walked = jnp.asarray(outer_step, rates.dtype) * jnp.sum(rates)
        return add(momentum, scale(1 / walked, subtract(arrived, anchor)))

    def absorb(server: Server, mean: Any) -> Server:
        done = server.step + local_steps
        if above.sums:
            outer, kept = above.moved(server.outer, server.kept, scale(local_steps, mean.momentum))
            rate = None
            if alone:
                square = squared_norm(subtract(server.outer, outer)) / jnp.maximum(
                    squared_norm(mean.momentum), steps.TINY
                )
                rate = jnp.sqrt(square)
            momentum = None if alone else mean.momentum
            return Server(outer, server.previous, momentum, done, kept, rate)
        outer = descend(mean.outer, mean.momentum, done) if paper else problem.into_set(mean.outer)
        return Server(outer, mean.outer if paper else server.previous, mean.momentum, done, server.kept, None)

    def init(key: jax.Array) -> Server:
        outer, _ = problem.start(key)
        rate = jnp.zeros((), dtype_of(outer)) if alone and above.sums else None
        momentum = None if alone else zeros(outer)
        return Server(outer, outer, momentum, jnp.zeros((), jnp.int32), above.start(outer), rate)

    def enroll(key: jax.Array) -> Local:
        outer, inner = problem.start(key)
        first = zeros(inner), jnp.zeros((), jnp.int32), no_calls(hypergradient), below.start(inner, key)
        return Local(inner, outer, inner, *first, (zeros(outer), outer) if alone else None)

    def message_of(server: Server) -> Message:
        return Message(server.previous if paper else server.outer, server.momentum, server.step, server.rate)

    def view(server: Server, local: Local) -> View:
        nu_at = omega_at = local.previous_outer
        if paper:
            nu_at, omega_at = server.previous, select(local.step == server.step, server.previous, omega_at)
        momentum = local.own[0] if alone else server.momentum
        inner = local.kept.answer(local.inner)
        return View(inner, momentum, local.momentum, nu_at, local.previous_inner, local.calls, omega_at)

    return Algorithm(
        init,
        enroll,
        plan=search.plan(phase("local", message_of, loop, absorb)),
        view=view,
        check=lambda data: steps.check_optimizers(problem, inner_optimizer, outer_optimizer),
        remark=lambda server: above.remark(server.kept),
    )
