"""One pairing of the bench: the search for step sizes, the runs with the best of them, and what they are worth."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pandas as pd

from fedbilevel.engines.simulation import Simulation
from fedbilevel.studies.bench.data import TUNING_SEED, Pairing, factors
from fedbilevel.studies.bench.walk import Walk, outer_value, prepared, settled_inner, walk
from fedbilevel.tasks import Images, Task

if TYPE_CHECKING:
    from fedbilevel.studies.bench.design import Design

TUNING_POINTS = 5
"""Moments at which a trial is looked at, to end it soon where it diverges."""


class Bench:
    """The runs behind one bench: its draws, and what they are worth untuned, computed once each."""

    def __init__(self, design: Design, images: Images | None) -> None:
        self.design, self.images = design, images
        self._untuned: dict[tuple[str, str, int], float] = {}
        self._lock = threading.Lock()

    def draw(self, pairing: Pairing, seed: int) -> Task:
        return pairing.draw(self.images, seed)

    def pairing(self, pairing: Pairing) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Tune, then run: one row a seed, and the history of every seed."""
        design, entry = self.design, pairing.entry
        best, tuning = self.tune(pairing)
        rows, histories = [], []
        for seed in range(design.seeds):
            task = self.draw(pairing, seed)
            steps = entry.steps(task, best)
            labels = {
                "dataset": pairing.task,
                "split": pairing.lower_level,
                "method": entry.title,
                "seed": seed,
                "split_seed": seed,
            }
            algorithm = entry.algorithm(task, steps)
            sizes = {"exchanges": design.rounds, "points": design.points}
            walked = walk(prepared(algorithm, task), algorithm.settings, task, seed=seed, **sizes, scores=True)
            setting = f"inner_step={steps.inner:.4g}, outer_step={steps.outer:.4g}"
            rows.append({**labels, "setting": setting, **tuning, **self.judged(pairing, task, seed, walked)})
            histories += [{**labels, **_told(row, task)} for row in walked.rows]
        return pd.DataFrame(rows), pd.DataFrame(histories)

    def tune(self, pairing: Pairing) -> tuple[tuple[float, float], dict[str, Any]]:
        """The best of ``budget`` pairs of factors by the validation objective, on a draw of its own.

        What counts is the larger of f(x, y) at the run's own y and f(x, y(x)) at the solution.  The first alone would favour
        inner variables that lag behind (f may be smaller there than anywhere it can stay), the second models that no one
        could use.
        """
        design, entry = self.design, pairing.entry
        task = self.draw(pairing, TUNING_SEED)
        tried = []
        run: Simulation | None = None
        for pair in factors(design.budget):
            algorithm = entry.algorithm(task, entry.steps(task, pair))
            run = run or prepared(algorithm, task)
            sizes = {"exchanges": design.rounds, "points": TUNING_POINTS}
            walked = walk(run, algorithm.settings, task, seed=TUNING_SEED, **sizes, scores=False)
            tried.append((_worth(task, walked), pair))
        value, best = min(tried)
        diverged = sum(math.isinf(value) for value, _ in tried)
        about = {"inner_factor": best[0], "outer_factor": best[1], "tuning_objective": value}
        return best, {**about, "tried": len(tried), "diverged_in_tuning": diverged}

    def judged(self, pairing: Pairing, task: Task, seed: int, walked: Walk) -> dict[str, Any]:
        """One row: the end of a run, what its outer variable alone is worth, and what no tuning at all is worth."""
        row: dict[str, Any] = {
            "score_name": task.score,
            "untuned": self.untuned(pairing, task, seed),
            "diverged": not walked.finite,
        }
        row |= _told(walked.rows[-1], task)
        row["rounds"], row["steps"] = row.pop("round"), row.pop("step")
        if not walked.finite:
            lost = [name for name in row if name.startswith("test_") or name in ("score", "objective", "detection_auc")]
            return {**row, **dict.fromkeys([*lost, "solved"], math.nan)}
        solved = task.evaluate(walked.outer, settled_inner(task, walked.outer, walked.inner))
        return {**row, "solved": solved[task.score]}

    def untuned(self, pairing: Pairing, task: Task, seed: int) -> float:
        """The score at the start of x with the inner problem solved: what ordinary training gives."""
        key = (pairing.task, pairing.lower_level, seed)
        with self._lock:
            if key not in self._untuned:
                outer, inner = task.problem.init(jax.random.key(seed))
                outer = task.problem.into_set(outer)
                stacked = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (task.data.clients, *leaf.shape)), inner)
                self._untuned[key] = task.evaluate(outer, settled_inner(task, outer, stacked))[task.score]
            return self._untuned[key]


def _worth(task: Task, walked: Walk) -> float:
    if not walked.finite:
        return math.inf
    solved = settled_inner(task, walked.outer, walked.inner)
    return max(float(outer_value(task.problem, walked.outer, inner, task.data.val)) for inner in (walked.inner, solved))


def _told(row: dict[str, Any], task: Task) -> dict[str, Any]:
    """A recorded moment under the names of the run folder."""
    names = {"hessian_vector_calls": "hvp_calls"}
    left_out = {"contacts", "replies", "consensus_error", "inner_momentum_error"}
    told = {names.get(name, name): value for name, value in row.items() if name not in left_out}
    told["score"] = told.get(f"test_{task.score}", math.nan)
    if "test_auc" in told:
        told["detection_auc"] = told.pop("test_auc")  # of the weights, not of the classifier
    return told
