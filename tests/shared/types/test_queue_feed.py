"""The updates of a feed: everything first, then changes; of long queues the head."""

import pytest

from shared.types.queue_delta import (
    QueuedRequest,
    QueueUpdate,
    RunningRequest,
    running_digest,
    update_digest,
    waiting_digest,
)
from shared.types.queue_feed import FEW_CHANGES, QueueFeed
from shared.types.session_key import SessionKey

MANY = 1000


def key_of(number: int) -> SessionKey:
    return SessionKey("t", "0f", f"s{number}")


def wait(feed: QueueFeed, *numbers: int, tag: float = 0.0) -> None:
    for number in numbers:
        feed.on_wait((0, tag, number), key_of(number), 10 * number)


def waiting(*numbers: int, tag: float = 0.0) -> list[QueuedRequest]:
    return [QueuedRequest((0, tag, number), key_of(number), 10 * number) for number in numbers]


def send(
    feed: QueueFeed, most_requests: int = MANY, *, send_full: bool = False
) -> QueueUpdate | None:
    """Send an update, acknowledged at once."""
    feed.check()
    update = feed.next_update(most_requests)
    if update is not None:
        feed.on_acknowledge(update.sequence, send_full=send_full)
    feed.check()
    return update


def news(update: QueueUpdate | None) -> tuple:
    assert update is not None
    change = update.change
    return sorted(change.waiting), sorted(change.running), sorted(change.left)


def test_the_first_update_has_everything_even_if_empty():
    """The other side may have an outdated queue."""
    feed = QueueFeed()
    update = send(feed)
    assert (update.base_sequence, update.digest, news(update)) == (0, 0, ([], [], []))
    assert send(feed) is None


def test_later_updates_have_the_changes():
    """Jobs that joined, started, left, or moved; each update names its base."""
    feed = QueueFeed()
    wait(feed, 1, 2, 3, 4)
    first = send(feed)
    assert news(first) == (waiting(1, 2, 3, 4), [], [])
    wait(feed, 5)
    feed.on_run(1, key_of(1))
    feed.on_leave(2)
    wait(feed, 3, tag=7.0)
    second = send(feed)
    assert (second.base_sequence, second.sequence) == (first.sequence, first.sequence + 1)
    joined = waiting(5) + waiting(3, tag=7.0)
    assert news(second) == (joined, [RunningRequest(1, key_of(1))], [2])


def test_jobs_between_two_updates_are_not_reported():
    """Changes are merged: a job that came and left, or one that ran and is back."""
    feed = QueueFeed()
    wait(feed, 1)
    send(feed)
    wait(feed, 2)
    feed.on_run(1, key_of(1))
    feed.on_leave(2)
    feed.on_leave(77)
    wait(feed, 1)
    assert send(feed) is None


def test_changes_during_an_update_are_part_of_the_next():
    """At most one is in flight; the newest state wins."""
    feed = QueueFeed()
    wait(feed, 1)
    update = feed.next_update(MANY)
    feed.on_run(1, key_of(1))
    with pytest.raises(AssertionError, match="one update at a time"):
        feed.next_update(MANY)
    feed.on_acknowledge(update.sequence, send_full=False)
    assert news(send(feed)) == ([], [RunningRequest(1, key_of(1))], [])


@pytest.mark.parametrize("how", ["asked", "restarted", "another sequence"])
def test_everything_is_sent_again_when_necessary(how):
    """On request, to another receiver, or if the receiver names another base."""
    feed = QueueFeed()
    wait(feed, 1)
    if how == "asked":
        send(feed, send_full=True)
    else:
        update = feed.next_update(MANY)
        if how == "restarted":
            feed.restart()
        else:
            feed.on_acknowledge(update.sequence + 5, send_full=False)
    again = send(feed)
    assert (again.base_sequence, news(again)) == (0, (waiting(1), [], []))


def test_the_digest_covers_the_reported_jobs():
    """It is a sum over the jobs of the head, running ones first."""
    feed = QueueFeed()
    wait(feed, 1, 2, 3)
    feed.on_run(9, key_of(9))
    digests = [
        running_digest(9, key_of(9)),
        waiting_digest((0, 0.0, 1), key_of(1)),
        waiting_digest((0, 0.0, 2), key_of(2)),
    ]
    assert send(feed, 3).digest == update_digest(0, added=sum(digests))
    feed.on_leave(1)
    digests[1] = waiting_digest((0, 0.0, 3), key_of(3))
    assert send(feed, 3).digest == update_digest(0, added=sum(digests))


def test_the_head_of_a_long_queue_is_reported():
    """Jobs that move up join, those pushed out leave, though they still wait."""
    feed = QueueFeed()
    wait(feed, *range(10, 20))
    assert news(send(feed, 3)) == (waiting(10, 11, 12), [], [])
    feed.on_leave(11)
    feed.on_leave(18)
    assert news(send(feed, 3)) == (waiting(13), [], [11])
    wait(feed, 5)
    feed.on_run(10, key_of(10))
    assert news(send(feed, 3)) == (waiting(5), [RunningRequest(10, key_of(10))], [13])
    assert news(send(feed, 5)) == (waiting(13, 14), [], [])
    assert news(send(feed, 4)) == ([], [], [14])


def test_changes_behind_the_head_are_not_reported():
    """Nobody needs to know."""
    feed = QueueFeed()
    wait(feed, *range(10))
    send(feed, 3)
    wait(feed, 20, 21)
    feed.on_leave(8)
    assert send(feed, 3) is None


def test_a_receiver_that_is_away_costs_no_memory():
    """Beyond a useful number of changes everything is sent when it is back."""
    feed = QueueFeed()
    send(feed)
    update = feed.next_update(MANY)
    assert update is None
    wait(feed, 1)
    update = feed.next_update(MANY)
    for number in range(2, 2 * FEW_CHANGES):
        wait(feed, number)
        feed.on_leave(number)
        assert len(feed._changed) <= FEW_CHANGES + 1
    feed.on_acknowledge(update.sequence, send_full=False)
    assert news(send(feed)) == (waiting(1), [], [])
    assert feed._base


def test_listeners_are_notified_of_every_change():
    """So an update is sent soon; leaving twice is one change."""
    feed, heard = QueueFeed(), []
    feed.on_change = lambda: heard.append(len(feed))
    wait(feed, 1, 2)
    feed.on_run(1, key_of(1))
    feed.on_leave(1)
    feed.on_leave(1)
    assert heard == [1, 2, 2, 1]


def test_each_update_has_the_present_interval():
    """As it is then."""
    feed = QueueFeed()
    feed.interval_s = 1.5
    assert send(feed).change.interval_ns == 1_500_000_000
