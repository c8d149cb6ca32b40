"""``fedbilevel federate init``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.cli.federate.parts import FOLDER, need_nvflare
from fedbilevel.cli.terminal import AsJson, Quiet, check_folder

if TYPE_CHECKING:
    from fedbilevel.federation.operator.provision import Established

ASKED = {
    "server": ("Host name of the server, as the sites reach it", "localhost"),
    "port": ("Port for the sites", 8002),
    "admin_port": ("Port for the coordinator", 8003),
    "coordinator": ("The coordinator's e-mail address", "admin@coordinator.org"),
}
"""What every federation has, in words, and what it is if nobody says."""


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
    chosen: dict[str, Any] = {"server": server, "port": port, "admin_port": admin_port, "coordinator": coordinator}
    if known is None and not site and not sys.stdin.isatty():
        raise ValueError("--site is missing: name the sites, --site NAME for each.")
    asks = known is None and not site
    if asks:
        site = typer.prompt("Names of the sites, with spaces between them").split()
    for name in [name for name, value in chosen.items() if value is None]:
        words, usual = ASKED[name]
        chosen[name] = getattr(known, name, usual) if not asks else typer.prompt(words, default=usual)
    people = (*((person, "lead") for person in lead or ()), *((person, "member") for person in member or ()))
    wanted = Roster(tuple(site or (known.sites if known else ())), **chosen, people=people)
    check_folder(out)
    done = establish(out, wanted, renew or ())
    if as_json:
        print(json.dumps(_machine(done)))
    elif not quiet:
        _print(done, out)


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
