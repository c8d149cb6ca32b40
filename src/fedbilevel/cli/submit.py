"""``fedbilevel federate submit`` and ``demo``: one fit over the sites, watched until it is done."""

from __future__ import annotations

import csv
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedbilevel.cli import options
from fedbilevel.cli.federate import UP_SECONDS, check_signals, ended_by_signals, hushed, kits_at, need_nvflare
from fedbilevel.cli.own_data import further, mapping_at, measure_tables, suited, verdict
from fedbilevel.cli.terminal import check_folder, prepare_jax, records, tell, typed

if TYPE_CHECKING:
    from fedbilevel.federation.operator.kits import Kits
    from fedbilevel.federation.protocol.settings import JobSettings
    from fedbilevel.jobs.federate import FederateResult
    from fedbilevel.jobs.fit import FitOptions
    from fedbilevel.tables.schema import Schema

LINE_SECONDS = 5.0
"""Without a terminal, a line about the rounds this often."""
PATIENCE = 600.0
"""Seconds without a round; on a machine with ten times too much to do the first one of a demo took more than two minutes."""


def submit(
    schema: options.SchemaFile = None,
    kits: Annotated[Path | None, typer.Option(help="The federation's folder, made by init.", metavar="DIR")] = None,
    admin: options.AdminKit = None,
    server: options.ServerKit = None,
    site: Annotated[list[str] | None, typer.Option(help="Only these sites; all if not given.")] = None,
    method: options.Method = "fedpath",
    formulation: options.Formulation = "cells",
    metric: options.Metric = None,
    strength: Annotated[
        float | None, typer.Option(help="How much fairness counts; the method's own if not given.")
    ] = None,
    gap: options.Gap = None,
    accuracy_loss: options.AccuracyLoss = None,
    steps: options.Steps = None,
    weight_steps: options.WeightSteps = None,
    local_steps: options.LocalSteps = 5,
    batch_size: options.BatchSize = 128,
    model: options.Model = None,
    loss: options.Loss = "squared",
    class_weight: options.ClassWeight = None,
    threshold: options.Threshold = None,
    minimum_cell: options.MinimumCell = 10,
    client_weights: options.ClientWeights = "uniform",
    validation: Annotated[float | None, typer.Option(help="Share of rows set apart for the outer problem.")] = None,
    seed: options.Seed = 0,
    secure_aggregation: options.SecureAggregation = "on",
    min_sites: Annotated[int | None, typer.Option(help="Sites that a round needs; all if not given.", min=1)] = None,
    reply_timeout: Annotated[float, typer.Option(help="Seconds a round waits for a site.")] = 300.0,
    patience: Annotated[float, typer.Option(help="Seconds without progress before giving up.")] = PATIENCE,
    run: Annotated[str | None, typer.Option(help="Name of the run; made from the options if not given.")] = None,
    test: Annotated[Path | None, typer.Option(help="The coordinator's own rows to measure the model on.")] = None,
    mapping: Annotated[
        Path | None,
        typer.Option(help="How the rows of --test are translated; sites keep their own mapping beside their tables."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/federate-TARGET if not given.")] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """One fit over the sites, watched until it is done.

    Runs on the server's machine.  If a fault ends the run, the command submits it again, and it continues from its last
    complete round.  The same command continues it after Ctrl-C.  Writes the run folder with model, tables and page.
    """
    need_nvflare()
    if schema is None:
        raise ValueError("--schema is missing: name the file made by `fedbilevel schema`.")
    named = kits_at(kits, admin, server)
    from fedbilevel.tables.schema import Schema

    meaning = Schema.read(schema)
    folder = out or Path("runs") / f"federate-{meaning.target}"
    check_folder(folder)
    prepare_jax()
    from fedbilevel.jobs.federate import job
    from fedbilevel.jobs.fit import FitOptions

    fit = FitOptions(
        method=method, formulation=formulation, strength=strength, gap=gap, accuracy_loss=accuracy_loss, steps=steps,
        weight_steps=weight_steps,
        local_steps=local_steps, batch_size=batch_size, client_weights=client_weights, seed=seed, compare_with=None,
        class_weight=class_weight, threshold=threshold, minimum_cell=minimum_cell,
        **suited(meaning, metric, model, loss),
    )  # fmt: skip
    settings = job(
        fit, meaning, sites_of(named, site), run=run, validation=validation, min_sites=min_sites,
        reply_timeout=reply_timeout, secure=switched(secure_aggregation),
    )  # fmt: skip
    with ended_by_signals():
        result = carry_out(named, settings, fit, meaning, folder, test, patience, quiet or as_json, mapping)
    tell_result(result, folder, as_json, quiet)


def switched(secure_aggregation: str) -> bool:
    if secure_aggregation not in ("on", "off"):
        raise ValueError(f"--secure-aggregation must be on or off, not {secure_aggregation!r}.")
    return secure_aggregation == "on"


def how_seen(settings: JobSettings) -> str:
    """What the coordinator sees of the sites' replies, in words."""
    if settings.secured:
        return f"secure sums: what is seen are sums over {settings.needed} sites or more, and no single reply"
    few = "of fewer than three sites there are no secure sums: " if len(settings.sites) < 3 else "no secure sums: "
    return f"{few}the coordinator sees every site's replies"


def sites_of(kits: Kits, given: list[str] | None) -> list[str]:
    known = list(kits.sites)
    strange = [name for name in given or () if known and name not in known]
    if strange:
        raise ValueError(f"--site {strange[0]}: the federation has {', '.join(known)}.")
    if not (given or known):
        raise ValueError("--site is missing: with --admin, name the sites of the run.")
    return given or known


def carry_out(
    kits: Kits,
    settings: JobSettings,
    fit: FitOptions,
    schema: Schema,
    out: Path,
    test: Path | None,
    patience: float,
    quiet: bool,
    mapping: Path | None = None,
) -> FederateResult:
    """Submit, show the rounds, collect."""
    from fedbilevel.jobs import federate
    from fedbilevel.tables.reading import open_table

    held = None if test is None else open_table(test)
    if held is not None:
        held = held if (rules := mapping_at(mapping)) is None else rules.alone(held)
        held.check_columns(schema.needed())
    supervised = supervision(kits, settings, patience, quiet)
    return federate.run(settings, fit, schema, out, supervised, test=held, line=typed())


def supervision(kits: Kits, settings: JobSettings, patience: float, quiet: bool) -> Callable[[], Path]:
    """What submits a run, shows its rounds and returns the coordinator's folder; a run that is left is stopped there."""
    from fedbilevel.federation.operator.sessions import Supervisor, run_folder, stop_run

    def supervised() -> Path:
        with Watch(run_folder(kits, settings.run), quiet) as watch, hushed():

            def look() -> bool:
                check_signals()
                watch.look(time.monotonic())
                return False

            try:
                watch.say(f"run {settings.run} with {', '.join(settings.sites)}")
                watch.say(how_seen(settings))
                return Supervisor(kits, settings, kits.admin / "transfer", watch.say, patience, stop=look).run()
            except KeyboardInterrupt:
                watch.say("stopping the run...")
                with suppress(Exception):  # the server may be gone, and its jobs with it
                    stop_run(kits, settings.run)
                raise KeyboardInterrupt("Stopped; the same command goes on from the last complete round.") from None

    return supervised


def tell_result(result: FederateResult, out: Path, as_json: bool, quiet: bool) -> None:
    """What came out, for people or for machines."""
    run = result.run

    def shown() -> Iterator[str | tuple[str, Any]]:
        sites = result.sites.copy()
        sites["rows"] = ["not told" if count != count else f"{int(count):,}" for count in sites["rows"]]
        # Short names: the table is to fit a terminal of 80 columns.
        short = {"bytes_up": "up", "bytes_down": "down", "median_seconds": "seconds", "median_own_seconds": "own"}
        for name in short:
            sites[name] = [size(int(value)) if name.startswith("bytes") else f"{value:.3f}" for value in sites[name]]
        yield "Sites (seconds of an exchange and of the site's own work: medians)", sites.rename(columns=short)
        for part in ("train", "test"):
            if f"{part}_accuracy" in run.rows and run.rows[f"{part}_accuracy"].notna().any():
                yield from measure_tables(run, part)
        yield from verdict(run)
        yield from (f"Warning: {sentence}" for sentence in result.warnings)
        yield from result.notes
        yield f"Model, tables and page are in {out}"

    told = {
        "folder": str(out), "page": str(result.page), "rows": records(run.rows), "groups": records(run.groups),
        "weights": records(run.weights), "sites": records(result.sites), "notes": result.notes,
        "warnings": result.warnings, **further(run),
    }  # fmt: skip
    tell(as_json, quiet, told, shown())


def demo(
    method: Annotated[
        str, typer.Option(help="fedpath, fedbioacc, fedbio, fedavg, fedreg, fedminmax, fcfl, fedfb or fairfed.")
    ] = "fedpath",
    steps: Annotated[int, typer.Option(help="Training steps of the model.", min=1)] = 1000,
    weight_steps: Annotated[int, typer.Option(help="Steps of the bilevel stage.", min=1)] = 500,
    local_steps: options.LocalSteps = 5,
    rows: Annotated[
        int | None, typer.Option(help="Use only this many of Adult's rows; all if not given.", min=300)
    ] = None,
    seed: options.Seed = 0,
    secure_aggregation: options.SecureAggregation = "on",
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the federation: kits, tables and logs, in OUT-federation.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/federate-demo"),
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """A whole federation on this machine, to watch it once.  It has certificates, a server and three sites, fits Adult by
    sex and writes the page.

    The sites are real processes with their own files, over mutual TLS on loopback.  All of them end with the command.
    """
    need_nvflare()
    check_folder(out)
    talks = not (quiet or as_json)
    prepare_jax()
    from fedbilevel.jobs.fit import FitOptions

    fit = FitOptions(
        method=method, steps=steps, weight_steps=weight_steps, local_steps=local_steps, seed=seed, compare_with=None
    )
    home = out.with_name(f"{out.name}-federation") if keep else Path(tempfile.mkdtemp(prefix="fedbilevel-demo-"))
    if keep and home.exists():
        raise ValueError(f"{home} is there already: move it away, or name another --out.")
    try:
        with ended_by_signals():
            result = _run(home, fit, rows, out, talks, switched(secure_aggregation))
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    tell_result(result, out, as_json, quiet)
    if talks and keep:
        print(f"Kits, tables and logs are in {home}")


def _run(home: Path, fit: FitOptions, rows: int | None, out: Path, talks: bool, secure: bool) -> FederateResult:
    import jax

    from fedbilevel.federation.operator import processes
    from fedbilevel.federation.operator.demo import prepare
    from fedbilevel.federation.operator.sessions import wait_for_sites
    from fedbilevel.jobs.federate import job

    began = time.monotonic()

    def say(text: str) -> None:
        if talks:
            print(f"{time.monotonic() - began:5.1f} s  {text}", file=sys.stderr, flush=True)

    made = prepare(home, rows, fit.seed, secure)
    sites = list(made.kits.sites)
    settings = job(fit, made.schema, sites, secure=secure)
    say(f"certificates and kits for a server, a coordinator and the sites {', '.join(sites)}")
    environment = {
        "JAX_PLATFORMS": "cpu",
        # Sites on one machine compile the same programs, and so does the next demo.
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),  # type: ignore[attr-defined]
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    with processes.started(made.kits, environment) as running:
        there: list[str] = []
        ended: list[str] = []
        while len(there) < len(sites) and not ended and time.monotonic() < began + PATIENCE:
            with hushed():
                there = wait_for_sites(made.kits, sites, UP_SECONDS)
            ended = [name for name, process in running.items() if process.poll() is not None]
        if len(there) < len(sites):
            reason = f"{ended[0]} ended at once" if ended else f"only {', '.join(there) or 'no site'} came up"
            raise RuntimeError(f"The demo's federation did not start: {reason}; --keep keeps its logs.")
        say(f"server and {len(sites)} sites are up, over mutual TLS")
        result = carry_out(made.kits, settings, fit, made.schema, out, made.test, PATIENCE, not talks)
        say("trained, measured, page written")
    say("everything is stopped")
    return result


class Watch:
    """Rounds as they are done, with bytes and time per site: a table on a terminal, plain lines elsewhere.

    `look` is called often and reads what the coordinator has written since.
    """

    def __init__(self, folder: Path, quiet: bool) -> None:
        self.folder, self.quiet = folder, quiet
        self.stream = os.fdopen(os.dup(2), "w", buffering=1)
        self.console = Console(file=self.stream, force_terminal=sys.stderr.isatty(), highlight=False, soft_wrap=True)
        self.live: Live | None = None
        self.place = 0
        self.sites: dict[str, dict[str, Any]] = {}
        self.last_line = 0.0
        self.shown = ""

    def __enter__(self) -> Watch:
        if not self.quiet and self.console.is_terminal:
            self.live = Live(console=self.console, transient=True, auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
        self.stream.close()

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False)

    def look(self, now: float) -> None:
        from fedbilevel.federation.protocol.record import read_status

        self._read()
        status = read_status(self.folder) or {}
        if self.quiet or not status.get("round") or not self.sites:
            return
        head = f"{status['stage']}: round {status['round']} of {status['rounds']}"
        if status.get("away"):
            head += f"; away: {', '.join(status['away'])}"
        if self.live is not None:
            self.live.update(self._table(head), refresh=True)
        elif head != self.shown and (now - self.last_line > LINE_SECONDS or status["round"] == status["rounds"]):
            self.shown, self.last_line = head, now
            each = "; ".join(
                f"{name} {site['seconds'] or '?'} s, up {size(site['up'])}, down {size(site['down'])}"
                for name, site in self.sites.items()
            )
            self.say(f"{head} ({each})")

    def _read(self) -> None:
        """New whole lines of exchanges.csv."""
        with suppress(OSError), (self.folder / "exchanges.csv").open(newline="") as file:
            head = file.readline()
            if self.place > os.fstat(file.fileno()).st_size:
                self.place, self.sites = 0, {}  # the run went back to its last complete round
            file.seek(max(self.place, len(head)))
            text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self.place = max(self.place, len(head)) + len(whole.encode())
            for row in csv.DictReader([head, *whole.splitlines(keepends=True)]):
                site = self.sites.setdefault(row["site"], {"up": 0, "down": 0, "answered": 0})
                site["up"] += int(row["bytes_up"])
                site["down"] += int(row["bytes_down"])
                site["answered"] += row["outcome"].startswith("answered")
                site["seconds"], site["outcome"] = row["seconds"][:5], row["outcome"]

    def _table(self, head: str) -> Table:
        table = Table(title=head, title_justify="left", header_style="bold")
        for name in ("site", "answered", "last s", "up", "down", "last outcome"):
            table.add_column(name, justify="left" if name in ("site", "last outcome") else "right")
        for name, site in self.sites.items():
            bytes_both = size(site["up"]), size(site["down"])
            table.add_row(name, str(site["answered"]), site["seconds"], *bytes_both, site["outcome"])
        return table


def size(count: int) -> str:
    """Bytes for people."""
    number, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
