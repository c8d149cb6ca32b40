"""Whole sets, no step to choose: y by limited-memory BFGS, the adjoint by conjugate gradients, x by the signs of its gradient.

For problems with one y for all clients, whose clients can read all their rows in every exchange.  The server does the thinking:
clients only evaluate derivatives at points it sends.  A round, with the means over clients of `fedbilevel.algorithms.coupled`:

    inner_turns times:    send y' = y + t d                       reply g(x, y'), grad_y g(x, y')
                          keep y' if g fell by t <grad, d> / 10^4 at least, then d = -B grad, t = 1; else t <- t/4
    once:                 send x, y, u                            reply f(x, y), q = (d2g/dy2) u - grad_y f
    adjoint_turns times:  send p                                  reply (d2g/dy2) p         (conjugate gradients, B before them)
    once:                 send u                                  reply nu = grad_x f - (d2g/dxdy) u
                          x_j <- x_j - s_j sign(nu_j)             s_j times 3/2, up to 3/2, while the sign stays; else halved

B is the inverse Hessian of J. Nocedal, "Updating quasi-Newton matrices with limited storage", Mathematics of Computation 35
(1980), from the last ``memory`` moves of y; it makes the conjugate gradients short as well.  The signs are those of M.
Riedmiller and H. Braun, "A direct adaptive method for faster backpropagation learning: the RPROP algorithm", 1993.  Their first
step is 1/2: right where the entries of x are logarithms, or have another natural unit.  x stands still for ``waits`` rounds,
until y has arrived.

Up per round and client: inner_turns + adjoint_turns + 1 times y, once x, and inner_turns + 1 numbers.  Down: inner_turns +
adjoint_turns + 3 times y and inner_turns + 1 times x.

Differences from the papers: of a line search only its test for descent is left, one point an exchange; where a sign changes,
that entry of x rests for one round instead of going back.

Checked: iterates against a naive loop, and penalties of a ridge regression against their closed form
(tests/algorithms/test_quasi_newton.py).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.arguments import Batch, Count, OuterBatch, Start, algorithm, bilevel
from fedbilevel.algorithms.coupled import Point, second_products
from fedbilevel.algorithms.lbfgs import Pairs
from fedbilevel.algorithms.local import Local, enroll
from fedbilevel.calculus import (
    Calls,
    Tree,
    all_finite,
    both_gradients,
    counted,
    dot,
    dtype_of,
    hessian_vector,
    no_calls,
    scale,
    select,
    step_along,
    subtract,
    zeros,
)
from fedbilevel.plan import Algorithm, Phase, Repeat, View
from fedbilevel.problem import BilevelProblem, ClientData, check_loss
from fedbilevel.sampling import LocalData

DESCENT = 1e-4
"""Share of the descent that the slope promises which a move must reach (Armijo)."""
SHORTER = 0.25
CURVED = 1e-6
"""Moves along which the gradient changes by less, relative to their lengths, say nothing about the Hessian."""
FIRST, LONGER, MOST = 0.5, 1.5, 1.5


class Descent(NamedTuple):
    """y with its loss and gradient, the way d on which the next point lies, how far t, and what was learned of the Hessian.
    ``fresh``: the loss is another than before, so that the next value counts whatever it is; ``first``: how far to go then,
    less than 1 where the loss before did not fall."""

    point: Tree
    value: jax.Array
    gradient: Tree
    way: Tree
    length: jax.Array
    moves: Pairs
    fresh: jax.Array
    first: jax.Array

    @classmethod
    def start(cls, point: Tree, memory: int) -> Descent:
        none, zero = zeros(point), jnp.zeros((), dtype_of(point))
        pairs, fresh = Pairs.none(point, memory), jnp.asarray(True)
        return cls(point, zero, none, none, zero, pairs, fresh, jnp.ones_like(zero))

    @property
    def trial(self) -> Tree:
        return step_along(self.point, self.length, self.way)

    def anew(self) -> Descent:
        """Before the same point is looked at with another loss."""
        return self._replace(length=jnp.zeros_like(self.length), fresh=jnp.asarray(True))

    def heard(self, value: jax.Array, gradient: Tree) -> Descent:
        """After the loss and its gradient at `trial` are known."""
        trial, slope = self.trial, dot(self.gradient, self.way)
        rounding = 8 * jnp.finfo(value.dtype).eps * jnp.abs(self.value)
        descends = value <= self.value + DESCENT * self.length * slope + rounding
        there = all_finite((value, gradient)) & (self.fresh | descends)
        moved, changed = subtract(trial, self.point), subtract(gradient, self.gradient)
        moves = select(there & ~self.fresh, self.moves.joined(moved, changed, CURVED), self.moves)
        way, old = scale(-1, moves.inverse_times(gradient)), jnp.asarray(False)
        first = jnp.where(self.fresh, self.first, jnp.ones_like(value))
        new = Descent(trial, value, gradient, way, first, moves, old, first)
        shorter = self._replace(length=SHORTER * self.length, fresh=old, first=SHORTER * self.length)
        return select(there, new, shorter)  # type: ignore[no-any-return]


class Value(NamedTuple):
    """A loss and its gradient in y."""

    value: jax.Array
    gradient: Tree


class Solve(NamedTuple):
    """Conjugate gradients: u, the residual, the next way, and <residual, B residual>."""

    adjoint: Tree
    residual: Tree
    way: Tree
    size: jax.Array

    @classmethod
    def begun(cls, adjoint: Tree, residual: Tree, moves: Pairs) -> Solve:
        way = moves.inverse_times(residual)
        return cls(adjoint, residual, way, dot(residual, way))

    def after(self, product: Tree, moves: Pairs) -> Solve:
        """After (d2g/dy2) times the way is known."""
        share = _ratio(self.size, dot(self.way, product))
        adjoint, residual = step_along(self.adjoint, share, self.way), step_along(self.residual, -share, product)
        steep = moves.inverse_times(residual)
        size = dot(residual, steep)
        return Solve(adjoint, residual, step_along(steep, _ratio(size, self.size), self.way), size)


class Signs(NamedTuple):
    """How x moves: a step for every entry, and the last gradient (0 where its sign has just changed)."""

    steps: Tree
    last: Tree

    @classmethod
    def start(cls, outer: Tree) -> Signs:
        return cls(jax.tree.map(lambda leaf: jnp.full_like(leaf, FIRST), outer), zeros(outer))

    def moved(self, outer: Tree, gradient: Tree) -> tuple[Tree, Signs]:
        def step(step: jax.Array, last: jax.Array, now: jax.Array) -> jax.Array:
            longer = jnp.minimum(LONGER * step, jnp.asarray(MOST, step.dtype))
            return jnp.where(last * now > 0, longer, jnp.where(last * now < 0, step / 2, step))

        steps = jax.tree.map(step, self.steps, self.last, gradient)
        kept = jax.tree.map(lambda last, now: jnp.where(last * now < 0, 0, now), self.last, gradient)
        return jax.tree.map(lambda x, s, g: x - s * jnp.sign(g), outer, steps, kept), Signs(steps, kept)


class Server(NamedTuple):
    """x and how it moves; y and how it does; u; rounds done."""

    outer: Tree
    signs: Signs
    descent: Descent
    solve: Solve
    rounds: jax.Array

    @property
    def inner(self) -> Tree:
        return self.descent.point


class Kept(NamedTuple):
    """Where the derivatives of the round are taken, sent once."""

    outer: Tree
    inner: Tree
    calls: Calls


@bilevel("global")
def quasi_newton(
    problem: BilevelProblem,
    inner_turns: Count = 4,
    adjoint_turns: Count = 2,
    memory: Count = 8,
    waits: Count = 3,
    batch_size: Batch = None,
    outer_batch_size: OuterBatch = None,
) -> Algorithm:
    """See the module's text.  ``inner_turns``: exchanges for y in a round; ``adjoint_turns``: for u; ``waits``: rounds before x
    moves.  It reads whole sets: ``batch_size`` and ``outer_batch_size`` must be None."""
    if batch_size is not None or outer_batch_size is not None:
        raise ValueError("quasi_newton reads whole sets: leave batch_size and outer_batch_size out.")

    def init(key: jax.Array) -> Server:
        outer, inner = problem.start(key)
        nothing = jnp.zeros((), dtype_of(inner))
        solve = Solve(zeros(inner), zeros(inner), zeros(inner), nothing)
        rounds = jnp.zeros((), jnp.int32)
        return Server(outer, Signs.start(outer), Descent.start(inner, memory), solve, rounds)

    def evaluate(message: tuple[Tree, Tree], local: Kept, data: LocalData, key: jax.Array) -> tuple[Value, Kept]:
        outer, inner = message
        value, gradient = jax.value_and_grad(problem.inner_loss, argnums=1)(outer, inner, data.whole("train"))
        return Value(value, gradient), counted(local, Calls(gradients=1))

    def heard(server: Server, mean: Value) -> Server:
        return server._replace(descent=server.descent.heard(*mean))

    def residual(message: Point, local: Kept, data: LocalData, key: jax.Array) -> tuple[Value, Kept]:
        outer, inner, adjoint = message
        val = data.whole("val")
        value, along = jax.value_and_grad(problem.outer_loss, argnums=1)(outer, inner, val)
        product = hessian_vector(problem.inner_loss, outer, inner, data.whole("train"), adjoint)
        kept = Kept(outer, inner, local.calls)
        return Value(value, subtract(along, product)), counted(kept, Calls(gradients=1, hessian_vector=1))

    def begin(server: Server, mean: Value) -> Server:
        solve = Solve.begun(server.solve.adjoint, mean.gradient, server.descent.moves)
        return server._replace(solve=solve)

    def product(message: Tree, local: Kept, data: LocalData, key: jax.Array) -> tuple[Tree, Kept]:
        image = hessian_vector(problem.inner_loss, local.outer, local.inner, data.whole("train"), message)
        return image, counted(local, Calls(hessian_vector=1))

    def solved(server: Server, mean: Tree) -> Server:
        return server._replace(solve=server.solve.after(mean, server.descent.moves))

    def direction(message: Tree, local: Kept, data: LocalData, key: jax.Array) -> tuple[Tree, Kept]:
        point = Point(local.outer, local.inner, message)
        in_outer, _ = both_gradients(problem.outer_loss, local.outer, local.inner, data.whole("val"))
        cross, _ = second_products(problem.inner_loss, point, data.whole("train"))
        return subtract(in_outer, cross), counted(local, Calls(gradients=1, cross=1))

    def move(server: Server, mean: Tree) -> Server:
        outer, signs = server.signs.moved(server.outer, mean)
        waiting = (server.rounds < waits) | ~all_finite(mean)
        outer, signs = select(waiting, (server.outer, server.signs), (problem.into_set(outer), signs))
        return server._replace(outer=outer, signs=signs, descent=server.descent.anew(), rounds=server.rounds + 1)

    plan = (
        Repeat((Phase("inner", lambda server: (server.outer, server.descent.trial), evaluate, heard),), inner_turns),
        Phase("residual", lambda server: Point(server.outer, server.inner, server.solve.adjoint), residual, begin),
        Repeat((Phase("adjoint", lambda server: server.solve.way, product, solved),), adjoint_turns),
        Phase("outer", lambda server: server.solve.adjoint, direction, move),
    )
    return Algorithm(
        init,
        lambda key: Kept(*problem.start(key), no_calls()),
        plan,
        view=lambda server, local: View(inner=server.inner, calls=local.calls),
    )


@algorithm()
def minimised(problem: BilevelProblem, outer: Start, memory: Count = 8) -> Algorithm:
    """The inner problem alone, at an ``outer`` that stays: the model that is used.  One exchange a round, of y alone."""

    def evaluate(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Value, Local]:
        value, gradient = jax.value_and_grad(problem.inner_loss, argnums=1)(outer, message, data.whole("train"))
        return Value(value, gradient), counted(local, Calls(gradients=1))

    def check(data: ClientData) -> None:
        start = jax.eval_shape(problem.start, jax.random.key(0))
        check_loss("inner_loss", problem.inner_loss, (*start, data.example("train")))

    return Algorithm(
        lambda key: Descent.start(problem.start(key)[1], memory),
        enroll,
        (Phase("inner", lambda server: server.trial, evaluate, lambda server, mean: server.heard(*mean)),),
        outer=lambda server: server.point,
        objective=lambda inner, _, data: problem.inner_loss(outer, inner, data.whole("train")),
        check=check,
    )


def _ratio(above: jax.Array, below: jax.Array) -> jax.Array:
    """Zero where there is nothing to divide by."""
    positive = below > 0
    return jnp.where(positive, above / jnp.where(positive, below, 1), 0)
