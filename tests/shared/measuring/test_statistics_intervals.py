"""Confidence intervals with known values."""

import math

import pytest

from shared.measuring.statistics import mean, share


def test_shares_have_wilsons_interval():
    """Wilson (1927); values as textbooks give them."""
    found = share(8, 10)
    assert (found.low, found.value, found.high) == pytest.approx((0.4902, 0.8, 0.9433), abs=1e-4)
    none, every = share(0, 10), share(10, 10)
    assert (none.low, none.high) == pytest.approx((0, 0.2775), abs=1e-4)
    assert (every.low, every.high) == pytest.approx((0.7225, 1), abs=1e-4)


def test_without_questions_the_interval_is_everything():
    """No question was asked."""
    assert (share(0, 0).low, share(0, 0).high) == (0, 1)


def test_the_interval_of_a_mean_follows_from_the_spread():
    """One value says nothing about the spread."""
    found = mean([1.0, 3.0, 2.0, 2.0])
    assert found.value == 2
    assert found.high - found.value == pytest.approx(1.959964 * math.sqrt(2 / 3 / 4))
    assert mean([5.0]).high == math.inf
