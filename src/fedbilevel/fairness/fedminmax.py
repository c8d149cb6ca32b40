"""FedMinMax: the model against an adversary who weights the groups.

A. Papadaki, N. Martinez, M. Bertran, G. Sapiro, M. Rodrigues, "Federating for Learning Group Fair Models" (2021) and
"Minimax Demographic Group Fairness in Federated Learning", FAccT 2022.

    min over theta   max over mu in the simplex   sum_a mu_a r_a(theta),      r_a the mean loss over all rows of group a

With rho_a = n_a / n and mu_0 = rho, in every round:

    the server sends theta and w = mu / rho
    client k:   theta_k = theta - eta grad mean_i w_{a_i} l_i(theta)            one step on its minibatch
    server:     theta <- sum_k (n_k / n) theta_k
                mu    <- projection onto the simplex of (mu + eta_mu r)

*Global statistics are needed*: the server must know how many rows every group has over all clients (``group_counts``), and
in every round each client reveals the mean loss and the share of each group among its rows.  Simulate with
``weights="samples"``: only then are the averages above those over all rows.

``risks="averaged"`` (default): r is taken at the new average, over all rows, and costs a second exchange.  Up per round and
client: a model and 2 K numbers; down: two models and K numbers.
``risks="sent"``: r is taken at the model the clients were sent, on the rows of their step (all of them with
``batch_size=None``: theta and mu then step simultaneously), in the same reply.  Up: a model and 2 K numbers; down: a model
and K numbers.  On minibatches, a group that no client drew keeps its last known risk.

Differences from the paper: minibatches; the ridge term, which enters the clients' steps and not the group risks;
``finish_after`` (`fedbilevel.fairness.baseline.finished`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.afl import onto_simplex
from fedbilevel.algorithms.arguments import Batch, MaybeCount, NotNegative, Positive, Start, algorithm, one_of
from fedbilevel.algorithms.local import Local
from fedbilevel.calculus import Calls, Tree, counted, step_along
from fedbilevel.fairness import baseline
from fedbilevel.fairness.baseline import GroupLosses, GroupWeights, Losses, Message, Reply, Scores, Server
from fedbilevel.fairness.models import LinearScores, group_totals, penalty, row_losses
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.sampling import LocalData, Sampler

GroupCounts = Annotated[
    Sequence[int] | np.ndarray, baseline.counts_by_group("every group needs rows; renumber the groups without it")
]


@algorithm()
def fedminmax(
    scores: Scores,
    init: Start,
    group_counts: GroupCounts,
    step: Positive = 0.1,
    group_step: Positive = 0.1,
    batch_size: Batch = 128,
    ridge: NotNegative = 0.0,
    risks: Annotated[str, one_of("averaged", "sent")] = "averaged",
    losses: Losses = row_losses,
    finish_after: MaybeCount = None,
) -> Algorithm:
    """FedMinMax with one local step a round.  ``group_counts[a]``: training rows of group a over all clients;
    ``step`` is eta, ``group_step`` eta_mu; ``risks`` when the group risks are taken, "averaged" or "sent" (see above).
    ``finish_after``: rounds after which the model is trained to the end with the mean weights of their second half.

    >>> import numpy as np
    >>> from fedbilevel.fairness.fedminmax import fedminmax
    >>> algo = fedminmax(lambda params, features: features @ params, np.zeros(3), group_counts=[120, 30])
    >>> [phase.name for phase in algo.plan]
    ['descent', 'ascent']
    """
    count, weights = len(group_counts), GroupWeights(group_counts)
    loss = baseline.PlainLoss(scores, ridge, losses)
    base = baseline.fair_averaging(loss, scores, init, step, 1, batch_size, count, losses)

    def weighed(message: Message, each: jax.Array, batch: Any) -> jax.Array:
        return message.row_weights.astype(each.dtype)[batch["groups"]] * each

    def by_group(each: jax.Array, groups: jax.Array) -> GroupLosses:
        return GroupLosses(*(group_totals(row, groups, count) / len(row) for row in (each, jnp.ones_like(each))))

    def descend(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        batches = Sampler(batch_size).once(data, key)
        packed = batch_size is not None and risks == "averaged"
        if packed and baseline.serves_packed(data, scores, message.model, losses):
            gradient = baseline.group_weighted_gradient(message.model, batches, message.row_weights, ridge)
            return Reply(step_along(message.model, -step, gradient), None), counted(local, Calls(gradients=1))
        batch = batches.inner()

        def weighted(params: Tree) -> tuple[jax.Array, jax.Array]:
            each = losses(scores(params, batch["features"]), batch["labels"])
            return jnp.mean(weighed(message, each, batch)) + penalty(params, ridge), each

        gradient, each = jax.grad(weighted, has_aux=True)(message.model)
        groups = by_group(each, batch["groups"]) if risks == "sent" else None
        return Reply(step_along(message.model, -step, gradient), groups), counted(local, Calls(gradients=1))

    def evaluate(model: Tree, local: Tree, data: LocalData, key: jax.Array) -> tuple[GroupLosses, Tree]:
        if baseline.serves(scores, model, losses):
            return baseline.group_losses(model, data, count), local
        rows = data.whole("train")
        return by_group(losses(scores(model, rows["features"]), rows["labels"]), rows["groups"]), local

    def ascend(server: Server, mean: GroupLosses) -> Server:
        means = baseline.mean_losses(mean, server.risks)
        moved = step_along(server.group_weights, group_step, means)
        return server._replace(group_weights=onto_simplex(moved), risks=means)

    def absorb(server: Server, mean: Reply) -> Server:
        return (server if mean.groups is None else ascend(server, mean.groups))._replace(model=mean.outer)

    descent = Phase("descent", weights.send, descend, absorb)
    ascent = Phase("ascent", lambda server: server.model, evaluate, ascend)
    made = base._replace(
        init=lambda key: weights.first(base.init(key)),
        plan=(descent, ascent) if risks == "averaged" else (descent,),
        outer=lambda server: server.model,
        linear="features" if isinstance(scores, LinearScores) and losses is row_losses else None,
    )
    if finish_after is None:
        return made

    def each_weighted(params: Tree, message: Message, rows: Any) -> jax.Array:
        return weighed(message, losses(scores(params, rows["features"]), rows["labels"]), rows)

    return baseline.finished(made, weights, finish_after, each_weighted, ridge)
