"""A federation on one machine, to see and to test the real thing: Adult's rows at three sites, kits, policies, a schema."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedbilevel.datasets.adult import TARGET, TRAIN_ROWS, read_adult
from fedbilevel.federation.operator.provision import Kits, provision
from fedbilevel.federation.protocol.policy import FILE, TELL
from fedbilevel.federation.protocol.record import write_text
from fedbilevel.tables.infer import infer
from fedbilevel.tables.reading import open_table
from fedbilevel.tables.schema import Schema

SHARES = {"north": 0.5, "south": 0.3, "west": 0.2}
"""The sites and the share of the training rows each of them has."""
SENSITIVE = "sex"
MINIMUM_ROWS = 20


@dataclass(frozen=True)
class Demo:
    """``tables``: each site's file; ``test``: the coordinator's own rows, which no site has."""

    kits: Kits
    schema: Schema
    schema_file: Path
    tables: dict[str, Path]
    test: Path


def prepare(folder: Path, rows: int | None = None, seed: int = 0) -> Demo:
    """Write everything under ``folder``; ``rows`` takes that many of Adult's training rows, all if None."""
    tables, test = write_tables(folder / "tables", rows, seed)
    # In a real federation one site drafts the schema and the others check it; the file is all that travels.
    first = next(iter(tables.values()))
    schema = infer([open_table(first)], target=TARGET, sensitive=SENSITIVE)
    file = schema.write(folder / "schema.toml")
    port, admin_port = free_ports(2)
    kits = provision(folder / "federation", list(SHARES), port=port, admin_port=admin_port)
    for site, table in tables.items():
        write_text(kits.sites[site] / "local" / FILE, policy_text(table, schema))
    return Demo(kits, schema, file, tables, test)


def write_tables(folder: Path, rows: int | None, seed: int) -> tuple[dict[str, Path], Path]:
    """The rows of adult.data dealt to the sites, those of adult.test for the coordinator; as CSV files."""
    frame = read_adult()
    order = np.random.default_rng(seed).permutation(TRAIN_ROWS)[:rows]
    cuts = (np.cumsum([*SHARES.values()])[:-1] * len(order)).round().astype(int)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        site: _csv(frame.iloc[np.sort(part)], folder / f"{site}.csv")
        for site, part in zip(SHARES, np.split(order, cuts), strict=True)
    }
    return tables, _csv(frame.iloc[TRAIN_ROWS:], folder / "test.csv")


def policy_text(table: Path, schema: Schema) -> str:
    """The file of a site that lets a run by ``schema`` read ``table`` and tell everything there is to tell."""
    return (
        "# What this site allows; see docs/federation.md.\n"
        f"[data]\ntable = {_quoted(str(table))}\ncolumns = [{', '.join(map(_quoted, schema.needed()))}]\n\n"
        f"[policy]\ntell = [{', '.join(map(_quoted, TELL))}]\nminimum_rows = {MINIMUM_ROWS}\n"
    )


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _csv(frame: pd.DataFrame, file: Path) -> Path:
    frame.to_csv(file, index=False)
    return file.resolve()


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
