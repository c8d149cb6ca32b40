"""Every public name has a docstring in one style that names all its parameters, a place in the reference, and an example."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import fedbilevel
from fedbilevel import datasets, fairness, plugins, tasks, theory, tracking, tuning

HOMES = {
    "fb": (fedbilevel, fedbilevel.__all__),
    "fairness": (fairness, fairness.__all__),
    "datasets": (datasets, datasets.__all__),
    "tasks": (tasks, tasks.__all__),
    "theory": (theory, theory.__all__),
    "tuning": (tuning, tuning.__all__),
    "tracking": (tracking, ["mlflow_callback"]),
    "plugins": (plugins, ["plugins", "suited"]),
}
ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
NAMES = [
    (home, name)
    for home, (module, names) in HOMES.items()
    for name in names
    if callable(getattr(module, name)) and not name.startswith("_")
]
PLAIN = {"add", "subtract", "scale", "step_along", "zeros", "RunFolder"}
"""Arithmetic of trees, which is its formula; and a class that `RunFolder.open` makes."""


def imported():
    """Names of other modules that the code of pages and examples imports: for readers these are public too."""
    texts = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))]
    code = [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, flags=re.S)]
    code += [script.read_text(encoding="utf-8") for script in sorted((ROOT / "examples").rglob("*.py"))]
    for node in (one for part in code for one in ast.walk(ast.parse(part))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fedbilevel"):
            module = importlib.import_module(str(node.module))
            yield from ((node.module, name.name) for name in node.names if callable(getattr(module, name.name, None)))


def sections(text):
    """What stands below ``Args:`` and ``Attributes:``, by the names explained there."""
    found = re.findall(r"^ *(?:Args|Attributes):\n((?:\n|(?: {4}| {8}).*\n?)+)", text, flags=re.M)
    heads = [head for part in found for head in re.findall(r"^ {4}([*\w][\w, *]*):", part, flags=re.M)]
    return {name.strip(" *") for head in heads for name in head.split(",")}


@pytest.mark.parametrize(("home", "name"), NAMES, ids=[".".join(one) for one in NAMES])
def test_docstring_names_every_parameter(home, name):
    value = getattr(HOMES[home][0], name)
    text = inspect.getdoc(value) or ""
    assert text, f"{home}.{name} has no docstring"
    if inspect.isclass(value) and (issubclass(value, BaseException) or getattr(value, "_is_protocol", False)):
        return
    parameters = {one for one in inspect.signature(value).parameters if one not in ("self", "args", "kwargs", "values")}
    assert parameters <= sections(text), f"{home}.{name} does not explain {sorted(parameters - sections(text))}"


def test_names_that_pages_import_explain_their_parameters():
    found = sorted(set(imported()))
    assert len(found) > 40
    for module, name in found:
        value = getattr(importlib.import_module(module), name)
        text = inspect.getdoc(value) or ""
        assert text, f"{module}.{name} has no docstring"
        if name in PLAIN or not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        wanted = {one for one in inspect.signature(value).parameters if one not in ("self", "args", "kwargs", "values")}
        assert wanted <= sections(text), f"{module}.{name} does not explain {sorted(wanted - sections(text))}"


def test_the_reference_shows_every_public_name():
    shown = []
    for page in PAGES:
        for path in re.findall(r"^::: ([\w.]+)", page.read_text(encoding="utf-8"), flags=re.M):
            module, _, name = path.rpartition(".")
            shown.append(getattr(importlib.import_module(module), name))
    missing = [
        f"{home}.{name}"
        for home, (module, names) in HOMES.items()
        for name in names
        if not any(getattr(module, name) is one for one in shown) and name not in ("__version__", "TUNED")
    ]
    assert missing == []


def test_every_public_name_has_an_example():
    """Where its docstring has none, a block of code on a page of the reference does; test_docs.py runs both."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.S))
    lacking = [
        f"{home}.{name}"
        for home, name in NAMES
        if ">>>" not in (inspect.getdoc(getattr(HOMES[home][0], name)) or "") and not re.search(rf"\b{name}\b", code)
    ]
    assert lacking == []


def raises_itself(value):
    """Whether its own code has a `raise`: a function's, or what a class does when it is made."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body
    making = [one for one in tree.body if getattr(one, "name", "") in ("__init__", "__post_init__", "fit")]
    return any(
        isinstance(node, ast.Raise)
        for part in (making if isinstance(tree, ast.ClassDef) else [tree])
        for node in ast.walk(part)
    )


@pytest.mark.parametrize(("home", "name"), NAMES, ids=[".".join(one) for one in NAMES])
def test_docstring_says_what_comes_back_and_what_goes_wrong(home, name):
    value = getattr(HOMES[home][0], name)
    text = inspect.getdoc(value) or ""
    if inspect.isfunction(value):
        assert "Returns:" in text, f"{home}.{name} does not say what it returns"
    if not (inspect.isclass(value) and issubclass(value, BaseException)) and raises_itself(value):
        assert "Raises:" in text, f"{home}.{name} does not say what it raises"
