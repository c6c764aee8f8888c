"""Encoded queue snapshots: they round-trip, and invalid ones are refused."""

import math

import pytest

from kvd.core.eviction.queue_window import QueueWindow
from kvd.core.records.errors import InvalidRequestError
from kvd.rpc.queue_replica import queue_update
from shared.kvd_client.queue_sender import snapshot_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import InvalidInputError
from shared.types.queue_delta import (
    QueuedRequest,
    QueueUpdate,
    RunningRequest,
    update_digest,
    waiting_digest,
)
from shared.types.queue_feed import QueueFeed
from shared.types.session_key import InvalidNameError, SessionKey
from tests.queue_changes import queue_change

MODEL = "0f"
NUMBERS = list(range(4))


def key_of(session_id, tenant="t") -> SessionKey:
    return SessionKey(tenant, MODEL, session_id)


def columns(**changes) -> kvd_pb2.QueueJobs:
    return kvd_pb2.QueueJobs(
        **{"numbers": NUMBERS, "session_ids": [f"s{n}" for n in NUMBERS], **changes}
    )


def decode_snapshot(max_requests=100, **fields) -> QueueUpdate:
    message = kvd_pb2.QueueSnapshot(**{"sequence": 1, **fields})
    return queue_update(
        kvd_pb2.QueueSnapshot.FromString(message.SerializeToString()), MODEL, max_requests
    )


def test_a_snapshot_round_trips():
    """All of it, with several tenants."""
    change = queue_change(
        [
            QueuedRequest((-5, 0.1, 1), key_of("a"), 70),
            QueuedRequest((100, 2.0**60, (1 << 64) - 1), key_of("b", "other"), 0),
        ],
        [RunningRequest(7, key_of("c", "other")), RunningRequest(8, key_of("a"))],
        [3, 1 << 40],
        1_500_000_000,
    )
    update = QueueUpdate(9, 8, change, (1 << 64) - 1)
    message = snapshot_message(5, update).SerializeToString()
    assert queue_update(kvd_pb2.QueueSnapshot.FromString(message), MODEL, 100) == update


def test_omitted_columns_have_defaults():
    """One tenant, the default one, and the order of the numbers."""
    requests = decode_snapshot(waiting=columns()).change.waiting
    assert list(requests)[2] == QueuedRequest((0, 0.0, 2), key_of("s2", "default"), 0)


def reported(feed: QueueFeed) -> kvd_pb2.QueueSnapshot:
    """Return the message of a feed's next update."""
    update = feed.next_update(100)
    feed.on_acknowledge(update.sequence, send_full=False)
    return snapshot_message(5, update)


def feed_of(*keys: SessionKey, priority: int = 0) -> QueueFeed:
    feed = QueueFeed()
    for number, key in enumerate(keys):
        feed.on_wait((-priority, number / 3, number), key, 10 * number)
    return feed


@pytest.mark.parametrize("priority", [0, -2])
@pytest.mark.parametrize("tenants", ["ttt", "tut"])
def test_a_column_of_defaults_is_omitted(tenants, priority):
    """The tenants if there is one, the priorities if all are 0; the queue stays the same."""
    keys = [key_of(f"s{number}", tenant) for number, tenant in enumerate(tenants)]
    message = reported(feed_of(*keys, priority=priority))
    assert list(message.waiting.tenants) == ([] if tenants == "ttt" else [0, 1, 0])
    assert list(message.waiting.priorities) == ([] if priority == 0 else [priority] * 3)
    assert list(message.waiting.session_ids) == ["s0", "s1", "s2"]
    waiting = queue_update(message, MODEL, 100).change.waiting
    ranks = [(-priority, number / 3, number) for number in range(3)]
    assert list(waiting) == [
        QueuedRequest(rank, key, 10 * rank[2]) for rank, key in zip(ranks, keys, strict=True)
    ]


def test_the_sum_of_the_digests_comes_with_the_requests():
    """A queue without it, of an older engine, has the same digest in kvd."""
    feed = feed_of(key_of("a"), key_of("b", "u"), key_of("c"))
    feed.on_run(7, key_of("d"))
    message = reported(feed)
    update = queue_update(message, MODEL, 100)
    digests = [waiting_digest(one.rank, one.key) for one in update.change.waiting]
    assert update.change.waiting.digest == update_digest(0, added=sum(digests))
    message.waiting.ClearField("digest")
    message.waiting.ClearField("checksum")
    older = queue_update(message, MODEL, 100)
    assert older.change.waiting.digest == 0
    for queue in (update.change, older.change):
        window = QueueWindow(lambda _keys, _unqueued: None)
        assert window.replace(5, queue, 0) == message.digest
        window.check()


@pytest.mark.parametrize(
    "change",
    [
        {"digest": 1},
        {"checksum": 0},
        {"numbers": [0, 2, 1]},
        {"numbers": [3, 1, 2]},
        {"session_ids": ["a", "c", "b"]},
        {"priorities": [0, 0, 1]},
        {"start_tags": [0.0, 1.0, 2.0]},
        {"tenants": [0, 0, 0]},
    ],
)
def test_requests_that_do_not_match_their_checksum_are_refused(change):
    """As with a wrong digest: kvd and the engine understand the columns differently."""
    message = reported(feed_of(key_of("a"), key_of("b", "u"), key_of("c")))
    assert queue_update(message, MODEL, 100)
    for name in change:
        message.waiting.ClearField(name)
    message.waiting.MergeFrom(kvd_pb2.QueueJobs(**change))
    with pytest.raises(InvalidRequestError, match="same release"):
        queue_update(message, MODEL, 100)


@pytest.mark.parametrize(
    "fields",
    [
        {"waiting": columns(numbers=[1, 1, 2, 3])},
        {"waiting": columns(), "running": columns(session_ids=["a", "b", "c", "d"])},
        {"waiting": columns(), "left": [3], "base_sequence": 1},
        {"left": [3]},
        {"waiting": columns(numbers=[1])},
        {"waiting": columns(session_ids=["a"])},
        {"waiting": columns(start_tags=[1.0])},
        {"waiting": columns(priorities=[1] * 5)},
        {"waiting": columns(history_tokens=[1])},
        {"waiting": columns(tenants=[0, 0, 0])},
        {"running": columns(tenants=[0, 0, 0, 1]), "tenants": ["a"]},
        {"waiting": columns(start_tags=[0, 0, 0, math.nan])},
        {"waiting": columns(start_tags=[0, 0, 0, math.inf])},
        {"waiting": columns(start_tags=[0, -1, 0, 0])},
        {"start_interval_s": -1.0},
        {"start_interval_s": math.nan},
        {"start_interval_s": 1e300},
        {"waiting": columns(), "max_requests": 3},
        {"left": NUMBERS, "base_sequence": 1, "max_requests": 3},
    ],
)
def test_invalid_snapshots_are_refused(fields):
    """With the error and the remedy, in one line."""
    with pytest.raises(InvalidRequestError) as refused:
        decode_snapshot(**fields)
    assert refused.value.remedy
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "names",
    [["", "b", "c", "d"], ["a", "b\nc", "c", "d"], ["a", "b", "c", "d\n"], ["-", "b", "c", "d"]],
)
def test_session_names_are_checked(names):
    """As everywhere; the tenant's, too."""
    with pytest.raises(InvalidNameError):
        decode_snapshot(waiting=columns(session_ids=names))
    with pytest.raises(InvalidInputError):
        decode_snapshot(running=columns(tenants=NUMBERS), tenants=["a", "b", "c", "../d"])
