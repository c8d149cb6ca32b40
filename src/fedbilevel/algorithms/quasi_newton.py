"""Hyper-parameters tuned for the bytes of a few trainings, without a step to choose, and never for the worse.  Ours.

For problems with one y for all clients, whose clients can read all their rows in every exchange.  y holds K models of one kind,
such as those of K folds: g is a sum over them, and their Hessians are much alike.  The server does the thinking: clients only
evaluate derivatives at points it sends, and all it needs are means over clients.  With H the Hessian of one model's g:

    first     model     down z         up mean_k g_k(x, z), its gradient      L-BFGS (`fedbilevel.algorithms.lbfgs`)
              bend      down nothing   up H, or its diagonal, at z            once
    a round   look      down x, y      up f, w = grad_y g                     y <- y - B w, and again until w is small
              server    where f is not less than what is kept, x and y go back a part of the way, and the round ends
              gap       down nothing   up b = grad_y f                        p = B b
              product   down p         up H p, each model's own               u = t p + B (b - t H p), t the best
              weigh     down u         up nu = grad_x f - (d2g/dxdy) u        the hypergradient; x moves by BFGS
              shift     down x         up w = grad_y g at the new x           y <- y - B w, the step by which y follows x
    last      choices   down x
              model     down z         up as at first                         the model that is used

B is an inverse of H, the same for all K models: what was sent of H once, brought up to date by L-BFGS with all moves of y
since, K of them in an exchange.  ``ridge``(x) is a part of H's diagonal that x alone decides; where x moves it, B follows
without being told.  Losses at a y that has not quite arrived are compared by f - <u, w>, whose error is of second order.

x moves in ``units``, by BFGS from its moves so far, no further than the radius: 1/2 at first, twice that after a move that
reached it and was kept.  BFGS starts from one curvature for each leaf of x, that of its moves on the whole.  ``least`` is a
curvature that f surely has along x, such as that of a prior.  A move is kept where f falls by a tenth of what it promised, and
by more than what y's error may account for.  After the first move, the tuning ends where f could fall by less than
``tolerance`` even if it curved no more than ``least`` wherever x has not been, and after ``rounds`` looks at an x; rounds
after that cost nothing.  So f at the answer is at most f at the start.

``finished``(x) is what the last model is trained with.  The answer is x and that model.

Checked: iterates against a naive loop, and penalties of a ridge regression against their closed form
(tests/algorithms/test_quasi_newton.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedbilevel.algorithms.arguments import Count, Limit, Positive, Start, algorithm, function_of
from fedbilevel.algorithms.lbfgs import ARRIVED, Descent, Pairs
from fedbilevel.algorithms.lbfgs import Server as Training
from fedbilevel.calculus import (
    Calls,
    Tree,
    all_finite,
    both_gradients,
    counted,
    cross_product,
    dot,
    hessian_vector,
    inner_gradient,
    no_calls,
    scale,
    select,
    solve_positive,
    squared_norm,
    step_along,
    subtract,
    zeros,
)
from fedbilevel.plan import Algorithm, Phase, Repeat, ServerStep, View
from fedbilevel.problem import BilevelProblem
from fedbilevel.sampling import LocalData

WHOLE = 200
"""Numbers in a model up to which all of H is sent; of larger ones, its diagonal."""
MEMORY = 30
MOVES = 64
"""Of x that are remembered: more than there usually are, so that one program serves any number of rounds."""
TRAINED = 60
"""Exchanges that a model takes, at most."""
TRAINED_TO = 1e-7
"""What the loss of the last model may still fall by."""
LOOKS = 4
"""At one x, at most."""
CLOSE, VAGUE = 0.1, 0.5
"""Times the tolerance: what g may still fall by after the last look at an x, and where f is not believed."""
SMALL = 0.1
"""Times the tolerance: a move that was taken back is not worth more if it promises less."""
ENOUGH = 0.1
"""Share of the decrease that a move promises which it must reach."""
SHORTER = (0.1, 0.5)
"""A move that is taken back becomes this much shorter, at most and at least."""
RADIUS = 0.5
CURVED = 1e-6
"""Steps along which the gradient changes by less, relative to their lengths, say nothing about H."""
UNHEARD = 1e30
"""The loss of a model that nobody was asked about: any other is less."""
TINY = 1e-20


def most_replies(rounds: int) -> int:
    """Of one client: two models, H, the last choices, and the looks and the move of every round."""
    return 2 * TRAINED + 2 + rounds * (LOOKS + 4)


class Told(NamedTuple):
    """f, and w."""

    loss: jax.Array
    gradient: Tree


class Place(NamedTuple):
    """x, the K models as rows of a matrix, and there: f, w, and what g may still fall by."""

    outer: Tree
    inner: jax.Array
    loss: jax.Array
    gradient: jax.Array
    error: jax.Array

    def value(self, adjoint: jax.Array) -> jax.Array:
        """f at y(x), up to an error of second order."""
        return self.loss - jnp.vdot(adjoint, self.gradient)


class Bend(NamedTuple):
    """What is known of H without the part that x alone decides: the matrix that was sent, or its diagonal, and pairs of moves
    since then."""

    matrix: jax.Array
    pairs: Pairs

    def joined(self, steps: jax.Array, changes: jax.Array, ridge: jax.Array) -> Bend:
        """With a pair of each of the K models."""
        own = changes - ridge * steps
        grown, _ = jax.lax.scan(lambda pairs, pair: (pairs.joined(*pair, CURVED), None), self.pairs, (steps, own))
        return self._replace(pairs=grown)

    def solve(self, vector: jax.Array, ridge: jax.Array) -> jax.Array:
        """By what was sent."""
        if self.matrix.ndim == 1:
            return vector / (self.matrix + ridge)
        return solve_positive(self.matrix + jnp.diag(ridge), vector)

    def inverse(self, vectors: jax.Array, ridge: jax.Array) -> jax.Array:
        """B times each row."""
        steps, changes, inverses = self.pairs
        changes = changes + ridge * steps
        products = jnp.sum(steps * changes, axis=1)
        there = (inverses > 0) & (products > 0)
        pairs = Pairs(steps, changes, jnp.where(there, 1 / jnp.where(there, products, 1), 0))

        def times(vector: jax.Array) -> jax.Array:
            return jnp.asarray(pairs.inverse_times(vector, between=lambda _, inside: self.solve(inside, ridge)))

        return jax.vmap(times)(vectors)


class Move(NamedTuple):
    """Of x, in its units, from what is kept to where is looked: the step, the slope of f along it, the decrease promised."""

    step: Tree
    slope: jax.Array
    promised: jax.Array


class Server(NamedTuple):
    """``training``: of the one model; ``trial``: where is looked; ``kept``: the best so far, with b, the adjoint u and the
    hypergradient nu in the units of x; ``moves``: pairs of moves of x.  ``looks``: at this x; ``good``: whether the last was
    kept; ``done``: whether the tuning is; ``last``: whether the last model is on its way."""

    training: Training
    trial: Place
    kept: Place
    right: jax.Array
    adjoint: jax.Array
    nu: Tree
    bend: Bend
    moves: Pairs
    move: Move
    radius: jax.Array
    looks: jax.Array
    round: jax.Array
    good: jax.Array
    done: jax.Array
    last: jax.Array


class Answer(NamedTuple):
    """x, and the model that was trained with it."""

    outer: Tree
    model: Tree


class Local(NamedTuple):
    """The point a client was sent last, and how much it computed."""

    outer: Tree
    inner: Tree
    calls: Calls


def _none(outer: Tree) -> float:
    return 0.0


def _same(outer: Tree) -> Tree:
    return outer


@algorithm()
def quasi_newton(
    problem: BilevelProblem,
    rounds: Limit,
    units: Start,
    least: Positive = 1e-3,
    tolerance: Positive = 1e-4,
    ridge: Annotated[Callable[[Tree], Any], function_of("(x) -> diagonal, shaped as a model")] = _none,
    finished: Annotated[Callable[[Tree], Tree], function_of("(x) -> x")] = _same,
    remembered: Count = MOVES,
) -> Algorithm:
    """See the module's text.  ``rounds``: how many x are looked at, at most; run it for one round more.  ``units``: of x, a
    tree like it.  ``remembered``: so many moves of x, the latest; with ``rounds`` or more, all."""
    like = jax.eval_shape(problem.start, jax.random.key(0))[1]
    parts = jax.tree.leaves(like)[0].shape[0]
    example, model_of = ravel_pytree(jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), like))
    size, kind = example.size, example.dtype
    whole = size <= WHOLE
    above = jnp.triu_indices(size) if whole else None

    def flat(inner: Tree) -> jax.Array:
        return jax.vmap(lambda model: ravel_pytree(model)[0])(inner)

    def models_of(inner: jax.Array) -> Tree:
        return jax.vmap(model_of)(inner)

    def diagonal(outer: Tree) -> jax.Array:
        return jnp.broadcast_to(jnp.ravel(ridge(outer)), size).astype(kind)

    # What clients compute.

    def of_one(model: Tree, outer: Tree, data: LocalData) -> jax.Array:
        """The mean loss of the K models where they are the same."""
        inner = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (parts, *leaf.shape)), model)
        return jnp.asarray(problem.inner_loss(outer, inner, data.whole("train")) / parts)

    def given(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Tree, Local]:
        return (), local._replace(outer=message)

    def train(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Any, Local]:
        return descent.evaluate(message, local.outer, local, data)  # type: ignore[arg-type,return-value]

    def bent(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[jax.Array, Local]:
        """H at the model that was sent last, one column after the other."""
        point = ravel_pytree(message)[0]
        slope = jax.grad(lambda model: of_one(model_of(model), local.outer, data))

        def column(place: jax.Array) -> jax.Array:
            image = jax.jvp(slope, (point,), (jnp.zeros_like(point).at[place].set(1),))[1]
            return jnp.asarray(image if whole else image[place])

        found = jax.lax.map(column, jnp.arange(size, dtype=jnp.int32))
        return found[above] if whole else found, counted(local, Calls(hessian_vector=1))

    def look(message: tuple[Tree, Tree], local: Local, data: LocalData, key: jax.Array) -> tuple[Told, Local]:
        outer, inner = message
        loss = problem.outer_loss(outer, inner, data.whole("val"))
        gradient = inner_gradient(problem.inner_loss, outer, inner, data.whole("train"))
        return Told(loss, gradient), counted(Local(outer, inner, local.calls), Calls(gradients=1))

    def gap(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Tree, Local]:
        along = inner_gradient(problem.outer_loss, local.outer, local.inner, data.whole("val"))
        return along, counted(local, Calls(gradients=1))

    def product(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Tree, Local]:
        image = hessian_vector(problem.inner_loss, local.outer, local.inner, data.whole("train"), message)
        return image, counted(local, Calls(hessian_vector=1))

    def weigh(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Tree, Local]:
        in_outer, _ = both_gradients(problem.outer_loss, local.outer, local.inner, data.whole("val"))
        cross = cross_product(problem.inner_loss, local.outer, local.inner, data.whole("train"), message)
        return subtract(in_outer, cross), counted(local, Calls(gradients=1, cross=1))

    def shift(message: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Tree, Local]:
        gradient = inner_gradient(problem.inner_loss, message, local.inner, data.whole("train"))
        return gradient, counted(local, Calls(gradients=1))

    # What the server makes of the means: first and last, one model.

    descent = Descent(of_one, MEMORY)

    def trains(server: Server) -> jax.Array:
        """The first model is only a start."""
        first = (server.round == 0) & (server.training.still < 1)
        return jnp.where(first | (server.last & (server.training.still < ARRIVED)), 1, 0)

    def trained(server: Server, mean: Any) -> Server:
        towards = diagonal(finished(server.kept.outer))

        def between(length: Any, vector: Tree) -> Tree:
            known = server.bend.solve(ravel_pytree(vector)[0], towards)
            return select(server.last, model_of(known), scale(length, vector))

        enough = jnp.where(server.last, TRAINED_TO, tolerance)
        return server._replace(
            training=descent._replace(tolerance=enough, between=between).absorb(server.training, mean)
        )

    def begun(server: Server, mean: jax.Array) -> Server:
        """The K models start from the one."""
        matrix = mean
        if whole:
            upper = jnp.zeros((size, size), kind).at[above].set(mean)
            matrix = upper + upper.T - jnp.diag(jnp.diag(upper))
        known = diagonal(server.trial.outer)
        own = matrix - (jnp.diag(known) if whole else known)
        inner = jnp.broadcast_to(ravel_pytree(server.training.outer)[0], (parts, size))
        return server._replace(trial=server.trial._replace(inner=inner), bend=server.bend._replace(matrix=own))

    def ended(server: Server, key: jax.Array) -> Server:
        """The one model starts from the mean of the K."""
        model = model_of(jnp.mean(server.kept.inner, axis=0))
        nothing, number, none = zeros(model), jnp.zeros((), kind), jnp.zeros((), jnp.int32)
        unheard, memory = jnp.asarray(UNHEARD, kind), Pairs.none(model, MEMORY)
        training = Training(model, unheard, nothing, nothing, number, memory, none, none, jnp.asarray(False))
        last = server._replace(training=training, last=jnp.asarray(True))
        return select(server.done & ~server.last, last, server)  # type: ignore[no-any-return]

    # Between them, the K models at one x after the other.

    def looks(server: Server) -> jax.Array:
        more = (server.looks < LOOKS) & (server.trial.error > CLOSE * tolerance)
        return jnp.where(~server.done & ((server.looks == 0) | more), 1, 0)

    def corrected(server: Server) -> jax.Array:
        """y - B w; where no w is known, y itself."""
        trial = server.trial
        return trial.inner - server.bend.inverse(trial.gradient, diagonal(trial.outer))

    def looked(server: Server, mean: Told) -> Server:
        before, inner, gradient = server.trial, corrected(server), flat(mean.gradient)
        known, own = jnp.any(before.gradient != 0), diagonal(before.outer)
        grown = server.bend.joined(inner - before.inner, gradient - before.gradient, own)
        bend = select(known, grown, server.bend)
        error = jnp.vdot(gradient, bend.inverse(gradient, own)) / 2
        trial = Place(before.outer, inner, mean.loss, gradient, error)
        return server._replace(trial=trial, bend=bend, looks=server.looks + 1)

    def judged(server: Server, key: jax.Array) -> Server:
        """Keeps where the move led, or goes back a part of the way, to where a parabola is lowest."""
        trial, kept, move = server.trial, server.kept, server.move
        fallen = kept.value(server.adjoint) - trial.value(server.adjoint)
        sure = all_finite((trial.loss, trial.gradient)) & (trial.error <= VAGUE * tolerance)
        better = fallen > jnp.maximum(ENOUGH * move.promised, (trial.error + kept.error) / parts)
        good = (server.round == 0) | (sure & better)
        length = jnp.sqrt(squared_norm(move.step))
        radius = jnp.where(length > 0.9 * server.radius, 2 * server.radius, server.radius)
        most, fewest = (jnp.asarray(share, kind) for share in SHORTER)
        lowest = -move.slope / (2 * jnp.maximum(-fallen - move.slope, TINY))
        share = jnp.clip(jnp.where(sure, lowest, 0), most, fewest)
        shorter = Move(scale(share, move.step), share * move.slope, -share * move.slope / 2)
        inner = jnp.where(sure, kept.inner + share * (trial.inner - kept.inner), kept.inner)
        back = kept._replace(outer=moved(kept.outer, shorter.step), inner=inner, gradient=zeros(kept.gradient))
        new = select(
            good,
            server._replace(kept=trial, radius=radius),
            server._replace(trial=back, move=shorter, radius=share * length),
        )
        over = (server.round + 1 >= rounds) | (~good & (shorter.promised < SMALL * tolerance))
        new = new._replace(good=good, done=over, round=server.round + 1, looks=jnp.zeros_like(server.looks))
        return select(server.done, server, new)  # type: ignore[no-any-return]

    def moves(server: Server) -> jax.Array:
        return jnp.where(server.good & ~server.done, 1, 0)

    def begin(server: Server, mean: Tree) -> Server:
        right = flat(mean)
        return server._replace(right=right, adjoint=server.bend.inverse(right, diagonal(server.kept.outer)))

    def solved(server: Server, mean: Tree) -> Server:
        """A step along p to where each model's own system is best solved, and B for what is left."""
        way, image, own = server.adjoint, flat(mean), diagonal(server.kept.outer)
        bend = server.bend.joined(way, image, own)
        lengths = jnp.sum(way * server.right, axis=1) / jnp.maximum(jnp.sum(way * image, axis=1), TINY)
        left = server.right - lengths[:, None] * image
        return server._replace(adjoint=lengths[:, None] * way + bend.inverse(left, own), bend=bend)

    def moved(outer: Tree, step: Tree) -> Tree:
        return problem.into_set(jax.tree.map(lambda x, s, unit: x + s * unit, outer, step, units))

    def usual(vector: jax.Array, steps: jax.Array, changes: jax.Array) -> jax.Array:
        """The inverse of the curvature that moves of this leaf of x have met, times the vector."""
        ratio = jnp.sqrt(jnp.sum(steps**2) / jnp.maximum(jnp.sum(changes**2), TINY))
        return jnp.where(ratio > 0, jnp.minimum(ratio, 1 / least), 1 / least) * vector

    def weighed(server: Server, mean: Tree) -> Server:
        """x by BFGS within the radius."""
        kept, nu = server.kept, jax.tree.map(jnp.multiply, mean, units)
        before, change = server.move.step, subtract(nu, server.nu)
        straight = dot(before, change) / jnp.maximum(squared_norm(before), TINY)
        pairs = server.moves.joined(before, step_along(change, jnp.maximum(least / 2 - straight, 0), before), 0.0)
        way = scale(-1, pairs.inverse_times(nu, between=lambda _, vector: jax.tree.map(usual, vector, *pairs[:2])))
        share = jnp.minimum(1, server.radius / jnp.maximum(jnp.sqrt(squared_norm(way)), TINY))
        outer = moved(kept.outer, scale(share, way))
        step = jax.tree.map(lambda new, old, unit: (new - old) / unit, outer, kept.outer, units)
        slope = dot(nu, step)
        move = Move(step, slope, -slope * (1 - share / 2))
        most = dot(nu, pairs.inverse_times(nu, between=lambda _, vector: scale(1 / least, vector))) / 2
        # The first move is always tried: where f bends downwards at the start, its slope there says little.
        done = ~(most >= jnp.where(server.round > 1, tolerance, 0))
        return server._replace(trial=kept._replace(outer=outer), nu=nu, moves=pairs, move=move, done=done)

    def shifted(server: Server, mean: Tree) -> Server:
        return server._replace(trial=server.trial._replace(gradient=flat(mean)))

    def init(key: jax.Array) -> Server:
        outer, inner = problem.start(key)
        rows, still, number = flat(inner), zeros(outer), jnp.zeros((), kind)
        here, none, no = Place(outer, rows, number, zeros(rows), number), jnp.zeros((), jnp.int32), jnp.asarray(False)
        bend = Bend(jnp.zeros((size, size) if whole else size, kind), Pairs.none(rows[0], MEMORY))
        return Server(
            descent.first(model_of(rows[0])), here, here, zeros(rows), zeros(rows), still, bend, Pairs.none(outer, remembered),
            Move(still, number, number), jnp.asarray(RADIUS, kind), none, none, no, no, no,
        )  # fmt: skip

    def until(turns: Callable[[Server], jax.Array], most: int, phase: Phase) -> Repeat:
        return Repeat((Repeat((phase,), 1, turns),), most)

    def if_so(condition: Callable[[Server], jax.Array], *phases: Phase) -> Repeat:
        return Repeat(phases, 1, lambda server: jnp.where(condition(server), 1, 0))

    recalling = partial(Phase, recalls=True)
    plan = (
        ServerStep("end", ended),
        if_so(
            lambda server: server.last & (server.training.loss >= UNHEARD),
            Phase("choices", lambda server: finished(server.kept.outer), given, lambda server, _: server),
        ),
        until(trains, TRAINED, recalling("model", lambda server: descent.point(server.training), train, trained)),
        if_so(lambda server: server.round == 0, recalling("bend", lambda server: server.training.outer, bent, begun)),
        until(
            looks, LOOKS, Phase("look", lambda server: (server.trial.outer, models_of(corrected(server))), look, looked)
        ),
        ServerStep("judge", judged),
        Repeat(
            (
                recalling("gap", lambda server: (), gap, begin),
                recalling("product", lambda server: models_of(server.adjoint), product, solved),
                recalling("weigh", lambda server: models_of(server.adjoint), weigh, weighed),
            ),
            1,
            moves,
        ),
        Repeat((recalling("shift", lambda server: server.trial.outer, shift, shifted),), 1, moves),
    )
    return Algorithm(
        init,
        lambda key: Local(*problem.start(key), no_calls()),
        plan,
        outer=lambda server: Answer(server.kept.outer, server.training.outer),
        view=lambda server, local: View(inner=models_of(server.kept.inner), calls=local.calls),
        objective=lambda answer, inner, data: problem.outer_loss(answer.outer, inner, data.whole("val")),
        check=lambda data: problem.check(data, None, None),
    )
