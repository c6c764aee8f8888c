"""The waiting session that is read next: the first that can be read in time, within the window."""

import pytest

from kvd.core.eviction.queue_window import QueueWindow
from kvd.core.eviction.session_placement import MOST_LATE, PrefetchOrder
from shared.types.queue_delta import QueuedRequest
from shared.types.session_key import SessionKey
from tests.queue_changes import queue_change

INTERVAL_NS = 1000
ENGINE = 1
KEYS = [SessionKey("a", "m", f"s{number}") for number in range(40)]
A, B, C, D = KEYS[:4]


class Waiting:
    """A queue and its prefetch order; every waiting session is reported to it."""

    def __init__(self, *keys, interval_ns=INTERVAL_NS) -> None:
        self.queue = QueueWindow(self._changed)
        self.order = PrefetchOrder(self.queue)
        self.change(waiting=requests_of(*keys), interval_ns=interval_ns)

    def _changed(self, keys, unqueued) -> None:
        self.order.on_queue(keys, unqueued)

    def change(self, engine=ENGINE, **change) -> None:
        self.queue.change(engine, queue_change(**change), now_ns=0)

    def pick(self, window=100, late=()):
        return self.order.pick(window, lambda key, _starts_in_ns: key not in late)

    def picks(self, window=100, late=()):
        """Pick one after another, reading each to its end before the next pick."""
        found = []
        while (key := self.pick(window, late)) is not None:
            found.append(key)
            self.order.settle(key)
        return found


def requests_of(*keys, first_number=0):
    return [QueuedRequest((0, 0.0, number), key) for number, key in enumerate(keys, first_number)]


def test_sessions_are_picked_in_queue_order():
    """Each is picked once; then no session is left to be read."""
    waiting = Waiting(C, A, B)
    assert waiting.picks() == [C, A, B]
    assert waiting.pick() is None


def test_a_pick_stays_until_it_is_settled():
    """Reading a session piece by piece picks the same one again."""
    waiting = Waiting(A, B)
    assert [waiting.pick(), waiting.pick()] == [A, A]


@pytest.mark.parametrize("window", range(4))
def test_the_window_counts_all_requests_of_the_queue(window):
    """Requests without anything to read count as well: the window limits what fills DRAM."""
    waiting = Waiting(A, B, C)
    waiting.order.settle(A)
    assert waiting.picks(window) == [B, C][: max(0, window - 1)]


def test_the_window_moves_as_turns_start():
    """A session behind the window enters it without a report of its own."""
    waiting = Waiting(A, B, C)
    assert waiting.picks(window=2) == [A, B]
    waiting.change(left=[0])
    assert waiting.picks(window=2) == [C]


def test_a_session_that_would_be_late_yields_to_one_in_time():
    """The disk's time is spent where it helps; the late one is picked when no other is left."""
    waiting = Waiting(A, B, C)
    assert waiting.picks(late={A}) == [B, C, A]


def test_if_all_would_be_late_the_first_is_read():
    """What is read by then need not be read on demand."""
    assert Waiting(A, B, C).picks(late={A, B, C}) == [A, B, C]


def test_a_bounded_number_of_late_sessions_is_skipped():
    """A pick is short however long the queue is; the last session looked at is taken."""
    waiting = Waiting(*KEYS)
    assert waiting.pick(late=KEYS[: MOST_LATE - 1]) == KEYS[MOST_LATE - 1]
    assert waiting.pick(late=KEYS[:MOST_LATE]) == KEYS[0]


def test_a_pick_has_the_sessions_start_time():
    """It follows from the requests ahead of it at its engine; 0 if their duration is unknown."""
    seen_ns = {}

    def note(key, starts_in_ns):
        seen_ns[key] = starts_in_ns
        return False

    waiting = Waiting(A, B)
    waiting.order.pick(100, note)
    assert seen_ns == {A: INTERVAL_NS, B: 2 * INTERVAL_NS}
    Waiting(C, interval_ns=0).order.pick(100, note)
    assert seen_ns[C] == 0


def test_a_session_whose_request_has_left_is_not_picked():
    """The request was cancelled or has started."""
    waiting = Waiting(A, B, C)
    waiting.change(left=[0])
    assert waiting.picks() == [B, C]


def test_a_session_with_two_requests_has_the_place_of_the_first():
    """When the first starts, it gets the second's place; it is picked once."""
    waiting = Waiting(A, B, A)
    assert waiting.pick() == A
    waiting.change(left=[0])
    assert waiting.picks() == [B, A]


def test_a_reopened_session_is_picked_again_in_its_place():
    """Some of its blocks have left DRAM."""
    waiting = Waiting(A, B, C)
    waiting.order.settle(A)
    waiting.order.settle(B)
    waiting.order.reopen(B)
    assert waiting.picks() == [B, C]


def test_an_idle_session_is_never_opened():
    """Losing blocks in DRAM is no reason to read an idle session."""
    waiting = Waiting(A)
    waiting.order.reopen(B)
    assert waiting.picks() == [A]


def test_an_urgent_request_is_picked_first_wherever_it_came_from():
    """The queue's order counts, not the order of arrival."""
    waiting = Waiting(A, B)
    waiting.change(waiting=[QueuedRequest((-1, 0.0, 7), D)])
    assert waiting.picks() == [D, A, B]


def test_requests_of_several_engines_are_picked_by_start_time():
    """A fast engine's third request may start before a slow one's first."""
    waiting = Waiting(A, B)
    waiting.change(engine=2, waiting=requests_of(C, D), interval_ns=INTERVAL_NS + 1)
    assert waiting.picks() == [A, C, B, D]


def test_a_lost_engines_sessions_are_not_picked():
    """Its queue is removed."""
    waiting = Waiting(A, B)
    waiting.queue.forget(ENGINE)
    assert waiting.picks() == []


def test_reopening_one_of_many_moves_only_it():
    """It leaves its old place for the new one; a settled session gets a place again."""
    waiting = Waiting(*KEYS)
    assert waiting.pick() == KEYS[0]
    waiting.change(waiting=[QueuedRequest((-1, 0.0, 20), KEYS[20])])
    assert waiting.pick() == KEYS[20]
    waiting.order.settle(KEYS[0])
    assert waiting.pick(late={KEYS[20]}) == KEYS[1]
    waiting.order.reopen(KEYS[0])
    others = [key for key in KEYS if key is not KEYS[20]]
    assert waiting.picks() == [KEYS[20], *others]
