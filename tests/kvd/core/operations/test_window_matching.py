"""Windows: stored where loads may end, found with their blocks, superseded, lost separately."""

from dataclasses import replace

import pytest

from kvd.core.engine import CacheEngine
from kvd.core.operations.window_matching import MOST_PENDING
from kvd.core.records.actions import IoOutcome, ReadBlock
from kvd.core.records.entries import pack_spans, unpack_spans
from kvd.core.records.errors import InvalidRequestError
from shared.types.granted_slots import Lookup
from shared.types.kv_layout import Component, KVLayout, Layer
from tests.kvd.core.turns import ENGINE_ID, A, B, C, counter, new_world
from tests.kvd.core.turns_with_parts import (
    load_with,
    prepare_with,
    store_with,
    window_ranges,
    window_world,
)
from tests.property.cache_world import MODEL, compute, to_bytes
from tests.property.test_window_engine import NUM_PARTS, WINDOW

TOKENS = list(range(1, 23))  # five blocks of 4, and half of one
assert (WINDOW, NUM_PARTS) == (6, 2)


def test_a_load_ends_where_all_windows_are_stored():
    world = window_world()
    store_with(world, A, TOKENS, [12, 20])
    assert window_ranges(world, A) == [(4, 20)]
    assert load_with(world, A, TOKENS).end == 20
    assert load_with(world, A, TOKENS[:19]).end == 16, "12..16 are there for 20"
    assert load_with(world, A, TOKENS[:15]).end == 12
    assert load_with(world, A, TOKENS, 16).end == 20


def test_windows_before_from_token_are_granted_too():
    """The engine has the tokens before it; it may lack part of their window."""
    world = window_world()
    store_with(world, A, TOKENS, [20])
    answer = load_with(world, A, TOKENS, 17).answer
    assert [span.token_offset for span in answer.spans] == [17]
    assert [(w.token_offset, w.num_tokens, w.start) for w in answer.windows] == [
        *((12, 4, 0), (16, 4, 0)),
    ]


def test_tokens_without_windows_are_a_miss():
    world = window_world()
    store_with(world, A, TOKENS, [20])
    for tokens, from_token in ((TOKENS, 20), (TOKENS[:15], 0)):
        answer = load_with(world, A, tokens, from_token).answer
        assert (answer.lookup, answer.miss_reason) == (Lookup.MISS, "no_window")
    assert load_with(world, B, [9] * 8).answer.miss_reason == "unknown_session"
    assert load_with(world, A, TOKENS, 22).answer.lookup is Lookup.MISS


def test_from_the_first_token_on_less_than_a_window_is_enough():
    world = window_world()
    store_with(world, A, TOKENS, [4])
    assert load_with(world, A, TOKENS).end == 4


def test_a_position_within_a_block_is_for_turns_that_diverge_there():
    """For example when reasoning is dropped: a load ends where the changed block begins."""
    world = window_world()
    answer = store_with(world, A, TOKENS, [14])
    assert [w.token_offset for w in answer.windows] == [4, 8, 12]
    assert load_with(world, A, [*TOKENS[:14], 90, 91, 92]).end == 12


def test_a_position_may_lie_beyond_the_tokens():
    """A prompt is stored in several stores; its windows exist once its end is stored."""
    world = window_world()
    assert store_with(world, A, TOKENS[:8], [18]).windows == ()
    answer = store_with(world, A, TOKENS[:16], [18], 8)
    assert [w.token_offset for w in answer.windows] == [8, 12]
    assert window_ranges(world, A) == [(8, 16)], "they wait for what follows"
    store_with(world, A, TOKENS, [18], 16)
    assert load_with(world, A, [*TOKENS[:18], 90, 91]).end == 16


def test_the_engine_stores_windows_of_existing_blocks():
    """It holds their tokens, and only their windows are missing."""
    world = window_world()
    store_with(world, A, TOKENS[:20])
    answer = store_with(world, A, TOKENS[:20], [20], 13)
    assert [w.token_offset for w in answer.windows] == [16]
    assert not answer.blocks
    assert load_with(world, A, TOKENS).answer.miss_reason == "no_window"
    assert [w.token_offset for w in store_with(world, A, TOKENS[:20], [20], 12).windows] == [12]
    assert load_with(world, A, TOKENS).end == 20
    assert not store_with(world, A, TOKENS[:20], [20], 12).lease_id


def test_a_growing_answer_keeps_positions_where_the_next_turn_may_diverge():
    """The end of each piece may be a load's, while it is the end; named positions stay."""
    world = window_world(num_slots=80)
    tokens = [*TOKENS, *range(50, 80)]
    store_with(world, A, tokens[:16], [16, 8])
    for end in range(20, 53, 7):
        start = (end - 7) // 4 * 4
        store_with(world, A, tokens[:end], [8, 16, end], max(16, start))
        assert load_with(world, A, [*tokens[:16], 99]).end == 16
        assert load_with(world, A, tokens[:end]).end == end
    assert [ranges[0] for ranges in window_ranges(world, A)] == [0, 40]


def test_the_first_the_newest_two_and_shared_ones_stay():
    world = window_world(num_slots=96)
    tokens = list(range(1, 61))
    store_with(world, A, tokens[:24], [8, 16, 20])
    assert window_ranges(world, A) == [(0, 20)]
    store_with(world, A, tokens[:40], [32, 36], 24)
    assert window_ranges(world, A) == [(0, 8), (24, 36)], "16 is superseded, and 20"
    store_with(world, B, [*tokens[:36], 99], [37], 36)
    assert window_ranges(world, B) == [(0, 8), (28, 37)], "they are A's, too"
    store_with(world, A, tokens[:60], [52, 60], 40)
    assert window_ranges(world, A) == [(0, 8), (28, 36), (44, 60)]
    world.engine.sessions.flush(B, dry_run=False)
    store_with(world, A, tokens[:60], [], 60)
    assert window_ranges(world, A) == [(0, 8), (44, 60)]


def test_windows_of_unreached_ends_are_forgotten():
    """Positions beyond the tokens are remembered, up to a bound."""
    world = window_world()
    store_with(world, A, TOKENS, range(30, 60))
    session = world.engine._state.sessions[A]
    assert session.load_ends == tuple(range(30, 30 + MOST_PENDING))


def test_other_sessions_find_windows_along_their_tokens():
    world = window_world()
    store_with(world, A, TOKENS, [8, 16])
    assert load_with(world, B, [*TOKENS[:9], 70, 71]).end == 8
    answer = store_with(world, B, [*TOKENS[:16], 70, 71], [16, 18], 16)
    assert [w.token_offset for w in answer.windows] == [16], "those before are stored"
    assert load_with(world, B, [*TOKENS[:16], 70, 71]).end == 18
    assert window_ranges(world, B) == [(0, 18)]
    stranger = A._replace(tenant="other")
    assert load_with(world, stranger, TOKENS).answer.lookup is Lookup.MISS


def test_tokens_are_stored_though_there_is_no_room_for_windows():
    world = window_world(num_slots=7, num_extents=0)
    answer = store_with(world, A, TOKENS, [20])
    assert (len(answer.blocks), answer.windows) == (6, ())
    world = window_world(num_slots=6)
    assert store_with(world, A, TOKENS[:4], [4]).windows == (), "no load could ever have them"


def test_a_failed_store_leaves_no_windows():
    world = window_world()
    answer = prepare_with(world, A, TOKENS, [20])
    world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=False)
    world.pump()
    assert world.engine.inspection.stats().tiers[0].used_bytes == 0


def test_two_stores_of_the_same_windows_leave_one():
    world = window_world()
    first = prepare_with(world, A, TOKENS[:8], [8])
    second = prepare_with(world, B, TOKENS[:8], [8])
    for answer in (first, second):
        world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=True)
        world.pump()
    world.quiesce()
    assert len(world.engine._state.blocks) == 2 + 2 * NUM_PARTS
    assert window_ranges(world, A) == window_ranges(world, B) == [(0, 8)]


def test_a_load_that_does_not_fit_is_answered_in_parts_and_ends_with_its_windows():
    world = window_world(num_slots=9, num_extents=96)
    tokens = list(range(1, 33))
    for end in range(4, 33, 4):
        store_with(world, A, tokens[:end], [end], end - 4)
    world.engine.release_dram()
    world.pump()
    world.quiesce()
    end, answers = 0, []
    while end < 32:
        answer = load_with(world, A, tokens, end).answer
        answers.append(answer)
        assert answer.end_token > end
        end = answer.end_token
    assert [bool(answer.windows) for answer in answers] == [
        *(False for _ in answers[:-1]),
        True,
    ]
    assert len(answers) > 1


def test_dram_only_ends_where_tokens_and_windows_are_in_dram():
    world = window_world()
    store_with(world, A, TOKENS, [8, 20])
    state = world.engine._state
    assert load_with(world, A, TOKENS, dram_only=True).end == 20
    stored = state.stored_parts.window_of(state.sessions[A].spans[-2].chain)
    block = state.blocks[stored.spans[1].block_key]
    state.leave_dram(block)
    world.pump()
    assert load_with(world, A, TOKENS, dram_only=True).end == 8
    world.engine.release_dram()
    world.pump()
    answer = load_with(world, A, TOKENS, dram_only=True).answer
    assert (answer.lookup, answer.miss_reason) == (Lookup.MISS, "on_ssd")


@pytest.mark.parametrize("outcome", [IoOutcome.TRANSIENT, IoOutcome.CORRUPT])
def test_an_unreadable_window_is_a_miss_and_the_tokens_stay(outcome):
    world = window_world()
    store_with(world, A, TOKENS[:20], [8, 20])
    world.engine.release_dram()
    world.pump()
    world.quiesce()
    answer = world.engine.loads.prepare(A, to_bytes(TOKENS), 0, ENGINE_ID)
    world.pump()
    assert answer.lookup is Lookup.PENDING
    assert len(answer.windows) == 2
    state = world.engine._state
    part = state.stored_parts.window_of(state.sessions[A].spans[-1].chain).spans[0].block_key
    read = next(op for op in world.io_of(ReadBlock) if world.io[op].key == part)
    world.finish_io(read, outcome)
    world.quiesce()
    settled = world.engine.loads.settle(answer.lease_id)
    assert settled.lookup is Lookup.MISS
    world.pump()
    assert world.engine.inspection.info(A).num_tokens == 20
    if outcome is IoOutcome.CORRUPT:
        assert window_ranges(world, A) == [(0, 8), (12, 16)]
        assert load_with(world, A, TOKENS).end == 8
        moves = [move.kind.value for move in world.engine.inspection.history.of(A)]
        assert "parts_dropped" in moves


def test_a_discard_keeps_the_windows_of_the_kept_tokens():
    """A load ends where all tokens that layers attend to are kept; spans of one block share it."""
    world = window_world()
    tokens = list(range(1, 33))
    store_with(world, A, tokens, [8, 32])
    world.engine.sessions.discard(A, to_bytes(tokens), [(10, 26), (27, 28)])
    world.pump()
    kept = [*tokens[:10], tokens[26], *tokens[28:]]
    assert window_ranges(world, A) == [(0, 8), (10, 15)]
    rows = [*compute([], tokens)[:10], compute([], tokens)[26], *compute([], tokens)[28:]]
    answer = world.engine.loads.prepare(A, to_bytes(kept), 0, ENGINE_ID)
    assert answer.end_token == 8, "of 8 and 9 there is no window"
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.engine.sessions.discard(A, to_bytes(kept), [(2, 10)])
    world.pump()
    answer = world.engine.loads.prepare(A, to_bytes([*kept[:2], *kept[10:]]), 0, ENGINE_ID)
    assert answer.end_token == 7
    windows = [(w.token_offset, w.num_tokens, w.start) for w in answer.windows]
    assert windows == [(0, 2, 0), (2, 1, 2), (3, 4, 0)]
    there = [*rows[:2], *rows[10:]]
    for window in answer.windows:
        for part, slot_id in enumerate(window.slot_ids):
            ((number, *block_rows),) = world.slots[slot_id]
            found = block_rows[window.start : window.start + window.num_tokens]
            assert number == part
            assert found == there[window.token_offset : window.token_offset + window.num_tokens]
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)


def test_windows_behind_a_discard_are_not_stored():
    """Their rows may have been computed before the discard or after it.

    A window must not mix both.
    """
    world = window_world()
    store_with(world, A, TOKENS)
    world.engine.sessions.discard(A, to_bytes(TOKENS), [(6, 9)])
    kept = [*TOKENS[:6], *TOKENS[9:]]
    answer = world.engine.stores.prepare(A, to_bytes([*kept, 50, 51]), 0, ENGINE_ID, load_ends=[21])
    assert [w.token_offset for w in answer.windows] == [19]


def test_a_session_packed_and_restored_has_its_windows():
    world = window_world(packs_sessions=True)
    store_with(world, A, TOKENS, [8, 22])
    world.engine.release_dram()
    world.pump()
    world.quiesce()
    world.engine.expire()
    world.pump()
    assert world.engine._state.sessions[A].packed
    assert load_with(world, B, TOKENS[:9]).end == 8
    world.start()
    assert window_ranges(world, A) == [(0, 8), (12, 22)]
    assert load_with(world, A, TOKENS).end == 22


def test_a_restart_that_finds_a_part_missing_keeps_the_tokens():
    world = window_world()
    store_with(world, A, TOKENS, [8, 22])
    spans = unpack_spans(world.index.sessions[A].spans)
    parts = [span for span in spans if not span.num_tokens]
    for damaged in (
        [span for span in spans if span != parts[0]],
        [*(span for span in spans if span not in parts[:2]), *parts[:2]],
        [parts[0], *spans],
        [*spans, *parts[:2]],
    ):
        record = replace(world.index.sessions[A], spans=pack_spans(damaged))
        world.index.sessions[A] = record
        world.start()
        assert world.engine.inspection.info(A).num_tokens == 22
        assert load_with(world, A, TOKENS).end == 22
        world.quiesce()


def test_an_arena_that_survives_kvd_has_its_windows():
    world = window_world()
    store_with(world, A, TOKENS, [22])
    world.start(keep_dram=True)
    assert load_with(world, A, TOKENS, dram_only=True).end == 22


def test_requests_that_cannot_be():
    with pytest.raises(InvalidRequestError, match="load_ends contains 0, but 22"):
        prepare_with(window_world(), A, TOKENS, [0])
    with pytest.raises(InvalidRequestError, match="neither states nor windows"):
        new_world().engine.stores.prepare(C, to_bytes(TOKENS), 0, ENGINE_ID, load_ends=[8])


def test_stored_and_loaded_windows_are_counted():
    world = window_world()
    store_with(world, A, TOKENS, [8, 20])
    assert counter(world, "store_windows") == 4
    load_with(world, A, TOKENS)
    assert counter(world, "load_windows") == 2
    assert counter(world, "load_states") == 0


# --------------------------------------------------------------------------------------- the figure

_COMPONENTS = (Component("k", (2, 64), "float32", "r"), Component("v", (2, 64), "float32"))
_WHOLE = Layer(_COMPONENTS)
NUM_TOKENS = 16 * 1024
TURN = 1024  # tokens of a turn, of which an answer has a quarter
GEMMA = KVLayout(MODEL, (Layer(_COMPONENTS, 1024),) * 5 + (_WHOLE,), 128)
PLAIN = replace(GEMMA, layers=(_WHOLE,) * 6)


def _stored_bytes(layout: KVLayout) -> int:
    """Return the stored bytes of a session that has grown turn by turn, in its last tier."""
    world = window_world(300 * (1 + layout.window_slots), 0, layout=layout)
    tokens = [n % 1000 for n in range(NUM_TOKENS)]
    for start in range(0, NUM_TOKENS, TURN):
        asked = start + TURN * 3 // 4
        for end in range(asked, start + TURN + 1, TURN // 8):
            positions = [1024, asked, end] if layout.window else []
            from_token = max(start, end - TURN // 8 if end > asked else 0)
            store_with(world, A, tokens[:end], positions, from_token)
    loaded = load_with(world, A, tokens) if layout.window else None
    assert loaded is None or loaded.end == NUM_TOKENS
    info = world.engine.inspection.info(A)
    assert info.num_tokens == NUM_TOKENS
    return info.total_bytes


def test_a_session_of_16k_tokens_takes_less_than_a_third(monkeypatch):
    """Five of six layers attend to a sixteenth of it; both layouts store as engines do."""
    monkeypatch.setattr(CacheEngine, "check", lambda _: None)  # it takes longer than all the others
    assert PLAIN.window == 0
    share = _stored_bytes(GEMMA) / _stored_bytes(PLAIN)
    assert share <= 0.30
