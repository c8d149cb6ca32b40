"""A client's own rows, and the minibatches one round draws from them.

Indices are drawn with replacement: drawing without replacement inside a compiled loop was measured to cost more than the
arithmetic of a step by three orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.kernels import Packed, draw, over_rows, take

STATIC = {"static": True}
Use = Callable[[Tree], Any]
PackedLeaves = dict[str, dict[str, Packed]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalData:
    """What one client's ``work`` can read.

    ``shared``: the leaves are ``[clients, samples, ...]`` and this client's rows are picked by ``client``, so that a
    minibatch is one gather and no client's rows are copied; otherwise the leaves are this client's own ``[samples, ...]``.
    ``own``: then these ``[samples, ...]`` all the same where they are at hand, for whole sets: picking them would copy them.
    ``number`` is the client's own among all clients, wherever its rows lie.  ``packed``: leaves once more, by part and name,
    for kernels that read one-hot rows by their ones.

    Clients of unequal sizes: the sizes say which rows are real, and nobody's result depends on the padding behind them.
    Minibatches draw real rows.  A whole set is cut to size, for which an engine runs clients of equal size together; or it
    comes with a mask, and clients of any sizes share one program.  `whole` does the first, `whole_with_mask` the second; for
    losses, which see only their batch, `ClientData.with_mask` puts the mask among the leaves.  ``padded``: the parts whose
    leaves hold padding that no such leaf marks.  ``notice`` hears of every part that is read whole and of whether it is cut.
    """

    train: Tree
    val: Tree
    client: jax.Array
    train_size: jax.Array
    val_size: jax.Array
    shared: bool = field(default=False, metadata=STATIC)
    number: jax.Array | None = None
    padded: tuple[str, ...] = field(default=(), metadata=STATIC)
    notice: Callable[[str, bool], None] | None = field(default=None, metadata=STATIC)
    own: tuple[Tree, Tree] | None = None
    packed: PackedLeaves = field(default_factory=dict)

    def rows(self, part: str, indices: jax.Array, use: Use | None = None) -> Any:
        """The rows of these numbers, or what ``use`` makes of them."""
        tree, numbers = self.flat(part, indices)
        if use is not None:
            return over_rows(use, tree, numbers, self._packed(part))
        return jax.tree.map(lambda leaf: take(leaf, numbers), tree)

    def whole(self, part: str) -> Tree:
        if self.notice is not None:
            self.notice(part, True)
        elif part in self.padded:
            raise RuntimeError(f"A whole {part} set was read that its tracing did not show: padding would count.")
        return self._own(part)

    def whole_with_mask(self, part: str) -> tuple[Tree, jax.Array]:
        """A client's rows with the padding behind them, and which of them are real."""
        if self.notice is not None:
            self.notice(part, False)
        rows = self._own(part)
        size = self.train_size if part == "train" else self.val_size
        return rows, jnp.arange(jax.tree.leaves(rows)[0].shape[0], dtype=jnp.int32) < size

    def _own(self, part: str) -> Tree:
        if self.own is not None:
            return self.own[part == "val"]
        tree = getattr(self, part)
        return jax.tree.map(lambda leaf: leaf[self.client], tree) if self.shared else tree

    def flat(self, part: str, indices: jax.Array) -> tuple[Tree, jax.Array]:
        """All rows reachable from here as ``[rows, ...]`` and the indices into them: for kernels that gather themselves."""
        tree = getattr(self, part)
        if not self.shared:
            return tree, indices
        samples = jax.tree.leaves(tree)[0].shape[1]
        merged = jax.tree.map(lambda leaf: leaf.reshape((-1, *leaf.shape[2:])), tree)
        return merged, indices + self.client * samples

    def features(self, rows: Tree, name: str) -> Any:
        """Of `flat` training ``rows`` the leaf ``name``, packed where it is."""
        return self._packed("train").get(name, rows[name])

    def _packed(self, part: str) -> dict[str, Packed]:
        """The leaves of a part that are packed, as `flat` has its rows."""
        leaves = self.packed.get(part, {})
        return {name: leaf.flat() for name, leaf in leaves.items()} if self.shared else leaves


class Draws(NamedTuple):
    """Row numbers for one round (leading axis: local steps) or, inside the loop, for one step.

    ``inner``: the batch of the inner gradient; ``train`` and ``val``: those of the hypergradient.  None = whole set.
    """

    inner: jax.Array | None = None
    train: jax.Array | None = None
    val: jax.Array | None = None


class Batches(NamedTuple):
    """The minibatches of one local step: the same rows at however many points they are evaluated.

    ``use``: what is wanted of a minibatch, instead of its rows.  A function of all points at once reads long rows once for all.
    """

    data: LocalData
    draws: Draws

    def inner(self, use: Use | None = None) -> Any:
        return self._part("train", self.draws.inner, use)

    def train(self, number: int | jax.Array, use: Use | None = None) -> Any:
        return self._part("train", None if self.draws.train is None else self.draws.train[number], use)

    def val(self, number: int | jax.Array, use: Use | None = None) -> Any:
        return self._part("val", None if self.draws.val is None else self.draws.val[number], use)

    @property
    def whole_train(self) -> bool:
        return self.draws.train is None

    def _part(self, part: str, indices: jax.Array | None, use: Use | None) -> Any:
        if indices is not None:
            return self.data.rows(part, indices, use)
        return self.data.whole(part) if use is None else use(self.data.whole(part))


def scaled(bits: jax.Array, size: jax.Array) -> jax.Array:
    """Row numbers in ``[0, size)`` from random 32-bit words, uniform up to ``size / 2**32``.

    The high word of the product, from 16-bit halves: one word an index where ``jax.random.randint`` takes two, and no
    64-bit arithmetic.
    """
    size = size.astype(jnp.uint32)
    low, high = bits & 0xFFFF, bits >> 16
    size_low, size_high = size & 0xFFFF, size >> 16
    middle = high * size_low + ((low * size_low) >> 16)
    carry = (middle & 0xFFFF) + low * size_high
    return (high * size_high + (middle >> 16) + (carry >> 16)).astype(jnp.int32)


class Sampler(NamedTuple):
    """How many rows the minibatches of one step have (None = the whole set), and how many minibatches it takes.

    Attributes:
        batch_size: training rows of a minibatch.
        outer_batch_size: validation rows of a minibatch.
        train_batches: training minibatches of a step beside the one for the inner gradient.
        val_batches: validation minibatches of a step.
    """

    batch_size: int | None = None
    outer_batch_size: int | None = None
    train_batches: int = 0
    val_batches: int = 0

    def draw(self, data: LocalData, key: jax.Array, steps: int) -> Draws:
        """Every minibatch of one client in one round, from that client's key of that round."""
        numbers = jnp.arange(steps, dtype=jnp.int32)
        return jax.vmap(self._drawn(data, key, steps))(numbers)

    def _drawn(self, data: LocalData, key: jax.Array, steps: int) -> Callable[[Any], Draws]:
        """The minibatches of a step, by its number."""
        inner, train = (self.batch_size is not None, self.batch_size is not None and self.train_batches > 0)
        train_shape = (steps, 1 + self.train_batches, self.batch_size or 0)
        val_shape = (steps, self.val_batches, self.outer_batch_size or 0)
        train_count, val_count = prod(train_shape), prod(val_shape)
        if train_count + val_count == 0:
            return lambda number: Draws()
        if draw.serves(key):
            # Step by step, where they are needed: the numbers of a whole round would be copied twice on their way there.
            pieces = [train_shape[2:]] * inner + [(self.train_batches, *train_shape[2:])] * train
            sizes = (data.train_size, data.val_size)

            def own(number: Any) -> Draws:
                found = iter(draw.draw(key, *sizes, number, steps, pieces, [val_shape[1:]] * bool(val_count)))
                return Draws(*(next(found) if there else None for there in (inner, train, val_count)))

            return own
        # One call of the generator serves all (compiling it is most of what a small program costs), and its result is
        # barred from fusion: a gather must read indices, not recompute them for every column.
        bits = jax.random.bits(key, (train_count + val_count,), jnp.uint32)
        rows = scaled(bits[:train_count].reshape(train_shape), data.train_size)
        val_rows = scaled(bits[train_count:].reshape(val_shape), data.val_size)
        rows, val_rows = jax.lax.optimization_barrier((rows, val_rows))
        every = Draws(rows[:, 0] if inner else None, rows[:, 1:] if train else None, val_rows if val_count else None)
        return lambda number: jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), every
        )

    def once(self, data: LocalData, key: jax.Array) -> Batches:
        """The minibatches of a single step."""
        return Batches(data, self._drawn(data, key, 1)(np.int32(0)))

    def walk(
        self, step: Callable[[Any, Batches], tuple[Any, Any]], state: Any, data: LocalData, key: jax.Array, steps: int
    ) -> tuple[Any, Any]:
        """``steps`` times ``step(state, batches) -> (state, record)``: the last state, and the records stacked."""
        drawn = self._drawn(data, key, steps)

        def one(held: Any, number: jax.Array) -> tuple[Any, Any]:
            return step(held, Batches(data, drawn(number)))

        return jax.lax.scan(one, state, jnp.arange(steps, dtype=jnp.int32))
