"""Table 1 on the terminal: the paper's layout, its own figures beside ours, and a bar with the time left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fedbilevel.report.summary import Cell
    from fedbilevel.runs import Run
    from fedbilevel.studies.table1.study import State

MARKS = {"best": " *", "lead": " +", "tied": "", "": ""}
"""Behind a cell: the best beyond noise, or the best within noise."""
EVERY = 5.0
"""Seconds between two lines where there is no terminal to draw a bar on."""


class Bar:
    """A bar on a terminal, a line now and then elsewhere; both on standard error."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.last = time.monotonic()

    def __enter__(self) -> Bar:
        if self.console.is_terminal and not self.silent:
            wide = self.console.width >= 90
            columns = (BarColumn(30 if wide else 12), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=self.console, transient=True)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def report(self, state: State) -> None:
        if self.silent:
            return
        left = state.what if state.left is None else f"{_time(state.left)} left: {state.what}"
        left = "done" if state.done == state.total else left
        if self.bar is not None:
            if self.task is None:
                self.task = self.bar.add_task("", total=state.total, left=left)
            self.bar.update(self.task, completed=state.done, total=state.total, left=left)
        elif time.monotonic() - self.last >= EVERY or state.done == state.total:
            self.last = time.monotonic()
            self.console.print(f"{state.done}/{state.total}, {left}", highlight=False, soft_wrap=True)


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def print_table(console: Console, run: Run) -> None:
    """One table a dataset; distributions side by side where the terminal is wide enough, else one below the other."""
    from fedbilevel.report.reading import WORDS, study
    from fedbilevel.report.summary import cells

    told = study(run)
    columns = [metric for metric in told.main if metric.column in ("test_accuracy", "train_gap", "test_gap")]
    found = cells(told, columns)
    datasets = list(dict.fromkeys(case.key[0] for case in told.cases))
    for dataset in datasets:
        cases = [case for case in told.cases if case.key[0] == dataset]
        beside = len(cases) > 1 and console.width >= 16 + len(cases) * len(columns) * 15
        for together in [cases] if beside else [[case] for case in cases]:
            places = ", ".join(WORDS.get(case.key[1], case.key[1]) for case in together)
            title = f"{WORDS.get(dataset, dataset)}, {places}"
            table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
            table.add_column("", no_wrap=True)
            for case in together:
                for metric in columns:
                    name = WORDS.get(case.key[1], case.key[1])
                    head = f"{name}\n{metric.short}" if beside else metric.short
                    table.add_column(head, justify="left", no_wrap=True)
            for number, method in enumerate(told.names):
                ours: list[Text] = [Text(method)]
                theirs: list[Text] = [Text("  paper", style="dim")]
                for case in together:
                    for metric in columns:
                        ours.append(_cell(found.get((case.number, number, metric.column))))
                        theirs.append(_printed(told.published(case, method, metric.column)))
                if len(ours) > 1 and any(text.plain.strip() for text in ours[1:]):
                    table.add_row(*ours)
                    if any(text.plain for text in theirs[1:]):
                        table.add_row(*theirs)
            console.print(table)
            console.print()


def _number(value: float) -> str:
    text = f"{value:.4f}"
    return text[1:] if text.startswith("0") else text


def _cell(cell: Cell | None) -> Text:
    if cell is None:
        return Text("")
    spread = "" if cell.sd != cell.sd else f"±{_number(cell.sd)}"
    return Text(f"{_number(cell.mean)}{spread}{MARKS[cell.verdict]}", style="bold" if cell.verdict == "best" else "")


def _printed(figure: tuple[float, float] | None) -> Text:
    return Text("" if figure is None else f"{_number(figure[0])}±{_number(figure[1])}", style="dim")


def notes(run: Run) -> list[str]:
    """What has to be said with the table."""
    kept = run.configuration
    told = [
        f"Mean ± standard deviation of {kept['seeds']} runs of {kept['steps']:,} steps; below each row the paper's figures.",
        "* best, beyond noise: the 95 % interval of the paired difference to every other method excludes 0 (Bonferroni).  "
        "+ best mean, but not beyond noise.",
    ]
    if kept["splits"] == "one":
        told.append(
            "One split: ± and the marks are about the draw of minibatches alone, not about other splits (--splits many)."
            + (" FCFL draws none: its runs are one run." if "fcfl" in kept["methods"] else "")
        )
    diverged = int((run.rows["diverged"].astype(str) == "True").sum()) if "diverged" in run.rows else 0
    if diverged:
        told.append(f"{diverged} run(s) diverged and are left out.")
    if kept["metric"] == "equal_opportunity" and kept["convention"] == "between_groups":
        told.append(
            "EqOpp is the largest minus the smallest true-positive rate of the groups, as defined in the paper; --convention "
            "majority_vs_rest compares the largest group with all others and gives numbers of the size the paper prints."
        )
    return told


def json_rows(run: Run) -> dict[str, Any]:
    """The table for machines: one entry a cell."""
    from fedbilevel.report.reading import study
    from fedbilevel.report.summary import cells

    told = study(run)
    columns = [metric for metric in told.main if metric.column in ("test_accuracy", "train_gap", "test_gap")]
    entries = []
    for cell in cells(told, columns).values():
        method = told.names[cell.series]
        printed = told.published(cell.case, method, cell.metric.column)
        entries.append({
            "dataset": cell.case.key[0], "distribution": cell.case.key[1], "method": method, "column": cell.metric.column,
            "mean": cell.mean, "sd": _or_none(cell.sd), "runs": cell.seeds, "verdict": cell.verdict,
            "paper_mean": None if printed is None else printed[0], "paper_sd": None if printed is None else printed[1],
        })  # fmt: skip
    return {"configuration": run.configuration, "cells": entries, "folder": str(run.path)}


def _or_none(value: float) -> float | None:
    return None if value != value else value
