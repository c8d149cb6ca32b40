"""Parquet files, through pyarrow where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

CHUNK_BYTES = 1 << 23
"""Batches are cut so that, by the file's own figures, they hold about this many bytes."""


def parquet_columns(path: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the columns, and those of a type that is no number, text, truth value or date, with that type."""
    with _opened(path) as file:
        schema = file.schema_arrow
        unread = {field.name: str(field.type) for field in schema if _kind(field.type) == "unread"}
        return list(schema.names), unread


def parquet_chunks(path: Path, columns: tuple[str, ...], rows: int) -> Iterator[pd.DataFrame]:
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
                found = {name: _column(batch.column(name), index) for name in columns}
            done += batch.num_rows
            if batch.num_rows:
                yield pd.DataFrame(found, index=index)


def _batch_rows(metadata: Any, rows: int) -> int:
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    heaviest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1.0)
    return int(max(1, min(rows, CHUNK_BYTES / max(1.0, heaviest))))


def _kind(kind: Any) -> str:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_boolean(kind):
        return "truth"
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if types.is_temporal(kind) and not types.is_duration(kind) and not types.is_interval(kind):
        return "date"
    return "nothing" if types.is_null(kind) else "unread"


def _column(values: Any, index: pd.Index) -> pd.Series[Any]:
    import pyarrow as pa

    kind = _kind(values.type)
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


class _faults:
    """Whatever pyarrow makes of a damaged file, as one sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        import pyarrow as pa

        if isinstance(error, pa.ArrowException | OSError | ValueError | KeyError | TypeError | OverflowError):
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{self.path} is damaged or no Parquet file ({reason}); write it anew.") from error
