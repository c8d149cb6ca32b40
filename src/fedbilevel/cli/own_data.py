"""``fedbilevel schema``, and what it shares with the other commands for tables of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.cli import options
from fedbilevel.cli.terminal import tell

if TYPE_CHECKING:
    import pandas as pd

    from fedbilevel.tables.reading import Table
    from fedbilevel.tables.schema import Schema


def opened(files: Sequence[Path], delimiter: str | None, encoding: str | None) -> list[Table]:
    from fedbilevel.tables.reading import open_table

    meant = {"\\t": "\t", "tab": "\t"}.get(delimiter, delimiter) if delimiter is not None else None
    return [open_table(file, delimiter=meant, encoding=encoding) for file in files]


def encoding_notes(tables: Sequence[Table]) -> list[str]:
    """Files that were taken for something else than UTF-8 are named, so that nobody wonders about odd letters."""
    return [
        f"{table.path} is not UTF-8: read as {table.encoding} (--encoding chooses)."
        for table in tables
        if table.encoding not in ("", "utf-8")
    ]


def inferred(tables: Sequence[Table], target: str | None, sensitive: list[str] | None, site: str | None,
             positive: str | None, keep_sensitive: bool, rare: int = 10, otherwise: str = "") -> Schema:  # fmt: skip
    """What the columns are taken for; ``otherwise``: what could have been named instead of them."""
    if target is None:
        raise ValueError(f"--target is missing: name the column to predict{otherwise}.")
    if not sensitive:
        raise ValueError(f"--sensitive is missing: name the column that makes the groups{otherwise}.")
    from fedbilevel.tables.schema import infer

    return infer(
        tables, target=target, sensitive=sensitive, site=site, positive=positive, keep_sensitive=keep_sensitive, rare=rare
    )  # fmt: skip


def schema_frame(schema: Schema) -> pd.DataFrame:
    """A schema as a table for the terminal."""
    import pandas as pd

    rows = [(schema.target, "target", f"{schema.positive} = 1, {schema.negative} = 0", "left out", "")]
    groups = f"{len(schema.groups)} groups: {shortened(schema.groups)}"
    rule = "left out" if schema.missing_group == "leave out" else "own group"
    rows.append((" & ".join(schema.sensitive), "sensitive", groups, rule, ""))
    if schema.site is not None:
        rows.append((schema.site, "site", "", "refused", ""))
    for column in schema.columns:
        ignored = column.kind == "ignore"
        if ignored and column.name in schema.sensitive:
            continue
        values = shortened(column.values) if column.kind in ("category", "boolean") else ""
        rows.append((column.name, column.kind, values, "" if ignored else column.missing, column.note))
    return pd.DataFrame(rows, columns=["column", "taken as", "values", "missing", "note"])


def shortened(values: Sequence[str], limit: int = 3) -> str:
    some = ", ".join(value if len(value) <= 20 else value[:19] + "…" for value in values[:limit])
    return some + (f" and {len(values) - limit} more" if len(values) > limit else "")


def schema(
    files: options.Files,
    target: options.Target = None,
    sensitive: options.Sensitive = None,
    site: options.SiteColumn = None,
    positive: options.Positive = None,
    keep_sensitive: options.KeepSensitive = False,
    rare: Annotated[int, typer.Option(help="Values of a category with fewer rows are pooled.", min=1)] = 10,
    out: Annotated[Path | None, typer.Option(help="Write the schema to this TOML file, to be edited.")] = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """What the columns of tables are taken for.

    Types, categories, the positive class and the groups, inferred from the files; edit the TOML file to change them, and
    pass it to fit with --schema.
    """
    tables = opened(files, delimiter, encoding)
    meaning = inferred(tables, target, sensitive, site, positive, keep_sensitive, rare)
    if out is not None:
        meaning.write(out)
    edit = [] if out is None else [f"Edit {out} to change this, and pass it on with --schema."]
    columns = f"Columns of {len(files)} file(s), as they would be used", schema_frame(meaning)
    tell(as_json, quiet, asdict(meaning), [columns, *encoding_notes(tables), *edit])
