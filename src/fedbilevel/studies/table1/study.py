"""The paper's Table 1: two datasets, two distributions, six methods, ten seeds; 240 runs, or 960 with the learning rates.

Everything is saved run by run in a run folder (`fedbilevel.runs`), and the same call goes on where a stopped one was.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel import kernels
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.recipe import Recipe
from fedbilevel.fairness.trainer import Clients, Trainer
from fedbilevel.runs import Run, RunFolder, read
from fedbilevel.studies.table1.data import Split, make_split
from fedbilevel.studies.table1.design import LABELS, OURS, Design, Job, from_configuration
from fedbilevel.studies.table1.measure import Measured, measure
from fedbilevel.studies.table1.models import save_model
from fedbilevel.studies.table1.pool import Pool

STOPS = 10
"""How often a run is looked at on its way, besides its start."""
HELD = 6
"""Splits kept in memory."""
EXACT = ("test_accuracy", "train_accuracy", "validation_accuracy", "train_gap", "test_gap", "validation_gap", "weights")
"""What `verify` compares."""


class State(NamedTuple):
    """How far a call is: runs done of all, a guess of the seconds left (None: not yet), and what was done last."""

    done: int
    total: int
    left: float | None
    what: str


Report = Callable[[State], None]


def run(
    design: Design,
    out: str | Path,
    progress: Report | None = None,
    line: str = "",
    workers: int | None = None,
) -> Run:
    """Run what ``out`` does not hold yet, and return all of it.  ``workers``: threads; default one per core."""
    with RunFolder.open(out, command="table1", configuration=design.configuration(), line=line) as folder:
        if not folder.complete:
            _Work(design, folder, progress or (lambda state: None)).all(workers or _cores())
        order, extra = (None, None) if folder.complete else chosen(design, folder)
        return folder.finish(order, extra)


class _Work:
    """The jobs of one call: compiled programs and splits are shared, jobs are not."""

    def __init__(self, design: Design, folder: RunFolder, report: Report) -> None:
        self.design, self.folder, self.report = design, folder, report
        self.trainers: dict[tuple[Any, ...], Trainer] = {}
        self.splits = _Splits(design.encoding)
        self.jobs = [job for job in design.jobs if not all(map(folder.done, job.keys))]
        self.total = sum(len(job.seeds) for job in design.jobs)
        self.done = self.total - sum(len(job.seeds) for job in self.jobs)
        self.lock = threading.Lock()
        self.began = time.monotonic()
        self.spent = 0.0

    def all(self, workers: int) -> None:
        programs: dict[tuple[str, str], list[Job]] = defaultdict(list)
        for job in sorted(self.jobs, key=_rank):
            programs[job.program].append(job)
        self.report(State(self.done, self.total, None, "preparing data and programs"))
        # On a machine that has not built the kernels yet, a compiler can do so while this process reads the data.
        threading.Thread(target=kernels.available, daemon=True).start()
        pool = Pool(self._prepare, self._run, _rank)
        pool.run([(jobs[0], jobs) for jobs in programs.values()], workers)

    def _trainer(self, job: Job, split: Split) -> Trainer:
        recipe = recipe_for(self.design, job, split)
        # Rare splits need a smaller batch than the others, and with it a program of their own.
        place = (*job.program, recipe.outer_batch_size)
        if place not in self.trainers:
            trainer = Trainer(program_for(recipe, split), clients_for(job, split))
            trainer.compile()
            self.trainers[place] = trainer
        return self.trainers[place]

    def _prepare(self, job: Job) -> None:
        self._trainer(job, self.splits.get(job))

    def _run(self, job: Job) -> None:
        split = self.splits.get(job)
        trainer = self._trainer(job, split)
        course = trainer.run(clients_for(job, split), job.seeds[0], job.rate, STOPS)
        found = measure(self.design, job, split, course)
        model = partial(save_model, split=split, job=job, recipe=trainer.program.recipe, course=course)
        for seed in job.seeds:
            if not self.folder.done(job.key(seed)):
                tables = {
                    name: table.assign(seed=seed) if len(table) else table for name, table in found._asdict().items()
                }
                self.folder.save(job.key(seed), **tables, models={job.key(seed).replace(" ", "-"): model})
        self._tell(job)

    def _tell(self, job: Job) -> None:
        with self.lock:
            self.done += len(job.seeds)
            self.spent += job.cost
            rest = sum(job.cost for job in self.jobs) - self.spent
            left = (time.monotonic() - self.began) * rest / self.spent if self.done > len(job.seeds) else None
            what = f"{job.dataset} {job.distribution} {LABELS[job.method]}"
            self.report(State(self.done, self.total, left, what))


def clients_for(job: Job, split: Split) -> Clients:
    return split.cells if job.method in OURS else split.paper


def program_for(recipe: Recipe, split: Split) -> FairProgram:
    return FairProgram(recipe, split.model, len(split.names), names=split.names)


def recipe_for(design: Design, job: Job, split: Split) -> Recipe:
    """The design's recipe, its outer batch cut to the smallest client's validation rows where a split has so few."""
    recipe = design.recipe(job.dataset, job.method)
    if not isinstance(recipe.outer_batch_size, int):
        return recipe
    return replace(recipe, outer_batch_size=min(recipe.outer_batch_size, int(split.paper.bilevel.val_sizes.min())))


def _rank(job: Job) -> Any:
    """Split by split, so that few are needed at a time; and what takes longest first, so that nothing long comes last."""
    return job.split_seed, -job.cost, job.dataset, job.distribution


class _Splits:
    """The splits used last; an Adult split takes about 60 MB."""

    def __init__(self, encoding: str) -> None:
        self.encoding = encoding
        self.held: dict[tuple[str, str, int], Split] = {}
        self.lock = threading.Lock()

    def get(self, job: Job) -> Split:
        place = (job.dataset, job.distribution, job.split_seed)
        # Making one is NumPy and pandas, which hold the interpreter: two threads would not be faster.
        with self.lock:
            split = self.held.pop(place, None) or make_split(*place, self.encoding)
            self.held[place] = split
            while len(self.held) > HELD:
                del self.held[next(iter(self.held))]
            return split


def chosen(design: Design, folder: RunFolder) -> tuple[list[str], dict[str, pd.DataFrame] | None]:
    """The keys of the runs that make the table, in its order; with a search, also a table of all runs.

    The rate of a method is the one with the highest accuracy on the rows set aside (on one split: the mean over the seeds);
    of equals the one with the smaller gap there.  Test rows have no say.
    """
    if not design.grid:
        return [key for job in design.jobs for key in job.keys], None
    parts = folder.parts()
    every = pd.concat([parts[key]["rows"] for job in design.jobs for key in job.keys], ignore_index=True)
    by = ["dataset", "split", "method", "split_seed"]
    means = every.groupby([*by, "rate"], sort=False)[["validation_accuracy", "validation_gap"]].mean().reset_index()
    ranked = means.fillna({"validation_accuracy": -np.inf, "validation_gap": np.inf}).sort_values(
        ["validation_accuracy", "validation_gap", "rate"], ascending=[False, True, True], kind="stable"
    )
    best = {tuple(row[name] for name in by): row["rate"] for row in ranked.drop_duplicates(by).to_dict("records")}
    order = []
    for job in design.jobs:
        if best[job.dataset, job.distribution, LABELS[job.method], job.split_seed] == job.rate:
            order += job.keys
    marked = [best[tuple(row[name] for name in by)] == row["rate"] for row in every.to_dict("records")]
    return order, {"grid": every.assign(chosen=marked)}


class Verified(NamedTuple):
    """A run computed again: ``differences`` by column, empty where everything agrees."""

    row: dict[str, Any]
    differences: dict[str, tuple[Any, Any]]


def verify(path: str | Path, seed: int | None = None) -> Verified:
    """Compute one run of a folder again, chosen at random (by ``seed``), and compare what was measured."""
    kept = read(path)
    if kept.command != "table1":
        raise ValueError(f"{path} holds a run of {kept.command!r}; only those of 'table1' can be verified.")
    if not len(kept.rows):
        raise ValueError(f"{path} holds no finished run yet: let it compute one first.")
    design = from_configuration(kept.configuration)
    row = kept.rows.iloc[int(np.random.default_rng(seed).integers(len(kept.rows)))]
    method = next(name for name, label in LABELS.items() if label == row["method"])
    job = Job(row["dataset"], row["split"], method, float(row["rate"]), int(row["split_seed"]), (int(row["seed"]),))
    again = compute(design, job).rows.iloc[0]
    differences = {
        name: (row[name], again.get(name)) for name in EXACT if not _same(row[name], again.get(name, np.nan))
    }
    return Verified({str(name): value for name, value in row.items()}, differences)


def compute(design: Design, job: Job) -> Measured:
    """One run, alone."""
    split = make_split(job.dataset, job.distribution, job.split_seed, design.encoding)
    clients = clients_for(job, split)
    trainer = Trainer(program_for(recipe_for(design, job, split), split), clients)
    return measure(design, job, split, trainer.run(clients, job.seeds[0], job.rate, STOPS))


def _same(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
