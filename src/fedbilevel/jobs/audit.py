"""Any model's predictions, judged by site and by group: files or real sites in, a run folder with tables and page out.

Two classes, more of them, or a number.  Nothing is trained.  Whoever holds the files gets exact numbers; over real sites every
site counts for itself, and AUC and the calibration curves come from binned probabilities (see `fairness.scores`).  All other
numbers are the same, as long as no site has to hide a group.

No cell (a group with a label, of all sites or of one) below the minimum is shown, and none follows by subtraction; see
`by_group`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.fairness import findings, moments
from fedbilevel.fairness.audit import (
    Predicted,
    audit_program,
    check_audited,
    class_columns,
    predicted,
    prediction_columns,
    yes_code,
)
from fedbilevel.fairness.disclosure import MINIMUM, Visible
from fedbilevel.fairness.findings import Finding
from fedbilevel.fairness.metrics import CRITERIA, check_choice
from fedbilevel.fairness.moments import Moments, Scale
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.jobs.federate import run_name
from fedbilevel.jobs.measuring import Tally, cells_of, findings_table, found_at_sites, measured, received, tally
from fedbilevel.jobs.sites import Tell, digests, left_out_notes, read_sites
from fedbilevel.report import page
from fedbilevel.runs import Run, RunFolder
from fedbilevel.tables import documents
from fedbilevel.tables.agreement import differences, stop
from fedbilevel.tables.columns import EVERYBODY
from fedbilevel.tables.mapping import Mapping as TableMapping
from fedbilevel.tables.profile import look, merged
from fedbilevel.tables.reading import Table
from fedbilevel.tables.schema import MISSING, Column, Schema, target_of

SCHEMA_FILE, MAPPING_FILE = "schema.toml", "mapping.toml"
PART = "test"
"""What the rows of an audit are in tables: rows that a model is judged on."""
EVERYWHERE = "all sites"
REMEDY = {False: "choose another model", True: "choose another threshold (--threshold), or another model"}
"""What to do, where there is no threshold to choose, and where there is."""


@dataclass(frozen=True)
class AuditOptions:
    """``threshold``: above it the probability of the positive class selects; ``metric``: what the gap is of, by default equal
    opportunity, or of a number the mean error; ``minimum_cell``: see above."""

    threshold: float = 0.5
    metric: str | None = None
    minimum_cell: int = MINIMUM

    def compares(self, schema: Schema) -> str:
        """What the gap is of."""
        known = tuple(moments.CRITERIA if schema.regression else CRITERIA)
        chosen = self.metric or ("mean_error" if schema.regression else known[0])
        check_choice("--metric", chosen, known)
        return chosen

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ValueError(f"--threshold must lie between 0 and 1, not {self.threshold:g}.")


@dataclass(frozen=True, eq=False)
class AuditResult:
    """``notes``: what was done to rows; ``warnings``: what people must know before they believe the numbers."""

    run: Run
    notes: list[str]
    warnings: list[str]
    page: Path


def question(
    tables: Sequence[Table],
    target: str,
    prediction: str,
    sensitive: Sequence[str] = (),
    site: str | None = None,
    positive: str | None = None,
    checked: Sequence[str] = (),
    task: str | None = None,
) -> Schema:
    """What the columns of an audit mean, from the tables; sites that contradict each other are refused.  ``prediction``: a
    column, or the beginning of the names of one a class (`class_columns`)."""
    begun = dict.fromkeys(name for table in tables for name in table.columns if name.startswith(f"{prediction} "))
    given = list(begun) if begun and not any(prediction in table.columns for table in tables) else [prediction]
    roles = [target, *given, *sensitive, *([] if site is None else [site])]
    for name in roles:
        if roles.count(name) > 1:
            raise ValueError(
                f"The column {name!r} is named twice among target, prediction, sensitive columns and site."
            )
    for table in tables:
        table.check_columns(roles)
    seen = look(tables, sensitive, frozenset(MISSING), site, roles)
    # Predictions may well differ from site to site: that is for the audit to show.
    stop(differences(seen, target, sensitive, positive, (*checked, *given), site))
    wanted = target_of(target, merged(seen.profiles[target]), positive, task)
    groups = tuple(sorted(seen.groups)) if sensitive else (EVERYBODY,)
    made: dict[str, Any] = {"sensitive": tuple(sensitive), "groups": groups, "site": site, **wanted}
    labels = Schema(target, columns=(Column(prediction),), **made).labels
    profiles = {name: dict(zip(seen.sites, seen.profiles[name], strict=True)) for name in given}
    return Schema(
        target, columns=prediction_columns(prediction, profiles, labels, wanted["classes"], wanted["positive"]), **made
    )


def meant(file: Path, prediction: str | None = None) -> Schema:
    """The schema of an audit, from a file.  Of a fit's schema only target and groups count, and ``prediction`` names the
    column of probabilities (of more than two classes the beginning of their names), or of predicted numbers."""
    schema = Schema.read(file)
    if prediction is not None:
        names = class_columns(prediction, schema.labels) if len(schema.labels) > 2 else [prediction]
        known = [column for column in schema.features if column.name in (prediction, *names)]
        if len(known) != len(schema.features):
            known = [Column(name) for name in names]
        schema = replace(schema, columns=tuple(known))
    try:
        check_audited(schema)
    except ValueError:
        raise ValueError(
            f"{file} is the schema of a fit: name the column of predictions with --prediction, or take the schema.toml that "
            "`fedbilevel audit` wrote."
        ) from None
    return schema


def by_threshold(schema: Schema) -> bool:
    """Whether a threshold decides: the prediction is the probability of one positive class."""
    return schema.positive is not None and schema.features[0].kind == "number"


def called(schema: Schema) -> str:
    """What the predictions are called: their column, or what the names of their columns begin with."""
    first = schema.features[0].name
    return first if len(schema.features) == 1 else first[: -len(schema.labels[0]) - 1]


def words(schema: Schema) -> list[str]:
    """How the predictions are read, in sentences."""
    column, name = schema.features[0], called(schema)
    if schema.regression:
        read = f"{name} is read as the predicted number, in the units of {schema.target}."
    elif column.kind == "category":
        yes = "" if schema.positive is None else f", {column.values[yes_code(column, schema.positive)]!r} for yes"
        read = f"{name} is read as decisions{yes}: without probabilities there is no AUC and no calibration."
    elif schema.positive is None:
        read = f"{', '.join(one.name for one in schema.features)} are read as probabilities; the largest decides."
    else:
        read = f"{name} is read as the probability of {schema.positive!r}."
    return [
        read,
        "It is not known here whether the model was trained on any of these rows. If it was, these numbers are too good.",
    ]


def run(
    tables: Sequence[Table],
    schema: Schema,
    out: Path,
    options: AuditOptions,
    *,
    mapping: TableMapping | None = None,
    line: str = "",
    tell: Tell | None = None,
) -> AuditResult:
    """Read, count and write.

    Args:
        tables: one a site, or one with a site column, in the common language.
        schema: what their columns mean, by `question`.
        out: the run folder.
        options: how to judge.
        mapping: what was done to the tables before, for the folder.
        line: the command that reproduces the run, for the folder.
        tell: hears about progress, (what, done, total).
    """
    configuration = {
        **_configuration(schema, options),
        "files": [str(table.path) for table in tables],
        "sha256": digests(tables),
        **({} if mapping is None else {"mapping_sha256": hashlib.sha256(mapping.text().encode()).hexdigest()}),
    }
    read = read_sites(tables, schema, tell=tell)
    sites = {site.name: predicted(schema, site.rows, options.threshold) for site in read}
    absent = sum(rows.absent for rows in sites.values())
    notes = [*words(schema), *left_out_notes(read, schema), *_without(absent)]
    tallies, found = _tallies(sites, schema, options)
    with RunFolder.open(out, command="audit", configuration=configuration, line=line) as folder:
        if not folder.complete:
            if mapping is not None:
                documents.write(folder.path / MAPPING_FILE, mapping.text())
            _save(folder, tallies, found, notes, schema, options)
        changes = pd.DataFrame() if mapping is None else mapping.frame()
        return _result(folder, {"mapping": changes} if len(changes) else {})


def _without(absent: int) -> list[str]:
    return [f"{absent:,} row(s) without a prediction were left out."] if absent else []


def _configuration(schema: Schema, options: AuditOptions) -> dict[str, Any]:
    kind = "numbers" if schema.regression else "probabilities" if schema.features[0].kind == "number" else "decisions"
    return {
        "target": schema.target,
        "prediction": called(schema),
        "kind": kind,
        "sensitive": list(schema.sensitive),
        "positive": schema.positive,
        "metric": options.compares(schema),
        "convention": "between_groups",
        "minimum_cell": options.minimum_cell,
        **({"threshold": options.threshold} if by_threshold(schema) else {}),
        **({"task": schema.task} if schema.regression else {}),
        "schema_sha256": hashlib.sha256(schema.text().encode()).hexdigest(),
    }


def _tallies(
    sites: Mapping[str, Predicted], schema: Schema, options: AuditOptions
) -> tuple[dict[str, Tally], list[Finding]]:
    """Of every site that may be shown, and last of all sites."""
    minimum, few = options.minimum_cell, findings.scarce(schema.labels)
    everything = _together(list(sites.values()))
    visible = Visible.of(cells_of(everything, len(schema.groups), schema), minimum)
    names = [str(name) for name in visible.listed(schema.groups)]
    compared = int(visible.shown.sum())
    if not compared:
        raise ValueError(
            f"Every group has fewer than {minimum} {few}, so none is shown: give more rows, fewer groups or a smaller "
            "--minimum-cell."
        )
    # Rows of groups that are left out are not looked at, at any site.
    codes = {name: visible.codes(rows.groups) for name, rows in sites.items()}
    seen = {name: rows.take(codes[name] >= 0, codes[name]) for name, rows in sites.items()}
    by_site = np.array([cells_of(rows, len(names), schema) for rows in seen.values()])
    labels = by_site.sum(axis=1)
    whole = Visible.of(labels, minimum, "labels").shown
    apart = by_group(by_site, whole, minimum)
    found = findings.of_hidden(visible, schema.groups, labels=schema.labels)
    found += findings.of_rows(dict(zip(seen, labels.tolist(), strict=True)), "site", classes=schema.labels)

    def told(rows: Predicted, divided: bool = True) -> Tally:
        taken = (names, compared) if divided else ([EVERYBODY], 1)
        return tally(schema, rows.labels, rows.said, rows.chances, rows.groups if divided else 0 * rows.groups, *taken)

    tallies = {
        name: told(rows, divided)
        for (name, rows), shown, divided in zip(seen.items(), whole, apart, strict=True)
        if len(seen) > 1 and shown and len(rows.labels)
    }
    tallies[EVERYWHERE] = told(_together(list(seen.values())))
    for code, which, how in (
        ("sites-not-shown", ~whole, f"are counted among all sites and not shown alone, because of fewer than {minimum} {few}"),
        (
            "sites-not-divided", whole & ~apart,
            f"are not shown by group, because of fewer than {minimum} {few} in a group of one of them",
        ),
    ):  # fmt: skip
        hidden = ", ".join(name for name, here in zip(seen, which, strict=True) if here)
        if hidden and len(seen) > 1:
            found.append(Finding(code, hidden, f"The site(s) {hidden} {how} (--minimum-cell).", blocks=False))
    return tallies, found


def by_group(cells: NDArray[np.int64], whole: NDArray[np.bool_], minimum: int) -> NDArray[np.bool_]:
    """Which sites may be shown by group, from ``cells`` [site, group, label], where the totals of all groups and of the sites
    that are shown as a ``whole`` are known.

    A site with a cell that is too small may not, nor may the smallest others, until there are two of them at least and their
    cells add up to the minimum: what can be had by subtraction is no single site's, and large enough.
    """
    closed = ((cells > 0) & (cells < minimum)).any(axis=(1, 2)) | ~whole
    while closed.any() and not closed.all():
        sums = cells[closed].sum(axis=0)
        if closed.sum() > 1 and not ((sums > 0) & (sums < minimum)).any():
            break
        others = np.flatnonzero(~closed)
        closed[others[np.argmin(cells[others].sum(axis=(1, 2)))]] = True
    return np.asarray(~closed)


def _together(parts: Sequence[Predicted]) -> Predicted:
    labels, groups, said, chances, absent = zip(*parts, strict=True)
    joined = None if chances[0] is None else np.concatenate(chances)
    return Predicted(np.concatenate(labels), np.concatenate(groups), np.concatenate(said), joined, sum(absent))


def _save(
    folder: RunFolder,
    tallies: Mapping[str, Tally],
    found: Sequence[Finding],
    notes: Sequence[str],
    schema: Schema,
    options: AuditOptions,
) -> None:
    """One part: a row a site and, last, one for all of them; the groups of each; what was found; calibration curves."""
    schema.write(folder.path / SCHEMA_FILE)
    name, metric, scale = called(schema), options.compares(schema), Scale(schema.center)
    groups_of = f" by {' & '.join(schema.sensitive)}" if schema.sensitive else ""
    rows, groups, against, sites = [], [], list(found), []
    for where, told in tallies.items():
        about = name if where == EVERYWHERE else f"{name} at {where}"
        remedy = REMEDY[by_threshold(schema)]
        at = measured(PART, told, schema, metric, options.minimum_cell, about, remedy, scale)
        key: dict[str, Any] = {
            "dataset": f"{schema.target}{groups_of}",
            "split": where,
            "method": name,
            "seed": 0,
        }
        row = {**key, **at.row, "usable": not any(finding.blocks for finding in at.found)}
        row["threshold"] = options.threshold
        if told.compared < 2:
            row |= dict.fromkeys((f"{PART}_gap", f"{PART}_gap_low", f"{PART}_gap_high"), np.nan)
        rows.append(row)
        groups.append(at.groups.assign(**key))
        if where == EVERYWHERE:
            against = [*at.found, *against]
        else:
            against += [one._replace(blocks=False) for one in at.found if one.about == about]
            sites.append({"site": where, "rows": told.rows, **_labelled(told, schema)})
    folder.save(
        name,
        rows=pd.DataFrame(rows),
        groups=pd.concat(groups, ignore_index=True),
        others={
            what: table
            for what, table in {
                "findings": findings_table(against).assign(method=name),
                "calibration": at.curve.assign(method=name),
                "gaps": at.gaps.assign(method=name),
                "sites": pd.DataFrame(sites),
                "notes": pd.DataFrame({"note": list(notes)}),
                "facts": pd.DataFrame(_facts(schema, options).items(), columns=["name", "value"]),
            }.items()
            if len(table)
        },
    )


def _labelled(told: Tally, schema: Schema) -> dict[str, float]:
    """The share of positives, or of every class, or the mean of the number."""
    if isinstance(told.sums, Moments):
        return {f"mean {schema.target}": float(told.sums.everybody().measure("mean_target")[0]) + schema.center}
    shares = told.sums.cells.sum(axis=(0, 2)) / told.rows
    if schema.positive is not None:
        return {"positive_share": float(shares[1])}
    return {f"share of {name}": float(share) for name, share in zip(schema.labels, shares, strict=True)}


def _facts(schema: Schema, options: AuditOptions) -> dict[str, str]:
    column = schema.features[0]
    what = "numbers" if schema.regression else "probabilities, the largest decides"
    if column.kind == "category":
        what = f"decisions ({', '.join(column.values)})"
    elif by_threshold(schema):
        what = f"probabilities, yes above {options.threshold:g}"
    return {
        "Target": f"{schema.target}; {schema.told_apart}",
        "Predictions": f"{called(schema)}: {what}",
        "Groups": f"{' & '.join(schema.sensitive)}: {', '.join(schema.groups)}" if schema.sensitive else "none",
        "Smallest count shown": str(options.minimum_cell),
        "Trained": "nothing; the model is somebody else's",
    }


def _result(folder: RunFolder, extra: Mapping[str, pd.DataFrame] | None = None) -> AuditResult:
    finished = folder.finish(extra=extra)
    notes, warnings = (
        list(dict.fromkeys(map(str, finished.others[name][column]))) if name in finished.others else []
        for name, column in (("notes", "note"), ("findings", "sentence"))
    )
    return AuditResult(finished, notes, warnings, page.write(folder.path))


# Over real sites.


def job(
    schema: Schema, options: AuditOptions, sites: Sequence[str], *, run: str | None = None, min_sites: int | None = None,
    reply_timeout: float = 300.0,
) -> JobSettings:  # fmt: skip
    """What is submitted; see `JobSettings`.  ``run``: its name, made from the options if None."""
    arguments = {
        "schema": schema.text(),
        "threshold": float(options.threshold),
        "minimum_cell": options.minimum_cell,
    }
    audit_program(arguments)
    return JobSettings(
        run or run_name(schema, [arguments, list(sites)], "audit-"), "audit", tuple(sites), arguments, min_sites=min_sites,
        reply_timeout=reply_timeout, start_timeout=reply_timeout,
    )  # fmt: skip


def federated(
    settings: JobSettings,
    schema: Schema,
    options: AuditOptions,
    out: Path,
    supervised: Callable[[], Path],
    line: str = "",
) -> AuditResult:
    """The same from real sites: ``supervised`` asks them and returns the coordinator's folder of the run."""
    configuration = {**_configuration(schema, options), "sites": list(settings.sites), "run": settings.run}
    with RunFolder.open(out, command="audit", configuration=configuration, line=line) as folder:
        if not folder.complete:
            reports = json.loads((supervised() / "report.json").read_text())
            told = {site: reports.get(site, {}) for site in settings.sites}
            tallies, found = _received(told, schema)
            absent = sum(int(report["absent"][0]) for report in told.values() if report)
            _save(folder, tallies, found, [*words(schema), *_without(absent)], schema, options)
        return _result(folder)


def _received(reports: Mapping[str, Mapping[str, Any]], schema: Schema) -> tuple[dict[str, Tally], list[Finding]]:
    """What the sites' reports add up to, and each by itself: what may be told has been decided there."""
    there = {site: report for site, report in reports.items() if report}
    silent = [site for site in reports if site not in there]
    if not there:
        raise ValueError(
            'No site told its counts: each must list "report" in tell of its policy (local/fedbilevel.toml in its kit).'
        )
    alone = {site: received([report], schema) for site, report in there.items() if len(there) > 1}
    tallies = {site: told for site, told in alone.items() if told.rows}
    tallies[EVERYWHERE] = received([*there.values()], schema)
    found = found_at_sites(there, schema)
    if silent:
        sentence = (
            f'{", ".join(silent)} told nothing and is not counted: the policy there does not list "report" in tell, or its '
            "own log says why."
        )
        found.append(Finding("sites-silent", ", ".join(silent), sentence, blocks=False))
    return tallies, found
