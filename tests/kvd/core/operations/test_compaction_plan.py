"""Which tokens are compacted: those that discards left, in the session's own blocks, at rest."""

from kvd.core.operations.compaction_plan import (
    is_pending,
    is_wasteful,
    may_be_copied,
    plan_compaction,
)
from kvd.core.records.entries import is_plain
from tests.kvd.core.operations.sparse_worlds import EVEN, TOKENS, discard, sparse_world
from tests.kvd.core.turns import A, B, new_world, store
from tests.property.cache_world import BLOCK_TOKENS, LAYOUT, to_bytes


def of(world, key=A):
    state = world.engine._state
    return state, state.sessions[key]


def test_half_empty_blocks_are_worth_it_and_full_ones_are_not():
    """The shares and bytes are those of `max_waste` and of the smallest run."""
    assert is_wasteful(*of(sparse_world()))
    assert not is_wasteful(*of(sparse_world(max_waste=0.6)))
    assert not is_wasteful(*of(sparse_world(compact_min_bytes=7 * LAYOUT.block_bytes)))
    world = new_world()
    store(world, A, TOKENS)
    assert not is_wasteful(*of(world))


def test_new_blocks_take_whole_spans_in_order():
    """As many as fit; each ends where a span ended, and has its chain."""
    state, session = of(sparse_world())
    plan = plan_compaction(state, session, 0, 0, 100)
    assert plan is not None
    assert (plan.first, plan.end_offset) == (0, len(TOKENS) // 2)
    assert plan.old == list(session.spans)
    assert [dense.span.num_tokens for dense in plan.dense] == [BLOCK_TOKENS] * 3
    assert b"".join(dense.token_ids for dense in plan.dense) == to_bytes(TOKENS[1::2])
    assert [dense.span.chain for dense in plan.dense] == [s.chain for s in session.spans[3::4]]
    assert plan.new == [dense.span for dense in plan.dense]


def test_a_plan_has_a_bounded_number_of_blocks():
    """The spans behind them are left for another run."""
    state, session = of(sparse_world())
    plan = plan_compaction(state, session, 0, 0, 1)
    assert plan is not None
    assert len(plan.dense) == 1
    rest = plan_compaction(state, session, len(plan.old), plan.end_offset, 100)
    assert rest is not None
    assert (rest.first, len(rest.dense)) == (len(plan.old), 2)


def test_uncut_blocks_are_not_moved():
    """A plain span in front is not part of the plan; a session of plain ones has none."""
    world = sparse_world()
    store(world, B, TOKENS)
    discard(world, B, TOKENS, [(start, end) for start, end in EVEN if start >= BLOCK_TOKENS])
    state, session = of(world, B)
    assert is_plain(session.spans[0])
    plan = plan_compaction(state, session, 0, 0, 100)
    assert plan is None or plan.first >= 1
    plain = new_world()
    store(plain, A, TOKENS)
    assert plan_compaction(*of(plain), 0, 0, 100) is None


def test_blocks_that_another_session_uses_stay():
    """Moving them saves nothing."""
    world = new_world(max_waste=0.5)
    store(world, A, TOKENS)
    store(world, B, TOKENS)
    discard(world, A, TOKENS, EVEN)
    state, session = of(world)
    assert not is_wasteful(state, session)
    assert plan_compaction(state, session, 0, 0, 100) is None
    assert not is_pending(state, session), "it is nothing that waiting changes"


def test_a_block_that_is_read_is_copied_later():
    """Its bytes must not move; the plan is pending until the reader has gone."""
    state, session = of(sparse_world())
    block = state.blocks[session.spans[0].block_key]
    assert may_be_copied(state, block)
    assert not is_pending(state, session)
    block.readers += 1
    assert not may_be_copied(state, block)
    assert is_pending(state, session)
