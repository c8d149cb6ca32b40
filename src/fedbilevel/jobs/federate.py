"""A fit over real sites: options as a job, and what the coordinator kept of it as a run folder with model and page."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.fairness.program import fair_program
from fedbilevel.fairness.recipe import BILEVEL
from fedbilevel.fairness.saving import FittedModel
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.jobs.fit.data import Part, encoded
from fedbilevel.jobs.fit.job import SCHEMA_FILE, save
from fedbilevel.jobs.fit.measure import counted, group_rows, intervals, measures, quality
from fedbilevel.jobs.fit.train import HISTORY_ROWS, FitOptions
from fedbilevel.jobs.outcome import Outcome
from fedbilevel.report.page.files import write_report
from fedbilevel.runs import Run, RunFolder
from fedbilevel.tables.encoder import parse
from fedbilevel.tables.reading import Table
from fedbilevel.tables.schema import Schema


@dataclass(frozen=True)
class FederateOptions:
    """How a run is to go, besides how to fit; see `JobSettings`.  ``run``: its name, made from the options if None."""

    fit: FitOptions
    run: str | None = None
    min_sites: int | None = None
    reply_timeout: float = 300.0
    start_timeout: float = 300.0
    record_every: int | None = None
    validation: float | None = None
    double: bool = False


@dataclass(frozen=True, eq=False)
class FederateResult:
    """``sites``: what every site did; ``notes``: sentences people should read."""

    run: Run
    sites: pd.DataFrame
    notes: list[str]
    page: Path


def job(options: FederateOptions, schema: Schema, sites: Sequence[str]) -> JobSettings:
    """What is submitted."""
    fit = options.fit
    recipe: dict[str, Any] = {
        "method": fit.method, "local_steps": fit.local_steps, "batch_size": fit.batch_size, "step": fit.step,
        "client_weights": fit.client_weights,
    }  # fmt: skip
    formulation: dict[str, Any] = {"kind": fit.formulation, "metric": fit.metric, "ridge": fit.ridge}
    for name in ("steps", "weight_steps"):
        if getattr(fit, name) is not None:
            recipe[name] = getattr(fit, name)
    if fit.strength is not None:
        if isinstance(fit.strength, str):
            raise ValueError("--strength auto needs the rows of all sites in one place; name a number.")
        if fit.method == "fedreg":
            recipe["penalty"] = float(fit.strength)
        else:
            formulation["strength"] = float(fit.strength)
    arguments = {
        "schema": schema.text(),
        "recipe": recipe,
        "formulation": formulation,
        "model": {"kind": fit.model, "hidden": fit.hidden},
        "validation": options.validation,
    }
    settled = fair_program(arguments).recipe
    rounds = max(settled.rounds, settled.weight_rounds if fit.method in BILEVEL else 0)
    identity = json.dumps([arguments, list(sites), fit.seed, options.double], sort_keys=True)
    name = re.sub(r"[^A-Za-z0-9]+", "-", schema.target).strip("-").lower()[:40] or "run"
    return JobSettings(
        run=options.run or f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}",
        program="fair",
        sites=tuple(sites),
        arguments=arguments,
        seed=fit.seed,
        double=options.double,
        min_sites=options.min_sites,
        reply_timeout=options.reply_timeout,
        start_timeout=options.start_timeout,
        record_every=options.record_every or max(1, rounds // HISTORY_ROWS),
    )


def run(
    settings: JobSettings,
    options: FederateOptions,
    schema: Schema,
    out: Path,
    supervised: Callable[[], Path],
    *,
    test: Table | None = None,
    line: str = "",
) -> FederateResult:
    """Write the run folder ``out``; ``supervised`` does the training and returns the coordinator's folder of it."""
    fit = options.fit
    configuration = {
        "target": schema.target,
        "sensitive": list(schema.sensitive),
        "positive": schema.positive,
        "schema_sha256": hashlib.sha256(schema.text().encode()).hexdigest(),
        "sites": list(settings.sites),
        "convention": "between_groups",
        **{name: value for name, value in fit.configuration().items() if name not in ("test_share", "compare_with")},
        **({} if options.validation is None else {"validation": options.validation}),
        **({} if test is None else {"test": str(test.path)}),
        "run": settings.run,  # last: where it follows from the options, the option that differs is to be named first
    }
    with RunFolder.open(out, command="federate", configuration=configuration, line=line) as folder:
        if not folder.complete:
            done = Outcome(supervised(), settings)
            schema.write(folder.path / SCHEMA_FILE)
            _save(folder, done, fit, test)
            for sentence in done.log():
                folder.log(f"coordinator: {sentence}")
            tables = {"exchanges": done.exchanges(), "sites": done.sites()}
            finished = folder.finish(extra=tables)
        else:
            finished = folder.finish()
    sites = pd.read_csv(out / "sites.csv")
    page, *_ = write_report(finished)
    return FederateResult(finished, sites, notes(sites, finished), page)


def _save(folder: RunFolder, done: Outcome, fit: FitOptions, test: Table | None) -> None:
    model = done.model(fit.label)
    schema = model.schema
    rounds, steps = done.recipe.total
    row: dict[str, Any] = {
        "rounds": rounds,
        "steps": steps,
        "bytes_up": done.bytes_up,
        "bytes_down": done.bytes_down,
        "seconds": done.seconds,
    }
    tables = []
    counts = done.counts()
    if counts is not None:
        row |= quality("train", counts, fit.metric)
        tables.append(group_rows("train", counts, schema.groups))
    if test is not None:
        rows = held_out(model, test)
        probability, count = model.probability_of(rows.features), len(schema.groups)
        row |= measures("test", rows, probability, count, fit.metric)
        row |= intervals(rows, probability > 0.5, count, fit.metric, fit.seed)
        tables.append(group_rows("test", counted(rows, probability > 0.5, count), schema.groups))
    save(folder, fit, model, len(done.settings.sites), row, tables, done.history())


def held_out(model: FittedModel, table: Table) -> Part:
    """The coordinator's own rows, encoded as the sites agreed; those without a class or a group are left out."""
    schema = model.schema
    table.check_columns(schema.needed())
    rows = parse(schema, pd.concat(list(table.chunks(schema.needed()))), labelled=True, source=str(table.path))
    assert rows.labels is not None
    assert rows.groups is not None
    kept = rows.take(np.flatnonzero((rows.labels >= 0) & (rows.groups >= 0)))
    if kept.rows == 0:
        raise ValueError(f"{table.path} has no row with a value of {schema.target!r} and a group to test on.")
    return encoded(model.by_schema, kept)


def notes(sites: pd.DataFrame, run: Run) -> list[str]:
    """What people should know, in sentences."""
    found = []
    silent = sites.loc[sites["rows"].isna(), "site"].tolist()
    if silent:
        found.append(
            f"Rates of groups at {', '.join(silent)} are not included: the policy there does not tell its report."
        )
    missed = sites[sites["missed"] > 0]
    found += [
        f"{name} missed {count} exchange(s); exchanges.csv says which."
        for name, count in zip(missed["site"], missed["missed"], strict=True)
    ]
    if "test_accuracy" in run.rows and run.rows["test_accuracy"].isna().all():
        found.append("No rows were held out: --test FILE measures the model on rows of the coordinator's own.")
    return found
