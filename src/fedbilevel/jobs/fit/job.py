"""A fair classifier from tables of one's own: files in, a run folder with model, tables and page out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel import storage
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.saving import FittedModel, named_weights
from fedbilevel.fairness.trainer import Fitted
from fedbilevel.jobs.fit.data import Prepared, Site, Tell, digests, joined, prepare, read_sites
from fedbilevel.jobs.fit.measure import counted, differences, group_rows, intervals, measures
from fedbilevel.jobs.fit.strength import choose_strength
from fedbilevel.jobs.fit.train import FitOptions, train
from fedbilevel.report import page
from fedbilevel.runs import Run, RunFolder, model_file, read
from fedbilevel.tables.reading import Table
from fedbilevel.tables.schema import Schema

SCHEMA_FILE = "schema.toml"
SEARCH_FILE = "strengths.csv"


@dataclass(frozen=True, eq=False)
class FitResult:
    """``run``: the folder's tables; ``sites``: rows of every site by part; ``notes``: what people should know."""

    run: Run
    schema: Schema
    sites: pd.DataFrame
    notes: list[str]
    page: Path


def run(
    tables: Sequence[Table],
    schema: Schema,
    out: Path,
    options: FitOptions | None = None,
    *,
    clients: int | None = None,
    line: str = "",
    tell: Tell | None = None,
) -> FitResult:
    """Read, split, train, measure and write.

    Args:
        tables: one a site; or one with a site column; or one to be dealt to ``clients``.
        schema: what the columns mean.
        out: the run folder; the same call goes on where it was stopped.
        options: how to fit.
        clients: deal the rows of the only table to so many.
        line: the command that reproduces the run, for the folder.
        tell: hears about progress, (what, done, total).
    """
    chosen = options or FitOptions()
    say = tell or (lambda what, done, total: None)
    paths = [str(table.path) for table in tables]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path} is named twice: every site needs a file of its own.")
    configuration = {
        "target": schema.target,
        "sensitive": list(schema.sensitive),
        "positive": schema.positive,
        "files": paths,
        "sha256": digests(tables),
        "schema_sha256": hashlib.sha256(schema.text().encode()).hexdigest(),
        "clients": clients,
        "convention": "between_groups",
        **chosen.configuration(),
    }
    sites = read_sites(tables, schema, clients=clients, seed=chosen.seed, tell=say)
    prepared = prepare(sites, schema, test_share=chosen.test_share, seed=chosen.seed)
    with RunFolder.open(out, command="fit", configuration=configuration, line=line) as folder:
        if not folder.complete:
            _fill(folder, prepared, schema, chosen, say)
        finished = folder.finish(order=[entry.label for entry in _entries(chosen)])
    return FitResult(finished, schema, site_table(prepared), notes(sites, schema), page.write(out))


def _entries(options: FitOptions) -> list[FitOptions]:
    baseline = options.baseline()
    return [options] if baseline is None else [baseline, options]


def _fill(folder: RunFolder, prepared: Prepared, schema: Schema, options: FitOptions, say: Tell) -> None:
    schema.write(folder.path / SCHEMA_FILE)
    for entry in _entries(options):
        if folder.done(entry.label):
            continue
        chosen = _with_strength(folder, entry, prepared, say)
        program = chosen.program(len(schema.feature_names), len(schema.groups), prepared.smooth, schema.groups)
        fitted = train(chosen, program, prepared.train, tell=partial(say, entry.label))
        model = FittedModel.of_schema(prepared.encoder, program.model, fitted.params, fitted.weights, entry.label)
        baseline = entry.baseline()
        other = None if baseline is None else FittedModel.read(model_file(read(folder.path), file_name(baseline.label)))
        row, groups = _measured(prepared, chosen, model, other)
        row |= _costs(program, fitted)
        history = fitted.history.rename(columns={"hessian_vector_calls": "hvp_calls"})
        save(folder, chosen, model, len(prepared.names), {"split_seed": chosen.seed, **row}, groups, history)
        folder.log(f"{entry.label}: trained in {fitted.seconds:.1f} s")


def _with_strength(folder: RunFolder, options: FitOptions, prepared: Prepared, say: Tell) -> FitOptions:
    if options.strength != "auto":
        return options
    names = prepared.encoder.schema.groups
    strength, search = choose_strength(
        options, prepared.train, names, prepared.smooth, partial(say, "choosing the strength")
    )
    target = folder.path / SEARCH_FILE
    try:
        storage.write(target, search.to_csv(index=False))
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror or error}.") from error
    folder.log(f"strength {strength:g} chosen by cross-validation; see {SEARCH_FILE}")
    return replace(options, strength=strength)


def _measured(
    prepared: Prepared, options: FitOptions, model: FittedModel, baseline: FittedModel | None
) -> tuple[dict[str, Any], list[pd.DataFrame]]:
    """The row of the fit, and its groups' rates, on training and test rows."""
    names = model.schema.groups
    row: dict[str, Any] = {}
    tables = []
    for part, rows in (("train", joined(prepared.train)), ("test", joined(prepared.test))):
        probability = model.probability_of(rows.features)
        decided = probability > 0.5
        row |= measures(part, rows, probability, len(names), options.metric)
        tables.append(group_rows(part, counted(rows, decided, len(names)), names))
        if part == "test":
            row |= intervals(rows, decided, len(names), options.metric, options.seed)
            if baseline is not None:
                theirs = baseline.probability_of(rows.features) > 0.5
                row |= differences(rows, decided, theirs, len(names), options.metric, options.seed)
    return row, tables


def save(
    folder: RunFolder,
    options: FitOptions,
    model: FittedModel,
    sites: int,
    row: dict[str, Any],
    groups: list[pd.DataFrame],
    history: pd.DataFrame,
) -> None:
    """One fit as a part of a run folder, on one machine or over real sites; ``row``: what was measured."""
    schema = model.schema
    key: dict[str, Any] = {
        "dataset": f"{schema.target} by {' & '.join(schema.sensitive)}",
        "split": f"{sites} site{'s' if sites > 1 else ''}",
        "method": options.label,
        "seed": options.seed,
    }
    row = {**key, "setting": "" if options.strength is None else f"strength={float(options.strength):g}", **row}
    weights = None
    if model.weights is not None:
        weights = named_weights(model.weights, model.groups, model.classes).reset_index().assign(**key)
        row["weights"] = json.dumps([round(float(value), 6) for value in model.weights])
    folder.save(
        options.label,
        rows=pd.DataFrame([row]),
        groups=pd.concat(groups, ignore_index=True).assign(**key) if groups else None,
        weights=weights,
        history=history.assign(**key),
        models={file_name(options.label): model.write},
    )


def _costs(program: FairProgram, fitted: Fitted) -> dict[str, Any]:
    """Totals over the stages: bytes run through in the history, calls are counted within a stage."""
    last = fitted.history.groupby("stage", sort=False).last()
    rounds, steps = program.recipe.total
    calls = {"gradient_calls": "gradient_calls", "hvp_calls": "hessian_vector_calls", "cross_calls": "cross_calls"}
    return {
        "rounds": rounds,
        "steps": steps,
        **{name: int(last[name].max()) for name in ("bytes_up", "bytes_down")},
        **{name: int(last[column].sum()) for name, column in calls.items()},
        "seconds": fitted.seconds,
    }


def file_name(label: str) -> str:
    """A model's file, without suffix: "FedBiOAcc, cells" is fedbioacc-cells."""
    return label.lower().replace(", ", "-")


def fitted_model(folder: Path, name: str | None = None) -> FittedModel:
    """The model of a run folder made by `run`: the fitted one, or the one named (as in the folder's tables)."""
    kept = read(folder)
    if kept.command not in ("fit", "federate"):
        raise ValueError(f"{folder} is a run of {kept.command!r}, which has no model for tables; name a folder of fit.")
    if kept.status != "complete":
        raise ValueError(f"{folder} is not finished: run `fedbilevel fit` again with the same options, and it goes on.")
    labels = kept.rows["method"].tolist()
    wanted = labels[-1] if name is None else name
    if wanted not in labels:
        raise ValueError(f"{folder} has no model {wanted!r}; it has {', '.join(map(repr, labels))}.")
    return FittedModel.read(model_file(kept, file_name(wanted)))


def site_table(prepared: Prepared) -> pd.DataFrame:
    """Rows of every site: how many to train on, to test with, and the share of positives."""
    rows = [
        {
            "site": name,
            "training_rows": len(train.labels),
            "test_rows": len(test.labels),
            "positive_share": float(np.concatenate([train.labels, test.labels]).mean()),
        }
        for name, train, test in zip(prepared.names, prepared.train, prepared.test, strict=True)
    ]
    return pd.DataFrame(rows)


def notes(sites: Sequence[Site], schema: Schema) -> list[str]:
    """What was done to rows, in sentences."""
    sentences = []
    without_label = sum(site.left_out[0] for site in sites)
    without_group = sum(site.left_out[1] for site in sites)
    if without_label:
        sentences.append(f"{without_label:,} row(s) without a value of {schema.target!r} were left out.")
    if without_group:
        sentences.append(f"{without_group:,} row(s) without a value of {', '.join(schema.sensitive)} were left out.")
    if len(sites) == 1:
        sentences.append("All rows are at one site; --site, --clients or one file a site makes several.")
    return sentences
