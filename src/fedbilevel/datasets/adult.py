"""Adult (census income), shipped with the package: 48,842 people, does the yearly income exceed 50,000 dollars?"""

from __future__ import annotations

import io

import pandas as pd

from fedbilevel.datasets import encode
from fedbilevel.datasets.dataset import Dataset, is_paper, read_file, shipped

TRAIN_ROWS = 32_561  # rows of adult.data, which come first; those of adult.test follow
COLUMNS = [
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship", "race", "sex",
    "capital_gain", "capital_loss", "hours_per_week", "native_country", "income",
]  # fmt: skip
NUMBERS = {"age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"}
TARGET = "income"

_SOURCE = (
    "Adult (Becker & Kohavi, 1996), UCI Machine Learning Repository, https://doi.org/10.24432/C5XW20, CC BY 4.0. "
    "Extracted from the 1994 census of the United States; 1 = more than 50,000 dollars a year."
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

    >>> data = load_adult("sex")
    >>> data.X.shape, int(data.y.sum()), data.groups.value_counts().to_dict()
    ((48842, 13), 11687, {'Male': 32650, 'Female': 16192})
    """
    paper = is_paper(encoding)
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
    categorical = set(COLUMNS) - NUMBERS - {TARGET}

    def encoded(X: pd.DataFrame) -> pd.DataFrame:
        if not paper:
            return X
        return encode.power_of_ten(encode.positional_one_hot(X, original=COLUMNS, categorical=categorical))

    return shipped(
        "adult", frame, target=TARGET, positive=">50K", sensitive=sensitive, keep_sensitive=keep_sensitive,
        encoding=encoding, encode=encoded, description=f"{_SOURCE} {how}",
    )  # fmt: skip


def read_adult() -> pd.DataFrame:
    """Both original files as one typed table, values as printed there (with "?" for unknown)."""
    # adult.test opens with a line that is no row, and ends every label with a full stop.
    _, test = read_file("adult.test").split(b"\n", 1)
    rows = read_file("adult.data").rstrip() + b"\n" + test.rstrip().replace(b"K.\n", b"K\n").removesuffix(b".")
    types = {column: "int64" if column in NUMBERS else "category" for column in COLUMNS}
    return pd.read_csv(
        io.BytesIO(rows),
        names=COLUMNS,
        dtype=types,
        skipinitialspace=True,
        na_filter=False,
    )
