"""How often the 95 % intervals of gaps hold the truth: the tables of docs/results/intervals.md.

    python -m benchmarks.coverage             # writes benchmarks/results/coverage.csv

Two groups: exact, by summing binomial probabilities over all outcomes, at 47 x 47
pairs of true rates that include 0 and 1.  Three and five groups, and two models on the same rows: 4,000 draws at every truth of
`truths` and `pairs`, among them all rates equal (a gap of 0).  What is reported is the smallest coverage of all truths, the
mean, and the mean width; beside it the percentile bootstrap within cells, which was used before.  The method was chosen among
several candidates (docs/results/intervals.md) on the same truths.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binom

from fedbilevel.fairness.intervals import gap_difference_ends, gap_ends
from fedbilevel.fairness.metrics import Counts

FILE = Path(__file__).parent / "results" / "coverage.csv"
SIZES = ((2, 2), (2, 10), (2, 100), (2, 1000), (3, 3), (5, 5), (10, 10), (10, 100), (30, 30), (100, 100), (100, 1000))
SEVERAL = (
    (2, 2, 2),
    (10, 10, 10),
    (30, 30, 30),
    (1000, 1000, 1000),
    (2, 1000, 1000),
    (2, 10, 30, 100, 1000),
    (1000,) * 5,
)
GRID = np.array([0, 0.002, 0.005, 0.01, *np.arange(1, 40) / 40, 0.99, 0.995, 0.998, 1])
DRAWS = 4000


def positives(hits, sizes):
    """Counts of groups that have positives only."""
    cells = np.zeros((*np.shape(hits), 2, 2), np.int64)
    cells[..., 1, 1], cells[..., 1, 0] = hits, np.asarray(sizes) - hits
    return Counts(cells)


def held(ends, truth):
    return (ends[0] <= truth + 1e-12) & (truth <= ends[1] + 1e-12)


def two_groups(sizes):
    """Smallest and mean coverage and mean width over `GRID` x `GRID`, exact."""
    first, second = sizes
    hits = np.stack(np.meshgrid(np.arange(first + 1), np.arange(second + 1), indexing="ij"), axis=-1)
    ends = gap_ends(positives(hits, sizes), "equal_opportunity")
    chances = [binom.pmf(np.arange(n + 1), n, GRID[:, None]) for n in sizes]
    covered = [
        chances[0][i] @ held(ends, abs(GRID[i] - GRID[j])) @ chances[1][j]
        for i, j in product(range(len(GRID)), repeat=2)
    ]
    return min(covered), np.mean(covered), float((chances[0] @ (ends[1] - ends[0]) @ chances[1].T).mean())


def truths(groups):
    """True rates: all equal, spread evenly, one apart."""
    equal = [np.full(groups, rate) for rate in (0.02, 0.1, 0.5, 0.9, 0.98)]
    spread = [np.linspace(*ends, groups) for ends in ((0.3, 0.7), (0.05, 0.2), (0.5, 0.55))]
    return [*equal, *spread, *(np.append(np.full(groups - 1, 0.5), rate) for rate in (0.05, 0.6, 0.9))]


def several_groups(sizes, draws=DRAWS, seed=0):
    generator = np.random.default_rng(seed)
    told = []
    for rates in truths(len(sizes)):
        ends = gap_ends(positives(generator.binomial(sizes, rates, (draws, len(sizes))), sizes), "equal_opportunity")
        told.append((held(ends, np.ptp(rates)).mean(), (ends[1] - ends[0]).mean()))
    return _summary(told)


def pairs(groups):
    """(rates of the one model, of the other, how far they agree: 0 independent, 1 as far as can be)."""
    (low, flat, more, high), steep = (np.full((4, groups), [[0.1], [0.5], [0.6], [0.8]]), np.linspace(0.4, 0.7, groups))
    return [
        (flat, flat, 0.9), (high, high, 0.95), (low, low, 0.9),
        (steep, steep, 0.9), (steep, flat, 0.9), (more, np.linspace(0.3, 0.7, groups), 0.5),
        (np.linspace(0.2, 0.3, groups), np.linspace(0.3, 0.2, groups), 0.9),
        (np.linspace(0.8, 0.95, groups), np.linspace(0.9, 0.92, groups), 1.0),
        (np.append(np.full(groups - 1, 0.5), 0.9), np.append(np.full(groups - 1, 0.5), 0.7), 0.8),
    ]  # fmt: skip


def two_models(sizes, draws=DRAWS, seed=0):
    generator = np.random.default_rng(seed)
    told = []
    for ours, theirs, agree in pairs(len(sizes)):
        both = ours * theirs + agree * (np.minimum(ours, theirs) - ours * theirs)
        chances = np.stack([1 - ours - theirs + both, theirs - both, ours - both, both], axis=-1)
        drawn = [generator.multinomial(n, p, draws) for n, p in zip(sizes, chances, strict=True)]
        joint = np.zeros((draws, len(sizes), 2, 2, 2), np.int64)
        joint[:, :, 1] = np.stack(drawn, axis=1).reshape(draws, len(sizes), 2, 2)
        ends = gap_difference_ends(joint, "equal_opportunity")
        told.append((held(ends, np.ptp(ours) - np.ptp(theirs)).mean(), (ends[1] - ends[0]).mean()))
    return _summary(told)


def redrawn(sizes, draws=400, resamples=400, seed=0):
    """The percentile bootstrap within cells, at the same truths as `several_groups`."""
    generator = np.random.default_rng(seed)
    told = []
    for rates in truths(len(sizes)):
        hits = generator.binomial(sizes, rates, (draws, len(sizes)))
        again = generator.binomial(sizes, hits / np.asarray(sizes), (resamples, *hits.shape)) / np.asarray(sizes)
        ends = np.quantile(np.ptp(again, axis=-1), [0.025, 0.975], axis=0)
        told.append((held(ends, np.ptp(rates)).mean(), (ends[1] - ends[0]).mean()))
    return _summary(told)


def _summary(told):
    covered, widths = zip(*told, strict=True)
    return min(covered), float(np.mean(covered)), float(np.mean(widths))


def main():
    lines = []
    for sizes in (*SIZES, *SEVERAL):
        one = two_groups(sizes) if len(sizes) == 2 else several_groups(sizes)
        before, _, before_width = redrawn(sizes)
        names = ("smallest", "mean", "width")
        line = {"positives": ", ".join(map(str, sizes))}
        line |= dict(zip((f"gap_{name}" for name in names), one, strict=True))
        line |= {"bootstrap_smallest": before, "bootstrap_width": before_width}
        line |= dict(zip((f"difference_{name}" for name in names), two_models(sizes), strict=True))
        lines.append(line)
        print(line, flush=True)
    pd.DataFrame(lines).to_csv(FILE, index=False)


if __name__ == "__main__":
    main()
