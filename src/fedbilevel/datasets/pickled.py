"""A data frame out of a pickle, without running anything that the pickle names.

A pickle is a program: it names functions and has them called.  Here no name is looked up.  Each of the dozen names that
a pickled data frame of plain columns holds stands for a record of how it would have been called; any other name is refused.
The table is then read off the records.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pandas as pd

_NUMPY = [f"numpy.{core}.{module}" for core in ("core", "_core") for module in ("multiarray", "numeric")]
_RENAMED = [  # pandas 3 names its public classes where they are public
    (".core.frame", "DataFrame"), (".core.indexes.base", "Index"), (".core.indexes.range", "RangeIndex"),
    ("", "DataFrame"), ("", "Index"), ("", "RangeIndex"),
]  # fmt: skip
ALLOWED = {
    *((f"pandas{module}", name) for module, name in _RENAMED), ("pandas.core.internals.managers", "BlockManager"),
    ("pandas._libs.internals", "_unpickle_block"), ("pandas.core.indexes.base", "_new_Index"),
    ("builtins", "slice"),
    ("numpy", "dtype"), ("numpy", "ndarray"),
    *((module, name) for module in _NUMPY for name in ("_reconstruct", "_frombuffer")),
}  # fmt: skip


class _Record:
    """A call that was not made: its arguments, and the state that would have been set afterwards."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        record = object.__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Record]:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return type(name, (_Record,), {})


def read_frame(contents: bytes) -> pd.DataFrame:
    """The table in a pickled data frame with columns of numbers and texts; ValueError for anything else."""
    try:
        frame = _Reader(io.BytesIO(contents)).load()
        blocks, (columns, _) = frame.state["_mgr"].args
        names = _array(columns.args[1]["data"])
        found: dict[str, Any] = {}
        for block in blocks:
            values, place, _ = block.args
            places = range(*place.args) if type(place).__name__ == "slice" else _array(place)
            found |= {str(names[at]): row for at, row in zip(places, _array(values), strict=True)}
        return pd.DataFrame({str(name): found[str(name)] for name in names})
    except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"This is no pickled data frame with columns of numbers and texts ({error}).") from error


def _array(record: Any) -> np.ndarray[Any, Any]:
    if type(record).__name__ == "_frombuffer":
        buffer, kind, shape, order = record.args
        return np.frombuffer(buffer, _plain(kind)).reshape(shape, order=order)
    _, shape, kind, by_column, contents = record.state
    if isinstance(contents, list):  # of texts, as a pickle holds an array of objects
        flat = np.empty(len(contents), dtype=object)
        flat[:] = contents
    else:
        flat = np.frombuffer(contents, _plain(kind))
    return flat.reshape(shape, order="F" if by_column else "C")


def _plain(kind: _Record) -> np.dtype[Any]:
    """The numeric type of a record of one; its state begins with a version and the order of the bytes."""
    plain: np.dtype[Any] = np.dtype(kind.args[0])
    return plain.newbyteorder(">") if kind.state[1] == ">" else plain
