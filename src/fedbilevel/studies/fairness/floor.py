"""How small a gap can be measured at all: the gap of a model that treats all groups alike, on parts of these sizes.

If every group has the true rate q, a part with n_a positives of group a still shows a largest minus smallest rate of

    E [ max_a B_a / n_a  -  min_a B_a / n_a ],    B_a ~ Binomial(n_a, q),

which for two groups is about sqrt(2/pi) sqrt(q (1 - q) (1/n_0 + 1/n_1)): the floor of a model whose fairness is given.
A model whose fairness was *learned* has rates that are equal on its training rows at best.  Those are a sample, too, so its
true rates differ by the error of that sample, and its floor adds the variance of the training part to that of the test part.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedbilevel.datasets import partition
from fedbilevel.studies.fairness.data import CASES, SET_ASIDE, TEST_SHARE, table
from fedbilevel.tables.columns import encode_groups

DRAWS = 20_000
RATES = {"adult-sex": 0.58, "adult-race": 0.58, "credit-status": 0.55}
"""FedAvg's true-positive rate on the training rows of split 0, rounded."""


def expected_gap(positives: np.ndarray, rate: float, learned_on: np.ndarray | None = None, seed: int = 0) -> float:
    """The mean gap of a fair model on groups with these numbers of positives; ``learned_on``: those of its training part.

    Groups without positives are left out.  Both parts are drawn from the same binomials; the training part's error has the
    opposite sign, which does not matter for the mean.
    """
    counts = np.asarray(positives)
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must lie between 0 and 1, not {rate}.")
    kept = counts > 0
    rng = np.random.default_rng(seed)
    rates = rng.binomial(counts[kept], rate, (DRAWS, int(kept.sum()))) / counts[kept]
    if learned_on is not None:
        others = np.maximum(np.asarray(learned_on)[kept], 1)
        rates = rates + rng.binomial(others, rate, rates.shape) / others
    return float(np.mean(rates.max(axis=1) - rates.min(axis=1)))


def floors(rows: pd.DataFrame, splits: int = 20) -> pd.DataFrame:
    """Per case: positives of the smallest and largest group in a test part, and both floors, at FedAvg's true-positive rate.

    ``rows``: those of the experiment; only which cases occur is read.
    """
    out = []
    for case in dict.fromkeys(rows["case"]):
        if case not in CASES:
            continue
        data = table(case)
        labels = data.y.to_numpy()
        found = []
        for number in range(splits):
            train, test = partition.train_test_split(data.groups, test_share=TEST_SHARE, seed=number)
            codes, names = encode_groups(data.groups.iloc[train])
            test_codes, _ = encode_groups(data.groups.iloc[test], known=names)
            inside = np.bincount(codes[labels[train] == 1], minlength=len(names))
            outside = np.bincount(test_codes[labels[test] == 1], minlength=len(names))
            used = np.round((1 - SET_ASIDE) * inside).astype(int)
            found.append((outside, expected_gap(outside, RATES[case]), expected_gap(outside, RATES[case], used)))
        counts = np.array([positives for positives, _, _ in found])
        out.append(
            {
                "case": case,
                "groups": counts.shape[1],
                "smallest": float(counts.min(axis=1).mean()),
                "largest": float(counts.max(axis=1).mean()),
                "rate": RATES[case],
                "fair": float(np.mean([floor for _, floor, _ in found])),
                "fair_in_training": float(np.mean([floor for _, _, floor in found])),
            }
        )
    return pd.DataFrame(out)
