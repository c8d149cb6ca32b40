"""Trees as lists of NumPy arrays: what travels, and the checks on what arrives.

Both ends know the tree's structure, because both build the algorithm from the same settings; so only arrays travel, and
everything that arrives is held against the shapes and types that ``jax.eval_shape`` says must arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedbilevel.calculus import Tree

Arrays = list[np.ndarray]


class BadReply(ValueError):
    """What arrived is not what the plan's phase sends: wrong arrays, or numbers that are not finite."""


def to_arrays(tree: Tree) -> Arrays:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def to_tree(arrays: Any, like: Tree, what: str, finite: bool = True) -> Tree:
    """The tree that ``arrays`` hold; `BadReply` unless they are exactly the leaves of ``like``, and ``finite``."""
    leaves, structure = jax.tree.flatten(like)
    if not isinstance(arrays, list | tuple) or not all(isinstance(array, np.ndarray) for array in arrays):
        raise BadReply(f"{what} holds something other than arrays")
    if len(arrays) != len(leaves):
        raise BadReply(f"{what} holds {len(arrays)} arrays instead of {len(leaves)}")
    for number, (array, leaf) in enumerate(zip(arrays, leaves, strict=True)):
        if array.shape != tuple(leaf.shape) or array.dtype != leaf.dtype:
            raise BadReply(
                f"array {number} of {what} is {array.dtype}{list(array.shape)} instead of {leaf.dtype}{list(leaf.shape)}"
            )
        if finite and array.dtype.kind in "fc" and not np.isfinite(array).all():
            raise BadReply(f"array {number} of {what} holds a NaN or an infinity")
    return jax.tree.unflatten(structure, list(arrays))


def named_arrays(values: Any, what: str) -> dict[str, np.ndarray]:
    """A dict of finite arrays by name, as surveys and reports send it."""
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise BadReply(f"{what} is not a table of named arrays")
    for name, array in values.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
            raise BadReply(f"{name!r} in {what} is not an array of numbers")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BadReply(f"{name!r} in {what} holds a NaN or an infinity")
    return dict(values)


def size_of(arrays: Sequence[np.ndarray]) -> int:
    """Bytes of the arrays: what they put on the wire, framing aside."""
    return sum(array.nbytes for array in arrays)


def stacked(trees: Sequence[Tree | None], like: Tree) -> Tree:
    """One tree with leaves ``[sites, ...]``; zeros for a site without one."""
    leaves, structure = jax.tree.flatten(like)
    columns = [None if tree is None else jax.tree.leaves(tree) for tree in trees]
    out = [np.zeros((len(trees), *leaf.shape), leaf.dtype) for leaf in leaves]
    for row, column in enumerate(columns):
        for number, leaf in enumerate(column or ()):
            out[number][row] = leaf
    return jax.tree.unflatten(structure, out)
