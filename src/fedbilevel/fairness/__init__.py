"""Group-fair classification: metrics and their uncertainty, formulations, methods, and a scikit-learn estimator.

Metrics load at once; what needs JAX or scikit-learn (the estimator, formulations, methods, baselines) on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbilevel.fairness.intervals import (
    Interval,
    across_splits,
    bootstrap_difference,
    bootstrap_interval,
    comparison_table,
    paired_difference,
)
from fedbilevel.fairness.metrics import (
    Disparity,
    GroupLeftOut,
    accuracy,
    auc,
    balanced_accuracy,
    demographic_parity_difference,
    disparities,
    disparity,
    equal_opportunity_difference,
    equalized_odds_difference,
    group_table,
)

if TYPE_CHECKING:
    from fedbilevel.fairness.estimator import FairFederatedClassifier, FairFederatedRegressor
    from fedbilevel.fairness.formulation import Formulation, fair_problem
    from fedbilevel.fairness.methods import Recipe
    from fedbilevel.fairness.models import Model

_LATER = {
    "FairFederatedClassifier": "estimator",
    "FairFederatedRegressor": "estimator",
    "Formulation": "formulation",
    "Model": "models",
    "Recipe": "methods",
    "fair_problem": "formulation",
}

__all__ = [
    "Disparity",
    "FairFederatedClassifier",
    "FairFederatedRegressor",
    "Formulation",
    "GroupLeftOut",
    "Interval",
    "Model",
    "Recipe",
    "accuracy",
    "across_splits",
    "auc",
    "balanced_accuracy",
    "bootstrap_difference",
    "bootstrap_interval",
    "comparison_table",
    "demographic_parity_difference",
    "disparities",
    "disparity",
    "equal_opportunity_difference",
    "equalized_odds_difference",
    "fair_problem",
    "group_table",
    "paired_difference",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        value = getattr(import_module(f"fedbilevel.fairness.{_LATER[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fedbilevel.fairness' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
