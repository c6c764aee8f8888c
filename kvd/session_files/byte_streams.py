"""Byte streams: how session files reach processes of this machine, beside their RPCs.

gRPC copies every byte several times, much of it on the event loop that serves engines. So a caller
on this machine connects to files.sock, sends a token that it has drawn and the memory of a pipe
(kvd/host/memory_pipe.py), and names the token in its RPC: all data then comes through the pipe, and
the RPC's messages say how many bytes come next. Nothing else travels here: the RPC is what is
allowed or refused, fails, and ends.
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
from kvd.session_files.in_thread import finished
from shared.process.packets import close_fds, receive
from shared.process.runtime_dir import STREAM_TOKEN_BYTES

CLAIM_S = 10.0  # between a connection and its RPC, whichever comes first
MOST_UNCLAIMED = 64  # connections
SILENCE_S = 60.0  # for which the other side may neither read nor write


class ByteStream:
    """One connection, which the other side has opened. One call at a time, in one direction.

    Args:
        sock: the connection.
        memory: of its pipe.
        threads: where its calls wait.
    """

    def __init__(self, sock: socket.socket, memory: mmap.mmap, threads: ThreadPoolExecutor) -> None:
        self._sock = sock
        self._pipe = MemoryPipe(sock, memory)
        self._threads = threads
        sock.settimeout(SILENCE_S)

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes; they may change afterwards.

        Raises:
            StalledTransferError: the other side does not read.
            BrokenTransferError: it has gone.
        """
        await self._call(lambda: self._pipe.write(data))

    async def finish(self) -> None:
        """Wait until the other side has everything; raises as `send` does."""
        await self._call(self._pipe.finish)

    async def receive_into(self, memory: memoryview) -> None:
        """Receive as many bytes as there is memory for.

        Raises:
            StalledTransferError: the other side does not write.
            BrokenTransferError: it has gone.
        """
        await self._call(lambda: self._pipe.read_into(memory))

    async def _call(self, do: Callable[[], None]) -> None:
        work = asyncio.get_running_loop().run_in_executor(self._threads, do)
        try:
            await finished(work, self._interrupt)
        except TimeoutError as error:
            raise StalledTransferError(
                f"the stream of a session file stood still for {SILENCE_S:g} s", "transfer it again"
            ) from error
        except OSError as error:
            raise BrokenTransferError(
                f"the stream of a session file broke off ({error.strerror or error})",
                "transfer it again",
            ) from error

    def _interrupt(self) -> None:
        """Have the call that waits in its thread fail."""
        with suppress(OSError):  # it has ended by itself
            self._sock.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class _Offer:
    """A connection that nobody uses yet."""

    sock: socket.socket
    memory: mmap.mmap
    claimed: asyncio.Event = field(default_factory=asyncio.Event)


class ByteStreams:
    """Accepts connections, and keeps each until its RPC claims it.

    Args:
        most: streams that are used at once.
    """

    def __init__(self, most: int) -> None:
        self._threads = ThreadPoolExecutor(most, "files")
        self._offers: dict[bytes, _Offer] = {}
        self._changed = asyncio.Condition()
        self._num_unclaimed = 0

    async def serve(self, listener: socket.socket) -> None:
        """Accept until cancelled."""
        async with asyncio.TaskGroup() as connections:
            async for sock in accept_connections(listener):
                if self._num_unclaimed < MOST_UNCLAIMED:
                    self._num_unclaimed += 1
                    connections.create_task(self._keep(sock))
                else:
                    sock.close()

    @asynccontextmanager
    async def claim(self, token: bytes) -> AsyncIterator[ByteStream]:
        """Take the connection of a token; it is closed on leaving.

        Raises:
            InvalidRequestError: there is none.
        """
        try:
            async with asyncio.timeout(CLAIM_S), self._changed:
                await self._changed.wait_for(lambda: token in self._offers)
                offer = self._offers.pop(token)
        except TimeoutError as error:
            raise InvalidRequestError(
                "no byte stream has this token", "connect to files.sock first, and send it"
            ) from error
        offer.claimed.set()
        with offer.sock:
            yield ByteStream(offer.sock, offer.memory, self._threads)

    async def _keep(self, sock: socket.socket) -> None:
        """Keep a connection until its RPC claims it, for a while."""
        token, offer = b"", None
        try:
            async with asyncio.timeout(CLAIM_S):
                token, memory = await _announced(sock)
                offer = _Offer(sock, memory)
                async with self._changed:
                    self._offers[token] = offer
                    self._changed.notify_all()
                await offer.claimed.wait()
        except (OSError, TimeoutError):
            pass  # it has gone, or nobody wants it
        finally:
            self._num_unclaimed -= 1
            if offer is None or not offer.claimed.is_set():
                sock.close()
                if offer is not None and self._offers.get(token) is offer:
                    del self._offers[token]


async def _announced(sock: socket.socket) -> tuple[bytes, mmap.mmap]:
    """Receive the token and the memory that a connection begins with.

    Raises:
        OSError: it begins otherwise.
    """
    token, fds = await receive(sock)
    try:
        if len(token) != STREAM_TOKEN_BYTES or len(fds) != 1:
            raise ConnectionResetError("it begins with no token")
        return token, map_memory(fds[0])
    finally:
        close_fds(fds)
