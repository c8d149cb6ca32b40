"""How a site's own table is brought into the common language: a TOML file that `fedbilevel schema` drafts and people edit.

    format = 1
    checked = ["age"]                      # columns whose differences somebody has looked at: they stop nothing any more

    [sites.south]                          # the file south.csv; or, with --site, the rows of south.  [all] is for every site
    rename = {gender = "sex"}              # own name = common name
    leave_out = ["ward"]                   # own names

    [sites.south.columns.outcome]          # common names from here on
    values = {yes = "1", no = "0"}         # own value = common value
    [sites.south.columns.creatinine]
    missing = ["-999"]                     # codes for missing
    factor = 0.0113                        # units: factor * value + offset
    [sites.south.columns.admitted]
    dates = "dmy"                          # 31/12/2024; "mdy": 12/31/2024

A mapping changes cells before anything else looks at them, so a schema, a model and a page speak the common language only.
Between real sites it does not travel: each site keeps its own, beside its table.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping as Entries
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

from fedbilevel import storage
from fedbilevel.hints import hint
from fedbilevel.tables import documents
from fedbilevel.tables.columns import day_of, listed, text_of, texts
from fedbilevel.tables.reading import Table, site_names

FORMAT = 1
ORDERS = ("dmy", "mdy")
HEADING = """\
# How each site's table is brought into the common language.  Edit this file and pass it on with --mapping.
#   rename      own name of a column = common name         leave_out   columns that not every site has
#   values      own value = common value                   missing     codes that mean missing
#   factor, offset   units: factor * value + offset        dates       "dmy" or "mdy", how dates are written
#   checked     columns whose differences you have looked at and found right: they stop nothing any more
"""
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ColumnRules:
    """What is done to the cells of a column; see above."""

    values: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    factor: float = 1.0
    offset: float = 0.0
    dates: str = ""

    def __post_init__(self) -> None:
        if self.dates not in ("", *ORDERS):
            raise ValueError(f"dates = {self.dates!r} is unknown; write 'dmy' or 'mdy'.")
        for name in ("factor", "offset"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError(f"{name} must be a number, not {number!r}.")
        if self.factor == 0:
            raise ValueError("factor must not be 0: every value would be the same.")

    def changed(self, cells: pd.Series[Any]) -> pd.Series[Any]:
        codes, distinct = pd.factorize(cells.astype(object))
        replaced = pd.array([*map(self._cell, distinct), None], dtype=object)
        return pd.Series(replaced[codes], index=cells.index, dtype=object, name=cells.name)

    def _cell(self, value: Any) -> Any:
        text = text_of(value, _NOTHING)
        if text is None or text in self.missing:
            return None
        if text in self.values:
            return self.values[text]
        if self.dates:
            day = day_of(text, self.dates)
            return value if math.isnan(day) else (date(1970, 1, 1) + timedelta(math.floor(day))).isoformat()
        if (self.factor, self.offset) == (1.0, 0.0):
            return value
        try:
            number = float(text.replace(",", ".") if "." not in text else text)
        except ValueError:
            return value
        return repr(self.factor * number + self.offset)

    def described(self) -> list[str]:
        """What it does, one line a change."""
        changes = [f"{own!r} is {common!r}" for own, common in self.values.items()]
        changes += [f"{listed(self.missing)} is missing"] if self.missing else []
        if (self.factor, self.offset) != (1.0, 0.0):
            changes.append(f"times {self.factor:g}" + (f", plus {self.offset:g}" if self.offset else ""))
        return changes + ([f"dates are written {self.dates}"] if self.dates else [])


@dataclass(frozen=True)
class SiteRules:
    """What is done to a site's table."""

    rename: dict[str, str] = field(default_factory=dict)
    leave_out: tuple[str, ...] = ()
    columns: dict[str, ColumnRules] = field(default_factory=dict)

    def changed(self, frame: pd.DataFrame) -> pd.DataFrame:
        there = {name: rules.changed(frame[name]) for name, rules in self.columns.items() if name in frame}
        return frame.assign(**there)


@dataclass(frozen=True)
class Mapping:
    """The file: rules for ``every`` site, rules for single ``sites``, and the columns that were ``checked``."""

    every: SiteRules = field(default_factory=SiteRules)
    sites: dict[str, SiteRules] = field(default_factory=dict)
    checked: tuple[str, ...] = ()

    def applied(self, tables: Sequence[Table], site: str | None = None) -> list[Table]:
        """The tables in the common language.  ``site``: the column that says whose a row is, where a table holds several."""
        if site is not None:
            return [self._by_row(table, site) for table in tables]
        names = site_names(tables)
        strange = [name for name in self.sites if name not in names]
        if strange:
            near = hint(strange[0], names)
            raise ValueError(f"The mapping has a section for the site {strange[0]!r}, which is none of them; {near}")
        return [self.of(table, name if name in self.sites else None) for table, name in zip(tables, names, strict=True)]

    def alone(self, table: Table) -> Table:
        """The only table at hand, whose site is called as its file, in the common language."""
        name = table.path.stem
        if self.sites and name not in self.sites:
            raise ValueError(
                f"The mapping has rules for {listed([*self.sites])}, and none for {name!r}, as {table.path} is called: add "
                f"[sites.{name}], or write what holds for every file into [all]."
            )
        return self.of(table, name if self.sites else None)

    def of(self, table: Table, name: str | None, *, partly: bool = False) -> Table:
        """The table of the site ``name`` in the common language; None: by what holds for every site.  ``partly``: it may lack
        columns that the mapping names."""
        own = SiteRules() if name is None else self.sites[name]
        return _with_rules(table, (self.every, own), lambda frame: own.changed(self.every.changed(frame)), partly)

    def _by_row(self, table: Table, site: str) -> Table:
        for name, rules in self.sites.items():
            if rules.rename or rules.leave_out:
                raise ValueError(
                    f"The mapping renames or leaves out columns of the site {name!r}, but all sites share one file: "
                    "do that in [all]."
                )

        def change(frame: pd.DataFrame) -> pd.DataFrame:
            frame = self.every.changed(frame)
            if site not in frame:
                return frame
            owners = texts(frame[site], _NOTHING)
            for name, rules in self.sites.items():
                here = owners == name
                if here.any():
                    part = rules.changed(frame[here])
                    frame = frame.assign(
                        **{column: frame[column].astype(object) for column in rules.columns if column in frame}
                    )
                    for column in rules.columns:
                        if column in frame:
                            frame.loc[here, column] = part[column]
            return frame

        return _with_rules(table, (self.every,), change)

    def frame(self) -> pd.DataFrame:
        """What is done, for people: one row a change."""
        rows: list[tuple[str, str, str]] = []
        for site, rules in {"all": self.every, **self.sites}.items():
            rows += [(site, common, f"called {own!r} there") for own, common in rules.rename.items()]
            rows += [(site, own, "left out") for own in rules.leave_out]
            rows += [(site, name, change) for name, column in rules.columns.items() for change in column.described()]
        rows += [("all", name, "differences were looked at and found right") for name in self.checked]
        return pd.DataFrame(rows, columns=["site", "column", "change"])

    def text(self) -> str:
        return draft(self, {})

    @classmethod
    def read(cls, path: str | Path) -> Mapping:
        """A mapping from a TOML file; one sentence if there is something wrong with it."""
        return documents.read(path, "mapping", _mapping)


def draft(mapping: Mapping, comments: Entries[tuple[str, str], Sequence[str]]) -> str:
    """The file as text.  ``comments``: lines to stand above the part of a (site, column); "" for the site as a whole."""
    lines = [HEADING, f"format = {FORMAT}", f"checked = {toml_list(mapping.checked)}"]
    sites = {"": mapping.every, **mapping.sites}
    sites |= {site: SiteRules() for site, _ in comments if site not in sites}
    for site, rules in sites.items():
        head = f"sites.{toml_key(site)}" if site else "all"
        about = {column: comments[place, column] for place, column in comments if place == site}
        if rules == SiteRules() and not about:
            continue
        whole = about.pop("", ())
        if whole or rules.rename or rules.leave_out:
            lines += ["", *(f"# {line}" for line in whole), f"[{head}]"]
        lines += [f"rename = {toml_table(rules.rename)}"] if rules.rename else []
        lines += [f"leave_out = {toml_list(rules.leave_out)}"] if rules.leave_out else []
        for column in dict.fromkeys([*rules.columns, *about]):
            lines += ["", *(f"# {line}" for line in about.get(column, ()))]
            if column not in rules.columns:
                continue
            rule = rules.columns[column]
            lines.append(f"[{head}.columns.{toml_key(column)}]")
            lines += [f"values = {toml_table(rule.values)}"] if rule.values else []
            lines += [f"missing = {toml_list(rule.missing)}"] if rule.missing else []
            lines += [f"factor = {float(rule.factor)!r}"] if rule.factor != 1 else []
            lines += [f"offset = {float(rule.offset)!r}"] if rule.offset != 0 else []
            lines += [f"dates = {_text(rule.dates)}"] if rule.dates else []
    return "\n".join(lines) + "\n"


def _with_rules(table: Table, rules: Sequence[SiteRules], change: Any, partly: bool = False) -> Table:
    names = {own: common for one in rules for own, common in one.rename.items()}
    left_out = {own for one in rules for own in one.leave_out}
    mapped = table.mapped(names, left_out, change)
    if not partly:
        table.check_columns([*names, *left_out])
        mapped.check_columns([column for one in rules for column in one.columns])
    return mapped


def _mapping(found: dict[str, Any]) -> Mapping:
    form = found.pop("format", None)
    if form != FORMAT:
        raise ValueError(f"format = {form!r}, but this version of fedbilevel reads format {FORMAT}; draft it anew.")
    documents.check_names("", found, ("checked", "all", "sites"))
    sites = _entries("sites", found.get("sites", {}))
    return Mapping(
        _site("all", found.get("all", {})),
        {name: _site(f"sites.{name}", entry) for name, entry in sites.items()},
        _texts("checked", found.get("checked", [])),
    )


def _site(where: str, entry: Any) -> SiteRules:
    documents.check_names(f"[{where}] ", _entries(where, entry), [one.name for one in fields(SiteRules)])
    columns = _entries(f"{where}.columns", entry.get("columns", {}))
    return SiteRules(
        _words(f"{where}.rename", entry.get("rename", {})),
        _texts(f"{where}.leave_out", entry.get("leave_out", [])),
        {name: _column(f"{where}.columns.{name}", rules) for name, rules in columns.items()},
    )


def _column(where: str, entry: Any) -> ColumnRules:
    documents.check_names(f"[{where}] ", _entries(where, entry), [one.name for one in fields(ColumnRules)])
    given = dict(entry)
    given["values"] = _words(f"{where}.values", given.get("values", {}))
    given["missing"] = _texts(f"{where}.missing", given.get("missing", []))
    try:
        return ColumnRules(**given)
    except ValueError as error:
        raise ValueError(f"[{where}] {error}") from None


def _entries(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"[{where}] must be a table.")
    return value


def _texts(where: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{where} must be a list of texts.")
    return tuple(_as_text(where, value) for value in values)


def _words(where: str, values: Any) -> dict[str, str]:
    return {own: _as_text(where, common) for own, common in _entries(where, values).items()}


def _as_text(where: str, value: Any) -> str:
    """Numbers and truth values may stand without quotes: they mean the cell that reads so."""
    text = text_of(value, _NOTHING) if isinstance(value, str | int | float) else None
    if text is None:
        raise ValueError(f"{where} must hold texts, not {value!r}.")
    return text


def _text(value: str) -> str:
    return json.dumps(storage.plain(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def toml_list(values: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def toml_table(values: Entries[str, str]) -> str:
    return "{" + ", ".join(f"{toml_key(own)} = {_text(common)}" for own, common in values.items()) + "}"
