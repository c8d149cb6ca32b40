"""Cube roots with the same bits however XLA compiles the program around them.

Only where the kernels are loaded already: nobody waits for a compiler in order to take a root.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.kernels import build


def cube_root(value: jax.Array) -> jax.Array:
    """``jnp.cbrt``, by the C library where the kernels are there."""
    if value.dtype != np.float32 or not build.ready():
        return jnp.cbrt(value)
    call: Any = jax.ffi.ffi_call(build.target("root"), jax.typeof(value), vmap_method="broadcast_all")
    root: jax.Array = call(value)
    return root
