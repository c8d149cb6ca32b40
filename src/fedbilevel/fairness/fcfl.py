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

Differences from the paper: more than two groups (it has two: there the gap is the absolute difference), and classes (v_k is
then the largest gap of a class, see `fedbilevel.fairness.models.recognised`) and numbers (the gap of their means); a client in
which fewer than two groups have positives has disparity 0; ridge is part of the loss instead of a weight decay beside the
linear programs; with unequal client weights w_k, p_k is proportional to w_k exp(...) and the mean of gradients is weighted
(``weights="uniform"`` is the paper's).  Stage two lasts for as many rounds as are run.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.arguments import AtLeastTwo, Kind, MaybeCount, NotNegative, Positive, Start, algorithm
from fedbilevel.algorithms.local import Local
from fedbilevel.calculus import Calls, Tree, counted, dtype_of, scale, select, squared_norm, step_along, zeros
from fedbilevel.fairness.baseline import Comparison, Losses, PlainLoss, Scores, fair_averaging, loss_and_gap, serves
from fedbilevel.fairness.linear_program import balance, gram, maximise
from fedbilevel.fairness.models import LinearScores, group_rates, largest_gap, penalty, recognised, row_losses
from fedbilevel.hints import not_negative
from fedbilevel.plan import Algorithm, Phase, weighted_mean
from fedbilevel.sampling import LocalData

SHRINK, SHRINK_NORM, SMALLEST_DELTA = 0.01, 0.1, 1e-4
"""What delta is multiplied by (``lr_delta`` in the authors' program), once the second times the norm of its gradient is below
it (``factor_delta``), unless it is already below the third (``eps_delta_l``, ``eps_delta_g``)."""


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


def _share_of_rounds(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What stage one gets of a run of ``rounds`` rounds."""
    first, second, rounds = (arguments[argument] for argument in ("stage_one", "stage_two", "rounds"))
    if rounds is not None:
        if first + second == 0:
            raise ValueError("stage_one and stage_two must not both be 0 when rounds is given.")
        first = round(rounds * first / (first + second))
    return {**arguments, "stage_one": float(first), "stage_two": None, "rounds": None}


@algorithm(_share_of_rounds)
def fcfl(
    scores: Scores,
    init: Start,
    step: Positive = 0.1,
    *,
    groups: AtLeastTwo,
    epsilon: NotNegative = 0.05,
    stage_one: NotNegative = 800,
    stage_two: Annotated[float, Kind(not_negative)] = 220,
    rounds: MaybeCount = None,
    temperature: Positive = 10.0,
    delta: Positive = 0.5,
    ridge: NotNegative = 0.0,
    losses: Losses = row_losses,
    compared: Comparison = recognised,
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
    base = fair_averaging(PlainLoss(scores, ridge, losses), scores, init, step, 1, None, groups, losses)

    def first(key: jax.Array) -> Server:
        model = base.init(key)
        smoothing = jnp.asarray(delta, dtype_of(model))
        return Server(model, smoothing, smoothing, jnp.zeros((), jnp.int32))

    def work(model: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        local = counted(local, Calls(gradients=2))
        if serves(scores, model, losses):
            loss, gap, loss_gradient, gap_gradient = loss_and_gap(model, data, groups, temperature)
            gradients = jnp.stack([step_along(loss_gradient, ridge, model), gap_gradient])
            return Reply(loss + penalty(model, ridge), gap, gradients), local
        rows = data.whole("train")

        def both(params: Tree) -> jax.Array:
            logits = scores(params, rows["features"])
            rates = group_rates(compared(logits, rows["labels"], temperature), rows["groups"], groups)
            loss = jnp.mean(losses(logits, rows["labels"])) + penalty(params, ridge)
            return jnp.stack([loss, largest_gap(rates)])

        # One forward pass, and one backward pass that carries both gradients through the features together.
        values, pull = jax.vjp(both, model)
        (gradients,) = jax.vmap(pull)(jnp.eye(2, dtype=values.dtype))
        return Reply(values[0], values[1], gradients), local

    def gather(replies: Reply, weights: jax.Array) -> Replies:
        of_loss, of_gap = (jax.tree.map(lambda leaf, i=i: leaf[:, i], replies.gradients) for i in (0, 1))
        return Replies(replies.loss, replies.gap, of_loss, of_gap, weights.astype(replies.loss.dtype))

    def absorb(server: Server, replies: Replies) -> Server:
        aim, kind = jnp.asarray(epsilon, replies.gap.dtype), server.loss_delta.dtype
        direction, loss_delta, gap_delta = jax.lax.cond(
            server.round.astype(kind) < jnp.asarray(stage_one, kind),
            lambda: _stage_one(server, replies, aim),
            lambda: _stage_two(server, replies, aim),
        )
        return Server(step_along(server.model, -step, direction), loss_delta, gap_delta, server.round + 1)

    return base._replace(
        init=first,
        plan=(Phase("gradients", lambda server: server.model, work, absorb, aggregate=gather),),
        outer=lambda server: server.model,
        linear="features" if isinstance(scores, LinearScores) and losses is row_losses else None,
    )


def smoothed_maximum(values: jax.Array, weights: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(p, largest value) over the clients with positive weight."""
    present = weights > 0
    largest = jnp.max(jnp.where(present, values, -jnp.inf))
    raised = jnp.where(present, weights * jnp.exp((values - largest) / delta), 0)
    return raised / jnp.sum(raised), largest


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
