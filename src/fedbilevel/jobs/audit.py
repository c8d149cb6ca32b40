"""Any model's predictions, judged by site and by group: files or real sites in, a run folder with tables and page out.

Nothing is trained.  Whoever holds the files gets exact numbers; over real sites every site counts for itself, and AUC and the
calibration curves come from binned probabilities (see `fairness.scores`).  All other numbers are the same, as long as no site
has to hide a group.

No cell (a group with a label, of all sites or of one) below the minimum is shown, and none follows by subtraction; see
`by_group`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.fairness import findings
from fedbilevel.fairness.audit import Predicted, audit_program, predicted, prediction_column, yes_code
from fedbilevel.fairness.disclosure import MINIMUM, Visible
from fedbilevel.fairness.findings import Finding
from fedbilevel.fairness.metrics import CRITERIA, Counts, check_choice
from fedbilevel.fairness.scores import Scores
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.jobs.measuring import findings_table, measured, received
from fedbilevel.jobs.sites import Tell, digests, left_out_notes, read_sites
from fedbilevel.report import page
from fedbilevel.runs import Run, RunFolder
from fedbilevel.tables import documents
from fedbilevel.tables.agreement import differences, stop
from fedbilevel.tables.columns import EVERYBODY
from fedbilevel.tables.mapping import Mapping as TableMapping
from fedbilevel.tables.profile import look, merged
from fedbilevel.tables.reading import Table
from fedbilevel.tables.schema import MISSING, Column, Schema, classes_of

SCHEMA_FILE, MAPPING_FILE = "schema.toml", "mapping.toml"
PART = "test"
"""What the rows of an audit are in tables: rows that a model is judged on."""
EVERYWHERE = "all sites"
REMEDY = "choose another threshold (--threshold), or another model"


@dataclass(frozen=True)
class AuditOptions:
    """``threshold``: above it a probability selects; ``metric``: what the gap is of; ``minimum_cell``: see above."""

    threshold: float = 0.5
    metric: str = "equal_opportunity"
    minimum_cell: int = MINIMUM

    def __post_init__(self) -> None:
        check_choice("--metric", self.metric, tuple(CRITERIA))
        if not 0 <= self.threshold < 1:
            raise ValueError(f"--threshold must lie between 0 and 1, not {self.threshold:g}.")


class Tally(NamedTuple):
    """Counts of all sites or of one: of the groups ``names``, of which the first ``compared`` make the gap."""

    where: str
    counts: Counts
    scores: Scores | None
    names: list[str]
    compared: int


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
) -> Schema:
    """What the columns of an audit mean, from the tables; sites that contradict each other are refused."""
    roles = [target, prediction, *sensitive, *([] if site is None else [site])]
    for name in roles:
        if roles.count(name) > 1:
            raise ValueError(
                f"The column {name!r} is named twice among target, prediction, sensitive columns and site."
            )
    for table in tables:
        table.check_columns(roles)
    seen = look(tables, sensitive, frozenset(MISSING), site, roles)
    # Predictions may well differ from site to site: that is for the audit to show.
    stop(differences(seen, target, sensitive, positive, (*checked, prediction), site))
    classes, chosen = classes_of(target, merged(seen.profiles[target]), positive)
    if chosen is None:
        raise ValueError(f"The target {target!r} has {len(classes)} classes: name the one to audit with --positive.")
    column = prediction_column(
        prediction, dict(zip(seen.sites, seen.profiles[prediction], strict=True)), classes, chosen
    )
    groups = tuple(sorted(seen.groups)) if sensitive else (EVERYBODY,)
    return Schema(target, classes, chosen, tuple(sensitive), groups, (column,), site)


def meant(file: Path, prediction: str | None = None) -> Schema:
    """The schema of an audit, from a file.  Of a fit's schema only target and groups count, and ``prediction`` names the
    column of probabilities."""
    schema = Schema.read(file)
    if prediction is not None:
        known = [column for column in schema.features if column.name == prediction and len(schema.features) == 1]
        return replace(schema, columns=tuple(known) or (Column(prediction, "number"),))
    if len(schema.features) != 1:
        raise ValueError(
            f"{file} is the schema of a fit: name the column of probabilities with --prediction, or take the schema.toml that "
            "`fedbilevel audit` wrote."
        )
    return schema


def words(schema: Schema) -> list[str]:
    """How the predictions are read, in sentences."""
    (column,) = schema.features
    read = f"{column.name} is read as the probability of {schema.positive!r}."
    if column.kind != "number":
        yes = column.values[yes_code(column, str(schema.positive))]
        read = f"{column.name} is read as decisions, {yes!r} for yes: without probabilities there is no AUC and no calibration."
    return [
        read,
        "Whether the model was trained on any of these rows is not known here; if it was, these numbers flatter it.",
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
    (column,) = schema.features
    return {
        "target": schema.target,
        "prediction": column.name,
        "kind": "probabilities" if column.kind == "number" else "decisions",
        "sensitive": list(schema.sensitive),
        "positive": schema.positive,
        "metric": options.metric,
        "convention": "between_groups",
        "minimum_cell": options.minimum_cell,
        **({"threshold": options.threshold} if column.kind == "number" else {}),
        "schema_sha256": hashlib.sha256(schema.text().encode()).hexdigest(),
    }


def _tallies(
    sites: Mapping[str, Predicted], schema: Schema, options: AuditOptions
) -> tuple[list[Tally], list[Finding]]:
    """Of every site that may be shown, and last of all sites."""
    everything = _together(list(sites.values()))
    number, minimum = len(schema.groups), options.minimum_cell
    visible = Visible.of(np.bincount(everything.cells, minlength=2 * number).reshape(number, 2), minimum)
    names = [str(name) for name in visible.listed(schema.groups)]
    compared = int(visible.shown.sum())
    if not compared:
        raise ValueError(
            f"Every group has fewer than {minimum} positives or negatives, so none is shown: give more rows, fewer groups or a "
            "smaller --minimum-cell."
        )
    # Rows of groups that are left out are not looked at, at any site.
    seen = {name: _taken(rows, visible.codes(rows.groups)) for name, rows in sites.items()}
    tallies = []
    by_site = np.array([np.bincount(rows.cells, minlength=2 * len(names)).reshape(-1, 2) for rows in seen.values()])
    labels = by_site.sum(axis=1)
    whole = Visible.of(labels, minimum, "labels").shown
    apart = by_group(by_site, whole, minimum)
    found = findings.of_hidden(visible, schema.groups)
    found += findings.of_rows(dict(zip(seen, labels.tolist(), strict=True)), "site")
    for (name, rows), shown, divided in zip(seen.items(), whole, apart, strict=True):
        if len(seen) == 1 or not shown or not len(rows.labels):
            continue
        if divided:
            tallies.append(_tally(name, rows, names, compared))
        else:
            tallies.append(_tally(name, _taken(rows, np.zeros(len(rows.labels), np.int64)), [EVERYBODY], 1))
    tallies.append(_tally(EVERYWHERE, _together(list(seen.values())), names, compared))
    few = f"of fewer than {minimum} positives or negatives"
    for code, which, how in (
        ("sites-not-shown", ~whole, f"are counted among all sites and not shown alone, because {few}"),
        ("sites-not-divided", whole & ~apart, f"are not shown by group, because {few} in a group of one of them"),
    ):
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
    labels, groups, decided, probability, absent = zip(*parts, strict=True)
    joined = None if probability[0] is None else np.concatenate(probability)
    return Predicted(np.concatenate(labels), np.concatenate(groups), np.concatenate(decided), joined, sum(absent))


def _taken(rows: Predicted, codes: NDArray[np.int64]) -> Predicted:
    """The rows with their groups numbered anew, without those of code -1."""
    kept = codes >= 0
    probability = None if rows.probability is None else rows.probability[kept]
    return Predicted(rows.labels[kept], codes[kept].astype(np.int32), rows.decided[kept], probability, rows.absent)


def _tally(where: str, rows: Predicted, names: list[str], compared: int) -> Tally:
    taken = rows.groups, len(names)
    scores = None if rows.probability is None else Scores.of(rows.labels, rows.probability, *taken)
    return Tally(where, Counts.of(rows.labels, rows.decided, *taken), scores, names, compared)


def _save(
    folder: RunFolder,
    tallies: Sequence[Tally],
    found: Sequence[Finding],
    notes: Sequence[str],
    schema: Schema,
    options: AuditOptions,
) -> None:
    """One part: a row a site and, last, one for all of them; the groups of each; what was found; calibration curves."""
    schema.write(folder.path / SCHEMA_FILE)
    (column,) = schema.features
    groups_of = f" by {' & '.join(schema.sensitive)}" if schema.sensitive else ""
    rows, groups, against, curve, sites = [], [], list(found), pd.DataFrame(), []
    for tally in tallies:
        everywhere = tally.where == EVERYWHERE
        about = column.name if everywhere else f"{column.name} at {tally.where}"
        told = measured(
            PART, tally.counts, tally.scores, tally.names, tally.compared, options.metric, options.minimum_cell, about,
            remedy=REMEDY,
        )  # fmt: skip
        key: dict[str, Any] = {
            "dataset": f"{schema.target}{groups_of}",
            "split": tally.where,
            "method": column.name,
            "seed": 0,
        }
        row = {**key, **told.row, "usable": not any(finding.blocks for finding in told.found)}
        row["threshold"] = options.threshold
        if tally.compared < 2:
            row |= dict.fromkeys((f"{PART}_gap", f"{PART}_gap_low", f"{PART}_gap_high"), np.nan)
        rows.append(row)
        groups.append(told.groups.assign(**key))
        if everywhere:
            against, curve = [*told.found, *against], told.curve
        else:
            against += [one._replace(blocks=False) for one in told.found if one.about == about]
            negatives, positives = tally.counts.cells.sum(axis=(0, 2)).tolist()
            share = positives / (negatives + positives)
            sites.append({"site": tally.where, "rows": negatives + positives, "positive_share": share})
    folder.save(
        column.name,
        rows=pd.DataFrame(rows),
        groups=pd.concat(groups, ignore_index=True),
        others={
            name: table
            for name, table in {
                "findings": findings_table(against).assign(method=column.name),
                "calibration": curve.assign(method=column.name),
                "sites": pd.DataFrame(sites),
                "notes": pd.DataFrame({"note": list(notes)}),
                "facts": pd.DataFrame(_facts(schema, options).items(), columns=["name", "value"]),
            }.items()
            if len(table)
        },
    )


def _facts(schema: Schema, options: AuditOptions) -> dict[str, str]:
    (column,) = schema.features
    number = column.kind == "number"
    what = f"probabilities, yes above {options.threshold:g}" if number else f"decisions ({', '.join(column.values)})"
    return {
        "Target": f"{schema.target}; positive: {schema.positive}",
        "Predictions": f"{column.name}: {what}",
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
    if run is None:
        identity = json.dumps([arguments, list(sites)], sort_keys=True)
        name = re.sub(r"[^A-Za-z0-9]+", "-", schema.target).strip("-").lower()[:40] or "run"
        run = f"audit-{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    return JobSettings(
        run, "audit", tuple(sites), arguments, min_sites=min_sites, reply_timeout=reply_timeout, start_timeout=reply_timeout
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


def _received(reports: Mapping[str, Mapping[str, Any]], schema: Schema) -> tuple[list[Tally], list[Finding]]:
    """What the sites' reports add up to, and each by itself: what may be told has been decided there."""
    there = {site: report for site, report in reports.items() if report}
    silent = [site for site in reports if site not in there]
    if not there:
        raise ValueError(
            'No site told its counts: each must list "report" in tell of its policy (local/fedbilevel.toml in its kit).'
        )

    def tally(where: str, told: Sequence[Mapping[str, Any]]) -> Tally:
        return Tally(where, *received(told, schema.groups), len(schema.groups))

    alone = [tally(site, [report]) for site, report in there.items() if np.sum(report["decisions"])]
    tallies = [*(alone if len(there) > 1 else ()), tally(EVERYWHERE, [*there.values()])]
    cells = {site: np.sum(report["decisions"], axis=(0, 2)).tolist() for site, report in there.items()}
    found = findings.of_rows(cells, "site")
    for site, report in there.items():
        few = [name for name, hidden in zip(schema.groups, report["hidden"], strict=True) if hidden]
        if few:
            found.append(findings.hidden_at(site, few))
    if silent:
        sentence = (
            f'{", ".join(silent)} told nothing and is not counted: the policy there does not list "report" in tell, or its '
            "own log says why."
        )
        found.append(Finding("sites-silent", ", ".join(silent), sentence, blocks=False))
    return tallies, found
