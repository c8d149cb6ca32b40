"""Every algorithm on every task it solves, each with tuned step sizes: objective, score and costs along the way.

A *cell* is one algorithm on one task with one lower level.  In every cell the same number of step-size pairs is tried, on a
draw of its own, and judged by the validation objective at the end; with the best of them the algorithm then runs on
``seeds`` other draws, and only these runs ever look at test rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedbilevel.report.bench.tables import BenchResult, summarise
from fedbilevel.runs import Run as Folder
from fedbilevel.runs import RunFolder
from fedbilevel.studies.bench.cells import Bench, Cell
from fedbilevel.studies.bench.design import CASES, ENTRIES, FULL, QUICK, Design
from fedbilevel.tasks import Images, digits, read_mnist
from fedbilevel.tasks.task import LOWER_LEVELS

__all__ = ["FULL", "QUICK", "BenchResult", "Cell", "design_of", "read", "run"]

Report = Callable[[str, int, int], None]


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
            changed: dict[str, Any] = {name: value}
            design = replace(design, **changed)
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
            tables = [
                pd.concat(parts, ignore_index=True) for parts in zip(*(found[cell.key] for cell in wanted), strict=True)
            ]
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
