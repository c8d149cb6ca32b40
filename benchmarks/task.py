"""The task that every implementation in this folder solves: federated logistic regression with group weights.

Client m holds training rows with labels and groups and a group-balanced validation set. The outer variable x in R^K
gives the weights K * softmax(x) of the K groups, the inner variable y holds the coefficients of the client's model:

    inner loss  g(x, y) = mean_i weight(x)[group_i] * logistic(row_i . y, label_i) + ridge/2 * ||y||^2   (training)
    outer loss  f(x, y) = mean_i logistic(row_i . y, label_i)                                            (validation)

This file knows NumPy only, so that no implementation pays for the import of another one.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

GROUPS = 5

# Adult after one-hot encoding: eight categorical columns with these many values, and five numbers: 107 columns.
CATEGORIES = (9, 16, 7, 15, 6, 5, 2, 42)
NUMBERS = 5
GROUP_COLUMN = 5  # the categorical column (race) whose five values are the groups
GROUP_SHARES = (0.854, 0.096, 0.031, 0.011, 0.008)
POSITIVE_SHARE = 0.24

ADULT_CLIENTS = 3
ADULT_ROWS = 11_333  # of each client: 33,999 in all, Adult's 32,561 rows and a little more
ADULT_VALIDATION = 335  # of each client: 67 of each group


class Client(NamedTuple):
    """One client's share of the data."""

    rows: NDArray[np.floating]  # [samples, features]
    labels: NDArray[np.floating]  # [samples], 0 or 1
    groups: NDArray[np.int32]  # [samples], 0 .. GROUPS-1
    val_rows: NDArray[np.floating]
    val_labels: NDArray[np.floating]


@dataclass(frozen=True)
class Settings:
    """What is run. The constants of FedBiOAcc are the paper's, with sigma = 1 where the paper gives none."""

    algorithm: Literal["fedbio", "fedbioacc"] = "fedbioacc"
    terms: int = 10  # Q: Hessian factors of the Neumann series
    neumann_step: float = 0.5
    inner_step: float = 0.1
    outer_step: float = 0.1
    local_steps: int = 5  # I
    batch_size: int | None = 128  # None: the whole local set
    ridge: float = 0.01
    delta: float = 0.1
    u: float = 1.0
    sigma: float = 1.0
    c_inner: float = 1.0
    c_outer: float = 1.0

    def alpha(self, step: int) -> float:
        """Return alpha_t, t = 1, 2, ... (Alg. 3, line 14); FedBiO has none and uses its steps as they are."""
        return self.delta / (self.u + self.sigma**2 * step) ** (1 / 3) if self.algorithm == "fedbioacc" else 1.0

    @property
    def slots(self) -> int:
        """Minibatches of one client in one step: inner gradient, validation, cross derivative, Q Hessians."""
        return self.terms + 3


def adult_like(
    seed: int = 0, clients: int = ADULT_CLIENTS, rows: int = ADULT_ROWS, validation: int = ADULT_VALIDATION
) -> list[Client]:
    """Make Adult-like tables: skewed one-hot columns, standardised numbers, labels from a logistic model."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=sum(CATEGORIES) + NUMBERS)
    group_truth = 0.5 * rng.normal(size=(GROUPS, truth.size))  # the groups disagree, or weights would not matter
    shares = [rng.dirichlet(np.linspace(3.0, 0.3, values)) for values in CATEGORIES]
    shares[GROUP_COLUMN] = np.asarray(GROUP_SHARES)

    def table(count: int, groups: NDArray[np.intp]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        columns = [rng.choice(values, size=count, p=share) for values, share in zip(CATEGORIES, shares, strict=True)]
        columns[GROUP_COLUMN] = groups
        one_hot = [np.eye(values)[column] for values, column in zip(CATEGORIES, columns, strict=True)]
        features = np.hstack([*one_hot, rng.normal(size=(count, NUMBERS))])
        logits = features @ truth + np.einsum("ij,ij->i", features, group_truth[groups])
        logits -= np.quantile(logits, 1 - POSITIVE_SHARE)
        labels = rng.random(count) < 1 / (1 + np.exp(-2 * logits))
        return features.astype(np.float32), labels.astype(np.float32)

    made = []
    for _ in range(clients):
        groups = rng.choice(GROUPS, size=rows, p=GROUP_SHARES)
        val_groups = np.resize(np.arange(GROUPS), validation)
        made.append(Client(*table(rows, groups), groups.astype(np.int32), *table(validation, val_groups)))
    return made


def gaussian(clients: int, rows: int, features: int, validation: int, seed: int = 0) -> list[Client]:
    """Make dense tables of any size, rows of about unit length, for the scaling measurements."""
    rng = np.random.default_rng(seed)
    scale = np.float32(features**-0.5)
    truth = rng.standard_normal(features, dtype=np.float32)

    def table(count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        block = rng.standard_normal((count, features), dtype=np.float32) * scale
        return block, (block @ truth + rng.logistic(size=count) > 0).astype(np.float32)

    return [
        Client(*table(rows), rng.integers(GROUPS, size=rows, dtype=np.int32), *table(validation))
        for _ in range(clients)
    ]


def in_double(clients: list[Client]) -> list[Client]:
    """Return the same clients in float64, for the checks."""
    return [
        Client(*(part.astype(np.float64) if part.dtype == np.float32 else part for part in client))
        for client in clients
    ]


def fixed_indices(clients: list[Client], settings: Settings, steps: int, seed: int = 0) -> NDArray[np.int32]:
    """Draw every minibatch of a run ahead, [steps, clients, slots, batch]; slot 1 points into the validation rows."""
    if settings.batch_size is None:
        raise ValueError("batch_size: fixed indices need a batch size; with None there is nothing to draw")
    rng = np.random.default_rng(seed)
    drawn = np.empty((steps, len(clients), settings.slots, settings.batch_size), np.int32)
    for m, client in enumerate(clients):
        drawn[:, m] = rng.integers(len(client.labels), size=drawn[:, m].shape)
        drawn[:, m, 1] = rng.integers(len(client.val_labels), size=drawn[:, m, 1].shape)
    return drawn
