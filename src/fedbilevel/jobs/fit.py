"""A fair classifier from your own tables: files in, a run folder with model, tables and page out.

``strength="auto"`` of FedPath spends half a point of accuracy at most, by its own path; nothing is trained for it.  With other
methods it chooses how much fairness to ask for by cross-validation on the training rows alone.  The rule: every site's training
rows are dealt into three folds (proportions of groups and classes kept).  Each strength, and FedAvg, is trained on two
folds and decides about the third; so every row is decided about once by a model that has not seen it.  Of the strengths that
lose at most half a point of accuracy against FedAvg on these decisions, the one with the smallest gap is taken; if all lose
more, the most accurate.  With class weights or a threshold of one's own, balanced accuracy stands for accuracy.  A strength
whose model selects (almost) nobody or everybody is not taken if there is another.  No test row is looked at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel import storage
from fedbilevel.datasets import partition
from fedbilevel.fairness import findings, trainer
from fedbilevel.fairness.disclosure import MINIMUM, Visible
from fedbilevel.fairness.effects import TrainingRows, effects
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.frontier import explained
from fedbilevel.fairness.methods import BILEVEL, LARGEST_LOSS, METHODS, PATH, Recipe, check_aims
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.pooled import PooledRows, front
from fedbilevel.fairness.program import FairProgram
from fedbilevel.fairness.saving import FittedModel, named_weights
from fedbilevel.fairness.thresholds import Threshold
from fedbilevel.jobs import measuring
from fedbilevel.jobs.measuring import LEVEL, Measured, findings_table, site_table, visible_groups
from fedbilevel.jobs.predict import MAPPING_FILE, file_name
from fedbilevel.jobs.sites import Part, Prepared, Site, Tell, digests, joined, left_out_notes, prepare, read_sites
from fedbilevel.report import card, page
from fedbilevel.runs import Run, RunFolder, model_file, read
from fedbilevel.tables import documents
from fedbilevel.tables.mapping import Mapping
from fedbilevel.tables.reading import Table
from fedbilevel.tables.schema import Schema

SCHEMA_FILE = "schema.toml"
SEARCH_FILE = "strengths.csv"
FOLDS = 3
POOLED = (
    "For --pooled-frontier the training rows of all sites were read in one place, on this machine, to draw the limit; no model "
    "that is used was made from them."
)
NAMES = {
    "fedavg": "FedAvg", "fedreg": "FedReg", "fedminmax": "FedMinMax", "fcfl": "FCFL", "fedfb": "FedFB",
    "fairfed": "FairFed", "fedbio": "FedBiO", "fedbioacc": "FedBiOAcc", "fedpath": "FedPath",
}  # fmt: skip
HISTORY_ROWS = 20
STRENGTHS = {"cells": (0.5, 2.0, 5.0, 10.0), "fedreg": (0.03, 0.1, 0.3, 1.0)}
"""What ``strength="auto"`` chooses from by cross-validation."""


@dataclass(frozen=True)
class FitOptions:
    """How to fit; what is None takes the method's default.  See `Recipe` and `FairFederatedClassifier` for the meaning."""

    method: str = "fedpath"
    formulation: str = "cells"
    metric: str = "equal_opportunity"
    strength: float | str | None = None
    gap: float | None = None
    accuracy_loss: float | None = None
    steps: int | None = None
    weight_steps: int | None = None
    local_steps: int = 5
    batch_size: int = 128
    step: float | None = None
    ridge: float | None = None
    model: str = "logistic"
    hidden: int = 16
    client_weights: str = "uniform"
    class_weight: str | None = None
    threshold: float | str | None = None
    minimum_cell: int = MINIMUM
    test_share: float = 0.3
    seed: int = 0
    compare_with: str | None = "fedavg"
    task: str = "classification"
    loss: str = "squared"
    secure: bool = False
    pooled_frontier: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.test_share < 1:
            raise ValueError(f"--test-share must lie between 0 and 1, not {self.test_share}.")
        if self.compare_with is not None and self.compare_with not in METHODS:
            raise ValueError(f"--compare-with must be one of {', '.join(METHODS)} or none, not {self.compare_with!r}.")
        if self.strength is not None and self.knob is None:
            which = f"{self.method} with the paper's formulation" if self.method in BILEVEL else self.method
            raise ValueError(
                f"--strength means nothing to {which}; it is for fedpath, fedbio and fedbioacc with cells, and fedreg."
            )
        check_aims(self.method, self.strength, self.gap, self.accuracy_loss)
        if isinstance(self.strength, str) and self.strength != "auto":
            raise ValueError(f"--strength must be a number or auto, not {self.strength!r}.")
        if self.pooled_frontier and (
            self.method != PATH or self.class_weight is not None or self.threshold is not None
        ):
            raise ValueError(
                "--pooled-frontier draws the limit of fedpath with its usual threshold and without class weights: leave it, or "
                "the others, out."
            )
        self.program(features=1, groups=2, curvature=0.0)
        self.baseline()

    @property
    def knob(self) -> str | None:
        """Whose strengths there are to choose from: "cells", "fedreg", "fedpath", or None."""
        if self.method in BILEVEL:
            return "cells" if self.formulation == "cells" else None
        return self.method if self.method in ("fedreg", PATH) else None

    def meant(self) -> FitOptions:
        """With the strength "auto" of FedPath as the aim that it is."""
        aims = self.method == PATH and self.strength == "auto"
        return replace(self, strength=None, accuracy_loss=LARGEST_LOSS) if aims else self

    @property
    def label(self) -> str:
        """What the method is called in tables."""
        name = NAMES.get(self.method, self.method)
        return f"{name}, {self.formulation}" if self.method in BILEVEL else name

    def baseline(self) -> FitOptions | None:
        """The same for the method to compare with; None where there is none, or it is this one."""
        if self.compare_with in (None, self.method):
            return None
        form = "cells" if self.compare_with == PATH else self.formulation
        return replace(
            self, method=str(self.compare_with), formulation=form, strength=None, gap=None, accuracy_loss=None,
            compare_with=None, pooled_frontier=False,
        )  # fmt: skip

    def recipe(self, groups: int) -> Recipe:
        """The same as a method's options."""
        chosen = self.meant()
        recipe = Recipe(
            self.method,
            Formulation(self.formulation, self.metric, ridge=self.ridge),
            self.steps,
            self.weight_steps,
            self.local_steps,
            self.batch_size,
            step=self.step,
            client_weights=self.client_weights,
            gap=chosen.gap,
            accuracy_loss=chosen.accuracy_loss,
        )
        return recipe.asked(groups, None if isinstance(chosen.strength, str) else chosen.strength)

    def program(
        self, features: int, groups: int, curvature: float, names: Sequence[str] | None = None, classes: int = 2
    ) -> FairProgram:
        """For rows of so many ``features``, and so many labels where they are classes; ``names``: of the groups."""
        number = self.task == "regression"
        model = Model(self.model, features, 1 if number else classes, self.hidden, self.loss if number else "log")
        return FairProgram(
            self.recipe(groups), model, groups, curvature=curvature, names=names, class_weight=self.class_weight,
            threshold=Threshold.parse(self.threshold), minimum=self.minimum_cell, secure=self.secure,
        )  # fmt: skip

    def program_of(self, schema: Schema, curvature: float) -> FairProgram:
        """For rows as the schema encodes them."""
        sizes = len(schema.feature_names), len(schema.groups)
        return self.program(*sizes, curvature, schema.groups, len(schema.labels))

    def configuration(self) -> dict[str, Any]:
        """What was asked for; the hidden units only of a model that has some, a loss only of a number."""
        unused = set() if self.model == "mlp" else {"hidden"}
        unused |= set() if self.task == "regression" else {"task", "loss"}
        unused |= {name for name in ("secure", "pooled_frontier") if not getattr(self, name)}
        return {name: value for name, value in asdict(self).items() if value is not None and name not in unused}


@dataclass(frozen=True, eq=False)
class FitResult:
    """``run``: the folder's tables; ``sites``: rows of every site by part; ``notes``: what was done to rows; ``warnings``: what
    people must know before they believe the numbers."""

    run: Run
    sites: pd.DataFrame
    notes: list[str]
    warnings: list[str]
    page: Path


def run(
    tables: Sequence[Table],
    schema: Schema,
    out: Path,
    options: FitOptions | None = None,
    *,
    clients: int | None = None,
    mapping: Mapping | None = None,
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
        mapping: what was done to the tables before, for the folder and its page.
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
        "mapping_sha256": None if mapping is None else hashlib.sha256(mapping.text().encode()).hexdigest(),
        "clients": clients,
        "convention": "between_groups",
        **chosen.configuration(),
    }
    if chosen.pooled_frontier and len(schema.labels) != 2:
        raise ValueError("--pooled-frontier is for two classes: leave it out, or name one class as --positive.")
    sites = read_sites(tables, schema, clients=clients, seed=chosen.seed, tell=say)
    prepared = prepare(sites, schema, test_share=chosen.test_share, seed=chosen.seed)
    visible = visible_groups(prepared, chosen.minimum_cell)
    table, found = site_table(prepared, visible)
    where = " among the training or test rows"
    found += findings.of_hidden(visible, schema.groups, where=where, labels=schema.labels)
    with RunFolder.open(out, command="fit", configuration=configuration, line=line) as folder:
        if not folder.complete:
            if mapping is not None:
                documents.write(folder.path / MAPPING_FILE, mapping.text())
            _fill(folder, prepared, visible, found, chosen, say)
        changes = pd.DataFrame() if mapping is None else mapping.frame()
        done = notes(sites, schema) + ([POOLED] if chosen.pooled_frontier else [])
        told = {
            "sites": table,
            "mapping": changes,
            "notes": pd.DataFrame({"note": done}),
            "facts": facts(schema, chosen.minimum_cell),
        }
        extra = {name: frame for name, frame in told.items() if len(frame)}
        finished = folder.finish([entry.label for entry in _entries(chosen)], extra)
    card.write(out)
    return FitResult(finished, table, done, warnings(finished), page.write(out))


def facts(schema: Schema, minimum_cell: int) -> pd.DataFrame:
    """What people should know of the columns before they use the model: ``name`` and ``value``."""
    used = [column.name for column in schema.features]
    left_out = [column.name for column in schema.columns if column.name not in used]
    told = {
        "Target": f"{schema.target}; {schema.told_apart}",
        "Groups": f"{' & '.join(schema.sensitive)}: {', '.join(schema.groups)}" if schema.sensitive else "none",
        "Columns used": ", ".join(used),
        "Columns left out": ", ".join(left_out) or "none",
        "Smallest count shown": str(minimum_cell),
    }
    return pd.DataFrame(told.items(), columns=["name", "value"])


def warnings(run: Run) -> list[str]:
    """The sentences of a run's findings, each once."""
    return list(dict.fromkeys(run.others["findings"]["sentence"])) if "findings" in run.others else []


def _entries(options: FitOptions) -> list[FitOptions]:
    baseline = options.baseline()
    return [options] if baseline is None else [baseline, options]


def _fill(
    folder: RunFolder,
    prepared: Prepared,
    visible: Visible,
    found: list[findings.Finding],
    options: FitOptions,
    say: Tell,
) -> None:
    schema = prepared.encoder.schema
    schema.write(folder.path / SCHEMA_FILE)
    for entry in _entries(options):
        if folder.done(entry.label):
            continue
        chosen = _with_strength(folder, entry, prepared, visible, say)
        program = chosen.program_of(schema, prepared.smooth)
        fitted, threshold = train(chosen, program, prepared.train, tell=partial(say, entry.label))
        encoder, weights = prepared.encoder, fitted.weights
        model = FittedModel.of_schema(encoder, program.model, fitted.params, weights, entry.label, threshold)
        parts = {"train": joined(prepared.train), "test": joined(prepared.test)}
        measured = [measuring.of_rows(part, rows, model, visible, chosen.metric) for part, rows in parts.items()]
        row: dict[str, Any] = {"split_seed": chosen.seed}
        baseline = entry.baseline()
        if baseline is not None:
            other = FittedModel.read(model_file(read(folder.path), file_name(baseline.label)))
            ours, theirs = (measuring.answers(each, parts["test"].features) for each in (model, other))
            kind: dict[str, Any] = {"classes": len(schema.labels), "target": encoder.target}
            if chosen.metric == "calibration":
                kind["chances"] = [each.probabilities_of(parts["test"].features) for each in (model, other)]
            row |= measuring.differences(parts["test"], ours, theirs, visible, chosen.metric, **kind)
        row |= _costs(program, fitted)
        history = fitted.history.rename(columns={"hessian_vector_calls": "hvp_calls"})
        used, told, more = training_rows(program, fitted, prepared.train), list(found), pd.DataFrame()
        if fitted.frontier is not None:
            rows = parts["train"]
            told += explained(fitted.frontier, rows.features, rows.groups, schema.groups)
            more = _on_test_rows(fitted, model, parts["test"], visible, chosen.metric)
            if chosen.pooled_frontier:
                say("pooled frontier", 0, 1)
                more = more.assign(**_limit(program, fitted, model, parts, visible))
        save(folder, chosen, model, len(prepared.names), row, measured, told, history, used, more)
        folder.log(f"{entry.label}: trained in {fitted.seconds:.1f} s")


def _on_test_rows(
    fitted: trainer.Fitted, model: FittedModel, rows: Part, visible: Visible, metric: str
) -> pd.DataFrame:
    """The frontier, with every point on the test rows besides: to look at, not to choose by."""
    assert fitted.frontier is not None
    path, kept = fitted.answers[-1], rows.take(visible.shown[rows.groups])
    seen = []
    for place in range(len(fitted.frontier.table)):
        point = replace(model, params=jax.tree.map(lambda leaf, place=place: leaf[place], path.inner))
        said, chances = measuring.answers(point, kept.features), measuring.chances_of(point, kept.features)
        seen.append(measuring.compared(kept, said, model.schema, visible, metric, plain=True, chances=chances))
    return fitted.frontier.table.assign(
        test_accuracy=[one["accuracy"] for one in seen], test_gap=[one["gap"] for one in seen]
    )


def _limit(
    program: FairProgram, fitted: trainer.Fitted, model: FittedModel, parts: dict[str, Part], visible: Visible
) -> dict[str, list[float]]:
    """The same problem solved exactly for every strength of the path, on the training rows of all sites in one place."""
    assert fitted.frontier is not None
    form, rows = program.settled(fitted.agreed).formulation, parts["train"]
    strengths = fitted.frontier.table["strength"].tolist()
    models = front(PooledRows(rows.features, rows.labels, rows.groups), program.groups, form, strengths)
    columns: dict[str, list[float]] = {}
    for part, prefix in (("train", "pooled_"), ("test", "pooled_test_")):
        kept = parts[part].take(visible.shown[parts[part].groups])
        for strength in strengths:
            point = replace(model, params=models[strength].astype(np.float32))
            said, chances = measuring.answers(point, kept.features), measuring.chances_of(point, kept.features)
            seen = measuring.compared(kept, said, model.schema, visible, str(form.metric), plain=True, chances=chances)
            for name in ("accuracy", "gap"):
                columns.setdefault(f"{prefix}{name}", []).append(seen[name])
    return columns


def _costs(program: FairProgram, fitted: trainer.Fitted) -> dict[str, Any]:
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


def train(
    options: FitOptions,
    program: FairProgram,
    parts: Sequence[Part],
    *,
    record: bool = True,
    tell: trainer.Tell | None = None,
) -> tuple[trainer.Fitted, float | NDArray[np.float64]]:
    """Run ``program`` on the sites' training rows: what was fitted, and the threshold; ``tell`` hears how far it is."""
    rows = joined(parts)
    leaves = {"features": rows.features, "labels": rows.labels.astype(np.float32), "groups": rows.groups}
    sizes = [len(part.labels) for part in parts]
    owned = [np.arange(first, last) for first, last in pairwise(np.cumsum([0, *sizes]))]
    kept, aside = zip(*program.set_aside(rows.groups, rows.labels, owned), strict=True)
    fitted = trainer.fit_alike(
        program,
        trainer.dealt(program, leaves, kept),
        seed=options.seed,
        record_every=program.recipe.record_every(HISTORY_ROWS) if record else None,
        tell=tell,
    )
    return fitted, trainer.tuned_threshold(program, fitted.params, leaves, aside)


def _with_strength(
    folder: RunFolder, options: FitOptions, prepared: Prepared, visible: Visible, say: Tell
) -> FitOptions:
    if options.strength != "auto" or options.method == PATH:
        return options.meant()
    strength, search = choose_strength(options, prepared, visible, partial(say, "choosing the strength"))
    target = folder.path / SEARCH_FILE
    try:
        storage.write(target, search.to_csv(index=False))
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror or error}.") from error
    folder.log(f"strength {strength:g} chosen by cross-validation; see {SEARCH_FILE}")
    return replace(options, strength=strength)


def choose_strength(
    options: FitOptions, prepared: Prepared, visible: Visible, tell: trainer.Tell
) -> tuple[float, pd.DataFrame]:
    """The strength, and a table of what was compared: strength (0 stands for FedAvg), accuracy, gap, usable, chosen."""
    if options.knob is None:
        raise ValueError(f"{options.label} has no strength to choose.")
    schema = prepared.encoder.schema
    folds = [
        _folds(part, options.seed + number, max(1, len(schema.labels))) for number, part in enumerate(prepared.train)
    ]
    sites = list(zip(prepared.train, folds, strict=True))
    candidates = [replace(options, method="fedavg", strength=None, compare_with=None)]
    candidates += [replace(options, strength=value, compare_with=None) for value in STRENGTHS[options.knob]]
    measured = []
    for number, candidate in enumerate(candidates):
        decided, held_out = [], []
        believed: list[Any] = []
        for fold in range(FOLDS):
            out = joined([part.take(owner == fold) for part, owner in sites])
            program = candidate.program_of(schema, prepared.smooth)
            kept = [_without(part, owner, fold) for part, owner in sites]
            fitted, threshold = train(candidate, program, kept, record=False)
            made = FittedModel.of_schema(prepared.encoder, program.model, fitted.params, threshold=threshold)
            decided.append(measuring.answers(made, out.features))
            believed.append(measuring.chances_of(made, out.features))
            held_out.append(out)
            tell(number * FOLDS + fold + 1, len(candidates) * FOLDS)
        strength = 0.0 if number == 0 else float(candidate.strength or 0)
        plain = options.class_weight is None and options.threshold is None
        chances: Any = None if schema.regression else np.concatenate(believed)
        together, said = joined(held_out), np.concatenate(decided)
        seen = measuring.compared(together, said, schema, visible, options.metric, plain, chances)
        measured.append({"strength": strength, **seen})
    table = pd.DataFrame(measured)
    best = _choice(table)
    return float(table["strength"][best]), table.assign(chosen=np.arange(len(table)) == best)


def _choice(table: pd.DataFrame) -> int:
    """The row of the chosen strength; row 0 is FedAvg, which is what others are held against and is not chosen."""
    loss = table["accuracy"][0] - table["accuracy"].to_numpy()
    gaps = table["gap"].fillna(np.inf).to_numpy()
    usable = table["usable"].to_numpy(bool)
    offered = np.flatnonzero(usable if usable[1:].any() else ~usable)
    offered = offered[offered > 0]
    allowed = offered[loss[offered] <= LARGEST_LOSS]
    if len(allowed):
        return int(allowed[np.argmin(gaps[allowed])])
    return int(offered[np.argmin(loss[offered])])


def _folds(part: Part, seed: int, classes: int = 2) -> NDArray[np.int64]:
    """Which fold every row is in, proportions of groups and labels kept."""
    cells = classes * part.groups.astype(np.int64) + (part.labels if classes > 1 else 0)
    return partition.folds(cells, FOLDS, seed=seed)


def _without(part: Part, owner: NDArray[np.int64], fold: int) -> Part:
    """Training rows of a fold, cut to a common length (a row or two): equal shapes share one compiled program."""
    rows = np.flatnonzero(owner != fold)
    sizes = np.bincount(owner, minlength=FOLDS)
    return part.take(rows[: int(sizes.sum() - sizes.max())])


def save(
    folder: RunFolder,
    options: FitOptions,
    model: FittedModel,
    sites: int,
    row: dict[str, Any],
    measured: Sequence[Measured],
    found: Sequence[findings.Finding],
    history: pd.DataFrame,
    rows: TrainingRows | None = None,
    frontier: pd.DataFrame | None = None,
) -> None:
    """One fit as a part of a run folder, on one machine or over real sites.

    ``measured`` on training and then on test rows; what counts against the model is what was found on the last of them, and
    ``found`` besides.  ``row``: further columns; ``rows``: what it was trained on, for the intervals of the features' effects;
    ``frontier``: of FedPath.
    """
    schema = model.schema
    key: dict[str, Any] = {
        "dataset": f"{schema.target} by {' & '.join(schema.sensitive)}",
        "split": f"{sites} site{'s' if sites > 1 else ''}",
        "method": options.label,
        "seed": options.seed,
    }
    against = findings_table([*(measured[-1].found if measured else ()), *found])
    row = {
        **key,
        "setting": _setting(options, frontier),
        **{name: value for of in measured for name, value in of.row.items()},
        **row,
    }
    curves = [of.curve for of in measured if len(of.curve)]
    gaps = [of.gaps for of in measured if len(of.gaps)]
    tables = {"calibration": curves, "gaps": gaps}
    others = {"findings": against} | {name: pd.concat(of, ignore_index=True) for name, of in tables.items() if of}
    row |= {"threshold": model.threshold_words, "usable": not against["blocks"].any()}
    if frontier is not None and len(frontier):
        others["frontier"] = frontier
    weights = None
    if model.weights is not None:
        weights = named_weights(model.weights, model.groups, model.classes).reset_index().assign(**key)
        row["weights"] = json.dumps([round(float(value), 6) for value in model.weights])
    folder.save(
        options.label,
        rows=pd.DataFrame([row]),
        groups=pd.concat([of.groups for of in measured], ignore_index=True).assign(**key) if measured else None,
        weights=weights,
        history=history.assign(**key),
        others={name: frame.assign(method=options.label) for name, frame in others.items() if len(frame)}
        | _effects(options, model, rows),
        models={file_name(options.label): model.write},
    )


def _setting(options: FitOptions, frontier: pd.DataFrame | None) -> str:
    """What was asked for, and the strength that this, or the default, took."""
    asked = {"gap": options.gap, "accuracy_loss": options.accuracy_loss, "strength": options.strength}
    told = [f"{name}={float(value):g}" for name, value in asked.items() if value is not None]
    if frontier is not None and len(frontier) and options.strength is None:
        told.append(f"strength={frontier.loc[frontier['chosen'], 'strength'].iloc[0]:g}")
    return ", ".join(told)


def _effects(options: FitOptions, model: FittedModel, rows: TrainingRows | None) -> dict[str, pd.DataFrame]:
    if model.model.kind != "logistic" or model.model.classes != 2:
        return {}
    usual = 1e-3 if options.method != PATH or rows is None else 1 / len(rows.labels)
    ridge = usual if options.ridge is None else options.ridge
    found = effects(model.by_schema, np.asarray(model.params), rows, ridge=ridge, level=LEVEL)
    return {"effects": found.assign(method=options.label)[["method", *found.columns]]}


def training_rows(program: FairProgram, fitted: trainer.Fitted, parts: Sequence[Part]) -> TrainingRows | None:
    """All rows with their weights in the loss that the model minimises; None where it minimises another loss."""
    if program.model.classes != 2:
        return None
    kept = [
        part.take(program.set_aside(part.groups, part.labels, [np.arange(len(part.labels))])[0][0]) for part in parts
    ]
    rows, sizes = joined(kept), np.array([len(part.labels) for part in kept])
    leaves = {"features": rows.features, "labels": rows.labels, "groups": rows.groups}
    used = program.training_rows(len(fitted.answers) - 1, leaves, fitted.answers, fitted.agreed)
    if "weights" not in used:
        return None
    by_rows = program.path or program.recipe.client_weights == "samples"
    share = np.ones(len(sizes)) if by_rows else sizes.mean() / sizes
    weights = np.asarray(used["weights"], np.float64) * np.repeat(share, sizes)
    return TrainingRows(rows.features, rows.labels.astype(np.float64), weights)


def notes(sites: Sequence[Site], schema: Schema) -> list[str]:
    """What was done to rows, in sentences."""
    sentences = left_out_notes(sites, schema)
    if len(sites) == 1:
        sentences.append("All rows are at one site; --site, --clients or one file a site makes several.")
    return sentences
