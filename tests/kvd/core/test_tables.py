"""The small tables: slots, extents, TTL clock."""

import random

import pytest

from kvd.core.eviction.ttl import TtlClock
from kvd.core.records.extent_shape import ExtentShape
from kvd.core.state.extents import ExtentTable
from kvd.core.state.slots import SlotState, SlotTable
from shared.types.kv_layout import Component, KVLayout, Layer
from tests.kvd.core.turns import A, B


def test_a_slot_gets_a_new_generation_each_time():
    """A late reader can tell that the slot has another owner now."""
    slots = SlotTable(1)
    slot_id, generation = slots.allocate()
    assert slots.state(slot_id) is SlotState.WRITING
    slots.commit(slot_id)
    slots.free(slot_id)
    assert slots.allocate() == (slot_id, generation + 1)
    assert len(slots) == 1


def test_slots_are_freed_and_committed_once():
    """Anything else violates an invariant."""
    slots = SlotTable(1)
    with pytest.raises(AssertionError):
        slots.free(0)
    with pytest.raises(AssertionError):
        slots.commit(0)


def test_an_arena_is_created_and_given_up():
    """All slots come and go at once, and only when none is in use."""
    slots = SlotTable(0)
    slots.add(2)
    slot_id, _ = slots.allocate()
    with pytest.raises(AssertionError):
        slots.drop()
    slots.free(slot_id)
    slots.drop()
    assert (len(slots), slots.num_free) == (0, 0)


def test_returned_extents_are_reused_first():
    """The volume grows only when no extent was given back."""
    extents = ExtentTable(3, sectors_per_extent=5)
    assert [extents.allocate(5), extents.allocate(5)] == [0, 5]
    extents.free(0, 5)
    assert [extents.allocate(5), extents.allocate(4)] == [0, 10]
    assert (extents.num_free, extents.num_used, len(extents)) == (0, 3, 3)
    assert extents.num_used_sectors == 14
    assert not extents.can_allocate(1)
    with pytest.raises(AssertionError):
        extents.allocate(5)


def test_short_runs_share_an_extent():
    """First fit among packing extents; an empty one is whole again."""
    extents = ExtentTable(2, sectors_per_extent=8)
    runs = [extents.allocate(n) for n in (3, 4, 1, 2)]
    assert runs == [0, 3, 7, 8]
    assert extents.num_free == 0
    assert extents.can_allocate(4)
    assert not extents.can_allocate(8)
    extents.free(3, 4)
    assert extents.allocate(2) == 3
    assert extents.num_free_packed == 2 + 6
    for run, num_sectors in zip((0, 3, 7, 8), (3, 2, 1, 2), strict=True):
        extents.free(run, num_sectors)
    assert (extents.num_free, extents.num_used_sectors, extents.num_free_packed) == (2, 0, 0)
    with pytest.raises(KeyError):
        extents.free(0, 3)


def test_packing_agrees_with_a_list_of_sectors():
    """With any allocations, runs never overlap and none is lost."""
    rng = random.Random(7)  # noqa: S311
    extents = ExtentTable(40, sectors_per_extent=70)
    taken: dict[int, int] = {}
    for _ in range(3000):
        num_sectors = rng.choice([1, 2, 3, 9, 20, 35, 36, 70])
        if taken and rng.random() < 0.48:
            run = rng.choice(list(taken))
            extents.free(run, taken.pop(run))
        elif extents.can_allocate(num_sectors):
            taken[extents.allocate(num_sectors)] = num_sectors
        sectors = [s for run, n in taken.items() for s in range(run, run + n)]
        assert len(sectors) == len(set(sectors)) == extents.num_used_sectors
        assert extents.num_used == len({sector // 70 for sector in sectors})


def test_fewer_extents_may_be_allowed_than_are_in_use():
    """Used extents stay; none is granted until enough are given back."""
    extents = ExtentTable(3, sectors_per_extent=5)
    runs = [extents.allocate(5) for _ in range(3)]
    extents.set_capacity(1)
    assert extents.num_free == 0
    for run in runs[:2]:
        extents.free(run, 5)
    assert extents.num_free == 0
    extents.set_capacity(4)
    assert extents.num_free == 3


def test_restored_extents_leave_their_gaps_free():
    """Recovery finds some extents in use; the others can be granted."""
    extents = ExtentTable(4, sectors_per_extent=5)
    assert extents.restore([5, 10, 12], [5, 2, 2]).all()
    assert [extents.allocate(n) for n in (5, 1, 5)] == [0, 14, 15]
    assert (extents.num_used, extents.num_used_sectors) == (4, 5 + 4 + 5 + 1 + 5)


def test_impossible_rows_are_not_restored():
    """Outside the tier, across an extent's end, or overlapping another: the first one counts."""
    extents = ExtentTable(4, sectors_per_extent=5)
    rows = [(5, 5), (5, 5), (5, 2), (0, 2), (1, 2), (0, 5), (8, 4), (20, 5), (-5, 5), (19, 2)]
    is_sound = extents.restore([run for run, _ in rows], [n for _, n in rows])
    assert is_sound.tolist() == [True, False, False, True] + [False] * 6
    assert extents.num_used_sectors == 7


def test_an_empty_table_is_restored():
    """No rows, nothing in use."""
    extents = ExtentTable(2, sectors_per_extent=5)
    assert extents.restore([], []).tolist() == []
    assert extents.num_free == 2


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


def test_a_dropped_session_leaves_the_clock():
    """However far its deadline was; the next one counts, and it may come back."""
    clock = TtlClock()
    for deadline_ns, key in ((10, A), (15, B)):
        clock.schedule(key, deadline_ns)
    clock.forget(A)
    clock.forget(A)
    assert (len(clock), clock.next_deadline_ns()) == (1, 15)
    clock.schedule(A, 20)
    assert [clock.pop_due(40), clock.pop_due(40), clock.pop_due(40)] == [B, A, None]
    assert len(clock) == 0


def test_an_extent_has_the_used_rows_only():
    """Header, then each layer's rows in whole sectors; a full block is as large as its slot."""
    layers = (
        Layer((Component("k", (4, 256), "float32"),)),
        Layer(()),
        Layer((Component("k", (1, 8), "float32"), Component("v", (1, 8), "float32"))),
    )
    shape = ExtentShape(KVLayout("0f", layers, block_tokens=16))
    assert shape.header_bytes == 4096
    assert [shape.num_sectors(n) for n in (1, 2, 16)] == [3, 4, 18]
    assert shape.sectors_per_extent == shape.num_sectors(16)


def test_a_restored_clock_continues():
    """It has one entry per session, which can be moved and removed."""
    clock = TtlClock()
    clock.restore([(5, A), (9, B)])
    assert (len(clock), clock.next_deadline_ns()) == (2, 5)
    clock.schedule(B, 3)
    clock.forget(A)
    assert (clock.next_deadline_ns(), clock.pop_due(2), clock.pop_due(3)) == (3, None, B)
    assert clock.pop_due(100) is None
    assert len(clock) == 0


def test_an_adopted_slot_keeps_its_generation():
    """The next owner gets a later one."""
    slots = SlotTable(2)
    slots.adopt(0, 7, is_committed=True)
    slots.adopt(1, 3, is_committed=False)
    slots.finish_adoption()
    assert (slots.num_free, slots.state(0), slots.state(1)) == (
        0,
        SlotState.COMMITTED,
        SlotState.WRITING,
    )
    slots.free(0)
    assert slots.allocate() == (0, 8)
    assert SlotTable(1).allocate() == (0, 1)


def test_low_slots_are_taken_first():
    """After a start, too: the used part of an arena stays at its beginning."""
    slots = SlotTable(4)
    slots.adopt(1, 1, is_committed=True)
    slots.finish_adoption()
    assert [slots.allocate()[0] for _ in range(3)] == [0, 2, 3]
    slots.free(2)
    slots.free(0)
    slots.mark_unwiped()
    assert slots.take_unwiped(1) == [2], "the one that has been free longest"
    assert slots.allocate()[0] == 0


def test_a_slot_is_unwiped_until_it_was_zeroed():
    """Whatever it is used for meanwhile; wiped slots are allocated first."""
    slots = SlotTable(3)
    filled, _ = slots.allocate()
    slots.mark_unwiped()
    slots.commit(filled)
    assert (slots.num_free, slots.num_unwiped) == (2, 2)
    assert slots.take_unwiped(1) == [2]
    slots.free(2)
    assert [slots.allocate()[0] for _ in range(2)] == [2, 1]
    for slot_id in (filled, 1, 2):
        slots.free(slot_id)
    assert slots.take_unwiped(3) == [filled, 1]
