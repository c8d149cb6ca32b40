"""One strict configuration for every test: CPU, float64 where asked for, no silent promotion, no clock."""

import ctypes
import gc
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What one process has compiled no other compiles again: neither the other worker, nor a process that a test starts, nor this
# one after it has let go of its programs, nor the next run.  Small programs too: of eight contracts with 193 programs, keeping
# all of them cost no processor time, and reading them back in the next run spared 1.6 of 3.7 seconds.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # an eighth of the time to lower a program
# The suite compiles some thousand programs and runs each for milliseconds: the compiler's optimisations would cost more than
# half of its time.  `make test-optimised` has them.  XLA ends the process at a flag it does not know, hence the version.
if os.environ.get("FEDBILEVEL_OPTIMISED") != "1" and version("jaxlib").startswith("0.10."):
    FAST = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    # Of a program of loops within loops these passes, which look again and again, take a fifth of the time to compile.
    LOOPS = "while-loop-invariant-code-motion,simplify-while-loops,while-loop-constant-sinking"
    FAST = f"{FAST} --xla_disable_hlo_passes={LOOPS}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST}".strip()

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests.quicker import dialects

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Derandomised: a run of the suite says the same thing twice.  No deadline: the first example may compile.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

MEMORY = max(1000 * 2**20, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
"""Bytes a process may hold between two tests before it lets go of the programs it compiled.  The tests at hand then trace and
compile theirs again, so not too few: an eighth of the machine's memory, for two workers and what they start."""


def pytest_sessionstart(session):
    """Programs are kept for a week."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for program in (session.config.rootpath / ".pytest_cache" / "programs").glob("*"):
            if program.stat().st_mtime < time.time() - 7 * 24 * 3600:
                program.unlink(missing_ok=True)


LONG = ("test_site.py", "test_tutorials.py", "test_docs.py", "test_devices.py")
"""Files whose tests start processes that take long."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Long tests first: a worker that runs out of tests at the end then waits for a short one of the other's."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish(session):
    """What is imported by now stays, and most objects of a trace go by themselves: look for cycles less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def held():
    """Bytes of this process in memory; 0 where the system does not say."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


@pytest.fixture(autouse=True)
def little_memory():
    yield
    if held() > MEMORY:
        jax.clear_caches()
        dialects.cache_clear()  # constants of programs stay with them
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # freed, but the allocator keeps it


@pytest.fixture(scope="module")
def compiled():
    """One entry for everything that XLA compiles, however small."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **about: events.append(event) if event.endswith("backend_compile_duration") else None
    )
    jax.jit(lambda x: x + 1)(np.arange(3.0))
    assert events, "the listener must hear a compilation"
    return events
