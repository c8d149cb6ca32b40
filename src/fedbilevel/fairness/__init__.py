"""Group-fair classification: metrics and their uncertainty."""

from fedbilevel.fairness.bootstrap import bootstrap_difference, bootstrap_interval
from fedbilevel.fairness.intervals import Interval, across_splits, comparison_table, paired_difference
from fedbilevel.fairness.metrics import (
    Disparity,
    GroupLeftOut,
    accuracy,
    auc,
    balanced_accuracy,
    demographic_parity_difference,
    disparity,
    equal_opportunity_difference,
    equalized_odds_difference,
    group_table,
)

__all__ = [
    "Disparity",
    "GroupLeftOut",
    "Interval",
    "accuracy",
    "across_splits",
    "auc",
    "balanced_accuracy",
    "bootstrap_difference",
    "bootstrap_interval",
    "comparison_table",
    "demographic_parity_difference",
    "disparity",
    "equal_opportunity_difference",
    "equalized_odds_difference",
    "group_table",
    "paired_difference",
]
