"""``fedbilevel report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.cli.terminal import AsJson, Quiet, check_folder, progress_lines


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
    from fedbilevel.report.page.files import write_report
    from fedbilevel.runs import read

    run = read(folder)
    check_folder(out)
    if figures and not quiet:
        with progress_lines() as progress:
            written = write_report(run, out, drawn=True, progress=progress)
    else:
        written = write_report(run, out, drawn=figures)
    if as_json:
        print(
            json.dumps(
                {"page": str(written[0]), "table": str(written[1]), "figures": [str(one) for one in written[2:]]}
            )
        )
    elif not quiet:
        print(f"Page: {written[0]}")
        print(f"LaTeX table: {written[1]}")
        if figures:
            print(f"Figures: {len(written) - 2} files in {written[2].parent}")
