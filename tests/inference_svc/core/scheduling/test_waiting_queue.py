"""The order of admission: priorities, shares of tenants, kept places."""

from collections import Counter

import pytest

from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.waiting_queue import WaitingQueue
from shared.types.queue_delta import QueuedRequest, RunningRequest
from shared.types.queue_feed import QueueFeed
from shared.types.session_key import SessionKey


def request(number, tenant="a", *, priority=0, new_tokens=10, max_tokens=10, history_tokens=0):
    return Request(
        number,
        SessionKey(tenant, "0f", str(number)),
        list(range(history_tokens + new_tokens)),
        max_tokens,
        arrived_ns=0,
        history_tokens=history_tokens,
        priority=priority,
    )


def queue_of(weights=None):
    return WaitingQueue(weights or {}, QueueFeed())


def numbers(queue):
    queue.check()
    return [waiting.number for waiting in queue]


def admit_head(queue):
    head = queue.head
    queue.admit(head)
    head.admitted_ns = 1
    return head


def test_equals_are_served_in_the_order_they_came():
    """Within a tenant and a priority: first come, first served."""
    queue = queue_of()
    for number in range(5):
        queue.add(request(number))
    assert numbers(queue) == [0, 1, 2, 3, 4]


def take_news(queue):
    """Return the feed's news: waiting requests with ranks and histories, and those that left."""
    update = queue._feed.next_update(100)
    if update is None:
        return [], []
    queue._feed.on_acknowledge(update.sequence, send_full=False)
    return sorted(update.change.waiting), list(update.change.left)


def test_an_arriving_turn_is_reported_before_its_request_waits():
    """With its approximate place; only the feed sees it before."""
    queue = queue_of()
    queue.add(request(0))
    queue.report_arrival(1, request(1).key, 2, 70)
    assert (numbers(queue), len(queue)) == ([0], 1)
    assert queue.is_arriving(request(1).key)
    assert not queue.is_arriving(request(0).key)
    assert take_news(queue)[0] == [
        QueuedRequest((-2, 20.0, 1), request(1).key, 70),
        QueuedRequest((0, 0.0, 0), request(0).key, 0),
    ]
    queue.add(request(1, priority=2, history_tokens=50))
    assert numbers(queue) == [1, 0]
    assert not queue.is_arriving(request(1).key)
    assert take_news(queue) == ([QueuedRequest((-2, 20.0, 1), request(1).key, 50)], [])
    queue.withdraw(1)
    assert take_news(queue) == ([], [])
    assert numbers(queue) == [1, 0]


def test_an_arriving_turn_that_is_withdrawn_is_removed():
    """Once; and its tenant has paid nothing."""
    queue = queue_of()
    queue.report_arrival(1, request(1).key, 0, 0)
    assert take_news(queue) == ([QueuedRequest((0, 0.0, 1), request(1).key, 0)], [])
    queue.withdraw(1)
    queue.withdraw(1)
    assert take_news(queue) == ([], [1])
    queue.report_arrival(2, request(2).key, 0, 0)
    queue.withdraw(2)
    assert take_news(queue) == ([], [])
    queue.add(request(3))
    assert take_news(queue)[0] == [QueuedRequest((0, 0.0, 3), request(3).key, 0)]


def test_higher_priorities_go_first():
    """Whatever their tenant has used before."""
    queue = queue_of()
    for number, priority in enumerate([0, -1, 5, 0, 5]):
        queue.add(request(number, priority=priority))
    assert numbers(queue) == [2, 4, 0, 3, 1]


def test_a_flooding_tenant_waits_behind_its_own_requests():
    """A newcomer of another tenant is served after one of the flood, not after all."""
    queue = queue_of()
    for number in range(50):
        queue.add(request(number, "flood"))
    admit_head(queue)
    queue.add(request(50, "calm"))
    assert numbers(queue)[:3] == [50, 1, 2]


def test_tenants_share_by_their_weights():
    """With weight 3 against 1, a tenant is admitted three times as often."""
    queue = queue_of({"heavy": 3.0})
    for number in range(80):
        queue.add(request(number, "heavy" if number % 2 else "light"))
    served = Counter(admit_head(queue).key.tenant for _ in range(40))
    assert served == {"heavy": 30, "light": 10}


def test_work_is_counted_in_tokens_without_the_history():
    """A tenant with short turns is admitted more often; loaded tokens cost nothing."""
    queue = queue_of()
    for number in range(80):
        if number % 2:
            queue.add(request(number, "short", new_tokens=1, max_tokens=9, history_tokens=500))
        else:
            queue.add(request(number, "long", new_tokens=20, max_tokens=20))
    served = Counter(admit_head(queue).key.tenant for _ in range(40))
    assert served == {"short": 32, "long": 8}


def test_an_idle_tenant_saves_no_credit():
    """A latecomer starts at the present, not at its old account."""
    queue = queue_of()
    for number in range(20):
        queue.add(request(number, "a"))
    for _ in range(10):
        admit_head(queue)
    for number in range(20, 40):
        queue.add(request(number, "b"))
    assert {waiting.key.tenant for waiting in list(queue)[:4]} == {"a", "b"}


def test_a_cancelled_request_is_not_charged():
    """A tenant whose requests were cancelled before admission is as well off as before."""
    queue = queue_of()
    cancelled = [request(number, "a") for number in range(10)]
    queue.add(request(10, "b"))
    for one in cancelled:
        queue.add(one)
    for one in cancelled:
        queue.remove(one)
    queue.add(request(11, "b"))
    queue.add(request(12, "a"))
    assert numbers(queue) == [10, 12, 11]


def test_a_request_cancelled_after_admission_is_charged():
    """Cancelling after a preemption must not give free service."""
    queue = queue_of()
    for number in range(3):
        queue.add(request(number, "a"))
    back = admit_head(queue)
    queue.put_back(back)
    queue.remove(back)
    queue.add(request(3, "a"))
    assert numbers(queue) == [1, 2, 3]
    assert [waiting.start_tag for waiting in queue] == [20, 40, 60]


def test_a_preempted_request_keeps_its_place():
    """It is before its equals that came after it."""
    queue = queue_of()
    for number in range(4):
        queue.add(request(number))
    first = admit_head(queue)
    admit_head(queue)
    queue.put_back(first)
    assert numbers(queue) == [0, 2, 3]


def test_an_empty_queue_clears_all_accounts():
    """Shares matter among requests that wait at the same time."""
    queue = queue_of()
    for number in range(5):
        queue.add(request(number, "a"))
    while queue.head is not None:
        admit_head(queue)
    queue.add(request(5, "a"))
    queue.add(request(6, "b"))
    assert numbers(queue) == [5, 6]
    assert queue._finish_tags.keys() == {"a", "b"}


def test_cancelling_after_the_accounts_were_cleared_is_harmless():
    """A request that outlives the backlog it was charged in is not refunded."""
    queue = queue_of()
    first, second = request(0, "a"), request(1, "a")
    queue.add(first)
    queue.admit(first)
    queue.add(second)
    queue._finish_tags.clear()
    queue.remove(second)
    assert numbers(queue) == []


def test_waiting_sessions_have_ranks():
    """A session's rank is that of its first request; it has none when none waits."""
    queue = queue_of()
    first, other, later = request(0), request(1), request(2, priority=1)
    later.key = first.key
    for one in (first, other, later):
        queue.add(one)
    assert queue.rank(first.key) < queue.rank(other.key)
    queue.remove(later)
    assert queue.rank(first.key) < queue.rank(other.key)
    queue.remove(first)
    assert queue.rank(first.key) is None
    assert numbers(queue) == [1]


def test_the_feed_gets_waiting_and_running_requests():
    """Whatever comes, goes, or comes back."""
    feed = QueueFeed()
    queue, one = WaitingQueue({}, feed), request(0, priority=3, history_tokens=5)

    def news():
        change = feed.next_update(10).change
        feed.on_acknowledge(feed._sequence, send_full=False)
        return list(change.waiting), change.running, change.left

    queue.add(one)
    waits = QueuedRequest((-3, 0.0, 0), one.key, 5)
    assert news() == ([waits], [], [])
    queue.admit(one)
    assert news() == ([], [RunningRequest(0, one.key)], [])
    queue.put_back(one)
    assert news() == ([waits], [], [])
    queue.remove(one)
    assert news() == ([], [], [0])


def test_a_request_that_does_not_wait_cannot_be_removed():
    """The caller's violated invariant is reported."""
    queue = queue_of()
    queue.add(request(0))
    with pytest.raises(ValueError, match="not in list"):
        queue.remove(request(1))
