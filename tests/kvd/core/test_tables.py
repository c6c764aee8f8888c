"""The small tables: slots, extents, TTL clock."""

import pytest

from kvd.core.extents import ExtentTable
from kvd.core.slots import SlotState, SlotTable
from kvd.core.ttl import TtlClock
from tests.kvd.core.turns import A, B


def test_a_slot_gets_a_new_generation_each_time():
    """A late reader can tell that the slot is somebody else's now."""
    slots = SlotTable(1)
    slot_id, generation = slots.allocate()
    assert slots.state(slot_id) is SlotState.WRITING
    slots.commit(slot_id)
    slots.free(slot_id)
    assert slots.allocate() == (slot_id, generation + 1)
    assert len(slots) == 1


def test_slots_are_freed_and_committed_once():
    """Anything else is a broken invariant."""
    slots = SlotTable(1)
    with pytest.raises(AssertionError):
        slots.free(0)
    with pytest.raises(AssertionError):
        slots.commit(0)


def test_returned_extents_are_reused_first():
    """The volume grows only when nothing was given back."""
    extents = ExtentTable(3)
    assert [extents.allocate(), extents.allocate()] == [0, 1]
    extents.free(0)
    assert [extents.allocate(), extents.allocate()] == [0, 2]
    assert (extents.num_free, extents.num_used, len(extents)) == (0, 3, 3)
    with pytest.raises(AssertionError):
        extents.allocate()


def test_restored_extents_leave_their_gaps_free():
    """Recovery finds some extents in use; the others can be had."""
    extents = ExtentTable(4)
    extents.restore({1, 2})
    assert [extents.allocate(), extents.allocate()] == [0, 3]


def test_the_earliest_deadline_counts():
    """An earlier deadline replaces a later one; the later entry is skipped."""
    clock = TtlClock()
    clock.schedule(A, None)
    clock.schedule(A, 20)
    clock.schedule(A, 30)
    clock.schedule(A, 10)
    clock.schedule(B, 15)
    assert clock.next_deadline_ns() == 10
    assert clock.pop_due(9) is None
    assert [clock.pop_due(40), clock.pop_due(40), clock.pop_due(40)] == [A, B, None]
