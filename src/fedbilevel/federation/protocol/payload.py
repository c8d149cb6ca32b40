"""Trees as lists of NumPy arrays: what travels, and the checks on what arrives.

Both ends know the tree's structure, because both build the algorithm from the same settings; so only arrays travel, and
everything that arrives is held against the shapes and types that ``jax.eval_shape`` says must arrive.

On the way an array is its type, its shape and its bytes (`packed`).  NumPy's own format has a header that Python's parser
reads, and in CPython before 3.11.8 and 3.12.2 that parser fails at times when two threads use it at once (gh-106905).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel.engines.stages import Expected

if TYPE_CHECKING:
    from fedbilevel.calculus import Tree

Arrays = list[np.ndarray]
BFLOAT16 = "bfloat16"
ARRAY = "\0array"
"""The only key of what stands for an array on its way."""


class BadReply(ValueError):
    """What arrived is not what the plan's phase sends: wrong arrays, or numbers that are not finite."""


def to_arrays(tree: Tree) -> Arrays:
    import jax  # an operator's process reads records, and has no trees

    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def packed(value: Any) -> Any:
    """``value`` as it travels: every array in it as its type, shape and bytes."""
    if isinstance(value, np.ndarray):
        # NumPy itself does not know bfloat16, and would write it as two bytes of anything.
        return {
            ARRAY: [BFLOAT16 if value.dtype.name == BFLOAT16 else value.dtype.str, list(value.shape), value.tobytes()]
        }
    if isinstance(value, dict):
        return {name: packed(entry) for name, entry in value.items()}
    return [packed(entry) for entry in value] if isinstance(value, list | tuple) else value


def unpacked(value: Any) -> Any:
    """What `packed` was given; `BadReply` where an array is not one of numbers, or not as long as it says."""
    if isinstance(value, list | tuple):
        return [unpacked(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {ARRAY}:
        return {name: unpacked(entry) for name, entry in value.items()}
    try:
        name, shape, contents = value[ARRAY]
        kind = np.dtype(name) if isinstance(name, str) and len(name) < 8 else np.dtype(object)
        if name == BFLOAT16:
            import ml_dtypes

            kind = np.dtype(ml_dtypes.bfloat16)
        if (kind.kind in "fciub" or kind.name == BFLOAT16) and len(contents) == kind.itemsize * math.prod(shape):
            return np.frombuffer(contents, kind).reshape(shape).copy()
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadReply("an array in it is damaged")


def to_tree(arrays: Any, like: Tree, what: str, finite: bool = True) -> Tree:
    """The tree that ``arrays`` hold; `BadReply` unless they are exactly the leaves of ``like``, and ``finite``."""
    import jax

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
        if array.dtype.name == BFLOAT16:
            array = array.astype(np.float32)  # which has the same range
        if finite and array.dtype.kind in "fc" and array.size:
            largest = float(np.abs(array).max())
            if not math.isfinite(largest):
                raise BadReply(f"array {number} of {what} holds a NaN or an infinity")
            if largest > math.sqrt(np.finfo(array.dtype).max):
                raise BadReply(f"array {number} of {what} holds {largest:.3g}, which is too large to compute with")
    return jax.tree.unflatten(structure, list(arrays))


def named_arrays(values: Any, what: str) -> dict[str, np.ndarray]:
    """A dict of finite arrays by name, as surveys and reports send it."""
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise BadReply(f"{what} is not a table of named arrays")
    for name, array in values.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
            raise BadReply(f"{name[:40]!r} in {what} is not an array of numbers")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BadReply(f"{name[:40]!r} in {what} holds a NaN or an infinity")
    return dict(values)


def share_of(values: Any, expected: Mapping[str, Expected], what: str) -> dict[str, np.ndarray]:
    """The numbers of a survey or a report: those that are ``expected``, of their shapes, within their bounds."""
    numbers = named_arrays(values, what)
    lacking, strange = sorted(expected.keys() - numbers.keys()), sorted(numbers.keys() - expected.keys())
    if lacking or strange:
        raise BadReply(f"{what} lacks {lacking[0]!r}" if lacking else f"{what} holds a strange {strange[0][:40]!r}")
    lengths = set()
    for name, (shape, low, high) in expected.items():
        array = numbers[name]
        open_ended = shape == (-1,) and array.ndim == 1
        if not open_ended and array.shape != shape:
            raise BadReply(f"{name!r} in {what} is of shape {list(array.shape)} instead of {list(shape)}")
        lengths |= {array.size} if open_ended else set()
        if not ((np.asarray(low) <= array) & (array <= high)).all():
            raise BadReply(f"{name!r} in {what} holds a number that cannot be")
    if len(lengths) > 1:
        raise BadReply(f"{what} holds lists of different lengths")
    return numbers


def size_of(arrays: Sequence[np.ndarray]) -> int:
    """Bytes of the arrays: what they put on the wire, framing aside."""
    return sum(array.nbytes for array in arrays)


def stacked(trees: Sequence[Tree | None], like: Tree) -> Tree:
    """One tree with leaves ``[sites, ...]``; zeros for a site without one."""
    import jax

    leaves, structure = jax.tree.flatten(like)
    columns = [None if tree is None else jax.tree.leaves(tree) for tree in trees]
    out = [np.zeros((len(trees), *leaf.shape), leaf.dtype) for leaf in leaves]
    for row, column in enumerate(columns):
        for number, leaf in enumerate(column or ()):
            out[number][row] = leaf
    return jax.tree.unflatten(structure, out)
