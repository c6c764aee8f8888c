"""Recovery from the index, whatever its contents."""

import dataclasses
import gc
import tracemalloc
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from kvd.core.engine import CacheEngine
from kvd.core.records.actions import (
    RESTORED,
    DropBlock,
    DropSession,
    Emit,
    IoOutcome,
    PutSession,
    WriteJournal,
)
from kvd.core.records.entries import (
    PLAIN_SPAN_BYTES,
    AdoptedSlot,
    CommittedSlot,
    IndexEntries,
    Pin,
    SessionRecord,
    Span,
    columns_of,
    pack_full,
    pack_spans,
    plain_span,
    unpack_spans,
)
from kvd.core.records.extent_shape import ExtentShape
from kvd.core.recovery import entry_join, restoring
from kvd.core.state.limits import Limits
from shared.types.units import NS_PER_S
from tests.kvd.core.turns import (
    ONES,
    OTHER_TENANT,
    THREES,
    TWOS,
    A,
    B,
    C,
    infos,
    load,
    new_world,
    restart_committed,
    store,
    tiers_of,
)
from tests.property.cache_world import LAYOUT, salt_of, to_bytes


def test_every_stored_session_survives_a_restart():
    """Spans, TTL, pin, end and last access are restored; loads read from SSD."""
    world = new_world(default_ttl_ns=10**12)
    store(world, A, [*ONES, 2])
    store(world, B, TWOS)
    store(world, C, THREES)
    world.engine.sessions.pin(A, Pin.HARD)
    world.engine.sessions.set_ttl(A, 10**13)
    world.engine.sessions.end(B)
    world.pump()
    world.commit(len(world.index.uncommitted))
    before = [world.engine.inspection.info(key) for key in (A, B, C)]
    world.start()
    after = [world.engine.inspection.info(key) for key in (A, B, C)]
    assert after == [dataclasses.replace(info, dram_bytes=0) for info in before]
    assert load(world, A, [*ONES, 2, 9]).end_token == 5


def test_unwritten_blocks_cut_their_session():
    """A session is restored up to the first block that is not on SSD; the rest is dropped."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES, settle=False)
    first, second, third = sorted(world.io)
    world.finish_io(first, IoOutcome.OK)
    world.finish_io(third, IoOutcome.OK)
    world.commit(len(world.index.uncommitted))
    world.start()
    assert world.engine.inspection.info(A).num_tokens == 4
    assert len(world.engine.inspection.describe(A).blocks) == 1
    world.commit(len(world.index.uncommitted))
    assert len(world.index.blocks) == 1, "the orphan's row is removed"
    assert second


def test_a_session_without_any_block_is_removed():
    """Its row goes with the next commit."""
    world = new_world()
    store(world, A, ONES, settle=False)
    world.commit(len(world.index.uncommitted))
    assert A in world.index.sessions
    world.start()
    world.commit(len(world.index.uncommitted))
    assert A not in world.index.sessions


def test_impossible_rows_are_removed():
    """Extents outside the tier or named twice, blocks without a size, spans outside their block."""
    world = new_world()
    for key, tokens in ((A, ONES), (B, TWOS), (C, THREES)):
        store(world, key, tokens)
    first, second, third = world.index.blocks.values()
    record = world.index.sessions[A]
    longer = plain_span(first.key, 5)
    sessions = [
        record,
        dataclasses.replace(record, key=B, spans=pack_spans([longer])),
        dataclasses.replace(record, key=C, spans=pack_spans([plain_span(first.key, 4), longer])),
        dataclasses.replace(record, key=OTHER_TENANT, spans=pack_spans([plain_span(b"?" * 16, 0)])),
    ]
    rows = IndexEntries(
        [columns_of(sessions)],
        first.key + second.key + third.key + b"?" * 16,
        [first.extent, first.extent, 10**6, third.extent],
        [4, 4, 4, 0],
    )
    engine = CacheEngine(LAYOUT, Limits(4, 8), salt_of)
    engine.restore(rows, (), (), 1)
    engine.check()
    assert engine.inspection.info(B) is None
    assert engine.inspection.info(C).num_tokens == 4
    assert engine.inspection.stats().tiers[1].num_blocks == 1
    actions = engine.drain()
    dropped = {action.key for action in actions if isinstance(action, DropBlock)}
    assert dropped == {second.key, third.key, b"?" * 16}
    gone = {action.key for action in actions if isinstance(action, DropSession)}
    assert gone == {B, OTHER_TENANT}


@pytest.mark.parametrize("packs_sessions", [True, False])
def test_shared_blocks_are_in_memory_once(packs_sessions):
    """Private blocks are packed behind them; the session's description is the same either way."""
    world = new_world(packs_sessions=packs_sessions)
    store(world, A, ONES + TWOS + THREES)
    store(world, B, ONES + THREES)
    before = world.engine.inspection.describe(A)
    world.start()
    after = world.engine.inspection.describe(A)
    places = [(block.key, block.extent, block.num_sessions) for block in after.blocks]
    assert places == [(block.key, block.extent, block.num_sessions) for block in before.blocks]
    assert len(world.engine._state.blocks) == (1 if packs_sessions else 4)
    assert load(world, A, ONES + TWOS + THREES).end_token == 12
    assert load(world, B, ONES + THREES).end_token == 8


def test_a_session_with_a_discard_is_packed_too():
    """It is found by its own spans and, where its blocks are plain, along the chain."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES)
    tokens = ONES + TWOS[:2] + THREES
    assert world.engine.sessions.discard(A, to_bytes(ONES + TWOS + THREES), [(4, 6)]) == 10
    world.pump()
    world.commit(len(world.index.uncommitted))
    world.start()
    assert not len(world.engine._state.blocks)
    assert world.engine.inspection.info(A).num_tokens == 10
    assert load(world, B, ONES + TWOS + THREES).end_token == 12, "its blocks are what they were"
    assert load(world, A, tokens).end_token == 10


def test_rows_may_be_damaged_in_any_way():
    """Cut or changed bytes of a row cost spans, never the start; the rest is written again."""
    world = new_world()
    store(world, A, ONES + TWOS)
    record = world.index.sessions[A]
    for spans, num_tokens in [
        (b"", 0),
        (b"\x07" + record.spans[1:], 0),
        (record.spans[:-1], 4),
        (record.spans + b"\0", 8),
        (b"\0", 0),
        (record.spans[:21] + bytes(20), 4),
        (b"\x01" + pack_full([plain_span(record.spans[1:17], 4)]) + b"\x09", 4),
        (b"\x01" + pack_full([Span(record.spans[1:17], 1, 9, b"d" * 16, b"c" * 16)]), 0),
    ]:
        world.index.sessions[A] = dataclasses.replace(record, spans=spans)
        engine = CacheEngine(LAYOUT, world.limits, salt_of)
        engine.restore(world.index.rows(), (), (), 1)
        engine.check()
        info = engine.inspection.info(A)
        assert (info.num_tokens if info else 0) == num_tokens
        puts = [a for a in engine.drain() if isinstance(a, PutSession | DropSession)]
        assert len(puts) == 1, "the row is written anew"


def test_two_blocks_with_one_key_or_half_a_key():
    """A row that repeats another is ignored; of two keys with equal halves one is dropped."""
    keys = [b"a" * 16, b"a" * 16, b"a" * 8 + b"b" * 8]
    spans = pack_spans([plain_span(keys[0], 4), plain_span(keys[2], 4)])
    rows = IndexEntries(
        [columns_of([SessionRecord(A, spans, 1)])], b"".join(keys), [0, 5, 10], [4, 4, 4]
    )
    engine = CacheEngine(LAYOUT, Limits(4, 8), salt_of)
    engine.restore(rows, (), (), 1)
    engine.check()
    assert engine.inspection.info(A).num_tokens == 4
    dropped = [action.key for action in engine.drain() if isinstance(action, DropBlock)]
    assert dropped == [keys[2]]


def test_a_block_in_dram_is_adopted_only_if_its_row_agrees():
    """If they have different sizes the row counts, because its extent has its data."""
    world = new_world()
    store(world, A, ONES)
    (record,) = world.journal.values()
    shorter = record._replace(num_tokens=2, token_ids=record.token_ids[:8])
    engine = CacheEngine(LAYOUT, world.limits, salt_of)
    engine.restore(world.index.rows(), [AdoptedSlot(0, shorter)], (), 1)
    engine.check()
    assert engine.inspection.stats().tiers[0].num_blocks == 0
    assert engine.inspection.info(A).ssd_bytes == LAYOUT.block_bytes
    assert engine.drain()[0] == WriteJournal({0: None})


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_of_half_equal_keys_the_one_on_ssd_is_found(num_tokens):
    """The block in DRAM is dropped, whether its length is equal or not."""
    checksums = bytes(8 * len(LAYOUT.layers))
    block = CommittedSlot(1, b"a" * 8 + b"b" * 8, num_tokens, bytes(4 * num_tokens), checksums)
    adopted = AdoptedSlot(1, block)
    spans = pack_spans([plain_span(b"a" * 16, 4)])
    rows = IndexEntries([columns_of([SessionRecord(A, spans, 1)])], b"a" * 16, [0], [4])
    engine = CacheEngine(LAYOUT, Limits(4, 8), salt_of)
    engine.restore(rows, [adopted], (), 1)
    engine.check()
    assert engine.inspection.stats().tiers[0].num_blocks == 0
    assert engine.inspection.info(A).num_tokens == 4


def test_thousands_of_sessions_are_restored():
    """Private, shared, cut and discarded ones: each equals its restoration without packing."""
    random = Random(7)  # noqa: S311
    keys: list[bytes] = []
    sessions = []
    for number in range(2_000):
        own = [random.randbytes(16) for _ in range(random.randrange(9))]
        shared = keys[: random.randrange(4)] if random.random() < 0.2 else []
        spans = [plain_span(key, 4) for key in (*shared, *own)]
        if spans and random.random() < 0.1:
            spans[-1] = Span(spans[-1].block_key, 1, 2, b"d" * 16, b"c" * 16)
        pin = random.choice([Pin.NONE] * 8 + [Pin.SOFT, Pin.HARD])
        key = A._replace(session_id=str(number))
        sessions.append(SessionRecord(key, pack_spans(spans), random.randrange(50), pin=pin))
        keys += own
    kept = [key for key in keys if random.random() < 0.99]
    random.shuffle(kept)
    rows = IndexEntries(
        [columns_of(sessions)], b"".join(kept), [5 * i for i in range(len(kept))], [4] * len(kept)
    )
    engines = []
    for packs_sessions in (True, False):
        limits = Limits(4, len(kept), max_sessions=1_900, packs_sessions=packs_sessions)
        engine = CacheEngine(LAYOUT, limits, salt_of)
        engine.advance(100)
        engine.restore(replace(rows), (), (), 1)
        engine.check()
        engines.append(engine)
    packed, plain = engines
    listed = [infos(engine) for engine in engines]
    assert listed[0] == listed[1]
    for info in listed[0]:
        assert packed.inspection.describe(info.key) == plain.inspection.describe(info.key)
    assert packed.drain() == plain.drain()
    assert len(packed._state.blocks) < len(plain._state.blocks) / 20


def test_a_start_frees_the_columns_and_joins_spans_in_steps(monkeypatch):
    """With any steps: sessions are the same, coldest first, and none is ranked individually."""
    monkeypatch.setattr(restoring, "MADE_AT_ONCE", 3)
    monkeypatch.setattr(entry_join, "JOINED_BYTES", 5 * PLAIN_SPAN_BYTES)
    keys = [bytes([number]) * 16 for number in range(1, 31)]
    sessions = []
    for number in range(10):
        spans = pack_spans([plain_span(key, 4) for key in keys[3 * number : 3 * number + 3]])
        key = A._replace(session_id=str(number))
        sessions.append(SessionRecord(key, spans, last_access_ns=50 - number))
    missing = 3 * 4 + 1  # a block in the middle of session 4
    kept = [key for index, key in enumerate(keys) if index != missing]
    rows = IndexEntries(
        [columns_of(sessions)], b"".join(kept), [5 * i for i in range(29)], [4] * 29
    )
    engine = CacheEngine(LAYOUT, Limits(4, 40), salt_of)
    engine.advance(100)
    engine.restore(rows, (), (), 1)
    assert (rows.block_keys, rows.extents, rows.block_tokens) == (b"", (), ())
    assert not engine._state.policy._facts
    victims = engine._state.placement.policy.victims(None, 100)
    assert [key.session_id for key in victims] == list("9876543210")
    num_blocks = {info.key.session_id: info.num_blocks for info in infos(engine)}
    assert num_blocks == {str(number): 1 if number == 4 else 3 for number in range(10)}
    places = [
        block.extent
        for key in "03"
        for block in engine._state.sessions[A._replace(session_id=key)].tail_blocks()
    ]
    assert places == [0, 5, 10, 45, 50, 55]
    engine.check()


def test_a_start_needs_little_more_memory_than_it_keeps(monkeypatch):
    """The columns, which are as large, are freed before sessions are made."""
    num_sessions, blocks_each = 4_000, 8
    monkeypatch.setattr(restoring, "MADE_AT_ONCE", num_sessions // 50)
    monkeypatch.setattr(entry_join, "JOINED_BYTES", num_sessions * PLAIN_SPAN_BYTES // 50)
    gc.freeze()  # no garbage collection frees what was allocated before
    tracemalloc.start()
    try:
        engine = CacheEngine(LAYOUT, Limits(0, num_sessions * blocks_each), salt_of)
        engine.advance(100)
        engine.restore(large_index(num_sessions, blocks_each), (), (), 1)
        kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(engine._state.sessions) == num_sessions
    assert peak_bytes < 1.25 * kept_bytes


def large_index(num_sessions, blocks_each):
    """Make entries of equal sessions; those of sessions are made as they are read."""
    num_blocks = num_sessions * blocks_each
    keys = Random(7).randbytes(16 * num_blocks)  # noqa: S311

    def sessions():
        for number in range(num_sessions):
            first = blocks_each * number
            own = [keys[16 * i : 16 * i + 16] for i in range(first, first + blocks_each)]
            spans = pack_spans([plain_span(key, 4) for key in own])
            yield columns_of([SessionRecord(A._replace(session_id=str(number)), spans, number)])

    extents = np.arange(num_blocks) * ExtentShape(LAYOUT).sectors_per_extent
    return IndexEntries(sessions(), keys, extents, np.full(num_blocks, 4, dtype=np.int32))


def test_the_oldest_sessions_beyond_the_bound_are_not_restored():
    """max_sessions applies after a restart with a smaller bound, too."""
    world = new_world()
    for key, tokens in ((A, ONES), (B, TWOS)):
        world.now_ns += 1
        store(world, key, tokens)
    world.limits = Limits(4, 64, max_sessions=1)
    world.start()
    assert world.engine.inspection.info(A) is None
    assert tiers_of(world, B) == ["S"]


def test_of_sessions_beyond_the_bound_those_go_that_eviction_would_take():
    """Ended ones first, retained and soft-pinned ones last; hard-pinned ones stay in any case."""
    keys = [A._replace(session_id=name) for name in ("hard", "soft", "kept", "late", "cold", "end")]
    for most in range(len(keys) + 1):
        world = new_world(num_slots=8)
        for number, key in enumerate(keys):
            world.now_ns += 1
            store(world, key, [number] * 4)
        world.engine.sessions.pin(keys[0], Pin.HARD)
        world.engine.sessions.pin(keys[1], Pin.SOFT)
        world.engine.retention.retain(keys[2], NS_PER_S)
        world.engine.sessions.end(keys[5])
        load(world, keys[3], [3] * 4)
        world.quiesce()
        world.limits = replace(world.limits, max_sessions=most)
        world.start()
        left = [key for key in keys if world.engine.inspection.info(key) is not None]
        assert left == keys[: max(1, most)]


def test_sessions_of_which_nothing_is_left_do_not_count_for_the_bound():
    """The oldest one stays where there is room for it."""
    world = new_world()
    for key, tokens in ((A, ONES), (B, TWOS), (C, THREES)):
        world.now_ns += 1
        store(world, key, tokens)
    lost = next(row for row in world.index.sessions.values() if row.key == B)
    (span,) = unpack_spans(lost.spans)
    del world.index.blocks[span.block_key]
    world.limits = replace(world.limits, max_sessions=2)
    world.start()
    assert [world.engine.inspection.info(key) is not None for key in (A, B, C)] == [
        True,
        False,
        True,
    ]


def test_a_start_says_what_it_found():
    """Sessions, their blocks, and rows that nothing needs."""
    world = new_world()
    store(world, A, ONES + TWOS)
    store(world, B, [*ONES, 3])
    row = replace(next(iter(world.index.blocks.values())), key=b"x" * 16, extent=50)
    world.index.blocks[row.key] = row
    world.start()
    (restored,) = [event for event in world.events if isinstance(event, Emit)]
    fields = {"num_sessions": "2", "num_blocks": "3", "num_dropped_blocks": "1"}
    assert restored == Emit(RESTORED, None, fields)


def test_an_unchanged_row_is_not_written_again():
    """The row of a complete session stays as it is."""
    world = new_world()
    store(world, A, ONES + TWOS)
    restart_committed(world)
    assert not world.index.uncommitted
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    assert [type(action) for action in world.index.uncommitted] == [
        DropBlock,
        DropBlock,
        DropSession,
    ]


def test_an_impossible_row_does_not_affect_a_block_in_dram():
    """The block is used from there, and gets another place on SSD."""
    world = new_world()
    store(world, A, ONES)
    (row,) = world.index.blocks.values()
    world.index.blocks[row.key] = replace(row, extent=10**6)
    world.start(keep_dram=True)
    assert load(world, A, ONES).end_token == 4
    world.quiesce()
    assert tiers_of(world, A) == ["DS"]
