"""Writing TOML (the standard library reads it): tables of texts, numbers, truth values, and lists of these."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np


def plain(value: Any, name: str = "value") -> Any:
    """``value`` as TOML can hold it: None left out of tables, tuples as lists, paths as text, NumPy's numbers as numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(one, f"{name}.{key}") for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple | range):
        return [plain(one, f"{name}[{number}]") for number, one in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name} is {value!r}: only texts, numbers, truth values, lists and tables of them can be kept.")


def toml_text(table: Mapping[str, Any]) -> str:
    """A whole document: what is no table first, then each table under its heading."""
    return "".join(_lines(plain(table), ())).lstrip("\n")


def _lines(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"\n[{'.'.join(map(_key, path))}]\n"] if path else []
    lines += [f"{_key(name)} = {_value(one)}\n" for name, one in table.items() if not isinstance(one, dict)]
    for name, one in table.items():
        if isinstance(one, dict):
            lines += _lines(one, (*path, name))
    return lines


def _key(name: str) -> str:
    bare = name != "" and all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name)
    return name if bare else _text(name)


def _text(value: str) -> str:
    # JSON's escapes are TOML's too, but for DEL, and for halves of surrogate pairs, which are no text.
    return json.dumps(value.encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        return repr(value) if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_value(one)}" for name, one in value.items()) + "}"
    return str(value)
