"""Importing this makes JAX's compilations cheaper and changes no program: for the tests, and for processes they start."""

import os
import threading
import zlib
from functools import cache

from jax._src import compilation_cache
from jax._src.interpreters import mlir


@cache
def dialects(thread, load=mlir.make_ir_context):
    """MLIR's dialects, once a thread: JAX would load them for every program, in 4 of the 14 milliseconds of one operation."""
    return load()


mlir.make_ir_context = lambda: dialects(threading.get_ident())
# Programs are read back a few times and kept for a week: packing them well took longer than that is worth.
compilation_cache.compress_executable = lambda program: zlib.compress(program, 1)
compilation_cache.decompress_executable = zlib.decompress


def plain():
    """The environment for a process with JAX as users have it: what is set for JAX stays out, but for what is kept of programs
    and how little they tell of lines."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAX_") or "CACHE" in name or "TRACEBACK" in name
    }
