"""An attachment's socket for calls: it is asked for where there is one, and ends with it."""

import asyncio
import os
import socket
from contextlib import asynccontextmanager

import grpc
import pytest

from shared.kvd_client import data_socket_protocol as packets
from shared.kvd_client.attachment import KvdUnavailableError, _open_calls
from shared.kvd_client.client import KvdClient
from shared.kvd_client.grants import KvdProtocolError
from tests.small_kvd import SmallKvd, small_kvd
from tests.synthetic_engine import encode, key_of, small_layout
from tests.until import until

LAYOUT = small_layout()
KEY = key_of("s")
TOKENS = encode(range(16))


@asynccontextmanager
async def attached(directory):
    """Yield a client that is attached."""
    client = KvdClient(directory, LAYOUT, "test", reconnect_delay_s=0.02)
    running = asyncio.create_task(client.run())
    try:
        await client.wait_attached(30)
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_calls_go_over_the_socket(tmp_path):
    """All but the streams."""
    async with small_kvd(tmp_path, LAYOUT) as kvd, attached(tmp_path) as client:
        grant = await client.prepare_store(KEY, TOKENS, 0, 5)
        assert await client.complete_store(grant, success=True) == 16
        assert kvd.completed == [(grant.lease_id, True)]
        assert client._attachment.local._last_number == 2


async def test_an_older_kvd_is_called_over_grpc(tmp_path, monkeypatch):
    """It is not even asked for a socket, which it would take for a breach of the protocol."""
    monkeypatch.setattr(SmallKvd, "offers_local_calls", False)
    async with small_kvd(tmp_path, LAYOUT) as kvd, attached(tmp_path) as client:
        grant = await client.prepare_store(KEY, TOKENS, 0, 5)
        assert await client.complete_store(grant, success=True) == 16
        assert kvd.completed == [(grant.lease_id, True)]
        assert (client._attachment.local, kvd.connection.calls) == (None, None)
        assert len(kvd.attaches) == 1


async def test_the_end_of_the_socket_ends_the_attachment(tmp_path):
    """Calls that are under way fail; the next attachment has a socket of its own, and the store."""
    async with small_kvd(tmp_path, LAYOUT) as kvd, attached(tmp_path) as client:
        grant = await client.prepare_store(KEY, TOKENS, 0, 5)
        kvd.mute.add("EndSession")
        ending = asyncio.create_task(client.end_session(key_of("e")))
        await until(lambda: kvd.unanswered)
        kvd.mute.clear()
        kvd.connection.calls.cancel()
        with pytest.raises(KvdUnavailableError):
            await ending
        await until(lambda: kvd.ended == ["e"])  # reported again
        await until(lambda: len(kvd.gone) == 1)
        await client.wait_attached(30)
        assert [list(one.held_leases) for one in kvd.attaches] == [[], [grant.lease_id]]
        assert await client.complete_store(grant, success=True) == 16


async def test_a_client_that_ends_closes_the_socket(tmp_path):
    """By itself: a kvd that hangs does not notice the end of the data connection."""
    async with small_kvd(tmp_path, LAYOUT) as kvd:
        async with attached(tmp_path) as client:
            await client.prepare_store(KEY, TOKENS, 0, 5)  # so it does not say that it leaves
            local = client._attachment.local
            data = client._attachment.data.dup()
        with data:
            assert local._frames._transport.is_closing()
            assert not kvd.gone


@pytest.mark.parametrize(
    ("answer", "num_fds"),
    [
        (packets.Leaving(), 1),
        (packets.CallSocket(), 0),
        (packets.CallSocket(), 1),
        (packets.CallSocket(), 2),
    ],
    ids=["another packet", "nothing", "a pipe", "two pipes"],
)
async def test_another_answer_than_a_socket_is_refused(answer, num_fds):
    """No descriptor is left: the pipe ends."""
    ours, kvds = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
    with ours, kvds:
        ours.setblocking(False)
        packets.send(kvds, answer, [write_fd] * num_fds)
        os.close(write_fd)
        async with grpc.aio.insecure_channel("unix:/without/streams") as streams:
            with pytest.raises(KvdProtocolError):
                await _open_calls(ours, "arena", streams)
        assert packets.decode(kvds.recv(1000)) == packets.CallsRequest("arena")
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
