"""Imports go downward only, pure modules stay pure, and the package starts without JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedbilevel

HOME = Path(fedbilevel.__file__).parent
LAYERS = [
    {"_version", "storage"},
    {"calculus", "kernels"},
    {"sampling", "plan"},
    {"linear", "problem"},  # a declared inner problem and the problem that carries it
    {"hypergradients"},
    {"algorithms"},
    {"tasks", "theory"},
    {"engines"},
    {"tables"},
    {"datasets"},
    {"fairness"},
    {"federation"},  # both ends of a run over real sites
    {"runs"},  # folders of results
    {"report"},  # shows results it is handed or reads; who makes them stands above
    {"jobs"},
    {"studies"},
    {"cli"},
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
PUBLIC = HEIGHT["engines"]
"""``import fedbilevel as fb`` reaches everything up to the engines."""

PURE = {"calculus", "sampling", "plan", "linear", "problem", "hypergradients", "algorithms"}
IMPURE = {
    "asyncio", "builtins", "concurrent", "csv", "datetime", "fileinput", "glob", "http", "io", "json", "logging",
    "multiprocessing", "os", "pandas", "pathlib", "pickle", "random", "requests", "rich", "shutil", "socket", "subprocess",
    "sys", "tempfile", "threading", "time", "typer", "urllib", "warnings",
}  # fmt: skip

FILES = sorted(HOME.rglob("*.py"))
modules = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(HOME)))


def part(file):
    """The part of the package a file belongs to: the folder or file at its top."""
    relative = file.relative_to(HOME)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def part_of(name):
    """The part a dotted import of ours reaches."""
    return name.split(".")[1]


def for_types_only(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(node):
    """Dotted names a file imports at run time, in functions too."""
    for child in ast.iter_child_nodes(node):
        if for_types_only(child):
            for other in child.orelse:
                yield from imports(other)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports name the package in full"
            if child.module == "fedbilevel":
                yield from (f"fedbilevel.{alias.name}" for alias in child.names)
            else:
                yield child.module
        else:
            yield from imports(child)


def height_of(name):
    """The layer an import reaches; public names count as the engines' layer."""
    return HEIGHT.get(part_of(name), PUBLIC) if "." in name else PUBLIC


def test_every_part_has_a_place():
    assert {part(file) for file in FILES} - {"__init__"} <= set(HEIGHT)


@modules
def test_imports_go_downward(file):
    own = part(file)
    if own == "__init__":
        return
    for name in imports(ast.parse(file.read_text())):
        if name.split(".")[0] == "fedbilevel" and not ("." in name and part_of(name) == own):
            same_layer = any({own, part_of(name)} <= layer for layer in LAYERS) if "." in name else False
            assert same_layer or height_of(name) < HEIGHT[own], f"{own} must not import {name}"


MEETS_NVFLARE = {"federation/nvflare", "federation/operator"}
"""The rooms that may import NVFlare: everything else runs and is tested without it."""


@modules
def test_only_the_federation_engine_imports_nvflare(file):
    roots = {name.split(".")[0] for name in imports(ast.parse(file.read_text()))}
    if str(file.relative_to(HOME).parent) not in MEETS_NVFLARE:
        assert "nvflare" not in roots


@pytest.mark.parametrize(
    "file", [file for file in FILES if part(file) in PURE], ids=lambda file: str(file.relative_to(HOME))
)
def test_pure_modules_touch_nothing(file):
    tree = ast.parse(file.read_text())
    assert not {name.split(".")[0] for name in imports(tree)} & IMPURE
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"open", "print", "input", "exec", "eval", "globals"}


@modules
def test_only_the_command_line_prints(file):
    if part(file) == "cli":
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("print", "sys.stdout.write", "sys.stderr.write"), (
                f"line {node.lineno}"
            )


def test_the_package_and_its_command_line_start_without_jax():
    script = "import sys, fedbilevel, fedbilevel.cli; print(sorted({'jax', 'pandas', 'sklearn', 'scipy'} & set(sys.modules)))"
    spoken = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert spoken.stdout.strip() == "[]"


def test_every_public_name_resolves():
    for name in fedbilevel.__all__:
        assert getattr(fedbilevel, name) is not None
    assert set(fedbilevel.__all__) <= set(dir(fedbilevel))
    assert len(set(fedbilevel.__all__)) == len(fedbilevel.__all__)
    with pytest.raises(AttributeError, match="module 'fedbilevel' has no attribute 'fedsgd'"):
        fedbilevel.fedsgd  # noqa: B018
