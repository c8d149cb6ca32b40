"""FedFB: FairBatch over clients, the weights of the groups' positives follow their losses.

Y. Zeng, H. Chen, K. Lee, "Improving Fairness via Federated Learning" (2021), after Y. Roh et al., "FairBatch: Batch Selection
for Model Fairness", ICLR 2021; here for equal opportunity.  With pi_a the share of group a among all positive rows, mu_0 = pi,
and r_a(theta) the mean loss over all positive rows of group a, in every round

    the server sends theta and mu / pi
    client k:   I local steps on   mean_i w_i l_i(theta),   w_i = mu_a / pi_a for positive rows of group a, 1 for negative rows
    server:     theta <- sum_k (n_k / n) theta_k
                mu_a += alpha d_a / |d|  for a >= 1,   d_a = r_a(theta) - r_0(theta);   mu_0 -= the sum of those
                mu   <- its projection onto the simplex

r is taken at the theta that was sent, over the clients' whole training sets.  *Global statistics are needed*: the server must
know how many positive rows every group has over all clients (``positive_counts``), and every client reveals, for each group,
the mean loss of its positives and their share of its rows.  Simulate with ``weights="samples"``: only then are the averages
those over all rows.  Up per round and client: a model and 2 K numbers; down: a model and K numbers.

Differences from the paper: equal opportunity only; known to us from its text's summaries and a published program, not from the
authors' code; losses are compared as means over a group's positives (as in FairBatch), not as sums; alpha is in shares of the
positives, not of all rows; for two groups the step is alpha sign(r_1 - r_0), as in the paper, for more it is along d / |d| and
projected; the ridge term, which enters the clients' steps and not r.

Checked: iterates against a naive loop; that it narrows the gap between the groups' positive losses which FedAvg leaves.
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
from fedbilevel.algorithms.local import check_rates
from fedbilevel.calculus import Calls, Tree, step_along
from fedbilevel.fairness.baseline import Scores, check_rows, check_scores, not_negative, penalty, plain_loss, row_losses
from fedbilevel.fairness.soft import group_totals
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.problem import ClientData
from fedbilevel.sampling import Batches, LocalData, draw_round


class Server(NamedTuple):
    """theta, mu, and the r that last moved mu."""

    model: Tree
    group_weights: jax.Array
    risks: jax.Array


class Message(NamedTuple):
    model: Tree
    row_weights: jax.Array


class Reply(NamedTuple):
    """The model, and per group the sum of its positives' losses and their number, both divided by all rows."""

    outer: Tree
    losses: jax.Array
    shares: jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "group_step", "ridge", "start", "positive_counts"),
    meta_fields=("scores", "init", "local_steps", "batch_size"),
)
@dataclass(frozen=True)
class Settings:
    scores: Scores
    init: Callable[[jax.Array], Tree] | None
    start: Tree
    positive_counts: Any
    step: Any
    group_step: Any
    local_steps: int
    batch_size: int | None
    ridge: Any


def fedfb(
    scores: Scores,
    init: Callable[[jax.Array], Tree] | Tree,
    positive_counts: Sequence[int] | np.ndarray,
    step: float = 0.1,
    group_step: float = 0.02,
    local_steps: int = 5,
    batch_size: int | None = 128,
    ridge: float = 0.0,
) -> Algorithm:
    """FedFB.  ``positive_counts[a]``: positive training rows of group a over all clients; ``step`` is the clients' step,
    ``group_step`` alpha.

    >>> import numpy as np
    >>> from fedbilevel.fairness.fedfb import fedfb
    >>> algo = fedfb(lambda params, features: features @ params, np.zeros(3), positive_counts=[60, 20])
    >>> [phase.name for phase in algo.plan]
    ['local']
    """
    check_scores(scores)
    not_negative("ridge", ridge)
    check_rates(group_step=group_step)
    counts = np.asarray(positive_counts, np.float64)
    if counts.ndim != 1 or len(counts) < 2:
        raise ValueError(
            f"positive_counts must be one number for each of at least two groups, not of shape {counts.shape}."
        )
    if not (np.isfinite(counts) & (counts > 0)).all():
        empty = int(np.argmin(np.where(np.isfinite(counts), counts, -np.inf)))
        raise ValueError(f"positive_counts[{empty}] is {counts[empty]:g}: every group needs positive rows.")
    base = fedavg(plain_loss(scores, ridge), init, step, local_steps, batch_size).settings
    return build(Settings(scores, base.init, base.start, counts, step, group_step, local_steps, batch_size, ridge))


def build(settings: Settings) -> Algorithm:
    count = settings.positive_counts.shape[0]
    base = averaging(
        Averaging(
            plain_loss(settings.scores, settings.ridge), settings.init, settings.start, settings.step,
            settings.local_steps, settings.batch_size,
        )
    )  # fmt: skip

    def shares_of_positives(model: Tree) -> jax.Array:
        counts = jnp.asarray(settings.positive_counts, jax.tree.leaves(model)[0].dtype)
        return counts / jnp.sum(counts)

    def init(key: jax.Array) -> Server:
        model = base.init(key)
        shares = shares_of_positives(model)
        return Server(model, shares, jnp.zeros_like(shares))

    def work(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        def weighted(params: Tree, batch: Tree) -> jax.Array:
            losses = row_losses(settings.scores(params, batch["features"]), batch["labels"])
            looked_up = message.row_weights.astype(losses.dtype)[batch["groups"]]
            return jnp.mean(jnp.where(batch["labels"] > 0, looked_up, 1) * losses) + penalty(params, settings.ridge)

        def walk(model: Tree, drawn: Any) -> tuple[Tree, None]:
            gradient = jax.grad(weighted)(model, Batches(data, drawn).inner())
            return step_along(model, -settings.step, gradient), None

        draws = draw_round(data, key, settings.local_steps, batch_size=settings.batch_size)
        model, _ = jax.lax.scan(walk, message.model, draws, length=settings.local_steps)
        rows, real = data.whole_with_mask("train")
        losses = row_losses(settings.scores(message.model, rows["features"]), rows["labels"])
        positive = jnp.where(real, rows["labels"].astype(losses.dtype), 0)
        size = data.train_size.astype(losses.dtype)
        sums, numbers = (group_totals(values, rows["groups"], count) / size for values in (positive * losses, positive))
        return Reply(model, sums, numbers), Local(local.calls.plus(Calls(gradients=settings.local_steps)))

    def absorb(server: Server, mean: Reply) -> Server:
        seen = mean.shares > 0
        risks = jnp.where(seen, mean.losses / jnp.where(seen, mean.shares, 1), server.risks).astype(server.risks.dtype)
        gaps = risks[1:] - risks[0]
        size = jnp.sqrt(jnp.sum(gaps**2))
        along = gaps / jnp.where(size > 0, size, 1)
        direction = jnp.concatenate([-jnp.sum(along, keepdims=True), along])
        weights = onto_simplex(step_along(server.group_weights, settings.group_step, direction))
        return Server(mean.outer, weights, risks)

    def check(data: ClientData) -> None:
        check_rows(data, count, settings.scores, base.init)
        base.check(data)

    def send(server: Server) -> Message:
        return Message(server.model, server.group_weights / shares_of_positives(server.model))

    return base._replace(
        name="fedfb",
        init=init,
        plan=(Phase("local", send, work, absorb),),
        outer=lambda server: server.model,
        check=check,
        settings=settings,
        build=build,
    )
