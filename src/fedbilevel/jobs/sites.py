"""From files to sites: rows read by a schema, dealt to clients, divided into training and test rows, and encoded."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbilevel.datasets import partition
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.program import smoothness
from fedbilevel.tables.columns import texts
from fedbilevel.tables.encoder import Encoder, Parsed, combine, parse, site_statistics, stack
from fedbilevel.tables.profile import MOST_SITES
from fedbilevel.tables.reading import Table, site_names
from fedbilevel.tables.schema import Schema

FEWEST_ROWS = 4
Decided = NDArray[np.int64]
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Site:
    """The rows of one site that have a label and a group.  ``left_out``: how many had none, (label, group)."""

    name: str
    rows: Parsed
    left_out: tuple[int, int]
    classes: int

    @property
    def cells(self) -> NDArray[np.int64]:
        """Group and label (of numbers: group) of every row as one code: what splits keep the proportions of."""
        return np.asarray(self.classes * self.rows.groups + (self.rows.labels if self.classes > 1 else 0), np.int64)


class Part(NamedTuple):
    """Encoded rows of one site or of all: features [n, d] float32, labels and groups [n] int32; of a number, the labels are its
    distance to the mean in spreads, float64."""

    features: NDArray[np.float32]
    labels: NDArray[Any]
    groups: NDArray[np.int32]

    def take(self, rows: NDArray[Any]) -> Part:
        return Part(self.features[rows], self.labels[rows], self.groups[rows])

    def counted(self, decided: Decided, groups: int, classes: int = 2) -> Counts:
        return Counts.of(self.labels, decided, self.groups, groups, classes=classes)


class Prepared(NamedTuple):
    """``train`` and ``test`` rows of every site; ``smooth``: the largest curvature of a site's logistic loss."""

    encoder: Encoder
    names: list[str]
    train: list[Part]
    test: list[Part]
    smooth: float


def read_sites(
    tables: Sequence[Table], schema: Schema, *, clients: int | None = None, seed: int = 0, tell: Tell | None = None
) -> list[Site]:
    """Rows of all tables as sites: by the schema's site column, or one a table, or one table dealt to ``clients``."""
    if clients is not None and len(tables) > 1:
        raise ValueError("--clients deals the rows of one file to several clients; with several files each is a site.")
    if clients is not None and schema.site is not None:
        raise ValueError("--clients and --site exclude each other: the site column says whose a row is.")
    owned: dict[str, list[Parsed]] = {}
    for number, (table, name) in enumerate(zip(tables, site_names(tables), strict=True)):
        table.check_columns(schema.needed())
        chunks = 0
        for chunk in table.chunks(schema.needed()):
            rows = parse(schema, chunk, labelled=True, source=str(table.path))
            chunks += 1
            if schema.site is None:
                owned.setdefault(name, []).append(rows)
                continue
            owners = texts(chunk[schema.site], frozenset(schema.missing))
            if any(owner is None for owner in owners):
                place = next(i for i, owner in enumerate(owners) if owner is None)
                raise ValueError(
                    f"{table.path}, {chunk.index.name} {chunk.index[place]}: the site column {schema.site!r} is empty; "
                    "fill it in or leave the row out."
                )
            for owner in sorted(set(owners)):
                owned.setdefault(owner, []).append(rows.take(np.flatnonzero(owners == owner)))
            if len(owned) > MOST_SITES:
                raise ValueError(
                    f"The site column {schema.site!r} has more than {MOST_SITES} values: name a column of sites."
                )
        if chunks == 0:
            raise ValueError(f"{table.path} names its columns but has no rows; leave it out or fill it.")
        if tell is not None:
            tell("reading", number + 1, len(tables))
    sites = [_site(name, stack(parts), max(1, len(schema.labels))) for name, parts in sorted(owned.items())]
    if clients is not None:
        sites = _dealt(sites[0], clients, seed)
    for site in sites:
        if site.rows.rows < FEWEST_ROWS:
            needed = "a target and a group" if schema.sensitive else "a target"
            raise ValueError(
                f"The site {site.name!r} has {site.rows.rows} row(s) with {needed} (of "
                f"{site.rows.rows + sum(site.left_out)}); every site needs {FEWEST_ROWS} at least, so leave it out."
            )
    return sites


def prepare(sites: Sequence[Site], schema: Schema, *, test_share: float, seed: int) -> Prepared:
    """Test rows set apart site by site, proportions of groups and classes kept; scaling by training rows only.

    The split of a site depends on its own rows, its name and the seed, so a site can make it by itself.
    """
    train: list[Parsed] = []
    test: list[Parsed] = []
    for site in sites:
        own_seed = zlib.crc32(f"{seed}/{site.name}".encode())
        try:
            divided = partition.train_test_split(site.cells, test_share=test_share, seed=own_seed)
        except ValueError as error:
            raise ValueError(f"The site {site.name!r}: {error}") from None
        for parts, rows in zip((train, test), divided, strict=True):
            parts.append(site.rows.take(rows))
    encoder = Encoder.from_statistics(schema, combine(site_statistics(schema, rows) for rows in train))
    learned, held_out = ([encoded(encoder, rows) for rows in parts] for parts in (train, test))
    steepest = max(smoothness(part.features, 1.0 if schema.regression else 0.25) for part in learned)
    labels = np.concatenate([part.labels for part in learned])
    if labels.min() == labels.max():
        only = schema.labels[labels[0]] if encoder.target is None else encoder.target[0]
        raise ValueError(f"The training rows are all {only!r}: there is nothing to learn; take more rows.")
    return Prepared(encoder, [site.name for site in sites], learned, held_out, steepest)


def encoded(encoder: Encoder, rows: Parsed) -> Part:
    return Part(encoder.transform(rows), encoder.standardised(rows.labels), rows.groups)


def joined(parts: Sequence[Part]) -> Part:
    return Part(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def left_out_notes(sites: Sequence[Site], schema: Schema) -> list[str]:
    """Rows that were not used, in sentences."""
    counts = [sum(site.left_out[place] for site in sites) for place in (0, 1)]
    columns = (repr(schema.target), ", ".join(schema.sensitive))
    return [
        f"{count:,} row(s) without a value of {names} were left out."
        for count, names in zip(counts, columns, strict=True)
        if count
    ]


def digests(tables: Sequence[Table]) -> list[str]:
    """SHA-256 of every file, so that a run that goes on is sure to go on with the same rows."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return [digest(table.path) for table in tables]


def _site(name: str, rows: Parsed, classes: int) -> Site:
    left_out = int(rows.unlabelled.sum()), int(((rows.groups < 0) & ~rows.unlabelled).sum())
    return Site(name, rows.complete(), left_out, classes)


def _dealt(site: Site, clients: int, seed: int) -> list[Site]:
    parts = partition.iid(site.rows.rows, clients, seed=seed)
    width = len(str(clients))
    return [
        Site(f"client {number:0{width}d}", site.rows.take(rows), site.left_out if number == 1 else (0, 0), site.classes)
        for number, rows in enumerate(parts, 1)
    ]
