"""``fedbilevel federate init``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.cli.federate.parts import FOLDER, need_nvflare
from fedbilevel.cli.terminal import AsJson, Quiet, check_folder

if TYPE_CHECKING:
    from fedbilevel.federation.operator.provision import Established
    from fedbilevel.federation.operator.roster import Roster

DEFAULTS = {"server": "localhost", "port": 8002, "admin_port": 8003, "coordinator": "admin@coordinator.org"}


def init(
    site: Annotated[list[str] | None, typer.Option(help="A site's name; repeat the option for several.")] = None,
    server: Annotated[str | None, typer.Option(help="Host name of the server, as the sites reach it.")] = None,
    port: Annotated[int | None, typer.Option(help="Port for the sites.", show_default="8002")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Port for the coordinator.", show_default="8003")] = None,
    coordinator: Annotated[str | None, typer.Option(help="The coordinator's e-mail address.")] = None,
    lead: Annotated[list[str] | None, typer.Option(help="Somebody else who may submit (e-mail address).")] = None,
    member: Annotated[list[str] | None, typer.Option(help="Somebody who may only look (e-mail address).")] = None,
    renew: Annotated[
        list[str] | None, typer.Option(help="Give this participant a new certificate; 'authority' renews everything.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the federation.")] = FOLDER,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Certificates and kits for everybody who takes part.

    Asks for what is not given, on a terminal.  Called again for the same folder it adds sites and people and leaves
    everything else as it is; --renew gives new certificates.
    """
    need_nvflare()
    from fedbilevel.federation.operator.provision import establish
    from fedbilevel.federation.operator.roster import FILE, Roster, read_roster

    known = read_roster(out) if (out / FILE).exists() else None
    wanted: Roster
    people = (*((one, "lead") for one in lead or ()), *((one, "member") for one in member or ()))
    if known is None:
        given = {"server": server, "port": port, "admin_port": admin_port, "coordinator": coordinator}
        if not site:
            site, given = _asked(given)
        chosen = {name: DEFAULTS[name] if value is None else value for name, value in given.items()}
        wanted = Roster(tuple(site), **chosen, people=people)  # type: ignore[arg-type]
    else:
        wanted = Roster(
            tuple(site or known.sites), server or known.server, port or known.port, admin_port or known.admin_port,
            coordinator or known.coordinator, people,
        )  # fmt: skip
    check_folder(out)
    done = establish(out, wanted, renew or ())
    if as_json:
        print(json.dumps(_machine(done)))
    elif not quiet:
        _print(done, out)


def _asked(given: dict[str, str | int | None]) -> tuple[list[str], dict[str, str | int | None]]:
    if not sys.stdin.isatty():
        raise ValueError("--site is missing: name the sites, --site NAME for each.")
    sites = [name for name in typer.prompt("Names of the sites, with spaces between them").split() if name]
    words = {
        "server": "Host name of the server, as the sites reach it",
        "port": "Port for the sites",
        "admin_port": "Port for the coordinator",
        "coordinator": "The coordinator's e-mail address",
    }
    for name, value in given.items():
        if value is None:
            given[name] = typer.prompt(words[name], default=DEFAULTS[name])
    return sites, given


def _machine(done: Established) -> dict[str, object]:
    roster = done.roster
    return {
        "server": {"name": roster.server, "kit": str(done.kits.server), "port": roster.port},
        "coordinator": {"name": roster.coordinator, "kit": str(done.kits.admin), "port": roster.admin_port},
        "sites": {name: str(kit) for name, kit in done.kits.sites.items()},
        "people": dict(roster.people),
        "made": list(done.made),
        "renewed": list(done.renewed),
    }


def _print(done: Established, out: Path) -> None:
    roster, kits = done.roster, out / "kits"
    if not (done.made or done.renewed):
        print(f"Nothing to do: {out} has kits for {', '.join(roster.names)}.")
        return
    if done.made:
        print(f"New kits in {kits}, each with a private key of its own:")
    stays = {roster.server: "stays on the server's machine", roster.coordinator: "stays with the coordinator"}
    for name in done.made:
        role = dict(roster.people).get(name)
        whose = stays.get(name) or (f"send to {name}, a {role}" if role else f"send to the site {name}")
        print(f"  {kits / name}: {whose}")
    for name in done.renewed:
        print(f"  {kits / name / 'startup'}: a new certificate; {name} replaces its startup folder with this one")
    print("Send kits over a channel you trust (they hold private keys), then delete your copies of the sites' kits.")
    print(f"Keep {out / 'authority'} where nobody else can read it: whoever has it can admit participants.")
    print(f"Open on {roster.server}: port {roster.port} for the sites, {roster.admin_port} for the coordinator.")
    if any(name in roster.sites for name in done.made):
        print("Each site fills in local/fedbilevel.toml in its kit, then:")
        print("  fedbilevel federate site check KIT --schema schema.toml")
        print("  fedbilevel federate start KIT")
