"""What the columns of a table mean: the target, the sensitive groups, and how each other column becomes numbers.

A schema is a small text file (TOML) that the owners of several tables agree on.  Together with `Statistics` (counts, sums and
sums of squares of the number columns, added up over the sites) it fixes the encoding: no row leaves its site for that.

    schema = infer([open_table("site1.csv"), open_table("site2.csv")], target="income", sensitive="sex")
    schema.write("schema.toml"); schema = Schema.read("schema.toml")
    mine = site_statistics(schema, frame)                       # at every site, of its training rows
    encoder = Encoder.from_statistics(schema, combine([mine, theirs]))          # everywhere the same
    encoder.transform(frame), encoder.labels(frame), encoder.groups(frame)

docs/your-own-data.md explains the file.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fedbilevel import storage
from fedbilevel.tables.columns import listed
from fedbilevel.tables.decoding import open_bytes

FORMAT = 1
LARGEST_FILE = 1 << 24
LONGEST_LINE = 100
HEADING = """\
# What the columns of the table mean.  Edit this file and pass it on with --schema.
#   kind       "number", "category", "boolean" or "ignore"
#   missing    "flag" (a further column says that the cell was missing), "plain" (it does not), "refuse"
#   pooled     whether values that are not listed share one column, "(other)"; if not they are all zeros
#   positive   the class that counts as 1

"""

KINDS = ("number", "category", "boolean", "ignore")
MISSING_RULES = ("flag", "plain", "refuse")
MISSING_GROUP_RULES = ("leave out", "own")
MISSING_GROUP = "(missing)"
OTHER = "(other)"
MISSING = ("", "?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "None")
MOST_GROUPS = 50
MOST_CLASSES = 20


@dataclass(frozen=True)
class Column:
    """One column that is neither the target nor the site.

    Attributes:
        name: of the column.
        kind: "number" (standardised), "category" (one 0/1 column a value), "boolean" (one 0/1 column) or "ignore".
        values: of a category, in the order of their columns (texts, but for typed tables); of a boolean, the words for false
            and for true.
        pooled: of a category: whether rare values, and values first seen later, share a column "(other)".  Without it a value
            first seen later is all zeros.
        missing: "flag": one more column says that the cell was missing.  "plain": it does not.  "refuse": a missing cell is an
            error.  In the column's own place a missing cell is the mean (number), all zeros (category), a half (boolean).
        also_missing: cells of this column that mean missing, besides those of the schema.
        decimal: of a number: "." or ",".
        center: of a number: a rough middle.  Sums are taken around it, so that sums of squares keep their precision.
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

    def __post_init__(self) -> None:
        where = self.place
        _choice(f"{where}: kind", self.kind, KINDS)
        _choice(f"{where}: missing", self.missing, MISSING_RULES)
        _choice(f"{where}: decimal", self.decimal, (".", ","))
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


@dataclass(frozen=True)
class Schema:
    """The meaning of a table's columns.

    Attributes:
        target: the column to predict.
        classes: the values it can take, two or more; rows where it is missing are left out.
        positive: the class that counts as 1; all others are 0.
        sensitive: the columns that make the groups; several are joined ("Black & Female").
        groups: all groups, sorted.
        columns: the others, features and ignored ones.
        site: the column that names a row's site, if the table holds several.
        missing: cells that mean missing, in all columns.
        missing_group: rows with a missing sensitive cell: "leave out" of training and evaluation, or a group of their "own",
            "(missing)".
    """

    target: str
    classes: tuple[str, ...]
    positive: str
    sensitive: tuple[str, ...]
    groups: tuple[str, ...]
    columns: tuple[Column, ...]
    site: str | None = None
    missing: tuple[str, ...] = MISSING
    missing_group: str = "leave out"

    def __post_init__(self) -> None:
        _text_check("target", self.target)
        _texts("classes", self.classes)
        _texts("sensitive", self.sensitive)
        _texts("groups", self.groups)
        _texts("missing", self.missing)
        _choice("missing_group", self.missing_group, MISSING_GROUP_RULES)
        if self.site is not None:
            _text_check("site", self.site)
        if len(self.classes) < 2:
            raise ValueError(f"classes must list two values of {self.target!r} at least, not {listed(self.classes)}.")
        if self.positive not in self.classes:
            raise ValueError(f"positive = {self.positive!r} is not among the classes {listed(self.classes)}.")
        if not self.sensitive:
            raise ValueError("sensitive must name one column at least.")
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
    def negative(self) -> str:
        """What a prediction of 0 is called: the other class of two, else "not " and the positive one."""
        others = [value for value in self.classes if value != self.positive]
        return others[0] if len(others) == 1 else f"not {self.positive}"

    @property
    def features(self) -> tuple[Column, ...]:
        """The columns that are not ignored."""
        return tuple(column for column in self.columns if column.kind != "ignore")

    @property
    def numbers(self) -> tuple[Column, ...]:
        """The number columns: those that statistics are taken of."""
        return tuple(column for column in self.features if column.kind == "number")

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
        return HEADING + re.sub(r"\[\n((?:    .*,\n)+)\]", _short_list, storage.toml_text(document))

    def write(self, path: str | Path) -> Path:
        """Write the schema as TOML, whole or not at all."""
        try:
            storage.write(Path(path), self.text())
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror or error}.") from error
        return Path(path)

    @classmethod
    def read(cls, path: str | Path) -> Schema:
        """A schema from a TOML file; one sentence if there is something wrong with it."""
        with open_bytes(Path(path)) as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ValueError(f"{path} is larger than {LARGEST_FILE:,} bytes: no schema is; name the TOML file.")
        try:
            return cls.parse(content.decode("utf-8-sig"), str(path))
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text: a schema is a TOML file in UTF-8.") from None

    @classmethod
    def parse(cls, content: str, source: str = "The schema") -> Schema:
        """The schema in a text; ``source`` names it in messages."""
        try:
            document = storage.read_toml(content)
        except storage.Unreadable as error:
            raise ValueError(f"{source} is no valid TOML ({' '.join(str(error).split())[:200]}).") from None
        try:
            return _schema(document)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


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
    known = [field.name for field in fields(Schema) if field.name != "columns"]
    _known("", found, known)
    for needed in ("target", "classes", "positive", "sensitive", "groups"):
        if needed not in found:
            raise ValueError(f"{needed} is missing.")
    options = [field.name for field in fields(Column) if field.name != "name"]
    made = []
    for name, entry in columns.items():
        _known(f"column {name!r}: ", entry, options)
        if "kind" not in entry:
            raise ValueError(f"column {name!r}: kind is missing.")
        made.append(Column(name=name, **_tuples(entry)))
    return Schema(columns=tuple(made), **_tuples(found))


def _known(where: str, found: Iterable[str], known: Sequence[str]) -> None:
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
            raise ValueError(f"{where}{name!r} is unknown; {hint}")


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
