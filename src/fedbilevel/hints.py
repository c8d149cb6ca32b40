"""What a misspelled name was probably meant to be: the end of a sentence that refuses it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
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
