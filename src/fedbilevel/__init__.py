"""Federated bilevel optimization.

    minimise over x   1/M sum_m f_m(x, y_m(x))     subject to     y_m(x) = argmin over y of g_m(x, y)

over clients that keep their data, their y and their momentum to themselves.  Names load on first use, so that the command
line starts without JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbilevel._version import __version__

if TYPE_CHECKING:
    from fedbilevel.algorithms.afl import afl as afl
    from fedbilevel.algorithms.aggitd import aggitd as aggitd
    from fedbilevel.algorithms.bome import bome as bome
    from fedbilevel.algorithms.f2sa import f2sa as f2sa
    from fedbilevel.algorithms.fedavg import fedavg as fedavg
    from fedbilevel.algorithms.fedbio import fedbio as fedbio
    from fedbilevel.algorithms.fedbio_global import fedbio_global as fedbio_global
    from fedbilevel.algorithms.fedbioacc import TUNED as TUNED
    from fedbilevel.algorithms.fedbioacc import fedbioacc as fedbioacc
    from fedbilevel.algorithms.fedbioacc_global import fedbioacc_global as fedbioacc_global
    from fedbilevel.algorithms.fedmbo import fedmbo as fedmbo
    from fedbilevel.algorithms.fedmsa import fedmsa as fedmsa
    from fedbilevel.algorithms.fednest import fednest as fednest
    from fedbilevel.algorithms.lbfgs import lbfgs as lbfgs
    from fedbilevel.algorithms.lfednest import lfednest as lfednest
    from fedbilevel.algorithms.meha import meha as meha
    from fedbilevel.algorithms.pbgd import pbgd as pbgd
    from fedbilevel.algorithms.qfedavg import qfedavg as qfedavg
    from fedbilevel.algorithms.simfbo import shrofbo as shrofbo
    from fedbilevel.algorithms.simfbo import simfbo as simfbo
    from fedbilevel.engines.checkpoint import CheckpointError as CheckpointError
    from fedbilevel.engines.lower_level import LowerLevel as LowerLevel
    from fedbilevel.engines.lower_level import lower_level as lower_level
    from fedbilevel.engines.plot import plot as plot
    from fedbilevel.engines.result import Diverged as Diverged
    from fedbilevel.engines.result import Interrupted as Interrupted
    from fedbilevel.engines.result import Progress as Progress
    from fedbilevel.engines.result import Result as Result
    from fedbilevel.engines.simulate import simulate as simulate
    from fedbilevel.engines.simulate import trace as trace
    from fedbilevel.engines.store import ClientStore as ClientStore
    from fedbilevel.engines.sweep import Sweep as Sweep
    from fedbilevel.engines.sweep import sweep as sweep
    from fedbilevel.hypergradients.conjugate_gradient import conjugate_gradient as conjugate_gradient
    from fedbilevel.hypergradients.exact import exact as exact
    from fedbilevel.hypergradients.neumann import neumann as neumann
    from fedbilevel.linear import LinearInner as LinearInner
    from fedbilevel.plan import Algorithm as Algorithm
    from fedbilevel.plan import Phase as Phase
    from fedbilevel.plan import Relay as Relay
    from fedbilevel.plan import Repeat as Repeat
    from fedbilevel.plan import ServerStep as ServerStep
    from fedbilevel.problem import BilevelProblem as BilevelProblem
    from fedbilevel.problem import ClientData as ClientData
    from fedbilevel.problem import linear_problem as linear_problem

_ALGORITHMS = (
    "afl aggitd bome f2sa fedavg fedbio fedbio_global fedbioacc fedbioacc_global fedmbo fedmsa fednest lbfgs lfednest "
    "meha pbgd qfedavg simfbo"
)
_HOMES = {
    **{f"algorithms.{name}": name for name in _ALGORITHMS.split()},
    **{f"hypergradients.{name}": name for name in ("conjugate_gradient", "exact", "neumann")},
    "algorithms.fedbioacc": "TUNED fedbioacc",
    "algorithms.simfbo": "shrofbo simfbo",
    "engines.checkpoint": "CheckpointError",
    "engines.lower_level": "LowerLevel lower_level",
    "engines.plot": "plot",
    "engines.result": "Diverged Interrupted Progress Result",
    "engines.simulate": "simulate trace",
    "engines.store": "ClientStore",
    "engines.sweep": "Sweep sweep",
    "linear": "LinearInner",
    "plan": "Algorithm Phase Relay Repeat ServerStep",
    "problem": "BilevelProblem ClientData linear_problem",
}
_HOME = {name: f"fedbilevel.{module}" for module, names in _HOMES.items() for name in names.split()}
"""Each name by the module that defines it: several functions are called like their module."""

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    from fedbilevel.hints import hint

    raise AttributeError(f"module 'fedbilevel' has no attribute {name!r}; {hint(name, _HOME)}")


def __dir__() -> list[str]:
    return sorted(__all__)
