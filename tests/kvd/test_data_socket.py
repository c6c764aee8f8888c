"""The data socket: tokens, bounds, and the end of a peer."""

import asyncio
import os
import sys
from contextlib import asynccontextmanager

import pytest

from kvd.data_socket import DataSocket
from kvd.errors import AttachDeniedError, UnusableSocketError
from kvd.tiers.dram import create_arena
from shared import data_socket_protocol as packets
from shared import seqpacket

# Connects, leaves the connection to a child that outlives it, and waits to be killed.
LEAVING_PROCESS = """
import os, sys, time
from shared import seqpacket
sock = seqpacket.connect(sys.argv[1])
os.set_inheritable(sock.fileno(), True)
child = os.fork()
if child == 0:
    os.close(1)  # the test waits for the end of what it reads
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


@asynccontextmanager
async def _serving(tmp_path, max_peers=4):
    data_socket = DataSocket(tmp_path / "data.sock", (), max_peers)
    gone = []
    with data_socket.listen(0o660) as listener:
        serving = asyncio.create_task(data_socket.serve(listener, gone.append))
        try:
            yield data_socket, gone
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def _received(sock):
    packet, fds = await seqpacket.receive(sock)
    return packets.decode(packet), fds


def _connect(tmp_path):
    return seqpacket.connect(str(tmp_path / "data.sock"))


async def _until(is_so):
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0)


async def test_a_token_is_claimed_once(tmp_path):
    """The token names its process, once; a forged one names nobody."""
    async with _serving(tmp_path) as (data_socket, _):
        with _connect(tmp_path) as sock:
            welcome, _ = await _received(sock)
            assert data_socket.claim(welcome.token).pid == os.getpid()
            for token in (welcome.token, "forged", ""):
                with pytest.raises(AttachDeniedError):
                    data_socket.claim(token)


async def test_the_arena_is_given_after_attach(tmp_path):
    """Before Attach has named an arena nobody gets it; afterwards its descriptor comes along."""
    arena = create_arena("mine", 4096, 2)
    async with _serving(tmp_path) as (data_socket, _):
        request = packets.encode(packets.ArenaRequest("mine"))
        with _connect(tmp_path) as early:
            await _received(early)
            seqpacket.send(early, request)
            refused, fds = await _received(early)
            assert isinstance(refused, packets.Refused)
            assert not fds
        with _connect(tmp_path) as sock:
            welcome, _ = await _received(sock)
            data_socket.claim(welcome.token).arena = arena
            seqpacket.send(sock, request)
            mapping, (fd,) = await _received(sock)
            assert mapping == packets.ArenaMapping(4096, 2)
            assert os.fstat(fd).st_ino == os.fstat(arena.fd).st_ino
            os.close(fd)
    arena.close()


async def test_a_closed_connection_is_a_gone_peer(tmp_path):
    """Its end is told once, and its token is worth nothing any more."""
    async with _serving(tmp_path) as (data_socket, gone):
        sock = _connect(tmp_path)
        welcome, _ = await _received(sock)
        claimed_sock = _connect(tmp_path)
        peer = data_socket.claim((await _received(claimed_sock))[0].token)
        sock.close()
        claimed_sock.close()
        await asyncio.wait_for(peer.gone.wait(), 30)
        await _until(lambda: len(gone) == 2)
        with pytest.raises(AttachDeniedError):
            data_socket.claim(welcome.token)


async def test_a_dead_process_is_gone_though_its_connection_lives(tmp_path):
    """A child that inherited the connection does not keep the engine alive."""
    async with _serving(tmp_path) as (_, gone):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LEAVING_PROCESS, str(tmp_path / "data.sock")),
            stdout=asyncio.subprocess.PIPE,
        )
        child = int(await process.stdout.readline())
        assert not gone
        process.kill()
        await process.wait()
        await _until(lambda: gone)
        assert gone[0].pid == process.pid
        os.kill(child, 9)


async def test_peers_are_bounded(tmp_path):
    """One too many is told so; when another leaves there is room again."""
    async with _serving(tmp_path, max_peers=1) as (_, gone):
        first = _connect(tmp_path)
        await _received(first)
        with _connect(tmp_path) as second:
            refused, _ = await _received(second)
        assert refused.reason == "limit_reached"
        first.close()
        await _until(lambda: gone)
        with _connect(tmp_path) as third:
            assert isinstance((await _received(third))[0], packets.Welcome)


def test_a_path_that_cannot_be_bound(tmp_path):
    """The error names the option."""
    with pytest.raises(UnusableSocketError, match="--runtime-dir"):
        DataSocket(tmp_path / "no" / "data.sock", (), 1).listen(0o660)
