"""What the parts of the rates experiment share: how much is run, with which settings, and on how many threads."""

from __future__ import annotations

from typing import Any, NamedTuple

import fedbilevel as fb

PRESETS: dict[str, dict[str, Any]] = {
    "tuned": dict(fb.TUNED),
    "paper": {
        "delta": 0.1,
        "u": 1.0,
        "sigma": 1.0,
        "c_inner": 1.0,
        "c_outer": 1.0,
        "inner_step": 1.0,
        "outer_step": 1.0,
    },
}
BATCH = 2
LOCAL_STEPS = 5
CLIENTS = 4
DELTA = 0.5  # practical FedBiO: eta = DELTA / sqrt(T) and inner step GAMMA
GAMMA = 0.5
WORKERS = 2


class Design(NamedTuple):
    """How much is run."""

    horizons: tuple[int, ...]
    instances: int
    seeds: int
    theory_seeds: int
    communication_steps: int
    local_steps: tuple[int, ...]
    replicas: int
    client_counts: tuple[int, ...]
    client_steps: int
