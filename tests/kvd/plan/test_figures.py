"""The capacity beyond which more stops paying."""

import pytest

from kvd.plan.figures import curves_of, knee_of
from tests.kvd.plan.plans import result, swept


@pytest.mark.parametrize(
    ("points", "index"),
    [
        ([(1, 0.0), (2, 0.5), (4, 0.9), (10, 1.0)], 2),
        ([(1, 0.0), (2, 0.9), (4, 0.95), (10, 1.0)], 1),
        ([(1, 0.0), (2, 0.5), (3, 1.0)], None),  # straight: every byte gains the same
        ([(1, 0.0), (2, 0.1), (3, 1.0)], None),  # bends the other way: more gains more
        ([(1, 0.800), (2, 0.805), (3, 0.806)], None),  # flat: the least suffices
        ([(1, 0.0), (2, 1.0)], None),
        ([(5, 0.0), (5, 0.5), (5, 1.0)], None),
    ],
)
def test_the_knee_is_the_point_farthest_above_the_straight_line(points, index):
    """With both axes scaled to 0..1; without one, none is named."""
    assert knee_of(points) == index


def test_a_curve_for_each_policy():
    """In the order of the sweep, with knee and cheapest point."""
    lru, belady = curves_of(swept().results)
    assert (lru.name, belady.name) == ("lru", "belady")
    assert (lru.knee, lru.cheapest) == (1, 2)
    assert [each.outcome.hits_tok for each in belady.results] == [0.5, 0.8, 0.9, 0.95]


def test_points_are_ordered_by_capacity():
    """The largest may have been swept first."""
    (curve,) = curves_of([result("lru", 8, 400, 0.9, 1), result("lru", 8, 100, 0.5, 2)])
    assert [each.outcome.hits_tok for each in curve.results] == [0.5, 0.9]


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ([(0, 8, 100), (0, 8, 200)], ["lru"]),
        ([(0, 8, 100), (0, 16, 100)], ["lru"]),
        ([(0, 6, 94), (0, 12, 188)], ["lru"]),  # proportions: DRAM grows with SSD
        ([(0, 8, 100), (0, 8, 200), (0, 16, 100), (0, 16, 200)], [
            "lru, DRAM 8 GB", "lru, DRAM 16 GB",
        ]),
        ([(1, 8, 100), (2, 8, 100)], ["lru, HBM 1 GB", "lru, HBM 2 GB"]),
    ],
)  # fmt: skip
def test_other_swept_values_make_their_own_curves(sizes, names):
    """There is one capacity axis: other values are in the curve's name."""
    results = [result("lru", dram, ssd, 0.5, 1, hbm_gb=hbm) for hbm, dram, ssd in sizes]
    assert [curve.name for curve in curves_of(results)] == names
