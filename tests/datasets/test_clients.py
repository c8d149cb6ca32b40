import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.datasets import client_batches, encode, load_credit, partition
from fedbilevel.tables.columns import encode_groups


def test_from_table_to_client_arrays():
    data = load_credit()
    train, _ = partition.train_test_split(data.groups)
    X, y, sensitive = data.X.iloc[train], data.y.iloc[train], data.groups.iloc[train]
    features = encode.feature_matrix(encode.clean_transformer(X).fit(X), X)
    codes, names = encode_groups(sensitive)
    split = partition.balanced_validation(sensitive, partition.iid(len(train), 3))
    batches = client_batches(features, y, codes, split)
    assert len(batches) == 3
    for (train_batch, val_batch), rows, val_rows in zip(batches, split.train, split.validation, strict=True):
        for batch, index in ((train_batch, rows), (val_batch, val_rows)):
            assert {name: leaf.dtype for name, leaf in batch.items()} == {
                "features": np.float32,
                "labels": np.float32,
                "groups": np.int32,
            }
            np.testing.assert_array_equal(batch["features"], features[index])
            np.testing.assert_array_equal(batch["labels"], y.to_numpy()[index])
            assert [names[code] for code in batch["groups"]] == sensitive.iloc[index].to_list()
        assert len(set(np.bincount(val_batch["groups"]))) == 1
    federated = fb.ClientData.from_clients(batches)
    assert federated.train_sizes.tolist() == [rows.size for rows in split.train]
    assert federated.val_sizes.tolist() == [rows.size for rows in split.validation]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"features": np.zeros(4)}, ValueError, r"features must be a matrix \[rows, columns\]"),
        ({"features": np.full((4, 1), np.nan)}, ValueError, "features holds values that are not finite"),
        ({"labels": [0, 1, 2, 1]}, ValueError, "labels must hold 0 and 1 only"),
        ({"labels": [0, 1]}, ValueError, "labels has 2 rows but features has 4"),
        ({"groups": np.zeros(4)}, TypeError, "groups must be whole-number codes, not float64"),
    ],
)
def test_bad_arrays_are_refused(change, error, message):
    arrays = {"features": np.zeros((4, 1)), "labels": [0, 1, 0, 1], "groups": np.array([0, 0, 1, 1])} | change
    split = partition.balanced_validation([0, 0, 1, 1], [np.arange(4)])
    with pytest.raises(error, match=message):
        client_batches(**arrays, split=split)
