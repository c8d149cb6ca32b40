"""Engines: where an algorithm's plan runs."""

from fedbilevel.engines.checkpoint import CheckpointError
from fedbilevel.engines.result import Diverged, Interrupted, Progress, Result
from fedbilevel.engines.simulate import simulate
from fedbilevel.engines.sweep import Sweep, sweep
from fedbilevel.engines.trace import trace

__all__ = ["CheckpointError", "Diverged", "Interrupted", "Progress", "Result", "Sweep", "simulate", "sweep", "trace"]
