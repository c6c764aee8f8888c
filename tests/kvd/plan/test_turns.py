"""Running means of a server's turns."""

import pytest

from kvd.plan.turns import Pace
from shared.types.units import NS_PER_S


def test_the_mean_starts_with_the_first_value_and_moves_slowly():
    """Each value moves it by a sixteenth."""
    pace = Pace()
    pace.on_start(5 * NS_PER_S)
    assert pace.interval_ns == 0.0  # there is none before the second start
    pace.on_start(9 * NS_PER_S)
    assert pace.interval_ns == 4 * NS_PER_S
    pace.on_start(10 * NS_PER_S)
    assert pace.interval_ns == pytest.approx((4 - 3 / 16) * NS_PER_S)
    assert pace.starts.per_s(10 * NS_PER_S) == pytest.approx(2 / 5)
    pace.on_end(5 * NS_PER_S, 13 * NS_PER_S)
    assert pace.turn_s == 8.0
    pace.on_end(9 * NS_PER_S, 25 * NS_PER_S)
    assert pace.turn_s == 8.5
