"""Numbers that are refused with a sentence, and what a misspelled name was probably meant to be.

Nothing heavy is imported: the command line and the operator's processes start with this.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

NEAR = 0.6
"""Names that are less alike than this were not meant."""


def hint(name: Any, known: Iterable[Any], limit: int = 8) -> str:
    """The nearest of the ``known`` names as a question (several if they are equally near), or else what there is.

    >>> hint("fedbo", ["fedavg", "fedbio", "fedmbo"]), hint("?", ["a", "b"])
    ("did you mean 'fedbio' or 'fedmbo'?", "there are 'a', 'b'.")
    """
    names = [str(one) for one in known]
    likeness = [difflib.SequenceMatcher(None, str(name).casefold(), one.casefold()).ratio() for one in names]
    nearest = max(likeness, default=0.0)
    if nearest >= NEAR:
        near = [repr(one) for one, like in zip(names, likeness, strict=True) if like == nearest]
        return f"did you mean {' or '.join(near[:3])}?"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"there are {', '.join(map(repr, names[:limit]))}{more}." if names else "there are none."


def positive(name: str, value: Any) -> Any:
    """Refuse a step that is not a positive number; traced values pass, they were checked before tracing."""
    return _number(name, value, lambda number: number > 0, "a positive number")


def not_negative(name: str, value: Any) -> Any:
    """Like `positive`, with 0 allowed."""
    return _number(name, value, lambda number: number >= 0, "a number of at least 0")


def _number(name: str, value: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
    if any(kind.__name__ == "Tracer" for kind in type(value).__mro__):  # jax.core's, which is not imported for this
        return value
    number = isinstance(value, Real) or (hasattr(value, "dtype") and value.dtype.kind in "fiu")
    if isinstance(value, bool) or not number or getattr(value, "ndim", 0) != 0:
        raise TypeError(f"{name} must be a number, not {value!r}.")
    if not (math.isfinite(value) and fits(value)):
        raise ValueError(f"{name} must be {wanted}, not {value}.")
    return value


def whole_number(name: str, value: Any, least: int = 1, optional: bool = False) -> Any:
    if value is None and optional:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}.")
    return value
