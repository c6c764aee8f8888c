"""Packets of the data socket."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kvd_client.data_socket_protocol import (
    ArenaMapping,
    ArenaRequest,
    CallSocket,
    CallsRequest,
    Leaving,
    Refused,
    Welcome,
    decode,
    encode,
)
from shared.process.packets import MalformedPacketError


@pytest.mark.parametrize(
    "message",
    [
        Welcome("token"),
        ArenaRequest("ab"),
        ArenaMapping(4096, 3, 7),
        CallsRequest("ab"),
        CallSocket(),
        Leaving(),
        Refused("denied", "no"),
    ],
)
def test_messages_round_trip(message):
    """What is encoded is decoded to the same message."""
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"junk",
        b"[]",
        b"{}",
        b'{"kind": "unknown"}',
        b'{"kind": "arena"}',
        b'{"kind": "arena", "arena_id": 3}',
        b'{"kind": "arena", "arena_id": "a", "more": 1}',
        b'{"kind": "mapping", "slot_bytes": 1, "num_slots": 1}',
        b'{"kind": "mapping", "slot_bytes": -1, "num_slots": 1, "num_words": 1}',
        b'{"kind": "mapping", "slot_bytes": true, "num_slots": 1, "num_words": 1}',
        b'{"kind": "calls"}',
        b'{"kind": "call_socket", "arena_id": "a"}',
        b'{"kind": "leaving", "later": 1}',
        b'{"kind": ["arena"]}',
        b"\xff\xfe",
        b"[" * 4096,
    ],
)
def test_garbage_is_refused(packet):
    """Anything but exactly one message is malformed."""
    with pytest.raises(MalformedPacketError):
        decode(packet)


values = st.one_of(st.integers(), st.text(max_size=8), st.none(), st.floats(), st.lists(st.none()))
objects = st.dictionaries(
    st.sampled_from(["kind", "token", "arena_id", "slot_bytes", "num_slots", "num_words", "more"]),
    st.one_of(
        values, st.sampled_from(["welcome", "arena", "mapping", "calls", "call_socket", "refused"])
    ),
)


@given(st.one_of(st.binary(max_size=300), objects.map(lambda fields: json.dumps(fields).encode())))
def test_any_packet_is_a_message_or_refused(packet):
    """No other exception is raised, and an accepted message is one that could have been sent."""
    try:
        message = decode(packet)
    except MalformedPacketError:
        return
    assert decode(encode(message)) == message
