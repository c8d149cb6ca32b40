"""Tuning across sites: what a grid search would look for, as the outer variable of one bilevel run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbilevel.tuning.estimator import TunedFederatedClassifier, TunedFederatedRegressor

__all__ = ["TunedFederatedClassifier", "TunedFederatedRegressor"]


def __getattr__(name: str) -> Any:
    """The estimators bring scikit-learn along, which sites do not need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedbilevel.tuning import estimator

    return getattr(estimator, name)
