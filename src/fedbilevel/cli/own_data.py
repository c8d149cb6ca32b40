"""``fedbilevel schema``, and what it shares with the other commands that read your own tables."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fedbilevel.cli import options
from fedbilevel.cli.terminal import records, tell

if TYPE_CHECKING:
    import pandas as pd

    from fedbilevel.runs import Run
    from fedbilevel.tables.agreement import Difference
    from fedbilevel.tables.mapping import Mapping
    from fedbilevel.tables.reading import Table
    from fedbilevel.tables.schema import Schema


GAPS = {
    "equal_opportunity": "gap of recall",
    "equalized_odds": "gap of recall, false pos.",
    "demographic_parity": "gap of selected",
    "calibration": "gap of calibration",
    "mean_error": "gap of mean errors",
    "mean_prediction": "gap of mean predictions",
}


def opened(files: Sequence[Path], delimiter: str | None, encoding: str | None) -> list[Table]:
    from fedbilevel.tables.reading import open_table

    meant = {"\\t": "\t", "tab": "\t"}.get(delimiter, delimiter) if delimiter is not None else None
    return [open_table(file, delimiter=meant, encoding=encoding) for file in files]


def encoding_notes(tables: Sequence[Table]) -> list[str]:
    """Files that were taken for something else than UTF-8 are named, so that nobody wonders about odd letters."""
    return [
        f"{table.path} is not UTF-8: read as {table.encoding} (--encoding chooses)."
        for table in tables
        if table.encoding not in ("", "utf-8")
    ]


MOST_BLOCKS = 12
"""Groups times classes that the terminal shows one by one."""
LAYERS = 4
"""How often a draft is applied and looked at again: a column that got its name may then turn out to be spelled differently."""


class Meant(NamedTuple):
    """Tables in the common language, what their columns mean, the mapping, and sentences about what is odd."""

    tables: list[Table]
    schema: Schema
    mapping: Mapping | None
    warnings: list[str]
    found: list[Difference]


def understood(
    tables: Sequence[Table], target: str | None, sensitive: list[str] | None, site: str | None, positive: str | None,
    keep_sensitive: bool = False, rare: int = 10, mapping: Mapping | None = None, schema: Schema | None = None,
    otherwise: str = "", settled: bool = True, task: str | None = None, grouped: bool = True,
) -> Meant:  # fmt: skip
    """What the columns are taken for, by a ``schema`` if there is one; sites that contradict each other are refused, unless
    that is still to be ``settled``.  ``otherwise``: what could have been named instead of target and sensitive columns;
    ``grouped``: there must be sensitive ones."""
    from fedbilevel.tables.agreement import differences, stop
    from fedbilevel.tables.profile import look
    from fedbilevel.tables.schema import MISSING, check_roles, schema_of

    if schema is not None:
        target, sensitive, site, positive = schema.target, list(schema.sensitive), schema.site, schema.positive
    if target is None:
        raise ValueError(f"--target is missing: name the column to predict{otherwise}.")
    sensitive = sensitive or []
    if grouped and not sensitive:
        raise ValueError(f"--sensitive is missing: name the column that makes the groups{otherwise}.")
    changed = list(tables) if mapping is None else mapping.applied(tables, site)
    check_roles(changed, target, sensitive, site)
    missing = MISSING if schema is None else schema.missing
    seen = look(changed, sensitive, frozenset(missing), site, None if schema is None else schema.needed())
    found = differences(seen, target, sensitive, positive, () if mapping is None else mapping.checked, site)
    if settled:
        stop(found)
    elif any(one.stops for one in found):
        return Meant(changed, schema, mapping, [], found)  # type: ignore[arg-type]
    meant = schema or schema_of(seen, target, sensitive, site, positive, keep_sensitive, missing, rare, task=task)
    used = {column.name for column in meant.features}
    odd = [f"{one.sentence}." for one in found if one.column in used]
    advice = ["`fedbilevel schema FILES ... --propose mapping.toml` drafts a file that settles this."] if odd else []
    return Meant(changed, meant, mapping, odd + advice, found)


def mapping_at(file: Path | None) -> Mapping | None:
    from fedbilevel.tables.mapping import Mapping

    return None if file is None else Mapping.read(file)


def schema_frame(schema: Schema) -> pd.DataFrame:
    """A schema as a table for the terminal."""
    import pandas as pd

    classes = f"{len(schema.labels)} classes: {shortened(schema.labels)}"
    if schema.regression:
        classes = "a number (regression); --task classification makes classes of it"
    if schema.positive is not None:
        classes = f"{schema.positive} = 1, {schema.labels[0]} = 0"
    rows = [(schema.target, "target", classes, "left out", "")]
    groups = f"{len(schema.groups)} groups: {shortened(schema.groups)}"
    rule = "left out" if schema.missing_group == "leave out" else "own group"
    if schema.sensitive:
        rows.append((" & ".join(schema.sensitive), "sensitive", groups, rule, ""))
    if schema.site is not None:
        rows.append((schema.site, "site", "", "refused", ""))
    for column in schema.columns:
        ignored = column.kind == "ignore"
        if ignored and column.name in schema.sensitive:
            continue
        values = shortened(column.values) if column.kind in ("category", "boolean") else ""
        rows.append((column.name, column.kind, values, "" if ignored else column.missing, column.note))
    return pd.DataFrame(rows, columns=["column", "taken as", "values", "missing", "note"])


def shortened(values: Sequence[str], limit: int = 3) -> str:
    some = ", ".join(value if len(value) <= 20 else value[:19] + "…" for value in values[:limit])
    return some + (f" and {len(values) - limit} more" if len(values) > limit else "")


def verdict(run: Run) -> list[str]:
    """What the numbers mean, in sentences."""
    from fedbilevel.report.brief import brief_of

    told = brief_of(run)
    return [] if told is None else told.verdict


def further(run: Run) -> dict[str, Any]:
    """What a fit found, in sentences too, and its calibration curves, for ``--json``."""
    names = ("findings", "calibration")
    tables = {name: records(run.others[name]) if name in run.others else [] for name in names}
    return {"verdict": verdict(run), **tables}


def measure_tables(run: Run, part: str) -> list[tuple[str, pd.DataFrame]]:
    """The first table of a fit: every measure with its interval, one column a model; for everybody, then by group.  Of several
    sensitive columns, a second one: the gap by each."""
    import pandas as pd

    from fedbilevel.jobs.measuring import MEASURES, MEASURES_OF_NUMBERS

    number = run.configuration.get("task") == "regression"
    known = MEASURES_OF_NUMBERS if number else MEASURES
    rows = run.rows.set_index("method")
    groups = run.groups[run.groups["part"] == part]
    for column, form in (("by", "{} ({})"), ("label", "{}, class {}")):
        groups = groups.assign(whole=groups["group"])
        if column in groups and (column == "label" or groups[column].nunique() > 1):
            pairs = zip(groups["group"], groups[column].fillna(""), strict=True)
            groups = groups.assign(group=[form.format(name, of) if of else name for name, of in pairs])
    groups = groups.set_index(["group", "method"])
    listed: list[dict[str, str]] = []

    def add(group: str, measure: str, values: dict[str, str], difference: str = "") -> None:
        if not any(values.values()):
            return
        first = not listed or listed[-1]["_"] != group
        listed.append(
            {"_": group, "group": group if first else "", "measure": measure, **values, "difference": difference}
        )

    def each(frame: pd.DataFrame, name: str) -> dict[str, str]:
        return {str(method): _with_ends(row, name) for method, row in frame.iterrows()}

    settings = {str(method): str(setting) for method, setting in rows["setting"].items()}
    if any(settings.values()):
        add("all", "setting", settings)
    if not number and (rows["threshold"] != 0.5).any():
        told = {str(method): value for method, value in rows["threshold"].items()}
        add(
            "all",
            "threshold",
            {name: value if isinstance(value, str) else f"{value:.3g}" for name, value in told.items()},
        )
    for name, word in {"gap": GAPS[run.configuration["metric"]], **known}.items():
        compared = [row for _, row in rows.iterrows() if f"{name}_difference" in row]
        difference = _with_ends(compared[-1], f"{name}_difference", "+.3f") if compared else ""
        add("all", word, each(rows, f"{part}_{name}"), difference)
    own = ("auc", "precision", "true_positive_rate", "false_positive_rate", "selection_rate", "calibration")
    wholes: set[str] = set()
    long = "label" in groups and groups.index.get_level_values("group").nunique() > MOST_BLOCKS
    for group in dict.fromkeys(groups.index.get_level_values("group")):
        here = groups.loc[group]
        of_class = "label" in here
        counts = {str(method): f"{row['count']:,}" for method, row in here.iterrows()}
        if of_class and (whole := str(here["whole"].iloc[0])) not in wholes:
            wholes.add(whole)  # what is the group's and not a class's own
            add(whole, "rows", counts)
            for name, word in known.items():
                if name not in own:
                    add(whole, word, each(here, name))
        if of_class and long:
            continue
        if not number:
            counts = {str(method): f"{row['count']:,}, {row['positives']:,}" for method, row in here.iterrows()}
        add(str(group), "rows" if number else "rows, of the class" if of_class else "rows, positives", counts)
        for name, word in known.items():
            if not of_class or name in own:
                add(str(group), word, each(here, name))
    table = pd.DataFrame(listed).drop(columns="_")
    table = table[(table.drop(columns=["group", "measure"]) != "").any(axis=1)]
    where = {"test": "Test rows", "train": "Training rows of the sites"}[part]
    where = "Predictions" if run.command == "audit" else where
    where += ", with 95 % intervals" + ("; groups.csv and the page show every class" if long else "")
    tables = [(where, table.loc[:, (table != "").any()])]
    if "gaps" in run.others:
        gaps = run.others["gaps"][run.others["gaps"]["part"] == part]
        shown = {
            "by": gaps["by"],
            "method": gaps["method"],
            "gap": [_with_ends(row, "gap") for _, row in gaps.iterrows()],
        }
        tables.append((f"The {GAPS[run.configuration['metric']]} by sensitive column", pd.DataFrame(shown)))
    return tables


def _with_ends(row: pd.Series[Any], name: str, form: str = ".3f") -> str:
    def short(value: float) -> str:
        return f"{value:{form}}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:{form}}"

    value, low, high = (float(row.get(f"{name}{end}", math.nan)) for end in ("", "_low", "_high"))
    return "" if math.isnan(value) else short(value) + ("" if math.isnan(low) else f" [{short(low)}, {short(high)}]")


def schema(
    files: options.Files,
    target: options.Target = None,
    sensitive: options.Sensitive = None,
    site: options.SiteColumn = None,
    positive: options.Positive = None,
    task: options.Task = None,
    keep_sensitive: options.KeepSensitive = False,
    rare: Annotated[int, typer.Option(help="Values of a category with fewer rows are pooled.", min=1)] = 10,
    mapping: options.MappingFile = None,
    propose: Annotated[
        Path | None, typer.Option(help="Where sites differ, draft a mapping to this TOML file, to be edited.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the schema to this TOML file, to be edited.")] = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """How the columns of tables are read, and whether the sites agree.

    Infers types, categories, the positive class and the groups from the files.  Edit the TOML file to change them, and pass
    it to fit with --schema.  Stops if labels, groups or values of different sites contradict each other; --propose drafts
    a mapping that reconciles them.
    """
    tables = opened(files, delimiter, encoding)
    asked = (target, sensitive, site, positive, keep_sensitive, rare)
    meant = understood(tables, *asked, mapping_at(mapping), settled=propose is None, task=task)
    shown: list[str | tuple[str, pd.DataFrame]] = []
    if propose is not None:
        from fedbilevel.tables import agreement, documents

        found, base, proposed = list(meant.found), meant.mapping, meant.mapping
        for _ in range(LAYERS):
            known, (proposed, text) = proposed, agreement.propose(found, base)
            if proposed == known:
                break
            meant = understood(tables, *asked, proposed, settled=False, task=task)
            found += [one for one in meant.found if one not in found]
        documents.write(propose, text)
        left = [one.sentence for one in meant.found if one.stops]
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise ValueError(
                f"{propose} is written, but this is for you to decide: {left[0]}{more}; edit it, and try again."
            )
        shown = [_differences(found), f"Edit {propose}, and pass it on with --mapping."] if found else []
        shown = shown or [f"The sites agree: {propose} changes nothing."]
        meant = meant._replace(warnings=[])
    if out is not None:
        meant.schema.write(out)
    edit = [] if out is None else [f"Edit {out} to change this, and pass it on with --schema."]
    columns = f"Columns of {len(files)} file(s), as they would be used", schema_frame(meant.schema)
    told = {**asdict(meant.schema), "warnings": meant.warnings}
    tell(as_json, quiet, told, [columns, *encoding_notes(tables), *meant.warnings, *shown, *edit])


def _differences(found: Sequence[Difference]) -> tuple[str, pd.DataFrame]:
    import pandas as pd

    rows = [
        (one.column, one.sentence, "mapped" if one.rules else "for you to decide" if one.hints else "said only")
        for one in found
    ]
    return "What differs between the sites", pd.DataFrame(rows, columns=["column", "difference", "in the draft"])


def kept_schema(file: Path, given: dict[str, Any], positive: str | None, keep_sensitive: bool = False) -> Schema:
    """The schema in ``file``; options (``given`` by name) that say something else are refused."""
    from fedbilevel.tables.schema import Schema

    schema = Schema.read(file)
    for option, here in given.items():
        there = getattr(schema, option)
        if here and here != there:
            raise ValueError(f"--{option} says {here!r} but the schema {file} says {there!r}; leave the option out.")
    if keep_sensitive:
        raise ValueError(f"--keep-sensitive: change kind of the column in the schema {file} instead.")
    return schema if positive is None else replace(schema, positive=positive)


def folder_for(command: str, schema: Schema) -> Path:
    """Where a run goes that was not told where."""
    return Path("runs") / f"{command}-{re.sub(r'[^A-Za-z0-9]+', '-', schema.target).strip('-') or 'table'}"


def suited(schema: Schema, metric: str | None, model: str | None, loss: str) -> dict[str, Any]:
    """Options of a fit that depend on what is predicted, with their defaults."""
    number = schema.regression
    kind = {"task": "regression", "loss": loss} if number else {}
    if not number and loss != "squared":
        raise ValueError(f"--loss {loss} is for a number, but {schema.target!r} has classes; leave it out.")
    usual = ("mean_error", "linear") if number else ("equal_opportunity", "logistic")
    return {"metric": metric or usual[0], "model": model or usual[1], **kind}
