"""The copiers: one process for each GPU that engines want copied, started when one asks.

A copier that does not answer is killed; engines whose channel it had copy themselves then, and ask
again. A channel is over once its copier says so or is dead: until then something may be copied into
slots, whatever has become of the engine.
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

MOST_COPIERS = 16
READY_S = 60.0  # from its start to the GPU's first answer: a GPU that sleeps takes seconds
PING_S = 2.0
SILENCE_S = 10.0  # without an answer: it is killed
_DEVICE = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

log = get_logger(__name__)


class NoCopierError(UnavailableError):
    """An engine has to copy itself."""

    reason = "no_copier"


class OpenChannel:
    """A channel between an engine and a copier, as kvd knows it.

    Attributes:
        is_over: nothing is copied for it any more.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        """Store what asks the copier to end it."""
        self.is_over = False
        self._end = end
        self._then: list[Callable[[], None]] = []

    def end(self, then: Callable[[], None]) -> None:
        """Call `then` once nothing is copied any more; its engine is gone."""
        if self.is_over:
            then()
            return
        self._then.append(then)
        self._end()

    def over(self) -> None:
        """Note that nothing is copied any more."""
        if self.is_over:
            return
        self.is_over = True
        for then in self._then:
            then()


class Copiers:
    """The copiers of one kvd; on its event loop.

    Attributes:
        num_failed: copiers that ended by themselves, or had to be killed.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        """Start nothing yet."""
        self.num_failed = 0
        self._is_enabled = is_enabled
        self._running: dict[str, _Running] = {}
        self._gone = Pong(0, 0, 0, 0)  # by copiers that are dead

    async def open(
        self, device: str, arena: "Arena", ring_fd: int, ring_bytes: int
    ) -> tuple[OpenChannel, socket.socket, int]:
        """Open a channel for an engine.

        Args:
            device: UUID of its GPU.
            arena: whose slots are copied.
            ring_fd: its memory on the GPU; stays the caller's.
            ring_bytes: its size.

        Returns:
            The channel; the engine's end of it, and a pidfd of the copier, both the caller's.

        Raises:
            NoCopierError: there is none for this GPU.
        """
        if not self._is_enabled:
            raise NoCopierError("kvd starts no copiers", "set copier.enabled in kvd's settings")
        if not _DEVICE.fullmatch(device):
            raise NoCopierError(f"no GPU is called {device[:60]!r}", "name it by its UUID")
        running = self._running.get(device)
        if running is None:
            if len(self._running) >= MOST_COPIERS:
                raise NoCopierError(f"{MOST_COPIERS} copiers are running", "use fewer GPUs")
            running = self._running[device] = _Running(device, self._ended)
        return await running.open(arena, ring_fd, ring_bytes)

    def totals(self) -> Pong:
        """Return what all copiers have done, as they said last, and what is locked now."""
        return _sum([self._gone, *(running.last for running in self._running.values())])

    @property
    def num_running(self) -> int:
        """How many copiers run."""
        return len(self._running)

    async def close(self) -> None:
        """End all copiers, and wait until they are dead."""
        await asyncio.gather(*(running.close() for running in list(self._running.values())))

    def _ended(self, running: "_Running", *, has_failed: bool) -> None:
        del self._running[running.device]
        self.num_failed += has_failed
        self._gone = replace(_sum([self._gone, running.last]), registered_bytes=0)


def _sum(pongs: Sequence[Pong]) -> Pong:
    return Pong(*(sum(numbers) for numbers in zip(*map(astuple, pongs), strict=True)))


class _Running:
    """One copier, from its start to its death.

    Attributes:
        last: its last answer to a ping.
    """

    def __init__(self, device: str, on_end: Callable[..., None]) -> None:
        self.device = device
        self.last = Pong(0, 0, 0, 0)
        self._on_end = on_end
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._pidfd = -1
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opening: dict[int, asyncio.Future[None]] = {}
        self._channels: dict[int, OpenChannel] = {}
        self._arenas: dict[str, Arena] = {}  # that it has mapped
        self._numbers = count(1)
        self._heard_s = asyncio.get_running_loop().time() + READY_S
        self._is_closing = False
        self._living = asyncio.create_task(self._live())

    async def open(
        self, arena: "Arena", ring_fd: int, ring_bytes: int
    ) -> tuple[OpenChannel, socket.socket, int]:
        """See Copiers."""
        await asyncio.shield(self._ready)
        number = next(self._numbers)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        opened = self._opening[number] = asyncio.get_running_loop().create_future()
        channel = self._channels[number] = OpenChannel(lambda: self.say(Close(number)))
        try:
            with theirs:
                slots = arena.slots
                wanted = Open(number, arena.arena_id, slots.slot_bytes, slots.num_slots, ring_bytes)
                self.say(wanted, (arena.fd, ring_fd, theirs.fileno()))
            self._arenas[arena.arena_id] = arena
            await opened
            return channel, ours, os.dup(self._pidfd)
        except BaseException as error:
            ours.close()  # if the copier has the other end, it closes the channel
            if isinstance(error, OSError):
                raise NoCopierError("the copier has ended", "see kvd's log") from error
            raise
        finally:
            del self._opening[number]

    def say(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send something; a copier that is dead, or too slow to read, is dealt with elsewhere."""
        with suppress(OSError):
            CONTROL.send(self._control, message, fds)

    async def close(self) -> None:
        """End it, and wait until it is dead."""
        self._is_closing = True
        self._control.shutdown(socket.SHUT_RDWR)
        await self._living

    async def _live(self) -> None:
        """Start the process, listen to it, and clean up after its death."""
        process = None
        try:
            with self._theirs as theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    # -P: what lies in the directory that kvd was started in is none of its modules.
                    *("-P", "-m", "kvd.copier", self.device, str(theirs.fileno())),
                    pass_fds=(theirs.fileno(),),
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
            self._fail(f"the copier cannot be started ({error.strerror})", "see kvd's log")
        finally:
            if process is not None:
                await _ended(process)
            self._control.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._over(None if process is None else process.returncode)

    async def _listen(self) -> None:
        """Hear what it says until its end."""
        while True:
            packet, fds = await receive(self._control)
            close_fds(fds)
            if not packet:
                return
            self._heard_s = asyncio.get_running_loop().time()
            self._hear(CONTROL.decode(packet))

    def _hear(self, message: Message) -> None:
        if isinstance(message, Ready):
            self._ready.set_result(None)
        elif isinstance(message, Unusable):
            self._fail(message.message, message.remedy)
        elif isinstance(message, Opened) and message.channel in self._opening:
            self._opening[message.channel].set_result(None)
        elif isinstance(message, Failed) and message.channel in self._channels:
            if message.channel in self._opening:  # else nobody waits any more
                error = NoCopierError(f"the copier refuses: {message.message}", "see kvd's log")
                self._opening[message.channel].set_exception(error)
            self._channels.pop(message.channel).over()
        elif isinstance(message, Closed) and message.channel in self._channels:
            self._channels.pop(message.channel).over()
        elif isinstance(message, Pong):
            self.last = message

    async def _ping(self, process: asyncio.subprocess.Process) -> None:
        """Kill it if it is silent for too long; have it unmap what was given up meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PING_S)
            self.say(Ping())
            for arena in [arena for arena in self._arenas.values() if arena.closing.is_set()]:
                self.say(Forget(arena.arena_id))
                del self._arenas[arena.arena_id]
            if loop.time() > self._heard_s + SILENCE_S:
                log.warning("copier_silent", device=self.device, pid=process.pid)
                with suppress(ProcessLookupError):
                    process.kill()

    def _fail(self, message: str, remedy: str) -> None:
        """Have everybody who waits for it hear why there is none."""
        error = NoCopierError(message, remedy)
        everybody: list[asyncio.Future[Any]] = [self._ready, *self._opening.values()]
        for waiting in everybody:
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # nobody need wait

    def _over(self, status: int | None) -> None:
        """Note its death."""
        has_failed = self._ready.done() and self._ready.exception() is None
        has_failed = has_failed and not self._is_closing
        self._fail("the copier has ended", "see kvd's log")
        self._on_end(self, has_failed=has_failed)
        say = log.warning if has_failed else log.info
        say("copier_ended", device=self.device, status=status)
        for channel in list(self._channels.values()):
            channel.over()


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process whose socket is closed; it is killed if it takes long."""
    try:
        async with asyncio.timeout(SILENCE_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
