"""FedReg: FedAvg with a fairness term in the loss, measured on each client's own minibatch.

The baseline of that name in J. Li, F. Huang, H. Huang, "Local Stochastic Bilevel Optimization with Momentum-Based Variance
Reduction", which adds a fairness metric to the FedAvg objective and evaluates it with local statistics only.  On client m,

    x_{t+1} = x_t - eta grad [ loss(x_t; B) + lambda max_{a, b} (r_a - r_b)(x_t; B) + ridge/2 |x_t|^2 ],   then the mean

where r_a is the soft true-positive rate of group a in the minibatch B: the mean predicted probability over its positives.
Groups without positives in B are left out; with fewer than two left the term is 0.

Up per round and client: one model; down: one.  No group statistic leaves a client.

Differences from the paper: it names the term "EqOpp" without saying how a gradient is taken through it; ours is the soft rate
above, at ``temperature`` 1.  For more than two groups the term is the largest pairwise gap.  For more than two classes r_a is
taken for every class, as the mean predicted probability of the class over its rows, and the largest gap of a class counts.
Where a number is predicted (``losses``, ``compared``), r_a is the mean prediction or mean error of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.arguments import AtLeastTwo, Batch, Count, NotNegative, Positive, Start, algorithm
from fedbilevel.calculus import Tree
from fedbilevel.fairness.baseline import Comparison, Losses, Scores, fair_averaging
from fedbilevel.fairness.models import (
    Compared,
    RowLosses,
    group_rates,
    largest_gap,
    mean_of,
    penalty,
    recognised,
    row_losses,
)
from fedbilevel.plan import Algorithm


@dataclass(frozen=True)
class FairLoss:
    """What a client minimises: mean loss, lambda times the largest gap, and ridge."""

    scores: Scores
    groups: int
    strength: Any
    ridge: Any
    temperature: Any = 1.0
    losses: RowLosses = row_losses
    compared: Compared = recognised

    def __call__(self, params: Tree, batch: Tree) -> jax.Array:
        return self.masked(params, batch, None)

    def masked(self, params: Tree, batch: Tree, real: jax.Array | None) -> jax.Array:
        """The same over the rows that are ``real``."""
        logits = self.scores(params, batch["features"])
        values = self.compared(logits, batch["labels"], self.temperature)
        if real is not None:
            values = jnp.where(real, values[0], 0), jnp.where(real, values[1], 0)
        gap = largest_gap(group_rates(values, batch["groups"], self.groups))
        fair = jnp.asarray(self.strength, gap.dtype) * gap
        each = self.losses(logits, batch["labels"])
        return (jnp.mean(each) if real is None else mean_of(each, real)) + fair + penalty(params, self.ridge)


@algorithm()
def fedreg(
    scores: Scores,
    init: Start,
    step: Positive = 0.1,
    local_steps: Count = 5,
    batch_size: Batch = 128,
    strength: NotNegative = 0.1,
    *,
    groups: AtLeastTwo,
    ridge: NotNegative = 0.0,
    temperature: Positive = 1.0,
    losses: Losses = row_losses,
    compared: Comparison = recognised,
) -> Algorithm:
    """FedReg: ``scores(params, features)`` are logits of class 1, or of every class, ``init`` the first parameters or a
    function of the key, ``groups`` how many groups there are, ``strength`` lambda.  Simulate with
    ``weights="samples"`` for FedAvg's n_k / n.

    >>> import fedbilevel as fb, numpy as np
    >>> from fedbilevel.fairness.fedreg import fedreg
    >>> rng = np.random.default_rng(0)
    >>> rows = {"features": rng.normal(size=(2, 50, 3)), "labels": rng.integers(2, size=(2, 50)) * 1.0,
    ...         "groups": rng.integers(2, size=(2, 50))}
    >>> algo = fedreg(lambda params, features: features @ params, init=np.zeros(3), batch_size=16, groups=2)
    >>> fb.simulate(algo, fb.ClientData(train=rows), rounds=3, record_every=None).outer.shape
    (3,)
    """

    loss = FairLoss(scores, groups, strength, ridge, temperature, losses, compared)
    return fair_averaging(loss, scores, init, step, local_steps, batch_size, groups, losses)
