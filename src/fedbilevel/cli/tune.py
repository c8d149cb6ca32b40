"""``fedbilevel tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.cli import options
from fedbilevel.cli.own_data import (
    encoding_notes,
    folder_for,
    kept_schema,
    mapping_at,
    opened,
    schema_frame,
    understood,
)
from fedbilevel.cli.terminal import (
    Shown,
    check_folder,
    console,
    prepare_jax,
    progress_lines,
    records,
    show,
    tell,
    typed,
)

if TYPE_CHECKING:
    import pandas as pd

    from fedbilevel.runs import Run

What = Annotated[
    str,
    typer.Option(
        help="penalties (one for each column) or features (one for each feature), classes (weights, label smoothing), sites "
        "(whose data "
        "helps?), rows (whose labels are doubtful); several with commas."
    ),
]
Folds = Annotated[int, typer.Option(help="Parts of a site's rows, each held out once.", min=2)]
Rounds = Annotated[int, typer.Option(help="How many choices to try at most; the run may end earlier.", min=1)]


def tune(
    files: options.Files,
    target: options.Target = None,
    what: What = "penalties",
    site: options.SiteColumn = None,
    clients: options.Clients = None,
    schema: options.SchemaFile = None,
    mapping: options.MappingFile = None,
    positive: options.Positive = None,
    task: options.Task = None,
    folds: Folds = 3,
    rounds: Rounds = 15,
    splits: Annotated[int, typer.Option(help="Ways of dealing rows into folds, for the intervals.", min=1)] = 5,
    minimum_cell: options.MinimumCell = 10,
    secure: options.Secure = False,
    test_share: options.TestShare = 0.3,
    search: Annotated[bool, typer.Option(help="Compare with a search over 20 ridge penalties by FedAvg.")] = True,
    seed: options.Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/tune-TARGET if not given.")] = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Tune hyper-parameters across sites in one run.  They are penalties, class weights, whose data helps,
    and doubtful rows.

    One file for each site, or one file with --site, or one file dealt to --clients.  Writes the run folder with model, tables
    and page.  If it stops, the same command continues.
    """
    given = None if schema is None else kept_schema(schema, {"target": target, "site": site, "task": task}, positive)
    meant = understood(
        opened(files, delimiter, encoding), target, None, site, positive, mapping=mapping_at(mapping), schema=given,
        otherwise=", or a --schema", task=task, grouped=False,
    )  # fmt: skip
    from fedbilevel.jobs import tune as job

    chosen = job.TuneOptions(
        what=choices_in(what), folds=folds, rounds=rounds, splits=splits,
        minimum_cell=minimum_cell, test_share=test_share, seed=seed, compare=search, secure=secure,
    )  # fmt: skip
    job.check_what(chosen.what, job.model_of(meant.schema))
    folder = out or folder_for("tune", meant.schema)
    check_folder(folder)
    if not (quiet or as_json):
        show(
            console(),
            "Columns, as they are used (fedbilevel schema writes a file to change this)",
            schema_frame(meant.schema),
        )
    prepare_jax()
    try:
        with progress_lines(quiet) as progress:
            result = job.run(
                meant.tables,
                meant.schema,
                folder,
                chosen,
                clients=clients,
                mapping=meant.mapping,
                line=typed(),
                tell=progress,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Stopped; the same command goes on with what is in {folder}.") from None
    run = result.run
    learned = job.learned(run)
    told = {"rows": records(run.rows), "learned": records(learned), "sites": records(result.sites)}
    warned = [f"Warning: {sentence}" for sentence in result.warnings]
    where = f"Model, tables and page are in {folder}; open {result.page}"
    notes = [*meant.warnings, *result.notes]
    shown: Shown = [
        ("Rows", result.sites),
        ("What was learned", learned),
        ("Test rows", compared(run)),
        *warned,
        *notes,
        *encoding_notes(meant.tables),
        where,
    ]
    about = {"folder": str(folder), "page": str(result.page), "warnings": result.warnings, "notes": notes}
    tell(as_json, quiet, {**about, **told}, shown)


def federated_tune(
    schema: options.SchemaFile = None,
    kits: options.KitsFolder = None,
    admin: options.AdminKit = None,
    server: options.ServerKit = None,
    site: Annotated[list[str] | None, typer.Option(help="Only these sites; all if not given.")] = None,
    what: What = "penalties",
    folds: Folds = 3,
    rounds: Rounds = 15,
    minimum_cell: options.MinimumCell = 10,
    seed: options.Seed = 0,
    secure_aggregation: options.SecureAggregation = "on",
    min_sites: Annotated[int | None, typer.Option(help="Sites that a round needs; all if not given.", min=1)] = None,
    reply_timeout: Annotated[float, typer.Option(help="Seconds a round waits for a site.")] = 300.0,
    patience: Annotated[float, typer.Option(help="Seconds without progress before giving up.")] = 600.0,
    run: Annotated[str | None, typer.Option(help="Name of the run; made from the options if not given.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/tune-TARGET if not given.")] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """The same tuning over real sites, watched until it is done.  Doubtful rows are listed at their own site only."""
    from fedbilevel.cli.federate import ended_by_signals, kits_at, need_nvflare
    from fedbilevel.cli.submit import sites_of, supervision, switched, tell_result

    need_nvflare()
    if schema is None:
        raise ValueError(
            "--schema is missing: name the schema.toml that `fedbilevel tune` or `fedbilevel schema` wrote."
        )
    named = kits_at(kits, admin, server)
    from fedbilevel.jobs import tune as job
    from fedbilevel.tables.schema import Schema

    meaning = Schema.read(schema)
    chosen = job.TuneOptions(
        choices_in(what), folds=folds, rounds=rounds, minimum_cell=minimum_cell, seed=seed, splits=1, compare=False
    )
    folder = out or folder_for("tune", meaning)
    check_folder(folder)
    prepare_jax()
    settings = job.job(
        meaning, chosen, sites_of(named, site), run=run, min_sites=min_sites, reply_timeout=reply_timeout,
        secure=switched(secure_aggregation),
    )  # fmt: skip
    with ended_by_signals():
        asked = supervision(named, settings, patience, quiet or as_json)
        result = job.federated(settings, meaning, chosen, folder, asked, typed())
    if not (quiet or as_json):
        show(console(), "What was learned", job.learned(result.run))
    tell_result(result, folder, as_json, quiet)


def choices_in(what: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in what.split(",") if name.strip())


def compared(run: Run) -> pd.DataFrame:
    """The models side by side: what they lose on test rows, how often they are right, and the bytes."""
    known = ("method", "test_loss", "test_accuracy", "test_auc", "test_rmse", "test_r2", "trainings", "bytes")
    return run.rows[[name for name in known if name in run.rows and run.rows[name].notna().any()]]


federated_tune.__name__ = "tune"
