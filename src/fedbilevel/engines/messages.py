"""Messages in a shorter type of numbers: any algorithm's plan, with what it sends and what clients reply rounded on the way.

Every float array of a message or a reply is rounded to the nearest number of the shorter type, ties to even, so that the same
run gives the same numbers everywhere.  Arrays of one number (steps, curvatures, counters) travel as they are: they are few,
and the rest may depend on each of their digits.

A reply is most often a small move away from what was sent.  Rounded by itself, such a move is lost where it is smaller than
half a unit in the last of x's few places, and x stands still.  So the client subtracts the array it received, where that makes
the reply smaller, and sends the difference and one byte that says so; the server adds the mean of these differences to its own
array, of which it sent the rounded one.  What rounding took from a message stays with the server, and a difference of any size
keeps its leading digits.  Which array belongs to which: the first of the same shape and type that no other has, as in the
privacy of real sites.  A phase whose server needs single replies (its own ``aggregate``, or a `Relay`) gets them rounded as
they are, and what it passes on is not rounded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Tree, squared_norm
from fedbilevel.plan import Algorithm, Item, Phase, Plan, Repeat, sums_up, weighted_mean

PLACES = {"bfloat16": (8, 7)}
"""Bits of the exponent and of the fraction."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Short:
    """An array on its way; ``dtype``: the type it has at both ends."""

    value: Any
    dtype: Any = field(metadata={"static": True})


class Moved(NamedTuple):
    """A reply on its way: differences from what was sent, or the arrays themselves where these are shorter (``near`` 0)."""

    reply: Tree
    near: Any


def in_messages(algorithm: Algorithm, dtype: str | None) -> Algorithm:
    """The same algorithm with messages of ``dtype``; itself where that is None.

    Args:
        algorithm: What to run.
        dtype: "bfloat16", or None.

    Returns:
        An algorithm for any engine.

    Raises:
        ValueError: The type is not known.
    """
    if dtype is None:
        return algorithm
    if dtype not in PLACES:
        raise ValueError(f"message_dtype must be {' or '.join(map(repr, PLACES))} or None, not {dtype!r}.")
    return _Rebuilt(algorithm.build, dtype).of(algorithm)


def message_dtype(algorithm: Algorithm) -> str | None:
    """The type that `in_messages` gave its messages, if it did."""
    return algorithm.build.dtype if isinstance(algorithm.build, _Rebuilt) else None


@dataclass(frozen=True)
class _Rebuilt:
    """``build`` of such an algorithm: equal ones share a compiled program."""

    build: Callable[[Any], Algorithm]
    dtype: str

    def __call__(self, settings: Any) -> Algorithm:
        return self.of(self.build(settings))

    def of(self, algorithm: Algorithm) -> Algorithm:
        return algorithm._replace(plan=_plan(algorithm.plan, self.dtype), build=self)


def _plan(plan: Plan, dtype: str) -> Plan:
    def item(one: Item) -> Item:
        if isinstance(one, Repeat):
            return one._replace(phases=_plan(one.phases, dtype))
        return _phase(one, dtype) if isinstance(one, Phase) else one

    return tuple(map(item, plan))


def _phase(phase: Phase, dtype: str) -> Phase:
    def send(server: Any) -> Tree:
        return shortened(phase.send(server), dtype)

    def replying(work: Callable[..., Any]) -> Callable[..., Any]:
        def rounded(message: Tree, local: Tree, data: Any, key: jax.Array) -> Any:
            received = lengthened(message)
            reply, *rest = work(received, local, data, key)
            return _towards(reply, received, dtype) if moves else shortened(reply, dtype), *rest

        return rounded

    def aggregate(replies: Any, weights: jax.Array) -> Any:
        if moves:
            replies = replies._replace(near=jax.tree.map(lambda flags: flags.astype(weights.dtype), replies.near))
        return (phase.aggregate or weighted_mean)(lengthened(replies), weights)

    def absorb(server: Any, mean: Any) -> Any:
        return phase.absorb(server, _from(mean, phase.send(server)) if moves else mean)

    def pack(replies: Tree, weights: jax.Array, key: jax.Array) -> Tree:
        assert phase.relay is not None
        return phase.relay.pack(lengthened(replies), weights, key)

    moves = sums_up(phase)
    return phase._replace(
        send=send,
        work=replying(phase.work),
        absorb=absorb,
        aggregate=aggregate,
        trace=phase.trace and replying(phase.trace),
        relay=phase.relay and phase.relay._replace(pack=pack),
    )


def shortened(tree: Tree, dtype: str) -> Tree:
    """Its arrays as they travel."""

    def one(leaf: Any) -> Any:
        if not _rounds(leaf, dtype):
            return leaf
        # A conversion there and back again alone is one that XLA may leave out.
        return Short(jax.lax.reduce_precision(leaf, *PLACES[dtype]).astype(dtype), np.dtype(leaf.dtype))

    return jax.tree.map(one, tree)


def lengthened(tree: Tree) -> Tree:
    """What `shortened` was given, rounded."""
    return jax.tree.map(
        lambda leaf: leaf.value.astype(leaf.dtype) if isinstance(leaf, Short) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Short),
    )


def _rounds(leaf: Any, dtype: str) -> bool:
    kind = jnp.result_type(leaf)
    return jnp.issubdtype(kind, jnp.floating) and kind.itemsize > jnp.dtype(dtype).itemsize and np.size(leaf) > 1


def _references(reply: Tree, message: Tree) -> list[Any]:
    """For every array of the reply the one of the message that it may be a move from, or None."""
    left, found = list(jax.tree.leaves(message)), []
    for leaf in jax.tree.leaves(reply):
        alike = [place for place, sent in enumerate(left) if (sent.shape, sent.dtype) == (leaf.shape, leaf.dtype)]
        found.append(left.pop(alike[0]) if alike else None)
    return found


def _towards(reply: Tree, received: Tree, dtype: str) -> Moved:
    leaves, structure = jax.tree.flatten(reply)
    sent: list[Any] = []
    near: list[Any] = []
    for leaf, reference in zip(leaves, _references(reply, received), strict=True):
        if reference is None or not _rounds(leaf, dtype):
            sent.append(leaf)
            near.append(None)
            continue
        closer = squared_norm(leaf - reference) < squared_norm(leaf)
        sent.append(leaf - jnp.where(closer, reference, 0))
        near.append(closer.astype(jnp.uint8))
    return Moved(shortened(jax.tree.unflatten(structure, sent), dtype), near)


def _from(moved: Moved, message: Tree) -> Tree:
    """A reply, or the mean of several: differences, and ``near`` times what they are from."""
    leaves, structure = jax.tree.flatten(moved.reply)
    references = _references(moved.reply, message)
    whole = [
        leaf if near is None else leaf + near.astype(leaf.dtype) * reference
        for leaf, near, reference in zip(leaves, moved.near, references, strict=True)
    ]
    return jax.tree.unflatten(structure, whole)


def arrived(replies: Tree, message: Tree) -> Tree:
    """What the clients replied to ``message``, one by one, whether or not it was rounded on the way."""
    if not isinstance(replies, Moved):
        return lengthened(replies)
    return jax.vmap(_from, (0, None))(lengthened(replies), lengthened(message))
