"""``fedbilevel table1``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbilevel.cli import options
from fedbilevel.cli.studies import conducted, prepare
from fedbilevel.cli.terminal import console
from fedbilevel.report.scales import short

if TYPE_CHECKING:
    from fedbilevel.report.reading import Estimate, Estimates, Metric, Reading
    from fedbilevel.runs import Run
    from fedbilevel.studies.table1 import Verified

OUT = Path("runs/table1")
MARKS = {"best": " *", "lead": " +", "tied": "", "untold": "", "": ""}
"""Behind a cell: the best beyond noise, or the best within noise."""


def table1(
    datasets: Annotated[str, typer.Option(help="adult, credit.")] = "adult,credit",
    distributions: Annotated[str, typer.Option(help="iid, noniid: how rows are dealt to the clients.")] = "iid,noniid",
    methods: Annotated[
        str,
        typer.Option(
            help="fedavg, fedreg, fedminmax, fcfl, fedbio, fedbioacc; fedbio-cells, fedbioacc-cells (our formulation); or "
            "paper, ours, all."
        ),
    ] = "paper",
    seeds: Annotated[int, typer.Option(help="Runs for every cell of the table.", min=1)] = 10,
    steps: Annotated[int, typer.Option(help="Steps of every training.", min=1)] = 2000,
    splits: Annotated[
        str, typer.Option(help="one: the paper's single split; many: a fresh one for every seed.")
    ] = "one",
    grid: Annotated[
        bool, typer.Option("--grid", help="Choose learning rates from .001, .01, .1, 1 on rows set aside.")
    ] = False,
    encoding: Annotated[str, typer.Option(help="clean, or paper (its preprocessing, slips included).")] = "clean",
    metric: options.ClassMetric = "equal_opportunity",
    convention: Annotated[
        str,
        typer.Option(help="How groups are compared: between_groups, to_overall, majority_vs_rest or mean_pairwise."),
    ] = "between_groups",
    positive_label: Annotated[
        str, typer.Option(help="The label that counts as positive in the gaps: favourable (to the person), or other.")
    ] = "favourable",
    contrast: Annotated[
        int | None,
        typer.Option(
            help="Splits of the small comparison below the table: Adult by sex, four methods. By default 5 beside the whole "
            "experiment on Adult, else 0.",
            min=0,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Run folder; if it stops, the same command continues.")] = OUT,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    verify: Annotated[
        Path | None, typer.Option(help="Compute one random run of this folder again and compare; nothing else.")
    ] = None,
) -> None:
    """The paper's Table 1, measured beside the printed one.

    Two datasets, two distributions, six methods, ten seeds.
    """
    from fedbilevel import kernels

    # On a machine that has not built them yet, a compiler can do so while this process loads the rest and reads the data.
    kernels.begin()
    from fedbilevel.studies import table1 as study

    if verify is not None:
        prepare(None)
        _verified(study.verify(verify), verify, as_json, quiet)
        return
    design = study.Design(
        study.named(datasets), study.named(distributions), study.named(methods, study.SHORT), seeds, steps,
        splits, grid, encoding, metric, convention, positive_label=positive_label,
    )  # fmt: skip
    whole = "adult" in design.datasets and design.steps == 2000 and len(design.methods) >= 6
    design = replace(design, contrast=contrast if contrast is not None else 5 if whole else 0)
    prepare(out)
    run = conducted(lambda report, line: study.run(design, out, report, line), out, quiet)
    if as_json:
        print(json.dumps(json_rows(run), ensure_ascii=False))
    elif not quiet:
        paper = console(int(os.environ.get("COLUMNS", "110")))
        print_table(paper, run)
        for note in notes(run):
            paper.print(note, highlight=False)
        _print_contrast(paper, run)
        paper.print(f"Everything is in {out}; fedbilevel report {out} makes a page.", highlight=False, soft_wrap=True)


def _print_contrast(paper: Console, run: Run) -> None:
    """What can be told from noise: a small table, and what follows from it."""
    from fedbilevel.report.brief import contrast_of

    told = contrast_of(run)
    if told is None:
        return
    table = Table(title=told.table.caption, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for head in told.table.heads:
        table.add_column(head)
    for row in told.table.rows:
        table.add_row(*row)
    paper.print()
    paper.print(table)
    for sentence in told.sentences:
        paper.print(sentence, highlight=False)


def _verified(again: Verified, folder: Path, as_json: bool, quiet: bool) -> None:
    row = again.row
    which = f"{row['dataset']} {row['split']} {row['method']}, {row['setting']}, seed {row['seed']}"
    if as_json:
        shown: Any = {name: list(map(str, pair)) for name, pair in again.differences.items()}
        print(json.dumps({"run": which, "same": not shown, "differences": shown}, ensure_ascii=False))
    elif not quiet and not again.differences:
        print(f"{folder}: {which}: computed again, the same.")
    if again.differences:
        name, (old, new) = next(iter(again.differences.items()))
        print(
            f"fedbilevel: {folder}: {which}: computed again, {name} is {new} and not {old}. Another machine or version can "
            "differ in the last digits; see [environment] in run.toml.",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _told(run: Run) -> tuple[Reading, list[Metric], Estimates]:
    """The run, the columns of the table, and its numbers."""
    from fedbilevel.report.reading import estimates, reading_of

    told = reading_of(run)
    columns = [metric for metric in told.main if metric.column in ("test_accuracy", "train_gap", "test_gap")]
    return told, columns, estimates(told, columns)


def print_table(paper: Console, run: Run) -> None:
    """One table a dataset; distributions side by side where the terminal is wide enough, else one below the other."""
    from fedbilevel.report.reading import WORDS

    told, columns, numbers = _told(run)
    for dataset in dict.fromkeys(case.key[0] for case in told.blocks):
        cases = [case for case in told.blocks if case.key[0] == dataset]
        beside = len(cases) > 1 and paper.width >= 16 + len(cases) * len(columns) * 15
        for together in [cases] if beside else [[case] for case in cases]:
            places = [WORDS.get(case.key[1], case.key[1]) for case in together]
            title = f"{WORDS.get(dataset, dataset)}, {', '.join(places)}"
            table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
            table.add_column("", no_wrap=True)
            for place in places:
                for metric in columns:
                    table.add_column(
                        f"{place}\n{metric.short}" if beside else metric.short, justify="left", no_wrap=True
                    )
            pairs = [(case, metric.column) for case in together for metric in columns]
            for number, method in enumerate(told.names):
                ours = [_cell(numbers.get((case.number, number, column))) for case, column in pairs]
                theirs = [_printed(told.published(case, method, column)) for case, column in pairs]
                if any(text.plain.strip() for text in ours):
                    table.add_row(method, *ours)
                    if any(text.plain for text in theirs):
                        table.add_row(Text("  paper", style="dim"), *theirs)
            paper.print(table)
            paper.print()


def _cell(cell: Estimate | None) -> Text:
    if cell is None:
        return Text("")
    spread = "" if cell.sd != cell.sd else f"±{short(cell.sd, 4)}"
    return Text(f"{short(cell.mean, 4)}{spread}{MARKS[cell.verdict]}", style="bold" if cell.verdict == "best" else "")


def _printed(figure: tuple[float, float] | None) -> Text:
    return Text("" if figure is None else f"{short(figure[0], 4)}±{short(figure[1], 4)}", style="dim")


def notes(run: Run) -> list[str]:
    """What has to be said with the table."""
    from fedbilevel.report.brief import CONVENTION

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
        told.append(CONVENTION)
    return told


def json_rows(run: Run) -> dict[str, Any]:
    """The table for machines: one entry a cell."""
    told, _, numbers = _told(run)
    entries = []
    for cell in numbers.values():
        method = told.names[cell.series]
        paper_mean, paper_sd = told.published(cell.block, method, cell.metric.column) or (None, None)
        entries.append({
            "dataset": cell.block.key[0], "distribution": cell.block.key[1], "method": method, "column": cell.metric.column,
            "mean": cell.mean, "sd": None if cell.sd != cell.sd else cell.sd, "runs": cell.seeds, "verdict": cell.verdict,
            "paper_mean": paper_mean, "paper_sd": paper_sd,
        })  # fmt: skip
    return {"configuration": run.configuration, "cells": entries, "folder": str(run.path)}
