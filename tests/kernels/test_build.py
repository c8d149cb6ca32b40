"""Building on demand: what is built, when it is not, and that nothing but a sentence comes of it."""

from __future__ import annotations

import re
import stat
import threading
from pathlib import Path

import jax
import pytest

from fedbilevel import kernels
from fedbilevel.kernels import build
from tests.kernels.references import process, spoken

FOLDER = Path(build.__file__).parent

PROGRAM = """
import jax, numpy as np
from fedbilevel import kernels
from tests.kernels.references import make, naive_neumann
assert kernels.available(), kernels.why_not()
for dtype, bound in ((np.float32, 1e-5), (np.float64, 1e-12)):
    for length, batch, points, link in ((107, 19, 2, "logistic"), (5, 8, 1, "squared")):
        arguments = make(0, 12, length, batch, 2, points, dtype=dtype)
        found = jax.jit(kernels.neumann, static_argnames="link")(**arguments, link=link)
        for got, want in zip(found, naive_neumann(**arguments, link=link)):
            error = abs(got - want).max() / abs(want).max()
            assert error < bound, (dtype, length, link, error)
print("same")
"""


def test_two_processes_build_at_once_and_leave_the_libraries_of_either_type(tmp_path):
    # With vectors of 64 bytes, which this machine may not have: the compiler splits them, the results stay. Not
    # optimised, to be quick: what is tested is how it is built.
    compiler = f"{build._command()[0][0]} -O0 -DFEDBILEVEL_VECTOR_BYTES=64"
    cache = tmp_path / "cache"
    both = [process(PROGRAM, XDG_CACHE_HOME=str(cache), CXX=compiler) for _ in range(2)]
    assert [spoken(one) for one in both] == ["same", "same"]
    libraries = sorted(path for path in cache.rglob("*") if path.is_file())
    assert [library.name for library in libraries] == ["linear.so", "linear64.so", "rows.so"]
    (folder,) = {library.parent for library in libraries}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(folder.iterdir()) == libraries


def test_a_damaged_library_is_built_anew_and_programs_are_kept(tmp_path, monkeypatch):
    compiler = f"{build._command()[0][0]} -O0 -DFEDBILEVEL_VECTOR_BYTES=16"
    environment = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    monkeypatch.setenv("CXX", compiler)
    digest = build._command()[1]
    folder = tmp_path / "cache" / "fedbilevel" / "kernels" / digest
    folder.mkdir(parents=True, mode=0o700)
    (folder / "linear.so").write_bytes(b"half a library")
    assert spoken(process(PROGRAM, **environment)) == "same"
    built = (folder / "linear.so").stat()
    assert built.st_size > 1000
    # A second process finds the library and the compiled programs that call it.
    assert spoken(process(PROGRAM, **environment)) == "same"
    assert (folder / "linear.so").stat().st_mtime_ns == built.st_mtime_ns


def test_building_can_begin_beside_other_work(monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(build, "available", asked.set)
    kernels.begin()
    assert asked.wait(60)


def test_turned_off_by_the_environment(monkeypatch):
    monkeypatch.setenv("FEDBILEVEL_KERNELS", "off")
    assert not kernels.available()
    assert "FEDBILEVEL_KERNELS" in kernels.why_not()
    with pytest.raises(RuntimeError, match="FEDBILEVEL_KERNELS"):
        build.target("linear")
    monkeypatch.delenv("FEDBILEVEL_KERNELS")
    assert kernels.available()


def test_not_on_other_backends(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not kernels.available()
    assert "'gpu'" in kernels.why_not()


def compiler(script):
    """One that is a shell script, whose output is its last argument."""

    def install(home, monkeypatch):
        program = home / "compiler"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))

    return install


def no_compiler(home, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")


def no_cache(home, monkeypatch):
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))


def open_cache(home, monkeypatch):
    folder = build._cache() / build._command()[1]
    folder.mkdir(parents=True)
    folder.chmod(0o777)


FINE = '[ "$1" = --version ] && exit 0'
REASONS = [
    (lambda home, m: m.setenv("CXX", "none -O1"), r"^The compiler 'none' that CXX names is not on this machine\.$"),
    (no_compiler, r"A C\+\+ compiler \(c\+\+, g\+\+ or clang\+\+\) is not on this machine\.$"),
    (compiler("exit 3"), r"The C\+\+ compiler .*/compiler does not run \(CalledProcessError\)\.$"),
    (
        compiler(f'{FINE}\necho "1: error: old" >&2\nexit 1'),
        r"/compiler cannot compile the kernels \(1: error: old\)\.$",
    ),
    (compiler(f'{FINE}\nfor last; do :; done\necho no > "$last"'), r"The compiled kernels cannot be loaded \("),
    (lambda home, m: m.setattr(jax.ffi, "include_dir", lambda: str(home)), r"^The headers .* jaxlib keeps them \(/"),
    (no_cache, r"The cache folder for compiled kernels cannot be made \("),
    (open_cache, r"The cache folder /.* belongs to somebody else or can be written by others\.$"),
]


@pytest.mark.parametrize(("spoil", "sentence"), REASONS)
def test_why_a_machine_has_no_kernels(monkeypatch, tmp_path, spoil, sentence):
    """What a process like this one, but with an empty cache, would say."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spoil(tmp_path, monkeypatch)
    assert re.search(sentence, build._load.__wrapped__().reason)


def test_a_relative_cache_counts_as_unset(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert build._cache() == tmp_path / ".cache" / "fedbilevel" / "kernels"


def test_the_digest_covers_what_the_machine_code_depends_on(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    digests = {build._command()[1]}
    for name, value in (("_processor", lambda: "x"), ("_version", lambda _: "x"), ("version", lambda _: "0")):
        with monkeypatch.context() as patch:
            patch.setattr(build, name, value)
            digests.add(build._command()[1])
    monkeypatch.setenv("CXX", f"{build._command()[0][0]} -O1")
    digests.add(build._command()[1])
    assert len(digests) == 5
    sources = {path.name for path in FOLDER.iterdir() if path.suffix in (".cc", ".h")}
    assert sources == set(build._SOURCES)


def test_the_name_known_to_xla_carries_the_digest():
    for kernel in ("linear", "take"):
        assert build.target(kernel) == f"fedbilevel_{kernel}_{build._command()[1]}"
