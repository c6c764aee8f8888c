"""Compaction that waits, is put off or given up: for leases, uses, room and other work."""

from kvd.core.operations.compacting import RETRY_NS
from kvd.core.records.actions import CompactTokens, HashSlot, IoOutcome, WriteBlock
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


def test_a_lease_that_comes_meanwhile_wins():
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


def test_a_lease_that_comes_while_the_copies_are_written_wins():
    """They are let go at once, though all of them come to SSD."""
    world = sparse_world()
    rest(world)
    world.finish_all(CompactTokens)
    assert world.io_of(WriteBlock)
    assert prepare_load(world, A, KEPT).lookup is Lookup.HIT
    assert counter(world, "compactions_given_up") == 1
    world.quiesce()
    assert (num_blocks(world), counter(world, "compactions")) == (6, 0)


def test_a_second_discard_meanwhile_wins():
    """What was copied is not what is left."""
    world = sparse_world()
    rest(world)
    discard(world, A, KEPT, [(0, 6)])
    assert load(world, A, KEPT[6:]).end_token == 6
    assert counter(world, "compactions") == 0


def test_without_room_on_ssd_it_is_given_up():
    """What is on SSD is not given up for what cannot be there."""
    world = sparse_world(num_extents=6)
    rest(world)
    world.quiesce()
    assert (num_blocks(world), counter(world, "compactions_given_up")) == (6, 1)
    assert world.engine.inspection.info(A).ssd_bytes


def test_who_comes_into_use_while_it_waits_is_looked_at_later():
    """Its turn may leave the queue without having touched it."""
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


def test_nothing_is_begun_once_the_end_is_near():
    """What is dirty goes first."""
    world = sparse_world(admission=Admission.ON_EVICT)
    world.engine.write_dirty()
    world.pump()
    rest(world)
    assert not world.io_of(CompactTokens)
    assert world.io_of(WriteBlock)


def test_a_failed_copy_leaves_all_as_it_was():
    """An operation that could not be made says nothing of the bytes."""
    world = sparse_world()
    rest(world)
    world.finish_all(CompactTokens, IoOutcome.TRANSIENT)
    assert not world.io_of(HashSlot)
    assert load(world, A, KEPT).end_token == len(KEPT)
    assert num_blocks(world) == 6


def test_an_arena_that_is_given_up_is_not_compacted():
    """A copy that is under way then is not made use of, and its slots come free."""
    world = sparse_world()
    rest(world)
    assert not world.engine.release_dram()
    world.pump()
    world.quiesce()
    assert (counter(world, "compactions"), counter(world, "compactions_given_up")) == (0, 1)
    assert world.engine.release_dram()


def test_a_session_that_goes_does_not_wait_any_more():
    """However long nothing can be compacted, only sessions that are stored wait."""
    world = sparse_world()
    world.engine.release_dram()
    rest(world)
    assert list(world.engine._state.wasteful) == [A]
    world.engine.sessions.flush(A, dry_run=False)
    assert not world.engine._state.wasteful


def test_a_use_puts_it_off():
    """A session is compacted when it has been left alone for a while since its last use."""
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


def test_a_session_in_use_when_it_is_due_is_looked_at_in_a_while():
    """Neither at once, again and again, nor never."""
    world = sparse_world()
    answer = prepare_load(world, A, KEPT)
    rest(world)
    assert not world.io
    assert world.engine.next_deadline_ns() == world.now_ns + RETRY_NS
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    rest(world, RETRY_NS)
    assert world.io_of(CompactTokens)


def test_blocks_that_are_hashed_just_then_are_compacted_in_a_while():
    """What cannot be moved yet is moved later, and nothing is moved meanwhile."""
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


def test_what_is_on_ssd_only_is_nothing_to_wait_for():
    """It is looked at when its session has been used again."""
    world = sparse_world(num_slots=6)
    store(world, B, [7] * len(TOKENS))
    assert world.engine.inspection.info(A).dram_bytes == 0
    rest(world)
    assert not world.io
    assert world.engine.next_deadline_ns() is None


def test_blocks_that_are_written_just_then_are_compacted_in_a_while():
    """What is on its way to SSD stays where it is."""
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


def test_a_discard_near_the_end_begins_nothing():
    """The end is for good, whatever is discarded then."""
    world = new_world(max_waste=0.5, compact_rest_ns=REST_NS)
    store(world, A, TOKENS)
    world.engine.write_dirty()
    discard(world, A, TOKENS, EVEN)
    rest(world)
    assert not world.io
    assert not world.engine._state.wasteful


def test_a_discard_after_an_arena_was_given_up_is_compacted():
    """That it was to be emptied once is forgotten then."""
    world = new_world(max_waste=0.5, compact_rest_ns=REST_NS)
    store(world, A, TOKENS)
    world.engine.release_dram()
    world.quiesce()
    load(world, A, TOKENS)
    discard(world, A, TOKENS, EVEN)
    rest(world)
    assert world.io_of(CompactTokens)
