"""The TOML files that people edit, schema and mapping: read, checked and written, every mistake answered with one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedbilevel import storage
from fedbilevel.hints import hint
from fedbilevel.tables.reading import open_bytes

LARGEST_FILE = 1 << 24
Made = TypeVar("Made")


def read(path: str | Path, what: str, make: Callable[[dict[str, Any]], Made]) -> Made:
    """What ``make`` makes of the file; ``what`` it is, for messages."""
    with open_bytes(Path(path)) as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"{path} is larger than {LARGEST_FILE:,} bytes: no {what} is; name the TOML file.")
    try:
        return parse(content.decode("utf-8-sig"), str(path), make)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: a {what} is a TOML file in UTF-8.") from None


def parse(content: str, source: str, make: Callable[[dict[str, Any]], Made]) -> Made:
    """What ``make`` makes of the text; ``source`` names it in messages."""
    try:
        return make(storage.read_toml(content))
    except storage.Unreadable as error:
        raise ValueError(f"{source} is no valid TOML ({' '.join(str(error).split())[:200]}).") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def write(path: str | Path, text: str) -> Path:
    """Whole or not at all."""
    try:
        storage.write(Path(path), text)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}.") from error
    return Path(path)


def check_names(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{where}{name!r} is unknown; {hint(name, known, len(known))}")
