"""A fair classifier from tables of one's own: files in, a run folder with model, tables and page out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbilevel.fairness.inputs import named_weights
from fedbilevel.fairness.table_model import TableModel
from fedbilevel.jobs.fit.data import Prepared, Site, Tell, digests, joined, prepare, read_sites
from fedbilevel.jobs.fit.measure import counted, differences, group_rows, intervals, measures
from fedbilevel.jobs.fit.strength import choose_strength
from fedbilevel.jobs.fit.train import FitOptions, Trained, train
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
        finished = folder.finish(order=[one.label for one in _entries(chosen)])
    return FitResult(finished, schema, site_table(prepared), notes(sites, schema), page.write(out))


def _entries(options: FitOptions) -> list[FitOptions]:
    baseline = options.baseline()
    return [options] if baseline is None else [baseline, options]


def _fill(folder: RunFolder, prepared: Prepared, schema: Schema, options: FitOptions, say: Tell) -> None:
    schema.write(folder.path / SCHEMA_FILE)
    names = schema.groups
    for entry in _entries(options):
        if folder.done(entry.label):
            continue
        setting = ""
        resolved = entry
        if entry.strength == "auto":
            strength, search = choose_strength(
                entry, prepared.train, names, prepared.smooth, lambda a, b: say("choosing the strength", a, b)
            )
            _write_csv(search, folder.path / SEARCH_FILE)
            folder.log(f"strength {strength:g} chosen by cross-validation; see {SEARCH_FILE}")
            resolved, setting = replace(entry, strength=strength), f"strength={strength:g}"
        elif entry.strength is not None:
            setting = f"strength={float(entry.strength):g}"
        label = entry.label
        trained = train(resolved, prepared.train, len(names), prepared.smooth, tell=_teller(say, label), names=names)
        model = TableModel(schema, prepared.encoder.statistics, trained.model, trained.params, label)
        baseline = entry.baseline()
        other = None if baseline is None else TableModel.read(model_file(read(folder.path), file_name(baseline.label)))
        _save(folder, prepared, entry, trained, model, other, setting)
        folder.log(f"{label}: trained in {trained.seconds:.1f} s")


def _teller(say: Tell, label: str) -> Any:
    return lambda done, total: say(label, done, total)


def _save(
    folder: RunFolder,
    prepared: Prepared,
    options: FitOptions,
    trained: Trained,
    model: TableModel,
    baseline: TableModel | None,
    setting: str,
) -> None:
    schema = model.schema
    key: dict[str, Any] = {
        "dataset": f"{schema.target} by {' & '.join(schema.sensitive)}",
        "split": f"{len(prepared.names)} site{'s' if len(prepared.names) > 1 else ''}",
        "method": options.label,
        "seed": options.seed,
    }
    row: dict[str, Any] = {**key, "split_seed": options.seed, "setting": setting, "seconds": trained.seconds}
    tables = []
    for part, rows in (("train", joined(prepared.train)), ("test", joined(prepared.test))):
        probability = model.probability_of(rows.features)
        decided, count = probability > 0.5, len(schema.groups)
        row |= measures(part, rows, probability, count, options.metric)
        tables.append(group_rows(part, counted(rows, decided, count), schema.groups))
        if part == "test":
            row |= intervals(rows, decided, count, options.metric, options.seed)
            if baseline is not None:
                theirs = baseline.probability_of(rows.features) > 0.5
                row |= differences(rows, decided, theirs, count, options.metric, options.seed)
    row |= _costs(trained)
    weights = None
    if trained.weights is not None:
        found = named_weights(trained.weights, list(schema.groups), np.array([schema.negative, schema.positive]))
        weights = found.reset_index().assign(**key)
        row["weights"] = json.dumps([round(float(value), 6) for value in trained.weights])
    history = trained.history.rename(columns={"hessian_vector_calls": "hvp_calls"})
    folder.save(
        options.label,
        rows=pd.DataFrame([row]),
        groups=pd.concat(tables, ignore_index=True).assign(**key),
        weights=weights,
        history=history.assign(**key),
        models={file_name(options.label): model.arrays()},
    )


def _costs(trained: Trained) -> dict[str, int]:
    """Totals over the stages: bytes run through in the history, everything else is counted within a stage."""
    history = trained.history
    last = history.groupby("stage", sort=False).last()
    recipe = trained.recipe
    steps = recipe.rounds * (1 if recipe.method in ("fedminmax", "fcfl") else recipe.local_steps)
    if "weights" in last.index:
        steps += recipe.weight_rounds * recipe.local_steps
    return {
        "rounds": int(last["round"].sum()),
        "steps": steps,
        "bytes_up": int(last["bytes_up"].max()),
        "bytes_down": int(last["bytes_down"].max()),
        "gradient_calls": int(last["gradient_calls"].sum()),
        "hvp_calls": int(last["hessian_vector_calls"].sum()),
        "cross_calls": int(last["cross_calls"].sum()),
    }


def file_name(label: str) -> str:
    """A model's file, without suffix: "FedBiOAcc, cells" is fedbioacc-cells."""
    return label.lower().replace(", ", "-")


def fitted_model(folder: Path, name: str | None = None) -> TableModel:
    """The model of a run folder made by `run`: the fitted one, or the one named (as in the folder's tables)."""
    found = read(folder)
    if found.command not in ("fit", "federate"):
        raise ValueError(
            f"{folder} is a run of {found.command!r}, which has no model for tables; name a folder of fit."
        )
    if found.status != "complete":
        raise ValueError(f"{folder} is not finished: run `fedbilevel fit` again with the same options, and it goes on.")
    labels = found.rows["method"].tolist()
    wanted = labels[-1] if name is None else name
    if wanted not in labels:
        raise ValueError(f"{folder} has no model {wanted!r}; it has {', '.join(map(repr, labels))}.")
    return TableModel.read(model_file(found, file_name(wanted)))


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
    found = []
    without_label = sum(site.left_out[0] for site in sites)
    without_group = sum(site.left_out[1] for site in sites)
    if without_label:
        found.append(f"{without_label:,} row(s) without a value of {schema.target!r} were left out.")
    if without_group:
        found.append(f"{without_group:,} row(s) without a value of {', '.join(schema.sensitive)} were left out.")
    if len(sites) == 1:
        found.append("All rows are at one site; --site, --clients or one file a site makes several.")
    return found


def _write_csv(frame: pd.DataFrame, target: Path) -> None:
    draft = target.with_name(f".{target.name}.tmp")
    try:
        frame.to_csv(draft, index=False)
        draft.replace(target)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror or error}.") from error
    finally:
        draft.unlink(missing_ok=True)
