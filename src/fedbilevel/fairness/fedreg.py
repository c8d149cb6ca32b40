"""FedReg: FedAvg with a fairness term in the loss, measured on each client's own minibatch.

The baseline of that name in J. Li, F. Huang, H. Huang, "Local Stochastic Bilevel Optimization with Momentum-Based Variance
Reduction", which adds a fairness metric to the FedAvg objective and evaluates it with local statistics only.  On client m,

    x_{t+1} = x_t - eta grad [ loss(x_t; B) + lambda max_{a, b} (r_a - r_b)(x_t; B) + ridge/2 |x_t|^2 ],   then the mean

where r_a is the soft true-positive rate of group a in the minibatch B: the mean predicted probability over its positives.
Groups without positives in B are left out; with fewer than two left the term is 0.

Up per round and client: one model; down: one.  No group statistic leaves a client.

Differences from the paper: it names the term "EqOpp" without saying how a gradient is taken through it; ours is the soft rate
above, at ``temperature`` 1.  For more than two groups the term is the largest pairwise gap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.algorithms.fedavg import Settings as Averaging
from fedbilevel.algorithms.fedavg import build as averaging
from fedbilevel.algorithms.fedavg import fedavg
from fedbilevel.calculus import Tree
from fedbilevel.fairness.baseline import Scores, check_rows, check_scores, not_negative, penalty, plain_loss, row_losses
from fedbilevel.fairness.soft import largest_gap, soft_true_positive_rates
from fedbilevel.plan import Algorithm
from fedbilevel.problem import ClientData, positive, whole_number


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "strength", "ridge", "temperature", "start"),
    meta_fields=("scores", "init", "local_steps", "batch_size", "groups"),
)
@dataclass(frozen=True)
class Settings:
    scores: Scores
    init: Callable[[jax.Array], Tree] | None
    start: Tree
    step: Any
    local_steps: int
    batch_size: int | None
    strength: Any
    groups: int
    ridge: Any
    temperature: Any


def fedreg(
    scores: Scores,
    init: Callable[[jax.Array], Tree] | Tree,
    step: float = 0.1,
    local_steps: int = 5,
    batch_size: int | None = 128,
    strength: float = 0.1,
    *,
    groups: int,
    ridge: float = 0.0,
    temperature: float = 1.0,
) -> Algorithm:
    """FedReg: ``scores(params, features)`` are logits of class 1, ``init`` the first parameters or a function of the key,
    ``groups`` how many groups there are, ``strength`` lambda.  Simulate with ``weights="samples"`` for FedAvg's n_k / n.

    >>> import fedbilevel as fb, numpy as np
    >>> from fedbilevel.fairness.fedreg import fedreg
    >>> rng = np.random.default_rng(0)
    >>> rows = {"features": rng.normal(size=(2, 50, 3)), "labels": rng.integers(2, size=(2, 50)) * 1.0,
    ...         "groups": rng.integers(2, size=(2, 50))}
    >>> algo = fedreg(lambda params, features: features @ params, init=np.zeros(3), batch_size=16, groups=2)
    >>> fb.simulate(algo, fb.ClientData(train=rows), rounds=3, record_every=None).outer.shape
    (3,)
    """
    check_scores(scores)
    whole_number("groups", groups, least=2)
    not_negative("strength", strength)
    not_negative("ridge", ridge)
    positive("temperature", temperature)
    base = fedavg(plain_loss(scores, ridge), init, step, local_steps, batch_size).settings
    return build(
        Settings(scores, base.init, base.start, step, local_steps, batch_size, strength, groups, ridge, temperature)
    )


def build(settings: Settings) -> Algorithm:
    def loss(params: Tree, batch: Tree) -> jax.Array:
        scores = settings.scores(params, batch["features"])
        rates = soft_true_positive_rates(
            scores, batch["labels"], batch["groups"], settings.groups, settings.temperature
        )
        gap = largest_gap(rates)
        strength = jnp.asarray(settings.strength, gap.dtype)
        return jnp.mean(row_losses(scores, batch["labels"])) + strength * gap + penalty(params, settings.ridge)

    base = averaging(
        Averaging(loss, settings.init, settings.start, settings.step, settings.local_steps, settings.batch_size)
    )

    def check(data: ClientData) -> None:
        check_rows(data, settings.groups, settings.scores, base.init)
        base.check(data)

    return base._replace(name="fedreg", check=check, settings=settings, build=build)
