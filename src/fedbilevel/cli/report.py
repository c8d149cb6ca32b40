"""``fedbilevel report`` and ``fedbilevel compare``: run folders as pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbilevel import storage
from fedbilevel.cli.options import AsJson, Quiet
from fedbilevel.cli.terminal import check_folder, progress_lines, records, tell
from fedbilevel.engines.plot import check_matplotlib


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
    if figures:
        check_matplotlib()
    with progress_lines(quiet) as progress:
        page, table, *drawn = write_report(run, out, drawn=figures, progress=progress)
    told = {"page": str(page), "table": str(table), "figures": [str(file) for file in drawn]}
    shown = [f"Page: {page}", f"LaTeX table: {table}"]
    if drawn:
        shown.append(f"Figures: {len(drawn)} files in {drawn[0].parent}")
    tell(as_json, quiet, told, shown)


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

    Differences are taken seed by seed where seeds and splits are the same.  A star says that the 95 % interval excludes 0.
    """
    from fedbilevel.report.comparison import as_table, comparison_page
    from fedbilevel.report.comparison import compare as compared
    from fedbilevel.runs import read

    runs = [read(folder) for folder in folders]
    found = compared(runs, measure)
    if out is not None:
        if out.is_dir():
            raise ValueError(f"--out {out} is a folder: name a file, such as {out / 'compare.html'}.")
        try:
            storage.write(out, comparison_page(runs, found))
        except OSError as error:
            raise ValueError(f"Cannot write {out} ({error.strerror or error}).") from error

    def shown() -> Iterator[str | tuple[str, Any]]:
        yield "Mean ± standard deviation over seeds; differences with 95 % intervals", as_table(found)
        if len(found.options):
            yield "Options that differ", found.options
        yield from found.notes
        if out is not None:
            yield f"Page: {out}"

    named = [{"name": name, "path": str(path)} for name, path in zip(found.names, folders, strict=True)]
    tables = {name: records(getattr(found, name)) for name in ("cells", "differences", "options")}
    tell(as_json, quiet, {"runs": named, **tables, "notes": found.notes}, shown(), width=160)
