"""A federation on one machine, to see and to test the real thing: Adult's rows at three sites, kits, policies, a schema."""

from __future__ import annotations

import contextlib
import random
import socket
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedbilevel import storage
from fedbilevel.datasets.shipped import ADULT_TARGET, TRAIN_ROWS, read_adult
from fedbilevel.engines.stages import TELL
from fedbilevel.federation.operator.kits import Kits, Roster, establish
from fedbilevel.federation.protocol.policy import FILE
from fedbilevel.tables.reading import open_table
from fedbilevel.tables.schema import Schema, infer

SHARES = {"north": 0.5, "south": 0.3, "west": 0.2}
"""The sites and the share of the training rows each of them has."""
SENSITIVE = "sex"
MINIMUM_ROWS, MINIMUM_BATCH = 20, 16
PORTS = range(10_000, 32_768)
"""Those from 32,768 on Linux gives to outgoing connections; other systems begin later."""


@dataclass(frozen=True)
class Demo:
    """``test``: the coordinator's own rows, which no site has."""

    kits: Kits
    schema: Schema
    test: Path


def prepare(folder: Path, rows: int | None = None, seed: int = 0, secure: bool = True) -> Demo:
    """Write everything under ``folder``; ``rows`` takes that many of Adult's training rows, all if None.

    ``secure``: the sites take part in secure sums only.
    """
    tables, test = write_tables(folder / "tables", rows, seed)
    # In a real federation one site drafts the schema and the others check it; the file is all that travels.
    schema = infer([open_table(next(iter(tables.values())))], target=ADULT_TARGET, sensitive=SENSITIVE)
    schema.write(folder / "schema.toml")
    port, admin_port = free_ports(2)
    kits = establish(folder / "federation", Roster(tuple(SHARES), port=port, admin_port=admin_port)).kits
    for site, table in tables.items():
        storage.write(kits.sites[site] / "local" / FILE, policy_text(table, schema, secure))
    return Demo(kits, schema, test)


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


def policy_text(table: Path, schema: Schema, secure: bool = True) -> str:
    """The file of a site that lets runs by ``schema`` read ``table`` and tell everything, without asking anybody."""
    data = {"table": table, "columns": schema.needed()}
    # Adult is public: no group of it is too small to be spoken of.
    bounds = {"tell": TELL, "minimum_rows": MINIMUM_ROWS, "minimum_batch": MINIMUM_BATCH, "minimum_cell": 1}
    bounds["secure_sums"] = "from-three" if secure else "optional"
    policy = storage.toml_text({"data": data, "policy": bounds, "approve": {"auto": True, "schemas": [schema.digest]}})
    return f"# What this site allows; see docs/reference/site-policy.md.\n{policy}"


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on now.

    None of those that a machine gives to outgoing connections: while a server is down, its port could go to somebody's
    connection, even to that of a site which looks for the server, and the server would not come up again.
    """
    free: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("127.0.0.1", port))
            free.append(port)
        if len(free) == count:
            return free
    raise RuntimeError(f"This machine has no {count} free ports from {PORTS[0]} to {PORTS[-1]}.")


def _csv(frame: pd.DataFrame, file: Path) -> Path:
    frame.to_csv(file, index=False)
    return file.resolve()
