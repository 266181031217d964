"""Paired statistics against scipy's paired t test and against numbers worked out by hand."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from sparkgpt.report.statistics import paired, t_interval, verdict

LOSSES = st.lists(
    st.tuples(st.floats(1, 3, width=32), st.floats(1, 3, width=32)), min_size=2, max_size=12
)


@given(LOSSES)
def test_interval_is_that_of_scipys_paired_test(pairs):
    a, b = zip(*pairs, strict=True)
    differences = [x - y for x, y in pairs]
    assume(max(differences) - min(differences) > 1e-3)
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    result = paired(dict(enumerate(a)), dict(enumerate(b)))
    assert result.interval == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-9)
    assert result.mean == pytest.approx(sum(differences) / len(differences))


def test_two_pairs_by_hand():
    # Differences -0.10 and -0.11: mean -0.105, s = 0.01 / sqrt(2), s / sqrt(2) = 0.005,
    # and t(0.975, 1) = tan(0.475 pi) = 12.7062.
    result = paired({0: 2.31, 1: 2.33}, {0: 2.41, 1: 2.44})
    half = 0.005 * math.tan(0.475 * math.pi)
    assert half == pytest.approx(0.063531, abs=1e-6)
    assert result.interval == pytest.approx((-0.105 - half, -0.105 + half))
    assert (result.wins_a, result.wins_b, result.pairs) == (2, 0, 2)
    assert verdict("dense", "adamw", result) == "dense lower"
    assert verdict("adamw", "dense", paired({0: 2.41, 1: 2.44}, {0: 2.31, 1: 2.33})) == (
        "dense lower"
    )


def test_two_wins_are_no_verdict_when_the_interval_holds_zero():
    result = paired({0: 2.0, 1: 2.0}, {0: 2.01, 1: 2.09})
    assert result.wins_a == 2
    assert result.interval[0] < 0 < result.interval[1]
    assert "no difference shown; too few pairs" in verdict("a", "b", result)


def test_one_seed_never_has_a_winner():
    result = paired({0: 1.0, 1: 5.0}, {0: 3.0})
    assert result.interval is None and t_interval([1.0]) is None
    assert verdict("a", "b", result) == "one pair: no verdict"


def test_five_pairs_around_zero_show_no_difference():
    result = paired(dict(enumerate([1, 2, 1, 2, 1.5])), dict(enumerate([2, 1, 2, 1, 1.5])))
    assert verdict("a", "b", result) == "no difference shown"
    assert (result.wins_a, result.wins_b) == (2, 2)  # the tie is nobody's
