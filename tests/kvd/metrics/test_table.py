"""kvd's table of metrics has a row for everything that is counted."""

from kvd.core.state.outbox import COUNTERS
from kvd.metrics.table import METRICS


def test_every_counter_is_exported():
    """Each of the core's counters is in some row, and each row's counters exist."""
    assert METRICS.counters() == set(COUNTERS)


def test_names():
    """Every name says whose it is."""
    assert all(row.name.startswith(("kvd_", "process_")) for row in METRICS)
