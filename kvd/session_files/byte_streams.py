"""Byte streams: session files to and from processes on this machine, beside their RPCs.

gRPC copies every byte several times, much of it on the event loop that serves engines. Therefore a
caller on this machine connects to files.sock, sends a random token and the memory of a pipe
(kvd/host/memory_pipe.py), and names the token in its RPC. All data then passes through the pipe;
the RPC's messages announce how many bytes come next. Nothing else passes here: access checks,
errors and the end of a transfer belong to the RPC.
"""

import asyncio
import mmap
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from kvd.core.records.errors import InvalidRequestError
from kvd.errors import BrokenTransferError, StalledTransferError
from kvd.host.listening import accept_connections
from kvd.host.memory_pipe import MemoryPipe, map_memory
from kvd.session_files.in_thread import wait_for_end
from shared.process.packets import close_fds, receive
from shared.process.runtime_dir import STREAM_TOKEN_BYTES

CLAIM_S = 10.0  # between a connection and its RPC, in either order
MOST_UNCLAIMED = 64  # connections that no RPC has claimed
SILENCE_S = 60.0  # the longest time in which the other side neither reads nor writes


class ByteStream:
    """kvd's end of one byte stream. One call at a time, in one direction.

    Args:
        sock: the connection.
        memory: the memory of its pipe.
        threads: the threads in which its calls block.
    """

    def __init__(self, sock: socket.socket, memory: mmap.mmap, threads: ThreadPoolExecutor) -> None:
        self._sock = sock
        self._pipe = MemoryPipe(sock, memory)
        self._threads = threads
        sock.settimeout(SILENCE_S)

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes. The caller may change them afterwards.

        Raises:
            StalledTransferError: the other side does not read.
            BrokenTransferError: the connection has ended.
        """
        await self._call(lambda: self._pipe.write(data))

    async def finish(self) -> None:
        """Wait until the other side has read everything; raises as `send` does."""
        await self._call(self._pipe.finish)

    async def receive_into(self, memory: memoryview) -> None:
        """Fill the memory with received bytes.

        Raises:
            StalledTransferError: the other side does not write.
            BrokenTransferError: the connection has ended.
        """
        await self._call(lambda: self._pipe.read_into(memory))

    async def _call(self, do: Callable[[], None]) -> None:
        work = asyncio.get_running_loop().run_in_executor(self._threads, do)
        try:
            await wait_for_end(work, self._interrupt)
        except TimeoutError as error:
            raise StalledTransferError(
                f"no data of the session file came for {SILENCE_S:g} s", "transfer it again"
            ) from error
        except OSError as error:
            raise BrokenTransferError(
                f"the stream of the session file was interrupted ({error.strerror or error})",
                "transfer it again",
            ) from error

    def _interrupt(self) -> None:
        """Make the call that blocks in a thread fail."""
        with suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class _Offer:
    """A connection that no RPC has claimed yet."""

    sock: socket.socket
    memory: mmap.mmap
    claimed: asyncio.Event = field(default_factory=asyncio.Event)


class ByteStreams:
    """Accepts connections, and keeps each until its RPC claims it.

    Args:
        most: streams in use at once, at most.
    """

    def __init__(self, most: int) -> None:
        self._threads = ThreadPoolExecutor(most, "files")
        self._offers: dict[bytes, _Offer] = {}
        self._changed = asyncio.Condition()
        self._num_unclaimed = 0

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        async with asyncio.TaskGroup() as connections:
            async for sock in accept_connections(listener):
                if self._num_unclaimed < MOST_UNCLAIMED:
                    self._num_unclaimed += 1
                    connections.create_task(self._keep_until_claimed(sock))
                else:
                    sock.close()

    @asynccontextmanager
    async def claim(self, token: bytes) -> AsyncIterator[ByteStream]:
        """Return the stream of a token; close it at the end of the block.

        Raises:
            InvalidRequestError: no connection has sent this token.
        """
        try:
            async with asyncio.timeout(CLAIM_S), self._changed:
                await self._changed.wait_for(lambda: token in self._offers)
                offer = self._offers.pop(token)
        except TimeoutError as error:
            raise InvalidRequestError(
                "no byte stream has this token",
                "connect to files.sock first, and send the token there",
            ) from error
        offer.claimed.set()
        with offer.sock:
            yield ByteStream(offer.sock, offer.memory, self._threads)

    async def _keep_until_claimed(self, sock: socket.socket) -> None:
        """Keep a connection until its RPC claims it, for at most CLAIM_S."""
        token, offer = b"", None
        try:
            async with asyncio.timeout(CLAIM_S):
                token, memory = await _receive_announcement(sock)
                offer = _Offer(sock, memory)
                async with self._changed:
                    self._offers[token] = offer
                    self._changed.notify_all()
                await offer.claimed.wait()
        except (OSError, TimeoutError):
            pass  # the caller has closed it, or no RPC has claimed it in time
        finally:
            self._num_unclaimed -= 1
            if offer is None or not offer.claimed.is_set():
                sock.close()
                if offer is not None and self._offers.get(token) is offer:
                    del self._offers[token]


async def _receive_announcement(sock: socket.socket) -> tuple[bytes, mmap.mmap]:
    """Receive the token and the memory with which a connection begins.

    Raises:
        OSError: it does not begin so, or has ended.
    """
    token, fds = await receive(sock)
    try:
        if len(token) != STREAM_TOKEN_BYTES or len(fds) != 1:
            raise ConnectionResetError("the stream does not begin with a token")
        return token, map_memory(fds[0])
    finally:
        close_fds(fds)
