"""All implementations must compute the same thing before any of them is timed.

Two kinds of comparison, both algorithms, float64 to 1e-10 and float32 to 1e-4 of the largest number: whole local sets
(nothing random), and minibatches, where everybody is given the row numbers that `fedbilevel` draws from its seed.
Run as a program it prints what was compared and fails with exit code 1 at the first disagreement. Without PyTorch the
others are compared with the C program.
"""

import sys
from importlib.util import find_spec
from typing import Any

import fused
import jax
import numpy as np
import ours
from task import Client, Settings, adult_like, in_double

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
STEPS = 20
# Larger steps and constants than the timed ones: every term must be visible after a few steps.
LIVELY = {"inner_step": 1.0, "outer_step": 1.0, "terms": 4, "delta": 0.5, "c_inner": 0.5, "c_outer": 2.0}


def in_torch(clients: list[Client], settings: Settings, indices: Any) -> dict[str, Any]:
    import torch_eager
    import torch_processes

    return {
        "torch eager": torch_eager.run(clients, settings, STEPS, indices),
        "torch processes": torch_processes.run(clients, settings, STEPS, indices),
    }


def compare(clients: list[Client], settings: Settings) -> dict[str, float]:
    """Return each implementation's largest distance from the first, relative to the largest number there."""
    whole = settings.batch_size is None
    indices = None if whole else ours.drawn_indices(clients, settings, STEPS)
    outcomes: dict[str, Any] = {
        **(in_torch(clients, settings, indices) if find_spec("torch") else {}),
        "C, portable": fused.run(clients, settings, STEPS, indices, target="portable"),
        "C, native": fused.run(clients, settings, STEPS, indices, target="native"),
        "fedbilevel, autodiff": ours.run(clients, settings, STEPS, path="autodiff"),
    }
    if not whole:  # on whole sets a declared linear problem takes the general path anyway
        outcomes["fedbilevel, fused"] = ours.run(clients, settings, STEPS, path="fused")
    distances = {}
    reference = outcomes.pop(next(iter(outcomes)))
    for name, outcome in outcomes.items():
        pairs = [(outcome.outer, reference.outer), (outcome.inner, reference.inner)]
        distances[name] = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    return distances


def main() -> int:
    jax.config.update("jax_enable_x64", True)
    if not find_spec("torch"):
        print("PyTorch is not installed: the other implementations are compared with the C program.", flush=True)
    single = adult_like(rows=301, validation=75)  # 301: no multiple of any block size
    for dtype, clients in (("float64", in_double(single)), ("float32", single)):
        for algorithm in ("fedbio", "fedbioacc"):
            for batch_size in (None, 16):
                settings = Settings(algorithm=algorithm, batch_size=batch_size, **LIVELY)
                for name, distance in compare(clients, settings).items():
                    agrees = distance <= TOLERANCE[dtype]
                    batch = "whole sets" if batch_size is None else f"batches of {batch_size}"
                    verdict = "agrees" if agrees else f"DIFFERS by more than {TOLERANCE[dtype]:.0e}"
                    print(f"{dtype} {algorithm:9} {batch:13} {name:20} {distance:.1e} {verdict}", flush=True)
                    if not agrees:
                        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
