"""The garbage collector, over objects that stay."""

import gc
from math import inf

import pytest

from shared.process import memory


@pytest.fixture(autouse=True)
def _little_to_look_at():
    """What other tests have left is left alone: a pass over all of it takes a second.

    Nor is it looked at again afterwards, by which each full pass would take as long to the end.
    """
    gc.freeze()


def is_looked_at(thing):
    """Whether the next full pass of the collector looks at it."""
    return any(found is thing for found in gc.get_objects())


def test_what_survives_a_long_pass_is_left_alone():
    """The next pass does not look at it; what comes later is looked at."""
    before = []
    with memory.freezing_survivors(long_pass_s=0.0):
        assert is_looked_at(before)
        gc.collect(1)
        assert is_looked_at(before), "only full passes take long"
        gc.collect()
        assert not is_looked_at(before)
        after = []
        assert is_looked_at(after)


def test_what_survives_a_short_pass_is_looked_at_again():
    """A small kvd loses no cycle."""
    kept = []
    with memory.freezing_survivors(long_pass_s=inf):
        gc.collect()
        assert is_looked_at(kept)


def test_nothing_is_left_alone_afterwards():
    """The collector is again as it was."""
    with memory.freezing_survivors(long_pass_s=0.0):
        pass
    kept = []
    gc.collect()
    assert is_looked_at(kept)
