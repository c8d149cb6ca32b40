"""A client's key and the rows it draws by it, as ``jax.random`` has them bit by bit, by two small kernels.

Only where the kernels are loaded already: nobody waits for a compiler in order to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.kernels import build

Shapes = Sequence[tuple[int, ...]]


def serves(key: Any) -> bool:
    """Whether the kernels draw what ``jax.random`` would from ``key``, and are there."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    usual = typed and str(jax.random.key_impl(key)) == "threefry2x32"
    counted: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    return usual and counted and build.ready()


def fold(key: jax.Array, *numbers: Any) -> jax.Array:
    """``jax.random.fold_in`` of one number after the other."""
    words = jnp.stack([jnp.asarray(number).astype(jnp.uint32) for number in numbers])
    given = build.together(jax.random.key_data(key), words)
    call = jax.ffi.ffi_call(build.target("fold"), jax.typeof(given[0]), vmap_method="expand_dims")
    folded: jax.Array = jax.random.wrap_key_data(call(*given), impl="threefry2x32")  # type: ignore[no-untyped-call]
    return folded


def draw(
    key: jax.Array,
    train_size: jax.Array,
    val_size: jax.Array,
    number: jax.Array,
    steps: int,
    train: Shapes,
    val: Shapes,
) -> list[jax.Array]:
    """Row numbers of step ``number`` of ``steps``: pieces of the shapes ``train`` below ``train_size``, and of ``val``.

    Of the words of ``jax.random.bits``, `scaled`, those of the training rows of all steps come first.
    """
    sizes, place = jnp.stack([train_size, val_size]).astype(jnp.int32), jnp.asarray(number, jnp.int32)
    given = build.together(jax.random.key_data(key), sizes, place)
    results = [jax.typeof(given[1]).update(shape=shape) for shape in (*train, *val)]
    call: Any = jax.ffi.ffi_call(build.target("draw"), results, vmap_method="expand_dims")
    rows: list[jax.Array] = call(*given, steps=np.int32(steps), train_pieces=np.int32(len(train)))
    return rows
