"""Every evicted session was announced before, if the new blocks fit into the headroom."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.io.announcing import LOOK_NS, MOST_A_LOOK
from kvd.core.records.actions import (
    EVICTED,
    SESSION_CUT,
    SESSION_DROPPED,
    SESSION_NEAR_EVICTION,
    Emit,
)
from kvd.core.records.entries import Pin
from kvd.core.records.tier import Admission
from kvd.core.state.limits import TenantLimits
from tests.kvd.core.turns import A, infos, load, new_world, store, wait
from tests.property.cache_world import LAYOUT, CacheWorld
from tests.sampled import examples

MOST_BLOCKS = 3  # blocks of a store
MOST_TOKENS = 28  # blocks of a conversation: few, so that reading it fits into the headroom, too
HEADROOM = 1 / 8  # of 64 blocks, eight
KEYS = [A._replace(session_id=f"s{number}") for number in range(12)]
BOUNDS = st.sampled_from(
    [
        {"num_slots": 8, "num_extents": 64},
        {"num_slots": 64, "num_extents": 0},
        {"num_slots": 64, "num_extents": 64},
        {"num_slots": 96, "num_extents": 64},
        {"num_slots": 128, "num_extents": 128, "max_sessions": 8},
        {
            "num_slots": 128,
            "num_extents": 128,
            "tenant_limits": lambda _: TenantLimits(quota_bytes=64 * LAYOUT.block_bytes),
        },
    ]
)
SOME = st.sampled_from(KEYS)
OPERATIONS = st.one_of(
    st.tuples(st.just("store"), SOME, st.integers(1, MOST_BLOCKS)),
    st.tuples(st.just("store"), SOME, st.integers(1, MOST_BLOCKS)),
    st.tuples(st.just("load"), SOME, st.just(0)),
    st.tuples(st.just("end"), SOME, st.just(0)),
    st.tuples(st.just("pin"), st.just(KEYS[0]), st.sampled_from([Pin.NONE, Pin.HARD])),
    st.tuples(st.just("pin"), st.just(KEYS[1]), st.sampled_from([Pin.NONE, Pin.SOFT])),
)


class Scene:
    """A full kvd, and conversations that continue with their stored history."""

    def __init__(self, bounds: dict, admission: Admission) -> None:
        self.world: CacheWorld = new_world(
            policy="lru", announces_evictions=True, admission=admission, **bounds
        )
        self.tokens: dict = {}
        self.num_stores = 0
        for key in (*KEYS, *KEYS):
            self.do("store", key, MOST_BLOCKS)
            self.look()

    def do(self, what: str, key, value) -> None:
        sessions = self.world.engine.sessions
        info = self.world.engine.inspection.info(key)
        if what == "store":
            self.num_stores += 1
            history = self.tokens[key][: info.num_tokens] if info else []
            if len(history) > MOST_TOKENS - 4 * MOST_BLOCKS:
                return
            self.tokens[key] = history + [self.num_stores] * 4 * value
            store(self.world, key, self.tokens[key])
        elif info is not None:
            if what == "load":
                load(self.world, key, self.tokens[key])
            elif what == "end":
                sessions.end(key)
            else:
                sessions.pin(key, value)
        self.world.quiesce()

    def events(self) -> list[Emit]:
        found = [event for event in self.world.events if isinstance(event, Emit)]
        self.world.events.clear()
        return found

    def look(self) -> None:
        """Let enough time pass for all announcements; at most `limit` per call."""
        due = True
        while due:
            wait(self.world, LOOK_NS)
            due = self.world.engine._announcer.next_deadline_ns() is not None
            told = [event for event in self.events() if event.name == SESSION_NEAR_EVICTION]
            assert len(told) <= MOST_A_LOOK
            self.check(told)

    def check(self, told: list[Emit]) -> None:
        for event in told:
            info = self.world.engine.inspection.info(event.key)
            assert info.near_eviction
            assert not info.ended
            assert info.pin is not Pin.HARD


@settings(max_examples=examples(40), deadline=None)
@given(BOUNDS, st.sampled_from(Admission), st.lists(OPERATIONS, min_size=10, max_size=30))
def test_every_eviction_was_announced(bounds, admission, operations):
    """It was announced at least one operation earlier."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvd.core.io.announcing.HEADROOM", HEADROOM)
        scene = Scene(bounds, admission)
        for what, key, value in operations:
            before = {info.key: info for info in infos(scene.world.engine)}
            scene.events()
            scene.do(what, key, value)
            for event in scene.events():
                if event.name in (SESSION_CUT, SESSION_DROPPED) and event.fields["why"] == EVICTED:
                    info = before[event.key]
                    assert info.near_eviction or info.ended, (what, key, event.key)
            scene.look()
