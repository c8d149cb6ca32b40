"""Every algorithm on every task it solves, each with tuned step sizes: objective, score and costs along the way.

A *cell* is one algorithm on one task with one lower level.  In every cell the same number of step-size pairs is tried, on a
draw of its own, and judged by the validation objective at the end; with the best of them the algorithm then runs on
``seeds`` other draws, and only these runs ever look at test rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from fedbilevel.experiments.bench_design import CASES, ENTRIES, FULL, QUICK, TUNING_SEED, Case, Design, Entry, factors
from fedbilevel.experiments.bench_tables import BenchResult, summarise
from fedbilevel.experiments.bench_walk import Walk, settled_inner, walk
from fedbilevel.runs import Run as Folder
from fedbilevel.runs import RunFolder
from fedbilevel.tasks import Images, Task, digits, read_mnist
from fedbilevel.tasks.task import LOWER_LEVELS

__all__ = ["FULL", "QUICK", "BenchResult", "Cell", "design_of", "read", "run"]

Report = Callable[[str, int, int], None]
TUNING_POINTS = 5
"""Moments at which a trial is looked at; its objective is the mean of the last two."""


class Cell(NamedTuple):
    task: str
    lower_level: str
    algorithm: str

    @property
    def key(self) -> str:
        return "/".join(self)

    @property
    def case(self) -> Case:
        return CASES[self.task]

    @property
    def entry(self) -> Entry:
        return ENTRIES[self.algorithm]


def design_of(
    tasks: str | None = None,
    algorithms: str | None = None,
    seeds: int | None = None,
    budget: int | None = None,
    rounds: int | None = None,
    quick: bool = False,
) -> Design:
    """The default design (or the quick one) with some of it replaced; names are separated by commas."""
    design = QUICK if quick else FULL
    if tasks is not None:
        design = replace(design, tasks=_names("--tasks", tasks, CASES))
    if algorithms is not None:
        design = replace(design, algorithms=_names("--algorithms", algorithms, ENTRIES))
    for name, value in (("seeds", seeds), ("budget", budget), ("rounds", rounds)):
        if value is not None:
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, not {value}.")
            design = replace(design, **{name: value})
    return design


def _names(option: str, text: str, known: dict[str, Any]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError(f"{option} is empty; choose from {', '.join(known)}.")
    for name in names:
        if name not in known:
            raise ValueError(f"{option} names {name!r}, which is unknown; choose from {', '.join(known)}.")
    return names


def cells(design: Design) -> list[Cell]:
    """In the order of the tables: tasks, lower levels, algorithms."""
    return [
        Cell(task, level, algorithm)
        for task in design.tasks
        for level in LOWER_LEVELS
        for algorithm in design.algorithms
        if ENTRIES[algorithm].lower_level == level
    ]


def configuration(design: Design, images: Images | None) -> dict[str, Any]:
    """Everything the numbers depend on."""
    about = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(design).items()}
    if images is None:
        return {**about, "images": "none"}
    return {**about, "images": images.source, "image_rows": len(images.labels), "image_columns": images.pixels.shape[1]}


def run(
    out: Path | None = None,
    design: Design = FULL,
    data: Path | None = None,
    progress: Report | None = None,
    workers: int = 2,
    line: str = "",
) -> BenchResult:
    """Run the bench; with ``out`` into a run folder, where finished cells are kept and a stopped run goes on.

    ``data``: a folder with MNIST files, used in place of scikit-learn's digits.
    """
    tell = progress or (lambda part, done, total: None)
    wanted = cells(design)
    if not wanted:
        raise ValueError("None of these algorithms solves one of these tasks.")
    uses_images = any(CASES[task].images for task in design.tasks)
    if data is not None and not uses_images:
        raise ValueError("--data is given, but none of these tasks uses images.")
    images = (digits() if data is None else read_mnist(data)) if uses_images else None
    about = configuration(design, images)
    folder = None if out is None else RunFolder.open(out, command="bench", configuration=about, line=line)
    with nullcontext() if folder is None else folder:
        left = [cell for cell in wanted if folder is None or not folder.done(cell.key)]
        bench = Bench(design, images)
        found: dict[str, tuple[pd.DataFrame, pd.DataFrame]] = {}
        for cell, rows, history in _as_ready(bench, left, workers):
            if folder is None:
                found[cell.key] = rows, history
            else:
                folder.save(cell.key, rows=rows, history=history)
                folder.log(f"{cell.key}: {rows['setting'].iloc[0]}")
            left.remove(cell)
            tell("cells", len(wanted) - len(left), len(wanted))
        if folder is None:
            tables = [pd.concat(parts, ignore_index=True) for parts in zip(*(found[cell.key] for cell in wanted), strict=True)]
            return summarise(tables[0], tables[1], about)
        return read(folder.finish([cell.key for cell in wanted]))


def read(folder: Folder) -> BenchResult:
    """The tables of a run folder, computed from its rows; nothing is run."""
    return summarise(folder.rows, folder.history, folder.configuration)


def _as_ready(bench: Bench, wanted: list[Cell], workers: int) -> Iterator[tuple[Cell, pd.DataFrame, pd.DataFrame]]:
    # JAX lets go of the interpreter while it compiles and computes, so threads use the cores.
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(bench.cell, cell): cell for cell in wanted}
        try:
            for future in as_completed(futures):
                yield futures[future], *future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class Bench:
    """The runs behind one bench: its draws, and what they are worth untuned, computed once each."""

    def __init__(self, design: Design, images: Images | None) -> None:
        self.design, self.images = design, images
        self._untuned: dict[tuple[str, str, int], float] = {}
        self._lock = threading.Lock()

    def draw(self, cell: Cell, seed: int) -> Task:
        return cell.case.make(self.images, seed, cell.lower_level)  # type: ignore[arg-type]

    def cell(self, cell: Cell) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Tune, then run: one row a seed, and the history of every seed."""
        design, entry = self.design, cell.entry
        best, tuning = self.tune(cell)
        rows, histories = [], []
        for seed in range(design.seeds):
            task = self.draw(cell, seed)
            steps = entry.steps(task, best)
            labels = {
                "dataset": cell.task,
                "split": cell.lower_level,
                "method": entry.title,
                "seed": seed,
                "split_seed": seed,
                "task": f"{cell.case.title}, {cell.lower_level}",
                "algorithm": entry.title,
            }
            walked = walk(entry.algorithm(task, steps), task, seed=seed, exchanges=design.rounds, points=design.points, scores=True)  # fmt: skip
            setting = f"inner_step={steps.inner:.4g}, outer_step={steps.outer:.4g}"
            rows.append({**labels, "setting": setting, **tuning, **self.judged(cell, task, seed, walked)})
            histories += [{**labels, **_told(row, task)} for row in walked.rows]
        return pd.DataFrame(rows), pd.DataFrame(histories)

    def tune(self, cell: Cell) -> tuple[tuple[float, float], dict[str, Any]]:
        """The best of ``budget`` pairs of factors by the validation objective, on a draw of its own."""
        design, entry = self.design, cell.entry
        task = self.draw(cell, TUNING_SEED)
        tried = []
        for pair in factors(design.budget):
            algorithm = entry.algorithm(task, entry.steps(task, pair))
            walked = walk(algorithm, task, seed=TUNING_SEED, exchanges=design.rounds, points=TUNING_POINTS, scores=False)
            value = float(np.mean([row["objective"] for row in walked.rows[-2:]])) if walked.finite else math.inf
            tried.append((value, pair))
        value, best = min(tried)
        diverged = sum(math.isinf(value) for value, _ in tried)
        about = {"inner_factor": best[0], "outer_factor": best[1], "tuning_objective": value}
        return best, {**about, "tried": len(tried), "diverged_in_tuning": diverged}

    def judged(self, cell: Cell, task: Task, seed: int, walked: Walk) -> dict[str, Any]:
        """One row: the end of a run, what its outer variable alone is worth, and what no tuning at all is worth."""
        row: dict[str, Any] = {"score_name": task.score, "untuned": self.untuned(cell, task, seed), "diverged": not walked.finite}
        row |= _told(walked.rows[-1], task)
        row["rounds"], row["steps"] = row.pop("round"), row.pop("step")
        if not walked.finite:
            return {**row, **dict.fromkeys([name for name in row if name.startswith("test_")], math.nan), "score": math.nan, "solved": math.nan}
        solved = task.evaluate(walked.outer, settled_inner(task, walked.outer, walked.inner))
        return {**row, "solved": solved[task.score]}

    def untuned(self, cell: Cell, task: Task, seed: int) -> float:
        """The score at the start of x with the inner problem solved: what ordinary training gives."""
        key = (cell.task, cell.lower_level, seed)
        with self._lock:
            if key not in self._untuned:
                outer, inner = task.problem.init(jax.random.key(seed))
                outer = task.problem.into_set(outer)
                stacked = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (task.data.clients, *leaf.shape)), inner)
                self._untuned[key] = task.evaluate(outer, settled_inner(task, outer, stacked))[task.score]
            return self._untuned[key]


def _told(row: dict[str, Any], task: Task) -> dict[str, Any]:
    """A recorded moment under the names of the run folder."""
    names = {"hessian_vector_calls": "hvp_calls"}
    left_out = {"contacts", "replies", "consensus_error", "inner_momentum_error"}
    told = {names.get(name, name): value for name, value in row.items() if name not in left_out}
    told["score"] = told.get(f"test_{task.score}", math.nan)
    if "test_auc" in told:
        told["detection_auc"] = told.pop("test_auc")  # of the weights, not of the classifier
    return told
