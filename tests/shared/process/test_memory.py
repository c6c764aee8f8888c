"""The garbage collector with many permanent objects."""

import gc
from math import inf

import pytest

from shared.process import memory


@pytest.fixture(autouse=True)
def _little_to_look_at():
    """Freeze objects of other tests: a full collection of them takes a second.

    They stay frozen, as each later full collection would take as long.
    """
    gc.freeze()


def is_looked_at(thing):
    """Return whether the next full collection scans it."""
    return any(found is thing for found in gc.get_objects())


def test_survivors_of_a_long_collection_are_frozen():
    """The next one does not scan them; later objects are scanned."""
    before = []
    with memory.freezing_survivors(long_pass_s=0.0):
        assert is_looked_at(before)
        gc.collect(1)
        assert is_looked_at(before), "only full passes take long"
        gc.collect()
        assert not is_looked_at(before)
        after = []
        assert is_looked_at(after)


def test_survivors_of_a_short_collection_are_not_frozen():
    """A small kvd leaks no cycle."""
    kept = []
    with memory.freezing_survivors(long_pass_s=inf):
        gc.collect()
        assert is_looked_at(kept)


def test_the_collector_is_restored_afterwards():
    """The collector is again as it was."""
    with memory.freezing_survivors(long_pass_s=0.0):
        pass
    kept = []
    gc.collect()
    assert is_looked_at(kept)
