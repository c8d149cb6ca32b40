"""An algorithm's functions, compiled once for one end of a federation, and the shapes of everything that travels.

As in `simulate`, step sizes are arguments of the compiled functions and random keys are functions of (seed, round, ordinal,
client), so that both engines compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree, all_finite
from fedbilevel.plan import SERVER, Algorithm, Item, Phase, Plan, Repeat, ServerStep, client_key, weighted_mean
from fedbilevel.sampling import LocalData

ROWS = 8
"""Rows of the example that shapes are taken from: no reply depends on how many there are."""


def items_of(plan: Plan) -> Iterator[Item]:
    """Every item of a plan, the insides of a `Repeat` right after it: their order numbers them."""
    for item in plan:
        yield item
        if isinstance(item, Repeat):
            yield from items_of(item.phases)


def item_count(plan: Plan) -> int:
    return sum(1 for _ in items_of(plan))


def local_data(train: Tree, val: Tree, client: int) -> LocalData:
    """One site's rows as ``work`` sees them."""
    index: Any = np.int32(0)
    own: Any = np.int32(client)
    sizes: list[Any] = [np.int32(0 if part is None else np.shape(jax.tree.leaves(part)[0])[0]) for part in (train, val)]
    return LocalData(train, val, index, sizes[0], sizes[1], number=own)


class Compiled:
    """The pure functions of ``algorithm`` for seed ``seed``, by the number of the plan's item."""

    def __init__(self, algorithm: Algorithm, seed: int, example: tuple[Tree, Tree]) -> None:
        self.algorithm, self.seed = algorithm, np.uint32(seed)
        self.items = list(items_of(algorithm.plan))
        self._train, self._val = (
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((ROWS, *leaf.shape[1:]), leaf.dtype), part)
            for part in example
        )
        self._begin = jax.jit(self._traced_begin, static_argnames="which")
        self._send = jax.jit(self._traced_send, static_argnames="item")
        self._work = jax.jit(self._traced_work, static_argnames="item")
        self._absorb = jax.jit(self._traced_absorb, static_argnames="item")
        self._update = jax.jit(self._traced_update, static_argnames="item")
        self._unpack = jax.jit(self._traced_unpack, static_argnames="item")
        self._measure = jax.jit(self._traced_measure)
        # Tracing costs more than a round's arithmetic: the shapes of a phase's messages are found once.
        self.message_like, self.reply_like = cache(self._message_like), cache(self._reply_like)
        self.parcel_like = cache(self._parcel_like)
        key = jax.random.key(0)
        self.server_like = jax.eval_shape(algorithm.init, key)
        self.local_like = jax.eval_shape(algorithm.enroll, key)
        self.outer_like = jax.eval_shape(algorithm.outer, self.server_like)

    # What both ends know of the messages, without computing anything.

    def phase(self, item: int) -> Phase:
        found = self.items[item]
        assert isinstance(found, Phase)
        return found

    def _message_like(self, item: int) -> Tree:
        return jax.eval_shape(self.phase(item).send, self.server_like)

    def _reply_like(self, item: int) -> Tree:
        data = _abstract(local_data(self._train, self._val, 0))
        message = self.message_like(item)
        return jax.eval_shape(self.phase(item).work, message, self.local_like, data, jax.random.key(0))[0]

    def _parcel_like(self, item: int) -> Tree:
        """One client's parcel; None where the phase passes nothing on."""
        relay = self.phase(item).relay
        if relay is None:
            return None
        alone = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), self.reply_like(item))
        parcels = jax.eval_shape(relay.pack, alone, jax.ShapeDtypeStruct((1,), float), jax.random.key(0))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), parcels)

    # What a site does.

    def enroll(self) -> Tree:
        return self._begin(self.algorithm.settings, self.seed, which="enroll")

    def work(
        self, item: int, message: Tree, local: Tree, data: LocalData, number: int, ordinal: int
    ) -> tuple[Tree, Tree]:
        numbers = (np.int32(number), np.int32(ordinal))
        found: tuple[Tree, Tree] = self._work(
            self.algorithm.settings, self.seed, message, local, data, *numbers, item=item
        )
        jax.block_until_ready(found)
        return found

    def unpack(self, item: int, local: Tree, parcel: Tree) -> Tree:
        return self._unpack(self.algorithm.settings, local, parcel, item=item)

    def measure(self, server: Tree, local: Tree, data: LocalData) -> float:
        """The site's share of the objective, over all its rows."""
        return float(self._measure(self.algorithm.settings, server, local, data))

    # What the coordinator does.

    def begin(self) -> Tree:
        return self._begin(self.algorithm.settings, self.seed, which="init")

    def send(self, item: int, server: Tree) -> Tree:
        return self._send(self.algorithm.settings, server, item=item)

    def absorb(
        self, item: int, server: Tree, replies: Tree, weights: np.ndarray, number: int, ordinal: int
    ) -> tuple[Tree, Tree, bool]:
        """(server state, parcels, whether the state is finite); ``weights`` are 0 for those who did not answer."""
        numbers = (np.int32(number), np.int32(ordinal))
        after, parcels, fine = self._absorb(
            self.algorithm.settings, self.seed, server, replies, weights, *numbers, item=item
        )
        return after, parcels, bool(fine)

    def update(self, item: int, server: Tree, number: int, ordinal: int) -> Tree:
        return self._update(self.algorithm.settings, self.seed, server, np.int32(number), np.int32(ordinal), item=item)

    def times(self, item: int, server: Tree) -> int:
        """How often a `Repeat` runs from this server state."""
        repeat = self.items[item]
        assert isinstance(repeat, Repeat)
        return repeat.times if repeat.turns is None else min(int(repeat.turns(server)), repeat.times)

    # Traced; the plan is rebuilt from the traced settings, and its items are found again by their number.

    def _item(self, settings: Any, item: int) -> Any:
        return list(items_of(self.algorithm.build(settings).plan))[item]

    def _traced_begin(self, settings: Any, seed: Any, which: str) -> Tree:
        return getattr(self.algorithm.build(settings), which)(jax.random.key(seed))

    def _traced_send(self, settings: Any, server: Tree, item: int) -> Tree:
        return self._item(settings, item).send(server)

    def _traced_work(
        self,
        settings: Any,
        seed: Any,
        message: Tree,
        local: Tree,
        data: LocalData,
        number: Any,
        ordinal: Any,
        item: int,
    ) -> Any:
        key = client_key(jax.random.key(seed), number, ordinal, data.number)
        return self._item(settings, item).work(message, local, data, key)

    def _traced_unpack(self, settings: Any, local: Tree, parcel: Tree, item: int) -> Tree:
        return self._item(settings, item).relay.unpack(local, parcel)

    def _traced_absorb(
        self,
        settings: Any,
        seed: Any,
        server: Tree,
        replies: Tree,
        weights: Any,
        number: Any,
        ordinal: Any,
        item: int,
    ) -> tuple[Tree, Tree, Any]:
        phase: Phase = self._item(settings, item)
        weights = weights / jnp.sum(weights)
        aggregate = phase.aggregate or weighted_mean
        parcels = None
        if phase.relay is not None:
            key = client_key(jax.random.key(seed), number, ordinal, SERVER)
            parcels = phase.relay.pack(replies, weights, key)
        after = phase.absorb(server, aggregate(replies, weights))
        return after, parcels, all_finite(after)

    def _traced_update(self, settings: Any, seed: Any, server: Tree, number: Any, ordinal: Any, item: int) -> Tree:
        step: ServerStep = self._item(settings, item)
        return step.update(server, client_key(jax.random.key(seed), number, ordinal, SERVER))

    def _traced_measure(self, settings: Any, server: Tree, local: Tree, data: LocalData) -> jax.Array:
        algorithm = self.algorithm.build(settings)
        inner = algorithm.view(server, local).inner
        return algorithm.objective(algorithm.outer(server), inner, data)


_abstract = partial(
    jax.tree.map,
    lambda leaf: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct((), jnp.int32),
)
