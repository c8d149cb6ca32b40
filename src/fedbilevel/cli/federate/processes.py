"""``fedbilevel federate start``, ``stop`` and ``status``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.cli.federate import parts
from fedbilevel.cli.terminal import AsJson, Quiet

if TYPE_CHECKING:
    from fedbilevel.federation.nvflare.sessions import Kits

Rows = dict[str, list[dict[str, Any]]]


def start(
    kit: parts.KitFolder,
    background: Annotated[bool, typer.Option("--background", help="Return as soon as it is up.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a server's or a site's kit on this machine.

    Stays until it is stopped (Ctrl-C, SIGTERM or federate stop), as a service manager wants it; with --background it
    returns.  The output goes to console.log in the kit.
    """
    parts.need_nvflare()
    from fedbilevel.federation.operator import processes
    from fedbilevel.federation.operator.kits import check_dates, open_kit

    opened = open_kit(kit)
    warning = check_dates(opened)
    if warning:
        print(warning, file=sys.stderr)
    log = opened.folder / processes.OUTPUT
    written = log.stat().st_size if log.exists() else 0
    with parts.ended_by_signals():
        process = processes.start(opened.folder)
        try:
            up = processes.is_up(process, opened.folder, opened.kind, written, parts.UP_SECONDS)
            if process.poll() is not None:
                raise RuntimeError(f"{opened.name} ended at once; {log} says why.")
            what = "is up" if opened.kind == "server" else f"is registered with {opened.address}"
            if not quiet:
                print(f"{opened.name} {what if up else f'is still trying to reach {opened.address}'}.", flush=True)
            if background:
                return
            code = process.wait()
        except KeyboardInterrupt as stopped:
            processes.stop(opened.folder)
            if str(stopped):  # a service manager's way of ending it
                return
            raise
    if code:
        raise RuntimeError(f"{opened.name} ended with code {code}; {log} says why.")


def stop(
    kits: Annotated[list[Path] | None, typer.Argument(metavar="[KIT]...", help="Kits whose processes end.")] = None,
    run: Annotated[str | None, typer.Option(help="Stop this run instead; it can go on when submitted again.")] = None,
    folder: parts.KitsFolder = None,
    admin: parts.AdminKit = None,
    server: parts.ServerKit = None,
    quiet: Quiet = False,
) -> None:
    """End the processes of kits on this machine, or a run.

    What was trained is kept: a site or server that is started again takes part again, a run that is submitted again goes on
    from its last complete round.
    """
    parts.need_nvflare()
    from fedbilevel.federation.nvflare.sessions import stop_run
    from fedbilevel.federation.operator import processes
    from fedbilevel.federation.operator.kits import open_kit

    if run is None and not kits:
        raise ValueError("Name the kits whose processes are to end, or a --run.")
    if run is not None and kits:
        raise ValueError("Name kits or a --run to stop, not both.")
    if run is not None:
        named = parts.kits_at(folder, admin, server)
        with parts.hushed():
            ended = stop_run(named, run)
        if not quiet:
            print(f"{run} is stopped; submit it again to go on." if ended else f"{run} is not running.")
    for opened in map(open_kit, kits or ()):
        count = processes.stop(opened.folder)
        if not quiet:
            many = "1 process" if count == 1 else f"{count} processes"
            print(f"{opened.name} is stopped ({many})." if count else f"{opened.name} was not running.")


def status(
    kits: Annotated[list[Path] | None, typer.Argument(metavar="[KIT]...", help="Only kits on this machine.")] = None,
    folder: parts.KitsFolder = None,
    admin: parts.AdminKit = None,
    server: parts.ServerKit = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Who is there, and how far the runs are.

    For kits: whether they run here, and how long their certificates last.  Else, at the coordinator: the sites that answer the
    server, and every run it knows.
    """
    parts.need_nvflare()
    rows = _of_kits(kits) if kits else _of_federation(parts.kits_at(folder, admin, server))
    parts.tell(as_json, quiet, rows, _tables(rows))


def _of_kits(kits: list[Path]) -> Rows:
    from fedbilevel.federation.operator.kits import open_kit
    from fedbilevel.federation.operator.processes import running

    rows = []
    for opened in map(open_kit, kits):
        members = running(opened.folder)
        rows.append(
            {
                "name": opened.name, "kind": opened.kind, "process": members[0].pid if members else None,
                "workers": max(len(members) - 1, 0), "server": opened.address, "until": f"{opened.until:%Y-%m-%d}",
            }
        )  # fmt: skip
    return {"kits": rows}


def _of_federation(kits: Kits) -> Rows:
    from fedbilevel.federation.nvflare.sessions import look, run_folder, session
    from fedbilevel.federation.protocol.record import read_status

    with parts.hushed(), session(kits) as opened:
        seen = look(opened)
    names = list(dict.fromkeys([*kits.sites, *seen.sites]))
    sites = [{"site": name, "connected": name in seen.sites, "jobs": len(seen.sites.get(name, ()))} for name in names]
    runs = []
    home = run_folder(kits, "any").parent
    for folder in sorted(home.iterdir()) if home.exists() else ():
        told = read_status(folder)
        if told is not None:
            lost = told["status"] == "running" and told.get("job") not in seen.jobs
            row = {"run": folder.name, "status": "interrupted" if lost else told["status"]}
            row |= {name: told.get(name) for name in ("stage", "round", "rounds")}
            runs.append({**row, "sentence": told.get("sentence", "")})
    return {"sites": sites, "runs": runs}


def _tables(told: Rows) -> Iterator[str | tuple[str, Any]]:
    import pandas as pd

    for title, rows in told.items():
        if not rows:
            yield f"No {title} yet."
            continue
        frame = pd.DataFrame(rows).astype(object).where(lambda cells: cells.notna(), "")
        if "connected" in frame:
            frame["connected"] = ["yes" if value else "no" for value in frame["connected"]]
        yield title.capitalize(), frame
