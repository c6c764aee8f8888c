"""Writes: when the policies ask for them, what they wait for, and their failures."""

import pytest

from kvd.core.io.writing import FIRST_RETRY_NS
from kvd.core.records.actions import (
    DropBlock,
    Emit,
    HashSlots,
    IoOutcome,
    PutBlock,
    VerifySlot,
    WriteBlock,
)
from kvd.core.records.tier import Admission
from shared.types.units import SECTOR_BYTES
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
    TWOS,
    A,
    B,
    C,
    complete_store,
    counter,
    load,
    new_world,
    prepare_load,
    prepare_store,
    store,
    tiers_of,
    wait,
)
from tests.property.cache_world import SHAPE


def test_a_row_is_put_after_its_data_is_durable():
    """PutBlock comes with the outcome of the write; tokens and checksums are in the extent."""
    world = new_world()
    store(world, A, ONES, settle=False)
    assert not any(isinstance(action, PutBlock) for action in world.index.uncommitted)
    assert world.engine.inspection.stats().dirty_bytes == world.engine.layout.block_bytes
    world.finish_io(next(iter(world.io)), IoOutcome.OK)
    rows = [action.block for action in world.index.uncommitted if isinstance(action, PutBlock)]
    assert [row.num_tokens for row in rows] == [4]
    stored = world.extents[rows[0].extent].stored
    assert (len(stored.token_ids), len(stored.checksums)) == (16, 8)
    assert world.engine.inspection.stats().dirty_bytes == 0


def test_a_failed_write_degrades_the_tier_and_is_tried_again():
    """Writes pause with a growing delay; the first success ends that."""
    world = new_world()
    store(world, A, ONES, settle=False)
    for delay_ns in (FIRST_RETRY_NS, 2 * FIRST_RETRY_NS):
        for op_id in sorted(world.io):
            world.finish_io(op_id, IoOutcome.FULL)
        assert world.engine.inspection.stats().tiers[1].degraded_reason == "full"
        assert world.engine.next_deadline_ns() == world.now_ns + delay_ns
        store(world, B, TWOS, settle=False)
        assert not world.io, "writes are held back"
        world.now_ns += delay_ns
        world.engine.expire()
        world.pump()
    world.finish_io(min(world.io), IoOutcome.OK)
    assert world.engine.inspection.stats().tiers[1].degraded_reason == ""
    names = [event.name for event in world.events if isinstance(event, Emit)]
    assert names.count("ssd_degraded") == names.count("ssd_recovered") == 1
    assert world.engine.next_deadline_ns() is None
    world.finish_all(WriteBlock, IoOutcome.FULL)
    store(world, C, THREES, settle=False)
    world.finish_all(WriteBlock, IoOutcome.FULL)
    assert world.engine.next_deadline_ns() == world.now_ns + FIRST_RETRY_NS, "as at first"


def test_simultaneous_failures_count_once():
    """Several writes failing together do not multiply the delay."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES, settle=False)
    for op_id in sorted(world.io):
        world.finish_io(op_id, IoOutcome.TRANSIENT)
    assert world.engine.next_deadline_ns() == world.now_ns + FIRST_RETRY_NS
    assert counter(world, "write_errors") == 3


def test_a_degraded_tier_does_not_block_stores():
    """With writes paused, dirty blocks of the coldest session make room."""
    world = new_world(num_slots=1)
    store(world, A, ONES, settle=False)
    world.finish_io(next(iter(world.io)), IoOutcome.FULL)
    answer = store(world, B, TWOS, settle=False)
    assert len(answer.blocks) == 1
    assert world.engine.inspection.info(A) is None


def test_a_write_waits_for_the_extent_of_a_dropped_row():
    """An extent is reused only after the removal of its row is committed."""
    world = new_world(num_slots=4, num_extents=1)
    store(world, A, ONES)
    store(world, B, TWOS, settle=False)
    assert not world.io
    drops = [action for action in world.index.uncommitted if isinstance(action, DropBlock)]
    assert len(drops) == 1
    world.commit(len(world.index.uncommitted))
    assert [type(action) for action in world.io.values()] == [WriteBlock]
    assert tiers_of(world, A) == ["D"]


def test_a_block_dropped_while_it_is_written_gives_back_both_places():
    """A flush does not wait for writes; their outcome finds no block."""
    world = new_world()
    store(world, A, ONES, settle=False)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.finish_io(next(iter(world.io)), IoOutcome.OK)
    assert [tier.used_bytes for tier in world.engine.inspection.stats().tiers] == [0, 0]


def test_a_dropped_block_whose_write_fails_leaves_nothing():
    """A failed write of an unwanted block is not tried again."""
    world = new_world()
    store(world, A, ONES, settle=False)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.finish_io(next(iter(world.io)), IoOutcome.TRANSIENT)
    assert [tier.used_bytes for tier in world.engine.inspection.stats().tiers] == [0, 0]
    assert world.engine.next_deadline_ns() is None


def test_nothing_is_written_before_it_is_hashed():
    """A hash that fails leaves the block in DRAM only, until its session stores again."""
    world = new_world()
    complete_store(world, prepare_store(world, A, ONES))
    world.finish_all(HashSlots, IoOutcome.TRANSIENT)
    assert not world.io
    assert (counter(world, "hash_errors"), world.engine.inspection.stats().num_unhashed) == (1, 1)
    store(world, A, ONES)
    assert tiers_of(world, A) == ["DS"]
    assert world.engine.inspection.stats().num_unhashed == 0


def test_a_block_dropped_while_it_is_hashed_leaves_nothing():
    """Its checksums are ignored."""
    world = new_world()
    complete_store(world, prepare_store(world, A, ONES))
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.quiesce()
    assert [tier.used_bytes for tier in world.engine.inspection.stats().tiers] == [0, 0]


@pytest.mark.parametrize(
    ("max_write_bytes", "num_writes"), [(1, 1), (SHAPE.full_bytes, 1), (SHAPE.full_bytes + 1, 2)]
)
def test_active_writes_are_bounded(max_write_bytes, num_writes):
    """The next one is issued when one has ended; the last one may exceed the bound."""
    world = new_world(max_write_bytes=max_write_bytes)
    store(world, A, ONES + TWOS + THREES, settle=False)
    assert len(world.io_of(WriteBlock)) == num_writes
    world.finish_io(world.io_of(WriteBlock)[0])
    assert len(world.io_of(WriteBlock)) == num_writes
    world.quiesce()
    assert tiers_of(world, A) == ["DS"] * 3


def test_fewer_extents_than_are_in_use_empty_the_tier_of_the_coldest():
    """Rows go until the rest fits; DRAM keeps its copies."""
    world = new_world()
    store(world, A, ONES + TWOS)
    store(world, B, THREES)
    world.engine.writes.set_capacity(1)
    world.pump()
    world.quiesce()
    assert (tiers_of(world, A), tiers_of(world, B)) == (["D", "D"], ["DS"])


def test_partial_blocks_share_extents():
    """Eight one-token blocks need four extents, not eight."""
    world = new_world(num_extents=4)
    for key in (A, B, C):
        store(world, key, [key.session_id.encode()[0]])
    used_bytes = world.engine.inspection.stats().tiers[1].used_bytes
    assert [tiers_of(world, key) for key in (A, B, C)] == [["DS"]] * 3
    assert used_bytes <= 2 * 5 * 4096


def test_a_packed_block_without_a_gap_makes_room():
    """Gaps may be too small: then a colder session's extent goes, or the block is refused."""
    world = new_world(num_extents=1)
    store(world, A, [1])
    store(world, B, [2])
    store(world, C, [3])
    assert counter(world, "ssd_refused") + counter(world, "evictions_ssd") >= 1
    world.quiesce()
    assert world.engine.inspection.stats().tiers[1].num_blocks >= 1


def test_an_arena_can_be_given_up_and_created_again():
    """Dirty blocks are written first; then no slot is in use, and sessions are on SSD."""
    world = new_world(num_slots=2, admission=Admission.ON_EVICT)
    store(world, A, ONES + TWOS)
    assert not world.engine.release_dram()
    world.pump()
    world.quiesce()
    assert world.engine.release_dram()
    world.engine.drop_slots()
    world.pump()
    assert tiers_of(world, A) == ["S", "S"]
    assert prepare_load(world, A, ONES).miss_reason == "busy"
    assert prepare_store(world, B, THREES).refused == "no_space"
    world.engine.add_slots(2, 1 << 41)
    answer = load(world, A, ONES + TWOS)
    assert answer.end_token == 8
    assert answer.lease_id >= 1 << 41, "leases of the arena before are none of this one"


def test_paused_writes_find_room_when_they_are_retried():
    """Blocks stored in the meantime have colder sessions make room for them then."""
    world = new_world(num_extents=2)
    store(world, A, ONES)
    store(world, B, TWOS, settle=False)
    world.finish_all(WriteBlock, IoOutcome.TRANSIENT)
    store(world, C, THREES, settle=False)
    assert not world.io_of(WriteBlock)
    assert world.engine.next_deadline_ns() == world.now_ns + FIRST_RETRY_NS
    wait(world, FIRST_RETRY_NS)
    world.quiesce()
    assert [tiers_of(world, key) for key in (A, B, C)] == [["D"], ["DS"], ["DS"]]


def test_a_failed_write_of_a_dropped_block_degrades_the_tier_too():
    """The next success says that it works again."""
    world = new_world()
    store(world, A, ONES, settle=False)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.finish_all(WriteBlock, IoOutcome.TRANSIENT)
    assert world.engine.inspection.stats().tiers[1].degraded_reason == "transient"
    wait(world, FIRST_RETRY_NS)
    store(world, B, TWOS)
    assert world.engine.inspection.stats().tiers[1].degraded_reason == ""


def test_written_bytes_are_counted_as_they_lie_on_ssd():
    """Whole sectors, header and padding included; successful writes only."""
    world = new_world()
    store(world, A, [*ONES, 2], settle=False)
    world.finish_io(min(world.io), IoOutcome.TRANSIENT)
    world.finish_all(WriteBlock)
    assert counter(world, "ssd_written_bytes") == SECTOR_BYTES * SHAPE.num_sectors(1)
    world.now_ns += FIRST_RETRY_NS
    world.engine.expire()
    world.quiesce()
    num_sectors = SHAPE.num_sectors(1) + SHAPE.num_sectors(4)
    assert counter(world, "ssd_written_bytes") == SECTOR_BYTES * num_sectors


def test_extents_that_return_soon_are_not_freed_again():
    """If the capacity sinks again before the first rows are gone, no extra ones are taken."""
    world = new_world(num_extents=4)
    for key, tokens in ((A, ONES), (B, TWOS), (C, THREES)):
        store(world, key, tokens)
    for num_extents in (2, 1):
        world.engine.writes.set_capacity(num_extents)
        world.pump()
    assert [tiers_of(world, key) for key in (A, B, C)] == [["D"], ["D"], ["DS"]]


def test_a_waiting_block_waits_again_after_a_verification():
    """Under any policy: its room was wanted."""
    world = new_world(num_slots=1, admission=Admission.ON_EVICT, verify_on_load=True)
    store(world, A, ONES)
    assert prepare_store(world, B, TWOS).refused == "wait"
    world.finish_all(WriteBlock, IoOutcome.TRANSIENT)
    assert len(world.engine._state.unwritten) == 1
    lease = prepare_load(world, A, ONES)
    assert len(world.engine._state.unwritten) == 0
    world.finish_all(VerifySlot)
    assert len(world.engine._state.unwritten) == 1
    world.engine.loads.complete(lease.lease_id, ENGINE_ID)
