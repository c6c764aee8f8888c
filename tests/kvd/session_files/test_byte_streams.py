"""Streams are matched with the RPCs that name them; vanished and stalled peers block nothing."""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvd.client.byte_stream import ByteStream, open_stream
from kvd.core.records.errors import InvalidRequestError
from kvd.errors import BrokenTransferError, StalledTransferError
from kvd.host.listening import listen_at
from kvd.host.memory_pipe import PIPE_BYTES, make_memory
from kvd.session_files import byte_streams
from kvd.session_files.byte_streams import ByteStreams
from shared.process.runtime_dir import FILES_SOCKET, OPERATOR_SOCKET, STREAM_TOKEN_BYTES

MUCH = 8 << 20  # more than the kernel buffers per connection


@asynccontextmanager
async def _serving(directory: Path) -> AsyncIterator[ByteStreams]:
    streams = ByteStreams(2)
    with listen_at(directory / FILES_SOCKET, socket.SOCK_SEQPACKET) as listener:
        serving = asyncio.create_task(streams.serve(listener))
        try:
            yield streams
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def _open(directory: Path) -> AsyncIterator[ByteStream]:
    with open_stream(f"unix:{directory / OPERATOR_SOCKET}") as stream:
        assert stream is not None
        yield stream


@asynccontextmanager
async def _both_ends(directory: Path) -> AsyncIterator[tuple[ByteStream, byte_streams.ByteStream]]:
    """Return both ends of a stream."""
    async with (
        _serving(directory) as streams,
        _open(directory) as ours,
        streams.claim(ours.token) as theirs,
    ):
        yield ours, theirs


async def test_bytes_flow_both_ways(tmp_path: Path) -> None:
    """As many as both sides have agreed on."""
    data = secrets.token_bytes(MUCH)
    async with _both_ends(tmp_path) as (ours, theirs):
        receiving = asyncio.to_thread(ours.receive, MUCH)
        received, _ = await asyncio.gather(receiving, theirs.send(memoryview(data)))
        await theirs.finish()
    assert received == data
    memory = bytearray(MUCH)
    async with _both_ends(tmp_path) as (ours, theirs):
        sending = asyncio.to_thread(ours.send, data)
        await asyncio.gather(sending, theirs.receive_into(memoryview(memory)))
    assert memory == data


async def test_an_rpc_may_come_first(tmp_path: Path) -> None:
    """It waits for its own stream, and takes no other one."""
    async with _serving(tmp_path) as streams, _open(tmp_path) as other:
        token = bytes(STREAM_TOKEN_BYTES)

        async def claim() -> None:
            async with streams.claim(token) as stream:
                await stream.send(b"yours")

        claiming = asyncio.create_task(claim())
        async with streams.claim(other.token):
            pass
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
            late.connect(str(tmp_path / FILES_SOCKET))
            memory = make_memory()
            socket.send_fds(late, [token], [memory])
            await claiming
            assert os.pread(memory, 5, 0) == b"yours"
            os.close(memory)


async def test_a_connection_without_memory_is_closed(tmp_path: Path) -> None:
    """Without memory, or with a file that could be cut short during the transfer."""
    async with _serving(tmp_path):
        with (tmp_path / "file").open("w+b") as file:
            file.truncate(PIPE_BYTES)
            for fds in ([], [file.fileno()]):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                    sock.connect(str(tmp_path / FILES_SOCKET))
                    socket.send_fds(sock, [bytes(STREAM_TOKEN_BYTES)], fds)
                    assert await asyncio.to_thread(sock.recv, 1) == b""


async def test_a_token_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The RPC fails; connections that no RPC names are closed after the same time."""
    monkeypatch.setattr(byte_streams, "CLAIM_S", 0.1)
    async with _serving(tmp_path) as streams, _open(tmp_path) as unclaimed:
        with pytest.raises(InvalidRequestError, match="no byte stream"):
            async with streams.claim(b"x"):
                pass
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(unclaimed.receive, 1)
        with pytest.raises(InvalidRequestError):
            async with streams.claim(unclaimed.token):
                pass


async def test_unclaimed_connections_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is closed at once; after one of them is claimed there is room again."""
    monkeypatch.setattr(byte_streams, "MOST_UNCLAIMED", 1)
    async with _serving(tmp_path) as streams, _open(tmp_path) as first:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as more:
            more.connect(str(tmp_path / FILES_SOCKET))
            assert await asyncio.to_thread(more.recv, 1) == b""
        async with (
            streams.claim(first.token),
            _open(tmp_path) as second,
            streams.claim(second.token),
        ):
            pass


async def test_a_vanished_peer_breaks_the_stream(tmp_path: Path) -> None:
    """In both directions."""
    async with _serving(tmp_path) as streams:
        async with _open(tmp_path) as ours:
            stack = streams.claim(ours.token)
            theirs = await stack.__aenter__()
        with pytest.raises(BrokenTransferError, match="transfer it again"):
            await theirs.receive_into(memoryview(bytearray(1)))
        with pytest.raises(BrokenTransferError):
            await theirs.send(bytes(MUCH))
        await stack.__aexit__(None, None, None)


async def test_a_stalled_peer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does not read or does not write."""
    monkeypatch.setattr(byte_streams, "SILENCE_S", 0.1)
    async with _both_ends(tmp_path) as (_, theirs):
        with pytest.raises(StalledTransferError, match=r"0\.1 s"):
            await theirs.receive_into(memoryview(bytearray(1)))
        with pytest.raises(StalledTransferError):
            await theirs.send(bytes(MUCH))


async def test_a_cancelled_call_leaves_no_thread_behind(tmp_path: Path) -> None:
    """It ends when it is cancelled, not when the other side reads."""
    async with _both_ends(tmp_path) as (ours, theirs):
        sending = asyncio.create_task(theirs.send(bytes(MUCH)))
        await asyncio.to_thread(ours.receive, 1)  # it has begun
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(ours.receive, MUCH)


def test_without_a_socket_there_is_no_stream(tmp_path: Path) -> None:
    """An older kvd has none, and neither has a remote one."""
    for address in (f"unix:{tmp_path / OPERATOR_SOCKET}", "gpu-2:9000"):
        with open_stream(address) as stream:
            assert stream is None
