"""``fedbilevel compare``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedbilevel.cli.terminal import AsJson, Quiet, records, show

if TYPE_CHECKING:
    from fedbilevel.report.comparison import Comparison


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Two run folders or more.")],
    measure: Annotated[
        list[str] | None, typer.Option(help="A column to compare, such as seconds; may be given several times.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write a page to this file.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Runs side by side, with differences to the first.

    Differences are taken seed by seed where seeds and splits are the same; a star: the 95 % interval excludes 0.
    """
    from fedbilevel.report.comparison import as_table, comparison_page
    from fedbilevel.report.comparison import compare as compared
    from fedbilevel.report.page.files import write_page
    from fedbilevel.runs import read

    runs = [read(folder) for folder in folders]
    found = compared(runs, measure)
    if out is not None:
        if out.is_dir():
            raise ValueError(f"--out {out} is a folder: name a file, such as {out / 'compare.html'}.")
        write_page(out, comparison_page(runs, found))
    if as_json:
        print(json.dumps(_machine(found, folders), ensure_ascii=False, allow_nan=False))
    elif not quiet:
        console = Console() if sys.stdout.isatty() else Console(width=160)
        show(console, "Mean ± standard deviation over seeds; differences with 95 % intervals", as_table(found))
        if len(found.options):
            show(console, "Options that differ", found.options)
        for note in found.notes:
            console.print(note, highlight=False, soft_wrap=True)
        if out is not None:
            console.print(f"Page: {out}", highlight=False, soft_wrap=True)


def _machine(found: Comparison, folders: list[Path]) -> dict[str, Any]:
    """Everything compared, with None where a number is missing."""
    return {
        "runs": [{"name": name, "path": str(path)} for name, path in zip(found.names, folders, strict=True)],
        "cells": records(found.cells),
        "differences": records(found.differences),
        "options": records(found.options),
        "notes": found.notes,
    }
