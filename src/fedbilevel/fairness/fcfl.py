"""FCFL: the worst client's loss and the worst client's disparity first, then every client's loss.

S. Cui, W. Pan, J. Liang, C. Zhang, F. Wang, "Addressing Algorithmic Disparity and Performance Inconsistency in Federated
Learning", NeurIPS 2021.  Every client k has a loss l_k and a disparity v_k, the largest pairwise gap of the soft
true-positive rates (mean of sigmoid(T z), T = 10) on its whole training set.  A maximum over clients is smoothed by the
weights p_k proportional to exp((v_k - max v) / delta).  In every round the clients send l_k, v_k and both gradients, and the
server takes one step of length eta against a direction d:

Stage one.  g_l = sum p_k(l) grad l_k and g_g = sum p_k(v) grad v_k; d = alpha_1 g_l + alpha_2 g_g, alpha in the simplex, with
    max v <= epsilon:   alpha maximises <d, g_l>
    otherwise:          alpha maximises <d, g_g> subject to <d, g_l> >= 0
after which delta_l and delta_g each become 0.01 delta if delta > 1e-4 and 0.1 |g| <= delta (g = g_l or g_g).

Stage two.  G holds the rows grad l_1 .. grad l_M and g_g (0 if max v < epsilon); d = alpha G with alpha in the simplex
maximising <d, mean of the grad l_k> subject to G d >= 0: no client's loss, and no violated disparity, may grow to first order.
That program always has a solution (the shortest d); where rounding hides it, no direction improves anybody and d = 0.

Up per round and client: two models and two numbers; down: one model.  Group labels are read by the clients only.

Differences from the paper: more than two groups (it has two: there the gap is the absolute difference); a client in which
fewer than two groups have positives has disparity 0; ridge is part of the loss instead of a weight decay beside the
linear programs; with unequal client weights w_k, p_k is proportional to w_k exp(...) and the mean of gradients is weighted
(``weights="uniform"`` is the paper's).  Stage two lasts for as many rounds as are run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.fedavg import Local, fedavg
from fedbilevel.algorithms.fedavg import Settings as Averaging
from fedbilevel.algorithms.fedavg import build as averaging
from fedbilevel.calculus import Calls, Tree, dot, scale, select, squared_norm, step_along, zeros
from fedbilevel.fairness import whole_set
from fedbilevel.fairness.baseline import Scores, check_rows, check_scores, not_negative, penalty, plain_loss, row_losses
from fedbilevel.fairness.linear_program import maximise
from fedbilevel.fairness.soft import largest_gap, soft_true_positive_rates
from fedbilevel.plan import Algorithm, Phase, weighted_mean
from fedbilevel.problem import ClientData, positive, whole_number
from fedbilevel.sampling import LocalData

SHRINK = 0.01
"""What delta is multiplied by (``lr_delta`` in the authors' program)..."""
SHRINK_NORM = 0.1
"""...once this times the norm of its gradient is below it (``factor_delta``)..."""
SMALLEST_DELTA = 1e-4
"""...unless it is already below this (``eps_delta_l``, ``eps_delta_g``)."""


class Server(NamedTuple):
    """The model, delta_l and delta_g, and the number of rounds done."""

    model: Tree
    loss_delta: jax.Array
    gap_delta: jax.Array
    round: jax.Array


class Reply(NamedTuple):
    """A client's loss, its disparity, and their gradients (leaves ``[2, ...]``: of the loss, of the disparity)."""

    loss: jax.Array
    gap: jax.Array
    gradients: Tree


class Replies(NamedTuple):
    """All replies, stacked, and the clients' weights: 0 for a client without a say or whose reply was lost."""

    loss: jax.Array
    gap: jax.Array
    loss_gradients: Tree
    gap_gradients: Tree
    weights: jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "epsilon", "stage_one", "temperature", "delta", "ridge", "start"),
    meta_fields=("scores", "init", "groups"),
)
@dataclass(frozen=True)
class Settings:
    scores: Scores
    init: Callable[[jax.Array], Tree] | None
    start: Tree
    step: Any
    groups: int
    epsilon: Any
    stage_one: Any
    temperature: Any
    delta: Any
    ridge: Any


def fcfl(
    scores: Scores,
    init: Callable[[jax.Array], Tree] | Tree,
    step: float = 0.1,
    *,
    groups: int,
    epsilon: float = 0.05,
    stage_one: float = 800,
    stage_two: float = 220,
    rounds: int | None = None,
    temperature: float = 10.0,
    delta: float = 0.5,
    ridge: float = 0.0,
) -> Algorithm:
    """FCFL.  ``epsilon``: the disparity aimed at; ``delta``: the first smoothing of both maxima; ``temperature``: T.

    Without ``rounds``, stage one lasts ``stage_one`` rounds and stage two the rest, however many those are.  With
    ``rounds``, the run's length, stage one takes the part ``stage_one / (stage_one + stage_two)`` of it; the two may then
    be any numbers, such as fractions.

    >>> import numpy as np
    >>> from fedbilevel.fairness.fcfl import fcfl
    >>> algo = fcfl(lambda params, features: features @ params, np.zeros(3), groups=2, rounds=2000)
    >>> algo.settings.stage_one
    1569.0
    """
    check_scores(scores)
    whole_number("groups", groups, least=2)
    whole_number("rounds", rounds, optional=True)
    for name, value in (("epsilon", epsilon), ("stage_one", stage_one), ("stage_two", stage_two), ("ridge", ridge)):
        not_negative(name, value)
    positive("temperature", temperature)
    positive("delta", delta)
    if rounds is not None:
        if stage_one + stage_two == 0:
            raise ValueError("stage_one and stage_two must not both be 0 when rounds is given.")
        stage_one = round(rounds * stage_one / (stage_one + stage_two))
    base = fedavg(plain_loss(scores, ridge), init, step, 1, None).settings
    return build(
        Settings(scores, base.init, base.start, step, groups, epsilon, float(stage_one), temperature, delta, ridge)
    )


def build(settings: Settings) -> Algorithm:
    base = averaging(
        Averaging(plain_loss(settings.scores, settings.ridge), settings.init, settings.start, settings.step, 1, None)
    )

    def init(key: jax.Array) -> Server:
        model = base.init(key)
        delta = jnp.asarray(settings.delta, jax.tree.leaves(model)[0].dtype)
        return Server(model, delta, delta, jnp.zeros((), jnp.int32))

    def work(model: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        counted = Local(local.calls.plus(Calls(gradients=2)))
        if whole_set.applies(settings.scores, model):
            found = whole_set.loss_and_gap(model, data, settings.groups, settings.temperature)
            loss = found.loss + penalty(model, settings.ridge)
            loss_gradient = step_along(found.loss_gradient, settings.ridge, model)
            return Reply(loss, found.gap, jnp.stack([loss_gradient, found.gap_gradient])), counted
        rows = data.whole("train")

        def loss_and_gap(params: Tree) -> jax.Array:
            scores = settings.scores(params, rows["features"])
            rates = soft_true_positive_rates(
                scores, rows["labels"], rows["groups"], settings.groups, settings.temperature
            )
            loss = jnp.mean(row_losses(scores, rows["labels"])) + penalty(params, settings.ridge)
            return jnp.stack([loss, largest_gap(rates)])

        # One forward pass, and one backward pass that carries both gradients through the features together.
        values, pull = jax.vjp(loss_and_gap, model)
        (gradients,) = jax.vmap(pull)(jnp.eye(2, dtype=values.dtype))
        return Reply(values[0], values[1], gradients), counted

    def gather(replies: Reply, weights: jax.Array) -> Replies:
        of_loss, of_gap = (jax.tree.map(lambda leaf, i=i: leaf[:, i], replies.gradients) for i in (0, 1))
        return Replies(replies.loss, replies.gap, of_loss, of_gap, weights.astype(replies.loss.dtype))

    def absorb(server: Server, replies: Replies) -> Server:
        epsilon = jnp.asarray(settings.epsilon, replies.gap.dtype)
        first = server.round.astype(server.loss_delta.dtype) < jnp.asarray(settings.stage_one, server.loss_delta.dtype)
        direction, loss_delta, gap_delta = jax.lax.cond(
            first, lambda: _stage_one(server, replies, epsilon), lambda: _stage_two(server, replies, epsilon)
        )
        model = step_along(server.model, -settings.step, direction)
        return Server(model, loss_delta, gap_delta, server.round + 1)

    def check(data: ClientData) -> None:
        check_rows(data, settings.groups, settings.scores, base.init)
        base.check(data)

    return base._replace(
        name="fcfl",
        init=init,
        plan=(Phase("gradients", lambda server: server.model, work, absorb, aggregate=gather),),
        outer=lambda server: server.model,
        check=check,
        settings=settings,
        build=build,
    )


def smoothed_maximum(values: jax.Array, weights: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(p, largest value) over the clients with positive weight."""
    present = weights > 0
    largest = jnp.max(jnp.where(present, values, -jnp.inf))
    raised = jnp.where(present, weights * jnp.exp((values - largest) / delta), 0)
    return raised / jnp.sum(raised), largest


def balance(loss_gradient: Tree, gap_gradient: Tree, satisfied: jax.Array) -> jax.Array:
    """alpha_2 of stage one.  Its programs have one free number, so their vertices are written out."""
    loss_loss, gap_gap = squared_norm(loss_gradient), squared_norm(gap_gradient)
    loss_gap = dot(loss_gradient, gap_gradient)
    for_loss = (loss_gap > loss_loss).astype(loss_loss.dtype)
    # <d, g_l> = (1 - s) |g_l|^2 + s <g_g, g_l> stays non-negative up to this s.
    opposed = loss_gap < 0
    furthest = jnp.where(opposed, loss_loss / jnp.where(opposed, loss_loss - loss_gap, 1), 1)
    for_gap = jnp.where(gap_gap >= loss_gap, furthest, 0)
    return jnp.where(satisfied, for_loss, for_gap)


def _stage_one(server: Server, replies: Replies, epsilon: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
    loss_weights, _ = smoothed_maximum(replies.loss, replies.weights, server.loss_delta)
    gap_weights, largest = smoothed_maximum(replies.gap, replies.weights, server.gap_delta)
    loss_gradient = weighted_mean(replies.loss_gradients, loss_weights)
    gap_gradient = weighted_mean(replies.gap_gradients, gap_weights)
    share = balance(loss_gradient, gap_gradient, largest <= epsilon)
    direction = step_along(scale(1 - share, loss_gradient), share, gap_gradient)
    return direction, shrunk(server.loss_delta, loss_gradient), shrunk(server.gap_delta, gap_gradient)


def shrunk(delta: jax.Array, gradient: Tree) -> jax.Array:
    small = SHRINK_NORM * jnp.sqrt(squared_norm(gradient)) <= delta
    return jnp.where((delta > SMALLEST_DELTA) & small, SHRINK * delta, delta)


def _stage_two(server: Server, replies: Replies, epsilon: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
    gap_weights, largest = smoothed_maximum(replies.gap, replies.weights, server.gap_delta)
    gap_gradient = weighted_mean(replies.gap_gradients, gap_weights)
    gap_gradient = select(largest < epsilon, zeros(gap_gradient), gap_gradient)
    present = replies.weights > 0
    loss_gradients = jax.vmap(select, in_axes=(0, 0, None))(
        present, replies.loss_gradients, zeros(gap_gradient)
    )  # an absent client must not constrain the others either
    stacked = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), loss_gradients, gap_gradient)
    products = gram(stacked)
    program = maximise(products[:, :-1] @ replies.weights, products, jnp.append(present, True))
    direction = weighted_mean(stacked, jnp.where(program.solved, program.point, 0))
    return direction, server.loss_delta, server.gap_delta


def gram(stacked: Tree) -> jax.Array:
    """Inner products of all pairs, the leading axis of every leaf counting the vectors."""
    flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(stacked)]
    products = [rows @ rows.T for rows in flat]
    return jnp.asarray(sum(products[1:], products[0]))
