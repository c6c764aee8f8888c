"""Packets of the data socket."""

import pytest

from shared.data_socket_protocol import (
    ArenaMapping,
    ArenaRequest,
    MalformedPacketError,
    Refused,
    Welcome,
    decode,
    encode,
)


@pytest.mark.parametrize(
    "message",
    [Welcome("token"), ArenaRequest("ab"), ArenaMapping(4096, 3), Refused("denied", "no")],
)
def test_messages_survive_the_way(message):
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
        b'{"kind": "mapping", "slot_bytes": -1, "num_slots": 1}',
        b'{"kind": "mapping", "slot_bytes": true, "num_slots": 1}',
        b'{"kind": ["arena"]}',
        b"\xff\xfe",
    ],
)
def test_junk_is_refused(packet):
    """Anything but exactly one message is malformed."""
    with pytest.raises(MalformedPacketError):
        decode(packet)
