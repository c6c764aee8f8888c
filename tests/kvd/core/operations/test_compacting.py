"""Compaction: the rest of discards is put together, and nothing else changes."""

from kvd.core.operations import compacting
from kvd.core.records.actions import (
    SESSION_COMPACTED,
    CommitIndex,
    CompactTokens,
    Emit,
    PutBlock,
    PutSession,
    WriteBlock,
)
from kvd.core.records.entries import CommittedSlot, Pin
from kvd.core.records.tier import Admission
from kvd.core.state.limits import Limits
from shared.types.granted_slots import Lookup
from shared.types.kv_layout import KVLayout
from shared.types.lineage import WHOLE
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
from tests.kvd.core.turns import ENGINE_ID, A, B, counter, keys_of, load, new_world, store
from tests.property.cache_world import BLOCK_TOKENS, LAYOUT, MODEL, CacheWorld, compute, to_bytes


def test_sparse_blocks_become_dense_ones():
    """Half of the blocks, whole spans, the same rows; on SSD before the session names them."""
    world = sparse_world()
    rows = rows_of(world, load(world, A, KEPT))
    info = world.engine.inspection.info(A)
    assert (info.num_spans, info.waste_bytes) == (12, 3 * world.engine.layout.block_bytes)
    rest(world)
    world.finish_all(CompactTokens)
    assert num_blocks(world) == 6, "not before the new blocks are on SSD"
    world.quiesce()
    assert world.engine.next_deadline_ns() is None, "there is nothing to look at again"
    answer = load(world, A, KEPT)
    assert [(s.start, s.num_tokens) for s in answer.spans] == [(0, BLOCK_TOKENS)] * 3
    assert rows_of(world, answer) == rows == compute([], TOKENS)[1::2]
    info = world.engine.inspection.info(A)
    assert (info.num_blocks, info.num_spans, info.waste_bytes, info.dirty_bytes) == (3, 3, 0, 0)
    assert len(world.index.blocks) == 3, "the old ones are gone from SSD, too"
    assert counter(world, "compactions") == 1
    assert counter(world, "compacted_tokens") == len(KEPT)
    assert counter(world, "compacted_blocks") == 3
    told = next(e for e in world.events if isinstance(e, Emit) and e.name == SESSION_COMPACTED)
    assert told.fields == {
        "num_tokens": "12",
        "num_blocks": "3",
        "num_blocks_before": "6",
        "num_spans": "3",
    }


def test_the_chain_continues_after_a_compaction():
    """Blocks stored before and after the compaction have the same chain."""
    world = sparse_world()
    before = world.engine.inspection.describe(A).blocks[-1]
    rest(world)
    world.quiesce()
    store(world, A, [*KEPT, 1, 2, 3, 4])
    other = sparse_world(max_waste=1.0)
    store(other, A, [*KEPT, 1, 2, 3, 4])
    assert num_blocks(other) == 7, "this one is not compacted"
    assert before.key != world.engine.inspection.describe(A).blocks[2].key
    assert (
        world.engine.inspection.describe(A).blocks[-1].key
        == other.engine.inspection.describe(A).blocks[-1].key
    )


def test_a_compacted_session_is_found_by_its_lineage():
    """An engine that names the discards gets the dense blocks."""
    world = sparse_world()
    rest(world)
    world.quiesce()
    lineage = WHOLE.after(to_bytes(TOKENS), EVEN)
    for named, num_found in ((lineage, len(KEPT)), (lineage.after(to_bytes(KEPT), [(1, 2)]), 0)):
        answer = world.engine.loads.prepare(A, to_bytes(KEPT), 0, ENGINE_ID, lineage=named)
        assert answer.end_token == num_found
        if answer.lookup is Lookup.HIT:
            world.engine.loads.complete(answer.lease_id, ENGINE_ID)
        world.pump()


def test_shared_blocks_are_not_compacted():
    """Another session's blocks would not become smaller."""
    world = new_world(max_waste=0.5, compact_rest_ns=REST_NS)
    store(world, A, TOKENS)
    store(world, B, TOKENS)
    discard(world, A, TOKENS, EVEN)
    rest(world)
    assert not world.io
    world.engine.sessions.flush(B, dry_run=False)
    world.quiesce()
    load(world, A, KEPT)
    rest(world)
    world.quiesce()
    assert num_blocks(world) == 3, "now they are its own"


def test_a_session_in_use_does_not_delay_the_next():
    """Both were due, and the first one has a turn."""
    world = sparse_world()
    other = [number + 50 for number in TOKENS]
    store(world, B, other)
    discard(world, B, other, EVEN)
    world.now_ns += REST_NS
    world.engine.expire()
    assert world.engine.loads.prepare(A, to_bytes(KEPT), 0, ENGINE_ID).lookup is Lookup.HIT
    world.pump()
    assert len(world.io_of(CompactTokens)) == 1, "of the other"


def test_the_index_gets_new_blocks_before_their_session():
    """Even if that session's row already waits for another reason."""
    world = sparse_world()
    rest(world)
    world.finish_all(CompactTokens)
    *others, last = world.io_of(WriteBlock)
    for op_id in others:
        world.finish_io(op_id)
    world.commit(len(world.index.uncommitted))
    world.engine.sessions.pin(A, Pin.SOFT)
    world.finish_io(last)
    kinds = [type(action) for action in world.index.uncommitted]
    assert kinds == [PutBlock, PutSession, CommitIndex]


def test_little_waste_is_not_compacted():
    """Neither little by share, nor little by size."""
    for limits in ({"max_waste": 0.51}, {"compact_min_bytes": 1 << 30}):
        world = new_world(compact_rest_ns=REST_NS, **({"max_waste": 0.5} | limits))
        store(world, A, TOKENS)
        discard(world, A, TOKENS, [(1, 3), (5, 7), (9, 11)])
        rest(world)
        assert not world.io


def test_a_corrupt_source_is_detected():
    """Wrong bytes never get new checksums; the copy on SSD is used."""
    world = sparse_world()
    block = world.engine.inspection.describe(A).blocks[0]
    rest(world)
    world.damage_slot(block.slot_id)
    world.quiesce()
    assert (counter(world, "compactions"), counter(world, "blocks_corrupt_dram")) == (0, 1)
    assert rows_of(world, load(world, A, KEPT)) == compute([], TOKENS)[1::2]


def test_a_restarted_kvd_finds_the_old_spans_or_the_new_ones():
    """Whatever was committed when it was killed, with DRAM or without, all rows exist."""
    for keep_dram in (True, False):
        num_steps = 0
        while True:
            world = sparse_world()
            rest(world)
            if not _resume(world, num_steps):
                break
            world.start(keep_dram=keep_dram)
            answer = load(world, A, KEPT)
            assert rows_of(world, answer) == compute([], TOKENS)[1::2]
            world.quiesce()
            used = world.engine.inspection.info(A).num_blocks
            assert len(world.index.blocks) == used, "nothing else is left"
            num_steps += 1
        assert num_steps > 10, "each of them was tried"


def _resume(world, num_steps: int) -> bool:
    """Continue step by step: end an operation, or commit a row.

    Return False if there are no more.
    """
    for _ in range(num_steps):
        if world.io:
            world.finish_io(min(world.io))
        elif world.index.uncommitted:
            world.commit(1)
        else:
            return False
    return True


def test_without_ssd_dense_blocks_are_adopted():
    """The journal has them once they are hashed, and the old ones until the row is committed."""
    world = sparse_world(num_extents=0, admission=Admission.ON_EVICT)
    rest(world)
    world.finish_all(CompactTokens)
    held = sum(isinstance(record, CommittedSlot) for record in world.journal.values())
    assert (num_blocks(world), held) == (3, 9)
    assert any(isinstance(action, CommitIndex) for action in world.index.uncommitted)
    world.quiesce()
    assert len(world.journal) == 3
    world.start(keep_dram=True)
    assert load(world, A, KEPT).end_token == len(KEPT)


def test_a_session_larger_than_a_run_takes_several_runs():
    """Room in DRAM bounds a run; the next one continues behind it."""
    world = sparse_world(num_slots=8)
    rest(world)
    world.quiesce()
    assert (num_blocks(world), counter(world, "compactions")) == (3, 2)
    assert rows_of(world, load(world, A, KEPT)) == compute([], TOKENS)[1::2]


def test_dense_blocks_between_sparse_ones_stay():
    """They are neither copied nor lost."""
    evens = [(i, i + 1) for i in (0, 2, 4, 6, 12, 14, 16, 18)]
    kept = [token for i, token in enumerate(TOKENS) if (i, i + 1) not in evens]
    world = new_world(max_waste=0.3, compact_rest_ns=REST_NS)
    store(world, A, TOKENS)
    discard(world, A, TOKENS, evens)
    rows = rows_of(world, load(world, A, kept))
    rest(world)
    world.quiesce()
    assert (counter(world, "compactions"), num_blocks(world)) == (1, 4)
    assert rows_of(world, load(world, A, kept)) == rows
    assert world.engine.inspection.info(A).num_tokens == len(kept)


def test_colder_sessions_make_room_for_a_compaction():
    """A full arena is the usual case."""
    world = new_world(num_slots=8, max_waste=0.5, compact_rest_ns=REST_NS)
    store(world, B, [7] * 8)
    store(world, A, TOKENS)
    discard(world, A, TOKENS, EVEN)
    rest(world)
    world.quiesce()
    assert num_blocks(world) == 3
    assert load(world, B, [7] * 8).end_token == 8


def test_many_spans_are_compacted():
    """Even with little waste: every load names each of them."""
    wide = KVLayout(MODEL, LAYOUT.layers, 2 * BLOCK_TOKENS)
    for max_waste, num_compactions in ((0.6, 1), (0.5, 1), (1.0, 0)):
        limits = Limits(16, 0, max_waste=max_waste, compact_rest_ns=REST_NS)
        world = CacheWorld(limits, layout=wide)
        store(world, A, TOKENS)
        discard(world, A, TOKENS, EVEN)
        rest(world)
        world.quiesce()
        assert counter(world, "compactions") == num_compactions
    limits = Limits(16, 0, max_waste=0.6, compact_rest_ns=REST_NS)
    world = CacheWorld(limits, layout=wide)
    store(world, A, TOKENS)
    discard(world, A, TOKENS, [r for r in EVEN if r[0] % 8 in (2, 4)])
    rest(world)
    assert not world.io, "three spans a block are few"


def test_shared_blocks_stay_before_the_compacted_ones():
    """Only the session's own blocks become dense, behind those that others use, too."""
    world = new_world(max_waste=0.5, compact_rest_ns=REST_NS)
    store(world, A, TOKENS)
    store(world, B, TOKENS[:8])
    discard(world, A, TOKENS, EVEN)
    rows = rows_of(world, load(world, A, KEPT))
    shared = keys_of(world, A)[:4]
    rest(world)
    world.quiesce()
    assert (num_blocks(world), counter(world, "compacted_tokens")) == (4, 8)
    assert keys_of(world, A)[:4] == shared
    assert rows_of(world, load(world, A, KEPT)) == rows
    assert load(world, B, TOKENS[:8]).end_token == 8


def test_two_half_blocks_suffice():
    """Each span has half of a block."""
    world = new_world(max_waste=0.5, compact_rest_ns=REST_NS)
    store(world, A, TOKENS)
    discard(world, A, TOKENS, [(i + 2, i + 4) for i in range(0, len(TOKENS), 4)])
    assert world.engine.inspection.info(A).num_spans == 6
    rest(world)
    world.quiesce()
    assert (num_blocks(world), counter(world, "compacted_blocks")) == (3, 3)


def test_a_run_is_bounded(monkeypatch):
    """A session is compacted in several runs, so that one copy stays short."""
    monkeypatch.setattr(compacting, "MAX_RUN_BYTES", LAYOUT.block_bytes)
    world = sparse_world()
    rest(world)
    (op_id,) = world.io_of(CompactTokens)
    assert len(world.io[op_id].blocks) == 1
    world.quiesce()
    assert (num_blocks(world), counter(world, "compactions")) == (3, 3)
