"""The options of a simulation: how to run, apart from what; and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedbilevel.engines.fleet import CHUNK
from fedbilevel.problem import ClientData


@dataclass(frozen=True)
class Options:
    """How to simulate, apart from what: shared by `simulate` and `sweep`, checked once."""

    weights: Any = "uniform"
    participation: float | int | None = None
    dropout: float = 0.0
    record_every: int | None = None
    diagnostics: str = "auto"
    client_chunk: int | None = CHUNK
    devices: Sequence[Any] | None = None


def client_weights(weights: Any, data: ClientData) -> np.ndarray:
    if isinstance(weights, str):
        if weights == "uniform":
            return np.ones(data.clients)
        if weights == "samples":
            return np.asarray(data.train_sizes, np.float64)
        raise ValueError(f"weights must be 'uniform', 'samples' or one number per client, not {weights!r}.")
    values = np.asarray(weights, np.float64)
    if values.shape != (data.clients,):
        raise ValueError(f"weights must have one number per client ({data.clients}), not shape {values.shape}.")
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() == 0:
        raise ValueError("weights must be finite, not negative, and not all zero.")
    return values


def cohort_size(participation: float | int | None, clients: int) -> int | None:
    if participation is None:
        return None
    if isinstance(participation, bool) or not isinstance(participation, int | float | np.number):
        raise TypeError(f"participation must be a fraction or a number of clients, not {participation!r}.")
    if isinstance(participation, float):
        if not 0 < participation <= 1:
            raise ValueError(f"participation as a fraction must lie in (0, 1], not {participation}.")
        count = max(1, round(participation * clients))
    else:
        count = int(participation)
        if not 1 <= count <= clients:
            raise ValueError(
                f"participation as a number must lie in 1..{clients} (the clients there are), not {count}."
            )
    return None if count == clients else count


def chance(dropout: float) -> float:
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a probability in [0, 1), not {dropout!r}.")
    return float(dropout)


def named_numbers(settings: Any) -> dict[str, Any]:
    """The float hyper-parameters by the names `sweep` takes."""
    leaves = jax.tree_util.tree_flatten_with_path(settings)[0]
    return {path_name(path): leaf for path, leaf in leaves if _is_number(leaf)}


def _is_number(leaf: Any) -> bool:
    """A scalar given as an array of NumPy's is a model to start from, not a hyper-parameter."""
    return np.ndim(leaf) == 0 and not isinstance(leaf, np.ndarray)


def path_name(path: tuple[Any, ...]) -> str:
    """Nested names joined by an underscore: ``hypergradient_step``."""
    return "_".join(str(getattr(entry, "name", getattr(entry, "key", entry))) for entry in path)
