"""The kernels under shard_map, in a process of its own: the number of devices is fixed when JAX starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedbilevel import kernels

PROGRAM = """
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from fedbilevel import kernels
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
assert mesh.size == 2
rng = np.random.default_rng(0)
f = lambda *shape: jnp.asarray(rng.normal(size=shape))
features, targets = f(4, 20, 7), jnp.asarray(rng.integers(0, 2, (4, 20)).astype(float))
cells, indices = (jnp.asarray(rng.integers(0, high, shape), jnp.int32) for high, shape in ((3, (4, 20)), (20, (4, 3, 9))))
inner, vectors, weights = f(4, 2, 7), f(4, 2, 7), jnp.exp(f(2, 3))
ridge, step = jnp.full(2, 0.1), jnp.full(2, 0.01)
kernel = jax.vmap(partial(kernels.neumann, link="logistic"), in_axes=(0,) * 6 + (None,) * 3)
operands = (features, targets, cells, indices, inner, vectors, weights, ridge, step)
expected = kernel(*operands)
for check in (True, False):
    sharded = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=(P("clients"),) * 6 + (P(),) * 3,
                                    out_specs=P("clients"), check_vma=check))
    for got, want in zip(sharded(*operands), expected):
        assert len(got.sharding.device_set) == 2
        np.testing.assert_array_equal(got, want)
print("same")
"""


def test_shard_map_gives_the_same_numbers():
    if kernels.why_not() is not None:
        pytest.skip(kernels.why_not())
    environment = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same"
