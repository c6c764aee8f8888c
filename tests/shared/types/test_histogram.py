"""Quantiles of a histogram."""

import pytest

from shared.types.histogram import Histogram


@pytest.mark.parametrize(
    ("share", "value"), [(0.25, 0.5), (0.5, 1.0), (0.75, 5.5), (1.0, 10.0)]
)  # fmt: skip
def test_a_quantile_lies_in_its_bucket(share, value):
    """In proportion to the counts, over all labels."""
    histogram = Histogram((1.0, 10.0))
    for seconds, label in ((0.2, "a"), (0.4, "b"), (2.0, "a"), (9.0, "b")):
        histogram.observe(seconds, label)
    assert histogram.quantile(share) == pytest.approx(value)
    assert (histogram.total.counts, histogram.total.total) == ([2, 2, 0], pytest.approx(11.6))


def test_extreme_quantiles():
    """An empty one has none; beyond the last bound it is at least that."""
    histogram = Histogram((1.0, 10.0))
    assert histogram.quantile(0.5) is None
    histogram.observe(99.0)
    assert histogram.quantile(0.5) == 10.0
