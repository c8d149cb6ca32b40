"""The bytes of a table file: what they are, in which encoding, and their lines, each of bounded length.

Rule for the encoding: a file whose bytes are valid UTF-8 from the first to the last is UTF-8 (a byte-order mark in front is
skipped).  Any other file is read as Windows-1252, which is Latin-1 with printable characters in the places of its second set of
control characters; that is what programs write when they say Latin-1.  Five bytes mean nothing there, and control characters
mean that a file is no text at all: such files are refused.
"""

from __future__ import annotations

import codecs
import io
from pathlib import Path
from typing import NamedTuple

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


class Look(NamedTuple):
    """What a file is: ``kind`` "csv" or "parquet", and the name of its encoding (one of `ENCODINGS`; "" for Parquet)."""

    kind: str
    encoding: str


def look(path: Path, encoding: str | None = None) -> Look:
    """Read all bytes once, in blocks, and say what they are; one sentence if they are no table."""
    if encoding is not None and encoding not in ENCODINGS:
        raise ValueError(f"The encoding {encoding!r} is unknown; choose one of {', '.join(ENCODINGS)}.")
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, utf8, first_bad, undefined = 1, True, 0, 0
    with open_bytes(path) as file:
        block = file.read(BLOCK)
        if block[:4] == b"PAR1":
            return Look("parquet", "")
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
        return Look("csv", "windows-1252")
    return Look("csv", encoding or "utf-8")


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


class Lines:
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

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        line = self.text.readline(LONGEST_RECORD + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.size += len(line)
        self.record.append(line)
        if self.size > LONGEST_RECORD:
            raise TooLong
        return line

    def close(self) -> None:
        self.text.close()


class TooLong(Exception):
    """A record exceeds `LONGEST_RECORD`; whoever parses the record says so in a sentence."""
