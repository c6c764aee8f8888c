"""Ratios of pairs."""

import pytest

from kvd.bench.figures import comparison
from shared.measuring.statistics import Pair, Sample, growth


def test_one_bad_pair_does_not_move_the_median_ratio():
    good = Pair(kvd=Sample(100, 1.25), floor=Sample(100, 1.0))
    bad = Pair(kvd=Sample(100, 50.0), floor=Sample(100, 1.0))
    found = comparison("store", [good, bad, good], slice_bytes=10, io_bytes=0, num_threads=2)
    assert found.ratio.median == pytest.approx(0.8)
    assert found.num_pairs == 3
    assert found.kvd_bytes_per_s == pytest.approx(80)
    assert found.floor_bytes_per_s == pytest.approx(100)


def test_a_ratio_compares_speeds_so_that_halves_of_different_sizes_can_be_paired():
    pair = Pair(kvd=Sample(50, 1.0), floor=Sample(100, 1.0))
    assert pair.ratio == pytest.approx(0.5)


def test_growth_compares_round_by_round():
    assert growth([1.0, 10.0, 2.0], [1.5, 15.0, 3.0]).median == pytest.approx(1.5)
    with pytest.raises(ValueError, match="shorter"):
        growth([1.0], [])
