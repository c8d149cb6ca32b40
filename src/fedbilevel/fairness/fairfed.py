"""FairFed: FedAvg that trusts clients more whose local fairness agrees with the global one.

Y. H. Ezzeldin, S. Yan, C. He, E. Ferrara, S. Avestimehr, "FairFed: Enabling Group Fairness in Federated Learning", AAAI 2023.
With F the gap between the groups' true-positive rates of the decisions (score > 0), F_k the one on client k's training rows,
and w_k the client weights (n_k / n), in every round at the current theta:

    Delta_k = |F - F_k|,   or |accuracy - accuracy_k| where client k cannot measure a gap
    omega_k <- omega_k - beta (Delta_k - mean_i Delta_i)           from omega_k = w_k
    theta   <- sum_k omega_k theta_k / sum_k omega_k,              theta_k after I local steps from theta

Three exchanges: rates, disagreement, training.  A client keeps theta and its own rates from the first to the last, and from
round to round the sum of its corrections, omega_k - w_k.  The server needs means over the clients, weighted by w_k, and no
single reply: a client sends Delta_k / w_k and 1 / w_k, and then omega_k / w_k times its model and omega_k / w_k.  Up per round
and client: 2 K + 1 numbers, 2 numbers, a model and 1 number; down: a model, K + 1 numbers, 1 number.

Differences from the paper: for more than two groups |F - F_k| is the largest disagreement over pairs of groups that have
positives at the client (for two it is the paper's, with signs); for more than two classes it is the largest over the classes,
with how often each is recognised as its rate, and K above is groups times classes; where a number is predicted, means take the
place of rates and the mean loss that of the accuracy; omega_k below 0 counts as 0, and where no client of a round is above it
theta stays; the mean of the Delta_i is over the clients of the round.  Simulate with ``weights="samples"``, which are the w_k.

Sources: the update as we know it from descriptions of the paper; we had neither its text nor its program to compare with.

Checked: iterates against a naive loop; that a client whose gap is opposite to everybody's loses weight, and that beta = 0 is
FedAvg.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.arguments import AtLeastTwo, Batch, Count, NotNegative, Positive, Start, algorithm
from fedbilevel.algorithms.local import Local as Counted
from fedbilevel.calculus import Calls, Tree, dtype_of, no_calls
from fedbilevel.fairness.baseline import Comparison, Losses, PlainLoss, Scores, fair_averaging
from fedbilevel.fairness.models import Rates, decided, group_totals, largest_gap, recognised, row_losses
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.sampling import LocalData


class Server(NamedTuple):
    """theta, the true-positive rates and the accuracy of all clients together, and the mean Delta."""

    model: Tree
    rates: Rates
    accuracy: jax.Array
    disagreement: jax.Array


class Local(NamedTuple):
    """What a client keeps: theta, its own rates, accuracy and Delta of this round; its correction; how much it computed."""

    model: Tree
    rates: Rates
    accuracy: jax.Array
    disagreement: jax.Array
    correction: jax.Array
    calls: Calls


class Counts(NamedTuple):
    """Per group (and class, of more than two) its rows and those recognised, of two classes the positives and those accepted;
    the rows decided rightly; all divided by the client's rows."""

    positives: jax.Array
    accepted: jax.Array
    right: jax.Array


class Weighted(NamedTuple):
    """Something times a weight, and that weight: the sums of both make the mean."""

    value: Tree
    weight: jax.Array


@algorithm()
def fairfed(
    scores: Scores,
    init: Start,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch_size: Batch = 128,
    beta: NotNegative = 0.1,
    *,
    groups: AtLeastTwo,
    rows: Positive,
    classes: AtLeastTwo = 2,
    ridge: NotNegative = 0.0,
    losses: Losses = row_losses,
    compared: Comparison = recognised,
) -> Algorithm:
    """FairFed.  ``beta`` is how fast disagreement moves the weights; ``rows``: training rows of all clients together; the other
    arguments as in `fedreg`.  ``classes``: how many the scores tell apart, which a client must know before it has seen a row.

    >>> import numpy as np
    >>> from fedbilevel.fairness.fairfed import fairfed
    >>> algo = fairfed(lambda params, features: features @ params, np.zeros(3), groups=2, rows=1000)
    >>> [phase.name for phase in algo.plan]
    ['rates', 'disagreement', 'local']
    """
    base = fair_averaging(PlainLoss(scores, ridge, losses), scores, init, step, local_steps, batch_size, groups, losses)
    (training,) = base.plan
    assert isinstance(training, Phase)

    def unknown(model: Tree) -> tuple[Rates, jax.Array, jax.Array]:
        zero = jnp.zeros((), dtype_of(model))
        shape = (groups,) if classes <= 2 else (classes, groups)
        return Rates(jnp.zeros(shape, zero.dtype), jnp.zeros(shape, bool)), zero, zero

    def measure(model: Tree, local: Local, data: LocalData, key: jax.Array) -> tuple[Counts, Local]:
        rows, real = data.whole_with_mask("train")
        logits = scores(model, rows["features"])
        size = data.train_size.astype(logits.dtype)
        hits, positives = (
            group_totals(jnp.where(real, values, 0), rows["groups"], groups) / size
            for values in compared(logits, rows["labels"])
        )
        if losses is row_losses:
            right = jnp.sum(real & (rows["labels"] == decided(logits).astype(rows["labels"].dtype)), dtype=logits.dtype)
        else:  # a number has no accuracy: its mean loss will do
            right = jnp.sum(jnp.where(real, losses(logits, rows["labels"]), 0))
        right = right / size
        kept = local._replace(model=model, rates=Rates.of(hits, positives), accuracy=right)
        return Counts(positives, hits, right), kept

    def learn(server: Server, mean: Counts) -> Server:
        return server._replace(rates=Rates.of(mean.accepted, mean.positives), accuracy=mean.right)

    def own_weight(data: LocalData, like: jax.Array) -> jax.Array:
        return data.train_size.astype(like.dtype) / jnp.asarray(rows, like.dtype)

    def compare(
        message: tuple[Rates, jax.Array], local: Local, data: LocalData, key: jax.Array
    ) -> tuple[Weighted, Local]:
        rates, accuracy = message
        measurable = rates.present & local.rates.present
        gap = largest_gap(Rates(rates.values - local.rates.values, measurable))
        enough = jnp.any(jnp.sum(measurable, axis=-1, dtype=jnp.int32) > 1)
        disagreement = jnp.where(enough, gap, jnp.abs(accuracy - local.accuracy))
        once = 1 / own_weight(data, disagreement)  # what is sent counts with the weight, and is to count once
        return Weighted(once * disagreement, once), local._replace(disagreement=disagreement)

    def train(mean: jax.Array, local: Local, data: LocalData, key: jax.Array) -> tuple[Weighted, Local]:
        reply, counted = training.work(local.model, Counted(local.calls), data, key)
        rate = jnp.asarray(beta, local.correction.dtype)
        correction = local.correction - rate * (local.disagreement - mean)
        moved = jnp.maximum(1 + correction / own_weight(data, correction), 0)
        model = jax.tree.map(lambda leaf: moved.astype(leaf.dtype) * leaf, reply.outer)
        return Weighted(model, moved), local._replace(correction=correction, calls=counted.calls)

    def combine(server: Server, mean: Weighted) -> Server:
        trusted = mean.weight > 0
        by = jnp.where(trusted, mean.weight, 1)
        model = jax.tree.map(
            lambda leaf, before: jnp.where(trusted, leaf / by.astype(leaf.dtype), before), mean.value, server.model
        )
        return server._replace(model=model)

    def first(key: jax.Array) -> Server:
        model = base.init(key)
        return Server(model, *unknown(model))

    def enroll(key: jax.Array) -> Local:
        model = base.init(key)
        rates, zero, _ = unknown(model)
        return Local(model, rates, zero, zero, zero, no_calls())

    rates = Phase("rates", lambda server: server.model, measure, learn)
    disagreement = Phase(
        "disagreement",
        lambda server: (server.rates, server.accuracy),
        compare,
        lambda server, mean: server._replace(disagreement=mean.value / mean.weight),
    )
    local = Phase("local", lambda server: server.disagreement, train, combine)
    plan = (rates, disagreement, local)
    return base._replace(init=first, enroll=enroll, plan=plan, outer=lambda server: server.model)
