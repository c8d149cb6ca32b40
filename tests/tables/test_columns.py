import numpy as np
import pandas as pd
import polars as pl
import pytest

from fedbilevel.tables.columns import (
    binary_labels,
    check_columns,
    check_lengths,
    encode_groups,
    group_series,
    to_frame,
    to_series,
)

WORDS = ["b", "a", "b"]


@pytest.mark.parametrize(
    "column",
    [
        WORDS,
        tuple(WORDS),
        np.array(WORDS),
        np.array(WORDS, dtype=object),
        np.array(WORDS)[:, None],
        pd.Series(WORDS, index=[7, 3, 5]),
        pd.Series(WORDS, dtype="category"),
        pd.DataFrame({"g": WORDS}),
        pl.Series(WORDS),
        pl.Series(WORDS, dtype=pl.Categorical),
        pl.DataFrame({"g": WORDS}),
        iter(WORDS),
    ],
)
def test_a_column_may_come_in_any_form(column):
    if isinstance(column, pd.DataFrame | pl.DataFrame) or getattr(column, "ndim", 1) == 2:
        assert to_series(column, "column").to_list() == WORDS
    codes, names = encode_groups(column)
    assert codes.tolist() == [1, 0, 1]
    assert codes.dtype == np.int32
    assert names == ["a", "b"]


@pytest.mark.parametrize("column", ["text", 5, None])
def test_what_is_no_column_is_refused(column):
    with pytest.raises(TypeError, match="clients must be a column"):
        to_series(column, "clients")


def test_tables_are_no_column():
    with pytest.raises(ValueError, match="y must be one column, but it has 2"):
        to_series(pd.DataFrame({"a": [1], "b": [2]}), "y")
    with pytest.raises(ValueError, match=r"y must be one column, but its shape is \(2, 2\)"):
        to_series(np.zeros((2, 2)), "y")


@pytest.mark.parametrize(
    "column",
    [
        ["a", None, "b"],
        ["a", float("nan"), "b"],
        np.array([0.0, np.nan, 1.0]),
        pd.Series(["a", pd.NA, "b"]),
        pd.Series(["a", None, "b"], dtype="category"),
        pl.Series(["a", None, "b"]),
        pl.Series([1, None, 2]),
    ],
)
def test_a_missing_group_is_refused_wherever_it_hides(column):
    with pytest.raises(ValueError, match=r"sensitive_features has 1 missing value\(s\), the first in row 1"):
        encode_groups(column)


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, lambda d: np.array(list(d.values()), dtype=object).T])
def test_several_columns_are_joined(make):
    table = make({"race": ["x", "y", "x"], "sex": ["f", "f", "m"]})
    assert group_series(table).to_list() == ["x & f", "y & f", "x & m"]


def test_a_missing_value_in_one_of_several_columns_names_the_column():
    with pytest.raises(ValueError, match=r"sensitive_features\['sex'\] has 1 missing"):
        group_series(pd.DataFrame({"race": ["x", "y"], "sex": ["f", None]}))


def test_known_groups_keep_their_codes_and_a_stranger_is_refused():
    codes, names = encode_groups(["c", "a"], known=["a", "b", "c"])
    assert codes.tolist() == [2, 0]
    assert names == ["a", "b", "c"]
    with pytest.raises(
        ValueError, match=r"holds the group 'd', which the training part does not have \(it has 'a', 'b'"
    ):
        encode_groups(["a", "d"], known=["a", "b"])


@pytest.mark.parametrize(
    ("labels", "pos_label"),
    [
        ([0, 1, 1], None),
        ([-1, 1, 1], None),
        ([False, True, True], None),
        (np.array([0.0, 1.0, 1.0]), None),
        (pl.Series([False, True, True]), None),
        (["no", "yes", "yes"], "yes"),
        ([2, 1, 1], 1),
    ],
)
def test_binary_labels(labels, pos_label):
    assert binary_labels(labels, "y", pos_label=pos_label).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("labels", "pos_label", "message"),
    [
        ([0, 1, 2], None, "y must hold 0/1, False/True or -1/1, but it holds 0, 1, 2; name the positive class"),
        (["no", "yes"], None, "but it holds 'no', 'yes'; name the positive class with pos_label"),
        (["a", "b"], "c", "y must hold 'c' and one other value, but it holds 'a', 'b'"),
        (["a", "b", "c"], "c", "y must hold 'c' and one other value"),
        ([0, None, 1], None, r"y has 1 missing value\(s\), the first in row 1"),
    ],
)
def test_labels_that_are_not_binary_are_refused(labels, pos_label, message):
    with pytest.raises(ValueError, match=message):
        binary_labels(labels, "y", pos_label=pos_label)


def test_lengths_and_columns():
    check_lengths(a=[1], b=None, c=[2])
    with pytest.raises(ValueError, match="b has 2 rows but a has 1; they must describe the same rows"):
        check_lengths(a=[1], b=[1, 2])
    with pytest.raises(ValueError, match="a has no rows"):
        check_lengths(a=[], b=[])
    frame = pd.DataFrame({"income": [1], "race": [2]})
    check_columns(frame, ["race"], "target")
    with pytest.raises(ValueError, match="target: there is no column 'incom'; did you mean 'income'"):
        check_columns(frame, ["incom"], "target")
    with pytest.raises(ValueError, match="target: there is no column 'zzz'; there are 'income', 'race'"):
        check_columns(frame, ["zzz"], "target")


def test_column_names_become_text():
    assert list(to_frame(pd.DataFrame({1: [0], 2: [0]})).columns) == ["1", "2"]
