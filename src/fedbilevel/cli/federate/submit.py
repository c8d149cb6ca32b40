"""``fedbilevel federate submit``."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.cli.federate import parts
from fedbilevel.cli.terminal import AsJson, Quiet, check_folder, prepare_jax, records

if TYPE_CHECKING:
    from fedbilevel.federation.nvflare.sessions import Kits
    from fedbilevel.federation.protocol.settings import JobSettings
    from fedbilevel.jobs.federate import FederateResult
    from fedbilevel.jobs.fit import FitOptions
    from fedbilevel.tables.schema import Schema


def submit(
    schema: Annotated[Path | None, typer.Option(help="What the columns mean, from the command schema.")] = None,
    kits: Annotated[Path | None, typer.Option(help="The federation's folder, made by init.", metavar="DIR")] = None,
    admin: parts.AdminKit = None,
    server: parts.ServerKit = None,
    site: Annotated[list[str] | None, typer.Option(help="Only these sites; all if not given.")] = None,
    method: Annotated[
        str, typer.Option(help="fedbioacc, fedbio, fedavg (no fairness), fedreg, fedminmax, fcfl, fedfb or fairfed.")
    ] = "fedbioacc",
    formulation: Annotated[str, typer.Option(help="cells (ours) or paper; for fedbioacc and fedbio.")] = "cells",
    metric: parts.Metric = "equal_opportunity",
    strength: Annotated[
        float | None, typer.Option(help="How much fairness counts; the method's own if not given.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps; the method's own if not given.", min=1)] = None,
    weight_steps: Annotated[
        int | None, typer.Option(help="Steps of the bilevel stage; the method's own if not given.", min=1)
    ] = None,
    local_steps: parts.LocalSteps = 5,
    batch_size: Annotated[int, typer.Option(help="Rows of a step.", min=1)] = 128,
    model: Annotated[str, typer.Option(help="logistic, or mlp (one hidden layer).")] = "logistic",
    client_weights: Annotated[
        str, typer.Option(help="Sites count alike (uniform) or by their rows (samples).")
    ] = "uniform",
    validation: Annotated[float | None, typer.Option(help="Share of rows set apart for the outer problem.")] = None,
    seed: parts.Seed = 0,
    min_sites: Annotated[int | None, typer.Option(help="Go on with so many; all if not given.", min=1)] = None,
    reply_timeout: Annotated[float, typer.Option(help="Seconds a round waits for a site.")] = 300.0,
    patience: Annotated[float, typer.Option(help="Seconds without progress before giving up.")] = 600.0,
    run: Annotated[str | None, typer.Option(help="Name of the run; made from the options if not given.")] = None,
    test: Annotated[Path | None, typer.Option(help="The coordinator's own rows to measure the model on.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/federate-TARGET if not given.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """One fit over the sites, watched until it is done.

    Runs on the server's machine.  A run that a fault has ended is submitted again and goes on from its last complete round;
    so does the same command after Ctrl-C.  Writes the run folder with model, tables and page.
    """
    parts.need_nvflare()
    if schema is None:
        raise ValueError("--schema is missing: name the file made by `fedbilevel schema`.")
    named = parts.kits_at(kits, admin, server)
    from fedbilevel.tables.schema import Schema

    meaning = Schema.read(schema)
    folder = out or Path("runs") / f"federate-{meaning.target}"
    check_folder(folder)
    prepare_jax()
    from fedbilevel.jobs.federate import job
    from fedbilevel.jobs.fit import FitOptions

    fit = FitOptions(
        method=method, formulation=formulation, metric=metric, strength=strength, steps=steps, weight_steps=weight_steps,
        local_steps=local_steps, batch_size=batch_size, model=model, client_weights=client_weights, seed=seed,
        compare_with=None,
    )  # fmt: skip
    settings = job(
        fit, meaning, _sites(named, site), run=run, validation=validation, min_sites=min_sites, reply_timeout=reply_timeout
    )  # fmt: skip
    with parts.ended_by_signals():
        result = carry_out(named, settings, fit, meaning, folder, test, patience, quiet or as_json)
    tell_result(result, folder, as_json, quiet)


def _sites(kits: Kits, given: list[str] | None) -> list[str]:
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
) -> FederateResult:
    """Submit, show the rounds, collect; a run that is left is stopped at the server too."""
    from fedbilevel.federation.nvflare.sessions import run_folder, stop_run
    from fedbilevel.federation.operator.supervisor import Supervisor
    from fedbilevel.jobs import federate
    from fedbilevel.tables.reading import open_table

    held = None if test is None else open_table(test)
    if held is not None:
        held.check_columns(schema.needed())

    def supervised() -> Path:
        with parts.Watch(run_folder(kits, settings.run), quiet) as watch, parts.hushed():

            def look() -> bool:
                watch.look(time.monotonic())
                return False

            try:
                watch.say(f"run {settings.run} with {', '.join(settings.sites)}")
                return Supervisor(kits, settings, kits.admin / "transfer", watch.say, patience, stop=look).run()
            except KeyboardInterrupt:
                watch.say("stopping the run...")
                with suppress(Exception):  # the server may be gone, and its jobs with it
                    stop_run(kits, settings.run)
                raise KeyboardInterrupt("Stopped; the same command goes on from the last complete round.") from None

    line = shlex.join(["fedbilevel", *sys.argv[1:]])
    return federate.run(settings, fit, schema, out, supervised, test=held, line=line)


def tell_result(result: FederateResult, out: Path, as_json: bool, quiet: bool) -> None:
    """What came out, for people or for machines."""
    run = result.run

    def shown() -> Iterator[str | tuple[str, Any]]:
        sites = result.sites.copy()
        sites["rows"] = ["not told" if count != count else f"{int(count):,}" for count in sites["rows"]]
        # Short names: the table is to fit a terminal of 80 columns.
        short = {"bytes_up": "up", "bytes_down": "down", "median_seconds": "seconds", "median_own_seconds": "own"}
        for name in short:
            sites[name] = [
                parts.size(int(value)) if name.startswith("bytes") else f"{value:.3f}" for value in sites[name]
            ]
        yield "Sites (seconds of an exchange and of the site's own work: medians)", sites.rename(columns=short)
        wanted = ["method", "train_accuracy", "train_gap", "test_accuracy", "test_gap", "rounds", "seconds"]
        kept = [name for name in wanted if name in run.rows and run.rows[name].notna().any()]
        yield f"Result ({run.configuration['metric'].replace('_', ' ')})", run.rows[kept]
        if len(run.groups):
            columns = ["part", "group", "count", "true_positive_rate", "false_positive_rate", "selection_rate"]
            yield "Groups", run.groups[columns]
        yield from result.notes
        yield f"Model, tables and page are in {out}"

    told = {
        "folder": str(out), "page": str(result.page), "rows": records(run.rows), "groups": records(run.groups),
        "weights": records(run.weights), "sites": records(result.sites), "notes": result.notes,
    }  # fmt: skip
    parts.tell(as_json, quiet, told, shown())
