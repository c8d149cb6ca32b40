"""German Credit (Statlog), shipped with the package: 1,000 loans of a German bank, was the risk bad?"""

from __future__ import annotations

import io

import pandas as pd

from fedbilevel.datasets import encode
from fedbilevel.datasets.dataset import Dataset, is_paper, read_file, shipped

# Column by column in file order: name and, for coded columns, what each code stands for. None: a number.
CODE_BOOK: dict[str, dict[str, str] | None] = {
    "checking_account": {
        "A11": "overdrawn",
        "A12": "0 to 199 DM",
        "A13": "200 DM or more, or salary paid in for a year",
        "A14": "none",
    },
    "duration_months": None,
    "credit_history": {
        "A30": "no credits, or all repaid on time",
        "A31": "all credits here repaid on time",
        "A32": "current credits repaid on time so far",
        "A33": "late payments in the past",
        "A34": "critical account, or credits elsewhere",
    },
    "purpose": {
        "A40": "new car",
        "A41": "used car",
        "A42": "furniture or equipment",
        "A43": "radio or television",
        "A44": "household appliances",
        "A45": "repairs",
        "A46": "education",
        "A47": "vacation",
        "A48": "retraining",
        "A49": "business",
        "A410": "other",
    },
    "amount": None,
    "savings": {
        "A61": "below 100 DM",
        "A62": "100 to 499 DM",
        "A63": "500 to 999 DM",
        "A64": "1000 DM or more",
        "A65": "none or unknown",
    },
    "employed_since": {
        "A71": "unemployed",
        "A72": "under 1 year",
        "A73": "1 to 3 years",
        "A74": "4 to 6 years",
        "A75": "7 years or more",
    },
    "instalment_rate": None,
    "personal_status": {
        "A91": "male, divorced or separated",
        "A92": "female, divorced, separated or married",
        "A93": "male, single",
        "A94": "male, married or widowed",
        "A95": "female, single",
    },
    "other_parties": {"A101": "none", "A102": "co-applicant", "A103": "guarantor"},
    "residence_since": None,
    "property": {
        "A121": "real estate",
        "A122": "savings agreement or life insurance",
        "A123": "car or other",
        "A124": "none or unknown",
    },
    "age": None,
    "other_instalments": {"A141": "bank", "A142": "stores", "A143": "none"},
    "housing": {"A151": "rented", "A152": "owned", "A153": "rent-free"},
    "credits_here": None,
    "job": {
        "A171": "unemployed, or unskilled and not resident",
        "A172": "unskilled, resident",
        "A173": "skilled employee or official",
        "A174": "manager, self-employed, highly qualified or officer",
    },
    "dependants": None,
    "telephone": {"A191": "no", "A192": "yes"},
    "foreign_worker": {"A201": "yes", "A202": "no"},
    "risk": {"1": "good", "2": "bad"},
}
TARGET = "risk"

_SOURCE = (
    "Statlog (German Credit Data) (Hofmann, 1994), UCI Machine Learning Repository, https://doi.org/10.24432/C5NC77, "
    "CC BY 4.0. 1 = bad risk."
)


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

    >>> data = load_credit()
    >>> data.X.shape, int(data.y.sum()), sorted(data.groups.value_counts())
    ((1000, 19), 300, [50, 92, 310, 548])
    """
    paper = is_paper(encoding)
    codes = read_credit()
    how = "Clean encoding: typed columns, codes replaced by words."
    if paper:
        how = "Paper encoding: each code replaced by its last digit, columns divided by a power of ten."

    def encoded(X: pd.DataFrame) -> pd.DataFrame:
        asked = [sensitive] if isinstance(sensitive, str) else sensitive
        if "sex" in asked and not keep_sensitive:
            X = X[[column for column in X.columns if column != "personal_status"]]
        return encode.power_of_ten(_last_digits(codes)[list(X.columns)]) if paper else X

    return shipped(
        "credit", _readable(codes), target=TARGET, positive="bad", sensitive=sensitive, keep_sensitive=keep_sensitive,
        encoding=encoding, encode=encoded, description=f"{_SOURCE} {how}", never=("sex",),
    )  # fmt: skip


def read_credit() -> pd.DataFrame:
    """The original file as a table: codes as text, numbers as integers."""
    types = {column: "int64" if book is None else "str" for column, book in CODE_BOOK.items()}
    return pd.read_csv(
        io.BytesIO(read_file("german.data")),
        sep=" ",
        names=list(CODE_BOOK),
        dtype=types,
        na_filter=False,
    )


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


def _last_digits(codes: pd.DataFrame) -> pd.DataFrame:
    # "A410" becomes 0 like "A40": the cited preprocessing merges these two purposes, and so does this copy of it.
    return pd.DataFrame(
        {name: codes[name] if book is None else codes[name].str[-1].astype("int64") for name, book in CODE_BOOK.items()}
    )
