"""A model card (Markdown) from a run folder: what was trained on what, how well it does for whom, and what to mind.

The sections are those of skops' cards, which follow Hugging Face's: model description, intended uses and limitations, training
procedure, evaluation results, how to get started.  What only the owner of a model knows is left for the owner to fill in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedbilevel import storage
from fedbilevel.report.reading import GAPS, metrics
from fedbilevel.report.scales import Span
from fedbilevel.runs import Run, read
from fedbilevel.tables.schema import Schema

CARD_FILE = "model-card.md"
SCHEMA_FILE = "schema.toml"
KINDS = {"logistic": "A logistic regression", "linear": "A linear regression", "mlp": "A network with one hidden layer"}
TO_FILL_IN = "[More Information Needed]"
SETTINGS = (
    "method", "formulation", "metric", "strength", "model", "hidden", "steps", "weight_steps", "local_steps", "batch_size",
    "step", "ridge", "loss", "client_weights", "class_weight", "threshold", "minimum_cell", "test_share", "validation", "seed",
)  # fmt: skip
MEASURES = (
    "accuracy", "balanced_accuracy", "auc", "true_positive_rate", "false_positive_rate", "selection_rate", "precision", "brier",
    "mean_target", "mean_prediction", "mean_error", "rmse", "mae", "r2",
)  # fmt: skip


def write(folder: Path, out: Path | None = None) -> Path:
    """The card of the run in ``folder``, beside its tables or as ``out``."""
    run = read(folder)
    target = folder / CARD_FILE if out is None else out
    try:
        storage.write(target, card(run))
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror or error}.") from error
    return target


def card(run: Run) -> str:
    """The card of the model that a fit, simulated or over sites, or an audit is for: the last of its rows."""
    if run.command not in ("fit", "federate", "audit"):
        raise ValueError(
            f"{run.path} is a run of {run.command!r}, which has no model for tables; name a folder of fit or audit."
        )
    if run.status != "complete":
        raise ValueError(f"{run.path} is not finished: run the same command again, and it goes on.")
    schema = Schema.read(run.path / SCHEMA_FILE)
    row = run.rows.iloc[-1]
    audited = run.command == "audit"
    settings = [(name, _plain(run.configuration[name])) for name in SETTINGS if name in run.configuration]
    sections = [
        f"---\nlibrary_name: fedbilevel\ntags:\n- tabular-{schema.task}\n- fairness\n- federated-learning\n---",
        f"# {row['method']}: {row['dataset']}",
        "## Model description",
        _audited(run, schema) if audited else _description(run, schema, row),
        "### Intended uses & limitations",
        f"Intended use: {TO_FILL_IN}",
        *_limits(run, schema),
        "## Training Procedure",
        *([TO_FILL_IN] if audited else ["### Training data", _data(run, schema), "### Hyperparameters"]),
        *([] if audited else [_table(["setting", "value"], settings)]),
        "## Evaluation Results",
        *([_data(run, schema), _table(["setting", "value"], settings)] if audited else []),
        *_results(run),
        "## How to Get Started with the Model",
        TO_FILL_IN if audited else _start(run),
        "## Model Card Authors",
        TO_FILL_IN,
        "## Model Card Contact",
        TO_FILL_IN,
        "## Citation",
        TO_FILL_IN,
    ]
    return "\n\n".join(sections) + "\n"


def _description(run: Run, schema: Schema, row: Any) -> str:
    kind = KINDS[run.configuration["model"]]
    told = "a number" if schema.regression else f"one of {len(schema.labels)} classes ({_listed(schema.labels)})"
    if schema.positive is not None:
        told = f"{_code(schema.positive)} or {_code(schema.labels[0])}"
    named = " and ".join(map(_code, schema.sensitive))
    crossed = " (crossed)" if len(schema.sensitive) > 1 else ""
    return (
        f"{kind} that predicts {_code(schema.target)}: {told}. It reads {len(schema.features)} columns and was trained over "
        f"{row['split']} that keep their rows. Groups are made by {named}{crossed}: {_listed(schema.groups)}. "
        f"Written by fedbilevel {run.version} on {run.created[:10]}."
    )


def _audited(run: Run, schema: Schema) -> str:
    columns = _listed([column.name for column in schema.features])
    return (
        f"{TO_FILL_IN} Its predictions of {_code(schema.target)} ({run.configuration['kind']} in {columns}) were "
        f"audited by fedbilevel {run.version} on {run.created[:10]}; nothing was trained."
    )


def _limits(run: Run, schema: Schema) -> list[str]:
    found, notes = (run.others.get(name, pd.DataFrame()) for name in ("findings", "notes"))
    told = [f"**{text}**" for text in dict.fromkeys(found.get("sentence", ()))]
    told += map(str, notes.get("note", ()))
    told.append(
        "Intervals are 95 %. They speak of other rows from the same sites, not of other sites, other times or another training."
    )
    gap = GAPS.get(str(run.configuration.get("metric")), ("gap", ""))[0]
    about = "What was compared" if run.command == "audit" else "What was made fair"
    told.append(f"{about} is the {gap} between the groups above. Other notions of fairness may disagree.")
    unused = [column for column in schema.columns if column.kind == "ignore"]
    if unused:
        reasons = ", ".join(f"{_code(column.name)} ({column.note or 'by the schema'})" for column in unused)
        told.append(f"Columns left out: {reasons}.")
    return ["\n".join(f"- {sentence}" for sentence in told)]


def _data(run: Run, schema: Schema) -> str:
    columns = _table(
        ["column", "taken as", "values"],
        [(_code(column.name), column.kind, _listed(column.values)) for column in schema.features],
    )
    sites = run.others.get("sites")
    if sites is None:
        return columns
    told = [name for name in sites.columns if not name.startswith(("bytes", "median", "answered", "missed"))]
    return _table([name.replace("_", " ") for name in told], sites[told].itertuples(index=False)) + "\n\n" + columns


def _results(run: Run) -> list[str]:
    known = metrics(str(run.configuration.get("metric")))
    columns = [name for name in known if name in run.rows and run.rows[name].notna().any()]
    first, last = "split" if run.command == "audit" else "method", run.rows.iloc[-1]
    heads = [{"split": "site"}.get(first, first), *(known[name].label for name in columns)]
    rows = [(row[first], *(_with_ends(row, name) for name in columns)) for _, row in run.rows.iterrows()]
    parts = [_table(heads, rows)]
    groups = run.groups[(run.groups["method"] == last["method"]) & (run.groups["split"] == last["split"])]
    tested = groups[groups["part"] == "test"] if (groups["part"] == "test").any() else groups
    if len(tested):
        where = "test" if (groups["part"] == "test").any() else "training"
        keys = [name for name in ("by", "group", "label") if name in tested]
        counts = {"count": "rows"}
        if "mean_error" not in tested:
            counts["positives"] = "of the class" if "label" in tested else "positives"
        measures = [name for name in MEASURES if name in tested and tested[name].notna().any()]
        parts.append(f"By group, on {where} rows:")
        parts.append(
            _table(
                [*keys, *counts.values(), *(name.replace("_", " ") for name in measures)],
                [
                    (*(row[key] for key in keys), *(f"{int(row[name]):,}" for name in counts),
                     *(_with_ends(row, name) for name in measures))
                    for _, row in tested.iterrows()
                ],
            )
        )  # fmt: skip
    return parts


def _start(run: Run) -> str:
    return (
        f"```sh\nfedbilevel predict {run.path} rows.csv > predictions.csv\n"
        f"fedbilevel export {run.path} --onnx model.onnx    # for any ONNX runtime\n```\n\n"
        f"The model is `{run.path.name}/models/{run.models[-1]}.npz`: arrays and JSON, no pickle. How it was made:\n\n"
        f"```sh\n{run.line or TO_FILL_IN}\n```"
    )


def _with_ends(row: Any, name: str) -> str:
    span = Span.of(row, name)
    return "" if span.value != span.value else span.text("", lambda value, _: f"{value:.3f}")


def _table(heads: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(_plain(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(heads), "|" + "---|" * len(heads), *map(line, rows)])


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return "" if pd.isna(value) else f"{value:.4g}"
    return str(value)


def _code(text: Any) -> str:
    return f"`{text}`"


def _listed(values: Sequence[Any], limit: int = 12) -> str:
    some = ", ".join(map(_code, values[:limit]))
    return some + (f" and {len(values) - limit} more" if len(values) > limit else "")
