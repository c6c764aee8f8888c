"""States have the same life as blocks: quotas, scrubs, erasing, files, retention, SSD."""

import struct

import pytest

from kvd.core.operations.checking import check
from kvd.core.records.actions import VerifyExtent, VerifySlot
from kvd.core.records.entries import Pin
from kvd.core.records.errors import SessionChangedError, UnknownSessionError
from kvd.core.records.tier import Tier
from kvd.core.state.limits import TenantLimits
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE
from tests.kvd.core.turns import ENGINE_ID, A, B, C, counter, queue_of
from tests.kvd.core.turns_with_parts import (
    load_with,
    positions_of,
    prepare_with,
    state_world,
    store_with,
)
from tests.property.cache_world import compute, to_bytes
from tests.property.test_state_engine import NUM_PARTS, STATE_LAYOUT, state_of

TOKENS = list(range(1, 23))  # five blocks of 4, and half of one
OPERATOR = 7


def _make_limited(num_blocks):
    """Make a world in which a tenant may have so many blocks."""
    quota = TenantLimits(quota_bytes=num_blocks * STATE_LAYOUT.block_bytes)
    return state_world(tenant_limits=lambda _: quota)


def test_state_parts_count_for_a_quota():
    """States without room in it are left out; otherwise older sessions give way."""
    world = _make_limited(7)
    answer = store_with(world, A, TOKENS[:16], [8, 16])
    assert (len(answer.blocks), answer.states) == (4, ())
    world = _make_limited(8)
    store_with(world, A, TOKENS[:8], [8])
    usage = next(iter(world.engine.inspection.tenants))
    assert usage.used_bytes == 4 * STATE_LAYOUT.block_bytes
    store_with(world, B, [50 + n for n in range(12)], [12])
    assert positions_of(world, B) == [12]
    assert positions_of(world, A) == []


def test_a_scrub_finds_a_corrupt_part_in_either_tier():
    """Its state is dropped from all sessions that have it; the tokens stay."""
    world = state_world(num_slots=12)
    store_with(world, A, TOKENS[:9], [5, 9])
    store_with(world, B, TOKENS[:9], [])
    assert positions_of(world, B) == [5, 9]
    part = next(b for b in world.engine._state.blocks if not b.num_tokens)
    world.damage_extent(part.extent)
    world.damage_slot(part.slot_id)
    scrub = world.engine.scrubs.begin(repair=True)
    while not world.engine.scrubs.step(scrub, 1 << 30).done:
        world.pump()
        world.finish_all(VerifySlot)
        world.finish_all(VerifyExtent)
        world.quiesce()
    assert len(positions_of(world, A)) == len(positions_of(world, B)) == 1
    assert world.engine.inspection.info(A).num_tokens == 9


def test_an_erased_tenant_leaves_no_state():
    world = state_world()
    store_with(world, A, TOKENS, [6, 22])
    prepare_with(world, B, [*TOKENS, 1], [23], 20)
    world.engine.erasing.begin(lambda tenant: tenant == A.tenant)
    world.engine.engines.remove(ENGINE_ID)
    while not world.engine.erasing.is_gone():
        world.engine.erasing.step(8)
        world.pump()
        world.quiesce()
    assert [tier.used_bytes for tier in world.engine.inspection.stats().tiers] == [0, 0]
    assert not list(world.engine._state.stored_parts)


def test_a_retained_prefix_has_the_states_of_its_tokens():
    """So common beginnings are useful after all their conversations are gone."""
    world = state_world(max_retention_ns=1_000_000)
    store_with(world, A, TOKENS, [6, 8, 22])
    prefix = A._replace(session_id="prefix")
    assert world.engine.retention.retain_prefix(prefix, to_bytes(TOKENS[:8]), 1000) == 1000
    world.pump()
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    assert positions_of(world, prefix) == [6, 8]
    assert load_with(world, C, TOKENS).end == 8


def test_states_are_read_ahead_with_their_session():
    world = state_world(10, policy="lookahead_queue", prefetch_bytes=1 << 30)
    store_with(world, A, TOKENS[:9], [9])
    world.engine.release_dram()
    world.pump()
    world.quiesce()
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(A))
    world.pump()
    world.quiesce()
    assert load_with(world, A, TOKENS[:9], dram_only=True).end == 9
    assert counter(world, "prefetch_hits") == 3 + NUM_PARTS


def test_a_pinned_session_keeps_its_states():
    world = state_world(num_slots=9, num_extents=0)
    store_with(world, A, TOKENS[:8], [4, 8])
    world.engine.sessions.pin(A, Pin.HARD)
    for number in range(6):
        store_with(world, B, [50 + number] * 12, [])
    assert positions_of(world, A) == [4, 8]


def test_operators_see_states():
    """By position, with their bytes and tiers; the blocks shown are those of tokens."""
    world = state_world()
    store_with(world, A, TOKENS, [6, 22])
    store_with(world, B, TOKENS[:8], [])
    found = world.engine.inspection.describe(A)
    assert [block.num_tokens for block in found.blocks] == [4, 4, 4, 4, 4, 2]
    assert [(s.position, s.num_sessions) for s in found.states] == [(6, 2), (22, 1)]
    first = found.states[0]
    assert first.num_bytes == NUM_PARTS * STATE_LAYOUT.block_bytes
    assert (first.tiers, first.dirty, first.is_hashed) == ((Tier.DRAM, Tier.SSD), False, True)
    assert found.info.num_blocks == 6 + 2 * NUM_PARTS
    assert found.info.waste_bytes == STATE_LAYOUT.block_bytes // 2, "of the last block"
    world.engine.release_dram()
    world.pump()
    world.quiesce()
    packed = world.engine.inspection.describe(A)
    assert [s.tiers for s in packed.states] == [(Tier.SSD,), (Tier.SSD,)]
    assert packed.info.waste_bytes == found.info.waste_bytes
    assert (counter(world, "store_states"), counter(world, "load_states")) == (2, 0)


def test_the_slots_of_a_store_that_turns_out_superfluous_are_freed():
    """Two sessions with the same state pay once; the last one frees it."""
    world = state_world()
    store_with(world, A, TOKENS[:8], [8])
    store_with(world, B, TOKENS[:8], [8])
    assert world.engine.inspection.stats().tiers[0].num_blocks == 2 + NUM_PARTS
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    assert load_with(world, B, TOKENS[:8]).end == 8
    world.engine.sessions.flush(B, dry_run=False)
    world.pump()
    world.quiesce()
    assert world.engine.inspection.stats().tiers[0].num_blocks == 0


# ------------------------------------------------------------------------------------------- files


def _export(world):
    """Export a session: all tokens, their rows, and the newest state."""
    files = world.engine.session_files
    export = files.begin_export(A)
    tokens, rows = [], []
    while not export.is_done:
        answer = files.prepare_export(export, 2, OPERATOR)
        answer = _settle(world, answer)
        for part in files.confirm_export(export, answer.lease_id):
            rows += world.slots[part.slot_id][part.start : part.start + part.num_tokens]
            tokens += struct.unpack(f"<{part.num_tokens}I", part.token_ids)
        world.engine.loads.complete(answer.lease_id, OPERATOR)
        world.pump()
    return export, tokens, rows


def _settle(world, answer):
    world.pump()
    if answer.lookup is Lookup.PENDING:
        world.quiesce()
        answer = world.engine.loads.settle(answer.lease_id)
    return answer


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_export_has_the_newest_state(is_packed):
    """Behind the tokens, part by part; the session does not change."""
    world = state_world()
    store_with(world, A, TOKENS, [6, 13, 20])
    if is_packed:
        world.engine.release_dram()
        world.pump()
        world.quiesce()
    export, tokens, rows = _export(world)
    assert (tokens, rows) == (TOKENS, compute([], TOKENS))
    assert export.position == 20
    parts = []
    while export.next_part < len(export.parts):
        answer = world.engine.session_files.prepare_export_parts(export, 1, OPERATOR)
        answer = _settle(world, answer)
        slot_ids = world.engine.session_files.confirm_export_parts(export, answer.lease_id)
        parts += [world.slots[slot_id] for slot_id in slot_ids]
        world.engine.loads.complete(answer.lease_id, OPERATOR)
        world.pump()
    assert parts == state_of(rows[19])
    assert positions_of(world, A) == [6, 13, 20]


def test_a_state_that_has_left_the_session_is_not_exported():
    world = state_world()
    store_with(world, A, TOKENS, [20])
    export, _, _ = _export(world)
    world.engine.sessions.discard(A, to_bytes(TOKENS), [(10, 12)])
    world.pump()
    with pytest.raises(SessionChangedError):
        world.engine.session_files.prepare_export_parts(export, 1, OPERATOR)
    world.engine.sessions.flush(A, dry_run=False)
    with pytest.raises(SessionChangedError):
        world.engine.session_files.prepare_export_parts(export, 1, OPERATOR)
    with pytest.raises(UnknownSessionError):
        world.engine.session_files.begin_export(A)


def test_an_import_stores_a_state_behind_its_tokens():
    world = state_world()
    files = world.engine.session_files
    token_ids = to_bytes(TOKENS)
    answer = files.prepare_import(A, token_ids, 0, OPERATOR, WHOLE, [22])
    assert [granted.position for granted in answer.states] == [22]
    world.engine.stores.complete(answer.lease_id, OPERATOR, success=True)
    world.pump()
    world.quiesce()
    assert positions_of(world, A) == [22]


# ---------------------------------------------------------------------------------------- checking


def _without_a_part(state):
    session = state.sessions[A]
    del session.spans[-1]
    next(b for b in state.blocks if b.key not in session.block_keys()).users.clear()


def _in_front_of_its_tokens(state):
    spans = state.sessions[A].spans
    spans.insert(0, spans.pop())
    spans.insert(0, spans.pop())


def _not_found(state):
    stored = next(iter(state.stored_parts))
    stored.users[B] = None


def _of_no_session(state):
    state.stored_parts._behind.clear()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_without_a_part, "has parts without the others"),
        (_in_front_of_its_tokens, "a state is behind its tokens"),
        (_not_found, "parts are found"),
        (_of_no_session, "parts are found"),
    ],
)
def test_every_violated_invariant_is_detected(break_it, message):
    world = state_world()
    store_with(world, A, TOKENS[:8], [8])
    break_it(world.engine._state)
    with pytest.raises(AssertionError, match=message):
        check(world.engine._state)
