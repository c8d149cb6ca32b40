"""A client's key and the rows it draws by it, as ``jax.random`` has them bit by bit, by two small kernels.

Only where the kernels are loaded already: nobody waits for a compiler in order to draw.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.kernels import build


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


def draw(key: jax.Array, train_size: jax.Array, val_size: jax.Array, train: int, val: int) -> jax.Array:
    """``train`` numbers below ``train_size``, then ``val`` below ``val_size``: `scaled` words of ``jax.random.bits``."""
    sizes = jnp.stack([train_size, val_size]).astype(jnp.int32)
    given = build.together(jax.random.key_data(key), sizes)
    result = jax.typeof(given[1]).update(shape=(train + val,))
    call: Any = jax.ffi.ffi_call(build.target("draw"), result, vmap_method="expand_dims")
    rows: jax.Array = call(*given, train=np.int32(train))
    return rows
