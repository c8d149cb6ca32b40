"""``fedbilevel compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel import storage
from fedbilevel.cli.terminal import AsJson, Quiet, answer, console, records, say, show


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
    from fedbilevel.runs import read

    runs = [read(folder) for folder in folders]
    told = compared(runs, measure)
    if out is not None:
        if out.is_dir():
            raise ValueError(f"--out {out} is a folder: name a file, such as {out / 'compare.html'}.")
        try:
            storage.write(out, comparison_page(runs, told))
        except OSError as error:
            raise ValueError(f"Cannot write {out} ({error.strerror or error}).") from error
    if as_json:
        tables = {name: records(getattr(told, name)) for name in ("cells", "differences", "options")}
        named = [{"name": name, "path": str(path)} for name, path in zip(told.names, folders, strict=True)]
        answer({"runs": named, **tables, "notes": told.notes})
    elif not quiet:
        screen = console(160)
        show(screen, "Mean ± standard deviation over seeds; differences with 95 % intervals", as_table(told))
        if len(told.options):
            show(screen, "Options that differ", told.options)
        say(screen, *told.notes, *([] if out is None else [f"Page: {out}"]))
