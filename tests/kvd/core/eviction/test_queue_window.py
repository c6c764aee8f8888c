"""The queues of all engines in one order."""

from collections import Counter
from collections.abc import Collection

import pytest

from kvd.core.eviction.queue_window import QueueWindow
from shared.types.queue_delta import (
    QueuedRequest,
    RunningRequest,
    running_digest,
    update_digest,
    waiting_digest,
)
from shared.types.session_key import SessionKey
from tests.queue_changes import queue_change

MS = 1_000_000


def key_of(name) -> SessionKey:
    return SessionKey("t", "0f", str(name))


def request(number: int, name=None, tag: float = 0.0, priority: int = 0) -> QueuedRequest:
    return QueuedRequest((-priority, tag, number), key_of(number if name is None else name))


class Window:
    """A queue window that is checked after each call, and records its notifications."""

    def __init__(self) -> None:
        self.reported: Counter[str] = Counter()
        self.queue = QueueWindow(self._changed)

    def _changed(self, keys: Collection[SessionKey], unqueued: list[SessionKey]) -> None:
        self.queue.check()  # notifications come after the whole change
        assert unqueued == [key for key in keys if not self.queue.is_queued(key)]
        self.reported.update(key.session_id for key in keys)

    def replace(
        self, engine_id: int, *requests: QueuedRequest, running=(), now_ns=0, interval_ns=0
    ) -> int:
        self.reported.clear()
        change = queue_change(requests, running, (), interval_ns)
        digest = self.queue.replace(engine_id, change, now_ns)
        self.queue.check()
        return digest

    def change(
        self, engine_id: int, *requests: QueuedRequest, running=(), left=(), now_ns=0
    ) -> int:
        self.reported.clear()
        digest = self.queue.change(engine_id, queue_change(requests, running, left), now_ns)
        self.queue.check()
        return digest

    def names(self) -> list[str]:
        return [key.session_id for key in self.queue]


def test_a_queue_is_in_the_order_of_its_ranks():
    """Higher priorities first, then lower tags, then lower numbers, however they are reported."""
    window = Window()
    window.replace(1, request(3), request(1, tag=5.0), request(2), request(4, priority=1))
    assert window.names() == ["4", "2", "3", "1"]
    assert len(window.queue) == window.queue.num_waiting(1) == 4


def test_changes_join_move_start_and_leave():
    """Each request is where its newest change has put it."""
    window = Window()
    window.replace(1, *map(request, range(5)))
    window.change(
        1,
        request(9, tag=-0.0),
        request(4, priority=2),
        running=[RunningRequest(0, key_of(0))],
        left=[2],
    )
    assert window.names() == ["4", "1", "3", "9"]
    assert window.queue.is_running(key_of(0))
    assert not window.queue.is_queued(key_of(0))
    assert [n for n in range(10) if window.queue.holds(1, n)] == [0, 1, 3, 4, 9]
    assert not window.queue.holds(2, 1)
    assert window.queue.num_running(1) == 1
    assert set(window.reported) == {"9", "4", "0", "2"}
    window.change(1, request(0))
    assert window.names() == ["4", "0", "1", "3", "9"]
    assert not window.queue.is_running(key_of(0))


def test_changes_of_unknown_requests_are_harmless():
    """A request may leave without having come, or come twice."""
    window = Window()
    window.replace(1, request(1))
    window.change(1, left=[7])
    window.change(1, request(1, tag=3.0))
    window.change(2, left=[1])
    assert window.names() == ["1"]


def test_the_digest_is_the_sum_over_all_requests():
    """It does not depend on the order of changes."""
    whole, steps = Window(), Window()
    running = [RunningRequest(77, key_of("r"))]
    digest = whole.replace(1, *map(request, range(20)), running=running)
    steps.replace(1, *map(request, range(0, 30, 3)))
    steps.change(1, *map(request, range(20)), left=range(20, 30))
    assert steps.change(1, running=running) == digest
    parts = [waiting_digest(request(n).rank, key_of(n)) for n in range(20)]
    assert digest == update_digest(running_digest(77, key_of("r")), added=sum(parts))
    assert whole.replace(1) == 0


def test_an_unchanged_queue_causes_no_notification():
    """Only sessions with changed requests are notified of, and the others keep their places."""
    window = Window()
    window.replace(1, *map(request, range(100)), interval_ns=MS)
    place = window.queue.place(key_of(50))
    window.replace(1, *map(request, range(2, 101)), now_ns=5, interval_ns=MS)
    assert set(window.reported) == {"0", "1", "100"}
    assert window.queue.place(key_of(50)) == place
    window.replace(1, *map(request, range(80, 200)), now_ns=5, interval_ns=MS)
    assert window.names() == [str(n) for n in range(80, 200)]


def test_a_number_that_another_session_takes_over_is_a_change():
    """Whether it waits or runs."""
    window = Window()
    window.replace(1, *map(request, range(9)), running=[RunningRequest(10, key_of("x"))])
    window.replace(
        1,
        request(0, "other"),
        *map(request, range(1, 9)),
        running=[RunningRequest(10, key_of("y"))],
    )
    assert window.names()[0] == "other"
    assert window.queue.is_running(key_of("y"))
    assert not window.queue.is_running(key_of("x"))


@pytest.mark.parametrize("how", ["forgotten", "replaced by nothing"])
def test_a_lost_engines_requests_are_removed(how):
    """Other engines' requests stay, also those of shared sessions."""
    window = Window()
    window.replace(1, *map(request, range(10)), running=[RunningRequest(20, key_of("both"))])
    window.replace(2, request(1, "both"), running=[RunningRequest(2, key_of("both"))])
    window.reported.clear()
    if how == "forgotten":
        window.queue.forget(1)
        window.queue.forget(77)
    else:
        window.replace(1)
    window.queue.check()
    assert window.names() == ["both"]
    assert window.queue.is_running(key_of("both"))
    assert set(window.reported) == {*map(str, range(10)), "both"}
    assert window.queue.num_waiting(1) == window.queue.num_running(1) == 0
    assert 1 not in window.queue._engines


def test_removing_a_small_engine_does_not_scan_all_requests():
    """Its requests are taken out one by one."""
    window = Window()
    window.replace(1, *map(request, range(200)), interval_ns=MS)
    window.replace(2, request(7, "small"), interval_ns=10 * MS)
    window.queue.forget(2)
    window.queue.check()
    assert window.names() == [str(n) for n in range(200)]


def test_engines_are_merged_by_estimated_start():
    """An engine that starts a request every millisecond overtakes one that needs two."""
    window = Window()
    window.replace(1, *(request(n, f"a{n}") for n in range(4)), interval_ns=2 * MS)
    window.replace(2, *(request(n, f"b{n}") for n in range(4)), interval_ns=1 * MS)
    assert window.names() == ["b0", "a0", "b1", "b2", "a1", "b3", "a2", "a3"]
    place = window.queue.place(key_of("a1"))
    assert window.queue.num_ahead(place) == 4
    assert window.queue.starts_in_ns(place) == 4 * MS
    assert list(window.queue)[:2] == [key_of("b0"), key_of("a0")]


def test_a_late_request_keeps_its_engines_order():
    """Its estimate lies between those of its neighbours, which were made before."""
    window = Window()
    window.replace(1, *(request(n, tag=float(n)) for n in range(4)), interval_ns=MS)
    window.change(1, request(9, tag=1.5), now_ns=100 * MS)
    window.change(1, request(10, tag=9.0), now_ns=100 * MS)
    assert window.names() == ["0", "1", "9", "2", "3", "10"]


def test_a_session_has_the_place_of_its_first_turn():
    """It is queued while any of its turns waits, and runs while any runs, at any engine."""
    window = Window()
    window.replace(1, request(1, "s"), request(2), request(3, "s"))
    window.replace(2, running=[RunningRequest(1, key_of("s"))])
    assert window.queue.place(key_of("s"))[2][2] == 1
    window.change(1, left=[1])
    assert window.queue.place(key_of("s"))[2][2] == 3
    window.change(1, left=[3])
    assert window.queue.place(key_of("s")) is None
    assert window.queue.is_running(key_of("s"))


def test_many_turns_of_one_session_cost_as_much_as_those_of_many():
    """A client that queues ten thousand turns in one session does not delay the others."""
    window = QueueWindow(lambda _keys, _unqueued: None)
    requests = queue_change([request(n, "same") for n in range(10_000)])
    window.replace(1, requests, 0)
    window.change(1, queue_change(left=range(0, 10_000, 2)), 0)
    assert len(window) == 5000
    window.check()


def test_the_requests_between_two_places_are_counted():
    """From the first place to below the second, in either order."""
    window = Window()
    window.replace(1, *(request(n) for n in range(5)), interval_ns=MS)
    places = [window.queue.place(key_of(n)) for n in range(5)]
    for one, other in ((1, 3), (3, 1)):
        assert list(window.queue.between(places[one], places[other])) == places[1:4]
    for one, other in ((places[3], None), (None, places[3])):
        assert list(window.queue.between(one, other)) == places[3:]
    assert list(window.queue.between(None, None)) == []
    assert [window.queue.place_at(n) for n in (0, 4, 5)] == [places[0], places[4], None]


def test_a_start_is_estimated_at_arrival():
    """It is one interval after the start before it, and no later than the next one's."""
    window = Window()
    window.change(1, request(1, tag=1.0), now_ns=10)
    assert window.queue.starts_in_ns(window.queue.place(key_of(1))) == 0, "no interval is known"
    window = Window()
    window.replace(1, request(1, tag=1.0), request(3, tag=3.0), now_ns=10, interval_ns=MS)
    window.change(1, request(2, tag=2.0), now_ns=10)
    window.change(1, request(4, tag=4.0), now_ns=10)
    window.change(1, request(5, tag=5.0), now_ns=0)
    window.change(1, request(6, tag=6.0), now_ns=-9 * MS)
    window.change(1, request(0, tag=0.5), now_ns=100 * MS)
    places = [window.queue.place(key_of(n)) for n in range(7)]
    starts_ns = [MS, MS, 2 * MS, 2 * MS, 4 * MS]
    assert [place[0] - 10 for place in places[:5]] == starts_ns
    assert [place[0] for place in places[5:]] == [5 * MS, 5 * MS]
    assert [window.queue.starts_in_ns(place) for place in places] == [n * MS for n in range(1, 8)]
