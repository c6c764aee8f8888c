"""The data socket: tokens, bounds, and the end of a connection."""

import asyncio
import os
import socket
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvd.engines.data_socket import DataSocket, EngineUsers
from kvd.errors import AttachDeniedError
from kvd.host.listening import listen_at
from kvd.tiers.arena_store import ArenaOptions, ArenaStore
from shared.kvd_client import data_socket_protocol as packets
from shared.kvd_client.arena_map import ProgressWords, lease_bits
from shared.process.packets import close_fds, receive
from shared.types.histogram import Tally
from tests.synthetic_engine import small_layout
from tests.until import until

# Connects, leaves the connection to a child that outlives it, and waits to be killed.
LEAVING_PROCESS = """
import os, sys, time
from shared.kvd_client import data_socket_protocol as packets
sock = packets.connect(sys.argv[1])
os.set_inheritable(sock.fileno(), True)
child = os.fork()
if child == 0:
    os.close(1)  # the test waits for the end of what it reads
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


@asynccontextmanager
async def _serving(tmp_path, max_connections=4, refused=None):
    data_socket = DataSocket(EngineUsers(), max_connections, refused)
    gone = []
    with listen_at(tmp_path / "data.sock", socket.SOCK_SEQPACKET) as listener:
        serving = asyncio.create_task(data_socket.serve(listener, gone.append))
        try:
            yield data_socket, gone
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def _receive(sock):
    packet, fds = await receive(sock)
    return packets.decode(packet), fds


def _connect(tmp_path):
    return packets.connect(str(tmp_path / "data.sock"))


async def test_a_token_is_claimed_once(tmp_path):
    """The token names its process, once; a forged one names none."""
    async with _serving(tmp_path) as (data_socket, _):
        with _connect(tmp_path) as sock:
            welcome, _ = await _receive(sock)
            assert data_socket.claim(welcome.token).pid == os.getpid()
            for token in (welcome.token, "forged", ""):
                with pytest.raises(AttachDeniedError):
                    data_socket.claim(token)


async def test_the_arena_is_given_after_attach(tmp_path):
    """Before Attach has named an arena none is sent; afterwards its descriptors are."""
    arena = ArenaStore(ArenaOptions(), tmp_path, num_words=4).create(small_layout(), 2)
    request = packets.ArenaRequest(arena.arena_id)
    async with _serving(tmp_path) as (data_socket, _):
        with _connect(tmp_path) as early:
            await _receive(early)
            packets.send(early, request)
            refused, fds = await _receive(early)
            assert isinstance(refused, packets.Refused)
            assert not fds
        with _connect(tmp_path) as sock:
            welcome, _ = await _receive(sock)
            connection = data_socket.claim(welcome.token)
            connection.arena = arena
            packets.send(sock, request)
            mapping, fds = await _receive(sock)
            slots_fd, progress_fd, wakeup_fd = fds
            assert mapping == packets.ArenaMapping(arena.slots.slot_bytes, 2, 4)
            assert os.fstat(slots_fd).st_ino == os.fstat(arena.fd).st_ino
            words = ProgressWords(progress_fd, 4)
            index = arena.progress.open(77, connection.wakeup.wake)
            arena.progress.publish(77, 3)
            assert (lease_bits(words.word(index)), words.word(index) & 0xFFFF) == (77, 3)
            assert os.read(wakeup_fd, 8) == b"w"
            close_fds(fds)
    arena.close()


@asynccontextmanager
async def _attached(tmp_path, data_socket):
    """Connect and attach; yield the socket, its connection, and a request for an arena."""
    arena = ArenaStore(ArenaOptions(), tmp_path, num_words=4).create(small_layout(), 2)
    with _connect(tmp_path) as sock:
        welcome, _ = await _receive(sock)
        connection = data_socket.claim(welcome.token)
        connection.arena = arena
        yield sock, connection
    arena.close()


async def test_a_socket_for_calls_is_given_once_after_attach(tmp_path):
    """Earlier, again, or where there are none the request ends the connection."""
    ended = asyncio.Event()

    async def serve_calls(sock):
        with sock:
            await ended.wait()

    async with _serving(tmp_path) as (data_socket, gone):
        data_socket.serve_calls = serve_calls
        with _connect(tmp_path) as early:
            await _receive(early)
            packets.send(early, packets.CallsRequest("ab"))
            assert isinstance((await _receive(early))[0], packets.Refused)
            assert (await receive(early))[0] == b""
        async with _attached(tmp_path, data_socket) as (sock, connection):
            request = packets.CallsRequest(connection.arena.arena_id)
            packets.send(sock, request)
            answer, fds = await _receive(sock)
            assert answer == packets.CallSocket()
            with socket.socket(fileno=fds[0]) as calls:
                assert (calls.family, calls.type) == (socket.AF_UNIX, socket.SOCK_STREAM)
                ended.set()
                assert not await asyncio.wait_for(connection.calls, 30)
                assert calls.recv(1) == b""
            packets.send(sock, request)  # one that has ended is not replaced either
            assert isinstance((await _receive(sock))[0], packets.Refused)
            assert (await receive(sock))[0] == b""
        data_socket.serve_calls = None
        async with _attached(tmp_path, data_socket) as (sock, connection):
            packets.send(sock, packets.CallsRequest(connection.arena.arena_id))
            assert isinstance((await _receive(sock))[0], packets.Refused)
            assert (await receive(sock))[0] == b""
        await until(lambda: len(gone) == 3)


@pytest.mark.parametrize("who", ["engine", "kvd"])
async def test_calls_end_with_the_connection(tmp_path, who):
    """It is over only when they are: none of them runs after kvd has stopped serving."""
    steps = []

    async def serve_calls(sock):
        with sock:
            try:
                await asyncio.Event().wait()
            finally:
                steps.append("cancelled")
                for _ in range(100):
                    await asyncio.sleep(0)
                steps.append("ended")

    async with AsyncExitStack() as connected:
        async with _serving(tmp_path) as (data_socket, gone):
            data_socket.serve_calls = serve_calls
            attaching = _attached(tmp_path, data_socket)
            sock, connection = await connected.enter_async_context(attaching)
            packets.send(sock, packets.CallsRequest(connection.arena.arena_id))
            _, fds = await _receive(sock)
            if who == "engine":
                await connected.aclose()
                await until(lambda: gone and connection.calls.done())
        assert steps == ["cancelled", "ended"]
    with socket.socket(fileno=fds[0]) as calls:
        assert calls.recv(1) == b""


async def test_a_closed_connection_does_not_mean_a_dead_process(tmp_path):
    """It may still be writing, unless it has announced its exit."""
    async with _serving(tmp_path) as (_, gone):
        for goodbyes in ((), (packets.Leaving(),)):
            with _connect(tmp_path) as sock:
                await _receive(sock)
                for goodbye in goodbyes:
                    packets.send(sock, goodbye)
        await until(lambda: len(gone) == 2)
        assert sorted(connection.has_left for connection in gone) == [False, True]


async def test_descriptors_are_closed(tmp_path):
    """However many connections come and go."""

    def num_open():
        return len(list(Path("/proc/self/fd").iterdir()))

    async def visit():
        with _connect(tmp_path) as sock:
            await _receive(sock)

    async with _serving(tmp_path) as (_, gone):
        await visit()
        await until(lambda: len(gone) == 1)
        await asyncio.sleep(0)
        before = num_open()
        for _ in range(20):
            await visit()
        await until(lambda: len(gone) == 21)
        await asyncio.sleep(0)
        assert num_open() <= before  # fewer: what earlier tests had left


async def test_a_closed_connection_is_reported(tmp_path):
    """Once, and its token is invalid afterwards."""
    async with _serving(tmp_path) as (data_socket, gone):
        sock = _connect(tmp_path)
        welcome, _ = await _receive(sock)
        claimed_sock = _connect(tmp_path)
        connection = data_socket.claim((await _receive(claimed_sock))[0].token)
        sock.close()
        claimed_sock.close()
        await asyncio.wait_for(connection.gone.wait(), 30)
        await until(lambda: len(gone) == 2)
        with pytest.raises(AttachDeniedError):
            data_socket.claim(welcome.token)


async def test_a_dead_process_is_reported_though_its_connection_lives(tmp_path):
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
        await until(lambda: gone)
        assert gone[0].pid == process.pid
        assert not gone[0].may_still_write
        os.kill(child, 9)


async def test_peers_are_bounded(tmp_path):
    """One too many is refused, and counted by its user; when another leaves there is room again."""
    counted = Tally()
    async with _serving(tmp_path, max_connections=1, refused=counted) as (_, gone):
        first = _connect(tmp_path)
        await _receive(first)
        with _connect(tmp_path) as second:
            refused, _ = await _receive(second)
        assert refused.reason == "limit_reached"
        assert counted.counts == {("limit_reached", f"uid {os.geteuid()}"): 1}
        first.close()
        await until(lambda: gone)
        with _connect(tmp_path) as third:
            assert isinstance((await _receive(third))[0], packets.Welcome)


async def test_connections_that_never_attach_leave_room(tmp_path):
    """A user's take half of the places at most; attaching frees a connection's place among them."""
    async with _serving(tmp_path, max_connections=4) as (data_socket, _):
        socks = [_connect(tmp_path) for _ in range(3)]
        first, _, refused = [(await _receive(sock))[0] for sock in socks]
        assert refused.reason == "limit_reached"
        data_socket.claim(first.token)
        with _connect(tmp_path) as another:
            assert isinstance((await _receive(another))[0], packets.Welcome)
        for sock in socks:
            sock.close()
