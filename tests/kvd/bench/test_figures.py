"""Latencies of caches that are measured in alternating rounds."""

import pytest

from kvd.bench.figures import Rounds


def _two_rounds() -> Rounds:
    rounds = Rounds("core")
    # the machine slows down: the ratio does not change
    for small, large in ((1e-6, 2e-6), (3e-6, 6e-6)):
        rounds.begin(("load",), 10)["load"] += [small] * 3
        rounds.begin(("load",), 200)["load"] += [large] * 3
    return rounds


def test_latencies_are_taken_over_all_rounds():
    found = _two_rounds().latencies()
    assert [(entry.operation, entry.num_sessions, entry.num_calls) for entry in found] == [
        ("load", 10, 6),
        ("load", 200, 6),
    ]
    assert found[0].p50_us == pytest.approx(2.0)


def test_growth_ignores_a_machine_that_slows_down_between_rounds():
    (found,) = _two_rounds().growths(10, 200)
    assert found.ratio.low == pytest.approx(2.0)
    assert found.ratio.high == pytest.approx(2.0)
