"""What the commands for tables of one's own share: options, opening files, showing a schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import pandas as pd

    from fedbilevel.tables.reading import Table
    from fedbilevel.tables.schema import Schema

Files = Annotated[
    list[Path], typer.Argument(metavar="FILES", help="Tables, CSV or Parquet: one a site, or one for all.")
]
Target = Annotated[str | None, typer.Option(help="The column to predict.")]
Sensitive = Annotated[
    list[str] | None,
    typer.Option(help="The column that makes the groups; name several to join them ('Black & Female')."),
]
SiteColumn = Annotated[str | None, typer.Option("--site", help="The column that says which site a row belongs to.")]
Positive = Annotated[str | None, typer.Option(help="The class that counts as 1; all others count as 0.")]
KeepSensitive = Annotated[bool, typer.Option(help="Use the sensitive columns as features too.")]
Delimiter = Annotated[
    str | None, typer.Option(help="Character between the fields of CSV files; recognised if not given.")
]
Encoding = Annotated[str | None, typer.Option(help="utf-8, latin-1 or windows-1252; recognised if not given.")]


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
