"""What the fair baselines share: a classifier given by its scores, its loss, and the checks of its data.

A batch is a dict ``{"features": [n, ...], "labels": [n] of 0..C-1, "groups": [n] of 0..K-1}``; a model is any tree of
parameters with ``scores(params, features) -> [n]``, the logits of class 1 of two, or ``[n, C]``, those of every class.  A
number to be predicted takes the place of labels, with losses and a comparison of its own (``losses``, ``compared``).

FCFL and FedMinMax read whole local sets in every round.  `group_losses` and `loss_and_gap` do so for a two-class logistic
model on the fused kernel, where it `serves`.  Elsewhere automatic differentiation computes the same, for any scores; it is
the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel import kernels
from fedbilevel.algorithms import lbfgs
from fedbilevel.algorithms.arguments import Kind, Start, function_of
from fedbilevel.algorithms.fedavg import ModelLoss, fedavg
from fedbilevel.algorithms.local import Local
from fedbilevel.calculus import Tree, dtype_of, select, step_along
from fedbilevel.fairness.models import (
    Compared,
    LinearScores,
    Rates,
    RowLosses,
    largest_gap,
    mean_of,
    penalty,
    row_losses,
)
from fedbilevel.plan import Algorithm, Phase, Repeat
from fedbilevel.problem import ClientData, shapes_of
from fedbilevel.sampling import Batches, LocalData

Scores = Annotated[Callable[[Tree, jax.Array], jax.Array], function_of("(params, features) -> [n] or [n, classes]")]

Losses = Annotated[RowLosses, function_of("(scores, labels) -> [n]")]
Comparison = Annotated[Compared, function_of("(scores, labels, temperature) -> (values, which rows count)")]

LEAVES = ("features", "labels", "groups")


@dataclass(frozen=True, eq=False)
class PlainLoss:
    """Mean loss plus ridge: what FedAvg would minimise."""

    scores: Scores
    ridge: Any
    losses: RowLosses = row_losses

    def __call__(self, params: Tree, batch: Tree) -> jax.Array:
        return jnp.mean(self._each(params, batch)) + penalty(params, self.ridge)

    def masked(self, params: Tree, batch: Tree, real: jax.Array) -> jax.Array:
        return mean_of(self._each(params, batch), real) + penalty(params, self.ridge)

    def _each(self, params: Tree, batch: Tree) -> jax.Array:
        return self.losses(self.scores(params, batch["features"]), batch["labels"])


def counts_by_group(remedy: str, by_class: bool = False) -> Kind:
    """A positive number for each of at least two groups, as an array, or with ``by_class`` for each class and group;
    ``remedy``: what to say where one is missing."""

    def settle(name: str, value: Any) -> Any:
        counts = np.asarray(value, np.float64)
        if counts.ndim not in ((1, 2) if by_class else (1,)) or counts.shape[-1] < 2:
            raise ValueError(f"{name} must be one number for each of at least two groups, not of shape {counts.shape}.")
        if not (np.isfinite(counts) & (counts > 0)).all():
            empty = np.unravel_index(np.argmin(np.where(np.isfinite(counts), counts, -np.inf)), counts.shape)
            raise ValueError(f"{name}[{', '.join(map(str, empty))}] is {counts[empty]:g}: {remedy}.")
        return counts

    return Kind(settle, traced=True)


class Server(NamedTuple):
    """Of the methods that weight groups: theta, the group weights mu, and the mean losses r that last moved mu."""

    model: Tree
    group_weights: jax.Array
    risks: jax.Array


class Message(NamedTuple):
    model: Tree
    row_weights: jax.Array


class GroupLosses(NamedTuple):
    """Per group, over the rows looked at: sum of losses and number of rows, both divided by all rows looked at.

    Being means over rows, they average over clients like anything else; r is the ratio of the averages.
    """

    losses: jax.Array
    shares: jax.Array


class Reply(NamedTuple):
    """The client's model, and the losses of its groups where they are asked for."""

    outer: Tree
    groups: GroupLosses | None


class GroupWeights(NamedTuple):
    """Weights of the groups (or, for every class, of its rows in each group), beginning with their shares of all rows, which
    are known by ``counts``."""

    counts: Any

    def shares(self, model: Tree) -> jax.Array:
        numbers = jnp.asarray(self.counts, dtype_of(model))
        return numbers / jnp.sum(numbers, axis=-1, keepdims=True)

    def first(self, model: Tree) -> Server:
        return Server(model, self.shares(model), jnp.zeros_like(self.shares(model)))

    def send(self, server: Server) -> Message:
        """A row counts as often as its group is heavier than at first."""
        return Message(server.model, server.group_weights / self.shares(server.model))


class Finishing(NamedTuple):
    """A method that weights groups, on its way or finished: its own state, the mean of its weights over the second half of its
    rounds, how many those are, and the descent after them."""

    own: Server
    group_weights: jax.Array
    rounds: jax.Array
    descent: Any


def finished(
    base: Algorithm,
    weights: GroupWeights,
    rounds: int,
    weighted: Callable[[Tree, Message, Tree], jax.Array],
    ridge: Any,
) -> Algorithm:
    """``rounds`` rounds of ``base``; then its model is trained to the end (`fedbilevel.algorithms.lbfgs`) with the mean group
    weights of the second half.  ``weighted(params, message, rows)``: every row's loss times its weight.

    A weight that circles around where it should be is there on average, and a model that is trained while it does is not.
    """

    def loss(params: Tree, message: Message, data: LocalData) -> jax.Array:
        rows, real = data.whole_with_mask("train")
        return mean_of(weighted(params, message, rows), real) + penalty(params, ridge)

    descent = lbfgs.Descent(loss)

    def first(key: jax.Array) -> Finishing:
        own = base.init(key)
        return Finishing(own, own.group_weights, jnp.zeros((), jnp.int32), descent.first(own.model))

    def counted(server: Finishing) -> Finishing:
        own, done, half = server.own, server.rounds + 1, rounds // 2
        share = 1 / jnp.maximum(done - half, 1).astype(own.group_weights.dtype)
        mean = step_along(server.group_weights, share, own.group_weights - server.group_weights)
        start = select(done == rounds, descent.first(own.model), server.descent)
        return Finishing(own, mean, done, start)

    def lifted(phase: Phase, last: bool) -> Phase:
        def absorb(server: Finishing, mean: Tree) -> Finishing:
            after = server._replace(own=phase.absorb(server.own, mean))
            return counted(after) if last else after

        return phase._replace(send=lambda server: phase.send(server.own), absorb=absorb)

    def send(server: Finishing) -> Message:
        model = descent.point(server.descent)
        return Message(model, server.group_weights / weights.shares(model))

    def work(message: Message, local: Local, data: LocalData, key: jax.Array) -> tuple[lbfgs.Reply, Local]:
        return descent.evaluate(message.model, message, local, data)

    def absorb(server: Finishing, mean: lbfgs.Reply) -> Finishing:
        return server._replace(descent=descent.absorb(server.descent, mean))

    own = tuple(lifted(phase, phase is base.plan[-1]) for phase in base.plan if isinstance(phase, Phase))
    return base._replace(
        init=first,
        plan=(
            Repeat(own, 1, lambda server: jnp.where(server.rounds < rounds, 1, 0)),
            Repeat(
                (Phase("finish", send, work, absorb),),
                1,
                lambda server: jnp.where(server.rounds < rounds, 0, descent.turns(server.descent)),
            ),
        ),
        outer=lambda server: select(server.rounds < rounds, server.own.model, server.descent.outer),
    )


def mean_losses(mean: GroupLosses, last: jax.Array) -> jax.Array:
    """r, the mean loss of each group; a group that nobody saw keeps its last one."""
    seen = mean.shares > 0
    return jnp.where(seen, mean.losses / jnp.where(seen, mean.shares, 1), last).astype(last.dtype)


def fair_averaging(
    loss: ModelLoss, scores: Scores, init: Start, step: Any, local_steps: int, batch_size: int | None, groups: int,
    losses: Losses = row_losses,
) -> Algorithm:  # fmt: skip
    """FedAvg that looks at its rows first: what the baselines start from."""
    base = fedavg(loss, init, step, local_steps, batch_size)

    def check(data: ClientData) -> None:
        check_rows(data, groups, scores, base.init, losses is row_losses)
        base.check(data)

    return base._replace(check=check)


def check_rows(
    data: ClientData, groups: int, scores: Scores, first: Callable[[jax.Array], Tree], classified: bool = True
) -> None:
    """Names, shapes and values of the training rows, and what ``scores`` makes of them."""
    train = data.train
    if not isinstance(train, dict) or set(train) != set(LEAVES):
        given = sorted(map(str, train)) if isinstance(train, dict) else type(train).__name__
        raise ValueError(f"Training rows must be a dict with features, labels and groups, not {given}.")
    real = np.arange(data.samples())[None, :] < np.asarray(data.train_sizes)[:, None]
    labels, numbers = np.asarray(train["labels"]), np.asarray(train["groups"])
    for name, array in (("labels", labels), ("groups", numbers)):
        if array.ndim != 2:
            raise ValueError(f"{name} must have one number per row ([clients, samples]), not shape {array.shape}.")
    params = shapes_of(first, "init", jax.random.key(0))
    features = data.example("train")["features"]
    result = shapes_of(scores, "scores", params, features)
    shape = getattr(result, "shape", result)
    if shape != features.shape[:1] and not (len(shape) == 2 and shape[0] == features.shape[0] and shape[1] > 2):
        raise ValueError(
            f"scores must return one number per row (shape {features.shape[:1]}), or one for each of more than two classes, "
            f"not {shape}."
        )
    classes = 2 if len(shape) == 1 else shape[1]
    allowed = np.isin(labels[real], np.arange(classes))
    if classified and not allowed.all():
        known = "0 or 1" if classes == 2 else f"0..{classes - 1}"
        raise ValueError(f"labels must be {known}, but one is {labels[real][~allowed][0]}: encode the classes first.")
    if not np.issubdtype(numbers.dtype, np.integer):
        raise TypeError(f"groups must be whole numbers 0..{groups - 1}, but their type is {numbers.dtype}.")
    if numbers[real].min() < 0 or numbers[real].max() >= groups:
        raise ValueError(
            f"groups must lie in 0..{groups - 1} (groups={groups}), but the data hold "
            f"{int(numbers[real].min())}..{int(numbers[real].max())}."
        )


def serves(scores: Any, params: Tree, losses: RowLosses) -> bool:
    """Whether the kernel serves this model: declared linear, two classes, and built on this machine."""
    linear = isinstance(scores, LinearScores) and getattr(params, "ndim", None) == 1 and losses is row_losses
    return linear and params.dtype in (jnp.float32, jnp.float64) and kernels.available()


def serves_packed(data: LocalData, scores: Any, params: Tree, losses: RowLosses) -> bool:
    """Whether the kernels for packed rows do."""
    return "train" in data.packed and serves(scores, params, losses) and params.dtype == jnp.float32


def group_losses(params: jax.Array, data: LocalData, count: int) -> GroupLosses:
    """By the kernel, over all rows of the client."""
    losses, counts = kernels.group_losses(*_operands(params, data), params, count=count)
    size = data.train_size.astype(params.dtype)
    return GroupLosses(losses / size, counts / size)


def group_weighted_gradient(params: jax.Array, batches: Batches, weights: jax.Array, ridge: Any) -> jax.Array:
    """By the kernel, of the mean loss on a minibatch with ``weights`` by group, and of the ridge."""
    assert batches.draws.inner is not None
    data = batches.data
    rows, indices = data.flat("train", batches.draws.inner)
    labels, groups = rows["labels"].astype(params.dtype), rows["groups"].astype(jnp.int32)
    tables = weights.astype(params.dtype)[None], jnp.asarray(ridge, params.dtype)[None]
    features = data.features(rows, "features")
    return kernels.gradient(features, labels, groups, indices, params[None], *tables, link="logistic")[0]


def loss_and_gap(
    params: jax.Array, data: LocalData, count: int, temperature: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """By the kernel: mean loss and largest gap of the soft true-positive rates, then their gradients; no ridge."""
    sharpness = jnp.asarray(temperature, params.dtype)
    sums = kernels.group_sums(*_operands(params, data), params, sharpness, count=count)
    rows = data.train_size.astype(params.dtype)
    present = sums.positives > 0
    positives = jnp.where(present, sums.positives, 1)
    rates = sums.rates / positives
    gap, slopes = jax.value_and_grad(lambda values: largest_gap(Rates(values, present)))(rates)
    gap_gradient = (slopes / positives) @ sums.rate_gradients
    return jnp.sum(sums.losses) / rows, gap, sums.loss_gradient / rows, gap_gradient


def _operands(params: jax.Array, data: LocalData) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Features (packed where they are), labels and groups of all rows at hand, and where this client's lie among them."""
    rows, start = data.flat("train", jnp.zeros((), jnp.int32))
    labels, groups = rows["labels"].astype(params.dtype), rows["groups"].astype(jnp.int32)
    return data.features(rows, "features"), labels, groups, start, data.train_size.astype(jnp.int32)
