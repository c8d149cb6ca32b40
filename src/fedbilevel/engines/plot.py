"""Curves of runs, side by side, through matplotlib (the ``report`` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedbilevel.hints import hint

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from fedbilevel.engines.result import Result
    from fedbilevel.engines.sweep import Sweep


def check_matplotlib() -> None:
    """Refuse before anything is computed for a figure."""
    if find_spec("matplotlib") is None:
        raise ImportError('Figures need matplotlib: install it with `pip install "fedbilevel[report]"`.')


def plot(
    *runs: Result | Sweep,
    column: str = "objective",
    against: str = "round",
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a column of the histories of ``runs`` against another; seeds of a sweep share a colour.

    Args:
        runs: results of `simulate` or `sweep`.
        column: what is drawn: any column of the histories.  On a logarithmic scale where all of it is above 0 and it spans two
            powers of ten.
        against: what it is drawn against, such as "round", "bytes_up" or "seconds".
        labels: a name for each run; "run 1", "run 2" and so on if not given.
        ax: where to draw; a figure of its own if not given.

    Returns:
        The axes, to be changed or saved: ``fb.plot(a, b).figure.savefig("both.png")``.

    Raises:
        ValueError: A history lacks the column or recorded nothing, or there are not as many labels as runs.
        TypeError: There is no run.
    """
    check_matplotlib()
    if not runs:
        raise TypeError("plot needs a run: fb.plot(result).")
    if labels is not None and len(labels) != len(runs):
        raise ValueError(f"labels names {len(labels)} runs, but there are {len(runs)}.")
    names = labels or ([""] if len(runs) == 1 else [f"run {number}" for number in range(1, len(runs) + 1)])
    curves = [curve for run, name in zip(runs, names, strict=True) for curve in _curves(run, name)]
    for _, history in curves:
        for wanted in (column, against):
            if wanted not in history.columns:
                if not len(history.columns):
                    raise ValueError("A run recorded nothing: give record_every= a number.")
                raise ValueError(f"The history has no column {wanted!r}; {hint(wanted, history.columns)}")
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(6, 4), layout="constrained").subplots()
    looks: dict[str, Any] = {}
    for label, history in curves:
        shown = None if label in looks else label
        (line,) = ax.plot(history[against], history[column], color=looks.get(label), label=shown, linewidth=1.4)
        looks[label] = line.get_color()
    values = [float(value) for _, history in curves for value in history[column] if value == value]
    if values and min(values) > 0 and max(values) > 100 * min(values):
        ax.set_yscale("log")
    ax.set(xlabel=against.replace("_", " "), ylabel=column.replace("_", " "))
    if len(looks) > 1:
        ax.legend(frameon=False)
    return ax


def _curves(run: Any, name: str) -> list[tuple[str, pd.DataFrame]]:
    if not hasattr(run, "results"):
        if not hasattr(run, "history"):
            raise TypeError(f"plot takes results of simulate and sweep, not {type(run).__name__}.")
        return [(name, run.history)]
    swept = [column for column in run.values if run.table[column].nunique() > 1]
    settings = run.table[swept].to_dict("records")
    return [
        (", ".join(filter(None, [name, *(f"{key}={value:g}" for key, value in setting.items())])), result.history)
        for result, setting in zip(run.results, settings, strict=True)
    ]
