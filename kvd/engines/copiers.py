"""The copiers of kvd: one process per GPU, started when the first engine requests a channel.

A copier that does not answer is killed. Its engines then copy themselves, and request a new
channel. A channel is over once its copier has reported it or is dead. Until then the copier may
copy into slots, even if the engine is gone.
"""

import asyncio
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from kvd.copier.control import (
    CONTROL,
    Close,
    Closed,
    Failed,
    Forget,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Ready,
    Unusable,
)
from shared.process.log import get_logger
from shared.process.packets import MalformedPacketError, close_fds, receive
from shared.types.errors import UnavailableError

if TYPE_CHECKING:
    from kvd.tiers.arena import Arena

MAX_COPIERS = 16
READY_S = 60.0  # from the start to the first answer: waking a GPU takes seconds
PING_S = 2.0  # between pings
SILENCE_S = 10.0  # a copier without an answer for so long is killed
_DEVICE = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

log = get_logger(__name__)


class NoCopierError(UnavailableError):
    """There is no copier for an engine, which has to copy itself."""

    reason = "no_copier"


class OpenChannel:
    """A channel between an engine and a copier, as kvd knows it.

    Attributes:
        is_over: whether the copier copies nothing for it any more.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        """Create an open channel.

        Args:
            end: asks the copier to close the channel.
        """
        self.is_over = False
        self._end = end
        self._callbacks: list[Callable[[], None]] = []

    def end(self, callback: Callable[[], None]) -> None:
        """End the channel of an engine that is gone; call `callback` once it is over."""
        if self.is_over:
            callback()
            return
        self._callbacks.append(callback)
        self._end()

    def mark_over(self) -> None:
        """Record that the copier copies nothing for the channel any more."""
        if self.is_over:
            return
        self.is_over = True
        for callback in self._callbacks:
            callback()


class Copiers:
    """The copiers of one kvd. Its methods are called on the event loop.

    Attributes:
        num_failed: copiers that ended by themselves, or had to be killed.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        """Start no copier yet.

        Args:
            is_enabled: whether copiers may be started.
        """
        self.num_failed = 0
        self._is_enabled = is_enabled
        self._copiers: dict[str, _CopierProcess] = {}
        self._dead_totals = Pong(0, 0, 0, 0)  # totals of copiers that are dead

    async def open(
        self, device: str, arena: "Arena", ring_fd: int, ring_bytes: int
    ) -> tuple[OpenChannel, socket.socket, int]:
        """Open a channel for an engine.

        Args:
            device: UUID of the engine's GPU.
            arena: arena whose slots are copied.
            ring_fd: descriptor of the engine's ring on the GPU; the caller still owns it.
            ring_bytes: size of the ring.

        Returns:
            The channel, the engine's end of its socket, and a pidfd of the copier. The caller owns
            socket and pidfd.

        Raises:
            NoCopierError: there is no copier for this GPU.
        """
        if not self._is_enabled:
            raise NoCopierError("kvd starts no copiers", "set copier.enabled in kvd's settings")
        if not _DEVICE.fullmatch(device):
            raise NoCopierError(
                f"{device[:60]!r} is not the UUID of a GPU", "send the UUID of the GPU"
            )
        copier = self._copiers.get(device)
        if copier is None:
            if len(self._copiers) >= MAX_COPIERS:
                raise NoCopierError(
                    f"{MAX_COPIERS} copiers are running, and no more are allowed", "use fewer GPUs"
                )
            copier = self._copiers[device] = _CopierProcess(device, self._on_copier_end)
        return await copier.open(arena, ring_fd, ring_bytes)

    def totals(self) -> Pong:
        """Return the counts of all copiers, as of their last pongs, and the bytes locked now."""
        return _sum([self._dead_totals, *(copier.last_pong for copier in self._copiers.values())])

    @property
    def num_running(self) -> int:
        """Number of copiers that run."""
        return len(self._copiers)

    async def close(self) -> None:
        """Stop all copiers, and wait until they are dead."""
        await asyncio.gather(*(copier.close() for copier in list(self._copiers.values())))

    def _on_copier_end(self, copier: "_CopierProcess", *, has_failed: bool) -> None:
        del self._copiers[copier.device]
        self.num_failed += has_failed
        self._dead_totals = replace(_sum([self._dead_totals, copier.last_pong]), registered_bytes=0)


def _sum(pongs: Sequence[Pong]) -> Pong:
    return Pong(*(sum(numbers) for numbers in zip(*map(astuple, pongs), strict=True)))


class _CopierProcess:
    """One copier process, from its start to its death.

    Attributes:
        device: UUID of its GPU.
        last_pong: its last answer to a ping.
    """

    def __init__(self, device: str, on_end: Callable[..., None]) -> None:
        self.device = device
        self.last_pong = Pong(0, 0, 0, 0)
        self._on_end = on_end
        self._control, self._remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._pidfd = -1
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opening: dict[int, asyncio.Future[None]] = {}
        self._channels: dict[int, OpenChannel] = {}
        self._arenas: dict[str, Arena] = {}  # arenas that the copier has mapped
        self._numbers = count(1)
        self._last_message_s = asyncio.get_running_loop().time() + READY_S
        self._is_closing = False
        self._task = asyncio.create_task(self._run())

    async def open(
        self, arena: "Arena", ring_fd: int, ring_bytes: int
    ) -> tuple[OpenChannel, socket.socket, int]:
        """Open a channel; see Copiers.open()."""
        await asyncio.shield(self._ready)
        number = next(self._numbers)
        engine_end, copier_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        opened = self._opening[number] = asyncio.get_running_loop().create_future()
        channel = self._channels[number] = OpenChannel(lambda: self.send(Close(number)))
        try:
            with copier_end:
                slots = arena.slots
                request = Open(
                    number, arena.arena_id, slots.slot_bytes, slots.num_slots, ring_bytes
                )
                self.send(request, (arena.fd, ring_fd, copier_end.fileno()))
            self._arenas[arena.arena_id] = arena
            await opened
            return channel, engine_end, os.dup(self._pidfd)
        except BaseException as error:
            engine_end.close()  # a copier that has the other end then closes the channel
            if isinstance(error, OSError):
                raise NoCopierError("the copier has ended", "the log of kvd says why") from error
            raise
        finally:
            del self._opening[number]

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message. Errors are ignored: _run() and _ping() detect a dead or stuck copier."""
        with suppress(OSError):
            CONTROL.send(self._control, message, fds)

    async def close(self) -> None:
        """Stop the copier, and wait until it is dead."""
        self._is_closing = True
        self._control.shutdown(socket.SHUT_RDWR)
        await self._task

    async def _run(self) -> None:
        """Start the process, handle its messages, and clean up after its death."""
        process = None
        try:
            with self._remote as remote:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    # -P: do not import modules from the directory in which kvd was started.
                    *("-P", "-m", "kvd.copier", self.device, str(remote.fileno())),
                    pass_fds=(remote.fileno(),),
                )
            self._pidfd = os.pidfd_open(process.pid)
            log.info("copier_started", device=self.device, pid=process.pid)
            pinging = asyncio.create_task(self._ping(process))
            try:
                await self._listen()
            except (OSError, MalformedPacketError) as error:
                log.warning("copier_broken", device=self.device, error=str(error))
            finally:
                pinging.cancel()
        except OSError as error:
            self._fail_waiters(
                f"the copier cannot be started ({error.strerror})", "the log of kvd says more"
            )
        finally:
            if process is not None:
                await _wait_for_exit(process)
            self._control.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._on_death(None if process is None else process.returncode)

    async def _listen(self) -> None:
        """Handle messages until the copier closes its socket."""
        while True:
            packet, fds = await receive(self._control)
            close_fds(fds)
            if not packet:
                return
            self._last_message_s = asyncio.get_running_loop().time()
            self._on_message(CONTROL.decode(packet))

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Ready):
            self._ready.set_result(None)
        elif isinstance(message, Unusable):
            self._fail_waiters(message.message, message.remedy)
        elif isinstance(message, Opened):
            if (opened := self._waiter(message.channel)) is not None:
                opened.set_result(None)
        elif isinstance(message, Failed) and message.channel in self._channels:
            if (opened := self._waiter(message.channel)) is not None:
                error = NoCopierError(
                    f"the copier refused: {message.message}", "the log of kvd says more"
                )
                opened.set_exception(error)
            self._channels.pop(message.channel).mark_over()
        elif isinstance(message, Closed) and message.channel in self._channels:
            self._channels.pop(message.channel).mark_over()
        elif isinstance(message, Pong):
            self.last_pong = message

    def _waiter(self, number: int) -> "asyncio.Future[None] | None":
        """Return what waits for a channel to be opened; None: the opening was cancelled."""
        opened = self._opening.get(number)
        return None if opened is None or opened.done() else opened

    async def _ping(self, process: asyncio.subprocess.Process) -> None:
        """Ping the copier, kill it if it stays silent, and have it unmap closed arenas."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PING_S)
            self.send(Ping())
            for arena in [arena for arena in self._arenas.values() if arena.closing.is_set()]:
                self.send(Forget(arena.arena_id))
                del self._arenas[arena.arena_id]
            if loop.time() > self._last_message_s + SILENCE_S:
                log.warning("copier_silent", device=self.device, pid=process.pid)
                with suppress(ProcessLookupError):
                    process.kill()

    def _fail_waiters(self, message: str, remedy: str) -> None:
        """Raise NoCopierError in all callers that wait for the copier or for a channel."""
        error = NoCopierError(message, remedy)
        waiters: list[asyncio.Future[Any]] = [self._ready, *self._opening.values()]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # marks it as retrieved: asyncio would log it if nobody waits

    def _on_death(self, status: int | None) -> None:
        """Record the copier's death: fail its waiters, and end its channels."""
        has_failed = self._ready.done() and self._ready.exception() is None
        has_failed = has_failed and not self._is_closing
        self._fail_waiters("the copier has ended", "the log of kvd says why")
        self._on_end(self, has_failed=has_failed)
        report = log.warning if has_failed else log.info
        report("copier_ended", device=self.device, status=status)
        for channel in list(self._channels.values()):
            channel.mark_over()


async def _wait_for_exit(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process whose socket is closed; kill it after SILENCE_S."""
    try:
        async with asyncio.timeout(SILENCE_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
