"""Deadlines of requests."""

from inference_svc.core.scheduling.request import Request, RequestEvent
from inference_svc.core.scheduling.waiting_queue import Deadlines
from shared.types.session_key import SessionKey


def request(number, deadline_ns, kind=Request):
    key = SessionKey("t", "0f", str(number))
    return kind(number, key, [1], 1, arrived_ns=0, deadline_ns=deadline_ns)


def test_due_requests_are_returned_once_earliest_first():
    """A deadline that equals the present has passed."""
    deadlines, requests = Deadlines(), [request(i, ns) for i, ns in enumerate((30, 10, None, 20))]
    for one in requests:
        deadlines.add(one)
    assert deadlines.next_ns() == 10
    assert deadlines.pop_due(20) == [requests[1], requests[3]]
    assert deadlines.pop_due(20) == []
    assert deadlines.next_ns() == 30


def test_ended_requests_are_never_due():
    """They schedule no wake-up either."""
    deadlines, one = Deadlines(), request(1, 10)
    deadlines.add(one)
    one.move(RequestEvent.CANCEL)
    assert deadlines.next_ns() is None
    assert deadlines.pop_due(10) == []


def test_a_request_may_be_given_more_time():
    """A later deadline counts once the earlier one would have passed; None is for ever."""
    deadlines, later, ever = Deadlines(), request(1, 10), request(2, 10)
    deadlines.add(later)
    deadlines.add(ever)
    later.deadline_ns, ever.deadline_ns = 30, None
    assert deadlines.pop_due(10) == []
    assert deadlines.next_ns() == 30
    assert deadlines.pop_due(30) == [later]
    assert deadlines.next_ns() is None


def test_ended_requests_do_not_accumulate():
    """A day of turns with far deadlines leaves no more than the live ones."""
    deadlines, living = Deadlines(), [request(i, 10**9 + i) for i in range(100)]
    for one in living:
        deadlines.add(one)
    for number in range(1000, 11_000):
        ended = request(number, 10**12)
        deadlines.add(ended)
        ended.move(RequestEvent.CANCEL)
    assert len(deadlines._heap) < 400
    assert deadlines.pop_due(10**10) == living


class Watched(Request):
    """A request that counts how often it is asked whether it has ended."""

    num_looks = 0

    @property
    def is_over(self):
        Watched.num_looks += 1
        return super().is_over


def test_live_requests_are_not_scanned_each_time():
    """However many have a deadline."""
    deadlines, num_requests = Deadlines(), 1000
    for number in range(num_requests):
        deadlines.add(request(number, 10**9, Watched))
    assert 0 < Watched.num_looks < 4 * num_requests
