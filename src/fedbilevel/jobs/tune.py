"""Tuning from your own tables: files in, a run folder with the tuned model, what was learned, and a page out.

The folder holds a model for `fedbilevel predict`, as a fit's does.  ``choices.csv`` has what was learned, once for each way of
dealing the rows into folds: the first gave the model, the others say how much of it is chance.  Rows that are not believed
are listed in ``doubtful/SITE.csv``, for that site alone; every other table has their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel import storage
from fedbilevel.fairness.disclosure import MINIMUM, Visible
from fedbilevel.fairness.findings import Finding
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.saving import FittedModel
from fedbilevel.federation.protocol.settings import LEAST, JobSettings
from fedbilevel.jobs import measuring
from fedbilevel.jobs.federate import FederateResult, Outcome, run_name
from fedbilevel.jobs.federate import notes as site_notes
from fedbilevel.jobs.fit import SCHEMA_FILE, FitResult, facts, notes, warnings
from fedbilevel.jobs.measuring import Measured, found_at_sites
from fedbilevel.jobs.predict import MAPPING_FILE, file_name
from fedbilevel.jobs.sites import Prepared, Site, Tell, digests, joined, prepare, read_sites
from fedbilevel.report import page
from fedbilevel.runs import Run, RunFolder
from fedbilevel.tables import documents
from fedbilevel.tables.encoder import Encoder
from fedbilevel.tables.mapping import Mapping
from fedbilevel.tables.reading import Table
from fedbilevel.tables.schema import Schema
from fedbilevel.tuning.problem import Choices, Tuning, check_what, not_summed
from fedbilevel.tuning.program import FOLDS, ROUNDS, TuneProgram, column_places, reading_of, tune_program
from fedbilevel.tuning.search import CANDIDATES, Search, Searched, held_out_loss
from fedbilevel.tuning.simulation import Tuner

TUNED, SEARCHED = "Tuned", f"Search of {len(CANDIDATES)}"
DOUBTFUL_FOLDER = "doubtful"
__all__ = ["TuneOptions", "check_what", "learned", "model_of", "run"]


@dataclass(frozen=True)
class TuneOptions:
    """``what``: see `fedbilevel.tuning.problem`; ``splits``: ways of dealing rows into ``folds``; ``compare``: search too."""

    what: tuple[str, ...] = ("penalties",)
    folds: int = FOLDS
    rounds: int = ROUNDS
    splits: int = 5
    minimum_cell: int = MINIMUM
    test_share: float = 0.3
    seed: int = 0
    compare: bool = True
    secure: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.test_share < 1:
            raise ValueError(f"--test-share must lie between 0 and 1, not {self.test_share}.")
        why = not_summed(self.what)
        if self.secure and why is not None:
            raise ValueError(f"{why}, or leave --secure out.")

    def program(self, schema: Schema, sites: int, rows: int, split: int = 0) -> TuneProgram:
        model = model_of(schema)
        reading = reading_of(model, self.what, minimum=self.minimum_cell)
        places = column_places(schema.features)
        seed = 1000 * self.seed + 100 * split
        return TuneProgram(reading, self.what, places, sites, rows, self.folds, self.rounds, seed)

    def configuration(self) -> dict[str, Any]:
        told = {**asdict(self), "what": list(self.what)}
        return {name: value for name, value in told.items() if name != "secure" or value}


def model_of(schema: Schema) -> Model:
    """The linear model of what is predicted."""
    width = len(schema.feature_names)
    if schema.regression:
        return Model("linear", width, 1, loss="squared")
    return Model("logistic", width, len(schema.labels))


def run(
    tables: Sequence[Table],
    schema: Schema,
    out: Path,
    options: TuneOptions | None = None,
    *,
    clients: int | None = None,
    mapping: Mapping | None = None,
    line: str = "",
    tell: Tell | None = None,
) -> FitResult:
    """Read, split, tune, measure and write; see `fedbilevel.jobs.fit.run` for the arguments."""
    chosen = options or TuneOptions()
    say = tell or (lambda what, done, total: None)
    configuration = {
        "target": schema.target,
        "positive": schema.positive,
        "files": [str(table.path) for table in tables],
        "sha256": digests(tables),
        "schema_sha256": hashlib.sha256(schema.text().encode()).hexdigest(),
        "clients": clients,
        "metric": metric_of(schema),
        **({"task": "regression"} if schema.regression else {}),
        **chosen.configuration(),
    }
    sites = read_sites(tables, schema, clients=clients, seed=chosen.seed, tell=say)
    check_classes(sites, schema)
    prepared = prepare(sites, schema, test_share=chosen.test_share, seed=chosen.seed)
    visible = measuring.visible_groups(prepared, chosen.minimum_cell)
    table, found = measuring.site_table(prepared, visible)
    with RunFolder.open(out, command="tune", configuration=configuration, line=line) as folder:
        if not folder.complete:
            schema.write(folder.path / SCHEMA_FILE)
            if mapping is not None:
                documents.write(folder.path / MAPPING_FILE, mapping.text())
            _fill(folder, prepared, visible, found, chosen, say)
        done = notes(sites, schema)
        told = {
            "sites": table,
            "mapping": pd.DataFrame() if mapping is None else mapping.frame(),
            "notes": pd.DataFrame({"note": done}),
            "facts": facts(schema, chosen.minimum_cell),
        }
        keys = [SEARCHED] * chosen.compare + [_key(split) for split in range(chosen.splits)]
        finished = folder.finish(keys, {name: frame for name, frame in told.items() if len(frame)})
    return FitResult(finished, table, done, warnings(finished), page.write(out))


def learned(run: Run) -> pd.DataFrame:
    """What was learned, with the smallest and the largest value over all ways of dealing rows into folds."""
    table = run.others["choices"]
    first = table[table["split"] == 0].set_index(["kind", "name"])["value"]
    over = table.groupby(["kind", "name"], sort=False)["value"]
    return pd.DataFrame({"value": first, "smallest": over.min(), "largest": over.max()}).loc[first.index].reset_index()


def check_classes(sites: Sequence[Site], schema: Schema) -> None:
    """Every site validates, so it needs rows of two classes at least."""
    for site in sites:
        present = np.unique(site.rows.labels)
        if not schema.regression and len(present) < 2:
            raise ValueError(
                f"The site {site.name!r} has only rows of the class {schema.labels[int(present[0])]!r}: tuning validates at "
                "every site, so leave it out, or join it with another site."
            )


def _key(split: int) -> str:
    return TUNED if split == 0 else f"split {split + 1}"


def _fill(
    folder: RunFolder,
    prepared: Prepared,
    visible: Visible,
    found: list[Finding],
    options: TuneOptions,
    say: Tell,
) -> None:
    schema, tuner = prepared.encoder.schema, Tuner(options.secure)
    rows = [(part.features, part.labels.astype(np.float64)) for part in prepared.train]
    total = sum(len(labels) for _, labels in rows)
    if options.compare and not folder.done(SEARCHED):
        say(SEARCHED, 0, 1)
        searched = Search(model_of(schema)).run(rows, options.seed)
        say(SEARCHED, 1, 1)
        row = {"bytes": searched.bytes_all, "trainings": len(CANDIDATES) + 1, "ridge": searched.ridge}
        _save(folder, SEARCHED, prepared, visible, options, searched.params, row, found, _candidates(searched))
    for split in range(options.splits):
        if folder.done(_key(split)):
            continue
        program = options.program(schema, len(rows), total, split)
        tuned = tuner.run(program, rows, options.seed, partial(say, _key(split)), record=split == 0)
        learned = {
            "choices": choices_table(tuned.tuning, tuned.choices, prepared.encoder, prepared.names).assign(split=split)
        }
        if split:
            folder.save(_key(split), others=learned)
            continue
        learned |= _doubtful(folder.path, program, tuned.choices, prepared, options)
        row = {
            "bytes": tuned.bytes_up + tuned.bytes_down,
            "bytes_up": tuned.bytes_up,
            "bytes_down": tuned.bytes_down,
            "trainings": 1,
        }
        history = tuned.history.rename(columns={"hessian_vector_calls": "hvp_calls"})
        _save(folder, TUNED, prepared, visible, options, tuned.params, row, found, learned, history)


def _save(
    folder: RunFolder, label: str, prepared: Prepared, visible: Visible, options: TuneOptions, params: np.ndarray,
    row: dict[str, Any], found: Sequence[Finding], others: dict[str, pd.DataFrame], history: pd.DataFrame | None = None,
) -> None:  # fmt: skip
    schema, parts = prepared.encoder.schema, {"train": joined(prepared.train), "test": joined(prepared.test)}
    model = FittedModel.of_schema(prepared.encoder, model_of(schema), params, label=label)
    measured = [measuring.of_rows(part, rows, model, visible, metric_of(schema)) for part, rows in parts.items()]
    losses = {
        f"{part}_loss": held_out_loss(model.model, params, rows.features, rows.labels) for part, rows in parts.items()
    }
    _write(folder, model, len(prepared.names), options.seed, {**losses, **row}, measured, found, others, history)


def _write(
    folder: RunFolder, model: FittedModel, sites: int, seed: int, row: dict[str, Any], measured: Sequence[Measured],
    found: Sequence[Finding], others: dict[str, pd.DataFrame], history: pd.DataFrame | None,
) -> None:  # fmt: skip
    """One model as a part of a run folder; nobody is compared, so there are no gaps."""
    label = model.label
    key: dict[str, Any] = {"dataset": model.schema.target, "split": f"{sites} sites", "method": label, "seed": seed}
    against = measuring.findings_table([*(measured[-1].found if measured else ()), *found])
    numbers = {name: value for of in measured for name, value in of.row.items() if "_gap" not in name}
    tables = {"findings": against, **others}
    folder.save(
        label,
        rows=pd.DataFrame([{**key, **numbers, **row, "usable": not against["blocks"].any()}]),
        groups=pd.concat([of.groups for of in measured], ignore_index=True).assign(**key) if measured else None,
        history=None if history is None else history.assign(**key),
        others={name: table.assign(method=label) for name, table in tables.items() if len(table)},
        models={file_name(label): model.write},
    )


def metric_of(schema: Schema) -> str:
    """What measures by group would be of; there is one group, everybody."""
    return "mean_error" if schema.regression else "equal_opportunity"


def _candidates(searched: Searched) -> dict[str, pd.DataFrame]:
    return {"candidates": pd.DataFrame({"ridge": CANDIDATES, "held_out_loss": searched.losses})}


def choices_table(tuning: Tuning, choices: Choices, encoder: Encoder, sites: Sequence[str]) -> pd.DataFrame:
    """What was learned, in words: ``kind``, ``name`` and ``value``; penalties are those of the model on all rows."""
    schema, shrunk = encoder.schema, (tuning.folds - 1) / tuning.folds
    rows = [("penalty", "common", shrunk * float(np.exp(choices.common)))]
    if choices.columns is not None:
        columns = [column.name for column in schema.features]
        names = columns if "penalties" in tuning.what else encoder.feature_names[:-1]
        rows += [
            ("penalty", name, shrunk * float(np.exp(choices.common + own)))
            for name, own in zip(names, choices.columns, strict=True)
        ]
    if choices.classes is not None:
        weights = np.exp(choices.classes - np.mean(choices.classes))
        rows += [("class weight", str(name), float(value)) for name, value in zip(schema.labels, weights, strict=True)]
        rows.append(("label smoothing", "share", float(1 / (1 + np.exp(-choices.smoothing)))))
    if choices.sites is not None:
        weights = np.asarray(tuning.site_weights(choices.sites))
        rows += [("site weight", name, float(value)) for name, value in zip(sites, weights, strict=True)]
    if choices.noise is not None:
        rows.append(("label noise", "share", float(1 / (1 + np.exp(-choices.noise)))))
    return pd.DataFrame(rows, columns=["kind", "name", "value"])


def _doubtful(
    folder: Path, program: TuneProgram, choices: Choices, prepared: Prepared, options: TuneOptions
) -> dict[str, pd.DataFrame]:
    """The lists of doubtful rows, each for its own site, and a table of how many there are."""
    if choices.trust is None:
        return {}
    counts = {}
    for name, part in zip(prepared.names, prepared.train, strict=True):
        found = program.doubtful(choices, part.features, part.labels)
        (folder / DOUBTFUL_FOLDER).mkdir(exist_ok=True)
        storage.write(folder / DOUBTFUL_FOLDER / f"{file_name(name)}.csv", found.to_csv(index=False))
        counts[name] = -1 if 0 < len(found) < options.minimum_cell else len(found)
    return {"doubtful": doubtful_table(counts, options.minimum_cell)}


def doubtful_table(counts: dict[str, int], minimum: int) -> pd.DataFrame:
    """By site; -1 stands for fewer than the minimum."""
    told = [(site, f"fewer than {minimum}" if count < 0 else str(count)) for site, count in counts.items()]
    return pd.DataFrame(told, columns=["site", "doubtful_rows"])


# Over real sites.


def job(
    schema: Schema,
    options: TuneOptions,
    sites: Sequence[str],
    *,
    run: str | None = None,
    min_sites: int | None = None,
    reply_timeout: float = 300.0,
    secure: bool = True,
) -> JobSettings:
    """What is submitted; see `JobSettings`.  ``run``: its name, made from the options if None."""
    secured, why = secure and len(sites) >= LEAST, not_summed(options.what)
    if secured and why is not None:
        raise ValueError(f"{why}, or use --secure-aggregation off where the policies of all sites allow it.")
    arguments = {
        "schema": schema.text(), "what": list(options.what), "folds": options.folds, "rounds": options.rounds,
        "sites": len(sites), "fold_seed": 1000 * options.seed, "minimum_cell": options.minimum_cell,
    }  # fmt: skip
    tune_program(arguments)
    return JobSettings(
        run or run_name(schema, [arguments, list(sites), options.seed, "tune", *["secure"] * secured], "tune-"),
        "tune", tuple(sites), arguments, options.seed, min_sites=min_sites, reply_timeout=reply_timeout, record_every=1,
        secure=secured,
    )  # fmt: skip


def federated(
    settings: JobSettings,
    schema: Schema,
    options: TuneOptions,
    out: Path,
    supervised: Callable[[], Path],
    line: str = "",
) -> FederateResult:
    """The run folder of a tuning over real sites; ``supervised`` does it and returns the coordinator's folder of it."""
    configuration = {
        "target": schema.target,
        "positive": schema.positive,
        "schema_sha256": hashlib.sha256(schema.text().encode()).hexdigest(),
        "sites": list(settings.sites),
        "metric": metric_of(schema),
        **({"task": "regression"} if schema.regression else {}),
        **{
            name: value
            for name, value in options.configuration().items()
            if name not in ("test_share", "compare", "splits")
        },
        **({"secure_aggregation": True} if settings.secured else {}),
        "run": settings.run,
    }
    with RunFolder.open(out, command="tune", configuration=configuration, line=line) as folder:
        tables = {}
        if not folder.complete:
            done = Outcome(supervised(), settings)
            schema.write(folder.path / SCHEMA_FILE)
            _save_federated(folder, done, schema, options)
            tables = {"exchanges": done.table("exchanges"), "sites": done.sites()}
        finished = folder.finish(extra=tables)
    sites = pd.read_csv(out / "sites.csv")
    return FederateResult(finished, sites, site_notes(sites, finished), warnings(finished), page.write(out))


def _save_federated(folder: RunFolder, done: Outcome, schema: Schema, options: TuneOptions) -> None:
    program, progress = done.program, done.progress
    tuning, (choices, params) = program.tuning(done.agreed), done.answers[0]
    at_sites = done.measured(schema, metric_of(schema), TUNED)
    row = {"bytes": progress.bytes_up + progress.bytes_down, "bytes_up": progress.bytes_up, "bytes_down": progress.bytes_down,
           "seconds": progress.seconds, "trainings": 1}  # fmt: skip
    encoder = program.encoder(done.agreed)
    others = {"choices": choices_table(tuning, choices, encoder, done.settings.sites).assign(split=0)}
    told = {site: int(report["doubtful"][0]) for site, report in done.reports.items() if "doubtful" in report}
    if told:
        others["doubtful"] = doubtful_table(told, options.minimum_cell)
    found = found_at_sites(done.reports, schema)
    model = FittedModel.of_schema(encoder, program.model, params, label=TUNED)
    measured = [] if at_sites is None else [at_sites]
    _write(folder, model, len(done.settings.sites), options.seed, row, measured, found, others, done.table("history"))
