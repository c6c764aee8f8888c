"""Loads: which tokens they find, in which tier, and what failed reads do."""

import pytest

from kvd.core.records.actions import IoOutcome, LeaseReady, ReadBlock, SpaceFreed
from kvd.core.records.errors import InvalidRequestError, LeaseLostError
from kvd.core.records.records import LeaseState
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE
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
    world_with_a_on_ssd,
)
from tests.property.cache_world import SHAPE, to_bytes


def test_a_hit_covers_the_requested_range():
    """A load from the middle of a block starts in its middle row."""
    world = new_world()
    store(world, A, [*ONES, 2, 2])
    answer = load(world, A, [*ONES, 2, 2, 9], from_token=3)
    spans = [(s.start, s.num_tokens, s.token_offset, s.tier) for s in answer.spans]
    assert spans == [(3, 1, 3, "dram"), (0, 2, 4, "dram")]
    assert (answer.end_token, answer.more) == (6, False)


def test_misses_name_their_reason():
    """The session is unknown, has other tokens, or none."""
    world = new_world()
    assert load(world, A, ONES).miss_reason == "unknown_session"
    store(world, A, ONES)
    assert load(world, A, TWOS).miss_reason == "tokens_differ"
    assert load(world, A, ONES + TWOS, from_token=4).miss_reason == "not_stored"
    assert load(world, A, ONES[:2]).miss_reason == "not_stored"
    assert counter(world, "load_misses") == 4


def test_a_fork_finds_the_full_blocks_of_its_origin():
    """A session that was never stored is found along the content chain, and not created by it."""
    world = new_world()
    store(world, A, [*ONES, *TWOS, 3])
    assert load(world, B, [*ONES, *TWOS, 3]).end_token == 8
    assert world.engine.inspection.info(B) is None


def test_the_longer_of_own_spans_and_content_chain_wins():
    """Own spans end early; another session's chain continues."""
    world = new_world()
    store(world, A, [*ONES, 2])
    store(world, B, ONES + TWOS)
    assert load(world, A, ONES + TWOS).end_token == 8
    store(world, A, [*ONES, 3])
    assert load(world, A, [*ONES, 3, 3]).end_token == 5


def test_a_load_from_ssd_is_pending_until_read():
    """Reads are issued in order, the last one makes the lease ready, settling counts SSD tokens."""
    world = world_with_a_on_ssd()
    answer = prepare_load(world, A, ONES + TWOS)
    assert answer.lookup is Lookup.PENDING
    assert {span.tier for span in answer.spans} == {"ssd"}
    first, second = sorted(world.io)
    world.finish_io(second, IoOutcome.OK)
    assert world.engine.loads.state_of(answer.lease_id) is LeaseState.PENDING
    assert LeaseReady(answer.lease_id) not in world.events
    world.finish_io(first, IoOutcome.OK)
    assert world.events.count(LeaseReady(answer.lease_id)) == 1
    assert world.engine.loads.state_of(answer.lease_id) is LeaseState.READY
    assert world.engine.loads.settle(answer.lease_id).end_token == 8
    assert counter(world, "load_tokens_ssd") == 8


def test_two_loads_share_a_read():
    """A second load of a block that is being read waits for the same read."""
    world = world_with_a_on_ssd()
    first, second = prepare_load(world, A, ONES), prepare_load(world, A, ONES)
    assert len(world.io) == 1
    world.finish_io(next(iter(world.io)), IoOutcome.OK)
    for answer in (first, second):
        assert world.engine.loads.settle(answer.lease_id).lookup is Lookup.HIT


def test_at_a_deadline_the_arrived_blocks_are_served():
    """Settling early abandons the active reads; they continue for the cache."""
    world = world_with_a_on_ssd()
    answer = prepare_load(world, A, ONES + TWOS)
    world.finish_io(min(world.io), IoOutcome.OK)
    assert world.engine.loads.settle(answer.lease_id).end_token == 4
    late = prepare_load(world, A, ONES + TWOS, from_token=4)
    assert world.engine.loads.settle(late.lease_id).miss_reason == "deadline"
    world.quiesce()
    assert tiers_of(world, A) == ["DS", "DS"]


def test_a_load_larger_than_the_arena_is_answered_in_parts():
    """`more` asks to come back; blocks leased before may then be evicted."""
    world = new_world(num_slots=2)
    tokens = ONES + TWOS + THREES
    store(world, A, tokens[:8])
    complete_store(world, prepare_store(world, A, tokens, from_token=8))
    world.quiesce()
    first = load(world, A, tokens)
    assert (first.end_token, first.more) == (8, True)
    second = load(world, A, tokens, from_token=8)
    assert (second.end_token, second.more) == (12, False)


def test_a_load_without_any_free_slot_is_busy():
    """When every slot is leased the load is a counted miss, to be repeated on SpaceFreed."""
    world = world_with_a_on_ssd()
    held = prepare_load(world, B, THREES * 2)
    assert load(world, A, ONES).miss_reason == "busy"
    assert counter(world, "loads_busy") == 1
    world.events.clear()
    world.engine.loads.complete(held.lease_id, ENGINE_ID)
    world.pump()
    assert [type(event).__name__ for event in world.events] == ["SpaceFreed"]


def test_a_lost_engine_loses_its_leases():
    """Loads and stores of a dead engine are released; a waiting servicer is notified."""
    world = world_with_a_on_ssd(num_slots=3)
    pending = prepare_load(world, A, ONES)
    storing = prepare_store(world, C, [7, 7, 7, 7])
    world.engine.engines.remove(ENGINE_ID)
    world.pump()
    assert LeaseReady(pending.lease_id) in world.events
    assert world.engine.loads.state_of(pending.lease_id) is LeaseState.LOST
    with pytest.raises(LeaseLostError):
        world.engine.loads.settle(pending.lease_id)
    with pytest.raises(LeaseLostError):
        world.engine.stores.complete(storing.lease_id, ENGINE_ID, success=True)
    assert world.engine.inspection.stats().num_leases == 0


def test_a_pending_load_is_tracked_until_it_ends():
    """Its progress word follows the reads it waits for."""
    world = world_with_a_on_ssd()
    answer = prepare_load(world, A, ONES + TWOS)
    assert world.tracked == {answer.lease_id: tuple(world.io_of(ReadBlock))}
    world.quiesce()
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.pump()
    assert not world.tracked
    assert (counter(world, "load_hits"), counter(world, "load_tokens_ssd")) == (1, 8)


def test_an_engine_may_cancel_a_pending_load():
    """If it completes before the reads it is a miss; the reads serve the cache."""
    world = world_with_a_on_ssd()
    answer = prepare_load(world, A, ONES)
    assert [info.is_pending for info in world.engine.inspection.leases()] == [True]
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.pump()
    assert not world.tracked
    assert counter(world, "load_misses") == 1
    world.quiesce()
    assert tiers_of(world, A) == ["DS", "S"]


def test_a_load_from_dram_reads_nothing():
    """It ends at the first block on SSD only, and says that there is more."""
    world = world_with_a_on_ssd()
    load(world, A, ONES)
    assert tiers_of(world, A) == ["DS", "S"]
    answer = prepare_load(world, A, ONES + TWOS, dram_only=True)
    assert (answer.lookup, answer.end_token, answer.more) == (Lookup.HIT, 4, True)
    assert {span.tier for span in answer.spans} == {"dram"}
    assert not world.io
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    whole = prepare_load(world, A, ONES, dram_only=True)
    assert (whole.end_token, whole.more) == (4, False)


def test_a_load_from_dram_misses_blocks_on_ssd():
    """Blocks behind the missing one would be useless; an empty session is another miss."""
    world = world_with_a_on_ssd()
    load(world, A, ONES)
    answer = prepare_load(world, A, ONES + TWOS, from_token=4, dram_only=True)
    assert (answer.lookup, answer.miss_reason) == (Lookup.MISS, "on_ssd")
    assert prepare_load(world, C, TWOS, dram_only=True).miss_reason == "unknown_session"
    assert not world.io
    assert world.engine.inspection.stats().num_leases == 0
    assert counter(world, "load_misses") == 2


def test_a_block_that_is_being_read_is_not_in_dram_yet():
    """Its slot has no bytes to grant until the read has ended."""
    world = world_with_a_on_ssd()
    prepare_load(world, A, ONES)
    assert prepare_load(world, A, ONES, dram_only=True).miss_reason == "on_ssd"
    world.finish_all(ReadBlock)
    assert prepare_load(world, A, ONES, dram_only=True).lookup is Lookup.HIT


def test_a_block_that_is_being_verified_is_in_dram():
    """It is pending, without a read."""
    world = new_world(verify_on_load=True)
    store(world, A, ONES + TWOS)
    answer = prepare_load(world, A, ONES + TWOS, dram_only=True)
    assert (answer.lookup, answer.end_token, answer.more) == (Lookup.PENDING, 8, False)
    assert not world.io_of(ReadBlock)
    world.quiesce()
    assert world.engine.loads.settle(answer.lease_id).end_token == 8


def test_large_loads_are_read_layer_by_layer():
    """Only loads that read more than the bound."""
    world = new_world(num_slots=2, layered_read_bytes=5 * 4096)
    store(world, A, ONES + TWOS)
    store(world, B, THREES * 2)
    small = prepare_load(world, A, ONES)
    assert [world.io[op_id].layered for op_id in world.io_of(ReadBlock)] == [False]
    world.quiesce()
    world.engine.loads.complete(small.lease_id, ENGINE_ID)
    load(world, B, THREES * 2)
    prepare_load(world, A, ONES + TWOS)
    assert [world.io[op_id].layered for op_id in world.io_of(ReadBlock)] == [True, True]


@pytest.mark.parametrize("from_token", [-1, 9])
def test_a_load_from_a_missing_position_is_refused(from_token):
    """The error names the position, and no lease is held."""
    world = new_world()
    store(world, A, ONES + TWOS)
    with pytest.raises(InvalidRequestError, match=str(from_token)):
        prepare_load(world, A, ONES + TWOS, from_token)
    assert not world.engine.inspection.leases()


def test_only_a_completion_by_another_engine_counts_as_lost():
    """The owner's completion does not, and another's leaves the lease as it is."""
    world = new_world()
    store(world, A, ONES)
    answer = prepare_load(world, A, ONES)
    with pytest.raises(LeaseLostError):
        world.engine.loads.complete(answer.lease_id, ENGINE_ID + 1)
    assert counter(world, "leases_lost") == 1
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    assert counter(world, "leases_lost") == 1


def test_the_results_of_loads_are_counted():
    """Hits and misses, tokens by their tier, and bytes that were read for them."""
    world = world_with_a_on_ssd(num_slots=3)
    load(world, A, ONES + TWOS)
    load(world, A, ONES + TWOS, from_token=4)
    load(world, A, [9] * 4)
    load(world, C, [9] * 4)
    assert (counter(world, "load_hits"), counter(world, "load_misses")) == (2, 2)
    assert (counter(world, "load_tokens_ssd"), counter(world, "load_tokens_dram")) == (8, 4)
    assert counter(world, "ssd_read_bytes") == 2 * SHAPE.full_bytes
    prepare_load(world, B, THREES * 3)
    world.finish_all(ReadBlock, IoOutcome.TRANSIENT)
    assert counter(world, "ssd_read_bytes") >= 3 * SHAPE.full_bytes, "failed ones, too"
    assert counter(world, "read_errors") >= 1


def test_a_hit_teaches_the_lineage_of_a_session():
    """A restart forgets it; a load of all stored tokens that names it proves it."""
    world = new_world()
    store(world, A, ONES + TWOS)
    world.start()
    for tokens, known in ((ONES, None), (ONES + TWOS, WHOLE)):
        answer = world.engine.loads.prepare(A, to_bytes(tokens), 0, ENGINE_ID, lineage=WHOLE)
        assert world.engine._state.sessions[A].lineage == known
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.quiesce()


def test_waiting_stores_are_notified_when_a_read_ends():
    """Its block may be evicted then, which it could not be before."""
    world = world_with_a_on_ssd(num_slots=1)
    pending = prepare_load(world, B, THREES)
    world.engine.loads.complete(pending.lease_id, ENGINE_ID)
    world.pump()
    pending = prepare_load(world, A, ONES)
    assert pending.lookup is Lookup.PENDING
    assert prepare_store(world, C, [8] * 4).refused == "wait"
    world.events.clear()
    world.finish_io(world.io_of(ReadBlock)[0])
    assert SpaceFreed() in world.events


def test_a_load_is_a_use_of_its_session():
    """Even if nothing is found, or the load takes a while."""
    world = new_world()
    store(world, A, ONES)
    for tokens in (TWOS, ONES):
        world.now_ns += 10
        prepare_load(world, A, tokens)
        assert world.engine.inspection.info(A).last_access_ns == world.now_ns


def test_a_hit_is_counted_when_it_is_answered():
    """Once, whether it is completed or not."""
    world = new_world()
    store(world, A, ONES)
    answer = prepare_load(world, A, ONES)
    counts = [counter(world, "load_hits"), counter(world, "load_tokens_dram")]
    assert counts == [1, 4]
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    assert [counter(world, "load_hits"), counter(world, "load_tokens_dram")] == counts
