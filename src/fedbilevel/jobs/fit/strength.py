"""``strength="auto"``: how much fairness to ask for, chosen by cross-validation on the training rows alone.

The rule: every site's training rows are dealt into three folds (proportions of groups and classes kept).  Each strength, and
FedAvg, is trained on two folds and decides about the third; so every row is decided about once by a model that has not seen it.
Of the strengths that lose at most half a point of accuracy against FedAvg on these decisions, the one with the smallest gap is
taken; if all lose more, the most accurate.  No test row is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.fairness.models import probabilities
from fedbilevel.jobs.fit.data import Part, joined
from fedbilevel.jobs.fit.measure import counted
from fedbilevel.jobs.fit.train import STRENGTHS, FitOptions, train

FOLDS = 3
LARGEST_LOSS = 0.005


def choose_strength(
    options: FitOptions,
    parts: Sequence[Part],
    names: tuple[str, ...],
    curvature: float,
    tell: Callable[[int, int], None] | None = None,
) -> tuple[float, pd.DataFrame]:
    """The strength, and a table of what was compared: strength (0 stands for FedAvg), accuracy, gap, chosen."""
    if options.knob is None:
        raise ValueError(f"{options.label} has no strength to choose.")
    folds = [_folds(part, options.seed + number) for number, part in enumerate(parts)]
    candidates = [replace(options, method="fedavg", strength=None, compare_with=None)]
    candidates += [replace(options, strength=value, compare_with=None) for value in STRENGTHS[options.knob]]
    measured = []
    for number, candidate in enumerate(candidates):
        decided, held_out = [], []
        for fold in range(FOLDS):
            kept = [_without(part, owner, fold) for part, owner in zip(parts, folds, strict=True)]
            out = joined([_only(part, owner == fold) for part, owner in zip(parts, folds, strict=True)])
            program = candidate.program(out.features.shape[1], len(names), curvature)
            params = train(candidate, program, kept, record=False).params
            decided.append(probabilities(program.model, params, out.features)[:, 1] > 0.5)
            held_out.append(out)
            if tell is not None:
                tell(number * FOLDS + fold + 1, len(candidates) * FOLDS)
        counts = counted(joined(held_out), np.concatenate(decided), len(names)).present()
        measured.append(
            {
                "strength": 0.0 if number == 0 else float(candidate.strength or 0),
                "accuracy": float(counts.overall("accuracy")),
                "gap": float(counts.gap(options.metric)),
            }
        )
    table = pd.DataFrame(measured)
    best = _choice(table)
    return float(table["strength"][best]), table.assign(chosen=np.arange(len(table)) == best)


def _choice(table: pd.DataFrame) -> int:
    """The row of the chosen strength; row 0 is FedAvg, which is what others are held against and is not chosen."""
    loss = table["accuracy"][0] - table["accuracy"].to_numpy()
    gaps = table["gap"].fillna(np.inf).to_numpy()
    allowed = np.flatnonzero(loss <= LARGEST_LOSS)
    allowed = allowed[allowed > 0]
    if len(allowed):
        return int(allowed[np.argmin(gaps[allowed])])
    return int(1 + np.argmin(loss[1:]))


def _folds(part: Part, seed: int) -> NDArray[np.int64]:
    """Which fold every row is in: each cell (group, label) shuffled and dealt round, going on where the last cell stopped."""
    generator = np.random.default_rng([seed, FOLDS])
    cells = 2 * part.groups.astype(np.int64) + part.labels
    order = generator.permutation(len(cells))
    order = order[np.argsort(cells[order], kind="stable")]
    owner = np.empty(len(cells), np.int64)
    owner[order] = np.arange(len(cells)) % FOLDS
    return owner


def _without(part: Part, owner: NDArray[np.int64], fold: int) -> Part:
    """Training rows of a fold, cut to a common length (a row or two): equal shapes share one compiled program."""
    rows = np.flatnonzero(owner != fold)
    sizes = np.bincount(owner, minlength=FOLDS)
    return _only(part, rows[: int(sizes.sum() - sizes.max())])


def _only(part: Part, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Part:
    return Part(part.features[rows], part.labels[rows], part.groups[rows])
