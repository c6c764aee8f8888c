"""Encoded queue snapshots: they round-trip, and invalid ones are refused."""

import math

import pytest

from kvd.core.records.errors import InvalidRequestError
from kvd.rpc.queue_replica import queue_update
from shared.kvd_client.queue_sender import snapshot_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import InvalidInputError
from shared.types.queue_delta import QueueChange, QueuedRequest, QueueUpdate, RunningRequest
from shared.types.session_key import InvalidNameError, SessionKey

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
    change = QueueChange(
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
    assert requests[2] == QueuedRequest((0, 0.0, 2), key_of("s2", "default"), 0)


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
