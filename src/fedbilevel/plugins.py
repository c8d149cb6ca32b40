"""Bilevel methods of other packages, found through their entry points.

A package names its methods in its own ``pyproject.toml``:

    [project.entry-points."fedbilevel.algorithms"]
    mymethod = "mypackage.mymethod:mymethod"

Each is a function decorated with `fedbilevel.algorithms.arguments.bilevel`.  Once the package is installed, the method stands
among those of `bench` and, with a local lower level, among those of `fit`, `table1` and the estimator.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fedbilevel.plan import Algorithm

GROUP = "fedbilevel.algorithms"
Factory = Callable[..., Algorithm]


@cache
def plugins(lower_level: str | None = None) -> dict[str, Factory]:
    """Methods of installed packages by name.  One that cannot be used is left out, with a warning.

    Args:
        lower_level: "local" or "global": only methods for that lower level; None: all.

    Returns:
        The functions that make an `Algorithm`, by the name of their entry point.

    Examples:
        >>> isinstance(plugins("local"), dict)
        True
    """
    found: dict[str, Factory] = {}
    for entry in sorted(entry_points(group=GROUP)):
        try:
            factory = entry.load()
        except Exception as error:
            warnings.warn(f"The method {entry.name!r} ({entry.value}) cannot be loaded: {error}", stacklevel=2)
            continue
        if getattr(factory, "lower_level", None) not in ("local", "global"):
            reason = "it is not decorated with fedbilevel.algorithms.arguments.bilevel"
            warnings.warn(f"The method {entry.name!r} ({entry.value}) is left out: {reason}.", stacklevel=2)
        elif lower_level in (None, factory.lower_level):
            found[entry.name] = factory
    return found


def suited(factory: Factory, values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that the method has an argument for.

    Args:
        factory: The function that makes the method.
        values: Arguments by name.

    Returns:
        A part of ``values``.

    Examples:
        >>> import fedbilevel as fb
        >>> suited(fb.fedbio, {"inner_step": 0.1, "penalty": 5.0})
        {'inner_step': 0.1}
    """
    names = inspect.signature(factory).parameters
    return {name: value for name, value in values.items() if name in names}
