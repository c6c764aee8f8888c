"""The check of all invariants: each violation is detected by the check meant for it."""

from collections.abc import Callable

import pytest

from kvd.core.operations.checking import check
from kvd.core.records.actions import CompactTokens, ReadBlock
from kvd.core.records.entries import Pin
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.limits import TenantLimits
from shared.types.granted_slots import Lookup
from tests.kvd.core.turns import (
    ONES,
    OTHER_TENANT,
    THREES,
    TWOS,
    A,
    B,
    C,
    new_world,
    prepare_load,
    prepare_store,
    queue_of,
    store,
)
from tests.property.cache_world import CacheWorld, to_bytes


def busy_world() -> CacheWorld:
    """Make a world: two blocks of A in both tiers, one leased; C packed on SSD; B being stored."""
    quotas = TenantLimits(quota_bytes=1 << 30)
    world = new_world(num_slots=4, tenant_limits=lambda _: quotas)
    store(world, C, THREES + ONES)
    store(world, OTHER_TENANT, [5] * 16)
    world.engine.sessions.flush(OTHER_TENANT, dry_run=False)
    world.quiesce()
    store(world, A, ONES + TWOS)
    prepare_load(world, A, ONES)
    assert prepare_store(world, B, [7] * 4).blocks
    check(world.engine._state)
    return world


def queued_nowhere(state: CacheState) -> None:
    state.placement.queue.change(1, queue_of(A), 0)
    state.placement.queue._order.clear()


def block_of_a(state: CacheState, index: int = 0) -> Block:
    """Return a block of the session with two in DRAM and on SSD; the first is leased."""
    return state.blocks[state.sessions[A].spans[index].block_key]


def two_of_one_slot(state: CacheState) -> None:
    block_of_a(state, 1).slot_id = block_of_a(state, 0).slot_id


def stored_over_a_block(state: CacheState) -> None:
    block_of_a(state, 1).slot_id = next(
        slot_id for lease in state.leases for slot_id, _ in getattr(lease, "slots", list)()
    )


def wiped_over_a_block(state: CacheState) -> None:
    state.under_way.wipes[99] = [block_of_a(state).slot_id]


def freed_under_a_block(state: CacheState) -> None:
    state.slots.free(block_of_a(state, 1).slot_id)


def used_by_nobody(state: CacheState) -> None:
    state.slots.allocate()


def not_in_the_journal(state: CacheState) -> None:
    state.journal.clear(block_of_a(state).slot_id)


def written_in_the_journal(state: CacheState) -> None:
    state.journal.put_writing([(block_of_a(state).slot_id, 1)], 1, 1)


def overlapping_extents(state: CacheState) -> None:
    block_of_a(state, 1).extent = block_of_a(state, 0).extent + 1


def sectors_of_nobody(state: CacheState) -> None:
    state.extents.allocate(1)


def another_key(state: CacheState) -> None:
    state.sessions[A].key = B


def without_a_span(state: CacheState) -> None:
    state.sessions[A].spans = []


def a_block_that_is_gone(state: CacheState) -> None:
    session = state.sessions[A]
    session.spans = [session.spans[0]._replace(block_key=b"gone"), *session.spans[1:]]


def an_empty_span(state: CacheState) -> None:
    session = state.sessions[A]
    session.spans = [session.spans[0]._replace(num_tokens=0), *session.spans[1:]]


def a_span_outside(state: CacheState) -> None:
    session = state.sessions[A]
    session.spans = [session.spans[0]._replace(start=1), *session.spans[1:]]


def a_user_without_a_span(state: CacheState) -> None:
    block_of_a(state).users[B] = None


def unranked(state: CacheState) -> None:
    state.policy.on_remove(A)


def hard_pinned_and_ranked(state: CacheState) -> None:
    state.sessions[A].pin = Pin.HARD


def packed_without_a_head(state: CacheState) -> None:
    state.tails.heads.clear()


def packed_twice(state: CacheState) -> None:
    session = state.sessions[C]
    session.packed += session.packed


def packed_blocks_miscounted(state: CacheState) -> None:
    state.tails.num_blocks += 1


def packed_and_unranked(state: CacheState) -> None:
    state.policy.on_evict(C, Tier.SSD)


def charged_too_much(state: CacheState) -> None:
    state.tenants.charge(A.tenant, 1)


def charged_to_nobody(state: CacheState) -> None:
    state.tenants.charge(A.tenant, -state.tenants._tenants[A.tenant].num_blocks)
    state.tenants.count_session(A.tenant, -state.tenants._tenants[A.tenant].num_sessions)


def sessions_of_a_tenant_miscounted(state: CacheState) -> None:
    state.tenants.count_session(A.tenant, 1)


def not_in_the_order_of_a_tenant(state: CacheState) -> None:
    state.tenants.on_remove(A)


def pins_miscounted(state: CacheState) -> None:
    state.num_pins[Pin.SOFT] += 1


def readers_miscounted(state: CacheState) -> None:
    block_of_a(state).readers += 1


def holders_miscounted(state: CacheState) -> None:
    block_of_a(state).holders += 1


def waits_miscounted(state: CacheState) -> None:
    next(lease for lease in state.leases if hasattr(lease, "entries")).num_waiting += 1


def a_leased_slot_given_away(state: CacheState) -> None:
    block_of_a(state).generation += 1


def orphans_miscounted(state: CacheState) -> None:
    state.leases.num_orphans += 1


def quarantine_miscounted(state: CacheState) -> None:
    state.leases.num_quarantined_slots += 1


def answers_miscounted(state: CacheState) -> None:
    block_of_a(state).num_answer_dram += 1


def clean_answers_miscounted(state: CacheState) -> None:
    block_of_a(state, 1).num_answer_clean += 1


def a_last_user_that_is_none(state: CacheState) -> None:
    block_of_a(state).last_user = B


def tokens_unknown(state: CacheState) -> None:
    block_of_a(state).token_ids = b""


def dram_miscounted(state: CacheState) -> None:
    state.blocks.num_dram += 1


def unverified_miscounted(state: CacheState) -> None:
    state.blocks.num_unverified += 1


def refused_though_clean(state: CacheState) -> None:
    block = block_of_a(state, 1)
    state.unwritten.refused[block.key] = block


def ahead_and_read(state: CacheState) -> None:
    block_of_a(state).is_ahead = True


BROKEN: list[tuple[Callable[[CacheState], None], str]] = [
    (two_of_one_slot, "has two owners"),
    (stored_over_a_block, "has two owners"),
    (wiped_over_a_block, "has two owners"),
    (freed_under_a_block, "should be SlotState.COMMITTED"),
    (used_by_nobody, "should be SlotState.FREE"),
    (not_in_the_journal, "the journal says"),
    (written_in_the_journal, "the journal says"),
    (overlapping_extents, "overlap"),
    (sectors_of_nobody, "sectors in use are counted right"),
    (another_key, "registered under its key"),
    (without_a_span, "stored without a span"),
    (a_block_that_is_gone, "names a block that is gone"),
    (an_empty_span, "has an empty span"),
    (a_span_outside, "a span outside its block"),
    (a_user_without_a_span, "a block's users are"),
    (unranked, "all but hard-pinned sessions rank"),
    (hard_pinned_and_ranked, "all but hard-pinned sessions rank"),
    (packed_without_a_head, "packed blocks are found"),
    (packed_twice, "extents 0 and 0 overlap"),
    (packed_blocks_miscounted, "packed blocks are counted right"),
    (packed_and_unranked, "answers for what it packs"),
    (charged_too_much, "charged for what it has"),
    (charged_to_nobody, "every block is charged"),
    (sessions_of_a_tenant_miscounted, "its sessions are counted right"),
    (not_in_the_order_of_a_tenant, "all sessions of a tenant with a quota rank"),
    (pins_miscounted, "pins are counted right"),
    (readers_miscounted, "a block's readers are"),
    (holders_miscounted, "a block's holders are"),
    (waits_miscounted, "counts what it waits for"),
    (a_leased_slot_given_away, "a leased slot is not given away"),
    (orphans_miscounted, "orphan leases are counted right"),
    (quarantine_miscounted, "quarantined slots are counted right"),
    (answers_miscounted, "who answers for a block is counted right"),
    (clean_answers_miscounted, "who answers for clean blocks is counted right"),
    (a_last_user_that_is_none, "the last user is one of them"),
    (tokens_unknown, "token ids of blocks in DRAM are known"),
    (dram_miscounted, "DRAM blocks are counted right"),
    (unverified_miscounted, "unverified blocks are counted right"),
    (refused_though_clean, "a refused block is in DRAM only"),
    (ahead_and_read, "is loaded counts as used"),
    (queued_nowhere, "every request that waits has its place"),
]


@pytest.mark.parametrize(
    ("break_it", "message"), BROKEN, ids=[broken.__name__ for broken, _ in BROKEN]
)
def test_every_violated_invariant_is_detected(break_it, message):
    """Each table that contradicts the others, and each wrong count."""
    state = busy_world().engine._state
    break_it(state)
    with pytest.raises(AssertionError, match=message):
        check(state)


def reading_world() -> CacheWorld:
    """Make a world where a load waits for blocks on SSD only."""
    world = new_world(num_slots=2)
    store(world, A, ONES + TWOS)
    store(world, B, THREES * 2)
    assert prepare_load(world, A, ONES + TWOS).lookup is Lookup.PENDING
    assert world.io_of(ReadBlock)
    return world


def test_a_load_waits_for_what_it_reads():
    """The lease waits for another block, or its read is not registered."""
    state = reading_world().engine._state
    arrival = next(iter(state.under_way.arrival_of.values()))
    waiting = dict(arrival.waiting)
    arrival.waiting.clear()
    with pytest.raises(AssertionError, match="waits for its reads"):
        check(state)
    arrival.waiting.update(waiting)
    check(state)
    del state.under_way.reads[arrival.op_id]
    with pytest.raises(AssertionError, match="blocks that are reading are registered"):
        check(state)


def test_a_waiting_lease_is_tracked():
    """Otherwise no engine would be notified of its progress."""
    state = reading_world().engine._state
    next(iter(state.leases)).is_tracked = False
    with pytest.raises(AssertionError, match="has its progress published"):
        check(state)


def test_blocks_read_ahead_are_counted():
    """A wrong count would let too many reads begin, or none."""
    world = reading_world()
    world._engine._reader.ahead_bytes += 1
    with pytest.raises(AssertionError, match="bytes read ahead are counted right"):
        world._engine.check()


def copying_world() -> CacheWorld:
    """Make a world in which a session is being compacted."""
    world = new_world(max_waste=0.5, compact_rest_ns=1)
    store(world, A, ONES + TWOS)
    world.engine.sessions.discard(A, to_bytes(ONES + TWOS), [(0, 2), (4, 6)])
    world.quiesce()
    world.now_ns += 1
    world.engine.expire()
    world.pump()
    assert world.io_of(CompactTokens)
    return world


def test_a_compaction_is_recorded_in_all_tables():
    """The slots that it fills, their session, and the blocks that it copies from."""
    state = copying_world().engine._state
    target = state.compaction.targets.pop()
    with pytest.raises(AssertionError, match=r"should be SlotState\.FREE"):
        check(state)
    state.compaction.targets = [target]
    source = state.compaction.sources.pop()
    with pytest.raises(AssertionError, match="blocks that are copying are registered"):
        check(state)
    state.compaction.sources.append(source)
    check(state)
    state.tenants.charge(A.tenant, -1)
    with pytest.raises(AssertionError, match="charged for what it has"):
        check(state)
