"""DRAM that survived a restart: verified before its first use, written if it was dirty."""

from dataclasses import replace

import pytest

from kvd.core.io.verifying import MAX_BACKGROUND, RETRY_NS
from kvd.core.records.actions import (
    HashSlots,
    IoOutcome,
    ReadBlock,
    TrackLoad,
    VerifySlot,
    WriteBlock,
)
from kvd.core.records.entries import (
    AdoptedSlot,
    CommittedSlot,
    OrphanSlot,
    WritingSlot,
    pack_spans,
    plain_span,
)
from kvd.core.records.errors import LeaseLostError
from shared.types.granted_slots import Lookup
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
    keys_of,
    load,
    new_world,
    prepare_load,
    prepare_store,
    spans_of_a,
    store,
    tiers_of,
)
from tests.property.cache_world import CacheWorld


def restart_on_arena(num_blocks: int = 1, *, on_ssd: bool = True, **limits) -> CacheWorld:
    """Start a new kvd on the arena of an earlier one, which held one session."""
    world = new_world(**limits)
    store(world, A, (ONES + TWOS + THREES * 6)[: 4 * num_blocks], settle=on_ssd)
    world.commit(len(world.index.uncommitted))
    world.start(keep_dram=True)
    return world


def test_adopted_blocks_are_hits_once_verified():
    """Blocks in DRAM before a kill are in DRAM after it."""
    world = restart_on_arena(num_blocks=2)
    assert tiers_of(world, A) == ["DS", "DS"]
    assert world.engine.inspection.stats().num_unverified == 2
    world.quiesce()
    assert world.engine.inspection.stats().num_unverified == 0
    assert load(world, A, ONES + TWOS).spans[0].tier == "dram"
    assert (counter(world, "adopted_blocks"), counter(world, "verified_blocks")) == (2, 2)


def test_a_load_does_not_wait_for_background_verification():
    """A block that is not verified yet is verified for the load, urgently."""
    world = restart_on_arena(num_blocks=MAX_BACKGROUND + 2)
    tokens = ONES + TWOS + THREES * MAX_BACKGROUND
    assert len(world.io_of(VerifySlot)) == MAX_BACKGROUND
    answer = prepare_load(world, A, tokens)
    assert answer.lookup is Lookup.PENDING
    checks = [world.io[op_id] for op_id in world.io_of(VerifySlot)]
    assert [check.urgent for check in checks] == [False] * MAX_BACKGROUND + [True] * 2
    assert set(world.tracked[answer.lease_id]) == set(world.io)
    world.quiesce()
    assert world.engine.loads.settle(answer.lease_id).end_token == len(tokens)


def test_dirty_adopted_blocks_are_written_after_verification():
    """Blocks that the killed kvd had not written survive in DRAM, and are written now."""
    world = restart_on_arena(on_ssd=False)
    assert tiers_of(world, A) == ["D"]
    assert not world.io_of(WriteBlock)
    world.finish_all(VerifySlot)
    assert len(world.io_of(WriteBlock)) == 1
    world.quiesce()
    assert tiers_of(world, A) == ["DS"]


def test_an_adopted_block_with_wrong_bytes_is_read_from_ssd():
    """The load stays pending, on the same slot, and is answered with the right bytes."""
    world = restart_on_arena()
    answer = prepare_load(world, A, ONES)
    world.damage_slot(answer.spans[0].slot_id)
    world.finish_all(VerifySlot)
    (read,) = world.io_of(ReadBlock)
    assert world.tracked[answer.lease_id] == (read,)
    assert world.io[read].slot_id == answer.spans[0].slot_id
    world.quiesce()
    assert world.engine.loads.settle(answer.lease_id).spans == answer.spans
    assert counter(world, "blocks_corrupt_dram") == 1


def test_corrupt_adopted_blocks_without_a_waiting_load_are_dropped():
    """The copy on SSD remains; the next load reads it."""
    world = restart_on_arena()
    world.damage_slot(world.engine.inspection.describe(A).blocks[0].slot_id)
    world.finish_all(VerifySlot)
    assert tiers_of(world, A) == ["S"]
    assert load(world, A, ONES).end_token == 4


def test_corrupt_adopted_blocks_without_another_copy_are_misses():
    """The session is cut at the block, and so is the load that waits for it."""
    world = restart_on_arena(num_blocks=2, on_ssd=False)
    answer = prepare_load(world, A, ONES + TWOS)
    world.damage_slot(answer.spans[1].slot_id)
    world.finish_all(VerifySlot)
    assert world.engine.loads.settle(answer.lease_id).end_token == 4
    assert load(world, A, ONES + TWOS, from_token=4).miss_reason == "corrupt"


def test_a_failed_verification_says_nothing():
    """The load is cut, the block stays unverified, and is tried again a little later."""
    world = restart_on_arena()
    answer = prepare_load(world, A, ONES)
    world.finish_all(VerifySlot, IoOutcome.TRANSIENT)
    assert world.engine.loads.settle(answer.lease_id).miss_reason == "read_error"
    assert world.engine.inspection.stats().num_unverified == 1
    assert world.engine.next_deadline_ns() == world.now_ns + RETRY_NS
    world.now_ns += RETRY_NS
    world.engine.expire()
    world.pump()
    world.finish_all(VerifySlot)
    assert world.engine.inspection.stats().num_unverified == 0
    assert world.engine.next_deadline_ns() is None


def test_equal_tokens_after_other_ones_are_not_served():
    """A damaged entry names a block of the same tokens that was computed without those before."""
    world = new_world()
    store(world, A, ONES + TWOS)
    store(world, B, TWOS)
    store(world, C, ONES + THREES)
    spans = [spans_of_a(world)[0], plain_span(keys_of(world, B)[0], 4)]
    entry = world.index.sessions[A]
    world.index.sessions[A] = replace(entry, spans=pack_spans(spans))
    world.start(keep_dram=True)
    world.quiesce()
    for _ in range(2):  # the first load computes keys, the second one may compare tokens
        answer = load(world, A, ONES + TWOS)
        assert (answer.end_token, answer.miss_reason) == (4, "tokens_differ")
    assert load(world, C, ONES + THREES).end_token == 8
    assert load(world, B, TWOS).end_token == 4


def test_unhashed_blocks_are_not_adopted():
    """Nothing could tell whether their bytes are right."""
    world = new_world()
    complete_store(world, prepare_store(world, A, ONES))
    assert world.io_of(HashSlots)
    assert world.engine.inspection.stats().num_unhashed == 1
    assert not world.journal
    world.commit(len(world.index.uncommitted))
    world.start(keep_dram=True)
    assert world.engine.inspection.info(A) is None
    assert world.engine.inspection.stats().tiers[0].used_bytes == 0


def test_adopted_blocks_without_a_session_are_dropped():
    """The index does not have the session yet: its slots are freed, in the journal too."""
    world = new_world()
    store(world, A, ONES, settle=False)
    assert world.journal
    world.start(keep_dram=True)
    assert world.engine.inspection.stats().tiers[0].used_bytes == 0
    assert not world.journal


def test_unverified_blocks_are_evicted_like_others():
    """A clean one is no reason to wait: its copy on SSD is as good."""
    world = restart_on_arena(num_blocks=MAX_BACKGROUND + 1, num_slots=MAX_BACKGROUND + 1)
    assert len(prepare_store(world, B, [7] * 4).blocks) == 1
    world.quiesce()


GOOD = CommittedSlot(3, b"k" * 16, 4, bytes(16), bytes(8))


@pytest.mark.parametrize(
    ("slot_id", "record"),
    [
        (9, GOOD),
        (-1, GOOD),
        (0, GOOD._replace(num_tokens=5, token_ids=bytes(20))),
        (0, GOOD._replace(num_tokens=0, token_ids=b"")),
        (0, GOOD._replace(token_ids=bytes(12))),
        (0, GOOD._replace(checksums=bytes(16))),
        (0, GOOD._replace(key=b"k")),
    ],
)
def test_a_slot_with_an_impossible_record_is_free(slot_id, record):
    """It is outside the arena, or has sizes that no block here has."""
    world = new_world(num_slots=2)
    world.journal = {slot_id: record}
    world.start(keep_dram=True)
    assert world.engine.inspection.stats().tiers[0].used_bytes == 0


def test_two_records_of_one_slot_or_block_count_once():
    """The first one does."""
    world = new_world(num_slots=4)
    writing = WritingSlot(1, 5, 1)
    adopted = [AdoptedSlot(0, GOOD), AdoptedSlot(1, GOOD), AdoptedSlot(2, GOOD)]
    orphans = [OrphanSlot(2, writing), OrphanSlot(2, writing), OrphanSlot(3, writing)]
    world.journal = {0: GOOD, 1: GOOD, 2: writing, 3: writing}
    world.engine = type(world.engine)(world.engine.layout, world.limits, lambda _: bytes(32))
    world.engine.restore(world.index.rows(), adopted, orphans, 1)
    world.pump()
    assert [lease.num_slots for lease in world.engine.inspection.leases()] == [2]
    assert set(world.journal) == {2, 3}
    assert prepare_store(world, A, ONES).lease_id == 6


def test_verify_on_load_verifies_live_hits():
    """Each load of an idle block waits for a verification."""
    world = new_world(verify_on_load=True)
    store(world, A, ONES)
    first = prepare_load(world, A, ONES)
    assert first.lookup is Lookup.PENDING
    assert [event for event in world.events if isinstance(event, TrackLoad)] == []
    world.finish_all(VerifySlot)
    assert world.engine.loads.settle(first.lease_id).lookup is Lookup.HIT


def test_readers_of_a_copy_that_a_later_load_finds_corrupt_lose_their_leases():
    """The later load gets the right bytes from SSD; the copied ones must not count."""
    world = new_world(verify_on_load=True)
    store(world, A, ONES)
    first = prepare_load(world, A, ONES)
    world.finish_all(VerifySlot)
    world.engine.loads.settle(first.lease_id)
    world.damage_slot(first.spans[0].slot_id)
    assert load(world, A, ONES).end_token == 4
    with pytest.raises(LeaseLostError):
        world.engine.loads.complete(first.lease_id, ENGINE_ID)
    assert counter(world, "blocks_corrupt_dram") == 1


def test_verify_on_load_finds_wrong_bytes():
    """The right ones are read from SSD; a verification that fails changes nothing."""
    world = new_world(verify_on_load=True)
    store(world, A, ONES)
    answer = prepare_load(world, A, ONES)
    world.finish_all(VerifySlot, IoOutcome.TRANSIENT)
    assert world.engine.loads.settle(answer.lease_id).miss_reason == "read_error"
    world.damage_slot(answer.spans[0].slot_id)
    assert load(world, A, ONES).end_token == 4
    assert counter(world, "blocks_corrupt_dram") == 1


def test_a_block_that_waits_to_be_written_is_verified_first():
    """It is not written while it is verified, and is queued again afterwards."""
    world = new_world(verify_on_load=True, max_write_bytes=1)
    store(world, A, ONES + TWOS, settle=False)
    assert len(world.io_of(WriteBlock)) == 1
    answer = prepare_load(world, A, ONES + TWOS)
    world.finish_all(WriteBlock)
    assert not world.io_of(WriteBlock)
    world.quiesce()
    assert world.engine.loads.settle(answer.lease_id).end_token == 8
    assert tiers_of(world, A) == ["DS", "DS"]


def test_all_adopted_blocks_are_verified_in_the_background():
    """One after another, whether or not they are loaded."""
    world = restart_on_arena(num_blocks=MAX_BACKGROUND + 2)
    assert len(world.io_of(VerifySlot)) == MAX_BACKGROUND
    world.finish_io(min(world.io))
    assert len(world.io_of(VerifySlot)) == MAX_BACKGROUND
    world.quiesce()
    assert world.engine.inspection.stats().num_unverified == 0


def test_warm_blocks_are_verified_first():
    """Their turns are more likely to come soon."""
    world = new_world(num_slots=2 * MAX_BACKGROUND)
    for key, token in ((A, 1), (B, 2)):
        world.now_ns += 1
        store(world, key, [token] * 4 * MAX_BACKGROUND)
    world.commit(len(world.index.uncommitted))
    world.start(keep_dram=True)
    verified = {action.slot_id for action in world.io.values()}
    assert verified == {block.slot_id for block in world.engine.inspection.describe(B).blocks}
