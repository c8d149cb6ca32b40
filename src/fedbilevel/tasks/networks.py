"""Which site's data helps?  The weights of the sources of training rows, with a convolutional network as the inner model.

    inner:  g_m(x, y) = mean_i S softmax(x)[s_i] CE(net_y(a_i), b_i) + ridge/2 |y|^2        rows of S sources
    outer:  f_m(x, y) = mean_j CE(net_y(a_j), b_j)                                           validation rows

x has one logit a source; zeros weigh all rows alike, which is ordinary training.  Some sources are spoiled: a share of their
labels is wrong.  This is the tuning of a data mixture, by validation rows.

- *Global* lower level: every client is a source, s_i = m, and one network is trained on the weighted sites.  - *Local* lower
levels: every client has rows from all sources (devices, laboratories), and a network of its own; what one client finds   out
about a source helps the others.

The network has tanh units, so that g is smooth in y; it is not convex.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree, squared_norm
from fedbilevel.hints import whole_number
from fedbilevel.problem import BilevelProblem, ClientData
from fedbilevel.tasks.classification import auc, corrupt, cross_entropies
from fedbilevel.tasks.images import CLASSES, Images, deal_images
from fedbilevel.tasks.task import Task, accuracy

CURVATURE = 2.5
"""Of the default network's inner loss, by measurement on the first steps from several starts; a network has no bound."""


@dataclass(frozen=True)
class Convolutional:
    """Two layers of 3 x 3 filters, each followed by averaging over squares of 2 x 2, and a linear layer.

    The features are the pixels of a picture, and a column of ones that is not read.

    Attributes:
        side: Rows and columns of a picture.
        channels: Filters of a layer.
    """

    side: int
    channels: int = 8

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, 3)
        flat = (self.side // 4) ** 2 * self.channels
        shapes = {"first": (9, self.channels), "second": (9 * self.channels, self.channels), "last": (flat, CLASSES)}
        drawn = {
            name: jax.random.normal(key, shape, jnp.float32) / shape[0] ** 0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return drawn | {f"{name}_bias": jnp.zeros(shape[1], jnp.float32) for name, shape in shapes.items()}

    def __call__(self, layers: Any, features: Any) -> jax.Array:
        """Logits, [rows, classes]."""
        hidden = features[:, : self.side**2].reshape(-1, self.side, self.side, 1)
        for name in ("first", "second"):
            hidden = _pooled(jnp.tanh(_patches(hidden) @ layers[name] + layers[f"{name}_bias"]))
        logits = hidden.reshape(hidden.shape[0], -1) @ layers["last"] + layers["last_bias"]
        return jnp.asarray(logits)


def _patches(pictures: jax.Array) -> jax.Array:
    """The 3 x 3 neighbourhood of every pixel, with zeros beyond the edge: filters are matrices, for many networks at once."""
    height, width = pictures.shape[1:3]
    padded = jnp.pad(pictures, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifted, axis=-1)


def _pooled(pictures: jax.Array) -> jax.Array:
    rows, height, width, channels = pictures.shape
    even = pictures[:, : height // 2 * 2, : width // 2 * 2]
    return jnp.mean(even.reshape(rows, height // 2, 2, width // 2, 2, channels), axis=(2, 4))


Network = Callable[[Any, Any], jax.Array]


@dataclass(frozen=True)
class WeighedLoss:
    """g, with the logits of ``network(inner, features)``; or f, where ``sources`` is 0."""

    network: Network
    sources: int = 0
    ridge: float = 0.0

    def __call__(self, outer: jax.Array, inner: Tree, batch: Any) -> jax.Array:
        losses = cross_entropies(self.network(inner, batch["features"]), batch["labels"])
        if not self.sources:
            return jnp.mean(losses)
        weights = self.sources * jax.nn.softmax(outer)[batch["source"]]
        return jnp.mean(weights * losses) + 0.5 * self.ridge * squared_norm(inner)


@dataclass(frozen=True)
class NetworkStart:
    """All sources alike, and a network from the run's key."""

    network: Any
    sources: int

    def __call__(self, key: jax.Array) -> tuple[jax.Array, Tree]:
        return jnp.zeros(self.sources, jnp.float32), self.network.init(key)


def source_weighting(
    images: Images,
    seed: int = 0,
    *,
    lower_level: str = "global",
    network: Any = None,
    clients: int = 6,
    train: int = 100,
    validation: int = 40,
    test: int = 60,
    spoiled: int = 2,
    noise: float = 0.9,
    ridge: float = 0.001,
) -> Task:
    """One draw with as many sources as clients, ``spoiled`` of which have a share ``noise`` of wrong labels.

    ``evaluate`` gives "accuracy" on test rows and "auc", the chance that a clean source has a larger weight than a spoiled one.

    Args:
        images: Where pictures are drawn from.
        seed: Of the draw; it says which sources are spoiled.
        lower_level: "global" (a source is a client) or "local" (every client has rows of all sources).
        network: A hashable object with ``init(key) -> inner variable`` and ``__call__(inner, features) -> logits``; None: a
            small `Convolutional`.
        clients: How many, and how many sources.
        train: Training rows of a client.
        validation: Validation rows of a client.
        test: Test rows of a client.
        spoiled: How many sources have wrong labels.
        noise: The share of them there.
        ridge: Of the inner loss.

    Returns:
        A `Task`.

    Raises:
        ValueError: A number is out of its range, or there are too few rows for so many clients.
    """
    if not 0 < whole_number("spoiled", spoiled) < clients:
        raise ValueError(f"spoiled={spoiled} must leave at least one of the {clients} sources clean.")
    generator = np.random.default_rng(seed)
    dealt = deal_images(images, generator, clients=clients, sizes=(train, validation, test))
    bad = np.isin(np.arange(clients), generator.permutation(clients)[:spoiled])
    own = np.arange(clients)[:, None] if lower_level == "global" else np.arange(train)[None, :] % clients
    source = np.broadcast_to(own, (clients, train)).astype(np.int32)
    wrong, _ = corrupt(dealt.train.labels, noise, generator)
    labels = np.where(bad[source], wrong, dealt.train.labels)
    if network is None:
        network = Convolutional(round((dealt.train.features.shape[-1] - 1) ** 0.5))
    start = NetworkStart(network, clients)
    logits = jax.jit(jax.vmap(network))

    def evaluate(outer: Tree, inner: Tree) -> dict[str, float]:
        decisions = np.argmax(np.asarray(logits(inner, dealt.test.features)), axis=-1)
        return {"accuracy": accuracy(decisions, dealt.test.labels), "auc": auc(np.asarray(outer), ~bad)}

    inner_loss = WeighedLoss(network, clients, ridge)
    return Task(
        name="sources",
        problem=BilevelProblem(inner_loss, WeighedLoss(network), start, lower_level=lower_level),
        data=ClientData(train={**dealt.train.batch(), "labels": labels, "source": source}, val=dealt.val.batch()),
        evaluate=evaluate,
        score="accuracy",
        curvature=CURVATURE,
        outer_step=1.0,
        facts={"spoiled": bad},
    )
