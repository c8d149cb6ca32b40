"""What each feature does in a logistic model: odds ratios, and intervals where the rows of the training are at hand.

Of a number, the odds ratio is that of one spread more; of a category, of each value instead of the most frequent one; of a
boolean, of its second word instead of its first; of missing cells, instead of the mean or the most frequent value.

The model minimises the weighted loss L(b) = mean_i v_i loss_i(b) + ridge/2 |b|^2 by minibatches, so it stops near the minimum.
The interval is that of the minimum b* itself, to which a few Newton steps lead from the model: c'b* -+ z sqrt(c'Vc) for a
contrast c, with the sandwich V = H^-1 (mean_i v_i^2 (p_i - y_i)^2 x_i x_i') H^-1 / n, H the Hessian of L.  Weights that were
learned are no counts, so the inverse Hessian alone would not do.  The weights are taken as given and rows as independent, and
the ridge shrinks what the interval surrounds; docs/reference/tables.md has the measured coverage.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.tables.encoder import Encoder
from fedbilevel.tables.schema import Column

Floats = NDArray[np.float64]
NEWTON_STEPS = 50


class TrainingRows(NamedTuple):
    """Encoded rows, labels of 0 and 1, and what each row weighs in the training loss (mean one or about)."""

    features: NDArray[np.float32]
    labels: NDArray[np.float64]
    weights: NDArray[np.float64]


def effects(
    encoder: Encoder, params: Floats, rows: TrainingRows | None = None, *, ridge: float = 0.0, level: float = 0.95
) -> pd.DataFrame:
    """One row a comparison: column, feature, compared, odds_ratio, low, high (NaN without ``rows``)."""
    frequent = None if rows is None else rows.features.sum(axis=0, dtype=np.float64)
    named = list(_contrasts(encoder, frequent))
    contrasts = np.stack([contrast for *_, contrast in named])
    table = pd.DataFrame([names for *names, _ in named], columns=["column", "feature", "compared"])
    model = np.asarray(params, np.float64)
    table["odds_ratio"] = np.exp(contrasts @ model)
    ends = np.full((2, len(table)), np.nan)
    if rows is not None:
        best, variance = minimum(model, rows, ridge)
        reach = NormalDist().inv_cdf(0.5 + level / 2) * np.sqrt(
            np.einsum("ci,ij,cj->c", contrasts, variance, contrasts)
        )
        ends = np.exp([contrasts @ best - reach, contrasts @ best + reach])
    return table.assign(low=ends[0], high=ends[1])


def minimum(start: Floats, rows: TrainingRows, ridge: float) -> tuple[Floats, Floats]:
    """The minimiser of the weighted loss, by Newton's method from ``start``, and the sandwich variance of it."""
    features, labels, weights = (np.asarray(array, np.float64) for array in rows)
    count, point = len(labels), np.array(start, np.float64)

    def loss(point: Floats) -> float:
        scores = features @ point
        return float(np.mean(weights * (np.logaddexp(0, scores) - labels * scores)) + 0.5 * ridge * point @ point)

    for _ in range(NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-features @ point))
        gradient = features.T @ (weights * (chance - labels)) / count + ridge * point
        hessian = (features * (weights * chance * (1 - chance))[:, None]).T @ features / count
        hessian += (ridge + 1e-10) * np.eye(len(point))
        step = np.linalg.solve(hessian, gradient)
        if gradient @ step < 1e-14:
            break
        here, length = loss(point), 1.0
        while loss(point - length * step) > here and length > 1e-6:
            length /= 2
        point = point - length * step
    squares = (weights * (chance - labels)) ** 2
    middle = (features * squares[:, None]).T @ features / count
    return point, np.linalg.solve(hessian, np.linalg.solve(hessian, middle).T) / count


def _contrasts(encoder: Encoder, frequent: Floats | None) -> Iterator[tuple[str, str, str, Floats]]:
    """(column, feature, compared how, contrast of the parameters), column by column."""
    width, place = len(encoder.feature_names), 0
    spreads = iter(encoder.spreads)
    for column in encoder.columns:
        names, own = column.features, np.eye(width)[place : place + len(column.features)]
        base, against = np.zeros(width), "instead of the mean"
        if column.scaled:
            more = "days more" if column.kind == "date" else "more"
            yield column.name, names[0], f"{next(spreads):.3g} {more}", own[0]
        elif column.kind == "boolean":
            base, against = -0.5 * own[0], f"instead of {column.values[0]}"
            yield column.name, names[0], against, own[0]
        else:
            base, against = yield from _categories(column, own, None if frequent is None else frequent[place:])
        if column.missing == "flag":
            yield column.name, names[-1], against, own[-1] - base
        place += len(names)


def _categories(
    column: Column, own: Floats, frequent: Floats | None
) -> Generator[tuple[str, str, str, Floats], None, tuple[Floats, str]]:
    values = len(column.values) + column.pooled
    most = 0 if frequent is None else int(np.argmax(frequent[:values]))
    against = f"instead of {column.features[most].removeprefix(column.name + '=')}"
    for number in range(values):
        if number != most:
            yield column.name, column.features[number], against, own[number] - own[most]
    return own[most], against
