"""``fedbilevel fit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.cli import options
from fedbilevel.cli.own_data import (
    encoding_notes,
    folder_for,
    further,
    kept_schema,
    mapping_at,
    measure_tables,
    opened,
    schema_frame,
    suited,
    understood,
    verdict,
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


def fit(
    files: options.Files,
    target: options.Target = None,
    sensitive: options.Sensitive = None,
    site: options.SiteColumn = None,
    clients: options.Clients = None,
    schema: options.SchemaFile = None,
    mapping: options.MappingFile = None,
    positive: options.Positive = None,
    task: options.Task = None,
    keep_sensitive: options.KeepSensitive = False,
    method: options.Method = "fedpath",
    formulation: options.Formulation = "cells",
    metric: options.Metric = None,
    strength: Annotated[
        str | None, typer.Option(help="How much fairness counts: a number, or auto to spend half a point of accuracy.")
    ] = None,
    gap: options.Gap = None,
    accuracy_loss: options.AccuracyLoss = None,
    steps: options.Steps = None,
    weight_steps: options.WeightSteps = None,
    batch_size: options.BatchSize = 128,
    model: options.Model = None,
    loss: options.Loss = "squared",
    class_weight: options.ClassWeight = None,
    threshold: options.Threshold = None,
    minimum_cell: options.MinimumCell = 10,
    client_weights: options.ClientWeights = "uniform",
    secure: options.Secure = False,
    pooled_frontier: Annotated[
        bool,
        typer.Option(
            "--pooled-frontier",
            help="Draw the limit too: the same problem solved on rows of all sites, which are pooled on this machine.",
        ),
    ] = False,
    test_share: options.TestShare = 0.3,
    compare_with: Annotated[
        str, typer.Option(help="Also train this method, to compare with; none: no comparison.")
    ] = "fedavg",
    seed: options.Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/fit-TARGET if not given.")] = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a model that is fair to groups, from your own tables.  It predicts classes or a number.

    One file for each site, or one file with --site, or one file dealt to --clients.  Writes the run folder with model, tables
    and page.  If it stops, the same command continues.
    """
    roles = {"target": target, "sensitive": sensitive and tuple(sensitive), "site": site, "task": task}
    given = None if schema is None else kept_schema(schema, roles, positive, keep_sensitive)
    meant = understood(
        opened(files, delimiter, encoding), target, sensitive, site, positive, keep_sensitive,
        mapping=mapping_at(mapping), schema=given, otherwise=", or a --schema", task=task,
    )  # fmt: skip
    tables, meaning = meant.tables, meant.schema
    from fedbilevel.jobs import fit as job

    chosen = job.FitOptions(
        method=method, formulation=formulation, strength=_strength(strength), gap=gap, accuracy_loss=accuracy_loss,
        steps=steps, weight_steps=weight_steps,
        batch_size=batch_size, client_weights=client_weights, **suited(meaning, metric, model, loss),
        class_weight=class_weight, threshold=threshold, minimum_cell=minimum_cell, test_share=test_share, seed=seed,
        compare_with=None if compare_with == "none" else compare_with, secure=secure,
        pooled_frontier=pooled_frontier,
    )  # fmt: skip
    folder = out or folder_for("fit", meaning)
    check_folder(folder)
    if not (quiet or as_json):
        title = "Columns, as they are used (fedbilevel schema writes a file to change this)"
        show(console(), title, schema_frame(meaning))
    prepare_jax()

    try:
        with progress_lines(quiet) as progress:
            result = job.run(
                tables, meaning, folder, chosen, clients=clients, mapping=meant.mapping, line=typed(), tell=progress
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Stopped; the same command goes on with what is in {folder}.") from None
    run = result.run
    frames = {"rows": run.rows, "groups": run.groups, "weights": run.weights, "sites": result.sites}
    told = {name: records(frame) for name, frame in frames.items()} | further(run)
    where = f"Model, tables and page are in {folder}; open {result.page}"
    warned = [f"Warning: {sentence}" for sentence in result.warnings]
    rows, notes = ("Rows", result.sites), [*meant.warnings, *result.notes]
    measured: Shown = [*measure_tables(run, "test"), *verdict(run)]
    shown: Shown = [rows, *measured, *warned, *notes, *encoding_notes(tables), where]
    about = {"folder": str(folder), "page": str(result.page), "warnings": result.warnings, "notes": notes}
    tell(as_json, quiet, {**about, **told}, shown)


def _strength(text: str | None) -> float | str | None:
    if text is None or text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--strength must be a number or auto, not {text!r}.") from None
