import csv
import io
import math

import numpy as np
import pandas as pd
import pytest

from fedbilevel.datasets import Dataset, load_adult
from fedbilevel.datasets.adult import COLUMNS, NUMBERS, TRAIN_ROWS
from fedbilevel.datasets.dataset import read_file


def original_rows(name):
    """The rows of an original file by the csv module, label without the full stop of adult.test."""
    lines = [line for line in read_file(name).decode().splitlines() if line and not line.startswith("|")]
    rows = list(csv.reader(io.StringIO("\n".join(lines)), skipinitialspace=True))
    return [[*row[:-1], row[-1].rstrip(".")] for row in rows]


@pytest.fixture(scope="module")
def clean():
    return load_adult()


@pytest.fixture(scope="module")
def paper():
    return load_adult(encoding="paper")


def test_every_value_is_that_of_the_original_files(clean):
    rows = original_rows("adult.data") + original_rows("adult.test")
    assert len(rows) == 48_842
    expected = pd.DataFrame(rows, columns=COLUMNS).replace("?", "Unknown").astype(str)
    pd.testing.assert_frame_equal(clean.frame.astype(str), expected)


def test_column_types_and_target(clean):
    for column in COLUMNS:
        is_number = pd.api.types.is_integer_dtype(clean.frame[column])
        assert is_number == (column in NUMBERS)
    assert clean.target_name == "income"
    assert clean.positive == ">50K"
    assert clean.y.to_list() == [int(value == ">50K") for value in clean.frame["income"]]
    assert not clean.frame.isna().any().any()


def test_group_sizes(clean):
    assert clean.groups.value_counts().to_dict() == {
        "White": 41_762,
        "Black": 4_685,
        "Asian-Pac-Islander": 1_519,
        "Amer-Indian-Eskimo": 470,
        "Other": 406,
    }
    assert clean.groups[:TRAIN_ROWS].value_counts().to_dict()["Other"] == 271


def test_sensitive_column_is_a_feature_only_if_asked_for(clean):
    assert "race" not in clean.X.columns
    assert "income" not in clean.X.columns
    assert list(load_adult(keep_sensitive=True).X.columns) == COLUMNS[:-1]


def test_several_sensitive_columns():
    data = load_adult(["race", "sex"])
    assert list(data.sensitive.columns) == ["race", "sex"]
    assert not {"race", "sex"} & set(data.X.columns)
    assert data.groups.nunique() == 10
    row = data.frame.iloc[5]
    assert data.groups[5] == f"{row['race']} & {row['sex']}" == "White & Female"


def paper_matrix_by_hand(rows, dropped, sample):
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
def test_paper_encoding_against_a_plain_loop(sensitive, keep, columns):
    data = load_adult(sensitive, "paper", keep_sensitive=keep)
    assert data.X.shape == (32_561, columns)
    dropped = set() if keep else set(np.atleast_1d(sensitive))
    sample = range(0, TRAIN_ROWS, 17)
    expected = paper_matrix_by_hand(original_rows("adult.data"), dropped, sample)
    np.testing.assert_array_equal(data.X.to_numpy()[sample], expected)


def test_paper_encoding_names_its_columns(paper):
    assert paper.X.columns.is_unique
    assert "workclass=?" in paper.X.columns
    assert sum(name.startswith("capital_gain=") for name in paper.X.columns) == 119
    assert len(paper.y) == len(paper.groups) == len(paper.frame) == TRAIN_ROWS
    assert int(paper.y.sum()) == 7_841


def test_description_names_source_licence_and_encoding(clean, paper):
    for data in (clean, paper):
        assert "10.24432/C5XW20" in data.description
        assert "CC BY 4.0" in data.description
    assert "Clean encoding" in clean.description
    assert "slip" in paper.description


def test_loads_are_independent_and_the_record_is_frozen(clean):
    other = load_adult()
    other.frame.loc[0, "age"] = -1
    assert load_adult().frame.loc[0, "age"] == clean.frame.loc[0, "age"] == 39
    with pytest.raises(AttributeError):
        clean.name = "other"
    assert repr(clean) == "Dataset('adult', encoding='clean', rows=48842, columns=13, target='income', groups=5)"
    assert isinstance(clean, Dataset)


@pytest.mark.parametrize("sensitive", ["gender", "income", "age", [], ["race", "gender"]])
def test_a_column_that_cannot_be_sensitive_is_refused(sensitive):
    with pytest.raises(ValueError, match=r"sensitive=.*choose one or several of workclass, .*race, sex"):
        load_adult(sensitive)


def test_other_refusals():
    with pytest.raises(ValueError, match="names a column twice"):
        load_adult(["sex", "sex"])
    with pytest.raises(ValueError, match="encoding='raw' is unknown; choose 'clean' or 'paper'"):
        load_adult(encoding="raw")
