"""Events reach watchers, and a slow one does not hold anybody up."""

import pytest

from kvd.core.actions import Emit
from kvd.errors import LimitReachedError
from kvd.events import MAX_WAITING, EventHub
from shared.session_key import SessionKey

KEY = SessionKey("tenant", "model", "a")


def test_every_watcher_hears_every_event():
    """An event carries its name, session and facts to all who watch."""
    hub = EventHub(max_watchers=2)
    with hub.watch() as one, hub.watch() as two:
        hub.publish(Emit("session_stored", KEY, {"num_tokens": "3"}))
        for queue in (one, two):
            event = queue.get_nowait()
            assert (event.name, event.session.session_id) == ("session_stored", "a")
            assert dict(event.fields) == {"num_tokens": "3"}


def test_a_slow_watcher_loses_the_oldest():
    """The queue is bounded; what is newest is kept."""
    hub = EventHub(max_watchers=1)
    with hub.watch() as queue:
        for number in range(MAX_WAITING + 5):
            hub.publish(Emit(f"event_{number}"))
        assert queue.qsize() == MAX_WAITING
        assert queue.get_nowait().name == "event_5"


def test_watchers_are_bounded():
    """One too many is refused, and leaving makes room."""
    hub = EventHub(max_watchers=1)
    with hub.watch(), pytest.raises(LimitReachedError), hub.watch():
        pass
    with hub.watch():
        pass
