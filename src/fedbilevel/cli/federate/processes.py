"""``fedbilevel federate start``, ``stop`` and ``status``."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedbilevel.cli.federate.parts import FOLDER, KitFolder, ended_by_signals, hushed, kits_at, need_nvflare
from fedbilevel.cli.terminal import AsJson, Quiet, show

if TYPE_CHECKING:
    from fedbilevel.federation.operator.provision import Kits

UP_SECONDS = 60.0
"""How long a process may take to come up before that is said."""


def start(
    kit: KitFolder,
    background: Annotated[bool, typer.Option("--background", help="Return as soon as it is up.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a server's or a site's kit on this machine.

    Stays until it is stopped (Ctrl-C, SIGTERM or federate stop), as a service manager wants it; with --background it
    returns.  The output goes to console.log in the kit.
    """
    need_nvflare()
    from fedbilevel.federation.operator import processes
    from fedbilevel.federation.operator.kits import check_dates, open_kit

    opened = open_kit(kit)
    warning = check_dates(opened)
    if warning:
        print(warning, file=sys.stderr)
    log = opened.folder / processes.OUTPUT
    before = log.stat().st_size if log.exists() else 0
    with ended_by_signals():
        made = processes.start(opened.folder)
        try:
            up = False
            end = time.monotonic() + UP_SECONDS
            while not up and made.poll() is None and time.monotonic() < end:
                up = processes.wait_for_text(log, processes.CONNECTED[opened.kind], 0.5, before)
            if made.poll() is not None:
                raise RuntimeError(f"{opened.name} ended at once; {log} says why.")
            what = "is up" if opened.kind == "server" else f"is registered with {opened.address}"
            if not quiet:
                print(f"{opened.name} {what if up else f'is still trying to reach {opened.address}'}.", flush=True)
            if background:
                return
            code = made.wait()
        except KeyboardInterrupt as stopped:
            processes.stop(made)
            processes.stop_kit(opened.folder)
            if str(stopped):  # a service manager's way of ending it
                return
            raise
    if code:
        raise RuntimeError(f"{opened.name} ended with code {code}; {log} says why.")


def stop(
    kits: Annotated[list[Path] | None, typer.Argument(metavar="[KIT]...", help="Kits whose processes end.")] = None,
    run: Annotated[str | None, typer.Option(help="Stop this run instead; it can go on when submitted again.")] = None,
    folder: Annotated[Path | None, typer.Option("--kits", help="The federation's folder.", metavar="DIR")] = None,
    admin: Annotated[Path | None, typer.Option(help="The coordinator's kit, instead of --kits.")] = None,
    server: Annotated[Path | None, typer.Option(help="The server's kit, with --admin.")] = None,
    quiet: Quiet = False,
) -> None:
    """End the processes of kits on this machine, or a run.

    What was trained is kept: a site or server that is started again takes part again, a run that is submitted again goes on
    from its last complete round.
    """
    need_nvflare()
    if run is not None:
        if kits:
            raise ValueError("Name kits or a --run to stop, not both.")
        from fedbilevel.federation.nvflare.sessions import stop_run

        named = kits_at(folder, admin, server)
        with hushed():
            ended = stop_run(named, run)
        if not quiet:
            print(f"{run} is stopped; submit it again to go on." if ended else f"{run} is not running.")
        return
    if not kits:
        raise ValueError("Name the kits whose processes are to end, or a --run.")
    from fedbilevel.federation.operator.kits import open_kit
    from fedbilevel.federation.operator.processes import stop_kit

    for kit in kits:
        opened = open_kit(kit)
        count = stop_kit(opened.folder)
        if not quiet:
            processes = "1 process" if count == 1 else f"{count} processes"
            print(f"{opened.name} is stopped ({processes})." if count else f"{opened.name} was not running.")


def status(
    kits: Annotated[list[Path] | None, typer.Argument(metavar="[KIT]...", help="Only kits on this machine.")] = None,
    folder: Annotated[Path | None, typer.Option("--kits", help="The federation's folder.", metavar="DIR")] = None,
    admin: Annotated[Path | None, typer.Option(help="The coordinator's kit, instead of --kits.")] = None,
    server: Annotated[Path | None, typer.Option(help="The server's kit, with --admin.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Who is there, and how far the runs are.

    For kits: whether they run here, and how long their certificates last.  Else, at the coordinator: the sites that answer the
    server, and every run it knows.
    """
    need_nvflare()
    from fedbilevel.federation.operator.kits import open_kit
    from fedbilevel.federation.operator.processes import running

    if kits:
        found = []
        for kit in kits:
            opened = open_kit(kit)
            members = running(opened.folder)
            found.append(
                {
                    "name": opened.name, "kind": opened.kind, "process": members[0].pid if members else None,
                    "workers": max(len(members) - 1, 0), "server": opened.address, "until": f"{opened.until:%Y-%m-%d}",
                }
            )  # fmt: skip
        _told({"kits": found}, as_json, quiet)
        return
    _told(_federation(kits_at(folder or (None if admin else FOLDER), admin, server)), as_json, quiet)


def _federation(kits: Kits) -> dict[str, Any]:
    from fedbilevel.federation.nvflare.sessions import look, run_folder, session
    from fedbilevel.federation.protocol.record import read_status

    with hushed(), session(kits) as opened:
        seen = look(opened)
    names = list(dict.fromkeys([*kits.sites, *seen.sites]))
    sites = [{"site": name, "connected": name in seen.sites, "jobs": len(seen.sites.get(name, ()))} for name in names]
    runs = []
    home = run_folder(kits, "any").parent
    for folder in sorted(home.iterdir()) if home.exists() else ():
        told = read_status(folder)
        if told is not None:
            alive = told.get("job") in seen.jobs
            state = told["status"] if told["status"] != "running" or alive else "interrupted"
            runs.append({"run": folder.name, "status": state, **{k: told.get(k) for k in ("stage", "round", "rounds")}})
            runs[-1]["sentence"] = told.get("sentence", "")
    return {"sites": sites, "runs": runs}


def _told(found: dict[str, list[dict[str, Any]]], as_json: bool, quiet: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    if quiet:
        return
    import pandas as pd

    console = Console() if sys.stdout.isatty() else Console(width=120)
    for title, rows in found.items():
        if rows:
            frame = pd.DataFrame(rows).astype(object).where(lambda cells: cells.notna(), "")
            with suppress(KeyError):
                frame["connected"] = ["yes" if value else "no" for value in frame["connected"]]
            show(console, title.capitalize(), frame)
        else:
            console.print(f"No {title} yet.", highlight=False)
