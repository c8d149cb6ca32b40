"""Dealing rows: everybody gets as many, nobody gets another's, and the skew is what the concentration says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.tasks.deal import deal, deal_images, gather, proportions
from fedbilevel.tasks.images import Images
from tests.tasks.common import IMAGES


def skew(labels):
    """Mean over the clients of the share of their most frequent label."""
    return np.mean([np.bincount(client).max() / client.size for client in labels])


@given(
    st.integers(0, 1000), st.integers(1, 6), st.integers(1, 20), st.sampled_from([None, 0.05, 1.0, 100.0]), st.data()
)
def test_every_client_gets_its_number_and_no_row_is_dealt_twice(seed, clients, size, concentration, data):
    extra = data.draw(st.integers(0, 30))
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, clients * size + extra)
    dealt = deal(labels, proportions(4, clients, concentration, generator), size, generator)
    assert dealt.shape == (clients, size)
    assert np.unique(dealt).size == dealt.size
    assert dealt.min() >= 0
    assert dealt.max() < labels.size


def test_a_small_concentration_skews_and_none_does_not():
    labels = np.repeat(np.arange(10), 1000)
    skews = {}
    for concentration in (None, 100.0, 1.0, 0.1):
        generator = np.random.default_rng(3)
        shares = proportions(10, 8, concentration, generator)
        assert np.allclose(shares.sum(axis=1), 1)
        skews[concentration] = skew(labels[deal(labels, shares, 200, generator)])
    assert skews[None] < 0.2
    assert skews[None] < skews[1.0] < skews[0.1]
    assert skews[100.0] < 0.25
    assert skews[0.1] > 0.5


def test_labels_follow_the_shares_where_rows_last():
    labels = np.repeat(np.arange(3), 3000)
    shares = np.array([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]])
    dealt = labels[deal(labels, shares, 2000, np.random.default_rng(0))]
    counts = np.stack([np.bincount(client, minlength=3) for client in dealt]) / 2000
    np.testing.assert_allclose(counts, shares, atol=0.04)  # four standard errors
    assert counts[1, 0] == 0


def test_images_are_dealt_with_the_clients_own_proportions_and_test_rows_stay_test_rows():
    first, other, again = (
        deal_images(IMAGES, np.random.default_rng(seed), clients=6, sizes=(60, 40, 30), concentration=0.5)
        for seed in (5, 6, 5)
    )
    assert first.train.features.shape == (6, 60, 65)
    assert first.val.labels.shape == (6, 40)
    assert not np.array_equal(first.train.labels, other.train.labels)
    counts = [np.stack([np.bincount(client, minlength=10) for client in part.labels]) for part in first]
    alike = np.corrcoef((counts[0] / 60).ravel(), (counts[2] / 30).ravel())[0, 1]
    assert alike > 0.8
    assert all(np.array_equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))


def test_scaling_centres_and_sizes_by_the_training_rows():
    generator = np.random.default_rng(0)
    train, other = generator.random((3, 20, 5), np.float32), generator.random((3, 8, 5), np.float32)
    labels = np.zeros(60, np.int32)
    images = Images("none", train.reshape(60, 5), labels, other.reshape(24, 5), labels[:24])
    rows, held = np.arange(60).reshape(3, 20), np.arange(24).reshape(3, 8)
    scaled, rest = (part.features for part in gather(images, rows, rows, held)[::2])
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled[..., :-1].mean(axis=(0, 1)), 0, atol=1e-6)
    np.testing.assert_allclose((scaled[..., :-1] ** 2).sum(axis=-1).mean(), 4, rtol=1e-5)
    assert (scaled[..., -1] == 1).all()
    assert (rest[..., -1] == 1).all()
    back = (other - train.mean(axis=(0, 1))) / rest[..., :-1]
    np.testing.assert_allclose(back, np.broadcast_to(back[0, 0, 0], back.shape), rtol=1e-4)


def test_bad_input_gets_a_sentence():
    generator = np.random.default_rng(0)
    with pytest.raises(ValueError, match="concentration=-1 must be a positive number"):
        proportions(3, 2, -1, generator)
    with pytest.raises(ValueError, match="2 clients with 6 rows each need 12 rows, but there are 10"):
        deal(np.zeros(10, int), np.full((2, 1), 1.0), 6, generator)
    with pytest.raises(ValueError, match="validation must be at least 1"):
        deal_images(IMAGES, generator, clients=2, sizes=(3, 0, 3))
