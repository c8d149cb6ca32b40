"""What a run gives back, and how a run can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd

from fedbilevel.calculus import Tree


@dataclass(frozen=True)
class Result:
    """``outer``: the answer; ``inner``: every client's inner variable (leaves ``[clients, ...]``, None for FedAvg);
    ``history``: one row a recorded round; ``server`` and ``local``: the full states, to go on from."""

    outer: Tree
    inner: Tree
    history: pd.DataFrame
    rounds: int
    seed: int
    hyper: dict[str, float] = field(default_factory=dict)
    server: Any = None
    local: Tree = None
    diverged: str | None = None


class Diverged(ArithmeticError):
    """A run met a NaN or an infinity.  ``result`` holds what was recorded up to there."""

    def __init__(self, sentence: str, result: Result) -> None:
        super().__init__(sentence)
        self.result = result


class Interrupted(KeyboardInterrupt):
    """The user stopped a run between two rounds; ``result`` is the state it had reached (saved, if it was being saved)."""

    def __init__(self, sentence: str, result: Result) -> None:
        super().__init__(sentence)
        self.result = result


class Progress(NamedTuple):
    """What a progress callback is told: rounds done of all, seconds so far, and the latest row of history."""

    done: int
    rounds: int
    seconds: float
    row: dict[str, Any]


ProgressCallback = Callable[[Progress], None]
