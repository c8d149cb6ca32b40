"""A raw table, and one small fit on it that several tests look at."""

import numpy as np
import pandas as pd
import pytest

from fedbilevel.fairness import FairFederatedClassifier

QUICK = {"steps": 60, "weight_steps": 20, "batch_size": 32, "history_rows": 0, "random_state": 0}


def table(n=400, seed=0):
    """A raw table: numbers and words, two sites, two groups.  One has fewer positives, and a column tells the groups apart."""
    rng = np.random.default_rng(seed)
    sex = rng.choice(["female", "male"], n)
    job = rng.choice(["cook", "judge", "none"], n)
    age = rng.normal(40, 10, n)
    drive = 0.08 * (age - 40) + (job == "judge") + 1.2 * (sex == "male") - 1.2 + 0.5 * rng.normal(size=n)
    size = 170 + 8 * (sex == "male") + 4 * rng.normal(size=n)
    X = pd.DataFrame({"age": age, "job": pd.Categorical(job), "old": age > 50, "size": size})
    return X, np.where(drive > 0, "rich", "poor"), sex, rng.choice(["Bern", "Lyon"], n)


@pytest.fixture(scope="session")
def raw():
    return table()


@pytest.fixture(scope="session")
def fitted(raw):
    X, y, sex, site = raw
    clf = FairFederatedClassifier(**{**QUICK, "history_rows": 5, "steps": 300})
    return clf.fit(X, y, sensitive_features=sex, clients=site)
