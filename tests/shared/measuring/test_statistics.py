"""Medians and quartiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.measuring.statistics import percentile, spread

SECONDS = st.floats(min_value=1e-6, max_value=1e3)


def test_a_percentile_between_two_values_is_interpolated():
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0], 0.0) == 1.0
    assert percentile([1.0, 2.0, 3.0], 1.0) == 3.0


def test_the_percentile_of_one_value_is_that_value():
    assert percentile([7.0], 0.99) == 7.0


def test_an_empty_list_has_no_percentile():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@given(st.lists(SECONDS, min_size=1))
def test_a_spread_is_ordered_and_lies_among_its_values(values):
    found = spread(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
