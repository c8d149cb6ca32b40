"""Cube roots have the same bits in every program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import kernels
from fedbilevel.algorithms.local import cube_root_rate
from fedbilevel.engines.simulation import EFFORTS, PLAIN
from fedbilevel.kernels import build

pytestmark = pytest.mark.skipif(not kernels.available(), reason=str(kernels.why_not()))


def compiled(function, *given, options=None):
    return np.asarray(jax.jit(function, compiler_options=options)(*given))


def test_a_rate_does_not_depend_on_how_xla_emits_its_program():
    times = jnp.arange(2000)

    def rates(times):
        return jax.vmap(lambda time: cube_root_rate(0.1, 1.0, 1.0, time, jnp.float32))(times)

    usual = compiled(rates, times)
    for options in EFFORTS.values():
        np.testing.assert_array_equal(compiled(rates, times, options=options or None), usual)
    np.testing.assert_allclose(usual, 0.1 / np.cbrt(1.0 + np.arange(2000)), rtol=1e-6)


def test_it_is_the_root_that_xla_takes_by_default(monkeypatch):
    values = jnp.linspace(0.1, 900, 500, dtype=jnp.float32).reshape(5, 100)
    root = compiled(kernels.cube_root, values)
    newer, older = ({**PLAIN, "xla_cpu_use_fusion_emitters": newer} for newer in (True, False))
    monkeypatch.setattr(build, "ready", lambda: False)
    np.testing.assert_array_equal(compiled(lambda value: kernels.cube_root(value), values, options=newer), root)
    assert (compiled(lambda value: kernels.cube_root(value), values, options=older) != root).any()


def test_other_types_are_left_to_xla():
    with jax.enable_x64(True):
        assert kernels.cube_root(jnp.float64(27.0)) == pytest.approx(3.0, rel=1e-15)
