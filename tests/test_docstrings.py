"""Every public name has a docstring in one style, which names every parameter it takes."""

from __future__ import annotations

import inspect
import re

import pytest

import fedbilevel
from fedbilevel import datasets, fairness, tasks, tracking

HOMES = {
    "fb": (fedbilevel, fedbilevel.__all__),
    "fairness": (fairness, fairness.__all__),
    "datasets": (datasets, datasets.__all__),
    "tasks": (tasks, tasks.__all__),
    "tracking": (tracking, ["mlflow_callback"]),
}
NAMES = [
    (home, name)
    for home, (module, names) in HOMES.items()
    for name in names
    if callable(getattr(module, name)) and not name.startswith("_")
]


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
    if inspect.isclass(value) and issubclass(value, BaseException):
        return
    parameters = {one for one in inspect.signature(value).parameters if one not in ("self", "args", "kwargs", "values")}
    assert parameters <= sections(text), f"{home}.{name} does not explain {sorted(parameters - sections(text))}"
