"""What is written to the index, and in which order, while it takes little or nothing."""

from functools import partial

import pytest

from kvd.core.records.actions import (
    CommitIndex,
    DropBlock,
    DropSession,
    HashSlots,
    PutBlock,
    PutUse,
)
from kvd.core.records.entries import BlockRecord, Pin
from kvd.core.state import index_line
from kvd.core.state.index_line import ENTRY_BYTES, USE_WAIT_NS, IndexLine
from kvd.core.state.session import Session
from tests.kvd.core.turns import (
    ONES,
    THREES,
    TWOS,
    A,
    B,
    C,
    load,
    new_world,
    prepare_store,
    store,
    tiers_of,
)
from tests.property.cache_world import to_bytes

KEYS = (A, B, C)


def _block(number: int) -> PutBlock:
    return PutBlock(BlockRecord(bytes([number]) * 16, number, 4))


def _kinds(actions) -> list[str]:
    return [type(action).__name__ for action in actions]


# --------------------------------------------------------------------------------------- the line


def test_a_session_keeps_its_place_however_often_it_changes():
    """Its row is written once, with its present contents, at the place of its first change."""
    session = Session(A, 7)
    line = IndexLine({A: session})
    line.put_session(A)
    line.add(_block(1))
    session.pin = Pin.HARD
    line.put_session(A)
    taken = line.take()
    assert _kinds(taken) == ["PutSession", "PutBlock"]
    assert taken[0].session.pin is Pin.HARD
    assert line.take() == []


def test_a_session_may_ask_for_a_place_behind_blocks():
    """A row that replaces blocks by new ones comes after their rows, and before all others."""
    line = IndexLine({A: Session(A, 7)})
    line.put_session(A)
    line.add(_block(1))
    line.put_session(A, behind_blocks=True)
    line.add(CommitIndex(9))
    assert _kinds(line.take()) == ["PutBlock", "PutSession", "CommitIndex"]


def test_a_use_is_written_last_and_as_its_time_only():
    """Unless the session's row is written anyway, which has the time, too."""
    line = IndexLine({key: Session(key, 7) for key in KEYS})
    for key in (A, A, B):
        line.put_use(key, 0)
    line.put_session(B)
    line.add(DropBlock(1, b"k" * 16))
    assert (len(line), line.num_uses) == (2, 2)
    taken = line.take()
    assert _kinds(taken) == ["PutSession", "DropBlock", "PutUse"]
    assert taken[-1] == PutUse(A, 7)


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_dropped_session_is_removed_if_the_index_may_have_it(is_indexed):
    """One that came and went while the index took nothing leaves nothing behind."""
    line = IndexLine({})
    line.put_session(A)
    line.put_use(A, 0)
    line.drop_session(A, is_indexed=is_indexed)
    assert line.take() == ([DropSession(A)] if is_indexed else [])


def test_a_session_that_returns_is_still_removed_when_it_is_dropped():
    """The index has the row of the first one, whatever became of the second."""
    line = IndexLine({})
    line.drop_session(A, is_indexed=True)
    line.put_session(A)
    line.drop_session(A, is_indexed=False)
    assert line.take() == [DropSession(A)]
    line.put_session(A)
    line.drop_session(A, is_indexed=False)
    assert line.take() == []


def test_the_bytes_handed_out_at_a_time_are_bounded():
    """The last row may exceed the bound; the others wait for the next time, in order."""
    line = IndexLine({key: Session(key, 7) for key in KEYS})
    for number in range(5):
        line.add(_block(number))
    assert line.take(0) == []
    assert line.take(2 * ENTRY_BYTES) == [_block(0), _block(1)]
    assert line.num_blocks == 3
    assert line.take(2 * ENTRY_BYTES + 1) == [_block(2), _block(3), _block(4)]
    assert (len(line), line.num_blocks) == (0, 0)

    for key in KEYS:
        line.put_use(key, 0)
    assert line.take(2 * ENTRY_BYTES) == [PutUse(A, 7), PutUse(B, 7)]
    assert line.num_uses == 1


# -------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("use", [load, partial(store, settle=False)])
def test_a_load_writes_no_spans(use):
    """Only the time of the last use; so does a store that finds everything stored."""
    world = new_world()
    store(world, A, ONES + TWOS)
    world.now_ns += 5
    used_ns = world.now_ns
    use(world, A, ONES + TWOS)
    assert world.index.uncommitted == []
    assert world.engine.next_deadline_ns() == used_ns + USE_WAIT_NS
    world.now_ns = used_ns + USE_WAIT_NS
    world.engine.expire()
    world.pump()
    assert world.index.uncommitted == [PutUse(A, used_ns)]
    assert world.engine.index_line.next_deadline_ns(world.now_ns) is None
    world.quiesce()
    assert world.index.sessions[A].last_access_ns == used_ns


def test_uses_wait_for_each_other_and_for_no_other_entry():
    """They are due a while after the first one; what is written earlier takes them along."""
    line = IndexLine({key: Session(key, 7) for key in KEYS})
    line.put_use(A, 10)
    line.put_use(B, 10 + USE_WAIT_NS - 1)
    assert not line.are_uses_due(10 + USE_WAIT_NS - 1)
    assert line.take(now_ns=10 + USE_WAIT_NS - 1) == []
    assert line.next_deadline_ns(10) == 10 + USE_WAIT_NS
    assert line.take(now_ns=10 + USE_WAIT_NS) == [PutUse(A, 7), PutUse(B, 7)]
    assert line.next_deadline_ns(0) is None
    line.put_use(A, 0)
    line.add(_block(1))
    assert line.take(now_ns=1) == [_block(1), PutUse(A, 7)]
    assert not line.are_uses_due(2 * USE_WAIT_NS)


def test_uses_that_are_due_wait_for_room():
    """No other deadline follows: the index calls when it has room."""
    line = IndexLine({A: Session(A, 7)})
    line.put_use(A, 0)
    assert line.take(0, USE_WAIT_NS) == []
    assert line.are_uses_due(USE_WAIT_NS)
    assert line.next_deadline_ns(USE_WAIT_NS) is None


def test_the_last_use_survives_a_restart():
    """A session that was only loaded since is the warmer one after it."""
    world = new_world(num_slots=4, num_extents=4)
    for key, tokens in ((A, ONES), (B, TWOS)):
        world.now_ns += 5
        store(world, key, tokens)
    world.now_ns += 5
    load(world, A, ONES)
    world.quiesce()
    world.start()
    assert list(world.engine._state.policy.victims(None, world.now_ns)) == [B, A]


def _num_waiting(world):
    """Return how many rows and uses wait for the index."""
    index_line = world.engine.index_line
    return len(index_line), index_line.num_uses


def test_waiting_rows_do_not_grow_with_changes():
    """An index that took nothing gets each session once, with its contents at that time."""
    world = new_world(num_slots=64)
    store(world, A, ONES)
    world.row_bytes = 0
    waiting = set()
    for number in range(20):
        load(world, A, ONES)
        world.engine.sessions.set_ttl(A, 1 + number)
        world.pump()
        waiting.add(_num_waiting(world))
    assert waiting == {(1, 1)}
    world.quiesce()
    assert world.index.sessions[A].ttl_ns == 20


def test_sessions_that_come_and_go_while_the_index_is_behind_leave_nothing():
    """However many: only those that the index has are remembered."""
    world = new_world(num_extents=0)
    store(world, A, ONES)
    world.row_bytes = 0
    for number in range(20):
        store(world, B._replace(session_id=f"b{number}"), TWOS, settle=False)
        world.engine.sessions.flush(B._replace(session_id=f"b{number}"), dry_run=False)
        world.pump()
    assert _num_waiting(world) == (0, 0)
    world.engine.sessions.flush(A, dry_run=False)
    assert _num_waiting(world) == (1, 0)


def test_no_block_is_written_while_the_index_is_far_behind(monkeypatch):
    """Blocks stay in DRAM; once the index has taken its rows they are written automatically."""
    monkeypatch.setattr(index_line, "MOST_ENTRIES_WAITING", 2)
    world = new_world()
    world.row_bytes = 0
    store(world, A, ONES + TWOS + THREES, settle=False)
    for op_id in list(world.io):
        world.finish_io(op_id)
    assert tiers_of(world, A) == ["DS"] * 3
    store(world, B, [7] * 8, settle=False)
    world.finish_all(HashSlots)
    assert not world.io
    assert tiers_of(world, B) == ["D", "D"]
    world.quiesce()
    assert tiers_of(world, B) == ["DS", "DS"]


def test_no_unwritten_block_is_evicted_while_the_index_is_far_behind(monkeypatch):
    """A store waits for its slots: the dirty blocks are written once the index has caught up."""
    monkeypatch.setattr(index_line, "MOST_ENTRIES_WAITING", 0)
    world = new_world(num_slots=2)
    world.row_bytes = 0
    store(world, A, TWOS + THREES, settle=False)
    assert tiers_of(world, A) == ["D", "D"]
    assert not world.io
    assert prepare_store(world, B, [7] * 8).refused == "wait"
    assert tiers_of(world, A) == ["D", "D"]
    world.quiesce()
    assert tiers_of(world, A) == ["DS", "DS"]
    store(world, B, [7] * 8)
    assert load(world, A, TWOS + THREES).end_token == 8


def test_uncommitted_blocks_are_known():
    """A block whose row waits would not be found by the next kvd."""
    world = new_world()
    world.row_bytes = 0
    store(world, A, ONES + TWOS, settle=False)
    for op_id in list(world.io):
        world.finish_io(op_id)
    assert world.engine.index_line.num_blocks == 2
    world.quiesce()
    assert world.engine.index_line.num_blocks == 0


def test_a_truncated_session_survives_an_index_that_is_behind():
    """Its new row comes before the removal of dropped blocks, wherever kvd is killed in between."""
    for num_rows in range(8):
        world = new_world()
        store(world, A, ONES + TWOS + THREES)
        world.row_bytes = 0
        world.engine.sessions.discard(A, to_bytes(ONES + TWOS + THREES), [(0, 4)])
        for _ in range(num_rows):
            world.row_bytes = 1
            world.pump()
            world.commit(1)
        world.row_bytes = 0
        world.start()
        assert world.engine.inspection.info(A).num_tokens in (8, 12), num_rows
