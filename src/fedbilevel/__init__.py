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
    from fedbilevel.algorithms.afl import afl
    from fedbilevel.algorithms.aggitd import aggitd
    from fedbilevel.algorithms.fedavg import fedavg
    from fedbilevel.algorithms.fedbio import fedbio
    from fedbilevel.algorithms.fedbio_global import fedbio_global
    from fedbilevel.algorithms.fedbioacc import TUNED, fedbioacc
    from fedbilevel.algorithms.fedbioacc_global import fedbioacc_global
    from fedbilevel.algorithms.fedmbo import fedmbo
    from fedbilevel.algorithms.fedmsa import fedmsa
    from fedbilevel.algorithms.fednest import fednest
    from fedbilevel.algorithms.lfednest import lfednest
    from fedbilevel.algorithms.qfedavg import qfedavg
    from fedbilevel.algorithms.simfbo import shrofbo, simfbo
    from fedbilevel.engines.checkpoint import CheckpointError
    from fedbilevel.engines.result import Diverged, Interrupted, Progress, Result
    from fedbilevel.engines.simulate import simulate, trace
    from fedbilevel.engines.sweep import Sweep, sweep
    from fedbilevel.hypergradients.conjugate_gradient import conjugate_gradient
    from fedbilevel.hypergradients.exact import exact
    from fedbilevel.hypergradients.neumann import neumann
    from fedbilevel.linear import LinearInner
    from fedbilevel.plan import Algorithm, Phase, Relay, Repeat, ServerStep
    from fedbilevel.problem import BilevelProblem, ClientData, linear_problem

# Each name by the module that defines it: several functions are called like their module.
_HOMES = {
    "fedbilevel.problem": ("BilevelProblem", "ClientData", "linear_problem"),
    "fedbilevel.linear": ("LinearInner",),
    "fedbilevel.plan": ("Algorithm", "Phase", "Relay", "Repeat", "ServerStep"),
    "fedbilevel.hypergradients.conjugate_gradient": ("conjugate_gradient",),
    "fedbilevel.hypergradients.exact": ("exact",),
    "fedbilevel.hypergradients.neumann": ("neumann",),
    "fedbilevel.algorithms.afl": ("afl",),
    "fedbilevel.algorithms.aggitd": ("aggitd",),
    "fedbilevel.algorithms.fedavg": ("fedavg",),
    "fedbilevel.algorithms.fedbio": ("fedbio",),
    "fedbilevel.algorithms.fedbio_global": ("fedbio_global",),
    "fedbilevel.algorithms.fedbioacc": ("TUNED", "fedbioacc"),
    "fedbilevel.algorithms.fedbioacc_global": ("fedbioacc_global",),
    "fedbilevel.algorithms.fedmbo": ("fedmbo",),
    "fedbilevel.algorithms.fedmsa": ("fedmsa",),
    "fedbilevel.algorithms.fednest": ("fednest",),
    "fedbilevel.algorithms.lfednest": ("lfednest",),
    "fedbilevel.algorithms.qfedavg": ("qfedavg",),
    "fedbilevel.algorithms.simfbo": ("shrofbo", "simfbo"),
    "fedbilevel.engines.checkpoint": ("CheckpointError",),
    "fedbilevel.engines.result": ("Diverged", "Interrupted", "Progress", "Result"),
    "fedbilevel.engines.simulate": ("simulate", "trace"),
    "fedbilevel.engines.sweep": ("Sweep", "sweep"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "TUNED",
    "Algorithm",
    "BilevelProblem",
    "CheckpointError",
    "ClientData",
    "Diverged",
    "Interrupted",
    "LinearInner",
    "Phase",
    "Progress",
    "Relay",
    "Repeat",
    "Result",
    "ServerStep",
    "Sweep",
    "__version__",
    "afl",
    "aggitd",
    "conjugate_gradient",
    "exact",
    "fedavg",
    "fedbio",
    "fedbio_global",
    "fedbioacc",
    "fedbioacc_global",
    "fedmbo",
    "fedmsa",
    "fednest",
    "lfednest",
    "linear_problem",
    "neumann",
    "qfedavg",
    "shrofbo",
    "simfbo",
    "simulate",
    "sweep",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fedbilevel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
