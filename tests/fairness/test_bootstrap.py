import math

import numpy as np
import pytest

from fedbilevel.fairness import (
    Interval,
    bootstrap_difference,
    bootstrap_interval,
    demographic_parity_difference,
    equal_opportunity_difference,
)


def rows(size=400, seed=0, noise=(0.1, 0.3)):
    """Two groups; the second group's labels are predicted wrongly more often."""
    generator = np.random.default_rng(seed)
    groups = generator.integers(2, size=size)
    y_true = generator.integers(2, size=size)
    wrong = generator.random(size) < np.take(noise, groups)
    return y_true, np.where(wrong, 1 - y_true, y_true), groups


def test_named_metric_equals_the_function_of_that_name():
    y_true, y_pred, groups = rows()
    for name, function in (
        ("equal_opportunity", equal_opportunity_difference),
        ("demographic_parity", demographic_parity_difference),
    ):
        named = bootstrap_interval(name, y_true, y_pred, sensitive_features=groups, resamples=50)
        called = bootstrap_interval(function, y_true, y_pred, sensitive_features=groups, resamples=50)
        assert named == called
        assert named.estimate == function(y_true, y_pred, sensitive_features=groups)


def test_named_metric_with_weights_equals_the_function():
    y_true, y_pred, groups = rows()
    weight = np.random.default_rng(1).random(len(groups))
    options = {"sensitive_features": groups, "resamples": 50, "sample_weight": weight}
    named = bootstrap_interval("equal_opportunity", y_true, y_pred, **options)
    called = bootstrap_interval(equal_opportunity_difference, y_true, y_pred, **options)
    assert named == called
    estimate = bootstrap_interval("accuracy", y_true, y_pred, **options).estimate
    assert estimate == pytest.approx(np.average(y_true == y_pred, weights=weight))


@pytest.mark.parametrize(
    ("strata", "fixed"), [("cell", (True, True)), ("group", (True, False)), ("none", (False, False))]
)
def test_rows_are_redrawn_within_their_stratum(strata, fixed):
    y_true, y_pred, groups = rows(60)
    seen = []

    def spy(true, predicted, *, sensitive_features):
        assert len(true) == len(predicted) == len(sensitive_features) == 60
        seen.append((sum(sensitive_features), sum(true * sensitive_features), sum(predicted)))
        return 0.0

    bootstrap_interval(spy, y_true, y_pred, sensitive_features=groups, strata=strata, resamples=40)
    group_sizes, positives, predicted = (len(set(column)) for column in zip(*seen, strict=True))
    assert (group_sizes == 1, positives == 1) == fixed
    assert predicted > 1


def test_same_seed_same_interval_other_seed_another():
    y_true, y_pred, groups = rows()
    one, again, other = (
        bootstrap_interval("accuracy", y_true, y_pred, sensitive_features=groups, resamples=60, seed=seed)
        for seed in (3, 3, 4)
    )
    assert one == again != other


def test_width_for_the_accuracy_is_that_of_a_proportion():
    generator = np.random.default_rng(0)
    y_true = np.zeros(2_000, dtype=int)
    y_pred = (generator.random(2_000) < 0.2).astype(int)
    interval = bootstrap_interval("accuracy", y_true, y_pred, sensitive_features=["a"] * 2_000, resamples=4_000)
    p = interval.estimate
    # The quantiles of 4,000 draws have a standard error of about 3 % of the width.
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * math.sqrt(p * (1 - p) / 2_000), rel=0.1)
    assert interval.low < p < interval.high


def test_coverage_of_a_difference_between_two_groups():
    """True selection rates .3 and .6: the 95 % interval holds the true gap in about 95 % of 200 samples."""
    hits = 0
    for seed in range(200):
        generator = np.random.default_rng([seed, 5])
        groups = np.repeat([0, 1], 150)
        y_pred = (generator.random(300) < np.take([0.3, 0.6], groups)).astype(int)
        interval = bootstrap_interval(
            "demographic_parity", np.zeros(300, dtype=int), y_pred, sensitive_features=groups, resamples=150, seed=seed
        )
        hits += interval.low <= 0.3 <= interval.high
    # Binomial(200, .95) lies in 180..198 with probability .998; percentile intervals run a little short.
    assert 178 <= hits <= 198


def test_difference_to_a_baseline_uses_the_same_rows_for_both():
    y_true, y_pred, groups = rows()
    none = bootstrap_difference("accuracy", y_true, y_pred, y_pred, sensitive_features=groups, resamples=50)
    assert (none.estimate, none.low, none.high) == (0.0, 0.0, 0.0)
    assert not none.excludes_zero
    better = y_pred.copy()
    better[:40] = y_true[:40]
    gain = bootstrap_difference("accuracy", y_true, better, y_pred, sensitive_features=groups, resamples=300)
    assert gain.estimate == pytest.approx(np.mean(better == y_true) - np.mean(y_pred == y_true))
    assert gain.excludes_zero
    alone = bootstrap_interval("accuracy", y_true, better, sensitive_features=groups, resamples=300)
    assert gain.high - gain.low < alone.high - alone.low


def test_resamples_without_a_value_are_counted():
    y_true, y_pred = [1, 0, 1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]
    options = {"sensitive_features": list("aabbaabb"), "strata": "none", "resamples": 200}
    for metric in ("equal_opportunity", equal_opportunity_difference):
        interval = bootstrap_interval(metric, y_true, y_pred, **options)
        assert 0 < interval.undefined < 200
    assert bootstrap_interval("equal_opportunity", y_true, y_pred, **options | {"strata": "cell"}).undefined == 0


def test_a_metric_that_fails_on_the_rows_themselves_raises():
    with pytest.raises(ValueError, match="one class only, no positives"):
        bootstrap_interval(equal_opportunity_difference, [0, 0], [0, 1], sensitive_features=["a", "b"])
    with pytest.raises(ValueError, match="undefined in every resample"):
        bootstrap_interval("equal_opportunity", [1, 0], [0, 1], sensitive_features=["a", "b"], resamples=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "eqopp"}, "metric='eqopp' is unknown; choose one of equal_opportunity, equalized_odds"),
        ({"method": "other"}, "method='other' is unknown"),
        ({"strata": "label"}, "strata='label' is unknown; choose one of cell, group, none"),
        ({"level": 95}, "level=95 must lie between 0 and 1, like 0.95"),
        ({"resamples": 0}, "resamples=0 must be at least 1"),
    ],
)
def test_bad_options(change, message):
    arguments = {"metric": "accuracy", "y_true": [0, 1], "y_pred": [0, 1], "sensitive_features": ["a", "b"]}
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(**(arguments | change))


def test_interval_record():
    assert Interval(1, 0.5, 2, 0.95, "student", 3).excludes_zero
    assert Interval(-1, -2, -0.5, 0.95, "student", 3).excludes_zero
    assert not Interval(1, -0.5, 2, 0.95, "student", 3).excludes_zero
