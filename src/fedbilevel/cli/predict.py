"""``fedbilevel predict``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from fedbilevel import storage
from fedbilevel.cli.options import AsJson, Delimiter, Encoding, MappingFile, Quiet
from fedbilevel.cli.own_data import encoding_notes, mapping_at, opened

if TYPE_CHECKING:
    from fedbilevel.jobs.predict import Predictions


def predict(
    folder: Annotated[Path, typer.Argument(help="A folder made by fit.", metavar="DIR")],
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Table, CSV or Parquet.")],
    keep: Annotated[list[str] | None, typer.Option(help="Copy this column into the answer; may be repeated.")] = None,
    model: Annotated[str | None, typer.Option(help="Which model of the folder; the fitted one if not given.")] = None,
    mapping: MappingFile = None,
    site: Annotated[
        str | None,
        typer.Option(help="The site whose rules of the mapping apply; the file's name decides if not given."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the answer; standard output if not given.")] = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predictions for new rows, as CSV.

    The answer has one row for every row of the table, in the same order.  Its columns are prediction and probability: that of
    the positive class, or one column for each of more than two classes; none where a number is predicted.  Rows are read
    and written in chunks, so files may be larger than memory.
    """
    from fedbilevel.jobs.predict import Predictions, fitted_model, in_common_language

    (own,) = opened([rows], delimiter, encoding)
    fitted = fitted_model(folder, model)
    table, notes = in_common_language(own, folder, mapping_at(mapping), site)
    answer = Predictions(fitted, table, keep or ())
    try:
        with _written(out) as file:
            _copy(answer, file, as_json)
            file.flush()
    except BrokenPipeError:
        # Whoever reads has had enough; Python must not complain about the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    if not quiet:
        _notes(answer, [*encoding_notes([table]), *notes])


def _copy(answer: Predictions, file: TextIO, as_json: bool) -> None:
    if not as_json:
        import pandas as pd

        pd.DataFrame(columns=answer.columns).to_csv(file, index=False, lineterminator="\n")
    for frame in answer:
        if as_json:
            frame.round(dict.fromkeys(answer.own[1:], 6)).to_json(file, orient="records", lines=True)
        else:
            frame.to_csv(file, index=False, header=False, float_format="%.6f", lineterminator="\n")


@contextmanager
def _written(out: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears whole or not at all."""
    if out is None:
        yield sys.stdout
        return
    try:
        with storage.draft(out) as draft, draft.open("w", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror or error}.") from error


def _notes(answer: Predictions, notes: list[str]) -> None:
    """What was done to cells, on standard error: the answer itself stays a table."""
    for what, counts in (
        ("missing", answer.missing),
        ("rare among the training rows or new, read as their (other) values", answer.pooled),
        ("values that no training row had", answer.unknown),
    ):
        columns = [f"{name} ({count:,})" for name, count in counts.items() if count]
        if columns:
            more = f" and {len(columns) - 5} more columns" if len(columns) > 5 else ""
            notes.append(f"{what}: {', '.join(columns[:5])}{more}")
    for note in [f"{answer.rows:,} rows", *notes]:
        print(note, file=sys.stderr)
