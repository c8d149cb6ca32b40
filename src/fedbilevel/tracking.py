"""Histories in an experiment tracker while a run goes on.  MLflow is an extra; nothing else in the package knows of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedbilevel.engines.result import Progress, ProgressCallback


def mlflow_callback(columns: Sequence[str] | None = None, prefix: str = "", client: Any = None) -> ProgressCallback:
    """A ``progress`` function for `simulate` that logs every recorded row of the history to the active MLflow run.

    Args:
        columns: Columns of the history to log, such as ``["objective", "bytes_up"]``.  None logs all but the round.
        prefix: Put before every name, for several runs in one MLflow run: ``"client-a/"``.
        client: The module to log with.  None imports ``mlflow``.

    Returns:
        A function of a `Progress`.  A column becomes a metric, the round its step.  Values that are not finite are left out.

    Raises:
        ImportError: MLflow is not installed.

    Examples:
        >>> from types import SimpleNamespace
        >>> from fedbilevel.engines.result import Progress
        >>> logged = []
        >>> tracker = SimpleNamespace(log_metrics=lambda metrics, step: logged.append((step, metrics)))
        >>> told = mlflow_callback(["objective"], client=tracker)
        >>> told(Progress(2, 10, 0.1, {}, [{"round": 1, "objective": 0.5}, {"round": 2, "objective": 0.25}]))
        >>> logged
        [(1, {'objective': 0.5}), (2, {'objective': 0.25})]
    """
    if client is None:
        try:
            import mlflow
        except ImportError:
            raise ImportError("mlflow_callback needs MLflow: pip install 'fedbilevel[mlflow]'.") from None
        client = mlflow

    def told(progress: Progress) -> None:
        for row in progress.rows:
            wanted = [name for name in row if name != "round"] if columns is None else columns
            if missing := [name for name in wanted if name not in row]:
                raise ValueError(f"columns: the history has no {missing[0]!r}; it has {', '.join(row)}.")
            metrics = {f"{prefix}{name}": float(row[name]) for name in wanted if math.isfinite(row[name])}
            client.log_metrics(metrics, step=int(row["round"]))

    return told
