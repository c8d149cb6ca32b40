"""An algorithm's functions, compiled once for one end of a federation, and the shapes of everything that travels.

As in `simulate`, step sizes are arguments of the compiled functions and random keys are functions of (seed, round, ordinal,
client), so that both engines compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree, all_finite
from fedbilevel.plan import SERVER, Algorithm, Item, Phase, Plan, Repeat, client_key, weighted_mean
from fedbilevel.sampling import LocalData

ROWS = 8
"""Rows of the example that shapes are taken from: no reply depends on how many there are."""


def items_of(plan: Plan) -> Iterator[Item]:
    """Every item of a plan, the insides of a `Repeat` right after it: their order numbers them."""
    for item in plan:
        yield item
        if isinstance(item, Repeat):
            yield from items_of(item.phases)


def beginnings(plan: Plan, first: int = 0) -> tuple[set[int], bool]:
    """The numbers of the phases that a round can begin with, and whether it can go through the plan without any; ``first``:
    the number of its first item."""
    found: set[int] = set()
    for item in plan:
        if isinstance(item, Phase):
            return found | {first}, False
        if isinstance(item, Repeat):
            inside, none = beginnings(item.phases, first + 1)
            found |= inside
            if item.turns is None and not none:
                return found, False
        first += len([*items_of((item,))])
    return found, True


def options_of(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm's settings by name; none where somebody made it by hand without any."""
    return dict(getattr(algorithm.settings, "__dict__", {}))


def local_data(train: Tree, val: Tree, client: int) -> LocalData:
    """One site's rows as ``work`` sees them."""
    sizes = [0 if part is None else np.shape(jax.tree.leaves(part)[0])[0] for part in (train, val)]
    index, train_size, val_size, number = map(np.int32, (0, *sizes, client))
    return LocalData(train, val, index, train_size, val_size, number=number)  # type: ignore[arg-type]


class Compiled:
    """The pure functions of ``algorithm`` for seed ``seed``; each takes the number of the plan's ``item``."""

    def __init__(self, algorithm: Algorithm, seed: int, example: tuple[Tree, Tree]) -> None:
        self.algorithm, self.seed = algorithm, np.uint32(seed)
        self.items = list(items_of(algorithm.plan))
        self.example: tuple[Tree, Tree] = jax.tree.map(lambda leaf: _like(leaf, ROWS, *leaf.shape[1:]), example)
        key = jax.random.key(0)
        self.server_like = jax.eval_shape(algorithm.init, key)
        self.local_like = jax.eval_shape(algorithm.enroll, key)
        # Tracing costs more than a round's arithmetic: the shapes of a phase's messages are found once.
        self.message_like = cache(lambda item: jax.eval_shape(self.phase(item).send, self.server_like))
        self.reply_like, self.parcel_like = cache(self._reply_like), cache(self._parcel_like)
        # What a site does: its first state, a phase's work, taking in a parcel, its share of the objective.
        self.enroll = self._compiled(lambda algorithm, _, key: algorithm.enroll(key))
        self.work = self._compiled(_work)
        self.unpack = self._compiled(lambda _, phase, key, local, parcel: phase.relay.unpack(local, parcel))
        self.measure = self._compiled(
            lambda algorithm, _, key, server, local, data: algorithm.objective(
                algorithm.outer(server), algorithm.view(server, local).inner, data
            )
        )
        # What the coordinator does: its first state, a phase's message, (state, parcels, finite) after it, its own steps.
        self.begin = self._compiled(lambda algorithm, _, key: algorithm.init(key))
        self.send = self._compiled(lambda _, phase, key, server: phase.send(server))
        self.absorb = self._compiled(_absorb)
        self.update = self._compiled(
            lambda _, step, key, server, number, ordinal: step.update(server, client_key(key, number, ordinal, SERVER))
        )

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function(algorithm, item, key, ...)`` on arrays; the plan is rebuilt from the traced settings."""

        def traced(settings: Any, seed: Any, *arguments: Any, item: int = 0) -> Any:
            algorithm = self.algorithm.build(settings)
            return function(algorithm, list(items_of(algorithm.plan))[item], jax.random.key(seed), *arguments)

        return partial(jax.jit(traced, static_argnames="item"), self.algorithm.settings, self.seed)

    def phase(self, item: int) -> Phase:
        phase = self.items[item]
        assert isinstance(phase, Phase)
        return phase

    # What both ends know of the messages, without computing anything.

    def _reply_like(self, item: int) -> Tree:
        data = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct((), jnp.int32),
            local_data(*self.example, 0),
        )
        message = self.message_like(item)
        return jax.eval_shape(self.phase(item).work, message, self.local_like, data, jax.random.key(0))[0]

    def _parcel_like(self, item: int) -> Tree:
        """One client's parcel; None where the phase passes nothing on."""
        relay = self.phase(item).relay
        if relay is None:
            return None
        alone = jax.tree.map(lambda leaf: _like(leaf, 1, *leaf.shape), self.reply_like(item))
        parcels = jax.eval_shape(relay.pack, alone, jax.ShapeDtypeStruct((1,), float), jax.random.key(0))
        return jax.tree.map(lambda leaf: _like(leaf, *leaf.shape[1:]), parcels)


def _work(
    _: Algorithm,
    phase: Phase,
    key: Any,
    message: Tree,
    local: Tree,
    data: LocalData,
    number: Any,
    ordinal: Any,
    secret: Any = None,
) -> Any:
    """``secret``: words by which a site draws, besides the key that everybody knows."""
    own = client_key(key, number, ordinal, data.number)
    for word in () if secret is None else secret:
        own = jax.random.fold_in(own, word)
    return phase.work(message, local, data, own)


def _absorb(
    _: Algorithm, phase: Phase, key: Any, server: Tree, replies: Tree, weights: Any, number: Any, ordinal: Any
) -> tuple[Tree, Tree, Any]:
    """``weights`` are 0 for those who did not answer."""
    weights = weights / jnp.sum(weights)
    parcels = None
    if phase.relay is not None:
        parcels = phase.relay.pack(replies, weights, client_key(key, number, ordinal, SERVER))
    after = phase.absorb(server, (phase.aggregate or weighted_mean)(replies, weights))
    return after, parcels, all_finite(after)


def _like(leaf: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, leaf.dtype)
