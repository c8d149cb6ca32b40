"""Axes: domains hold what they should, ticks are round, numbers are written as the page writes them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.report.figures import _measured, _up_axis
from fedbilevel.report.reading import Metric
from fedbilevel.report.scales import Axis, Scale, domain, ladder, shown, si, signed, tick_labels, ticks

numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), st.booleans(), st.sampled_from([-1, 1]))
def test_all_points_are_in_sight(values, log, sign):
    values = values if log else [sign * value for value in values]
    low, high = domain(Axis("", log=log), values, [], [])
    assert low < min(values)
    assert high > max(values)
    assert low > 0 or not log


def test_whiskers_do_not_flatten_the_points():
    low, high = domain(Axis(""), [0.1, 0.2, 0.15], [-5.0, 0.19, 0.14], [0.11, 9.0, 0.16])
    assert low == pytest.approx(0.1 - 0.15 - 0.06 * 0.4)
    assert high == pytest.approx(0.2 + 0.15 + 0.06 * 0.4)
    # Where most are long, they are what there is to see.
    low, high = domain(Axis(""), [0.851, 0.852], [0.84, 0.84], [0.86, 0.86])
    assert low < 0.8405
    assert high > 0.8595
    assert domain(Axis(""), [0.1], [-5.0], [9.0])[0] < -5  # one point alone keeps its whiskers


def test_ends_of_an_axis():
    assert domain(Axis("", low=0, high=1), [0.4], [], []) == (0, 1)
    assert domain(Axis("", floor=0, include=0), [5.0], [], [])[0] == 0
    assert domain(Axis("", ceiling=1), [0.9, 1.0], [], [])[1] == 1
    low, high = domain(Axis("", include=0), [3.0, 5.0], [], [])
    assert low < 0 < 5 < high
    low, high = domain(Axis(""), [math.nan], [], [])
    assert low < high


@given(numbers, st.floats(1e-3, 1e5), st.integers(3, 8))
def test_ticks_are_inside_and_even(low, width, count):
    values = ticks(low, low + width, count)
    assert 2 <= len(values) <= count + 2
    assert all(low - 1e-6 * width <= value <= low + width * (1 + 1e-6) for value in values)
    texts = tick_labels(values, "rate")
    assert len(set(texts)) == len(texts) or width < 1e-4 * abs(low)


def test_ticks_of_a_logarithmic_axis():
    assert ticks(0.5, 2000, 6, log=True) == [1, 10, 100, 1000]
    assert ticks(150, 1200, 4, log=True) == [200, 500, 1000]
    assert tick_labels([1e-4, 1e-3], "number", log=True) == ["0.0001", "0.001"]


@given(st.lists(st.tuples(numbers, st.floats(1e-2, 1e3)), min_size=1, max_size=5))
def test_a_ladder_holds_the_ticks_of_every_window(series):
    spans = [(low, low + width) for low, width in series]
    sets = ladder(Axis(""), spans)
    for low in (low for low, _ in spans):
        for high in (high for _, high in spans if high > low):
            wanted = [float(f"{value:.9g}") for value in ticks(*domain(Axis(""), [low, high], [], []), 6)]
            assert any(set(wanted) <= set(values) for values in sets)


def test_texts():
    assert tick_labels([-0.1, -0.05, 0.0, 0.05], "rate") == ["−.10", "−.05", "0", ".05"]
    assert tick_labels([0, 500_000, 1_000_000], "bytes") == ["0", "500\u00a0kB", "1\u00a0MB"]
    assert [shown(value, "rate") for value in (0.84833, 1.0, math.nan)] == [".8483", "1.0000", "–"]
    assert shown(6000, "count") == "6,000"
    assert (signed(0.01, "rate"), signed(-0.01, "rate")) == ("+.0100", "−.0100")
    assert si(999_700, "B") == "1\u00a0MB"


def test_a_scale_maps_its_ends():
    scale = Scale(1, 100, 0, 10, log=True)
    assert (scale.at(1), scale.at(10), scale.at(100)) == (0, 5, 10)
    assert Scale(0, 4, 10, 0).at(1) == 7.5


def test_no_axis_shows_scores_above_one():
    """Student's intervals of few draws go beyond what a score can be."""
    score = Metric("score", "score", "Score", "higher", "number")
    for axis in (_measured(score), _up_axis(score, [0.7, 0.9])):
        assert domain(axis, [0.7, 0.9], [0.4, 0.8], [1.2, 1.0])[1] == 1
    assert domain(_measured(score._replace(column="objective")), [0.7, 0.9], [0.4, 0.8], [1.2, 1.0])[1] > 1
