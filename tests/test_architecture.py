"""Imports go downward only, pure modules stay pure, and the package starts without JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedbilevel

HOME = Path(fedbilevel.__file__).parent
LAYERS = [
    {"_version", "storage", "hints"},
    {"calculus", "kernels"},
    {"sampling", "plan", "linear"},
    {"problem"},
    {"hypergradients"},
    {"algorithms"},
    {"plugins"},
    {"engines"},
    {"tracking"},
    {"tasks"},  # problems with known answers...
    {"theory"},  # ...and what is true along a run
    {"tables"},
    {"datasets"},
    {"fairness"},
    {"tuning"},
    {"federation/protocol"},  # both ends of a run over real sites...
    {"federation/nvflare"},  # ...on NVFlare...
    {"federation/operator"},  # ...as somebody runs it
    {"runs"},  # folders of results
    {"report"},  # shows results it is handed or reads; who makes them stands above
    {"jobs"},
    {"studies"},
    {"cli"},
]
"""Every room may import those in the layers below its own, and none beside it."""
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}

PURE = {"hints", "calculus", "sampling", "plan", "linear", "problem", "hypergradients", "algorithms"}
IMPURE = {
    "asyncio", "builtins", "concurrent", "csv", "datetime", "fileinput", "glob", "http", "io", "json", "logging",
    "multiprocessing", "os", "pandas", "pathlib", "pickle", "random", "requests", "rich", "shutil", "socket", "subprocess",
    "sys", "tempfile", "threading", "time", "typer", "urllib", "warnings",
}  # fmt: skip

FILES = sorted(HOME.rglob("*.py"))
modules = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(HOME)))


def room(path):
    """Where a file or module lies: the file or folder at the top, or the folder within ``federation``."""
    top, *rest = path
    return f"{top}/{rest[0]}" if f"{top}/{rest[0] if rest else ''}" in HEIGHT else top


def room_of(file):
    return room(file.relative_to(HOME).with_suffix("").parts)


def imports(tree):
    """Dotted names a file imports, in functions and for types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached(name):
    """The room an import of ours leads to; public names, such as ``fb.simulate``, count as the engines'."""
    found = room(name.split(".")[1:] or ["engines"])
    return found if found in HEIGHT else "engines"


def test_every_room_has_a_place():
    assert {room_of(file) for file in FILES} - {"__init__", "federation"} <= set(HEIGHT)
    assert not list(imports(ast.parse((HOME / "federation" / "__init__.py").read_text())))


@modules
def test_imports_go_downward(file):
    own = room_of(file)
    if own in ("__init__", "federation"):
        return
    for name in imports(ast.parse(file.read_text())):
        if name.split(".")[0] == "fedbilevel" and reached(name) != own:
            assert HEIGHT[reached(name)] < HEIGHT[own], f"{own} must not import {name}"


@modules
def test_only_two_rooms_import_nvflare(file):
    """Everything else runs and is tested without it."""
    roots = {name.split(".")[0] for name in imports(ast.parse(file.read_text()))}
    assert "nvflare" not in roots or room_of(file) in ("federation/nvflare", "federation/operator")


@pytest.mark.parametrize(
    "file", [file for file in FILES if room_of(file) in PURE], ids=lambda file: str(file.relative_to(HOME))
)
def test_pure_modules_touch_nothing(file):
    tree = ast.parse(file.read_text())
    assert not {name.split(".")[0] for name in imports(tree)} & IMPURE
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"open", "print", "input", "exec", "eval", "globals"}


@modules
def test_only_the_command_line_prints(file):
    if room_of(file) == "cli":
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("print", "sys.stdout.write", "sys.stderr.write"), (
                f"line {node.lineno}"
            )


HEAVY = {"jax", "pandas", "sklearn", "scipy"}


def test_the_package_and_its_command_line_start_without_jax():
    script = f"import sys, fedbilevel, fedbilevel.cli; print(sorted({HEAVY} & set(sys.modules)))"
    spoken = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert spoken.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["nvflare.validator", "nvflare.steward", "operator.processes", "operator.sessions"])
def test_the_processes_of_an_operator_start_without_jax(module):
    """A site's and a server's own process, and the commands that look at them: only the workers of jobs compute."""
    pytest.importorskip("nvflare", reason="needs the federation extra: pip install 'fedbilevel[federation]'")
    script = f"import sys, fedbilevel.federation.{module}; print(sorted({HEAVY} & set(sys.modules)))"
    spoken = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert spoken.stdout.strip().splitlines()[-1] == "[]"


def test_every_public_name_resolves():
    for name in fedbilevel.__all__:
        assert getattr(fedbilevel, name) is not None
    assert set(fedbilevel.__all__) <= set(dir(fedbilevel))
    assert len(set(fedbilevel.__all__)) == len(fedbilevel.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'fedbo'; did you mean 'fedbio' or 'fedmbo'\?"):
        fedbilevel.fedbo  # noqa: B018
