"""Tables from files, CSV or Parquet, in chunks of bounded size.

>>> import tempfile
>>> from pathlib import Path
>>> file = Path(tempfile.mkdtemp()) / "site.csv"
>>> _ = file.write_text("age;job\\n31;cook\\n;judge\\n")
>>> table = open_table(file)
>>> table.columns, table.delimiter
(('age', 'job'), ';')
>>> [chunk.to_dict("list") for chunk in table.chunks()]
[{'age': ['31', ''], 'job': ['cook', 'judge']}]

A CSV file's first line names the columns; cells are text, without the blanks around them; what means "missing" is for the
schema to say.  Blank lines are skipped.  A Parquet file's columns come as numbers, text and truth values.  The index of a chunk
holds the lines (CSV) or rows (Parquet) in the file, counted from 1, so that a message about a cell can say where it is.

Whatever the bytes, the answer is a table or a ValueError of one sentence, in bounded memory: a record of a CSV file has at
most 1,048,576 characters, a field 131,072 (the limit of Python's own reader).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from fedbilevel.tables.columns import check_columns, listed
from fedbilevel.tables.decoding import LONGEST_RECORD, Lines, TooLong, look

CHUNK_ROWS = 16_384
CHUNK_CHARACTERS = 1 << 22
"""A chunk ends after this many rows, or characters of text, whichever comes first."""
DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that are recognised; any other single character can be given."""
SAMPLE_RECORDS = 100


@dataclass(frozen=True)
class Table:
    """A table in a file: opened, its columns known, its rows not yet read.

    ``kind``: "csv" or "parquet".  ``encoding`` and ``delimiter``: of a CSV file, "" else.  ``unread``: columns of a Parquet
    file whose type cannot be used (lists, binary), with that type; their cells come as missing.
    """

    path: Path
    kind: str
    columns: tuple[str, ...]
    encoding: str = ""
    delimiter: str = ""
    unread: dict[str, str] = field(default_factory=dict)

    def chunks(self, columns: Sequence[str] | None = None, rows: int = CHUNK_ROWS) -> Iterator[pd.DataFrame]:
        """The rows in order, at most ``rows`` at a time; ``columns`` chooses columns."""
        wanted = self.columns if columns is None else tuple(columns)
        self.check_columns(wanted)
        if rows < 1:
            raise ValueError(f"rows={rows!r} must be at least 1.")
        if self.kind == "parquet":
            from fedbilevel.tables.parquet import parquet_chunks

            return parquet_chunks(self.path, wanted, rows)
        return self._csv_chunks(wanted, rows)

    def check_columns(self, wanted: Sequence[str]) -> None:
        """Every one of ``wanted`` must be there; the sentence says what the delimiter may have to do with it."""
        if len(self.columns) == 1 and any(column not in self.columns for column in wanted):
            raise ValueError(
                f"{self.path} has one column only, {self.columns[0][:80]!r}: name the character between its columns "
                "with the option --delimiter."
                if self.kind == "csv"
                else f"{self.path} has one column only, {self.columns[0][:80]!r}."
            )
        check_columns(pd.DataFrame(columns=list(self.columns)), wanted, str(self.path))

    def _csv_chunks(self, wanted: tuple[str, ...], rows: int) -> Iterator[pd.DataFrame]:
        places = [self.columns.index(column) for column in wanted]
        with closing(Lines(self.path, self.encoding)) as lines:
            records = _records(lines, self.delimiter)
            next(records)  # the header
            cells: list[list[str]] = []
            numbers: list[int] = []
            size = 0
            for number, record in records:
                if len(record) != len(self.columns):
                    raise ValueError(
                        f"{self.path}, line {number}: {len(record)} field(s) where the first line names "
                        f"{len(self.columns)} column(s); mend the line, put text that holds {self.delimiter!r} in "
                        "quotes, or name another delimiter."
                    )
                cells.append(record)
                numbers.append(number)
                size += lines.size
                if len(cells) == rows or size >= CHUNK_CHARACTERS:
                    yield _frame(cells, numbers, places, wanted)
                    cells, numbers, size = [], [], 0
            if cells:
                yield _frame(cells, numbers, places, wanted)


def open_table(path: str | Path, *, delimiter: str | None = None, encoding: str | None = None) -> Table:
    """Look at a file and learn its columns.

    Args:
        path: a CSV or Parquet file; which of the two its first bytes tell.
        delimiter: the character between fields; None: the one of `DELIMITERS` that cuts the first records into the same
            number of fields, two at least; of several the one that gives most.
        encoding: "utf-8", "latin-1" or "windows-1252"; None: see `decoding`.
    """
    source = Path(path)
    if delimiter is not None:
        _check_delimiter(delimiter)
    kind, found = look(source, encoding)
    if kind == "parquet":
        from fedbilevel.tables.parquet import parquet_columns

        columns, unread = parquet_columns(source)
        return Table(source, kind, _distinct(source, columns), unread=unread)
    chosen = _sniffed(source, found) if delimiter is None else delimiter
    with closing(Lines(source, found)) as lines:
        header = next(_records(lines, chosen), None)
    if header is None:
        raise ValueError(f"{source} is empty: its first line must name the columns.")
    names = [cell or f"column_{place}" for place, cell in enumerate(header[1], 1)]
    if len(names) == 1 and delimiter is not None:
        other = next((one for one in DELIMITERS if one in names[0]), None)
        if other is not None:
            raise ValueError(
                f"{source}: cut at {delimiter!r}, the first line {names[0][:80]!r} is one column; "
                f"leave the delimiter out, or name {other!r}."
            )
    return Table(source, kind, _distinct(source, names), found, chosen)


def _check_delimiter(delimiter: str) -> None:
    if len(delimiter) != 1 or delimiter in '"\r\n' or not (delimiter == "\t" or delimiter.isprintable()):
        raise ValueError(f"The delimiter must be one character, no quote and no line break, not {delimiter!r}.")


def _distinct(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    first: dict[str, int] = {}
    for place, name in enumerate(names, 1):
        if name in first:
            raise ValueError(
                f"{path} has two columns named {name[:80]!r}, the {first[name]}. and the {place}.; rename one of them."
            )
        first[name] = place
    return tuple(names)


def _sniffed(path: Path, encoding: str) -> str:
    best, score = ",", (0.0, 1)
    for delimiter in DELIMITERS:
        widths: list[int] = []
        with closing(Lines(path, encoding)) as lines:
            try:
                for _, record in _records(lines, delimiter):
                    widths.append(len(record))
                    if len(widths) == SAMPLE_RECORDS:
                        break
            except ValueError:
                # Not this delimiter, or a broken file: then reading it says where.
                widths.append(0)
        if widths[0] > 1:
            found = (widths.count(widths[0]) / len(widths), widths[0])
            if found > score:
                best, score = delimiter, found
    return best


def _records(lines: Lines, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Records with the line each begins on, cells stripped; blank lines are left out."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)
    while True:
        lines.next_record()
        try:
            record = next(reader)
        except StopIteration:
            return
        except (csv.Error, TooLong) as error:
            raise ValueError(_sentence(lines, delimiter, error)) from None
        except UnicodeDecodeError:
            raise ValueError(
                f"{lines.path}, line {lines.number + 1}: the file has changed while it was read."
            ) from None
        if record and (len(record) > 1 or record[0].strip()):
            yield lines.first, [cell.strip() for cell in record]


def _sentence(lines: Lines, delimiter: str, error: Exception) -> str:
    where = f"{lines.path}, line {lines.first}"
    limit = csv.field_size_limit()
    if isinstance(error, TooLong) or "field limit" in str(error):
        place = _long_field("".join(lines.record), delimiter, limit)
        if place:
            return (
                f"{where}: the field in column {place} has more than {limit:,} characters; "
                "close its quote if one is missing, or leave the column out of the file."
            )
        return (
            f"{where}: the record has more than {LONGEST_RECORD:,} characters; is this a table with one line a row? "
            "Leave long columns out of the file."
        )
    if "unexpected end" in str(error):
        return f"{where}: a quote is opened and never closed; close it, or double it if it belongs to the text."
    return (
        f"{where}: text follows a closing quote ({error}); double a quote that belongs to the text, "
        "or name another delimiter."
    )


def _long_field(text: str, delimiter: str, limit: int) -> int:
    """Which field (from 1) exceeds the limit; 0 if none does.  Runs only when a record has been refused."""
    column, length, quoted = 1, 0, False
    for character in text:
        if character == '"':
            quoted = not quoted
        if character == delimiter and not quoted:
            column, length = column + 1, 0
            continue
        length += 1
        if length > limit:
            return column
    return 0


def _frame(cells: list[list[str]], numbers: list[int], places: list[int], wanted: tuple[str, ...]) -> pd.DataFrame:
    index = pd.Index(numbers, name="line")
    columns = {
        name: pd.Series([record[place] for record in cells], index=index, dtype=object)
        for name, place in zip(wanted, places, strict=True)
    }
    return pd.DataFrame(columns, index=index)


def check_same_columns(tables: Sequence[Table]) -> None:
    """The files of all sites must have the same columns, in any order."""
    first, *others = tables
    for other in others:
        lacking = [column for column in first.columns if column not in other.columns]
        extra = [column for column in other.columns if column not in first.columns]
        if lacking or extra:
            what = f"has no column {listed(lacking)}" if lacking else f"has the column {listed(extra)} as well"
            also = f", but {listed(extra)}" if lacking and extra else ""
            raise ValueError(
                f"{other.path} {what}{also}; {first.path} says otherwise: "
                "all sites need the same columns, so rename, add or remove them."
            )
