"""One strict configuration for every test: CPU, float64 where asked for, no silent promotion, no clock."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from hypothesis import HealthCheck, settings

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Derandomised: a run of the suite says the same thing twice.  No deadline: the first example may compile.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
