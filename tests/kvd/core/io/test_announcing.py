"""The sessions that are evicted next are announced in time, once, and not too many at once."""

from dataclasses import replace

import pytest

from kvd.core.eviction.session_order import Guard
from kvd.core.io.announcing import LOOK_NS
from kvd.core.records.actions import SESSION_DROPPED, SESSION_NEAR_EVICTION, Emit
from kvd.core.records.entries import Pin
from kvd.core.state.limits import TenantLimits
from shared.types.queue_delta import RunningRequest
from tests.kvd.core.operations.sparse_worlds import discard
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
    TWOS,
    A,
    B,
    C,
    infos,
    load,
    new_world,
    queue_of,
    store,
    wait,
)
from tests.property.cache_world import LAYOUT, CacheWorld
from tests.queue_changes import queue_change

KEYS = [A._replace(session_id=f"s{number}") for number in range(64)]
QUOTA = {"tenant_limits": lambda _: TenantLimits(quota_bytes=16 * LAYOUT.block_bytes)}


def announcing_world(num_slots=4, num_extents=16, **limits) -> CacheWorld:
    """Make a world whose headroom is a block."""
    return new_world(num_slots, num_extents, announces_evictions=True, **limits)


def fill(world: CacheWorld, num_sessions: int, first: int = 0) -> None:
    """Store sessions of a block each."""
    for number in range(first, first + num_sessions):
        store(world, KEYS[number], [number + 100] * 4)


def take_announced(world: CacheWorld) -> list:
    """Return the sessions announced since the last call, after the looks that are due."""
    wait(world, LOOK_NS)
    wait(world, LOOK_NS)
    return news(world)


def news(world: CacheWorld) -> list:
    """Return the sessions announced since the last call."""
    found = [e.key for e in world.events if isinstance(e, Emit) and e.name == SESSION_NEAR_EVICTION]
    world.events.clear()
    return found


@pytest.mark.parametrize(
    ("num_slots", "num_extents", "limits"),
    [
        (4, 16, {}),
        (16, 0, {}),
        (64, 64, {"max_sessions": 16}),
        (64, 64, QUOTA),
    ],
    ids=["ssd", "dram", "sessions", "quota"],
)
def test_the_next_victims_are_announced(num_slots, num_extents, limits):
    """Whether new blocks or used ones need the room."""
    world = announcing_world(num_slots, num_extents, **limits)
    fill(world, 15)
    assert take_announced(world) == []
    fill(world, 1, first=15)
    assert take_announced(world) == KEYS[:2]
    for number in range(16, 40):
        fill(world, 1, first=number)
        dropped = [e.key for e in world.events if isinstance(e, Emit) and e.name == SESSION_DROPPED]
        assert dropped == [KEYS[number - 16]]
        assert take_announced(world) == [KEYS[number - 14]]


def test_announcements_can_be_switched_off():
    """The limits say so; a reload switches them on."""
    world = new_world(4, 16)
    fill(world, 20)
    assert take_announced(world) == []
    world.engine.set_limits(replace(world.limits, announces_evictions=True))
    assert take_announced(world) == KEYS[4:6]


def test_a_session_is_announced_once_between_two_uses():
    """Loads and stores are uses; operators see it, and the next kvd announces it again."""
    world = announcing_world()
    fill(world, 16)
    assert take_announced(world) == KEYS[:2]
    near = [info.key for info in infos(world.engine) if info.near_eviction]
    assert sorted(near) == KEYS[:2]
    assert take_announced(world) == []
    load(world, KEYS[0], [100] * 4)
    assert take_announced(world) == [KEYS[2]]
    store(world, KEYS[1], [101] * 4 + [7])
    assert take_announced(world) == KEYS[3:5], "one of them has gone for it"
    world.quiesce()
    world.start()
    assert take_announced(world) == KEYS[3:5]


def test_ended_sessions_are_not_announced():
    """Their room counts."""
    world = announcing_world()
    fill(world, 15)
    world.engine.sessions.end(KEYS[7])
    fill(world, 1, first=15)
    assert take_announced(world) == [KEYS[0]]
    fill(world, 1, first=16)
    assert take_announced(world) == [KEYS[1]]


def test_pinned_sessions_are_not_announced():
    """A hard-pinned one stays in any case; softly pinned or retained ones go after the others."""
    world = announcing_world()
    fill(world, 15)
    world.engine.sessions.pin(KEYS[0], Pin.HARD)
    world.engine.sessions.pin(KEYS[1], Pin.SOFT)
    assert world.engine._state.sessions[KEYS[1]].guard is Guard.PINNED
    fill(world, 40, first=15)
    assert not {KEYS[0], KEYS[1]} & set(take_announced(world))


def test_a_superseded_session_is_announced_as_such():
    """It goes first, and may be pushed last."""
    world = announcing_world()
    fill(world, 15)
    world.engine.expectations.expect(KEYS[5], (), superseded=True)
    fill(world, 1, first=15)
    wait(world, LOOK_NS)
    told = {e.key: e.fields for e in world.events if e.name == SESSION_NEAR_EVICTION}
    assert told == {
        KEYS[5]: {"num_tokens": "4", "superseded": "1"},
        KEYS[0]: {"num_tokens": "4", "superseded": "0"},
    }


def test_a_shared_block_gives_room_with_its_last_session():
    """Until then the next session is announced, too."""
    world = announcing_world(16, 16)
    store(world, A, ONES * 2)
    store(world, B, ONES * 2)
    store(world, C, TWOS)
    fill(world, 13)
    assert take_announced(world) == [A, B, C, KEYS[0]]


def test_a_block_of_several_spans_counts_once():
    """Discards have left two spans on it; DRAM has the only copy."""
    world = announcing_world(32, 0)
    for key, tokens in ((A, [1, 2, 3, 4]), (B, [5, 6, 7, 8])):
        store(world, key, tokens)
        assert discard(world, key, tokens, [(1, 2)]) == 3
    fill(world, 30)
    assert take_announced(world) == [A, B, KEYS[0]]


def test_one_look_announces_a_bounded_number(monkeypatch):
    """Later looks, which are scheduled, announce the others."""
    monkeypatch.setattr("kvd.core.io.announcing.MOST_A_LOOK", 2)
    world = announcing_world(4, 64)
    fill(world, 64)
    seen = []
    for _ in range(2):
        wait(world, LOOK_NS)
        seen += (found := news(world))
        assert len(found) == 2
    assert seen == KEYS[:4]
    assert world.engine.next_deadline_ns() == world.now_ns + LOOK_NS
    assert take_announced(world) == [KEYS[4]]
    assert world.engine.next_deadline_ns() is None


def test_one_look_skips_a_bounded_number(monkeypatch):
    """However large the headroom is."""
    monkeypatch.setattr("kvd.core.io.announcing.MOST_AHEAD", 3)
    world = announcing_world(4, 64)
    fill(world, 64)
    assert take_announced(world) == KEYS[:3]


def test_an_unannounced_victim_is_announced_as_it_goes():
    """More was stored at once than the headroom holds: no loss goes unreported."""
    world = announcing_world(8, 16)
    fill(world, 16)
    world.events.clear()
    store(world, B, ONES + TWOS + THREES)
    told = [(e.name, e.key) for e in world.events if isinstance(e, Emit)]
    for key in KEYS[1:3]:
        assert told.index((SESSION_NEAR_EVICTION, key)) < told.index((SESSION_DROPPED, key))


@pytest.mark.parametrize(
    ("num_slots", "num_extents", "limits"),
    [(16, 0, {}), (4, 16, {}), (64, 64, {"max_sessions": 16}), (64, 64, QUOTA)],
    ids=["dram", "ssd", "sessions", "quota"],
)
def test_a_running_session_is_not_near_eviction(num_slots, num_extents, limits):
    """In DRAM it ranks first, because its engine has it, but it is lost only after all others."""
    world = announcing_world(num_slots, num_extents, policy="lookahead_queue", **limits)
    fill(world, 15)
    running = queue_change(running=[RunningRequest(1, KEYS[0])])
    world.engine.engines.change_queue(ENGINE_ID, running)
    fill(world, 1, first=15)
    assert take_announced(world) == KEYS[1:3]


def test_a_quota_that_has_ended_is_ignored():
    """Earlier charges of the tenant do not matter any more."""
    world = announcing_world(64, 64, **QUOTA)
    fill(world, 20)
    world.events.clear()
    world.engine.set_limits(new_world(64, 64, announces_evictions=True).limits)
    assert take_announced(world) == []
    assert not world.engine._state.tenants.charged


def test_blocks_in_dram_only_are_announced_before_they_leave_it():
    """SSD is full of warmer sessions."""
    world = announcing_world(16, 4, policy="lookahead_queue")
    fill(world, 4)
    world.engine.engines.change_queue(ENGINE_ID, queue_of(*KEYS[:4]))
    world.events.clear()
    fill(world, 11, first=4)
    assert world.engine._state.unwritten.refused
    assert take_announced(world)
