import math

import numpy as np
import pandas as pd
import pytest

from fedbilevel.datasets import load_credit
from fedbilevel.datasets.credit import CODE_BOOK
from fedbilevel.datasets.dataset import read_file


def original_rows():
    return [line.split() for line in read_file("german.data").decode().splitlines()]


@pytest.fixture(scope="module")
def clean():
    return load_credit()


def test_every_value_is_that_of_the_original_file_by_the_code_book(clean):
    rows = original_rows()
    assert len(rows) == 1_000
    for position, (name, book) in enumerate(CODE_BOOK.items()):
        printed = [row[position] for row in rows]
        expected = [int(value) for value in printed] if book is None else [book[value] for value in printed]
        assert clean.frame[name].to_list() == expected


def test_code_book_is_one_to_one_and_readable():
    for book in CODE_BOOK.values():
        if book is not None:
            assert len(set(book.values())) == len(book)
            assert not any(word.startswith("A1") for word in book.values())


def test_target_and_groups(clean):
    assert (clean.target_name, clean.positive) == ("risk", "bad")
    assert int(clean.y.sum()) == 300
    assert clean.groups.value_counts().to_dict() == {
        "male, single": 548,
        "female, divorced, separated or married": 310,
        "male, married or widowed": 92,
        "male, divorced or separated": 50,
    }
    assert clean.X.shape == (1_000, 19)
    assert not {"risk", "personal_status", "sex"} & set(clean.X.columns)


def test_sex_is_read_off_the_status_and_takes_it_along():
    data = load_credit("sex")
    assert data.groups.value_counts().to_dict() == {"male": 690, "female": 310}
    for sex, status in zip(data.groups, data.frame["personal_status"], strict=True):
        assert status.startswith(sex)
    # Otherwise the features would still tell the sex.
    assert "personal_status" not in data.X.columns
    assert "personal_status" in load_credit("sex", keep_sensitive=True).X.columns


@pytest.mark.parametrize(("keep", "columns"), [(False, 19), (True, 20)])
def test_paper_encoding_against_a_plain_loop(keep, columns):
    data = load_credit(encoding="paper", keep_sensitive=keep)
    expected = []
    for position, name in enumerate(CODE_BOOK):
        if name == "risk" or (name == "personal_status" and not keep):
            continue
        printed = [row[position] for row in original_rows()]
        values = [int(value[-1]) if value.startswith("A") else int(value) for value in printed]
        magnitude = 10.0 ** math.floor(math.log10(max(values)))
        expected.append([value / magnitude for value in values])
    assert data.X.shape == (1_000, columns)
    np.testing.assert_array_equal(data.X.to_numpy(), np.array(expected).T)
    assert int(data.y.sum()) == 300


def test_types_description_and_refusals(clean):
    for name, book in CODE_BOOK.items():
        assert pd.api.types.is_integer_dtype(clean.frame[name]) == (book is None)
    assert "10.24432/C5NC77" in clean.description
    assert "CC BY 4.0" in clean.description
    with pytest.raises(ValueError, match="sensitive='race': choose one or several of checking_account"):
        load_credit("race")
    with pytest.raises(ValueError, match="encoding='onehot' is unknown"):
        load_credit(encoding="onehot")
