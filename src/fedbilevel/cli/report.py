"""``fedbilevel report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.cli.terminal import AsJson, Quiet, answer, check_folder, progress_lines


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the page; the run folder itself if not given.")] = None,
    figures: Annotated[bool, typer.Option("--figures", help="Also write figures/*.svg and *.png for papers.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """One self-contained HTML page from a run folder.

    Writes page.html and table.tex (LaTeX, booktabs); nothing is run again.
    """
    from fedbilevel.report.page import write_report
    from fedbilevel.runs import read

    run = read(folder)
    check_folder(out)
    with progress_lines(quiet) as progress:
        page, table, *drawn = write_report(run, out, drawn=figures, progress=progress)
    if as_json:
        answer({"page": str(page), "table": str(table), "figures": [str(file) for file in drawn]})
    elif not quiet:
        print(f"Page: {page}\nLaTeX table: {table}")
        if drawn:
            print(f"Figures: {len(drawn)} files in {drawn[0].parent}")
