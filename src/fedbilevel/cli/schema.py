"""``fedbilevel schema``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedbilevel.cli.own_data import (
    Delimiter,
    Encoding,
    Files,
    KeepSensitive,
    Positive,
    Sensitive,
    SiteColumn,
    Target,
    encoding_notes,
    opened,
    schema_frame,
)
from fedbilevel.cli.terminal import AsJson, Quiet, show


def schema(
    files: Files,
    target: Target = None,
    sensitive: Sensitive = None,
    site: SiteColumn = None,
    positive: Positive = None,
    keep_sensitive: KeepSensitive = False,
    rare: Annotated[int, typer.Option(help="Values of a category with fewer rows are pooled.", min=1)] = 10,
    out: Annotated[Path | None, typer.Option(help="Write the schema to this TOML file, to be edited.")] = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """What the columns of tables are taken for.

    Types, categories, the positive class and the groups, inferred from the files; edit the TOML file to change them, and
    pass it to fit with --schema.
    """
    if target is None:
        raise ValueError("--target is missing: name the column to predict.")
    if not sensitive:
        raise ValueError("--sensitive is missing: name the column that makes the groups.")
    from fedbilevel.tables.infer import infer

    tables = opened(files, delimiter, encoding)
    found = infer(
        tables, target=target, sensitive=sensitive, site=site, positive=positive, keep_sensitive=keep_sensitive, rare=rare
    )  # fmt: skip
    if out is not None:
        found.write(out)
    if as_json:
        print(json.dumps(asdict(found), ensure_ascii=False))
    elif not quiet:
        console = Console() if sys.stdout.isatty() else Console(width=120)
        show(console, f"Columns of {len(files)} file(s), as they would be used", schema_frame(found))
        for note in encoding_notes(tables):
            console.print(note, highlight=False, soft_wrap=True)
        if out is not None:
            console.print(f"Edit {out} to change this, and pass it on with --schema.", highlight=False, soft_wrap=True)
