"""Compile the kernels once for this machine, keep them in the user's cache, and make them known to XLA.

The libraries lie in ``$XDG_CACHE_HOME/fedbilevel/kernels/<digest>`` (``~/.cache`` by default): two, so that two cores build
them; float64, which few need, has one of its own and waits until it is needed. The digest covers what
the machine code depends on, and is part of the names under which XLA knows the kernels: a program kept in XLA's
persistent compilation cache can never meet a kernel of another version. ``FEDBILEVEL_KERNELS=off`` turns them off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax

_SOURCES = (
    "linear.cc", "calls.h", "model.h", "long.h", "rows.h", "batches.h", "take.h", "whole.h", "packed.h", "packed_calls.h",
    "draw.h", "products.h", "root.h",
)  # fmt: skip
_FLAGS = ("-std=c++17", "-O2", "-fpeel-loops", "-funswitch-loops", "-fPIC", "-shared", "-w")
"""Of what -O3 adds, the two that the kernels' short loops need: the same speed and bits for three quarters of the time."""
_NATIVE = "-march=native"
_HANDLERS = {
    "linear": "FedbilevelLinear", "take": "FedbilevelTake", "whole": "FedbilevelWhole", "packed": "FedbilevelPacked",
    "packed-whole": "FedbilevelPackedWhole", "packed-products": "FedbilevelPackedProducts", "draw": "FedbilevelDraw",
    "fold": "FedbilevelFold", "products": "FedbilevelProducts", "root": "FedbilevelRoot",
}  # fmt: skip
_LIBRARIES = {
    False: {"linear.so": ("-DFEDBILEVEL_PART=1", ["linear"]), "rows.so": ("-DFEDBILEVEL_PART=2", [*_HANDLERS][1:])},
    True: {"linear64.so": ("-DFEDBILEVEL_DOUBLE", ["linear", "whole", "products"])},
}
"""For float32 and for float64: the files, how each is compiled, and the kernels in it."""
_COMPILE_SECONDS = 300
_LOCK = threading.Lock()


class _Unavailable(Exception):
    """Why there are no kernels, in one sentence."""


def why_not() -> str | None:
    """Why the fused kernels cannot be used, in one sentence; None if they can. The first call may compile them."""
    if os.environ.get("FEDBILEVEL_KERNELS", "").strip().lower() in ("off", "0", "false", "no"):
        return "The environment variable FEDBILEVEL_KERNELS turns the fused kernels off."
    if jax.default_backend() != "cpu":
        return f"The fused kernels run on CPUs, and JAX runs on {jax.default_backend()!r} here."
    with _LOCK:
        return _load(False).reason


def begin() -> None:
    """Build them, where that takes a compiler, beside what else a process does at its start."""
    # No daemon: a process that ends with such a thread at work (as where what it was asked for is refused) may crash.
    threading.Thread(target=available).start()


def ready() -> bool:
    """Whether they can be used and need no compiler: somebody has loaded them."""
    return _load.cache_info().currsize > 0 and available()


def available() -> bool:
    """Whether the fused kernels can be used here. The first call may compile them, which takes a few seconds."""
    return why_not() is None


def target(kernel: str, double: bool = False) -> str:
    """The name under which XLA knows a kernel, one of `_HANDLERS`; ``double``: that for float64."""
    reason = why_not()
    if reason is None and double:
        with _LOCK:
            reason = _load(double).reason
    if reason is not None:
        raise RuntimeError(f"The fused kernels are not available. {reason}")
    return _load(double).names[kernel]


def together(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Inside shard_map: operands that all vary over the mesh axes that any of them varies over, as results do."""
    varying = [jax.typeof(operand).mat.varying for operand in operands]
    union = frozenset[str]().union(*varying)
    return tuple(
        operand if own == union else jax.lax.pcast(operand, tuple(sorted(union - own)), to="varying")
        for operand, own in zip(operands, varying, strict=True)
    )


class _Loaded(NamedTuple):
    names: Mapping[str, str] = MappingProxyType({})
    reason: str | None = None


@functools.cache
def _load(double: bool = False) -> _Loaded:
    """The names of XLA's targets, or why there are none. Kept: what cannot be built is not tried again."""
    try:
        command, digest = _command()
        wanted = _LIBRARIES[double]
        with ThreadPoolExecutor(len(wanted)) as compilers:
            made = [compilers.submit(_library, [*command, part], digest, name) for name, (part, _) in wanted.items()]
        libraries = [library.result() for library in made]
        names = {}
        for library, (_, served) in zip(libraries, wanted.values(), strict=True):
            for kernel in served:
                names[kernel] = f"fedbilevel_{kernel}{'64' * double}_{digest}"
                capsule = jax.ffi.pycapsule(getattr(library, _HANDLERS[kernel]))
                jax.ffi.register_ffi_target(names[kernel], capsule, platform="cpu")
        return _Loaded(names)
    except _Unavailable as reason:
        return _Loaded(reason=str(reason))
    except Exception as error:  # whatever is odd about this machine, the caller has a way without kernels
        return _Loaded(
            reason=f"The fused kernels could not be loaded ({type(error).__name__}: {_first_line(str(error))})."
        )


def _command() -> tuple[list[str], str]:
    """The compiler's command line without its output, and the digest of all that decides the machine code."""
    chosen = os.environ.get("CXX")
    compiler = shlex.split(chosen) if chosen else []
    names = compiler[:1] or ["c++", "g++", "clang++"]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        what = f"The compiler {names[0]!r} that CXX names" if compiler else "A C++ compiler (c++, g++ or clang++)"
        raise _Unavailable(f"{what} is not on this machine.")
    headers = Path(jax.ffi.include_dir())
    if not (headers / "xla" / "ffi" / "api" / "c_api.h").is_file():
        raise _Unavailable(f"The headers of XLA's foreign functions are not where jaxlib keeps them ({headers}).")
    folder = Path(__file__).parent
    missing = [name for name in _SOURCES if not (folder / name).is_file()]
    if missing:
        raise _Unavailable(f"The source file {missing[0]} is missing from {folder}.")
    command = [found, *_FLAGS, *compiler[1:], f"-I{headers}", str(folder / "linear.cc")]
    parts = [
        *((folder / name).read_bytes() for name in _SOURCES),
        *(part.encode() for part in (found, *compiler[1:], *_FLAGS, _NATIVE)),
        _version(found).encode(),
        _processor().encode(),
        version("jaxlib").encode(),
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return command, digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise _Unavailable(f"The C++ compiler {compiler} does not run ({type(error).__name__}).") from error


def _processor() -> str:
    """What distinguishes processors for which ``-march=native`` means different things."""
    wanted = ("flags", "Features", "model name", "cpu family", "model\t", "CPU part", "isa")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        flags = sorted({line for line in lines if line.startswith(wanted)})
    except OSError:
        flags = [platform.processor()]
    return "\n".join([platform.system(), platform.machine(), *flags])


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG convention: a path that is not absolute counts as unset.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "fedbilevel" / "kernels"


def _library(command: list[str], digest: str, name: str) -> ctypes.CDLL:
    """The compiled library ``name``, from the cache or into it."""
    try:
        folder = _cache() / digest
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise _Unavailable(
            f"The cache folder for compiled kernels cannot be made ({_first_line(str(error))})."
        ) from error
    if hasattr(os, "getuid"):
        status = folder.stat()
        # Its content is run: nobody else may be able to put it there.
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise _Unavailable(f"The cache folder {folder} belongs to somebody else or can be written by others.")
    path = folder / name
    if path.is_file():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            pass  # damaged, or of a machine that only looks like this one: build it anew
    _compile(command, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise _Unavailable(f"The compiled kernels cannot be loaded ({_first_line(str(error))}).") from error


def _compile(command: list[str], path: Path) -> None:
    """Compile under a temporary name and rename: another process sees the whole library or none."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
            output = Path(scratch) / path.name
            message = ""
            for options in ([_NATIVE], []):
                made = subprocess.run(
                    [*command, *options, "-o", str(output)], capture_output=True, text=True, timeout=_COMPILE_SECONDS
                )
                if made.returncode == 0 and output.is_file():
                    os.replace(output, path)
                    return
                errors = [line for line in made.stderr.splitlines() if "error" in line.lower()]
                message = message or (errors or [f"exit code {made.returncode}"])[0]
    except subprocess.TimeoutExpired as error:
        raise _Unavailable(f"The C++ compiler {command[0]} did not finish in {_COMPILE_SECONDS} seconds.") from error
    except OSError as error:
        raise _Unavailable(f"The cache folder {path.parent} cannot be written ({_first_line(str(error))}).") from error
    raise _Unavailable(f"The C++ compiler {command[0]} cannot compile the kernels ({_first_line(message)}).")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0].rstrip(".")[:300]
