"""What the columns of a table mean: the target, the sensitive groups, and how each other column becomes numbers.

A schema is a small text file (TOML) that the owners of several tables agree on.  Together with `Statistics` (counts, sums and
sums of squares of the number columns, added up over the sites) it fixes the encoding: no row leaves its site for that.

    schema = infer([open_table("site1.csv"), open_table("site2.csv")], target="income", sensitive="sex")
    schema.write("schema.toml"); schema = Schema.read("schema.toml")
    mine = site_statistics(schema, frame)                       # at every site, of its training rows
    encoder = Encoder.from_statistics(schema, combine([mine, theirs]))          # everywhere the same
    encoder.transform(frame), encoder.labels(frame), encoder.groups(frame)

docs/reference/tables.md explains the file.

`infer` makes a schema from the tables themselves: types, categories, the positive class, the groups.  Its rules, in this order,
over all tables together; missing cells count for nothing:

- no value, or one value only: ignored.
- all cells are dates: date, days since 1970; ignored where nothing tells day from month.  Times of day: ignored.
- all cells are words for true and false: boolean.
- all cells are numbers (or all but a few different words, a tenth of the cells at most, which then mean missing): number;
  ignored if it counts the rows (1, 2, 3, ...) or is named like an identifier and differs in every row.
- text that differs in nearly every row (20 rows at least), or is longer than 200 characters: an identifier or free text,
  ignored.
- other text: category.  Values of fewer than ``rare`` rows, and all beyond the ``most`` frequent, are pooled as "(other)":
  little can be learned from a handful of rows, and the list, which travels, must not point at single people.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel import storage
from fedbilevel.tables import documents
from fedbilevel.tables.agreement import FAR, MOST_CLASSES, differences, middle, stop
from fedbilevel.tables.columns import EVERYBODY, JOIN, day_of, is_number_column, listed
from fedbilevel.tables.profile import LONGEST_VALUE, MOST_GROUPS, MOST_ODD, MOST_ODD_SHARE, Profile, Seen, look, merged
from fedbilevel.tables.reading import Table

FORMAT = 1
LONGEST_LINE = 100
HEADING = """\
# What the columns of the table mean.  Edit this file and pass it on with --schema.
#   kind       "number", "category", "boolean", "date" (days) or "ignore"
#   missing    "flag" (a further column says that the cell was missing), "plain" (it does not), "refuse"
#   pooled     whether values that are not listed share one column, "(other)"; if not they are all zeros
#   positive   the class that counts as 1; without it, each of more than two classes is told from the others
#   task       "regression" where the target is a number; then there are no classes, and center is a rough middle of it

"""

KINDS = ("number", "category", "boolean", "date", "ignore")
ORDERS = ("ymd", "dmy", "mdy")
MISSING_RULES = ("flag", "plain", "refuse")
TASKS = ("classification", "regression")
MISSING_GROUP_RULES = ("leave out", "own")
OTHER = "(other)"
MISSING = ("", "?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "None")
RARE = 10
MOST = 100
ENOUGH_ROWS = 20
WORDS = (("false", "true"), ("no", "yes"), ("f", "t"), ("n", "y"))
CODED = ({"0", "1"}, {"-1", "1"}, *({false, true} for false, true in WORDS))

_IDENTIFIER = re.compile(r"(.*[ _.-])?(id|uuid|guid|key|index|nr|no|rownames|row|column_1)", re.IGNORECASE)


@dataclass(frozen=True)
class Column:
    """One column that is neither the target nor the site.

    Attributes:
        name: of the column.
        kind: "number" (standardised), "category" (one 0/1 column a value), "boolean" (one 0/1 column), "date" (days since 1970,
            standardised) or "ignore".
        values: of a category, in the order of their columns (texts, but for typed tables); of a boolean, the words for false
            and for true.
        pooled: of a category: whether rare values, and values first seen later, share a column "(other)".  Without it a value
            first seen later is all zeros.
        missing: "flag": one more column says that the cell was missing.  "plain": it does not.  "refuse": a missing cell is an
            error.  In the column's own place a missing cell is the mean (number), all zeros (category), a half (boolean).
        also_missing: cells of this column that mean missing, besides those of the schema.
        decimal: of a number: "." or ",".
        order: of a date that does not begin with its year: "dmy" or "mdy".
        center: of a number or date: a rough middle.  Sums are taken around it, so that sums of squares keep their precision.
        note: for the reader: why the column was taken as it was.
    """

    name: str
    kind: str = "number"
    values: tuple[Any, ...] = ()
    pooled: bool = False
    missing: str = "plain"
    also_missing: tuple[str, ...] = ()
    decimal: str = "."
    center: float = 0.0
    note: str = ""
    order: str = "ymd"

    def __post_init__(self) -> None:
        where = self.place
        _choice(f"{where}: kind", self.kind, KINDS)
        _choice(f"{where}: missing", self.missing, MISSING_RULES)
        _choice(f"{where}: decimal", self.decimal, (".", ","))
        _choice(f"{where}: order", self.order, ORDERS)
        _texts(f"{where}: also_missing", self.also_missing)
        if not isinstance(self.pooled, bool):
            raise ValueError(f"{where}: pooled must be true or false, not {self.pooled!r}.")
        number = isinstance(self.center, int | float) and not isinstance(self.center, bool)
        if not number or not math.isfinite(self.center):
            raise ValueError(f"{where}: center must be a number, not {self.center!r}.")
        if not isinstance(self.note, str):
            raise ValueError(f"{where}: note must be text, not {self.note!r}.")
        if self.kind == "category" and not self.values and not self.pooled:
            raise ValueError(f"{where}: a category needs values, the list of those it can take.")
        if self.kind == "boolean" and len(self.values) != 2:
            raise ValueError(f"{where}: a boolean needs values, the words for false and for true.")

    @property
    def place(self) -> str:
        """What the column is called in messages about the schema."""
        return f"columns.{self.name if self.name.isprintable() else repr(self.name)}"

    @property
    def scaled(self) -> bool:
        """Whether it becomes one standardised number."""
        return self.kind in ("number", "date")

    @property
    def features(self) -> list[str]:
        """Names of the numeric columns it becomes."""
        if self.kind == "ignore":
            return []
        names = [self.name]
        if self.kind == "boolean":
            names = [f"{self.name}={self.values[1]}"]
        if self.kind == "category":
            names = [f"{self.name}={value}" for value in self.values]
            names += [f"{self.name}={OTHER}"] if self.pooled else []
        return [*names, f"{self.name} missing"] if self.missing == "flag" else names


class Margin(NamedTuple):
    """A sensitive column by itself: its ``name`` and values, and the place of every group's value among these."""

    name: str
    values: tuple[str, ...]
    places: np.ndarray


@dataclass(frozen=True)
class Schema:
    """The meaning of a table's columns.

    Attributes:
        target: the column to predict.
        classes: the values it can take, two or more; rows where it is missing are left out.
        positive: the class that counts as 1; all others are 0.  None: each of more than two is told from the others.
        sensitive: the columns that make the groups; several are joined ("Black & Female").
        groups: all groups, sorted.
        columns: the others, features and ignored ones.
        site: the column that names a row's site, if the table holds several.
        missing: cells that mean missing, in all columns.
        missing_group: rows with a missing sensitive cell: "leave out" of training and evaluation, or a group of their "own",
            "(missing)".
        task: "classification", or "regression": the target is a number, and there are no classes.
        center, decimal: of such a number, as of a `Column`.
    """

    target: str
    classes: tuple[str, ...]
    positive: str | None
    sensitive: tuple[str, ...]
    groups: tuple[str, ...]
    columns: tuple[Column, ...]
    site: str | None = None
    missing: tuple[str, ...] = MISSING
    missing_group: str = "leave out"
    task: str = "classification"
    center: float = 0.0
    decimal: str = "."

    def __post_init__(self) -> None:
        _text_check("target", self.target)
        _choice("task", self.task, TASKS)
        Column(self.target, center=self.center, decimal=self.decimal)  # checks them
        _texts("classes", self.classes)
        _texts("sensitive", self.sensitive)
        _texts("groups", self.groups)
        _texts("missing", self.missing)
        _choice("missing_group", self.missing_group, MISSING_GROUP_RULES)
        if self.site is not None:
            _text_check("site", self.site)
        if self.regression:
            if self.classes or self.positive is not None:
                raise ValueError('task = "regression" predicts a number: leave classes and positive out.')
        elif len(self.classes) < 2:
            raise ValueError(f"classes must list two values of {self.target!r} at least, not {listed(self.classes)}.")
        if self.positive is None and len(self.classes) == 2:
            raise ValueError(f"positive is missing: name one of the two classes {listed(self.classes)}.")
        if self.positive is not None and self.positive not in self.classes:
            raise ValueError(f"positive = {self.positive!r} is not among the classes {listed(self.classes)}.")
        if not self.sensitive and self.groups != (EVERYBODY,):
            raise ValueError("sensitive must name one column at least.")
        if len(self.sensitive) > 1:
            wrong = [group for group in self.groups if len(group.split(JOIN)) != len(self.sensitive)]
            if wrong:
                raise ValueError(
                    f"The group {wrong[0]!r} must name one value of each of {listed(self.sensitive)}, joined by {JOIN!r}: "
                    f"values that hold {JOIN.strip()!r} themselves must be renamed first."
                )
        if not 1 <= len(self.groups) <= MOST_GROUPS:
            raise ValueError(f"groups must list 1 to {MOST_GROUPS} groups, not {len(self.groups)}.")
        for column in self.columns:
            _text_check("the name of a column", column.name)
            _texts(f"{column.place}: values", column.values)
        names = [column.name for column in self.columns]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"The column {name!r} is there twice.")
        if self.target in self.sensitive:
            raise ValueError(f"The target {self.target!r} cannot be a sensitive column as well.")
        for role, taken in (("target", self.target), ("site", self.site)):
            if taken in names:
                raise ValueError(f"The column {taken!r} is the {role}: it cannot be a feature as well.")
        if not self.features:
            raise ValueError("No column is left as a feature: every one is ignored; see the notes in the schema.")

    @property
    def labels(self) -> tuple[str, ...]:
        """What is told apart, in the order of its numbers: the classes; or what is not positive (the other class of two, else
        "not " and the positive one) and what is."""
        if self.positive is None:
            return self.classes
        others = [value for value in self.classes if value != self.positive]
        return (others[0] if len(others) == 1 else f"not {self.positive}"), self.positive

    @property
    def told_apart(self) -> str:
        """What is predicted, in words."""
        if self.regression:
            return "a number"
        return f"classes: {', '.join(self.labels)}" if self.positive is None else f"positive: {self.positive}"

    @property
    def regression(self) -> bool:
        return self.task == "regression"

    @property
    def margins(self) -> list[Margin]:
        """Of several sensitive columns, each by itself; of one, nothing."""
        if len(self.sensitive) < 2:
            return []
        made = []
        for values, name in zip(
            zip(*(group.split(JOIN) for group in self.groups), strict=True), self.sensitive, strict=True
        ):
            known = tuple(sorted(set(values)))
            made.append(Margin(name, known, np.array([known.index(value) for value in values])))
        return made

    @property
    def features(self) -> tuple[Column, ...]:
        """The columns that are not ignored."""
        return tuple(column for column in self.columns if column.kind != "ignore")

    @property
    def numbers(self) -> tuple[Column, ...]:
        """The number and date columns: those that statistics are taken of."""
        return tuple(column for column in self.features if column.scaled)

    @property
    def centers(self) -> np.ndarray:
        """Of the number columns and, where it is one, of the target: what their sums are taken around."""
        target = [self.center] if self.regression else []
        return np.array([*(column.center for column in self.numbers), *target], np.float64)

    @property
    def feature_names(self) -> list[str]:
        """Names of the encoded matrix's columns; the constant 1 is last."""
        return [name for column in self.features for name in column.features] + ["1"]

    def needed(self, *, labelled: bool = True) -> list[str]:
        """Columns a table must have: to train (``labelled``), or to predict."""
        names = [column.name for column in self.features]
        if labelled:
            names += [self.target, *(name for name in self.sensitive if name not in names)]
            names += [] if self.site is None or self.site in names else [self.site]
        return names

    def text(self) -> str:
        """The schema as TOML, for people to read and edit: what is usual is left out, short lists stand on one line."""
        usual = asdict(Column("usual"))

        def entry(column: Column) -> dict[str, Any]:
            always = ("kind",) if column.kind == "ignore" else ("kind", "missing")
            given = {name: value for name, value in asdict(column).items() if name in always or value != usual[name]}
            return {name: value for name, value in given.items() if name != "name"}

        columns = {column.name: entry(column) for column in self.columns}
        document = {"format": FORMAT} | asdict(self) | {"columns": columns}
        for name in ("classes",) if self.regression else ("task", "center", "decimal"):
            document.pop(name)
        return HEADING + re.sub(r"\[\n((?:    .*,\n)+)\]", _short_list, storage.toml_text(document))

    @property
    def digest(self) -> str:
        """SHA-256 of what the schema says: not of how a file looks, of notes, or of which column names the site."""

        def said(thing: Any, *without: str) -> dict[str, Any]:
            values = {option.name: (getattr(thing, option.name), option.default) for option in fields(thing)}
            return {name: value for name, (value, usual) in values.items() if name not in without and value != usual}

        document = {**said(self, "columns", "site"), "columns": [said(column, "note") for column in self.columns]}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def write(self, path: str | Path) -> Path:
        """Write the schema as TOML, whole or not at all."""
        return documents.write(path, self.text())

    @classmethod
    def read(cls, path: str | Path) -> Schema:
        """A schema from a TOML file; one sentence if there is something wrong with it."""
        return documents.read(path, "schema", _schema)

    @classmethod
    def parse(cls, content: str, source: str = "The schema") -> Schema:
        """The schema in a text; ``source`` names it in messages."""
        return documents.parse(content, source, _schema)


def _short_list(found: re.Match[str]) -> str:
    items = " ".join(item[4:] for item in found[1].split("\n")).rstrip(" ,")
    line = f"[{items}]"
    return line if len(line) <= LONGEST_LINE else found[0]


def _schema(found: dict[str, Any]) -> Schema:
    form = found.pop("format", None)
    if form != FORMAT:
        raise ValueError(
            f"format = {form!r}, but this version of fedbilevel reads format {FORMAT}; make the schema anew."
        )
    columns = found.pop("columns", {})
    if not isinstance(columns, dict) or not all(isinstance(entry, dict) for entry in columns.values()):
        raise ValueError("[columns.NAME] must be a table for every column.")
    known = [option.name for option in fields(Schema) if option.name != "columns"]
    documents.check_names("", found, known)
    usual = {"positive": None} | ({"classes": ()} if found.get("task") == "regression" else {})
    found = usual | found
    for needed in ("target", "classes", "sensitive", "groups"):
        if needed not in found:
            raise ValueError(f"{needed} is missing.")
    options = [option.name for option in fields(Column) if option.name != "name"]
    made = []
    for name, entry in columns.items():
        documents.check_names(f"column {name!r}: ", entry, options)
        if "kind" not in entry:
            raise ValueError(f"column {name!r}: kind is missing.")
        made.append(Column(name=name, **_tuples(entry)))
    return Schema(columns=tuple(made), **_tuples(found))


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} = {value!r} is unknown; choose one of {', '.join(map(repr, allowed))}.")


def _text_check(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be text, not {value!r}.")


def _texts(name: str, values: Any) -> None:
    if not isinstance(values, tuple) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be a list of texts.")
    repeated = len(values) - len(set(values))
    if repeated:
        twice = next(value for i, value in enumerate(values) if value in values[:i])
        raise ValueError(f"{name} lists {twice!r} twice.")


def infer(
    tables: Sequence[Table | pd.DataFrame],
    *,
    target: str,
    sensitive: str | Sequence[str],
    site: str | None = None,
    positive: str | None = None,
    keep_sensitive: bool = False,
    missing: Sequence[str] = MISSING,
    rare: int = RARE,
    most: int = MOST,
    checked: Iterable[str] = (),
    task: str | None = None,
) -> Schema:
    """Read all tables once, chunk by chunk, and say what their columns are.

    Sites that contradict each other are refused; see `fedbilevel.tables.agreement`.

    Args:
        tables: one per site (or one): opened files or pandas tables, with the same columns.
        target: the column to predict.
        sensitive: the column(s) that make the groups.
        site: the column that names a row's site, if any.
        positive: the class that counts as 1.  None: 1, true or yes if the target is coded so, else the rarer of two classes; of
            more than two none is, and each is told from the others.
        keep_sensitive: whether the sensitive columns are features as well.
        missing: cells that mean missing.
        rare: values of a category with fewer rows are pooled.
        most: values of a category at most; the rest is pooled.
        checked: columns whose differences between sites are right as they are.
        task: "classification" or "regression".  None: regression if the target holds numbers, more than 20 different ones.

    Returns:
        The schema, which can be written to a file and edited.

    Raises:
        ValueError: sites contradict each other, or a column that was named is not there.
    """
    columns = [sensitive] if isinstance(sensitive, str) else list(sensitive)
    opened = [Table.of(table) if isinstance(table, pd.DataFrame) else table for table in tables]
    check_roles(opened, target, columns, site)
    seen = look(opened, columns, frozenset(missing), site)
    stop(differences(seen, target, columns, positive, checked, site))
    return schema_of(seen, target, columns, site, positive, keep_sensitive, missing, rare, most, task)


def misfits(schema: Schema, table: Table) -> list[str]:
    """What is odd about one site's table in the light of a schema that others made; what it refuses is refused elsewhere."""
    missing = frozenset(schema.missing)
    seen = look([table], schema.sensitive, missing, only=schema.needed())
    own = {name: profiles[0] for name, profiles in seen.profiles.items()}
    said = []
    wanted = schema.positive
    if wanted is not None and own[schema.target].present and not own[schema.target].counts[wanted]:
        said.append(f"The target {schema.target!r} has no row with {schema.positive!r} here.")
    for column in schema.features:
        profile = own[column.name]
        listed_rows = sum(profile.counts[value] for value in column.values)
        if profile.present == 0:
            said.append(f"The column {column.name!r} is empty here.")
        elif column.kind == "category" and 2 * listed_rows < profile.present:
            said.append(f"The column {column.name!r} holds mostly values that the schema does not list.")
        elif column.kind == "number" and profile.present >= ENOUGH_ROWS and column.center:
            low, median, high = middle(profile)
            if not low <= column.center <= high and not 1 / FAR < median / column.center < FAR:
                said.append(
                    f"The column {column.name!r} has another scale here: its median is {median:.4g}, in the schema about "
                    f"{column.center:.4g}; perhaps another unit."
                )
    odd = differences(seen, schema.target, schema.sensitive, schema.positive)
    return said + [f"{one.sentence}." for one in odd if one.column in schema.needed(labelled=False)]


def check_roles(tables: Sequence[Table], target: str, sensitive: Sequence[str], site: str | None) -> None:
    """The columns that people name must be there, at one site at least."""
    roles = [target, *sensitive] + ([] if site is None else [site])
    for name in roles:
        if roles.count(name) > 1:
            raise ValueError(f"The column {name!r} is named twice among target, sensitive columns and site.")
    if not tables:
        raise ValueError("There are no tables: name one file at least.")
    for name in roles:
        if name == site or not any(name in table.columns for table in tables):
            for table in tables:
                table.check_columns([name])


def schema_of(
    seen: Seen, target: str, sensitive: Sequence[str], site: str | None = None, positive: str | None = None,
    keep_sensitive: bool = False, missing: Sequence[str] = MISSING, rare: int = RARE, most: int = MOST,
    task: str | None = None,
) -> Schema:  # fmt: skip
    """What the columns are, from what was seen; see `infer`."""
    wanted = target_of(target, merged(seen.profiles[target]), positive, task)
    made = []
    for name, profiles in seen.profiles.items():
        if name in (target, site):
            continue
        if name in seen.unread:
            made.append(Column(name, "ignore", note=f"holds {seen.unread[name][:60]}, which is not read"))
            continue
        column = column_of(name, profiles, rare=rare, most=most)
        if name in sensitive and not keep_sensitive:
            column = Column(name, "ignore", column.values, note="sensitive, and so no feature")
        made.append(column)
    groups = tuple(sorted(seen.groups)) if sensitive else (EVERYBODY,)
    if not groups:
        raise ValueError(f"The sensitive column {listed(sensitive)} has no values in rows of these tables.")
    return Schema(
        target, sensitive=tuple(sensitive), groups=groups, columns=tuple(made), site=site,
        missing=tuple(missing), **wanted,
    )  # fmt: skip


def target_of(target: str, profile: Profile, positive: str | None, task: str | None) -> dict[str, Any]:
    """What is predicted: classes, or a number."""
    _choice("--task", task or TASKS[0], TASKS)
    if profile.present == 0:
        raise ValueError(f"The target {target!r} is missing in every row.")
    many = bool(profile.uncounted) or profile.distinct > MOST_CLASSES
    if task == "regression" or (task is None and positive is None and many):
        number = _number(target, profile, [])
        if number is not None and not number.also_missing:
            if positive is not None:
                raise ValueError(
                    f"--positive {positive!r} makes two classes of {target!r}: leave it out, or --task regression."
                )
            return {
                "classes": (), "positive": None, "task": "regression", "center": number.center, "decimal": number.decimal,
            }  # fmt: skip
        if task == "regression":
            odd = next(iter(profile.odd), "text")
            raise ValueError(
                f"--task regression needs numbers, but the target {target!r} holds {odd!r}: mend it or leave it out."
            )
    classes, chosen = classes_of(target, profile, positive)
    return {"classes": classes, "positive": chosen}


def classes_of(target: str, profile: Profile, positive: str | None) -> tuple[tuple[str, ...], str | None]:
    """All classes, sorted, and the positive one of two."""
    if profile.present == 0:
        raise ValueError(f"The target {target!r} is missing in every row.")
    if profile.uncounted or profile.distinct > MOST_CLASSES:
        raise ValueError(
            f"The target {target!r} has more than {MOST_CLASSES} values ({listed(sorted(profile.counts), 3)}): it must be a "
            "class or a number; name another column, or cut its values into classes first."
        )
    classes = tuple(sorted(profile.counts))
    if len(classes) == 1:
        raise ValueError(f"The target {target!r} is {classes[0]!r} in every row: there is nothing to learn.")
    if positive is not None:
        if positive not in classes:
            raise ValueError(f"--positive {positive!r} is no value of {target!r}, which has {listed(classes)}.")
        return classes, positive
    if len(classes) > 2:
        return classes, None
    if {value.lower() for value in classes} in CODED:
        return classes, max(classes, key=str.lower)  # 1, true, yes, t and y come last
    return classes, min(classes, key=lambda value: (profile.counts[value], value))


def learned_columns(frame: pd.DataFrame, *, named: bool, rare: int = RARE, most: int = MOST) -> list[Column]:
    """What the columns of a table in memory are.  Numbers are numbers, but for whole ones that differ in every row and are
    ``named`` like an identifier; all else is taken as in a file."""
    made = []
    for name in frame.columns:
        values, rule = frame[name], "flag" if frame[name].isna().any() else "plain"
        if not is_number_column(values):
            profile = Profile()
            profile.add(values, frozenset(MISSING))
            said = isinstance(values.dtype, pd.CategoricalDtype)
            made.append(column_of(name, [profile], rare=rare, most=most, category=said))
        elif named and _IDENTIFIER.fullmatch(name) and len(values) >= ENOUGH_ROWS and _numbers_rows(values):
            made.append(Column(name, "ignore", note="an identifier: it names the rows"))
        elif named and values.isna().all():
            made.append(Column(name, "ignore", note="no values"))
        else:
            made.append(Column(name, missing=rule))
    return made


def _numbers_rows(values: pd.Series[Any]) -> bool:
    numbers = values.dropna().to_numpy(np.float64)
    return bool((numbers == np.floor(numbers)).all()) and len(np.unique(numbers)) >= 0.9 * len(numbers)


def column_of(name: str, profiles: list[Profile], *, rare: int, most: int, category: bool = False) -> Column:
    """What a column is, by its cells; ``category``: its owner says that they name kinds, be they digits or dates."""
    profile = merged(profiles)
    rule = "flag" if profile.missing else "plain"
    if profile.present == 0:
        return Column(name, "ignore", note="no values")
    if profile.distinct == 1 and not profile.uncounted:
        return Column(name, "ignore", note="one value only")
    if profile.dates == profile.present and not category:
        return _date(name, profile, rule)
    words = {value.lower(): value for value in profile.counts}
    for false, true in WORDS:
        if set(words) == {false, true} and profile.distinct == 2 and not profile.uncounted:
            return Column(name, "boolean", (words[false], words[true]), missing=rule)
    number = None if category else _number(name, profile, profiles)
    if number is not None:
        return number
    if profile.longest > LONGEST_VALUE:
        return Column(name, "ignore", note=f"free text (cells of more than {LONGEST_VALUE} characters)")
    if profile.present >= ENOUGH_ROWS and all(one.all_different for one in profiles if one.present):
        return Column(name, "ignore", note="an identifier: nearly every row has a value of its own")
    frequent = [value for value, count in profile.counts.most_common(most) if count >= rare]
    if not frequent:
        return Column(name, "ignore", note=f"no value has {rare} rows")
    pooled = profile.distinct - len(frequent)
    many = "more than " if profile.uncounted else ""
    note = f"{many}{pooled:,} rare value(s) pooled" if pooled else ""
    return Column(name, "category", tuple(sorted(frequent)), bool(pooled), rule, note=note)


def _date(name: str, profile: Profile, rule: str) -> Column:
    if "time" in profile.orders:
        return Column(name, "ignore", note="times of day are not used; add the hour as a number")
    order = next((one for one in ("dmy", "mdy") if one in profile.orders), "ymd")
    if {"dmy", "mdy"} <= profile.orders or ("?" in profile.orders and order == "ymd"):
        asked = 'day or month first? write kind = "date" and order = "dmy" or "mdy"'
        return Column(name, "ignore", note=f"dates: {asked}")
    days = np.array([day_of(value, order) for value in profile.counts])
    if np.isnan(days).any():
        return Column(name, "ignore", note="dates, some of which the calendar does not have")
    center = _rounded(float(days.mean()), float(days.std()))
    return Column(name, "date", missing=rule, order=order, center=center, note="as days since 1970")


def _number(name: str, profile: Profile, profiles: list[Profile]) -> Column | None:
    """A number column, or None if too many cells are no numbers; without ``profiles`` of the sites nothing is an identifier."""
    decimal = "."
    numeric = profile.numeric
    if profile.comma and profile.thousands_like < profile.comma:
        decimal, numeric = ",", numeric + profile.comma
    odd = profile.present - numeric
    if odd and (odd > MOST_ODD_SHARE * profile.present or not 0 < len(profile.odd) <= MOST_ODD):
        return None
    if odd and decimal == "." and profile.comma:
        return None
    # Numbers written with a comma were not summed: their center stays 0, which costs precision only.
    mean, spread = 0.0, 1.0
    if profile.numeric and decimal == ".":
        mean, spread = profile.mean, float(np.sqrt(profile.squares / profile.numeric))
    if profiles and not odd and profile.present >= ENOUGH_ROWS and profile.whole and decimal == ".":
        # In one file the rows of several sites may be numbered through.
        through = all(one.rising for one in profiles) and profile.high - profile.low == profile.numeric - 1
        counted = through or all(one.consecutive for one in profiles if one.present > 1)
        named = _IDENTIFIER.fullmatch(name) is not None and all(one.all_different for one in profiles if one.present)
        if counted or named:
            return Column(name, "ignore", note="an identifier: it counts or names the rows")
    words = tuple(sorted(profile.odd)) if odd else ()
    note = f"{listed(words)} ({odd:,} cell(s)) read as missing" if words else ""
    rule = "flag" if profile.missing or odd else "plain"
    return Column(
        name, "number", missing=rule, also_missing=words, decimal=decimal, center=_rounded(mean, spread), note=note
    )  # fmt: skip


def _rounded(mean: float, spread: float) -> float:
    """The mean, no more precise than its spread allows: a rough middle that says little about any row."""
    if not np.isfinite(mean) or not spread > 0:
        return float(f"{mean:.3g}") if np.isfinite(mean) else 0.0
    digits = int(np.clip(-np.floor(np.log10(spread)), -300, 300))
    return round(mean, digits) + 0.0  # no negative zero
