"""L-BFGS at the server, on the clients' mean loss and gradient: a model trained to the end, without a step to choose.

D. C. Liu, J. Nocedal, "On the Limited Memory BFGS Method for Large Scale Optimization", Mathematical Programming 45 (1989).

    a round:   loss, g = mean over the clients of (loss, gradient), over all their rows, at the point z that was sent
    loss too large for the step:   z = x + t d with a shorter t
    otherwise:   s = z - x, y = g(z) - g(x) join the last ``memory`` pairs;   x = z;   d = -H g;   z = x + d

H is the matrix of the pairs, by the two loops of the paper (H = 1 / ||g|| without any).  "Too large" is Armijo's rule,
loss(z) > loss(x) + 1e-4 t <g, d>, beyond what rounding makes of the loss; a shorter t is the minimum of the parabola through
what is known, kept within a tenth and a half.  Pairs along which the loss curves downwards are left out.  After 10 refused
points in a row the pairs are forgotten and x is asked for again: other clients may have answered, with another loss.

The run has arrived when the decrease that H foresees, -<g, d> / 2, stays below ``tolerance`` for three steps in a row, or when
no step along -g helps either.  Rounds after that ask nobody: they cost no bytes.

Up per round and client: one gradient and one number; down: one model.  Both are weighted means, so secure sums serve.

Differences from the paper: its line search looks for Wolfe's conditions, which would take gradients at refused points.

Checked: iterates against a naive loop, with unequal weights and refused points; the minimum against a closed form and against
Newton's method; on tables, against scikit-learn on the pooled rows (docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.arguments import Count, NotNegative, Start, algorithm
from fedbilevel.algorithms.fedavg import ModelLoss, fedavg, whole_loss
from fedbilevel.algorithms.local import Local, enroll
from fedbilevel.calculus import (
    Calls,
    Tree,
    counted,
    dot,
    dtype_of,
    scale,
    select,
    squared_norm,
    step_along,
    subtract,
    zeros,
)
from fedbilevel.plan import Algorithm, Phase, Repeat
from fedbilevel.sampling import LocalData

ARMIJO = 1e-4
SHORTER = (0.1, 0.5)
"""A refused step becomes this much shorter, at most and at least."""
REFUSED = 10
ARRIVED = 3
ROUNDING = 8
"""Losses that differ by so many units in the last place are equal."""
CURVED = 1e-8
"""Cosine of s and y from which on a pair counts."""


class Pairs(NamedTuple):
    """The last steps s and changes y of the gradient, oldest first, and 1 / <s, y>, which is 0 where there is none."""

    steps: Tree
    changes: Tree
    inverses: jax.Array

    @classmethod
    def none(cls, model: Tree, memory: int) -> Pairs:
        several = jax.tree.map(lambda leaf: jnp.zeros((memory, *leaf.shape), leaf.dtype), model)
        return cls(several, several, jnp.zeros(memory, dtype_of(model)))

    def joined(self, step: Tree, change: Tree, curved: float = CURVED) -> Pairs:
        """With one more pair in the place of the oldest, unless the loss does not curve upwards along it."""
        product = dot(step, change)
        least = jnp.asarray(curved, product.dtype) * jnp.sqrt(squared_norm(step) * squared_norm(change))

        def after(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.concatenate([old[1:], new[None]])

        upwards = product > least
        grown = jax.tree.map(after, self, Pairs(step, change, 1 / jnp.where(upwards, product, 1)))
        return select(upwards, grown, self)  # type: ignore[no-any-return]

    def inverse_times(self, vector: Tree, first: Any = 1.0, between: Callable[[Any, Tree], Tree] = scale) -> Tree:
        """H times a vector: the two loops of the paper's Algorithm 2.1, places without a pair doing nothing; without any pair
        H = ``first``.  ``between`` the loops the vector is scaled by the last pair's size, or as else is wanted."""

        def back(vector: Tree, pair: Pairs) -> tuple[Tree, jax.Array]:
            share = pair.inverses * dot(pair.steps, vector)
            return step_along(vector, -share, pair.changes), share

        def forth(vector: Tree, held: tuple[Pairs, jax.Array]) -> tuple[Tree, None]:
            pair, share = held
            return step_along(vector, share - pair.inverses * dot(pair.changes, vector), pair.steps), None

        vector, shares = jax.lax.scan(back, vector, self, reverse=True)
        latest: Any = jax.tree.map(lambda leaf: leaf[-1], self)
        inverse, flatness = latest.inverses, squared_norm(latest.changes)
        size = jnp.where(inverse > 0, 1 / jnp.where(inverse > 0, inverse * flatness, 1), first)
        return jax.lax.scan(forth, between(size, vector), (self, shares))[0]


class Server(NamedTuple):
    """x with its loss and gradient, the direction d and the length t of the step to be tried, the pairs; how many points were
    refused since the last step, how many steps in a row foresaw next to nothing, and whether x must be asked for."""

    outer: Tree
    loss: jax.Array
    gradient: Tree
    direction: Tree
    length: jax.Array
    pairs: Pairs
    refused: jax.Array
    still: jax.Array
    unknown: jax.Array


class Reply(NamedTuple):
    loss: jax.Array
    gradient: Tree


class Descent(NamedTuple):
    """What the server and the clients do, for any plan that holds a `Server`; ``loss(model, told, data)`` is a client's, over
    all its rows; ``between``: see `Pairs.inverse_times`."""

    loss: Callable[[Tree, Tree, LocalData], jax.Array]
    memory: int = 10
    tolerance: Any = 1e-7
    between: Callable[[Any, Tree], Tree] = scale

    def first(self, model: Tree) -> Server:
        zero, none = jnp.zeros((), dtype_of(model)), jnp.zeros((), jnp.int32)
        here, unknown = zeros(model), jnp.asarray(True)
        return Server(model, zero, here, here, zero, Pairs.none(model, self.memory), none, none, unknown)

    def turns(self, server: Server) -> jax.Array:
        """0 when the run has arrived."""
        return jnp.where(server.still < ARRIVED, 1, 0)

    def point(self, server: Server) -> Tree:
        return step_along(server.outer, server.length, server.direction)

    def evaluate(self, model: Tree, told: Tree, local: Local, data: LocalData) -> tuple[Reply, Local]:
        found = jax.value_and_grad(self.loss)(model, told, data)
        return Reply(*found), counted(local, Calls(gradients=1))

    def absorb(self, server: Server, mean: Reply) -> Server:
        return select(_enough(server, mean), self._stepped(server, mean), _shortened(server, mean))  # type: ignore[no-any-return]

    def _stepped(self, server: Server, mean: Reply) -> Server:
        model, gradient = self.point(server), mean.gradient
        step, change = subtract(model, server.outer), subtract(gradient, server.gradient)
        pairs = select(server.unknown, Pairs.none(model, self.memory), server.pairs.joined(step, change))
        first = 1 / jnp.maximum(jnp.sqrt(squared_norm(gradient)), 1)
        direction = scale(-1, pairs.inverse_times(gradient, first, self.between))
        foreseen = -dot(gradient, direction) / 2
        still = jnp.where(foreseen <= jnp.asarray(self.tolerance, foreseen.dtype), server.still + 1, 0)
        known, none = jnp.asarray(False), jnp.zeros((), jnp.int32)
        return Server(model, mean.loss, gradient, direction, jnp.ones_like(mean.loss), pairs, none, still, known)


@algorithm()
def lbfgs(loss: ModelLoss, init: Start, memory: Count = 10, tolerance: NotNegative = 1e-7) -> Algorithm:
    """L-BFGS on all training rows: ``loss(model, rows)``, ``init`` the first model or a function of the key.

    Args:
        loss: ``(model, rows) -> scalar``, a mean over the rows.
        init: The first model, any tree of float arrays, or a function of a key that makes it.
        memory: Pairs of steps and gradient differences that are kept.
        tolerance: The loss may still fall by so much at the end; not negative.

    Returns:
        An `Algorithm`, for `simulate` and `sweep`.

    Raises:
        ValueError: A number is out of its range.
        TypeError: An argument is of the wrong kind, or its name is not known.

    Examples:
        >>> import fedbilevel as fb, jax.numpy as jnp, numpy as np
        >>> algo = fb.lbfgs(lambda model, rows: jnp.mean((model - rows) ** 2), init=np.zeros(()))
        >>> print(fb.simulate(algo, fb.ClientData(train=np.array([[1.0], [3.0]])), rounds=10).outer)
        2.0
    """
    base = fedavg(loss, init)
    descent = Descent(lambda model, told, data: whole_loss(loss, model, data), memory, tolerance)

    def work(model: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        return descent.evaluate(model, None, local, data)

    return Algorithm(
        lambda key: descent.first(base.init(key)),
        enroll,
        plan=(Repeat((Phase("gradient", descent.point, work, descent.absorb),), 1, descent.turns),),
        objective=base.objective,
        check=base.check,
    )


def _shortened(server: Server, mean: Reply) -> Server:
    """A shorter step or, after `REFUSED` of them, none, with everything forgotten."""
    slope, length = dot(server.gradient, server.direction), server.length
    bend = mean.loss - server.loss - length * slope
    lowest = -slope * length / jnp.maximum(2 * bend, jnp.finfo(bend.dtype).tiny)
    lowest = jnp.where(jnp.isfinite(lowest), lowest, 0)
    least, most = (jnp.asarray(share, length.dtype) for share in SHORTER)
    shorter = server._replace(length=length * jnp.clip(lowest, least, most), refused=server.refused + 1)
    # Without pairs there was nothing to forget: no step along the gradient helps, and x is where it ends.
    bare = ~jnp.any(server.pairs.inverses > 0)
    anew = server._replace(
        direction=zeros(server.outer),
        refused=jnp.zeros((), jnp.int32),
        unknown=jnp.asarray(True),
        still=jnp.where(bare, ARRIVED, server.still),
    )
    return select(shorter.refused < REFUSED, shorter, anew)  # type: ignore[no-any-return]


def _enough(server: Server, mean: Reply) -> jax.Array:
    """Whether the loss at the new point is low enough, or nothing is known to compare it with."""
    slope = dot(server.gradient, server.direction)
    rounding = ROUNDING * jnp.finfo(slope.dtype).eps * jnp.abs(server.loss)
    allowed = server.loss + jnp.asarray(ARMIJO, slope.dtype) * server.length * slope + rounding.astype(slope.dtype)
    return server.unknown | (mean.loss <= allowed)
