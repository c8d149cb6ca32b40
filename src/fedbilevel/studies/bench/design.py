"""What `fedbilevel bench` compares: every algorithm on every task it solves, each with tuned step sizes.

A *pairing* is one algorithm on one task with one lower level.  In every pairing the same number of step-size pairs is tried,
on a draw of its own, and judged by the validation objective at the end; with the best of them the algorithm then runs on
``seeds`` other draws, and only these runs ever look at test rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbilevel.problem import whole_number
from fedbilevel.report.bench import BenchResult, summarise
from fedbilevel.studies.bench.data import ENTRIES, TASKS, Pairing
from fedbilevel.studies.bench.measure import Bench
from fedbilevel.studies.driver import Part, Report, Study, conduct, listed
from fedbilevel.tasks import Images, digits, read_mnist
from fedbilevel.tasks.task import LOWER_LEVELS

WORKERS = 2


@dataclass(frozen=True)
class Design(Study):
    """``rounds`` counts exchanges between server and clients, so that methods with many a step get no more of them.
    ``data``: a folder with MNIST files, used in place of scikit-learn's digits."""

    tasks: tuple[str, ...]
    algorithms: tuple[str, ...]
    seeds: int = 5
    budget: int = 12
    rounds: int = 200
    points: int = 24
    data: Path | None = None

    command = "bench"

    @cached_property
    def images(self) -> Images | None:
        if any(TASKS[task].images for task in self.tasks):
            return digits() if self.data is None else read_mnist(self.data)
        if self.data is not None:
            raise ValueError("--data is given, but none of these tasks uses images.")
        return None

    def configuration(self) -> dict[str, Any]:
        names = ("tasks", "algorithms", "seeds", "budget", "rounds", "points")
        about: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.images is None:
            return {**about, "images": "none"}
        rows, columns = self.images.pixels.shape
        return {**about, "images": self.images.source, "image_rows": rows, "image_columns": columns}

    def parts(self) -> list[Part]:
        """In the order of the tables: tasks, lower levels, algorithms."""
        pairings = [
            Pairing(task, level, algorithm)
            for task in self.tasks
            for level in LOWER_LEVELS
            for algorithm in self.algorithms
            if ENTRIES[algorithm].lower_level == level
        ]
        return [Part((pairing.key,), pairing, pairing.key, rank=number) for number, pairing in enumerate(pairings)]

    @cached_property
    def bench(self) -> Bench:
        return Bench(self, self.images)

    def compute(self, part: Part) -> dict[str, dict[str, Any]]:
        rows, history = self.bench.pairing(part.what)
        return {part.keys[0]: {"rows": rows, "history": history}}


FULL = Design(("quadratic", "ridge", "cleaning", "representation", "imbalance"), tuple(ENTRIES))
QUICK = Design(
    ("ridge",), ("fedbio", "fedbioacc", "fedbio-global", "simfbo", "fednest"), seeds=2, budget=3, rounds=60, points=6
)


def design_of(
    tasks: str | None = None,
    algorithms: str | None = None,
    seeds: int | None = None,
    budget: int | None = None,
    rounds: int | None = None,
    quick: bool = False,
    data: Path | None = None,
) -> Design:
    """The default design (or the quick one) with some of it replaced; names are separated by commas."""
    changes: dict[str, Any] = {"seeds": seeds, "budget": budget, "rounds": rounds}
    for name, number in changes.items():
        whole_number(f"--{name}", number, optional=True)
    changes["tasks"] = None if tasks is None else listed("--tasks", tasks, TASKS)
    changes["algorithms"] = None if algorithms is None else listed("--algorithms", algorithms, ENTRIES)
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(QUICK if quick else FULL, **given, data=data)


def run(
    out: Path | None = None,
    design: Design = FULL,
    report: Report | None = None,
    line: str = "",
    workers: int = WORKERS,
) -> BenchResult:
    """Run the bench; with ``out`` into a run folder, where finished pairings are kept and a stopped run goes on."""
    finished = conduct(design, out, report, line, workers)
    return summarise(finished.rows, finished.history, finished.configuration)
