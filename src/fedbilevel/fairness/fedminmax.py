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

Differences from the paper: minibatches; the ridge term, which enters the clients' steps and not the group risks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.afl import onto_simplex
from fedbilevel.algorithms.fedavg import Local, fedavg
from fedbilevel.algorithms.fedavg import Settings as Averaging
from fedbilevel.algorithms.fedavg import build as averaging
from fedbilevel.calculus import Calls, Tree, step_along
from fedbilevel.fairness import whole_set
from fedbilevel.fairness.baseline import Scores, check_rows, check_scores, not_negative, penalty, plain_loss, row_losses
from fedbilevel.fairness.soft import group_totals
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.problem import ClientData, positive
from fedbilevel.sampling import Batches, LocalData, draw_round


class Server(NamedTuple):
    """theta, mu, and the group risks r that last moved mu."""

    model: Tree
    group_weights: jax.Array
    risks: jax.Array


class GroupLosses(NamedTuple):
    """Per group, over the rows looked at: sum of losses and number of rows, both divided by all rows looked at.

    Being means over rows, they average over clients like anything else; r is the ratio of the averages.
    """

    losses: jax.Array
    shares: jax.Array


class Message(NamedTuple):
    model: Tree
    row_weights: jax.Array


class Reply(NamedTuple):
    outer: Tree
    groups: GroupLosses | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "group_step", "ridge", "start", "group_counts"),
    meta_fields=("scores", "init", "batch_size", "risks"),
)
@dataclass(frozen=True)
class Settings:
    scores: Scores
    init: Callable[[jax.Array], Tree] | None
    start: Tree
    group_counts: Any
    step: Any
    group_step: Any
    batch_size: int | None
    ridge: Any
    risks: str


def fedminmax(
    scores: Scores,
    init: Callable[[jax.Array], Tree] | Tree,
    group_counts: Sequence[int] | np.ndarray,
    step: float = 0.1,
    group_step: float = 0.1,
    batch_size: int | None = 128,
    ridge: float = 0.0,
    risks: str = "averaged",
) -> Algorithm:
    """FedMinMax with one local step a round.  ``group_counts[a]``: training rows of group a over all clients;
    ``step`` is eta, ``group_step`` eta_mu; ``risks`` when the group risks are taken, "averaged" or "sent" (see above).

    >>> import numpy as np
    >>> from fedbilevel.fairness.fedminmax import fedminmax
    >>> algo = fedminmax(lambda params, features: features @ params, np.zeros(3), group_counts=[120, 30])
    >>> [phase.name for phase in algo.plan]
    ['descent', 'ascent']
    """
    check_scores(scores)
    not_negative("ridge", ridge)
    positive("group_step", group_step)
    if risks not in ("averaged", "sent"):
        raise ValueError(f"risks must be 'averaged' or 'sent', not {risks!r}.")
    counts = np.asarray(group_counts, np.float64)
    if counts.ndim != 1 or len(counts) < 2:
        raise ValueError(
            f"group_counts must be one number for each of at least two groups, not of shape {counts.shape}."
        )
    if not (np.isfinite(counts) & (counts > 0)).all():
        empty = int(np.argmin(np.where(np.isfinite(counts), counts, -np.inf)))
        raise ValueError(
            f"group_counts[{empty}] is {counts[empty]:g}: every group needs rows; renumber the groups without it."
        )
    base = fedavg(plain_loss(scores, ridge), init, step, 1, batch_size).settings
    return build(Settings(scores, base.init, base.start, counts, step, group_step, batch_size, ridge, risks))


def build(settings: Settings) -> Algorithm:
    count = settings.group_counts.shape[0]
    loss = plain_loss(settings.scores, settings.ridge)
    base = averaging(Averaging(loss, settings.init, settings.start, settings.step, 1, settings.batch_size))

    def proportions(model: Tree) -> jax.Array:
        counts = jnp.asarray(settings.group_counts, jax.tree.leaves(model)[0].dtype)
        return counts / jnp.sum(counts)

    def init(key: jax.Array) -> Server:
        model = base.init(key)
        rho = proportions(model)
        return Server(model, rho, jnp.zeros_like(rho))

    def by_group(losses: jax.Array, groups: jax.Array) -> GroupLosses:
        rows = losses.shape[0]
        return GroupLosses(
            group_totals(losses, groups, count) / rows, group_totals(jnp.ones_like(losses), groups, count) / rows
        )

    def step(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Any]:
        draws = jax.tree.map(lambda rows: rows[0], draw_round(data, key, 1, batch_size=settings.batch_size))
        batch = Batches(data, draws).inner()

        def weighted(params: Tree) -> tuple[jax.Array, jax.Array]:
            losses = row_losses(settings.scores(params, batch["features"]), batch["labels"])
            weights = message.row_weights.astype(losses.dtype)[batch["groups"]]
            return jnp.mean(weights * losses) + penalty(params, settings.ridge), losses

        gradient, losses = jax.grad(weighted, has_aux=True)(message.model)
        groups = by_group(losses, batch["groups"]) if settings.risks == "sent" else None
        reply = Reply(step_along(message.model, -settings.step, gradient), groups)
        return reply, Local(local.calls.plus(Calls(gradients=1)))

    def evaluate(model: Tree, local: Tree, data: LocalData, key: jax.Array) -> tuple[GroupLosses, Tree]:
        if whole_set.applies(settings.scores, model):
            return GroupLosses(*whole_set.group_losses(model, data, count)), local
        rows = data.whole("train")
        return by_group(row_losses(settings.scores(model, rows["features"]), rows["labels"]), rows["groups"]), local

    def ascend(server: Server, mean: GroupLosses) -> Server:
        seen = mean.shares > 0
        risks = jnp.where(seen, mean.losses / jnp.where(seen, mean.shares, 1), server.risks)
        risks = risks.astype(server.risks.dtype)
        moved = step_along(server.group_weights, settings.group_step, risks)
        return server._replace(group_weights=onto_simplex(moved), risks=risks)

    def descend(server: Server, mean: Reply) -> Server:
        if mean.groups is not None:
            server = ascend(server, mean.groups)
        return server._replace(model=mean.outer)

    descent = Phase(
        "descent",
        lambda server: Message(server.model, server.group_weights / proportions(server.model)),
        step,
        descend,
    )
    ascent = Phase("ascent", lambda server: server.model, evaluate, ascend)

    def check(data: ClientData) -> None:
        check_rows(data, count, settings.scores, base.init)
        base.check(data)

    return base._replace(
        name="fedminmax",
        init=init,
        plan=(descent, ascent) if settings.risks == "averaged" else (descent,),
        outer=lambda server: server.model,
        check=check,
        settings=settings,
        build=build,
    )
