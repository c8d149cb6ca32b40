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

More than two classes: every class has its own pi, mu and r among its rows, as the positives above, and so every row a weight;
mu stays where all r agree to five digits, as they do at the start.
K is then groups times classes.

A number to be predicted has no labels: pi and r are those of all rows of a group, and every row has a weight.

Differences from the paper: equal opportunity only; known to us from its text's summaries and a published program, not from the
authors' code; losses are compared as means over a group's positives (as in FairBatch), not as sums; alpha is in shares of the
positives, not of all rows; for two groups the step is alpha sign(r_1 - r_0), as in the paper, for more it is along d / |d| and
projected; the ridge term, which enters the clients' steps and not r; ``finish_after``.

Checked: iterates against a naive loop; that it narrows the gap between the groups' positive losses which FedAvg leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.afl import onto_simplex
from fedbilevel.algorithms.arguments import Batch, Count, MaybeCount, NotNegative, Positive, Start, algorithm
from fedbilevel.algorithms.local import Local
from fedbilevel.calculus import Calls, Tree, counted, step_along
from fedbilevel.fairness import baseline
from fedbilevel.fairness.baseline import GroupLosses, GroupWeights, Losses, Message, Reply, Scores, Server
from fedbilevel.fairness.models import group_totals, own_class, penalty, row_losses
from fedbilevel.plan import Algorithm, Phase
from fedbilevel.sampling import Batches, LocalData, Sampler

ALIKE = 1e-5
"""Losses of a class that differ by a smaller share between groups are equal: a step of full length would follow rounding."""
PositiveCounts = Annotated[
    Sequence[int] | np.ndarray, baseline.counts_by_group("every group needs positive rows", by_class=True)
]


@algorithm()
def fedfb(
    scores: Scores,
    init: Start,
    positive_counts: PositiveCounts,
    step: Positive = 0.1,
    group_step: Positive = 0.02,
    local_steps: Count = 5,
    batch_size: Batch = 128,
    ridge: NotNegative = 0.0,
    losses: Losses = row_losses,
    finish_after: MaybeCount = None,
) -> Algorithm:
    """FedFB.  ``positive_counts[a]``: positive training rows of group a over all clients; of more than two classes
    ``[class, group]``, the rows of that class; with other ``losses``, those of a number, all rows.  ``step`` is the clients'
    step, ``group_step`` alpha.  ``finish_after``: rounds after which the model is trained to the end with the mean weights of
    their second half.

    >>> import numpy as np
    >>> from fedbilevel.fairness.fedfb import fedfb
    >>> algo = fedfb(lambda params, features: features @ params, np.zeros(3), positive_counts=[60, 20])
    >>> [phase.name for phase in algo.plan]
    ['local']
    """
    count, weights = np.shape(positive_counts)[-1], GroupWeights(positive_counts)
    loss, classified = baseline.PlainLoss(scores, ridge, losses), losses is row_losses
    base = baseline.fair_averaging(loss, scores, init, step, local_steps, batch_size, count, losses)

    def each_weighted(params: Tree, message: Message, rows: Any) -> jax.Array:
        each = losses(scores(params, rows["features"]), rows["labels"])
        return _row_weights(message, rows, classified).astype(each.dtype) * each

    def work(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[Reply, Local]:
        def weighted(params: Tree, batch: Tree) -> jax.Array:
            return jnp.mean(each_weighted(params, message, batch)) + penalty(params, ridge)

        def descend(model: Tree, batches: Batches) -> tuple[Tree, None]:
            return step_along(model, -step, jax.grad(weighted)(model, batches.inner())), None

        model, _ = Sampler(batch_size).walk(descend, message.model, data, key, local_steps)
        rows, real = data.whole_with_mask("train")
        found = scores(message.model, rows["features"])
        each = jnp.where(real, losses(found, rows["labels"]), 0)
        positive = jnp.where(real, own_class(found, rows["labels"]) if classified else jnp.ones_like(each), 0)
        size = data.train_size.astype(each.dtype)
        totals = (group_totals(values, rows["groups"], count) / size for values in (positive * each, positive))
        return Reply(model, GroupLosses(*totals)), counted(local, Calls(gradients=local_steps))

    def absorb(server: Server, mean: Reply) -> Server:
        assert mean.groups is not None
        risks = baseline.mean_losses(mean.groups, server.risks)
        if risks.ndim == 1:
            return Server(mean.outer, _moved(server.group_weights, risks, group_step, 0.0), risks)
        moved: Any = jax.vmap(lambda weights, own: _moved(weights, own, group_step, ALIKE * jnp.max(own)))
        return Server(mean.outer, moved(server.group_weights, risks), risks)

    made = base._replace(
        init=lambda key: weights.first(base.init(key)),
        plan=(Phase("local", weights.send, work, absorb),),
        outer=lambda server: server.model,
    )
    return made if finish_after is None else baseline.finished(made, weights, finish_after, each_weighted, ridge)


def _row_weights(message: Message, batch: Any, classified: bool) -> jax.Array:
    """Two classes: of the positive rows, 1 for the others; more, or a number: of all."""
    weights, groups, labels = message.row_weights, batch["groups"], batch["labels"]
    if weights.ndim == 1:
        return jnp.where(labels > 0, weights[groups], 1) if classified else weights[groups]
    return weights[labels.astype(jnp.int32), groups]


def _moved(weights: jax.Array, risks: jax.Array, step: Any, least: Any) -> jax.Array:
    """mu of the groups, or of a class's rows in each of them, after a step; of differences beyond ``least`` only."""
    gaps = risks[1:] - risks[0]
    size = jnp.sqrt(jnp.sum(gaps**2))
    along = jnp.where(size > least, gaps, 0) / jnp.where(size > 0, size, 1)
    direction = jnp.concatenate([-jnp.sum(along, keepdims=True), along])
    return onto_simplex(step_along(weights, step, direction))
