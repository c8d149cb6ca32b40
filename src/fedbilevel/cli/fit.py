"""``fedbilevel fit``."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.cli import options
from fedbilevel.cli.own_data import encoding_notes, mapping_at, opened, schema_frame, understood
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

    from fedbilevel.jobs.fit import FitResult
    from fedbilevel.tables.schema import Schema

GAPS = {
    "equal_opportunity": "gap of true-positive rates",
    "equalized_odds": "gap of true- and false-positive rates",
    "demographic_parity": "gap of selection rates",
}


def fit(
    files: options.Files,
    target: options.Target = None,
    sensitive: options.Sensitive = None,
    site: options.SiteColumn = None,
    clients: Annotated[int | None, typer.Option(help="Deal the rows of one file to so many clients.", min=1)] = None,
    schema: options.SchemaFile = None,
    mapping: options.MappingFile = None,
    positive: options.Positive = None,
    keep_sensitive: options.KeepSensitive = False,
    method: options.Method = "fedbioacc",
    formulation: options.Formulation = "cells",
    metric: options.Metric = "equal_opportunity",
    strength: Annotated[
        str | None, typer.Option(help="How much fairness counts: a number, or auto to cross-validate on training rows.")
    ] = None,
    steps: options.Steps = None,
    weight_steps: options.WeightSteps = None,
    batch_size: options.BatchSize = 128,
    model: options.Model = "logistic",
    client_weights: options.ClientWeights = "uniform",
    test_share: Annotated[float, typer.Option(help="Share of every site's rows kept for testing.")] = 0.3,
    compare_with: Annotated[
        str, typer.Option(help="Train this method too, to compare with; none for none.")
    ] = "fedavg",
    seed: options.Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/fit-TARGET if not given.")] = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """A classifier that is fair to groups, from tables of one's own.

    One file a site; or one file with --site; or one file dealt to --clients.  Writes the run folder with model, tables and
    page; the same command goes on where it was stopped.
    """
    given = None if schema is None else _kept(schema, target, sensitive, site, positive, keep_sensitive)
    meant = understood(
        opened(files, delimiter, encoding), target, sensitive, site, positive, keep_sensitive,
        mapping=mapping_at(mapping), schema=given, otherwise=", or a --schema",
    )  # fmt: skip
    tables, meaning = meant.tables, meant.schema
    from fedbilevel.jobs import fit as job

    chosen = job.FitOptions(
        method=method, formulation=formulation, metric=metric, strength=_strength(strength), steps=steps,
        weight_steps=weight_steps, batch_size=batch_size, model=model, client_weights=client_weights,
        test_share=test_share, seed=seed, compare_with=None if compare_with == "none" else compare_with,
    )  # fmt: skip
    folder = out or Path("runs") / f"fit-{re.sub(r'[^A-Za-z0-9]+', '-', meaning.target).strip('-') or 'table'}"
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
    told = {name: records(frame) for name, frame in frames.items()}
    where = f"Model, tables and page are in {folder}; open {result.page}"
    shown: Shown = [*_tables(result, metric), *meant.warnings, *result.notes, *encoding_notes(tables), where]
    tell(
        as_json,
        quiet,
        {"folder": str(folder), "page": str(result.page), **told, "notes": [*meant.warnings, *result.notes]},
        shown,
    )


def _kept(file: Path, target: str | None, sensitive: list[str] | None, site: str | None, positive: str | None,
          keep_sensitive: bool) -> Schema:  # fmt: skip
    """The schema in ``file``; options that say something else are refused."""
    from fedbilevel.tables.schema import Schema

    schema = Schema.read(file)
    given = {"target": target, "sensitive": sensitive and tuple(sensitive), "site": site}
    for option, here in given.items():
        there = getattr(schema, option)
        if here and here != there:
            raise ValueError(f"--{option} says {here!r} but the schema {file} says {there!r}; leave the option out.")
    if keep_sensitive:
        raise ValueError(f"--keep-sensitive: change kind of the column in the schema {file} instead.")
    return schema if positive is None else replace(schema, positive=positive)


def _strength(text: str | None) -> float | str | None:
    if text is None or text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--strength must be a number or auto, not {text!r}.") from None


def _tables(result: FitResult, metric: str) -> list[tuple[str, pd.DataFrame]]:
    """What is shown on the terminal, with titles."""
    import pandas as pd

    rows, groups = result.run.rows, result.run.groups
    table = rows[["method", "setting"]].copy()
    table["test accuracy"] = _with_ends(rows, "test_accuracy")
    table[GAPS[metric]] = _with_ends(rows, "test_gap")
    if "gap_difference" in rows:
        table["accuracy minus baseline"] = _with_ends(rows, "accuracy_difference", "+.4f")
        table["gap minus baseline"] = _with_ends(rows, "gap_difference", "+.4f")
    test = groups[groups["part"] == "test"]
    by_group = pd.DataFrame(
        {"method": test["method"], "group": test["group"], "rows": test["count"], "positives": test["positives"]}
    )
    for rate in ("true_positive_rate", "false_positive_rate", "selection_rate"):
        by_group[rate] = _with_ends(test, rate, ".3f")
    return [
        ("Rows", result.sites),
        ("Test rows, with 95 % bootstrap intervals", table.loc[:, (table != "").any()]),
        ("Groups, on test rows, with 95 % Wilson intervals", by_group),
    ]


def _with_ends(frame: pd.DataFrame, name: str, form: str = ".4f") -> list[str]:
    def short(value: float) -> str:
        return f"{value:{form}}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:{form}}"

    columns = [frame[name], frame[f"{name}_low"], frame[f"{name}_high"]]
    return [
        "" if value != value else short(value) + ("" if low != low else f" [{short(low)}, {short(high)}]")
        for value, low, high in zip(*columns, strict=True)
    ]
