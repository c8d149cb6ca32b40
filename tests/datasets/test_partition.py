import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.datasets import client_batches, encode, load_credit, partition
from fedbilevel.tables.columns import encode_groups
from tests.references.compare import refusals

checked = settings(max_examples=40)

groups = st.lists(st.sampled_from("abcd"), min_size=1, max_size=120)
seeds = st.integers(0, 2**32)
ALONE = (["a", "b"], [np.array([0]), np.array([1])])  # one row a client


def assert_every_row_once(parts, rows):
    for part in parts:
        assert part.size > 0
        assert (np.diff(part) > 0).all()
    assert sorted(np.concatenate(parts)) == list(range(rows))


def same(left, right):
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@checked
@given(rows=st.integers(1, 200), clients=st.integers(1, 9), seed=seeds)
def test_iid(rows, clients, seed):
    if rows < clients:
        with pytest.raises(ValueError, match=rf"{rows} row\(s\) cannot be dealt to {clients} clients"):
            partition.iid(rows, clients, seed=seed)
        return
    parts = partition.iid(rows, clients, seed=seed)
    assert_every_row_once(parts, rows)
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert same(parts, partition.iid(rows, clients, seed=seed))


@checked
@given(total=st.integers(0, 10_000), shares=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_apportion_is_within_one_of_exact_and_loses_nothing(total, shares):
    sizes = partition.apportion(total, shares)
    assert sizes.sum() == total
    exact = total * np.array(shares) / np.sum(shares)
    assert (np.abs(sizes - exact) < 1 + 1e-6).all()


def test_apportion_is_exact_where_it_can_be():
    for total in range(0, 1000, 10):
        assert partition.apportion(total, (2, 2, 6)).tolist() == [total // 5, total // 5, 3 * total // 5]


@checked
@given(sensitive=st.lists(st.sampled_from("abc"), min_size=30, max_size=150), seed=seeds)
def test_group_shares_deals_each_group_two_two_six(sensitive, seed):
    parts = partition.group_shares(sensitive, seed=seed)
    assert_every_row_once(parts, len(sensitive))
    labels = np.array(sensitive)
    for group in set(sensitive):
        size = (labels == group).sum()
        held = sorted((labels[part] == group).sum() for part in parts)
        assert np.abs(np.array(held) - size * np.array([0.2, 0.2, 0.6])).max() < 1
    assert same(parts, partition.group_shares(sensitive, seed=seed))


def test_group_shares_deals_at_random_and_not_the_same_to_every_group():
    sensitive = np.repeat(["a", "b"], 100)
    largest = []
    for seed in range(60):
        parts = partition.group_shares(sensitive, seed=seed)
        counts = np.array([[(sensitive[part] == g).sum() for part in parts] for g in "ab"])
        largest.append(tuple(counts.argmax(axis=1)))
    # Nine possible pairs of holders; all appear, so the two groups are dealt independently.
    assert len(set(largest)) == 9


@checked
@given(
    column=st.lists(st.sampled_from([0, 1, 2]), min_size=20, max_size=120),
    clients=st.integers(1, 4),
    concentration=st.floats(0.2, 100),
    smallest=st.integers(1, 3),
    seed=seeds,
)
def test_dirichlet(column, clients, concentration, smallest, seed):
    options = {"concentration": concentration, "smallest": smallest, "seed": seed}
    parts = partition.dirichlet(column, clients, **options)
    assert_every_row_once(parts, len(column))
    assert min(part.size for part in parts) >= smallest
    assert same(parts, partition.dirichlet(column, clients, **options))


def test_dirichlet_concentration_sets_how_different_the_clients_are():
    column = np.tile([0, 1], 1000)

    def spread(concentration):
        draws = [partition.dirichlet(column, concentration=concentration, seed=seed) for seed in range(20)]
        return np.std([column[part].mean() for parts in draws for part in parts])

    assert spread(0.1) > 3 * spread(10) > 9 * spread(10_000)


@checked
@given(column=groups)
def test_by_column_is_one_client_per_value_in_sorted_order(column):
    parts = partition.by_column(column)
    assert_every_row_once(parts, len(column))
    assert [set(np.array(column)[part]) for part in parts] == [{value} for value in sorted(set(column))]


@checked
@given(sensitive=st.lists(st.sampled_from("abcd"), min_size=12, max_size=200), share=st.floats(0.1, 0.9), seed=seeds)
def test_train_test_split_keeps_group_proportions(sensitive, share, seed):
    train, test = partition.train_test_split(sensitive, test_share=share, seed=seed)
    assert_every_row_once([train, test], len(sensitive))
    labels = np.array(sensitive)
    for group in set(sensitive):
        size = (labels == group).sum()
        assert abs((labels[test] == group).sum() - share * size) <= 1
        assert (labels[train] == group).any()
    again = partition.train_test_split(sensitive, test_share=share, seed=seed)
    assert same([train, test], again)


def test_train_test_split_of_the_whole_is_rounded_exactly():
    sensitive = np.repeat(list("abcde"), [271, 311, 1039, 3124, 27816])
    train, test = partition.train_test_split(sensitive)
    assert (train.size, test.size) == (22_793, 9_768)


def test_train_test_split_by_groups_and_labels_together():
    table = pd.DataFrame({"group": np.repeat(["a", "b"], 100), "label": np.tile([0, 0, 0, 1], 50)})
    _, test = partition.train_test_split(table, test_share=0.2)
    assert table.iloc[test].value_counts().to_dict() == {("a", 0): 15, ("b", 0): 15, ("a", 1): 5, ("b", 1): 5}


@checked
@given(
    sensitive=st.lists(st.sampled_from("abc"), min_size=24, max_size=150),
    size=st.one_of(st.floats(0.01, 0.99), st.integers(1, 100)),
    repeat=st.booleans(),
    seed=seeds,
)
def test_balanced_validation(sensitive, size, repeat, seed):
    labels = np.array(sensitive)
    parts = partition.iid(labels.size, 3, seed=seed)
    split = partition.balanced_validation(labels, parts, size=size, repeat=repeat, seed=seed)
    for part, train, val, per_group, absent in zip(parts, *split, strict=True):
        # Nothing is lost, nothing is in both.
        assert sorted({*train, *val}) == list(part)
        assert not set(train) & set(val)
        wanted = size * part.size if size < 1 else size
        for group in sorted(set(sensitive)):
            held = (labels[part] == group).sum()
            assert (group in absent) == (held < 2)
            assert (labels[val] == group).sum() == (0 if group in absent else per_group)
            if held:
                # Training keeps at least half of every group.
                assert (labels[train] == group).sum() >= held / 2
        present = len(set(sensitive)) - len(absent)
        assert val.size == present * per_group
        assert val.size <= max(wanted, present)
        if repeat:
            assert val.size > wanted - present
        else:
            assert np.unique(val).size == val.size
    again = partition.balanced_validation(labels, parts, size=size, repeat=repeat, seed=seed)
    assert same(split.validation, again.validation)


def test_balanced_validation_is_limited_by_the_smallest_group_unless_rows_repeat():
    labels = np.repeat(["big", "small"], [100, 10])
    parts = [np.arange(110)]
    plain = partition.balanced_validation(labels, parts, size=40)
    assert plain.per_group == [5]
    repeated = partition.balanced_validation(labels, parts, size=40, repeat=True)
    assert repeated.per_group == [20]
    small = repeated.validation[0][repeated.validation[0] >= 100]
    assert np.unique(small, return_counts=True)[1].tolist() == [4, 4, 4, 4, 4]


def test_the_rule_for_a_client_that_lacks_a_group():
    labels = np.array(list("aaaabbbb" + "aaaaaa" + "aaaab"))
    parts = [np.arange(0, 8), np.arange(8, 14), np.arange(14, 19)]
    split = partition.balanced_validation(labels, parts, size=0.5)
    # The second has no "b"; the third has one, which stays in training.
    assert split.absent == [[], ["b"], ["b"]]
    assert [sorted(labels[val]) for val in split.validation] == [["a", "a", "b", "b"], ["a", "a", "a"], ["a", "a"]]
    assert "b" in labels[split.train[2]]
    with pytest.raises(ValueError, match="Client 1 has fewer than two rows of the group 'b'"):
        partition.balanced_validation(labels, parts, absent="error")


@checked
@given(sensitive=st.lists(st.sampled_from("abc"), min_size=24, max_size=150), share=st.floats(0.05, 0.9), seed=seeds)
def test_proportional_validation(sensitive, share, seed):
    labels = np.array(sensitive)
    parts = partition.iid(labels.size, 3, seed=seed)
    split = partition.proportional_validation(labels, parts, share=share, seed=seed)
    for part, train, val, per_group, absent in zip(parts, *split, strict=True):
        assert sorted([*train, *val]) == list(part)
        counts = []
        for group in sorted(set(sensitive)):
            held, taken = (labels[part] == group).sum(), (labels[val] == group).sum()
            assert (taken == 0) == (group in absent) == (held < 2)
            if held >= 2:
                assert abs(taken - share * held) <= 1
                assert 1 <= taken < held
                counts.append(taken)
        assert per_group == min(counts)


def test_different_functions_and_seeds_draw_differently():
    rows = ["a"] * 100
    assert not same(partition.iid(100, seed=0), partition.iid(100, seed=1))
    halves = {tuple(part) for part in partition.iid(100, 2, seed=0)}
    assert halves != {tuple(part) for part in partition.train_test_split(rows, test_share=0.5, seed=0)}
    assert halves != {tuple(part) for part in partition.group_shares(rows, (1, 1), seed=0)}


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: partition.iid(24, 3, seed=seed)[0],
        lambda seed: min(partition.group_shares(["a"] * 24, (1, 2), seed=seed), key=len),
        lambda seed: partition.dirichlet(["a"] * 24, concentration=1e6, seed=seed)[0],
        lambda seed: partition.train_test_split(["a"] * 24, test_share=1 / 3, seed=seed)[1],
        lambda seed: partition.balanced_validation(["a"] * 24, [np.arange(24)], size=8, seed=seed).validation[0],
        lambda seed: partition.proportional_validation(["a"] * 24, [np.arange(24)], share=1 / 3, seed=seed)[1][0],
    ],
)
def test_every_row_has_the_same_chance(draw):
    """8 rows of 24 are drawn by 300 seeds: each row about 100 times."""
    times = np.zeros(24)
    for seed in range(300):
        rows = draw(seed)
        assert rows.size == 8
        times[rows] += 1
    # Binomial(300, 1/3) has a standard deviation of 8.2; four of them.
    assert np.abs(times - 100).max() < 33


test_bad_input_is_refused_in_one_sentence = refusals(
    None,
    (lambda: partition.iid(10, 0), "clients=0 must be at least 1"),
    (lambda: partition.iid(10, 2, seed=-1), "seed=-1 must be a whole number, 0 or larger"),
    (lambda: partition.iid(10, 2, seed=1.5), "seed=1.5 must be a whole number"),
    (lambda: partition.group_shares(["a"] * 9, (2, 0, 6)), r"shares=\(2, 0, 6\) must be positive numbers"),
    (lambda: partition.group_shares(["a"] * 9, ()), r"shares=\(\) must be positive numbers"),
    (lambda: partition.group_shares(["a"] * 3, (1, 1, 98)), "3 rows in these groups leave a client without any"),
    (lambda: partition.group_shares(["a", None, "b"]), r"sensitive has 1 missing value\(s\)"),
    (lambda: partition.dirichlet([0, 1], concentration=0), "concentration=0 must be a positive number"),
    (lambda: partition.dirichlet([0, 1, 1], 3, smallest=2), "3 clients cannot have that many rows each of 3"),
    (lambda: partition.by_column(["x", None]), r"clients has 1 missing value\(s\)"),
    (lambda: partition.train_test_split(["a"] * 5, test_share=1), "test_share=1 must lie between 0 and 1"),
    (lambda: partition.train_test_split(["a", "b"]), "leaves no test rows"),
    (lambda: partition.balanced_validation(["a"] * 4, [np.arange(4)], size=0), "size=0 must be a share below 1"),
    (lambda: partition.balanced_validation(["a"] * 4, [np.arange(4)], absent="x"), "absent='x' is unknown"),
    (lambda: partition.balanced_validation(["a"] * 4, []), "parts is empty"),
    (lambda: partition.balanced_validation(["a"] * 4, [np.arange(5)]), "parts names row 4, but .* has 4 rows"),
    (lambda: partition.balanced_validation(["a"] * 4, [np.arange(3), np.arange(2, 4)]), "a row to two clients"),
    (lambda: partition.proportional_validation(["a"] * 4, [np.arange(4)], share=0), "share=0 must lie between"),
    (lambda: partition.balanced_validation(*ALONE), r"Client 0 has 1 row\(s\) and no group with two of them"),
    (lambda: partition.proportional_validation(*ALONE), r"Client 0 has 1 row\(s\) and no group with two of them"),
    (
        lambda: partition.dirichlet([0] * 100, 20, concentration=1e-3, smallest=4),
        r"No draw gave .* 20 clients 4 row\(s\)",
    ),
)


KINDS = {"features": np.float32, "labels": np.float32, "groups": np.int32}


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
            assert {name: leaf.dtype for name, leaf in batch.items()} == KINDS
            np.testing.assert_array_equal(batch["features"], features[index])
            np.testing.assert_array_equal(batch["labels"], y.to_numpy()[index])
            assert [names[code] for code in batch["groups"]] == sensitive.iloc[index].to_list()
        assert len(set(np.bincount(val_batch["groups"]))) == 1
    federated = fb.ClientData.from_clients(batches)
    assert federated.train_sizes.tolist() == [rows.size for rows in split.train]
    assert federated.val_sizes.tolist() == [rows.size for rows in split.validation]


SPLIT = partition.balanced_validation([0, 0, 1, 1], [np.arange(4)])
ARRAYS = {"features": np.zeros((4, 1)), "labels": [0, 1, 0, 1], "groups": np.array([0, 0, 1, 1]), "split": SPLIT}

test_bad_arrays_are_refused = refusals(
    lambda change: client_batches(**{**ARRAYS, **change}),
    ({"features": np.zeros(4)}, r"features must be a matrix \[rows, columns\]"),
    ({"features": np.full((4, 1), np.nan)}, "features holds values that are not finite"),
    ({"labels": [0, 1, 2, 1]}, "labels must hold 0 and 1 only"),
    ({"labels": [0, 1]}, "labels has 2 rows but features has 4"),
    ({"groups": np.zeros(4)}, "groups must be whole-number codes, not float64", TypeError),
)
