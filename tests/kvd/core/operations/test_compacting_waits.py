"""Compaction that waits, is postponed or given up: for leases, uses, room and other work."""

from kvd.core.operations.compacting import RETRY_NS
from kvd.core.records.actions import CompactTokens, HashSlots, IoOutcome, WriteBlock
from kvd.core.records.tier import Admission
from shared.types.granted_slots import Lookup
from tests.kvd.core.operations.sparse_worlds import (
    EVEN,
    KEPT,
    REST_NS,
    TOKENS,
    discard,
    num_blocks,
    rest,
    rows_of,
    sparse_world,
)
from tests.kvd.core.turns import (
    ENGINE_ID,
    A,
    B,
    complete_store,
    counter,
    load,
    new_world,
    prepare_load,
    prepare_store,
    queue_of,
    store,
)
from tests.property.cache_world import compute, to_bytes


def test_a_lease_during_a_compaction_has_precedence():
    """The session stays as it is while it is in use, and is compacted later."""
    world = sparse_world()
    rest(world)
    answer = prepare_load(world, A, KEPT)
    assert answer.lookup is Lookup.HIT, "copying keeps nobody waiting"
    world.quiesce()
    assert (num_blocks(world), counter(world, "compactions_given_up")) == (6, 1)
    assert world.engine.next_deadline_ns() == world.now_ns + RETRY_NS
    assert rows_of(world, answer) == compute([], TOKENS)[1::2]
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.pump()
    rest(world, 2_000_000_000)
    world.quiesce()
    assert num_blocks(world) == 3


def test_a_lease_while_the_copies_are_written_has_precedence():
    """They are dropped at once, even if all of them reach SSD."""
    world = sparse_world()
    rest(world)
    world.finish_all(CompactTokens)
    assert world.io_of(WriteBlock)
    assert prepare_load(world, A, KEPT).lookup is Lookup.HIT
    assert counter(world, "compactions_given_up") == 1
    world.quiesce()
    assert (num_blocks(world), counter(world, "compactions")) == (6, 0)


def test_a_second_discard_during_a_compaction_has_precedence():
    """The copies do not match the remaining tokens."""
    world = sparse_world()
    rest(world)
    discard(world, A, KEPT, [(0, 6)])
    assert load(world, A, KEPT[6:]).end_token == 6
    assert counter(world, "compactions") == 0


def test_without_room_on_ssd_compaction_is_given_up():
    """Blocks on SSD are not evicted for copies that cannot be written."""
    world = sparse_world(num_extents=6)
    rest(world)
    world.quiesce()
    assert (num_blocks(world), counter(world, "compactions_given_up")) == (6, 1)
    assert world.engine.inspection.info(A).ssd_bytes


def test_a_session_used_while_it_waits_is_compacted_later():
    """Its turn may leave the queue without having used it."""
    world = sparse_world()
    store(world, B, TOKENS[::-1])
    discard(world, B, TOKENS[::-1], EVEN)
    world.now_ns += REST_NS
    world.engine.expire()
    world.pump()
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(A, B))
    world.quiesce()
    assert counter(world, "compactions") < 2
    assert world.engine.next_deadline_ns() == world.now_ns + RETRY_NS
    world.engine.engines.replace_queue(ENGINE_ID, queue_of())
    rest(world, 2_000_000_000)
    world.quiesce()
    assert (num_blocks(world, A), num_blocks(world, B)) == (3, 3)


def test_no_compaction_begins_during_a_shutdown():
    """Dirty blocks go first."""
    world = sparse_world(admission=Admission.ON_EVICT)
    world.engine.write_dirty()
    world.pump()
    rest(world)
    assert not world.io_of(CompactTokens)
    assert world.io_of(WriteBlock)


def test_a_failed_copy_changes_nothing():
    """A failed operation says nothing about the bytes."""
    world = sparse_world()
    rest(world)
    world.finish_all(CompactTokens, IoOutcome.TRANSIENT)
    assert not world.io_of(HashSlots)
    assert load(world, A, KEPT).end_token == len(KEPT)
    assert num_blocks(world) == 6


def test_an_arena_that_is_given_up_is_not_compacted():
    """An active copy is not used, and its slots are freed."""
    world = sparse_world()
    rest(world)
    assert not world.engine.release_dram()
    world.pump()
    world.quiesce()
    assert (counter(world, "compactions"), counter(world, "compactions_given_up")) == (0, 1)
    assert world.engine.release_dram()


def test_a_removed_session_does_not_wait_for_compaction():
    """Only stored sessions wait, however long no compaction is possible."""
    world = sparse_world()
    world.engine.release_dram()
    rest(world)
    assert list(world.engine._state.wasteful) == [A]
    world.engine.sessions.flush(A, dry_run=False)
    assert not world.engine._state.wasteful


def test_a_use_postpones_compaction():
    """A session is compacted when it has been idle for a while."""
    world = sparse_world()
    world.now_ns += REST_NS - 1
    load(world, A, KEPT)
    rest(world, 1)
    assert not world.io
    assert world.engine.next_deadline_ns() == world.now_ns + REST_NS - 1
    rest(world, REST_NS - 2)
    assert not world.io
    rest(world, 1)
    assert world.io_of(CompactTokens)


def test_a_session_in_use_when_it_is_due_is_compacted_later():
    """It is checked after a while: not at once, again and again, nor never."""
    world = sparse_world()
    answer = prepare_load(world, A, KEPT)
    rest(world)
    assert not world.io
    assert world.engine.next_deadline_ns() == world.now_ns + RETRY_NS
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    rest(world, RETRY_NS)
    assert world.io_of(CompactTokens)


def test_blocks_being_hashed_are_compacted_later():
    """Nothing is moved while one of them cannot be."""
    world = new_world(max_waste=0.5, compact_rest_ns=REST_NS, admission=Admission.ON_EVICT)
    complete_store(world, prepare_store(world, A, TOKENS))
    world.engine.sessions.discard(A, to_bytes(TOKENS), EVEN)
    rest(world)
    assert not world.io_of(CompactTokens)
    assert world.engine.next_deadline_ns() == world.now_ns + RETRY_NS
    world.quiesce()
    rest(world, RETRY_NS)
    world.quiesce()
    assert (num_blocks(world), counter(world, "compactions")) == (3, 1)


def test_blocks_on_ssd_only_are_not_waited_for():
    """The session is checked again after its next use."""
    world = sparse_world(num_slots=6)
    store(world, B, [7] * len(TOKENS))
    assert world.engine.inspection.info(A).dram_bytes == 0
    rest(world)
    assert not world.io
    assert world.engine.next_deadline_ns() is None


def test_blocks_being_written_are_compacted_later():
    """They stay in their slots until they are on SSD."""
    world = new_world(max_waste=0.5, compact_rest_ns=REST_NS)
    store(world, A, TOKENS, settle=False)
    assert len(world.io_of(WriteBlock)) == 6
    world.engine.sessions.discard(A, to_bytes(TOKENS), EVEN)
    rest(world)
    assert not world.io_of(CompactTokens)
    assert world.engine.next_deadline_ns() == world.now_ns + RETRY_NS
    world.quiesce()
    rest(world, RETRY_NS)
    world.quiesce()
    assert (num_blocks(world), counter(world, "compactions")) == (3, 1)


def test_a_discard_during_a_shutdown_begins_nothing():
    """A shutdown is final, whatever is discarded then."""
    world = new_world(max_waste=0.5, compact_rest_ns=REST_NS)
    store(world, A, TOKENS)
    world.engine.write_dirty()
    discard(world, A, TOKENS, EVEN)
    rest(world)
    assert not world.io
    assert not world.engine._state.wasteful


def test_a_discard_after_an_arena_was_given_up_is_compacted():
    """The earlier order to empty it has no effect any more."""
    world = new_world(max_waste=0.5, compact_rest_ns=REST_NS)
    store(world, A, TOKENS)
    world.engine.release_dram()
    world.quiesce()
    load(world, A, TOKENS)
    discard(world, A, TOKENS, EVEN)
    rest(world)
    assert world.io_of(CompactTokens)
