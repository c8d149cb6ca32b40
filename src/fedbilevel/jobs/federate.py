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

from fedbilevel.fairness import findings
from fedbilevel.fairness.disclosure import Visible
from fedbilevel.fairness.methods import BILEVEL, PATH, Recipe
from fedbilevel.fairness.moments import Scale
from fedbilevel.fairness.program import check_secure, fair_program
from fedbilevel.fairness.saving import FittedModel
from fedbilevel.federation.protocol.program import answer_trees, make_program
from fedbilevel.federation.protocol.record import Progress, read_answers
from fedbilevel.federation.protocol.settings import LEAST, JobSettings
from fedbilevel.jobs.fit import HISTORY_ROWS, SCHEMA_FILE, FitOptions, save, warnings
from fedbilevel.jobs.measuring import REPORTED, Measured, cells_of, found_at_sites, measured, of_rows, received
from fedbilevel.jobs.sites import Part, encoded
from fedbilevel.report import card
from fedbilevel.report.page import write_report
from fedbilevel.runs import Run, RunFolder
from fedbilevel.tables.encoder import parse
from fedbilevel.tables.reading import Table
from fedbilevel.tables.schema import Schema


@dataclass(frozen=True, eq=False)
class FederateResult:
    """``sites``: what every site did; ``notes``: sentences people should read."""

    run: Run
    sites: pd.DataFrame
    notes: list[str]
    warnings: list[str]
    page: Path


def job(
    fit: FitOptions,
    schema: Schema,
    sites: Sequence[str],
    *,
    run: str | None = None,
    validation: float | None = None,
    min_sites: int | None = None,
    reply_timeout: float = 300.0,
    secure: bool = True,
) -> JobSettings:
    """What is submitted; see `JobSettings`.  ``run``: its name, made from the options if None."""
    secured = secure and len(sites) >= LEAST
    if secured:
        check_secure(fit.method)
    recipe: dict[str, Any] = {
        "method": fit.method, "local_steps": fit.local_steps, "batch_size": fit.batch_size, "step": fit.step,
        "client_weights": fit.client_weights,
    }  # fmt: skip
    recipe |= {name: getattr(fit, name) for name in ("steps", "weight_steps") if getattr(fit, name) is not None}
    fit = fit.meant()
    recipe |= {name: getattr(fit, name) for name in ("gap", "accuracy_loss") if getattr(fit, name) is not None}
    formulation: dict[str, Any] = {"kind": fit.formulation, "metric": fit.metric, "ridge": fit.ridge}
    if isinstance(fit.strength, str):
        raise ValueError("--strength auto needs the rows of all sites in one place; name a number.")
    if fit.strength is not None and fit.method == "fedreg":
        recipe["penalty"] = float(fit.strength)
    elif fit.strength is not None:
        formulation["strength"] = float(fit.strength)
        recipe["insists"] = True
    model = {"kind": fit.model, "hidden": fit.hidden, **({"loss": fit.loss} if schema.regression else {})}
    arguments = {
        "schema": schema.text(), "recipe": recipe, "formulation": formulation, "model": model, "validation": validation,
        "class_weight": fit.class_weight, "threshold": fit.threshold, "minimum_cell": fit.minimum_cell,
    }  # fmt: skip
    settled = fair_program(arguments).recipe
    rounds = max(settled.rounds, settled.weight_rounds if fit.method in BILEVEL else 0)
    # FedPath's sites tell their losses as they train; to measure on the way its whole state would have to travel.
    record_every = rounds if fit.method == PATH else max(1, rounds // HISTORY_ROWS)
    name = run or run_name(schema, [arguments, list(sites), fit.seed, False, *["secure"] * secured])
    return JobSettings(
        name, "fair", tuple(sites), arguments, fit.seed, min_sites=min_sites, reply_timeout=reply_timeout,
        record_every=record_every, secure=secured,
    )  # fmt: skip


def run_name(schema: Schema, identity: list[Any], before: str = "") -> str:
    """A name that is the same whenever the same is asked for."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", schema.target).strip("-").lower()[:40] or "run"
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    return f"{before}{name}-{digest}"


class Outcome:
    """A complete run as the coordinator kept it."""

    def __init__(self, folder: Path, settings: JobSettings) -> None:
        self.folder, self.settings = folder, settings
        progress = Progress.read(folder / "state.npz")
        if progress is None:
            raise ValueError(f"{folder / 'state.npz'} cannot be read; restore it from a backup.")
        self.progress, self.agreed = progress, progress.agreed
        self.program: Any = make_program(settings.program, settings.arguments, ())
        self.answers = answer_trees(self.program, self.agreed, read_answers(folder))
        self.reports: dict[str, dict[str, Any]] = json.loads((folder / "report.json").read_text())

    @property
    def recipe(self) -> Recipe:
        """Of the fair program."""
        return self.program.settled(self.agreed)  # type: ignore[no-any-return]

    @property
    def minimum(self) -> int:
        """The smallest count that is shown."""
        return int(self.settings.arguments["minimum_cell"])

    @property
    def weights(self) -> np.ndarray | None:
        """Of groups or cells, where the method learns them."""
        learns = self.program.two_stages or self.program.path
        return self.program.weights(self.agreed, self.answers, None) if learns else None

    def model(self, label: str) -> FittedModel:
        encoder = self.program.encoder(self.agreed)
        threshold = self.program.decides(self.agreed)
        params = self.program.params(self.answers, self.agreed)
        return FittedModel.of_schema(encoder, self.program.model, params, self.weights, label, threshold)

    def measured(self, schema: Schema, metric: str, about: str) -> Measured | None:
        """What the sites' counts, or sums, say of the model on their training rows; None where no site tells them."""
        told = [report for report in self.reports.values() if REPORTED[schema.regression] in report]
        if not told:
            return None
        scale = Scale(*self.program.encoder(self.agreed).target or ())
        return measured("train", received(told, schema), schema, metric, self.minimum, about, scale=scale)

    def table(self, name: str) -> pd.DataFrame:
        """``exchanges`` or ``history``, with the stages by name."""
        made = [self.program.stage(k, self.agreed, self.answers[:k]) for k in range(len(self.answers))]
        stages = [stage.name for stage in made]
        table = pd.read_csv(self.folder / f"{name}.csv")
        return table.assign(stage=[stages[number] for number in table["stage"]])

    def sites(self) -> pd.DataFrame:
        """One row a site: what it answered, how much was sent, how long it took."""
        exchanges = self.table("exchanges")
        held = len(exchanges[["stage", "round", "ordinal"]].drop_duplicates())
        rows = []
        for site in self.settings.sites:
            here = exchanges[exchanges["site"] == site]
            answered = here["outcome"].str.startswith("answered")
            counts = self._rows(site)
            rows.append(
                {
                    "site": site,
                    "rows": counts,
                    "answered": int(answered.sum()),
                    "missed": held - int(answered.sum()),
                    "bytes_up": int(here["bytes_up"].sum()),
                    "bytes_down": int(here["bytes_down"].sum()),
                    "median_seconds": float(here.loc[answered, "seconds"].median()),
                    "median_own_seconds": float(here.loc[answered, "site_seconds"].median()),
                }
            )
        return pd.DataFrame(rows)

    def _rows(self, site: str) -> int | None:
        """How many rows a site tells of."""
        report, schema = self.reports.get(site, {}), self.program.schema
        assert schema is not None
        return received([report], schema).rows if REPORTED[schema.regression] in report else None

    def log(self) -> list[str]:
        file = self.folder / "log.txt"
        return file.read_text().splitlines() if file.exists() else []


def run(
    settings: JobSettings,
    fit: FitOptions,
    schema: Schema,
    out: Path,
    supervised: Callable[[], Path],
    *,
    test: Table | None = None,
    line: str = "",
) -> FederateResult:
    """Write the run folder ``out``; ``supervised`` does the training and returns the coordinator's folder of it."""
    validation = settings.arguments["validation"]
    configuration = {
        "target": schema.target,
        "sensitive": list(schema.sensitive),
        "positive": schema.positive,
        "schema_sha256": hashlib.sha256(schema.text().encode()).hexdigest(),
        "sites": list(settings.sites),
        "convention": "between_groups",
        **{name: value for name, value in fit.configuration().items() if name not in ("test_share", "compare_with")},
        **({} if validation is None else {"validation": validation}),
        **({"secure_aggregation": True} if settings.secured else {}),
        **({} if test is None else {"test": str(test.path)}),
        "run": settings.run,  # last: where it follows from the options, the option that differs is to be named first
    }
    with RunFolder.open(out, command="federate", configuration=configuration, line=line) as folder:
        tables = {}
        if not folder.complete:
            done = Outcome(supervised(), settings)
            schema.write(folder.path / SCHEMA_FILE)
            _save(folder, done, fit, test)
            for sentence in done.log():
                folder.log(f"coordinator: {sentence}")
            tables = {"exchanges": done.table("exchanges"), "sites": done.sites()}
        finished = folder.finish(extra=tables)
    sites = pd.read_csv(out / "sites.csv")
    page, *_ = write_report(finished)
    card.write(out)
    return FederateResult(finished, sites, notes(sites, finished), warnings(finished), page)


def _save(folder: RunFolder, done: Outcome, fit: FitOptions, test: Table | None) -> None:
    model, progress = done.model(fit.label), done.progress
    schema = model.schema
    rounds, steps = done.recipe.total
    row: dict[str, Any] = {
        "rounds": rounds, "steps": steps, "bytes_up": progress.bytes_up, "bytes_down": progress.bytes_down,
        "seconds": progress.seconds,
    }  # fmt: skip
    found = found_at_sites(done.reports, schema, fit.method != "fedavg")
    frontier = done.program.frontier(done.answers, done.agreed) if done.program.path else None
    found += [] if frontier is None else frontier.found
    at_sites = done.measured(schema, fit.metric, fit.label)
    parts = [] if at_sites is None else [at_sites]
    if test is not None:
        rows = held_out(model, test)
        visible = Visible.of(cells_of(rows, len(schema.groups), schema), fit.minimum_cell)
        parts.append(of_rows("test", rows, model, visible, fit.metric))
        found += findings.of_hidden(visible, schema.groups, where=" among the test rows", labels=schema.labels)
    table = None if frontier is None else frontier.table
    history = done.table("history")
    save(folder, fit.meant(), model, len(done.settings.sites), row, parts, found, history, frontier=table)


def held_out(model: FittedModel, table: Table) -> Part:
    """The coordinator's own rows, encoded as the sites agreed; those without a class or a group are left out."""
    schema = model.schema
    table.check_columns(schema.needed())
    rows = parse(schema, pd.concat(list(table.chunks(schema.needed()))), labelled=True, source=str(table.path))
    kept = rows.complete()
    if kept.rows == 0:
        raise ValueError(f"{table.path} has no row with a value of {schema.target!r} and a group to test on.")
    return encoded(model.by_schema, kept)


def notes(sites: pd.DataFrame, run: Run) -> list[str]:
    """What people should know, in sentences."""
    sentences = []
    silent = sites.loc[sites["rows"].isna(), "site"].tolist()
    if run.configuration.get("secure_aggregation"):
        sentences.append("Rows and rates of the sites are known in sum, and of no single one (secure sums).")
    elif silent:
        sentences.append(
            f"Rates of groups at {', '.join(silent)} are not included: the policy there does not tell its report."
        )
    missed = sites[sites["missed"] > 0]
    for name, count in zip(missed["site"], missed["missed"], strict=True):
        sentences.append(f"{name} missed {count} exchange(s); exchanges.csv says which.")
    if "test_accuracy" in run.rows and run.rows["test_accuracy"].isna().all():
        sentences.append("No rows were held out: --test FILE measures the model on rows of the coordinator's own.")
    return sentences
