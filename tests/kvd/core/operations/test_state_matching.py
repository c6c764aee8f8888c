"""States: stored at positions, found by tokens alone, superseded, lost without their tokens."""

from dataclasses import replace

import pytest

from kvd.core.records.actions import IoOutcome, ReadBlock
from kvd.core.records.entries import pack_spans, unpack_spans
from kvd.core.records.errors import InvalidRequestError
from shared.types.granted_slots import Lookup
from tests.kvd.core.turns import ENGINE_ID, A, B, C, new_world
from tests.kvd.core.turns_with_parts import (
    load_with,
    positions_of,
    prepare_with,
    state_world,
    store_with,
)
from tests.property.cache_world import to_bytes

TOKENS = list(range(1, 23))  # five blocks of 4, and half of one


def test_a_load_ends_at_the_last_stored_state():
    world = state_world()
    store_with(world, A, TOKENS, [6, 13])
    assert load_with(world, A, TOKENS).end == 13
    assert load_with(world, A, TOKENS[:12]).end == 6
    assert load_with(world, A, TOKENS, 8).end == 13


def test_tokens_without_a_state_are_a_miss():
    world = state_world()
    store_with(world, A, TOKENS, [6])
    answer = load_with(world, A, TOKENS, 6).answer
    assert (answer.lookup, answer.miss_reason) == (Lookup.MISS, "no_state")
    answer = load_with(world, A, TOKENS[:5]).answer
    assert (answer.lookup, answer.miss_reason) == (Lookup.MISS, "no_state")
    assert load_with(world, B, [9] * 8).answer.miss_reason == "unknown_session"
    assert load_with(world, A, TOKENS).answer.miss_reason == "no_state"


def test_a_state_within_a_block_is_found_where_the_block_continues_differently():
    """For example when reasoning is dropped: a turn diverges in the middle of a block."""
    world = state_world()
    store_with(world, A, TOKENS, [10, 22])
    other = [*TOKENS[:10], 90, 91, 92, 93]
    assert load_with(world, A, other).end == 10
    store_with(world, A, other, [14], 8)
    assert positions_of(world, A) == [10, 14]
    assert load_with(world, A, [*other, 1, 2]).end == 14


def test_other_sessions_find_states_along_their_tokens():
    world = state_world()
    store_with(world, A, TOKENS, [8, 15])
    assert load_with(world, B, [*TOKENS[:8], 70, 71]).end == 8
    assert load_with(world, B, [*TOKENS[:15], 70, 71]).end == 15
    answer = store_with(world, B, [*TOKENS[:15], 70, 71], [8, 17], 12)
    assert [state.position for state in answer.states] == [17], "8 is stored"
    assert positions_of(world, B) == [8, 15, 17]
    assert positions_of(world, A) == [8, 15]


def test_another_tenant_finds_none():
    world = state_world()
    store_with(world, A, TOKENS, [8])
    stranger = A._replace(tenant="other")
    assert load_with(world, stranger, TOKENS).answer.lookup is Lookup.MISS


def test_the_first_the_newest_two_and_shared_ones_stay():
    world = state_world(num_slots=40)
    store_with(world, A, TOKENS[:5], [3, 5])
    store_with(world, A, TOKENS[:9], [9], 4)
    assert positions_of(world, A) == [3, 5, 9]
    store_with(world, A, TOKENS[:13], [13], 8)
    assert positions_of(world, A) == [3, 9, 13]
    store_with(world, B, [*TOKENS[:9], 50], [10], 8)
    assert positions_of(world, B) == [3, 9, 10]
    store_with(world, A, TOKENS[:18], [15, 18], 12)
    assert positions_of(world, A) == [3, 9, 15, 18], "9 is of B, too"
    world.engine.sessions.flush(B, dry_run=False)
    store_with(world, A, TOKENS[:20], [20], 16)
    assert positions_of(world, A) == [3, 18, 20]


def test_a_state_that_would_be_superseded_at_once_is_not_stored():
    answer = prepare_with(state_world(num_slots=40), A, TOKENS, [4, 8, 12, 16, 20])
    assert [state.position for state in answer.states] == [4, 16, 20]


def test_a_store_may_have_states_alone():
    world = state_world()
    store_with(world, A, TOKENS, [])
    answer = store_with(world, A, TOKENS, [22], 22)
    assert answer.lease_id
    assert not answer.blocks
    assert answer.end_token == 22
    assert load_with(world, A, TOKENS).end == 22
    again = store_with(world, A, TOKENS, [22], 22)
    assert not again.lease_id


def test_tokens_are_stored_though_there_is_no_room_for_states():
    world = state_world(num_slots=7, num_extents=0)
    answer = store_with(world, A, TOKENS, [22])
    assert (len(answer.blocks), answer.states) == (6, ())
    world = state_world(num_slots=2)
    assert store_with(world, A, TOKENS[:4], [4]).states == (), "no load could ever have it"


def test_a_failed_store_leaves_no_state():
    world = state_world()
    answer = prepare_with(world, A, TOKENS, [22])
    world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=False)
    world.pump()
    assert world.engine.inspection.stats().tiers[0].used_bytes == 0


def test_two_stores_of_the_same_state():
    world = state_world()
    one = prepare_with(world, A, TOKENS, [22])
    other = prepare_with(world, B, TOKENS, [22])
    for answer in (one, other):
        world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=True)
        world.pump()
    world.quiesce()
    assert positions_of(world, A) == positions_of(world, B) == [22]
    assert load_with(world, B, TOKENS).end == 22


def test_invalid_positions():
    for positions in ([0], [23]):
        with pytest.raises(InvalidRequestError, match="but 22 tokens were sent"):
            prepare_with(state_world(), A, TOKENS, positions)
    with pytest.raises(InvalidRequestError, match="neither states nor windows"):
        new_world().engine.stores.prepare(A, to_bytes(TOKENS), 0, ENGINE_ID, load_ends=[4])


def test_an_arena_that_cannot_hold_everything_at_once():
    """The tokens are loaded without the state, and then the rest with it."""
    world = state_world(num_slots=5)
    store_with(world, A, TOKENS[:12], [])
    store_with(world, A, TOKENS[:20], [20], 12)
    store_with(world, A, TOKENS[:20], [20], 20)
    assert positions_of(world, A) == [20]
    first = load_with(world, A, TOKENS[:20])
    assert first.end == 0
    assert first.answer.more
    last = load_with(world, A, TOKENS[:20], first.answer.end_token)
    assert last.end == 20
    assert not last.answer.more


def test_dram_only_ends_at_the_last_state_in_dram():
    world = state_world(num_slots=12)
    store_with(world, A, TOKENS[:9], [5, 9])
    session = world.engine._state.sessions[A]
    blocks = world.engine._state.blocks
    newest = [blocks[span.block_key] for span in session.spans if span.start == 9]
    world.engine._state.leave_dram(newest[0])
    world.pump()
    assert load_with(world, A, TOKENS[:9], dram_only=True).end == 5
    answer = load_with(world, A, TOKENS[:9], 5, dram_only=True).answer
    assert answer.miss_reason == "on_ssd"
    assert load_with(world, A, TOKENS[:9]).end == 9, "it is read"


def test_a_state_with_a_corrupt_part_is_dropped_and_the_tokens_stay():
    world = state_world(num_slots=8)
    store_with(world, A, TOKENS[:9], [5, 9])
    store_with(world, B, [60 + n for n in range(32)], [])
    answer = world.engine.loads.prepare(A, to_bytes(TOKENS[:9]), 0, ENGINE_ID)
    world.pump()
    assert answer.lookup is Lookup.PENDING
    reads = world.io_of(ReadBlock)
    parts = [op_id for op_id in reads if not world.io[op_id].num_tokens]
    world.finish_io(parts[0], IoOutcome.CORRUPT)
    world.quiesce()
    answer = world.engine.loads.settle(answer.lease_id)
    assert (answer.lookup, answer.miss_reason) == (Lookup.MISS, "corrupt")
    world.pump()
    assert positions_of(world, A) == [5]
    assert world.engine.inspection.info(A).num_tokens == 9
    assert load_with(world, A, TOKENS[:9]).end == 5


def test_a_discard_leaves_the_states_before_it():
    world = state_world()
    store_with(world, A, TOKENS, [6, 13, 20])
    kept = world.engine.sessions.discard(A, to_bytes(TOKENS), [(14, 16)])
    world.pump()
    assert kept == 14
    assert positions_of(world, A) == [6, 13]
    assert load_with(world, A, [*TOKENS[:14], *TOKENS[16:]]).end == 13
    kept = world.engine.sessions.discard(A, to_bytes(TOKENS[:14]), [(5, 7)])
    world.pump()
    assert kept == 5
    assert positions_of(world, A) == []


def test_eviction_takes_the_newest_state_before_the_tokens_it_follows():
    world = state_world(num_slots=8, num_extents=0)
    store_with(world, A, TOKENS[:12], [4, 12])
    assert positions_of(world, A) == [4, 12]
    store_with(world, B, [50] * 4, [])
    store_with(world, C, [51] * 4, [])
    assert positions_of(world, A) == [4]
    assert world.engine.inspection.info(A).num_tokens == 12
    assert load_with(world, A, TOKENS).end == 4


@pytest.mark.parametrize("keep_dram", [True, False])
def test_states_survive_a_restart(keep_dram):
    world = state_world()
    store_with(world, A, TOKENS, [6, 13, 22])
    store_with(world, B, [*TOKENS[:6], 80], [7], 4)
    world.quiesce()
    world.start(keep_dram=keep_dram)
    assert positions_of(world, A) == [6, 13, 22]
    assert load_with(world, C, TOKENS).end == 22
    assert load_with(world, B, [*TOKENS[:6], 80]).end == 7


def test_an_unwritten_state_costs_no_tokens():
    world = state_world()
    store_with(world, A, TOKENS, [6, 13, 22])
    world.quiesce()
    parts = [key for key, block in world.index.blocks.items() if not block.num_tokens]
    del world.index.blocks[parts[2]]
    world.start()
    assert len(positions_of(world, A)) == 2
    assert world.engine.inspection.info(A).num_tokens == 22
    load_with(world, A, TOKENS)
    world.quiesce()
    world.start()
    assert len(positions_of(world, A)) == 2


def test_packed_sessions_give_their_states():
    world = state_world(packs_sessions=True)
    store_with(world, A, TOKENS, [6, 22])
    world.engine.release_dram()
    world.pump()
    world.quiesce()
    assert world.engine._state.sessions[A].packed
    assert positions_of(world, A) == [6, 22]
    assert load_with(world, B, TOKENS).end == 22


def test_a_session_adopts_states_that_another_one_has_packed():
    world = state_world(packs_sessions=True)
    store_with(world, A, TOKENS[:9], [6, 9])
    world.engine.release_dram()
    world.pump()
    world.quiesce()
    assert world.engine._state.sessions[A].packed
    store_with(world, B, [*TOKENS[:9], 70], [10])
    assert positions_of(world, B) == [6, 9, 10]
    assert load_with(world, B, [*TOKENS[:9], 71]).end == 9


def _torn(spans):
    """Return its entry without the first part of its second state."""
    return [*spans[:-2], spans[-1]]


def _swap(spans):
    """Return its entry with the parts of its two states exchanged."""
    parts = [index for index, span in enumerate(spans) if not span.num_tokens]
    first, second = parts[:2], parts[2:]
    moved = dict(zip(parts, [*second, *first], strict=True))
    return [spans[moved.get(index, index)] for index in range(len(spans))]


def _twice(spans):
    """Return its entry with its second state twice."""
    return [*spans, *spans[-2:]]


@pytest.mark.parametrize(("damage", "positions"), [(_torn, [5]), (_swap, []), (_twice, [5, 9])])
def test_a_damaged_entry_costs_states_and_no_tokens(damage, positions):
    world = state_world()
    store_with(world, A, TOKENS[:9], [5, 9])
    world.quiesce()
    entry = world.index.sessions[A]
    packed = pack_spans(damage(unpack_spans(entry.spans)))
    world.index.sessions[A] = replace(entry, spans=packed)
    world.start()
    assert positions_of(world, A) == positions
    assert world.engine.inspection.info(A).num_tokens == 9
    assert load_with(world, A, TOKENS[:9]).end == max(positions, default=0)


def test_a_fork_from_a_session_with_a_short_block():
    """Its first block is short; a fork continues from the state in its second."""
    world = state_world(num_slots=40)
    store_with(world, A, TOKENS[:2], [])
    store_with(world, A, TOKENS[:15], [11], 2)
    fork = [*TOKENS[:11], 70, 71, 72]
    assert load_with(world, B, fork).end == 11
    answer = store_with(world, B, fork, [14], 8)
    assert answer.refused == ""
    assert load_with(world, B, [*fork, 1]).end == 14
