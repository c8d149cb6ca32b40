"""``fedbilevel audit``, and the same over the sites of a federation."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.cli import options
from fedbilevel.cli.own_data import encoding_notes, mapping_at, measure_tables, opened, verdict
from fedbilevel.cli.terminal import Shown, check_folder, prepare_jax, progress_lines, records, tell, typed

if TYPE_CHECKING:
    from fedbilevel.jobs.audit import AuditResult
    from fedbilevel.tables.schema import Schema

SIDE_BY_SIDE = 4
"""Sites that the terminal shows beside each other; more are in the folder and on the page."""
Threshold = Annotated[
    float | None, typer.Option(help="Yes above this probability; 0.5 if not given.", min=0.0, max=1.0)
]
Out = Annotated[Path | None, typer.Option(help="Run folder; runs/audit-TARGET if not given.")]


def audit(
    files: options.Files,
    target: options.Target = None,
    prediction: options.Prediction = None,
    sensitive: options.Sensitive = None,
    site: options.SiteColumn = None,
    positive: options.Positive = None,
    threshold: Threshold = None,
    task: options.Task = None,
    metric: options.Metric = None,
    mapping: options.MappingFile = None,
    minimum_cell: options.MinimumCell = 10,
    out: Out = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure any model by site and by group, without training.

    The tables hold the target and the model's answers: probabilities, decisions, or predicted numbers.  More than two classes
    need a column of probabilities for each, named alike, as predict writes them.  Writes the run folder with tables, page
    and the schema that `federate audit` takes.
    """
    for name, column in (("target", target), ("prediction", prediction)):
        if column is None:
            what = {"target": "what is to be predicted", "prediction": "what the model said"}[name]
            raise ValueError(f"--{name} is missing: name the column that holds {what}.")
    from fedbilevel.jobs import audit as job

    own, rules = opened(files, delimiter, encoding), mapping_at(mapping)
    tables = own if rules is None else rules.applied(own, site)
    chosen = _options(threshold, metric, minimum_cell)
    checked = () if rules is None else rules.checked
    schema = job.question(tables, str(target), str(prediction), sensitive or (), site, positive, checked, task)
    _check_threshold(schema, threshold)
    folder = out or _folder(schema)
    check_folder(folder)
    with progress_lines(quiet or as_json) as progress:
        result = job.run(tables, schema, folder, chosen, mapping=rules, line=typed(), tell=progress)
    _tell(result, folder, encoding_notes(own), as_json, quiet)


def federated_audit(
    schema: Annotated[
        Path | None, typer.Option("--schema", help="The audit's schema.toml, or a fit's with --prediction.")
    ] = None,
    prediction: Annotated[
        str | None, typer.Option(help="The column of probabilities, where the schema is one of a fit.")
    ] = None,
    kits: options.KitsFolder = None,
    admin: options.AdminKit = None,
    server: options.ServerKit = None,
    site: Annotated[list[str] | None, typer.Option(help="Only these sites; all if not given.")] = None,
    threshold: Threshold = None,
    metric: options.Metric = None,
    minimum_cell: options.MinimumCell = 10,
    min_sites: Annotated[int | None, typer.Option(help="Sites that a round needs; all if not given.", min=1)] = None,
    reply_timeout: Annotated[float, typer.Option(help="Seconds to wait for a site.")] = 300.0,
    patience: Annotated[float, typer.Option(help="Seconds without progress before giving up.")] = 600.0,
    run: Annotated[str | None, typer.Option(help="Name of the run; made from the options if not given.")] = None,
    out: Out = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure any model at the sites.  Nothing but counts leaves them.

    Every site must offer the columns of the schema and list "report" under tell in its policy.
    """
    from fedbilevel.cli.federate import ended_by_signals, kits_at, need_nvflare
    from fedbilevel.cli.submit import sites_of, supervision

    need_nvflare()
    if schema is None:
        raise ValueError("--schema is missing: name the schema.toml that `fedbilevel audit` wrote at one of the sites.")
    named = kits_at(kits, admin, server)
    from fedbilevel.jobs import audit as job

    meaning = job.meant(schema, prediction)
    _check_threshold(meaning, threshold)
    chosen = _options(threshold, metric, minimum_cell)
    folder = out or _folder(meaning)
    check_folder(folder)
    prepare_jax()
    settings = job.job(
        meaning, chosen, sites_of(named, site), run=run, min_sites=min_sites, reply_timeout=reply_timeout
    )
    with ended_by_signals():
        asked = supervision(named, settings, patience, quiet or as_json)
        result = job.federated(settings, meaning, chosen, folder, asked, typed())
    _tell(result, folder, [], as_json, quiet)


federated_audit.__name__ = "audit"


def _options(threshold: float | None, metric: str | None, minimum_cell: int) -> Any:
    from fedbilevel.jobs.audit import AuditOptions

    return AuditOptions(0.5 if threshold is None else threshold, metric, minimum_cell)


def _check_threshold(schema: Schema, threshold: float | None) -> None:
    from fedbilevel.jobs.audit import by_threshold

    if threshold is None or by_threshold(schema):
        return
    what = f"{schema.features[0].name!r} holds decisions"
    if schema.features[0].kind == "number":
        kind = "is a number" if schema.regression else f"has {len(schema.labels)} classes"
        what = f"{schema.target!r} {kind}"
    raise ValueError(f"--threshold is for the probability of one positive class, but {what}; leave it out.")


def _folder(schema: Schema) -> Path:
    return Path("runs") / f"audit-{re.sub(r'[^A-Za-z0-9]+', '-', schema.target).strip('-') or 'table'}"


def _tell(result: AuditResult, folder: Path, more: list[str], as_json: bool, quiet: bool) -> None:
    run = result.run
    wide = len(run.rows) > SIDE_BY_SIDE + 1
    *others, everywhere = run.rows["split"]
    columns = [everywhere] if wide else [everywhere, *others]
    rows = run.rows.set_index("split", drop=False).loc[columns]
    groups = run.groups[run.groups["split"].isin(columns)]
    # One column a site, where other commands have one a method.
    beside = replace(run, rows=rows.assign(method=rows["split"]), groups=groups.assign(method=groups["split"]))
    where = f"Tables and page are in {folder}; open {result.page}"
    each = [f"{len(run.rows) - 1} sites are in rows.csv, groups.csv and on the page."] if wide else []
    warned = [f"Warning: {sentence}" for sentence in result.warnings]
    shown: Shown = [*measure_tables(beside, "test"), *verdict(run), *warned, *result.notes, *each, *more, where]
    told = {name: records(frame) for name, frame in {"rows": run.rows, "groups": run.groups, **run.others}.items()}
    about = {"folder": str(folder), "page": str(result.page), "warnings": result.warnings, "notes": result.notes}
    about["verdict"] = verdict(run)
    tell(as_json, quiet, {**told, **about}, shown)
