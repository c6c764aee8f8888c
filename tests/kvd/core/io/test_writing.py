"""Writes: when the policies ask for them, what they wait for, and their failures."""

from dataclasses import replace

import pytest

from kvd.core.eviction.policies import LruPolicy
from kvd.core.io.writing import FIRST_RETRY_NS
from kvd.core.records.actions import (
    DropBlock,
    Emit,
    HashSlot,
    IoOutcome,
    PutBlock,
    VerifySlot,
    WriteBlock,
)
from kvd.core.records.entries import Pin
from kvd.core.records.records import Admission
from kvd.core.state.limits import Limits
from shared.types.units import SECTOR_BYTES
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    OTHER_TENANT,
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
)
from tests.property.cache_world import SHAPE, CacheWorld

DELAY_NS = 100


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
    """Writes are held back with a growing delay; the first success ends it."""
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


def test_failures_of_one_volley_count_once():
    """Several writes failing together do not multiply the delay."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES, settle=False)
    for op_id in sorted(world.io):
        world.finish_io(op_id, IoOutcome.TRANSIENT)
    assert world.engine.next_deadline_ns() == world.now_ns + FIRST_RETRY_NS
    assert counter(world, "write_errors") == 3


def test_a_degraded_tier_does_not_block_stores():
    """With writes held back, dirty blocks of the coldest session make room."""
    world = new_world(num_slots=1)
    store(world, A, ONES, settle=False)
    world.finish_io(next(iter(world.io)), IoOutcome.FULL)
    answer = store(world, B, TWOS, settle=False)
    assert len(answer.blocks) == 1
    assert world.engine.inspection.info(A) is None


def test_a_write_waits_for_the_extent_of_a_dropped_row():
    """An extent is reused only once the removal of its row is committed."""
    world = new_world(num_slots=4, num_extents=1)
    store(world, A, ONES)
    store(world, B, TWOS, settle=False)
    assert not world.io
    drops = [action for action in world.index.uncommitted if isinstance(action, DropBlock)]
    assert len(drops) == 1
    world.commit(len(world.index.uncommitted))
    assert [type(action) for action in world.io.values()] == [WriteBlock]
    assert tiers_of(world, A) == ["D"]


def test_a_block_dropped_while_it_is_written_gives_both_places_back():
    """A flush does not wait for writes; their outcome finds nobody."""
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
    world.finish_all(HashSlot, IoOutcome.TRANSIENT)
    assert not world.io
    assert (counter(world, "hash_errors"), world.engine.inspection.stats().num_unhashed) == (1, 1)
    store(world, A, ONES)
    assert tiers_of(world, A) == ["DS"]
    assert world.engine.inspection.stats().num_unhashed == 0


def test_a_block_dropped_while_it_is_hashed_leaves_nothing():
    """Nobody wants its checksums."""
    world = new_world()
    complete_store(world, prepare_store(world, A, ONES))
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.quiesce()
    assert [tier.used_bytes for tier in world.engine.inspection.stats().tiers] == [0, 0]


@pytest.mark.parametrize(
    ("max_write_bytes", "num_writes"), [(1, 1), (SHAPE.full_bytes, 1), (SHAPE.full_bytes + 1, 2)]
)
def test_writes_under_way_are_bounded(max_write_bytes, num_writes):
    """The next one is issued when one is done; the last one may go beyond."""
    world = new_world(max_write_bytes=max_write_bytes)
    store(world, A, ONES + TWOS + THREES, settle=False)
    assert len(world.io_of(WriteBlock)) == num_writes
    world.finish_io(world.io_of(WriteBlock)[0])
    assert len(world.io_of(WriteBlock)) == num_writes
    world.quiesce()
    assert tiers_of(world, A) == ["DS"] * 3


def write_back_world(num_slots=16, **limits):
    return new_world(
        num_slots, admission=Admission.WRITE_BACK, write_back_delay_ns=DELAY_NS, **limits
    )


def wait(world, elapsed_ns):
    world.now_ns += elapsed_ns
    world.engine.expire()
    world.pump()


def test_write_back_waits_until_a_session_is_left_alone():
    """Each use puts it off; then all of its dirty blocks are written."""
    world = write_back_world()
    store(world, A, ONES + TWOS)
    assert world.engine.next_deadline_ns() == world.now_ns + DELAY_NS
    wait(world, DELAY_NS - 1)
    load(world, A, ONES)
    wait(world, DELAY_NS - 1)
    assert tiers_of(world, A) == ["D", "D"]
    assert world.engine.next_deadline_ns() == world.now_ns + 1
    wait(world, 1)
    world.quiesce()
    assert tiers_of(world, A) == ["DS", "DS"]
    assert world.engine.next_deadline_ns() is None


def test_a_tail_replaced_before_its_time_is_never_written():
    """Growing a session costs SSD only what remains of it."""
    world = write_back_world()
    store(world, A, [*ONES, 2])
    store(world, A, ONES + TWOS)
    wait(world, DELAY_NS)
    assert sorted(world.io[op_id].num_tokens for op_id in world.io_of(WriteBlock)) == [4, 4]


def test_a_session_flushed_before_its_write_back_is_not_missed():
    """Its turn comes, and nothing is there."""
    world = write_back_world()
    store(world, A, ONES)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    wait(world, DELAY_NS)
    assert world.engine.next_deadline_ns() is None


def test_too_much_dirty_is_written_back_at_once():
    """The sessions left alone longest go first, as far as needed."""
    world = write_back_world(num_slots=4)
    for key, tokens in ((A, ONES), (B, TWOS), (C, THREES)):
        world.now_ns += 1
        store(world, key, tokens, settle=False)
    load(world, A, ONES)
    world.quiesce()
    assert [tiers_of(world, key) for key in (A, B, C)] == [["DS"], ["D"], ["D"]]
    world.now_ns += 1
    load(world, B, TWOS)
    store(world, B, TWOS + ONES)
    assert [tiers_of(world, key) for key in (B, C)] == [["D", "D"], ["DS"]]


def test_dirty_blocks_are_written_when_their_room_is_wanted():
    """on_evict: nothing is written until a store wants slots, and then the coldest."""
    world = new_world(num_slots=2, admission=Admission.ON_EVICT)
    store(world, A, ONES)
    store(world, B, TWOS)
    assert tiers_of(world, A) == ["D"]
    assert prepare_store(world, C, THREES).refused == "wait"
    assert prepare_store(world, C, THREES).refused == "wait"
    assert (len(world.io_of(WriteBlock)), counter(world, "demotions")) == (1, 1)
    world.quiesce()
    assert len(prepare_store(world, C, THREES).blocks) == 1
    assert [tiers_of(world, key) for key in (A, B)] == [["S"], ["D"]]


def test_a_load_wants_room_as_a_store_does():
    """Busy, until a dirty block has been written to make room."""
    world = new_world(num_slots=1, admission=Admission.ON_EVICT)
    store(world, A, ONES)
    assert prepare_store(world, B, TWOS).refused == "wait"
    world.quiesce()
    store(world, B, TWOS)
    assert prepare_load(world, A, ONES).miss_reason == "busy"
    world.quiesce()
    assert load(world, A, ONES).end_token == 4


def test_what_ssd_cannot_take_is_cut():
    """A demotion for which no extent can be had is no reason to wait."""
    world = new_world(num_slots=2, num_extents=1, admission=Admission.ON_EVICT)
    store(world, A, ONES)
    world.engine.write_dirty()
    world.pump()
    world.quiesce()
    world.engine.sessions.pin(A, Pin.HARD)
    store(world, B, TWOS)
    assert len(prepare_store(world, C, THREES).blocks) == 1
    assert counter(world, "ssd_refused") == 2, "when it was hashed, and for its room"
    assert world.engine.inspection.info(B) is None


def test_all_that_is_dirty_can_be_written():
    """Whatever the policy: before a shutdown."""
    world = new_world(admission=Admission.ON_EVICT)
    store(world, A, ONES + TWOS)
    world.engine.write_dirty()
    world.pump()
    world.quiesce()
    assert world.engine.inspection.stats().dirty_bytes == 0


@pytest.mark.parametrize("admission", [Admission.ON_EVICT, Admission.WRITE_BACK])
def test_what_is_being_hashed_at_the_end_is_written_too(admission):
    """A shutdown asks once; a block that cannot be written just then is when it can be."""
    world = new_world(admission=admission)
    complete_store(world, prepare_store(world, A, ONES))
    assert any(isinstance(action, HashSlot) for action in world.io.values())
    world.engine.write_dirty()
    world.pump()
    world.quiesce()
    assert world.engine.inspection.stats().dirty_bytes == 0


def test_less_room_on_ssd_makes_the_coldest_go():
    """A full file system is answered with eviction, and the writes go on."""
    world = new_world(num_extents=3)
    store(world, A, ONES + TWOS)
    store(world, B, THREES, settle=False)
    world.finish_all(WriteBlock, IoOutcome.FULL)
    assert world.engine.inspection.stats().tiers[1].degraded_reason == "full"
    world.engine.writes.set_capacity(2)
    world.pump()
    world.quiesce()
    assert world.engine.inspection.stats().tiers[1].degraded_reason == ""
    assert tiers_of(world, A) == ["DS", "D"]
    assert tiers_of(world, B) == ["DS"]
    world.engine.writes.set_capacity(3)
    store(world, A, ONES + TWOS)
    assert tiers_of(world, A) == ["DS", "DS"]


def test_fewer_extents_than_are_in_use_empty_the_tier_of_the_coldest():
    """Rows go until what is left fits; DRAM keeps its copies."""
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


def test_a_packed_block_that_fits_nowhere_makes_room_for_itself():
    """Gaps may be too small: then a colder session's extent goes, or the block is refused."""
    world = new_world(num_extents=1)
    store(world, A, [1])
    store(world, B, [2])
    store(world, C, [3])
    assert counter(world, "ssd_refused") + counter(world, "evictions_ssd") >= 1
    world.quiesce()
    assert world.engine.inspection.stats().tiers[1].num_blocks >= 1


def test_an_arena_can_be_given_up_and_made_again():
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


def test_writes_held_back_find_room_when_they_are_tried_again():
    """What was stored meanwhile has colder sessions make room for it then."""
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


def test_a_failed_write_of_what_nobody_wants_degrades_the_tier_all_the_same():
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


def test_what_was_refused_is_written_when_there_is_room_again():
    """Without its session being used: extents that nobody else wants are for it."""
    world = new_world(num_extents=1)
    store(world, A, ONES)
    world.engine.sessions.pin(A, Pin.HARD)
    store(world, B, TWOS + THREES)
    assert tiers_of(world, B) == ["D", "D"]
    assert counter(world, "ssd_refused") == 2
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.quiesce()
    assert tiers_of(world, B) == ["DS", "D"], "the one refused first"
    world.engine.writes.set_capacity(2)
    world.pump()
    world.quiesce()
    assert tiers_of(world, B) == ["DS", "DS"]


def test_what_lost_its_extent_to_a_warmer_session_gets_one_again():
    """It is dirty again, and written when the warmer one is gone."""
    world = new_world(num_extents=1)
    store(world, A, ONES)
    store(world, B, TWOS)
    assert (tiers_of(world, A), tiers_of(world, B)) == (["D"], ["DS"])
    world.engine.sessions.flush(B, dry_run=False)
    world.pump()
    world.quiesce()
    assert tiers_of(world, A) == ["DS"]


def test_what_was_refused_does_not_take_what_others_wait_for():
    """And is forgotten with its session."""
    world = new_world(num_slots=4, num_extents=1)
    store(world, A, ONES)
    world.engine.sessions.pin(A, Pin.HARD)
    store(world, B, TWOS)
    store(world, C, THREES)
    world.engine.sessions.flush(B, dry_run=False)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.quiesce()
    assert tiers_of(world, C) == ["DS"]
    assert not world.engine._state.unwritten.refused


def test_what_is_written_is_counted_as_it_lies_on_ssd():
    """Whole sectors, header and padding included; of what was written well."""
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


def test_extents_that_come_back_soon_are_not_made_free_again():
    """A capacity that sinks again before the first rows are gone takes as many as it says."""
    world = new_world(num_extents=4)
    for key, tokens in ((A, ONES), (B, TWOS), (C, THREES)):
        store(world, key, tokens)
    for num_extents in (2, 1):
        world.engine.writes.set_capacity(num_extents)
        world.pump()
    assert [tiers_of(world, key) for key in (A, B, C)] == [["D"], ["D"], ["DS"]]


def looking_world(**limits):
    """A world, and how often it has looked for sessions that could give way."""
    looks = []

    class Looking(LruPolicy):
        def victims(self, tier, now_ns, **asked):
            if tier is not None:
                looks.append(tier)
            return super().victims(tier, now_ns, **asked)

    return CacheWorld(Limits(4, 64, **limits), Looking), looks


def test_what_is_short_of_the_watermark_is_looked_for_once():
    """Until something may have changed: all that there is may be in use."""
    world, looks = looking_world(watermark=0.5)
    store(world, A, ONES + TWOS + THREES, settle=False)
    lease = prepare_load(world, A, ONES + TWOS + THREES)
    world.quiesce()
    looks.clear()
    for _ in range(5):
        world.pump()
    assert not looks, "all of it is leased"
    world.engine.set_limits(replace(world.limits, watermark=0.75))
    for _ in range(5):
        world.pump()
    assert len(looks) == 1, "the watermark is another one"
    world.engine.loads.complete(lease.lease_id, ENGINE_ID)
    world.pump()
    assert world.engine._state.slots.num_free == 3


def test_the_watermark_is_no_reason_to_write_more_than_is_short():
    """Blocks that rest are written as many as are missing, not one more."""
    world = new_world(4, admission=Admission.ON_EVICT, watermark=0.25)
    for key in (A, B, C):
        store(world, key, [key.session_id.encode()[0]] * 4)
    assert not world.io_of(WriteBlock)
    store(world, OTHER_TENANT, ONES, settle=False)
    assert counter(world, "demotions") == 1
    world.quiesce()
    assert (counter(world, "demotions"), world.engine._state.slots.num_free) == (1, 1)


def test_what_waits_to_be_written_waits_again_after_it_was_verified():
    """Whatever the policy: its room was wanted."""
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
