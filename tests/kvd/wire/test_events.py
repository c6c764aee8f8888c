"""Events reach watchers, and a slow one delays nothing."""

import pytest

from kvd.core.records.actions import Emit
from kvd.errors import LimitReachedError
from kvd.wire.events import EVENTS_LOST, EVERY_EVENT, MAX_RECENT, MAX_WAITING, EventFilter, EventHub
from shared.types.session_key import SessionKey

KEY = SessionKey("tenant", "model", "a")


async def test_every_watcher_receives_every_event():
    """With its name, session and fields."""
    hub = EventHub(max_watchers=2)
    with hub.watch() as one, hub.watch() as two:
        hub.publish(Emit("session_stored", KEY, {"num_tokens": "3"}))
        for watcher in (one, two):
            event = await watcher.next()
            assert (event.name, event.session.session_id) == ("session_stored", "a")
            assert dict(event.fields) == {"num_tokens": "3"}


async def test_a_slow_watcher_loses_the_oldest():
    """The queue is bounded; the newest are kept, and the watcher learns how many it has lost."""
    hub = EventHub(max_watchers=1)
    with hub.watch() as watcher:
        for number in range(MAX_WAITING + 5):
            hub.publish(Emit(f"event_{number}"))
        assert len(watcher) == MAX_WAITING
        lost = await watcher.next()
        assert (lost.name, dict(lost.fields)) == (EVENTS_LOST, {"num_events": "5"})
        assert (await watcher.next()).name == "event_5"


async def test_a_watcher_receives_the_events_it_selected():
    """By session, tenant and name; events without a session belong to no tenant."""
    hub = EventHub(max_watchers=4)
    other = SessionKey("other", "model", "b")
    filters = {
        "tenant": EventFilter(tenants=frozenset({"tenant"})),
        "session": EventFilter(session_id="b"),
        "names": EventFilter(names=frozenset({"restored", "session_cut"})),
    }
    for emit in (Emit("restored"), Emit("session_cut", KEY), Emit("session_stored", other)):
        hub.publish(emit)
    received = {
        name: [event.name for event in hub.recent(wanted, 9)] for name, wanted in filters.items()
    }
    assert received == {
        "tenant": ["session_cut"],
        "session": ["session_stored"],
        "names": ["restored", "session_cut"],
    }
    assert [event.name for event in hub.recent(EVERY_EVENT, 1)] == ["session_stored"]
    with hub.watch(filters["session"]) as watcher:
        hub.publish(Emit("restored"))
        hub.publish(Emit("session_ended", other))
        assert (await watcher.next()).name == "session_ended"


def test_old_events_are_forgotten():
    """The log is bounded; an erased tenant leaves nothing in it."""
    hub = EventHub(max_watchers=1)
    for number in range(MAX_RECENT + 5):
        hub.publish(Emit(f"event_{number}"))
    assert hub.recent(EVERY_EVENT, MAX_RECENT + 5)[0].name == "event_5"
    hub.publish(Emit("session_cut", KEY))
    hub.forget("tenant")
    assert not hub.recent(EventFilter(session_id="a"), 9)
    hub.forget(None)
    assert not hub.recent(EVERY_EVENT, 9)


def test_watchers_are_bounded():
    """One too many is refused, and leaving makes room."""
    hub = EventHub(max_watchers=1)
    with hub.watch(), pytest.raises(LimitReachedError), hub.watch():
        pass
    with hub.watch():
        pass
