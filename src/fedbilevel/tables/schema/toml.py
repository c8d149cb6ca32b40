"""A schema as a TOML file, for people to read and edit."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedbilevel.tables.files.decoding import open_bytes
from fedbilevel.tables.schema.schema import Column, Schema

FORMAT = 1
LARGEST_FILE = 1 << 24
HEADING = """\
# What the columns of the table mean.  Edit this file and pass it on with --schema.
#   kind       "number", "category", "boolean" or "ignore"
#   missing    "flag" (a further column says that the cell was missing), "plain" (it does not), "refuse"
#   pooled     whether values that are not listed share one column, "(other)"; if not they are all zeros
#   positive   the class that counts as 1
"""
_LISTS = ("values", "also_missing", "classes", "sensitive", "groups", "missing")


def text(schema: Schema) -> str:
    """The file's text."""
    lines = [HEADING, f"format = {FORMAT}"]
    for field in fields(Schema):
        value = getattr(schema, field.name)
        if field.name != "columns" and value is not None:
            lines.append(f"{field.name} = {_value(value)}")
    usual = Column("usual")
    for column in schema.columns:
        lines += ["", f"[columns.{_value(column.name)}]", f"kind = {_value(column.kind)}"]
        for field in fields(Column):
            value = getattr(column, field.name)
            if field.name in ("name", "kind"):
                continue
            if value != getattr(usual, field.name) or (field.name == "missing" and column.kind != "ignore"):
                lines.append(f"{field.name} = {_value(value)}")
    return "\n".join(lines) + "\n"


def parse(content: str, source: str = "The schema") -> Schema:
    """The schema in a text; ``source`` names it in messages."""
    try:
        found = tomllib.loads(content)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{source} is no valid TOML ({' '.join(str(error).split())[:200]}).") from None
    try:
        return _schema(found)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def write(schema: Schema, path: Path) -> Path:
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text(schema), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        draft.unlink(missing_ok=True)
    return path


def read(path: Path) -> Schema:
    with open_bytes(path) as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"{path} is larger than {LARGEST_FILE:,} bytes: no schema is; name the TOML file.")
    try:
        return parse(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: a schema is a TOML file in UTF-8.") from None


def _schema(found: dict[str, Any]) -> Schema:
    form = found.pop("format", None)
    if form != FORMAT:
        raise ValueError(
            f"format = {form!r}, but this version of fedbilevel reads format {FORMAT}; make the schema anew."
        )
    columns = found.pop("columns", {})
    if not isinstance(columns, dict) or not all(isinstance(entry, dict) for entry in columns.values()):
        raise ValueError("[columns.NAME] must be a table for every column.")
    known = [field.name for field in fields(Schema) if field.name != "columns"]
    _known("", found, known)
    for needed in ("target", "classes", "positive", "sensitive", "groups"):
        if needed not in found:
            raise ValueError(f"{needed} is missing.")
    options = [field.name for field in fields(Column) if field.name != "name"]
    made = []
    for name, entry in columns.items():
        _known(f"column {name!r}: ", entry, options)
        if "kind" not in entry:
            raise ValueError(f"column {name!r}: kind is missing.")
        made.append(Column(name=name, **_tuples(entry)))
    return Schema(columns=tuple(made), **_tuples(found))


def _known(where: str, found: Iterable[str], known: Sequence[str]) -> None:
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
            raise ValueError(f"{where}{name!r} is unknown; {hint}")


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples.  In a column ``missing`` is a word, in the schema a list, so the type decides."""
    return {
        name: tuple(value) if name in _LISTS and isinstance(value, list) else value for name, value in entry.items()
    }


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(float(value))
    if isinstance(value, str):
        # A JSON string is a TOML string, but for the delete character, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    items = [_value(item) for item in value]
    line = f"[{', '.join(items)}]"
    if len(line) <= 100:
        return line
    return "[\n" + "".join(f"  {item},\n" for item in items) + "]"
