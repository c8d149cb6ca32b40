"""What a data set is, the files inside the package, and the two tables of the paper: Adult and German Credit."""

from __future__ import annotations

import io
import lzma
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import pandas as pd

from fedbilevel.datasets import encode
from fedbilevel.tables.columns import JOIN, group_series

# Of the original, uncompressed files.
SHA256 = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    "german.data": "b21f3d81db8071257d5ff1deaeba1fd4303b62712e6fcc9715c7a86202cb5871",
    "employment.csv": "91311183865b3eedaab6f300d521a0af24908522c55847d1276ed104b68477e1",
    "processed.cleveland.data": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "processed.hungarian.data": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "processed.switzerland.data": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "processed.va.data": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}

TRAIN_ROWS = 32_561  # rows of adult.data, which come first; those of adult.test follow
COLUMNS = [
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship", "race", "sex",
    "capital_gain", "capital_loss", "hours_per_week", "native_country", "income",
]  # fmt: skip
NUMBERS = {"age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"}
ADULT_TARGET = "income"

# German Credit column by column in file order: name and, for coded columns, what each code stands for. None: a number.
CODE_BOOK: dict[str, dict[str, str] | None] = {
    "checking_account": {
        "A11": "overdrawn", "A12": "0 to 199 DM", "A13": "200 DM or more, or salary paid in for a year",
        "A14": "none",
    },
    "duration_months": None,
    "credit_history": {
        "A30": "no credits, or all repaid on time", "A31": "all credits here repaid on time",
        "A32": "current credits repaid on time so far", "A33": "late payments in the past",
        "A34": "critical account, or credits elsewhere",
    },
    "purpose": {
        "A40": "new car", "A41": "used car", "A42": "furniture or equipment", "A43": "radio or television",
        "A44": "household appliances", "A45": "repairs", "A46": "education", "A47": "vacation",
        "A48": "retraining", "A49": "business", "A410": "other",
    },
    "amount": None,
    "savings": {
        "A61": "below 100 DM", "A62": "100 to 499 DM", "A63": "500 to 999 DM", "A64": "1000 DM or more",
        "A65": "none or unknown",
    },
    "employed_since": {
        "A71": "unemployed", "A72": "under 1 year", "A73": "1 to 3 years", "A74": "4 to 6 years",
        "A75": "7 years or more",
    },
    "instalment_rate": None,
    "personal_status": {
        "A91": "male, divorced or separated", "A92": "female, divorced, separated or married",
        "A93": "male, single", "A94": "male, married or widowed", "A95": "female, single",
    },
    "other_parties": {"A101": "none", "A102": "co-applicant", "A103": "guarantor"},
    "residence_since": None,
    "property": {
        "A121": "real estate", "A122": "savings agreement or life insurance", "A123": "car or other",
        "A124": "none or unknown",
    },
    "age": None,
    "other_instalments": {"A141": "bank", "A142": "stores", "A143": "none"},
    "housing": {"A151": "rented", "A152": "owned", "A153": "rent-free"},
    "credits_here": None,
    "job": {
        "A171": "unemployed, or unskilled and not resident", "A172": "unskilled, resident",
        "A173": "skilled employee or official", "A174": "manager, self-employed, highly qualified or officer",
    },
    "dependants": None,
    "telephone": {"A191": "no", "A192": "yes"},
    "foreign_worker": {"A201": "yes", "A202": "no"},
    "risk": {"1": "good", "2": "bad"},
}  # fmt: skip
CREDIT_TARGET = "risk"

_ADULT = (
    "Adult (Becker & Kohavi, 1996), UCI Machine Learning Repository, https://doi.org/10.24432/C5XW20, CC BY 4.0. "
    "Extracted from the 1994 census of the United States; 1 = more than 50,000 dollars a year."
)
_CREDIT = (
    "Statlog (German Credit Data) (Hofmann, 1994), UCI Machine Learning Repository, https://doi.org/10.24432/C5NC77, "
    "CC BY 4.0. 1 = bad risk."
)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A table with sensitive groups, and with sites where it has them.

    Attributes:
        name: short name, for titles and file names.
        frame: the whole readable table: features, sensitive columns and target.
        X: the features; the sensitive columns are left out unless they were asked for.
        y: the target: 0 and 1, or numbers where `positive` is None.
        sensitive: the sensitive column, or a table of them if several were asked for.
        target_name: the column of `frame` that `y` was made of.
        positive: what `y` = 1 means; None where the target is a number.
        encoding: "clean" (raw typed columns) or "paper" (numbers, as preprocessed for the paper).
        description: source, licence and what was done to the data.
        sites: who holds each row, by nature: a hospital, a year; None where nothing says so (see `partition`).
    """

    name: str
    frame: pd.DataFrame
    X: pd.DataFrame
    y: pd.Series[Any]
    sensitive: pd.Series[Any] | pd.DataFrame
    target_name: str
    positive: str | None
    encoding: str
    description: str
    sites: pd.Series[Any] | None = None

    @property
    def groups(self) -> pd.Series[Any]:
        """The sensitive group of each row as one column of text; several columns joined ("Black & Female")."""
        return group_series(self.sensitive, "sensitive").astype(str)

    @property
    def sensitive_name(self) -> str:
        """The sensitive column's name, or several joined."""
        columns = [self.sensitive.name] if isinstance(self.sensitive, pd.Series) else self.sensitive.columns
        return JOIN.join(map(str, columns))

    def __repr__(self) -> str:
        rows, columns = self.X.shape
        sites = "" if self.sites is None else f", sites={self.sites.nunique()}"
        return (
            f"Dataset({self.name!r}, encoding={self.encoding!r}, rows={rows}, columns={columns}, "
            f"target={self.target_name!r}, groups={self.groups.nunique()}{sites})"
        )


def load_adult(
    sensitive: str | list[str] = "race", encoding: str = "clean", *, keep_sensitive: bool = False
) -> Dataset:
    """The Adult data.

    Args:
        sensitive: "race" (5 groups), "sex" (2), or a list of columns, which gives a table of groups.
        encoding: "clean": all 48,842 rows in file order (adult.data, then adult.test), typed columns, "?" written as
            the category "Unknown"; see `encode.clean_transformer`. "paper": the 32,561 rows of adult.data as numbers
            the way the paper's preprocessing gives them, 220 columns for race.
        keep_sensitive: keep the sensitive column(s) among the features.

    Returns:
        A `Dataset`.

    Examples:
        >>> data = load_adult("sex")
        >>> data.X.shape, int(data.y.sum()), data.groups.value_counts().to_dict()
        ((48842, 13), 11687, {'Male': 32650, 'Female': 16192})
    """
    paper = _is_paper(encoding)
    frame = read_adult()
    if paper:
        frame = frame.iloc[:TRAIN_ROWS].copy()
        how = (
            'Paper encoding: adult.data only, "?" kept as a category, text one-hot, columns divided by a power of ten; '
            "with the sensitive column dropped a slip of positions one-hot encodes capital_gain too."
        )
    else:
        for column in frame.columns.difference(list(NUMBERS)):
            if "?" in frame[column].cat.categories:
                frame[column] = frame[column].cat.rename_categories({"?": "Unknown"})
        how = 'Clean encoding: both files, typed columns, "?" written as "Unknown".'
    data = divided("adult", frame, ADULT_TARGET, ">50K", sensitive, keep_sensitive, encoding, f"{_ADULT} {how}")
    if not paper:
        return data
    categorical = set(COLUMNS) - NUMBERS - {ADULT_TARGET}
    hot = encode.positional_one_hot(data.X, original=COLUMNS, categorical=categorical)
    return replace(data, X=encode.power_of_ten(hot))


def read_adult() -> pd.DataFrame:
    """Both original files as one typed table, values as printed there (with "?" for unknown)."""
    # adult.test opens with a line that is no row, and ends every label with a full stop.
    _, test = read_file("adult.test").split(b"\n", 1)
    rows = read_file("adult.data").rstrip() + b"\n" + test.rstrip().replace(b"K.\n", b"K\n").removesuffix(b".")
    types = {column: "int64" if column in NUMBERS else "category" for column in COLUMNS}
    return pd.read_csv(io.BytesIO(rows), names=COLUMNS, dtype=types, skipinitialspace=True, na_filter=False)


def load_credit(
    sensitive: str | list[str] = "personal_status", encoding: str = "clean", *, keep_sensitive: bool = False
) -> Dataset:
    """The German Credit data, codes replaced by words.

    Args:
        sensitive: "personal_status" (status and sex together: 4 groups), "sex" (2, read off the status; the status then
            leaves the features with it), or a list of columns, which gives a table of groups.
        encoding: "clean": raw typed columns; see `encode.clean_transformer`. "paper": each code replaced by its last
            digit and every column divided by a power of ten, 19 columns.
        keep_sensitive: keep the sensitive column(s) among the features.

    Returns:
        A `Dataset`.

    Examples:
        >>> data = load_credit()
        >>> data.X.shape, int(data.y.sum()), sorted(data.groups.value_counts())
        ((1000, 19), 300, [50, 92, 310, 548])
    """
    paper = _is_paper(encoding)
    types = {column: "int64" if book is None else "str" for column, book in CODE_BOOK.items()}
    file = io.BytesIO(read_file("german.data"))
    codes = pd.read_csv(file, sep=" ", names=list(CODE_BOOK), dtype=types, na_filter=False)
    how = "Clean encoding: typed columns, codes replaced by words."
    if paper:
        how = "Paper encoding: each code replaced by its last digit, columns divided by a power of ten."
    frame, about = _readable(codes), f"{_CREDIT} {how}"
    data = divided("credit", frame, CREDIT_TARGET, "bad", sensitive, keep_sensitive, encoding, about)
    left_out = ["sex"]
    if not keep_sensitive and "sex" in ([sensitive] if isinstance(sensitive, str) else sensitive):
        left_out.append("personal_status")
    X = data.X.drop(columns=left_out, errors="ignore")
    if not paper:
        return replace(data, X=X)
    # "A410" becomes 0 like "A40": the cited preprocessing merges these two purposes, and so does this copy of it.
    digits = {
        name: codes[name] if CODE_BOOK[name] is None else codes[name].str[-1].astype("int64") for name in map(str, X)
    }
    return replace(data, X=encode.power_of_ten(pd.DataFrame(digits)))


def _readable(codes: pd.DataFrame) -> pd.DataFrame:
    columns = {}
    for name, book in CODE_BOOK.items():
        if book is None:
            columns[name] = codes[name]
            continue
        used = [code for code in book if (codes[name] == code).any()]
        words = pd.CategoricalDtype([book[code] for code in used])
        columns[name] = codes[name].map(book).astype(words)
    status = columns["personal_status"].astype(str)
    columns["sex"] = status.str.split(",").str[0].astype("category")
    return pd.DataFrame(columns)


def divided(
    name: str, frame: pd.DataFrame, target: str, positive: str | None, sensitive: str | list[str], keep_sensitive: bool,
    encoding: str, description: str, left_out: Sequence[str] = (),
) -> Dataset:  # fmt: skip
    """A readable table divided into features, target and groups; ``left_out``: columns that are no features."""
    columns = [sensitive] if isinstance(sensitive, str) else list(sensitive)
    categorical = [c for c in frame.columns if c != target and not pd.api.types.is_numeric_dtype(frame[c])]
    for column in columns or [""]:
        if column not in categorical:
            raise ValueError(f"sensitive={sensitive!r}: choose one or several of {', '.join(categorical)}.")
    if len(set(columns)) < len(columns):
        raise ValueError(f"sensitive={sensitive!r} names a column twice.")
    features = frame.drop(columns=[target, *left_out, *([] if keep_sensitive else columns)])
    groups = frame[columns[0]] if isinstance(sensitive, str) else frame[columns]
    y = frame[target].astype("float64") if positive is None else (frame[target] == positive).astype("int64")
    return Dataset(name, frame, features, y, groups, target, positive, encoding, description)


def _is_paper(encoding: str) -> bool:
    """Whether the paper's encoding is asked for."""
    if encoding not in ("clean", "paper"):
        raise ValueError(f"encoding={encoding!r} is unknown; choose 'clean' or 'paper'.")
    return encoding == "paper"


def shipped_bytes(names: Sequence[str]) -> int:
    """How many bytes these files have as they ship, compressed."""
    return sum(len(_compressed(name)) for name in names)


def read_file(name: str) -> bytes:
    """The original bytes of one of the files inside the package, which are compressed there."""
    return lzma.decompress(_compressed(name))


def _compressed(name: str) -> bytes:
    return resources.files("fedbilevel.datasets").joinpath("data", f"{name}.xz").read_bytes()
