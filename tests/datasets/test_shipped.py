"""The data sets inside the package: the original files, licensed in plain sight, and every value that is made of them."""

import csv
import hashlib
import io
import math
from importlib import resources

import numpy as np
import pandas as pd
import pytest

from fedbilevel.datasets import Dataset, load_adult, load_credit
from fedbilevel.datasets.shipped import CODE_BOOK, COLUMNS, NUMBERS, SHA256, TRAIN_ROWS, read_file
from tests.references.compare import refusals

FOLDER = resources.files("fedbilevel.datasets").joinpath("data")


@pytest.fixture(scope="module")
def adult():
    return load_adult()


@pytest.fixture(scope="module")
def paper():
    return load_adult(encoding="paper")


@pytest.fixture(scope="module")
def credit():
    return load_credit()


def adult_rows(name):
    """The rows of an original file by the csv module, label without the full stop of adult.test."""
    lines = [line for line in read_file(name).decode().splitlines() if line and not line.startswith("|")]
    rows = list(csv.reader(io.StringIO("\n".join(lines)), skipinitialspace=True))
    return [[*row[:-1], row[-1].rstrip(".")] for row in rows]


def credit_rows():
    return [line.split() for line in read_file("german.data").decode().splitlines()]


@pytest.mark.parametrize("name", sorted(SHA256))
def test_decompressed_bytes_are_the_original_file(name):
    assert hashlib.sha256(read_file(name)).hexdigest() == SHA256[name]


def test_nothing_else_is_shipped_and_it_stays_small():
    assert {entry.name for entry in FOLDER.iterdir()} == {f"{name}.xz" for name in SHA256} | {"LICENSE.txt"}
    assert sum(len(entry.read_bytes()) for entry in FOLDER.iterdir()) < 1_500_000


@pytest.mark.parametrize(
    "fact", ["10.24432/C5XW20", "10.24432/C5NC77", "10.24432/C52P4X", "CC BY 4.0", *SHA256.values()]
)
def test_licence_file_states(fact):
    assert fact in FOLDER.joinpath("LICENSE.txt").read_text()


def test_descriptions_name_source_licence_and_encoding(adult, paper, credit):
    for data, source in ((adult, "10.24432/C5XW20"), (paper, "10.24432/C5XW20"), (credit, "10.24432/C5NC77")):
        assert source in data.description
        assert "CC BY 4.0" in data.description
    assert "Clean encoding" in adult.description
    assert "slip" in paper.description


SENSITIVE = "sensitive=.*choose one or several of workclass, .*race, sex"
test_a_column_that_cannot_be_sensitive_is_refused = refusals(
    load_adult,
    *((name, SENSITIVE) for name in ("gender", "income", "age", [], ["race", "gender"])),
    (["sex", "sex"], "names a column twice"),
)

test_other_refusals = refusals(
    None,
    (lambda: load_credit("race"), "sensitive=.*choose one or several of checking_account"),
    (lambda: load_adult(encoding="raw"), "encoding='raw' is unknown; choose 'clean' or 'paper'"),
    (lambda: load_credit(encoding="raw"), "encoding='raw' is unknown; choose 'clean' or 'paper'"),
)


def test_every_value_of_adult_is_that_of_the_original_files(adult):
    rows = adult_rows("adult.data") + adult_rows("adult.test")
    assert len(rows) == 48_842
    expected = pd.DataFrame(rows, columns=COLUMNS).replace("?", "Unknown").astype(str)
    pd.testing.assert_frame_equal(adult.frame.astype(str), expected)
    for column in COLUMNS:
        assert pd.api.types.is_integer_dtype(adult.frame[column]) == (column in NUMBERS)
    assert not adult.frame.isna().any().any()


def test_target_and_groups_of_adult(adult):
    assert (adult.target_name, adult.positive) == ("income", ">50K")
    assert adult.y.to_list() == [int(value == ">50K") for value in adult.frame["income"]]
    assert adult.groups.value_counts().to_dict() == {
        "White": 41_762, "Black": 4_685, "Asian-Pac-Islander": 1_519, "Amer-Indian-Eskimo": 470, "Other": 406,
    }  # fmt: skip
    assert adult.groups[:TRAIN_ROWS].value_counts().to_dict()["Other"] == 271
    assert not {"race", "income"} & set(adult.X.columns)
    assert list(load_adult(keep_sensitive=True).X.columns) == COLUMNS[:-1]


def test_several_sensitive_columns():
    data = load_adult(["race", "sex"])
    assert list(data.sensitive.columns) == ["race", "sex"]
    assert not {"race", "sex"} & set(data.X.columns)
    assert data.groups.nunique() == 10
    row = data.frame.iloc[5]
    assert data.groups[5] == f"{row['race']} & {row['sex']}" == "White & Female"


def adult_matrix_by_hand(rows, dropped, sample):
    """The cited preprocessing, column by column: one-hot by position (with the slip), then a power of ten.

    Categories and orders of magnitude are those of all rows; the `sample` rows are returned.
    """
    kept = [index for index, name in enumerate(COLUMNS[:-1]) if name not in dropped]
    columns = []
    for position, index in enumerate(kept):
        values = [row[index] for row in rows]
        numeric = COLUMNS[index] in NUMBERS
        if numeric:
            values = [int(value) for value in values]
        if numeric and COLUMNS[position] in NUMBERS | {"income"}:
            magnitude = 10.0 ** math.floor(math.log10(max(values)))
            columns.append([values[row] / magnitude for row in sample])
            continue
        levels = sorted(set(values))
        shown = levels[1:] if len(levels) == 2 else levels
        columns += [[float(values[row] == level) for row in sample] for level in shown]
    return np.array(columns).T


@pytest.mark.parametrize(
    ("sensitive", "keep", "columns"),
    [("race", False, 220), ("race", True, 107), ("sex", False, 224), (["race", "sex"], False, 310)],
)
def test_paper_encoding_of_adult_against_a_plain_loop(sensitive, keep, columns):
    data = load_adult(sensitive, "paper", keep_sensitive=keep)
    assert data.X.shape == (32_561, columns)
    dropped = set() if keep else set(np.atleast_1d(sensitive))
    sample = range(0, TRAIN_ROWS, 17)
    expected = adult_matrix_by_hand(adult_rows("adult.data"), dropped, sample)
    np.testing.assert_array_equal(data.X.to_numpy()[sample], expected)


def test_paper_encoding_names_its_columns(paper):
    assert paper.X.columns.is_unique
    assert "workclass=?" in paper.X.columns
    assert sum(name.startswith("capital_gain=") for name in paper.X.columns) == 119
    assert len(paper.y) == len(paper.groups) == len(paper.frame) == TRAIN_ROWS
    assert int(paper.y.sum()) == 7_841


def test_loads_are_independent_and_the_record_is_frozen(adult):
    other = load_adult()
    other.frame.loc[0, "age"] = -1
    assert load_adult().frame.loc[0, "age"] == adult.frame.loc[0, "age"] == 39
    with pytest.raises(AttributeError):
        adult.name = "other"
    assert repr(adult) == "Dataset('adult', encoding='clean', rows=48842, columns=13, target='income', groups=5)"
    assert isinstance(adult, Dataset)


def test_every_value_of_credit_is_that_of_the_original_file_by_the_code_book(credit):
    rows = credit_rows()
    assert len(rows) == 1_000
    for position, (name, book) in enumerate(CODE_BOOK.items()):
        printed = [row[position] for row in rows]
        expected = [int(value) for value in printed] if book is None else [book[value] for value in printed]
        assert credit.frame[name].to_list() == expected
        assert pd.api.types.is_integer_dtype(credit.frame[name]) == (book is None)
        if book is not None:
            assert len(set(book.values())) == len(book)
            assert not any(word.startswith("A1") for word in book.values())


def test_target_and_groups_of_credit(credit):
    assert (credit.target_name, credit.positive) == ("risk", "bad")
    assert int(credit.y.sum()) == 300
    assert credit.groups.value_counts().to_dict() == {
        "male, single": 548, "female, divorced, separated or married": 310, "male, married or widowed": 92,
        "male, divorced or separated": 50,
    }  # fmt: skip
    assert credit.X.shape == (1_000, 19)
    assert not {"risk", "personal_status", "sex"} & set(credit.X.columns)


def test_sex_is_read_off_the_status_and_takes_it_along():
    data = load_credit("sex")
    assert data.groups.value_counts().to_dict() == {"male": 690, "female": 310}
    for sex, status in zip(data.groups, data.frame["personal_status"], strict=True):
        assert status.startswith(sex)
    # Otherwise the features would still tell the sex.
    assert "personal_status" not in data.X.columns
    assert "personal_status" in load_credit("sex", keep_sensitive=True).X.columns


@pytest.mark.parametrize(("keep", "columns"), [(False, 19), (True, 20)])
def test_paper_encoding_of_credit_against_a_plain_loop(keep, columns):
    data = load_credit(encoding="paper", keep_sensitive=keep)
    expected = []
    for position, name in enumerate(CODE_BOOK):
        if name == "risk" or (name == "personal_status" and not keep):
            continue
        printed = [row[position] for row in credit_rows()]
        values = [int(value[-1]) if value.startswith("A") else int(value) for value in printed]
        magnitude = 10.0 ** math.floor(math.log10(max(values)))
        expected.append([value / magnitude for value in values])
    assert data.X.shape == (1_000, columns)
    np.testing.assert_array_equal(data.X.to_numpy(), np.array(expected).T)
    assert int(data.y.sum()) == 300
