"""Which waiting session is read next: the soonest that can be there in time, within the window."""

import pytest

from kvd.core.eviction.queue_window import QueueWindow
from kvd.core.eviction.session_placement import MOST_LATE, PrefetchOrder
from shared.types.queue_delta import QueueChange, QueuedRequest
from shared.types.session_key import SessionKey

INTERVAL_NS = 1000
ENGINE = 1
KEYS = [SessionKey("a", "m", f"s{number}") for number in range(40)]
A, B, C, D = KEYS[:4]


class Waiting:
    """A queue and its order of prefetching; every session that waits is looked at."""

    def __init__(self, *keys, interval_ns=INTERVAL_NS) -> None:
        self.queue = QueueWindow(self._changed)
        self.order = PrefetchOrder(self.queue)
        self.change(waiting=requests_of(*keys), interval_ns=interval_ns)

    def _changed(self, keys) -> None:
        self.order.on_queue(keys)

    def change(self, engine=ENGINE, **change) -> None:
        self.queue.change(engine, QueueChange(**change), now_ns=0)

    def pick(self, window=100, late=()):
        return self.order.pick(window, lambda key, _starts_in_ns: key not in late)

    def picks(self, window=100, late=()):
        """One after another, each read to its end before the next is picked."""
        found = []
        while (key := self.pick(window, late)) is not None:
            found.append(key)
            self.order.settle(key)
        return found


def requests_of(*keys, first_number=0):
    return [QueuedRequest((0, 0.0, number), key) for number, key in enumerate(keys, first_number)]


def test_sessions_are_picked_in_queue_order():
    """Each once; then there is nothing to be read."""
    waiting = Waiting(C, A, B)
    assert waiting.picks() == [C, A, B]
    assert waiting.pick() is None


def test_a_pick_stays_until_it_is_settled():
    """Who reads a session piece by piece gets the same one again."""
    waiting = Waiting(A, B)
    assert [waiting.pick(), waiting.pick()] == [A, A]


@pytest.mark.parametrize("window", range(4))
def test_the_window_counts_all_requests_of_the_queue(window):
    """Also those of sessions that have nothing to be read: it is DRAM that would be full."""
    waiting = Waiting(A, B, C)
    waiting.order.settle(A)
    assert waiting.picks(window) == [B, C][: max(0, window - 1)]


def test_the_window_moves_as_turns_start():
    """A session behind the window comes into it without a report of its own."""
    waiting = Waiting(A, B, C)
    assert waiting.picks(window=2) == [A, B]
    waiting.change(left=[0])
    assert waiting.picks(window=2) == [C]


def test_one_that_cannot_be_there_in_time_yields_to_one_that_can():
    """The disk's time is spent where it helps; the late one is picked when nothing else is."""
    waiting = Waiting(A, B, C)
    assert waiting.picks(late={A}) == [B, C, A]


def test_if_none_can_be_there_in_time_the_first_is_read_all_the_same():
    """What is there by then need not be read on demand."""
    assert Waiting(A, B, C).picks(late={A, B, C}) == [A, B, C]


def test_a_bounded_number_of_late_ones_is_passed_over():
    """However long the queue is, a look is short; the last that is looked at is still taken."""
    waiting = Waiting(*KEYS)
    assert waiting.pick(late=KEYS[: MOST_LATE - 1]) == KEYS[MOST_LATE - 1]
    assert waiting.pick(late=KEYS[:MOST_LATE]) == KEYS[0]


def test_a_pick_says_when_the_session_starts():
    """By the requests that its own engine has before it; 0 if nobody knows how long one takes."""
    seen_ns = {}

    def note(key, starts_in_ns):
        seen_ns[key] = starts_in_ns
        return False

    waiting = Waiting(A, B)
    waiting.order.pick(100, note)
    assert seen_ns == {A: INTERVAL_NS, B: 2 * INTERVAL_NS}
    Waiting(C, interval_ns=0).order.pick(100, note)
    assert seen_ns[C] == 0


def test_a_session_whose_request_left_is_not_picked():
    """Neither the cancelled one nor one that runs already."""
    waiting = Waiting(A, B, C)
    waiting.change(left=[0])
    assert waiting.picks() == [B, C]


def test_a_session_with_two_requests_stands_where_its_first_one_does():
    """When that one starts, where the second does; it is picked once."""
    waiting = Waiting(A, B, A)
    assert waiting.pick() == A
    waiting.change(left=[0])
    assert waiting.picks() == [B, A]


def test_one_that_is_reopened_is_picked_again_in_its_place():
    """Bytes of it have left DRAM."""
    waiting = Waiting(A, B, C)
    waiting.order.settle(A)
    waiting.order.settle(B)
    waiting.order.reopen(B)
    assert waiting.picks() == [B, C]


def test_one_that_does_not_wait_is_never_opened():
    """What leaves DRAM of an idle session is no reason to read it."""
    waiting = Waiting(A)
    waiting.order.reopen(B)
    assert waiting.picks() == [A]


def test_an_urgent_request_is_picked_first_wherever_it_came_from():
    """The queue's order counts, not the order of arrival."""
    waiting = Waiting(A, B)
    waiting.change(waiting=[QueuedRequest((-1, 0.0, 7), D)])
    assert waiting.picks() == [D, A, B]


def test_requests_of_another_engine_are_picked_by_when_they_start():
    """A fast engine's third request may start before a slow one's first."""
    waiting = Waiting(A, B)
    waiting.change(engine=2, waiting=requests_of(C, D), interval_ns=INTERVAL_NS + 1)
    assert waiting.picks() == [A, C, B, D]


def test_nothing_is_left_of_an_engine_that_is_gone():
    """Its sessions are nobody's next."""
    waiting = Waiting(A, B)
    waiting.queue.forget(ENGINE)
    assert waiting.picks() == []


def test_one_of_many_is_looked_up_by_itself():
    """It leaves its old place for the new one; one that was settled has a place again."""
    waiting = Waiting(*KEYS)
    assert waiting.pick() == KEYS[0]
    waiting.change(waiting=[QueuedRequest((-1, 0.0, 20), KEYS[20])])
    assert waiting.pick() == KEYS[20]
    waiting.order.settle(KEYS[0])
    assert waiting.pick(late={KEYS[20]}) == KEYS[1]
    waiting.order.reopen(KEYS[0])
    others = [key for key in KEYS if key is not KEYS[20]]
    assert waiting.picks() == [KEYS[20], *others]
