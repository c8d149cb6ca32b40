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

Rule for the encoding: a file whose bytes are valid UTF-8 from the first to the last is UTF-8 (a byte-order mark in front is
skipped).  Any other file is read as Windows-1252, which is Latin-1 with printable characters in the places of its second set of
control characters; that is what programs write when they say Latin-1.  Five bytes mean nothing there, and control characters
mean that a file is no text at all: such files are refused.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.tables.columns import check_columns

CHUNK_ROWS = 16_384
CHUNK_CHARACTERS = 1 << 22
"""A chunk ends after this many rows, or characters of text, whichever comes first."""
DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that are recognised; any other single character can be given."""
SAMPLE_RECORDS = 100
CHUNK_BYTES = 1 << 23
"""Batches of a Parquet file are cut so that, by its own figures, they hold about this many bytes."""
ENCODINGS = {"utf-8": "utf-8-sig", "latin-1": "latin-1", "windows-1252": "cp1252"}
"""Names a user may give, and the codecs behind them."""
BLOCK = 1 << 20
LONGEST_RECORD = 1 << 20
"""Characters of one record; what is longer is a file without line breaks or with a quote that is never closed."""

_NEWLINE = b"\n"
_PRINTABLE = bytes(set(range(256)) - (set(range(32)) - set(b"\t\n\r\x0b\x0c")))
_UNDEFINED = b"\x81\x8d\x8f\x90\x9d"  # in Windows-1252
_FOREIGN = {
    b"\x1f\x8b": "is compressed (gzip): unpack it first",
    b"PK\x03\x04": "is a ZIP archive or an Excel workbook: save the table as CSV",
    b"\xff\xfe": "is UTF-16 text: save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text: save it as UTF-8",
    b"%PDF": "is a PDF: save the table as CSV",
}


@dataclass(frozen=True)
class Table:
    """A table in a file: opened, its columns known, its rows not yet read.

    ``kind``: "csv", "parquet", or "frame" for a table that is ``held`` in memory.  ``encoding`` and ``delimiter``: of a CSV
    file, "" else.  ``unread``: columns of a Parquet file whose type cannot be used (lists, binary), with that type; their cells
    come as missing.
    """

    path: Path
    kind: str
    columns: tuple[str, ...]
    encoding: str = ""
    delimiter: str = ""
    unread: dict[str, str] = field(default_factory=dict)
    held: pd.DataFrame | None = field(default=None, repr=False, compare=False)
    _mapped: tuple[Table, dict[str, str], Callable[[pd.DataFrame], pd.DataFrame]] | None = field(
        default=None, repr=False, compare=False
    )

    def mapped(
        self, names: Mapping[str, str], left_out: Collection[str], change: Callable[[pd.DataFrame], pd.DataFrame]
    ) -> Table:
        """The same table with some columns called by other ``names``, some ``left_out``, and every chunk ``change``d then."""
        kept = [column for column in self.columns if column not in left_out]
        unread = {names.get(column, column): kind for column, kind in self.unread.items()}
        columns = _distinct(self.path, [names.get(column, column) for column in kept])
        back = {names.get(column, column): column for column in kept}

        def renamed(chunk: pd.DataFrame) -> pd.DataFrame:
            return change(chunk.rename(columns=dict(names)))

        return replace(self, columns=columns, unread=unread, _mapped=(self, back, renamed))

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Table:
        """A pandas table in the place of a file; messages call it "The table"."""
        return cls(Path("The table"), "frame", tuple(map(str, frame.columns)), held=frame)

    def chunks(self, columns: Sequence[str] | None = None, rows: int = CHUNK_ROWS) -> Iterator[pd.DataFrame]:
        """The rows in order, at most ``rows`` at a time; ``columns`` chooses columns."""
        wanted = self.columns if columns is None else tuple(columns)
        self.check_columns(wanted)
        if rows < 1:
            raise ValueError(f"rows={rows!r} must be at least 1.")
        if self._mapped is not None:
            own, back, change = self._mapped
            return (change(chunk) for chunk in own.chunks([back[column] for column in wanted], rows))
        if self.held is not None:
            return iter([self.held[list(wanted)]])
        if self.kind == "parquet":
            return _parquet_chunks(self.path, wanted, rows)
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
        with closing(_Lines(self.path, self.encoding)) as lines:
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
        encoding: "utf-8", "latin-1" or "windows-1252"; None: see above.
    """
    source = Path(path)
    if delimiter is not None:
        _check_delimiter(delimiter)
    kind, found = _look(source, encoding)
    if kind == "parquet":
        columns, unread = _parquet_columns(source)
        return Table(source, kind, _distinct(source, columns), unread=unread)
    chosen = _sniffed(source, found) if delimiter is None else delimiter
    with closing(_Lines(source, found)) as lines:
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


def site_names(tables: Sequence[Table]) -> list[str]:
    """What sites are called whose tables these are: as the files, without suffix where that tells them apart."""
    for names in ([table.path.stem for table in tables], [str(table.path) for table in tables]):
        if len(set(names)) == len(names):
            return names
    return [f"table {number}" for number in range(1, len(tables) + 1)]


def _look(path: Path, encoding: str | None) -> tuple[str, str]:
    """Read all bytes once, in blocks: "csv" or "parquet", and the encoding (one of `ENCODINGS`; "" for Parquet).

    One sentence if they are no table.
    """
    if encoding is not None and encoding not in ENCODINGS:
        raise ValueError(f"The encoding {encoding!r} is unknown; choose one of {', '.join(ENCODINGS)}.")
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, utf8, first_bad, undefined = 1, True, 0, 0
    with open_bytes(path) as file:
        block = file.read(BLOCK)
        if block[:4] == b"PAR1":
            return "parquet", ""
        if path.suffix.lower() in (".parquet", ".pq"):
            raise ValueError(f"{path} is named like a Parquet file but does not begin like one; write it anew.")
        for mark, sentence in _FOREIGN.items():
            if block.startswith(mark):
                raise ValueError(f"{path} {sentence}.")
        if not block.removeprefix(codecs.BOM_UTF8).strip():
            raise ValueError(f"{path} is empty: its first line must name the columns.")
        while block:
            _refuse_control_characters(path, block, lines)
            if utf8:
                try:
                    decoder.decode(block)
                except UnicodeDecodeError as error:
                    utf8 = False
                    first_bad = lines + block.count(_NEWLINE, 0, error.start)
            if not undefined and len(block.translate(None, _UNDEFINED)) < len(block):
                places = (block.find(character) for character in _UNDEFINED)
                undefined = lines + block.count(_NEWLINE, 0, min(place for place in places if place >= 0))
            lines += block.count(_NEWLINE)
            block = file.read(BLOCK)
    if utf8:
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            utf8, first_bad = False, lines
    if encoding == "utf-8" and not utf8:
        raise ValueError(f"{path}, line {first_bad}: not valid UTF-8; leave the encoding out, or name another.")
    if encoding == "windows-1252" or (encoding is None and not utf8):
        if undefined:
            raise ValueError(
                f"{path}, line {undefined}: neither UTF-8 nor Latin-1 (Windows-1252) text; save the file as UTF-8."
            )
        return "csv", "windows-1252"
    return "csv", encoding or "utf-8"


def _refuse_control_characters(path: Path, block: bytes, lines: int) -> None:
    found = block.translate(None, _PRINTABLE)
    if found:
        place = block.find(found[:1])
        what = "a NUL byte" if found[:1] == b"\0" else f"the control character 0x{found[0]:02x}"
        raise ValueError(
            f"{path}, line {lines + block.count(_NEWLINE, 0, place)}: {what}, so this is no text file; "
            "save the table as CSV (UTF-8) or Parquet."
        )


def open_bytes(path: Path) -> io.BufferedReader:
    """The file, or one sentence why not."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise ValueError(f"There is no file {path}.") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder: name a file.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error


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
        with closing(_Lines(path, encoding)) as lines:
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


class _TooLong(Exception):
    """A record exceeds `LONGEST_RECORD`; whoever parses the record says so in a sentence."""


class _Lines:
    """Lines of a text file for `csv.reader`, which may take several for one record; none may grow without end.

    ``number``: lines given so far.  Call `next_record` before every record: it empties ``record``, the text of the record
    so far, and notes in ``first`` the line it begins with.
    """

    def __init__(self, path: Path, encoding: str) -> None:
        self.path = path
        self.text = io.TextIOWrapper(open_bytes(path), encoding=ENCODINGS[encoding], newline="")
        self.number = 0
        self.next_record()

    def next_record(self) -> None:
        self.record: list[str] = []
        self.size = 0
        self.first = self.number + 1

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.text.readline(LONGEST_RECORD + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.size += len(line)
        self.record.append(line)
        if self.size > LONGEST_RECORD:
            raise _TooLong
        return line

    def close(self) -> None:
        self.text.close()


def _records(lines: _Lines, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Records with the line each begins on, cells stripped; blank lines are left out."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)
    while True:
        lines.next_record()
        try:
            record = next(reader)
        except StopIteration:
            return
        except (csv.Error, _TooLong) as error:
            raise ValueError(_sentence(lines, delimiter, error)) from None
        except UnicodeDecodeError:
            raise ValueError(
                f"{lines.path}, line {lines.number + 1}: the file has changed while it was read."
            ) from None
        if record and (len(record) > 1 or record[0].strip()):
            yield lines.first, [cell.strip() for cell in record]


def _sentence(lines: _Lines, delimiter: str, error: Exception) -> str:
    where = f"{lines.path}, line {lines.first}"
    limit = csv.field_size_limit()
    if isinstance(error, _TooLong) or "field limit" in str(error):
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


def _parquet_columns(path: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the columns, and those of a type that is no number, text, truth value or date, with that type."""
    with _opened(path) as file:
        schema = file.schema_arrow
        unread = {field.name: str(field.type) for field in schema if _parquet_kind(field.type) == "unread"}
        return list(schema.names), unread


def _parquet_chunks(path: Path, columns: tuple[str, ...], rows: int) -> Iterator[pd.DataFrame]:
    with _opened(path) as file:
        size = _batch_rows(file.metadata, rows)
        batches = file.iter_batches(batch_size=size, columns=list(columns))
        done = 0
        while True:
            # Errors of the caller must not be taken for the file's, so the frame is yielded outside.
            with _faults(path):
                batch = next(batches, None)
                if batch is None:
                    return
                index = pd.RangeIndex(done + 1, done + 1 + batch.num_rows, name="row")
                found = {name: _parquet_column(batch.column(name), index) for name in columns}
            done += batch.num_rows
            if batch.num_rows:
                yield pd.DataFrame(found, index=index)


def _batch_rows(metadata: Any, rows: int) -> int:
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    heaviest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1.0)
    return int(max(1, min(rows, CHUNK_BYTES / max(1.0, heaviest))))


def _parquet_kind(kind: Any) -> str:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return _parquet_kind(kind.value_type)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_boolean(kind):
        return "truth"
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if types.is_temporal(kind) and not types.is_duration(kind) and not types.is_interval(kind):
        return "date"
    return "nothing" if types.is_null(kind) else "unread"


def _parquet_column(values: Any, index: pd.Index) -> pd.Series[Any]:
    import pyarrow as pa

    kind = _parquet_kind(values.type)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if kind == "number":
        # A null becomes NaN; whole numbers beyond 2^53 lose digits, which only an identifier would have.
        numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return pd.Series(np.array(numbers), index=index)
    if kind in ("text", "date"):
        cells = values.cast(pa.string()).to_pylist()
        return pd.Series([None if cell is None else cell.strip() for cell in cells], index=index, dtype=object)
    cells = values.to_pylist() if kind == "truth" else [None] * len(values)
    return pd.Series(cells, index=index, dtype=object)


def _opened(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(f"{path} is a Parquet file, and pyarrow is not installed: pip install pyarrow.") from None
    with _faults(path):
        return parquet.ParquetFile(path)


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    """Whatever pyarrow makes of a damaged file, as one sentence."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is damaged or no Parquet file ({reason}); write it anew.") from error
