"""``fedbilevel federate``: kits, the processes they start, and who is there; `cli.submit` has the runs."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.cli import options
from fedbilevel.cli.own_data import suited
from fedbilevel.cli.terminal import check_folder, prepare_jax, tell

if TYPE_CHECKING:
    from fedbilevel.federation.operator.kits import Established, Kits

FOLDER = Path("federation")
Rows = dict[str, list[dict[str, Any]]]
UP_SECONDS = 60.0
"""How long processes may take to come up before that is said."""
ASKED = {
    "server": ("Host name of the server, as the sites reach it", "localhost"),
    "port": ("Port for the sites", 8002),
    "admin_port": ("Port for the coordinator", 8003),
    "coordinator": ("The coordinator's e-mail address", "admin@coordinator.org"),
}
"""What every federation has, in words, and what it is if nobody says."""


def need_nvflare() -> None:
    """One sentence where the extra is missing; and NVFlare's own lines are kept off the terminal."""
    if find_spec("nvflare") is None:
        raise ValueError("This command needs NVFlare: pip install 'fedbilevel[federation]'.")
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger().setLevel(logging.CRITICAL)
    logging.disable(logging.ERROR)


def kits_at(folder: Path | None, admin: Path | None, server: Path | None) -> Kits:
    """Kits from the federation's folder, or the two that the coordinator's machine needs."""
    from fedbilevel.federation.operator.kits import Kits, kits_of, open_kit, read_roster

    if admin is None and server is None:
        return kits_of(folder or FOLDER, read_roster(folder or FOLDER))
    if admin is None or server is None:
        raise ValueError(
            "--admin and --server belong together: the coordinator's kit and the server's, on its machine."
        )
    person = open_kit(admin, "person")
    return Kits(open_kit(server, "server").folder, person.folder, {}, person.name)


_signals: list[int] = []
"""Those that have asked the command to end."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: everything that was started is stopped on the way out."""

    def interrupt(number: int, _frame: object) -> None:
        _signals.append(number)
        check_signals()

    numbers = [signal.SIGINT, signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    _signals.clear()
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_signals() -> None:
    """Raise what a signal raised: NVFlare catches everything in places, and a command would go on as if nobody had spoken."""
    if _signals:
        raise KeyboardInterrupt(*(f"Stopped by {signal.Signals(n).name}." for n in _signals[-1:] if n != signal.SIGINT))


@contextmanager
def hushed() -> Iterator[None]:
    """NVFlare prints where it likes, from threads too: standard output and error of the process go nowhere.

    What we print meanwhile goes to `Watch`'s own copy of the terminal.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1), os.dup(2)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


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
    request: Annotated[
        list[Path] | None,
        typer.Option(help="The .csr or NVFlare .request.zip of a site that made its key itself: a kit without a key."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the federation.")] = FOLDER,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Certificates and kits for everybody who takes part.

    On a terminal, the command asks for what you do not give.  Called again for the same folder, it adds sites and people and
    leaves everything else as it is.  --renew gives new certificates.
    """
    need_nvflare()
    from fedbilevel.federation.operator.keys import read_request
    from fedbilevel.federation.operator.kits import FILE, Roster, establish, read_roster

    requests = [read_request(file) for file in request or ()]
    site = [*(site or ()), *(asked.name for asked in requests if asked.name not in (site or ()))]
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
    done = establish(out, wanted, renew or (), requests)
    roster, made = done.roster, done.kits
    told = {
        "server": {"name": roster.server, "kit": str(made.server), "port": roster.port},
        "coordinator": {"name": roster.coordinator, "kit": str(made.admin), "port": roster.admin_port},
        "sites": {name: str(kit) for name, kit in made.sites.items()},
        "people": dict(roster.people), "made": list(done.made), "renewed": list(done.renewed),
        "fingerprints": {name: asked.fingerprint for name, asked in done.requests.items()},
    }  # fmt: skip
    tell(as_json, quiet, told, _delivery(done, out))


def _delivery(done: Established, out: Path) -> Iterator[str]:
    """Who gets which kit, and what to do next."""
    roster, kits = done.roster, out / "kits"
    if not (done.made or done.renewed):
        yield f"Nothing to do: {out} has kits for {', '.join(roster.names)}."
        return
    if done.made:
        yield f"New kits in {kits}:"
    stays = {roster.server: "stays on the server's machine", roster.coordinator: "stays with the coordinator"}
    for name in done.made:
        role = dict(roster.people).get(name)
        whose = stays.get(name) or (f"send to {name}, a {role}" if role else f"send to the site {name}")
        yield f"  {kits / name}: {whose}"
    for name in done.renewed:
        again = ", then puts its key in again (federate site install)" if name in done.requests else ""
        yield f"  {kits / name / 'startup'}: a new certificate; {name} replaces its startup folder with this one{again}"
    for name, asked in done.requests.items():
        yield f"  {name} keeps its own key. Ask {name} by telephone whether this is its fingerprint, before you send the kit:"
        yield f"    {asked.fingerprint}"
    holding = [name for name in (*done.made, *done.renewed) if name not in (*stays, *done.requests)]
    if holding:
        yield f"Private keys are in the kits of {', '.join(holding)}: whoever sees such a kit can play its owner."
        yield "  Send them over a channel you trust, then delete your copies."
        yield "  For more than a trial let sites make their own keys (federate site request NAME, here --request NAME.csr)."
    yield f"Keep {out / 'authority'} where nobody else can read it: whoever has it can admit participants."
    yield f"Open on {roster.server}: port {roster.port} for the sites, {roster.admin_port} for the coordinator."
    if any(name in roster.sites for name in done.made):
        yield "Each site fills in local/fedbilevel.toml in its kit, then:"
        yield "  fedbilevel federate site check KIT --schema schema.toml"
        yield "  fedbilevel federate start KIT"


def request(
    name: Annotated[str, typer.Argument(help="The site's name, as agreed with the coordinator.")],
    out: Annotated[Path, typer.Option(help="Folder for the key and the request.")] = Path(),
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Make this site's private key, and a request for a certificate.

    The key stays here.  The request goes to the coordinator, who answers with a kit; `federate site install` puts the key
    into it.
    """
    need_nvflare()
    from fedbilevel.federation.operator.keys import make_request
    from fedbilevel.federation.operator.kits import Roster

    Roster((name,))
    key, asked, made = make_request(name, out)
    told = {"site": name, "key": str(key), "request": str(asked), "fingerprint": made.fingerprint}
    said = [
        f"{key} is the private key of {name}: it stays here, and nobody else gets it.",
        f"{asked} goes to the coordinator, over any channel.",
        "When the coordinator calls, compare the fingerprint:",
        f"  {made.fingerprint}",
        f"When the kit has come: fedbilevel federate site install KIT --key {key}",
    ]
    tell(as_json, quiet, told, said)


def install(
    kit: options.KitFolder,
    key: Annotated[Path, typer.Option(help="The private key that the request was made with.")],
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Put this site's private key into the kit that came without it."""
    need_nvflare()
    from fedbilevel.federation.operator.kits import install_key

    opened = install_key(kit, key)
    told = {"site": opened.name, "server": opened.address, "until": f"{opened.until:%Y-%m-%d}"}
    said = [
        f"The kit of {opened.name} is complete; its certificate is good until {opened.until:%Y-%m-%d}.",
        f"Keep {key} as a copy where nobody else can read it, or delete it: a new certificate needs it, or a new request.",
    ]
    tell(as_json, quiet, told, said)


def revoke(
    site: Annotated[str, typer.Argument(help="The site to exclude.")],
    folder: options.KitsFolder = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Take a site out of the federation, for good.

    The server refuses the site from now on, whatever certificate it shows.  A running server does so at once.  Nobody gets
    the name again.  A run in which the site takes part continues without it if --min-sites allows that; otherwise stop it.
    """
    need_nvflare()
    from fedbilevel.federation.operator.kits import take_out
    from fedbilevel.federation.operator.sessions import NoServer, disable

    folder = folder or FOLDER
    kits = kits_at(folder, None, None)
    take_out(folder, site)
    try:
        with hushed():
            disable(kits, site)
        when, at_once = "The server refuses it from now on.", True
    except NoServer:
        at_once = False
        when = (
            f"The server does not answer. It will refuse {site} when it starts with {kits.server}. If the server's kit lies "
            "on another machine, copy disabled_clients.json from there into it, and start it again."
        )
    told = {"site": site, "at_once": at_once, "server": str(kits.server)}
    tell(as_json, quiet, told, [f"{site} is taken out. {when}"])


def check(
    kit: options.KitFolder,
    schema: Annotated[Path | None, typer.Option(help="The schema of the run to come, from its coordinator.")] = None,
    method: Annotated[str, typer.Option(help="The method of the run to come, or audit.")] = "fedpath",
    formulation: Annotated[str, typer.Option(help="Of fedbioacc and fedbio: cells or paper.")] = "cells",
    metric: options.Metric = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Would this site take part, and what would leave it?

    Looks at the kit's certificate and rules, reads the table by the schema under the site's own policy, does one round of
    each stage, and lists everything that would have been sent.  It sends nothing.
    """
    need_nvflare()
    from fedbilevel.federation.operator.kits import check_dates, loosened, open_kit
    from fedbilevel.federation.operator.processes import python_doubt
    from fedbilevel.federation.protocol.policy import FILE, read_policy

    if schema is None:
        raise ValueError("--schema is missing: name the schema file the coordinator sent.")
    opened = open_kit(kit, "site")
    warnings = [*filter(None, [check_dates(opened)]), *loosened(opened)]
    policy = read_policy(opened.folder / "local")
    source = policy.source
    if source.table is None:
        raise ValueError(f"{opened.folder / 'local' / FILE} names no table: fill in [data], table and columns.")
    prepare_jax()
    from fedbilevel.federation.operator.rehearsal import rehearse
    from fedbilevel.jobs import audit
    from fedbilevel.jobs.federate import job
    from fedbilevel.jobs.fit import FitOptions
    from fedbilevel.tables.schema import Schema, misfits

    table, meaning = source.opened(), Schema.read(schema)
    table.check_columns(source.columns)
    if method == "audit":
        settings = audit.job(audit.meant(schema), audit.AuditOptions(), [opened.name])
    else:
        fit = FitOptions(method, formulation, compare_with=None, **suited(meaning, metric, None, "squared"))
        settings = job(fit, meaning, [opened.name])
    left, said = rehearse(opened.name, settings, policy)
    needs_person = not policy.approval.auto or not {"any", meaning.digest} & set(policy.approval.schemas)
    warnings += [*misfits(meaning, table), *filter(None, [python_doubt()])]
    if method == "audit" and not policy.may_tell("report"):
        warnings.append('It would tell nothing: an audit needs "report" in tell of local/fedbilevel.toml.')
    elif method != "audit" and policy.privacy is None:
        warnings.append("Replies leave without noise: [privacy] in local/fedbilevel.toml would add it.")
    if method != "audit" and policy.secure_sums == "optional":
        warnings.append('The coordinator may ask for single replies: secure_sums = "from-three" would not let it.')
    until = f"{opened.until:%Y-%m-%d}"

    def shown() -> Iterator[str | tuple[str, Any]]:
        import pandas as pd

        title = "What would leave this site (one round a stage; training repeats work)"
        yield title, pd.DataFrame(left, columns=["when", "what", "shape", "bytes"])
        yield f"{opened.name} would take part: {source.table} fits {schema}."
        yield f"SHA-256 of the schema: {meaning.digest}"
        yield (
            "A run by it waits for a person: fedbilevel federate site approve."
            if needs_person
            else "A run by it needs no person, within the bounds of [approve]."
        )
        yield f"It connects to {opened.address}; its certificate is good until {until}."
        yield from (f"Note: {warning}" for warning in warnings)

    told = {
        "site": opened.name, "server": opened.address, "until": until, "warnings": warnings,
        "table": str(source.table), "columns": list(source.columns), "tell": list(policy.tell),
        "schema_sha256": meaning.digest, "needs_person": needs_person, "said": said,
        "left": [thing._asdict() for thing in left],
    }  # fmt: skip
    tell(as_json, quiet, told, shown())


def approve(
    kit: options.KitFolder,
    run: Annotated[
        str | None, typer.Argument(help="The run's name; without it, the runs that wait are listed.")
    ] = None,
    yes: Annotated[
        str | None,
        typer.Option(metavar="FINGERPRINT", help="Approve the run that was shown with this fingerprint, unasked."),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Say what a run would do here, and ask whether it may.

    A submitted run waits here until somebody approves it, unless local/fedbilevel.toml approves it by itself.  The command
    rehearses the run at this site alone and sends nothing.  Where nobody can be asked, it ends with the fingerprint of what it
    has shown, which --yes takes.  Once all sites have approved, the coordinator submits it again.
    """
    need_nvflare()
    from fedbilevel.federation.nvflare.job import STATE
    from fedbilevel.federation.operator.kits import open_kit
    from fedbilevel.federation.protocol import approval
    from fedbilevel.federation.protocol.policy import read_policy

    opened = open_kit(kit, "site")
    policy = read_policy(opened.folder / "local")
    folder = policy.folder or opened.folder / STATE
    waiting = approval.pending(folder)
    if run is None:
        names = list(waiting)
        tell(
            as_json,
            quiet,
            {"waiting": names},
            [f"Waiting for approval: {', '.join(names)}." if names else "No run waits."],
        )
        return
    if run not in waiting:
        raise ValueError(f"No run {run!r} waits here; there are: {', '.join(waiting) or 'none'}.")
    prepare_jax()
    from fedbilevel.federation.operator.rehearsal import in_words, rehearse

    settings = waiting[run]
    if yes is not None:
        approval.check_shown(settings, yes)
    left, said = rehearse(opened.name, settings, policy)
    # A job's own words are among them: nothing in them may act on the terminal.
    said_plainly = in_words(settings, policy, folder, left, said)
    sentences = ["".join(c if c.isprintable() else "?" for c in sentence) for sentence in said_plainly]
    if not as_json:
        tell(False, quiet, {}, sentences)
    agreed = yes is not None or (sys.stdin.isatty() and typer.confirm("May it take part?"))
    if agreed:
        approval.approve(settings, folder, "person")
    done = "approved: it takes part when it is submitted again"
    outcome = done if agreed else f"not approved (--yes {settings.digest})"
    told = {"run": run, "approved": agreed, "fingerprint": settings.digest, "words": sentences}
    tell(as_json, quiet, told, [f"{run} is {outcome}."])


def start(
    kit: options.KitFolder,
    background: Annotated[bool, typer.Option("--background", help="Return as soon as it is up.")] = False,
    as_it_is: Annotated[
        bool,
        typer.Option("--as-it-is", help="Start a site's kit even if it holds or allows more than kits are made with."),
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Run a server's or a site's kit on this machine.

    The command compares a site's kit with those that init makes.  It names any further code, components or rights, and then
    does not start.  It stays in the foreground until Ctrl-C, SIGTERM or federate stop, as service managers expect; with
    --background it returns.  The output goes to console.log in the kit.
    """
    need_nvflare()
    from fedbilevel.federation.nvflare.console import OUTPUT
    from fedbilevel.federation.operator import processes
    from fedbilevel.federation.operator.kits import check_dates, open_kit

    opened = open_kit(kit)
    warning = check_dates(opened)
    if warning:
        print(warning, file=sys.stderr)
    log = opened.folder / OUTPUT
    written = log.stat().st_size if log.exists() else 0
    with ended_by_signals():
        process = processes.start(opened.folder, as_it_is=as_it_is)
        try:
            up = processes.is_up(process, opened.folder, opened.kind, written, UP_SECONDS)
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
    run: Annotated[str | None, typer.Option(help="Stop this run instead; submitted again, it continues.")] = None,
    folder: options.KitsFolder = None,
    admin: options.AdminKit = None,
    server: options.ServerKit = None,
    quiet: options.Quiet = False,
) -> None:
    """End the processes of kits on this machine, or a run.

    What was trained is kept.  A site or server that is started again takes part again.  A run that is submitted again
    continues from its last complete round.
    """
    need_nvflare()
    from fedbilevel.federation.operator import processes
    from fedbilevel.federation.operator.kits import open_kit
    from fedbilevel.federation.operator.sessions import stop_run

    if run is None and not kits:
        raise ValueError("Name the kits whose processes are to end, or a --run.")
    if run is not None and kits:
        raise ValueError("Name kits or a --run to stop, not both.")
    if run is not None:
        named = kits_at(folder, admin, server)
        with hushed():
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
    folder: options.KitsFolder = None,
    admin: options.AdminKit = None,
    server: options.ServerKit = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Who is there, and how far the runs are.

    With kits, it says whether they run here and how long their certificates last.  Without, at the coordinator, it shows the
    sites that answer the server and every run it knows.
    """
    need_nvflare()
    rows = _of_kits(kits) if kits else _of_federation(kits_at(folder, admin, server))
    tell(as_json, quiet, rows, _tables(rows))


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
    from fedbilevel.federation.operator.sessions import look, run_folder, session, twins
    from fedbilevel.federation.protocol.record import read_status

    with hushed(), session(kits) as opened:
        seen = look(opened)
    names, twice = list(dict.fromkeys([*kits.sites, *seen.sites])), twins(kits)
    sites = [
        {
            "site": name,
            "connected": "twice" if name in twice else name in seen.sites,
            "jobs": len(seen.sites.get(name, ())),
        }
        for name in names
    ]
    runs = []
    home = run_folder(kits, "any").parent
    for folder in sorted(home.iterdir()) if home.exists() else ():
        told = read_status(folder)
        if told is not None:
            lost = told["status"] == "running" and told.get("job") not in seen.jobs
            row = {"run": folder.name, "status": "interrupted" if lost else told["status"]}
            row |= {name: told.get(name) for name in ("stage", "round", "rounds")}
            row["seen"] = "sums" if told.get("secure") else "replies"
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
            words = {True: "yes", False: "no", "twice": "twice: a copy of its kit is in use"}
            frame["connected"] = [words[value] for value in frame["connected"]]
        yield title.capitalize(), frame
