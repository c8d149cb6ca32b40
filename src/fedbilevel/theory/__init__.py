"""The paper's analysis, usable: constants, step sizes for which the theorems hold, bounds, and lemmas along runs.

>>> from fedbilevel import theory
>>> constants = theory.Constants(L=2.0, mu=0.5, M=1.0, C_gxy=1.0, sigma=0.1)
>>> theory.fedbio_steps(constants, local_steps=5, rounds=1000).holds
True
"""

from fedbilevel.theory.bounds import Bound, fedbio_bound, fedbioacc_bound
from fedbilevel.theory.constants import Constants, InnerRates
from fedbilevel.theory.estimate import (
    Region,
    Reweighting,
    covering_region,
    logistic_constants,
    quadratic_constants,
    sampled_constants,
    softmax_weights,
)
from fedbilevel.theory.lemmas import (
    Evaluation,
    Oracles,
    Path,
    ProblemOracles,
    acc_state,
    fedbio_lemmas,
    fedbioacc_lemmas,
    path_of,
    potential_along,
)
from fedbilevel.theory.steps import Check, FedBiOAccSteps, FedBiOSteps, fedbio_steps, fedbioacc_steps

__all__ = [
    "Bound",
    "Check",
    "Constants",
    "Evaluation",
    "FedBiOAccSteps",
    "FedBiOSteps",
    "InnerRates",
    "Oracles",
    "Path",
    "ProblemOracles",
    "Region",
    "Reweighting",
    "acc_state",
    "covering_region",
    "fedbio_bound",
    "fedbio_lemmas",
    "fedbio_steps",
    "fedbioacc_bound",
    "fedbioacc_lemmas",
    "fedbioacc_steps",
    "logistic_constants",
    "path_of",
    "potential_along",
    "quadratic_constants",
    "sampled_constants",
    "softmax_weights",
]
