"""What a feed reports: all once, then what has changed; of long queues the head."""

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
    """An update, acknowledged at once."""
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


def test_all_is_told_first_even_if_it_is_nothing():
    """The other side may have something that is not so."""
    feed = QueueFeed()
    update = send(feed)
    assert (update.base_sequence, update.digest, news(update)) == (0, 0, ([], [], []))
    assert send(feed) is None


def test_then_what_has_changed():
    """Jobs that joined, started, left, and stand elsewhere; each update names its base."""
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


def test_what_comes_and_goes_between_two_updates_is_never_told():
    """Changes are coalesced: a job that came and left, one that ran and is where it was."""
    feed = QueueFeed()
    wait(feed, 1)
    send(feed)
    wait(feed, 2)
    feed.on_run(1, key_of(1))
    feed.on_leave(2)
    feed.on_leave(77)
    wait(feed, 1)
    assert send(feed) is None


def test_changes_while_an_update_is_in_flight_go_with_the_next():
    """One is on its way at most; the newest state wins."""
    feed = QueueFeed()
    wait(feed, 1)
    update = feed.next_update(MANY)
    feed.on_run(1, key_of(1))
    with pytest.raises(AssertionError, match="one update at a time"):
        feed.next_update(MANY)
    feed.on_acknowledge(update.sequence, send_full=False)
    assert news(send(feed)) == ([], [RunningRequest(1, key_of(1))], [])


@pytest.mark.parametrize("how", ["asked", "restarted", "another sequence"])
def test_all_is_told_again(how):
    """When the other side asks for it, when it is another one, when it speaks of something else."""
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


def test_the_digest_is_that_of_what_is_told():
    """A sum over the jobs of the head, those that run first."""
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


def test_of_a_long_queue_the_head_is_told():
    """What moves up into it joins, what is pushed out of it leaves, though it waits still."""
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


def test_changes_behind_the_head_are_not_told():
    """Nobody needs to know."""
    feed = QueueFeed()
    wait(feed, *range(10))
    send(feed, 3)
    wait(feed, 20, 21)
    feed.on_leave(8)
    assert send(feed, 3) is None


def test_a_side_that_does_not_listen_costs_no_memory():
    """Beyond what is worth reporting as a change, all is reported when it listens again."""
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


def test_who_listens_hears_of_every_change():
    """So that an update is sent soon; leaving twice is one change."""
    feed, heard = QueueFeed(), []
    feed.on_change = lambda: heard.append(len(feed))
    wait(feed, 1, 2)
    feed.on_run(1, key_of(1))
    feed.on_leave(1)
    feed.on_leave(1)
    assert heard == [1, 2, 2, 1]


def test_the_interval_goes_with_each_update():
    """As it is then."""
    feed = QueueFeed()
    feed.interval_s = 1.5
    assert send(feed).change.interval_ns == 1_500_000_000
