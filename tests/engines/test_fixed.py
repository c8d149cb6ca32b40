"""Averages in fixed point: right to the last step that they promise; which methods they serve; where they are refused."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.cli.submit import how_seen, switched
from fedbilevel.engines.fixed import NARROW, WIDE, WORKING, check_summed, exact_sums, exact_words, mean_on_host
from fedbilevel.fairness import FairFederatedClassifier
from fedbilevel.federation.protocol.settings import JobSettings
from tests.contracts import cases

SINGLE = ("afl", "fcfl", "fedmbo", "fedmbo_auto")
"""Methods whose servers need the replies one by one."""


@pytest.mark.parametrize("name", cases.METHODS)
def test_every_method_is_served_or_refused_with_the_names_of_others(name):
    made = cases.algorithm(name)
    if name not in SINGLE:
        check_summed(made, 3)
        return
    with pytest.raises(ValueError, match=f"{made.name} needs every client's reply by itself .* use {WORKING}"):
        check_summed(made, 3)
    with pytest.raises(ValueError, match="needs every client's reply by itself"):
        fb.simulate(made, cases.data_of(name), 1, secure=True)


def test_the_methods_that_are_named_work():
    served = {cases.algorithm(name).name for name in cases.METHODS if name not in SINGLE}
    named = WORKING.replace(" or ", ", ").replace("\n", " ").split(", ")
    assert set(named) - {"fedpath"} <= served
    assert {
        "fedavg",
        "fedbio",
        "fedbioacc",
        "fedreg",
        "fedminmax",
        "fedfb",
        "qfedavg",
        "fednest",
        "lfednest",
        "aggitd",
    } <= {*named}
    assert {"simfbo", "fedmsa", "fairfed", "fedpath"} <= {*named}


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from([np.float32, np.float64]), st.integers(1, 9))
def test_a_mean_is_off_by_its_rounding_and_no_more(data, kind, clients):
    """Against exact fractions: half a step a client, over the sum of the shares; and for the share itself."""
    width = 32 if kind == np.float32 else 64
    numbers = st.floats(-1000, 1000, width=width)
    replies = np.array([[data.draw(numbers)] for _ in range(clients)], kind)
    weights = np.array([data.draw(st.integers(1, 500)) for _ in range(clients)], float)
    (mean,) = mean_on_host([replies], weights, weights)
    exact = sum(Fraction(float(w)) * Fraction(float(r)) for w, (r,) in zip(weights, replies, strict=True)) / int(
        weights.sum()
    )
    step = 2.0 ** -(NARROW if kind == np.float32 else WIDE).bits
    # The shares add up to more than a half.  A share that is off by half a step moves the mean by as much of its size.
    allowed = clients * step * (1 + abs(float(exact))) + np.finfo(kind).eps * abs(float(exact))
    assert abs(float(mean[0]) - float(exact)) <= allowed


@given(st.lists(st.floats(-(2.0**50), 2.0**50), min_size=1, max_size=6))
def test_sums_that_must_be_exact_are(values):
    total = np.sum([exact_words(value) for value in values], axis=0, dtype=np.uint64)
    steps = [round(Fraction(value) * 2**84) for value in values]
    assert exact_sums(total) == float(Fraction(sum(steps), 2**84))


def test_the_estimator_offers_the_rounding_and_refuses_what_needs_single_replies():
    rng = np.random.default_rng(0)
    features, labels, groups, sites = (
        rng.normal(size=(90, 3)),
        rng.integers(2, size=90),
        rng.integers(2, size=90),
        np.arange(90) % 3,
    )
    fitted = [
        FairFederatedClassifier(method="fedavg", steps=4, local_steps=2, secure=secure, random_state=0).fit(
            features + labels[:, None], labels, sensitive_features=groups, clients=sites
        )
        for secure in (False, True)
    ]
    plain, summed = (model.predict_proba(features) for model in fitted)
    np.testing.assert_allclose(plain, summed, atol=1e-6)
    assert not np.array_equal(plain, summed)
    with pytest.raises(ValueError, match=r"fcfl needs every client's reply by itself, .* use fedpath"):
        FairFederatedClassifier(method="fcfl", secure=True).fit(
            features, labels, sensitive_features=groups, clients=sites
        )


def test_what_the_commands_say():
    assert (switched("on"), switched("off")) == (True, False)
    with pytest.raises(ValueError, match="must be on or off"):
        switched("perhaps")
    told = [
        how_seen(JobSettings("run", "fair", tuple("abcde"[:count]), secure=secure, min_sites=1))
        for count, secure in ((5, True), (5, False), (2, True))
    ]
    assert "sums over 4 sites or more, and no single reply" in told[0]
    assert told[1] == "no secure sums: the coordinator sees every site's replies"
    assert told[2].startswith("of fewer than three sites there are no secure sums")
