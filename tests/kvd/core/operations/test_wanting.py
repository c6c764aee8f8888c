"""Who waits for a session that is not stored has it asked for, now and then, and not too often."""

import pytest

from kvd.core.operations.wanting import ASK_AGAIN_NS, MOST_PER_S
from kvd.core.records.actions import SESSION_WANTED, Emit
from shared.types.queue_delta import QueueChange, QueuedRequest
from shared.types.units import NS_PER_S
from tests.kvd.core.turns import ENGINE_ID, ONES, A, B, counter, new_world, store


def wanted(world, *requests, replaces=False):
    """Report requests that wait, as (key, history); returns the sessions asked for and lengths."""
    waiting = [QueuedRequest((0, 0.0, number), key, tokens) for number, (key, tokens) in requests]
    world.pump()
    world.events.clear()
    engines = world.engine.engines
    take = engines.replace_queue if replaces else engines.change_queue
    take(ENGINE_ID, QueueChange(waiting))
    world.pump()
    found = [e for e in world.events if isinstance(e, Emit) and e.name == SESSION_WANTED]
    return [(event.key, event.fields["num_tokens"]) for event in found]


@pytest.mark.parametrize("replaces", [True, False])
def test_what_waits_and_is_not_stored_is_asked_for(replaces):
    """What is known to have a history first; not what is here."""
    world = new_world(wants_sessions=True)
    store(world, A, ONES)
    other, first = B._replace(session_id="other"), B._replace(session_id="first")
    requests = [(1, (A, 4)), (2, (first, 0)), (3, (B, 40)), (4, (other, 9))]
    assert wanted(world, *requests, replaces=replaces) == [
        *((B, "40"), (other, "9"), (first, "0")),
    ]
    assert counter(world, "sessions_wanted") == 3


def test_nobody_asks_where_nobody_answers():
    """As the limits say; a reload lets it begin."""
    world = new_world()
    assert wanted(world, (1, (B, 4))) == []
    world.engine.set_limits(new_world(wants_sessions=True).engine._state.limits)
    assert wanted(world, (2, (B, 4))) == [(B, "4")]


def test_a_session_is_asked_for_again_after_a_while():
    """Not with each change of its turn's place."""
    world = new_world(wants_sessions=True)
    assert wanted(world, (1, (B, 4))) == [(B, "4")]
    assert wanted(world, (1, (B, 4))) == []
    world.now_ns += ASK_AGAIN_NS
    world.engine.advance(world.now_ns)
    assert wanted(world, (1, (B, 4))) == [(B, "4")]


def test_what_is_remembered_is_bounded(monkeypatch):
    """Who was asked for longest ago is forgotten, and may be asked for again."""
    monkeypatch.setattr("kvd.core.operations.wanting.MOST_REMEMBERED", 1)
    world = new_world(wants_sessions=True)
    assert wanted(world, (1, (A, 4)), (2, (B, 4))) == [(A, "4"), (B, "4")]
    assert wanted(world, (1, (A, 4)), (2, (B, 4))) == [(A, "4"), (B, "4")]


def test_a_flood_is_bounded():
    """So many a second; the others are asked for when they are reported again."""
    world = new_world(wants_sessions=True)
    keys = [B._replace(session_id=str(number)) for number in range(MOST_PER_S + 5)]
    requests = [(number, (key, 4)) for number, key in enumerate(keys)]
    assert len(wanted(world, *requests)) == MOST_PER_S
    world.now_ns += NS_PER_S
    world.engine.advance(world.now_ns)
    assert [key for key, _ in wanted(world, *requests)] == keys[MOST_PER_S:]
