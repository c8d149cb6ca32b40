"""``fedbilevel schema``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.cli import own_data as own
from fedbilevel.cli.terminal import AsJson, Quiet, answer, console, say, show


def schema(
    files: own.Files,
    target: own.Target = None,
    sensitive: own.Sensitive = None,
    site: own.SiteColumn = None,
    positive: own.Positive = None,
    keep_sensitive: own.KeepSensitive = False,
    rare: Annotated[int, typer.Option(help="Values of a category with fewer rows are pooled.", min=1)] = 10,
    out: Annotated[Path | None, typer.Option(help="Write the schema to this TOML file, to be edited.")] = None,
    delimiter: own.Delimiter = None,
    encoding: own.Encoding = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """What the columns of tables are taken for.

    Types, categories, the positive class and the groups, inferred from the files; edit the TOML file to change them, and
    pass it to fit with --schema.
    """
    tables = own.opened(files, delimiter, encoding)
    meaning = own.inferred(tables, target, sensitive, site, positive, keep_sensitive, rare)
    if out is not None:
        meaning.write(out)
    if as_json:
        answer(asdict(meaning))
    elif not quiet:
        screen = console()
        show(screen, f"Columns of {len(files)} file(s), as they would be used", own.schema_frame(meaning))
        edit = [] if out is None else [f"Edit {out} to change this, and pass it on with --schema."]
        say(screen, *own.encoding_notes(tables), *edit)
