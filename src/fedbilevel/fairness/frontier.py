"""Accuracy against gap along FedPath's path, and which point of it is used.

Points are measured on the training rows, each judged as by a model trained without it (`fedbilevel.fairness.fedpath`), by the
averages that clients send while they train: no further exchange, and over real sites never more than sums.  So rows that a
model remembers do not flatter it.  But a gap on few rows is uncertain, and ``floor`` says how large it would be on average for
a model that is exactly fair.  Of a number, "accuracy" is the share of its variance that is explained.

Where nobody says how much fairness to ask for, the default strength says how fair, and not at what price: of the weaker models
whose gap is within a standard error of the one there, that with the largest accuracy - `PRICE` * gap is used.  (One standard
error is the rule by which L. Breiman, J. Friedman, R. Olshen, C. Stone, "Classification and Regression Trees", 1984, prune.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.fairness.disclosure import Visible
from fedbilevel.fairness.fedpath import Path
from fedbilevel.fairness.findings import FEW, Finding, of_model
from fedbilevel.fairness.methods import Recipe
from fedbilevel.fairness.metrics import CRITERIA, Counts
from fedbilevel.fairness.models import Model

DRAWS = 4000
MOST_ROWS = 20_000
"""Rows that `told_apart` reads."""
PRICE = 0.1
"""Accuracy that the default gives for a gap that is smaller by one, where rows cannot tell the gaps apart."""

Floats = NDArray[np.float64]


class Frontier(NamedTuple):
    """``table``: strength (0: unweighted), accuracy, gap, floor, usable (it does not decide alike about everybody), chosen;
    ``place``: the chosen row; ``found``: what to say about the choice; ``ends``: the groups with the largest and smallest rate
    there, and of which comparison, where an aim was missed for no reason that the counts show."""

    table: pd.DataFrame
    place: int
    found: list[Finding]
    ends: tuple[int, int] | None = None


def frontier_of(
    path: Path, recipe: Recipe, model: Model, rows: float, names: Sequence[Any], minimum: int = 1
) -> Frontier:
    """From the answer of FedPath, with the recipe's aim; groups with fewer rows of a label than ``minimum`` are in no gap."""
    strengths = (0.0, *recipe.strengths)
    points = [_point(path, place, recipe, model, rows, names, minimum) for place in range(len(strengths))]
    table = pd.DataFrame([point[0] for point in points])
    table.insert(0, "strength", strengths)
    place, found, missed = _chosen(table, recipe, points)
    widest = _ends(points[place][1].values) if missed else None
    ends = None if widest is None else widest[1:]
    return Frontier(table.assign(chosen=np.arange(len(table)) == place), place, found, ends)


class Compared(NamedTuple):
    """By comparison and group: the rate or mean, and how many rows it is of; by comparison the variance of a row."""

    values: Floats
    rows: Floats
    variance: Floats


def _point(
    path: Path, place: int, recipe: Recipe, model: Model, rows: float, names: Sequence[Any], minimum: int
) -> tuple[dict[str, Any], Compared]:
    told, metric = path.told, recipe.formulation.metric
    sums = np.asarray(told.sums[place], np.float64)
    if model.regression:
        accuracy, usable = 1 - 2 * float(told.loss_apart[place]), True
    else:
        counts, first = (_counts(path, at, rows) for at in (place, 0))
        accuracy = float(counts.overall("accuracy").max()) if counts.classes == 2 else _right(counts)
        # A table on which the unweighted model is of no use is not this method's fault.
        usable = not _useless(counts, names) - _useless(first, names)
    if not isinstance(metric, str):
        gap = float(np.sqrt(max(float(sums), 0.0)))
        return {"accuracy": accuracy, "gap": gap, "floor": np.nan, "usable": usable}, Compared(*[np.zeros((1, 1))] * 3)
    compared = _of_counts(counts, metric) if metric in CRITERIA else _of_sums(sums, rows)
    shown = Visible.of(compared.rows.T if model.regression else counts.cells.sum(axis=-1), minimum).shown
    compared = compared._replace(
        values=np.where(shown, compared.values, np.nan), rows=np.where(shown, compared.rows, 0)
    )
    gap = float(_ranges(compared.values).max())
    return {"accuracy": accuracy, "gap": gap, "floor": _floor(compared), "usable": usable}, compared


def _counts(path: Path, place: int, rows: float) -> Counts:
    return Counts(np.rint(np.asarray(path.told.decisions[place], np.float64) * rows).astype(np.int64))


def _right(counts: Counts) -> float:
    return float(np.trace(counts.cells.sum(axis=0)) / max(1, counts.cells.sum()))


def _useless(counts: Counts, names: Sequence[Any]) -> set[str]:
    return {finding.code for finding in of_model(counts, names, "equal_opportunity") if finding.code != "few-rows"}


def _of_counts(counts: Counts, metric: str) -> Compared:
    rates = np.concatenate([np.atleast_2d(counts.rates(rate)) for rate in CRITERIA[metric]])
    among = np.concatenate([
        np.atleast_2d(np.broadcast_to(counts.among(rate), np.shape(counts.rates(rate)))) for rate in CRITERIA[metric]
    ]).astype(np.float64)  # fmt: skip
    overall = np.nansum(rates * among, axis=1) / np.maximum(among.sum(axis=1), 1)
    return Compared(rates, among, overall * (1 - overall))


def _of_sums(sums: Floats, rows: float) -> Compared:
    share, total, squares = (sums[:, part] for part in range(3))
    there = share > 0
    safe = np.where(there, share, 1)
    means = np.where(there, total / safe, np.nan)
    within = np.where(there, squares - total**2 / safe, 0).sum(axis=1) / np.maximum(share.sum(axis=1), 1e-12)
    return Compared(means, share * rows, within)


def _ranges(values: Floats) -> Floats:
    """Largest minus smallest of the groups that have a value; 0 where fewer than two have."""
    return np.asarray(np.nan_to_num(np.fmax.reduce(values, axis=1) - np.fmin.reduce(values, axis=1)))


def _floor(compared: Compared) -> float:
    """The mean gap of groups that do not differ, on so many rows."""
    spread = np.sqrt(compared.variance[:, None] / np.maximum(compared.rows, 1))
    spread = np.where(compared.rows > 0, spread, np.nan)
    draws = np.random.default_rng(0).normal(size=(DRAWS, *spread.shape)) * spread
    return float(np.nan_to_num(np.fmax.reduce(draws, axis=2) - np.fmin.reduce(draws, axis=2)).max(axis=1).mean())


def _ends(values: Floats) -> tuple[int, int, int] | None:
    """The comparison with the widest gap, and the groups with the largest and the smallest value there."""
    widest = int(np.argmax(_ranges(values)))
    if values.shape[1] < 2 or np.isnan(values[widest]).all():
        return None
    return widest, int(np.nanargmax(values[widest])), int(np.nanargmin(values[widest]))


def _error(compared: Compared) -> float:
    """The standard error of the gap, by the two groups that make it; 0 where it is not known."""
    ends = _ends(compared.values)
    if ends is None:
        return 0.0
    widest, *both = ends
    return float(np.sqrt(compared.variance[widest] * np.sum(1 / compared.rows[widest, both])))


def _chosen(
    table: pd.DataFrame, recipe: Recipe, points: Sequence[tuple[dict[str, Any], Compared]]
) -> tuple[int, list[Finding], bool]:
    """The place on the path, what to say about it, and whether an aim was missed for a reason that no count shows."""
    usable = np.flatnonzero(table["usable"].to_numpy(bool))
    gaps, accuracies = table["gap"].to_numpy(), table["accuracy"].to_numpy()
    if recipe.accuracy_loss is not None:
        allowed = usable[accuracies[usable] >= accuracies[0] - recipe.accuracy_loss - 1e-9]
        place = int(allowed[np.argmin(gaps[allowed])])
        fairer = usable[gaps[usable] < gaps[0]]
        if place or not len(fairer):
            return place, [], False
        cheapest = int(fairer[np.argmax(accuracies[fairer])])
        sentence = (
            f"For a loss of accuracy of at most {recipe.accuracy_loss:g} no model of the path has a smaller gap, so the "
            f"unweighted one is used, with a gap of {gaps[0]:.3f}: the cheapest that is fairer has {gaps[cheapest]:.3f} and "
            f"loses {accuracies[0] - accuracies[cheapest]:.4f}."
        )
        return place, [Finding("aim-missed", "The model", sentence, blocks=False)], False
    if recipe.gap is None:
        asked = int(np.flatnonzero(table["strength"] == recipe.formulation.strength)[0])
        places = usable[usable <= asked]
        last = int(places[-1])
        place = last if recipe.exactly else _worth(table, places, _error(points[last][1]))
        if last == asked:
            return place, [], False
        sentence = (
            f"At strength {recipe.formulation.strength:g} the model decides (almost) alike about everybody, so that of "
            f"strength {table['strength'][place]:g} is used: ask for less, or give it columns that tell more."
        )
        return place, [Finding("collapsed", "The model", sentence, blocks=False)], False
    reached = usable[gaps[usable] <= recipe.gap]
    if len(reached):
        place = int(reached[0])
        floor = float(table["floor"][place])
        noise = (
            f"The gap aimed at, {recipe.gap:g}, is reached on the training rows, but with so many of them even a fair model "
            f"shows {floor:.3f} on average: on other rows expect as much."
        )
        return (
            place,
            [Finding("aim-below-noise", "The model", noise, blocks=False)] if floor > recipe.gap else [],
            False,
        )
    place = int(usable[np.argmin(gaps[usable])])
    sizes = points[place][1].rows
    floor, fewest = float(table["floor"][place]), float(sizes[sizes > 0].min(initial=np.inf))
    said = f"The gap aimed at, {recipe.gap:g}, was not reached: the smallest on the training rows is {gaps[place]:.3f}"
    few = fewest < FEW
    if few:
        why = f"a group has {fewest:.0f} rows to compare, too few to tell its rate; gather groups, or more rows"
    elif floor >= recipe.gap:
        why = f"with this many rows even a fair model shows {floor:.3f} on average; aim at no less than that"
    else:
        why = "weights reach a model only through its features, and these do not tell enough"
    return place, [Finding("aim-missed", "The model", f"{said}; {why}.", blocks=False)], not few and floor < recipe.gap


def _worth(table: pd.DataFrame, places: NDArray[np.intp], error: float) -> int:
    """Of ``places`` whose gap is within ``error`` of the last one's, the one with the largest accuracy - `PRICE` * gap."""
    gaps, accuracies = table["gap"].to_numpy()[places], table["accuracy"].to_numpy()[places]
    value = np.where(gaps <= gaps[-1] + error, accuracies - PRICE * gaps, -np.inf)
    return int(places[np.argmax(value)])


def told_apart(features: NDArray[Any], groups: NDArray[Any], ends: tuple[int, int]) -> float:
    """How well the features tell two groups apart: the chance that a row of the first scores above one of the second, by the
    least-squares line (0.5: not at all, 1: always)."""
    rows = np.flatnonzero(np.isin(groups, ends))
    rows = rows[:: max(1, len(rows) // MOST_ROWS)]
    truth = groups[rows] == ends[0]
    matrix = np.asarray(features[rows], np.float64)
    line = np.linalg.lstsq(matrix.T @ matrix + 1e-6 * np.eye(matrix.shape[1]), matrix.T @ truth, rcond=None)[0]
    from scipy.stats import rankdata  # takes as long to import as all else that a site needs

    ranks, first = rankdata(matrix @ line), int(truth.sum())
    return float((ranks[truth].sum() - first * (first + 1) / 2) / max(1, first * (len(truth) - first)))


def explained(frontier: Frontier, features: NDArray[Any], groups: NDArray[Any], names: Sequence[Any]) -> list[Finding]:
    """What was found, with how well the features tell the groups apart where that is the reason."""
    if frontier.ends is None:
        return frontier.found
    chance = told_apart(features, groups, frontier.ends)
    high, low = (names[place] for place in frontier.ends)
    how = f" They put a row of {high} and one of {low} in order in {chance:.0%} of cases, and guessing does in 50%."
    return [finding._replace(sentence=finding.sentence + how) for finding in frontier.found]
