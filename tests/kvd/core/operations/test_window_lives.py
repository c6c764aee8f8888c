"""Windows have the same life as blocks: quotas, scrubs, files, retention, operators."""

import struct

import pytest

from kvd.core.operations.checking import check
from kvd.core.records.actions import CompactTokens, VerifyExtent, VerifySlot
from kvd.core.records.entries import Pin
from kvd.core.records.errors import SessionChangedError
from kvd.core.records.tier import Tier
from kvd.core.state.limits import TenantLimits
from shared.types.graft_source import GraftSource
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE
from tests.kvd.core.turns import ENGINE_ID, A, B, C, counter, queue_of
from tests.kvd.core.turns_with_parts import (
    load_with,
    prepare_with,
    store_with,
    window_ranges,
    window_world,
)
from tests.property.cache_world import compute, to_bytes
from tests.property.test_window_engine import NUM_PARTS, WINDOW_LAYOUT

TOKENS = list(range(1, 23))  # five blocks of 4, and half of one
OPERATOR = 7


def test_window_parts_count_for_a_quota():
    """Windows without room in it are left out; otherwise older sessions give way."""
    for num_blocks, num_windows in ((7, 0), (8, 2)):
        quota = TenantLimits(quota_bytes=num_blocks * WINDOW_LAYOUT.block_bytes)
        world = window_world(tenant_limits=lambda _, quota=quota: quota)
        assert len(store_with(world, A, TOKENS[:16], [16]).windows) == num_windows
        usage = next(iter(world.engine.inspection.tenants))
        used = (4 + num_windows * NUM_PARTS) * WINDOW_LAYOUT.block_bytes
        assert usage.used_bytes == used
    store_with(world, B, [50 + n for n in range(4)], [4])
    assert window_ranges(world, B) == [(0, 4)]
    assert window_ranges(world, A) != [(8, 16)]


def test_a_scrub_finds_a_corrupt_part_in_either_tier():
    """Its window is dropped from all sessions that have it; the tokens stay."""
    world = window_world()
    store_with(world, A, TOKENS[:20], [8, 20])
    store_with(world, B, TOKENS[:20], [])
    assert window_ranges(world, B) == [(0, 8), (12, 20)]
    part = next(b for b in world.engine._state.blocks if not b.num_tokens)
    world.damage_extent(part.extent)
    world.damage_slot(part.slot_id)
    scrub = world.engine.scrubs.begin(repair=True)
    while not world.engine.scrubs.step(scrub, 1 << 30).done:
        world.pump()
        world.finish_all(VerifySlot)
        world.finish_all(VerifyExtent)
        world.quiesce()
    assert window_ranges(world, A) == window_ranges(world, B)
    assert sum(end - start for start, end in window_ranges(world, A)) == 12
    assert world.engine.inspection.info(A).num_tokens == 20


def test_an_erased_tenant_leaves_no_window():
    world = window_world()
    store_with(world, A, TOKENS, [8, 22])
    prepare_with(world, B, [*TOKENS, 1], [23], 20)
    world.engine.erasing.begin(lambda tenant: tenant == A.tenant)
    world.engine.engines.remove(ENGINE_ID)
    while not world.engine.erasing.is_gone():
        world.engine.erasing.step(8)
        world.pump()
        world.quiesce()
    assert [tier.used_bytes for tier in world.engine.inspection.stats().tiers] == [0, 0]
    assert not list(world.engine._state.stored_parts)


def test_a_retained_prefix_has_the_windows_of_its_end():
    """So common beginnings are useful after all their conversations are gone."""
    world = window_world(max_retention_ns=1_000_000)
    store_with(world, A, TOKENS, [12, 22])
    prefix = A._replace(session_id="prefix")
    assert world.engine.retention.retain_prefix(prefix, to_bytes(TOKENS[:12]), 1000) == 1000
    world.pump()
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    assert window_ranges(world, prefix) == [(4, 12)]
    assert load_with(world, C, TOKENS).end == 12


def test_windows_are_read_ahead_with_their_session():
    world = window_world(12, policy="lookahead_queue", prefetch_bytes=1 << 30)
    store_with(world, A, TOKENS[:8], [8])
    world.engine.release_dram()
    world.pump()
    world.quiesce()
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(A))
    world.pump()
    world.quiesce()
    assert load_with(world, A, TOKENS[:8], dram_only=True).end == 8
    assert counter(world, "prefetch_hits") == 2 + 2 * NUM_PARTS


def test_a_pinned_session_keeps_its_windows():
    world = window_world(num_slots=12, num_extents=0)
    store_with(world, A, TOKENS[:8], [8])
    world.engine.sessions.pin(A, Pin.HARD)
    for number in range(6):
        store_with(world, B, [50 + number] * 12, [12])
    assert window_ranges(world, A) == [(0, 8)]


def test_operators_see_windows():
    """By tokens, adjacent ones together; the blocks shown are those of tokens."""
    world = window_world()
    store_with(world, A, TOKENS, [8, 22])
    store_with(world, B, TOKENS[:8], [])
    found = world.engine.inspection.describe(A)
    assert [block.num_tokens for block in found.blocks] == [4, 4, 4, 4, 4, 2]
    assert [(w.token_offset, w.num_tokens, w.num_sessions) for w in found.windows] == [
        *((0, 8, 2), (12, 10, 1)),
    ]
    first = found.windows[0]
    assert first.num_bytes == 2 * NUM_PARTS * WINDOW_LAYOUT.block_bytes
    assert (first.tiers, first.dirty, first.is_hashed) == ((Tier.DRAM, Tier.SSD), False, True)
    assert found.info.num_blocks == 6 + 5 * NUM_PARTS
    assert found.info.waste_bytes == WINDOW_LAYOUT.block_bytes // 2, "of the last block"
    assert not found.states
    world.engine.release_dram()
    world.pump()
    world.quiesce()
    packed = world.engine.inspection.describe(A)
    assert [w.tiers for w in packed.windows] == [(Tier.SSD,), (Tier.SSD,)]
    assert packed.info.waste_bytes == found.info.waste_bytes


def test_an_evicted_window_leaves_the_tokens():
    """If there is not room for all: the last parts go first, and loads end earlier."""
    world = window_world(num_slots=13, num_extents=0)
    store_with(world, A, TOKENS[:12], [8, 12])
    assert load_with(world, A, TOKENS).end == 12
    store_with(world, B, [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66], [])
    assert world.engine.inspection.info(A).num_tokens == 12
    assert load_with(world, A, TOKENS).end == 8


# -------------------------------------------------------------------------------------- compaction


def test_blocks_with_windows_are_not_compacted():
    """Others are: their tokens are put together, and windows are found as before."""
    world = window_world(num_slots=64, max_waste=0.2, compact_rest_ns=20)
    tokens = list(range(1, 49))
    store_with(world, A, tokens, [48])
    ranges = [(at, at + 2) for at in range(4, 44, 4)]
    dropped = {at for start, end in ranges for at in range(start, end)}
    kept = [token for at, token in enumerate(tokens) if at not in dropped]
    lineage = WHOLE.after(to_bytes(tokens), ranges)
    world.engine.sessions.discard(A, to_bytes(tokens), ranges, lineage=WHOLE)
    world.pump()
    before = window_ranges(world, A)
    world.now_ns += 10_000_000_000
    world.engine.expire()
    world.pump()
    world.finish_all(CompactTokens)
    world.quiesce()
    assert counter(world, "compactions") == 1
    assert counter(world, "compacted_tokens") == 2 * 8, "of nine blocks from 4 to 40, two by two"
    assert window_ranges(world, A) == before == [(22, 28)]
    answer = world.engine.loads.prepare(A, to_bytes(kept), 0, ENGINE_ID, lineage=lineage)
    assert (answer.lookup, answer.end_token) == (Lookup.HIT, 28)


def test_windows_cannot_be_grafted_to_another_session():
    world = window_world()
    store_with(world, A, TOKENS, [22])
    store_with(world, B, [50, 51, 52, 53], [4])
    source = GraftSource(A, to_bytes(TOKENS), WHOLE, 8, 22)
    assert world.engine.sessions.graft(B, to_bytes([50, 51, 52, 53]), WHOLE, source) == 0


# ------------------------------------------------------------------------------------------- files


def _settle(world, answer):
    world.pump()
    if answer.lookup is Lookup.PENDING:
        world.quiesce()
        answer = world.engine.loads.settle(answer.lease_id)
    return answer


def _export(world):
    """Export a session: all tokens, and the contents of the parts behind them."""
    files = world.engine.session_files
    export = files.begin_export(A)
    tokens, parts = [], []
    while not export.is_done:
        answer = _settle(world, files.prepare_export(export, 2, OPERATOR))
        for part in files.confirm_export(export, answer.lease_id):
            tokens += struct.unpack(f"<{part.num_tokens}I", part.token_ids)
        world.engine.loads.complete(answer.lease_id, OPERATOR)
        world.pump()
    while export.next_part < len(export.parts):
        answer = _settle(world, files.prepare_export_parts(export, 3, OPERATOR))
        slot_ids = files.confirm_export_parts(export, answer.lease_id)
        parts += [world.slots[slot_id] for slot_id in slot_ids]
        world.engine.loads.complete(answer.lease_id, OPERATOR)
        world.pump()
    return export, tokens, parts


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_export_has_the_windows_for_its_last_end(is_packed):
    """Behind the tokens, part by part, and those of a block before; the session does not change."""
    world = window_world()
    store_with(world, A, TOKENS, [8, 20, 22])
    if is_packed:
        world.engine.release_dram()
        world.pump()
        world.quiesce()
    export, tokens, parts = _export(world)
    assert tokens == TOKENS
    assert export.position == 22
    assert export.windows == ((12, 4, 0), (16, 4, 0), (20, 2, 0))
    rows = compute([], TOKENS)
    expected = [rows[12:16], rows[16:20], rows[20:22]]
    assert parts == [[(part, *of)] for of in expected for part in range(NUM_PARTS)]
    assert window_ranges(world, A) == [(0, 8), (12, 22)]


def test_a_session_without_windows_is_exported_without_any():
    world = window_world()
    store_with(world, A, TOKENS, [])
    export, tokens, parts = _export(world)
    assert (tokens, parts, export.position) == (TOKENS, [], 0)


def test_windows_that_have_left_the_session_are_not_exported():
    world = window_world()
    store_with(world, A, TOKENS, [22])
    export = world.engine.session_files.begin_export(A)
    world.engine.sessions.discard(A, to_bytes(TOKENS), [(10, 22)])
    world.pump()
    with pytest.raises(SessionChangedError):
        world.engine.session_files.prepare_export_parts(export, 1, OPERATOR)


# ---------------------------------------------------------------------------------------- checking


def _without_a_part(state):
    session = state.sessions[A]
    del session.spans[-1]
    next(b for b in state.blocks if b.key not in session.block_keys()).users.clear()


def _in_front_of_its_block(state):
    spans = state.sessions[A].spans
    spans.insert(0, spans.pop())


def _not_found(state):
    stored = next(iter(state.stored_parts))
    stored.users[B] = None


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_without_a_part, "has parts without the others"),
        (_in_front_of_its_block, "a window behind its block"),
        (_not_found, "parts are found"),
    ],
)
def test_every_violated_invariant_is_detected(break_it, message):
    world = window_world()
    store_with(world, A, TOKENS[:8], [8])
    break_it(world.engine._state)
    with pytest.raises(AssertionError, match=message):
        check(world.engine._state)
