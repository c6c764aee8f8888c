"""kvd's table of metrics has a row for every counter."""

from kvd.core.state.outbox import COUNTERS
from kvd.metrics.table import METRICS


def test_every_counter_is_exported():
    """Each of the core's counters is in a row, and each row's counters exist."""
    assert METRICS.counters() == set(COUNTERS)


def test_names_have_the_prefix():
    """Every name says whose it is."""
    assert all(row.name.startswith(("kvd_", "process_")) for row in METRICS)
