"""What a run gives back, and how a run can fail."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from fedbilevel.calculus import Tree
from fedbilevel.engines.plot import plot
from fedbilevel.problem import shapes_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LISTED = 10
"""Rows of a table that a notebook shows."""


class Later(NamedTuple):
    """What a `Result` makes when it is first looked at."""

    make: Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """``outer``: the answer; ``inner``: every client's inner variable (leaves ``[clients, ...]``, None for FedAvg);
    ``history``: one row for each recorded round; ``server`` and ``local``: the full states, to continue from.

    Attributes:
        outer: The answer.
        inner: Every client's inner variable, leaves ``[clients, ...]``; None for methods of one level.
        history: A pandas table, one row for each recorded round.
        rounds: Rounds done.
        seed: The seed of the run.
        hyper: The float hyper-parameters by name.
        server: The server's state at the end.
        local: The clients' states at the end, leaves ``[clients, ...]``.
        diverged: Why the run ended early (in a `Sweep`); None if it did not.
    """

    outer: Tree
    inner: Tree
    history: pd.DataFrame
    rounds: int
    seed: int
    hyper: dict[str, float] = field(default_factory=dict)
    server: Any = None
    local: Tree = None
    diverged: str | None = None

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if isinstance(value, Later):
            value = value.make()
            object.__setattr__(self, name, value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in vars(self)}

    def __repr__(self) -> str:
        told = [f"{self.rounds} rounds, seed {self.seed}"]
        if len(self.history):
            last = self.history.iloc[-1]
            told.append(f"objective {last['objective']:.6g}")
            told.append(f"{_size(last['bytes_up'])} up, {_size(last['bytes_down'])} down")
        told.append(f"outer {shapes_in(self.outer)}")
        return f"Result({'; '.join(told)}{'; diverged' if self.diverged else ''})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>" + table_html(self.history)

    def plot(self, column: str = "objective", against: str = "round", ax: Axes | None = None) -> Axes:
        """A column of the history as a curve; see `fedbilevel.plot`."""
        return plot(self, column=column, against=against, ax=ax)


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
    """What a progress callback receives.

    Attributes:
        done: Rounds done; of a `sweep`, runs done.
        rounds: Rounds in all; of a `sweep`, runs in all.
        seconds: Wall time so far; NaN in a `sweep`.
        row: The latest row of the history, empty where nothing is recorded.
        rows: All rows of the history that were recorded since the last call, in order.
    """

    done: int
    rounds: int
    seconds: float
    row: dict[str, Any]
    rows: Sequence[dict[str, Any]] = ()


ProgressCallback = Callable[[Progress], None]


def table_html(table: pd.DataFrame) -> str:
    """A table for a notebook, long ones cut in the middle."""
    return str(table.to_html(max_rows=LISTED, border=0, index=False)) if len(table.columns) else ""


def _size(count: float) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} kB" if count >= 1e3 else f"{count:.0f} B"
