"""Whole local sets, which FCFL and FedMinMax read in every round.

`group_losses` and `loss_and_gap` are for a two-class logistic model and use the fused kernel.  The general path computes the
same by automatic differentiation, for any scores; it is the oracle, and serves wherever the kernel does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel import kernels
from fedbilevel.calculus import Tree
from fedbilevel.fairness.models import LinearScores
from fedbilevel.fairness.soft import Rates, largest_gap
from fedbilevel.sampling import LocalData


class LossAndGap(NamedTuple):
    """Mean loss and largest gap of the soft true-positive rates, with their gradients; no ridge."""

    loss: jax.Array
    gap: jax.Array
    loss_gradient: jax.Array
    gap_gradient: jax.Array


def applies(scores: Any, params: Tree) -> bool:
    """Whether the kernel serves this model: declared linear, two classes, and built on this machine."""
    linear = isinstance(scores, LinearScores) and getattr(params, "ndim", None) == 1
    return linear and params.dtype in (jnp.float32, jnp.float64) and kernels.available()


def group_losses(params: jax.Array, data: LocalData, count: int) -> tuple[jax.Array, jax.Array]:
    """Per group the sum of the losses and the number of rows, both divided by all rows of the client."""
    losses, counts = kernels.group_losses(*_operands(params, data), params, count=count)
    rows = data.train_size.astype(params.dtype)
    return losses / rows, counts / rows


def loss_and_gap(params: jax.Array, data: LocalData, count: int, temperature: Any) -> LossAndGap:
    sharpness = jnp.asarray(temperature, params.dtype)
    sums = kernels.group_sums(*_operands(params, data), params, sharpness, count=count)
    rows = data.train_size.astype(params.dtype)
    present = sums.positives > 0
    positives = jnp.where(present, sums.positives, 1)
    rates = sums.rates / positives
    gap, slopes = jax.value_and_grad(lambda values: largest_gap(Rates(values, present)))(rates)
    gap_gradient = (slopes / positives) @ sums.rate_gradients
    return LossAndGap(jnp.sum(sums.losses) / rows, gap, sums.loss_gradient / rows, gap_gradient)


def _operands(params: jax.Array, data: LocalData) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Features, labels and groups of all rows at hand, and where this client's lie among them."""
    rows, start = data.flat("train", jnp.zeros((), jnp.int32))
    labels, groups = rows["labels"].astype(params.dtype), rows["groups"].astype(jnp.int32)
    return rows["features"], labels, groups, start, data.train_size.astype(jnp.int32)
