import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fedbilevel.datasets import load_adult, load_credit
from fedbilevel.datasets.encode import clean_transformer, feature_matrix, positional_one_hot, power_of_ten
from fedbilevel.tables.encoder import Encoder
from tests.references.compare import refusals

TABLE = pd.DataFrame(
    {"age": [20, 30, 40, 50], "member": [True, False, True, True], "job": ["cook", "judge", "cook", "tailor"]}
)


@pytest.fixture
def table():
    return TABLE.copy()


def test_numbers_are_standardised_and_categories_one_hot(table):
    encoder = clean_transformer(table).fit(table)
    matrix = feature_matrix(encoder, table)
    names = list(encoder.get_feature_names_out())
    assert names == ["age", "member=false", "member=true", "job=cook", "job=judge", "job=tailor"]
    np.testing.assert_allclose(matrix[:, 0], (table["age"] - 35) / np.sqrt(125), rtol=1e-6)  # float32
    np.testing.assert_array_equal(matrix[:, 3], [1, 0, 1, 0])
    assert matrix.dtype == np.float32
    assert matrix.flags.c_contiguous


def test_statistics_come_from_the_fitted_rows_only(table):
    encoder = clean_transformer(table[:2]).fit(table[:2])
    matrix = feature_matrix(encoder, table)
    np.testing.assert_allclose(matrix[:2, 0], [-1, 1])
    np.testing.assert_allclose(matrix[3, 0], 5)
    # A category first seen later is all zeros.
    np.testing.assert_array_equal(matrix[3, 3:], [0, 0])


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame])
def test_pandas_and_polars_give_the_same_matrix(table, make):
    other = make(table.to_dict(orient="list"))
    encoder = clean_transformer(other).fit(table)
    np.testing.assert_array_equal(feature_matrix(encoder, other), feature_matrix(encoder, table))


def test_numpy_table():
    array = np.array([[1.0, 2.0], [3.0, 2.0]])
    frame = pd.DataFrame(array, columns=["x0", "x1"])
    matrix = feature_matrix(clean_transformer(array).fit(frame), array)
    np.testing.assert_array_equal(matrix, [[-1, 0], [1, 0]])


def test_column_order_and_extra_columns_do_not_matter(table):
    encoder = clean_transformer(table).fit(table)
    shuffled = table[["job", "age", "member"]].assign(extra=1)
    np.testing.assert_array_equal(feature_matrix(encoder, shuffled), feature_matrix(encoder, table))


test_bad_tables_are_refused_in_one_sentence = refusals(
    lambda change: feature_matrix(clean_transformer(TABLE).fit(TABLE), change(TABLE)),
    (lambda t: t.assign(age=[1.0, None, 3.0, 4.0]), r"column 'age' has 1 missing value\(s\), the first in row 1"),
    (lambda t: t.assign(job=["a", "b", None, None]), r"column 'job' has 2 missing value\(s\), the first in row 2"),
    (lambda t: t.assign(age=[1.0, 2.0, np.inf, 4.0]), "column 'age' has infinite values"),
    (lambda t: t.rename(columns={"age": "ages"}), "there is no column 'age'; did you mean 'ages'"),
    (lambda t: t.assign(age=["1", "2", "x", "4"]), "X, row 2: the column 'age' must hold numbers .* holds 'x'"),
    (lambda t: t[:0], "0 rows"),
    (lambda t: pd.concat([t, t[["age"]]], axis=1), "two columns named 'age'"),
)

test_before_fitting_too = refusals(
    clean_transformer,
    (TABLE.assign(age=[1.0, None, 3.0, 4.0]), "column 'age' has 1 missing"),
    (np.array([1.0, 2.0]), "has 1 dimension"),
)


@pytest.mark.parametrize(("load", "columns"), [(load_adult, 103), (load_credit, 57)])
def test_shipped_tables_encode_as_scikit_learn_does(load, columns):
    """Bit for bit, and the transformer goes through `clone` and into a table with names."""
    X = load().X
    train, test = X.iloc[::2], X.iloc[1::2]
    numbers = list(X.select_dtypes("number"))
    steps = [("numbers", StandardScaler(), numbers)]
    steps += [
        ("categories", OneHotEncoder(handle_unknown="ignore", sparse_output=False), list(X.columns.drop(numbers)))
    ]
    matrix = feature_matrix(clone(clean_transformer(train)).fit(train), test)
    np.testing.assert_array_equal(matrix, ColumnTransformer(steps).fit(train).transform(test).astype(np.float32))
    assert np.isfinite(matrix).all()
    whole = clean_transformer(X).set_output(transform="pandas").fit_transform(X)
    assert whole.shape == (len(X), columns)


def test_the_encoder_behind_it_adds_a_constant(table):
    encoder = Encoder.learn(table, every_value=True)
    assert encoder.feature_names == [
        "age", "member=false", "member=true", "job=cook", "job=judge", "job=tailor", "1",
    ]  # fmt: skip
    assert (encoder.transform(table)[:, -1] == 1).all()
    with pytest.raises(ValueError, match="learned from a table: it has no schema"):
        encoder.labels(table)


def test_positional_one_hot_looks_up_the_wrong_column_once_one_is_dropped():
    frame = pd.DataFrame({"sex": ["f", "m", "f"], "gain": [0, 7, 7], "loss": [1, 2, 3]})
    original = ["race", "sex", "gain", "loss"]
    encoded = positional_one_hot(frame, original=original, categorical={"race", "sex"})
    assert list(encoded.columns) == ["sex=m", "gain=7", "loss"]
    whole = positional_one_hot(frame.assign(race="x")[original], original=original, categorical={"race", "sex"})
    assert list(whole.columns) == ["race=x", "sex=m", "gain", "loss"]


def test_power_of_ten():
    frame = pd.DataFrame({"a": [0, 999], "b": [-1000, 5], "c": [0.02, 0.01], "zero": [0, 0]})
    expected = [[0, -1, 2, 0], [9.99, 0.005, 1, 0]]
    np.testing.assert_allclose(power_of_ten(frame).to_numpy(), expected, rtol=1e-15)
